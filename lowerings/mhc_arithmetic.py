"""The entries of what is computed: pointwise functions, reductions, products of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings.mhc_arrays import Array, each, indices
from inductor_ext.lowerings.mhc_entries import Reader, add_rule, aten, shape_of
from inductor_ext.lowerings.mhc_terms import NARROW, Entries

# --- pointwise ------------------------------------------------------------------------------------


def _aligned(reader: Reader, node: Any, operands: Any) -> tuple[list[Entries], int] | None:
    """The operands' entries with arrays of one rank, and the result's number of lead dimensions."""
    sizes = shape_of(node)
    leads = [
        len(sizes) - len(shape_of(o)) + entries.lead
        for o in operands
        if isinstance(o, torch.fx.Node) and (entries := reader.of(o)) is not None and entries.lead
    ]
    lead = max(leads, default=reader.leads.get(node, 0))
    rank = len(sizes) - lead
    found: list[Entries | None] = []
    for o in operands:
        entries = None
        if not isinstance(o, torch.fx.Node):
            entries = Entries(Array((), [reader.terms.constant(o)]), 0)
        else:
            entries = reader.of(o)
            if entries is not None and entries.lead:
                entries = entries.in_lead(lead - len(sizes) + len(shape_of(o)))
                if entries is None:
                    return None
                own = shape_of(o)[: entries.lead]
                if own != sizes[lead - entries.lead : lead]:
                    return None
                if any(s != 1 for s in sizes[: lead - entries.lead]):
                    return None
        found.append(entries)
    is_wide = any(e is not None and e.wide is not None for e in found)
    for i, o in enumerate(operands):
        if found[i] is None:
            found[i] = _other(reader, o, sizes, lead, is_wide)
        if found[i] is None:
            return None
    padded = [e.padded(rank) for e in found if e is not None]
    if any(e is None for e in padded):
        return None
    return [e for e in padded if e is not None], lead


def _other(reader: Reader, o: Any, sizes: list[Any], lead: int, is_wide: bool) -> Entries | None:
    """An operand that is not read yet."""
    own = shape_of(o)
    rank = len(sizes) - lead
    of_tokens = lead > 0 and len(own) - rank == lead and own[:lead] == sizes[:lead]
    if of_tokens and reader.outside is not None:
        return reader.outside(reader, o, lead)
    if len(own) <= rank or all(s == 1 for s in own[: len(own) - rank]):
        large = is_wide and bool(own) and own[-1] != 1
        return reader.parameter(o, large)
    return None


def _pointwise(fn: Callable[..., int]) -> Callable[[Reader, Any], Entries | None]:
    def rule(reader: Reader, node: Any) -> Entries | None:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) < 1:
            return None
        operands = [a for a in node.args if isinstance(a, (torch.fx.Node, int, float))]
        if len(operands) != len(node.args) or len(operands) > 2:
            return None
        aligned = _aligned(reader, node, operands)
        if aligned is None:
            return None
        entries, lead = aligned
        wides = {e.wide for e in entries if e.wide is not None}
        if len(wides) > 1:
            return None
        wide = next(iter(wides), None)
        if wide is not None and any(
            e.wide is None and e.array.ndim > wide and e.array.shape[wide] != 1 for e in entries
        ):
            return None
        array = each(lambda *t: fn(reader.terms, *t), *(e.array for e in entries))
        return Entries(reader.rounded(array, node), lead, wide)

    return rule


def _power(terms: Any, x: int, exponent: int) -> int:
    power = terms.constant_of(exponent)
    if power == 2.0:
        return terms.mul(x, x)
    if power == 0.5:
        return terms.apply("sqrt", x)
    if power == -0.5:
        return terms.apply("rsqrt", x)
    if power == -1.0:
        return terms.div(terms.constant(1.0), x)
    return terms.apply("pow", x, exponent)


def _reciprocal(terms: Any, x: int) -> int:
    return _div(terms, terms.constant(1.0), x)


def _div(terms: Any, a: int, b: int) -> int:
    """A quotient; one by a root of a sum of squares is a product."""
    if terms[b][0] == "sqrt":
        return terms.mul(a, terms.apply("rsqrt", terms[b][1]))
    return terms.div(a, b)


def _named(name: str) -> Callable[..., int]:
    return lambda terms, *t: terms.apply(name, *t)


add_rule(_pointwise(lambda t, a, b: t.add(a, b)), aten.add.Tensor, aten.add.Scalar)
add_rule(_pointwise(lambda t, a, b: t.sub(a, b)), aten.sub.Tensor, aten.sub.Scalar)
add_rule(_pointwise(lambda t, a, b: t.sub(b, a)), aten.rsub.Scalar, aten.rsub.Tensor)
add_rule(_pointwise(lambda t, a, b: t.mul(a, b)), aten.mul.Tensor, aten.mul.Scalar)
add_rule(_pointwise(_div), aten.div.Tensor, aten.div.Scalar)
add_rule(_pointwise(_reciprocal), aten.reciprocal.default)
add_rule(_pointwise(_power), aten.pow.Tensor_Scalar)
add_rule(_pointwise(lambda t, a: t.mul(a, t.constant(-1.0))), aten.neg.default)
add_rule(_pointwise(lambda t, a: t.mul(a, a)), aten.square.default)
for _name in ("sigmoid", "exp", "sqrt", "rsqrt", "tanh", "log", "abs", "relu", "silu"):
    add_rule(_pointwise(_named(_name)), getattr(aten, _name).default)
for _op in (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
    add_rule(_pointwise(_named("clamp")), _op)


def _clamp(reader: Reader, node: Any) -> Entries | None:
    entries = reader.of(node.args[0])
    if entries is None:
        return None
    bounds = str((*node.args[1:], *sorted(node.kwargs.items())))
    array = each(lambda t: reader.terms.apply("clamp", t, bounds), entries.array)
    return Entries(reader.rounded(array, node), entries.lead, entries.wide)


add_rule(_clamp, aten.clamp.default)


# --- reductions -----------------------------------------------------------------------------------


def _reduction(fn: Callable[..., int]) -> Callable[[Reader, Any], Entries | None]:
    def rule(reader: Reader, node: Any) -> Entries | None:
        source = node.args[0]
        entries = reader.of(source)
        dims = node.args[1] if len(node.args) > 1 else None
        dims = [dims] if isinstance(dims, int) else dims
        if entries is None or not dims:
            return None
        keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        axes = sorted(d % (entries.lead + entries.array.ndim) - entries.lead for d in dims)
        if axes[0] < 0:
            return None
        whole = entries.shape(reader.hidden)
        count = math.prod(whole[a] for a in axes)
        over_hidden = entries.wide in axes
        kept = [a for a in range(entries.array.ndim) if a not in axes]
        moved = entries.array.transpose([*kept, *axes])
        shape = moved.shape[: len(kept)]
        lines = moved.reshape((math.prod(shape), moved.size // max(math.prod(shape), 1))).rows()
        out = Array(shape, [fn(reader.terms, line, count, over_hidden) for line in lines])
        wide = None
        if entries.wide is not None and not over_hidden:
            wide = entries.wide if keep else kept.index(entries.wide)
        if keep:
            out = out.reshape([1 if a in axes else s for a, s in enumerate(entries.array.shape)])
        return Entries(reader.rounded(out, node), entries.lead, wide)

    return rule


def _sum(terms: Any, parts: list[int], count: int, over_hidden: bool) -> int:
    return terms.over_hidden(parts) if over_hidden else terms.sum(parts)


def _mean(terms: Any, parts: list[int], count: int, over_hidden: bool) -> int:
    return terms.div(_sum(terms, parts, count, over_hidden), terms.constant(count))


def _max(terms: Any, parts: list[int], count: int, over_hidden: bool) -> int:
    return terms.apply("max", str(over_hidden), *sorted(parts))


add_rule(_reduction(_sum), aten.sum.dim_IntList)
add_rule(_reduction(_mean), aten.mean.dim)
add_rule(_reduction(_max), aten.amax.default)


def _softmax(reader: Reader, node: Any) -> Entries | None:
    entries = reader.of(node.args[0])
    if entries is None or entries.wide is not None:
        return None
    axis = node.args[1] % (entries.lead + entries.array.ndim) - entries.lead
    if axis < 0:
        return None
    order = [a for a in range(entries.array.ndim) if a != axis]
    last = entries.array.transpose([*order, axis])
    terms = [reader.terms.apply("softmax", t, *sorted(row)) for row in last.rows() for t in row]
    back = [*range(axis), len(order), *range(axis, len(order))]
    out = Array(last.shape, terms).transpose(back)
    return Entries(reader.rounded(out, node), entries.lead)


add_rule(_softmax, aten._softmax.default)


def _normed(reader: Reader, node: Any) -> Any:
    """F.rms_norm, where the program's torch has an operation of it."""
    source, sizes, *rest = (*node.args, *(None,) * 4)[:4]
    entries, terms = reader.of(source), reader.terms
    if entries is None or entries.wide is None or len(sizes) != entries.array.ndim:
        return None
    weight, eps = rest
    dtype = source.meta["val"].dtype
    squares = [terms.mul(t, t) for t in entries.array.flat]
    mean = terms.div(terms.over_hidden(squares), terms.constant(len(squares) * reader.hidden))
    eps = torch.finfo(dtype).eps if eps is None else eps
    root = terms.apply("rsqrt", terms.add(mean, terms.constant(eps)))
    array = each(lambda t: terms.mul(t, root), entries.array)
    if weight is not None:
        by = reader.parameter(weight, wide=True)
        if by is None or by.wide != entries.wide or by.array.shape != array.shape:
            return None
        array = each(terms.mul, array, by.array)
    if dtype in NARROW:
        array = each(lambda t: terms.round(t, dtype), array)
    normed = Entries(array, entries.lead, entries.wide)
    return normed if isinstance(node.meta["val"], torch.Tensor) else (normed, None)


