"""What replaces attention in a graph: where it pays, the arguments, what the result becomes."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from inductor_ext.lowerings.attention_function import Function, Roles
from inductor_ext.lowerings.attention_masks import with_infinity
from inductor_ext.lowerings.attention_operands import (
    Operand,
    Sizes,
    any_layout,
    arranged,
    hint,
    laid,
    operand,
    straight,
)
from inductor_ext.lowerings.attention_places import (
    Axes,
    Index,
    Place,
    dtype_of,
    equal,
)
from inductor_ext.lowerings.attention_scores import Scores
from inductor_ext.lowerings.attention_sites import Site
from inductor_ext.lowerings.mhc_entries import shape_of
from inductor_ext.lowerings.sites import DTYPES, NoSite, Program, Replacement, program_node

from inductor_ext import compat, compat_fx
from inductor_ext.ops import _attention as operation
from inductor_ext.ops import _attention_choice as choice
from inductor_ext.shadow import value_of

NAME = "attention"
# Bytes of scores in fp32, or of keys and values, from which a site of known sizes is replaced.
# Its launches are repeated from a tape (ops/_tape): that takes the host 36 to 46 us forward and 100
# backward, some 30 more than the kernels that are replaced, and a training step no more. At 64 MiB
# of scores the card is faster by 34 and 80 us, at 256 MiB by 150 and 340 or more (H200, 16 heads of
# 64, results/host_time.csv); from 128 MiB on stock keeps the card busier than the host.
LEAST_STATIC = 2**27, 2**26
# The same where a CUDA graph is replayed: the host's time does not count.
LEAST_REPLAYED = 2**26, 2**26
# Of symbolic sizes: other sizes in each call are decided anew each time, which costs the host more
# (0.2 ms, 0.8 with gradients) than fewer scores save the card.
LEAST_SCORES, LEAST_KEYS = 2**29, 2**26


@dataclasses.dataclass
class Plan:
    """The operands of an operation and their groups of axes."""

    site: Site
    roles: Roles
    shared: tuple[int, ...]  # heads of one KV head: the last of roles.h
    channels: list[tuple[int, ...]]  # of each part of q and k
    values: tuple[int, ...]
    q: list[Operand]
    k: list[Operand]
    v: Operand


def _factors(site: Site, node: Any, place: Place) -> tuple[tuple[Any, Place, Any, Place], Index]:
    """q and k of a product, and their channels."""
    axes, (one, other) = site.axes, node.args[-2:]
    *batch, first, second = axes.now(place)
    inner = axes.new(shape_of(one)[-1])
    turned = first.axes == axes.flat(site.keys.axes) and first.whole
    left, right = (one, (*batch, first, inner)), (other, (*batch, inner, second))
    return ((*right, *left) if turned else (*left, *right)), inner


def _own(axes: Axes, operands: list[Operand]) -> set[int]:
    return {a for o in operands for i in axes.now(o.place) for a in i.axes}


def plan(site: Site) -> Plan:
    """Raises NoSite, NoPlace."""
    assert site.scores is not None
    parts = [_factors(site, node, place) for node, place in site.scores.product.parts]
    return operands(site, [pair for pair, _ in parts], [inner for _, inner in parts])


def operands(site: Site, pairs: list[tuple[Any, Place, Any, Place]], inner: list[Index]) -> Plan:
    """The plan of a site whose product is the sum of those of ``pairs`` (q, its place, k, its
    place) along ``inner``."""
    axes, (value_node, value_at) = site.axes, site.value
    dtype = dtype_of(value_node)
    used = (*(node for node, _ in (site.scores.product.parts if site.scores else [])),)
    used = used or (site.result,) * len(pairs)
    q = [operand(site.seen, axes, p[0], p[1], dtype, n) for p, n in zip(pairs, used, strict=True)]
    k = [operand(site.seen, axes, p[2], p[3], dtype, n) for p, n in zip(pairs, used, strict=True)]
    v = operand(site.seen, axes, value_node, value_at, dtype, used[0])
    channels = [axes.flat(index.axes) for index in inner]
    keys = axes.flat(site.keys.axes)
    of_values = [i for i in axes.now(site.place) if i.axes]
    place = axes.now(site.weights.place)
    order = [a for i in place for a in i.axes if a not in keys]
    values = tuple(a for i in of_values for a in i.axes if a not in order)
    kv = _own(axes, [*k, v]) - set(keys) - set(sum(channels, ())) - set(values)
    rows = _rows(axes, place, keys, kv, order)
    at = [i.axes for i in place].index(keys)
    near = set(place[at - 1].axes) if at else set()
    if near & kv and near - _own(axes, [v]):  # each row's keys would be in memory
        raise NoSite("its keys are others for each query row, and its values are not")
    rest = [a for a in order if a not in rows]
    outer = list(rest)
    shared: tuple[int, ...] = ()
    while outer and outer[-1] not in kv:
        shared = (outer.pop(), *shared)
    heads = tuple(outer[-1:]) if len(outer) > 1 else ()
    batch = tuple(outer[: len(outer) - len(heads)])
    return Plan(site, Roles(batch, heads + shared, rows, keys), shared, channels, values, q, k, v)


def _rows(
    axes: Axes, place: Place, keys: tuple[int, ...], kv: set[int], order: list[int]
) -> tuple[int, ...]:
    """Which axes are the query rows: those next to the keys, if q alone varies along them (none, if
    there is one row); else the longest along which only q varies."""
    dims = [i.axes for i in place]
    at = dims.index(keys)
    near = dims[at - 1] if at else ()
    if at and not kv.intersection(near):
        return near
    beside = {a for dim in dims if kv.intersection(dim) for a in dim}  # heads that share keys
    free = [a for a in order if a not in kv and a not in beside]
    return (max(free, key=lambda a: hint(axes.size((a,)))),) if free else ()


@dataclasses.dataclass
class Emitted:
    """Nodes that an operation was given and gave; ``total`` is the log-sum-exp with all sinks."""

    out: Any
    lse: Any
    total: Any
    q: Any
    k: Any
    inputs: list[Any]
    numbers: list[Any]
    text: str


def replacement(made: Plan, text_of: Any, uses: Any = None) -> Replacement:
    """``uses(plan, sizes, inside)`` gives what else is asked of the weights: (value, function that
    makes it, values in between)."""
    site, axes, roles = made.site, made.site.axes, made.roles
    seen, scores = site.seen, site.scores
    assert scores is not None and site.score is not None
    dtype = dtype_of(site.value[0])
    if dtype not in DTYPES:
        raise NoSite(f"q, k and v are expected in one of fp16, bf16 and fp32, got {dtype}")
    if not compat_fx.writes_triton(value_of(seen.first[site.result]).device):
        raise NoSite("it is not on a card")
    _check_size(made, dtype)
    _check_heads(made)
    kv_heads = roles.h[: len(roles.h) - len(made.shared)]
    inputs = [Operand(program_node(seen, n), p, dtype_of(n)) for n, p in scores.inputs]
    sinks = [Operand(program_node(seen, n), p, dtype_of(n)) for n, p in _sinks(site)]
    sample, empty, means = _sample(axes, roles, inputs), site.weights.empty, False
    function = Function(site.score, axes, roles)
    text, keeps = text_of(function, sample, empty)
    # Few rows read everything anyway, and the mean would read it twice. A log-sum-exp that is asked
    # for is finite where a row keeps nothing.
    also = uses is not None or bool(site.weights.totals)
    dropout = site.weights.dropout
    called, scale = "", 1.0
    if dropout and not also and not inputs and not function.numbers and not sinks:
        # cuDNN's dropout is faster than ours, and what stock may have found here as well.
        called, scale = compat_fx.apart(lambda: operation.sdpa_form(text, empty))
        if called == "causal" and not equal(axes.size(roles.q), axes.size(roles.k)):
            called = ""
    # A row's mean is not the mean of what a dropout leaves of it.
    if not keeps and not also and not dropout and hint(axes.size(roles.q)) > choice.FEW_ROWS:
        score = with_infinity(site.score, [o.dtype for o in inputs], is_trained(site))
        if score is not None:
            function, means = Function(score, axes, roles), not sinks
            empty = "zero"
            text, _ = text_of(function, sample, empty)
    tensors = list(dict.fromkeys(o.node for o in (*made.q, *made.k, made.v, *inputs, *sinks)))
    sizes = Sizes(seen, tensors)
    factors = (*made.q, *made.k, made.v)
    needed = [o.after for o in factors if o.after is not None]
    needed += [n for size in function.numbers for n in sizes.needed(size)]
    for axis in (*roles.b, *roles.h, *roles.q, *roles.k, *sum(made.channels, ()), *made.values):
        needed += sizes.needed(axes.size((axis,)))
    result = seen.first[site.result]
    totals = _totals(site)

    def emit(program: Program) -> Any:
        def of(one: Operand, groups: list[tuple[int, ...]], fill: bool) -> Any:
            node = one.node
            if not fill and _is_expanded_leaf(value_of(node)):
                node = program.call("clone", node, memory_format=torch.contiguous_format)
            found = arranged(program, sizes, axes, node, one.place, groups, fill)
            if value_of(found).dtype != one.dtype:
                found = program.call("to", found, one.dtype)
            return found

        def joined(parts: list[Operand], groups: list[tuple[int, ...]]) -> Any:
            found = [of(p, [*groups, c], True) for p, c in zip(parts, made.channels, strict=True)]
            return found[0] if len(found) == 1 else program.call(torch.cat, found, -1)

        q = joined(made.q, [roles.b, roles.h, roles.q])
        k = joined(made.k, [roles.b, kv_heads, roles.k])
        v = of(made.v, [roles.b, kv_heads, roles.k, made.values], True)
        given = [of(one, list(roles), False) for one in inputs]
        numbers = [sizes.made(program, n) for n in function.numbers]
        target = torch.ops.inductor_ext.attention.default
        if called:
            out = program.call(
                F.scaled_dot_product_attention, q, k, v, dropout_p=dropout,
                is_causal=called == "causal", scale=scale, enable_gqa=bool(made.shared),
            )  # fmt: skip
            return Emitted(out, None, None, q, k, given, numbers, text)
        more = (seed(program, q), dropout) if dropout else ()
        both = program.call(target, q, k, v, given, numbers, text, empty, *more)
        out, lse = (program.call(operator.getitem, both, i) for i in (0, 1))
        if means:
            out = _or_mean(program, out, lse, v, made.shared, sizes, axes)
        total = lse
        for sink in sinks:
            own = of(sink, [roles.b, roles.h, roles.q], False)
            out, total = _beside(program, out, total, own)
        return Emitted(out, lse, total, q, k, given, numbers, text)

    def shaped(program: Program, found: Any) -> Any:
        groups = [i.axes for i in axes.now(site.place)]
        own = straight(axes, [roles.b, roles.h, roles.q, made.values])
        out = arranged(program, sizes, axes, found.out, own, groups, False)
        return out if any_layout(result, value_of(out)) else laid(program, out, result)

    outputs = {result: shaped}
    inside = {*site.weights.passed, *scores.visited}
    for total, at, between in totals:
        outputs[seen.first[total]] = _lse(sizes, axes, total, at, roles)
        inside.update(between)
    asked: set[Any] = set()
    for value, make, between in uses(made, sizes, inside) if uses is not None else ():
        inside.update(between)
        asked.add(value)
        # Of the nodes that stand for it, as a conversion that changes nothing does.
        nodes = [n for n, own in seen.of.items() if own is value]
        used = [n for n in nodes if any(seen.of.get(u) is not value for u in n.users)]
        outputs.update(dict.fromkeys(used, _once(make)))
    drawn = {value.meta["made_in"] for value in site.weights.drawn} & seen.drawing
    if dropout and compat.draws_as_eager():
        raise NoSite("its dropout is to be that of eager (fallback_random)")
    return Replacement(
        NAME, NAME, _described(made), f"no scores in memory: {text}",
        list(dict.fromkeys([*tensors, *needed])), outputs,
        {n for n, value in seen.of.items() if value in inside or value in asked} - {*outputs}, emit,
        drawn=drawn,
    )  # fmt: skip


def seed(program: Program, beside: Any) -> Any:
    """A seed, drawn whenever the program runs, on the device of a value."""
    return program.call(
        torch.randint, 0, 1 << 62, (1,), dtype=torch.int64, device=value_of(beside).device
    )


def _is_expanded_leaf(x: torch.Tensor) -> bool:
    """Whether each element is asked for its gradient, though they share memory: of an expanded
    input the operation gives only the sum."""
    return x.requires_grad and x.is_leaf and 0 in x.stride()


def _totals(site: Site) -> list[tuple[Any, Place, list[Any]]]:
    """The log-sum-exps of a site's scores that the program asks for: (value, place, what lies
    between)."""
    place, found = site.axes.now(site.weights.place), []
    dim = next((d for d, i in enumerate(place) if i.axes == site.axes.flat(site.keys.axes)), None)
    for total, keeps, between in site.weights.totals:
        if total not in site.seen.first or dim is None:
            continue
        rest = (Index(),) if keeps else ()
        found.append((total, (*place[:dim], *rest, *place[dim + 1 :]), between))
    return found


def _lse(sizes: Sizes, axes: Axes, total: Any, place: Place, roles: Roles) -> Any:
    def made(program: Program, found: Any) -> Any:
        own = straight(axes, [roles.b, roles.h, roles.q])
        groups = [i.axes for i in axes.now(place)]
        lse = arranged(program, sizes, axes, found.lse, own, groups, False)
        dtype = dtype_of(total)
        return lse if dtype == torch.float32 else program.call("to", lse, dtype)

    return made


def _sinks(site: Site) -> list[tuple[Any, Place]]:
    """Sinks as tensors of the program."""
    found = []
    for node, place in site.weights.sinks:
        reader = Scores(site.seen, site.axes, site.keys, site.rows)
        reader.read(node, place)
        if len(reader.inputs) != 1 or reader.visited:
            raise NoSite("a sink is no tensor of the program")
        found += reader.inputs
    return found


def _beside(program: Program, out: Any, total: Any, sink: Any) -> tuple[Any, Any]:
    """Attention with one more column, of which no value is used: out sigmoid(total - sink); and the
    log-sum-exp with that column."""
    dtype = value_of(out).dtype
    weight = program.call(torch.sigmoid, program.call(operator.sub, total, sink))
    wide = program.call(operator.mul, out, program.call("unsqueeze", weight, -1))
    return program.call("to", wide, dtype), program.call(torch.logaddexp, total, sink)


def _once(make: Any) -> Any:
    kept: list[Any] = []

    def made(program: Program, found: Emitted) -> Any:
        if not kept:
            kept.append(make(program, found))
        return kept[0]

    return made


def repeated(program: Program, x: Any, sizes: Sizes, axes: Axes, shared: tuple[int, ...]) -> Any:
    """Keys or values [B, Hkv, ...] of every query head."""
    many = sizes.made(program, axes.size(shared))
    if isinstance(many, int) and many == 1:
        return x
    x = program.call("unsqueeze", x, 2)
    return program.call("flatten", program.call("expand", x, -1, -1, many, -1, -1), 1, 2)


def _or_mean(
    program: Program, out: Any, lse: Any, v: Any, shared: tuple[int, ...], sizes: Sizes, axes: Axes
) -> Any:
    """The mean of all values for rows that keep nothing."""
    mean = repeated(program, program.call("mean", v, 2, True), sizes, axes, shared)
    lost = program.call("unsqueeze", program.call(operator.eq, lse, -math.inf), -1)
    return program.call(torch.where, lost, mean, out)


def is_trained(site: Site) -> bool:
    """Whether gradients of the result are recorded."""
    return bool(value_of(site.seen.first[site.result]).requires_grad)


def _check_size(made: Plan, dtype: torch.dtype) -> None:
    if compat.ahead_of_time():
        raise NoSite("a C++ wrapper can't hold an operation in Python")
    axes, roles = made.site.axes, made.roles
    b, h, q, k = (hint(axes.size(role)) for role in roles)
    wide = sum(hint(axes.size(c)) for c in (*made.channels, made.values))
    shared = hint(axes.size(made.shared))
    scores, keys = b * h * q * k * 4, b * (h // max(shared, 1)) * k * wide * dtype.itemsize
    if compat.replays_graphs():
        least = LEAST_REPLAYED
    elif all(compat.is_static(axes.size(role)) for role in roles):
        least = LEAST_STATIC
    else:
        least = LEAST_SCORES, LEAST_KEYS
    if scores < least[0] and keys < least[1]:
        raise NoSite(f"its scores are {scores} bytes, keys and values {keys}: products are as fast")


def _check_heads(made: Plan) -> None:
    """Whether there are kernels for heads of such sizes."""
    axes = made.site.axes
    sizes = [sum(axes.size(c) for c in made.channels), axes.size(made.values)]
    if not all(compat.is_static(size) for size in sizes):
        raise NoSite("the size of its heads is symbolic")
    largest = choice.LARGEST_BACKWARD if is_trained(made.site) else choice.LARGEST
    if max(sizes) > largest:
        raise NoSite(f"its heads are of {max(sizes)}, more than the {largest} of the kernels")


def _sample(axes: Axes, roles: Roles, inputs: list[Operand]) -> list[torch.Tensor]:
    """Tensors of the inputs' dtypes with sizes of 1 where they do not vary."""
    found = []
    for one in inputs:
        own = {a for i in axes.now(one.place) for a in i.axes}
        shape = [2 if own.intersection(role) else 1 for role in roles]
        found.append(torch.empty(shape, dtype=one.dtype, device="meta"))
    return found


def _described(made: Plan) -> str:
    axes, roles = made.site.axes, made.roles
    sizes = [axes.size(role) for role in roles]
    wide = sum(axes.size(c) for c in made.channels)
    text = ",".join(str(s) for s in (*sizes, wide))
    return f"{NAME} [{text}] {str(made.v.dtype).removeprefix('torch.')}"
