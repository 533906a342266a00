"""The scores in front of a softmax, read as a function of a product and of positions.

What lies between the two is pointwise: each score is a function of the dot product s at the same
place, of where it is (comparisons of iotas, triangles of ones) and of tensors read there through
their broadcasts. Reading goes backwards from the scores and ends at the product, at constants, and
at tensors of the program, which become inputs. Scores are not rounded to 16 bits on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from inductor_ext.lowerings.attention_constants import uniform
from inductor_ext.lowerings.attention_places import (
    Axes,
    Index,
    NoPlace,
    Place,
    is_view,
    same,
    size_of,
)
from inductor_ext.lowerings.attention_values import (
    Call,
    Input,
    Number,
    Position,
    Product,
    Value,
    is_integer,
    is_plain,
)
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import NoSite

from inductor_ext import compat_fx
from inductor_ext.shadow import Shadow, Symbol

MOST_INPUTS = 8
PRODUCTS = {aten.bmm.default, aten.mm.default, aten.baddbmm.default}


@dataclasses.dataclass
class Joined:
    """One product q k^T, or several that are summed: (node, place of its result)."""

    parts: list[tuple[Any, Place]] = dataclasses.field(default_factory=list)


# Pointwise for the purpose, but not tagged so.
_MORE_POINTWISE = {
    aten._to_copy.default,
    aten.floor_divide.default,
    aten.masked_fill.Tensor,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.true_divide.Tensor,
}
_FILLED: dict[Any, Callable[[Any], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.scalar_tensor.default: lambda node: node.args[0],
    aten.fill.Scalar: lambda node: node.args[1],
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), lambda node: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default), lambda node: 1),
    **dict.fromkeys((aten.new_zeros.default, aten.zero.default), lambda node: 0),
    aten.new_ones.default: lambda node: 1,
}
_POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_TRIANGLES = {aten.tril.default, aten.triu.default}
# What leaves a truth value as it is.
_NEUTRAL = {
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), True),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), False),
}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_WIDE = (torch.float16, torch.bfloat16, torch.float32)


def is_pointwise(node: Any) -> bool:
    target = node.target
    return node.op == "call_function" and (
        target in _MORE_POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())
    )


class Scores:
    """Reads values at places of ``axes``. ``keys`` are the axes of the keys, ``rows`` those of the
    query rows as far as the second product tells them. ``visited`` are the values on the way from
    the product; ``inputs`` the tensors that are read, each with its place. With ``made_before``,
    the products, what does not depend on them is an input as it is there; with ``only`` nothing
    else is taken for the product."""

    def __init__(
        self, seen: Shadow, axes: Axes, keys: Index, rows: Index,
        made_before: set[Any] | None = None, only: Any = None,
    ) -> None:  # fmt: skip
        self.only = only
        self.seen, self.axes, self.keys, self.rows = seen, axes, keys, rows
        self.made_before = made_before
        self._constant: dict[Any, bool] = {}
        self.several: set[Any] = set()  # products that are not one sum
        self.product = Joined()
        self.visited: list[Any] = []
        self.inputs: list[tuple[Any, Place]] = []
        self._known: dict[Any, Value] = {}

    def read(self, node: Any, place: Place) -> Value:
        """Raises NoSite."""
        key = node, self.axes.now(place)
        if key not in self._known:
            try:
                found = self._read(node, key[1])
            except NoPlace as reason:
                raise NoSite(str(reason)) from None
            if self.seen.is_mutated(node):
                raise NoSite("its scores, or a mask, are written to in this graph")
            if found.scores:
                self.visited.append(node)
            self._known[key] = found
        return self._known[key]

    def _read(self, node: Any, place: Place) -> Value:
        number = self._number(node)
        if number is not None:
            return number
        if self._may_be_product(node, place):
            return self._multiplied(node, place)
        if node.target in _POSITIONS:
            found = _positions(node, place)
            if found is not None:
                return found
        if node.target in _TRIANGLES:
            return self._triangle(node, place)
        if node.target is aten.index.Tensor:
            found = self._gathered(node, place)
            if found is not None:
                return found
        if (not is_view(node) and not is_pointwise(node)) or self._is_kept(node, place):
            number = uniform(self.seen, node) if self._is_narrow(node, place) else None
            if number is not None:
                return Number(number=number, dtype=node.meta["val"].dtype)
            return self._input(node, place)
        if is_pointwise(node) and not is_view(node):
            return self._called(node, place)
        return self._viewed(node, place)

    def _gathered(self, node: Any, place: Place) -> Value | None:
        """An element at positions along each dimension is read as through a view."""
        source, indices = node.args
        if len(indices) != len(source.meta["val"].shape) or None in indices:
            return None
        found = []
        for index in indices:
            at = self.read(index, self.axes.operand(node, index, place))
            if not isinstance(at, Position) or at.step != 1 or not _is_offset(at.start):
                return None
            begin, along = at.start, at.index
            found.append(Index(along.axes, along.offset + begin, along.whole and begin == 0))
        return self.read(source, self._within(source, tuple(found)))

    def _within(self, source: Any, place: Place) -> Place:
        """A place at which only a part of a dimension is read."""
        return tuple(
            Index(i.axes, i.offset, i.whole and same(self.axes.size(i.axes), size))
            for i, size in zip(place, shape_of(source), strict=True)
        )

    # --- leaves -----------------------------------------------------------------------------------

    def _number(self, node: Any) -> Number | None:
        if node.target in _FILLED:
            value = _FILLED[node.target](node)
            value = size_of(value) if isinstance(value, Symbol) else value
            if isinstance(value, (bool, int, float)) or is_integer(value):
                return Number(number=value, dtype=node.meta["val"].dtype)
            return None
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and not value.dim():
            known = compat_fx.known_number(value)
            if known is not None:
                return Number(number=known, dtype=value.dtype)
        return None

    def _is_narrow(self, node: Any, place: Place) -> bool:
        """Whether a value is one of a row, or of a key, so that it costs nothing to keep."""
        axes = {a for i in place for a in self.axes.flat(i.axes)}
        rows, keys = self.axes.flat(self.rows.axes), self.axes.flat(self.keys.axes)
        return not axes & set(keys) or bool(rows and not axes & set(rows))

    def _is_kept(self, node: Any, place: Place) -> bool:
        """Whether a value becomes an input: it is there in the program, and is narrow, or all masks
        are kept whole. What is made of positions and numbers is computed where it is read."""
        if node not in self.seen.first or self._is_constant(node):
            return False
        if self.made_before is not None and not self._depends(node, self.made_before):
            return True
        return self._is_narrow(node, place)

    def _is_constant(self, node: Any) -> bool:
        if node not in self._constant:
            sources = node.all_input_nodes
            self._constant[node] = (
                node.op == "call_function"
                and (node.target in _POSITIONS or node.target in _FILLED or bool(sources))
                and (not sources or node.target in _FILLED or is_view(node)
                     or is_pointwise(node) or node.target in _TRIANGLES
                     or node.target is aten.index.Tensor)
                and (node.target in _FILLED or all(map(self._is_constant, sources)))
            )  # fmt: skip
        return self._constant[node]

    def _viewed(self, node: Any, place: Place) -> Value:
        inputs = len(self.inputs)
        try:
            below = self.axes.below(node, place)
        except NoPlace:
            if node not in self.seen.first:
                raise
            return self._input(node, place)
        assert below is not None
        found = self.read(*below)
        detached = node.target is aten.detach.default and (found.scores or found.tensors)
        if detached and found.scores:
            raise NoSite("scores are detached")
        if detached:
            return self._input(node, place)
        new = isinstance(found, Input) and found.which == inputs and node in self.seen.first
        # Read as the program has it, unless what lies behind varies along less.
        if new and _along(self.axes.now(place)) == _along(self.axes.now(below[1])):
            self.inputs[-1] = node, place
        return found

    def _input(self, node: Any, place: Place) -> Value:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.is_complex():
            raise NoSite(f"{node.name} is no tensor of numbers")
        place = self.axes.now(place)
        for i, (known, where) in enumerate(self.inputs):
            if known is node and self.axes.now(where) == place:
                return Input(which=i)
        if len(self.inputs) == MOST_INPUTS:
            raise NoSite(f"its scores are made of more than {MOST_INPUTS} tensors")
        self.inputs.append((node, place))
        return Input(which=len(self.inputs) - 1)

    def check(self) -> None:
        """Raises NoSite where an input is itself computed of the product."""
        products = {n for n, _ in self.product.parts}
        for node, _ in self.inputs:
            if self._depends(node, products):
                raise NoSite(f"{node.target} is not pointwise on scores")

    def _depends(self, node: Any, products: set[Any]) -> bool:
        stack, known = [node], set()
        while stack:
            at = stack.pop()
            if at in products:
                return True
            if at not in known:
                known.add(at)
                stack.extend(at.all_input_nodes)
        return False

    # --- the product ------------------------------------------------------------------------------

    def _may_be_product(self, node: Any, place: Place) -> bool:
        """Whether it is a product with a row of keys for each row."""
        if node.target not in PRODUCTS or self.only not in (None, node):
            return False
        keys = self.axes.flat(self.keys.axes)
        return any(self.axes.flat(i.axes) == keys and i.whole for i in place[-2:])

    def _multiplied(self, node: Any, place: Place) -> Value:
        parts = self.product.parts
        if parts and (node, place) not in [(n, self.axes.now(p)) for n, p in parts]:
            self.several.update(n for n, _ in parts)
            self.several.add(node)
            raise NoSite("its scores are made of several products")
        if not parts:
            parts.append((node, place))
        found: Value = Product()
        if node.target is aten.baddbmm.default:
            beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
            if isinstance(beta, Symbol) or isinstance(alpha, Symbol):
                raise NoSite("a factor of the product is symbolic")
            if alpha != 1:
                found = Call(scores=True, op=aten.mul.Tensor, args=(found, alpha))
            if beta != 0:
                added = node.args[0]
                bias = self.read(added, self.axes.operand(node, added, place))
                if beta != 1:
                    bias = Call(bias.scores, bias.tensors, aten.mul.Tensor, (bias, beta))
                found = Call(True, bias.tensors, aten.add.Tensor, (found, bias))
        return found

    def _pure(self, node: Any, place: Place) -> tuple[Any, Place] | None:
        """The product that a value is, behind views and conversions."""
        while node.target not in PRODUCTS:
            below = self.axes.below(node, place)
            if below is None and node.target is aten._to_copy.default:
                below = node.args[0], place
            if below is None or node.target is aten.detach.default or self.seen.is_mutated(node):
                return None
            node, place = below
        place = self.axes.now(place)
        plain = node.target is not aten.baddbmm.default and self._may_be_product(node, place)
        plain = plain and not self.seen.is_mutated(node)
        return (node, place) if plain else None

    def _summed(self, node: Any, place: Place) -> Value | None:
        """The sum of two products is one, over more channels."""
        if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
            return None
        found: list[tuple[Any, Place]] = []
        for arg in node.args:
            if not isinstance(arg, torch.fx.Node):
                return None
            where = self.axes.operand(node, arg, place)
            try:
                one = self._pure(arg, where)
            except NoPlace:
                return None
            if one is not None:
                found.append(one)
            elif arg.target is aten.add.Tensor:
                inner = self._summed(arg, where)
                if inner is None:
                    return None
            else:
                return None
        parts = self.product.parts
        known = [(n, self.axes.now(p)) for n, p in parts]
        parts += [one for one in found if one not in known]
        for arg in node.args:
            self._on_the_way(arg)
        return Product()

    def _on_the_way(self, node: Any) -> None:
        while node.target not in PRODUCTS and node.target is not aten.add.Tensor:
            self.visited.append(node)
            node = node.args[0]
        self.visited.append(node)

    # --- pointwise --------------------------------------------------------------------------------

    def _called(self, node: Any, place: Place) -> Value:
        summed = self._summed(node, place)
        if summed is not None:
            return summed

        def of(arg: Any) -> Any:
            if isinstance(arg, torch.fx.Node):
                return self.read(arg, self.axes.operand(node, arg, place))
            if isinstance(arg, Symbol):
                size = size_of(arg)
                if not is_integer(size):
                    raise NoSite("a number in its scores is symbolic and no size")
                return Number(number=size, dtype=torch.int64)
            return arg

        args = tuple(of(a) for a in node.args)
        own = node.meta["val"].dtype
        values = [a for a in args if isinstance(a, Value)]
        scores, tensors = any(a.scores for a in values), any(a.tensors for a in values)
        if node.target is aten._to_copy.default:
            return self._converted(node, args[0], own)
        kwargs = {k: v for k, v in node.kwargs.items() if v is not None}
        if any(isinstance(v, (torch.fx.Node, Symbol)) for v in kwargs.values()):
            raise NoSite(f"{node.target} has arguments that are not read")
        if values and all(isinstance(a, Number) for a in values):
            folded = _folded(node.target, args, kwargs, own)
            if folded is not None:
                return folded
        args = _promoted(node, args)
        moved = _moved(node, args)
        if moved is not None:
            return moved
        kept = _NEUTRAL.get(node.target)
        if kept is not None and own == torch.bool:
            for one, other in (args, args[::-1]):
                if isinstance(one, Number) and one.number is kept and isinstance(other, Value):
                    return other
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return self._input(node, place)
        wide = scores and own in _WIDE
        op = node.target
        if op in _FILLS:
            op, args = aten.where.self, (args[1], args[2], args[0])
        return Call(scores, tensors, op, args, kwargs, None if wide else own)

    def _converted(self, node: Any, source: Value, own: torch.dtype) -> Value:
        if isinstance(source, Number) and is_plain(source.number):
            return Number(number=torch.tensor(source.number).to(own).item(), dtype=own)
        before = node.args[0].meta["val"]
        if before.device != node.meta["val"].device and source.tensors:
            raise NoSite("a part of its scores is on another device")
        if own == before.dtype or (source.scores and own in _WIDE and before.dtype in _WIDE):
            return source
        return Call(source.scores, source.tensors, None, (source,), {}, own)

    def _triangle(self, node: Any, place: Place) -> Value:
        source = self.read(node.args[0], place)
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        row, column = Position(index=place[-2]), Position(index=place[-1])
        edge = Position(index=place[-2], start=size_of(diagonal))
        op = aten.le.Tensor if node.target is aten.tril.default else aten.ge.Tensor
        kept: Value = Call(op=op, args=(column, edge if diagonal != 0 else row), dtype=torch.bool)
        own = node.meta["val"].dtype
        if isinstance(source, Number) and own == torch.bool:
            return kept if source.number else source
        zero = Number(number=False if own == torch.bool else 0, dtype=own)
        wide = source.scores and own in _WIDE
        return Call(
            source.scores, source.tensors, aten.where.self, (kept, source, zero), {},
            None if wide else own,
        )  # fmt: skip


def _promoted(node: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands beside a tensor of one number, which widens them as no number does."""
    full = [
        n.meta["val"].dtype
        for n, a in zip(node.args, args, strict=True)
        if isinstance(a, Number) and isinstance(n, torch.fx.Node) and n.meta["val"].dim()
    ]
    found = []
    for n, a in zip(node.args, args, strict=True):
        for dtype in full:
            if not isinstance(a, Value) or isinstance(a, Number) or a.scores:
                continue
            own = n.meta["val"].dtype
            if torch.bool in (own, dtype) or own.is_floating_point != dtype.is_floating_point:
                continue
            if torch.promote_types(own, dtype) != own:
                a = Call(tensors=a.tensors, args=(a,), dtype=dtype)
        found.append(a)
    return tuple(found)


