"""Gradients of attention, as texts of three kernels around a score's ``Program``.

With p = exp2(r - lse2) (lse2: lse in units of log 2), and for a row with gradient do of the output

    delta = sum(do * out) - dlse         dP = do v^T
    g = p * (dP - delta)                 gradient for the score in natural units
    ds = gradient(g)                     of the program
    dv = p^T do      dk = ds^T q      dq = ds k

``statistics_kernel`` writes delta and lse2. ``keys_kernel`` holds a tile of keys and goes over
query rows and the heads of a group; its tiles are transposed, [keys, rows], so that p and ds are the left
operands of their products as they come out of registers. ``rows_kernel`` holds a tile of query rows
and goes over keys. ``pairs_kernel`` holds a tile of both and goes over what an input with both is
broadcast along. Nothing is added to memory by two programs, so all is deterministic. A row without
keys has lse2 = inf, hence p = 0: its gradients are 0.

A kernel of rows makes s and dP once more, 7 products in all where 5 would do. ``staged``, the
kernel of keys stores ds and ``product_kernel`` multiplies it by k: see ``attention_staging``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from . import attention_staging as staging
from .attention_program import Program, Span
from .attention_text import (
    Loops,
    Operand,
    indented,
    inputs_at,
    joined,
    kernel_of,
    loops,
    product,
    score_parameters,
    scores,
)

# Sizes that are not to be compiled in.
SIZES = ["rows", "columns", "kv_heads", "group", "heads", "together", "padded", "first"]

STATISTICS = ("shift", "delta")  # lse2 and delta


def gradient_axis(axes: str) -> str:
    """Which kernel makes the gradient of an input that varies along ``axes``: "rows" (not along
    keys), "columns" (along keys only) or "pairs"."""
    return "rows" if "k" not in axes else "pairs" if "q" in axes else "columns"


@dataclass(frozen=True)
class Form:
    """What is compiled besides the program. ``head``, ``value``: D and Dv. ``loaded``: q, k, v and
    do through tensor descriptors, ``descriptors``: lse2 and delta as well. ``dk``, ``dv``, ``dq``: the pieces of the head whose gradient a
    kernel makes. ``inputs``: the numbers of the inputs whose gradient it makes. ``staged``: ds goes
    through memory, which ``attention_staging`` describes. ``ahead``: s of whole tiles is made a
    tile earlier than it is used, so that the products of one tile are under way together."""

    head: int
    value: int
    tma: tuple[bool, bool, bool, bool]
    descriptors: bool
    precision: str
    dq: tuple[int, ...] = ()
    dk: tuple[int, ...] = ()
    dv: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    staged: bool = False
    ahead: bool = False

    @property
    def operands(self) -> tuple[Operand, Operand, Operand, Operand]:
        q, k, v, do = self.tma
        return (
            Operand("query", self.head, q),
            Operand("key", self.head, k),
            Operand("value", self.value, v),
            Operand("out_grad", self.value, do),
        )


@triton.jit
def statistics_kernel(
    out_ptr, out_grad_ptr, lse_ptr, lse_grad_ptr, delta_ptr, shift_ptr, rows, padded, heads, out_b,
    out_h, out_s, out_grad_b, out_grad_h, out_grad_s, lse_grad_b, lse_grad_h, lse_grad_s,
    VALUE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta and lse2 [B, H, padded] in fp32 of ROWS rows of a head; beyond ``rows`` 0 and inf."""
    tiles = tl.cdiv(padded, ROWS)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b = bh // heads
    h = bh % heads
    q = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    there = q < rows
    inside = there[:, None] & (column < VALUE)
    at = q[:, None].to(tl.int64)
    out_at = out_ptr + b * out_b + h * out_h
    given_at = out_grad_ptr + b * out_grad_b + h * out_grad_h
    out = tl.load(out_at + at * out_s + column, inside, other=0.0)
    given = tl.load(given_at + at * out_grad_s + column, inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * given.to(tl.float32), 1)
    if lse_grad_ptr is not None:
        where = b * lse_grad_b + h * lse_grad_h + q.to(tl.int64) * lse_grad_s
        delta -= tl.load(lse_grad_ptr + where, there, other=0.0)
    lse = tl.load(lse_ptr + bh * rows + q, there, other=float("-inf"))
    empty = lse == float("-inf")
    tl.store(delta_ptr + bh * padded + q, tl.where(empty, 0.0, delta), q < padded)
    shift = tl.where(empty, float("inf"), lse * 1.4426950408889634)
    tl.store(shift_ptr + bh * padded + q, shift, q < padded)


