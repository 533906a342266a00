"""What stands behind a scan and can be computed with it: its results, views and flips of them, what
is pointwise, and the results shifted by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from inductor_ext.lowerings.scan_places import (
    NoPlace,
    Place,
    Step,
    above,
    cut,
    filled,
    is_flip_or_view,
)
from inductor_ext.templates.scan_program import Program

from inductor_ext import scan_pointwise
from inductor_ext.editing import same_shape, value


@dataclasses.dataclass(frozen=True)
class Site:
    """A scan in a graph, before anything is fused with it.

    ``program`` has the nodes ``inputs`` as its inputs and gives ``results``: one list of nodes per
    output of the program, all of them that value. Its texts take inputs as stored or wider, and its
    outputs may be wider than they are stored. ``expanded``: the steps from an input's own shape,
    which the scanned dimension is not in, by its number. ``identity`` assigns the states of one.
    ``parts`` are nodes in front of ``node`` that go with it.
    """

    node: Any
    what: str
    program: Program
    inputs: tuple[Any, ...]
    results: tuple[tuple[Any, ...], ...]
    dim: int
    expanded: Mapping[int, tuple[Step, ...]] = dataclasses.field(default_factory=dict)
    identity: str | None = None
    parts: tuple[Any, ...] = ()

    @property
    def shape(self) -> Any:
        return value(self.inputs[0]).shape


@dataclasses.dataclass
class Member:
    """A node behind the scan that the kernel computes. ``steps`` lead from the scan's shape to its
    own; ``of`` is the member that it is a view or flip of.

    Of an exclusive scan, which an inclusive one is shifted to, ``stage`` is "whole" or "cut" until
    it is shifted, and ``index`` the number of the result."""

    place: Place
    steps: tuple[Step, ...]
    of: Any = None
    index: int | None = None
    stage: str = ""


class Members:
    """The nodes behind a scan that its kernel computes, by node in ``found``. ``later`` are those
    that depend on the scan and are none. ``refused`` ones stay outside.

    ``mirrored``: the scan runs against its nodes' positions. ``exclusive``: it stands for results
    shifted by one, which ``shifted`` maps to the number of the result and what is put in front.
    """

    def __init__(self, site: Site, mirrored: bool, exclusive: bool, refused: set[Any]) -> None:
        self.site, self.mirrored, self.refused = site, mirrored, refused
        self.found: dict[Any, Member] = {}
        self.later: set[Any] = {site.node}
        self.shifted: dict[Any, tuple[int, Any]] = {}
        self.grow("whole" if exclusive else "")
        if exclusive:
            self.check_shifted()

    def grow(self, stage: str) -> None:
        for index, results in enumerate(self.site.results):
            for node in results:
                place = Place((), self.site.dim, self.mirrored)
                self.found[node] = Member(place, (), index=index, stage=stage)
        self.later -= set(self.found)
        node = self.site.node.next
        while node.op != "root":
            if node not in self.found and any(
                n in self.found or n in self.later for n in node.all_input_nodes
            ):
                member = None if node in self.refused else self.joined(node)
                if member is None:
                    self.later.add(node)
                else:
                    self.found[node] = member
            node = node.next

    def joined(self, node: Any) -> Member | None:
        """A node as a member; None where it is none."""
        sources = node.all_input_nodes
        if any(n in self.later for n in sources):
            return None
        inner = [n for n in sources if n in self.found]
        first = self.found[inner[0]]
        if any(self.found[n].stage for n in inner):
            return self.shifting(node, inner[0])
        if is_flip_or_view(node):
            if node.args[0] is not inner[0] or len(sources) > 1:
                return None
            try:
                place, step = above(node, first.place)
            except NoPlace:
                return None
            steps = first.steps if step is None else (*first.steps, step)
            return Member(place, steps, inner[0], first.index, first.stage)
        if not is_fusible(node, self.site.node):
            return None
        for n in inner:
            member = self.found[n]
            if member.place != first.place or not same_shape(value(n).shape, value(node).shape):
                return None
        return Member(first.place, first.steps)

    def shifting(self, node: Any, source: Any) -> Member | None:
        """A node on the way from a result to the result shifted by one."""
        member = self.found[source]
        dim = member.place.dim
        assert dim is not None
        along = member.place.mirrored == self.mirrored  # in the order of the scan
        if member.stage == "whole":
            if cut(node, dim) == ("last" if along else "first"):
                return dataclasses.replace(member, stage="cut", of=None)
            try:
                place, step = above(node, member.place)
            except NoPlace:
                return None
            steps = member.steps if step is None else (*member.steps, step)
            return Member(place, steps, source, member.index, member.stage)
        found = filled(node, dim)
        if found is None or found[0] is not source:
            return None
        if found[1] != ("first" if along else "last") or not isinstance(found[2], (int, float)):
            return None
        assert member.index is not None
        self.shifted[node] = member.index, found[2]
        return Member(member.place, member.steps)

    def check_shifted(self) -> None:
        """Raise where an exclusive scan is not all that is asked for."""
        for node, member in self.found.items():
            if member.stage and any(u not in self.found for u in node.users):
                raise NoPlace
        if not self.shifted:
            raise NoPlace

    def is_read_outside(self, node: Any) -> bool:
        """Whether anything but members reads a member, or a view of it."""
        for user in node.users:
            member = self.found.get(user)
            if member is None:
                return True
            if self.is_plain_view(user) and self.is_read_outside(user):
                return True
        return False

    def is_plain_view(self, node: Any) -> bool:
        member = self.found[node]
        return member.of is not None and member.place.mirrored == (
            self.found[member.of].place.mirrored
        )


def is_fusible(node: Any, site: Any) -> bool:
    tensor = value(node)
    return (
        node.op == "call_function"
        and isinstance(tensor, torch.Tensor)
        and (tensor.device == _device(site) or scan_pointwise.is_constant(node))
        and scan_pointwise.is_translatable(node)
    )


def _device(site: Any) -> Any:
    out = value(site)
    return (out[0] if isinstance(out, (tuple, list)) else out).device
