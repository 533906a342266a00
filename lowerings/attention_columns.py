"""Uses of attention's weights for which they need not be there: sums over the last query rows of
what each key was given (SnapKV, https://arxiv.org/abs/2404.14469), and the one row of a decode step
(H2O, https://arxiv.org/abs/2306.14048)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from inductor_ext.lowerings.attention_operands import Sizes, arranged, straight
from inductor_ext.lowerings.attention_places import Axes, NoPlace, Place, dtype_of, same
from inductor_ext.lowerings.attention_replacement import Emitted, Plan, repeated
from inductor_ext.lowerings.attention_sites import Site
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import Program

_SUMS = {aten.sum.dim_IntList, aten.mean.dim}


@dataclasses.dataclass
class Columns:
    """A value that is a sum of weights: ``result`` is its node, its elements at ``place``;
    ``reduced`` are the axes that are summed; of rows those from ``first`` on. ``share``: what the
    sum is divided by."""

    result: Any
    place: Place
    reduced: tuple[int, ...]
    first: Any
    share: float
    inside: list[Any]


def found(site: Site) -> list[Columns]:
    """The sums of weights that a program asks for, the last of nested ones."""
    seen, sums = site.seen, []
    for node in seen.graph.nodes:
        if node.target not in _SUMS or node not in seen.first:
            continue
        try:
            one = _sum(site, node)
        except NoPlace:
            one = None
        if one is not None:
            sums.append(one)
    inner = {n for one in sums for n in one.inside}
    return [one for one in sums if one.result not in inner]


def _sum(site: Site, node: Any) -> Columns | None:
    axes, softmax = site.axes, site.weights.softmax
    place = tuple(axes.new(size) for size in shape_of(node))
    reduced: list[int] = []
    inside: list[Any] = []
    share, at, where = 1.0, node, place
    while at is not softmax:
        if site.seen.is_mutated(at):
            return None
        if at is not node:
            inside.append(at)
        if at.target in _SUMS:
            step = _summed(axes, at, where, reduced)
            if step is None:
                return None
            where, part = step
            share *= part
            at = at.args[0]
        elif at.target is aten._to_copy.default and dtype_of(at).is_floating_point:
            at = at.args[0]
        else:
            below = axes.below(at, where)
            if below is None or at.target is aten.detach.default:
                return None
            at, where = below
        if at.op == "placeholder":
            return None
    first = _joined(site, axes.now(where), reduced)
    if first is None:
        return None
    return Columns(node, place, axes.flat(tuple(reduced)), first, share, inside)


def _summed(axes: Axes, node: Any, place: Place, reduced: list[int]) -> tuple[Place, float] | None:
    """Where a sum reads, and what it divides by."""
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) for d in dims):
        return None
    before = shape_of(node.args[0])
    dims = [d % len(before) for d in dims]
    keeps = len(node.args) > 2 and node.args[2] is True
    left, found, share = iter(place), [], 1.0
    for dim, size in enumerate(before):
        if dim not in dims:
            found.append(next(left))
            continue
        if keeps:
            next(left)
        index = axes.new(size)
        reduced += index.axes
        found.append(index)
        if node.target is aten.mean.dim:
            if not isinstance(size, int):
                return None
            share /= size
    return tuple(found), share


def _joined(site: Site, place: Place, reduced: list[int]) -> Any:
    """The first row that is summed, the axes being those of the site from here on; None where
    something else is summed."""
    axes, own = site.axes, site.axes.now(site.weights.softmax_place)
    rows = axes.flat(site.rows.axes)
    first: Any = 0
    for got, wanted in zip(place, own, strict=True):
        if wanted.axes == rows and rows:
            size = axes.size(rows)
            if not set(got.axes) <= set(axes.flat(tuple(reduced))):
                return None
            if not same(got.offset + axes.size(got.axes), size):
                return None
            first = got.offset
            if got.whole:
                axes.unite(got.axes, wanted.axes)
        elif not got.whole or not wanted.whole:
            return None
        else:
            axes.unite(got.axes, wanted.axes)
    return first


def rows_used(site: Site, plan: Plan, inside: set[Any]) -> list[tuple[Any, Place]]:
    """Weights of one query row that the program uses otherwise."""
    if plan.roles.q:
        return []
    seen, used = site.seen, []
    for node, place in site.weights.parts:
        result = seen.first[site.result]
        users = [user for n, own in seen.of.items() if own is node for user in n.users]
        if any(user is not result and seen.of.get(user) not in inside for user in users):
            used.append((node, place))
    return used


def sums(
    plan: Plan, sizes: Sizes, node: Any, place: Place, reduced: tuple[int, ...], first: Any,
    share: float,
) -> Any:  # fmt: skip
    """The function that makes a value out of what an attention emitted."""
    axes, roles = plan.site.axes, plan.roles
    over = set(axes.flat(reduced))
    grouped = bool(plan.shared) and over.issuperset(plan.shared)

    def made(program: Program, found: Emitted) -> Any:
        k = found.k if grouped else repeated(program, found.k, sizes, axes, plan.shared)
        target = torch.ops.inductor_ext.attention_columns.default
        columns = program.call(
            target, found.q, k, found.total, found.inputs, found.numbers, found.text,
            sizes.made(program, first),
        )  # fmt: skip
        if share != 1:
            columns = program.call("mul", columns, share)
        heads = roles.h[: len(roles.h) - len(plan.shared)] if grouped else roles.h
        own = straight(axes, [roles.b, heads, roles.k])
        groups = [i.axes for i in axes.now(place)]
        columns = arranged(program, sizes, axes, columns, own, groups, False)
        dtype = dtype_of(node)
        return columns if dtype == torch.float32 else program.call("to", columns, dtype)

    return made


def fits(plan: Plan, one: Columns) -> bool:
    """Whether the sums are over rows, or over rows and the heads of a group."""
    axes = plan.site.axes
    over = set(axes.flat(one.reduced)) - set(plan.roles.q)
    known = {a for role in plan.roles for a in role}
    over &= known
    return not over or over == set(plan.shared)
