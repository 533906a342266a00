"""What is fused with a scan: the pointwise operations that its inputs are made by and those that
its results go through, as the text of one ``scan_program.Program``."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch
from inductor_ext.lowerings.scan_places import (
    FLIPS,
    NOWHERE,
    NoPlace,
    Place,
    Step,
    above,
    below,
    broadcast,
    cut,
    filled,
    is_flip,
    is_flip_or_view,
    viewed,
)
from inductor_ext.templates.scan_program import Input, Program

from inductor_ext import compat, matching, scan_pointwise
from inductor_ext.editing import same_shape, same_size, value

MOST_INPUTS, MOST_OUTPUTS = 12, 6  # a kernel keeps an address and a tile of each


@dataclasses.dataclass(frozen=True)
class Site:
    """A scan in a graph, before anything is fused with it.

    ``program`` has the nodes ``inputs`` as its inputs and gives ``results``: one list of nodes per
    output of the program, all of them that value. Its texts take inputs as stored or wider, and its
    outputs may be wider than they are stored. ``expanded``: the steps from an input's own shape,
    which the scanned dimension is not in, by its number. ``identity`` assigns the states of one.
    """

    node: Any
    what: str
    program: Program
    inputs: tuple[Any, ...]
    results: tuple[tuple[Any, ...], ...]
    dim: int
    expanded: Mapping[int, tuple[Step, ...]] = dataclasses.field(default_factory=dict)
    identity: str | None = None

    @property
    def shape(self) -> Any:
        return value(self.inputs[0]).shape


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor that the kernel reads: a node, seen through ``steps``."""

    node: Any
    steps: tuple[Step, ...]
    shift: int = 0
    fill: str = "0"


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


@dataclasses.dataclass
class _Member:
    """A node behind the scan that the kernel computes. ``steps`` lead from the scan's shape to its
    own; ``of`` is the member that it is a view or flip of.

    Of an exclusive scan, which an inclusive one is shifted to, ``stage`` is "whole" or "cut" until
    it is shifted, and ``index`` the number of the result."""

    place: Place
    steps: tuple[Step, ...]
    of: Any = None
    index: int | None = None
    stage: str = ""


class _Text:
    """Statements from scratch copies of nodes: what lies in different places has copies of its
    own."""

    def __init__(self, leaves: dict[Leaf, int], prefix: str) -> None:
        self.graph = torch.fx.Graph()
        self.leaves = leaves
        self.translator = scan_pointwise.Translator({}, prefix)
        self.known: dict[Any, Any] = {}

    def given(self, key: Any, like: Any, name: str) -> Any:
        """A value that has a name: of a leaf, or of a result of the scan."""
        if key not in self.known:
            copy = self.known[key] = self.graph.placeholder(f"given_{len(self.known)}")
            copy.meta["val"] = value(like)
            self.translator.given(copy, name)
        return self.known[key]

    def leaf(self, leaf: Leaf) -> Any:
        index = self.leaves.setdefault(leaf, len(self.leaves))
        return self.given(leaf, leaf.node, f"x{index}")

    def pointwise(self, key: Any, node: Any, sources: dict[Any, Any]) -> Any:
        """Copy a pointwise node; ``sources`` are the copies of what it reads. Raises Unknown."""
        if key not in self.known:
            copy = self.graph.node_copy(node, lambda n: sources[n])
            self.translator.add(copy)
            self.known[key] = copy
        return self.known[key]

    def of(self, copy: Any) -> str:
        return self.translator.of(copy)

    def lines(self) -> list[str]:
        return self.translator.statements

    def state(self) -> Any:
        return dict(self.known), dict(self.leaves), self.translator.state()

    def back_to(self, state: Any) -> None:
        """Forget what was added since ``state()``."""
        self.known = dict(state[0])
        self.leaves.clear()
        self.leaves.update(state[1])
        self.translator.back_to(state[2])


