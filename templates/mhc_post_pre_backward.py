"""The gradient of a post and the pre that follows it: 48 H bytes a token for n = 4 and 16 bits.

With X1, what the post returned, and draw, f, pre of the pre as in ``mhc_pre_backward``,

    D_j = dX1_j + pre_j dU + W_j^T draw - f X1_j       in fp32, rounded to nothing
    dX_i = sum_j comb[i, j] D_j       dcomb[i, j] = <X_i, D_j>
    dY = sum_j post_j D_j             dpost_j = <D_j, Y>         dW_j = sum_t draw_t X1_jt^T

A program owns BH columns of all streams and walks the tokens of one range: dW has a part per range,
dpost and dcomb one per BH columns. Two more kernels add the parts up, in a fixed order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from . import mhc_post_backward
from .mhc_pre_backward import (
    add_outer,
    divisor,
    even,
    finish,
    gradient,
    load_slopes,
    load_streams,
    load_tile,
    padded,
    ranges_of,
    slopes,
    through_weights,
    weights,
)


@triton.jit
def load_block(
    X1, DX1, DU, DRAW, COEFFICIENTS, start, t, h, m, end, within, tokens, hidden,
    N: tl.constexpr, M: tl.constexpr, HAS_DX1: tl.constexpr, HAS_DU: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """What D of a block of tokens is made of."""
    rows = start + t < end
    mask = rows[:, None] & (within | EVEN)[None, :]
    slopes = load_slopes(DRAW, COEFFICIENTS, start, t, m, rows, tokens, 0, N, M, N)
    x1s = load_streams(X1, start, t, h, mask, hidden, N, 0, N)
    dx1s = load_streams(DX1, start, t, h, mask & HAS_DX1, hidden, N, 0, N)
    du = load_streams(DU, start, t, h, mask & HAS_DU, hidden, 1, 0, 1)
    return slopes, x1s, dx1s, du[0]


@triton.jit
def load_mixing(POST, COMB, start, t, rows, comb_t, comb_i, comb_j, N: tl.constexpr):
    """post_j and comb[i, j] of each token."""
    comb_at = COMB + start * comb_t + t * comb_t
    post, comb = (), ()
    for j in tl.static_range(N):
        post = post + (load_tile(POST + (start + t) * N + j, rows),)  # type: ignore[assignment]
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            comb = comb + (load_tile(comb_at + i * comb_i + j * comb_j, rows),)  # type: ignore[assignment]
    return post, comb


@triton.jit
def boundary_kernel(
    X, Y, POST, COMB, X1, DX1, DU, W, DRAW, COEFFICIENTS, DX, DY, MIXED, PARTS,
    tokens, hidden, length, comb_t, comb_i, comb_j,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, HAS_DX1: tl.constexpr, HAS_DU: tl.constexpr, HIDDEN_OF: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = W.dtype.element_ty != tl.bfloat16
    VALUES: tl.constexpr = N * (N + 1)
    hidden = hidden // HIDDEN_OF * HIDDEN_OF  # what masks and rows are made of, by its divisor
    width = hidden * N
    slab, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BT)
    h = slab * BH + tl.arange(0, BH)
    m = tl.arange(0, P)
    v = tl.arange(0, V)[None, :]
    within = h < hidden
    w_high, w_low, dw = (), (), ()
    for j in tl.static_range(N):
        w_mask = (m < M)[None, :] & within[:, None]
        w_parts = weights(W + j * hidden, m, h, w_mask, width, M, SPLIT)
        w_high, w_low = w_high + (w_parts[0],), w_low + (w_parts[1],)  # type: ignore[assignment]
        dw = dw + (tl.zeros([BH, P], tl.float32),)  # type: ignore[assignment]
    first = part * length
    end = tl.minimum(first + length, tokens)
    block = load_block(
        X1, DX1, DU, DRAW, COEFFICIENTS, first, t, h, m, end, within, tokens, hidden,
        N, M, HAS_DX1, HAS_DU, EVEN,
    )  # fmt: skip
    for start in range(first, end, BT):
        rows = start + t < end
        mask = rows[:, None] & (within | EVEN)[None, :]
        xs = load_streams(X, start, t, h, mask, hidden, N, 0, N)
        slopes, x1s, dx1s, du = block[0], block[1], block[2], block[3]
        high, low, f = slopes[0], slopes[1], slopes[2]
        ds, next_dw = (), ()
        for j in tl.static_range(N):
            d = through_weights(w_high[j], w_low[j], high, low, SPLIT)
            d -= f[:, None] * x1s[j].to(tl.float32)
            if HAS_DX1:
                d += dx1s[j].to(tl.float32)
            if HAS_DU:
                d += slopes[3 + j][:, None] * du.to(tl.float32)
            ds = ds + (d,)  # type: ignore[assignment]
            next_dw = next_dw + (add_outer(dw[j], x1s[j], high, low),)  # type: ignore[assignment]
        dw = next_dw
        y = load_streams(Y, start, t, h, mask, hidden, 1, 0, 1)[0]
        mixing = load_mixing(POST, COMB, start, t, rows, comb_t, comb_i, comb_j, N)
        post, comb = mixing[0], mixing[1]
        at = t[:, None] * width + h[None, :]
        mixed = tl.zeros([BT, V], tl.float32)
        dy = tl.zeros([BT, BH], tl.float32)
        for j in tl.static_range(N):
            dy += post[j].to(tl.float32)[:, None] * ds[j]
            mixed = tl.where(v == j, tl.sum(y.to(tl.float32) * ds[j], 1)[:, None], mixed)
        dy_at = DY + start * hidden + (t[:, None] * hidden + h[None, :])
        tl.store(dy_at, dy.to(DY.dtype.element_ty), mask=mask)
        # The next block is on its way while this one is mixed.
        block = load_block(
            X1, DX1, DU, DRAW, COEFFICIENTS, start + BT, t, h, m, end, within, tokens, hidden,
            N, M, HAS_DX1, HAS_DU, EVEN,
        )  # fmt: skip
        for i in tl.static_range(N):
            x = xs[i].to(tl.float32)
            dx = tl.zeros([BT, BH], tl.float32)
            for j in tl.static_range(N):
                dx += comb[i * N + j].to(tl.float32)[:, None] * ds[j]
                mixed = tl.where(v == N + i * N + j, tl.sum(x * ds[j], 1)[:, None], mixed)
            dx_at = DX + start * width + i * hidden + at
            tl.store(dx_at, dx.to(DX.dtype.element_ty), mask=mask)
        mixed_at = MIXED + (slab.to(tl.int64) * tokens + start) * VALUES + (t[:, None] * VALUES + v)
        tl.store(mixed_at, mixed, mask=rows[:, None] & (v < VALUES))
    for j in tl.static_range(N):
        part_at = PARTS + part * (M * width) + (m[None, :] * width + j * hidden + h[:, None])
        tl.store(part_at, dw[j], mask=(m < M)[None, :] & within[:, None])


@triton.jit
def mixed_kernel(MIXED, DPOST, DCOMB, tokens, slabs, N: tl.constexpr, BLOCK: tl.constexpr):
    """dpost and dcomb: the sums of their parts, in the order of the columns."""
    VALUES: tl.constexpr = N * (N + 1)
    size = tl.cast(tokens, tl.int64) * VALUES
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slab in range(0, slabs):
        total += tl.load(MIXED + slab * size + k, mask=k < size, other=0.0)
    t, value = k // VALUES, k % VALUES
    dpost, dcomb = total.to(DPOST.dtype.element_ty), total.to(DCOMB.dtype.element_ty)
    tl.store(DPOST + t * N + value, dpost, mask=(k < size) & (value < N))
    tl.store(DCOMB + t * (N * N) + value - N, dcomb, mask=(k < size) & (value >= N))


# --- launches -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """How ``boundary_kernel`` is cut: ``tokens`` and ``columns`` of a block, ``ranges`` of tokens
    (a multiple of it for many), ``warps``."""

    tokens: int
    columns: int
    ranges: int
    warps: int


_PROGRAMS = 264


def tile(n: int, hidden: Any, dtype: torch.dtype, w_dtype: torch.dtype) -> Tile | None:
    """The tile for residuals of n streams of ``hidden`` columns; None: D goes through memory, as
    eight streams' would not stay in registers."""
    if n == 8:
        return None
    columns = 64
    slabs = triton.cdiv(hidden, columns) if isinstance(hidden, int) else 64
    # Four warps, two programs on a multiprocessor, where nothing is spilled.
    few = dtype.itemsize == 2 and w_dtype == torch.float32 and even(hidden, columns)
    return Tile(16, columns, max(1, min(16, _PROGRAMS // slabs)), 4 if few else 8)


def backward(
    x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, x1: torch.Tensor,
    w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, mixes: torch.Tensor,
    sqrsum: torch.Tensor, dx1: torch.Tensor | None, du: torch.Tensor | None,
    dpost1: torch.Tensor | None, dcomb1: torch.Tensor | None, iters: int, rms_eps: float,
    pre_eps: float, eps: float, post_mult: float, chosen: Tile | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(dX, dY, dpost, dcomb, dW, dscale, dbase) of X, X1, dX1 [T, n, H], Y, dU [T, H].

    All contiguous but comb [T, n, n], which has any strides.
    """
    tokens, n, hidden = x.shape
    m = base.shape[0]
    chosen = chosen or tile(n, hidden, x.dtype, w.dtype)
    draw, coefficients, sums = slopes(
        x1, scale, base, mixes, sqrsum, du, dpost1, dcomb1, iters, rms_eps, pre_eps, eps, post_mult
    )
    if chosen is None:
        total, parts = gradient(x1, w, draw, coefficients, du, dx1, torch.float32, None)
        found = mhc_post_backward.backward(x, y, post, comb, total)
        return *found, *finish(parts, sums, n, w, scale, base)
    slabs = triton.cdiv(hidden, chosen.columns)
    dx = torch.empty((tokens, n, hidden), dtype=x.dtype, device=x.device)
    dy = torch.empty((tokens, hidden), dtype=y.dtype, device=x.device)
    dpost = torch.empty((tokens, n), dtype=post.dtype, device=x.device)
    dcomb = torch.empty((tokens, n, n), dtype=comb.dtype, device=x.device)
    mixed = torch.empty((slabs, tokens, n * (n + 1)), dtype=torch.float32, device=x.device)
    ranges, length = ranges_of(tokens, chosen.ranges, chosen.tokens)
    parts = torch.empty((ranges, m, n * hidden), dtype=torch.float32, device=x.device)
    wrap_triton(boundary_kernel)[(slabs, ranges)](
        x, y, post, comb, x1, x1 if dx1 is None else dx1, x1 if du is None else du, w, draw,
        coefficients, dx, dy, mixed, parts, tokens, hidden, length, *comb.stride(),
        N=n, M=m, P=padded(m), V=triton.next_power_of_2(n * (n + 1)), BT=chosen.tokens,
        BH=chosen.columns, HAS_DX1=dx1 is not None, HAS_DU=du is not None,
        HIDDEN_OF=divisor(hidden), EVEN=even(hidden, chosen.columns), num_warps=chosen.warps,
        num_stages=1,
    )  # fmt: skip
    wrap_triton(mixed_kernel)[(triton.cdiv(tokens * n * (n + 1), 256),)](
        mixed, dpost, dcomb, tokens, slabs, N=n, BLOCK=256, num_warps=2
    )
    return dx, dy, dpost, dcomb, *finish(parts, sums, n, w, scale, base)
