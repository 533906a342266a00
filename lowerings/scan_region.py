"""What is fused with a scan: the pointwise operations that its inputs are made by and those that
its results go through, as the text of one ``scan_program.Program``."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import torch
from inductor_ext.lowerings.scan_members import Member, Members, Site, is_fusible
from inductor_ext.lowerings.scan_places import (
    FLIPS,
    NOWHERE,
    NoPlace,
    Place,
    Step,
    below,
    broadcast,
    is_flip,
    is_flip_or_view,
    viewed,
)
from inductor_ext.lowerings.scan_statements import Leaf, Statements
from inductor_ext.templates.scan_program import Input, Program

from inductor_ext import compat, matching, scan_operations
from inductor_ext.editing import same_shape, same_size, value

MOST_INPUTS, MOST_OUTPUTS = 12, 6  # a kernel keeps an address and a tile of each


@dataclasses.dataclass(frozen=True)
class Stored:
    """A node that the kernel writes: ``steps`` lead from the scan's shape to its own."""

    node: Any
    steps: tuple[Step, ...]
    strides: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Fused:
    """A scan with what is fused. ``nodes`` are those that the kernel computes besides the leaves,
    as far as nothing else needs them; ``flips`` of them turn the scanned dimension around."""

    site: Site
    program: Program
    leaves: tuple[Leaf, ...]
    stored: tuple[Stored, ...]
    nodes: tuple[Any, ...]
    flips: int


class CanNotFuse(Exception):
    """Why a scan can't be a kernel of its own; the message is one sentence."""


class _Refused(Exception):
    """A consumer that can't be fused after all."""

    def __init__(self, node: Any) -> None:
        super().__init__(str(node))
        self.node = node


