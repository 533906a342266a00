"""Private Dynamo names: which sizes of a function's arguments are dynamic, and how it says no."""

from __future__ import annotations

import re
from typing import Any

import torch

from .compat import shape_env


def size_symbols() -> dict[tuple[str, int], Any]:
    """(argument, dimension) -> symbol, for the dynamic sizes of the function being compiled.

    Sizes found equal share a symbol, one found to be a number is that number. Arguments go by their
    names in the function; ``args[0]`` is the first of ``*args``.
    """
    found = {}
    for symbol, sources in shape_env().var_to_sources.items():
        for source in sources:
            match = re.fullmatch(r"L\['(\w+)'\](\[\d+\])?\.size\(\)\[(\d+)\]", source.name)
            if match:
                found[match[1] + (match[2] or ""), int(match[3])] = shape_env().replace(symbol)
    return found


def marked_dynamic(tensor: torch.Tensor) -> list[int]:
    """The dimensions marked with ``mark_dynamic``."""
    return sorted(getattr(tensor, "_dynamo_dynamic_indices", ()))


def is_constraint_violation(error: BaseException) -> bool:
    """Whether a compile failed because a dimension marked dynamic is specialised."""
    return "mark_dynamic" in str(error) or "Constraints violated" in str(error)
