"""mHC on Hopper: blocks come and go by the copy engine, products by warp groups.

post_projection_kernel: X' behind a layer, and the next one's projection where X' is made.

    X'_j = post_j Y + sum_i comb[i, j] X_i          P = W vec(X'), X' rounded first

gradient_kernel: what ``mhc_pre_backward.gradient_kernel`` computes, dX and dW in one pass over X.

    dX_i = pre_i dU + W_i^T draw - f X_i (+ what is added),   dW_i = sum_t draw_t X_it^T

A program owns a slab of columns of all 4 streams, whose part of W stays in shared memory, and walks
over tiles of tokens: one read of what comes in, one write. Blocks are copied into a ring of STAGES
places; results take the place of an input, if there is one, and are copied out from there. Each
slab has its own part of P; dW is in registers, and each range of tiles has its own part of it.

The kernel that follows, ``mhc_pre.fuse`` or post's gradient, runs at the same time: it begins with
a tile of tokens as soon as all slabs of it are counted in DONE, when its blocks are still in the L2
cache. All programs of these kernels are there before the next one starts, so its waiting ends.
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
def in_turn():
    """As ``dependent.in_turn``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_copies():
    """Until what was copied out has been written, which ``store_wait`` does not say."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def coefficients(POST, COMB, t, tokens, strides):
    """post and comb, row by row as [in, out], of one token per thread, in fp32."""
    post_token, post_stream, comb_token, comb_in, comb_out = strides
    here = t < tokens
    found = ()
    for j in gl.static_range(N):
        at = POST + (t * post_token + j * post_stream)
        found = found + (gl.load(at, mask=here, other=0.0).to(gl.float32),)  # type: ignore[assignment]
    for i in gl.static_range(N):
        for j in gl.static_range(N):
            at = COMB + (t * comb_token + (i * comb_in + j * comb_out))
            found = found + (gl.load(at, mask=here, other=0.0).to(gl.float32),)  # type: ignore[assignment]
    return found


@gluon.jit
def start_post(x_desc, y_desc, buffers, ready, step, first, ranges, column, hidden):
    """Start the copies of a tile's blocks."""
    x_buffers, y_buffers = buffers
    STAGES: gl.constexpr = y_buffers.shape[0]
    ROWS: gl.constexpr = y_buffers.shape[1]
    place = step % STAGES
    t = (first + step * ranges) * ROWS
    size: gl.constexpr = N * x_desc.block_type.nbytes + y_desc.block_type.nbytes
    mbarrier.expect(ready.index(place), size)
    for i in gl.static_range(N):
        load(x_desc, [t, i * hidden + column], ready.index(place), x_buffers[i].index(place))
    load(y_desc, [t, column], ready.index(place), y_buffers.index(place))


@gluon.jit
def mix(x_buffers, y_buffers, place, first, known, layout: gl.constexpr, BLOCK: gl.constexpr):
    """X' in place of X, of BLOCK columns."""
    y = y_buffers.index(place).slice(first, BLOCK, 1).load(layout).to(gl.float32)
    x = ()
    for i in gl.static_range(N):
        streams = x_buffers[i].index(place).slice(first, BLOCK, 1)
        x = x + (streams.load(layout).to(gl.float32),)  # type: ignore[assignment]
    made = ()
    for j in gl.static_range(N):
        # As ``mhc_post.mixed``, to the bit.
        total = gl.expand_dims(known[j], 1) * y
        for i in gl.static_range(N):
            total = gl.fma(gl.expand_dims(known[N + N * i + j], 1), x[i], total)
        made = made + (total.to(y_buffers.dtype),)  # type: ignore[assignment]
    for j in gl.static_range(N):
        x_buffers[j].index(place).slice(first, BLOCK, 1).store(made[j])


