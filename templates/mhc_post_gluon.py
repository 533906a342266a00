# mypy: disable-error-code="assignment,misc"
"""X' behind a layer, and the next one's projection where X' is made, for Hopper.

    X'_j = post_j Y + sum_i comb[i, j] X_i          P = W vec(X'), X' rounded first

A program owns a slab of BLOCKS blocks of columns of all 4 streams, whose part of W stays in shared
memory, and walks over tiles of tokens. One warp copies blocks into a ring of STAGES places; two
consumers have a tile each: X' takes the place of X, from where it is copied out and multiplied.
While one waits for its products or its copies the other one mixes. Each slab has its own part of P.

No product is in flight where a loop comes round: ptxas would wait behind every one of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

if hasattr(tma, "async_load"):  # triton 3.9
    load, store = tma.async_load, tma.async_store
else:
    load, store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

N = gl.constexpr(4)
CONSUMERS = gl.constexpr(2)


@gluon.jit
def coefficients(POST, COMB, t, tokens, strides):
    """post and comb, row by row as [in, out], of one token per thread, in fp32."""
    post_token, post_stream, comb_token, comb_in, comb_out = strides
    here = t < tokens
    t = t.to(gl.int64)
    found = ()
    for j in gl.static_range(N):
        at = POST + (t * post_token + j * post_stream)
        found = found + (gl.load(at, mask=here, other=0.0).to(gl.float32),)
    for i in gl.static_range(N):
        for j in gl.static_range(N):
            at = COMB + (t * comb_token + (i * comb_in + j * comb_out))
            found = found + (gl.load(at, mask=here, other=0.0).to(gl.float32),)
    return found


@gluon.jit
def share(tokens, ranges, ROWS: gl.constexpr):
    """(slab, first tile, pairs of tiles) of a program, which takes every ``ranges``-th tile."""
    first = gl.program_id(0) % ranges
    tiles = ((tokens + ROWS - 1) // ROWS - first + ranges - 1) // ranges
    return gl.program_id(0) // ranges, first, (tiles + CONSUMERS - 1) // CONSUMERS


@gluon.jit
def produce(descs, shared, C: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr):
    """Start all copies into shared memory. Of two tiles the blocks come in turns."""
    x_desc, y_desc, w_desc = descs
    x_buffers, y_buffers, w_buffers, ready, empty, w_ready, tokens, hidden, ranges = shared
    STAGES: gl.constexpr = y_buffers.shape[0]
    ROWS: gl.constexpr = y_buffers.shape[1]
    COLUMNS: gl.constexpr = y_buffers.shape[2]
    MATRICES: gl.constexpr = BLOCKS * N * PARTS
    BYTES: gl.constexpr = N * x_desc.block_type.nbytes + y_desc.block_type.nbytes
    slab, first, pairs = share(tokens, ranges, ROWS)
    column = slab * (COLUMNS * BLOCKS)
    mbarrier.expect(w_ready.index(0), MATRICES * w_desc.block_type.nbytes)
    for m in gl.static_range(MATRICES):
        at = [m % PARTS * C, m // PARTS % N * hidden + column + m // (N * PARTS) * COLUMNS]
        load(w_desc, at, w_ready.index(0), w_buffers.index(m))
    for block in range(0, pairs * (BLOCKS * CONSUMERS)):
        place = block % STAGES
        # A ring's first lap waits for the phase before the first, which counts as complete.
        mbarrier.wait(empty.index(place), ((block // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(place), BYTES)
        turn = block // (BLOCKS * CONSUMERS) * CONSUMERS + block % CONSUMERS
        t = (first + turn * ranges) * ROWS
        h = column + block // CONSUMERS % BLOCKS * COLUMNS
        load(y_desc, [t, h], ready.index(place), y_buffers.index(place))
        for i in gl.static_range(N):
            at = [t, i * hidden + h]
            load(x_desc, at, ready.index(place), x_buffers.index(place * N + i))


@gluon.jit
def mix(x_buffers, y_buffers, place, known, layout: gl.constexpr):
    """X' in place of X."""
    y = y_buffers.index(place).load(layout).to(gl.float32)
    x = ()
    for i in gl.static_range(N):
        x = x + (x_buffers.index(place * N + i).load(layout).to(gl.float32),)
    for j in gl.static_range(N):
        # As ``mhc_post.mixed``, to the bit.
        total = gl.expand_dims(known[j], 1) * y
        for i in gl.static_range(N):
            total = gl.fma(gl.expand_dims(known[N + N * i + j], 1), x[i], total)
        x_buffers.index(place * N + j).store(total.to(y_buffers.dtype))


