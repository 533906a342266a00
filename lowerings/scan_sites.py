"""Scans in a graph behind autograd: which node is one, and its program before anything is fused."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings.scan_members import Site
from inductor_ext.lowerings.scan_places import Step, expansion
from inductor_ext.templates import scan_forms
from inductor_ext.templates.scan_program import Input, Program

from inductor_ext import compat, compat_scans, scan_operations, scan_pointwise
from inductor_ext.editing import same_shape, value

aten = torch.ops.aten

NAMES = {
    aten.cumsum.default: "sum",
    aten.cumprod.default: "prod",
    aten.logcumsumexp.default: "logsumexp",
    aten.cummax.default: "cummax",
    aten.cummin.default: "cummin",
}
_STATES = {
    "tl.float64": "fp64",
    "tl.float32": "fp32",
    "tl.int64": "int64",
    "tl.int32": "int32",
    "tl.int16": "int32",
    "tl.int8": "int32",
    "tl.uint8": "int32",
    "tl.int1": "int1",
}


_IDENTITIES = {
    "sum": "s0 = tl.zeros_like(s0)",
    "prod": "s0 = tl.zeros_like(s0) + 1",
    "logsumexp": 's0 = tl.zeros_like(s0) + float("-inf")\ns1 = tl.zeros_like(s1)',
}


RECURRENCE = "cumprod(a) cumsum(b / cumprod(a))"


class NoSite(Exception):
    """Why a scan has no program; the message is one sentence."""


def _type(dtype: torch.dtype) -> str:
    try:
        return scan_operations.computed_type(dtype)
    except scan_operations.Unknown as error:
        raise NoSite(str(error)) from None


def _results(node: Any, count: int) -> tuple[tuple[Any, ...], ...]:
    """The nodes that take result 0, 1, ... out of a tuple."""
    users = [u for u in node.users if u.target is operator.getitem]
    if len(users) != len(node.users):
        raise NoSite("its results are read as a tuple")
    return tuple(tuple(u for u in users if u.args[1] == i) for i in range(count))


def _is_short(size: Any) -> bool:
    bound = compat.upper_bound(compat.expr(size))
    return bound is not None and bound < 2**31


def _aten(node: Any) -> Site:
    """cumsum and the like."""
    name, x = NAMES[node.target], node.args[0]
    source, results = value(x), value(node)
    if source.dim() == 0:
        raise NoSite("a number is not scanned")
    dim = node.args[1] % source.dim()
    pair = name in ("cummax", "cummin")
    dtype = results[0].dtype if pair else results.dtype
    kind = _type(dtype)
    _type(source.dtype)
    try:
        form = scan_forms.form(name, dtype, wide=not _is_short(source.shape[dim]))
    except TypeError as error:
        raise NoSite(str(error)) from None
    widened = f"v = x0.to({kind})"
    if dtype != source.dtype and dtype in (torch.bfloat16, torch.float16):
        widened = f"v = x0.to({scan_operations.stored_type(dtype)}).to({kind})"
    wide = f"v = v.to(tl.{scan_forms_type(form.states[0])})"
    text = scan_forms.LOGARITHM if name == "logsumexp" else "s0"
    consume = f"y0 = ({text}).to({kind})"
    outputs: tuple[torch.dtype, ...] = (dtype,)
    if pair:
        consume, outputs = f"{consume}\ny1 = s1.to(tl.int64)", (dtype, torch.int64)
    program = Program(
        inputs=(Input(source.dtype),),
        outputs=outputs,
        states=form.states,
        produce=f"{widened}\n{wide}\n{form.lift}",
        combine=form.combine,
        consume=consume,
    )
    nodes = _results(node, 2) if pair else ((node,),)
    what = node.target.overloadpacket.__name__
    return Site(node, what, program, (x,), nodes, dim, identity=_IDENTITIES.get(name))


def scan_forms_type(state: str) -> str:
    """A state's type in Triton's own words."""
    return {"fp32": "float32", "fp64": "float64"}.get(state, state)


def _states(leaves: list[Any]) -> tuple[str, ...]:
    return tuple(_STATES[_type(value(leaf).dtype)] for leaf in leaves)


def _of_combine(node: Any, combine: str, leaves: list[Any]) -> Site:
    """A scan of ``leaves`` along their first dimension by a text that combines their states."""
    states = _states(leaves)
    dtypes = tuple(value(leaf).dtype for leaf in leaves)
    kinds = [_type(dtype) for dtype in dtypes]
    program = Program(
        inputs=tuple(Input(dtype) for dtype in dtypes),
        outputs=dtypes,
        states=states,
        produce="\n".join(f"s{i} = x{i}.to({kind})" for i, kind in enumerate(kinds)),
        combine=combine,
        consume="\n".join(f"y{i} = s{i}" for i in range(len(kinds))),
    )
    nodes = _results(node, len(leaves))
    return Site(node, "associative_scan", program, tuple(leaves), nodes, 0)


def _higher_order(node: Any) -> Site:
    """associative_scan, along the first dimension of all its leaves."""
    function, leaves = node.args[:2]
    graph = getattr(node.graph.owning_module, function.target).graph
    try:
        combine = scan_pointwise.combine(graph)
    except scan_operations.Unknown as error:
        raise NoSite(str(error)) from None
    return _of_combine(node, combine, list(leaves))


# --- a recurrence written with cumulative products ------------------------------------------------


def recurrence_of(node: Any) -> Site | None:
    """h_t = a_t h_(t-1) + b_t, at its last node, written as P cumsum(b / P), where P = cumprod(a),
    or exp(L) with L = cumsum(log a); None for another. Instead of b / P also b times 1 / P or
    exp(-L). The recurrence has a value where P has left the range of its dtype.
    """
    if node.target is not aten.mul.Tensor:
        return None
    for product, total in (node.args[:2], node.args[1::-1]):
        if _is(product, aten.cumprod.default):
            sums = product
        elif _is(product, aten.exp.default) and _is(product.args[0], aten.cumsum.default):
            sums = product.args[0]
        else:
            continue
        if not _is(total, aten.cumsum.default):
            continue
        found = _over(total.args[0], product)
        if found is None:
            continue
        a, (b, *inverse) = sums.args[0], found
        parts = {sums, product, *inverse, total.args[0], total}
        chain = [a, b, *parts, node]
        if not all(isinstance(n, torch.fx.Node) for n in chain):
            continue
        rank, dtype = value(node).dim(), value(node).dtype
        if (
            dtype.is_floating_point
            and all(value(n).dtype == dtype for n in chain)
            and all(same_shape(value(n).shape, value(node).shape) for n in chain)
            and sums.args[1] % rank == total.args[1] % rank
            and all(set(n.users) <= {*parts, node} for n in parts)
        ):
            site = _affine(node, a, b, total.args[1] % rank, logarithms=sums is not product)
            return dataclasses.replace(site, parts=tuple(parts))
    return None


def _is(node: Any, target: Any) -> bool:
    return getattr(node, "target", None) is target


def _over(ratio: Any, product: Any) -> tuple[Any, ...] | None:
    """b of b / ``product``, and the nodes of the inverse where it is multiplied by that."""
    if _is(ratio, aten.div.Tensor) and ratio.args[1] is product and not ratio.kwargs:
        return (ratio.args[0],)
    if not _is(ratio, aten.mul.Tensor):
        return None
    for b, inverse in (ratio.args[:2], ratio.args[1::-1]):
        times = (inverse,) if _is(inverse, aten.mul.Tensor) and inverse.args[1] == 1 else ()
        if times:  # as 1 / P is traced
            inverse = inverse.args[0]
        if _is(inverse, aten.reciprocal.default) and inverse.args[0] is product:
            return (b, inverse, *times)
        if _is(inverse, aten.exp.default) and _is(product, aten.exp.default):
            negative = inverse.args[0]
            if _is(negative, aten.neg.default) and negative.args[0] is product.args[0]:
                return b, inverse, negative
    return None


def is_recurrence(site: Site) -> bool:
    """Whether a site is one of ``recurrence_of``."""
    return site.node.target is aten.mul.Tensor


def _affine(node: Any, a: Any, b: Any, dim: int, logarithms: bool) -> Site:
    dtype = value(node).dtype
    kind, form = _type(dtype), scan_forms.form("affine", dtype)
    factor = f"libdevice.exp(x0.to({kind}))" if logarithms else f"x0.to({kind})"
    program = Program(
        inputs=(Input(dtype), Input(dtype)),
        outputs=(dtype,),
        states=form.states,
        produce=f"s0 = {factor}\ns1 = x1.to({kind})",
        combine=form.combine,
        consume="y0 = s1",
    )
    what = "exp(cumsum(g)) cumsum(b / exp(cumsum(g)))" if logarithms else RECURRENCE
    return Site(node, what, program, (a, b), ((node,),), dim)


# --- operations of the package, which are registered when they are first used --------------------


def _arguments(node: Any) -> list[Any]:
    """A node's arguments in the order of its operation, defaults filled in."""
    schema = node.target._schema.arguments
    return [
        node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
        for i, a in enumerate(schema)
    ]