class _Builder:
    """One attempt: ``refused`` consumers stay outside."""

    def __init__(self, site: Site, mirrored: bool, exclusive: bool, refused: set[Any]) -> None:
        self.site, self.mirrored, self.refused = site, mirrored, refused
        self.exclusive = exclusive
        self.shifted: dict[Any, tuple[int, Any]] = {}  # to the number of the result, and the fill
        self.order = {n: i for i, n in enumerate(site.node.graph.nodes)}
        self.members: dict[Any, _Member] = {}
        self.later: set[Any] = {site.node}
        self.leaves: dict[Leaf, int] = {}
        self.inlined: set[Any] = set()
        self.flips: set[Any] = set()
        self.full: dict[Any, frozenset[Any]] = {}

    # --- behind the scan ------------------------------------------------------------------------

    def grow(self) -> None:
        """Find the members: results of the scan, and what is pointwise behind them."""
        stage = "whole" if self.exclusive else ""
        for index, results in enumerate(self.site.results):
            for node in results:
                place = Place((), self.site.dim, self.mirrored)
                self.members[node] = _Member(place, (), index=index, stage=stage)
        self.later -= set(self.members)
        node = self.site.node.next
        while node.op != "root":
            if node not in self.members and any(
                n in self.members or n in self.later for n in node.all_input_nodes
            ):
                member = None if node in self.refused else self.joined(node)
                if member is None:
                    self.later.add(node)
                else:
                    self.members[node] = member
            node = node.next

    def joined(self, node: Any) -> _Member | None:
        """A node as a member; None where it is none."""
        sources = node.all_input_nodes
        if any(n in self.later for n in sources):
            return None
        inner = [n for n in sources if n in self.members]
        first = self.members[inner[0]]
        if any(self.members[n].stage for n in inner):
            return self.shifting(node, inner[0])
        if is_flip_or_view(node):
            if node.args[0] is not inner[0] or len(sources) > 1:
                return None
            try:
                place, step = above(node, first.place)
            except NoPlace:
                return None
            steps = first.steps if step is None else (*first.steps, step)
            return _Member(place, steps, inner[0], first.index, first.stage)
        if not _is_fusible(node, self.site.node):
            return None
        for n in inner:
            member = self.members[n]
            if member.place != first.place or not same_shape(value(n).shape, value(node).shape):
                return None
        return _Member(first.place, first.steps)

    def shifting(self, node: Any, source: Any) -> _Member | None:
        """A node on the way from a result to the result shifted by one."""
        member = self.members[source]
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
            return _Member(place, steps, source, member.index, member.stage)
        found = filled(node, dim)
        if found is None or found[0] is not source:
            return None
        if found[1] != ("first" if along else "last") or not isinstance(found[2], (int, float)):
            return None
        assert member.index is not None
        self.shifted[node] = member.index, found[2]
        return _Member(member.place, member.steps)

    def check_shifted(self) -> None:
        """Raise where an exclusive scan is not all that is asked for."""
        for node, member in self.members.items():
            if member.stage and any(u not in self.members for u in node.users):
                raise NoPlace
        if not self.shifted:
            raise NoPlace

    def is_read_outside(self, node: Any) -> bool:
        """Whether anything but members reads a member, or a view of it."""
        for user in node.users:
            member = self.members.get(user)
            if member is None:
                return True
            if self.is_plain_view(user) and self.is_read_outside(user):
                return True
        return False

    def is_plain_view(self, node: Any) -> bool:
        member = self.members[node]
        return member.of is not None and member.place.mirrored == (
            self.members[member.of].place.mirrored
        )

    # --- in front of it -------------------------------------------------------------------------

    def only_for_us(self) -> set[Any]:
        """What nothing needs but the scan and the members."""
        mine = {self.site.node, *self.members}
        for node in reversed(self.site.node.graph.nodes):
            ours = node not in mine and node.users and all(u in mine for u in node.users)
            if ours and (is_flip_or_view(node) or _is_fusible(node, self.site.node)):
                mine.add(node)
        return mine

    def full_leaves(self, node: Any, depth: int = 8) -> frozenset[Any]:
        """The tensors as large as the scan's that a node is computed of, itself if it is none."""
        if node not in self.full:
            found: frozenset[Any] = frozenset()
            if depth and (is_flip_or_view(node) or _is_fusible(node, self.site.node)):
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

    def pull(self, text: _Text, node: Any, place: Place, shift: int = 0) -> Any:
        """The copy of a node's value at ``place``, ``shift`` positions before. Raises NoPlace."""
        if node in self.members or node in self.later:
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
        elif _is_fusible(node, self.site.node) and (
            node in self.mine or self.is_worth_inlining(node)
        ):
            before = text.state()
            try:
                sources = {
                    n: self.pull(text, n, broadcast(n, node, place), shift)
                    for n in node.all_input_nodes
                }
                copy = text.pointwise(key, node, sources)
            except (NoPlace, scan_pointwise.Unknown):
                text.back_to(before)
            else:
                self.inlined.add(node)
                return copy
        tensor = viewed(value(node), place.steps)
        if not place.is_direct() or not same_shape(tensor.shape, self.site.shape):
            raise NoPlace
        if tensor.device != value(self.site.inputs[0]).device:
            raise NoPlace
        if not scan_pointwise.is_known_dtype(tensor.dtype):
            raise NoPlace
        leaf = Leaf(node, place.steps, 0 if place.dim == NOWHERE else shift)
        if len(self.leaves) >= MOST_INPUTS and leaf not in self.leaves:
            raise NoPlace
        return text.leaf(leaf)

    # --- the program ----------------------------------------------------------------------------

    def build(self) -> Fused:
        self.grow()
        if self.exclusive:
            self.check_shifted()
        self.mine = self.only_for_us()
        produce = _Text(self.leaves, "f")
        inputs = self.inputs(produce)
        base = self.site.program
        before = _renamed(base.produce, "x", inputs)
        if self.exclusive:
            before += "\n" + _where_none(self.site)
        consume, shifted = _Text(self.leaves, "h"), []
        given = self.inputs(consume) if re.search(r"\bx\d", base.consume) else []
        if not self.exclusive:
            for index, results in enumerate(self.site.results):
                for node in results:
                    copy = consume.given(("result", index), node, f"o{index}")
                    consume.known[node] = copy
        for number, (node, (index, fill)) in enumerate(self.shifted.items()):
            dtype = value(node).dtype
            kind, missing = scan_pointwise.computed_type(dtype), scan_pointwise.literal(fill, dtype)
            shifted.append(f"e{number} = tl.where(t == 0, {missing}, o{index}.to({kind}))")
            consume.known[node] = consume.given(("shifted", number), node, f"e{number}")
        outputs = [n for n in self.members if self.is_to_store(n)]
        # Values of inputs come first, then the scan's results, then what is made of them.
        split = len(consume.lines())
        self.translate(consume, outputs)
        if not outputs:
            raise CanNotFuse("nothing reads it")
        if len(outputs) > MOST_OUTPUTS:
            drop = [n for n in outputs if not self.is_result(n)]
            raise _Refused(drop[-1]) if drop else CanNotFuse("it has too many results")
        ends = [f"y{i} = {consume.of(consume.known[n])}" for i, n in enumerate(outputs)]
        ends = [
            f"{end}.to({scan_pointwise.stored_type(value(n).dtype)})"
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

    def place_below(self, node: Any) -> int | None:
        """The scanned dimension in a member that is a view."""
        return None if self.members[node].of is None else self.members[node].place.dim

    def inputs(self, text: _Text) -> list[str]:
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
            if not all(_is_fused_by_stock(u) for u in node.users if u not in self.members):
                continue
            inner = [n for n in node.all_input_nodes if n in self.members]
            before = {self.stored_as(n) for n in inner} - set(outputs)
            if sum(value(n).dtype.itemsize for n in before) < value(node).dtype.itemsize:
                raise _Refused(node)

    def stored_as(self, node: Any) -> Any:
        """The member that is stored if a member is read outside."""
        while self.is_plain_view(node):
            node = self.members[node].of
        return node

    def is_to_store(self, node: Any) -> bool:
        if self.members[node].stage or self.is_plain_view(node) or not self.is_read_outside(node):
            return False
        if self.members[node].place.mirrored:
            if self.mirrored:
                raise CanNotFuse("a result is read as it is and turned around")
            raise _Refused(node)
        return True

    def translate(self, text: _Text, outputs: list[Any]) -> None:
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
            except (NoPlace, scan_pointwise.Unknown):
                raise _Refused(node) from None

    def to_store(self, node: Any) -> Stored:
        member, tensor = self.members[node], value(node)
        there = viewed(torch.empty_like(tensor), member.place.steps)
        dense = viewed(tensor, member.place.steps)
        strides = dense.stride() if _is_dense(tensor) else there.stride()
        return Stored(node, member.steps, tuple(strides))


def _is_fused_by_stock(node: Any) -> bool:
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


def _is_fusible(node: Any, site: Any) -> bool:
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
