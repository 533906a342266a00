"""Ranges of a symbolic size -> one host-side branch around the whole region.

A lowering may name the symbolic sizes its choice depends on (``Lowering.sizes``). Where the choice
changes within the values these sizes can take, a pass after Inductor's own takes the operation and
everything that fuses with it out of the graph, and puts one call in its place. At lowering that
becomes an ``if`` on the sizes with the region compiled anew in each branch: by the same code as a
static graph, told that branch's sizes and choice.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import choosing, compat, compat_dispatch, compat_ir, matching, ranges, registry, report

MAX_RANGES = 8


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What the choice at a site depends on.

    ``sizes`` are sympy expressions, ``pick(values)`` the candidate (or "stock") at these sizes; it
    must accept every value that the expressions can take, 0 included.
    """

    site: str
    sizes: tuple[Any, ...]
    pick: Callable[[tuple[int, ...]], str]


# --- boxes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    """A symbol, or an expression of several, that ranges run along: ``hi`` None is unbounded."""

    expr: Any
    lo: int
    hi: int | None
    traced: int


@dataclasses.dataclass(frozen=True)
class Box:
    """A range per axis (both ends inclusive), what is chosen there, and sizes typical of it."""

    ends: tuple[tuple[int, int | None], ...]
    choice: str
    typical: tuple[int, ...] = ()


def axes_of(sizes: Sequence[Any]) -> list[Axis]:
    """What to branch on: the symbol where a size has one, else the whole expression."""
    found = []
    for size in sizes:
        symbols = sorted(size.free_symbols, key=str)
        found.append(symbols[0] if len(symbols) == 1 else size)
    return [Axis(e, *compat.bounds(e), compat.hint(e)) for e in dict.fromkeys(found)]


def along(axes: Sequence[Axis], sensitivity: Sensitivity) -> Callable[[tuple[int, ...]], str]:
    """The choice as a function of the axes' values."""
    exprs = [axis.expr for axis in axes]

    @functools.cache
    def pick(values: tuple[int, ...]) -> str:
        known = dict(zip(exprs, values, strict=True))
        try:
            sizes = [
                known[s] if s in known else compat.substitute(s, known)
                for s in sensitivity.sizes
            ]
        except ZeroDivisionError:  # no such size: x.view(-1, 4, k) at fewer than 4 rows
            return choosing.STOCK
        return sensitivity.pick(tuple(int(s) for s in sizes))

    return pick


def boxes_of(axes: Sequence[Axis], pick: Callable[[tuple[int, ...]], str]) -> list[Box]:
    """At most MAX_RANGES boxes that cover all values, neighbours of one choice merged."""
    if len(axes) == 1:
        (axis,) = axes
        found = ranges.find_ranges(
            lambda size: pick((size,)), axis.lo, axis.hi, max_ranges=MAX_RANGES
        )
        boxes = [Box(((r.lo, r.hi),), r.choice) for r in found]
    else:
        boxes = _merged(_tree(axes, pick))
    return [dataclasses.replace(box, typical=_typical(axes, box, pick)) for box in boxes]


_GRID_TOP = 1 << 14  # one size beyond is asked for all