def _scan(node: Any) -> Site:
    from inductor_ext.ops import _scan_programs as programs

    x, resets, op, dim, reverse, exclusive, *_ = _arguments(node)
    tensor, y, flags = value(x), value(node), resets is not None
    dim, pair = int(dim), isinstance(value(node), (tuple, list))
    dtype = tensor.dtype if pair else y.dtype
    short = _is_short(tensor.shape[dim]) if pair else False
    program = programs.scan(tensor.dtype, flags, op, reverse, exclusive, dtype, short)
    nodes = _results(node, 2) if pair else ((node,),)
    return Site(node, f"scan {op}", program, _given(x, resets), nodes, dim)


def _given(*nodes: Any) -> tuple[Any, ...]:
    return tuple(n for n in nodes if n is not None)


def _scan_backward(node: Any) -> Site:
    from inductor_ext.ops import _scan_programs as programs

    g, x, y, resets, op, dim, reverse, exclusive = _arguments(node)
    dtypes = [value(n).dtype for n in (g, x, y)]
    program = programs.scan_backward(*dtypes, resets is not None, op, reverse, exclusive)
    read = programs.scan_backward_inputs(g, x, y, resets, op, exclusive)
    return Site(node, f"scan {op}, gradient", program, tuple(read), ((node,),), int(dim))


