"""A site whose candidates are timed at sizes of one's choice: every tensor follows.

The sizes are assumed (``compat.assume``) while the operation and what fuses behind it are taken out
of the graph, so all tensors that share a symbol are resized together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import choosing, compat, compat_ir, ranges, region, report
from .plan import Bounds, Box, Key

# (key, sizes by name, candidates) -> us by candidate; stands in for a card in tests.
Timer = Callable[[Key, Mapping[str, int], Sequence[str]], Mapping[str, float]]


log = logging.getLogger("inductor_ext")

_QUICK = 5  # rounds that tell candidates apart which are far from each other


class MeasuredSite:
    """The site being lowered: its candidates and their times at given values of the symbols.

    A candidate is compiled once for a band of sizes (1 to 4, 16, 32, 64, 256, ...) with the sizes
    symbolic, as a branch over ranges emits it, and that program is timed at every size inside. What
    can't be compiled so is compiled anew for each size.
    """

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
        self._programs: dict[Any, Callable[[], Callable[..., Any]] | None] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}
        self.compiled = 0  # programs

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

    def prepare(self, values: Mapping[Any, int], names: Sequence[str]) -> None:
        """Write the programs of the candidates: their kernels begin to compile, side by side."""
        if self._timer is None:
            for name in names:
                self._program(values, name)

    def times(
        self, values: Mapping[Any, int], names: Sequence[str], *, quick: bool = False
    ) -> dict[str, float]:
        """us of every candidate that gave the right result there; ``quick`` takes fewer rounds."""
        if self._timer is not None:
            return dict(self._timer(self.problem.key, self.sizes(values), names))
        self.prepare(values, names)
        builders = {name: functools.partial(self._build, values, name) for name in names}
        outcomes = self._region(values).compare(
            builders, self.how.input_gen_fns, **({"repeats": _QUICK} if quick else {})
        )
        return {name: o.us for name, o in outcomes.items() if o.us is not None}

    @contextlib.contextmanager
    def _only(self, name: str) -> Iterator[None]:
        # Strict: a candidate that fails must not be timed as the stock code that replaces it.
        with (
            choosing.recording(None),
            choosing.force_here(self.lowering, name),
            report.muted(),
            compat.strict(),
            compat_ir.without_descent(),  # the many programs of a search; what is emitted is tuned
        ):
            yield

    @functools.cached_property
    def _symbolic(self) -> region.Symbolic | None:
        return region.symbolic(self._node)

    def _program(
        self, values: Mapping[Any, int], name: str
    ) -> Callable[[], Callable[..., Any]] | None:
        """What loads the candidate's program for all sizes of the band; None: there is none."""
        if self._symbolic is None or not values:
            return None
        bands = {symbol: _band(value) for symbol, value in values.items()}
        key = (tuple(bands.values()), name)
        if key not in self._programs:
            assumed = {
                symbol: compat.Assumed(math.isqrt(lo * hi), lo, hi)
                for symbol, (lo, hi) in bands.items()
            }
            try:
                with self._only(name):
                    load = self._symbolic.generate(assumed)
                self._programs[key] = functools.cache(load)
                self.compiled += 1
            except Exception as error:  # compiled for each size, a failing candidate fails again
                log.info("%s of %s is compiled for each size: %s", name, self.site, error)
                self._programs[key] = None
        return self._programs[key]

    def _build(self, values: Mapping[Any, int], name: str) -> Callable[..., Any]:
        """The candidate as a function of the region's tensors at these values."""
        program = self._program(values, name)
        if program is not None and self._symbolic is not None:
            with self._only(name), self._at(values):
                return self._symbolic.bind(program())
        key = (tuple(values.values()), name)
        if key not in self._calls:
            with self._only(name):
                self._calls[key] = self._region(values).compile()
            self.compiled += 1
        return self._calls[key]

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


def _band(size: int) -> tuple[int, int]:
    """The sizes for which a candidate is one program: a kernel that holds all rows in a tile (of
    16, 32 or 64) may be another than one that doesn't, and factors of 4 settle the rest."""
    lo, hi = 1, 4
    while hi < size:
        lo, hi = hi + 1, hi * (2 if hi in (16, 32) else 4)
    return lo, hi