@gluon.jit
def store_sums(P, acc, slab, tile, tokens, C: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    t = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.expand_dims(gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    here = gl.expand_dims(t < tokens, 1) & (c < C)
    gl.store(P + gl.cast(slab, gl.int64) * tokens * C + (gl.expand_dims(t, 1) * C + c), acc, here)


@gluon.jit(do_not_specialize=["tokens", "ranges"])
def post_projection_kernel(
    x_desc, y_desc, w_desc, out_desc, P, POST, COMB, DONE, tokens, hidden, ranges, strides,
    C: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """P [slabs, tokens, C], and in DONE how many slabs of a tile are finished."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    WIDE: gl.constexpr = w_desc.block_type.shape[0]
    dtype: gl.constexpr = x_desc.dtype
    x_buffers = ()  # each stream's by itself, so that one barrier is for all of them
    for _ in gl.static_range(N):
        stream = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
        x_buffers = x_buffers + (stream,)  # type: ignore[assignment]
    y_buffers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], y_desc.layout)
    w_buffers = gl.allocate_shared_memory(dtype, [N * PARTS, WIDE, COLUMNS], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(w_ready.index(0), count=1)
    fence_async_shared()
    buffers = (x_buffers, y_buffers)
    if PDL:
        in_turn()

    slab = gl.program_id(0) // ranges
    column = slab * COLUMNS
    # Programs of a slab take turns, so that tiles are finished in their order.
    first = gl.program_id(0) % ranges
    steps = ((tokens + ROWS - 1) // ROWS - first + ranges - 1) // ranges
    mbarrier.expect(w_ready.index(0), N * PARTS * w_desc.block_type.nbytes)
    for i in gl.static_range(N):
        for part in gl.static_range(PARTS):
            at = [part * C, i * hidden + column]
            load(w_desc, at, w_ready.index(0), w_buffers.index(i * PARTS + part))
    for early in gl.static_range(STAGES):
        if early < steps:
            start_post(x_desc, y_desc, buffers, ready, early, first, ranges, column, hidden)

    WARPS: gl.constexpr = ROWS // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS // 2, 2], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16])
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    known = coefficients(POST, COMB, first * ROWS + local, tokens, strides)
    mbarrier.wait(w_ready.index(0), 0)
    tile = first
    for step in range(0, steps):
        t = tile * ROWS
        place = step % STAGES
        mbarrier.wait(ready.index(place), (step // STAGES) & 1)
        for piece in gl.static_range(COLUMNS // BLOCK):
            mix(x_buffers, y_buffers, place, piece * BLOCK, known, layout, BLOCK)
        fence_async_shared()
        if DONE is not None:
            wait_for_copies()
        gl.thread_barrier()
        if DONE is not None:
            if step > 0:
                gl.atomic_add(DONE + (tile - ranges), 1, sem="release")
        for j in gl.static_range(N):
            store(out_desc, [t, j * hidden + column], x_buffers[j].index(place))
        acc = warpgroup_mma_init(gl.zeros((ROWS, WIDE), gl.float32, layout=sums))
        for j in gl.static_range(N):
            for part in gl.static_range(PARTS):
                w = w_buffers.index(j * PARTS + part).permute((1, 0))
                acc = warpgroup_mma(
                    x_buffers[j].index(place), w, acc, use_acc=j + part > 0, is_async=True
                )
        known = coefficients(POST, COMB, t + ranges * ROWS + local, tokens, strides)
        total = warpgroup_mma_wait(0, deps=[acc])
        store_sums(P, total, slab, tile, tokens, C)
        tma.store_wait(0)
        gl.thread_barrier()  # every warp's products have been waited for
        if step + STAGES < steps:
            start_post(x_desc, y_desc, buffers, ready, step + STAGES, first, ranges, column, hidden)
        tile += ranges
    if DONE is not None:
        wait_for_copies()
        gl.thread_barrier()
        gl.atomic_add(DONE + (tile - ranges), 1, sem="release")


# --- the gradient ---------------------------------------------------------------------------------


@gluon.jit
def start_gradient(
    descs, buffers, ready, step, tile, column, hidden, ADDED: gl.constexpr, C: gl.constexpr
):
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
    buffers, w_buffers, dw, COEFFICIENTS, t, tokens, place, i: gl.constexpr, SPLIT: gl.constexpr,
    ADDED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """dX of a stream, in shared memory; its dW with what is still being added."""
    x_buffers, du_buffers, draw_buffers, _out_buffers = buffers
    through = through_weights(draw_buffers, w_buffers, place, i, SPLIT, layout)
    dw = warpgroup_mma_init(dw)
    for half in gl.static_range(2):
        turned = x_buffers[i].index(place).permute((1, 0))
        dw = warpgroup_mma(turned, draw_buffers.index(place * 2 + half), dw, is_async=True)
    # Read anew for each stream, as dU is: they would take the registers of a product.
    gate = gl.load(COEFFICIENTS + (gl.cast(tokens, gl.int64) * i + t), mask=t < tokens, other=0.0)
    f = gl.load(COEFFICIENTS + (gl.cast(tokens, gl.int64) * N + t), mask=t < tokens, other=0.0)
    dx = warpgroup_mma_wait(2, deps=[through])  # dW's two go on
    out = out_of(buffers, place, i, ADDED)
    if ADDED:
        dx += out.load(layout).to(gl.float32)
    x = x_buffers[i].index(place).load(layout).to(gl.float32)
    dx -= gl.expand_dims(f, 1) * x
    du = du_buffers.index(place).load(layout).to(gl.float32)
    dx += gl.expand_dims(gate, 1) * du
    out.store(dx.to(out.dtype))
    return dw


@gluon.jit
def store_part(OUT, dw, column, width, C: gl.constexpr):
    """dw [columns of a stream, columns of W] at OUT [columns of W, width]."""
    layout: gl.constexpr = dw.type.layout
    h = gl.expand_dims(column + gl.arange(0, dw.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, dw.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    gl.store(OUT + (c * width + h), dw, (c < C) & (h >= 0))


@gluon.jit(do_not_specialize=["tokens", "turns", "each"])
def gradient_kernel(
    x_desc, du_desc, draw_desc, added_desc, w_desc, dx_desc, COEFFICIENTS, PARTS, DONE, tokens,
    hidden, turns, each, C: gl.constexpr, SPLIT: gl.constexpr, ADDED: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """PARTS [parts, C, n H]: a slab has ``turns`` programs, which take tiles in turns, and make a
    part of dW of every ``each`` of theirs; and in DONE how many slabs of a tile are finished."""
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
    # Programs of a slab take turns, so that tiles are finished in their order.
    first = gl.program_id(0) % turns
    steps = ((tokens + ROWS - 1) // ROWS - first + turns - 1) // turns
    if PDL:
        in_turn()
    mbarrier.expect(w_ready.index(0), N * W_PARTS * w_desc.block_type.nbytes)
    for i in gl.static_range(N):
        for half in gl.static_range(W_PARTS):
            where = [half, 0, i * hidden + column]
            load(w_desc, where, w_ready.index(0), w_buffers.index(i * W_PARTS + half))
    for early in gl.static_range(STAGES):
        if early < steps:
            start_gradient(
                descs, buffers, ready, early, first + early * turns, column, hidden, ADDED, C
            )

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, COLUMNS // 2, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDE // 2, 16])
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    mbarrier.wait(w_ready.index(0), 0)
    tile = first
    for begun in range(0, steps, each):
        zeros = gl.zeros((COLUMNS, WIDE), gl.float32, layout=thin)
        dw = (zeros, zeros, zeros, zeros)
        for step in range(begun, gl.minimum(begun + each, steps)):
            place = step % STAGES
            if step > 0:
                # What was copied out in the step before has been read.
                tma.store_wait(0)
                if step - 1 + STAGES < steps:
                    start_gradient(
                        descs, buffers, ready, step - 1 + STAGES, tile + (STAGES - 1) * turns,
                        column, hidden, ADDED, C,
                    )  # fmt: skip
            mbarrier.wait(ready.index(place), (step // STAGES) & 1)
            running = ()
            for i in gl.static_range(N):
                sums = gradient_of(
                    buffers, w_buffers, dw[i], COEFFICIENTS, tile * ROWS + local, tokens, place, i,
                    SPLIT, ADDED, layout,
                )  # fmt: skip
                running = running + (sums,)  # type: ignore[assignment]
            dw = warpgroup_mma_wait(0, deps=running)
            fence_async_shared()
            if DONE is not None:
                wait_for_copies()
            gl.thread_barrier()
            if DONE is not None:
                if step > 0:
                    gl.atomic_add(DONE + (tile - turns), 1, sem="release")
            for i in gl.static_range(N):
                at = [tile * ROWS, i * hidden + column]
                store(dx_desc, at, out_of(buffers, place, i, ADDED))
            tile += turns
        part = begun // each * turns + first
        for i in gl.static_range(N):
            begin = PARTS + (gl.cast(part, gl.int64) * (C * N) + i) * hidden
            store_part(begin, dw[i], column, N * hidden, C)
    tma.store_wait(0)
    if DONE is not None:
        wait_for_copies()
        gl.thread_barrier()
        gl.atomic_add(DONE + (tile - turns), 1, sem="release")
