"""The gradients dk and dv of attention for Hopper: copies and products by warps of their own.

A tile is KEYS keys of each of CONSUMERS consumers, against all the query rows that its span names,
of all heads of a group. One warp copies blocks of ROWS rows of q and of the gradient do, with
lse2 and delta, into a ring of STAGES places in shared memory. A consumer holds its rows of k and v
there, and dk and dv in registers; with everything transposed, [keys, rows],

    s = k q^T     dP = v do^T     p = exp2(score(s) - lse2)     ds = p * (dP - delta)
    dv += p do    dk += ds q

p and ds are left operands as they come out of registers. The exponentials of a block lie beside dP,
ds beside dv, and the scores of the next block are started behind dk, so that a consumer's products
follow one another almost without a gap. dk and dv leave through the
memory of k and v. No two programs add to one place, so all is deterministic.

What a score reads along rows and keys is copied beside q, a consumer's keys of a block of rows.

Scores are those whose gradient is a multiple of ds, which is multiplied by it at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .attention_gluon_parts import (
    BATCHES_BESIDE,
    SCORED,
    STAGED,
    along,
    along_rows,
    barriers_of,
    block_of,
    blocks_of,
    keep,
    key_tile_of,
    load,
    masked_block,
    place_in_ring,
    score,
    scores_of,
    staged_buffers,
    staged_places,
    store,
    tell_following,
    told_following,
    whole_block,
)


@gluon.jit
def batch_and_head(head, heads, kv_heads):
    """The place of a tile's ``head`` among ``heads`` of all batches."""
    if BATCHES_BESIDE:
        return head % (heads // kv_heads), head // (heads // kv_heads)
    else:
        return head // kv_heads, head % kv_heads


@gluon.jit
def copy_matrices(
    maps, buffers, barrier, place, b, h, q0, k0, KEYS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Start the copies of the staged inputs' blocks of rows from ``q0`` and keys from ``k0``."""
    at = staged_places(b, h, q0, k0)
    for j in gl.static_range(STAGED):
        for c in gl.static_range(CONSUMERS):
            where = [at[4 * j], at[4 * j + 1], at[4 * j + 2], at[4 * j + 3] + c * KEYS]
            load(maps[j], where, barrier, buffers[j].index(place * CONSUMERS + c))


@gluon.jit
def matrices(
    buffers, place, WHICH: gl.constexpr, CONSUMERS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """A consumer's blocks of the staged inputs in a place of the ring, [KEYS, ROWS]."""
    found = ()
    for j in gl.static_range(STAGED):
        block = buffers[j].index(place * CONSUMERS + WHICH)
        block = block.reshape((buffers[j].shape[3], buffers[j].shape[4])).permute((1, 0))
        found = found + (block.load(LAYOUT),)  # type: ignore[assignment]
    return found


@gluon.jit
def produce(sources, shared, DYNAMIC: gl.constexpr, STAGED_BYTES: gl.constexpr):
    """Start all copies into shared memory, and tell the consumers which tile follows."""
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, maps, counter = sources
    buffers, input_buffers, barriers, sizes, numbers, _inputs = shared
    k_buffers, v_buffers, q_buffers, do_buffers, shift_buffers, delta_buffers, tile_buffers = (
        buffers
    )
    held_ready, held_empty, ready, empty, tile_ready, tile_empty = barriers
    tiles, heads, sections, key_tiles, kv_heads, group, rows, columns = sizes
    CONSUMERS: gl.constexpr = k_buffers.shape[0]
    KEYS: gl.constexpr = k_buffers.shape[3]
    STAGES: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    HELD_BYTES: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    LINES: gl.constexpr = 2 * shift_desc.block_type.nbytes + STAGED_BYTES
    BYTES: gl.constexpr = q_desc.block_type.nbytes + do_desc.block_type.nbytes + LINES
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        following = tell_following(
            tile, turn, counter, tile_buffers, tile_ready, tile_empty, DYNAMIC
        )
        key_tile, head = key_tile_of(tile, heads, sections, key_tiles)
        b, kv = batch_and_head(head, heads, kv_heads)
        masked, whole, found = blocks_of(
            key_tile, KEYS * CONSUMERS, ROWS, b, kv, columns, rows, numbers, ()
        )
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(held_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(held_ready.index(c), HELD_BYTES)
            at = (key_tile * CONSUMERS + c) * KEYS
            load(k_desc, [b, kv, at, 0], held_ready.index(c), k_buffers.index(c))
            load(v_desc, [b, kv, at, 0], held_ready.index(c), v_buffers.index(c))
        turn += 1
        for member in range(0, group):
            h = kv * group + member
            for i in range(0, masked + whole):
                q0 = block_of(i, masked, found) * ROWS
                place = place_in_ring(count, ready, empty, BYTES, STAGES)
                load(q_desc, [b, h, q0, 0], ready.index(place), q_buffers.index(place))
                load(do_desc, [b, h, q0, 0], ready.index(place), do_buffers.index(place))
                load(shift_desc, [b, h, 0, q0], ready.index(place), shift_buffers.index(place))
                load(delta_desc, [b, h, 0, q0], ready.index(place), delta_buffers.index(place))
                copy_matrices(
                    maps, input_buffers, ready.index(place), place, b, h, q0,
                    key_tile * CONSUMERS * KEYS, KEYS, CONSUMERS,
                )  # fmt: skip
                count += 1
        tile = following


@gluon.jit
def step(
    held, shared, state, count, end, scale, place, fixed, q0, MASKED: gl.constexpr,
    WHICH: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A block of rows whose scores are there."""
    k_buffer, v_buffer = held
    buffers, input_buffers, barriers, sizes, numbers, _inputs = shared
    k_buffers, _v_buffers, q_buffers, do_buffers, shift_buffers, delta_buffers, _told = buffers
    _held_ready, _held_empty, ready, empty, _tile_ready, _tile_empty = barriers
    _tiles, _heads, _sections, _key_tiles, _kv_heads, _group, rows, columns = sizes
    dk, dv, s = state
    STAGES: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    KEYS: gl.constexpr = k_buffer.shape[0]
    CONSUMERS: gl.constexpr = k_buffers.shape[0]
    dtype: gl.constexpr = q_buffers.dtype
    b, h, k = place
    ring = count % STAGES
    do = do_buffers.index(ring).reshape((ROWS, do_buffers.shape[4]))
    dp = gl.zeros((KEYS, ROWS), gl.float32, layout=S_LAYOUT)
    if STAGED == 0:
        dp = warpgroup_mma(v_buffer, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    shift = along(shift_buffers, ring, S_LAYOUT)
    q = gl.expand_dims(q0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
    moving = matrices(input_buffers, ring, WHICH, CONSUMERS, S_LAYOUT)
    if SCORED:
        s = score(s, q, k, b, h, rows, columns, numbers, fixed, moving)
    else:
        s = s * scale
    if MASKED:
        kept = keep(q, k, b, h, rows, columns, numbers, fixed, moving) & (q < rows)
        s = gl.where(kept, s, float("-inf"))
    if STAGED:  # behind the matrix's values, which would stand in registers beside it
        dp = warpgroup_mma(v_buffer, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    p = gl.exp2(s - shift)
    weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    delta = along(delta_buffers, ring, S_LAYOUT)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(weights, do, dv, is_async=True)
    ds = p * (dp - delta)
    ds = gl.convert_layout(ds.to(dtype), gl.DotOperandLayout(0, dk.type.layout, 2))
    dk = warpgroup_mma(
        ds, q_buffers.index(ring).reshape((ROWS, q_buffers.shape[4])), dk, is_async=True
    )
    # Behind the last block its own scores once more, which nobody reads.
    s = scores_of(k_buffer, q_buffers, ready, gl.minimum(count + 1, end), S_LAYOUT)
    # Not across a loop's end: the assembler would start one product at a time.
    dk, dv, s = warpgroup_mma_wait(0, deps=[dk, dv, s])
    mbarrier.arrive(empty.index(ring), count=1)
    return dk, dv, s


@gluon.jit
def consume(results, shared, DYNAMIC: gl.constexpr, WHICH: gl.constexpr):
    """KEYS keys of every tile of a program: products, exponentials, gradients."""
    dk_desc, dv_desc, scale, slope = results
    buffers, _staged, barriers, sizes, numbers, inputs = shared
    k_buffers, v_buffers, q_buffers, _do_buffers, _shift_buffers, _delta_buffers, tile_buffers = (
        buffers
    )
    held_ready, held_empty, ready, _empty, tile_ready, tile_empty = barriers
    tiles, heads, sections, key_tiles, kv_heads, group, rows, columns = sizes
    CONSUMERS: gl.constexpr = k_buffers.shape[0]
    KEYS: gl.constexpr = k_buffers.shape[3]
    D: gl.constexpr = k_buffers.shape[4]
    V: gl.constexpr = v_buffers.shape[4]
    ROWS: gl.constexpr = q_buffers.shape[3]
    WARPS: gl.constexpr = [KEYS // 16, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, ROWS, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, D, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, V, 16])
    dtype: gl.constexpr = q_buffers.dtype

    k_buffer = k_buffers.index(WHICH).reshape((KEYS, D))
    v_buffer = v_buffers.index(WHICH).reshape((KEYS, V))
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        key_tile, head = key_tile_of(tile, heads, sections, key_tiles)
        b, kv = batch_and_head(head, heads, kv_heads)
        masked, whole, found = blocks_of(
            key_tile, KEYS * CONSUMERS, ROWS, b, kv, columns, rows, numbers, ()
        )
        k0 = (key_tile * CONSUMERS + WHICH) * KEYS
        k = gl.expand_dims(k0 + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
        # Keys that do not exist read the last one's inputs.
        near = gl.minimum(k, columns - 1)
        end = count + group * (masked + whole) - 1

        mbarrier.wait(held_ready.index(WHICH), turn & 1)
        s = scores_of(k_buffer, q_buffers, ready, count, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
        dk = gl.zeros((KEYS, D), gl.float32, layout=K_LAYOUT)
        dv = gl.zeros((KEYS, V), gl.float32, layout=V_LAYOUT)
        for member in range(0, group):
            h = kv * group + member
            fixed = along_rows(inputs, b, h, near)
            for i in range(0, masked):
                dk, dv, s = step(
                    (k_buffer, v_buffer), shared, (dk, dv, s), count, end, scale,
                    (b, h, k), fixed, masked_block(i, found) * ROWS, True, WHICH, S_LAYOUT,
                )  # fmt: skip
                count += 1
            for i in range(0, whole):
                dk, dv, s = step(
                    (k_buffer, v_buffer), shared, (dk, dv, s), count, end, scale,
                    (b, h, k), fixed, whole_block(i, found) * ROWS, False, WHICH, S_LAYOUT,
                )  # fmt: skip
                count += 1
        tile = told_following(tile, turn, tile_buffers, tile_ready, tile_empty, KEYS // 16, DYNAMIC)
        turn += 1
        k_buffer.store((dk * slope).to(dtype))
        v_buffer.store(dv.to(dtype))
        fence_async_shared()
        store(dk_desc, [b, kv, k0, 0], k_buffers.index(WHICH))
        store(dv_desc, [b, kv, k0, 0], v_buffers.index(WHICH))
        # The copies out have to have read their memory before the next keys come.
        tma.store_wait(0)
        mbarrier.arrive(held_empty.index(WHICH), count=1)


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "heads",
        "sections",
        "key_tiles",
        "kv_heads",
        "group",
        "rows",
        "columns",
    ]
)
def attention_keys_gluon(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_desc, dv_desc, x0_desc, counter,
    tiles, heads, sections, key_tiles, kv_heads, group, scale, slope, rows, columns, numbers,
    inputs,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, DYNAMIC: gl.constexpr,
    STAGED_BYTES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    k_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, KEYS, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, KEYS, V], v_desc.layout)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, V], do_desc.layout)
    line: gl.constexpr = [STAGES, 1, 1, 1, ROWS]
    shift_buffers = gl.allocate_shared_memory(gl.float32, line, shift_desc.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, line, delta_desc.layout)
    maps = ()
    input_buffers = ()
    if STAGED == 1:
        maps = (x0_desc,)  # type: ignore[assignment]
        input_buffers = (staged_buffers(x0_desc, STAGES, CONSUMERS),)  # type: ignore[assignment]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    barriers = barriers_of(STAGES, CONSUMERS)
    fence_async_shared()

    shared = (
        (k_buffers, v_buffers, q_buffers, do_buffers, shift_buffers, delta_buffers, tile_buffers),
        input_buffers,
        barriers,
        (tiles, heads, sections, key_tiles, kv_heads, group, rows, columns),
        numbers,
        inputs,
    )
    results = (dk_desc, dv_desc, scale, slope)
    sources = (q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, maps, counter)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (results, shared, DYNAMIC, 0)),
                (consume, (results, shared, DYNAMIC, 1)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [KEYS // 16, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (results, shared, DYNAMIC, 0)),
                (consume, (results, shared, DYNAMIC, 1)),
                (consume, (results, shared, DYNAMIC, 2)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [KEYS // 16, KEYS // 16, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