def _initial(read: list[Any], h0: Any, like: Any, dim: int) -> dict[int, tuple[Step, ...]]:
    """Add the state in front of a recurrence to what is read; how it is expanded."""
    if h0 is None:
        return {}
    read.append(h0)
    steps = Step(aten.unsqueeze.default, (dim,)), expansion(like)
    return {len(read) - 1: steps}


def _recurrence(node: Any) -> Site:
    from inductor_ext.ops import _scan_programs as programs

    a, b, h0, dim, reverse = _arguments(node)
    read = [a, b]
    expanded = _initial(read, h0, b, int(dim))
    program = programs.recurrence(value(b).dtype, h0 is not None, reverse)
    what = "linear_recurrence"
    return Site(node, what, program, tuple(read), ((node,),), int(dim), expanded)


def _recurrence_backward(node: Any) -> Site:
    from inductor_ext.ops import _scan_programs as programs

    g, a, h, h0, dim, reverse = _arguments(node)
    read = [g, a, h]
    expanded = _initial(read, h0, h, int(dim))
    dtypes = value(h).dtype, value(g).dtype
    program = programs.recurrence_backward(*dtypes, h0 is not None, reverse)
    what, nodes = "linear_recurrence, gradient", _results(node, 2)
    return Site(node, what, program, tuple(read), nodes, int(dim), expanded)


def _associative(node: Any) -> Site:
    from inductor_ext.ops import _combine_programs as programs

    leaves, text, dim, reverse = _arguments(node)
    try:
        program = programs.forward(text, tuple(value(leaf).dtype for leaf in leaves), reverse)
    except programs.NoProgram as error:
        raise NoSite(str(error)) from None
    nodes = _results(node, len(leaves))
    return Site(node, "associative_scan", program, tuple(leaves), nodes, int(dim))


def _associative_backward(node: Any) -> Site:
    from inductor_ext.ops import _combine_programs as programs

    grads, xs, ys, text, dim, reverse, present = _arguments(node)
    dtypes, incoming = (tuple(value(n).dtype for n in nodes) for nodes in (xs, grads))
    try:
        made = programs.backward(text, dtypes, incoming, tuple(present), reverse)
    except programs.NoProgram as error:
        raise NoSite(str(error)) from None
    given = {"g": dict(zip(present, grads, strict=True)), "x": xs, "y": ys}
    read = tuple(given[kind][i] for kind, i in made.inputs)
    nodes = _results(node, len(made.results))
    what = "associative_scan, gradient"
    return Site(node, what, made.program, read, nodes, int(dim))


_MAKERS: dict[Any, Callable[[Any], Site]] = {op: _aten for op in NAMES}
_MAKERS[compat_scans.associative_scan()] = _higher_order
_OWN: dict[str, Callable[[Any], Site]] = {
    "inductor_ext::scan": _scan,
    "inductor_ext::scan_with_index": _scan,
    "inductor_ext::scan_backward": _scan_backward,
    "inductor_ext::linear_recurrence": _recurrence,
    "inductor_ext::linear_recurrence_backward": _recurrence_backward,
    "inductor_ext::associative_scan": _associative,
    "inductor_ext::associative_scan_backward": _associative_backward,
}


def _maker(node: Any) -> Callable[[Any], Site] | None:
    if node.op != "call_function":
        return None
    if is_own(node):
        return _OWN.get(node.target._schema.name)
    return _MAKERS.get(node.target)


def is_scan(node: Any) -> bool:
    """Whether a node scans."""
    return _maker(node) is not None


def is_own(node: Any) -> bool:
    """Whether a node is an operation of this package, which has no stock lowering."""
    return (
        isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "inductor_ext"
    )


def is_beyond_stock(node: Any) -> bool:
    """Whether stock raises at a node: its combine function is given sizes."""
    higher_order = node.target is compat_scans.associative_scan()
    return higher_order and bool(node.args[2:] and node.args[2]) and not compat_scans.takes_sizes()


def site_of(node: Any) -> Site:
    """A node that scans, or ends a recurrence, as a site. Raises NoSite."""
    maker = _maker(node)
    if maker is not None:
        return maker(node)
    found = recurrence_of(node)
    assert found is not None
    return found
