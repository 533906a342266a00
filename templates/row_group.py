"""``row_gradient`` with a row over several programs that hold it in registers between its two uses.

A row of a large vocabulary fits into no multiprocessor, and the rows that a card works on at a time
not into its L2: a second sweep comes from memory again. Here PARTS programs share a row. Each loads
its slice, publishes the slice's statistics, loads its slice of the next row, waits until the others
have published theirs, and writes the gradient of the slice that it still holds. x is read once,
dx written once, and loads of one row overlap the stores of the one before.

Programs wait for one another, so all must be on the card at once: the launch is cooperative, which
the driver refuses otherwise. A row's statistics are merged by all its programs in the order of
slices: the same bits every run.

    PARTIALS [rows, 4, PARTS]   maximum, sum, linear, mass of a slice: see ``cross_entropy.gather``
    ARRIVED  [rows]             how many slices are published; zeros before the launch
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cross_entropy import INDEX, LOG2E, absorb, gather, slope
from .row_gradient import complete, factors_of, own_of, own_slope, put_rows, slopes_of


@triton.jit
def slice_of(X, row, x_stride, i, inside, E: tl.constexpr):
    offset = tl.multiple_of(row.to(tl.int64) * x_stride, E)
    return tl.load(X + offset + i, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def group_kernel(
    X, DX, T, A0, A1, B, C, PEAK, TOTAL, BELOW, PICKED, MARGIN, PARTIALS, ARRIVED,
    rows, columns, x_stride, dx_stride, t_stride, groups, scale, cap,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, Z: tl.constexpr, SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr, COLUMNS_OF: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    SLICE: tl.constexpr = R * THREADS * E
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first = part * SLICE
    i = first + tl.arange(0, SLICE)
    inside = i < columns
    p = tl.arange(0, PARTS_BLOCK)
    zeros = tl.zeros([THREADS], tl.float32)
    x = slice_of(X, group, x_stride, i, inside & (group < rows), E)
    for k in range(tl.cdiv(rows - group, groups)):
        row = group + k * groups
        t, x_t = own_of(X, T, row, x_stride, t_stride, columns, cap, CAPPED)
        state = (tl.full([THREADS], -float("inf"), tl.float32), zeros, zeros, zeros)
        state = absorb(
            x, first, inside, t, x_t, X, X, state, alpha, cap, (1.0, 1.0), R,
            INDEX, False, SMOOTH, CAPPED, THREADS, E, True,
        )  # fmt: skip
        anchor, total, linear, mass = gather(state, x_t, alpha, INDEX, SMOOTH)
        at = PARTIALS + row.to(tl.int64) * 4 * PARTS + part
        tl.store(at, tl.where(total == 0, -float("inf"), anchor))
        tl.store(at + PARTS, total)
        if SMOOTH:
            tl.store(at + 2 * PARTS, linear)
            tl.store(at + 3 * PARTS, mass)
        tl.debug_barrier()
        tl.atomic_add(ARRIVED + row, 1, sem="release")
        ahead = row + groups
        following = slice_of(X, ahead, x_stride, i, inside & (ahead < rows), E)
        arrived = tl.atomic_add(ARRIVED + row, 0, sem="acquire")
        while arrived < PARTS:
            arrived = tl.atomic_add(ARRIVED + row, 0, sem="acquire")
        at = PARTIALS + row.to(tl.int64) * 4 * PARTS + p
        shift = tl.load(at, mask=p < PARTS, other=-float("inf"), cache_modifier=".cg")
        total = tl.load(at + PARTS, mask=p < PARTS, other=0.0, cache_modifier=".cg")
        linear = tl.zeros([PARTS_BLOCK], tl.float32)
        mass = tl.zeros([PARTS_BLOCK], tl.float32)
        if SMOOTH:
            linear = tl.load(at + 2 * PARTS, mask=p < PARTS, other=0.0, cache_modifier=".cg")
            mass = tl.load(at + 3 * PARTS, mask=p < PARTS, other=0.0, cache_modifier=".cg")
        anchor, total, linear, _ = gather((shift, total, linear, mass), x_t, alpha, INDEX, SMOOTH)
        peak, total, below, anchor, margin = complete(
            x_t, anchor, total, linear, scale, alpha, SMOOTH
        )
        if part == 0:
            picked = tl.where(t >= 0, x_t * scale, 0.0)
            put_rows(PEAK, TOTAL, BELOW, PICKED, row, peak, total, below, picked, SMOOTH)
            tl.store(MARGIN + row, margin)
        a0, a1, b, c, used = factors_of(A0, A1, B, C, row, Z, SMOOTH)
        to = DX + tl.multiple_of(row.to(tl.int64) * dx_stride, E)
        if used:
            per_exp, per_p = slopes_of(a0, a1, b, anchor, total, scale)
            single = own_slope(
                X, row, x_stride, t, x_t, scale, alpha, cap, b, c, anchor, per_exp, per_p, margin,
                SMOOTH, CAPPED,
            )  # fmt: skip
            dx = slope(DX, x, i, inside, X, X, alpha, anchor, per_exp, scale, cap, (b, c), INDEX,
                       False, SMOOTH, CAPPED, True)  # fmt: skip
            tl.store(to + i, dx, mask=inside, eviction_policy="evict_first")
            tl.debug_barrier()
            here = (t >= first) & (t < first + SLICE)
            tl.store(to + t, single.to(DX.dtype.element_ty), mask=here)
        else:
            tl.store(to + i, tl.zeros([SLICE], DX.dtype.element_ty), mask=inside)
        x = following
