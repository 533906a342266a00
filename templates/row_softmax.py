"""Rows of a softmax: statistics in one read, and how rows lie in memory and registers.

    shift = max_j z_j log2(e)            total = sum_j 2^(z_j log2(e) - shift)
    lse   = (shift + log2(total)) ln(2)  p_j   = 2^(z_j log2(e) - shift) / total

shift and total stay apart, so that a common offset of the logits cancels: ``fma(z, log2(e),
-shift)`` is rounded once, after the subtraction.

A block of BLOCK columns is [R, THREADS, E]: E neighbours make one 16-byte access and R E elements
belong to one thread. Each thread keeps a running maximum and sum of its own, one exp2 per element
and one per block for rescaling; threads meet once per row, not once per block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(x, shift, total, alpha):
    """The block x [R, THREADS, E] into each thread's (shift, total); -inf counts for nothing."""
    new = tl.maximum(shift, tl.max(tl.max(x, 2), 0) * alpha)
    anchor = tl.where(new == -float("inf"), 0.0, new)
    e = tl.exp2(tl.fma(x, alpha, -anchor[None, :, None]))
    return new, total * tl.exp2(shift - anchor) + tl.sum(tl.sum(e, 2), 0)


@triton.jit
def meet(shift, total):
    """(anchor, total) of what the threads, or the splits of a row, have: exact, in any order."""
    top = tl.max(shift, 0)
    anchor = tl.where(top == -float("inf"), 0.0, top)
    return anchor, tl.sum(total * tl.exp2(shift - anchor), 0)


@triton.jit
def soft_cap(x, cap, CAPPED: tl.constexpr):
    """(c tanh(x/c), its derivative), or (x, 1)."""
    if CAPPED:
        # tanh u = 1 - 2 r with r = 1 / (1 + e^(2u)); its derivative 4 r (1 - r) does not cancel.
        r = 1.0 / (1.0 + tl.exp2(x * (2.0 * 1.4426950408889634 / cap)))
        return cap - 2.0 * cap * r, 4.0 * r * (1.0 - r)
    else:
        return x, 1.0


@triton.jit
def row_start(row, stride, E: tl.constexpr, ALIGNED: tl.constexpr):
    """(offset, head): row's first column on a 16-byte boundary, the number of columns before it."""
    offset = row.to(tl.int64) * stride
    if ALIGNED:
        offset = tl.multiple_of(offset, E)
        head = 0
    else:
        head = ((E - offset % E) % E).to(tl.int32)
        offset = tl.multiple_of(offset + head, E)
    return offset, head


# --- softmax and log-softmax of rows --------------------------------------------------------------


@triton.jit
def _forward_block(x, anchor, total, log_total, scale, alpha, LOG: tl.constexpr):
    z = tl.fma(x, alpha, -anchor)
    if LOG:
        return (z - log_total) * 0.6931471805599453
    else:
        return tl.exp2(z) / total


@triton.jit
def softmax_kernel(
    X, Y, x_stride, y_stride, columns, scale,
    LOG: tl.constexpr, COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, HELD: tl.constexpr,
    WHOLE: tl.constexpr, STREAM: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y = softmax(scale X) or its logarithm, a row per program. The first HELD blocks stay in
    registers, the rest is read again, out of L2."""
    BLOCK: tl.constexpr = R * THREADS * E
    row = tl.program_id(0)
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    alpha = scale * 1.4426950408889634
    offset, head = row_start(row, x_stride, E, ALIGNED)
    x_row = X + offset
    y_row = Y + row.to(tl.int64) * y_stride + head
    n = columns - head  # columns from the boundary on
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, THREADS * E)
    shift = tl.full([THREADS], -float("inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    if not ALIGNED:
        x = tl.load(x_row - head + j, mask=j < head, other=-float("inf")).to(tl.float32)
        shift, total = fold(tl.reshape(x, [1, THREADS, E]), shift, total, alpha)
    held = ()
    for k in tl.static_range(HELD):
        if k < WHOLE:
            held = held + (tl.load(x_row + k * BLOCK + i),)
        else:
            inside = k * BLOCK + i < n
            held = held + (tl.load(x_row + k * BLOCK + i, mask=inside, other=-float("inf")),)
    for k in tl.static_range(HELD):
        x = tl.reshape(held[k].to(tl.float32), [R, THREADS, E])
        shift, total = fold(x, shift, total, alpha)
    if STREAM:
        last = HELD * BLOCK + (n - HELD * BLOCK) // BLOCK * BLOCK
        for c in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            x = tl.load(x_row + c + i, eviction_policy="evict_last").to(tl.float32)
            shift, total = fold(tl.reshape(x, [R, THREADS, E]), shift, total, alpha)
        if last < n:
            inside = last + i < n
            x = tl.load(x_row + last + i, mask=inside, other=-float("inf")).to(tl.float32)
            shift, total = fold(tl.reshape(x, [R, THREADS, E]), shift, total, alpha)
    anchor, all_of = meet(shift, total)
    log_total = tl.log2(all_of)
    if not ALIGNED:
        x = tl.load(x_row - head + j, mask=j < head, other=0.0).to(tl.float32)
        y = _forward_block(x, anchor, all_of, log_total, scale, alpha, LOG)
        tl.store(y_row - head + j, y.to(Y.dtype.element_ty), mask=j < head)
    for k in tl.static_range(HELD):
        x = held[k].to(tl.float32)
        y = _forward_block(x, anchor, all_of, log_total, scale, alpha, LOG).to(Y.dtype.element_ty)
        if k < WHOLE:
            tl.store(y_row + k * BLOCK + i, y)
        else:
            tl.store(y_row + k * BLOCK + i, y, mask=k * BLOCK + i < n)
    if STREAM:
        last = HELD * BLOCK + (n - HELD * BLOCK) // BLOCK * BLOCK
        for c in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            x = tl.load(x_row + c + i, eviction_policy="evict_first").to(tl.float32)
            y = _forward_block(x, anchor, all_of, log_total, scale, alpha, LOG)
            tl.store(y_row + c + i, y.to(Y.dtype.element_ty), eviction_policy="evict_first")
        if last < n:
            inside = last + i < n
            x = tl.load(x_row + last + i, mask=inside, other=0.0).to(tl.float32)
            y = _forward_block(x, anchor, all_of, log_total, scale, alpha, LOG)
            tl.store(y_row + last + i, y.to(Y.dtype.element_ty), mask=inside)
