"""From candidates to a choice at one site.

Order: a candidate forced by name (tests, measuring), then a loaded plan, then the measurement in
max-autotune modes (never with a plan of the user's), then the lowering's stated heuristic. The
stock lowering is always a candidate, called ``stock``; choosing it means the lowering returns None
and Inductor goes on as if the plugin were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import active_plan, compat, plan, plan_cache, report

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


@dataclasses.dataclass(frozen=True)
class Problem:
    """A site as plans know it: the static key, and the sizes that ranges are about by name.

    ``dims`` are ints or size expressions of the graph. ``named(name)`` makes a candidate that is
    not among those worth measuring, None where the name means nothing for this problem. For tuning:
    ``short_list()`` names the candidates worth measuring at the sizes assumed around the call
    (None: those given to ``choose``), ``plausible()`` says whether any might beat stock there.
    """

    key: plan.Key
    dims: Mapping[str, Any]
    named: Callable[[str], Candidate | None] = lambda name: None
    short_list: Callable[[], list[str]] | None = None
    plausible: Callable[[], bool] = lambda: True

    def sizes(self) -> dict[str, int]:
        """The ranged sizes as ints: static, assumed in this branch, or seen at tracing."""
        return {name: compat.hint(size) for name, size in self.dims.items()}


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
def force_here(lowering: str, name: str) -> Iterator[None]:
    """Force by exact name in this thread only: nested compiles of a measurement, branches."""
    before = getattr(_forced_here, "choices", {})
    _forced_here.choices = {**before, lowering: re.escape(name)}
    try:
        yield
    finally:
        _forced_here.choices = before


def _exact(lowering: str) -> str | None:
    return getattr(_forced_here, "choices", {}).get(lowering)


def forced_salt() -> str:
    """Forced choices change generated code, so they belong to the cache key."""
    return repr(sorted(_forced.items()))


def layout(stride: Sequence[Any]) -> str:
    """The layout class in a key: "row" where the last dimension is dense, "column" where the one
    before is, else "other"."""
    dense = [compat.is_static(s) and int(s) == 1 for s in stride[-2:]]
    return "row" if not dense or dense[-1] else "column" if dense[0] else "other"


Recorder = Callable[[str, str, Problem, Sequence[str], Measure], None]


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """In this thread sites are handed to ``recorder(lowering, site, problem, candidates, how)`` and
    left to stock, also those that the lowering's rule would not look at. None: no longer."""
    before = getattr(_forced_here, "recorder", None)
    _forced_here.recorder = recorder
    try:
        yield
    finally:
        _forced_here.recorder = before


def is_recording() -> bool:
    """Whether sites are handed to a recorder in this thread."""
    return getattr(_forced_here, "recorder", None) is not None


def forced_choice(lowering: str) -> str | None:
    """The pattern a lowering's choice is forced to, if any."""
    if getattr(_forced_here, "recorder", None) is not None:
        return STOCK
    return _exact(lowering) or _forced.get(lowering)


def leave(lowering: str, site: str, reason: str) -> None:
    """Report that a site is left to stock; returns None, what a declining lowering returns."""
    report.record(report.Decision(lowering, False, STOCK, reason, site, ranges=_ranges()))


RANGES = "inductor_ext_ranges"  # in the meta of an fx node: one choice for all its sizes
DECIDED = "inductor_ext_decided"  # the same: {lowering: Decided}, where no rule made that choice


class Decided(NamedTuple):
    """A choice for all sizes of a dynamic site, made before it is lowered."""

    name: str
    source: str
    reason: str
    times: tuple[report.CandidateTime, ...] = ()


def decided(lowering: str) -> Decided | None:
    """What was decided about the site being lowered; None: nothing, or something is forced."""
    node = compat.current_node()
    if node is None or forced_choice(lowering) is not None:
        return None
    return node.meta.get(DECIDED, {}).get(lowering)


def _ranges() -> tuple[report.SizeRange, ...]:
    node = compat.current_node()
    return () if node is None else node.meta.get(RANGES, ())


