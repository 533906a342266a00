"""Which lowerings exist, which are on, and how they reach Inductor.

A capability is a ``Lowering`` value in one module of ``lowerings/``. Registering is additive: the
entry of an operation in Inductor's lowering table is wrapped, never replaced, and graph passes are
appended to Inductor's own pass lists, so no custom-pass slot is taken and every thread sees them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import agreement, compat, compat_pre_grad, config, editing, report


@dataclasses.dataclass(frozen=True)
class Lowering:
    """One capability.

    ``lower`` maps an aten overload to a function called with the lowering's arguments (Inductor
    IR); it returns IR, or None to leave the site to stock. ``passes`` maps a stage of
    ``compat.append_graph_pass`` to a function that edits an ``fx.Graph`` in place. ``sizes`` maps
    an aten overload to a function from its fx node to ``dispatch.Sensitivity`` (which symbolic
    sizes the choice depends on, and how) or None; ``dispatch`` then branches between choices.
    ``candidate_name`` matches every name that a candidate can have besides "stock", so that a plan
    can be checked.
    """

    name: str
    lower: Mapping[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    passes: Mapping[str, Callable[[Any], None]] = dataclasses.field(default_factory=dict)
    sizes: Mapping[Any, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    candidate_name: re.Pattern[str] | None = None
    off: str | None = None


_lowerings: dict[str, Lowering] = {}
_wrapped: dict[Any, Callable[..., Any]] = {}
_by_op: dict[Any, list[Lowering]] = {}
_lock = threading.RLock()
_disabled: dict[str, str] = {
    name.strip(): "INDUCTOR_EXT_DISABLE"
    for name in os.environ.get("INDUCTOR_EXT_DISABLE", "").split(",")
    if name.strip()
}


def register(lowering: Lowering, *, first: bool = False) -> None:
    """Add a lowering to Inductor, behind those of the same operation or ``first``.

    Raises ValueError when the name is taken.
    """
    with _lock:
        if lowering.name in _lowerings:
            raise ValueError(f"expected a new lowering name, got {lowering.name!r} a second time")
        _lowerings[lowering.name] = lowering
        if lowering.off is not None:
            _disabled.setdefault(lowering.name, lowering.off)
        for op in lowering.lower:
            if op not in _wrapped:
                _by_op[op] = []
                _wrapped[op] = compat.wrap_lowering(op, functools.partial(_dispatch, op))
            _by_op[op].insert(0 if first else len(_by_op[op]), lowering)
        for stage, apply in lowering.passes.items():
            compat.append_graph_pass(
                stage, _GuardedPass(f"{lowering.name}_{stage}", lowering, apply)
            )


def unregister(name: str) -> None:
    """Forget a lowering whose operation is defined anew. It must have no graph passes."""
    with _lock:
        lowering = _lowerings.pop(name)
        for op in lowering.lower:
            _by_op[op].remove(lowering)


def warn_of_unknown_names() -> None:
    """One warning for names in INDUCTOR_EXT_DISABLE that no lowering has."""
    unknown = [n for n, by in _disabled.items() if by != "disable()" and n not in _lowerings]
    if unknown:
        warnings.warn(
            f"INDUCTOR_EXT_DISABLE names {', '.join(unknown)}, expected names among "
            f"{sorted(_lowerings)}",
            stacklevel=2,
        )


def _dispatch(op: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Try the enabled lowerings of ``op`` in order; the first that returns IR wins, else stock.

    An operation of ours is lowered whatever is enabled now: a backward is lowered later than the
    graph was rewritten that put the operation there, often outside ``enable``.
    """
    for lowering in _by_op[op]:
        if not is_enabled(lowering.name) and op.namespace != "inductor_ext":
            continue
        try:
            out = lowering.lower[op](*args, **kwargs)
        except Exception as error:
            # Nodes it had already emitted have no users: Inductor's scheduler drops them.
            failed(lowering.name, str(op), error)
            continue
        if out is not None:
            return out
    return stock(*args, **kwargs)