# ----------------------------------------------------------------------------------------
# what the kernels share


def _place(axis: str, limit: str, block: str, last_first: bool) -> str:
    """The tile and head of a program: ``together`` heads take turns, tile by tile, so that what
    they read stays in the L2 and the longest tiles still come first."""
    tile = "tiles - 1 - rest // width" if last_first else "rest // width"
    return f"""pid = tl.program_id(0)
tiles = tl.cdiv({limit}, {block})
many = tiles * together
chunk = pid // many
rest = pid % many
width = tl.minimum(together, tl.num_programs(0) // tiles - chunk * together)
{axis}_start = ({tile}) * {block}
bh = first + chunk * together + rest % width"""


def _statistic(form: Form, name: str, expanded: str) -> str:
    """A load of ``shift`` or ``delta`` of the tile's rows; there are more of both than rows.

    Through descriptors where those are: a pipelined load of a row by pointers takes a register per
    element and thread, since its layout is that of what it is subtracted from."""
    if form.descriptors:
        load = f"{name}_desc.load([row, q_start]).reshape(BLOCK_M)"
    else:
        load = f"tl.load({name}_ptr + row_at + q_start + tl.arange(0, BLOCK_M))"
    return f"{name} = {load}{expanded}"


def statistics_parameters(form: Form) -> list[str]:
    return [f"{name}_{'desc' if form.descriptors else 'ptr'}" for name in STATISTICS]


def _names(operand: Operand) -> list[str]:
    return [f"{operand.name}{i}" for i in range(len(operand.pieces))]


def _loaded(operand: Operand, start: str, block: str, limit: str) -> str:
    lines = [
        f"{operand.name}{i} = {operand.load(i, start, block, limit)}"
        for i in range(len(operand.pieces))
    ]
    return "\n".join(lines)


def _transposed(names: Sequence[str]) -> list[str]:
    return [f"tl.trans({name})" for name in names]


def _gradient(program: Program, inputs: Sequence[int]) -> str:
    """From ``g`` to ``ds`` and the inputs' gradients. Where the score is a multiple of s, its
    factor waits for the end."""
    if program.scale is not None and not inputs:
        return "ds = g"
    return program.gradient


def _ds_factor(program: Program, inputs: Sequence[int]) -> str:
    return f" * {program.scale!r}" if program.scale is not None and not inputs else ""


def _whole_tiles(over: Loops, form: Form, body: str, moving: Operand, held: Operand) -> str:
    """The loop over tiles that are kept whole. ``ahead``, each step makes s of the next one."""
    if not form.ahead:
        return over.full(body)
    axis = over.axis
    (start, _), (count, _) = over.starts, over.counts
    block = "BLOCK_M" if axis == "q" else "BLOCK_N"

    def made(step: str) -> str:
        names = [f"next{i}" for i in range(len(moving.pieces))]
        loads = [f"{name} = {moving.load(i, 'next_start', block)}" for i, name in enumerate(names)]
        pairs = _names(held), _transposed(names)
        where = re.sub(r"\bstep\b", step, start)
        result = product(*pairs, _options(form))
        return joined(f"next_start = {where}", *loads, f"s_ahead = {result}")

    first = joined(f"whole = {count}", made("0"))
    return joined(first, over.full(joined(body, made("tl.minimum(step + 1, whole - 1)"))))


def _options(form: Form) -> str:
    return f', input_precision="{form.precision}"' if form.precision else ""


# ----------------------------------------------------------------------------------------
# dk, dv, and gradients of inputs along keys