add_rule(_normed, aten.rms_norm.default, aten._fused_rms_norm.default)


# --- products of matrices -------------------------------------------------------------------------


def _projection(reader: Reader, node: Any) -> Entries | None:
    """[tokens, streams * H] times a weight: a column is a sum over H and the streams, out of which
    the factors are taken that all streams have (a norm in front of the projection)."""
    x, w = node.args[:2]
    entries, terms = reader.of(x), reader.terms
    if entries is None or entries.wide != 0 or entries.lead != 1 or w in reader.found:
        return None
    columns = shape_of(w)[1]
    if not isinstance(columns, int) and not getattr(columns, "is_number", False):
        return None
    if int(columns) > LARGEST_PROJECTION:
        return None
    streams = [list(terms.factors(t)) for t in entries.array.flat]
    common = [f for f in streams[0] if not terms.is_wide(f) and all(f in s for s in streams)]
    for factor in common:
        for s in streams:
            s.remove(factor)
    rest = [terms.mul(*s) for s in streams]
    w, transposed = weight_of(w)
    if w not in reader.leaves:
        reader.leaves.append(w)
    index = reader.leaves.index(w)
    made = [
        terms.mul(terms.make("projected", index, transposed, column, *rest), *common)
        for column in range(int(columns))
    ]
    return Entries(reader.rounded(Array((len(made),), made), node), 1)


