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
    zeros,
)


@triton.jit
def settled(x):
    """x, computed once: the compiler would compute it a second time in a product's own layout."""
    if x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
        )


@triton.jit
def group_post(
    X, Y, POST, COMB, OUT, W, local, rows, column, group, hidden, x_token, x_stream, y_token,
    post_token, post_stream, comb_token, comb_in, comb_out,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, J: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """X' over one group, stored, and its (W u, sum(u^2)), each in a tuple of one. The tensors begin
    at the first of the ``local`` tokens."""
    first, blocks = group_range(group, hidden, BK, GROUPS)
    mixes, square = tl.zeros((BM, CP), tl.float32), tl.zeros((BM, BK), tl.float32)
    there = local < rows
    k = tl.arange(0, BK)
    x_at = local[:, None] * x_token + k[None, :]
    y_at = local[:, None] * y_token + k[None, :]
    out_at = local[:, None] * (N * hidden) + k[None, :]
    w_at = column[:, None] * (N * hidden) + k[None, :]
    post_at, comb_at = local * post_token, local * comb_token
    # X is read again for every J streams of X', from L1 but for the first time: with everything
    # that a block needs in registers, few programs would fit a multiprocessor.
    for step in tl.range(0, blocks * (N // J), num_stages=1):
        h = (first + step // (N // J)) * BK
        inside = h + k[None, :] < hidden
        here = there[:, None] & inside
        w_mask = (column[:, None] < C) & inside
        x = ()
        for i in tl.static_range(N):
            x = x + (tl.load(X + (i * x_stream + h) + x_at, mask=here, other=0.0),)
        y = tl.load(Y + h + y_at, mask=here, other=0.0)
        for next_j in tl.static_range(J):
            j = step % (N // J) * J + next_j
            w = tl.load(W + (j * hidden + h) + w_at, mask=w_mask, other=0.0)
            gate = tl.load(POST + j * post_stream + post_at, mask=there, other=0.0)
            total = gate.to(tl.float32)[:, None] * y.to(tl.float32)
            for i in tl.static_range(N):
                at = COMB + (i * comb_in + j * comb_out) + comb_at
                c = tl.load(at, mask=there, other=0.0).to(tl.float32)
                total += c[:, None] * x[i].to(tl.float32)
            rounded = settled(total.to(X.dtype.element_ty))
            tl.store(OUT + (j * hidden + h) + out_at, rounded, mask=here)
            mixes = project(rounded, w, mixes, PARTS)
            stored = rounded.to(tl.float32)
            square += stored * stored
    return (mixes,), (tl.sum(square, 1),)


@triton.jit
def post_pre_kernel(
    X, Y, POST, COMB, OUT, W, P, Q, tokens, hidden, x_token, x_stream, y_token, post_token,
    post_stream, comb_token, comb_in, comb_out,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, J: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, H_OF: tl.constexpr, STRIDE_OF: tl.constexpr,
    Y_OF: tl.constexpr, GROUPS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """OUT = X', and P [S, tokens, C] and Q of it, sums of 2^LOG groups each."""
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    y_token = y_token // Y_OF * Y_OF
    start = tl.program_id(0) * BM
    local = tl.arange(0, BM)
    far = start.to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, CP)
    group = part << LOG
    pairs, pairs_square = zeros(1, BM, CP)  # the tree of projection_kernel
    for _ in range(2 if LOG > 1 else 1):
        ones, ones_square = zeros(1, BM, CP)
        for _ in range(2 if LOG > 0 else 1):
            mixes, square = group_post(
                X + far * x_token, Y + far * y_token, POST + far * post_token,
                COMB + far * comb_token, OUT + far * (N * hidden), W, local, tokens - start,
                column, group, hidden, x_token, x_stream, y_token, post_token, post_stream,
                comb_token, comb_in, comb_out, N, C, CP, PARTS, J, BM, BK, GROUPS,
            )  # fmt: skip
            ones, ones_square = plus(ones, ones_square, mixes, square, 1)
            group += 1
        pairs, pairs_square = plus(pairs, pairs_square, ones, ones_square, 1)
    put_partials(P, Q, part, start + local, column, tokens, pairs, pairs_square, C, 1, BM)


def tiling(tokens: Any, n: int, x: torch.Tensor) -> dict[str, Any]:
    """2^LOG groups per program, up to 4; J streams of X' for one read of X."""
    log = 0 if isinstance(tokens, int) and tokens <= 1024 else 1
    chosen: dict[str, Any] = {"LOG": log, "J": 1, "num_warps": 8}
    if n == 4 and x.dtype == torch.bfloat16 and stride_divisor(x) == 8:
        chosen["maxnreg"] = 128  # two programs on a multiprocessor
    return chosen


def post_pre(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    scale: torch.Tensor, base: torch.Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, precision: str, chosen: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(X', U, post', comb', mixes', sqrsum'); the operands as for ``post`` and ``pre``."""
    tokens, n, hidden = x.shape
    columns = w.shape[0]
    chosen = chosen or tiling(tokens, n, x)
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
