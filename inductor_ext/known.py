"""Boxes of a site where something is known: a plan's ranges or measured ones, exactly.

What they leave open the rule fills. Along one axis the pieces lie in a row; along several the known
boxes come first in the chain of conditions and the rule's behind them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import active_plan, boxes, choosing, compat, plan, ranges
from .boxes import Axis, Box, Known, Sensitivity

_FARTHEST = 1 << 40  # no axis is followed beyond


def of_plans(problem: choosing.Problem, names: Sequence[str]) -> tuple[tuple[Known, ...], str]:
    """What the plans say over all values of the sizes called ``names``, and of the rest why not.

    The other sizes are as they are, or as traced. The reason is empty without a plan of the user's.
    """
    found = active_plan.ranges_of(problem.key, problem.sizes(), names)
    known = tuple(
        Known(bounds, box.choice, "plan", f"{box} in {name}", _at(box, names, problem))
        for box, bounds, name in found.boxes
    )
    return known, "" if found.elsewhere is None else f"not in the plan: {found.elsewhere}"


def _at(
    box: plan.Box, names: Sequence[str], problem: choosing.Problem
) -> dict[str, Mapping[str, float]]:
    """The times of a box by values of the sizes ``names``; of several points, the nearest."""
    ranged = [name for name, _ in box.bounds]
    fixed = {**dict(problem.key.sizes), **problem.sizes()}
    points: dict[str, Mapping[str, float]] = {}

    def distance(point: str) -> float:
        at = dict(zip(ranged, map(int, point.split(",")), strict=True))
        return sum(abs(math.log((at[n] + 1) / (fixed[n] + 1))) for n in ranged if n not in names)

    for point in sorted(box.times, key=distance):
        at = dict(zip(ranged, point.split(","), strict=True))
        points.setdefault(",".join(at.get(n, str(fixed[n])) for n in names), box.times[point])
    return points


@dataclasses.dataclass(frozen=True)
class Cover:
    """Boxes that cover all values in the order of their conditions, and what was given up.

    ``rest`` says where and why a rule decides; ``dropped`` which edges there was no room for;
    ``note`` is that of the sensitivity.
    """

    boxes: tuple[Box, ...]
    rest: str = ""
    dropped: str = ""
    note: str = ""


def cover(
    axes: Sequence[Axis],
    sensitivity: Sensitivity,
    rule: Callable[[Sequence[Axis], Callable[[tuple[int, ...]], str]], list[Box]],
) -> Cover:
    """At most MAX_RANGES boxes: those known with their edges, and between them the rule's.

    Where there are more, the rule's edges go first. Edges are exact along an axis with which the
    sizes grow or shrink.
    """
    return dataclasses.replace(_cover(axes, sensitivity, rule), note=sensitivity.note)


def _cover(axes: Sequence[Axis], sensitivity: Sensitivity, rule: Any) -> Cover:
    pick = boxes.along(axes, sensitivity)
    if not sensitivity.known:
        return Cover(tuple(rule(axes, pick)), sensitivity.rest)
    placed: list[_Placed] = []
    unusable = ""
    for known in sensitivity.known:
        spans = [_spans(i, axes, sensitivity, known) for i in range(len(axes))]
        for ends in itertools.product(*spans):
            with compat.assume(assumed(axes, ends)):
                exists = known.choice == choosing.STOCK or sensitivity.exists(known.choice)
            if exists:
                placed.append(_Placed(ends, known))
            else:
                source = "not in the plan: " if known.source == "plan" else ""
                unusable = f"{source}{known.where} names {known.choice}, which is no candidate here"
    rest = unusable or sensitivity.rest
    if not placed:
        return Cover(tuple(rule(axes, pick)), rest)
    if len(axes) == 1:
        return _row(axes[0], placed, pick, rest)
    return _chain(axes, placed, pick, rest)


Ends = tuple[plan.Bounds, ...]


def assumed(axes: Sequence[Axis], ends: Ends) -> dict[Any, compat.Assumed]:
    """What holds inside a box."""
    return {
        axis.expr: compat.Assumed(_middle(axis, end), *end)
        for axis, end in zip(axes, ends, strict=True)
    }


def _middle(axis: Axis, end: plan.Bounds) -> int:
    """A size typical of a range: the one traced, or the geometric middle."""
    lo, hi = end
    if plan.within(axis.traced, end):
        return axis.traced
    top = 4 * max(lo, 1) if hi is None else hi
    return min(max(math.isqrt(max(lo, 1) * top), lo), top)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A part of the axes with a known choice (None: the rule's)."""

    ends: Ends
    known: Known | None
    picked: str = ""

    @property
    def choice(self) -> str:
        return self.picked if self.known is None else self.known.choice


