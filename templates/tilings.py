"""Which tiling a launch takes: that of its rule, or the one that a plan names for the problem.

``@tunable`` stands on the rule of a launch and is all that a kernel needs for plans and ``tune`` to
cover it. The rule is called as before; keyword arguments that it doesn't have are sizes that only
plans know of. Tilings are dataclasses or dicts of numbers, flags and words; the name of one is its
text, "block_m=64,block_n=128,warps=4". A problem has as candidates the rule's own tiling and its
neighbours, which differ from it in one field by one step: nothing else is ever launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

HEURISTIC = "heuristic"  # the choice that leaves a launch to its rule

_MOST = 4096  # problems kept of a launch

LAUNCHES: dict[tuple[str, str], Tunable] = {}


class Watcher(Protocol):
    """Who sees every launch of the process, for ``tune`` and ``explain``."""

    @property
    def whole(self) -> bool:
        """Whether traced operations stay whole, so that they run on tensors that exist."""

    def operation(self, name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run an operation, whose launches are met inside."""

    def met(self, launch: Tunable, facts: tuple[Any, ...], given: dict[str, Any]) -> Any | None:
        """The tiling to take, None: what is taken without a watcher."""


# The tiling that a plan in force names for a problem; None: the rule decides.
plans: Callable[[Tunable, tuple[Any, ...], dict[str, Any]], Any | None] | None = None
watcher: Watcher | None = None
epoch = 0  # how often everything was forgotten, for those who keep what follows from decisions


def forget() -> None:
    """Decide everything anew: other plans are in force."""
    global epoch
    epoch += 1
    for launch in LAUNCHES.values():
        launch.forget()


