"""Where the other documents' tiles are: what a tile of rows, or of keys, meets of its documents.

Queries and keys carry a document's number each, and a pair is kept only if they are equal. For a
tile of one axis the kernel finds the shortest range of the other axis outside of which no number
lies between the tile's least and greatest, and, where the tile is of one document and so is all of
that range, that the range is kept whole as far as documents go. Documents need not be in order;
where they are, as packed sequences have them, a tile meets its own documents and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .attention_program import Program

CHUNK = 4096


@triton.jit(do_not_specialize=["size", "others"])
def hull_kernel(
    own_ptr, own_b, own_h, own_s, other_ptr, other_b, other_h, other_s, hull_ptr, size, others,
    heads, tiles, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    at = tl.minimum(tile * BLOCK + tl.arange(0, BLOCK), size - 1)  # the last one again
    own_ptr += tl.cast(b, tl.int64) * own_b + tl.cast(h, tl.int64) * own_h
    own = tl.load(own_ptr + at.to(tl.int64) * own_s)
    least = tl.min(own, 0)
    greatest = tl.max(own, 0)
    other_ptr += tl.cast(b, tl.int64) * other_b + tl.cast(h, tl.int64) * other_h
    lo = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    hi = tl.zeros([CHUNK], tl.int32)
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(0, others, CHUNK):
        place = start + tl.arange(0, CHUNK)
        there = place < others
        other = tl.load(other_ptr + place.to(tl.int64) * other_s, there, other=0)
        meets = there & (other >= least) & (other <= greatest)
        lo = tl.minimum(lo, tl.where(meets, place, 0x7FFFFFFF))
        hi = tl.maximum(hi, tl.where(meets, place + 1, 0))
        count += meets.to(tl.int32)
    first = tl.min(lo, 0)
    last = tl.max(hi, 0)
    whole = (least == greatest) & (tl.sum(count, 0) == last - first)
    hull_ptr += (tl.cast(tl.program_id(1), tl.int64) * tiles + tile) * 4
    tl.store(hull_ptr, tl.minimum(first, last))
    tl.store(hull_ptr + 1, last)
    tl.store(hull_ptr + 2, tl.where(whole, first, 0))
    tl.store(hull_ptr + 3, tl.where(whole, last, 0))


def hulls(program: Program, inputs: Any, axis: str, block: int) -> Tensor:
    """[B or 1, H or 1, tiles, 4] in int32: lo, hi, full_lo, full_hi along the other axis for each
    tile of ``block`` along ``axis`` ("q" or "k"), of the documents of ``program``. Empty ranges are
    0 to 0. Batch and heads are 1 where no document's number varies along them."""
    assert program.documents is not None
    q_ids, k_ids = (inputs[i] for i in program.documents)
    (own, other) = (q_ids, k_ids.mT) if axis == "q" else (k_ids.mT, q_ids)
    given = [program.inputs[i].axes for i in program.documents]
    batch, heads = (
        max(own.shape[dim], other.shape[dim]) if any(name in axes for axes in given) else 1
        for dim, name in enumerate("bh")
    )
    size, others = own.shape[2], other.shape[2]
    tiles = triton.cdiv(size, block)
    found = torch.empty((batch, heads, tiles, 4), dtype=torch.int32, device=own.device)
    wrap_triton(hull_kernel)[(tiles, batch * heads)](
        own, *_strides(own), other, *_strides(other), found, size, others, heads, tiles,
        BLOCK=block, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return found


def _strides(ids: Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(ids.shape[:3], ids.stride()[:3], strict=True))


def hull_values(found: Tensor) -> dict[str, Any]:
    """What a kernel is passed for ``doc_ptr``, ``doc_b``, ``doc_h``."""
    steps = [0 if n == 1 else s for n, s in zip(found.shape[:2], found.stride()[:2], strict=True)]
    return {"doc_ptr": found, "doc_b": steps[0], "doc_h": steps[1]}
