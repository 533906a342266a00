"""Where the edges between candidates lie along one size: found by sweeping and bisecting.

``find_ranges`` is for a rule without noise (a heuristic), ``find_measured_ranges`` for times. Both
walk a geometric sweep, because what matters about a size is its order of magnitude, and then
bisect where the answer changes. Sizes are plain ints; torch is not imported.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

OPEN_END = 1 << 20  # a range without an upper end is looked at up to here


@dataclasses.dataclass(frozen=True)
class Range:
    """Sizes ``lo`` to ``hi``, both inclusive (``hi`` None: unbounded), and what is chosen there."""

    lo: int
    hi: int | None
    choice: str

    def __contains__(self, size: int) -> bool:
        return self.lo <= size and (self.hi is None or size <= self.hi)


@dataclasses.dataclass(frozen=True)
class MeasuredRange(Range):
    """A range with the times it rests on: size -> candidate -> us."""

    times: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)


def _check(lo: int, hi: int | None, max_ranges: int) -> None:
    if lo < 0:
        raise ValueError(f"expected lo >= 0, got {lo}")
    if hi is not None and lo > hi:
        raise ValueError(f"expected lo <= hi, got lo={lo} and hi={hi}")
    if max_ranges < 1:
        raise ValueError(f"expected max_ranges >= 1, got {max_ranges}")


# --- a rule ---------------------------------------------------------------------------------------


def _sweep(lo: int, hi: int) -> list[int]:
    """Sizes to ask a rule at: all up to 16, powers of two and their neighbours, steps of 1/8."""
    found = {lo, hi}
    found.update(range(lo, min(hi, 16) + 1))
    size = max(lo, 16)
    while size < hi:
        found.add(size)
        size += max(size // 8, 1)
    for exponent in range(hi.bit_length() + 1):
        found.update(p for p in range((1 << exponent) - 1, (1 << exponent) + 2) if lo <= p <= hi)
    return sorted(found)


def find_ranges(
    pick: Callable[[int], str], lo: int, hi: int | None, *, max_ranges: int = 8
) -> list[Range]:
    """The ranges over which ``pick`` gives one answer, covering ``lo`` to ``hi`` without gaps.

    ``pick`` maps a size to a candidate's name and must be deterministic; every change between two
    neighbours of the sweep (see ``_sweep``) is bisected to the exact size. An answer that holds
    only strictly inside one step of the sweep (an eighth of the size) goes unseen. With ``hi`` None
    sizes up to 2**20 are asked and the last range is unbounded.

    Where there are more than ``max_ranges``, the range that spans the smallest factor between its
    ends goes first, into the one above it (the one before the last: into the one below).
    Raises ValueError for lo < 0, lo > hi or max_ranges < 1.
    """
    _check(lo, hi, max_ranges)
    known: dict[int, str] = {}

    def at(size: int) -> str:
        if size not in known:
            known[size] = pick(size)
        return known[size]

    top = max(lo, OPEN_END) if hi is None else hi
    points = _sweep(lo, top)
    starts = [lo]
    for left, right in itertools.pairwise(points):
        while at(left) != at(right):  # several changes may lie between two points
            last, first = left, right
            while first - last > 1:
                middle = (last + first) // 2
                if at(middle) == at(left):
                    last = middle
                else:
                    first = middle
            starts.append(first)
            left = first
    ends = [start - 1 for start in starts[1:]] + [top]
    found = [Range(a, b, at(a)) for a, b in zip(starts, ends, strict=True)]
    found = _merge(found, max_ranges)
    if hi is None:
        found[-1] = dataclasses.replace(found[-1], hi=None)
    return found


def _octaves(r: Range) -> float:
    assert r.hi is not None
    return math.log2((r.hi + 1) / max(r.lo, 1))


def _merge(found: list[Range], limit: int) -> list[Range]:
    """Absorb the smallest ranges until ``limit`` are left; neighbours of one choice become one."""
    while len(found) > limit:
        i = min(range(len(found)), key=lambda j: _octaves(found[j]))
        # Upwards: what is cut for more is a little large for less; the other way round it may not
        # fit. But not into the last, which has no end: what is chosen for the largest sizes.
        j = i + 1 if i + 2 < len(found) or i == 0 else i - 1
        left, right = found[min(i, j)], found[max(i, j)]
        found[min(i, j) : max(i, j) + 1] = [Range(left.lo, right.hi, found[j].choice)]
        joined: list[Range] = []
        for r in found:
            if joined and joined[-1].choice == r.choice:
                joined[-1] = dataclasses.replace(joined[-1], hi=r.hi)
            else:
                joined.append(r)
        found = joined
    return found


# --- measurements ---------------------------------------------------------------------------------

_REPEATS = 8  # calls per size, at most: noise beyond this widens the dead zone instead
_PROBES = 3  # calls per size where noise is estimated, and at every size a change rests on
_SIGMAS = 3.0  # a loss counts once it exceeds the margin by this many standard errors
_MEDIAN = 1.25  # standard error of a median over that of a mean
_STEP = 1.125  # a crossover is located to this factor
_BISECTIONS = 5  # new sizes per range at most, besides the interior points
_FAILED = 10**12


class _Search:
    """Measured times by size, with repeats, and the segmentation that follows from them."""

    def __init__(
        self,
        score: Callable[[int], Mapping[str, float]],
        margin: float,
        default: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._score, self._default, self._progress = score, default, progress
        self._margin = math.log1p(margin)
        self._samples: dict[int, list[Mapping[str, float]]] = {}
        self._noise = 0.0  # standard deviation of log(time)

    @property
    def sizes(self) -> list[int]:
        return sorted(self._samples)

    def measure(self, size: int, calls: int) -> bool:
        """See to it that ``size`` has ``calls`` samples; whether anything was measured."""
        samples = self._samples.setdefault(size, [])
        before = len(samples)
        while len(samples) < calls:
            times = {name: us for name, us in self._score(size).items() if us > 0}
            if not times:
                raise ValueError(f"no candidate could be timed at size {size}")
            samples.append(times)
            if self._progress is not None:
                self._progress(size)
        return len(samples) > before

    def times(self, size: int) -> dict[str, float]:
        """Median us of every candidate that ran each time."""
        samples = self._samples[size]
        return {
            name: statistics.median(s[name] for s in samples)
            for name in samples[0]
            if all(name in s for s in samples)
        }

    def estimate_noise(self, sizes: Sequence[int]) -> int:
        """Measure ``sizes`` several times; the calls per size that keep noise below the margin."""
        variances = []
        for size in sizes:
            self.measure(size, _PROBES)
            for name in self.times(size):
                logs = [math.log(s[name]) for s in self._samples[size]]
                variances.append(statistics.variance(logs))
        self._noise = math.sqrt(statistics.fmean(variances)) if variances else 0.0
        for calls in range(1, _REPEATS):
            if self._slack(calls) <= self._margin / 2:
                return calls
        return _REPEATS

    def _slack(self, calls: int) -> float:
        """How far noise alone may move the log of a ratio of two medians."""
        return _SIGMAS * _MEDIAN * self._noise * math.sqrt(2 / calls)

    def segment(self, max_ranges: int) -> list[str]:
        """The choice at every measured size, in order: the best of all ways with few changes.

        First comes what is lost beyond the margin and the noise, then the number of changes, then
        the loss summed over the log scale: so within the margin nothing changes, which is the
        hysteresis, and among equals the best geometric mean wins.
        """
        sizes = self.sizes
        names = sorted({name for size in sizes for name in self._samples[size][0]})
        logs = [math.log(max(size, 1)) for size in sizes]
        # cost and way of ending at (changes, name); a change costs 1 in the second place
        ways: dict[tuple[int, str], tuple[tuple[int, int, float], tuple[str, ...]]] = {}
        for i, size in enumerate(sizes):
            times = self.times(size)
            best = min(times.values(), default=1.0)
            width = (logs[min(i + 1, len(logs) - 1)] - logs[max(i - 1, 0)]) / 2 + 1e-6
            allowed = self._margin + self._slack(len(self._samples[size]))
            before = ways
            ways = {}
            # The cheapest way that has made so many changes, whatever it ends in.
            cheapest: dict[int, tuple[tuple[int, int, float], tuple[str, ...]]] = {}
            for (changes, _), way in before.items():
                if changes not in cheapest or way[0] < cheapest[changes][0]:
                    cheapest[changes] = way
            for name in names:
                loss = math.log(times[name] / best) if name in times else math.inf
                beyond = _FAILED if name not in times else int(max(loss - allowed, 0.0) * 1e6)
                if name not in times:
                    loss = 0.0
                elif name == self._default:
                    loss -= self._margin
                for changes in range(min(i + 1, max_ranges)):
                    arrivals = [before[changes, name]] if (changes, name) in before else []
                    if changes and changes - 1 in cheapest:
                        (excess, count, total), path = cheapest[changes - 1]
                        arrivals.append(((excess, count + 1, total), path))
                    if not before:
                        arrivals = [((0, 0, 0.0), ())]
                    if arrivals:
                        (excess, count, total), path = min(arrivals)
                        cost = (excess + beyond, count, total + loss * width)
                        ways[changes, name] = (cost, (*path, name))
        return list(min(ways.values())[1])


def geometric(lo: int, hi: int) -> list[int]:
    """lo, hi, powers of two and the sizes half-way between them."""
    found = {lo, hi}
    power = 1
    while power <= hi:
        found.update(p for p in (power, power * 3 // 2) if lo <= p <= hi)
        power *= 2
    return sorted(found)


def few(lo: int, hi: int, most: int) -> list[int]:
    """At most so many sizes from lo to hi, both among them, spread evenly on a log scale."""
    return _thinned(geometric(lo, hi), most)


def _thinned(sweep: list[int], most: int) -> list[int]:
    """At most so many of them, at least both ends: powers of two stay longest."""
    inner = sweep[1:-1]
    if len(sweep) > most:
        inner = [size for size in inner if size & (size - 1) == 0]
    while inner and len(inner) + 2 > most:
        inner = inner[1::2]
    return sorted({sweep[0], *inner, sweep[-1]})


def _between(lo: int, hi: int) -> int:
    """The roundest size near the geometric middle of two sizes: tiles end at round sizes."""
    low = max(lo + 1, math.ceil((max(lo, 1) ** 3 * hi) ** 0.25))
    high = min(hi - 1, math.floor((max(lo, 1) * hi**3) ** 0.25))
    return _roundest(low, high) if low <= high else (lo + hi) // 2


def _roundest(low: int, high: int) -> int:
    """The multiple of the largest power of two in low..high."""
    step = 1
    while high // (2 * step) * 2 * step >= low and high // (2 * step) > 0:
        step *= 2
    return high // step * step


def find_measured_ranges(
    score: Callable[[int], Mapping[str, float]],
    lo: int,
    hi: int,
    *,
    max_ranges: int = 8,
    margin: float = 0.03,
    interior: int = 3,
    max_sizes: int | None = None,
    default: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[MeasuredRange]:
    """The ranges of a size and the candidate to use in each, from times that are noisy.

    ``score(size)`` measures and returns us by candidate; one that is missing failed at that size
    and is not chosen where it did. A candidate called ``default`` wins ties within ``margin``.

    Sizes are swept by factors of 1.5 or less. From repeated calls at three of them the noise is
    estimated, which decides how often every size is measured (8 times at most; medians count).
    Then the ranges are those with the fewest changes in which no choice loses by more than
    ``margin`` (and 3 standard errors of noise) at any measured size; among these, those with the
    best geometric mean. Each crossover is bisected until it is known to 1/8, or exactly between
    neighbouring sizes; the sizes a change rests on are measured 3 times at least; each range is
    scored at ``interior`` sizes inside it at least, and the ranges are found again with all of
    that. ``max_ranges`` bounds their number; where it binds, what is lost beyond the margin is
    least. At most (sweep + (5 + interior) * max_ranges) sizes are measured, 8 times each at most;
    ``max_sizes`` lowers that number, and half of it goes into the sweep, which is thinned for it.

    Raises ValueError for bad bounds, max_sizes < 4 and where no candidate ran at a size.
    """
    _check(lo, hi, max_ranges)
    if not 0 <= margin < 1 or interior < 0:
        raise ValueError(f"expected 0 <= margin < 1 and interior >= 0, got {margin} and {interior}")
    if max_sizes is not None and max_sizes < 4:
        raise ValueError(f"expected max_sizes >= 4, got {max_sizes}")
    search = _Search(score, margin, default, progress)
    sweep = geometric(lo, hi)
    if max_sizes is not None:
        sweep = _thinned(sweep, max_sizes // 2)
    probes = {sweep[0], sweep[len(sweep) // 2], sweep[-1]}
    calls = search.estimate_noise(sorted(probes))
    for size in sweep:
        search.measure(size, calls)
    most = len(sweep) + (_BISECTIONS + interior) * max_ranges
    most = most if max_sizes is None else min(most, max_sizes)

    while True:
        choices = search.segment(max_ranges)
        sizes = search.sizes
        changes = [i for i in range(1, len(sizes)) if choices[i] != choices[i - 1]]
        grew = False
        for i in changes:
            for size in sizes[max(i - 2, 0) : i + 2]:
                grew |= search.measure(size, max(calls, _PROBES))
        if grew:
            continue  # a change that noise made is gone now
        new = []
        for i in changes:
            left, right = sizes[i - 1], sizes[i]
            if right - left > 1 and right > left * _STEP:
                new.append(_between(left, right))
        if not new:
            new = [
                size
                for a, b in _spans(sizes, changes)
                for size in _missing_interior(sizes[a], sizes[b - 1], sizes[a:b], interior)
            ]
        new = new[: max(most - len(sizes), 0)]
        if not new:
            break
        for size in new:
            search.measure(size, calls)

    result: list[MeasuredRange] = []
    start = lo
    for a, b in _spans(sizes, changes):
        end = hi if b == len(sizes) else _edge(sizes[b - 1], sizes[b])
        times = {size: search.times(size) for size in sizes[a:b]}
        result.append(MeasuredRange(start, end, choices[a], times))
        start = end + 1
    return result


def _spans(sizes: Sequence[int], changes: Sequence[int]) -> list[tuple[int, int]]:
    """Index ranges [a, b) of the sizes between changes."""
    edges = [0, *changes, len(sizes)]
    return list(itertools.pairwise(edges))


def _edge(left: int, right: int) -> int:
    """Last size of the lower range when the change lies between two measured sizes."""
    return _roundest(left, right - 1)


def _missing_interior(lo: int, hi: int, have: Sequence[int], count: int) -> list[int]:
    """Sizes strictly inside lo..hi that bring those measured there to ``count``, spread evenly."""
    inside = [size for size in have if lo < size < hi]
    lacking = count - len(inside)
    if lacking <= 0 or hi - lo < 2:
        return []
    ratio = hi / max(lo, 1)
    wanted = {
        min(max(round(max(lo, 1) * ratio ** ((j + 1) / (count + 1))), lo + 1), hi - 1)
        for j in range(count)
    }
    return sorted(wanted - set(inside))[:lacking]
