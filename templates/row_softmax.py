"""Rows of a softmax: statistics in one read, and how rows lie in memory and in registers.

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
from triton.language.extra import libdevice


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
        # The divisor is 1 at least and may be inf: the fast division needs no more care.
        e = tl.exp2(x * (2.0 * 1.4426950408889634 / cap))
        r = libdevice.fast_dividef(tl.full(e.shape, 1.0, tl.float32), 1.0 + e)
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
