"""What ``mhc_pre_backward.gradient_kernel`` computes, for Hopper: dX and dW in one pass over X.

    dX_i = pre_i dU + W_i^T draw - f X_i (+ what is added),   dW_i = sum_t draw_t X_it^T

A program owns a slab of columns of all 4 streams, whose parts of W stay in shared memory and whose
dW in registers, and walks over the tiles of tokens of its ranges. Blocks are copied into a ring of
STAGES places, dX is copied out. A range's part of dW is stored at its end.
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


@gluon.jit
def start(descs, buffers, ready, step, tile, column, hidden, ADDED: gl.constexpr, C: gl.constexpr):
    """Start the copies of a tile's blocks."""
    x_desc, du_desc, draw_desc, added_desc = descs
    x_buffers, du_buffers, draw_buffers, out_buffers = buffers
    STAGES: gl.constexpr = du_buffers.shape[0]
    ROWS: gl.constexpr = du_buffers.shape[1]
    place = step % STAGES
    t = tile * ROWS
    blocks: gl.constexpr = N * x_desc.block_type.nbytes * (2 if ADDED else 1)
    size: gl.constexpr = blocks + du_desc.block_type.nbytes + 2 * draw_desc.block_type.nbytes
    mbarrier.expect(ready.index(place), size)
    for part in gl.static_range(2):
        load(draw_desc, [t, part * C], ready.index(place), draw_buffers.index(place * 2 + part))
    load(du_desc, [t, column], ready.index(place), du_buffers.index(place))
    for i in gl.static_range(N):
        at = [t, i * hidden + column]
        load(x_desc, at, ready.index(place), x_buffers[i].index(place))
        if ADDED:
            load(added_desc, at, ready.index(place), out_buffers[i].index(place))


@gluon.jit
def slopes(COEFFICIENTS, t, tokens):
    """pre_i, and f, of tokens."""
    found = ()
    for i in gl.static_range(N + 1):
        at = COEFFICIENTS + (gl.cast(tokens, gl.int64) * i + t)
        found = found + (gl.load(at, mask=t < tokens, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def through_weights(
    draw_buffers, w_buffers, place, i: gl.constexpr, SPLIT: gl.constexpr, layout: gl.constexpr
):
    """draw W_i, started: three products, one less of a W that is not split."""
    ROWS: gl.constexpr = draw_buffers.shape[1]
    WIDE: gl.constexpr = w_buffers.shape[2]
    COLUMNS: gl.constexpr = w_buffers.shape[3]
    W_PARTS: gl.constexpr = 2 if SPLIT else 1
    acc = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), gl.float32, layout=layout))
    w = w_buffers.index(i * W_PARTS).reshape((WIDE, COLUMNS))
    acc = warpgroup_mma(draw_buffers.index(place * 2 + 1), w, acc, use_acc=False, is_async=True)
    if SPLIT:
        low = w_buffers.index(i * W_PARTS + 1).reshape((WIDE, COLUMNS))
        acc = warpgroup_mma(draw_buffers.index(place * 2), low, acc, is_async=True)
    return warpgroup_mma(draw_buffers.index(place * 2), w, acc, is_async=True)


@gluon.jit
def out_of(buffers, place, i: gl.constexpr, ADDED: gl.constexpr):
    """Where a stream's dX is made: what is added to it lies there."""
    _x_buffers, _du_buffers, _draw_buffers, out_buffers = buffers
    return out_buffers[i].index(place if ADDED else 0)


