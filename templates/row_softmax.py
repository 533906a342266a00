"""Rows of a softmax: statistics in one read, and how rows lie in memory and in registers.

    z = scale x    alpha = scale log2(e)
    shift = max_j x_j                    total = sum_j 2^((x_j - shift) alpha)
    lse   = scale shift + log(total)     p_j   = 2^((x_j - shift) alpha) / total

shift and total stay apart, and shift is one of the x: subtracted first, a common offset of the
logits cancels exactly, whatever its size. A product that is rounded before, ``x alpha``, is off by
half an ulp of itself, which 2^ makes a factor that overflows for x of 1e10.

A block of BLOCK columns is [R, THREADS, E]: E neighbours make one 16-byte access and R E elements
belong to one thread. Each thread keeps a running maximum and sum of its own, one exp2 per element
and one per block for rescaling; threads meet once per row, not once per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def anchor_of(shift):
    """What is subtracted: the shift, but nothing where all that was seen is -inf."""
    return tl.where(shift == -float("inf"), 0.0, shift)


@triton.jit
def highest(x):
    """Each thread's maximum of the block x [R, THREADS, E]."""
    return tl.max(tl.max(x, 2), 0)


@triton.jit
def fold(x, top, shift, total, alpha):
    """The block x [R, THREADS, E], ``highest`` of it top, into each thread's (shift, total).

    -inf counts for nothing.
    """
    new = tl.maximum(shift, top)
    anchor = anchor_of(new)
    e = tl.exp2((x - anchor[None, :, None]) * alpha)
    return new, total * tl.exp2((shift - anchor) * alpha) + tl.sum(tl.sum(e, 2), 0)


@triton.jit
def meet(shift, total, alpha):
    """(anchor, total) of what the threads, or the splits of a row, have: in any order."""
    anchor = anchor_of(tl.max(shift, 0))
    return anchor, tl.sum(total * tl.exp2((shift - anchor) * alpha), 0)


@triton.jit
def soft_cap(x, cap, CAPPED: tl.constexpr):
    """(c tanh(x/c), its derivative), or (x, 1)."""
    if CAPPED:
        # tanh u = 1 - 2 r with r = 1 / (1 + e^(2u)); its derivative 4 r (1 - r) does not cancel.
        # The divisor is 1 at least and may be inf: the fast division needs no more care.
        u = x * (2.0 * 1.4426950408889634 / cap)
        e = tl.exp2(u)
        r = libdevice.fast_dividef(tl.full(e.shape, 1.0, tl.float32), 1.0 + e)
        # c - 2 c r is off by an ulp of c, which is much where |x/c| is small. Below 0.19 tanh is a
        # polynomial instead, fitted to 1e-7.
        u2 = u * u
        near = tl.fma(x, u2 * tl.fma(u2, 0.00188513, -0.04003417), x)
        capped = tl.where(u2 < 0.3, near, cap - 2.0 * cap * r)
        return capped, 4.0 * r * (1.0 - r)
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
