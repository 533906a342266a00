"""Tensors of the program that an operation is given, and how they are laid out for it."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import sympy
import torch
from inductor_ext.lowerings.attention_places import (
    COPIES,
    Axes,
    Index,
    NoPlace,
    Place,
    dtype_of,
    same,
)
from inductor_ext.lowerings.mhc_entries import aten
from inductor_ext.lowerings.sites import NoSite, Program, program_node

from inductor_ext import compat
from inductor_ext.shadow import Shadow, value_of


@dataclasses.dataclass
class Operand:
    """A node of the program, where its elements are, and the dtype to convert it to. ``after``: a
    node behind which it has its value."""

    node: Any
    place: Place
    dtype: torch.dtype
    after: Any = None


def _is_exact(before: torch.dtype, after: torch.dtype) -> bool:
    return before == after or (before in (torch.float16, torch.bfloat16) and after == torch.float32)


def operand(
    seen: Shadow, axes: Axes, node: Any, place: Place, dtype: torch.dtype, product: Any
) -> Operand:
    """What a factor of ``product`` is in ``dtype``: the node nearest to it, but behind what copies
    it or repeats it along an axis. Raises NoSite, NoPlace."""
    found: tuple[Any, Place] | None = None
    rounded: torch.dtype | None = None
    stale = True
    while True:
        if node in seen.first and (stale or dtype_of(found[0]) != dtype):  # type: ignore[index]
            found, stale = (node, place), False
        if node.target is aten._to_copy.default:
            before, after = dtype_of(node.args[0]), dtype_of(node)
            if node.args[0].meta["val"].device != node.meta["val"].device or rounded is not None:
                break
            if not _is_exact(before, after):
                if found is not None or not before.is_floating_point:
                    break
                rounded = after
            elif found is not None and dtype_of(found[0]) == dtype:
                break
            if seen.is_mutated(node.args[0]) or seen.is_mutated(node):
                break  # it was converted then, or written to since
            node = node.args[0]
            continue
        below = None
        if node.target is not aten.detach.default:
            try:
                below = axes.below(node, place)
            except NoPlace:
                if found is None:
                    raise
        copied = node.target in COPIES
        if below is None or (copied and (seen.is_mutated(below[0]) or seen.is_mutated(node))):
            break
        kept = {a for i in axes.now(place) for a in i.axes}
        left = {a for i in axes.now(below[1]) for a in i.axes}
        stale = stale or node.target in COPIES or kept != left
        node, place = below
    if found is None:
        raise NoSite("q, k or v is computed inside a function of torch")
    own = dtype_of(found[0])
    if rounded not in (None, dtype) or not (_is_exact(own, dtype) or rounded == dtype):
        raise NoSite(f"a factor is in {own}, another in {dtype}")
    after = _last_write(seen, found[0], product)
    place = axes.now(found[1])
    if after is not None:
        return Operand(seen.first[found[0]], place, dtype, after)
    return Operand(program_node(seen, found[0]), place, dtype)


def _last_write(seen: Shadow, node: Any, product: Any) -> Any:
    """The last node that writes to the memory of a factor, if all that do come before its use."""
    used = product.meta["made_in"]
    if not seen.is_mutated(node) or used is None:
        return None
    last = seen.last_write(node)
    return last if last is not None and seen.order[last] < seen.order[used] else None


class Sizes:
    """Nodes that hold sizes, made of what an operation is given anyway. ``symbols`` are nodes of
    the program that are sizes, ``tensors`` those whose sizes may be asked for."""

    def __init__(self, seen: Shadow, tensors: list[Any]) -> None:
        self.tensors = tensors
        self.symbols: dict[Any, Any] = {}
        for node in seen.order:
            value = value_of(node)
            if isinstance(value, torch.SymInt):
                self.symbols.setdefault(compat.expr(value), node)

    def needed(self, size: Any) -> list[Any]:
        """The nodes of the program besides ``tensors`` that a size is made of. Raises NoSite."""
        size = sympy.sympify(size)
        if size.is_number or self._along(size) is not None:
            return []
        if size in self.symbols:
            return [self.symbols[size]]
        if not isinstance(size, (sympy.Add, sympy.Mul)):
            raise NoSite(f"the size {size} is not at hand in this graph")
        return [node for part in size.args for node in self.needed(part)]

    def _along(self, size: Any) -> tuple[Any, int] | None:
        for node in self.tensors:
            for dim, own in enumerate(value_of(node).shape):
                if same(compat.expr(own), size):
                    return node, dim
        return None

    def made(self, program: Program, size: Any) -> Any:
        """A size as an argument of a node: an int, or a node."""
        size = sympy.sympify(size)
        if size.is_number:
            return int(size)
        along = self._along(size)
        if along is not None:
            return program.call("size", *along)
        if size in self.symbols:
            return self.symbols[size]
        function = operator.add if isinstance(size, sympy.Add) else operator.mul
        parts = [self.made(program, part) for part in size.args]
        found = parts[0]
        for part in parts[1:]:
            found = program.call(function, found, part)
        return found


def arranged(
    program: Program, sizes: Sizes, axes: Axes, node: Any, place: Place,
    groups: list[tuple[int, ...]], fill: bool,
) -> Any:  # fmt: skip
    """``node``, whose elements are at ``place``, with one dimension per group of axes. Where it
    varies along none of a group's, that dimension is 1; with ``fill`` it is repeated (stride 0)."""
    place, groups = axes.now(place), [axes.flat(group) for group in groups]
    if [index.axes for index in place] == groups and all(index.whole for index in place):
        return node
    dims: list[tuple[int, ...]] = []
    for dim in reversed(range(len(place))):
        index = place[dim]
        if not index.axes:
            one = value_of(node).shape[dim]
            if isinstance(one, int) and one == 1:
                node = program.call("squeeze", node, dim)
            else:
                node = program.call("select", node, dim, sizes.made(program, index.offset))
            continue
        if not index.whole:
            begin, length = (sizes.made(program, n) for n in (index.offset, axes.size(index.axes)))
            node = program.call("narrow", node, dim, begin, length)
        if len(index.axes) > 1:
            parts = [_once(axes.size((a,))) for a in index.axes]
            if parts.count(-1) > 1:
                raise NoSite("several sizes that one dimension is made of are symbolic")
            node = program.call("unflatten", node, dim, parts)
        dims[:0] = [(a,) for a in index.axes]
    own = [a for (a,) in dims]
    wanted = [a for group in groups for a in group]
    order = [own.index(a) for a in wanted if a in own]
    if sorted(order) != list(range(len(own))):
        raise NoSite("a tensor is read along a dimension that its scores do not have so")
    if order != list(range(len(own))):
        node = program.call("permute", node, *order)
    return _grouped(program, sizes, axes, node, groups, set(own), fill)


