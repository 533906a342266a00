"""The plans in force: the user's, then the one shipped for the card.

The user's come from ``load_plan`` and from INDUCTOR_EXT_PLAN at import (files separated as in
PATH). With one of them in force compiling measures nothing. The shipped plan only answers for what
it covers. All of them are part of Inductor's cache keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from . import agreement, compat, config, plan_file
from .plan import Bounds, Box, Entry, Key, Plan, PlanError

ENVIRONMENT = "INDUCTOR_EXT_PLAN"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A plan in force; ``forced``: for whatever card and version."""

    plan: Plan
    name: str
    forced: bool

    def unfit(self, card: str | None) -> str:
        """Why the plan does not hold here, one clause; empty when it does. None: no card known."""
        wanted = {"torch": compat.minor_version("torch"), "triton": compat.minor_version("triton")}
        if self.forced:
            return ""
        if card is not None and card != self.plan.card:
            return f"it was measured on {self.plan.card}, and this card is {card}"
        for package, here in wanted.items():
            if (theirs := getattr(self.plan, package)) != here:
                return f"it was measured with {package} {theirs}, and this is {here}"
        return ""


_user: list[Loaded] = []
_lock = threading.Lock()
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever other plans come into force."""
    _listeners.append(listener)


_spoken: dict[tuple[str, str], bool] = {}  # what ``speak_of`` found


def forget() -> None:
    """What plans said is asked anew: of others, or for another card."""
    _spoken.clear()
    for listener in _listeners:
        listener()


config.on_change(forget)  # of what it holds, ``shipped_plan`` says which plans are in force


def load_plan(plan: Plan | str | os.PathLike[str], *, force: bool = False) -> Plan:
    """Put a plan in force for compiles that start later; what is compiled stays.

    ``plan`` is a ``Plan`` or the path of one. Plans add up; where two cover a problem, the one
    loaded last decides. What none covers falls back to the heuristic, and ``explain`` says so. In
    a torch.distributed job every rank must call this, with the same plan.

    Raises PlanError (a ValueError) for a malformed file, and for a plan of another card, torch or
    triton minor version unless ``force``; ``agreement.Disagreement`` on every rank where the ranks
    load different plans or one of them fails.
    """
    error: PlanError | None = None
    try:
        loaded = read(plan, force, compat.card_name())
        outcome = f"plan {loaded.plan.digest[:16]}"
    except PlanError as e:
        error, outcome = e, f"no plan ({e})"
    outcomes = agreement.gather("load_plan", outcome)
    if error is not None:
        raise error
    for rank, theirs in enumerate(outcomes):
        if theirs != outcome:
            raise agreement.Disagreement(
                f"inductor_ext: {outcome} was loaded here, and {theirs} by rank {rank}; every rank "
                "must load the same plan."
            )
    with _lock:
        _user.append(loaded)
    forget()
    return loaded.plan


def read(plan: Plan | str | os.PathLike[str], force: bool, card: str | None) -> Loaded:
    """A plan that would hold on this card (None: not asked); PlanError where it would not."""
    if isinstance(plan, Plan):
        loaded = Loaded(plan, "the plan", force)
    else:
        loaded = Loaded(Plan.load(plan), os.fspath(plan), force)
    if why := loaded.unfit(card):
        raise PlanError(
            f"{loaded.name}: the plan is not for this machine, {why} (force=True loads it anyway)."
        )
    return loaded


def unload_plan() -> None:
    """Forget every plan of the user's; the shipped one, if any, is in force again."""
    with _lock:
        _user.clear()
    forget()


def environment_paths() -> list[str]:
    """The files that INDUCTOR_EXT_PLAN names."""
    return [p for p in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if p]


def load_environment() -> None:
    """Read the files that INDUCTOR_EXT_PLAN names; one warning for each that can't be used.

    The card is not asked for here, which would start CUDA at import: ``find`` does that.
    """
    for path in environment_paths():
        try:
            loaded = read(path, False, None)
        except PlanError as error:
            if config.strict:
                raise
            warnings.warn(f"{ENVIRONMENT} is not used: {error}", stacklevel=3)
            continue
        with _lock:
            _user.append(loaded)
    forget()


def user_plans() -> tuple[Loaded, ...]:
    """What the user loaded, in that order."""
    return tuple(_user)


@functools.cache
def shipped(card: str) -> Loaded | None:
    """The plan that came with the package for a card of this name, if any.

    The file is called after the word of the card's name that tells it: h200.json, "NVIDIA H200".
    """
    folder = importlib.resources.files("inductor_ext") / "plans"
    for word in re.findall(r"[a-z0-9]+", card.lower()):
        path = Path(str(folder / f"{word}.json"))
        if path.is_file():
            return Loaded(plan_file.read(path, tested=True), str(path), False)
    return None


def salt() -> str:
    """The content of every plan in force, for the cache key."""
    parts = [f"{p.plan.digest} {p.forced}" for p in user_plans()]
    return " ".join([*parts, "shipped", _shipped_digest() if config.shipped_plan else "off"])


