"""The projection of mHC: ``W u`` and ``sum(u^2)`` of u = vec(X), X [T, n, H], in one read of X.

H is cut into GROUPS runs of whole blocks, whatever T is. A group is summed from zero, over its
blocks and in each over the streams; groups are added in a binary tree. A program takes 1, 2 or 4
neighbouring groups of a tile of tokens and adds them up, whoever reads the partials goes on in the
same tree: the bits of a token depend neither on T nor on how the work was cut.

bf16 meets W in bf16: W is the sum of 3 such parts to the last bit of fp32, of 2 to more than tf32
has. fp16 and fp32 meet it in tf32, each operand cut into 2 parts for full precision. For bf16 the
squares are summed by the tensor cores too, as the diagonal of X X^T: the compiler pipelines loads
of X, and an operand of a pipelined product must not be read by anything else in the loop (triton
3.6 then overwrites it too early). The tf32 kind does not pipeline and squares its operand plainly.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

GROUPS = 32  # a power of two
ROWS = 64  # tokens of a tile: what one matrix instruction takes


@triton.jit
def to_tf32(x):
    """x rounded to tf32: the tensor cores would cut it off, which is 2.6 times less exact."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def bf16_parts(w, PARTS: tl.constexpr):
    """``PARTS`` matrices in bf16 whose sum is w, the largest first."""
    parts = (w.to(tl.bfloat16),)
    if PARTS > 1:
        rest = w - parts[0].to(tl.float32)
        parts = parts + (rest.to(tl.bfloat16),)
        if PARTS > 2:
            parts = parts + ((rest - parts[1].to(tl.float32)).to(tl.bfloat16),)
    return parts


@triton.jit
def project(x, w, acc, PARTS: tl.constexpr):
    """``acc + x w^T`` for x [rows, k], w [columns, k] of any of the kinds."""
    if x.dtype == tl.bfloat16:
        parts = bf16_parts(w, PARTS)
        for k in tl.static_range(PARTS):
            acc = tl.dot(x, tl.trans(parts[k]), acc)
    else:
        wide, weight = x.to(tl.float32), w.to(tl.float32)
        x_high, w_high = to_tf32(wide), to_tf32(weight)
        if PARTS > 1:
            if w.dtype == tl.float32:
                low = tl.trans(weight - w_high)
                acc = tl.dot(x_high, low, acc, input_precision="tf32")
            if x.dtype == tl.float32:
                acc = tl.dot(wide - x_high, tl.trans(w_high), acc, input_precision="tf32")
        acc = tl.dot(x_high, tl.trans(w_high), acc, input_precision="tf32")
    return acc


@triton.jit
def squares_start(BM: tl.constexpr, BK: tl.constexpr, PRODUCT: tl.constexpr):
    if PRODUCT:
        return tl.zeros((BM, BM), tl.float32)
    else:
        return tl.zeros((BM, BK), tl.float32)


@triton.jit
def squares(x, acc, PRODUCT: tl.constexpr):
    if PRODUCT:
        return tl.dot(x, tl.trans(x), acc)
    else:
        wide = x.to(tl.float32)
        return acc + wide * wide


@triton.jit
def squares_end(acc, BM: tl.constexpr, PRODUCT: tl.constexpr):
    if PRODUCT:
        i = tl.arange(0, BM)
        acc = tl.where(i[:, None] == i[None, :], acc, 0.0)
    return tl.sum(acc, 1)


@triton.jit
def group_range(group, hidden, BK: tl.constexpr, GROUPS: tl.constexpr):
    """(first block, number of blocks) of a group."""
    blocks = tl.cdiv(hidden, BK)
    each = tl.cdiv(blocks, GROUPS)
    first = group * each
    return first, tl.maximum(tl.minimum(each, blocks - first), 0)


