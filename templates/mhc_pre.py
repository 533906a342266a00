"""mHC before a layer: the layer's input, post and comb, from X [T, n, H] and the projection.

    U = sum_i pre_i X_i

projection_kernel (mhc_projection)     partial sums of W u and sum(u^2)
fuse_kernel      the first programs: sums, post and comb of a block of tokens each, Sinkhorn in
                 registers. The others: a slab of U of one token, with the n pre gates from the
                 partials; none of them waits for Sinkhorn.
squares_kernel   sum(u^2) for who brings a projection without it
sinkhorn_kernel  Sinkhorn alone
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from . import mhc_projection as projection
from .dependent import in_turn, launched
from .mhc_coefficients import gates_of, put_coefficients, put_sums, sinkhorn_of

TOKENS = 32  # whose coefficients one program makes, a thread each


@triton.jit
def load_streams(at, x_stream, h, mask, N: tl.constexpr):
    x = ()
    for i in tl.static_range(N):
        x = x + (tl.load(at + i * x_stream + h, mask=mask, other=0.0),)
    return x


@triton.jit
def apply_slab(
    X, P, Q, SCALE, BASE, U, t, first, tokens, hidden, x_token, x_stream, rms_eps, pre_eps,
    N: tl.constexpr, C: tl.constexpr, S: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    at = X + t.to(tl.int64) * x_token
    h = first + tl.arange(0, BLOCK)
    held = ()
    for k in tl.static_range(HELD):  # on their way before the gates are
        held = held + (load_streams(at, x_stream, h + k * BLOCK, h + k * BLOCK < hidden, N),)
    size = tl.cast(hidden * N, tl.float32)
    gates = gates_of(P, Q, SCALE, BASE, t, tokens, size, rms_eps, pre_eps, N, C, S, LOG)
    for k in tl.static_range(HELD):
        u = gates[0] * held[k][0].to(tl.float32)
        for i in tl.static_range(1, N):
            u += gates[i] * held[k][i].to(tl.float32)
        out = U + t.to(tl.int64) * hidden + h + k * BLOCK
        tl.store(out, u.to(U.dtype.element_ty), mask=h + k * BLOCK < hidden)


@triton.jit
def fuse_kernel(
    X, P, Q, SCALE, BASE, U, POST, COMB, MIXES, SQRSUM,
    tokens, hidden, x_token, x_stream, blocks, slabs, iters, rms_eps, pre_eps, sinkhorn_eps,
    post_mult, N: tl.constexpr, HEAD: tl.constexpr, S: tl.constexpr, LOG: tl.constexpr,
    H_OF: tl.constexpr, STRIDE_OF: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    in_turn(PDL)
    C: tl.constexpr = N if HEAD else N * (N + 2)
    hidden = hidden // H_OF * H_OF  # what masks and rows are made of, by its divisor
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    # Doubles in programs that Inductor writes.
    rms_eps, pre_eps = tl.cast(rms_eps, tl.float32), tl.cast(pre_eps, tl.float32)
    sinkhorn_eps, post_mult = tl.cast(sinkhorn_eps, tl.float32), tl.cast(post_mult, tl.float32)
    pid = tl.program_id(0)
    if pid < blocks:
        put_sums(P, Q, MIXES, SQRSUM, pid, tokens, C, S, LOG, BT)
        if not HEAD:
            tl.debug_barrier()  # other threads stored what a thread reads now
            put_coefficients(
                MIXES, SQRSUM, SCALE, BASE, POST, COMB, pid, tokens,
                tl.cast(hidden * N, tl.float32), iters, rms_eps, sinkhorn_eps, post_mult, N, BT,
            )  # fmt: skip
    else:
        slab = pid - blocks
        apply_slab(
            X, P, Q, SCALE, BASE, U, slab // slabs, slab % slabs * (HELD * BLOCK), tokens, hidden,
            x_token, x_stream, rms_eps, pre_eps, N, C, S, LOG, BLOCK, HELD,
        )  # fmt: skip


@triton.jit
def squares_kernel(
    X, Q, hidden, x_token, x_stream, N: tl.constexpr, H_OF: tl.constexpr, STRIDE_OF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    hidden = hidden // H_OF * H_OF
    x_token, x_stream = x_token // STRIDE_OF * STRIDE_OF, x_stream // STRIDE_OF * STRIDE_OF
    at = X + t.to(tl.int64) * x_token
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, hidden, BLOCK):
        h = first + tl.arange(0, BLOCK)
        x = load_streams(at, x_stream, h, h < hidden, N)
        for i in tl.static_range(N):
            wide = x[i].to(tl.float32)
            total += wide * wide
    tl.store(Q + t, tl.sum(total, 0))


@triton.jit
def sinkhorn_kernel(L, COMB, tokens, iters, eps, N: tl.constexpr, BT: tl.constexpr):
    eps = tl.cast(eps, tl.float32)  # a double in programs that Inductor writes
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    there = t < tokens
    logits = ()
    for k in tl.static_range(N * N):
        value = tl.load(L + t * (N * N) + k, mask=there, other=0.0)
        logits = logits + (value.to(tl.float32),)
    comb = sinkhorn_of(logits, iters, eps, N)
    for k in tl.static_range(N * N):
        tl.store(COMB + t * (N * N) + k, comb[k].to(COMB.dtype.element_ty), mask=there)


# --- launches -------------------------------------------------------------------------------------


def divisor(size: Any, itemsize: int) -> int:
    """The largest that kernels make use of: 16 bytes of elements."""
    if not isinstance(size, int):
        return 1
    return next(p for p in (16 // itemsize, 4, 2, 1) if size % p == 0 and p * itemsize <= 16)


def stride_divisor(x: torch.Tensor) -> int:
    """That of the first element of every stream of every token, counted in elements."""
    return min(divisor(x.stride(d), x.element_size()) for d in (0, 1))


def apply_tile(tokens: Any, n: int, itemsize: int) -> dict[str, Any]:
    """HELD blocks of a slab, 16 bytes per thread, stream and block."""
    few = isinstance(tokens, int) and tokens <= 64
    held = 1 if few else max(1, 16 // n)
    return {"BLOCK": 128 * (16 // itemsize), "HELD": held, "num_warps": 4}


def results(x: torch.Tensor, columns: int) -> tuple[torch.Tensor, ...]:
    """Memory for what ``fuse`` returns, of as many ``columns`` of the projection."""
    tokens, n, hidden = x.shape

    def empty(*shape: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    u = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    sums = empty(tokens, columns), empty(tokens)
    return (u, *sums) if columns == n else (u, empty(tokens, n), empty(tokens, n, n), *sums)


def fuse(
    x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    chosen: dict[str, Any] | None = None, out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, post, comb, mixes, sqrsum) from partials; (U, mixes, sqrsum) for a head's n columns."""
    tokens, n, hidden = x.shape
    head = p.shape[2] == n
    chosen = chosen or apply_tile(tokens, n, x.element_size())
    out = results(x, p.shape[2]) if out is None else out
    u, *coefficients, mixes, sqrsum = out
    post, comb = (mixes, mixes) if head else coefficients
    s = p.shape[0]
    blocks = (tokens + TOKENS - 1) // TOKENS
    slab = chosen["BLOCK"] * chosen["HELD"]
    slabs = (hidden + slab - 1) // slab
    if not isinstance(tokens, int) or tokens:
        launched(fuse_kernel, wrap_triton(fuse_kernel), x, (blocks + tokens * slabs,))(
            x, p, q, scale, base, u, post, comb, mixes, sqrsum, tokens, hidden, x.stride(0),
            x.stride(1), blocks, slabs, iters, rms_eps, pre_eps, sinkhorn_eps, post_mult,
            N=n, HEAD=head, S=s, LOG=(s - 1).bit_length(), H_OF=divisor(hidden, x.element_size()),
            STRIDE_OF=stride_divisor(x), BT=TOKENS, **chosen,
        )  # fmt: skip
    return out