def sensitive(op: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """(lowering, its ``sizes`` function) of every enabled lowering that names sizes of ``op``."""
    found = [(name, lowering.sizes.get(op)) for name, lowering in _lowerings.items()]
    return [(name, rule) for name, rule in found if rule is not None and is_enabled(name)]


class _GuardedPass:
    """A graph pass in Inductor's list: skipped while its lowering is off; where one fails, the
    graph is what it was in front of it."""

    def __init__(self, name: str, lowering: Lowering, apply: Callable[[Any], None]) -> None:
        self.name, self.lowering, self.edit = name, lowering, apply

    def apply(self, graph: Any) -> int:
        if is_enabled(self.lowering.name):
            decisions: list[report.Decision] = []
            try:
                with editing.all_or_nothing(graph), report.held() as decisions:
                    self.edit(graph)
                    if any(d.fired for d in decisions):
                        editing.follow_views(graph)
            except Exception as error:
                undone = f"undone: the lowering failed later in this graph: {_cause(error)}"
                for d in decisions:
                    report.record(d if not d.fired else _left(d, undone))
                failed(self.lowering.name, self.name, error)
            else:
                for d in decisions:
                    report.record(d)
        return 0


def _left(decision: report.Decision, reason: str) -> report.Decision:
    """A decision that was taken back."""
    return report.Decision(decision.lowering, False, "stock", reason, decision.sites)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def failed(lowering: str, site: str, error: Exception) -> None:
    """Report that stock code is used at a site because something broke; raises when strict, and
    where ranks disagree: stock code on one of them would be another program."""
    if isinstance(error, agreement.Disagreement):
        raise error
    reason = _cause(error)
    if config.strict:
        raise RuntimeError(
            f"inductor_ext: {lowering} failed at {site} ({reason}); "
            "INDUCTOR_EXT_STRICT=1 asks for this error"
        ) from error
    report.record(report.Decision(lowering, False, "stock", f"the lowering failed: {reason}", site))
    warnings.warn(
        f"inductor_ext: {lowering} failed at {site} ({reason}); stock code is used there",
        stacklevel=2,
    )


def is_enabled(name: str) -> bool:
    """Whether a registered lowering is on."""
    return name not in _disabled


def _check(names: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [n for n in names if n not in _lowerings]
    if unknown:
        raise ValueError(
            f"expected lowering names among {sorted(_lowerings)}, got {', '.join(unknown)}"
        )
    return names or tuple(_lowerings)


class _Switch(contextlib.AbstractContextManager):
    """Result of enable/disable: acts at once; as a context manager it restores on exit."""

    def __init__(self, before: dict[str, str]) -> None:
        self._before = before

    def __exit__(self, *exc: object) -> None:
        with _lock:
            _disabled.clear()
            _disabled.update(self._before)


def enable(*names: str) -> contextlib.AbstractContextManager:
    """Turn lowerings on (all, without names) for the process; ``with`` restores on exit.

    Affects compiles that start later; what is compiled stays. Raises ValueError for unknown names.
    """
    with _lock:
        before = dict(_disabled)
        for name in _check(names):
            _disabled.pop(name, None)
    return _Switch(before)


def disable(*names: str) -> contextlib.AbstractContextManager:
    """Turn lowerings off (all without names): stock code, byte for byte. See ``enable``."""
    with _lock:
        before = dict(_disabled)
        for name in _check(names):
            _disabled[name] = "disable()"
    return _Switch(before)


def status() -> list[tuple[str, bool, str]]:
    """(name, enabled, what turned it off) of every registered lowering."""
    return [(n, is_enabled(n), _disabled.get(n, "")) for n in _lowerings]


def candidate_pattern(name: str) -> re.Pattern[str] | None:
    """What the names of a lowering's candidates match, "stock" aside; None where that is open."""
    lowering = _lowerings.get(name)
    return None if lowering is None else lowering.candidate_name


@functools.cache
def source_hash() -> str:
    """Hash of every source file whose text can change what is compiled."""
    digest = hashlib.sha256()
    import inductor_ext
    import inductor_ext.lowerings
    import inductor_ext.templates

    packages: list[types.ModuleType] = [
        inductor_ext,
        inductor_ext.lowerings,
        inductor_ext.templates,
    ]
    for package in packages:
        for root in package.__path__:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


_salts: dict[str, Callable[[], str]] = {}


def add_salt(name: str, salt: Callable[[], str]) -> None:
    """Let a module put state that changes generated code (a forced choice, a plan) into the key."""
    _salts[name] = salt


def revision() -> str:
    """What Inductor's cache keys contain of the plugin: sources, switches, config, salts."""
    parts = [
        source_hash(),
        ",".join(n for n in _lowerings if is_enabled(n)),
        f"strict={config.strict} pdl={config.pdl}",
        *(f"{name}={salt()}" for name, salt in sorted(_salts.items())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def self_check() -> list[tuple[str, bool, str]]:
    """(what, ok, detail) for every hook that should be in place; the doctor prints it."""
    rows = [("cache key", compat.salt_installed(), "revision() is hashed into both caches")]
    if compat_pre_grad.entries():
        ok, gone = compat_pre_grad.is_installed(), "another package replaced it after the import"
        rows.append(("passes in front of AOTAutograd", ok, "" if ok else gone))
    for op, wrapper in _wrapped.items():
        ok = compat.lowering_of(op) is wrapper
        rows.append(
            (f"lowering of {op}", ok, "" if ok else "another package replaced it after the import")
        )
    return rows


@contextlib.contextmanager
def only(*names: str) -> Iterator[None]:
    """Nothing but ``names`` is on while the context is open."""
    with disable(), enable(*names) if names else contextlib.nullcontext():
        yield