class _Builder:
    """One attempt: ``refused`` consumers stay outside."""

    def __init__(self, site: Site, mirrored: bool, exclusive: bool, refused: set[Any]) -> None:
        self.site, self.mirrored = site, mirrored
        self.exclusive = exclusive
        self.behind = Members(site, mirrored, exclusive, refused)
        self.members, self.shifted = self.behind.found, self.behind.shifted
        self.order = {n: i for i, n in enumerate(site.node.graph.nodes)}
        self.leaves: dict[Leaf, int] = {}
        self.inlined: set[Any] = set()
        self.flips: set[Any] = set()
        self.full: dict[Any, frozenset[Any]] = {}
        self.mine = self.only_for_us()

    # --- in front of it -------------------------------------------------------------------------

    def only_for_us(self) -> set[Any]:
        """What nothing needs but the scan and the members."""
        mine = {self.site.node, *self.site.parts, *self.members}
        for node in reversed(self.site.node.graph.nodes):
            ours = node not in mine and node.users and all(u in mine for u in node.users)
            if ours and (is_flip_or_view(node) or is_fusible(node, self.site.node)):
                mine.add(node)
        return mine

    def full_leaves(self, node: Any, depth: int = 8) -> frozenset[Any]:
        """The tensors as large as the scan's that a node is computed of, itself if it is none."""
        if node not in self.full:
            found: frozenset[Any] = frozenset()
            if depth and (is_flip_or_view(node) or is_fusible(node, self.site.node)):
                for n in node.all_input_nodes:
                    if isinstance(value(n), torch.Tensor):
                        found |= self.full_leaves(n, depth - 1)
            elif same_size(value(node).numel(), value(self.site.inputs[0]).numel()):
                found = frozenset([node])
            self.full[node] = found
        return self.full[node]

    def is_worth_inlining(self, node: Any) -> bool:
        """Whether a node is computed where it is read although something else needs it too."""
        leaves = self.full_leaves(node)
        width = sum(value(n).dtype.itemsize for n in leaves)
        return len(leaves) <= 1 and width <= value(node).dtype.itemsize

    def is_kept(self, node: Any, place: Place, shift: int = 0) -> bool:
        """Whether a value on the way to the scan is stored as well, since memory must hold it."""
        if node in self.mine or node in self.behind.refused or place.steps or shift:
            return False
        return not place.mirrored and not all(
            user in self.mine or is_fused_by_stock(user) for user in node.users
        )

    def pull(self, text: Statements, node: Any, place: Place, shift: int = 0) -> Any:
        """The copy of a node's value at ``place``, ``shift`` positions before. Raises NoPlace."""
        if node in self.members or node in self.behind.later:
            raise NoPlace
        key = node, place, shift
        if key in text.known:
            return text.known[key]
        if is_flip_or_view(node):
            before = text.state()
            try:
                source, there = below(node, place)
                copy = self.pull(text, source, there, shift)
            except NoPlace:
                text.back_to(before)
            else:
                self.inlined.add(node)
                if is_flip(node, place.dim):
                    self.flips.add(node)
                return copy
        elif is_fusible(node, self.site.node) and (
            node in self.mine or self.is_kept(node, place, shift) or self.is_worth_inlining(node)
        ):
            before = text.state()
            try:
                sources = {
                    n: self.pull(text, n, broadcast(n, node, place), shift)
                    for n in node.all_input_nodes
                }
                copy = text.pointwise(key, node, sources)
            except (NoPlace, scan_operations.Unknown):
                text.back_to(before)
            else:
                self.inlined.add(node)
                return copy
        tensor = viewed(value(node), place.steps)
        if not place.is_direct() or not same_shape(tensor.shape, self.site.shape):
            raise NoPlace
        if tensor.device != value(self.site.inputs[0]).device:
            raise NoPlace
        if not scan_operations.is_known_dtype(tensor.dtype):
            raise NoPlace
        leaf = Leaf(node, place.steps, 0 if place.dim == NOWHERE else shift, dim=place.dim)
        if len(self.leaves) >= MOST_INPUTS and leaf not in self.leaves:
            raise NoPlace
        return text.leaf(leaf)

    # --- the program ----------------------------------------------------------------------------

    def build(self) -> Fused:
        produce = Statements(self.leaves, "f")
        inputs = self.inputs(produce)
        base = self.site.program
        before = _renamed(base.produce, "x", inputs)
        if self.exclusive:
            before += "\n" + _where_none(self.site)
        consume, shifted = Statements(self.leaves, "h"), []
        given = self.inputs(consume) if re.search(r"\bx\d", base.consume) else []
        if not self.exclusive:
            for index, results in enumerate(self.site.results):
                for node in results:
                    copy = consume.given(("result", index), node, f"o{index}")
                    consume.known[node] = copy
        for number, (node, (index, fill)) in enumerate(self.shifted.items()):
            dtype = value(node).dtype
            kind = scan_operations.computed_type(dtype)
            missing = scan_operations.literal(fill, dtype)
            shifted.append(f"e{number} = tl.where(t == 0, {missing}, o{index}.to({kind}))")
            consume.known[node] = consume.given(("shifted", number), node, f"e{number}")
        outputs = [n for n in self.members if self.is_to_store(n)]
        if not outputs:
            raise CanNotFuse("nothing reads it")
        self.check_worth(outputs)
        # Values of inputs come first, then the scan's results, then what is made of them.
        split = len(consume.lines())
        self.translate(consume, outputs)
        outputs += self.kept(produce, consume)
        if len(outputs) > MOST_OUTPUTS:
            drop = [n for n in outputs if not self.is_result(n)]
            raise _Refused(drop[-1]) if drop else CanNotFuse("it has too many results")
        ends = [f"y{i} = {consume.of(consume.known[n])}" for i, n in enumerate(outputs)]
        ends = [
            f"{end}.to({scan_operations.stored_type(value(n).dtype)})"
            for end, n in zip(ends, outputs, strict=True)
        ]
        after = _renamed(base.consume, "x", given)
        after = re.sub(r"\by(\d+)\b", r"o\1", after)
        written = consume.lines()
        lines = [*written[:split], after, *shifted, *written[split:], *ends]
        program = Program(
            inputs=tuple(
                Input(value(leaf.node).dtype, leaf.shift, leaf.fill) for leaf in self.leaves
            ),
            outputs=tuple(value(n).dtype for n in outputs),
            states=base.states,
            produce="\n".join([*produce.lines(), before]),
            combine=base.combine,
            consume="\n".join(lines),
            reverse=base.reverse != self.mirrored,
        )
        flips = len(self.flips) + sum(is_flip(n, self.place_below(n)) for n in self.members)
        nodes = [n for n in self.order if n in self.mine or n in self.inlined]
        return Fused(
            self.site,
            program,
            tuple(self.leaves),
            tuple(self.to_store(n) for n in outputs),
            tuple(nodes),
            flips,
        )

    def kept(self, produce: Statements, consume: Statements) -> list[Any]:
        """Values on the way to the scan that are stored; their copies are in ``consume`` then."""
        home = Place((), self.site.dim, False)
        found = [
            n
            for n in self.order
            if n in self.inlined
            and ((n, home, 0) in produce.known or (n, home, 0) in consume.known)
            and self.is_kept(n, home)
        ]
        for node in found:
            try:
                consume.known[node] = self.pull(consume, node, home)
            except NoPlace:
                raise _Refused(node) from None
        behind = set(found)
        for node in self.order:
            if node not in self.mine and any(n in behind for n in node.all_input_nodes):
                behind.add(node)
        if any(leaf.node in behind for leaf in self.leaves):
            raise _Refused(found[-1])
        return found

    def place_below(self, node: Any) -> int | None:
        """The scanned dimension in a member that is a view."""
        return None if self.members[node].of is None else self.members[node].place.dim

    def inputs(self, text: Statements) -> list[str]:
        """Names of the values of the site's own inputs."""
        names = []
        for i, (node, given) in enumerate(
            zip(self.site.inputs, self.site.program.inputs, strict=True)
        ):
            steps = self.site.expanded.get(i, ())
            place = Place(steps, NOWHERE if steps else self.site.dim, self.mirrored)
            if given.shift == 0:
                names.append(text.of(self.pull(text, node, place, int(self.exclusive))))
                continue
            if self.mirrored or self.exclusive:
                raise NoPlace
            # What lies outside has a value of its own, which no function was applied to.
            names.append(text.of(text.leaf(Leaf(node, steps, given.shift, given.fill))))
        return names

    def is_result(self, node: Any) -> bool:
        return any(node in results for results in self.site.results)

    def check_worth(self, outputs: list[Any]) -> None:
        """Refuse a consumer that stock computes where it is read, if less is written then."""
        for node in reversed(outputs):
            if node in self.shifted or self.is_result(node) or self.members[node].of is not None:
                continue
            if not all(is_fused_by_stock(u) for u in node.users if u not in self.members):
                continue
            inner = [n for n in node.all_input_nodes if n in self.members]
            before = {self.stored_as(n) for n in inner} - set(outputs)
            if sum(value(n).dtype.itemsize for n in before) < value(node).dtype.itemsize:
                raise _Refused(node)

    def stored_as(self, node: Any) -> Any:
        """The member that is stored if a member is read outside."""
        while self.behind.is_plain_view(node):
            node = self.members[node].of
        return node

    def is_to_store(self, node: Any) -> bool:
        if (
            self.members[node].stage
            or self.behind.is_plain_view(node)
            or not self.behind.is_read_outside(node)
        ):
            return False
        if self.members[node].place.mirrored:
            if self.mirrored:
                raise CanNotFuse("a result is read as it is and turned around")
            raise _Refused(node)
        return True

    def translate(self, text: Statements, outputs: list[Any]) -> None:
        """Copies of the members that outputs are made of."""
        wanted, stack = set(), list(outputs)
        while stack:
            node = stack.pop()
            if node not in wanted and node in self.members:
                wanted.add(node)
                stack.extend(node.all_input_nodes)
        for node in sorted(wanted, key=self.order.__getitem__):
            if node in text.known:
                continue
            member = self.members[node]
            if member.stage:
                continue
            if member.of is not None:
                text.known[node] = text.known[member.of]
                continue
            try:
                sources = {
                    n: text.known[n]
                    if n in self.members
                    else self.pull(text, n, broadcast(n, node, member.place))
                    for n in node.all_input_nodes
                }
                text.pointwise(node, node, sources)
            except (NoPlace, scan_operations.Unknown):
                raise _Refused(node) from None

    def to_store(self, node: Any) -> Stored:
        tensor = value(node)
        member = self.members.get(node, Member(Place((), self.site.dim, False), ()))
        there = viewed(torch.empty_like(tensor), member.place.steps)
        dense = viewed(tensor, member.place.steps)
        strides = dense.stride() if _is_dense(tensor) else there.stride()
        return Stored(node, member.steps, tuple(strides))