def _once(size: Any) -> int:
    return int(size) if sympy.sympify(size).is_number else -1


def _grouped(
    program: Program, sizes: Sizes, axes: Axes, node: Any, groups: list[tuple[int, ...]],
    own: set[int], fill: bool,
) -> Any:  # fmt: skip
    """Axes that follow one another as one dimension per group."""
    rank, full = 0, []
    for group in groups:
        partly = own.intersection(group) and not own.issuperset(group)
        for axis in group:
            missing = axis not in own
            if missing and (fill or partly):
                node = program.call("unsqueeze", node, rank)
                full.append(sizes.made(program, axes.size((axis,))))
                rank += 1
            elif not missing:
                full.append(-1)
                rank += 1
        if not group or (not own.intersection(group) and not fill):
            node = program.call("unsqueeze", node, rank)
            full.append(-1)
            rank += 1
    if any(not isinstance(size, int) or size != -1 for size in full):
        node = program.call("expand", node, *full)
    for dim, group in enumerate(groups):
        length = len(group) if own.intersection(group) or fill else 1
        if length > 1:
            node = program.call("flatten", node, dim, dim + length - 1)
    return node


def straight(axes: Axes, groups: list[tuple[int, ...]]) -> Place:
    """The place of a result with one dimension per group."""
    return tuple(Index(axes.flat(group)) for group in groups)


def hint(size: Any) -> int:
    """How large a size is about."""
    try:
        return int(compat.hint(size))
    except Exception:
        return 2**20  # unknown: as long as sequences are


# --- how results lie in memory --------------------------------------------------------------------

_ORDER = {"transpose", "permute", "swapaxes", "movedim", "unsqueeze"}
_ANY = {"contiguous", "reshape", "flatten"}


def any_layout(node: Any, own: torch.Tensor) -> bool:
    """Whether whatever reads a node of the program gives the same memory of ``own`` in its place,
    however that lies: not so where it looks at ``own`` and copied before."""
    for user in node.users:
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if name not in _ANY | _ORDER or user.args[0] is not node:
            return False
        args, kwargs = torch.fx.node.map_arg((user.args[1:], user.kwargs), value_of)
        function = getattr(torch.Tensor, name) if user.op == "call_method" else user.target
        found = function(own, *args, **kwargs)
        same = _lie_alike(found, value_of(user))
        if not (any_layout(user, found) if name in _ORDER else same):
            return False
    return bool(node.users)


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(compat.expr(n) == 1 or compat.expr(s) == compat.expr(t) for n, s, t in strides)


def laid(program: Program, node: Any, like: Any) -> Any:
    """``node`` in the shape and order in memory of another node."""
    node = program.shaped(node, like)
    wanted = value_of(like)
    if _lie_alike(value_of(node), wanted):
        return node
    order = sorted(range(wanted.dim()), key=lambda d: -hint(compat.expr(wanted.stride(d))))
    dense = program.call("contiguous", program.call("permute", node, *order))
    return program.call("permute", dense, *(order.index(d) for d in range(len(order))))