def choose(
    lowering: str,
    site: str,
    candidates: Sequence[Candidate],
    heuristic: Callable[[], tuple[str, str]],
    *,
    key: str = "",
    measure: Measure = Measure(),
    problem: Problem | None = None,
) -> Any:
    """Emit the chosen candidate at the site being lowered; None when that is stock.

    ``heuristic()`` returns (candidate name or "stock", reason). ``key`` identifies the problem for
    remembered measurements (everything that decides: shapes, strides, dtypes, what follows).
    ``problem`` is the site as plans know it; without one no plan has a say.
    """
    by_name = {c.name: c for c in candidates}
    recorder: Recorder | None = getattr(_forced_here, "recorder", None)
    if recorder is not None:
        if problem is not None:
            recorder(lowering, site, problem, list(by_name), measure)
        return None
    times: tuple[report.CandidateTime, ...] = ()
    pattern, made_before = forced_choice(lowering), decided(lowering)
    ask = pattern is None and made_before is None
    by_plan = _emittable(_planned(problem), problem, by_name) if ask else None
    if made_before is not None:
        name, source, reason, times = made_before
        if name != STOCK and name not in by_name:
            made = None if problem is None else problem.named(name)
            if made is None:
                raise LookupError(f"{name} was decided on, and it is no candidate here")
            by_name[name] = made
    elif pattern is not None:
        source = "forced"
        if problem is not None and not any(re.fullmatch(pattern, n) for n in [STOCK, *by_name]):
            # A plain name need not be on the short list.
            made = problem.named(re.sub(r"\\(.)", r"\1", pattern))
            by_name.update({made.name: made} if made else {})
        name = next((n for n in [STOCK, *by_name] if re.fullmatch(pattern, n)), STOCK)
        reason = f"forced to {pattern}"
        if name == STOCK and pattern != STOCK and pattern == _exact(lowering):
            # Timed or emitted as a branch, stock would go by the name of what is missing.
            raise LookupError(f"no candidate of {lowering} is called {pattern} here")
        if name == STOCK and not re.fullmatch(pattern, STOCK):
            reason += f", which matches none of {', '.join(by_name)}"
    elif by_plan is not None and by_plan.name:
        source = "plan"
        name, reason, times = by_plan
    elif (
        by_plan is None and (measure.always or compat.wants_measurement()) and compat.on_real_card()
    ):
        source = "measured"
        # Sizes that vary are measured as they were traced, under names that say nothing.
        at = f"{key} {problem.sizes()}" if key and problem is not None else key
        name, reason, times = _measure(lowering, list(by_name), at, measure)
    else:
        source = "heuristic"
        name, reason = heuristic()
        if by_plan is not None:
            reason = f"{by_plan.reason}; {reason}"
        times = tuple(report.CandidateTime(n, note="not timed") for n in [STOCK, *by_name])
    out = None if name == STOCK else by_name[name].emit()
    # After emitting: a candidate that fails is reported once, by the registry.
    report.record(
        report.Decision(lowering, name != STOCK, name, reason, site, source, times, _ranges())
    )
    return out


class Planned(NamedTuple):
    """What the plans say at a site: a candidate, or "" and why none."""

    name: str
    reason: str
    times: tuple[report.CandidateTime, ...] = ()


def planned(problem: Problem | None) -> Planned | None:
    """The plans' choice, whether or not it can be emitted; None: nothing is planned or forced, so
    that rule and measurement decide. For a lowering that would leave the site alone."""
    if problem is None or getattr(_forced_here, "recorder", None) is not None:
        return None
    if forced_choice(problem.key.lowering) is not None or decided(problem.key.lowering) is not None:
        return None
    if not active_plan.may_answer(problem.key, problem.sizes()):
        return None
    return _planned(problem)


def against_plan(problem: Problem | None, reason: str) -> str:
    """A reason that comes before any plan, naming the plan that asks for something else."""
    found = planned(problem)
    if found is None or found.name in ("", STOCK):
        return reason
    return f"{reason}, so {found.name} is not emitted, which {found.reason} names"


def _planned(problem: Problem | None) -> Planned | None:
    dims = {} if problem is None else problem.sizes()
    answer = active_plan.find(None if problem is None else problem.key, dims)
    if answer is None:
        return None
    if answer.box is None or problem is None:
        return Planned("", f"not in the plan: {answer.reason}")
    point, us = answer.box.nearest_times({**dict(problem.key.sizes), **dims})
    note = f"measured for the plan at {point}"
    times = tuple(report.CandidateTime(n, t, note) for n, t in us.items())
    return Planned(answer.box.choice, f"{answer.box} in {answer.plan}", times)


def _emittable(
    found: Planned | None, problem: Problem | None, by_name: dict[str, Candidate]
) -> Planned | None:
    """The plans' choice, added to ``by_name`` if need be; no choice where there is none of it."""
    if found is None or problem is None or found.name in ("", STOCK, *by_name):
        return found
    made = problem.named(found.name)
    if made is None:
        where = found.reason.partition(" in ")[2]
        return Planned(
            "", f"not in the plan: {where} names {found.name}, which is no candidate here"
        )
    by_name[found.name] = made
    return found


_measured: dict[str, tuple[str, str, tuple[report.CandidateTime, ...]]] = {}


def _measure(
    lowering: str, names: list[str], key: str, how: Measure
) -> tuple[str, str, tuple[report.CandidateTime, ...]]:
    """The measurement of this site: remembered, taken, or taken by another rank of the job."""
    problem = f"{lowering} {key} {names} {how.threshold} {how.stock_may_win}"
    here = plan_cache.here(problem) if key else ""
    if here in _measured:
        return _measured[here]

    def compute() -> list[Any]:
        name, reason, times = _measure_here(lowering, names, how)
        return [name, reason, [dataclasses.astuple(t) for t in times]]

    def complete(value: list[Any]) -> bool:
        return any(name == STOCK and us is not None for name, us, *_ in value[2])

    # Which candidates there are may differ from rank to rank; what is emitted must not.
    name, reason, times = (
        plan_cache.recall(problem, compute, topic=f"{lowering} {key}", keep=complete)
        if key
        else compute()
    )
    result = (name, reason, tuple(report.CandidateTime(*t) for t in times))
    if key:
        _measured[here] = result
    return result


def _measure_here(
    lowering: str, names: list[str], how: Measure
) -> tuple[str, str, tuple[report.CandidateTime, ...]]:
    """Time every candidate with the pointwise region that follows, by graph replay, cold L2."""
    from . import region

    found = region.extract(compat.current_node())
    times: list[report.CandidateTime] = []

    def build(name: str) -> Callable[..., Any]:
        # Strict: a candidate that fails must not be timed as the stock code that replaces it.
        with force_here(lowering, name), report.muted(), compat.strict():
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
    return best, reason, tuple(times)
