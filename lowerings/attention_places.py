"""Where the elements of a value are, seen from a result: axes, followed backwards through views.

Nothing is assumed from sizes. Each dimension of a result is an *axis*; a view, permute, expand or
slice on the way down says at which of them an element of its source is read. A view may show that
one axis is several (batch times heads), which is then known everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from inductor_ext.lowerings.mhc_entries import aten, shape_of

from inductor_ext import compat
from inductor_ext.shadow import Symbol

LAST = 2**63 - 1  # how far "to the end" is in a slice


class Index(NamedTuple):
    """The place along one dimension: ``offset`` + the axes, the last one running fastest.
    ``whole``: all of the dimension is read, each element once."""

    axes: tuple[int, ...] = ()
    offset: Any = 0
    whole: bool = True


Place = tuple[Index, ...]


class NoPlace(Exception):
    """Why elements can't be followed through a view."""


def size_of(number: Any) -> Any:
    """A size among a shadow node's arguments as a number or an expression."""
    return compat.expr(number.number) if isinstance(number, Symbol) else compat.expr(number)


def equal(a: Any, b: Any) -> bool:
    return bool(sympy.sympify(a) == sympy.sympify(b)) or ratio(a, b) == 1


def same(a: Any, b: Any) -> bool:
    """Whether two numbers are equal, also where a division in them leaves a rest: that of a size
    halved and doubled is none of ``equal``'s, which are sizes of one tensor in two shapes."""
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def ratio(a: Any, b: Any) -> Any:
    """a / b where that is a whole number of any size; None where it is not known to be one."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    found = sympy.cancel(_exact(a) / _exact(b))
    top, bottom = found.as_numer_denom()
    return top if bottom == 1 else None


def _exact(size: Any) -> Any:
    """Sizes that a view inferred are floored divisions, and exact ones."""
    size = sympy.sympify(size)
    return size.replace(
        lambda e: type(e).__name__ == "FloorDiv", lambda e: sympy.cancel(e.args[0] / e.args[1])
    )


def product(sizes: Any) -> Any:
    return sympy.expand(sympy.Mul(*map(_exact, sizes)))


class Axes:
    """The axes of one site and their sizes."""

    def __init__(self) -> None:
        self.sizes: list[Any] = []
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, size: Any) -> Index:
        """An axis of its own; none where there is one element."""
        if size == 1:
            return Index()
        self.sizes.append(size)
        return Index((len(self.sizes) - 1,))

    def flat(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Axes as what they are known to consist of."""
        found: list[int] = []
        for axis in axes:
            parts = self._parts.get(axis)
            found += [axis] if parts is None else self.flat(parts)
        return tuple(found)

    def now(self, place: Place) -> Place:
        return tuple(Index(self.flat(i.axes), i.offset, i.whole) for i in place)

    def unite(self, one: tuple[int, ...], other: tuple[int, ...]) -> None:
        """Two descriptions of one dimension. Raises NoPlace where they do not fit."""
        one, other = self.flat(one), self.flat(other)
        if len(one) < len(other):
            one, other = other, one  # ``other`` is the coarser
        if one == other:
            return
        if len(other) == 1:
            self._parts[other[0]] = one
        elif len(one) == len(other):
            for a, b in zip(one, other, strict=True):
                if a != b and not equal(self.sizes[a], self.sizes[b]):
                    raise NoPlace("a dimension is cut in two ways")
            self._parts.update({b: (a,) for a, b in zip(one, other, strict=True) if a != b})
        else:
            raise NoPlace("a dimension is cut in two ways")

    def size(self, axes: tuple[int, ...]) -> Any:
        return sympy.expand(sympy.Mul(*(self.sizes[a] for a in self.flat(axes))))

    def cut(self, axes: tuple[int, ...], sizes: list[Any]) -> list[tuple[int, ...]]:
        """The axes of one dimension as those of dimensions of these sizes. Raises NoPlace."""
        left = list(self.flat(axes))
        found: list[tuple[int, ...]] = []
        for size in sizes:
            taken: list[int] = []
            while not equal(size, 1):
                if not left:
                    raise NoPlace("a view mixes dimensions")
                axis = left.pop(0)
                rest = ratio(size, self.sizes[axis])
                if rest is not None:
                    taken.append(axis)
                    size = rest
                    continue
                inner = ratio(self.sizes[axis], size)
                if inner is None:
                    raise NoPlace("a view mixes dimensions")
                outer = self.new(size).axes
                self._parts[axis] = (*outer, *self.new(inner).axes)
                taken += outer
                left[:0] = self._parts[axis][1:]
                size = 1
            found.append(tuple(taken))
        if left:
            raise NoPlace("a view mixes dimensions")
        return found

    # --- one step down ---------------------------------------------------------------------------

    def below(self, node: Any, place: Place) -> tuple[Any, Place] | None:
        """What a view reads, and where; None for what is no view. Raises NoPlace."""
        rule = _RULES.get(node.target)
        if rule is None:
            return None
        source = node.args[0]
        return source, rule(self, node, shape_of(source), self.now(place))

    def operand(self, of: Any, node: Any, place: Place) -> Place:
        """Where a pointwise operation ``of`` reads an operand: broadcast along sizes of 1."""
        return _broadcast(shape_of(node), shape_of(of), place)