def _grid(axis: Axis) -> list[int]:
    """Powers of two, the sizes behind them and half-way: kernels' tiles end at powers of two."""
    top = max(axis.lo, _GRID_TOP) if axis.hi is None else axis.hi
    powers = [1 << e for e in range(min(top, _GRID_TOP).bit_length())]
    found = {size for p in powers for size in (p, p + 1, p * 3 // 2) if axis.lo <= size <= top}
    return sorted(found | {axis.lo, top})


@dataclasses.dataclass
class _Cells:
    """Grid cells of a box under construction: index ranges, and what is chosen in each cell."""

    spans: tuple[tuple[int, int], ...]  # per axis, half open
    ends: tuple[tuple[int, int | None], ...]
    choices: dict[tuple[int, ...], str]

    def cells(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(*span) for span in self.spans))

    def count(self) -> Counter[str]:
        return Counter(self.choices[cell] for cell in self.cells())

    def split(self, axis: int, at: int, edge: int) -> tuple[_Cells, _Cells]:
        """Below index ``at`` of an axis, with values up to ``edge``, and above."""
        (a, b), (lo, hi) = self.spans[axis], self.ends[axis]
        halves = (((a, at), (lo, edge)), ((at, b), (edge + 1, hi)))
        left, right = (
            _Cells(
                (*self.spans[:axis], span, *self.spans[axis + 1 :]),
                (*self.ends[:axis], ends, *self.ends[axis + 1 :]),
                self.choices,
            )
            for span, ends in halves
        )
        return left, right

    def best_split(self) -> tuple[float, int, int]:
        """(gain, axis, index) of the split after which the halves' choices lose least."""
        whole = self.count()
        before = _loss(whole)[0]
        best = (0.0, 0, 0)
        for axis, (a, b) in enumerate(self.spans):
            slices = [Counter[str]() for _ in range(a, b)]
            for cell in self.cells():
                slices[cell[axis] - a][self.choices[cell]] += 1
            left: Counter[str] = Counter()
            for at in range(a + 1, b):
                left = left + slices[at - 1 - a]
                gain = before - _loss(left)[0] - _loss(whole - left)[0]
                best = max(best, (gain, axis, at))
        return best


def _loss(count: Counter[str]) -> tuple[float, str]:
    """What the best single choice for cells that want ``count`` gives away, and that choice.

    Only stock can't be behind stock, so it is taken wherever a cell wants it. Another candidate
    than the picked one costs less than none; a last term draws splits to where stock ends.
    """
    total = count.total()
    stock = count[choosing.STOCK]
    choice = choosing.STOCK if stock else count.most_common(1)[0][0]
    wrong = total - count[choice]
    mixed = stock * (total - stock) / total if total else 0.0
    return (wrong if stock else 0.3 * wrong) + 0.5 * mixed, choice


def _tree(axes: Sequence[Axis], pick: Callable[[tuple[int, ...]], str]) -> list[Box]:
    """Boxes of several axes: the split that separates most is taken, until all are pure."""
    grids = [_grid(axis) for axis in axes]
    choices = {
        cell: pick(tuple(grid[i] for grid, i in zip(grids, cell, strict=True)))
        for cell in itertools.product(*(range(len(grid)) for grid in grids))
    }
    leaves = [
        _Cells(
            tuple((0, len(grid)) for grid in grids),
            tuple((axis.lo, axis.hi) for axis in axes),
            choices,
        )
    ]
    while len(leaves) < MAX_RANGES:
        (gain, axis, at), i = max((leaf.best_split(), i) for i, leaf in enumerate(leaves))
        if gain <= 0:
            break
        leaf = leaves.pop(i)
        leaves += leaf.split(axis, at, _edge(leaf, axis, at, grids[axis]))
    found = [Box(leaf.ends, _loss(leaf.count())[1]) for leaf in leaves]
    return sorted(found, key=lambda box: [lo for lo, _ in box.ends])


def _edge(leaf: _Cells, axis: int, at: int, grid: Sequence[int]) -> int:
    """The last value below a split: the sizes between two of the grid go to where stock is."""
    below, above = (half.count() for half in leaf.split(axis, at, grid[at - 1]))
    return grid[at] - 1 if below[choosing.STOCK] and not above[choosing.STOCK] else grid[at - 1]


def _merged(boxes: list[Box]) -> list[Box]:
    """Boxes of one choice that are neighbours along one axis and alike along the others, joined."""
    for a, b in itertools.permutations(boxes, 2):
        differ = [i for i in range(len(a.ends)) if a.ends[i] != b.ends[i]]
        if a.choice == b.choice and len(differ) == 1:
            (lo, end), (start, hi) = a.ends[differ[0]], b.ends[differ[0]]
            if end is not None and start == end + 1:
                ends = list(a.ends)
                ends[differ[0]] = (lo, hi)
                rest = [box for box in boxes if box not in (a, b)]
                return _merged([*rest, Box(tuple(ends), a.choice)])
    return sorted(boxes, key=lambda box: [lo for lo, _ in box.ends])


def _typical(
    axes: Sequence[Axis], box: Box, pick: Callable[[tuple[int, ...]], str]
) -> tuple[int, ...]:
    """Sizes inside a box at which its choice is picked: those traced, else near the middle."""
    per_axis = []
    for axis, (lo, hi) in zip(axes, box.ends, strict=True):
        top = 4 * max(lo, 1) if hi is None else hi
        traced = [axis.traced] if lo <= axis.traced and (hi is None or axis.traced <= hi) else []
        middle = min(max(math.isqrt(max(lo, 1) * top), lo), top)
        powers = [p for e in range(top.bit_length()) if lo <= (p := 1 << e) <= top]
        per_axis.append(list(dict.fromkeys([*traced, middle, top, lo, *powers])))
    points = list(itertools.product(*per_axis))
    return next((point for point in points if pick(point) == box.choice), points[0])


# --- the pass -------------------------------------------------------------------------------------


class Pass:
    """A graph pass in Inductor's list, behind those of the lowerings."""

    def apply(self, graph: Any) -> int:
        """Replace every region whose choice depends on its sizes; returns how many."""
        taken: set[Any] = set()
        count = 0
        for node in list(graph.nodes):
            if node in taken:
                continue
            for name, rule in registry.sensitive(node.target):
                if choosing.forced_choice(name) is not None:
                    continue
                try:
                    site = _site(name, node, rule(node), taken, count)
                    if site is not None:
                        taken.update(site.put_into(graph))
                        count += 1
                        break
                except Exception as error:
                    registry.failed(name, f"ranges of {node.target}", error)
        return count


def _site(
    lowering: str, node: Any, sensitivity: Sensitivity | None, taken: set[Any], number: int
) -> Site | None:
    """The site to branch at; None where one choice holds for all sizes, or none is to be made."""
    if sensitivity is None or compat.has_unbacked(sensitivity.sizes):
        return None
    axes = axes_of(sensitivity.sizes)
    boxes = boxes_of(axes, along(axes, sensitivity))
    if len({box.choice for box in boxes}) == 1:
        node.meta[choosing.RANGES] = tuple(_size_range(axes, box) for box in boxes)
        return None
    region = matching.fusible_region(node, taken)
    if region is None:
        return None
    return Site(lowering, sensitivity.site, region, tuple(axes), tuple(boxes), number)


def _size_range(axes: Sequence[Axis], box: Box) -> report.SizeRange:
    parts = [(str(axis.expr), *ends) for axis, ends in zip(axes, box.ends, strict=True)]
    bounded = [p for p, axis in zip(parts, axes, strict=True) if p[1:] != (axis.lo, axis.hi)]
    first, *others = bounded or parts[:1]
    return report.SizeRange(*first, box.choice, tuple(others))


@dataclasses.dataclass(frozen=True)
class Site:
    """A region and the boxes of sizes between which its choice changes."""

    lowering: str
    name: str
    region: matching.Region
    axes: tuple[Axis, ...]
    boxes: tuple[Box, ...]
    number: int
    copies: tuple[Any, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Before the graph is edited: the region's nodes are erased from it.
        copies = tuple(self.region.copy() for _ in (*self.boxes, None))
        object.__setattr__(self, "copies", copies)

    def put_into(self, graph: Any) -> list[Any]:
        """Replace the region by one call; returns the new nodes."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        region = self.region
        last = max((*region.erased, *region.operands), key=order.__getitem__)
        early = sorted((n for n in region.later if order[n] < order[last]), key=order.__getitem__)
        if any(n.op == "output" or n.is_impure() for n in early):
            raise NotImplementedError("what follows the region can't be moved behind it")
        target = compat_dispatch.CallAtLowering("size_dispatch", self.lower, self.copies[-1])
        with graph.inserting_after(last):
            call = graph.call_function(target, region.operands)
        call.meta["val"] = tuple(out.meta["val"] for out in region.outputs)
        call.meta.update({k: v for k, v in region.site.meta.items() if k == "stack_trace"})
        new = [call]
        erased = set(region.erased)
        for i, out in enumerate(region.outputs):
            with graph.inserting_after(new[-1]):
                result = graph.call_function(operator.getitem, (call, i))
            result.meta = dict(out.meta)
            new.append(result)
            out.replace_all_uses_with(result, delete_user_cb=lambda user: user not in erased)
        for node in reversed(region.erased):
            graph.erase_node(node)
        end = new[-1]
        for node in early:
            end.append(node)
            end = node
        return new

    def lower(self, *operands: Any) -> list[Any]:
        """IR of the region's outputs, when the graph around is lowered."""
        node = compat.current_node()
        fakes = [arg.meta["val"] for arg in node.args]
        why_not = compat_dispatch.can_branch()
        if not why_not:
            try:
                found = self._branch(operands, fakes)
                chosen = {box.choice for box in self.boxes}
                self._report(True, f"{len(self.boxes)} ranges, {len(chosen)} implementations")
                return found
            except Exception as error:
                registry.failed(self.lowering, self.name, error)
        else:
            report.record(report.Decision(self.lowering, False, choosing.STOCK, why_not, self.name))
        with choosing.force_here(self.lowering, choosing.STOCK), report.muted():
            return list(compat_ir.inline(self.copies[-1], operands, {}))

    def _branch(self, operands: Sequence[Any], fakes: Sequence[Any]) -> list[Any]:
        realized = [
            compat_dispatch.realize_operand(x, fake)
            for x, fake in zip(operands, fakes, strict=True)
        ]
        branches = []
        for i, box in enumerate(self.boxes):
            with choosing.force_here(self.lowering, box.choice), report.muted():
                subgraph = compat_dispatch.lower_branch(
                    self.copies[i],
                    f"range{self.number}_{i}",
                    realized,
                    fakes,
                    self._assumed(box),
                )
            branches.append(compat_dispatch.Branch(self._when(box), subgraph))
        outputs = [out.meta["val"] for out in self.region.outputs]
        return compat_dispatch.emit(branches, realized, outputs)

    def _assumed(self, box: Box) -> Mapping[Any, compat.Assumed]:
        return {
            axis.expr: compat.Assumed(value, *ends)
            for axis, value, ends in zip(self.axes, box.typical, box.ends, strict=True)
        }

    def _when(self, box: Box) -> list[compat_dispatch.Bound]:
        """What of a box is to be asked: in a row of ranges, only the upper end of each."""
        found = []
        for axis, (lo, hi) in zip(self.axes, box.ends, strict=True):
            below = None if lo == axis.lo or len(self.axes) == 1 else lo
            above = None if hi == axis.hi else hi
            if below is not None or above is not None:
                found.append(compat_dispatch.Bound(axis.expr, below, above))
        return found

    def _report(self, fired: bool, chosen: str) -> None:
        names = dict.fromkeys([choosing.STOCK, *(box.choice for box in self.boxes)])
        sizes = " and ".join(str(axis.expr) for axis in self.axes)
        report.record(
            report.Decision(
                self.lowering,
                fired,
                chosen,
                f"what is best depends on {sizes}",
                self.name,
                "heuristic",
                tuple(report.CandidateTime(name, note="not timed") for name in names),
                tuple(_size_range(self.axes, box) for box in self.boxes),
            )
        )
