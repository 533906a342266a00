"""dq, and gradients of inputs along rows, or along rows and keys: see ``attention_backward``."""

from __future__ import annotations

import functools
from typing import Any

from . import attention_dropout as dropout
from .attention_backward import (
    PART,
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


def _rows_body(program: Program, form: Form, masked: str) -> str:
    """A tile of keys: p and ds, [BLOCK_M, BLOCK_N]."""
    query, key, value, out_grad = form.operands
    options = product_options(form)
    limit = "columns" if masked else ""
    given = weight_gradient(
        program, pieces_of(out_grad), pieces_of(value), options, "[BLOCK_M, BLOCK_N]"
    )
    lines = [
        _held_rows(form) if form.again else "",
        loaded(key, "k_start", "BLOCK_N", limit),
        loaded(value, "k_start", "BLOCK_N", limit),
        f"s = {product(pieces_of(query), transposed(pieces_of(key)), options)}",
        joined(dropout.draws(program, "row"), given) if form.early else "",
        score_of(program, form, masked, False, not masked, "k"),
        "p = tl.exp2(r - shift)",
        "" if form.early else joined(dropout.draws(program, "row"), given),
        "g = p * dp",
        gradient_of(program, form.inputs + form.pairs),
    ]
    for i in form.pairs:
        lines.append(_stored_pairs(form, i, f"tl.broadcast_to(d{i}, [BLOCK_M, BLOCK_N])"))
    if form.dq:
        lines.append("narrow_ds = ds.to(key0.dtype)")
    for i in form.dq:
        lines.append(f"dq{i} = tl.dot(narrow_ds, key{i}, dq{i}{options})")
    if form.inputs:
        lines += [summed("sum", form), "sum_g += tl.sum(g, 1)", "sum_p += tl.sum(p, 1)"]
        lines += ["g = p", program.gradient, summed("weight", form)]
    return joined(*lines)


def _stored_pairs(form: Form, i: int, value: str) -> str:
    """``value`` for a tile's pairs. There is memory for whole tiles: no mask, wide stores."""
    if form.stored:
        return f"pair{i}_desc.store([pair_row, k_start], ({value}).to(pair{i}_desc.dtype))"
    at = f"pair{i}_at + (ql * pair_step + (k_start + kl))"
    return f"tl.store({at}, ({value}).to(pair{i}_ptr.dtype.element_ty))"


def _unkept_pairs(program: Program, form: Form) -> str:
    """Zeros for the pairs of tiles that the loops leave out."""
    lo, hi = [], []
    for span in program.row_spans:
        lo.append(f"tl.maximum({span.lo}, doc_lo)" if program.documents else span.lo)
        hi.append(f"tl.minimum({span.hi}, doc_hi)" if program.documents else span.hi)
    if not form.pairs or list(zip(lo, hi, strict=True)) == [("0", "columns")]:
        return ""
    touched = " | ".join(
        f"((k_start < {b}) & (k_start + BLOCK_N > {a}))" for a, b in zip(lo, hi, strict=True)
    )
    zeros = [_stored_pairs(form, i, "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)") for i in form.pairs]
    return joined(
        "for k_start in range(0, columns, BLOCK_N):",
        f"    if not ({touched}):",
        indented(joined(*zeros), 8),
    )


def _corrected(form: Form) -> str:
    """Row sums of inputs' gradients with the delta of this very sum.

    delta is made of an output that was rounded, an error that all of a row shares, which averages
    out in sums along other axes. Here the sum of p dP - delta, which is dlse, tells it, and a
    gradient is linear in g: that of g = p says what the error has added. Rows far from 0 have p and
    1 / dlse times the sum of p."""
    lines = ["off = tl.load(lse_grad_ptr + row_at + at) * sum_p - sum_g"]
    lines.append("off = off / tl.where(sum_p > 0, sum_p, 1.0)")
    lines += [f"sum{i} += off * weight{i}" for i in form.inputs]
    lines += [f"tl.store(sum{i}_ptr + row_at + at, sum{i})" for i in form.inputs]
    return joined("at = q_start + tl.arange(0, BLOCK_M)", *lines) if form.inputs else ""


def _held_rows(form: Form) -> str:
    query, *_, out_grad = form.operands
    rows = "q_start", "BLOCK_M", "rows"
    return joined(loaded(query, *rows), loaded(out_grad, *rows))


def rows_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    if form.dq:
        names += Operand("dq", 0).parameters
    names += [*statistics_parameters(form), *(f"sum{i}_ptr" for i in form.inputs)]
    names += ["lse_grad_ptr"] if form.inputs else []
    names += [f"pair{i}_{'desc' if form.stored else 'ptr'}" for i in form.pairs]
    names += ["pair_step", "pair_rows", *PART] if form.pairs else []
    return [*names, *common_parameters(program, form)]


def _rows(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    documents = "doc" if program.documents else ""
    over = loops(program.row_spans, "k", "columns", "BLOCK_N", hull=documents)
    ends = []
    sums = [f"{name}{i}" for i in form.inputs for name in ("sum", "weight")]
    sums += ["sum_g", "sum_p"] if sums else []
    if form.dq:
        result = Operand("dq", form.head)
        factor = ds_factor(program)
        ends.append(result.at())
        for i in form.dq:
            ends.append(result.store(i, "q_start", "BLOCK_M", "rows", f"dq{i}{factor}"))
    some = ["b = bh // heads", "h = bh % heads"]
    if form.pairs:
        some = ["b = first_batch + bh // some_heads", "h = first_head + bh % some_heads"]
        some.append("pair_row = bh * pair_rows + q_start")
        if not form.stored:
            first = "tl.cast(pair_row, tl.int64) * pair_step"
            some += [f"pair{i}_at = pair{i}_ptr + {first}" for i in form.pairs]
    lost = "lost_ptr + tl.cast(b * heads + h, tl.int64) * padded + q_start + tl.arange(0, BLOCK_M)"
    place = joined(place_of("q", "rows", "BLOCK_M", True), *some)
    return if_lost(form, place, f"tl.max(tl.load({lost}), 0)", joined(
        "kv_head = h // group",
        "ql = tl.arange(0, BLOCK_M)[:, None]",
        "kl = tl.arange(0, BLOCK_N)[None, :]",
        "q0 = q_start",
        "q1 = tl.minimum(q_start + BLOCK_M, rows) - 1",
        query.at(),
        out_grad.at(),
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        inputs_at(program, described=form.described),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        statistic(form, "shift", "[:, None]"),
        statistic(form, "delta", "[:, None]"),
        dropout.seeded(program),
        "" if form.again else _held_rows(form),
        *(f"dq{i} = tl.zeros([BLOCK_M, {query.pieces[i].size}], tl.float32)" for i in form.dq),
        *(f"{name} = tl.zeros([BLOCK_M], tl.float32)" for name in sums),
        held_inputs(program, form, "k"),
        hull_of(program, "q_start // BLOCK_M"),
        over.head,
        tiles_of(over, form, functools.partial(_rows_body, program, form)),
        _unkept_pairs(program, form),
        *ends,
        _corrected(form),
    ))  # fmt: skip


@functools.cache
def rows_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_rows",
        rows_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STAGES"],
        _rows(program, form),
        unspecialised=[*unspecialised(program), *(PART if form.pairs else [])],
    )