def _broadcast(before: list[Any], after: list[Any], place: Place) -> Place:
    place = place[len(after) - len(before) :]
    sizes = after[len(after) - len(before) :]
    return tuple(
        Index() if b == 1 and a != 1 else i for i, b, a in zip(place, before, sizes, strict=True)
    )


def _view(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    after = shape_of(node)
    found: list[Index] = []
    i = j = 0
    while i < len(after) or j < len(before):
        ends = sorted(
            ((a, b) for a in range(i, len(after) + 1) for b in range(j, len(before) + 1)), key=sum
        )
        a, b = next(
            (a, b)
            for a, b in ends
            if (a, b) != (i, j) and equal(product(after[i:a]), product(before[j:b]))
        )
        found += _regrouped(axes, place[i:a], after[i:a], before[j:b])
        i, j = a, b
    return tuple(found)


def _regrouped(axes: Axes, place: Place, after: list[Any], before: list[Any]) -> list[Index]:
    kept = [p for p, size in zip(place, after, strict=True) if size != 1]
    if not all(p.whole for p in kept):
        if len(kept) > 1 or sum(size != 1 for size in before) > 1:
            raise NoPlace("a view mixes dimensions of which a part is read")
        return [kept[0] if size != 1 else Index() for size in before]
    joined = tuple(a for p in kept for a in p.axes)
    return [Index(found) for found in axes.cut(joined, list(before))]


def _expand(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    return _broadcast(before, shape_of(node), place)


def _order(node: Any, rank: int) -> list[int]:
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    order = list(range(rank))
    if rank > 1:
        a, b = (d % rank for d in (node.args[1:3] if len(node.args) > 2 else (0, 1)))
        order[a], order[b] = order[b], order[a]
    return order


def _permute(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    found = [Index()] * len(before)
    for to, dim in enumerate(_order(node, len(before))):
        found[dim] = place[to]
    return tuple(found)


def _unsqueeze(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    dim = node.args[1] % len(place)
    return place[:dim] + place[dim + 1 :]


def _squeeze(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    rank = len(before)
    dims = range(rank)
    if len(node.args) > 1:
        given = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        dims = [d % rank for d in given]  # type: ignore[assignment]
    left = iter(place)
    return tuple(Index() if d in dims and s == 1 else next(left) for d, s in enumerate(before))


def _same(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    return place


def _slice(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    _, dim, start, _, step = list(node.args) + [0, 0, LAST, 1][len(node.args) - 1 :]
    if step != 1:
        raise NoPlace("a slice has steps")
    dim %= len(before)
    if same(shape_of(node)[dim], before[dim]):
        return place
    start = 0 if start is None else size_of(start)
    if sympy.sympify(start).is_number and start < 0:
        start = start + before[dim]
    elif not sympy.sympify(start).is_nonnegative:
        raise NoPlace("a slice begins at a position whose sign is not known")
    found = Index(place[dim].axes, place[dim].offset + start, False)
    return (*place[:dim], found, *place[dim + 1 :])


def _select(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    _, dim, at = node.args
    dim %= len(before)
    at = size_of(at)
    if sympy.sympify(at).is_number and at < 0:
        at = at + before[dim]
    elif not sympy.sympify(at).is_nonnegative:
        raise NoPlace("an element is taken at a position whose sign is not known")
    return (*place[:dim], Index((), at, before[dim] == 1), *place[dim:])


def _repeat(axes: Axes, node: Any, before: list[Any], place: Place) -> Place:
    times = [size_of(t) for t in node.args[1]]
    place, times = place[len(times) - len(before) :], times[len(times) - len(before) :]
    found = []
    for index, many, size in zip(place, times, before, strict=True):
        if many == 1:
            found.append(index)
        elif size == 1:
            found.append(Index())
        elif not index.whole:
            raise NoPlace("a part of a repeated dimension is read")
        else:
            found.append(Index(axes.cut(index.axes, [many, size])[1]))
    return tuple(found)


VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
# Also what copies: what lies behind is read where it was.
COPIES = {aten.clone.default, aten.repeat.default, aten.lift_fresh_copy.default}
_RULES: dict[Any, Any] = {
    **dict.fromkeys(VIEWS, _view),
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.repeat.default: _repeat,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
}


def is_view(node: Any) -> bool:
    return node.target in _RULES


def dtype_of(node: Any) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found
