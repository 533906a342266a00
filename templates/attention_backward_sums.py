"""Sums around attention's backward: what each row needs of its output, and gradients of single
pairs over what an input is broadcast along."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def statistics_kernel(
    out_ptr, out_grad_ptr, lse_ptr, lse_grad_ptr, delta_ptr, shift_ptr, kept_ptr, lost_ptr, rows,
    padded, heads, out_b, out_h, out_s, out_grad_b, out_grad_h, out_grad_s, lse_grad_b, lse_grad_h,
    lse_grad_s,
    VALUE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """delta, lse2 and dlse [B, H, padded] in fp32 of ROWS rows of a head; beyond ``rows`` they are
    0, inf and 0, as for a row without keys. lost, int32: whether a row that has a gradient is one
    of which a likely program knows nothing."""
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
    lse = tl.load(lse_ptr + bh * rows + q, there, other=float("-inf"))
    empty = lse == float("-inf")
    lse_grad = tl.zeros([ROWS], tl.float32)
    if lse_grad_ptr is not None:
        where = b * lse_grad_b + h * lse_grad_h + q.to(tl.int64) * lse_grad_s
        lse_grad = tl.load(lse_grad_ptr + where, there & ~empty, other=0.0)
    delta -= lse_grad
    if lost_ptr is not None:
        has = (tl.max((given != 0).to(tl.int32), 1) > 0) | (lse_grad != 0)
        tl.store(
            lost_ptr + bh * padded + q, ((lse < LOWEST) & there & has).to(tl.int32), q < padded
        )
    if kept_ptr is not None:
        tl.store(kept_ptr + bh * padded + q, lse_grad, q < padded)
    tl.store(delta_ptr + bh * padded + q, tl.where(empty, 0.0, delta), q < padded)
    shift = tl.where(empty, float("inf"), lse * 1.4426950408889634)
    tl.store(shift_ptr + bh * padded + q, shift, q < padded)


@triton.jit(do_not_specialize=["rows", "heads", "batch_sums", "head_sums"])
def sums_kernel(
    pairs_ptr, total_ptr, rows, columns, heads, batch_sums, head_sums, pair_b, pair_h, pair_q,
    total_b, total_h, total_q, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """total [B, H, Sq, Sk], of ``heads`` heads, is or gains the sums over so many batches and heads
    of pairs [.., .., Sq, Sk], whose memory has whole tiles of ROWS and COLUMNS."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    tiles = column_tiles * tl.cdiv(rows, ROWS)
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b = bh // heads
    h = bh % heads
    q = tile // column_tiles * ROWS + tl.arange(0, ROWS)[:, None]
    k = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at = pairs_ptr + b * pair_b + h * pair_h + q.to(tl.int64) * pair_q + k
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(0, batch_sums):
        for j in range(0, head_sums):
            total += tl.load(at + tl.cast(i, tl.int64) * pair_b + tl.cast(j, tl.int64) * pair_h)
    inside = (q < rows) & (k < columns)
    where = total_ptr + b * total_b + h * total_h + q.to(tl.int64) * total_q + k
    if ADD:
        total += tl.load(where, inside, other=0.0)
    tl.store(where, total.to(total_ptr.dtype.element_ty), inside)
