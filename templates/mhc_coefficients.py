# mypy: disable-error-code="assignment"
"""The coefficients of mHC on the card: sums of partials in a fixed tree, gates, Sinkhorn.

A token's coefficients are computed by one thread: its n x n entries are a tuple of registers, so
that no iteration of Sinkhorn exchanges anything.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .dependent import in_turn


@triton.jit
def added(terms, LOG: tl.constexpr):
    """The sum of 2^LOG terms, neighbours first: the tree that ``mhc_pre`` sums its groups in."""
    for level in tl.static_range(LOG):
        pairs = ()
        for i in tl.static_range(1 << (LOG - 1 - level)):
            pairs = pairs + (terms[2 * i] + terms[2 * i + 1],)
        terms = pairs
    return terms[0]


@triton.jit
def summed(at, stride, mask, S: tl.constexpr, LOG: tl.constexpr):
    """``sum_s at[s stride]`` of S partials, filled up with zeros to 2^LOG."""
    terms = ()
    for s in tl.static_range(1 << LOG):
        if s < S:
            if mask is None:
                terms = terms + (tl.load(at + s * stride),)
            else:
                terms = terms + (tl.load(at + s * stride, mask=mask, other=0.0),)
        else:
            terms = terms + (tl.zeros_like(terms[0]),)  # type: ignore[misc]
    return added(terms, LOG)


@triton.jit
def summed_apart(at, stride, column, used, S: tl.constexpr, LOG: tl.constexpr, HALF: tl.constexpr):
    """``summed`` of many partials [S, columns], 16 neighbours by a thread: in the same tree. HALF:
    eight of them at a time, for registers."""
    CP: tl.constexpr = column.shape[0]
    RUNS: tl.constexpr = 1 << (LOG - 4)
    AT_ONCE: tl.constexpr = 8 if HALF else 16
    first = tl.arange(0, RUNS)[:, None] * 16
    at += column[None, :] + first * stride
    total = tl.zeros((RUNS, CP), tl.float32)
    for done in range(0, 16, AT_ONCE):
        terms = ()
        for s in tl.static_range(AT_ONCE):
            here = used[None, :] & (first + (done + s) < S)
            terms = terms + (tl.load(at + (done + s) * stride, mask=here, other=0.0),)
        total += added(terms, 3 if HALF else 4)
    for level in tl.static_range(LOG - 4):
        total = tl.sum(tl.reshape(total, (RUNS >> (level + 1), 2, CP)), 1)
    return tl.reshape(total, (CP,))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def put_input(U, h, x, gates, mask, N: tl.constexpr):
    u = gates[0] * x[0].to(tl.float32)
    for i in tl.static_range(1, N):
        u += gates[i] * x[i].to(tl.float32)
    tl.store(U + h, u.to(U.dtype.element_ty), mask=mask)


@triton.jit
def reciprocal(x):
    """1 / x to an ulp, of x below 2^126: a third of what a division issues, 156 times a token."""
    return libdevice.fast_dividef(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def by_rows(c, eps, N: tl.constexpr):
    out = ()
    for i in tl.static_range(N):
        total = c[i * N]
        for j in tl.static_range(1, N):
            total = total + c[i * N + j]
        inverse = reciprocal(total + eps)
        for j in tl.static_range(N):
            out = out + (c[i * N + j] * inverse,)
    return out


@triton.jit
def by_columns(c, eps, N: tl.constexpr):
    inverse = ()
    for j in tl.static_range(N):
        total = c[j]
        for i in tl.static_range(1, N):
            total = total + c[i * N + j]
        inverse = inverse + (reciprocal(total + eps),)
    out = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            out = out + (c[i * N + j] * inverse[j],)
    return out


@triton.jit
def row_softmax(c, eps, N: tl.constexpr, POWERS: tl.constexpr):
    """Powers of e over their sums by row; with POWERS over these plus eps."""
    out = ()
    for i in tl.static_range(N):
        peak = c[i * N]
        for j in tl.static_range(1, N):
            peak = tl.maximum(peak, c[i * N + j])
        powers = ()
        total = tl.zeros_like(peak)
        for j in tl.static_range(N):
            powers = powers + (tl.exp(c[i * N + j] - peak),)
            total = total + powers[j]
        if POWERS:
            total += tl.where(eps > 0.0, eps * tl.exp(-peak), 0.0)
        inverse = 1.0 / total
        for j in tl.static_range(N):
            out = out + (powers[j] * inverse,)
    return out


@triton.jit
def sinkhorn_of(logits, iters, eps, N: tl.constexpr, POWERS: tl.constexpr):
    """The N * N entries, row by row, of a tuple of as many logits."""
    c = row_softmax(logits, eps, N, POWERS)
    if not POWERS:
        softened = c
        c = ()
        for k in tl.static_range(N * N):
            c = c + (softened[k] + eps,)
    c = by_columns(c, eps, N)
    for _ in range(1, iters):
        c = by_columns(by_rows(c, eps, N), eps, N)
    return c


@triton.jit
def put_comb(
    MIXES, SQRSUM, SCALE, BASE, COMB, first, tokens, size, iters, rms_eps, eps,
    N: tl.constexpr, POWERS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """COMB of BT tokens from their sums."""
    t = tl.cast(first, tl.int64) + tl.arange(0, BT)
    there = t < tokens
    r = tl.rsqrt(tl.load(SQRSUM + t, mask=there, other=1.0) / size + rms_eps)
    at = MIXES + t * (N * (N + 2)) + 2 * N
    scale = tl.load(SCALE + 2)
    logits = ()
    for k in tl.static_range(N * N):
        z = tl.load(at + k, mask=there, other=0.0) * r
        logits = logits + (scale * z + tl.load(BASE + 2 * N + k),)
    comb = sinkhorn_of(logits, iters, eps, N, POWERS)
    for k in tl.static_range(N * N):
        tl.store(COMB + t * (N * N) + k, comb[k], mask=there)


@triton.jit
def comb_kernel(
    MIXES, SQRSUM, SCALE, BASE, COMB, tokens, size, iters, rms_eps, eps,
    N: tl.constexpr, POWERS: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    in_turn(PDL)
    # Doubles in programs that Inductor writes.
    rms_eps, eps = tl.cast(rms_eps, tl.float32), tl.cast(eps, tl.float32)
    first = tl.program_id(0) * BT
    size = tl.cast(size, tl.float32)
    put_comb(
        MIXES, SQRSUM, SCALE, BASE, COMB, first, tokens, size, iters, rms_eps, eps, N, POWERS, BT
    )
