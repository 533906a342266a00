"""Plans and the launches of our operations: which tiling a plan names for one, and what to say.

A graph pass decides that an operation is used; which tiling it launches is looked up when it is
launched, or traced, by the sizes there (``templates.tilings``). Nothing is measured then and no
rank is asked: the plans in force were compared when they were loaded, or with the first compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext import active_plan
from inductor_ext.plan import Key
from inductor_ext.report import CandidateTime, Decision
from inductor_ext.templates import tilings
from inductor_ext.templates.tilings import HEURISTIC, Tunable

log = logging.getLogger("inductor_ext")


def key_of(launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> Key | None:
    """A problem as plans know it, all of its sizes static; None where a size is symbolic."""
    dtype, kind, sizes = launch.problem(facts, given)
    if not all(type(size) is int for size in sizes.values()):
        return None
    return Key.of(launch.lowering, launch.op, dtype, kind, sizes)


@functools.cache
def launches() -> dict[tuple[str, str], Tunable]:
    """Every launch that plans can speak of, by lowering and name."""
    from inductor_ext import templates

    for module in pkgutil.iter_modules(templates.__path__):
        importlib.import_module(f"{templates.__name__}.{module.name}")
    return tilings.LAUNCHES


def fault(lowering: str, op: str, choice: str) -> str:
    """What is amiss with a choice for a launch, one clause; empty where there is no such launch."""
    from inductor_ext import registry

    if "::" in lowering or registry.candidate_pattern(lowering) is not None:
        return ""
    launch = launches().get((lowering, op))
    if launch is None or choice == HEURISTIC:
        return ""
    why = launch.fault(choice)
    return f"{lowering} {op} has no candidate {choice!r}, {why}" if why else ""


def _ruled(launch: Tunable, facts: Any, given: Any) -> Decision:
    """The rule's tiling as a decision."""
    name = tilings.name_of(launch.ruled(facts, given))
    key = key_of(launch, facts, given)
    site = f"launch {launch.op}: a size is symbolic" if key is None else f"launch {_site(key)}"
    return Decision(launch.lowering, True, name, "the launch's rule", site, HEURISTIC)


def _site(key: Key) -> str:
    return str(key).partition(" ")[2]


def decision(launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> Decision:
    """What is launched for a problem, and why."""
    ruled = _ruled(launch, facts, given)
    key = key_of(launch, facts, given)
    if key is None:
        return ruled
    answer = active_plan.look_up(key)
    if answer is None:
        return ruled

    def by_rule(reason: str) -> Decision:
        return Decision(
            ruled.lowering, True, ruled.chosen, f"{reason}; {ruled.reason}", ruled.sites, HEURISTIC
        )

    if answer.box is None:
        return by_rule(f"not in the plan: {answer.reason}")
    chosen = launch.whole(answer.box.choice)
    if chosen not in (HEURISTIC, *launch.candidates(facts, given)):
        return by_rule(f"not in the plan: {answer.plan} names {chosen}, which is no candidate here")
    point, us = answer.box.nearest_times(dict(key.sizes))
    times = tuple(CandidateTime(n, t, f"measured for the plan at {point}") for n, t in us.items())
    reason = f"{answer.box} in {answer.plan}"
    if chosen == HEURISTIC:
        chosen, reason = ruled.chosen, f"{reason}: {ruled.reason}"
    return Decision(ruled.lowering, True, chosen, reason, ruled.sites, "plan", times)


def _tiling(launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> Any | None:
    """The provider that ``tilings`` asks once for each problem."""
    if not active_plan.speak_of(launch.lowering, launch.op):
        return None
    if log.isEnabledFor(logging.INFO):
        found = decision(launch, facts, given)
        log.info("%s %s: %s (%s)", found.lowering, found.sites, found.chosen, found.reason)
    key = key_of(launch, facts, given)
    answer = None if key is None else active_plan.look_up(key)
    if answer is None or answer.box is None or answer.box.choice == HEURISTIC:
        return None
    return launch.candidates(facts, given).get(launch.whole(answer.box.choice))


class _Watching:
    """Who is shown launches: ``tune``, which has a say, those of its own thread and of autograd's,
    and each ``explain`` those of its own thread."""

    def __init__(self) -> None:
        self.tuning: tuple[int, tilings.Watcher] | None = None  # its thread
        self.explaining: dict[int, dict[Any, Decision]] = {}  # by thread

    def _tuner(self) -> tilings.Watcher | None:
        if self.tuning is None:
            return None
        thread, watcher = self.tuning
        # Threads that Python knows and did not start are the autograd engine's.
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return watcher if foreign or thread == threading.get_ident() else None

    @property
    def whole(self) -> bool:
        tuner = self._tuner()
        return tuner is not None and tuner.whole

    def operation(self, name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        tuner = self._tuner()
        return run(*args) if tuner is None else tuner.operation(name, run, args)

    def met(self, launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> Any | None:
        decisions = self.explaining.get(threading.get_ident())
        if decisions is not None:
            found = decision(launch, facts, given)
            decisions.setdefault((found.lowering, found.sites), found)
        tuner = self._tuner()
        return None if tuner is None else tuner.met(launch, facts, given)

    def come_or_gone(self) -> None:
        """Launches are shown while there is anyone to see them."""
        tilings.watcher = self if self.tuning is not None or self.explaining else None


_watching = _Watching()
_lock = threading.Lock()


@contextlib.contextmanager
def watched(watcher: tilings.Watcher) -> Iterator[None]:
    """One watcher at a time sees what its thread launches, backward too, and may choose."""
    with _lock:
        if _watching.tuning is not None:
            raise RuntimeError("inductor_ext: expected one tune at a time, and another is running")
        _watching.tuning = threading.get_ident(), watcher
        _watching.come_or_gone()
    try:
        yield
    finally:
        with _lock:
            _watching.tuning = None
            _watching.come_or_gone()


@contextlib.contextmanager
def explained() -> Iterator[dict[Any, Decision]]:
    """Collects a decision for every problem that this thread launches, or traces, while open."""
    thread, decisions = threading.get_ident(), dict[Any, Decision]()
    with _lock:
        before = _watching.explaining.get(thread)
        _watching.explaining[thread] = decisions
        _watching.come_or_gone()
    try:
        yield decisions
    finally:
        with _lock:
            del _watching.explaining[thread]
            if before is not None:  # explained within explained
                _watching.explaining[thread] = before
            _watching.come_or_gone()


def install() -> None:
    """Let the plans in force have a say in what is launched."""
    tilings.plans = _tiling
    active_plan.on_change(tilings.forget)
