"""What a score is made of: the product, positions, numbers, tensors, and operations of these."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from inductor_ext.lowerings.attention_places import Index


@dataclasses.dataclass(eq=False)
class Value:
    """``scores``: it depends on the product; ``tensors``: on tensors of the program."""

    scores: bool = False
    tensors: bool = False


@dataclasses.dataclass(eq=False)
class Product(Value):
    scores: bool = True


@dataclasses.dataclass(eq=False)
class Position(Value):
    """start + step * index."""

    index: Index = dataclasses.field(default_factory=Index)
    start: Any = 0
    step: Any = 1


@dataclasses.dataclass(eq=False)
class Number(Value):
    number: Any = 0
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass(eq=False)
class Input(Value):
    """``which``: of ``Scores.inputs``."""

    which: int = 0
    tensors: bool = True


@dataclasses.dataclass(eq=False)
class Call(Value):
    op: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype | None = None  # None: as it comes


def is_plain(number: Any) -> bool:
    return isinstance(number, (bool, int, float))


def is_integer(number: Any) -> bool:
    return not is_plain(number) and bool(sympy.sympify(number).is_integer)
