# mypy: disable-error-code="assignment"
"""mHC behind a layer: ``X'_j = post_j Y + sum_i comb[i, j] X_i``, a slab of one token per program.

X and X' are [T, n, H]: one read of X and of Y, one write.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .dependent import in_turn, launched
from .mhc_layout import divisor, load_streams, stride_divisor
from .tilings import tunable


@triton.jit
def mixed(x, y, post, comb, N: tl.constexpr):
    """The N streams of X' in fp32: comb an N x N tuple, row by row as [in, out].

    Fused multiply-adds are spelled out: which of two products a compiler fuses depends on what
    else a kernel computes, and bits with it."""
    out = ()
    for j in tl.static_range(N):
        total = post[j] * y
        for i in tl.static_range(N):
            total = tl.fma(tl.broadcast_to(comb[i * N + j], x[i].shape), x[i], total)
        out = out + (total,)
    return out


@triton.jit
def wide(values, N: tl.constexpr):
    out = ()
    for i in tl.static_range(N):
        out = out + (values[i].to(tl.float32),)
    return out


@triton.jit
def load_coefficients(POST, COMB, t, post_token, post_stream, comb_token, comb_in, comb_out, mask,
                      N: tl.constexpr):  # fmt: skip
    """(post, comb) of tokens ``t`` as tuples in fp32."""
    post, comb = (), ()
    far = t.to(tl.int64)
    for j in tl.static_range(N):
        at = POST + far * post_token + j * post_stream
        if mask is None:
            post = post + (tl.load(at).to(tl.float32),)
        else:
            post = post + (tl.load(at, mask=mask, other=0.0).to(tl.float32),)
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            at = COMB + far * comb_token + (i * comb_in + j * comb_out)
            if mask is None:
                comb = comb + (tl.load(at).to(tl.float32),)
            else:
                comb = comb + (tl.load(at, mask=mask, other=0.0).to(tl.float32),)
    return post, comb


@triton.jit
def post_kernel(
    X, Y, POST, COMB, OUT, hidden, slabs, x_token, x_stream, y_token, post_token,
    post_stream, comb_token, comb_in, comb_out, N: tl.constexpr, H_OF: tl.constexpr,
    STRIDE_OF: tl.constexpr, Y_OF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    in_turn(PDL)
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    y_token = y_token // Y_OF * Y_OF
    t = tl.program_id(0) // slabs
    far = t.to(tl.int64)
    h = tl.program_id(0) % slabs * BLOCK + tl.arange(0, BLOCK)
    here = h < hidden
    x = load_streams(X + far * x_token, x_stream, h, here, N)
    y = tl.load(Y + far * y_token + h, mask=here, other=0.0)
    post, comb = load_coefficients(
        POST, COMB, t, post_token, post_stream, comb_token, comb_in, comb_out, None, N
    )
    out = mixed(wide(x, N), y.to(tl.float32), post, comb, N)
    at = OUT + far * (N * hidden) + h
    for j in tl.static_range(N):
        tl.store(at + j * hidden, out[j].to(OUT.dtype.element_ty), mask=here)


@tunable("mhc_post", "post", "tokens hidden", scaled="BLOCK", warps="num_warps")
def tile(n: int, itemsize: int) -> dict[str, Any]:
    """A program's BLOCK of every stream: 64 bytes per thread, 16 of 8 streams."""
    return {"BLOCK": (128 if n == 8 else 512) * (16 // itemsize), "num_warps": 4}


def post(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor,
    chosen: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """X' [T, n, H] of x [T, n, H], y [T, H], their last dimensions dense, gates [T, n] and comb
    [T, n, n] of any strides."""
    tokens, n, hidden = x.shape
    out = torch.empty((tokens, n, hidden), dtype=x.dtype, device=x.device)
    chosen = chosen or tile(n, x.element_size(), tokens=tokens, hidden=hidden)
    slabs = (hidden + chosen["BLOCK"] - 1) // chosen["BLOCK"]
    if not isinstance(tokens, int) or tokens:
        launched(post_kernel, wrap_triton(post_kernel), x, (tokens * slabs,))(
            x, y, gates, comb, out, hidden, slabs, x.stride(0), x.stride(1), y.stride(0),
            *gates.stride(), *comb.stride(), N=n, H_OF=divisor(hidden, x.element_size()),
            STRIDE_OF=stride_divisor(x), Y_OF=divisor(y.stride(0), y.element_size()), **chosen,
        )  # fmt: skip
    return out
