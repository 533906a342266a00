# mypy: disable-error-code="assignment"
"""The projection of mHC: ``W u`` of u = vec(X), X [T, n, H], in one read of X.

H is cut into GROUPS runs of whole blocks. A group is summed from zero, over its blocks and in each
over the streams; groups are added in a binary tree. A program takes 2^LOG neighbouring groups of a
tile of tokens and adds them up, whoever reads the partials goes on in the same tree: with equal
GROUPS the bits of a token depend neither on T nor on how the work was cut.

bf16 meets W in bf16: W is the sum of 3 such parts to the last bit of fp32, of 2 to more than tf32
has. They stand side by side in one product, so that it reads X from shared memory once. fp16 and
fp32 meet it in tf32, each operand cut into 2 parts for full precision.

The loads of X are pipelined, so nothing but the product may read it: triton 3.6 overwrites an
operand that is also computed with too early (relative errors up to 3e-3, at full occupancy only).
The sum of squares is left to who reads X next.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .dependent import in_turn, launched
from .tilings import tunable

FEW = 1024  # tokens
# Up to so many a program cuts its block of W itself, which is a launch less.
AT_ONCE_TOKENS = 128


@triton.jit
def to_tf32(x):
    """x rounded to tf32: the tensor cores would cut it off, which is 2.6 times less exact."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def bf16_parts(w):
    """Three matrices in bf16 whose sum is w, the largest first."""
    high = w.to(tl.bfloat16)
    rest = w - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def project(x, w, acc, PARTS: tl.constexpr):
    """``acc + x w^T`` for x [rows, k]; bf16 x meets the parts of w [parts and columns, k] side by
    side, other x a w of their own [columns, k]."""
    if x.dtype == tl.bfloat16:
        acc = tl.dot(x, tl.trans(w), acc)
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
def joined(acc, SLOTS: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """The products with the parts, added: two at a time, whose order is no matter of layouts."""
    if SLOTS == 4:
        acc = tl.sum(tl.reshape(acc, (BM, 2, 2, CP)), 2)
        return tl.sum(acc, 1)
    elif SLOTS == 2:
        return tl.sum(tl.reshape(acc, (BM, 2, CP)), 1)
    else:
        return acc


@triton.jit
def group_range(group, hidden, BK: tl.constexpr, GROUPS: tl.constexpr):
    """(first block, number of blocks) of a group."""
    blocks = tl.cdiv(hidden, BK)
    each = tl.cdiv(blocks, GROUPS)
    first = group * each
    return first, tl.maximum(tl.minimum(each, blocks - first), 0)


@triton.jit
def group_sums(
    X, W, local, rows, hidden, group, x_token, x_stream,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, SLOTS: tl.constexpr, TURNS: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """W u over one group; X begins at the first of the ``local`` tokens, of which there are
    ``rows``."""
    first, blocks = group_range(group, hidden, BK, GROUPS)
    acc = tl.zeros((BM, SLOTS * CP), tl.float32)
    k = tl.arange(0, BK)
    # Within a tile 32 bits suffice, of which the registers are fewer.
    x_at = local[:, None] * x_token + k[None, :]
    slot = tl.arange(0, SLOTS * CP)
    part, column = slot // CP, slot % CP
    w_at = (part * C + column)[:, None] * (N * hidden) + k[None, :]
    x_mask, w_mask = local[:, None] < rows, ((part < PARTS) & (column < C))[:, None]
    for step in range(0, blocks * N):
        stream, h = step % N, (first + step // N) * BK
        x_here, w_here = x_mask, w_mask
        if not EVEN:
            x_here = x_here & (h + k[None, :] < hidden)
            w_here = w_here & (h + k[None, :] < hidden)
        x = tl.load(X + (stream * x_stream + h) + x_at, mask=x_here, other=0.0)
        for turn in tl.static_range(TURNS):
            at = (stream * hidden + h) + w_at + turn * C * N * hidden
            w = tl.load(W + at, mask=w_here, other=0.0)
            acc = project(x, w, acc, PARTS)
    return joined(acc, SLOTS, CP, BM)


@triton.jit
def one_block(
    X, W, local, rows, hidden, group, x_token, x_stream,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """As ``group_sums`` of groups that are one block each, W not cut: all is loaded at once."""
    k = group * BK + tl.arange(0, BK)
    x_at = local[:, None] * x_token + k[None, :]
    column = tl.arange(0, CP)
    w_at = column[:, None] * (N * hidden) + k[None, :]
    x_here, w_here = local[:, None] < rows, (column < C)[:, None]
    if not EVEN:
        x_here, w_here = x_here & (k[None, :] < hidden), w_here & (k[None, :] < hidden)
    xs, ws = (), ()
    for i in tl.static_range(N):
        ws = ws + (tl.load(W + i * hidden + w_at, mask=w_here, other=0.0),)
        xs = xs + (tl.load(X + i * x_stream + x_at, mask=x_here, other=0.0),)
    # The parts' products apart, whose operands go to shared memory as they are: the same bits.
    total = tl.zeros((BM, CP), tl.float32)
    for part in tl.static_range(PARTS):
        acc = tl.zeros((BM, CP), tl.float32)
        for i in tl.static_range(N):
            acc = project(xs[i], bf16_parts(ws[i])[part], acc, PARTS)
        total += acc
    return total


@triton.jit
def projection_kernel(
    X, W, P, tokens, hidden, x_token, x_stream,
    N: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, SLOTS: tl.constexpr, TURNS: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, LOG: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """P [S, tokens, C]: sums of 2^LOG groups each."""
    in_turn(PDL)
    start = tl.program_id(0) * BM
    local = tl.arange(0, BM)
    part = tl.program_id(1)
    group = part << LOG
    X += start.to(tl.int64) * x_token
    # The tree as loops: each level adds the two of the level below, from zero. 0 + x is x.
    total = tl.zeros((BM, CP), tl.float32)
    for _ in range(2 if LOG > 2 else 1):
        fours = tl.zeros((BM, CP), tl.float32)
        for _ in range(2 if LOG > 1 else 1):
            twos = tl.zeros((BM, CP), tl.float32)
            for _ in range(2 if LOG > 0 else 1):
                if AT_ONCE:
                    twos += one_block(
                        X, W, local, tokens - start, hidden, group, x_token, x_stream,
                        N, C, CP, PARTS, BM, BK, EVEN,
                    )  # fmt: skip
                else:
                    twos += group_sums(
                        X, W, local, tokens - start, hidden, group, x_token, x_stream,
                        N, C, CP, SLOTS, TURNS, PARTS, BM, BK, EVEN, GROUPS,
                    )  # fmt: skip
                group += 1
            fours += twos
        total += fours
    column, row = tl.arange(0, CP), start + local
    at = P + (tl.cast(tokens, tl.int64) * part + row)[:, None] * C + column[None, :]
    tl.store(at, total, mask=(row[:, None] < tokens) & (column[None, :] < C))


@triton.jit
def cut_kernel(W, OUT, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """OUT [PARTS, size] in bf16: the parts of W."""
    in_turn(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(W + i, mask=i < size, other=0.0)
    parts = bf16_parts(w)
    for part in tl.static_range(PARTS):
        tl.store(OUT + part * size + i, parts[part], mask=i < size)


# --- launches -------------------------------------------------------------------------------------


def parts_of(x: torch.dtype, w: torch.dtype, precision: str) -> int:
    """Of W for bf16 X, else of each operand that is wider than tf32."""
    if x == torch.bfloat16:
        return 1 if w == torch.bfloat16 else 3 if precision == "ieee" else 2
    return 2 if precision == "ieee" else 1


def block(x: torch.dtype) -> int:
    """Columns of a stream that are taken at a time: a group consists of whole blocks."""
    return 64 if x == torch.bfloat16 else 32


def splits(hidden: Any, x: torch.dtype, groups: int, log: int) -> int:
    """The number of partials of 2^log groups each; groups beyond H are left out at the end."""
    if not isinstance(hidden, int):
        return groups >> log
    blocks = triton.cdiv(max(hidden, 1), block(x))
    return triton.cdiv(triton.cdiv(blocks, triton.cdiv(blocks, groups)), 1 << log)


@tunable(
    "mhc_pre", "projection", "tokens hidden",
    scaled="BM", warps="num_warps", stages="num_stages", counted="LOG", flipped="BEFORE",
)  # fmt: skip
def tiling(tokens: Any, n: int, x: torch.dtype) -> dict[str, Any]:
    """BM tokens, 64 per four warps, and 2^LOG of GROUPS groups per program, LOG up to 3; whether
    W is cut into its parts BEFORE, once, also where a program could. Only GROUPS changes bits.

    Up to FEW tokens many short groups let as many programs work; beyond them a group is long, as
    the pipeline of loads starts anew with each.
    """
    most = tokens if isinstance(tokens, int) else FEW + 1
    if most <= FEW:
        log = 0 if most <= 128 else 1
        chosen = {"GROUPS": 128, "LOG": log, "BM": 64, "num_warps": 4, "num_stages": 4}
    else:
        # Of 8 groups a sum is twice as long, and the tensor cores cut it off at every step.
        chosen = {"GROUPS": 16, "LOG": 1, "BM": 128, "num_warps": 8, "num_stages": 3}
    chosen["BEFORE"] = most > AT_ONCE_TOKENS
    if x != torch.bfloat16:
        chosen |= {"BM": 64, "num_warps": 4, "num_stages": 1}  # its operands are computed with
        if most > FEW:  # tensor cores cut a sum's last bits off at every step
            chosen |= {"GROUPS": 32, "LOG": 2}
    elif n == 8:
        chosen |= {"GROUPS": 8, "LOG": 0} if most > FEW else {}
        chosen |= {"BM": 64, "num_warps": 4, "num_stages": 2}
    return chosen


def weights(
    x: torch.dtype, w: torch.Tensor, precision: str, at_once: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """W as the kernels take it, [parts, columns, n H] unless it is cut ``at_once``, and how."""
    columns = w.shape[0]
    parts = parts_of(x, w.dtype, precision)
    side = parts if x == torch.bfloat16 else 1
    padded = triton.next_power_of_2(columns)
    turns = side if padded > 32 else 1  # n = 8: side by side they would fill the registers
    slots = triton.next_power_of_2(side // turns)
    width = max(padded, 16 if at_once else 16 // slots)
    if x == torch.bfloat16 and w.dtype != torch.bfloat16 and not at_once:
        size = w.numel()
        out = torch.empty((parts, *w.shape), dtype=torch.bfloat16, device=w.device)
        launched(cut_kernel, wrap_triton(cut_kernel), w, ((size + 1023) // 1024,))(
            w, out, size, PARTS=parts, BLOCK=1024, num_warps=4
        )
        w = out
    how = {"C": columns, "CP": width, "SLOTS": slots, "TURNS": turns, "PARTS": parts}
    return w, how


def partials(
    x: torch.Tensor, w: torch.Tensor, precision: str, chosen: dict[str, Any] | None = None
) -> torch.Tensor:
    """P [S, T, columns] in fp32 of x [T, n, H], last dimension dense, and w."""
    tokens, n, hidden = x.shape
    chosen = dict(chosen or tiling(tokens, n, x.dtype, hidden=hidden))
    # Where a group is one block, and all its parts of W fit into the registers.
    short = isinstance(hidden, int) and hidden <= chosen["GROUPS"] * block(x.dtype)
    wide = x.dtype == torch.bfloat16 and w.dtype != torch.bfloat16
    few = n <= 4 and w.shape[0] <= 32
    at_once = not chosen.pop("BEFORE") and wide and short and few
    if at_once:
        chosen["num_stages"] = 1  # there is nothing to pipeline but groups
    w, how = weights(x.dtype, w, precision, at_once)
    s = splits(hidden, x.dtype, chosen["GROUPS"], chosen["LOG"])
    p = torch.empty((s, tokens, how["C"]), dtype=torch.float32, device=x.device)
    grid = ((tokens + chosen["BM"] - 1) // chosen["BM"], s)
    launched(projection_kernel, wrap_triton(projection_kernel), x, grid)(
        x, w, p, tokens, hidden, x.stride(0), x.stride(1), N=n, BK=block(x.dtype),
        EVEN=isinstance(hidden, int) and hidden % block(x.dtype) == 0, AT_ONCE=at_once, **how,
        **chosen,
    )  # fmt: skip
    return p