# --- from a size to the axis it depends on --------------------------------------------------------


def _spans(
    i: int, axes: Sequence[Axis], sensitivity: Sensitivity, known: Known
) -> list[plan.Bounds]:
    """Where, along one axis, every size that depends on it lies within the known bounds."""
    axis = axes[i]
    spans: list[plan.Bounds] = [(axis.lo, axis.hi)]
    for size, bounds in zip(sensitivity.sizes, known.bounds, strict=True):
        if axis.expr == size or axis.expr in compat.symbols_of(size):
            found = inside(axis, size, bounds)
            spans = [c for a in spans for b in found if (c := plan.intersection(a, b)) is not None]
    return spans


def inside(axis: Axis, size: Any, bounds: plan.Bounds) -> list[plan.Bounds]:
    """The values of an axis at which a size lies within bounds."""
    if size == axis.expr:
        return [bounds]
    values: dict[int, int] = {}

    def at(x: int) -> int:
        if x not in values:
            try:
                values[x] = int(compat.substitute(size, {axis.expr: x}))
            except ZeroDivisionError:  # no such size
                values[x] = -1
        return values[x]

    low, high = bounds
    top = axis.hi
    if top is None:
        top = max(axis.lo, ranges.OPEN_END)
        while at(top) <= (low if high is None else high) and top < _FARTHEST:
            top *= 2
    found = ranges.find_ranges(
        lambda x: "in" if plan.within(at(x), bounds) else "below" if at(x) < low else "above",
        axis.lo,
        top,
        max_ranges=top,
    )
    spans = [(r.lo, r.hi) for r in found if r.choice == "in"]
    if spans and spans[-1][1] == top and axis.hi is None:
        spans[-1] = (spans[-1][0], None)
    return list(spans)


# --- one axis -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Run:
    """Pieces in a row with one choice."""

    pieces: list[_Placed]

    @property
    def choice(self) -> str:
        return self.pieces[0].choice

    @property
    def ends(self) -> plan.Bounds:
        return self.pieces[0].ends[0][0], self.pieces[-1].ends[0][1]

    def octaves(self) -> float:
        lo, hi = self.ends
        return math.inf if hi is None else math.log2((hi + 1) / max(lo, 1))

    def by_rule(self) -> bool:
        return all(piece.known is None for piece in self.pieces)


def _row(
    axis: Axis,
    placed: Sequence[_Placed],
    pick: Callable[[tuple[int, ...]], str],
    rest: str,
) -> Cover:
    starts = {axis.lo}
    for piece in placed:
        lo, hi = piece.ends[0]
        starts |= {lo} if hi is None else {lo, hi + 1}
    inside = sorted(s for s in starts if axis.lo <= s and (axis.hi is None or s <= axis.hi))
    pieces: list[_Placed] = []
    ends = [*(start - 1 for start in inside[1:]), axis.hi]
    for lo, hi in zip(inside, ends, strict=True):
        known = next((p.known for p in placed if plan.within(lo, p.ends[0])), None)
        if known is not None and pieces and pieces[-1].known is known:
            pieces[-1] = _Placed(((pieces[-1].ends[0][0], hi),), known)
        elif known is not None:
            pieces.append(_Placed(((lo, hi),), known))
        else:
            for r in ranges.find_ranges(lambda x: pick((x,)), lo, hi, max_ranges=boxes.MAX_RANGES):
                pieces.append(_Placed(((r.lo, r.hi),), None, r.choice))
    runs, dropped = _at_most(_joined([_Run([piece]) for piece in pieces]), boxes.MAX_RANGES)
    found = tuple(
        Box(
            (run.ends,),
            run.choice,
            (_middle(axis, run.ends),),
            tuple((p.ends, p.known) for p in run.pieces if p.known is not None),
        )
        for run in runs
    )
    open_ends = [p.ends[0] for run in runs for p in run.pieces if p.known is None]
    where = ", ".join(plan.show(end) for end in _touching(open_ends))
    return Cover(found, f"{rest} ({axis.expr} {where})" if where and rest else "", dropped)


def _touching(ends: Sequence[plan.Bounds]) -> list[plan.Bounds]:
    """Bounds in order, with neighbours joined."""
    out: list[plan.Bounds] = []
    for lo, hi in ends:
        if out and out[-1][1] is not None and out[-1][1] + 1 == lo:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    out: list[_Run] = []
    for run in runs:
        if out and out[-1].choice == run.choice:
            out[-1] = _Run(out[-1].pieces + run.pieces)
        else:
            out.append(run)
    return out


