"""mHC across a boundary of layers: post of one and the projection of the next, in one pass.

A program has a tile of tokens and a run of groups of ``mhc_projection``. Where it has computed a
block of X', it rounds and stores it and takes the products with W and with itself from registers:
the same sums in the same order as the projection of a stored X'. The fuse kernel of ``mhc_pre``
follows, on X'. Nothing here is pipelined: what is stored and squared is an operand of the products
as well (``mhc_projection`` says why that must not be).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from . import mhc_projection as projection
from .dependent import in_turn, launched
from .mhc_pre import dense, divisor, fuse, stride_divisor
from .mhc_projection import (
    group_range,
    joined,
    load_weights,
    project,
    put_partials,
    squares,
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
    X, Y, POST, COMB, OUT, W, local, rows, hidden, group, x_token, x_stream, y_token,
    post_token, post_stream, comb_token, comb_in, comb_out,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, SLOTS: tl.constexpr, TURNS: tl.constexpr,
    PARTS: tl.constexpr, CUT: tl.constexpr, J: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """X' over one group, stored, and its (W u, sum(u^2)). The tensors begin at the first of the
    ``local`` tokens, of which there are ``rows``."""
    first, blocks = group_range(group, hidden, BK, GROUPS)
    acc = tl.zeros((BM, SLOTS * CP), tl.float32)
    square = tl.zeros((BM, BK // 8), tl.float32)
    there = local < rows
    k = tl.arange(0, BK)
    x_at = local[:, None] * x_token + k[None, :]
    y_at = local[:, None] * y_token + k[None, :]
    out_at = local[:, None] * (N * hidden) + k[None, :]
    slot = tl.arange(0, CP if CUT else SLOTS * CP)
    part, column = slot // CP, slot % CP
    w_at = (part * C + column)[:, None] * (N * hidden) + k[None, :]
    used = ((part < PARTS) & (column < C))[:, None]
    post_at, comb_at = local * post_token, local * comb_token
    # X is read again for every J streams of X', from L1 but for the first time: with everything
    # that a block needs in registers, few programs would fit a multiprocessor.
    for step in range(0, blocks * (N // J)):
        h = (first + step // (N // J)) * BK
        inside = h + k[None, :] < hidden
        here = there[:, None] & inside
        x = ()
        for i in tl.static_range(N):
            x = x + (tl.load(X + (i * x_stream + h) + x_at, mask=here, other=0.0),)
        y = tl.load(Y + h + y_at, mask=here, other=0.0)
        for next_j in tl.static_range(J):
            j = step % (N // J) * J + next_j
            gate = tl.load(POST + j * post_stream + post_at, mask=there, other=0.0)
            total = gate.to(tl.float32)[:, None] * y.to(tl.float32)
            for i in tl.static_range(N):
                at = COMB + (i * comb_in + j * comb_out) + comb_at
                c = tl.load(at, mask=there, other=0.0).to(tl.float32)
                total += c[:, None] * x[i].to(tl.float32)
            rounded = settled(total.to(X.dtype.element_ty))
            tl.store(OUT + (j * hidden + h) + out_at, rounded, mask=here)
            square = squares(rounded, square, BM, BK)
            for turn in tl.static_range(TURNS):
                at = (j * hidden + h) + w_at
                if not CUT:
                    at += turn * C * N * hidden
                w = load_weights(W, at, used & inside, turn, CP, BK, SLOTS, TURNS, CUT)
                acc = project(rounded, w, acc, PARTS)
    return joined(acc, SLOTS, CP, BM), tl.sum(square, 1)


@triton.jit
def post_pre_kernel(
    X, Y, POST, COMB, OUT, W, P, Q, tokens, hidden, x_token, x_stream, y_token, post_token,
    post_stream, comb_token, comb_in, comb_out,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, SLOTS: tl.constexpr, TURNS: tl.constexpr,
    PARTS: tl.constexpr, CUT: tl.constexpr, J: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    H_OF: tl.constexpr, STRIDE_OF: tl.constexpr, Y_OF: tl.constexpr, GROUPS: tl.constexpr,
    LOG: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """OUT = X', and P [S, tokens, C] and Q of it, sums of 2^LOG groups each."""
    in_turn(PDL)
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    y_token = y_token // Y_OF * Y_OF
    start = tl.program_id(0) * BM
    local = tl.arange(0, BM)
    far = start.to(tl.int64)
    part = tl.program_id(1)
    group = part << LOG
    b, b_square = tl.zeros((BM, CP), tl.float32), tl.zeros((BM,), tl.float32)
    for _ in range(2 if LOG > 1 else 1):  # the tree of projection_kernel
        a, a_square = tl.zeros((BM, CP), tl.float32), tl.zeros((BM,), tl.float32)
        for _ in range(2 if LOG > 0 else 1):
            mixes, square = group_post(
                X + far * x_token, Y + far * y_token, POST + far * post_token,
                COMB + far * comb_token, OUT + far * (N * hidden), W, local, tokens - start,
                hidden, group, x_token, x_stream, y_token, post_token, post_stream,
                comb_token, comb_in, comb_out, N, C, CP, SLOTS, TURNS, PARTS, CUT, J, BM, BK,
                GROUPS,
            )  # fmt: skip
            a, a_square = a + mixes, a_square + square
            group += 1
        b, b_square = b + a, b_square + a_square
    put_partials(P, Q, part, start + local, tl.arange(0, CP), tokens, b, b_square, C)


def tiling(tokens: Any, n: int, x: torch.dtype) -> dict[str, Any]:
    """2^LOG groups per program, LOG up to 2; J streams of X' for one read of X."""
    most = tokens if isinstance(tokens, int) else 4096
    chosen: dict[str, Any] = {"LOG": 0 if most <= 1024 else 1, "J": 1, "BEFORE": most > 256}
    return chosen | {"num_warps": 8 if n == 8 else 4, "num_stages": 1}


def post_pre(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    scale: torch.Tensor, base: torch.Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, precision: str, chosen: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(X', U, post', comb', mixes', sqrsum'); the operands as for ``post`` and ``pre``."""
    tokens, n, hidden = x.shape
    chosen = dict(chosen or tiling(tokens, n, x.dtype))
    w, how = projection.weights(x.dtype, dense(w), precision, chosen.pop("BEFORE"))
    s = projection.splits(hidden, x.dtype, chosen["LOG"])
    out = torch.empty((tokens, n, hidden), dtype=x.dtype, device=x.device)
    p = torch.empty((s, tokens, how["C"]), dtype=torch.float32, device=x.device)
    q = torch.empty((s, tokens), dtype=torch.float32, device=x.device)
    if not isinstance(tokens, int) or tokens:
        rows = projection.ROWS
        grid = ((tokens + rows - 1) // rows, s)
        launched(post_pre_kernel, wrap_triton(post_pre_kernel), x, grid)(
            x, y, gates, comb, out, w, p, q, tokens, hidden, x.stride(0), x.stride(1),
            y.stride(0), *gates.stride(), *comb.stride(), N=n, BM=rows,
            BK=projection.block(x.dtype), H_OF=divisor(hidden, x.element_size()),
            STRIDE_OF=stride_divisor(x), Y_OF=divisor(y.stride(0), y.element_size()),
            GROUPS=projection.GROUPS, **how, **chosen,
        )  # fmt: skip
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    return out, *fuse(out, p, q, dense(scale), dense(base), *options)
