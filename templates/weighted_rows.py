"""Sums over rows of log-probabilities that are weighted, in the sweep that takes their softmax.

    z    = scale c tanh(x / c)            c: the softcap; z = scale x without one
    peak = max_j z_j     total = sum_j exp(z_j - peak)     below = sum_j (z_j - peak)
    linear = sum_j w_j (z_j - peak)

    OWN      w_j = exp(z_j - peak): linear / total - log(total) is the negated entropy
    GIVEN    w_j is read beside x; mass = sum_j w_j
    SOFTMAX  w_j = exp(u_j - top), of other logits u with a softcap and a scale of their own:
             top = max_j u_j, mass = sum_j w_j

    own = sum_j xlogy(w_j, w_j) of GIVEN; sum_j w_j ((u_j - top) - (z_j - peak)) of SOFTMAX, where
    what is small is the difference of two columns, not of two sums

All is kept relative to the running maxima s of a thread, which move on the way: for s -> s', and f
what w is scaled by as its own maximum moves (1 if it has none),

    linear -> f linear + (f mass) (s - s')

Nothing cancels: log p_j = (z_j - peak) - log(total) is a sum of two terms that are not positive, so
that the terms of linear are no larger than those of the sum that it stands for, whatever sign the
weights have. Infinities and NaN come out as torch's products have them: 0 (-inf) is NaN. Weights
of SOFTMAX are divided by their sum at the end, so that it is mass times the loss that may overflow.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton
from triton.language.extra import libdevice

from .cross_entropy import LN2, LOG2E
from .cross_entropy_launch import Tile, _layout, _same, _shape_of, tunable
from .row_gradient import complete
from .row_softmax import anchor_of, highest, row_start, soft_cap

OWN, GIVEN, SOFTMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NORMAL = tl.constexpr(2.0**-126)
# ``own`` is not wanted; is; is, and u of -inf counts for nothing in it (as in xlogy).
NO, YES, FINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _thread(x, ROWS: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr):
    """Each thread's sum of the block x."""
    return tl.sum(tl.sum(tl.reshape(x, [ROWS, THREADS, E]), 2), 0)