@gluon.jit
def consume(
    results, shared, C: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Every second tile of a program."""
    out_desc, P, POST, COMB, strides = results
    x_buffers, y_buffers, w_buffers, ready, empty, w_ready, tokens, hidden, ranges = shared
    STAGES: gl.constexpr = y_buffers.shape[0]
    ROWS: gl.constexpr = y_buffers.shape[1]
    COLUMNS: gl.constexpr = y_buffers.shape[2]
    WIDE: gl.constexpr = w_buffers.shape[1]
    WARPS: gl.constexpr = ROWS // 16
    slab, first, pairs = share(tokens, ranges, ROWS)
    column = slab * (COLUMNS * BLOCKS)
    # A thread has one token.
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32, 1], [ROWS // 32, WARPS * 32 // ROWS], [1, 0]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16])
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
    c = gl.expand_dims(gl.arange(0, WIDE, layout=gl.SliceLayout(0, sums)), 0)
    P += gl.cast(slab, gl.int64) * tokens * C
    tile = first + WHICH * ranges
    known = coefficients(POST, COMB, tile * ROWS + local, tokens, strides)
    mbarrier.wait(w_ready.index(0), 0)
    for pair in range(0, pairs):
        following = tile + CONSUMERS * ranges
        zeros = gl.zeros((ROWS, WIDE), gl.float32, layout=sums)
        accs = ()
        for _ in gl.static_range(PARTS):
            accs = accs + (zeros,)
        for b in range(0, BLOCKS):
            block = (pair * BLOCKS + b) * CONSUMERS + WHICH
            place = block % STAGES
            mbarrier.wait(ready.index(place), (block // STAGES) & 1)
            mix(x_buffers, y_buffers, place, known, layout)
            fence_async_shared()
            gl.thread_barrier()
            for j in gl.static_range(N):
                at = [tile * ROWS, j * hidden + column + b * COLUMNS]
                store(out_desc, at, x_buffers.index(place * N + j))
            # The parts of W one beside another: chains of products of their own.
            started = ()
            for part in gl.static_range(PARTS):
                started = started + (warpgroup_mma_init(accs[part]),)
            for j in gl.static_range(N):
                added = ()
                for part in gl.static_range(PARTS):
                    w = w_buffers.index((b * N + j) * PARTS + part).permute((1, 0))
                    acc = warpgroup_mma(
                        x_buffers.index(place * N + j), w, started[part], is_async=True
                    )
                    added = added + (acc,)
                started = added
            # On their way while products are computed: a tile's last block is followed by others.
            t = gl.where(b == BLOCKS - 1, following, tile) * ROWS + local
            known = coefficients(POST, COMB, t, tokens, strides)
            if PARTS == 1:
                accs = (warpgroup_mma_wait(0, deps=started),)
            else:
                accs = warpgroup_mma_wait(0, deps=started)
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
        total = accs[0]
        for part in gl.static_range(1, PARTS):
            total += accs[part]
        t = tile * ROWS + rows
        here = gl.expand_dims(t < tokens, 1) & (c < C)
        gl.store(P + (gl.expand_dims(t, 1) * C + c), total, here)
        tile = following


@gluon.jit(do_not_specialize=["tokens", "ranges"])
def post_projection_kernel(
    x_desc, y_desc, w_desc, out_desc, P, POST, COMB, tokens, hidden, ranges, strides,
    C: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """P [slabs, tokens, C]. The ``ranges`` programs of a slab take tiles in turns."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    WIDE: gl.constexpr = w_desc.block_type.shape[0]
    dtype: gl.constexpr = x_desc.dtype
    x_buffers = gl.allocate_shared_memory(dtype, [STAGES * N, ROWS, COLUMNS], x_desc.layout)
    y_buffers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], y_desc.layout)
    w_buffers = gl.allocate_shared_memory(dtype, [BLOCKS * N * PARTS, WIDE, COLUMNS], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(w_ready.index(0), count=1)
    fence_async_shared()
    shared = (x_buffers, y_buffers, w_buffers, ready, empty, w_ready, tokens, hidden, ranges)
    results = (out_desc, P, POST, COMB, strides)
    gl.warp_specialize(
        [
            (consume, (results, shared, C, PARTS, BLOCKS, 0)),
            (consume, (results, shared, C, PARTS, BLOCKS, 1)),
            (produce, ((x_desc, y_desc, w_desc), shared, C, PARTS, BLOCKS)),
        ],
        [ROWS // 16, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
