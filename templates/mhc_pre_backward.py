"""The gradient of mHC's pre, in four kernels and 28 H bytes a token for n = 4 and 16 bits.

36 H with another gradient of X, from a post that X went through as well, in the same sum.

    dpre_i = <dU, X_i>                                                      products, a token each
    dlogit of the gates and, through Sinkhorn, of comb;  dz = s dlogit      logits, tokens at once
    draw = r dz,  f = r^2 / K <dz, z>
    dX_i = pre_i dU + W_i^T draw - f X_i,   dW_i = sum_t draw_t X_it^T      gradient, a slab of K
    sums over the parts of dW, dscale, dbase                                finish

A program of ``gradient_kernel`` owns BH columns of G streams and walks the tokens of one range, of
which there is a fixed number: dX is summed in fp32 and rounded once, dW has one part per range.
Both products run on tensor cores in bf16: an operand that is not bf16 is split into two bf16 parts,
and the product of the small parts is dropped, 2^-18 of the result. No atomics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .mhc_sinkhorn_backward import block_of, held_rounds
from .mhc_slopes import logits_kernel, split
from .tilings import tunable


@triton.jit
def over_columns(x, THREADS: tl.constexpr, E: tl.constexpr):
    """Sums of [rows, THREADS E] over each thread's E columns."""
    return tl.sum(tl.reshape(x, [x.shape[0], THREADS, E]), 2)