@gluon.jit
def gradient_of(
    buffers, w_buffers, dw, known, place, i: gl.constexpr, SPLIT: gl.constexpr,
    ADDED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """dX of a stream, in shared memory; its dW with what is still being added."""
    x_buffers, du_buffers, draw_buffers, _out_buffers = buffers
    through = through_weights(draw_buffers, w_buffers, place, i, SPLIT, layout)
    dw = warpgroup_mma_init(dw)
    for half in gl.static_range(2):
        turned = x_buffers[i].index(place).permute((1, 0))
        dw = warpgroup_mma(turned, draw_buffers.index(place * 2 + half), dw, is_async=True)
    dx = warpgroup_mma_wait(2, deps=[through])  # dW's two go on
    out = out_of(buffers, place, i, ADDED)
    if ADDED:
        dx += out.load(layout).to(gl.float32)
    x = x_buffers[i].index(place).load(layout).to(gl.float32)
    dx -= gl.expand_dims(known[N], 1) * x
    # Read anew for each stream: it would take the registers of a product.
    du = du_buffers.index(place).load(layout).to(gl.float32)
    dx += gl.expand_dims(known[i], 1) * du
    out.store(dx.to(out.dtype))
    return dw


@gluon.jit
def store_part(OUT, dw, column, width, C: gl.constexpr):
    """dw [columns of a stream, columns of W] at OUT [columns of W, width]."""
    layout: gl.constexpr = dw.type.layout
    h = gl.expand_dims(column + gl.arange(0, dw.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, dw.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    gl.store(OUT + (c * width + h), dw, (c < C) & (h >= 0))


@gluon.jit(do_not_specialize=["tokens", "parts", "turns", "each"])
def gradient_kernel(
    x_desc, du_desc, draw_desc, added_desc, w_desc, dx_desc, COEFFICIENTS, PARTS, tokens, hidden,
    parts, turns, each, C: gl.constexpr, SPLIT: gl.constexpr, ADDED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """PARTS [parts, C, n H], of ranges of ``each`` tiles; a slab has ``turns`` programs, which take
    its ranges in turns."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    WIDE: gl.constexpr = w_desc.block_type.shape[1]
    W_PARTS: gl.constexpr = 2 if SPLIT else 1
    PLACES: gl.constexpr = STAGES if ADDED else 1
    dtype: gl.constexpr = x_desc.dtype
    x_buffers = ()
    out_buffers = ()
    for _ in gl.static_range(N):
        stream = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
        x_buffers = x_buffers + (stream,)  # type: ignore[assignment]
        made = gl.allocate_shared_memory(dtype, [PLACES, ROWS, COLUMNS], dx_desc.layout)
        out_buffers = out_buffers + (made,)  # type: ignore[assignment]
    du_buffers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], du_desc.layout)
    draw_buffers = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, WIDE], draw_desc.layout)
    w_buffers = gl.allocate_shared_memory(dtype, [N * W_PARTS, 1, WIDE, COLUMNS], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(w_ready.index(0), count=1)
    fence_async_shared()
    buffers = (x_buffers, du_buffers, draw_buffers, out_buffers)
    descs = (x_desc, du_desc, draw_desc, added_desc)

    column = gl.program_id(0) // turns * COLUMNS
    first = gl.program_id(0) % turns
    tiles = (tokens + ROWS - 1) // ROWS
    mine = (parts - first + turns - 1) // turns
    last = first + (mine - 1) * turns
    steps = (mine - 1) * each + gl.minimum(each, tiles - last * each)
    mbarrier.expect(w_ready.index(0), N * W_PARTS * w_desc.block_type.nbytes)
    for i in gl.static_range(N):
        for half in gl.static_range(W_PARTS):
            where = [half, 0, i * hidden + column]
            load(w_desc, where, w_ready.index(0), w_buffers.index(i * W_PARTS + half))
    for early in gl.static_range(STAGES):
        if early < steps:
            near = (first + early // each * turns) * each + early % each
            start(descs, buffers, ready, early, near, column, hidden, ADDED, C)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    mbarrier.wait(w_ready.index(0), 0)
    step = gl.program_id(0) * 0
    for part in range(first, parts, turns):
        zeros = gl.zeros((COLUMNS, WIDE), gl.float32, layout=thin)
        dw = (zeros, zeros, zeros, zeros)
        for tile in range(part * each, gl.minimum(part * each + each, tiles)):
            place = step % STAGES
            if step > 0:
                # What was copied out in the step before has been read.
                tma.store_wait(0)
                after = step - 1 + STAGES
                if after < steps:
                    far = (first + after // each * turns) * each + after % each
                    start(descs, buffers, ready, after, far, column, hidden, ADDED, C)
            known = slopes(COEFFICIENTS, tile * ROWS + local, tokens)
            mbarrier.wait(ready.index(place), (step // STAGES) & 1)
            running = ()
            for i in gl.static_range(N):
                sums = gradient_of(buffers, w_buffers, dw[i], known, place, i, SPLIT, ADDED, layout)
                running = running + (sums,)  # type: ignore[assignment]
            dw = warpgroup_mma_wait(0, deps=running)
            fence_async_shared()
            gl.thread_barrier()
            for i in gl.static_range(N):
                at = [tile * ROWS, i * hidden + column]
                store(dx_desc, at, out_of(buffers, place, i, ADDED))
            step += 1
        for i in gl.static_range(N):
            begin = PARTS + (gl.cast(part, gl.int64) * (C * N) + i) * hidden
            store_part(begin, dw[i], column, N * hidden, C)
    tma.store_wait(0)