LARGEST_PROJECTION = 80  # n (n + 2) columns of 8 streams


def weight_of(node: Any) -> tuple[Any, bool]:
    """(the weight [columns, inputs] or its transpose, whether it is the transpose) of the second
    factor [inputs, columns] of a product."""
    dims = [0, 1]
    if node.target is aten.t.default:
        dims = [1, 0]
    elif node.target is aten.transpose.int:
        dims = [1, 0] if {d % 2 for d in node.args[1:]} == {0, 1} else dims
    elif node.target is aten.permute.default:
        dims = [d % 2 for d in node.args[1]]
    transposed = dims == [0, 1]
    return _exact(node if transposed else node.args[0]), transposed


def _exact(w: Any) -> Any:
    """bf16 weights that are converted to fp32."""
    if w.target is not aten._to_copy.default or w.meta["val"].dtype != torch.float32:
        return w
    source = w.args[0]
    return source if source.meta["val"].dtype == torch.bfloat16 else w


def _batched(reader: Reader, node: Any) -> Entries | None:
    """Products of matrices of every token: one of coefficients, one of streams."""
    a, b = node.args[:2]
    found = [reader.of(a), reader.of(b)]
    for i, other in enumerate((a, b)):
        if found[i] is None:
            if reader.outside is None or shape_of(other)[:1] != shape_of(node)[:1]:
                return None
            found[i] = reader.outside(reader, other, 1)
    left, right = found
    if left is None or right is None or left.lead != 1 or right.lead != 1:
        return None
    if left.wide == 1 or right.wide == 0 or (left.wide is not None) == (right.wide is not None):
        return None
    terms = reader.terms
    rows, columns = left.array.rows(), right.array.transpose([1, 0]).rows()

    def dot(row: list[int], column: list[int]) -> int:
        return terms.sum([terms.mul(x, y) for x, y in zip(row, column, strict=True)])

    shape = len(rows), len(columns)
    out = Array(shape, [dot(rows[p], columns[r]) for p, r in indices(shape)])
    wide = 0 if left.wide is not None else 1
    return Entries(reader.rounded(out, node), 1, wide)


add_rule(_projection, aten.mm.default)
add_rule(_batched, aten.bmm.default)
