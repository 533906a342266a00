"""The gradients of the logits of mHC, tokens at once: pre gates, post and, by Sinkhorn, comb.

    dz = s dlogit,  draw = r dz,  f = r^2 / K <dz, z>

and the sums over tokens of dlogit and dlogit z. Of a collapse the gates alone, to which the
gradients of its sums are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .mhc_sinkhorn_backward import sinkhorn_slope


@triton.jit
def split(x):
    """x in two bf16 parts."""
    high = x.to(tl.bfloat16)
    return high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def put_draw(DRAW, at, draw, mask, M: tl.constexpr):
    """Store draw in two parts."""
    high, low = split(draw)
    tl.store(DRAW + at, high, mask=mask)
    tl.store(DRAW + M + at, low, mask=mask)


@triton.jit
def put_sums(SUMS, column, dlogit, z, L: tl.constexpr):
    """Store, from ``column`` of L on, the sums of dlogit and dlogit z."""
    blocks = tl.num_programs(0)
    sums_at = SUMS + (column + tl.arange(0, dlogit.shape[1])) * blocks + tl.program_id(0)
    tl.store(sums_at, tl.sum(dlogit, 0))
    tl.store(sums_at + L * blocks, tl.sum(dlogit * z, 0))


@triton.jit
def put_slope(DRAW, SUMS, at, column, dlogit, z, r, scale, mask, M: tl.constexpr):
    put_draw(DRAW, at, r * (scale * dlogit), mask, M)
    put_sums(SUMS, column, dlogit, z, M)


@triton.jit
def put_given(
    DRAW, DMIXES, DSQRSUM, at, dlogit, f, r, scale, t, rows, inside, N: tl.constexpr,
    M: tl.constexpr, P: tl.constexpr, HAS_MIXES: tl.constexpr, HAS_SQRSUM: tl.constexpr,
):  # fmt: skip
    """Store draw of a collapse, whose sums have gradients of their own; returns f with theirs."""
    i = tl.arange(0, N)[None, :]
    draw = r[:, None] * (scale * dlogit)
    if HAS_MIXES:
        draw += tl.load(DMIXES + at * M + i, mask=rows, other=0.0)
    put_draw(DRAW, at * (2 * M) + i, draw, rows, M)
    if M > N:
        k = N + tl.arange(0, P)[None, :]
        there = rows & (k < M)
        others = tl.zeros([rows.shape[0], P], tl.float32)
        if HAS_MIXES:
            others = tl.load(DMIXES + at * M + k, mask=there, other=0.0)
        put_draw(DRAW, at * (2 * M) + k, others, there, M)
    if HAS_SQRSUM:
        f -= 2.0 * tl.load(DSQRSUM + t, mask=inside, other=0.0)
    return f


@triton.jit
def logits_kernel(
    MIXES, SQRSUM, SCALE, BASE, DPRE, DPOST, DCOMB, DRAW, COEFFICIENTS, SUMS,
    tokens, width, rms_eps, pre_eps, eps, post_mult,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, HEAD: tl.constexpr, POWERS: tl.constexpr,
    B: tl.constexpr,
    HAS_DU: tl.constexpr, HAS_POST: tl.constexpr, HAS_COMB: tl.constexpr, ITERS: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    rms_eps, pre_eps = tl.cast(rms_eps, tl.float32), tl.cast(pre_eps, tl.float32)
    eps, post_mult = tl.cast(eps, tl.float32), tl.cast(post_mult, tl.float32)
    t = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = t < tokens
    r = tl.rsqrt(tl.load(SQRSUM + t, mask=inside, other=1.0) / width + rms_eps)
    i = tl.arange(0, N)[None, :]
    rows, at = inside[:, None], t[:, None]
    z = tl.load(MIXES + at * M + i, mask=rows, other=0.0) * r[:, None]
    scale = tl.load(SCALE).to(tl.float32)
    gate = tl.sigmoid(scale * z + tl.load(BASE + i).to(tl.float32))
    dlogit = tl.zeros([B, N], tl.float32)
    if HAS_DU:
        dpre = tl.load(DPRE + at * N + i, mask=rows, other=0.0)
        dlogit = dpre * gate * (1.0 - gate)
    tl.store(COEFFICIENTS + i * tokens + at, gate + pre_eps, mask=rows)
    norm = tl.sum(scale * dlogit * z, 1)
    if HEAD:  # DPOST and DCOMB are those of the sums
        put_sums(SUMS, 0, dlogit, z, N)
        f = put_given(
            DRAW, DPOST, DCOMB, at, dlogit, r * r / width * norm, r, scale, t, rows, inside,
            N, M, P, HAS_POST, HAS_COMB,
        )  # fmt: skip
    else:
        put_slope(DRAW, SUMS, at * (2 * M) + i, 0, dlogit, z, r[:, None], scale, rows, M)
        scale = tl.load(SCALE + 1).to(tl.float32)
        z = tl.load(MIXES + at * M + N + i, mask=rows, other=0.0) * r[:, None]
        dlogit = tl.zeros([B, N], tl.float32)
        if HAS_POST:
            gate = tl.sigmoid(scale * z + tl.load(BASE + N + i).to(tl.float32))
            dpost = tl.load(DPOST + at * N + i, mask=rows, other=0.0).to(tl.float32)
            dlogit = post_mult * dpost * gate * (1.0 - gate)
        norm += tl.sum(scale * dlogit * z, 1)
        put_slope(DRAW, SUMS, at * (2 * M) + N + i, N, dlogit, z, r[:, None], scale, rows, M)

        scale = tl.load(SCALE + 2).to(tl.float32)
        ij = tl.arange(0, N * N)[None, :]
        z = tl.load(MIXES + at * M + 2 * N + ij, mask=rows, other=0.0) * r[:, None]
        dlogit = tl.zeros([B, N * N], tl.float32)
        if HAS_COMB:
            logits = scale * z + tl.load(BASE + 2 * N + ij).to(tl.float32)
            dcomb = tl.load(DCOMB + at * (N * N) + ij, mask=rows, other=0.0).to(tl.float32)
            dlogit = sinkhorn_slope(logits, dcomb, eps, N, POWERS, ITERS, HELD)
        norm += tl.sum(scale * dlogit * z, 1)
        put_slope(
            DRAW, SUMS, at * (2 * M) + 2 * N + ij, 2 * N, dlogit, z, r[:, None], scale, rows, M
        )
        f = r * r / width * norm
    tl.store(COEFFICIENTS + N * tokens + t, f, mask=inside)
