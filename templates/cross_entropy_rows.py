"""The kernels of cross entropy, made of the pieces in ``cross_entropy``.

statistics_kernel   one read: loss, lse and what the gradient needs; per row or (row, split)
merge_kernel        the splits of a row into one
                    (both leave what a SHARD has of a row, instead of the row's own)
gradient_kernel     one read and one write, from saved statistics; per (row, chunk)
fused_kernel        loss and gradient; the second sweep reads what registers do not hold from L2
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cross_entropy import (
    INDEX,
    LN2,
    LOG2E,
    SPARSE,
    denominators,
    finish,
    gather,
    put_zeros,
    single_slope,
    sweep,
    target_of,
    write,
)
from .row_softmax import row_start


@triton.jit
def _put(STATS, rows, row, a, b, c, d):
    tl.store(STATS + row, a)
    tl.store(STATS + rows + row, b)
    tl.store(STATS + 2 * rows + row, c)
    tl.store(STATS + 3 * rows + row, d)


@triton.jit
def _skip(LOSS, LSE, STATS, COUNTS, rows, row, programs, MEAN: tl.constexpr,
          PROGRAMS: tl.constexpr):  # fmt: skip
    """What an ignored row leaves: a loss of 0, and 0/0, as in torch, where no row counts."""
    tl.store(LOSS + row, 0.0 * denominators(COUNTS, programs, MEAN, PROGRAMS)[0])
    tl.store(LSE + row, 0.0)
    _put(STATS, rows, row, 0.0, 1.0, 0.0, 0.0)


@triton.jit
def _share(
    PACKED, W, W_SUM, rows, row, t, shift, total, x_t, linear, SKIPPED: tl.constexpr,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """What a shard has of a row: ``cross_entropy_shards`` says what is where."""
    tl.store(PACKED + row, shift)
    tl.store(PACKED + rows + row, total)
    tl.store(PACKED + 2 * rows + row, x_t)
    if SMOOTH:
        tl.store(PACKED + 3 * rows + row, linear)
        tl.store(PACKED + 4 * rows + row, tl.load(W_SUM).to(tl.float32))
    if WEIGHTED:
        w = 0.0
        if not SKIPPED:
            w = tl.load(W + t, mask=t >= 0, other=0.0).to(tl.float32)
        tl.store(PACKED + (5 if SMOOTH else 3) * rows + row, w)


@triton.jit
def statistics_kernel(
    X, T, Q, W, W_SUM, COUNTS, LOSS, LSE, STATS, PARTIALS,
    rows, columns, x_stride, t_stride, q_stride, K, ignore_index, programs, splits, segment,
    scale, cap, keep, smoothing, z_loss,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    MEAN: tl.constexpr, PROGRAMS: tl.constexpr, K_BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    SHARD: tl.constexpr, COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr,
    THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Numbers are doubles in programs that Inductor writes.
    scale, cap, z_loss = (
        tl.cast(scale, tl.float32),
        tl.cast(cap, tl.float32),
        tl.cast(z_loss, tl.float32),
    )
    keep, spread = tl.cast(keep, tl.float32), tl.cast(smoothing, tl.float32) / columns
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    eps_of = (keep, spread)
    row = tl.program_id(0)
    part = 0
    if SPLIT:
        part = row % splits
        row = row // splits
    t, x_t, skipped = target_of(
        X, T, Q, row, x_stride, t_stride, q_stride, columns, K, ignore_index, cap,
        KIND, CAPPED, K_BLOCK, SHARD,
    )  # fmt: skip
    if KIND == INDEX or KIND == SPARSE:
        if skipped:
            if SHARD and not SPLIT:
                _share(STATS, W, W_SUM, rows, row, 0, 0.0, 1.0, 0.0, 0.0, True, WEIGHTED, SMOOTH)
            elif not SPLIT:
                _skip(LOSS, LSE, STATS, COUNTS, rows, row, programs, MEAN, PROGRAMS)
            return
    offset, head = row_start(row, x_stride, E, ALIGNED)
    first = head
    edges = tl.minimum(head, columns)  # a row may end before its first boundary
    n = tl.maximum(columns - head, 0)
    if SPLIT:
        first = head + part * segment
        offset += part * segment
        n = tl.minimum(tl.maximum(columns - first, 0), segment)
        edges = tl.where(part == 0, edges, 0)
    _, state = sweep(
        X, X + offset, head, edges, first, n, t, x_t, Q + row.to(tl.int64) * q_stride, W,
        alpha, cap, eps_of, KIND, WEIGHTED, SMOOTH, CAPPED, ALIGNED, 0, 0, True, R, THREADS, E,
        STAGES, False,
    )  # fmt: skip
    anchor, total, linear, mass = gather(state, x_t, alpha, KIND, SMOOTH)
    if SPLIT:
        # An empty split has the sum 0, whatever its anchor: merged with -inf, it never wins.
        shift = tl.where(total == 0, -float("inf"), anchor)
        _put(PARTIALS, rows * splits, row * splits + part, shift, total, linear, mass)
    elif SHARD:
        shift = tl.where(total == 0, -float("inf"), anchor)
        _share(STATS, W, W_SUM, rows, row, t, shift, total, x_t, linear, False, WEIGHTED, SMOOTH)
    else:
        loss, lse, anchor, total, margin, mass = finish(
            X, T, Q, W, W_SUM, row, x_stride, q_stride, t, x_t, anchor, total, linear,
            mass, K, scale, alpha, cap, eps_of, z_loss,
            denominators(COUNTS, programs, MEAN, PROGRAMS),
            KIND, WEIGHTED, SMOOTH, CAPPED, K_BLOCK,
        )  # fmt: skip
        tl.store(LOSS + row, loss)
        tl.store(LSE + row, lse)
        _put(STATS, rows, row, anchor, total, margin, mass)


@triton.jit
def merge_kernel(
    X, T, Q, W, W_SUM, COUNTS, LOSS, LSE, STATS, PARTIALS,
    rows, columns, x_stride, t_stride, q_stride, K, ignore_index, programs, splits,
    scale, cap, keep, smoothing, z_loss,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    MEAN: tl.constexpr, PROGRAMS: tl.constexpr, K_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    SHARD: tl.constexpr,
):  # fmt: skip
    # Numbers are doubles in programs that Inductor writes.
    scale, cap, z_loss = (
        tl.cast(scale, tl.float32),
        tl.cast(cap, tl.float32),
        tl.cast(z_loss, tl.float32),
    )
    keep, spread = tl.cast(keep, tl.float32), tl.cast(smoothing, tl.float32) / columns
    row = tl.program_id(0)
    t, x_t, skipped = target_of(
        X, T, Q, row, x_stride, t_stride, q_stride, columns, K, ignore_index, cap,
        KIND, CAPPED, K_BLOCK, SHARD,
    )  # fmt: skip
    if KIND == INDEX or KIND == SPARSE:
        if skipped:
            if SHARD:
                _share(STATS, W, W_SUM, rows, row, 0, 0.0, 1.0, 0.0, 0.0, True, WEIGHTED, SMOOTH)
            else:
                _skip(LOSS, LSE, STATS, COUNTS, rows, row, programs, MEAN, PROGRAMS)
            return
    i = tl.arange(0, SPLITS)
    at = PARTIALS + row * splits + i
    size = rows * splits
    shift = tl.load(at, mask=i < splits, other=-float("inf"))
    total = tl.load(at + size, mask=i < splits, other=0.0)
    linear = tl.load(at + 2 * size, mask=i < splits, other=0.0)
    mass = tl.load(at + 3 * size, mask=i < splits, other=0.0)
    state = (shift, total, linear, mass)
    anchor, total, linear, mass = gather(state, x_t, scale * LOG2E, KIND, SMOOTH)
    if SHARD:
        merged = tl.where(total == 0, -float("inf"), anchor)
        _share(STATS, W, W_SUM, rows, row, t, merged, total, x_t, linear, False, WEIGHTED, SMOOTH)
    else:
        loss, lse, anchor, total, margin, mass = finish(
            X, T, Q, W, W_SUM, row, x_stride, q_stride, t, x_t, anchor, total, linear, mass,
            K, scale, scale * LOG2E, cap, (keep, spread), z_loss,
            denominators(COUNTS, programs, MEAN, PROGRAMS),
            KIND, WEIGHTED, SMOOTH, CAPPED, K_BLOCK,
        )  # fmt: skip
        tl.store(LOSS + row, loss)
        tl.store(LSE + row, lse)
        _put(STATS, rows, row, anchor, total, margin, mass)


@triton.jit
def _factors(
    W, W_SUM, t, scale, keep, spread, z_loss, lse, total, mass, g, g_z, g_lse,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """(per_exp, per_q, per_p) of ``slope`` and ``single_slope``."""
    per_p = 2.0 * z_loss * lse * g_z + g_lse
    per_exp = (g * mass + per_p) * scale / total
    if KIND == INDEX and SMOOTH:
        per_p += g * spread * tl.load(W_SUM).to(tl.float32)
    return per_exp, g * scale, per_p * scale


@triton.jit
def gradient_kernel(
    X, DX, T, Q, W, W_SUM, COUNTS, STATS, G, G_LSE,
    rows, columns, x_stride, dx_stride, t_stride, q_stride, g_stride, g_lse_stride, K,
    ignore_index, programs, chunks, chunk, scale, cap, keep, smoothing, z_loss,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    MEAN: tl.constexpr, WITH_G_LSE: tl.constexpr, PROGRAMS: tl.constexpr, K_BLOCK: tl.constexpr,
    SHARD: tl.constexpr, COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr,
    R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Numbers are doubles in programs that Inductor writes.
    scale, cap, z_loss = (
        tl.cast(scale, tl.float32),
        tl.cast(cap, tl.float32),
        tl.cast(z_loss, tl.float32),
    )
    keep, spread = tl.cast(keep, tl.float32), tl.cast(smoothing, tl.float32) / columns
    if SHARD:  # the number of classes is known on the card only
        spread = tl.load(COUNTS + 2 * programs)
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    chunk = chunk // (R * THREADS * E) * (R * THREADS * E)
    alpha = scale * LOG2E
    eps_of = (keep, spread)
    row = tl.program_id(0) // chunks
    part = tl.program_id(0) % chunks
    t, x_t, skipped = target_of(
        X, T, Q, row, x_stride, t_stride, q_stride, columns, K, ignore_index, cap,
        KIND, CAPPED, K_BLOCK, SHARD,
    )  # fmt: skip
    offset, head = row_start(row, x_stride, E, ALIGNED)
    first = head + part * chunk
    n = tl.minimum(tl.maximum(columns - first, 0), chunk)
    dx_offset = row.to(tl.int64) * dx_stride + head
    if SAME:
        dx_offset = offset
    elif ALIGNED:
        dx_offset = tl.multiple_of(dx_offset, E)
    before = tl.where(part == 0, head, 0)
    edges = tl.minimum(before, columns)  # a row may end before its first boundary
    x_row = X + offset + part * chunk
    dx_row = DX + dx_offset + part * chunk
    if KIND == INDEX or KIND == SPARSE:
        if skipped:
            put_zeros(DX, dx_row - before, n + edges, R * THREADS * E)
            return
    anchor, total = tl.load(STATS + row), tl.load(STATS + rows + row)
    margin, mass = tl.load(STATS + 2 * rows + row), tl.load(STATS + 3 * rows + row)
    lse = anchor * scale + tl.log2(total) * LN2
    of_ce, of_z = denominators(COUNTS, programs, MEAN, PROGRAMS)
    g = tl.load(G + row.to(tl.int64) * g_stride).to(tl.float32)
    g_lse = 0.0
    if WITH_G_LSE:
        g_lse = tl.load(G_LSE + row.to(tl.int64) * g_lse_stride).to(tl.float32)
    per_exp, per_q, per_p = _factors(
        W, W_SUM, t, scale, keep, spread, z_loss, lse, total, mass, g * of_ce, g * of_z, g_lse,
        KIND, WEIGHTED, SMOOTH,
    )  # fmt: skip
    if KIND == INDEX or KIND == SPARSE:
        if SHARD:  # what is read at another shard's target is not stored
            t = tl.maximum(t, 0)
        single, used = single_slope(
            X, T, Q, W, row, x_stride, q_stride, t, x_t, K, scale, alpha, cap, eps_of, anchor,
            per_exp, per_q, per_p, margin, KIND, WEIGHTED, SMOOTH, CAPPED, K_BLOCK,
        )  # fmt: skip
        # Loaded here: what comes out of a call with pointers makes torch 2.11 take all of those for
        # written.
        if KIND == INDEX:
            at = tl.load(T + row.to(tl.int64) * t_stride).to(tl.int32)
        else:
            k = tl.arange(0, K_BLOCK)
            at = tl.load(T + row.to(tl.int64) * q_stride + k, mask=k < K, other=0).to(tl.int32)
        # Another shard's target is no column here, and may lie before a short row's boundary.
        used = used & (at >= first - before) & (at < tl.minimum(first + n, columns))
        tl.debug_barrier()  # DX may be X, whose single columns every thread has read now
    write(
        DX, x_row, dx_row, (), head, edges, first, n, Q + row.to(tl.int64) * q_stride, W,
        alpha, anchor, per_exp, per_q, cap, eps_of, KIND, WEIGHTED, SMOOTH, CAPPED,
        ALIGNED, 0, 0, True, R, THREADS, E, STAGES,
    )  # fmt: skip
    if KIND == INDEX or KIND == SPARSE:
        tl.debug_barrier()
        tl.store(dx_row - first + at, single.to(DX.dtype.element_ty), mask=used)


@triton.jit
def fused_kernel(
    X, DX, T, Q, W, W_SUM, COUNTS, LOSS,
    rows, columns, x_stride, dx_stride, t_stride, q_stride, K, ignore_index, programs,
    scale, cap, keep, smoothing, z_loss,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    MEAN: tl.constexpr, PROGRAMS: tl.constexpr, K_BLOCK: tl.constexpr, COLUMNS_OF: tl.constexpr,
    ALIGNED: tl.constexpr, SAME: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr,
    STREAM: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Numbers are doubles in programs that Inductor writes.
    scale, cap, z_loss = (
        tl.cast(scale, tl.float32),
        tl.cast(cap, tl.float32),
        tl.cast(z_loss, tl.float32),
    )
    keep, spread = tl.cast(keep, tl.float32), tl.cast(smoothing, tl.float32) / columns
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    eps_of = (keep, spread)
    row = tl.program_id(0)
    t, x_t, skipped = target_of(
        X, T, Q, row, x_stride, t_stride, q_stride, columns, K, ignore_index, cap,
        KIND, CAPPED, K_BLOCK, False,
    )  # fmt: skip
    offset, head = row_start(row, x_stride, E, ALIGNED)
    edges = tl.minimum(head, columns)
    n = tl.maximum(columns - head, 0)
    dx_offset = row.to(tl.int64) * dx_stride + head
    if SAME:
        dx_offset = offset
    elif ALIGNED:
        dx_offset = tl.multiple_of(dx_offset, E)
    x_row, dx_row = X + offset, DX + dx_offset
    if KIND == INDEX or KIND == SPARSE:
        if skipped:
            # 0/0, as in torch, where no row counts.
            tl.store(LOSS + row, 0.0 * denominators(COUNTS, programs, MEAN, PROGRAMS)[0])
            put_zeros(DX, dx_row - head, columns, R * THREADS * E)
            return
    q_row = Q + row.to(tl.int64) * q_stride
    held, state = sweep(
        X, x_row, head, edges, head, n, t, x_t, q_row, W, alpha, cap, eps_of,
        KIND, WEIGHTED, SMOOTH, CAPPED, ALIGNED, HELD, WHOLE, STREAM, R, THREADS, E, STAGES, True,
    )  # fmt: skip
    anchor, total, linear, mass = gather(state, x_t, alpha, KIND, SMOOTH)
    of_ce, of_z = denominators(COUNTS, programs, MEAN, PROGRAMS)
    loss, lse, anchor, total, margin, mass = finish(
        X, T, Q, W, W_SUM, row, x_stride, q_stride, t, x_t, anchor, total,
        linear, mass, K, scale, alpha, cap, eps_of, z_loss, (of_ce, of_z),
        KIND, WEIGHTED, SMOOTH, CAPPED, K_BLOCK,
    )  # fmt: skip
    tl.store(LOSS + row, loss)
    per_exp, per_q, per_p = _factors(
        W, W_SUM, t, scale, keep, spread, z_loss, lse, total, mass, of_ce, of_z, 0.0,
        KIND, WEIGHTED, SMOOTH,
    )  # fmt: skip
    if KIND == INDEX or KIND == SPARSE:
        single, used = single_slope(
            X, T, Q, W, row, x_stride, q_stride, t, x_t, K, scale, alpha, cap, eps_of, anchor,
            per_exp, per_q, per_p, margin, KIND, WEIGHTED, SMOOTH, CAPPED, K_BLOCK,
        )  # fmt: skip
        # As above.
        if KIND == INDEX:
            at = tl.load(T + row.to(tl.int64) * t_stride).to(tl.int32)
        else:
            k = tl.arange(0, K_BLOCK)
            at = tl.load(T + row.to(tl.int64) * q_stride + k, mask=k < K, other=0).to(tl.int32)
        tl.debug_barrier()  # DX may be X, whose single columns every thread has read now
    write(
        DX, x_row, dx_row, held, head, edges, head, n, q_row, W, alpha, anchor, per_exp, per_q,
        cap, eps_of, KIND, WEIGHTED, SMOOTH, CAPPED, ALIGNED, HELD, WHOLE, STREAM,
        R, THREADS, E, STAGES,
    )  # fmt: skip
    if KIND == INDEX or KIND == SPARSE:
        tl.debug_barrier()
        tl.store(dx_row - head + at, single.to(DX.dtype.element_ty), mask=used)
