"""Ranges of a user's operation: which implementation is fastest over which sizes of one dimension.

On a card they are measured before the graph is lowered, with every tensor that shares the symbol
resized and with what fuses behind the operation; ``dispatch`` then branches around that region.
That takes a bounded time: at most 40 sizes are measured (``measured_ranges.MAX_SIZES``), three in
each range that is given, each with every candidate, at most 8 times where the times are noisy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import (
    active_plan,
    boxes,
    choosing,
    compat,
    known,
    measured_ranges,
    plan,
    plan_cache,
    ranges,
    report,
)
from .measured_site import MeasuredSite, Timer

DEFAULT_UPPER_BOUND = 65536  # as Inductor's
_POINTS = 3  # sizes that each given range is scored at

_measure: Timer | None = None  # stands in for a card in tests


@dataclasses.dataclass(frozen=True)
class DispatchOn:
    """The dimension whose size decides: up to ``upper`` an open range is measured, and
    ``split_points`` (the last size of every range but the last) are given or None, to be found."""

    tensor: str
    dim: int
    upper: int = DEFAULT_UPPER_BOUND
    split_points: tuple[int, ...] | None = None

    def given(self) -> list[plan.Bounds]:
        """The ranges between split points; the first starts at 0."""
        points = self.split_points or ()
        starts = [0, *(p + 1 for p in points)]
        return list(zip(starts, [*points, None], strict=True))


def checked(dispatch_on: Any, split_points: Any, op: Any) -> DispatchOn | None:
    """The arguments of a registration; None without. Raises TypeError or ValueError."""
    if dispatch_on is None:
        if split_points is not None:
            raise ValueError("expected dispatch_on with split_points, got split_points alone")
        return None
    if not isinstance(dispatch_on, Mapping):
        raise TypeError(
            'expected dispatch_on like {"tensor_name": "x", "dim": 0}, '
            f"got {type(dispatch_on).__name__}"
        )
    missing = [key for key in ("tensor_name", "dim") if key not in dispatch_on]
    unknown = [k for k in dispatch_on if k not in ("tensor_name", "dim", "range_upper_bound")]
    if missing or unknown:
        what = f"none of {', '.join(missing)}" if missing else f"{', '.join(map(repr, unknown))}"
        raise ValueError(
            f"expected dispatch_on with tensor_name, dim and perhaps range_upper_bound, got {what}"
        )
    tensor, dim = dispatch_on["tensor_name"], dispatch_on["dim"]
    tensors = [a.name for a in op._schema.arguments if isinstance(a.type, torch.TensorType)]
    if tensor not in tensors:
        raise ValueError(f"expected tensor_name among {tensors}, got {tensor!r}")
    if type(dim) is not int:
        raise TypeError(f"expected dim as a whole number, got {dim!r}")
    upper = dispatch_on.get("range_upper_bound", DEFAULT_UPPER_BOUND)
    if type(upper) is not int or upper < 1:
        raise ValueError(f"expected range_upper_bound as a whole number >= 1, got {upper!r}")
    return DispatchOn(tensor, dim, upper, _points_checked(split_points, upper))


def _points_checked(split_points: Any, upper: int) -> tuple[int, ...] | None:
    if split_points is None:
        return None
    if not isinstance(split_points, (list, tuple)):
        raise TypeError(f"expected split_points as a list, got {type(split_points).__name__}")
    points = tuple(split_points)
    if not points:
        raise ValueError("expected at least one split point, got an empty list (leave it out?)")
    if any(type(p) is not int or p < 1 for p in points) or list(points) != sorted(set(points)):
        raise ValueError(f"expected split_points as increasing sizes >= 1, got {list(points)}")
    if points[-1] >= upper:
        raise ValueError(f"expected split_points below range_upper_bound={upper}, got {points[-1]}")
    if len(points) >= boxes.MAX_RANGES:
        raise ValueError(f"expected at most {boxes.MAX_RANGES - 1} split_points, got {len(points)}")
    return points


@dataclasses.dataclass(frozen=True)
class OpSite:
    """A call of the operation in a graph, before it is lowered.

    ``size`` is that of the named dimension, ``names`` the candidates, ``unmeasured`` the choice
    where nothing can be measured, ``note`` what is to be reported besides and ``key`` what else
    identifies the problem.
    """

    lowering: str
    site: str
    node: Any
    on: DispatchOn
    size: Any
    problem: choosing.Problem
    names: Sequence[str]
    how: choosing.Measure
    unmeasured: str
    note: str
    key: str

    def sensitivity(self) -> boxes.Sensitivity | None:
        """How the choice depends on the size: by a plan, measured, or one choice for all.

        A static size is measured as it is, and so decided here.
        """
        if compat.is_static(self.size):
            planned = choosing.planned(self.problem)
            if planned is None and self._may_measure(()):
                self._decide_static()
            return None
        symbols = compat.symbols_of(self.size)
        dims = self.problem.dims
        about = [n for n, size in dims.items() if compat.symbols_of(size) <= symbols]
        by_plan, rest = known.of_plans(self.problem, about)
        if not self._may_measure(by_plan):
            sizes = tuple(dims[n] for n in about)
            exists = self.names.__contains__
            return self._sensitive(sizes, by_plan, rest, exists)
        (axis,) = boxes.axes_of([self.size])
        if not axis.expr.is_Symbol:
            return None  # of a product of sizes, no one size follows: measured as it was traced
        return self._sensitive((axis.expr,), self._measured(axis), "")

    def _sensitive(
        self, sizes: Any, found: tuple[boxes.Known, ...], rest: str, exists: Any = lambda n: True
    ) -> boxes.Sensitivity:
        return boxes.Sensitivity(
            self.site, sizes, lambda values: self.unmeasured, found, rest, exists, self.note
        )

    def _may_measure(self, by_plan: Sequence[boxes.Known]) -> bool:
        """Where no plan of the user's forbids it and none that was shipped knows better."""
        can = _measure is not None or compat.on_real_card()
        return can and not by_plan and not active_plan.user_plans()

    def _site(self) -> MeasuredSite:
        return MeasuredSite(
            self.lowering, self.site, self.problem, self.names, self.how, _measure, self.node
        )

    def _all(self) -> list[str]:
        return [choosing.STOCK, *self.names] if self.how.stock_may_win else list(self.names)

    def _decide_static(self) -> None:
        times = self._remembered(self._static_times)[0][3][str(self.size)]
        choice = _best([times], self.how)
        self.node.meta[choosing.DECIDED] = {
            self.lowering: choosing.Decided(
                choice,
                "measured",
                f"fastest of {len(times)} timed with what fuses behind",
                tuple(report.CandidateTime(n, us) for n, us in times.items()),
            )
        }

    def _static_times(self) -> list[_Measured]:
        times = self._site().times({}, self._all())
        return [(int(self.size), int(self.size), "", {str(self.size): times})]

    def _measured(self, axis: boxes.Axis) -> tuple[boxes.Known, ...]:
        """Ranges along a symbol."""
        spans: list[plan.Bounds] | None = None
        if self.on.split_points is not None:
            every = [known.inside(axis, self.size, bounds) for bounds in self.on.given()]
            bounds = (axis.lo, axis.hi)
            spans = [c for s in every for b in s if (c := plan.intersection(b, bounds)) is not None]
        (up_to,) = known.inside(axis, self.size, (0, self.on.upper))[:1] or [(axis.lo, axis.lo)]
        top = max(axis.lo, up_to[1] or self.on.upper)
        top = top if axis.hi is None else min(top, axis.hi)

        def measure() -> list[_Measured]:
            at = self._site()
            least = max(axis.lo, 1)
            largest = measured_ranges.largest_that_fits(at, axis.expr, least, top, _measure)
            if spans is None:
                return self._search(at, axis, largest)
            return self._score(at, axis, spans, largest)

        found = []
        for lo, hi, choice, times in self._remembered(measure):
            sizes = f"at {len(times)} sizes up to {max(map(int, times))}" if times else "nowhere"
            where = f"{axis.expr} {plan.show((lo, hi))} measured {sizes}"
            found.append(boxes.Known(((lo, hi),), choice, "measured", where, times))
        return tuple(found)

    def _search(self, at: MeasuredSite, axis: boxes.Axis, top: int) -> list[_Measured]:
        found = ranges.find_measured_ranges(
            lambda size: at.times({axis.expr: size}, self._all()),
            max(axis.lo, 1),
            max(top, axis.lo, 1),
            max_ranges=boxes.MAX_RANGES,
            max_sizes=measured_ranges.MAX_SIZES,
            default=choosing.STOCK if self.how.stock_may_win else None,
            margin=max(self.how.threshold, 1.01) - 1,
        )
        out: list[_Measured] = []
        for r in found:
            lo = axis.lo if r is found[0] else r.lo
            hi = axis.hi if r is found[-1] else r.hi  # what is beyond goes with the last
            times = {str(size): dict(us) for size, us in r.times.items()}
            out.append((lo, hi, r.choice, times))
        return out

    def _score(
        self, at: MeasuredSite, axis: boxes.Axis, spans: Sequence[plan.Bounds], top: int
    ) -> list[_Measured]:
        out: list[_Measured] = []
        for lo, hi in spans:
            last = max(lo, top if hi is None else min(hi, top))
            first = max(lo, 1)
            ratio = last / first
            sizes = [round(first * ratio ** (i / _POINTS)) for i in range(1, _POINTS + 1)]
            times = {
                size: at.times({axis.expr: size}, self._all())
                for size in dict.fromkeys(sizes)
                if size <= top
            }
            choice = _best(list(times.values()), self.how) if times else self.unmeasured
            out.append((lo, hi, choice, {str(size): us for size, us in times.items()}))
        return out

    def _remembered(self, measure: Any) -> list[_Measured]:
        """What was measured for this problem: in this process, or what the plan cache recalls."""
        symbols: dict[str, str] = {}
        text = re.sub(r"\bs\d+\b", lambda m: symbols.setdefault(m[0], f"#{len(symbols)}"), self.key)
        problem = f"ranges {self.lowering} {text}"
        here = plan_cache.here(problem)
        if here not in _found:
            answer = plan_cache.recall(problem, measure, keep=_complete)
            _found[here] = [(lo, hi, choice, times) for lo, hi, choice, times in answer]
        return _found[here]


# lo, hi, choice, us by candidate by size
_Measured = tuple[int, "int | None", str, dict[str, dict[str, float]]]
_found: dict[str, list[_Measured]] = {}


def _complete(measured: list[Any]) -> bool:
    """Whether something could be timed wherever it was tried."""
    return all(us for *_, times in measured for us in times.values())


def _best(points: Sequence[Mapping[str, float]], how: choosing.Measure) -> str:
    """The fastest in the geometric mean of those that ran at every point; stock where none did."""
    everywhere = [n for n in points[0] if all(n in times for times in points)]
    mean = {n: math.fsum(math.log(t[n]) for t in points) / len(points) for n in everywhere}
    best = min((n for n in mean if n != choosing.STOCK), key=mean.__getitem__, default="")
    if not best or not how.stock_may_win:
        return best or choosing.STOCK
    # Where stock can't be timed nothing says that a candidate is faster.
    gain = mean[choosing.STOCK] - mean[best] if choosing.STOCK in mean else 0.0
    return best if gain > math.log(how.threshold) else choosing.STOCK
