"""``row_gradient`` of classes that are strided in memory: x [N, C, D], a row per place of a sample.

What is computed is written there; how places and classes lie in a program, in ``class_softmax``. A
place's target is left out of the running sum and its slope is put in where its class is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .class_softmax import classes_of, fold, load_block, place_of, store_block
from .cross_entropy import LOG2E, reference_of, sigmoid
from .row_gradient import complete, slopes_of
from .row_softmax import anchor_of, soft_cap


@triton.jit
def _absorb(x, first, t, x_t, classes, state, alpha, cap, SMOOTH: tl.constexpr,
            CAPPED: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """A block of logits into each thread's (shift, total, linear, mass) [SPLIT, PLACES]."""
    shift, total, linear, mass = state
    c = first + classes_of(R, SPLIT)
    x, _ = soft_cap(x.to(tl.float32), cap, CAPPED)
    if SMOOTH:
        inside = c < classes
        top = tl.max(tl.where(inside, x, -float("inf")), 0)
        old, new = reference_of(shift, x_t), reference_of(tl.maximum(shift, top), x_t)
        linear += mass * (old - new)
        linear += tl.sum(tl.where(inside, x - new[None, :, :], 0.0), 0)
        mass += tl.sum(inside.to(tl.float32), 0)
    x = tl.where((c < classes) & (c != t[None, :, :]), x, -float("inf"))
    shift, total = fold(x, shift, total, alpha)
    return shift, total, linear, mass


@triton.jit
def class_gradient_kernel(
    X, DX, T, A0, A1, B, C, PEAK, TOTAL, BELOW, PICKED, classes, places, scale, cap,
    Z: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, PLACES_OF: tl.constexpr,
    R: tl.constexpr, SPLIT: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    places = places // PLACES_OF * PLACES_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    sample, d = place_of(places, PLACES)
    first_class = sample * classes * places
    x_sample, dx_sample = X + first_class, DX + first_class
    d2 = tl.reshape(d, [1, PLACES])
    there = d2 < places
    row = sample * places + d2
    t = tl.load(T + row, mask=there, other=-1).to(tl.int64)
    has = (t >= 0) & (t < classes)
    own = x_sample + tl.where(has, t, 0) * places + d2
    x_t, own_derivative = soft_cap(tl.load(own, mask=has, other=0.0).to(tl.float32), cap, CAPPED)
    x_t = tl.where(has, x_t, -float("inf"))
    t = tl.where(has, t, -1).to(tl.int32)
    zeros = tl.zeros([SPLIT, PLACES], tl.float32)
    state = (tl.full([SPLIT, PLACES], -float("inf"), tl.float32), zeros, zeros, zeros)
    for first in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
        x = load_block(x_sample, first, d, classes, places, 0.0, R, SPLIT)
        state = _absorb(x, first, t, x_t, classes, state, alpha, cap, SMOOTH, CAPPED, R, SPLIT)
    shift, total, linear, mass = state
    top = tl.max(shift, 0, keep_dims=True)
    anchor = anchor_of(top)
    total = tl.sum(total * tl.exp2((shift - anchor) * alpha), 0, keep_dims=True)
    if SMOOTH:
        linear += mass * (reference_of(shift, x_t) - reference_of(top, x_t))
        linear = tl.sum(linear, 0, keep_dims=True)
    peak, total, below, anchor, margin = complete(x_t, anchor, total, linear, scale, alpha, SMOOTH)
    tl.store(PEAK + row, peak, mask=there)
    tl.store(TOTAL + row, total, mask=there)
    if SMOOTH:
        tl.store(BELOW + row, below, mask=there)
    tl.store(PICKED + row, tl.where(has, x_t * scale, 0.0), mask=there)
    a0, b = tl.load(A0 + row, mask=there, other=0.0), tl.load(B + row, mask=there, other=0.0)
    a1, c = tl.zeros_like(a0), tl.zeros_like(a0)
    used = (a0 != 0) | (b != 0)
    if Z:
        a1 = tl.load(A1 + row, mask=there, other=0.0)
        used = used | (a1 != 0)
    if SMOOTH:
        c = tl.load(C + row, mask=there, other=0.0)
        used = used | (c != 0)
    per_exp, per_p = slopes_of(a0, a1, b, anchor, total, scale)
    single = per_p * sigmoid(-margin) - scale * b * sigmoid(margin) - scale * c
    if CAPPED:
        single *= own_derivative
    last = (classes - 1) // (R * SPLIT) * (R * SPLIT)
    for step in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
        first = last - step  # backwards: L2 still has what was read last
        x = load_block(x_sample, first, d, classes, places, 0.0, R, SPLIT)
        x, derivative = soft_cap(x.to(tl.float32), cap, CAPPED)
        dx = tl.exp2((x - anchor[None, :, :]) * alpha) * per_exp[None, :, :]
        if SMOOTH:
            dx -= (scale * c)[None, :, :]
        if CAPPED:
            dx *= derivative
        dx = tl.where(first + classes_of(R, SPLIT) == t[None, :, :], single[None, :, :], dx)
        dx = tl.where(used[None, :, :], dx, 0.0).to(DX.dtype.element_ty)
        store_block(dx_sample, first, d, classes, places, dx, R, SPLIT)
