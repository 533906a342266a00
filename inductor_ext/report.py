"""What the plugin decided, where and why.

Every site a lowering looks at ends in one ``Decision``: fired or left alone, the candidate chosen,
the times or the rule behind it. Decisions are logged to ``inductor_ext``
(``TORCH_LOGS="+inductor_ext"`` or the standard logging module) and handed to every collector that
is open, whichever thread compiles: a backward is lowered in the autograd engine's thread. With
TORCH_TRACE every compile in which decisions were taken leaves them in torch's structured trace, as
the artifact ``inductor_ext_decisions`` that tlparse shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

log = logging.getLogger("inductor_ext")


@dataclasses.dataclass(frozen=True)
class CandidateTime:
    """One candidate of a decision; ``us`` is None where it was not timed, ``note`` says why."""

    name: str
    us: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class SizeRange:
    """Where one choice holds: ``lo <= size <= hi`` (``hi`` None: unbounded), ``size`` being an
    expression as text. ``and_also`` are the ranges of further sizes that must hold as well."""

    size: str
    lo: int
    hi: int | None
    chosen: str
    and_also: tuple[tuple[str, int, int | None], ...] = ()

    def span(self) -> str:
        """The sizes: "s0 1..8"."""
        parts = [(self.size, self.lo, self.hi), *self.and_also]
        return ", ".join(_interval(*part) for part in parts)

    def __str__(self) -> str:
        return f"{self.span()}: {self.chosen}"


def _interval(size: str, lo: int, hi: int | None) -> str:
    if lo == hi:
        return f"{size} = {lo}"
    return f"{size} >= {lo}" if hi is None else f"{size} {lo}..{hi}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The outcome at one site of one graph.

    ``lowering`` is the registered name, ``sites`` the operation and its shapes, ``chosen`` the
    candidate emitted ("stock" where the site was left alone), ``source`` one of "heuristic",
    "measured", "plan", "forced" or "" (left alone before any candidate was weighed), ``reason`` one
    sentence, ``ranges`` the size ranges the decision holds for (empty: all sizes of this graph).
    """

    lowering: str
    fired: bool
    chosen: str
    reason: str
    sites: str
    source: str = ""
    candidates: tuple[CandidateTime, ...] = ()
    ranges: tuple[SizeRange, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Time of "stock" over the time of the chosen candidate; None unless both were timed."""
        us = {c.name: c.us for c in self.candidates}
        stock, chosen = us.get("stock"), us.get(self.chosen)
        return stock / chosen if stock and chosen else None


_collectors: list[list[Decision]] = []
_lock = threading.Lock()
_muted = threading.local()


def record(decision: Decision) -> None:
    """Log a decision and hand it to every open collector; lowerings end in ``choosing`` instead."""
    if getattr(_muted, "on", False):
        return
    held = getattr(_muted, "held", None)
    if held is not None:
        held.append(decision)
        return
    log.info(
        "%s %s: %s (%s)",
        decision.lowering,
        decision.sites,
        decision.chosen if decision.fired else "left to stock",
        decision.reason,
    )
    for c in decision.candidates:
        log.debug(
            "  candidate %s: %s %s",
            c.name,
            "not timed" if c.us is None else f"{c.us:.2f} us",
            c.note,
        )
    with _lock:
        for collector in _collectors:
            collector.append(decision)
    _trace(decision)


ARTIFACT = "inductor_ext_decisions"


def _trace(decision: Decision) -> None:
    """Into torch's structured trace, together with the other decisions of this graph."""
    from . import compat_trace

    if not compat_trace.tracing():
        return

    def emit(rows: list[str]) -> None:
        compat_trace.emit_artifact(ARTIFACT, "[\n" + ",\n".join(rows) + "\n]")

    # As text already: what can't be written fails here, where stock takes over.
    compat_trace.keep_until_code(json.dumps(as_row(decision)), emit)


@contextlib.contextmanager
def collect() -> Iterator[list[Decision]]:
    """Collect the decisions of every compile in this process while the context is open."""
    decisions: list[Decision] = []
    with _lock:
        _collectors.append(decisions)
    try:
        yield decisions
    finally:
        with _lock:
            _collectors[:] = [c for c in _collectors if c is not decisions]


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Decisions of this thread are not reported (nested compiles that only serve a measurement)."""
    before = getattr(_muted, "on", False)
    _muted.on = True
    try:
        yield
    finally:
        _muted.on = before


@contextlib.contextmanager
def held() -> Iterator[list[Decision]]:
    """Decisions of this thread are put by, in order: whoever opens it says what is reported."""
    before = getattr(_muted, "held", None)
    decisions: list[Decision] = []
    _muted.held = decisions
    try:
        yield decisions
    finally:
        _muted.held = before


def by_range(found: Sequence[tuple[SizeRange, Decision]]) -> Decision:
    """One site's decisions in several branches, in order, as one. A range's ``chosen`` is that of
    its decision."""
    ranges = tuple(dataclasses.replace(span, chosen=d.chosen) for span, d in found)
    chosen = list(dict.fromkeys(d.chosen for _, d in found))
    reasons = dict.fromkeys(d.reason for _, d in found)
    timed = [
        dataclasses.replace(c, note=f"{span.span()}: {c.note}" if c.note else span.span())
        for span, d in found
        for c in d.candidates
        if c.us is not None
    ]
    first = found[0][1]
    return dataclasses.replace(
        first,
        fired=any(d.fired for _, d in found),
        chosen=chosen[0]
        if len(chosen) == 1
        else f"{len(ranges)} ranges, {len(chosen)} implementations",
        reason="; ".join(reasons),
        source=next((d.source for _, d in found if d.source), ""),
        candidates=tuple(timed) or first.candidates,
        ranges=ranges,
    )


def _times(decision: Decision, shown: int = 5) -> str:
    """The times of a decision for a table cell: the fastest few and stock, then how many more; of
    a decision by ranges the fastest two and stock in each."""
    timed = sorted((c for c in decision.candidates if c.us is not None), key=lambda c: c.us or 0.0)
    if not timed:
        count = len(decision.candidates)
        return f"{count} candidates, not timed" if count else "-"
    if len(decision.ranges) > 1:
        by_range: dict[str, list[str]] = {c.note: [] for c in decision.candidates if c in timed}
        for c in timed:
            if len(by_range[c.note]) < 2 or c.name == "stock":
                by_range[c.note].append(f"{c.us:6.2f} {c.name}")
        return "\n".join(line for note, lines in by_range.items() for line in (note, *lines))
    lines = [f"{c.us:6.2f} {c.name}" for c in timed[:shown]]
    lines += [f"{c.us:6.2f} {c.name}" for c in timed[shown:] if c.name == "stock"]
    slower = len(timed) - len(lines)
    lines += [f"       {slower} slower"] if slower else []
    failed = [c for c in decision.candidates if c.us is None]
    lines += [f"       {c.name}: {c.note}" for c in failed]
    return "\n".join(lines)


def as_row(decision: Decision) -> dict[str, Any]:
    """A decision as ``Report.to_json`` shows it."""
    return {**dataclasses.asdict(decision), "speedup": decision.speedup}


@dataclasses.dataclass(frozen=True)
class Report:
    """The decisions of one compile. ``print(report)`` shows a table, one row per site.

    ``launches`` are those of the operations that ran or were traced: which tiling each problem has,
    by which plan ("plan") or by its rule ("heuristic").
    """

    decisions: tuple[Decision, ...]
    launches: tuple[Decision, ...] = ()

    def to_json(self) -> str:
        """The decisions as a JSON list, one object per site in the order of compiling.

        lowering    name of the lowering, or of a user's operation
        sites       the operation with its shapes and dtype
        fired       true where the plugin's code was emitted
        chosen      the candidate; "stock" where the site was left alone; for a branch over ranges
                    a summary, the candidates being in ``ranges``
        source      "heuristic", "measured", "plan", "forced", or "" (left alone before weighing)
        reason      one sentence
        candidates  list of {name, us, note}: us is a number of microseconds, null where not timed;
                    ``note`` says why not, or at which size of a plan it was measured
        ranges      list of {size, lo, hi, chosen, and_also}: ``chosen`` holds for lo <= size <= hi,
                    ``hi`` null is unbounded; ``and_also`` lists [size, lo, hi] that must hold too
        speedup     us of "stock" over us of ``chosen``, null unless both were timed

        The launches follow, whose ``sites`` begin with "launch" and whose ``chosen`` is a tiling.
        The artifact ``inductor_ext_decisions`` in torch's structured trace has the same schema.
        """
        rows = [as_row(d) for d in (*self.decisions, *self.launches)]
        return json.dumps(rows, indent=2)

    def __str__(self) -> str:
        import io

        from rich.console import Console
        from rich.table import Table

        if not (self.decisions or self.launches):
            return "inductor_ext: no site was looked at (nothing here concerns an enabled lowering)"
        table = Table(title="inductor_ext decisions", title_justify="left")
        every = (*self.decisions, *self.launches)
        any_timed = any(c.us is not None for d in every for c in d.candidates)
        table.add_column("site", width=24, overflow="fold")
        table.add_column("chosen, and why", width=34, overflow="fold")
        table.add_column("times (us)", width=41 if any_timed else 25, overflow="fold")
        table.add_column("speed-up")
        for d in every:
            by = f"by {d.source}: " if d.source else ""
            table.add_row(
                f"{d.lowering}\n{d.sites}",
                "\n".join([d.chosen, *(f"  {r}" for r in d.ranges), f"{by}{d.reason}"]),
                _times(d),
                f"{d.speedup:.2f}x" if d.speedup else "-",
            )
        out = io.StringIO()
        # Sizes such as [s0,64] are text, not markup.
        Console(file=out, width=120, markup=False, emoji=False).print(table)
        return out.getvalue().rstrip()


def explain(fn: Any, *args: Any, **kwargs: Any) -> Report:
    """Compile ``fn`` for these arguments and report every site a lowering looked at.

    ``fn`` is a function, module or compiled function, called once with ``args`` (forward only); a
    fresh compile in the default mode without Inductor's caches, so that every decision is taken
    again. Dynamo's caches are emptied first, so what was compiled before is compiled again at its
    next call. Returns a ``Report``; ``print`` it.
    """
    import torch

    from . import compat, planned_launches

    original = getattr(fn, "_torchdynamo_orig_callable", fn)
    torch._dynamo.reset()
    with compat.without_caches(), collect() as decisions, planned_launches.explained() as launches:
        torch.compile(original)(*args, **kwargs)
    return Report(tuple(decisions), tuple(launches.values()))
