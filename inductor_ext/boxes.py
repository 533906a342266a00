"""Ranges of symbolic sizes as boxes: where one choice holds, by a rule, a plan or times.

A rule is asked where it changes. What is known otherwise (a plan's ranges, measured ones) keeps its
edges exactly, and the rule fills what that leaves open.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import choosing, compat, plan, ranges

MAX_RANGES = 8


@dataclasses.dataclass(frozen=True)
class Known:
    """A choice that no rule made: it holds where every size lies within its bounds.

    ``bounds`` go with the sizes of a ``Sensitivity``. ``source`` is "plan" or "measured", ``where``
    says which range of what, ``times`` are us by candidate at the measured points (as in
    ``plan.Box``).
    """

    bounds: tuple[plan.Bounds, ...]
    choice: str
    source: str
    where: str
    times: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict, hash=False)

    def nearest_times(self, sizes: Sequence[int]) -> tuple[str, Mapping[str, float]]:
        """The measured point nearest to ``sizes`` on a log scale, and its times."""
        named = {str(i): size for i, size in enumerate(sizes)}
        box = plan.Box(tuple(zip(named, self.bounds, strict=True)), self.choice, self.times)
        return box.nearest_times(named)


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What the choice at a site depends on.

    ``sizes`` are sympy expressions, ``pick(values)`` the rule's candidate (or "stock") at these
    sizes; it must accept every value that the expressions can take, 0 included. ``known`` are
    choices that come before the rule, the first that holds, and ``rest`` says why the rule decides
    elsewhere ("not in the plan: ..."; empty: nothing to say). ``exists(name)`` is asked, with the
    sizes of a range assumed, whether a known candidate can be emitted there. ``note`` is reported.
    """

    site: str
    sizes: tuple[Any, ...]
    pick: Callable[[tuple[int, ...]], str]
    known: tuple[Known, ...] = ()
    rest: str = ""
    exists: Callable[[str], bool] = lambda name: True
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A symbol, or an expression of several, that ranges run along: ``hi`` None is unbounded."""

    expr: Any
    lo: int
    hi: int | None
    traced: int


@dataclasses.dataclass(frozen=True)
class Box:
    """A range per axis (both ends inclusive), what is chosen there, and sizes typical of it.

    ``known`` are the parts of it, with their ends, in which no rule chose.
    """

    ends: tuple[tuple[int, int | None], ...]
    choice: str
    typical: tuple[int, ...] = ()
    known: tuple[tuple[tuple[tuple[int, int | None], ...], Known], ...] = ()


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
                known[s] if s in known else compat.substitute(s, known) for s in sensitivity.sizes
            ]
        except ZeroDivisionError:  # no such size: x.view(-1, 4, k) at fewer than 4 rows
            return choosing.STOCK
        return sensitivity.pick(tuple(int(s) for s in sizes))

    return pick


def boxes_of(
    axes: Sequence[Axis], pick: Callable[[tuple[int, ...]], str], most: int = MAX_RANGES
) -> list[Box]:
    """At most ``most`` boxes that cover all values, neighbours of one choice merged."""
    if len(axes) == 1:
        (axis,) = axes
        found = ranges.find_ranges(lambda size: pick((size,)), axis.lo, axis.hi, max_ranges=most)
        boxes = [Box(((r.lo, r.hi),), r.choice) for r in found]
    else:
        boxes = merged(_tree(axes, pick, most))
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


def _tree(axes: Sequence[Axis], pick: Callable[[tuple[int, ...]], str], most: int) -> list[Box]:
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
    while len(leaves) < most:
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


def merged(boxes: list[Box]) -> list[Box]:
    """Boxes of one choice that are neighbours along one axis and alike along the others, joined."""
    for a, b in itertools.permutations(boxes, 2):
        differ = [i for i in range(len(a.ends)) if a.ends[i] != b.ends[i]]
        if a.choice == b.choice and len(differ) == 1:
            (lo, end), (start, hi) = a.ends[differ[0]], b.ends[differ[0]]
            if end is not None and start == end + 1:
                ends = list(a.ends)
                ends[differ[0]] = (lo, hi)
                rest = [box for box in boxes if box not in (a, b)]
                return merged([*rest, Box(tuple(ends), a.choice, (), a.known + b.known)])
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
