"""The gradient of mHC's post in one pass, 28 H bytes a token for n = 4 and 16 bits.

    dX_i = sum_j comb[i, j] dX1_j       dcomb[i, j] = <X_i, dX1_j>
    dY = sum_j post_j dX1_j             dpost_j = <dX1_j, Y>

A program per token: it walks the columns with the rows of X beside each other, so that a thread has
the same columns of all streams, and adds up each thread's columns last. Eight streams are two
programs of four rows of X.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .mhc_pre_backward import columns_tile, over_columns


@triton.jit
def load_columns(at, c, hidden, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at + c).to(tl.float32)
    return tl.load(at + c, mask=c < hidden, other=0.0).to(tl.float32)


@triton.jit
def store_columns(at, c, hidden, value, EVEN: tl.constexpr):
    if EVEN:
        tl.store(at + c, value.to(at.dtype.element_ty))
    else:
        tl.store(at + c, value.to(at.dtype.element_ty), mask=c < hidden)


@triton.jit
def post_backward_kernel(
    X, Y, POST, COMB, DX1, DX, DY, DPOST, DCOMB, tokens, hidden, comb_t, comb_i, comb_j,
    N: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr,
    HIDDEN_OF: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = THREADS * E
    hidden = hidden // HIDDEN_OF * HIDDEN_OF  # what masks and rows are made of, by its divisor
    GROUPS: tl.constexpr = N // ROWS
    t = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    i = group * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    x_at, dx_at = (
        X + t * (hidden * N) + i[:, None] * hidden,
        DX + t * (hidden * N) + i[:, None] * hidden,
    )
    dcomb, dpost, comb, post = (), (), (), ()
    for j in tl.static_range(N):
        comb_at = COMB + t * comb_t + i * comb_i + j * comb_j
        comb = comb + (tl.load(comb_at).to(tl.float32)[:, None],)  # type: ignore[assignment]
        post = post + (tl.load(POST + t * N + j).to(tl.float32),)  # type: ignore[assignment]
        dcomb = dcomb + (tl.zeros([ROWS, THREADS], tl.float32),)  # type: ignore[assignment]
        dpost = dpost + (tl.zeros([1, THREADS], tl.float32),)  # type: ignore[assignment]
    for h in range(0, hidden, BLOCK):
        x = load_columns(x_at, h + c, hidden, EVEN)
        y = load_columns(Y + t * hidden, h + c, hidden, EVEN)
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        dy = tl.zeros([1, BLOCK], tl.float32)
        next_dcomb, next_dpost = (), ()
        for j in tl.static_range(N):
            d = load_columns(DX1 + t * (hidden * N) + j * hidden, h + c, hidden, EVEN)
            dx += comb[j] * d
            dy += post[j] * d
            next_dcomb = next_dcomb + (dcomb[j] + over_columns(x * d, THREADS, E),)  # type: ignore[assignment]
            next_dpost = next_dpost + (dpost[j] + over_columns(y * d, THREADS, E),)  # type: ignore[assignment]
        dcomb, dpost = next_dcomb, next_dpost
        store_columns(dx_at, h + c, hidden, dx, EVEN)
        if group == 0:
            store_columns(DY + t * hidden, h + c, hidden, dy, EVEN)
    for j in tl.static_range(N):
        total = tl.sum(dcomb[j], 1)
        tl.store(DCOMB + t * (N * N) + i * N + j, total.to(DCOMB.dtype.element_ty))
        if group == 0:
            value = tl.sum(tl.sum(dpost[j], 1), 0)
            tl.store(DPOST + t * N + j, value.to(DPOST.dtype.element_ty))


def backward(
    x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, dx1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dX, dY, dpost, dcomb) of X, dX1 [T, n, H], Y [T, H], post [T, n], comb [T, n, n].

    In the dtypes of X, Y, post and comb; all contiguous but comb, which has any strides.
    """
    tokens, n, hidden = x.shape
    dx = torch.empty((tokens, n, hidden), dtype=x.dtype, device=x.device)
    dy = torch.empty((tokens, hidden), dtype=y.dtype, device=x.device)
    dpost = torch.empty((tokens, n), dtype=post.dtype, device=x.device)
    dcomb = torch.empty((tokens, n, n), dtype=comb.dtype, device=x.device)
    options: dict[str, Any] = columns_tile(hidden, x.element_size())
    rows = min(n, 4)
    wrap_triton(post_backward_kernel)[(tokens * (n // rows),)](
        x, y, post, comb, dx1, dx, dy, dpost, dcomb, tokens, hidden, *comb.stride(),
        N=n, ROWS=rows, **options,
    )  # fmt: skip
    return dx, dy, dpost, dcomb
