"""mHC behind a layer and the next one's projection, for Hopper: X' is projected where it is made.

    X'_j = post_j Y + sum_i comb[i, j] X_i          P = W vec(X'), X' rounded first

A program owns a slab of columns of all 4 streams, whose part of W stays in shared memory, and walks
over tiles of tokens. Blocks of X and Y are copied into a ring of STAGES places; X' takes the place
of X, is copied out from there and meets W there: one read of X and Y, one write. Each slab has its
own partial sums, which ``mhc_pre.fuse`` adds, at the same time: it begins with a tile of tokens as
soon as all slabs of it are counted, when X' is still in the L2 cache. All programs of this kernel
are there before that one starts, so that its waiting ends.

A thread has one token's coefficients and so many columns of all streams that all 4 warps are busy
with one block; copies and products of a block run while the next one is computed.
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
def start(x_desc, y_desc, buffers, ready, step, first, ranges, column, hidden):
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
def wait_for_copies(PENDING: gl.constexpr):
    """Until all but the last 0 or 4 copies have been written, which ``store_wait`` does not say."""
    if PENDING == 0:
        text: gl.constexpr = "cp.async.bulk.wait_group 0; // $0"
    else:
        text: gl.constexpr = "cp.async.bulk.wait_group 4; // $0"  # type: ignore[no-redef]
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_sums(P, acc, slab, tile, tokens, C: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    t = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.expand_dims(gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    here = gl.expand_dims(t < tokens, 1) & (c < C)
    gl.store(P + gl.cast(slab, gl.int64) * tokens * C + (gl.expand_dims(t, 1) * C + c), acc, here)


@gluon.jit
def in_turn():
    """As ``dependent.in_turn``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


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
    count = ((tokens + ROWS - 1) // ROWS - first + ranges - 1) // ranges
    mbarrier.expect(w_ready.index(0), N * PARTS * w_desc.block_type.nbytes)
    for i in gl.static_range(N):
        for part in gl.static_range(PARTS):
            at = [part * C, i * hidden + column]
            load(w_desc, at, w_ready.index(0), w_buffers.index(i * PARTS + part))
    for early in gl.static_range(STAGES):
        if early < count:
            start(x_desc, y_desc, buffers, ready, early, first, ranges, column, hidden)

    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [2, 2], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    known = coefficients(POST, COMB, first * ROWS + local, tokens, strides)
    acc = warpgroup_mma_init(gl.zeros((ROWS, WIDE), gl.float32, layout=sums))
    mbarrier.wait(w_ready.index(0), 0)
    tile = first
    for step in range(0, count):
        t = tile * ROWS
        following = coefficients(POST, COMB, t + ranges * ROWS + local, tokens, strides)
        place = step % STAGES
        mbarrier.wait(ready.index(place), (step // STAGES) & 1)
        for piece in gl.static_range(COLUMNS // BLOCK):
            mix(x_buffers, y_buffers, place, piece * BLOCK, known, layout, BLOCK)
        known = following
        # What was started in the step before ran meanwhile, and frees its place now.
        done = warpgroup_mma_wait(0, deps=[acc])
        tma.store_wait(0)
        if step > 0:
            store_sums(P, done, slab, tile - ranges, tokens, C)
        fence_async_shared()
        gl.thread_barrier()
        for j in gl.static_range(N):
            store(out_desc, [t, j * hidden + column], x_buffers[j].index(place))
        acc = warpgroup_mma_init(done)
        for j in gl.static_range(N):
            for part in gl.static_range(PARTS):
                w = w_buffers.index(j * PARTS + part).permute((1, 0))
                acc = warpgroup_mma(
                    x_buffers[j].index(place), w, acc, use_acc=j + part > 0, is_async=True
                )
        if step > 0:
            if step - 1 + STAGES < count:
                start(
                    x_desc, y_desc, buffers, ready, step - 1 + STAGES, first, ranges, column, hidden
                )
            if DONE is not None:
                # The copies of the tile before have been written, not only read.
                wait_for_copies(4)
                gl.thread_barrier()
                gl.atomic_add(DONE + (tile - ranges), 1, sem="release")
        tile += ranges
    done = warpgroup_mma_wait(0, deps=[acc])
    store_sums(P, done, slab, tile - ranges, tokens, C)
    tma.store_wait(0)
    if DONE is not None:
        wait_for_copies(0)
        gl.thread_barrier()
        gl.atomic_add(DONE + (tile - ranges), 1, sem="release")