@triton.jit
def group_sums(
    X, W, local, rows, column, group, hidden, x_token, x_stream,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(W u of each tile, sum(u^2) of each tile) over one group; X begins at the first of the
    ``local`` tokens, of which there are ``rows``."""
    PRODUCT: tl.constexpr = X.dtype.element_ty == tl.bfloat16
    first, blocks = group_range(group, hidden, BK, GROUPS)
    mixes, square = (), ()
    for _ in tl.static_range(TILES):
        mixes = mixes + (tl.zeros((BM, CP), tl.float32),)
        square = square + (squares_start(BM, BK, PRODUCT),)
    k = tl.arange(0, BK)
    # Within a tile 32 bits suffice, of which the registers are fewer.
    x_at = local[:, None] * x_token + k[None, :]
    w_at = column[:, None] * (N * hidden) + k[None, :]
    for step in tl.range(0, blocks * N, num_stages=STAGES):
        stream = step % N
        h = (first + step // N) * BK
        inside = h + k[None, :] < hidden
        w_mask = column[:, None] < C
        if not EVEN:
            w_mask = w_mask & inside
        w = tl.load(W + (stream * hidden + h) + w_at, mask=w_mask, other=0.0)
        more_mixes, more_square = (), ()
        for tile in tl.static_range(TILES):
            x_mask = local[:, None] < rows - tile * BM
            if not EVEN:
                x_mask = x_mask & inside
            at = X + tl.cast(x_token, tl.int64) * (tile * BM) + (stream * x_stream + h)
            x = tl.load(at + x_at, mask=x_mask, other=0.0)
            more_mixes = more_mixes + (project(x, w, mixes[tile], PARTS),)
            more_square = more_square + (squares(x, square[tile], PRODUCT),)
        mixes, square = more_mixes, more_square
    out = ()
    for tile in tl.static_range(TILES):
        out = out + (squares_end(square[tile], BM, PRODUCT),)
    return mixes, out


@triton.jit
def zeros(TILES: tl.constexpr, BM: tl.constexpr, CP: tl.constexpr):
    mixes, square = (), ()
    for _ in tl.static_range(TILES):
        mixes = mixes + (tl.zeros((BM, CP), tl.float32),)
        square = square + (tl.zeros((BM,), tl.float32),)
    return mixes, square


@triton.jit
def plus(a_mixes, a_square, b_mixes, b_square, TILES: tl.constexpr):
    mixes, square = (), ()
    for tile in tl.static_range(TILES):
        mixes = mixes + (a_mixes[tile] + b_mixes[tile],)
        square = square + (a_square[tile] + b_square[tile],)
    return mixes, square


@triton.jit
def put_partials(P, Q, part, row, column, tokens, mixes, square, C: tl.constexpr,
                 TILES: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    for tile in tl.static_range(TILES):
        t = row + tile * BM
        at = tl.cast(tokens, tl.int64) * part + t
        here = (t[:, None] < tokens) & (column[None, :] < C)
        tl.store(P + at[:, None] * C + column[None, :], mixes[tile], mask=here)
        tl.store(Q + at, square[tile], mask=t < tokens)


@triton.jit
def projection_kernel(
    X, W, P, Q, tokens, hidden, x_token, x_stream,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr,
    LOG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P [S, tokens, C] and Q, as much without C: sums of 2^LOG groups each."""
    start = tl.program_id(0) * (TILES * BM)
    local = tl.arange(0, BM)
    part = tl.program_id(1)
    column = tl.arange(0, CP)
    group = part << LOG
    X += start.to(tl.int64) * x_token
    # The tree as loops: each level adds the two of the level below, from zero. 0 + x is x.
    fours, fours_square = zeros(TILES, BM, CP)
    for _ in range(2 if LOG > 2 else 1):
        pairs, pairs_square = zeros(TILES, BM, CP)
        for _ in range(2 if LOG > 1 else 1):
            ones, ones_square = zeros(TILES, BM, CP)
            for _ in range(2 if LOG > 0 else 1):
                mixes, square = group_sums(
                    X, W, local, tokens - start, column, group, hidden, x_token, x_stream,
                    N, C, CP, PARTS, TILES, BM, BK, EVEN, GROUPS, STAGES,
                )  # fmt: skip
                ones, ones_square = plus(ones, ones_square, mixes, square, TILES)
                group += 1
            pairs, pairs_square = plus(pairs, pairs_square, ones, ones_square, TILES)
        fours, fours_square = plus(fours, fours_square, pairs, pairs_square, TILES)
    put_partials(P, Q, part, start + local, column, tokens, fours, fours_square, C, TILES, BM)


# --- launches -------------------------------------------------------------------------------------


def parts_of(x: torch.dtype, w: torch.dtype, precision: str) -> int:
    """Of W for bf16 X, else of each operand that is wider than tf32."""
    if x == torch.bfloat16:
        return 1 if w == torch.bfloat16 else 3 if precision == "ieee" else 2
    return 2 if precision == "ieee" else 1


def block(x: torch.dtype) -> int:
    """Columns of a stream that are taken at a time: a group consists of whole blocks."""
    return 64 if x == torch.bfloat16 else 32


def splits(hidden: Any, x: torch.dtype, log: int) -> int:
    """The number of partials of 2^log groups each; groups beyond H are left out at the end."""
    if not isinstance(hidden, int):
        return GROUPS >> log
    blocks = triton.cdiv(max(hidden, 1), block(x))
    return triton.cdiv(triton.cdiv(blocks, triton.cdiv(blocks, GROUPS)), 1 << log)


def tiling(tokens: Any, n: int, x: torch.dtype) -> dict[str, Any]:
    """TILES of 64 tokens and 2^LOG groups per program: neither changes a bit, nor do STAGES.

    Few tokens: many programs of one group fill the card. Many: few partials, and three programs on
    a multiprocessor.
    """
    known = isinstance(tokens, int)
    log = 0 if known and tokens <= 128 else 1 if known and tokens <= 1024 else 2
    chosen: dict[str, Any] = {"TILES": 1, "LOG": log, "STAGES": 1, "num_warps": 4}
    if x == torch.bfloat16:
        chosen |= {"STAGES": 3, "num_warps": 8} if n == 8 else {"STAGES": 4}
        if n == 4 and log == 2:
            chosen["maxnreg"] = 168
    return chosen


def partials(
    x: torch.Tensor, w: torch.Tensor, precision: str, chosen: dict[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(P [S, T, columns], Q [S, T]) in fp32 of x [T, n, H], last dimension dense, and w."""
    tokens, n, hidden = x.shape
    columns = w.shape[0]
    chosen = chosen or tiling(tokens, n, x.dtype)
    s = splits(hidden, x.dtype, chosen["LOG"])
    p = torch.empty((s, tokens, columns), dtype=torch.float32, device=x.device)
    q = torch.empty((s, tokens), dtype=torch.float32, device=x.device)
    tile = chosen["TILES"] * ROWS
    wrap_triton(projection_kernel)[((tokens + tile - 1) // tile, s)](
        x, w, p, q, tokens, hidden, x.stride(0), x.stride(1), N=n, C=columns,
        CP=max(16, triton.next_power_of_2(columns)), PARTS=parts_of(x.dtype, w.dtype, precision),
        BM=ROWS, BK=block(x.dtype), GROUPS=GROUPS,
        EVEN=isinstance(hidden, int) and hidden % block(x.dtype) == 0, **chosen,
    )  # fmt: skip
    return p, q