def _worth(runs: Sequence[_Run], i: int) -> tuple[bool, bool, float]:
    """What is given up with a run: edges of the rule's are, before those between it and a plan."""
    near = [runs[j] for j in (i - 1, i + 1) if 0 <= j < len(runs)]
    return not runs[i].by_rule(), not any(r.by_rule() for r in near), runs[i].octaves()


def _at_most(runs: list[_Run], limit: int) -> tuple[list[_Run], str]:
    """The smallest run, of the rule's first, goes into a neighbour until ``limit`` are left."""
    lost = {True: 0, False: 0}
    while len(runs) > limit:
        i = min(range(len(runs)), key=functools.partial(_worth, runs))
        lost[runs[i].by_rule()] += 1
        sides = [j for j in (i - 1, i + 1) if 0 <= j < len(runs)]
        j = max(sides, key=lambda n: (runs[n].by_rule(), runs[n].octaves()))
        whole = (runs[min(i, j)].ends[0], runs[max(i, j)].ends[1])
        near = runs[j].pieces[-1 if j < i else 0]
        taken = dataclasses.replace(near, ends=((near.ends[0][0], whole[1]),))
        if j > i:
            taken = dataclasses.replace(near, ends=((whole[0], near.ends[0][1]),))
        kept = [*runs[j].pieces[:-1], taken] if j < i else [taken, *runs[j].pieces[1:]]
        runs[min(i, j) : max(i, j) + 1] = [_Run(kept)]
        runs = _joined(runs)
    return runs, _said(lost[True], lost[False])


def _said(by_rule: int, known: int) -> str:
    """Which edges were dropped, one clause; empty where none were."""
    counts = [(by_rule, "of the heuristic"), (known, "of the plan")]
    parts = [f"{n} range{'s' * (n > 1)} {whose}" for n, whose in counts if n]
    return f"{' and '.join(parts)} dropped: at most {boxes.MAX_RANGES} are emitted" if parts else ""


# --- several axes ---------------------------------------------------------------------------------


def _chain(
    axes: Sequence[Axis],
    placed: Sequence[_Placed],
    pick: Callable[[tuple[int, ...]], str],
    rest: str,
) -> Cover:
    disjoint: list[Box] = []
    for piece in placed:
        for ends in _outside(piece.ends, [box.ends for box in disjoint]):
            assert piece.known is not None
            disjoint.append(Box(ends, piece.choice, (), ((ends, piece.known),)))
    disjoint = boxes.merged(disjoint)
    everything = tuple((axis.lo, axis.hi) for axis in axes)
    full = not _outside(everything, [box.ends for box in disjoint])
    kept = disjoint
    if len(disjoint) > boxes.MAX_RANGES - (not full):
        largest = sorted(disjoint, key=_volume, reverse=True)[: boxes.MAX_RANGES - 1]
        kept, full = [box for box in disjoint if box in largest], False
    found = [dataclasses.replace(box, typical=_point(axes, box.ends)) for box in kept]
    dropped = 0
    if not full:
        covered = [box.ends for box in kept]
        room = boxes.MAX_RANGES - len(kept)
        counts = []
        for most in (boxes.MAX_RANGES, room):
            by_rule = boxes.boxes_of(axes, pick, most)
            by_rule = [box for box in by_rule if _outside(box.ends, covered)]
            counts.append(len(by_rule))
            if len(by_rule) <= room:
                break
        dropped = counts[0] - counts[-1]
        found += by_rule
    said = _said(dropped, len(disjoint) - len(kept))
    return Cover(tuple(found), "" if full else rest, said)


def _point(axes: Sequence[Axis], ends: Ends) -> tuple[int, ...]:
    return tuple(_middle(axis, end) for axis, end in zip(axes, ends, strict=True))


def _volume(box: Box) -> float:
    return math.prod(
        64.0 if hi is None else math.log2((hi + 1) / max(lo, 1)) for lo, hi in box.ends
    )


def _outside(ends: Ends, taken: Sequence[Ends]) -> list[Ends]:
    """The parts of a box that none of ``taken`` covers."""
    names = [str(i) for i in range(len(ends))]

    def named(e: Ends) -> plan.Box:
        return plan.Box(tuple(zip(names, e, strict=True)), "")

    parts = plan.outside(named(ends), tuple(named(e) for e in taken))
    return [tuple(bounds for _, bounds in part.bounds) for part in parts]
