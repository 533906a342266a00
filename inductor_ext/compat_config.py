"""Settings of torch's kind that hold in the whole process.

Newer releases keep an override for the thread, or task, that made it. A backward is compiled, and
launches its kernels, in autograd's threads, which would not hear of it. As in the older releases, a
patch puts back what it found: patches of one setting that overlap in two threads undo each other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

Listener = Callable[[], None]


def hold_everywhere(module: ModuleType) -> Callable[[Listener], None]:
    """Make overrides in a config module those of every thread. Returns what takes a listener, which
    is called whenever a value is set, ``patch`` included."""
    overrides: dict[str, Any] = {}
    listeners: list[Listener] = []

    class Switches(type(module)):  # type: ignore[misc]  # torch's class, made for this module
        def __getattr__(self, name: str) -> Any:
            return overrides[name] if name in overrides else super().__getattr__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in self._config:  # not the module's own state
                overrides[name] = value
                for listener in listeners:
                    listener()

        def __delattr__(self, name: str) -> None:
            super().__delattr__(name)
            overrides.pop(name, None)

    ModuleType.__setattr__(module, "__class__", Switches)
    return listeners.append
