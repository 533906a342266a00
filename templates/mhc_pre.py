# mypy: disable-error-code="assignment"
"""mHC before a layer: the layer's input, post and comb, from X [T, n, H] and the projection.

    U = sum_i pre_i X_i

projection_kernel (mhc_projection)     partial sums of W u
fuse_kernel      a token per program, all of which is in registers: the sum of its squares, its
                 sums of partials, its gates, then U. Where tokens are few, another program makes
                 its post and comb.
comb_kernel      Sinkhorn, a token per thread
sinkhorn_kernel  Sinkhorn of given logits
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from . import mhc_projection as projection
from . import mhc_slabs as slabs
from .dependent import in_turn, launched
from .mhc_coefficients import (
    comb_kernel,
    put_comb,
    put_input,
    sigmoid,
    sinkhorn_of,
    summed,
    summed_apart,
)
from .mhc_layout import dense, divisor, load_streams, results, stride_divisor

FEW = 64  # tokens, up to which one launch less is worth a program per token for its comb


@triton.jit
def squares(x, total, N: tl.constexpr):
    for i in tl.static_range(N):
        if x[i].dtype == tl.bfloat16:
            # By its bits: a plain conversion would be kept, in twice the registers, for the apply.
            bits = x[i].to(tl.int16, bitcast=True).to(tl.int32) << 16
            wide = bits.to(tl.float32, bitcast=True)
        else:
            wide = x[i].to(tl.float32)
        total += wide * wide
    return total


@triton.jit
def fuse_kernel(
    X, P, SCALE, BASE, U, POST, COMB, MIXES, SQRSUM,
    tokens, hidden, x_token, x_stream, iters, rms_eps, pre_eps, sinkhorn_eps, post_mult,
    N: tl.constexpr, C: tl.constexpr, HEAD: tl.constexpr, POWERS: tl.constexpr,
    INSIDE: tl.constexpr, CP: tl.constexpr, S: tl.constexpr,
    LOG: tl.constexpr, H_OF: tl.constexpr, STRIDE_OF: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr, STREAM: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not EARLY:
        in_turn(PDL)
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    # Doubles in programs that Inductor writes.
    rms_eps, pre_eps = tl.cast(rms_eps, tl.float32), tl.cast(pre_eps, tl.float32)
    sinkhorn_eps, post_mult = tl.cast(sinkhorn_eps, tl.float32), tl.cast(post_mult, tl.float32)
    pid = tl.program_id(0)
    apart = False  # whether this program makes post and comb, and another one U
    if INSIDE:
        apart = pid >= tokens
        pid = pid % tokens
    t = pid.to(tl.int64)
    at, h = X + t * x_token, tl.arange(0, BLOCK)
    held = ()
    for k in tl.static_range(HELD):
        here = h + k * BLOCK < hidden
        held = held + (load_streams(at, x_stream, h + k * BLOCK, here, N),)
    if EARLY:
        in_turn(PDL)
    column = tl.arange(0, CP)
    used = column < C
    wide = tl.cast(tokens, tl.int64)
    if LOG > 4:
        mixes = summed_apart(P + t * C, wide * C, column, used, S, LOG, not EARLY)
    else:
        mixes = summed(P + t * C + column, wide * C, used, S, LOG)
    base = tl.load(BASE + column, mask=column < N if HEAD else used, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(HELD):
        total = squares(held[k], total, N)
    if STREAM:
        for first in range(HELD * BLOCK, hidden, BLOCK):
            x = load_streams(at, x_stream, h + first, h + first < hidden, N)
            total = squares(x, total, N)
    square = tl.sum(total, 0)
    tl.store(MIXES + t * C + column, mixes, mask=used)
    tl.store(SQRSUM + t, square)
    size = tl.cast(hidden * N, tl.float32)
    z = mixes * tl.rsqrt(square / size + rms_eps)
    gate = sigmoid(tl.load(SCALE) * z + base) + pre_eps
    if not HEAD:
        post = post_mult * sigmoid(tl.load(SCALE + 1) * z + base)
        tl.store(POST + t * N + (column - N), post, mask=(column >= N) & (column < 2 * N))
    if apart:
        tl.debug_barrier()  # other threads stored what a thread reads now
        put_comb(
            MIXES,
            SQRSUM,
            SCALE,
            BASE,
            COMB,
            t,
            tokens,
            size,
            iters,
            rms_eps,
            sinkhorn_eps,
            N,
            POWERS,
            1,
        )
    else:
        gates = ()
        for i in tl.static_range(N):
            gates = gates + (tl.sum(tl.where(column == i, gate, 0.0), 0),)
        row = U + t * hidden
        for k in tl.static_range(HELD):
            put_input(row, h + k * BLOCK, held[k], gates, h + k * BLOCK < hidden, N)
        if STREAM:
            for first in range(HELD * BLOCK, hidden, BLOCK):
                x = load_streams(at, x_stream, h + first, h + first < hidden, N)
                put_input(row, h + first, x, gates, h + first < hidden, N)


@triton.jit
def sinkhorn_kernel(
    L, COMB, tokens, iters, eps, N: tl.constexpr, POWERS: tl.constexpr, BT: tl.constexpr
):
    eps = tl.cast(eps, tl.float32)  # a double in programs that Inductor writes
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    there = t < tokens
    logits = ()
    for k in tl.static_range(N * N):
        value = tl.load(L + t * (N * N) + k, mask=there, other=0.0)
        logits = logits + (value.to(tl.float32),)
    comb = sinkhorn_of(logits, iters, eps, N, POWERS)
    for k in tl.static_range(N * N):
        tl.store(COMB + t * (N * N) + k, comb[k].to(COMB.dtype.element_ty), mask=there)


# --- launches -------------------------------------------------------------------------------------


def row_tile(n: int, hidden: Any, itemsize: int) -> dict[str, Any]:
    """HELD blocks of each stream are in registers, 16 bytes of a thread in each: 64 registers at
    most. T is no matter: it would change the bits of the sum of squares."""
    most = 16 // n
    for warps in (4, 8, 16):
        block = 32 * warps * (16 // itemsize)
        if isinstance(hidden, int) and hidden <= most * block:
            held = triton.cdiv(hidden, block)
            return {"BLOCK": block, "HELD": held, "STREAM": False, "num_warps": warps}
    return {"BLOCK": block, "HELD": most, "STREAM": True, "num_warps": warps}


def fuse(
    x: torch.Tensor, p: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iters: int,
    rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    chosen: dict[str, Any] | None = None, early: bool = False,
    powers: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, post, comb, mixes, sqrsum) from partials p [S, T, columns]; (U, mixes, sqrsum) where
    base has n elements, those of the pre gates. ``early`` where the kernel before is the
    projection, which waited for all that wrote X: it need not be waited for to read it."""
    tokens, n, hidden = x.shape
    s, columns = p.shape[0], p.shape[2]
    head = base.shape[0] == n
    chosen = chosen or row_tile(n, hidden, x.element_size())
    out = results(x, columns, head)
    u, *coefficients, mixes, sqrsum = out
    post, comb = (mixes, mixes) if head else coefficients
    few = isinstance(tokens, int) and tokens <= FEW
    light = s <= 16 or (isinstance(tokens, int) and tokens > projection.FEW)
    if x.dtype == torch.bfloat16 and n <= 4 and light and stride_divisor(x) == 8:
        chosen = {"maxnreg": 80} | chosen  # three programs of 8 warps on a multiprocessor
    if isinstance(tokens, int) and tokens == 0:
        return out
    inside = few and not head
    launched(fuse_kernel, wrap_triton(fuse_kernel), x, (2 * tokens if inside else tokens,))(
        x, p, scale, base, u, post, comb, mixes, sqrsum, tokens,
        hidden, x.stride(0), x.stride(1), iters, rms_eps, pre_eps, sinkhorn_eps, post_mult,
        N=n, C=columns, HEAD=head, POWERS=powers, INSIDE=inside, EARLY=early,
        CP=triton.next_power_of_2(columns), S=s, LOG=(s - 1).bit_length(),
        H_OF=divisor(hidden, x.element_size()), STRIDE_OF=stride_divisor(x), **chosen,
    )  # fmt: skip
    if not few and not head:
        launched(comb_kernel, wrap_triton(comb_kernel), x, ((tokens + 31) // 32,))(
            mixes, sqrsum, scale, base, comb, tokens, n * hidden, iters, rms_eps, sinkhorn_eps,
            N=n, POWERS=powers, BT=32, num_warps=1,
        )  # fmt: skip
    return out


def pre(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iters: int,
    rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, precision: str,
    powers: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, post, comb, mixes, sqrsum) of x [T, n, H], last dimension dense."""
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    scale, base = dense(scale), dense(base)
    p = projection.partials(x, dense(w), precision)
    return fuse(x, p, scale, base, *options, early=True, powers=powers)


def from_mixes(
    p: torch.Tensor, q: torch.Tensor | None, x: torch.Tensor, scale: torch.Tensor,
    base: torch.Tensor, iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float,
    post_mult: float, powers: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The same from somebody's partials of the projection."""
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if q is None:
        return fuse(x, p, dense(scale), dense(base), *options, powers=powers)
    return slabs.fuse(x, p, q, dense(scale), dense(base), *options, powers=powers)


def collapse(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float,
    pre_eps: float, precision: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, mixes, sqrsum)."""
    scale, base = dense(scale), dense(base)
    p = projection.partials(x, dense(w), precision)
    return fuse(x, p, scale, base, 1, rms_eps, pre_eps, 0.0, 1.0, early=True)


def sinkhorn(logits: torch.Tensor, iters: int, eps: float, powers: bool = False) -> torch.Tensor:
    """Of logits [T, n, n], in their dtype."""
    tokens, n, _ = logits.shape
    logits = dense(logits)
    comb = torch.empty_like(logits)
    if not isinstance(tokens, int) or tokens:
        wrap_triton(sinkhorn_kernel)[((tokens + 127) // 128,)](
            logits, comb, tokens, iters, eps, N=n, POWERS=powers, BT=128, num_warps=4
        )
    return comb