def _along(place: Place) -> set[int]:
    return {axis for index in place for axis in index.axes}


def _moved(node: Any, args: Sequence[Any]) -> Value | None:
    """A position and a whole number are a position."""
    if node.target is not aten.add.Tensor or node.kwargs or len(args) < 2:
        return None
    for one, other in (args, args[::-1]):
        by = other.number if isinstance(other, Number) else other
        whole = (isinstance(by, int) and not isinstance(by, bool)) or (
            isinstance(other, Number) and is_integer(by)
        )
        if isinstance(one, Position) and whole and node.meta["val"].dtype == torch.int64:
            return dataclasses.replace(one, start=one.start + by)
    return None


def _is_offset(start: Any) -> bool:
    """Whether a position is known not to count from the end."""
    return start >= 0 if isinstance(start, int) else bool(sympy.sympify(start).is_nonnegative)


def _positions(node: Any, place: Place) -> Value | None:
    start, step = 0, 1
    if node.target is not aten.arange.default:
        start = node.args[0]
    if node.target is aten.arange.start_step and len(node.args) > 2:
        step = node.args[2]
    start, step = size_of(start), size_of(step)
    if not all(isinstance(n, int) or is_integer(n) for n in (start, step)):
        return None
    own = node.meta["val"].dtype
    found = Position(index=place[0], start=start, step=step)
    return found if own == torch.int64 else Call(op=None, args=(found,), dtype=own)


def _folded(op: Any, args: Sequence[Any], kwargs: dict[str, Any], own: torch.dtype) -> Any:
    values = [a.number if isinstance(a, Number) else None for a in args]
    if not all(is_plain(v) for v, a in zip(values, args, strict=True) if isinstance(a, Number)):
        return None
    tensors = [
        torch.tensor(v, dtype=a.dtype) if isinstance(a, Number) else a
        for v, a in zip(values, args, strict=True)
    ]
    found = op(*tensors, **kwargs)
    return Number(number=found.to(own).item(), dtype=own)
