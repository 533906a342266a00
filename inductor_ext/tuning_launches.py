"""The launches of our operations, tuned: which tiling is fastest at which sizes.

The program runs compiled at several values of a dimension, with its own arguments repeated or cut
to size. Every operation it calls is taken down with copies of its arguments, and run again with
each candidate of each of its launches: what is timed is the operation, by graph replay with cold
L2, and a candidate whose result is not that of the rule's tiling has no say.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from . import choosing, compat_ahead, compat_launch, measure, planned_launches, ranges
from .measured_site import Timer
from .plan import Bounds, Box, Key
from .templates.tilings import HEURISTIC, Tunable

log = logging.getLogger("inductor_ext")

_COARSE = 5  # sizes at which all candidates are timed
_MOST = 12  # sizes at which those are timed that won somewhere
_KEPT = 3  # of them
_ROUNDS = 7
_PIECE = 1 << 26  # elements compared at a time
_MARGIN = choosing.Measure().threshold - 1
_SLACK = {torch.float32: 1e-5, torch.float64: 1e-12}  # relative norm; narrower: an ulp of the peak


class _Met(NamedTuple):
    """A launch inside an operation, and its problem."""

    launch: Tunable
    facts: tuple[Any, ...]
    given: dict[str, Any]


class Site(NamedTuple):
    """A launch of a program: which operation's, and the problem but for its sizes."""

    operation: int
    nth: int
    lowering: str
    op: str
    dtype: str
    kind: str


@dataclasses.dataclass(frozen=True)
class _Call:
    """An operation at some sizes, with arguments of its own."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]

    def leaves(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten(self.args)

    @property
    def bytes(self) -> int:
        tensors = [t for t in self.leaves()[0] if isinstance(t, torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def with_tiling(self, launch: Tunable, tiling: Any) -> Callable[..., Any]:
        """The operation as a function of its leaves, one of its launches with this tiling."""
        _, spec = self.leaves()

        def call(*leaves: Any) -> Any:
            args = pytree.tree_unflatten(leaves, spec)
            forced = planned_launches.watched(_Forced(launch, tiling))
            with torch.no_grad(), compat_launch.direct_launches(), forced:
                return self.run(*args)

        return call


class _Forced:
    """Gives one launch a tiling."""

    whole = True

    def __init__(self, launch: Tunable, tiling: Any) -> None:
        self._launch, self._tiling = launch, tiling

    def operation(self, name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return run(*args)

    def met(self, launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> Any | None:
        return self._tiling if launch is self._launch else launch.ruled(facts, given)


class _Recorder:
    """Takes down the operations of one run that launch what can be tuned."""

    whole = True

    def __init__(self, keep: bool) -> None:
        self._keep, self._count = keep, 0
        self._inside: list[_Met] | None = None
        self.found: dict[Site, tuple[_Call, _Met, dict[str, int]]] = {}

    def operation(self, name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._inside is not None:
            return run(*args)
        self._inside = []
        try:
            out = run(*args)
        finally:
            met, self._inside = self._inside, None
        self._count += 1
        problems = [(m, *m.launch.problem(m.facts, m.given)) for m in met]
        if any(type(n) is int for *_, sizes in problems for n in sizes.values()):
            call = _Call(name, run, _copied(args) if self._keep else ())
            for m, dtype, kind, sizes in problems:
                nth = 0
                names = m.launch.lowering, m.launch.op, dtype, kind
                while (site := Site(self._count, nth, *names)) in self.found:
                    nth += 1
                self.found[site] = call, m, sizes
        return out

    def met(self, launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> None:
        if self._inside is not None:
            self._inside.append(_Met(launch, facts, given))


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(args)
    with torch.no_grad():
        own = measure.cloned(tuple(leaves))
    return pytree.tree_unflatten(own, spec)


def _same(candidate: Any, expected: Any) -> str:
    """Why a result is not the expected one; empty where it is."""
    pairs = zip(pytree.tree_leaves(candidate), pytree.tree_leaves(expected), strict=True)
    for got, wanted in pairs:
        if not isinstance(got, torch.Tensor) or not got.numel():
            continue
        if not got.is_floating_point():
            if not torch.equal(got, wanted):
                return "whole numbers differ"
            continue
        errors, scales = [], []
        norm = got.dtype in _SLACK
        for a, b in zip(*(t.reshape(-1).split(_PIECE) for t in (got, wanted)), strict=True):
            if not torch.equal(_kinds(a), _kinds(b)):
                return "NaN or inf at other places"
            finite = b.isfinite()
            off, b = ((a.double() - b.double())[finite], b.double()[finite])
            if off.numel():
                errors.append(off.norm() if norm else off.abs().max())
                scales.append(b.norm() if norm else b.abs().max())
        if not errors:
            continue
        total = torch.linalg.vector_norm if norm else torch.max
        error, scale = (float(total(torch.stack(parts))) for parts in (errors, scales))
        allowed = scale * (_SLACK[got.dtype] if norm else torch.finfo(got.dtype).eps)
        if error > allowed:
            return f"off by {error:.3g} where {allowed:.3g} is allowed"
    return ""


def _kinds(x: torch.Tensor) -> torch.Tensor:
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


def recorded(run: Callable[[], None]) -> bool:
    """Whether ``run`` launches anything that can be tuned."""
    recorder = _Recorder(keep=False)
    with planned_launches.watched(recorder):
        run()
    return bool(recorder.found)


def _never_behind(found: Sequence[ranges.MeasuredRange]) -> list[ranges.MeasuredRange]:
    """The ranges, with the rule's tiling around sizes where a choice was measured behind it."""
    starts: list[int] = []
    choices: list[str] = []
    times: list[dict[int, Mapping[str, float]]] = []
    for r in found:
        start = r.lo
        for size in sorted(r.times):
            us = r.times[size]
            behind = us[HEURISTIC] < us.get(r.choice, math.inf)
            choice = HEURISTIC if behind else r.choice
            if choice != HEURISTIC and size > r.lo and choices[-1] == HEURISTIC:
                start = max(start, size)  # what lies between is not known to be better
            if not choices or choices[-1] != choice:
                starts, choices, times = [*starts, start], [*choices, choice], [*times, {}]
            times[-1][size] = us
            start = size + 1
    ends = [*(start - 1 for start in starts[1:]), found[-1].hi]
    return [ranges.MeasuredRange(*r) for r in zip(starts, ends, choices, times, strict=True)]


