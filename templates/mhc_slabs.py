# mypy: disable-error-code="assignment"
"""The layer's input, post and comb of mHC where a token's sum of squares is known beforehand.

slab_kernel      the first programs: post and comb of a block of tokens each, a token per thread,
                 Sinkhorn in registers. The others: a slab of U of one token, with the n pre gates
                 from the partial sums; none of them waits for Sinkhorn.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .dependent import in_turn, launched
from .mhc_coefficients import put_comb, put_input, sigmoid, summed
from .mhc_layout import divisor, load_streams, results, stride_divisor
from .tilings import tunable

CHUNK = tl.constexpr(512)  # partial sums that a program adds at a time
TOKENS = 32  # whose coefficients one program makes


@triton.jit
def put_sums(
    P, Q, MIXES, SQRSUM, first, tokens, C: tl.constexpr, S: tl.constexpr, LOG: tl.constexpr,
    QS: tl.constexpr, QLOG: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """MIXES and SQRSUM of BT tokens from partials P [S, tokens, C], Q [QS, tokens]."""
    size = tl.cast(tokens, tl.int64) * C
    for k in range(0, BT * C, CHUNK):
        i = k + tl.arange(0, CHUNK)
        here = (i < BT * C) & (first * C + i < size)
        tl.store(MIXES + first * C + i, summed(P + first * C + i, size, here, S, LOG), mask=here)
    t = first + tl.arange(0, BT)
    total = summed(Q + t, tl.cast(tokens, tl.int64), t < tokens, QS, QLOG)
    tl.store(SQRSUM + t, total, mask=t < tokens)


@triton.jit
def put_post(
    MIXES, SQRSUM, SCALE, BASE, POST, first, tokens, size, rms_eps, post_mult,
    N: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t = first + tl.arange(0, BT)
    there = t < tokens
    r = tl.rsqrt(tl.load(SQRSUM + t, mask=there, other=1.0) / size + rms_eps)
    scale = tl.load(SCALE + 1)
    for j in tl.static_range(N):
        z = tl.load(MIXES + t * (N * (N + 2)) + (N + j), mask=there, other=0.0) * r
        gate = post_mult * sigmoid(scale * z + tl.load(BASE + N + j))
        tl.store(POST + t * N + j, gate, mask=there)


@triton.jit
def slab_kernel(
    X, P, Q, SCALE, BASE, U, POST, COMB, MIXES, SQRSUM,
    tokens, hidden, x_token, x_stream, blocks, slabs, iters, rms_eps, pre_eps, sinkhorn_eps,
    post_mult, N: tl.constexpr, POWERS: tl.constexpr, S: tl.constexpr, LOG: tl.constexpr,
    QS: tl.constexpr, QLOG: tl.constexpr, H_OF: tl.constexpr, STRIDE_OF: tl.constexpr,
    BT: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    in_turn(PDL)
    C: tl.constexpr = N * (N + 2)
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    # Doubles in programs that Inductor writes.
    rms_eps, pre_eps = tl.cast(rms_eps, tl.float32), tl.cast(pre_eps, tl.float32)
    sinkhorn_eps, post_mult = tl.cast(sinkhorn_eps, tl.float32), tl.cast(post_mult, tl.float32)
    size = tl.cast(hidden * N, tl.float32)
    pid = tl.program_id(0)
    if pid < blocks:
        first = pid.to(tl.int64) * BT
        put_sums(P, Q, MIXES, SQRSUM, first, tokens, C, S, LOG, QS, QLOG, BT)
        tl.debug_barrier()  # other threads stored what a thread reads now
        put_post(MIXES, SQRSUM, SCALE, BASE, POST, first, tokens, size, rms_eps, post_mult, N, BT)
        put_comb(
            MIXES, SQRSUM, SCALE, BASE, COMB, first, tokens, size, iters, rms_eps, sinkhorn_eps,
            N, POWERS, BT,
        )  # fmt: skip
    else:
        t = ((pid - blocks) // slabs).to(tl.int64)
        h = (pid - blocks) % slabs * (HELD * BLOCK) + tl.arange(0, BLOCK)
        held = ()
        for k in tl.static_range(HELD):  # on their way before the gates are
            at = h + k * BLOCK
            held = held + (load_streams(X + t * x_token, x_stream, at, at < hidden, N),)
        wide = tl.cast(tokens, tl.int64)
        r = tl.rsqrt(summed(Q + t, wide, None, QS, QLOG) / size + rms_eps)
        scale = tl.load(SCALE)
        gates = ()
        for i in tl.static_range(N):
            z = summed(P + t * C + i, wide * C, None, S, LOG) * r
            gates = gates + (sigmoid(scale * z + tl.load(BASE + i)) + pre_eps,)
        for k in tl.static_range(HELD):
            at = h + k * BLOCK
            put_input(U + t * hidden, at, held[k], gates, at < hidden, N)


@tunable("mhc_pre", "slabs", "tokens hidden", scaled="BLOCK HELD", warps="num_warps")
def slab_tile(n: int, itemsize: int) -> dict[str, Any]:
    """HELD blocks of a slab, 16 bytes per thread, stream and block."""
    return {"BLOCK": 128 * (16 // itemsize), "HELD": max(1, 16 // n), "num_warps": 4}


def fuse(
    x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    chosen: dict[str, Any] | None = None, powers: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, post, comb, mixes, sqrsum) from partials p [S, T, n (n + 2)] of the projection and q
    [S', T] of the sum of squares, few of each."""
    tokens, n, hidden = x.shape
    chosen = chosen or slab_tile(n, x.element_size(), tokens=tokens, hidden=hidden)
    out = results(x, p.shape[2])
    blocks, slab = (tokens + TOKENS - 1) // TOKENS, chosen["BLOCK"] * chosen["HELD"]
    slabs = (hidden + slab - 1) // slab
    if isinstance(tokens, int) and tokens == 0:
        return out
    s, qs = p.shape[0], q.shape[0]
    launched(slab_kernel, wrap_triton(slab_kernel), x, (blocks + tokens * slabs,))(
        x, p, q, scale, base, *out, tokens, hidden, x.stride(0), x.stride(1), blocks, slabs, iters,
        rms_eps, pre_eps, sinkhorn_eps, post_mult, N=n, POWERS=powers, S=s,
        LOG=(s - 1).bit_length(), QS=qs, QLOG=(qs - 1).bit_length(),
        H_OF=divisor(hidden, x.element_size()), STRIDE_OF=stride_divisor(x), BT=TOKENS, **chosen,
    )  # fmt: skip
    return out
