"""A softmax's statistics of rows of logits x, and a gradient of x from factors known per row.

    z     = scale c tanh(x / c)       c: the softcap; z = scale x without one
    peak  = max_j z_j     total = sum_j exp(z_j - peak)     below = sum_j (z_j - peak)
    p_j   = exp(z_j - lse)            lse = peak + log(total)
    dx_j  = (dz_j/dx_j) (A p_j - b [j = t] - c)       A = a0 + a1 lse

t is the target's column; a row may have none. A cross entropy has A = b, label smoothing c, a
z-loss a1. As in ``cross_entropy``, whose sweeps these are, the target's column stays out of the
running sum: with d the log of the others' sum less z_t,

    A p_t - b = (A - b) sigmoid(-d) - b sigmoid(d)

has no difference of nearly equal numbers where A = b. Nothing is held back from a row whose factors
are all 0 but its gradient, which is 0 whatever the row holds.

rows_kernel         statistics and gradient in one program per row
segments_kernel     statistics of a row, or of a segment of one where rows are too few for a card
join_kernel         a row's segments into one
spread_kernel       the gradient from these, per (row, chunk)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cross_entropy import INDEX, LN2, LOG2E, NONE, gather, put_zeros, single_slope, sweep, write
from .row_softmax import anchor_of, row_start, soft_cap

SAVED = tl.constexpr(3)  # anchor, total, margin: what the gradient needs of a row


@triton.jit
def own_of(
    X, T, row, x_stride, t_stride, columns, cap, CAPPED: tl.constexpr, KIND: tl.constexpr = INDEX
):  # fmt: skip
    """(column of the target, its logit); (-1, -inf) where there is none."""
    if KIND == NONE:
        return -1, -float("inf")
    else:
        t = tl.load(T + row.to(tl.int64) * t_stride).to(tl.int64)
        there = (t >= 0) & (t < columns)
        x = tl.load(X + row.to(tl.int64) * x_stride + tl.where(there, t, 0)).to(tl.float32)
        x, _ = soft_cap(x, cap, CAPPED)
        return tl.where(there, t, -1).to(tl.int32), tl.where(there, x, -float("inf"))


@triton.jit
def complete(x_t, anchor, total, linear, scale, alpha, SMOOTH: tl.constexpr):
    """(peak, total, below, anchor, margin) of a row from what ``gather`` has of the others."""
    margin = tl.log2(total) * LN2 - (x_t - anchor) * scale
    if_others = tl.where(total == 0, -float("inf"), anchor)
    top = tl.maximum(if_others, x_t)
    anchor = anchor_of(top)
    total = total * tl.exp2((if_others - anchor) * alpha) + tl.exp2((x_t - anchor) * alpha)
    # As of a maximum that keeps NaN, and of -inf - -inf.
    total = tl.where(total == 0, float("nan"), total)
    known = total == total
    peak = tl.where(known | (tl.abs(top) == float("inf")), top * scale, float("nan"))
    below = 0.0
    if SMOOTH:
        below = tl.where(known, linear * scale, float("nan"))
    return peak, total, below, anchor, margin


@triton.jit
def factors_of(A0, A1, B, C, row, Z: tl.constexpr, SMOOTH: tl.constexpr):
    """(a0, a1, b, c, whether one of them is not 0) of a row."""
    a0, b, a1, c = tl.load(A0 + row), tl.load(B + row), 0.0, 0.0
    used = (a0 != 0) | (b != 0)
    if Z:
        a1 = tl.load(A1 + row)
        used = used | (a1 != 0)
    if SMOOTH:
        c = tl.load(C + row)
        used = used | (c != 0)
    return a0, a1, b, c, used


@triton.jit
def slopes_of(a0, a1, b, anchor, total, scale):
    """(per_exp, per_p) of ``slope`` and ``single_slope``."""
    of_lse = a1 * (anchor * scale + tl.log2(total) * LN2)
    return (a0 + of_lse) * scale / total, ((a0 - b) + of_lse) * scale


@triton.jit
def own_slope(
    X, row, x_stride, t, x_t, scale, alpha, cap, b, c, anchor, per_exp, per_p, margin,
    SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dx at the target's column."""
    single, _ = single_slope(
        X, X, X, X, row, x_stride, 0, tl.maximum(t, 0), x_t, 0, scale, alpha, cap, (b, c), anchor,
        per_exp, scale, per_p, margin, INDEX, False, SMOOTH, CAPPED, 1,
    )  # fmt: skip
    return single