class Tunable:
    """A rule whose answers plans can overrule; called as the rule is."""

    def __init__(
        self, rule: Callable[..., Any], lowering: str, op: str, sizes: str, fields: dict[str, str]
    ) -> None:
        self.rule, self.lowering, self.op, self.fields = rule, lowering, op, fields
        self.signature = self.__signature__ = inspect.signature(rule)
        self.sizes = tuple(sizes.split())
        self._more = tuple(n for n in self.sizes if n not in self.signature.parameters)
        self._kept: dict[Any, Any] = {}  # by problem: looking up is faster than most rules
        self.__doc__, self.__name__ = rule.__doc__, rule.__name__

    def __call__(self, *facts: Any, **given: Any) -> Any:
        if watcher is not None and (chosen := watcher.met(self, facts, given)) is not None:
            return chosen
        problem, kept = (*facts, *given.values()), self._kept
        try:
            return kept[problem]
        except KeyError:
            pass
        except TypeError:  # a symbolic size, of which nobody knows the value
            return self.ruled(facts, given)
        if len(kept) >= _MOST:
            kept.clear()
        planned = None if plans is None else plans(self, facts, given)
        chosen = self.ruled(facts, given) if planned is None else planned
        kept[problem] = chosen  # of the plans that were asked: forget() puts another in its place
        return chosen

    def forget(self) -> None:
        """Decide anew: other plans are in force."""
        self._kept = {}

    def ruled(self, facts: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        """What the rule says."""
        return self.rule(*facts, **{n: v for n, v in given.items() if n not in self._more})

    def candidates(self, facts: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any]:
        """Tilings of a problem by name, the rule's first. What a tiling's class refuses is none."""
        ruled = self.ruled(facts, given)
        found = {name_of(ruled): ruled}
        for field, how in self.fields.items():
            for value in _STEPS[how](_items(ruled)[field]):
                with contextlib.suppress(ValueError):
                    one = _replaced(ruled, field, value)
                    found[name_of(one)] = one
        return found

    def problem(
        self, facts: tuple[Any, ...], given: Mapping[str, Any]
    ) -> tuple[str, str, dict[str, int]]:
        """(dtype, kind, sizes by name) of a problem, as plans name them."""
        own = {n: v for n, v in given.items() if n not in self._more}
        bound = self.signature.bind(*facts, **own)
        bound.apply_defaults()
        dtypes, words, sizes = [], [], {}
        for name, fact in bound.arguments.items():
            if isinstance(fact, torch.dtype):
                dtypes.append(str(fact).removeprefix("torch."))
            elif isinstance(fact, bool):
                words += [name] if fact else []
            elif isinstance(fact, (int, torch.SymInt)):
                sizes[name] = fact
            elif not isinstance(fact, torch.device):  # a plan is one card's
                words.append(_word(fact))
        for name in self._more:
            if isinstance(given.get(name), str):
                words.append(given[name])
            elif name in given:
                sizes[name] = given[name]
        return ",".join(dtypes) or "any", ",".join(words) or "any", sizes

    def fault(self, name: str) -> str:
        """Why no tiling can have such a name, as far as that can be told without a problem."""
        parts = [part.partition("=") for part in name.split(",")]
        changed = [field for field, _, _ in parts]
        if len(set(changed)) < len(parts) or not all(eq and value for _, eq, value in parts):
            return "it is no tiling, which is written field=value,field=value"
        for field in self.named:
            if field not in changed and field not in self._defaults:
                return f"it names no {field}"
        for field in changed:
            if self._made is not None and field not in self.named:
                return f"no tiling has {field!r}"
        return ""

    def whole(self, name: str) -> str:
        """A name with what it leaves out: fields that came after a plan have their defaults."""
        if self._made is None or self.fault(name):
            return name
        told = dict(part.split("=", 1) for part in name.split(","))
        return ",".join(f"{f}={told.get(f) or self._defaults[f]}" for f in self.named)

    @functools.cached_property
    def _defaults(self) -> dict[str, Any]:
        """Of a dataclass of tilings, the fields that have a default, as names have them."""
        if self._made is None:
            return {}
        given = {f.name: f.default for f in dataclasses.fields(self._made)}
        return {
            n: int(v) if isinstance(v, bool) else v
            for n, v in given.items()
            if v is not dataclasses.MISSING
        }

    @functools.cached_property
    def _made(self) -> Any:
        """The dataclass of tilings; None where they are dicts."""
        made = typing.get_type_hints(self.rule).get("return")
        return made if dataclasses.is_dataclass(made) else None

    @property
    def named(self) -> tuple[str, ...]:
        """What the name of a tiling names; of dicts, those fields that can vary."""
        if self._made is None:
            return tuple(self.fields)
        return tuple(f.name for f in dataclasses.fields(self._made))


_STEPS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "scaled": lambda n: (n // 2, 2 * n) if n > 1 else (2,) if n else (),
    "warps": lambda n: tuple(m for m in (n // 2, 2 * n) if 1 <= m <= 16),
    "stages": lambda n: (n - 1, n + 1) if n > 1 else (),
    "counted": lambda n: (n - 1, n + 1) if n else (1,),
    "flipped": lambda flag: (not flag,),
}


def tunable(
    lowering: str, op: str, sizes: str = "", *, scaled: str = "", warps: str = "warps",
    stages: str = "", counted: str = "", flipped: str = "",
) -> Callable[..., Tunable]:  # fmt: skip
    """Let plans overrule a rule.

    ``op`` names the launch among those of its lowering, ``sizes`` what tells problems apart besides
    the rule's own arguments (numbers, or words). The fields of a tiling by which a neighbour
    differs: ``scaled`` and ``warps`` by a factor of 2, ``stages`` and ``counted`` by 1, ``flipped``
    are flags. Where a rule says one stage it may have to be one: that is never raised.
    """
    kinds = {
        "scaled": scaled, "warps": warps, "stages": stages, "counted": counted, "flipped": flipped
    }  # fmt: skip
    fields = {field: how for how, names in kinds.items() for field in names.split()}

    def wrap(rule: Callable[..., Any]) -> Tunable:
        launch = Tunable(rule, lowering, op, sizes, fields)
        LAUNCHES[lowering, op] = launch
        return launch

    return wrap


def _items(tiling: Any) -> dict[str, Any]:
    if isinstance(tiling, dict):
        return tiling
    return {f.name: getattr(tiling, f.name) for f in dataclasses.fields(tiling)}


def name_of(tiling: Any) -> str:
    """A tiling as text."""
    return ",".join(
        f"{field}={int(value) if isinstance(value, bool) else value}"
        for field, value in _items(tiling).items()
    )


def _replaced(tiling: Any, field: str, value: Any) -> Any:
    if isinstance(tiling, dict):
        return {**tiling, field: value}
    return dataclasses.replace(tiling, **{field: value})


@functools.lru_cache(maxsize=1024)
def _word(fact: Any) -> str:
    """A fact that is no number: programs have a ``kind``, and are told apart by their text."""
    if isinstance(fact, str):
        return fact
    digest = hashlib.sha256(repr(fact).encode()).hexdigest()[:8]
    return f"{getattr(fact, 'kind', type(fact).__name__)}-{digest}"
