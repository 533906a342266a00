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
def publish(
    x, first, inside, row, t, x_t, PARTIALS, ARRIVED, part, alpha, cap,
    PARTS: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, R: tl.constexpr,
    THREADS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The statistics of the slice x of a row, for the row's other programs to see."""
    zeros = tl.zeros([THREADS], tl.float32)
    state = (tl.full([THREADS], -float("inf"), tl.float32), zeros, zeros, zeros)
    state = absorb(
        x, first, inside, t, x_t, x, x, state, alpha, cap, (1.0, 1.0), R,
        INDEX, False, SMOOTH, CAPPED, THREADS, E, True,
    )  # fmt: skip
    anchor, total, linear, mass = gather(state, x_t, alpha, INDEX, SMOOTH)
    at = PARTIALS + row.to(tl.int64) * 4 * PARTS + part
    tl.store(at, tl.where(total == 0, -float("inf"), anchor))
    tl.store(at + PARTS, total)
    if SMOOTH:
        tl.store(at + 2 * PARTS, linear)
        tl.store(at + 3 * PARTS, mass)
    tl.debug_barrier()  # what every thread has stored comes before the count
    tl.atomic_add(ARRIVED + row, 1, sem="release")


@triton.jit
def merged(
    row, x_t, PARTIALS, ARRIVED, scale, alpha,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """``complete`` of a row once all its slices are published."""
    arrived = tl.atomic_add(ARRIVED + row, 0, sem="acquire")
    while arrived < PARTS:
        arrived = tl.atomic_add(ARRIVED + row, 0, sem="acquire")
    p = tl.arange(0, PARTS_BLOCK)
    at = PARTIALS + row.to(tl.int64) * 4 * PARTS + p
    shift = tl.load(at, mask=p < PARTS, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(at + PARTS, mask=p < PARTS, other=0.0, cache_modifier=".cg")
    linear, mass = tl.zeros([PARTS_BLOCK], tl.float32), tl.zeros([PARTS_BLOCK], tl.float32)
    if SMOOTH:
        linear = tl.load(at + 2 * PARTS, mask=p < PARTS, other=0.0, cache_modifier=".cg")
        mass = tl.load(at + 3 * PARTS, mask=p < PARTS, other=0.0, cache_modifier=".cg")
    anchor, total, linear, _ = gather((shift, total, linear, mass), x_t, alpha, INDEX, SMOOTH)
    return complete(x_t, anchor, total, linear, scale, alpha, SMOOTH)


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
    # Two rows are under way: while one's slices are waited for, the next one's are published, and
    # the one after is on its way from memory.
    row = group
    x = slice_of(X, row, x_stride, i, inside, E)
    t, x_t = own_of(X, T, row, x_stride, t_stride, columns, cap, CAPPED)
    after = tl.minimum(row + groups, rows - 1)
    x_after = slice_of(X, after, x_stride, i, inside, E)
    t_after, x_t_after = own_of(X, T, after, x_stride, t_stride, columns, cap, CAPPED)
    publish(x, first, inside, row, t, x_t, PARTIALS, ARRIVED, part, alpha, cap,
            PARTS, SMOOTH, CAPPED, R, THREADS, E)  # fmt: skip
    for k in range(tl.cdiv(rows - group, groups)):
        row = group + k * groups
        a0, a1, b, c, used = factors_of(A0, A1, B, C, row, Z, SMOOTH)
        later = tl.minimum(row + 2 * groups, rows - 1)
        x_later = slice_of(X, later, x_stride, i, inside & (row + 2 * groups < rows), E)
        t_later, x_t_later = own_of(X, T, later, x_stride, t_stride, columns, cap, CAPPED)
        if row + groups < rows:
            publish(x_after, first, inside, row + groups, t_after, x_t_after, PARTIALS, ARRIVED,
                    part, alpha, cap, PARTS, SMOOTH, CAPPED, R, THREADS, E)  # fmt: skip
        peak, total, below, anchor, margin = merged(
            row, x_t, PARTIALS, ARRIVED, scale, alpha, PARTS, PARTS_BLOCK, SMOOTH
        )
        if part == 0:
            picked = tl.where(t >= 0, x_t * scale, 0.0)
            put_rows(PEAK, TOTAL, BELOW, row, peak, total, below, SMOOTH)
            tl.store(PICKED + row, picked)
            tl.store(MARGIN + row, margin)
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
        x, t, x_t = x_after, t_after, x_t_after
        x_after, t_after, x_t_after = x_later, t_later, x_t_later
