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
    chosen = answer.box.choice
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
    return launch.candidates(facts, given).get(answer.box.choice)


class _Explaining:
    """Takes down what every launch is decided by, each problem once."""

    whole = False

    def __init__(self) -> None:
        self.decisions: dict[tuple[str, str], Decision] = {}

    def operation(self, name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return run(*args)

    def met(self, launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> None:
        found = decision(launch, facts, given)
        self.decisions.setdefault((found.lowering, found.sites), found)


@contextlib.contextmanager
def watched(watcher: tilings.Watcher) -> Iterator[None]:
    """One watcher at a time sees what the process launches."""
    if tilings.watcher is not None:
        raise RuntimeError("inductor_ext: launches are watched already, by tune or explain")
    tilings.watcher = watcher
    try:
        yield
    finally:
        tilings.watcher = None


@contextlib.contextmanager
def explained() -> Iterator[dict[Any, Decision]]:
    """Collects a decision for every problem that is launched, or traced, while open."""
    explaining = _Explaining()
    watching = watched(explaining) if tilings.watcher is None else contextlib.nullcontext()
    with watching:  # another thread's explain sees them otherwise
        yield explaining.decisions


def install() -> None:
    """Let the plans in force have a say in what is launched."""
    tilings.plans = _tiling
    active_plan.on_change(tilings.forget)
