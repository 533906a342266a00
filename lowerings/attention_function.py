"""Scores that were read from a graph, as a function of tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from inductor_ext.lowerings.attention_places import Axes, Index, same
from inductor_ext.lowerings.attention_values import (
    Call,
    Input,
    Number,
    Position,
    Product,
    Value,
    is_plain,
)
from inductor_ext.lowerings.sites import NoSite


@dataclasses.dataclass
class Roles:
    """Which axes are the batch, the heads, the query rows and the keys."""

    b: tuple[int, ...]
    h: tuple[int, ...]
    q: tuple[int, ...]
    k: tuple[int, ...]

    def __iter__(self) -> Any:
        return iter((self.b, self.h, self.q, self.k))


class Function:
    """What was read as a function of tensors (see ``attention_score.write``). ``numbers`` are the
    sizes that it needs besides those of rows and columns, as expressions."""

    def __init__(self, value: Value, axes: Axes, roles: Roles) -> None:
        self.value, self.axes, self.roles = value, axes, roles
        self.rows, self.columns = axes.size(roles.q), axes.size(roles.k)
        self.numbers: list[Any] = []
        self._collect(value, set())

    def _collect(self, value: Any, done: set[int]) -> None:
        if not isinstance(value, Value) or id(value) in done:
            return
        done.add(id(value))
        if isinstance(value, Position):
            sizes = [self.axes.size((a,)) for a in self.axes.flat(value.index.axes)]
            for size in (value.start, value.step, value.index.offset, *sizes):
                self._known(size)
        elif isinstance(value, Number):
            self._known(value.number)
        elif isinstance(value, Call):
            for arg in value.args:
                self._collect(arg, done)

    def _known(self, size: Any) -> int | None:
        """Which of ``numbers`` a size is; None where it needs none."""
        if is_plain(size) or sympy.sympify(size).is_number or self._own(size) is not None:
            return None
        for i, known in enumerate(self.numbers):
            if same(known, size):
                return i
        self.numbers.append(size)
        return len(self.numbers) - 1

    def _own(self, size: Any) -> str | None:
        """How rows and columns make a size."""
        for text, made in (
            ("rows", self.rows),
            ("columns", self.columns),
            ("columns-rows", self.columns - self.rows),
        ):
            if same(size, made):
                return text
        return None

    def __call__(
        self, s: Any, b: Any, h: Any, q: Any, k: Any, rows: Any, columns: Any, numbers: Any,
        inputs: Any,
    ) -> Any:  # fmt: skip
        self._names = dict(zip("bhqk", (b, h, q, k), strict=True))
        self._given = {"rows": rows, "columns": columns, "columns-rows": None}
        self._s, self._n, self._inputs = s, numbers, inputs
        self._done: dict[int, Any] = {}
        found = self._of(self.value)
        return found if isinstance(found, torch.Tensor) else s * 0 + found

    def _size(self, size: Any, geometric: bool = False) -> Any:
        if isinstance(size, float):
            return size
        if is_plain(size) or sympy.sympify(size).is_number:
            # An offset that is the difference of the sizes here is written as one: a program then
            # serves other sizes.
            difference = self.columns - self.rows
            if geometric and size and sympy.sympify(difference).is_number and size == difference:
                return self._given["columns"] - self._given["rows"]
            return size if is_plain(size) else int(size)
        own = self._own(size)
        if own == "columns-rows":
            return self._given["columns"] - self._given["rows"]
        if own is not None:
            return self._given[own]
        return self._n[self._known(size)]

    def _of(self, value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._computed(value)
        return self._done[id(value)]

    def _computed(self, value: Value) -> Any:
        if isinstance(value, Product):
            return self._s
        if isinstance(value, Input):
            return self._inputs[value.which]
        if isinstance(value, Number):
            return self._size(value.number)
        if isinstance(value, Position):
            return self._position(value)
        assert isinstance(value, Call)
        args = [self._of(a) for a in value.args]
        if value.op is None:
            (found,) = args
            if not isinstance(found, torch.Tensor):
                found = self._tensor(found, value.args[0])
        else:
            found = _call(value.op, args, value.kwargs, self._tensor, value.args)
        if value.dtype is not None and found.dtype != value.dtype:
            found = found.to(value.dtype)
        return found

    def _tensor(self, number: Any, value: Any) -> Any:
        """A number as a tensor, for operations that take no numbers."""
        dtype = value.dtype if isinstance(value, Number) else None
        return torch.full_like(self._names["b"], number, dtype=dtype)

    def _position(self, value: Position) -> Any:
        index = self._index(value.index)
        step, start = self._size(value.step), self._size(value.start, geometric=True)
        if not _is_one(step):
            index = index * step
        return index if _is_zero(start) else index + start

    def _index(self, index: Index) -> Any:
        axes, offset = self.axes.flat(index.axes), self._size(index.offset, geometric=True)
        if not axes:
            return torch.full_like(self._names["b"], offset)
        found = self._along(axes)
        return found if _is_zero(offset) else found + offset

    def _along(self, axes: tuple[int, ...]) -> Any:
        for name, role in zip("bhqk", self.roles, strict=True):
            if role == axes:
                return self._names[name]
        found: Any = None
        for axis in axes:
            one = self._single(axis)
            found = one if found is None else found * self._size(self.axes.size((axis,))) + one
        return found

    def _single(self, axis: int) -> Any:
        for name, role in zip("bhqk", self.roles, strict=True):
            if axis in role:
                at = role.index(axis)
                value = self._names[name]
                inner = role[at + 1 :]
                if inner:
                    value = value // self._size(self.axes.size(inner))
                return value % self._size(self.axes.size((axis,))) if at else value
        raise NoSite("a position is along no dimension of the scores")


def _is_zero(number: Any) -> bool:
    return isinstance(number, int) and number == 0


def _is_one(number: Any) -> bool:
    return isinstance(number, int) and number == 1


def _call(op: Any, args: list[Any], kwargs: dict[str, Any], tensor: Any, values: Any) -> Any:
    truth = isinstance(values[0], Number) and values[0].dtype == torch.bool
    if truth or all(not isinstance(a, torch.Tensor) for a in args):
        args = [tensor(args[0], values[0]), *args[1:]]
    try:
        return op.overloadpacket(*args, **kwargs)
    except RuntimeError:  # no overload takes numbers there
        made = [
            tensor(a, v) if isinstance(v, Value) and not isinstance(a, torch.Tensor) else a
            for a, v in zip(args, values, strict=True)
        ]
        return op.overloadpacket(*made, **kwargs)