@triton.jit
def products_kernel(
    X, DU, DPRE, tokens, hidden,
    N: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, HIDDEN_OF: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = THREADS * E
    hidden = hidden // HIDDEN_OF * HIDDEN_OF  # what masks and rows are made of, by its divisor
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    c = tl.arange(0, BLOCK)[None, :]
    x_at, du_at = X + t * (hidden * N) + i[:, None] * hidden, DU + t * hidden
    total = tl.zeros([N, THREADS], tl.float32)
    for h in range(0, hidden, BLOCK):
        if EVEN:
            x, du = tl.load(x_at + h + c), tl.load(du_at + h + c)
        else:
            x = tl.load(x_at + h + c, mask=h + c < hidden, other=0.0)
            du = tl.load(du_at + h + c, mask=h + c < hidden, other=0.0)
        total += over_columns(x.to(tl.float32) * du.to(tl.float32), THREADS, E)
    tl.store(DPRE + t * N + i, tl.sum(total, 1))


# Products of few rows, so that Triton takes mma.sync: the fence in front of a wgmma would wait for
# the loads of the next block.


@triton.jit
def weights(W, m, h, within, hidden, M: tl.constexpr, SPLIT: tl.constexpr):
    """W_i [P, BH] of a stream in bf16 parts; the second is not used where W is in bf16."""
    mask = (m < M)[:, None] & within[None, :]
    w = tl.load(W + m[:, None] * hidden + h[None, :], mask=mask, other=0.0)
    high, low = w.to(tl.bfloat16), w.to(tl.bfloat16)
    if SPLIT:
        high, low = split(w)
    return high, low


@triton.jit
def through_weights(w_high, w_low, high, low, SPLIT: tl.constexpr):
    """draw W_i [tokens, BH]."""
    product = tl.dot(high, w_high)
    product = tl.dot(low, w_high, product)
    if SPLIT:
        product = tl.dot(high, w_low, product)
    return product


@triton.jit
def add_outer(dw, x, high, low):
    """dw [P, BH] + draw^T x, with x [tokens, BH]."""
    if x.dtype == tl.bfloat16:
        dw = tl.dot(tl.trans(high), x, dw)
        dw = tl.dot(tl.trans(low), x, dw)
    else:
        x_high, x_low = split(x)
        dw = tl.dot(tl.trans(high), x_high, dw)
        dw = tl.dot(tl.trans(low), x_high, dw)
        dw = tl.dot(tl.trans(high), x_low, dw)
    return dw


@triton.jit
def store_part(PARTS, dw, m, h, within, hidden, M: tl.constexpr):
    at = PARTS + (m[:, None] * hidden + h[None, :])
    tl.store(at, dw, mask=(m < M)[:, None] & within[None, :])


@triton.jit
def load_tile(at, mask):
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def load_streams(X, start, t, h, mask, hidden, N: tl.constexpr, FIRST, G: tl.constexpr):
    """G tiles [tokens, columns] of X [T, n, H] from the stream FIRST on."""
    at = X + (start * N + FIRST) * hidden + (t[:, None] * (hidden * N) + h[None, :])
    found = ()
    for g in tl.static_range(G):
        found = found + (load_tile(at + g * hidden, mask),)  # type: ignore[assignment]
    return found


@triton.jit
def load_slopes(
    DRAW, COEFFICIENTS, start, t, m, rows, tokens, FIRST, N: tl.constexpr, M: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """The parts of draw [tokens, P] and, of each token, f and pre of G streams from FIRST on."""
    draw_at = DRAW + start * (2 * M) + (t[:, None] * (2 * M) + m[None, :])
    mask = rows[:, None] & (m < M)[None, :]
    at = COEFFICIENTS + start + t
    found = load_tile(draw_at, mask), load_tile(draw_at + M, mask), load_tile(at + N * tokens, rows)
    for g in tl.static_range(G):
        found = found + (load_tile(at + (FIRST + g) * tokens, rows),)  # type: ignore[assignment]
    return found


@triton.jit
def load_block(
    X, DU, ADDED, DRAW, COEFFICIENTS, start, end, t, h, m, within, tokens, hidden, FIRST,
    N: tl.constexpr, M: tl.constexpr, G: tl.constexpr, HAS_DU: tl.constexpr,
    HAS_ADDED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What dX and dW of a block of tokens are made of."""
    rows = start + t < end
    mask = rows[:, None] & (within | EVEN)[None, :]
    slopes = load_slopes(DRAW, COEFFICIENTS, start, t, m, rows, tokens, FIRST, N, M, G)
    xs = load_streams(X, start, t, h, mask, hidden, N, FIRST, G)
    du, added = xs, xs
    if HAS_DU:
        du = load_streams(DU, start, t, h, mask, hidden, 1, 0, 1)
    if HAS_ADDED:
        added = load_streams(ADDED, start, t, h, mask, hidden, N, FIRST, G)
    return slopes, xs, du, added


@triton.jit
def gradient_kernel(
    X, DU, W, DRAW, COEFFICIENTS, ADDED, DX, PARTS, tokens, hidden, length,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, G: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, AHEAD: tl.constexpr, HAS_DU: tl.constexpr, HAS_ADDED: tl.constexpr,
    HIDDEN_OF: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = W.dtype.element_ty != tl.bfloat16
    hidden = hidden // HIDDEN_OF * HIDDEN_OF
    width = hidden * N
    stream = tl.program_id(0) % (N // G) * G
    part = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BT)
    h = tl.program_id(0) // (N // G) * BH + tl.arange(0, BH)
    m = tl.arange(0, P)
    within = h < hidden
    w_high, w_low, dw = (), (), ()
    for g in tl.static_range(G):
        w_parts = weights(W + (stream + g) * hidden, m, h, within, width, M, SPLIT)
        w_high, w_low = w_high + (w_parts[0],), w_low + (w_parts[1],)  # type: ignore[assignment]
        dw = dw + (tl.zeros([P, BH], tl.float32),)  # type: ignore[assignment]
    first = part * length
    end = tl.minimum(first + length, tokens)
    blocks = ()
    for k in tl.static_range(AHEAD):
        made = load_block(
            X, DU, ADDED, DRAW, COEFFICIENTS, first + k * BT, end, t, h, m, within, tokens, hidden,
            stream, N, M, G, HAS_DU, HAS_ADDED, EVEN,
        )  # fmt: skip
        blocks = blocks + (made,)  # type: ignore[assignment]
    for start in range(first, end, BT):
        # The next blocks are on their way while this one is computed.
        coming = load_block(
            X, DU, ADDED, DRAW, COEFFICIENTS, start + AHEAD * BT, end, t, h, m, within, tokens,
            hidden, stream, N, M, G, HAS_DU, HAS_ADDED, EVEN,
        )  # fmt: skip
        slopes, xs, du, added = blocks[0][0], blocks[0][1], blocks[0][2], blocks[0][3]  # type: ignore[misc]
        high, low, f = slopes[0], slopes[1], slopes[2]
        mask = (start + t < end)[:, None] & (within | EVEN)[None, :]
        at = DX + (start * N + stream) * hidden + (t[:, None] * width + h[None, :])
        next_dw = ()
        for g in tl.static_range(G):
            dx = through_weights(w_high[g], w_low[g], high, low, SPLIT)
            dx -= f[:, None] * xs[g].to(tl.float32)
            if HAS_DU:
                dx += slopes[3 + g][:, None] * du[0].to(tl.float32)
            if HAS_ADDED:
                dx += added[g].to(tl.float32)
            tl.store(at + g * hidden, dx.to(DX.dtype.element_ty), mask=mask)
            next_dw = next_dw + (add_outer(dw[g], xs[g], high, low),)  # type: ignore[assignment]
        dw, left = next_dw, ()
        for k in tl.static_range(1, AHEAD):
            left = left + (blocks[k],)  # type: ignore[assignment]
        blocks = left + (coming,)  # type: ignore[assignment]
    for g in tl.static_range(G):
        part_at = PARTS + part * (M * width) + (stream + g) * hidden
        store_part(part_at, dw[g], m, h, within, width, M)


@triton.jit
def finish_kernel(
    PARTS, SUMS, DW, DSCALE, DBASE, size, blocks, ranges,
    N: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An element of dbase or dscale of each of the first programs, BLOCK of dW of the others."""
    SINGLE: tl.constexpr = M + 1 if M == N else M + 3
    program = tl.program_id(0)
    if program < SINGLE:
        # What one element is summed from is one run of SUMS [2, M, blocks].
        k = program - M
        first = tl.where(k < 0, program, M + k * N)
        count = tl.where(k < 0, 1, tl.where(k < 2, N, N * N))
        at, length = SUMS + first.to(tl.int64) * blocks, count * blocks
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += tl.load(at + i, mask=i < length, other=0.0)
        everything = tl.sum(total, 0)
        if k < 0:
            tl.store(DBASE + program, everything.to(DBASE.dtype.element_ty))
        else:
            tl.store(DSCALE + k, everything.to(DSCALE.dtype.element_ty))
    else:
        i = (program - SINGLE) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        wide_size = tl.cast(size, tl.int64)
        for part in range(0, ranges):
            total += tl.load(PARTS + part * wide_size + i, mask=i < size, other=0.0)
        tl.store(DW + i, total.to(DW.dtype.element_ty), mask=i < size)


# --- launches -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """How ``gradient_kernel`` is cut.

    ``tokens`` and ``columns`` of a block; ``streams`` of a program; ``ranges`` of tokens (a
    multiple of it for many), each with its part of dW; ``warps``; blocks loaded ``ahead``.
    """

    tokens: int
    columns: int
    streams: int
    ranges: int
    warps: int
    ahead: int


_PROGRAMS = 1584  # four turns of three on each multiprocessor of an H200


@tunable("mhc_pre", "backward", "tokens", scaled="tokens columns ranges")
def tile(n: int, hidden: Any, dtype: torch.dtype) -> Tile:
    """The tile for residuals of n streams of ``hidden`` columns."""
    columns = 32 if n == 8 else 64
    # Two streams where masks and addresses leave the registers for them.
    streams = 2 if n < 8 and dtype.itemsize == 2 and even(hidden, columns) else 1
    slabs = (triton.cdiv(hidden, columns) if isinstance(hidden, int) else 64) * (n // streams)
    return Tile(16, columns, streams, max(1, min(16, _PROGRAMS // slabs)), 4, 1)


def divisor(hidden: Any) -> int:
    """A power of two that divides ``hidden``, as far as it is known."""
    if not isinstance(hidden, int):
        return 1
    return next(p for p in (16, 8, 4, 2, 1) if hidden % p == 0)


def even(hidden: Any, block: int) -> bool:
    """Whether blocks of columns are known to need no mask."""
    return isinstance(hidden, int) and hidden % block == 0


def padded(m: int) -> int:
    """Columns of W as the tensor cores want them."""
    return max(16, triton.next_power_of_2(m))


def columns_tile(hidden: Any, itemsize: int) -> dict[str, Any]:
    """Threads and columns of a thread where a program walks the columns of one token."""
    elements, warps = 16 // itemsize, 4
    if isinstance(hidden, int) and hidden <= 32 * elements * 2:
        warps = 1
    block = 32 * warps * elements
    return {
        "THREADS": 32 * warps, "E": elements, "HIDDEN_OF": divisor(hidden),
        "EVEN": even(hidden, block), "num_warps": warps,
    }  # fmt: skip


def products(x: torch.Tensor, du: torch.Tensor) -> torch.Tensor:
    """<dU, X_i> [T, n] in fp32 of X [T, n, H] and dU [T, H]."""
    tokens, n, hidden = x.shape
    dpre = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    wrap_triton(products_kernel)[(tokens,)](
        x, du, dpre, tokens, hidden, N=n, **columns_tile(hidden, x.element_size())
    )
    return dpre


def slopes(
    x: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, mixes: torch.Tensor,
    sqrsum: torch.Tensor, du: torch.Tensor | None, dpost: torch.Tensor | None,
    dcomb: torch.Tensor | None, iters: int, rms_eps: float, pre_eps: float, eps: float,
    post_mult: float, powers: bool = False, warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the gradient of X [T, n, H] is made of, and dscale and dbase.

    Returns draw [T, 2, M] in two bf16 parts, the coefficients pre_i and f [n + 1, T] in fp32, and
    the sums [2, L, blocks] of dlogit and dlogit z over blocks of tokens, L the elements of base.
    L = n is a collapse, of which dpost and dcomb are the gradients of mixes [T, M] and sqrsum [T].
    """
    tokens, n, hidden = x.shape
    m, gates = mixes.shape[1], base.shape[0]
    dpre = x if du is None else products(x, du)
    block = block_of(n, warps)
    blocks = triton.cdiv(tokens, block)
    draw = torch.empty((tokens, 2, m), dtype=torch.bfloat16, device=x.device)
    coefficients = torch.empty((n + 1, tokens), dtype=torch.float32, device=x.device)
    sums = torch.empty((2, gates, blocks), dtype=torch.float32, device=x.device)
    wrap_triton(logits_kernel)[(blocks,)](
        mixes, sqrsum, scale, base, dpre, x if dpost is None else dpost,
        x if dcomb is None else dcomb, draw, coefficients, sums,
        tokens, n * hidden, rms_eps, pre_eps, eps, post_mult,
        N=n, M=m, P=triton.next_power_of_2(max(m - n, 1)), HEAD=gates == n, POWERS=powers,
        B=block, HAS_DU=du is not None, HAS_POST=dpost is not None, HAS_COMB=dcomb is not None,
        ITERS=iters, HELD=held_rounds(iters), num_warps=warps,
    )  # fmt: skip
    return draw, coefficients, sums


# The tensor cores cut off what does not fit into a sum: a range's part of dW may not grow longer.
_LONGEST = 4096
# A range's part of dW is written and read again: few tokens are not worth one.
_SHORTEST = 128


def ranges_of(tokens: Any, ranges: int, block: int) -> tuple[Any, Any]:
    """How many ranges, a multiple of ``ranges`` for many tokens, and tokens of each, in whole
    blocks."""
    if isinstance(tokens, int):
        ranges = min(ranges, tokens // _SHORTEST + 1)
    ranges = (tokens // (ranges * _LONGEST + 1) + 1) * ranges
    return ranges, triton.cdiv(triton.cdiv(tokens, ranges), block) * block


def finish(
    parts: torch.Tensor, sums: torch.Tensor, n: int, w: torch.Tensor, scale: torch.Tensor,
    base: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dW, dscale, dbase) in the dtypes of W, scale and base, from the parts of their sums."""
    dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    dscale = torch.empty(scale.shape, dtype=scale.dtype, device=w.device)
    dbase = torch.empty(base.shape, dtype=base.dtype, device=w.device)
    block, size = 2048, w.shape[0] * w.shape[1]
    programs = triton.cdiv(size, block) + base.shape[0] + scale.shape[0]
    wrap_triton(finish_kernel)[(programs,)](
        parts, sums, dw, dscale, dbase, size, sums.shape[2], parts.shape[0],
        N=n, M=base.shape[0], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return dw, dscale, dbase


def backward(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    mixes: torch.Tensor, sqrsum: torch.Tensor, added: torch.Tensor | None,
    du: torch.Tensor | None, dpost: torch.Tensor | None, dcomb: torch.Tensor | None, iters: int,
    rms_eps: float, pre_eps: float, eps: float, post_mult: float, powers: bool = False,
    chosen: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dX, dW, dscale, dbase) of X [T, n, H], all contiguous; a collapse's if base has n elements.

    ``added`` [T, n, H] is another part of dX, added before it is rounded.
    """
    tokens, n, hidden = x.shape
    m = w.shape[0]
    draw, coefficients, sums = slopes(
        x, scale, base, mixes, sqrsum, du, dpost, dcomb, iters, rms_eps, pre_eps, eps, post_mult,
        powers,
    )  # fmt: skip
    chosen = chosen or tile(n, hidden, x.dtype, tokens=tokens)
    ranges, length = ranges_of(tokens, chosen.ranges, chosen.tokens)
    dx = torch.empty((tokens, n, hidden), dtype=x.dtype, device=x.device)
    parts = torch.empty((ranges, m, n * hidden), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(hidden, chosen.columns) * (n // chosen.streams), ranges)
    wrap_triton(gradient_kernel)[grid](
        x, x if du is None else du, w, draw, coefficients, x if added is None else added, dx,
        parts, tokens, hidden, length,
        N=n, M=m, P=padded(m), G=chosen.streams, BT=chosen.tokens, BH=chosen.columns,
        AHEAD=chosen.ahead, HAS_DU=du is not None, HAS_ADDED=added is not None,
        HIDDEN_OF=divisor(hidden), EVEN=even(hidden, chosen.columns), num_warps=chosen.warps,
        num_stages=1,
    )  # fmt: skip
    return dx, *finish(parts, sums, n, w, scale, base)
