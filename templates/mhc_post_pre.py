"""mHC across a boundary of layers: post of one and the projection of the next, in one pass.

A program has a tile of tokens and a run of groups of ``mhc_projection``. Where it has computed a
block of X', it rounds and stores it and takes the products with W and with itself from registers:
the same instructions in the same order as the projection of a stored X', so the bits are the same.
The fuse kernel of ``mhc_pre`` follows, on X'. Nothing here is pipelined: what is stored and squared
is an operand of the products as well (``mhc_projection`` says why that must not be).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from . import mhc_projection as projection
from .mhc_pre import dense, divisor, fuse, stride_divisor
from .mhc_projection import (
    group_range,
    plus,
    project,
    put_partials,
    squares,
    squares_end,
    squares_start,
    zeros,
)


@triton.jit
def load_weights(w_row, h, stream, hidden, mask, N: tl.constexpr):
    return tl.load(w_row + (stream * hidden + h)[None, :], mask=mask, other=0.0)


@triton.jit
def group_post(
    X, Y, POST, COMB, OUT, W, row, column, group, tokens, hidden, x_token, x_stream, y_token,
    post_token, post_stream, comb_token, comb_in, comb_out,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """X' over one group, stored, and its (W u, sum(u^2)), each in a tuple of one."""
    PRODUCT: tl.constexpr = X.dtype.element_ty == tl.bfloat16
    first, blocks = group_range(group, hidden, BK, GROUPS)
    mixes, square = tl.zeros((BM, CP), tl.float32), squares_start(BM, BK, PRODUCT)
    there = row < tokens
    far = row.to(tl.int64)
    w_row = W + column.to(tl.int64)[:, None] * (N * hidden)
    for block in tl.range(0, blocks, num_stages=1):
        h = (first + block) * BK + tl.arange(0, BK)
        inside = h[None, :] < hidden
        here = there[:, None] & inside
        w_mask = (column[:, None] < C) & inside
        x = ()
        for i in tl.static_range(N):
            at = X + far[:, None] * x_token + (i * x_stream + h)[None, :]
            x = x + (tl.load(at, mask=here, other=0.0),)
        y = tl.load(Y + far[:, None] * y_token + h[None, :], mask=here, other=0.0)
        weights = ()
        if AHEAD:
            for j in tl.static_range(N):
                weights = weights + (load_weights(w_row, h, j, hidden, w_mask, N),)
        for j in tl.static_range(N):
            # Read again for every block, from L1: all of them would fill the registers.
            gate = tl.load(POST + far * post_token + j * post_stream, mask=there, other=0.0)
            total = gate.to(tl.float32)[:, None] * y.to(tl.float32)
            for i in tl.static_range(N):
                at = COMB + far * comb_token + (i * comb_in + j * comb_out)
                c = tl.load(at, mask=there, other=0.0).to(tl.float32)
                total += c[:, None] * x[i].to(tl.float32)
            rounded = total.to(X.dtype.element_ty)
            at = OUT + far[:, None] * (N * hidden) + (j * hidden + h)[None, :]
            tl.store(at, rounded, mask=here)
            if AHEAD:
                w = weights[j]
            else:
                w = load_weights(w_row, h, j, hidden, w_mask, N)
            mixes = project(rounded, w, mixes, PARTS)
            square = squares(rounded, square, PRODUCT)
    return (mixes,), (squares_end(square, BM, PRODUCT),)


@triton.jit
def post_pre_kernel(
    X, Y, POST, COMB, OUT, W, P, Q, tokens, hidden, x_token, x_stream, y_token, post_token,
    post_stream, comb_token, comb_in, comb_out,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, H_OF: tl.constexpr, STRIDE_OF: tl.constexpr,
    Y_OF: tl.constexpr, GROUPS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """OUT = X', and P [S, tokens, C] and Q of it, sums of 2^LOG groups each."""
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    y_token = y_token // Y_OF * Y_OF
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    column = tl.arange(0, CP)
    group = part << LOG
    pairs, pairs_square = zeros(1, BM, CP)  # the tree of projection_kernel
    for _ in range(2 if LOG > 1 else 1):
        ones, ones_square = zeros(1, BM, CP)
        for _ in range(2 if LOG > 0 else 1):
            mixes, square = group_post(
                X, Y, POST, COMB, OUT, W, row, column, group, tokens, hidden, x_token, x_stream,
                y_token, post_token, post_stream, comb_token, comb_in, comb_out,
                N, C, CP, PARTS, AHEAD, BM, BK, GROUPS,
            )  # fmt: skip
            ones, ones_square = plus(ones, ones_square, mixes, square, 1)
            group += 1
        pairs, pairs_square = plus(pairs, pairs_square, ones, ones_square, 1)
    put_partials(P, Q, part, row, column, tokens, pairs, pairs_square, C, 1, BM)


def tiling(tokens: Any, n: int, x: torch.dtype) -> dict[str, Any]:
    """2^LOG groups per program, up to 4."""
    log = 0 if isinstance(tokens, int) and tokens <= 1024 else 1
    return {"LOG": log, "AHEAD": n <= 4, "num_warps": 8}


def post_pre(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    scale: torch.Tensor, base: torch.Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, precision: str, chosen: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(X', U, post', comb', mixes', sqrsum'); the operands as for ``post`` and ``pre``."""
    tokens, n, hidden = x.shape
    columns = w.shape[0]
    chosen = chosen or tiling(tokens, n, x.dtype)
    s = projection.splits(hidden, x.dtype, chosen["LOG"])
    out = torch.empty((tokens, n, hidden), dtype=x.dtype, device=x.device)
    p = torch.empty((s, tokens, columns), dtype=torch.float32, device=x.device)
    q = torch.empty((s, tokens), dtype=torch.float32, device=x.device)
    if not isinstance(tokens, int) or tokens:
        rows = projection.ROWS
        wrap_triton(post_pre_kernel)[((tokens + rows - 1) // rows, s)](
            x, y, gates, comb, out, dense(w), p, q, tokens, hidden, x.stride(0), x.stride(1),
            y.stride(0), *gates.stride(), *comb.stride(), N=n, C=columns,
            CP=max(16, triton.next_power_of_2(columns)),
            PARTS=projection.parts_of(x.dtype, w.dtype, precision), BM=rows,
            BK=projection.block(x.dtype), H_OF=divisor(hidden, x.element_size()),
            STRIDE_OF=stride_divisor(x), Y_OF=divisor(y.stride(0), y.element_size()),
            GROUPS=projection.GROUPS, **chosen,
        )  # fmt: skip
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    return out, *fuse(out, p, q, dense(scale), dense(base), *options)
