"""Attention over short lists of entries for Hopper: all entries of a program on their way at once.

The same formula and parts as ``sparse_attention``. A program has up to ENTRIES of a list: their
indices are read, and all copies of entries are asked for before the first product waits for one,
in slabs of WIDTH numbers, which the products of the scores take as they come. So the memory has as
many reads in flight as shared memory holds, and there is one softmax instead of one per block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .dependent import in_turn


@gluon.jit
def gather_kernel(
    Q, KV, INDICES, OUT, STATS, tokens, heads, entries, topk, part, scale, q_b, q_t, q_h, kv_b,
    kv_s, i_b, i_t, DV: gl.constexpr, REST: gl.constexpr, ENTRIES: gl.constexpr,
    HEADS: gl.constexpr, WIDTH: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """o of the parts [B T, splits, H, dv] in fp32, not yet divided, and their m, l in ``STATS``
    [B T, splits, H, 2]. ``scale`` is in units of log 2."""
    slabs: gl.constexpr = DV // WIDTH
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEADS, 16])
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    dtype: gl.constexpr = KV.dtype.element_ty
    split = gl.program_id(0) % SPLITS
    line = gl.cast(gl.program_id(0) // SPLITS, gl.int64)
    b = line // tokens
    t = line % tokens
    first = split * part
    last = gl.minimum(first + part, topk)
    kv = gl.allocate_shared_memory(dtype, [slabs, ENTRIES, WIDTH], wide)
    queries = gl.allocate_shared_memory(dtype, [slabs, HEADS, WIDTH], wide)
    if PDL:
        in_turn(PDL)
    j = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, copies))
    at = gl.load(INDICES + b * i_b + t * i_t + first + j, mask=first + j < last, other=-1)
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, copies))
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, copies))
    e = gl.arange(0, REST if REST else 64, layout=gl.SliceLayout(0, copies))
    q_at = Q + b * q_b + t * q_t + gl.expand_dims(row * q_h, 1)
    real = gl.expand_dims(row < heads, 1)
    there = (at >= 0) & (at < entries)
    entry = KV + b * kv_b + gl.expand_dims(gl.cast(at, gl.int64) * kv_s, 1)
    known = gl.expand_dims(there, 1)
    for n in gl.static_range(slabs):
        q = gl.expand_dims(n * WIDTH + d, 0)
        async_copy.async_copy_global_to_shared(queries.index(n), q_at + q, mask=real)
    if REST:
        more_queries = gl.allocate_shared_memory(dtype, [HEADS, REST], wide)
        q = gl.expand_dims(DV + e, 0)
        async_copy.async_copy_global_to_shared(more_queries, q_at + q, mask=real)
        more = gl.allocate_shared_memory(dtype, [ENTRIES, REST], wide)
        async_copy.async_copy_global_to_shared(more, entry + q, mask=known)
    for n in gl.static_range(slabs):
        k = gl.expand_dims(n * WIDTH + d, 0)
        async_copy.async_copy_global_to_shared(kv.index(n), entry + k, mask=known)
        async_copy.commit_group()
    s = gl.zeros((ENTRIES, HEADS), gl.float32, layout=products)
    for n in gl.static_range(slabs):
        async_copy.wait_group(slabs - 1 - n)
        fence_async_shared()
        gl.thread_barrier()
        if REST and n == 0:
            s = warpgroup_mma(more, more_queries.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(kv.index(n), queries.index(n).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    here = gl.convert_layout(there, gl.SliceLayout(1, products))
    r = gl.where(gl.expand_dims(here, 1), s * scale, float("-inf"))
    m = gl.max(r, axis=0)
    p = gl.exp2(r - gl.expand_dims(gl.where(m == float("-inf"), 0.0, m), 0))
    sums = gl.sum(p, axis=0)
    # An index that no entry has: the token's result is NaN.
    astray = gl.max(gl.cast((at < -1) | (at >= entries), gl.int32), axis=0)
    sums = gl.where(astray > 0, float("nan"), sums)
    weights = gl.allocate_shared_memory(dtype, [ENTRIES, HEADS], narrow, p.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    column = gl.arange(0, HEADS, layout=gl.SliceLayout(0, products))
    slot = (line * SPLITS + split) * heads + column
    gl.store(STATS + slot * 2, m, mask=column < heads)
    gl.store(STATS + slot * 2 + 1, sums, mask=column < heads)
    place = OUT + gl.expand_dims(slot * DV, 0)
    place += gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(1, products)), 1)
    stored = gl.expand_dims(column < heads, 0)
    none = gl.zeros((WIDTH, HEADS), gl.float32, layout=products)
    for n in gl.static_range(slabs):
        o = warpgroup_mma(kv.index(n).permute((1, 0)), weights, none, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        gl.store(place + n * WIDTH, o, mask=stored)