def _keys_body(program: Program, form: Form, masked: bool) -> str:
    """A tile of query rows: p^T and ds^T, [BLOCK_N, BLOCK_M]."""
    query, key, value, out_grad = form.operands
    options = _options(form)
    limit = "rows" if masked else ""
    made = f"s = {product(_names(key), _transposed(_names(query)), options)}"
    given = ""
    if form.dk or form.inputs:
        start = "tl.broadcast_to(-delta, [BLOCK_N, BLOCK_M])"
        operands = _names(value), _transposed(_names(out_grad))
        given = joined(
            _statistic(form, "delta", "[None, :]"),
            f"dp = {product(*operands, options, start)}",
        )
    ahead = form.ahead and not masked
    lines = [
        _loaded(query, "q_start", "BLOCK_M", limit),
        _loaded(out_grad, "q_start", "BLOCK_M", limit),
        joined(given, "s = s_ahead") if ahead else made,
        scores(program, masked, q_inside=not masked, k_inside=False),
        _statistic(form, "shift", "[None, :]"),
        "p = tl.exp2(r - shift)",
    ]
    if form.dv:
        lines.append("narrow = p.to(out_grad0.dtype)")
    for i in form.dv:
        lines.append(f"dv{i} = tl.dot(narrow, out_grad{i}, dv{i}{options})")
    if given:
        lines += ["" if ahead else given, "g = p * dp", _gradient(program, form.inputs)]
    for i in form.inputs:
        lines.append(f"sum{i} += tl.sum(tl.broadcast_to(d{i}, p.shape), 1)")
    if form.dk:
        lines.append("narrow_ds = ds.to(query0.dtype)")
    for i in form.dk:
        lines.append(f"dk{i} = tl.dot(narrow_ds, query{i}, dk{i}{options})")
    if form.staged:
        lines.append(staging.store("narrow_ds"))
    return joined(*lines)


def keys_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    for name in ("dk", "dv"):
        if getattr(form, name):
            names += Operand(name, 0).parameters
    names += [*statistics_parameters(form), *(f"sum{i}_ptr" for i in form.inputs)]
    names += staging.PARAMETERS if form.staged else []
    return [*names, *score_parameters(program), *SIZES]


def _keys(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    if form.staged:
        over = loops(staging.whole(program.column_spans), "q", "padded", "BLOCK_M")
    else:
        over = loops(program.column_spans, "q", "rows", "BLOCK_M")
    zeros = [
        f"{name}{i} = tl.zeros([BLOCK_N, {operand.pieces[i].size}], tl.float32)"
        for name, operand, which in (("dk", key, form.dk), ("dv", value, form.dv))
        for i in which
    ]
    sums = [f"sum{i} = tl.zeros([BLOCK_N], tl.float32)" for i in form.inputs]
    stored = [
        f"tl.store(sum{i}_ptr + (tl.cast(b, tl.int64) * heads + h) * columns + keys, "
        f"sum{i}, keys < columns)"
        for i in form.inputs
    ]
    head = joined(
        "h = kv_head * group + member",
        query.at(),
        out_grad.at(),
        inputs_at(program),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        staging.slot("bh - first", "member") if form.staged else "",
        *sums,
        _whole_tiles(over, form, _keys_body(program, form, False), query, key),
        over.partial(_keys_body(program, form, True)),
        *stored,
    )
    ends = []
    for name, dim, which in (("dk", form.head, form.dk), ("dv", form.value, form.dv)):
        if not which:
            continue
        result = Operand(name, dim)
        factor = _ds_factor(program, form.inputs) if name == "dk" else ""
        ends.append(result.at("b", "kv_head"))
        for i in which:
            ends.append(result.store(i, "k_start", "BLOCK_N", "columns", f"{name}{i}{factor}"))
    return joined(
        _place("k", "columns", "BLOCK_N", False),
        "b = bh // kv_heads",
        "kv_head = bh % kv_heads",
        "ql = tl.arange(0, BLOCK_M)[None, :]",
        "kl = tl.arange(0, BLOCK_N)[:, None]",
        "keys = k_start + tl.arange(0, BLOCK_N)",
        "k0 = k_start",
        "k1 = tl.minimum(k_start + BLOCK_N, columns) - 1",
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        _loaded(key, "k_start", "BLOCK_N", "columns"),
        _loaded(value, "k_start", "BLOCK_N", "columns"),
        *zeros,
        over.head,
        staging.place(program, "k_start // BLOCK_N", "BLOCK_N") if form.staged else "",
        "for member in range(0, group):",
        indented(head),
        *ends,
    )


@functools.cache
def keys_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_keys",
        keys_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STAGES"],
        _keys(program, form),
        unspecialised=[*SIZES, *(f"n{i}" for i in range(program.numbers))],
    )


