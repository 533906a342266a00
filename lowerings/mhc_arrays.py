"""Small arrays of terms, and what views do to them: numpy is no requirement of the plugin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index, the last axis fastest."""
    return itertools.product(*map(range, shape))


class Array:
    """Values in row-major order."""

    __slots__ = ("flat", "shape")

    def __init__(self, shape: Iterable[int], flat: Iterable[Any]) -> None:
        self.shape, self.flat = tuple(shape), list(flat)
        if len(self.flat) != math.prod(self.shape):
            raise ValueError(f"expected {math.prod(self.shape)} values, got {len(self.flat)}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.flat)

    def __getitem__(self, index: Sequence[int]) -> Any:
        offset = 0
        for i, size in zip(index, self.shape, strict=True):
            offset = offset * size + i
        return self.flat[offset]

    def reshape(self, shape: Iterable[int]) -> Array:
        return Array(shape, self.flat)

    def _gather(self, shape: Sequence[int], where: Callable[[Any], Sequence[int]]) -> Array:
        return Array(shape, [self[where(i)] for i in indices(shape)])

    def transpose(self, axes: Sequence[int]) -> Array:
        back = [axes.index(a) for a in range(self.ndim)]
        return self._gather([self.shape[a] for a in axes], lambda i: [i[b] for b in back])

    def broadcast(self, shape: Sequence[int]) -> Array:
        more = len(shape) - self.ndim
        own = self.shape
        return self._gather(
            shape, lambda i: [k if size > 1 else 0 for k, size in zip(i[more:], own, strict=True)]
        )

    def insert(self, axis: int) -> Array:
        """With an axis of size 1."""
        return self.reshape((*self.shape[:axis], 1, *self.shape[axis:]))

    def cut(self, axis: int, begin: int, end: int) -> Array:
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return self._gather(shape, lambda i: (*i[:axis], i[axis] + begin, *i[axis + 1 :]))

    def take(self, axis: int, index: int) -> Array:
        index %= self.shape[axis]
        part = self.cut(axis, index, index + 1)
        return part.reshape((*self.shape[:axis], *self.shape[axis + 1 :]))

    def rows(self) -> list[list[Any]]:
        """The values, cut along the last axis."""
        width = self.shape[-1]
        return [self.flat[i : i + width] for i in range(0, self.size, width)]


def joined(arrays: Sequence[Array], axis: int) -> Array:
    """One behind the other along an axis."""
    ends = list(itertools.accumulate(a.shape[axis] for a in arrays))
    first = arrays[0].shape
    shape = (*first[:axis], ends[-1], *first[axis + 1 :])

    def value(i: tuple[int, ...]) -> Any:
        which = next(k for k, end in enumerate(ends) if i[axis] < end)
        begin = ends[which] - arrays[which].shape[axis]
        index = (*i[:axis], i[axis] - begin, *i[axis + 1 :])
        return arrays[which][index]

    return Array(shape, map(value, indices(shape)))


def each(fn: Callable[..., Any], *arrays: Array) -> Array:
    """``fn`` of the values, the arrays broadcast as tensors are. Raises ValueError."""
    rank = max(a.ndim for a in arrays)
    sizes = [(1,) * (rank - a.ndim) + a.shape for a in arrays]
    shape = [max(s) if 0 not in s else 0 for s in zip(*sizes, strict=True)]
    if any(s not in (1, whole) for own in sizes for s, whole in zip(own, shape, strict=True)):
        raise ValueError(f"shapes do not broadcast: {sizes}")
    wide = [a if a.shape == tuple(shape) else a.broadcast(shape) for a in arrays]
    return Array(shape, map(fn, *(a.flat for a in wide)))