@functools.cache
def _shipped_digest() -> str:
    digest = hashlib.sha256()
    folder = importlib.resources.files("inductor_ext") / "plans"
    for path in sorted(folder.iterdir(), key=lambda p: p.name):
        if path.name.endswith(".json"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class Answer(NamedTuple):
    """What the plans say about a problem: a box of one of them, or None and why."""

    box: Box | None
    plan: str
    reason: str = ""


_consulted: list[list[Entry]] = []


@contextlib.contextmanager
def consulted() -> Iterator[list[Entry]]:
    """The entries whose ranges answer compiles of this process while open, each once."""
    found: list[Entry] = []
    with _lock:
        _consulted.append(found)
    try:
        yield found
    finally:
        with _lock:
            _consulted[:] = [c for c in _consulted if c is not found]


def _answer(loaded: Loaded, box: Box, name: str) -> Answer:
    with _lock:
        for found in _consulted:
            for entry in loaded.plan.entries:
                if any(b is box for b in entry.boxes) and all(e is not entry for e in found):
                    found.append(entry)
    return Answer(box, name)


def find(key: Key | None, dims: dict[str, int]) -> Answer | None:
    """What the plans say; None where only the shipped one is there and does not cover it.

    Raises ``agreement.Disagreement`` where another rank compiles with other plans.
    """
    _compare(wait=True)
    return look_up(key, dims)


def _compare(wait: bool) -> None:
    user = user_plans()
    names = ", ".join(p.plan.digest[:16] for p in user)
    state = f"plan {names}" if user else "no plan"
    agreement.compare_state("state", state, wait=wait and bool(user))


def speak_of(lowering: str, op: str) -> bool:
    """Whether a plan in force has entries for a launch.

    Raises ``agreement.Disagreement`` where another rank has other plans, as far as it has said so.
    """
    if (lowering, op) not in _spoken:
        _compare(wait=False)
        card = compat.card_name()
        ours = shipped(card) if card is not None and config.shipped_plan else None
        plans = [p for p in (*user_plans(), ours) if p is not None]
        _spoken[lowering, op] = any((lowering, op) in p.plan.problems for p in plans)
    return _spoken[lowering, op]


def look_up(key: Key | None, dims: Mapping[str, int] = MappingProxyType({})) -> Answer | None:
    """As ``find``, without asking other ranks."""
    user = user_plans()
    card = compat.card_name()
    reason = ""
    for loaded in reversed(user):
        if key is None:
            reason = reason or "plans do not describe this kind of site"
        elif why := loaded.unfit(card):
            reason = reason or why
        elif (box := loaded.plan.find(key, dims)) is not None:
            return _answer(loaded, box, loaded.name)
        else:
            reason = reason or loaded.plan.why_not(key, dims)
    ours, box = _shipped_box(key, dims)
    if ours is not None and box is not None:
        return _answer(ours, box, "the shipped plan")
    return Answer(None, user[-1].name, reason) if user else None


def _shipped_box(key: Key | None, dims: Mapping[str, int]) -> tuple[Loaded | None, Box | None]:
    card = compat.card_name()
    if key is None or card is None or not config.shipped_plan:
        return None, None
    ours = shipped(card)
    if ours is None or ours.unfit(card):
        return None, None
    return ours, ours.plan.find(key, dims)


def may_answer(key: Key, dims: dict[str, int]) -> bool:
    """Whether ``find`` has anything to say, without asking other ranks."""
    return bool(user_plans()) or _shipped_box(key, dims)[1] is not None


class Ranges(NamedTuple):
    """What the plans say about a problem over all values of some sizes.

    ``boxes`` are (box, its bounds of these sizes, name of the plan), the first that holds decides.
    ``elsewhere`` says why the plans may not cover the rest; None where no plan of the user's is in
    force, so that nothing need be said.
    """

    boxes: tuple[tuple[Box, tuple[Bounds, ...], str], ...]
    elsewhere: str | None


def ranges_of(key: Key, dims: dict[str, int], names: Sequence[str]) -> Ranges:
    """The plans' boxes over all values of the sizes ``names``; ``dims`` as for ``find``.

    Raises ``agreement.Disagreement`` where another rank compiles with other plans.
    """
    answer = find(key, dims)  # compares the ranks' plans, and says why nothing holds here
    card = compat.card_name()
    ours = shipped(card) if card is not None and config.shipped_plan else None
    plans = [(p, p.name) for p in reversed(user_plans())]
    plans += [] if ours is None else [(ours, "the shipped plan")]
    fixed = {name: size for name, size in dims.items() if name not in names}
    found = []
    for loaded, name in plans:
        if not loaded.unfit(card):
            for box, bounds in loaded.plan.boxes_of(key, fixed, names):
                found.append((box, bounds, _answer(loaded, box, name).plan))
    if not user_plans():
        return Ranges(tuple(found), None)
    reason = "" if answer is None else answer.reason
    return Ranges(tuple(found), reason if reason and not found else "sizes outside its ranges")