# ----------------------------------------------------------------------------------------
# dq, and gradients of inputs along rows


def _rows_body(program: Program, form: Form, masked: bool) -> str:
    """A tile of keys: p and ds, [BLOCK_M, BLOCK_N]."""
    query, key, value, out_grad = form.operands
    options = _options(form)
    limit = "columns" if masked else ""
    made = f"s = {product(_names(query), _transposed(_names(key)), options)}"
    start = "tl.broadcast_to(-delta, [BLOCK_M, BLOCK_N])"
    operands = _names(out_grad), _transposed(_names(value))
    given = f"dp = {product(*operands, options, start)}"
    ahead = form.ahead and not masked
    lines = [
        _loaded(key, "k_start", "BLOCK_N", limit),
        _loaded(value, "k_start", "BLOCK_N", limit),
        joined(given, "s = s_ahead") if ahead else made,
        scores(program, masked, q_inside=False, k_inside=not masked),
        "p = tl.exp2(r - shift)",
        "" if ahead else given,
        "g = p * dp",
        _gradient(program, form.inputs),
    ]
    for i in form.inputs:
        lines.append(f"sum{i} += tl.sum(tl.broadcast_to(d{i}, p.shape), 1)")
    if form.dq:
        lines.append("narrow_ds = ds.to(key0.dtype)")
    for i in form.dq:
        lines.append(f"dq{i} = tl.dot(narrow_ds, key{i}, dq{i}{options})")
    return joined(*lines)


def rows_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    if form.dq:
        names += Operand("dq", 0).parameters
    names += [*statistics_parameters(form), *(f"sum{i}_ptr" for i in form.inputs)]
    return [*names, *score_parameters(program), *SIZES]


def _rows(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    over = loops(program.row_spans, "k", "columns", "BLOCK_N")
    ends = []
    if form.dq:
        result = Operand("dq", form.head)
        factor = _ds_factor(program, form.inputs)
        ends.append(result.at())
        for i in form.dq:
            ends.append(result.store(i, "q_start", "BLOCK_M", "rows", f"dq{i}{factor}"))
    return joined(
        _place("q", "rows", "BLOCK_M", True),
        "b = bh // heads",
        "h = bh % heads",
        "kv_head = h // group",
        "ql = tl.arange(0, BLOCK_M)[:, None]",
        "kl = tl.arange(0, BLOCK_N)[None, :]",
        "q0 = q_start",
        "q1 = tl.minimum(q_start + BLOCK_M, rows) - 1",
        query.at(),
        out_grad.at(),
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        inputs_at(program),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        _statistic(form, "shift", "[:, None]"),
        _statistic(form, "delta", "[:, None]"),
        _loaded(query, "q_start", "BLOCK_M", "rows"),
        _loaded(out_grad, "q_start", "BLOCK_M", "rows"),
        *(f"dq{i} = tl.zeros([BLOCK_M, {query.pieces[i].size}], tl.float32)" for i in form.dq),
        *(f"sum{i} = tl.zeros([BLOCK_M], tl.float32)" for i in form.inputs),
        over.head,
        _whole_tiles(over, form, _rows_body(program, form, False), key, query),
        over.partial(_rows_body(program, form, True)),
        *ends,
        *(
            f"tl.store(sum{i}_ptr + row_at + q_start + tl.arange(0, BLOCK_M), sum{i})"
            for i in form.inputs
        ),
    )


@functools.cache
def rows_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_rows",
        rows_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STAGES"],
        _rows(program, form),
        unspecialised=[*SIZES, *(f"n{i}" for i in range(program.numbers))],
    )


# ----------------------------------------------------------------------------------------
# dq of a ds that is stored


def product_parameters(program: Program, form: Form) -> list[str]:
    names = [*form.operands[1].parameters, *Operand("dq", 0).parameters, *staging.PARAMETERS]
    return [*names, *(f"n{i}" for i in range(program.numbers)), *SIZES]