@triton.jit
def absorb(
    x, w, inside, state, scale, cap, w_scale, w_cap,
    ROWS: tl.constexpr, KIND: tl.constexpr, SELF: tl.constexpr, SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr, W_CAPPED: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks of logits and of what they are weighted with into each thread's sums."""
    shift, total, below, number, top, mass, linear, own = state
    x, _ = soft_cap(x.to(tl.float32), cap, CAPPED)
    x = tl.reshape(tl.where(inside, x, -float("inf")) if MASKED else x, [ROWS, THREADS, E])
    there = tl.reshape(inside, [ROWS, THREADS, E]) if MASKED else True
    new = tl.maximum(shift, highest(x))
    anchor = anchor_of(new)
    drop = anchor_of(shift) - anchor
    y = x - anchor[None, :, None]
    e = tl.exp2(y * (scale * LOG2E))
    f = tl.exp2((shift - anchor) * (scale * LOG2E))
    if SMOOTH:
        below += number * drop + _thread(tl.where(there, y, 0.0) if MASKED else y, ROWS, THREADS, E)
        if MASKED:
            number += _thread(inside.to(tl.float32), ROWS, THREADS, E)
        else:
            number += ROWS * E
    if KIND == OWN:
        product = e * y
        linear = f * linear + (f * total) * drop
    elif KIND == GIVEN:
        w = tl.reshape(w.to(tl.float32), [ROWS, THREADS, E])
        product = w * y
        linear += mass * drop
        mass += _thread(w, ROWS, THREADS, E)
        if SELF:
            # The card's own logarithm, which takes what is not normal for 0, is off by 2^-22 at
            # most: less than what fp32 makes of the log of a row's sum.
            log = libdevice.fast_log2f(w) * LN2
            own += _thread(tl.where(tl.abs(w) < NORMAL, 0.0, w * log), ROWS, THREADS, E)
    else:
        u, _ = soft_cap(w.to(tl.float32), w_cap, W_CAPPED)
        u = tl.reshape(tl.where(inside, u, -float("inf")) if MASKED else u, [ROWS, THREADS, E])
        higher = tl.maximum(top, highest(u))
        w_anchor = anchor_of(higher)
        w_f = tl.exp2((top - w_anchor) * (w_scale * LOG2E))
        v = (u - w_anchor[None, :, None]) * w_scale
        w = tl.exp2(v * LOG2E)
        product = w * y
        mass = mass * w_f
        linear = w_f * linear + mass * drop
        if SELF:
            if SELF == FINITE:
                v = tl.where(w == 0, 0.0, v)
            apart = (anchor_of(top) - w_anchor) * w_scale - drop * scale
            own = w_f * own + mass * apart
            difference = w * (v - y * scale)
            difference = tl.where(there, difference, 0.0) if MASKED else difference
            own += _thread(difference, ROWS, THREADS, E)
        mass += _thread(w, ROWS, THREADS, E)
        top = higher
    linear += _thread(tl.where(there, product, 0.0) if MASKED else product, ROWS, THREADS, E)
    total = total * f + _thread(e, ROWS, THREADS, E)
    return new, total, below, number, top, mass, linear, own


@triton.jit
def gather(state, scale, w_scale, KIND: tl.constexpr, SELF: tl.constexpr):
    """(anchor, total, below, the weights' anchor, mass, linear, own) of all threads."""
    shift, total, below, number, top, mass, linear, own = state
    anchor = anchor_of(tl.max(shift, 0))
    f = tl.exp2((shift - anchor) * (scale * LOG2E))
    drop = anchor_of(shift) - anchor
    total = total * f
    below += number * drop
    w_anchor = 0.0
    if KIND == OWN:
        linear = f * linear + total * drop
    elif KIND == GIVEN:
        linear += mass * drop
    else:
        w_anchor = anchor_of(tl.max(top, 0))
        w_f = tl.exp2((top - w_anchor) * (w_scale * LOG2E))
        mass = mass * w_f
        linear = w_f * linear + mass * drop
        own = w_f * own + mass * ((anchor_of(top) - w_anchor) * w_scale - drop * scale)
    sums = tl.sum(total, 0), tl.sum(below, 0), tl.sum(mass, 0), tl.sum(linear, 0), tl.sum(own, 0)
    return anchor, sums[0], sums[1], w_anchor, sums[2], sums[3] * scale, sums[4]


@triton.jit
def weighted_kernel(
    X, W, PEAK, TOTAL, BELOW, TOP, MASS, LINEAR, OWN_SUM,
    columns, x_stride, w_stride, scale, cap, w_scale, w_cap,
    KIND: tl.constexpr, SELF: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    W_CAPPED: tl.constexpr, COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr,
    R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = R * THREADS * E
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    row = tl.program_id(0)
    offset, head = row_start(row, x_stride, E, ALIGNED)
    w_offset = row.to(tl.int64) * w_stride + head
    if SAME:
        w_offset = offset
    elif ALIGNED:
        w_offset = tl.multiple_of(w_offset, E)
    x_row, w_row = X + offset, W + w_offset
    edges, n = tl.minimum(head, columns), tl.maximum(columns - head, 0)
    low = tl.full([THREADS], -float("inf"), tl.float32)
    zeros = tl.zeros([THREADS], tl.float32)
    state = low, zeros, zeros, zeros, low, zeros, zeros, zeros
    i = tl.arange(0, BLOCK)
    if not ALIGNED:
        j = tl.arange(0, THREADS * E)
        x_edge = tl.load(x_row - head + j, mask=j < edges, other=0.0)
        w_edge = x_edge
        if KIND != OWN:
            w_edge = tl.load(w_row - head + j, mask=j < edges, other=0.0)
        state = absorb(
            x_edge, w_edge, j < edges, state, scale, cap, w_scale, w_cap, 1, KIND, SELF, SMOOTH,
            CAPPED, W_CAPPED, THREADS, E, True,
        )  # fmt: skip
    last = n // BLOCK * BLOCK
    for c in tl.range(0, last, BLOCK, num_stages=STAGES):
        x = tl.load(x_row + c + i, eviction_policy="evict_first")
        w = x
        if KIND != OWN:
            w = tl.load(w_row + c + i, eviction_policy="evict_first")
        state = absorb(
            x, w, True, state, scale, cap, w_scale, w_cap, R, KIND, SELF, SMOOTH, CAPPED,
            W_CAPPED, THREADS, E, False,
        )  # fmt: skip
    if last < n:
        inside = last + i < n
        x_tail = tl.load(x_row + last + i, mask=inside, other=0.0)
        w_tail = x_tail
        if KIND != OWN:
            w_tail = tl.load(w_row + last + i, mask=inside, other=0.0)
        state = absorb(
            x_tail, w_tail, inside, state, scale, cap, w_scale, w_cap, R, KIND, SELF, SMOOTH,
            CAPPED, W_CAPPED, THREADS, E, True,
        )  # fmt: skip
    anchor, total, below, w_anchor, mass, linear, own = gather(state, scale, w_scale, KIND, SELF)
    low_x = -float("inf")
    peak, total, below, _, _ = complete(low_x, anchor, total, below, scale, scale * LOG2E, SMOOTH)
    known = total == total  # not so of a row of -inf, less whose maximum all is NaN in torch
    linear = tl.where(known, linear, float("nan"))
    if KIND == SOFTMAX:
        own = tl.where(known, own, float("nan"))
    tl.store(PEAK + row, peak)
    tl.store(TOTAL + row, total)
    if SMOOTH:
        tl.store(BELOW + row, below)
    if KIND == SOFTMAX:
        top, mass, _, _, _ = complete(low_x, w_anchor, mass, 0.0, w_scale, w_scale * LOG2E, False)
        tl.store(TOP + row, top)
    if KIND != OWN:
        tl.store(MASS + row, mass)
    tl.store(LINEAR + row, linear)
    if SELF:
        tl.store(OWN_SUM + row, own)


@tunable("cross_entropy", "weighted", "columns rows of", scaled="r")
def tile(columns: Any, itemsize: int, kind: int) -> Tile:
    """The tile for a row and what it is weighted with (benchmarks/NOTES.md)."""
    if kind == SOFTMAX.value:
        return Tile(2, 4, 0, 1)
    if isinstance(columns, int) and columns * itemsize <= 8192:
        return Tile(2, 4, 0, 1)
    return Tile(4, 8, 0, 1)


def weighted_statistics(
    x: torch.Tensor, w: torch.Tensor | None, kind: int, own: int, below: bool, scale: float,
    softcap: float, w_scale: float, w_softcap: float, chosen: Tile | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(peak, total, below, top, mass, linear, own) [N] of the module's formulas, fp32, in one read
    of x and w [N, V], whose strides along V are 1. What a kind does not have, or is not wanted, has
    no elements."""
    rows, columns = x.shape
    softmax = kind == SOFTMAX.value
    made = True, True, below, softmax, kind != OWN.value, True, own != NO.value
    results = [torch.empty(rows * m, dtype=torch.float32, device=x.device) for m in made]
    if rows == 0:
        return tuple(results)
    other = x if w is None else w
    layout = _layout(x, other)
    of = ("own", "given", "softmax")[kind]
    chosen = chosen or tile(columns, x.element_size(), kind, rows=rows, of=of)
    wrap_triton(weighted_kernel)[(rows,)](
        x, other, *results, columns, x.stride(0), other.stride(0), scale, softcap or 1.0, w_scale,
        w_softcap or 1.0, KIND=kind, SELF=own, SMOOTH=below, CAPPED=softcap != 0,
        W_CAPPED=w_softcap != 0, SAME=_same(x, other), **layout, **_shape_of(chosen),
    )  # fmt: skip
    return tuple(results)