def is_fused_by_stock(node: Any) -> bool:
    """Whether stock computes what a node reads where it reads it."""
    return matching.is_pointwise(node) or matching.is_reduction(node)


def _is_dense(tensor: Any) -> bool:
    """Whether a tensor's elements fill a stretch of memory, each once."""
    if any(not isinstance(s, int) for s in tensor.shape):
        return True  # symbolic tensors in a graph are those of allocations, views of which are none
    pairs = sorted((st, s) for s, st in zip(tensor.shape, tensor.stride(), strict=True) if s != 1)
    expected = 1
    for stride, size in pairs:
        if not isinstance(stride, int) or stride != expected:
            return False
        expected *= size
    return True


def _renamed(text: str, prefix: str, names: list[str]) -> str:
    """A text whose ``x0, x1, ...`` go by other names."""
    return re.sub(rf"\b{prefix}(\d+)\b", lambda m: names[int(m[1])], text) if names else text


def fuse(site: Site) -> Fused:
    """The scan with everything around it that one kernel can compute. Raises CanNotFuse."""
    attempts = itertools.product((True, False), (True, False))
    reason = ""
    for mirrored, exclusive in attempts:
        if (mirrored and not _may_be_mirrored(site)) or (exclusive and site.identity is None):
            continue
        refused: set[Any] = set()
        while True:
            try:
                return _Builder(site, mirrored, exclusive, refused).build()
            except _Refused as which:
                refused.add(which.node)
            except (NoPlace, CanNotFuse) as error:
                reason = str(error)
                break
    raise CanNotFuse(reason or "its inputs are not seen through views")


def _where_none(site: Site) -> str:
    """Statements that make the first state of an exclusive scan one that changes nothing."""
    states = range(len(site.program.states))
    kept = [f"k{i} = s{i}" for i in states]
    chosen = [f"s{i} = tl.where(t == 0, s{i}, k{i})" for i in states]
    return "\n".join([*kept, site.identity or "", *chosen])


def _may_be_mirrored(site: Site) -> bool:
    return any(n.target in FLIPS for n in site.node.graph.nodes)


def size_of(node: Any) -> int:
    """The number of a tensor's elements, as far as is known."""
    return compat.hint(compat.expr(value(node).numel()))
