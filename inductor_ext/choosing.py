"""From candidates to a choice at one site.

Order: a candidate forced by name (tests, measuring), then the measurement in max-autotune modes,
then the lowering's stated heuristic. The stock lowering is always a candidate, called ``stock``;
choosing it means the lowering returns None and Inductor goes on as if the plugin were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import compat, report

STOCK = "stock"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a site: ``emit()`` builds its IR."""

    name: str
    emit: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Measure:
    """How a site is measured: outside max-autotune modes too (``always``), what speed-up over stock
    a candidate needs, and functions that make inputs by argument name."""

    always: bool = False
    threshold: float = 1.03  # a tie within the noise goes to stock: a rewrite must earn its place
    stock_may_win: bool = True
    input_gen_fns: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)


_forced: dict[str, str] = {}
_forced_here = threading.local()
_lock = threading.Lock()


@contextlib.contextmanager
def force(choices: Mapping[str, str]) -> Iterator[None]:
    """Make lowerings pick the first candidate whose name matches a regular expression.

    ``choices`` maps lowering names to patterns (``re.fullmatch``); process-wide while open. A site
    with no matching candidate is left to stock and says so in the report.
    """
    with _lock:
        before = dict(_forced)
        _forced.update(choices)
    try:
        yield
    finally:
        with _lock:
            _forced.clear()
            _forced.update(before)


@contextlib.contextmanager
def _force_here(lowering: str, name: str) -> Iterator[None]:
    """Force by exact name in this thread only, for the nested compiles of a measurement."""
    before = getattr(_forced_here, "choices", {})
    _forced_here.choices = {**before, lowering: re.escape(name)}
    try:
        yield
    finally:
        _forced_here.choices = before


def forced_salt() -> str:
    """Forced choices change generated code, so they belong to the cache key."""
    return repr(sorted(_forced.items()))


def forced_choice(lowering: str) -> str | None:
    """The pattern a lowering's choice is forced to, if any."""
    return getattr(_forced_here, "choices", {}).get(lowering) or _forced.get(lowering)


def leave(lowering: str, site: str, reason: str) -> None:
    """Report that a site is left to stock; returns None, what a declining lowering returns."""
    report.record(report.Decision(lowering, False, STOCK, reason, site))


def choose(
    lowering: str,
    site: str,
    candidates: Sequence[Candidate],
    heuristic: Callable[[], tuple[str, str]],
    *,
    key: str = "",
    measure: Measure = Measure(),
) -> Any:
    """Emit the chosen candidate at the site being lowered; None when that is stock.

    ``heuristic()`` returns (candidate name or "stock", reason). ``key`` identifies the problem for
    remembered measurements (everything that decides: shapes, strides, dtypes, what follows).
    """
    by_name = {c.name: c for c in candidates}
    times: tuple[report.CandidateTime, ...] = ()
    pattern = forced_choice(lowering)
    if pattern is not None:
        source = "forced"
        name = next((n for n in [STOCK, *by_name] if re.fullmatch(pattern, n)), STOCK)
        reason = f"forced to {pattern}"
        if name == STOCK and not re.fullmatch(pattern, STOCK):
            reason += f", which matches none of {', '.join(by_name)}"
    elif (measure.always or compat.wants_measurement()) and compat.on_real_card():
        source = "measured"
        name, reason, times = _measure(lowering, list(by_name), key, measure)
    else:
        source = "heuristic"
        name, reason = heuristic()
        times = tuple(report.CandidateTime(n, note="not timed") for n in [STOCK, *by_name])
    out = None if name == STOCK else by_name[name].emit()
    # After emitting: a candidate that fails is reported once, by the registry.
    report.record(report.Decision(lowering, name != STOCK, name, reason, site, source, times))
    return out


_measured: dict[str, tuple[str, str, tuple[report.CandidateTime, ...]]] = {}


def _measure(
    lowering: str, names: list[str], key: str, how: Measure
) -> tuple[str, str, tuple[report.CandidateTime, ...]]:
    """Time every candidate with the pointwise region that follows, by graph replay, cold L2."""
    if key and key in _measured:
        return _measured[key]
    from . import region

    found = region.extract(compat.current_node())
    times: list[report.CandidateTime] = []

    def build(name: str) -> Callable[..., Any]:
        # Strict: a candidate that fails must not be timed as the stock code that replaces it.
        with _force_here(lowering, name), report.muted(), compat.strict():
            return found.compile()

    builders = {name: functools.partial(build, name) for name in [STOCK, *names]}
    results = found.compare(builders, how.input_gen_fns)
    for name, outcome in results.items():
        times.append(report.CandidateTime(name, outcome.us, outcome.note))
    timed = {t.name: t.us for t in times if t.us is not None}
    if STOCK not in timed:
        note = next(t.note for t in times if t.name == STOCK)
        return STOCK, f"stock could not be timed here ({note})", tuple(times)
    others = [n for n in timed if n != STOCK]
    best = min(others, key=lambda n: timed[n], default=STOCK)
    if how.stock_may_win and timed[best] * how.threshold >= timed[STOCK]:
        best = STOCK
    reason = f"fastest of {len(timed)} timed with the {found.nodes} fused operations that follow"
    result = (best, reason, tuple(times))
    if key:
        _measured[key] = result
    return result
