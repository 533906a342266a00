"""Attention of every token over its own list of entries of a latent cache (multi-query, absorbed).

    s_j = scale q . kv[index_j]      p = softmax of s      out = sum p_j kv[index_j][:dv]

What is a key is also, in its first dv numbers, its value: entries are gathered once. Tiles are
entries x heads, so that the entries fill the 64 rows of a wgmma and few heads are its columns; the
values' product reads the same shared memory transposed. A list is cut into equal parts, whose
(m, l, o) a second launch merges exactly, in the order of the list.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from .attention_text import kernel_of
from .dependent import in_turn

_ARGUMENTS = [
    "Q", "KV", "INDICES", "OUT", "LSE", "STATS", "tokens", "heads", "entries", "topk", "part",
    "scale", "q_b", "q_t", "q_h", "kv_b", "kv_s", "i_b", "i_t", "out_b", "out_t", "out_h",
]  # fmt: skip
_CONSTANTS = ["DV", "REST", "HEADS", "BLOCK", "SPLITS", "STAGES", "PRECISION", "PDL"]

_BODY = """scale = tl.cast(scale, tl.float32)
split = tl.program_id(0) % SPLITS
line = (tl.program_id(0) // SPLITS).to(tl.int64)
b = line // tokens
t = line % tokens
head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
real = head < heads
first = split * part
last = tl.minimum(first + part, topk)
KV += b * kv_b
INDICES += b * i_b + t * i_t
in_turn(PDL)
# The first 128 at once, so that the blocks' own loads, each a chain of two, find them near.
early = first + tl.arange(0, 128)
named = tl.load(INDICES + early, mask=early < last, other=-1)
j = tl.arange(0, BLOCK)
coming = tl.load(INDICES + first + j, mask=first + j < last, other=-1)
q_at = Q + b * q_b + t * q_t + (head * q_h)[:, None]
{queries}
outside = tl.zeros([BLOCK], tl.int32)
m = tl.full([HEADS], -float("inf"), tl.float32)
sums = tl.zeros([BLOCK, HEADS], tl.float32)
{zeros}
for i in tl.range(first, last, BLOCK, num_stages=STAGES):
    at = coming
    ahead = i + BLOCK + j
    coming = tl.load(INDICES + ahead, mask=ahead < last, other=-1)
    there = (at >= 0) & (at < entries)
    outside |= ((at < -1) | (at >= entries)).to(tl.int32)
    entry = KV + at.to(tl.int64)[:, None] * kv_s
    {keys}
    {scores}
    r = tl.where(there[:, None], ({sum}) * scale, -float("inf"))
    higher = tl.maximum(m, tl.max(r, 0))
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(r - shift[None, :])
    faded = tl.exp2(m - shift)
    sums = sums * faded[None, :] + p
    m = higher
    narrow = p.to(KV.dtype.element_ty)
    {values}
# Over warps only once.
sums = tl.sum(sums, 0)
# An index that no entry has: the token's result is NaN.
astray = tl.max(outside, 0) + tl.max(((named < -1) | (named >= entries)).to(tl.int32), 0)
sums = tl.where(astray > 0, float("nan"), sums)
if SPLITS == 1:
    place = OUT + b * out_b + t * out_t + (head * out_h)[None, :]
    tl.store(LSE + line * heads + head, (m + tl.log2(sums)) * 0.6931471805599453, mask=real)
else:
    place = OUT + ((line * SPLITS + split) * heads + head)[None, :] * DV
    stats = STATS + ((line * SPLITS + split) * heads + head) * 2
    tl.store(stats, m, mask=real)
    tl.store(stats + 1, sums, mask=real)
{results}"""

_RESULT = """if SPLITS == 1:
    o{n} = tl.where((sums == 0.0)[None, :], 0.0, o{n} / sums[None, :])
tl.store(place + d{n}[:, None], o{n}.to(OUT.dtype.element_ty), mask=real[None, :])"""


@functools.cache
def gather_kernel(value: int, rest: int, width: int) -> Any:
    """The kernel of entries of ``value`` numbers and ``rest`` more, in pieces of ``width``.

    ``OUT``: with one split the result; else o of the parts [B T, splits, H, dv] in fp32, not yet
    divided, and their m, l in ``STATS`` [B T, splits, H, 2]. ``scale`` is in units of log 2."""
    starts = list(range(0, value, width))
    sizes = [width] * len(starts)
    of_values = range(len(starts))
    if rest:
        starts, sizes = [*starts, value], [*sizes, rest]
    every = range(len(starts))

    def lines(text: str, which: range, by: int = 4) -> str:
        found = [text.format(n=n, start=starts[n], size=sizes[n]) for n in which]
        return ("\n" + " " * by).join(found)

    body = _BODY.format(
        queries=lines(
            "d{n} = {start} + tl.arange(0, {size})\n"
            "q{n} = tl.load(q_at + d{n}[None, :], mask=real[:, None], other=0.0)",
            every, 0,
        ),
        zeros=lines("o{n} = tl.zeros([{size}, HEADS], tl.float32)", of_values, 0),
        keys=lines(
            "k{n} = tl.load(entry + d{n}[None, :], mask=there[:, None], other=0.0)", every
        ),
        scores=lines("s{n} = tl.dot(k{n}, tl.trans(q{n}), input_precision=PRECISION)", every),
        sum=" + ".join(f"s{n}" for n in every),
        values=lines(
            "o{n} = o{n} * faded[None, :]\n"
            "    o{n} = tl.dot(tl.trans(k{n}), narrow, o{n}, input_precision=PRECISION)",
            of_values,
        ),
        results=lines(_RESULT, of_values, 0),
    )  # fmt: skip
    return kernel_of("gather", _ARGUMENTS, _CONSTANTS, body, {"in_turn": in_turn})


@triton.jit
def merge_kernel(
    PARTS, STATS, OUT, LSE, tokens, heads, out_b, out_t, out_h, DV: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token, head and COLUMNS of the result."""
    slabs: tl.constexpr = DV // COLUMNS
    slab = tl.program_id(0) % slabs
    line = (tl.program_id(0) // slabs).to(tl.int64)
    token = line // heads
    head = line % heads
    d = slab * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, SLOTS)
    slot = (token * SPLITS + i) * heads + head
    in_turn(PDL)
    m = tl.load(STATS + 2 * slot, mask=i < SPLITS, other=-float("inf"))
    sums = tl.load(STATS + 2 * slot + 1, mask=i < SPLITS, other=0.0)
    inside = (i < SPLITS)[:, None]
    o = tl.load(PARTS + slot[:, None] * DV + d[None, :], mask=inside, other=0.0)
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight * sums, 0)
    o = tl.sum(weight[:, None] * o, 0)
    o = tl.where(total == 0.0, 0.0, o / total)
    place = OUT + token // tokens * out_b + token % tokens * out_t + head * out_h
    tl.store(place + d, o.to(OUT.dtype.element_ty))
    if slab == 0:
        tl.store(LSE + line, (top + tl.log2(total)) * 0.6931471805599453)