def _product(program: Program, form: Form) -> str:
    query, key, *_ = form.operands
    over = loops([Span(s.lo, s.hi, "0", "0") for s in program.row_spans], "k", "columns", "BLOCK_N")
    result = Operand("dq", form.head)
    body = [
        staging.place(program, "k_start // STRIPE", "STRIPE"),
        staging.load("narrow_ds", "k_start % STRIPE"),
        _loaded(key, "k_start", "BLOCK_N", "columns"),
        *(f"dq{i} = tl.dot(tl.trans(narrow_ds), key{i}, dq{i})" for i in form.dq),
    ]
    return joined(
        _place("q", "rows", "BLOCK_M", True),
        "b = bh // heads",
        "h = bh % heads",
        staging.slot("(bh - first) // group", "bh % group"),
        "q0 = q_start",
        "q1 = tl.minimum(q_start + BLOCK_M, rows) - 1",
        key.at("b", "h // group"),
        result.at(),
        *(f"dq{i} = tl.zeros([BLOCK_M, {query.pieces[i].size}], tl.float32)" for i in form.dq),
        over.head,
        over.partial(joined(*body)),
        *(
            result.store(
                i, "q_start", "BLOCK_M", "rows", f"dq{i}{_ds_factor(program, form.inputs)}"
            )
            for i in form.dq
        ),
    )


@functools.cache
def product_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_product",
        product_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STRIPE", "STAGES"],
        _product(program, form),
        unspecialised=[*SIZES, *(f"n{i}" for i in range(program.numbers))],
    )


# ----------------------------------------------------------------------------------------
# the gradient of one input along rows and columns


def pairs_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    names += [*statistics_parameters(form), "grad_ptr"]
    return [*names, *score_parameters(program), *SIZES, "batches"]


def _pairs(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    (i,) = form.inputs
    options = _options(form)
    axes = program.inputs[i].axes
    touched = " | ".join(
        f"((k_start < {span.hi}) & (k_start + BLOCK_N > {span.lo}))" for span in program.row_spans
    )
    body = joined(
        f"b = {'outer // own_heads' if 'b' in axes else 'turn // other_heads'}",
        f"h = {'outer % own_heads' if 'h' in axes else 'turn % other_heads'}",
        "kv_head = h // group",
        query.at(),
        out_grad.at(),
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        inputs_at(program),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        _loaded(query, "q_start", "BLOCK_M", "rows"),
        _loaded(key, "k_start", "BLOCK_N", "columns"),
        _loaded(out_grad, "q_start", "BLOCK_M", "rows"),
        _loaded(value, "k_start", "BLOCK_N", "columns"),
        f"s = {product(_names(query), _transposed(_names(key)), options)}",
        scores(program, True),
        _statistic(form, "shift", "[:, None]"),
        _statistic(form, "delta", "[:, None]"),
        "p = tl.exp2(r - shift)",
        f"g = p * ({product(_names(out_grad), _transposed(_names(value)), options)} - delta)",
        program.gradient,
        f"total += d{i}",
    )
    return joined(
        f"own_heads = {'heads' if 'h' in axes else '1'}",
        f"other_heads = {'1' if 'h' in axes else 'heads'}",
        "tiles = tl.cdiv(columns, BLOCK_N)",
        "pid = tl.program_id(0)",
        "k_start = pid % tiles * BLOCK_N",
        "q_start = pid // tiles % tl.cdiv(rows, BLOCK_M) * BLOCK_M",
        "outer = pid // tiles // tl.cdiv(rows, BLOCK_M)",
        "ql = tl.arange(0, BLOCK_M)[:, None]",
        "kl = tl.arange(0, BLOCK_N)[None, :]",
        "q0 = q_start",
        "q1 = tl.minimum(q_start + BLOCK_M, rows) - 1",
        "total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)",
        f"turns = {'1' if 'b' in axes else 'batches'} * other_heads",
        f"for turn in range(0, tl.where({touched}, turns, 0)):",
        indented(body),
        "at = (tl.cast(outer, tl.int64) * rows + q_start + ql) * columns + k_start + kl",
        "inside = (q_start + ql < rows) & (k_start + kl < columns)",
        "tl.store(grad_ptr + at, total.to(grad_ptr.dtype.element_ty), inside)",
    )


@functools.cache
def pairs_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_pairs",
        pairs_parameters(program, form),
        ["BLOCK_M", "BLOCK_N"],
        _pairs(program, form),
        unspecialised=[*SIZES, "batches", *(f"n{i}" for i in range(program.numbers))],
    )
