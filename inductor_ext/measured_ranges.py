"""Ranges of a site's size by measurement: for ``tune``, and in max-autotune modes.

The candidates worth timing differ from size to size. A coarse sweep times what each size offers,
and the search for the edges goes on with those that were best somewhere, and with what the
lowering's rule would take between two coarse sizes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import active_plan, agreement, boxes, choosing, compat, config, plan, plan_cache, ranges
from .measured_site import MeasuredSite, Timer

MAX_SIZES = 40  # measured at one site while a program compiles
UPPER = 65536  # where a size has no upper bound, it is measured up to here
_KEPT = 2  # candidates kept of each size of the first, coarse sweep
_HOPELESS = 1.3  # times the best: not compared between two coarse sizes where it is so far behind
_COARSE = 4

_measure: Timer | None = None  # stands in for a card in tests
_found: dict[str, Any] = {}

Values = Callable[[int], Mapping[Any, int]]  # what every symbol is, at a size
Count = Callable[[int, Sequence[str], Mapping[str, float]], None]


def _sweep(lo: int, hi: int) -> list[int]:
    return sorted({lo, hi, *(p for e in range(32) if lo <= (p := _COARSE**e) <= hi)})


def plausible_top(at: MeasuredSite, values: Values, lo: int, hi: int) -> int | None:
    """Up to where it is worth measuring: one coarse step further than the rule believes in, since
    it may be wrong, but not by more. None: nowhere."""
    plausible = [size for size in _sweep(lo, hi) if at.plausible(values(size))]
    return min(hi, _COARSE * plausible[-1]) if plausible else None


def search(
    at: MeasuredSite,
    values: Values,
    lo: int,
    top: int,
    *,
    max_ranges: int,
    max_sizes: int | None = None,
    count: Count = lambda size, names, times: None,
) -> list[ranges.MeasuredRange]:
    """The ranges over lo..top, see ``ranges.find_measured_ranges``; ``count`` hears of each
    measurement."""
    coarse = _sweep(lo, top)
    stock = {choosing.STOCK} if at.how.stock_may_win else set()
    listed = {size: at.short_list(values(size)) for size in coarse}
    for size in coarse:  # all at once: while one is timed, the kernels of the others compile
        at.prepare(values(size), listed[size])
    swept: dict[int, dict[str, float]] = {}
    kept = stock | _ruled(at, values, lo, top)
    for size in coarse:
        swept[size] = at.times(values(size), listed[size], quick=True)
        count(size, listed[size], swept[size])
        kept.update(sorted(swept[size], key=swept[size].__getitem__)[:_KEPT])
    unknown = {size: sorted(kept - set(listed[size])) for size in coarse}
    for size in coarse:
        at.prepare(values(size), unknown[size])
    near: dict[int, set[str]] = {}
    for size in coarse:
        if unknown[size]:
            swept[size].update(at.times(values(size), unknown[size], quick=True))
            count(size, unknown[size], swept[size])
        times = {name: us for name, us in swept[size].items() if name in kept}
        best = min(times.values(), default=0.0)
        near[size] = {name for name, us in times.items() if us <= _HOPELESS * best}

    def score(size: int) -> Mapping[str, float]:
        # What is far behind on both sides of a size is not compiled for it.
        below = near[max(c for c in coarse if c <= size)]
        above = near[min(c for c in coarse if c >= size)]
        names = sorted(stock | below | above)
        times = at.times(values(size), names)
        count(size, names, times)
        return times

    return ranges.find_measured_ranges(
        score,
        lo,
        top,
        max_ranges=max_ranges,
        max_sizes=max_sizes,
        default=choosing.STOCK if at.how.stock_may_win else None,
        margin=max(at.how.threshold, 1.01) - 1,
    )


def _ruled(at: MeasuredSite, values: Values, lo: int, hi: int) -> set[str]:
    """The first candidate of the lowering's own order at the sizes from lo to hi."""
    lists = (at.short_list(values(size)) for size in ranges.geometric(lo, hi))
    return {name for names in lists for name in [n for n in names if n != choosing.STOCK][:1]}


def largest_that_fits(at: MeasuredSite, symbol: Any, lo: int, top: int, timer: Timer | None) -> int:
    """``top``, halved as often as need be for measuring to fit into 80% of the free memory."""
    if timer is not None or not torch.cuda.is_available():
        return top
    free = int(0.8 * torch.cuda.mem_get_info()[0])
    while top > lo and at.memory({symbol: top}) > free:
        top = max(lo, top // 2)
    return top


def in_autotune_mode(
    at: Callable[[Timer | None], MeasuredSite],
    sensitivity: boxes.Sensitivity,
    key: str,
) -> boxes.Sensitivity:
    """A rule's sensitivity with its ranges measured, in a max-autotune mode; else as it is.

    Of a site whose sizes depend on one symbol, with no plan of the user's loaded and none shipped
    that covers it. At most ``MAX_SIZES`` sizes are measured, and what was found is remembered in
    the plan cache. Beyond what was measured the rule decides. ``at(timer)`` makes the site, ``key``
    identifies the problem besides the sizes.
    """
    symbols = {s for size in sensitivity.sizes for s in compat.symbols_of(size)}
    measurable = compat.wants_measurement() and (_measure is not None or compat.on_real_card())
    if not measurable or sensitivity.known or active_plan.user_plans() or len(symbols) != 1:
        return sensitivity
    if compat.ahead_of_time():
        return sensitivity
    (symbol,) = symbols
    (axis,) = boxes.axes_of([symbol])
    lo, hi = max(axis.lo, 1), UPPER if axis.hi is None else axis.hi

    def measure() -> list[Any]:
        site = at(_measure)
        top = plausible_top(site, lambda size: {symbol: size}, lo, hi) if lo <= hi else None
        if top is None:
            return []
        top = largest_that_fits(site, symbol, lo, top, _measure)
        most = boxes.MAX_RANGES - (top != axis.hi)
        found = search(
            site, lambda size: {symbol: size}, lo, top, max_ranges=most, max_sizes=MAX_SIZES
        )
        return [[r.lo, r.hi, r.choice, {str(s): us for s, us in r.times.items()}] for r in found]

    text = f"ranges {key} {(axis.lo, axis.hi)}"
    numbers: dict[str, str] = {}
    text = re.sub(r"\bs\d+\b", lambda m: numbers.setdefault(m[0], f"#{len(numbers)}"), text)
    here = plan_cache.here(text)
    if here not in _found:
        try:
            _found[here] = plan_cache.recall(text, measure)
        except agreement.Disagreement:
            raise
        except Exception as error:
            if config.strict:
                raise
            return dataclasses.replace(sensitivity, rest=f"measuring failed: {error}")
    if not _found[here]:
        return sensitivity
    return _with(sensitivity, axis, _found[here])


def _with(sensitivity: boxes.Sensitivity, axis: boxes.Axis, found: Any) -> boxes.Sensitivity:
    parts = []
    for lo, hi, choice, times in found:
        bounds: plan.Bounds = (axis.lo if lo == found[0][0] else lo, hi)
        sizes = f"at {len(times)} sizes up to {max(map(int, times))}" if times else "nowhere"
        where = f"{axis.expr} {plan.show(bounds)} measured {sizes}"
        parts.append(boxes.Known((bounds,), choice, "measured", where, times))
    rule = boxes.along([axis], sensitivity)
    return dataclasses.replace(
        sensitivity,
        sizes=(axis.expr,),
        pick=rule,
        known=tuple(parts),
        rest="not measured",
    )