@triton.jit
def put_rows(PEAK, TOTAL, BELOW, row, peak, total, below, SMOOTH: tl.constexpr):
    tl.store(PEAK + row, peak)
    tl.store(TOTAL + row, total)
    if SMOOTH:
        tl.store(BELOW + row, below)


@triton.jit
def rows_kernel(
    X, DX, T, A0, A1, B, C, PEAK, TOTAL, BELOW, PICKED,
    columns, x_stride, dx_stride, t_stride, scale, cap,
    Z: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COLUMNS_OF: tl.constexpr,
    ALIGNED: tl.constexpr, SAME: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr,
    STREAM: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    row = tl.program_id(0)
    t, x_t = own_of(X, T, row, x_stride, t_stride, columns, cap, CAPPED)
    a0, a1, b, c, used = factors_of(A0, A1, B, C, row, Z, SMOOTH)
    offset, head = row_start(row, x_stride, E, ALIGNED)
    edges = tl.minimum(head, columns)  # a row may end before its first boundary
    n = tl.maximum(columns - head, 0)
    dx_offset = row.to(tl.int64) * dx_stride + head
    if SAME:
        dx_offset = offset
    elif ALIGNED:
        dx_offset = tl.multiple_of(dx_offset, E)
    x_row, dx_row = X + offset, DX + dx_offset
    held, state = sweep(
        X, x_row, head, edges, head, n, t, x_t, X, X, alpha, cap, (1.0, 1.0),
        INDEX, False, SMOOTH, CAPPED, ALIGNED, HELD, WHOLE, STREAM, R, THREADS, E, STAGES, True,
    )  # fmt: skip
    anchor, total, linear, _ = gather(state, x_t, alpha, INDEX, SMOOTH)
    peak, total, below, anchor, margin = complete(x_t, anchor, total, linear, scale, alpha, SMOOTH)
    put_rows(PEAK, TOTAL, BELOW, row, peak, total, below, SMOOTH)
    tl.store(PICKED + row, tl.where(t >= 0, x_t * scale, 0.0))
    if used:
        per_exp, per_p = slopes_of(a0, a1, b, anchor, total, scale)
        single = own_slope(
            X, row, x_stride, t, x_t, scale, alpha, cap, b, c, anchor, per_exp, per_p, margin,
            SMOOTH, CAPPED,
        )  # fmt: skip
        tl.debug_barrier()  # DX may be X, whose single column every thread has read now
        write(
            DX, x_row, dx_row, held, head, edges, head, n, X, X, alpha, anchor, per_exp, scale,
            cap, (b, c), INDEX, False, SMOOTH, CAPPED, ALIGNED, HELD, WHOLE, STREAM,
            R, THREADS, E, STAGES,
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(dx_row - head + t, single.to(DX.dtype.element_ty), mask=t >= 0)
    else:
        put_zeros(DX, dx_row - head, columns, R * THREADS * E)


@triton.jit
def segments_kernel(
    X, T, PARTIALS, PEAK, TOTAL, BELOW,
    rows, columns, x_stride, t_stride, splits, segment, scale, cap,
    KIND: tl.constexpr, SPLIT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = columns // COLUMNS_OF * COLUMNS_OF
    alpha = scale * LOG2E
    row, part, first = tl.program_id(0), 0, 0
    if SPLIT:
        row, part = tl.program_id(0) // splits, tl.program_id(0) % splits
        first = part * segment
    t, x_t = own_of(X, T, row, x_stride, t_stride, columns, cap, CAPPED, KIND)
    offset, head = row_start(row, x_stride, E, ALIGNED)
    n, edges = tl.maximum(columns - head - first, 0), tl.minimum(head, columns)
    if SPLIT:
        n, edges = tl.minimum(n, segment), tl.where(part == 0, edges, 0)
    _, state = sweep(
        X, X + offset + first, head, edges, head + first, n, t, x_t, X, X, alpha, cap,
        (1.0, 1.0), KIND, False, SMOOTH, CAPPED, ALIGNED, 0, 0, True, R, THREADS, E, STAGES,
        KIND == INDEX,
    )  # fmt: skip
    anchor, total, linear, mass = gather(state, x_t, alpha, KIND, SMOOTH)
    if SPLIT:
        # An empty segment has the sum 0, whatever its anchor: merged with -inf, it never wins.
        at, size = PARTIALS + tl.program_id(0), rows * splits
        tl.store(at, tl.where(total == 0, -float("inf"), anchor))
        tl.store(at + size, total)
        if SMOOTH:
            tl.store(at + 2 * size, linear)
            tl.store(at + 3 * size, mass)
    else:
        peak, total, below, _, _ = complete(x_t, anchor, total, linear, scale, alpha, SMOOTH)
        put_rows(PEAK, TOTAL, BELOW, row, peak, total, below, SMOOTH)


@triton.jit
def join_kernel(
    X, T, PARTIALS, SAVED_ROWS, PEAK, TOTAL, BELOW, PICKED,
    rows, columns, x_stride, t_stride, splits, scale, cap,
    KIND: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t, x_t = own_of(X, T, row, x_stride, t_stride, columns, cap, CAPPED, KIND)
    i = tl.arange(0, SPLITS)
    at, size = PARTIALS + row * splits + i, rows * splits
    shift = tl.load(at, mask=i < splits, other=-float("inf"))
    total = tl.load(at + size, mask=i < splits, other=0.0)
    linear, mass = tl.zeros([SPLITS], tl.float32), tl.zeros([SPLITS], tl.float32)
    if SMOOTH:
        linear = tl.load(at + 2 * size, mask=i < splits, other=0.0)
        mass = tl.load(at + 3 * size, mask=i < splits, other=0.0)
    alpha = scale * LOG2E
    anchor, total, linear, _ = gather((shift, total, linear, mass), x_t, alpha, KIND, SMOOTH)
    peak, total, below, anchor, margin = complete(x_t, anchor, total, linear, scale, alpha, SMOOTH)
    put_rows(PEAK, TOTAL, BELOW, row, peak, total, below, SMOOTH)
    if KIND == INDEX:
        tl.store(PICKED + row, tl.where(t >= 0, x_t * scale, 0.0))
        tl.store(SAVED_ROWS + row, anchor)
        tl.store(SAVED_ROWS + rows + row, total)
        tl.store(SAVED_ROWS + 2 * rows + row, margin)


@triton.jit
def spread_kernel(
    X, DX, T, A0, A1, B, C, SAVED_ROWS,
    rows, columns, x_stride, dx_stride, t_stride, chunks, chunk, scale, cap,
    Z: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, COLUMNS_OF: tl.constexpr,
    ALIGNED: tl.constexpr, SAME: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = columns // COLUMNS_OF * COLUMNS_OF
    chunk = chunk // (R * THREADS * E) * (R * THREADS * E)
    alpha = scale * LOG2E
    row, part = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    t, x_t = own_of(X, T, row, x_stride, t_stride, columns, cap, CAPPED)
    a0, a1, b, c, used = factors_of(A0, A1, B, C, row, Z, SMOOTH)
    offset, head = row_start(row, x_stride, E, ALIGNED)
    first = head + part * chunk
    n = tl.minimum(tl.maximum(columns - first, 0), chunk)
    dx_offset = row.to(tl.int64) * dx_stride + head
    if SAME:
        dx_offset = offset
    elif ALIGNED:
        dx_offset = tl.multiple_of(dx_offset, E)
    before = tl.where(part == 0, head, 0)
    edges = tl.minimum(before, columns)
    x_row, dx_row = X + offset + part * chunk, DX + dx_offset + part * chunk
    if used:
        anchor, total = tl.load(SAVED_ROWS + row), tl.load(SAVED_ROWS + rows + row)
        margin = tl.load(SAVED_ROWS + 2 * rows + row)
        per_exp, per_p = slopes_of(a0, a1, b, anchor, total, scale)
        single = own_slope(
            X, row, x_stride, t, x_t, scale, alpha, cap, b, c, anchor, per_exp, per_p, margin,
            SMOOTH, CAPPED,
        )  # fmt: skip
        write(
            DX, x_row, dx_row, (), head, edges, first, n, X, X, alpha, anchor, per_exp, scale,
            cap, (b, c), INDEX, False, SMOOTH, CAPPED, ALIGNED, 0, 0, True, R, THREADS, E, STAGES,
        )  # fmt: skip
        tl.debug_barrier()
        here = (t >= first - before) & (t < tl.minimum(first + n, columns)) & (t >= 0)
        tl.store(dx_row - first + t, single.to(DX.dtype.element_ty), mask=here)
    else:
        put_zeros(DX, dx_row - before, n + edges, R * THREADS * E)