def pre(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iters: int,
    rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, precision: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, post, comb, mixes, sqrsum) of x [T, n, H], last dimension dense."""
    p, q = projection.partials(x, dense(w), precision)
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    return fuse(x, p, q, dense(scale), dense(base), *options)


def head(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float,
    pre_eps: float, precision: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(U, mixes, sqrsum)."""
    p, q = projection.partials(x, dense(w), precision)
    return fuse(x, p, q, dense(scale), dense(base), 1, rms_eps, pre_eps, 0.0, 1.0)


def from_mixes(
    mixes: torch.Tensor, sqrsum: torch.Tensor | None, x: torch.Tensor, scale: torch.Tensor,
    base: torch.Tensor, iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float,
    post_mult: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As ``pre`` from mixes [S, T, n (n + 2)] and sqrsum [S, T]."""
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if sqrsum is None:
        tokens, n, hidden = x.shape
        # As many partials as mixes has, all but the first of them zero.
        sqrsum = torch.zeros(mixes.shape[:2], dtype=torch.float32, device=x.device)
        if not isinstance(tokens, int) or tokens:
            wrap_triton(squares_kernel)[(tokens,)](
                x, sqrsum, hidden, x.stride(0), x.stride(1), N=n,
                H_OF=divisor(hidden, x.element_size()), STRIDE_OF=stride_divisor(x),
                BLOCK=256 * (16 // x.element_size()), num_warps=8,
            )  # fmt: skip
    return fuse(x, mixes, sqrsum, dense(scale), dense(base), *options)


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Of logits [T, n, n], in their dtype."""
    tokens, n, _ = logits.shape
    logits = dense(logits)
    comb = torch.empty_like(logits)
    if not isinstance(tokens, int) or tokens:
        wrap_triton(sinkhorn_kernel)[((tokens + 127) // 128,)](
            logits, comb, tokens, iters, eps, N=n, BT=128, num_warps=4
        )
    return comb


def dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() else t.contiguous()