Run = Callable[[int], None]  # the program at a value of the dimension
Count = Callable[[str, int, Sequence[str], Mapping[str, float]], None]


class Launches:
    """The launches of a program along one dimension, from ``lo`` to ``hi``."""

    def __init__(
        self, run: Run, lo: int, hi: int, timer: Timer | None, count: Count, max_memory: int
    ) -> None:
        self._run, self._lo, self._hi = run, lo, hi
        self._timer, self._count, self._max_memory = timer, count, max_memory
        self._last: tuple[int, dict[Site, Any]] | None = None
        self._sizes: dict[int, dict[Site, dict[str, int]]] = {}
        self._failed: set[tuple[Site, str]] = set()
        self.memory = 0

    def _at(self, size: int) -> dict[Site, tuple[_Call, _Met, dict[str, int]]]:
        if self._last is None or self._last[0] != size:
            self._last = None  # its memory first
            found = self._recorded(size, keep=True)
            self._last = size, found
        return self._last[1]

    def _recorded(self, size: int, keep: bool) -> dict[Site, Any]:
        recorder = _Recorder(keep)
        with planned_launches.watched(recorder):
            self._run(size)
        self._sizes[size] = {site: sizes for site, (_, _, sizes) in recorder.found.items()}
        return recorder.found

    def _sizes_of(self, site: Site, size: int) -> dict[str, int] | None:
        if size not in self._sizes:
            self._recorded(size, keep=False)
        return self._sizes[size].get(site)

    def _times(self, site: Site, size: int, among: Sequence[str] | None = None) -> dict[str, float]:
        """us of the operation by candidate of its launch; the rule's is ``HEURISTIC``."""
        found = self._at(size).get(site)
        if found is None:
            return {}
        call, met, sizes = found
        every = met.launch.candidates(met.facts, met.given)
        ruled, *others = every
        names = [n for n in others if among is None or n in among]
        names = [n for n in names if (site, n) not in self._failed]
        key = Key.of(site.lowering, site.op, site.dtype, site.kind, {})
        if self._timer is not None:
            times = dict(self._timer(key, sizes, [HEURISTIC, *names]))
        else:
            tilings = {HEURISTIC: every[ruled]} | {n: every[n] for n in names}
            times, failed = self._measured(call, met, tilings)
            self._failed.update((site, name) for name in failed)
        if HEURISTIC in times:
            times[ruled] = times[HEURISTIC]
        self._count(f"{site.lowering} {site.op}", size, [HEURISTIC, *names], times)
        return times

    def _measured(
        self, call: _Call, met: _Met, tilings: Mapping[str, Any]
    ) -> tuple[dict[str, float], list[str]]:
        """us by candidate, and the candidates that can't be launched or are wrong."""
        need = 4 * call.bytes  # of several sets of arguments, and of results
        if need > self._max_memory:
            raise MemoryError(
                f"measuring {call.name} needs {need / 2**30:.2f} GiB, and max_memory is "
                f"{self._max_memory / 2**30:.2f} GiB; lower the upper end, or raise max_memory"
            )
        self.memory = max(self.memory, need)
        leaves, _ = call.leaves()
        calls = {n: call.with_tiling(met.launch, tiling) for n, tiling in tilings.items()}
        compat_ahead.compile_ahead(functools.partial(run, *leaves) for run in calls.values())
        expected = calls[HEURISTIC](*leaves)
        right = {}
        for name, run in calls.items():
            try:
                why = "" if name == HEURISTIC else _same(run(*leaves), expected)
            except Exception as error:
                why = measure.one_line(error)
            if why:
                log.info("tune: %s with %s is left out: %s", call.name, name, why)
            else:
                right[name] = run
        del expected
        results = measure.compare(right, leaves, repeats=_ROUNDS)
        times = {n: t.us for n, t in results.items() if isinstance(t, measure.Timing)}
        return times, [name for name in tilings if name not in right]

    def boxes(self, max_ranges: int) -> dict[Key, tuple[Box, ...]]:
        """What was found, by problem."""
        coarse = ranges.few(self._lo, self._hi, _COARSE)
        swept: dict[Site, dict[int, dict[str, float]]] = {}
        known: set[tuple[Any, ...]] = set()
        for size in coarse:
            for site in list(self._at(size)):
                problem = (*site[2:], tuple(sorted(self._sizes[size][site].items())))
                if site not in swept and problem in known:
                    continue  # another layer's, which is alike
                known.add(problem)
                if times := self._times(site, size):
                    swept.setdefault(site, {})[size] = times
        found: dict[Key, tuple[Box, ...]] = {}
        for site, by_size in swept.items():
            if made := self._boxes_of(site, by_size, max_ranges):
                found.setdefault(*made)
        return found

    def _boxes_of(
        self, site: Site, swept: dict[int, dict[str, float]], max_ranges: int
    ) -> tuple[Key, tuple[Box, ...]] | None:
        sizes = sorted(size for size, times in swept.items() if HEURISTIC in times)
        if not sizes:
            return None
        gains: dict[str, float] = {}
        for size in sizes:
            for name, us in swept[size].items():
                gains[name] = max(gains.get(name, 0.0), swept[size][HEURISTIC] / us - 1)
        won = [name for name in sorted(gains, key=lambda n: -gains[n]) if gains[name] > _MARGIN]
        lo, hi = sizes[0], sizes[-1]
        if not won or lo == hi:
            found = [ranges.MeasuredRange(lo, hi, HEURISTIC, {s: swept[s] for s in sizes})]
            return self._placed(site, found)
        among = (HEURISTIC, *won[:_KEPT])

        def score(size: int) -> dict[str, float]:
            # Asked again, the same: medians are of many rounds already.
            if size not in swept:
                swept[size] = self._times(site, size, among) or {HEURISTIC: 1.0}
            return {name: us for name, us in swept[size].items() if name in among}

        found = ranges.find_measured_ranges(
            score, lo, hi, max_ranges=max_ranges, max_sizes=_MOST, default=HEURISTIC,
            margin=_MARGIN,
        )  # fmt: skip
        return self._placed(site, _never_behind(found))

    def _placed(
        self, site: Site, found: Sequence[ranges.MeasuredRange]
    ) -> tuple[Key, tuple[Box, ...]] | None:
        """Ranges of the dimension as boxes of the sizes that follow it."""
        wanted = {size for r in found for size in (*r.times, r.lo, r.hi) if size is not None}
        points = {size: self._sizes_of(site, size) for size in sorted(wanted)}
        there = [sizes for sizes in points.values() if sizes is not None]
        varying = sorted(n for n in there[0] if len({sizes[n] for sizes in there}) > 1)
        if not varying:
            return None
        fixed = {n: size for n, size in there[0].items() if n not in varying}
        out: list[Box] = []
        told = {HEURISTIC, *(r.choice for r in found)}
        for r in found:
            assert r.hi is not None
            low, high = points[r.lo], points[r.hi]
            if low is None or high is None:
                continue
            # Up to where the next range begins: sizes like 2*s have steps wider than 1.
            beyond = self._sizes_of(site, r.hi + 1) if r.hi < self._hi else None
            bounds: list[tuple[str, Bounds]] = []
            for name in varying:
                end = high[name] if beyond is None else max(beyond[name] - 1, low[name])
                bounds.append((name, (low[name], max(end, low[name]))))
            at = {
                ",".join(str(sizes[n]) for n in varying): {
                    n: us for n, us in times.items() if n in told
                }
                for size, times in r.times.items()
                if (sizes := points[size]) is not None
            }
            box = Box(tuple(bounds), r.choice, at)
            if not any(box.overlaps(other) for other in out):
                out.append(box)
        return Key.of(site.lowering, site.op, site.dtype, site.kind, fixed), tuple(out)
