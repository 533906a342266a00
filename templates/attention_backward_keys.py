"""dk, dv, and gradients of inputs along keys: see ``attention_backward``."""

from __future__ import annotations

import functools
from typing import Any

from . import attention_dropout as dropout
from .attention_backward import (
    Form,
    common_parameters,
    ds_factor,
    gradient_of,
    held_inputs,
    hull_of,
    if_lost,
    loaded,
    pieces_of,
    place_of,
    product_options,
    score_of,
    statistic,
    statistics_parameters,
    summed,
    tiles_of,
    transposed,
    unspecialised,
    weight_gradient,
)
from .attention_program import Program
from .attention_text import Operand, indented, inputs_at, joined, kernel_of, loops, product


def _batch_and_head(program: Program) -> list[str]:
    """Batches that share a matrix lie side by side: it is most of what a tile reads."""
    axes = [set(given.axes) for given in program.inputs]
    if any({"q", "k"} <= a and "b" not in a for a in axes):
        batches = "batches = tl.num_programs(0) // (tiles * kv_heads)"
        return [batches, "b = bh % batches", "kv_head = bh // batches"]
    return ["b = bh // kv_heads", "kv_head = bh % kv_heads"]


def _keys_body(program: Program, form: Form, masked: str) -> str:
    """A tile of query rows: p^T and ds^T, [BLOCK_N, BLOCK_M]."""
    query, key, value, out_grad = form.operands
    options = product_options(form)
    limit = "rows" if masked else ""
    given = ""
    if form.dk or form.inputs:
        given = joined(
            statistic(form, "delta", "[None, :]"),
            weight_gradient(
                program, pieces_of(value), pieces_of(out_grad), options, "[BLOCK_N, BLOCK_M]"
            ),
        )
    lines = [
        _held_keys(form) if form.again else "",
        loaded(query, "q_start", "BLOCK_M", limit),
        loaded(out_grad, "q_start", "BLOCK_M", limit),
        f"s = {product(pieces_of(key), transposed(pieces_of(query)), options)}",
        joined(dropout.draws(program, "row"), given) if form.early else "",
        score_of(program, form, masked, not masked, False, "q"),
        statistic(form, "shift", "[None, :]"),
        "p = tl.exp2(r - shift)",
        "" if form.early else dropout.draws(program, "row"),
    ]
    if form.dv:
        weights = "(p * drop_factor)" if program.dropout else "p"
        lines.append(f"narrow = {weights}.to(out_grad0.dtype)")
    for i in form.dv:
        lines.append(f"dv{i} = tl.dot(narrow, out_grad{i}, dv{i}{options})")
    if given:
        lines += ["" if form.early else given, "g = p * dp", gradient_of(program, form.inputs)]
    lines.append(summed("sum", form))
    if form.dk:
        lines.append("narrow_ds = ds.to(query0.dtype)")
    for i in form.dk:
        lines.append(f"dk{i} = tl.dot(narrow_ds, query{i}, dk{i}{options})")
    return joined(*lines)


def _held_keys(form: Form) -> str:
    _, key, value, _ = form.operands
    lines = [loaded(key, "k_start", "BLOCK_N", "columns")]
    if form.dk or form.inputs:
        lines.append(loaded(value, "k_start", "BLOCK_N", "columns"))
    return joined(*lines)


def keys_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    for name in ("dk", "dv"):
        if getattr(form, name):
            names += Operand(name, 0).parameters
    names += [*statistics_parameters(form), *(f"sum{i}_ptr" for i in form.inputs)]
    names += [f"x{i}_row" for i in form.streamed]
    return [*names, *common_parameters(program, form)]


def _keys(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    documents = "doc" if program.documents else ""
    over = loops(program.column_spans, "q", "rows", "BLOCK_M", hull=documents)
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
        inputs_at(program, described=form.described),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        held_inputs(program, form, "q"),
        hull_of(program, "k_start // BLOCK_N"),
        over.head if documents else "",
        *sums,
        tiles_of(over, form, functools.partial(_keys_body, program, form)),
        *stored,
    )
    ends = []
    for name, dim, which in (("dk", form.head, form.dk), ("dv", form.value, form.dv)):
        if not which:
            continue
        result = Operand(name, dim)
        factor = ds_factor(program) if name == "dk" else ""
        ends.append(result.at("b", "kv_head"))
        for i in which:
            ends.append(result.store(i, "k_start", "BLOCK_N", "columns", f"{name}{i}{factor}"))
    place = joined(place_of("k", "columns", "BLOCK_N", False), *_batch_and_head(program))
    return if_lost(form, place, "tl.load(lost_ptr + b * kv_heads + kv_head)", joined(
        "ql = tl.arange(0, BLOCK_M)[None, :]",
        "kl = tl.arange(0, BLOCK_N)[:, None]",
        "keys = k_start + tl.arange(0, BLOCK_N)",
        "k0 = k_start",
        "k1 = tl.minimum(k_start + BLOCK_N, columns) - 1",
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        dropout.seeded(program),
        "" if form.again else _held_keys(form),
        *zeros,
        "" if documents else over.head,
        "for member in range(0, group):",
        indented(head),
        *ends,
    ))  # fmt: skip


@functools.cache
def keys_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_keys",
        keys_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STAGES"],
        _keys(program, form),
        unspecialised=unspecialised(program),
    )
