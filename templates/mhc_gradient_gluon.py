# mypy: disable-error-code="assignment,misc"
"""What ``mhc_pre_backward.gradient_kernel`` computes, for Hopper: dX and dW in one pass over X.

    dX_i = pre_i dU + W_i^T draw - f X_i + what is added,   dW_i = sum_t draw_t X_it^T

A program owns a slab of columns of all 4 streams, whose part of W stays in shared memory, and walks
over tiles of tokens. One warp copies blocks into a ring of STAGES places; two consumers have a tile
each: dX takes the place of X, from where it is copied out, and dW is in registers. While one waits
for its copies or its products the other one computes.

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
def share(tokens, turns, ROWS: gl.constexpr):
    """(slab, first tile, number of tiles) of a program, which takes every ``turns``-th tile."""
    first = gl.program_id(0) % turns
    tiles = ((tokens + ROWS - 1) // ROWS - first + turns - 1) // turns
    return gl.program_id(0) // turns, first, tiles


@gluon.jit
def produce(descs, shared, C: gl.constexpr, W_PARTS: gl.constexpr, ADDED: gl.constexpr):
    """Start all copies into shared memory."""
    x_desc, du_desc, draw_desc, added_desc, w_desc = descs
    buffers, ready, empty, w_ready, tokens, hidden, turns = shared
    x_buffers, du_buffers, draw_buffers, added_buffers, w_buffers = buffers
    STAGES: gl.constexpr = du_buffers.shape[0]
    ROWS: gl.constexpr = du_buffers.shape[1]
    COLUMNS: gl.constexpr = du_buffers.shape[2]
    STREAMS: gl.constexpr = N * x_desc.block_type.nbytes * (2 if ADDED else 1)
    BYTES: gl.constexpr = STREAMS + du_desc.block_type.nbytes + 2 * draw_desc.block_type.nbytes
    slab, first, tiles = share(tokens, turns, ROWS)
    column = slab * COLUMNS
    mbarrier.expect(w_ready.index(0), N * W_PARTS * w_desc.block_type.nbytes)
    for m in gl.static_range(N * W_PARTS):
        where = [m % W_PARTS, 0, m // W_PARTS * hidden + column]
        load(w_desc, where, w_ready.index(0), w_buffers.index(m))
    for turn in range(0, tiles):
        place = turn % STAGES
        # A ring's first lap waits for the phase before the first, which counts as complete.
        mbarrier.wait(empty.index(place), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(place), BYTES)
        t = (first + turn * turns) * ROWS
        for part in gl.static_range(2):
            load(draw_desc, [t, part * C], ready.index(place), draw_buffers.index(place * 2 + part))
        load(du_desc, [t, column], ready.index(place), du_buffers.index(place))
        for i in gl.static_range(N):
            at = [t, i * hidden + column]
            load(x_desc, at, ready.index(place), x_buffers.index(place * N + i))
            if ADDED:
                load(added_desc, at, ready.index(place), added_buffers.index(place * N + i))


@gluon.jit
def load_known(COEFFICIENTS, t, tokens):
    """The gates and f of one token per row."""
    found = ()
    for i in gl.static_range(N + 1):
        at = COEFFICIENTS + (gl.cast(tokens, gl.int64) * i + t)
        found = found + (gl.load(at, mask=t < tokens, other=0.0),)
    return found


@gluon.jit
def through_weights(
    draw_buffers, w_buffers, place, i: gl.constexpr, W_PARTS: gl.constexpr, layout: gl.constexpr
):
    """draw W_i, started: three products, one less of a W that is not split."""
    ROWS: gl.constexpr = draw_buffers.shape[1]
    WIDE: gl.constexpr = w_buffers.shape[2]
    COLUMNS: gl.constexpr = w_buffers.shape[3]
    acc = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), gl.float32, layout=layout))
    w = w_buffers.index(i * W_PARTS).reshape((WIDE, COLUMNS))
    acc = warpgroup_mma(draw_buffers.index(place * 2 + 1), w, acc, use_acc=False, is_async=True)
    if W_PARTS == 2:
        low = w_buffers.index(i * W_PARTS + 1).reshape((WIDE, COLUMNS))
        acc = warpgroup_mma(draw_buffers.index(place * 2), low, acc, is_async=True)
    return warpgroup_mma(draw_buffers.index(place * 2), w, acc, is_async=True)


@gluon.jit
def products_of(buffers, dw, place, i: gl.constexpr, W_PARTS: gl.constexpr, layout: gl.constexpr):
    """draw W_i, and dW_i with a tile more, both started."""
    x_buffers, _du_buffers, draw_buffers, _added_buffers, w_buffers = buffers
    through = through_weights(draw_buffers, w_buffers, place, i, W_PARTS, layout)
    turned = x_buffers.index(place * N + i).permute((1, 0))
    dw = warpgroup_mma_init(dw)
    for half in gl.static_range(2):
        dw = warpgroup_mma(turned, draw_buffers.index(place * 2 + half), dw, is_async=True)
    return through, dw


@gluon.jit
def gradient_of(
    buffers, through, known, place, i: gl.constexpr, ADDED: gl.constexpr, layout: gl.constexpr
):
    """dX of a stream, rounded."""
    x_buffers, du_buffers, _draw_buffers, added_buffers, _w_buffers = buffers
    x_buffer = x_buffers.index(place * N + i)
    if ADDED:
        through += added_buffers.index(place * N + i).load(layout).to(gl.float32)
    through -= gl.expand_dims(known[N], 1) * x_buffer.load(layout).to(gl.float32)
    through += gl.expand_dims(known[i], 1) * du_buffers.index(place).load(layout).to(gl.float32)
    return through.to(x_buffers.dtype)


@gluon.jit
def store_part(OUT, dw, column, width, C: gl.constexpr):
    """dw [columns of a stream, columns of W] at OUT [columns of W, width]."""
    layout: gl.constexpr = dw.type.layout
    h = gl.expand_dims(column + gl.arange(0, dw.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, dw.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    gl.store(OUT + (c * width + h), dw, (c < C) & (h >= 0))


@gluon.jit
def consume(
    results, shared, C: gl.constexpr, W_PARTS: gl.constexpr, WHICH: gl.constexpr,
    ADDED: gl.constexpr,
):  # fmt: skip
    """Every second tile of a program."""
    dx_desc, COEFFICIENTS, PARTS, each, segments = results
    buffers, ready, empty, w_ready, tokens, hidden, turns = shared
    x_buffers, du_buffers, _draw_buffers, _added_buffers, w_buffers = buffers
    STAGES: gl.constexpr = du_buffers.shape[0]
    ROWS: gl.constexpr = du_buffers.shape[1]
    COLUMNS: gl.constexpr = du_buffers.shape[2]
    WIDE: gl.constexpr = w_buffers.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    slab, first, tiles = share(tokens, turns, ROWS)
    column = slab * COLUMNS
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    tile = first + WHICH * turns
    mine = (tiles - WHICH + CONSUMERS - 1) // CONSUMERS
    known = load_known(COEFFICIENTS, tile * ROWS + local, tokens)
    mbarrier.wait(w_ready.index(0), 0)
    for segment in range(0, segments):
        zeros = gl.zeros((COLUMNS, WIDE), gl.float32, layout=thin)
        dw = (zeros, zeros, zeros, zeros)
        begun = segment * each
        for k in range(begun, gl.minimum(begun + each, mine)):
            turn = k * CONSUMERS + WHICH
            place = turn % STAGES
            following = tile + CONSUMERS * turns
            mbarrier.wait(ready.index(place), (turn // STAGES) & 1)
            # dX of a stream takes the place of X when dW has read that: behind the next one's.
            through, sums = products_of(buffers, dw[0], place, 0, W_PARTS, layout)
            through = warpgroup_mma_wait(2, deps=[through])
            made = gradient_of(buffers, through, known, place, 0, ADDED, layout)
            done = ()
            for i in gl.static_range(1, N):
                through, more = products_of(buffers, dw[i], place, i, W_PARTS, layout)
                through, sums = warpgroup_mma_wait(2, deps=[through, sums])
                done = done + (sums,)
                gl.thread_barrier()  # every warp's products have read it
                x_buffers.index(place * N + i - 1).store(made)
                made = gradient_of(buffers, through, known, place, i, ADDED, layout)
                sums = more
            known = load_known(COEFFICIENTS, following * ROWS + local, tokens)
            dw = done + (warpgroup_mma_wait(0, deps=[sums]),)
            gl.thread_barrier()
            x_buffers.index(place * N + N - 1).store(made)
            fence_async_shared()
            gl.thread_barrier()
            for i in gl.static_range(N):
                at = [tile * ROWS, i * hidden + column]
                store(dx_desc, at, x_buffers.index(place * N + i))
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(place), count=1)
            tile = following
        part = gl.cast((segment * turns + first) * CONSUMERS + WHICH, gl.int64)
        for i in gl.static_range(N):
            store_part(PARTS + (part * (C * N) + i) * hidden, dw[i], column, N * hidden, C)


@gluon.jit(do_not_specialize=["tokens", "turns", "each", "segments"])
def gradient_kernel(
    x_desc, du_desc, draw_desc, added_desc, w_desc, dx_desc, COEFFICIENTS, PARTS, tokens, hidden,
    turns, each, segments, C: gl.constexpr, W_PARTS: gl.constexpr, STAGES: gl.constexpr,
    ADDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """PARTS [parts, C, n H]: the ``turns`` programs of a slab take tiles in turns; each consumer
    makes a part of dW of every ``each`` of its tiles."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    WIDE: gl.constexpr = w_desc.block_type.shape[1]
    dtype: gl.constexpr = x_desc.dtype
    x_buffers = gl.allocate_shared_memory(dtype, [STAGES * N, ROWS, COLUMNS], x_desc.layout)
    added_buffers = gl.allocate_shared_memory(
        dtype, [STAGES * N if ADDED else 1, ROWS, COLUMNS], dx_desc.layout
    )
    du_buffers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], du_desc.layout)
    draw_buffers = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, WIDE], draw_desc.layout)
    w_buffers = gl.allocate_shared_memory(dtype, [N * W_PARTS, 1, WIDE, COLUMNS], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(w_ready.index(0), count=1)
    fence_async_shared()
    buffers = (x_buffers, du_buffers, draw_buffers, added_buffers, w_buffers)
    shared = (buffers, ready, empty, w_ready, tokens, hidden, turns)
    results = (dx_desc, COEFFICIENTS, PARTS, each, segments)
    gl.warp_specialize(
        [
            (consume, (results, shared, C, W_PARTS, 0, ADDED)),
            (consume, (results, shared, C, W_PARTS, 1, ADDED)),
            (
                produce,
                ((x_desc, du_desc, draw_desc, added_desc, w_desc), shared, C, W_PARTS, ADDED),
            ),
        ],
        [ROWS // 16, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
