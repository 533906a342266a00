"""How tests ask whether torch still has a private name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def find(path: str) -> Any:
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} moved {path}, which compat.py uses: {error}")
    return found


def accepts(path: str, *args: Any, **kwargs: Any) -> None:
    """The function at ``path`` can be called like this (values do not matter)."""
    try:
        inspect.signature(find(path)).bind(*args, **kwargs)
    except TypeError as error:
        pytest.fail(f"torch {torch.__version__} changed the signature of {path}: {error}")


def is_a(path: str, kind: type) -> None:
    found = find(path)
    assert isinstance(found, kind), (
        f"{path} became a {type(found).__name__}, compat.py wants {kind}"
    )


X = object()
