"""Causal linear attention, spelled with a state for every token.

    out_t = q_t S_t        S = cumsum over tokens of k_t v_t^T

The outer products are a product broadcast or matrices with an inner size of 1; q is applied by a
product of matrices or a sum; ``einsum`` makes the same of its letters. Which dimension is what
follows from what q, k and v vary along.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from inductor_ext.lowerings.attention_operands import Operand, Sizes, arranged, operand, straight
from inductor_ext.lowerings.attention_places import (
    VIEWS,
    Axes,
    Index,
    Place,
    dtype_of,
    is_view,
)
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import NoSite, Program, Replacement, describe

from inductor_ext import shadow

_MUL, _BMM, _SUM = aten.mul.Tensor, aten.bmm.default, aten.sum.dim_IntList
_CUMSUM = aten.cumsum.default
_MOVES = (
    *VIEWS, aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
)  # fmt: skip


def may_hold_states(graph: Any) -> bool:
    """Whether there is a cumsum at all."""
    return any("cumsum" in str(node.target) for node in graph.nodes)


@dataclasses.dataclass
class Sum:
    """A site: q, k, v, the axes of heads, tokens, and channels of the key and of the value."""

    axes: Axes
    result: Any
    place: Place
    factors: list[Operand]
    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    state: Any


def _is_view(node: Any) -> bool:
    return is_view(node) and node.target is not aten.detach.default


def _down(seen: shadow.Shadow, axes: Axes, node: Any, place: Place) -> tuple[Any, Place]:
    """Behind all views. Raises NoSite, NoPlace."""
    while not seen.is_mutated(node):
        below = axes.below(node, place) if _is_view(node) else None
        if below is None:
            return node, place
        node, place = below
    raise NoSite(f"{node.name} is written to in this graph")


def _two(axes: Axes, node: Any, place: Place, inner: Index) -> list[tuple[Any, Place]]:
    """The factors of a product of matrices, or of one by elements."""
    if node.target is _BMM:
        batch, row, column = place
        return [(node.args[0], (batch, row, inner)), (node.args[1], (batch, inner, column))]
    return [(arg, axes.operand(node, arg, place)) for arg in node.args[:2]]


def _are_tensors(node: Any) -> bool:
    return all(isinstance(arg, torch.fx.Node) for arg in node.args[:2])


def _reads(axes: Axes, place: Place) -> set[int]:
    return {a for index in axes.now(place) for a in index.axes}


def _result(seen: shadow.Shadow, node: Any) -> Any:
    while node not in seen.first:
        users = list(node.users)
        if len(users) != 1 or users[0].target not in _MOVES:
            raise NoSite("the result is used inside a function of torch")
        node = users[0]
    return node


def find(seen: shadow.Shadow, last: Any) -> Sum | None:
    """The site whose last operation this is; None for anything else. Raises NoSite, NoPlace."""
    product = last
    if last.target is _SUM:
        product = last.args[0]
        if product.target is not _MUL or len(last.args[1]) != 1:
            return None
    elif last.target is not _BMM:
        return None
    if not _are_tensors(product):
        return None
    sides = [side for side in (0, 1) if _leads_to_cumsum(product.args[side])]
    if len(sides) != 1:
        return None
    axes, result = Axes(), _result(seen, last)
    place = at = tuple(axes.new(size) for size in shape_of(result))
    node = result
    while node is not last:
        below = axes.below(node, at)
        assert below is not None
        node, at = below
    if last.target is _SUM:
        dim = last.args[1][0] % len(shape_of(product))
        inner = axes.new(shape_of(product)[dim])
        at = (*at[:dim], inner, *at[dim + (len(at) == len(shape_of(product))) :])
    else:
        inner = axes.new(shape_of(product.args[0])[-1])
    factors = _two(axes, product, at, inner)
    query = factors[1 - sides[0]]
    state, where = _down(seen, axes, *factors[sides[0]])
    dim = state.args[1] % len(where)
    tokens = where[dim]
    outer, where = _down(seen, axes, state.args[0], where)
    one = outer.target is _BMM and shape_of(outer.args[0])[-1] == 1
    if not (one or outer.target is _MUL) or not _are_tensors(outer):
        return None
    if not tokens.whole or tokens.offset != 0 or not inner.axes:
        raise NoSite("a part of the sums is read")
    if seen.is_mutated(last) or seen.is_mutated(product):
        raise NoSite("a value in between is written to in this graph")
    dtype = dtype_of(state)
    if dtype_of(last) != dtype or dtype_of(outer) != dtype:
        raise NoSite("sums are expected in the dtype of what is summed")
    found = [
        operand(seen, axes, *factor, dtype, last)
        for factor in (query, *_two(axes, outer, where, Index()))
    ]
    if any(factor.after is not None for factor in found):
        raise NoSite("an input is written to in this graph")
    return _roles(axes, result, place, found, tokens, inner, state)


def _leads_to_cumsum(node: Any) -> bool:
    while _is_view(node):
        node = node.args[0]
    return node.target is _CUMSUM


def _roles(
    axes: Axes, result: Any, place: Place, found: list[Operand], tokens: Index, inner: Index,
    state: Any,
) -> Sum | None:  # fmt: skip
    """None where it is no sum of outer products that queries are applied to."""
    tokens_axes, keys = axes.flat(tokens.axes), axes.flat(inner.axes)
    read = [_reads(axes, factor.place) for factor in found]
    if set(keys) <= read[2] and not set(keys) & read[1]:
        found, read = [found[0], found[2], found[1]], [read[0], read[2], read[1]]
    own = [a for index in axes.now(place) for a in index.axes]
    values = tuple(a for a in own if a in read[2] and a not in read[0] | read[1])
    heads = tuple(a for a in own if a not in (*tokens_axes, *values))
    rest = {*heads, *tokens_axes}
    if (
        not values
        or not set(tokens_axes) <= set(own)
        or not all(set(tokens_axes) <= r for r in read)
        or not (set(keys) <= read[0] <= rest | set(keys))
        or not (set(keys) <= read[1] <= rest | set(keys))
        or not read[2] <= rest | set(values)
    ):
        return None
    return Sum(axes, result, place, found, heads, tokens_axes, keys, values, state)


def replacement(seen: shadow.Shadow, site: Sum, name: str) -> Replacement:
    axes, q = site.axes, site.factors[0]
    inputs = list(dict.fromkeys(factor.node for factor in site.factors))
    sizes = Sizes(seen, inputs)
    out = seen.first[site.result]
    groups = [site.heads[:1], site.heads[1:], site.tokens]

    def emit(program: Program) -> Any:
        given = [
            arranged(program, sizes, axes, factor.node, factor.place, [*groups, last], True)
            for factor, last in zip(site.factors, (site.keys, site.keys, site.values), strict=True)
        ]
        target = torch.ops.inductor_ext.linear_attention.default
        both = program.call(target, *given, None, None, 1.0, 0)
        found = program.call(operator.getitem, both, 0)
        own = straight(axes, [*groups, site.values])
        wanted = [index.axes for index in site.place]
        return arranged(program, sizes, axes, found, own, wanted, False)

    made = {out: lambda program, found: program.shaped(found, out)}
    return Replacement(
        name, name, describe(name, q.node, shadow.value_of(q.node)), "no state for every token",
        inputs, made, _states(site, out, inputs), emit,
    )  # fmt: skip


def _states(site: Sum, out: Any, inputs: list[Any]) -> set[Any]:
    """The nodes of the program that hold a state for every token."""
    size = site.state.meta["val"].numel()
    found: set[Any] = set()
    stack = list(out.all_input_nodes)
    while stack:
        node = stack.pop()
        tensor = shadow.value_of(node)
        if node in found or node in inputs or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.numel() == size:
            found.add(node)
        stack.extend(node.all_input_nodes)
    return found
