"""A site whose candidates are timed at sizes of one's choice: every tensor follows.

The sizes are assumed (``compat.assume``) while the operation and what fuses behind it are taken out
of the graph, so all tensors that share a symbol are resized together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import choosing, compat, ranges, region, report
from .plan import Bounds, Box, Key

# (key, sizes by name, candidates) -> us by candidate; stands in for a card in tests.
Timer = Callable[[Key, Mapping[str, int], Sequence[str]], Mapping[str, float]]


class MeasuredSite:
    """The site being lowered: its candidates and their times at given values of the symbols."""

    def __init__(
        self,
        lowering: str,
        site: str,
        problem: choosing.Problem,
        names: Sequence[str],
        how: choosing.Measure,
        timer: Timer | None,
        node: Any,
    ) -> None:
        self.lowering, self.site, self.problem, self.how = lowering, site, problem, how
        self._names, self._timer = names, timer
        self._node = node
        self._regions: dict[Any, region.Region] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}

    def _at(self, values: Mapping[Any, int]) -> Any:
        return compat.assume({s: compat.Assumed(v, v, v) for s, v in values.items()})

    def sizes(self, values: Mapping[Any, int]) -> dict[str, int]:
        """The problem's ranged sizes."""
        with self._at(values):
            return self.problem.sizes()

    def plausible(self, values: Mapping[Any, int]) -> bool:
        """Whether the lowering's rule thinks that a candidate might win there."""
        with self._at(values):
            return self.problem.plausible()

    def short_list(self, values: Mapping[Any, int]) -> list[str]:
        """Stock and the candidates worth measuring there."""
        with self._at(values):
            listed = self.problem.short_list
            names = list(self._names if listed is None else listed())
        return [choosing.STOCK, *names] if self.how.stock_may_win else names

    def _region(self, values: Mapping[Any, int]) -> region.Region:
        key = tuple(values.values())
        if key not in self._regions:
            with self._at(values):
                self._regions[key] = region.extract(self._node, reductions=True)
        return self._regions[key]

    def memory(self, values: Mapping[Any, int]) -> int:
        """Bytes that measuring there takes, at most: see ``Region.measuring_bytes``."""
        return self._region(values).measuring_bytes()

    def times(self, values: Mapping[Any, int], names: Sequence[str]) -> dict[str, float]:
        """us of every candidate that gave the right result there."""
        if self._timer is not None:
            return dict(self._timer(self.problem.key, self.sizes(values), names))
        found = self._region(values)

        def build(name: str) -> Callable[..., Any]:
            key = (tuple(values.values()), name)
            if key not in self._calls:
                with (
                    choosing.recording(None),
                    choosing.force_here(self.lowering, name),
                    report.muted(),
                    compat.strict(),
                ):
                    self._calls[key] = found.compile()
            return self._calls[key]

        builders = {name: functools.partial(build, name) for name in names}
        outcomes = found.compare(builders, self.how.input_gen_fns)
        return {name: o.us for name, o in outcomes.items() if o.us is not None}

    def boxes(
        self,
        lead: Any,
        found: Sequence[ranges.MeasuredRange],
        ends: Mapping[Any, tuple[int, int]],
        fixed: Mapping[Any, int],
    ) -> list[Box]:
        """Ranges of a symbol as boxes of the problem's sizes, which grow with the symbols."""
        out: list[Box] = []
        told = {choosing.STOCK, *(r.choice for r in found)}
        for r in found:
            assert r.hi is not None
            corner = {s: (lo, hi) for s, (lo, hi) in ends.items()}
            if lead is not None:
                corner[lead] = (r.lo, r.hi)
            low = self.sizes({s: lo for s, (lo, _) in corner.items()})
            # Up to where the next range begins: with sizes like 2*s the steps are wider than 1.
            high = self.sizes({s: hi + 1 for s, (_, hi) in corner.items()})
            bounds: list[tuple[str, Bounds]] = [
                (name, (low[name], max(high[name] - 1, low[name]))) for name in sorted(low)
            ]
            times: dict[str, Mapping[str, float]] = {}
            for size, us in r.times.items():
                at = self.sizes({**fixed, **({} if lead is None else {lead: size})})
                times[",".join(str(at[name]) for name, _ in bounds)] = {
                    n: t for n, t in us.items() if n in told
                }
            box = Box(tuple(bounds), r.choice, times)
            if not any(box.overlaps(other) for other in out):  # sizes like s//8 repeat
                out.append(box)
        return out
