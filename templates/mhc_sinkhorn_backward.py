"""The gradient of Sinkhorn's logits, tokens at once.

    p = softmax(logits), c = p + eps;  c = c / s, s = sum(c) + eps, of columns, rows, columns ...

backwards, from the last division to the first,

    dc = (dc - sum(dc c)) / s        with c after the division, sums along its axis
    dlogits = p (dc - sum_j dc_j p_j)

A division loses what precedes it (its sums are 1 up to eps), so the forward is made again and its
c and 1 / s stay in registers: HELD rounds of rows and columns at a time, from the last; each such
segment starts from the softmax anew.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

LOG2E = tl.constexpr(1.4426950408889634)
ROWS, COLUMNS = tl.constexpr(2), tl.constexpr(1)  # the axis of a sum over [tokens, in, out]


@triton.jit
def divided(c, eps, AXIS: tl.constexpr):
    """(c / s, 1 / s) with s the sums of c along AXIS, plus eps."""
    inverse = 1.0 / (tl.sum(c, AXIS, keep_dims=True) + eps)
    return c * inverse, inverse


@triton.jit
def undivided(dc, c, inverse, AXIS: tl.constexpr):
    """The gradient before the division that gave c."""
    return (dc - tl.sum(dc * c, AXIS, keep_dims=True)) * inverse


@triton.jit
def rounds(c, eps, count):
    for _ in range(count):
        c = divided(c, eps, ROWS)[0]
        c = divided(c, eps, COLUMNS)[0]
    return c


@triton.jit
def back_over(dc, c, eps, COUNT: tl.constexpr):
    """The gradient before COUNT rounds that start from c."""
    held = ()
    for _ in tl.static_range(COUNT):
        c, inverse = divided(c, eps, ROWS)
        held = held + (c, inverse)  # type: ignore[assignment]
        c, inverse = divided(c, eps, COLUMNS)
        held = held + (c, inverse)  # type: ignore[assignment]
    for k in tl.static_range(COUNT - 1, -1, -1):
        dc = undivided(dc, held[4 * k + 2], held[4 * k + 3], COLUMNS)
        dc = undivided(dc, held[4 * k], held[4 * k + 1], ROWS)
    return dc


@triton.jit
def sinkhorn_slope(
    logits, dc, eps, N: tl.constexpr, POWERS: tl.constexpr, ITERS: tl.constexpr, HELD: tl.constexpr
):
    """The gradient of logits [tokens, n n] from dc, that of the result; both fp32."""
    # Loaded as rows of n n elements, a token's elements stay in one warp: no sum leaves it.
    B: tl.constexpr = logits.shape[0]
    logits, dc = tl.reshape(logits, [B, N, N]), tl.reshape(dc, [B, N, N])
    peak = tl.max(logits, ROWS, keep_dims=True)
    e = tl.exp2((logits - peak) * LOG2E)
    total = tl.sum(e, ROWS, keep_dims=True)
    if POWERS:
        p = e / (total + tl.where(eps > 0.0, eps * tl.exp2(-peak * LOG2E), 0.0))
        c = p
    else:
        p = e / total
        c = p + eps
    first, inverse = divided(c, eps, COLUMNS)
    SEGMENTS: tl.constexpr = (ITERS - 1) // HELD
    if SEGMENTS > 0:
        for k in range(SEGMENTS):
            before = rounds(first, eps, ITERS - 1 - (k + 1) * HELD)
            dc = back_over(dc, before, eps, HELD)
    dc = back_over(dc, first, eps, (ITERS - 1) % HELD)
    dc = undivided(dc, first, inverse, COLUMNS)
    return tl.reshape(p * (dc - tl.sum(dc * p, ROWS, keep_dims=True)), [B, N * N])


@triton.jit
def sinkhorn_backward_kernel(
    L, DC, DL, tokens, eps,
    N: tl.constexpr, POWERS: tl.constexpr, B: tl.constexpr, ITERS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)  # a double in programs that Inductor writes
    t = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)[:, None]
    at = t * (N * N) + tl.arange(0, N * N)[None, :]
    logits = tl.load(L + at, mask=t < tokens, other=0.0).to(tl.float32)
    dc = tl.load(DC + at, mask=t < tokens, other=0.0).to(tl.float32)
    dl = sinkhorn_slope(logits, dc, eps, N, POWERS, ITERS, HELD)
    tl.store(DL + at, dl.to(DL.dtype.element_ty), mask=t < tokens)


def block_of(n: int, warps: int) -> int:
    """Tokens of a program: a warp has whole ones, a thread one element, or two for n = 8."""
    return max(1, 32 // (n * n)) * warps


def held_rounds(iters: int) -> int:
    """Rounds that are held in registers, of ``iters - 1``."""
    return max(1, min(iters, 20))


def sinkhorn_backward(
    logits: torch.Tensor,
    dcomb: torch.Tensor,
    iters: int,
    eps: float,
    powers: bool = False,
    warps: int = 4,
) -> torch.Tensor:
    """dlogits [T, n, n] in the dtype of logits; both contiguous."""
    tokens, n, _ = logits.shape
    dlogits: Any = torch.empty_like(logits)
    block = block_of(n, warps)
    wrap_triton(sinkhorn_backward_kernel)[(triton.cdiv(tokens, block),)](
        logits, dcomb, dlogits, tokens, eps, N=n, POWERS=powers, B=block, ITERS=iters,
        HELD=held_rounds(iters), num_warps=warps,
    )  # fmt: skip
    return dlogits
