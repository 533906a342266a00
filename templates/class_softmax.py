"""Softmaxes over classes that are strided in memory: x [N, C, D], D places of an image or a text.

    z    = scale c tanh(x / c)            c: the softcap; z = scale x without one
    peak = max_c z_c     total = sum_c exp(z_c - peak)
    y_c  = exp(z_c - peak) / total        y_c = (z_c - peak) - log(total)
    dx_c = scale y_c (g_c - sum_c y_c g_c)       dx_c = scale (g_c - e^(y_c) sum_c g_c)

A program has PLACES neighbouring places, whose E in a thread make one 16-byte access, and all of
their classes: a block is [R, SPLIT, PLACES] of them, of which the R are one thread's. So a class
costs no exchange between threads; where places are few, the SPLIT of them that share a place meet
once. Classes that fit into one block stay in registers between their two sweeps (ONE); else the
second sweep goes back from the end, where L2 still has what was read last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cross_entropy import LN2, LOG2E
from .row_gradient import complete
from .row_softmax import anchor_of, soft_cap


@triton.jit
def place_of(places, PLACES: tl.constexpr):
    """(sample, the program's places in it as [1, 1, PLACES])."""
    tiles = tl.cdiv(places, PLACES)
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return sample.to(tl.int64), (tile * PLACES + tl.arange(0, PLACES))[None, None, :]


@triton.jit
def classes_of(R: tl.constexpr, SPLIT: tl.constexpr):
    """A block's classes, less its first, as [R, SPLIT, 1]."""
    r, s = tl.arange(0, R), tl.arange(0, SPLIT)
    return r[:, None, None] * SPLIT + s[None, :, None]


@triton.jit
def load_block(X, first, d, classes, places, other, R: tl.constexpr, SPLIT: tl.constexpr):
    """A block of X, the tensor's first class of a sample, beginning at class ``first``."""
    inside = classes_of(R, SPLIT)
    mask = (first + inside < classes) & (d < places)
    return tl.load(
        X + first * tl.cast(places, tl.int64) + inside * places + d, mask=mask, other=other
    )


@triton.jit
def fold(x, shift, total, alpha):
    """A block x [R, SPLIT, PLACES] into each thread's (shift, total) [SPLIT, PLACES]."""
    new = tl.maximum(shift, tl.max(x, 0))
    anchor = anchor_of(new)
    e = tl.exp2((x - anchor[None, :, :]) * alpha)
    return new, total * tl.exp2((shift - anchor) * alpha) + tl.sum(e, 0)


@triton.jit
def _meet(shift, total, alpha):
    """(anchor, total) [PLACES]."""
    anchor = anchor_of(tl.max(shift, 0))
    return anchor, tl.sum(total * tl.exp2((shift - anchor[None, :]) * alpha), 0)


@triton.jit
def class_statistics_kernel(
    X, PEAK, TOTAL, classes, places, scale, cap,
    CAPPED: tl.constexpr, PLACES_OF: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr,
    PLACES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    places = places // PLACES_OF * PLACES_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    sample, d = place_of(places, PLACES)
    x_sample = X + sample * classes * places
    shift = tl.full([SPLIT, PLACES], -float("inf"), tl.float32)
    total = tl.zeros([SPLIT, PLACES], tl.float32)
    for first in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
        x = load_block(x_sample, first, d, classes, places, -float("inf"), R, SPLIT).to(tl.float32)
        if CAPPED:
            x, _ = soft_cap(x, cap, CAPPED)
            x = tl.where(first + classes_of(R, SPLIT) < classes, x, -float("inf"))
        shift, total = fold(x, shift, total, alpha)
    anchor, everyone = _meet(shift, total, alpha)
    peak, everyone, _, _, _ = complete(
        -float("inf"), anchor, everyone, 0.0, scale, alpha, False
    )  # fmt: skip
    at = sample * places + tl.reshape(d, [PLACES])
    inside = tl.reshape(d, [PLACES]) < places
    tl.store(PEAK + at, peak, mask=inside)
    tl.store(TOTAL + at, everyone, mask=inside)


@triton.jit
def _value(Y, x, scale, anchor, total, LOG: tl.constexpr):
    x = x.to(tl.float32) - anchor[None, None, :]
    if LOG:
        y = tl.fma(
            x, tl.full(x.shape, 1.0, tl.float32) * scale, (tl.log2(total) * -LN2)[None, None, :]
        )
    else:
        y = tl.exp2(x * (scale * LOG2E)) / total[None, None, :]
    return y.to(Y.dtype.element_ty)


@triton.jit
def store_block(Y, first, d, classes, places, y, R: tl.constexpr, SPLIT: tl.constexpr):
    inside = classes_of(R, SPLIT)
    mask = (first + inside < classes) & (d < places)
    tl.store(Y + first * tl.cast(places, tl.int64) + inside * places + d, y, mask=mask)


@triton.jit
def class_softmax_kernel(
    X, Y, classes, places, scale,
    LOG: tl.constexpr, ONE: tl.constexpr, PLACES_OF: tl.constexpr, R: tl.constexpr,
    SPLIT: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    places = places // PLACES_OF * PLACES_OF
    scale = tl.cast(scale, tl.float32)
    alpha = scale * LOG2E
    sample, d = place_of(places, PLACES)
    x_sample, y_sample = X + sample * classes * places, Y + sample * classes * places
    shift = tl.full([SPLIT, PLACES], -float("inf"), tl.float32)
    total = tl.zeros([SPLIT, PLACES], tl.float32)
    if ONE:
        kept = load_block(x_sample, 0, d, classes, places, -float("inf"), R, SPLIT)
        shift, total = fold(kept.to(tl.float32), shift, total, alpha)
        anchor, everyone = _meet(shift, total, alpha)
        y = _value(Y, kept, scale, anchor, everyone, LOG)
        store_block(y_sample, 0, d, classes, places, y, R, SPLIT)
    else:
        for first in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
            x = load_block(x_sample, first, d, classes, places, -float("inf"), R, SPLIT).to(
                tl.float32
            )
            shift, total = fold(x, shift, total, alpha)
        anchor, everyone = _meet(shift, total, alpha)
        last = (classes - 1) // (R * SPLIT) * (R * SPLIT)
        for step in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
            first = last - step
            x = load_block(x_sample, first, d, classes, places, 0.0, R, SPLIT)
            y = _value(Y, x, scale, anchor, everyone, LOG)
            store_block(y_sample, first, d, classes, places, y, R, SPLIT)


@triton.jit
def _slope(DX, y, g, total, scale, LOG: tl.constexpr):
    y, g = y.to(tl.float32), g.to(tl.float32)
    if LOG:
        dx = g - tl.exp2(y * LOG2E) * total[None, None, :]
    else:
        dx = y * (g - total[None, None, :])
    return (dx * scale).to(DX.dtype.element_ty)


@triton.jit
def _term(y, g, LOG: tl.constexpr):
    term = g.to(tl.float32)
    if not LOG:
        term *= y.to(tl.float32)
    return tl.sum(term, 0)


@triton.jit
def class_softmax_backward_kernel(
    Y, G, DX, classes, places, scale,
    LOG: tl.constexpr, ONE: tl.constexpr, PLACES_OF: tl.constexpr, R: tl.constexpr,
    SPLIT: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    places = places // PLACES_OF * PLACES_OF
    scale = tl.cast(scale, tl.float32)
    sample, d = place_of(places, PLACES)
    at = sample * classes * places
    y_sample, g_sample, dx_sample = Y + at, G + at, DX + at
    total = tl.zeros([SPLIT, PLACES], tl.float32)
    if ONE:
        y = load_block(y_sample, 0, d, classes, places, 0.0, R, SPLIT)
        g = load_block(g_sample, 0, d, classes, places, 0.0, R, SPLIT)
        dx = _slope(DX, y, g, tl.sum(_term(y, g, LOG), 0), scale, LOG)
        store_block(dx_sample, 0, d, classes, places, dx, R, SPLIT)
    else:
        for first in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
            g = load_block(g_sample, first, d, classes, places, 0.0, R, SPLIT)
            y = g
            if not LOG:
                y = load_block(y_sample, first, d, classes, places, 0.0, R, SPLIT)
            total += _term(y, g, LOG)
        everyone = tl.sum(total, 0)
        last = (classes - 1) // (R * SPLIT) * (R * SPLIT)
        for step in tl.range(0, classes, R * SPLIT, num_stages=STAGES):
            first = last - step
            y = load_block(y_sample, first, d, classes, places, 0.0, R, SPLIT)
            g = load_block(g_sample, first, d, classes, places, 0.0, R, SPLIT)
            dx = _slope(DX, y, g, everyone, scale, LOG)
            store_block(dx_sample, first, d, classes, places, dx, R, SPLIT)
