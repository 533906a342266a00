"""How the test kit reaches private names and changes them: by ``private`` and ``Patches``.

Both name what a torch release moved, and what is changed is changed back.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch


class MovedName(RuntimeError):
    """A private name of torch or triton is not where this version of the test kit expects it."""


def private(path: str) -> Any:
    """The object at ``package.module:attribute[.attribute]``; MovedName says which part is gone."""
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split(".") if attributes else ():
            found = getattr(found, name)
    except (ImportError, AttributeError) as e:
        raise MovedName(
            f"inductor_ext.testing expected {path} in torch {torch.__version__}, got: {e}"
        ) from e
    return found


_MISSING = object()


class Patches(contextlib.ExitStack):
    """An ExitStack of attribute changes that refuses to create what should already be there."""

    def set(self, owner: Any, name: str, value: Any, create: bool = False) -> Any:
        """Set ``owner.name`` until the stack closes; returns what was there."""
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        before = getattr(owner, name, _MISSING)
        if before is _MISSING and not create:
            raise MovedName(
                f"inductor_ext.testing expected {getattr(owner, '__name__', owner)}.{name} in "
                f"torch {torch.__version__}, got no such name"
            )
        if own is _MISSING and before is not _MISSING and not isinstance(owner, type):
            own = before  # a slot or a module-level __getattr__
        setattr(owner, name, value)
        if own is _MISSING:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, own)
        return before

    def set_if_there(self, owner: Any, name: str, value: Any) -> None:
        """As ``set`` for a name that only some of the supported versions have."""
        if hasattr(owner, name):
            self.set(owner, name, value)

    def fresh_dict(self, owner: dict, **entries: Any) -> None:
        """Replace the contents of ``owner`` by ``entries`` until the stack closes."""
        before = dict(owner)

        def restore() -> None:
            owner.clear()
            owner.update(before)

        self.callback(restore)
        owner.clear()
        owner.update(entries)
