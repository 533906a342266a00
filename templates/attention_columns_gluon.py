"""Column sums of attention's weights for Hopper: copies and products by warps of their own.

    sums[b, g, k] = sum over heads of group g and rows q of 2^(r[q, k] - lse2[q])

A tile is KEYS keys of each of CONSUMERS consumers, against all the query rows that its span names,
of all heads of a group. One warp copies blocks of ROWS rows of q, with their ``shift`` (lse2), into
a ring of STAGES places in shared memory. A consumer holds its rows of k in registers, so that only
q is read there for products; the scores of a block, [keys, rows], are made while it takes the
exponentials of the one before, two blocks a turn of the loop. Eight sums of each key are kept, of
every eighth row, and added up only at the end. Values are not read. Deterministic.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from .attention_gluon_parts import (
    SCORED,
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
    tell_following,
    told_following,
    whole_block,
)


@gluon.jit
def produce(sources, shared, DYNAMIC: gl.constexpr):
    """Start all copies into shared memory, and tell the consumers which tile follows."""
    q_desc, k_desc, shift_desc, counter = sources
    buffers, barriers, sizes, numbers, _inputs = shared
    k_buffers, q_buffers, shift_buffers, tile_buffers = buffers
    held_ready, held_empty, ready, empty, tile_ready, tile_empty = barriers
    tiles, heads, sections, key_tiles, kv_heads, group, rows, columns = sizes
    CONSUMERS: gl.constexpr = k_buffers.shape[0]
    KEYS: gl.constexpr = k_buffers.shape[3]
    STAGES: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    BYTES: gl.constexpr = q_desc.block_type.nbytes + shift_desc.block_type.nbytes
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        following = tell_following(
            tile, turn, counter, tile_buffers, tile_ready, tile_empty, DYNAMIC
        )
        key_tile, head = key_tile_of(tile, heads, sections, key_tiles)
        b = head // kv_heads
        kv = head % kv_heads
        masked, whole, found = blocks_of(
            key_tile, KEYS * CONSUMERS, ROWS, b, kv, columns, rows, numbers, ()
        )
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(held_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(held_ready.index(c), k_desc.block_type.nbytes)
            at = (key_tile * CONSUMERS + c) * KEYS
            load(k_desc, [b, kv, at, 0], held_ready.index(c), k_buffers.index(c))
        turn += 1
        for member in range(0, group):
            h = kv * group + member
            for i in range(0, masked + whole):
                q0 = block_of(i, masked, found) * ROWS
                place = place_in_ring(count, ready, empty, BYTES, STAGES)
                load(q_desc, [b, h, q0, 0], ready.index(place), q_buffers.index(place))
                load(shift_desc, [b, h, 0, q0], ready.index(place), shift_buffers.index(place))
                count += 1
        tile = following


@gluon.jit
def eighths(p):
    """[KEYS, 8]: sums of every eighth column of ``p``, which are a thread's own."""
    WARPS: gl.constexpr = [p.shape[0] // 16, 1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, 8, 16])
    sums = gl.sum(gl.reshape(p, (p.shape[0], p.shape[1] // 8, 8)), 1)
    return gl.convert_layout(sums, LAYOUT)


@gluon.jit
def step(
    held, shared, state, count, end, scale, place, fixed, q0, MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A block of rows whose scores are there, beside the scores of the next one."""
    buffers, barriers, sizes, numbers, _inputs = shared
    _k_buffers, q_buffers, shift_buffers, _told = buffers
    _held_ready, _held_empty, ready, empty, _tile_ready, _tile_empty = barriers
    _tiles, _heads, _sections, _key_tiles, _kv_heads, _group, rows, columns = sizes
    weights, s = state
    STAGES: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    b, h, k = place
    ring = count % STAGES
    # Behind the last block its own scores once more, which nobody reads.
    following = scores_of(held, q_buffers, ready, gl.minimum(count + 1, end), S_LAYOUT)
    shift = along(shift_buffers, ring, S_LAYOUT)
    q = gl.expand_dims(q0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
    if SCORED:
        s = score(s, q, k, b, h, rows, columns, numbers, fixed, ())
    else:
        s = s * scale
    if MASKED:
        kept = keep(q, k, b, h, rows, columns, numbers, fixed, ()) & (q < rows)
        s = gl.where(kept, s, float("-inf"))
    weights += eighths(gl.exp2(s - shift))
    following = warpgroup_mma_wait(0, deps=[following])
    mbarrier.arrive(empty.index(ring), count=1)
    return weights, following


@gluon.jit
def consume(results, shared, DYNAMIC: gl.constexpr, WHICH: gl.constexpr):
    """KEYS keys of every tile of a program: products, exponentials, sums."""
    sums, scale = results
    buffers, barriers, sizes, numbers, inputs = shared
    k_buffers, q_buffers, _shift_buffers, tile_buffers = buffers
    held_ready, held_empty, ready, _empty, tile_ready, tile_empty = barriers
    tiles, heads, sections, key_tiles, kv_heads, group, rows, columns = sizes
    CONSUMERS: gl.constexpr = k_buffers.shape[0]
    KEYS: gl.constexpr = k_buffers.shape[3]
    D: gl.constexpr = k_buffers.shape[4]
    ROWS: gl.constexpr = q_buffers.shape[3]
    WARPS: gl.constexpr = [KEYS // 16, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, ROWS, 16])
    SUMS_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, 8, 16])
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)

    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        key_tile, head = key_tile_of(tile, heads, sections, key_tiles)
        b = head // kv_heads
        kv = head % kv_heads
        masked, whole, found = blocks_of(
            key_tile, KEYS * CONSUMERS, ROWS, b, kv, columns, rows, numbers, ()
        )
        k0 = (key_tile * CONSUMERS + WHICH) * KEYS
        k = k0 + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
        # Keys that do not exist read the last one's inputs.
        near = gl.minimum(gl.expand_dims(k, 1), columns - 1)
        end = count + group * (masked + whole) - 1

        mbarrier.wait(held_ready.index(WHICH), turn & 1)
        held = k_buffers.index(WHICH).reshape((KEYS, D)).load(K_LAYOUT)
        mbarrier.arrive(held_empty.index(WHICH), count=1)
        s = scores_of(held, q_buffers, ready, count, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
        weights = gl.zeros((KEYS, 8), gl.float32, layout=SUMS_LAYOUT)
        for member in range(0, group):
            h = kv * group + member
            fixed = along_rows(inputs, b, h, near)
            place = (b, h, gl.expand_dims(k, 1))
            for i in range(0, masked):
                weights, s = step(
                    held, shared, (weights, s), count, end, scale, place, fixed,
                    masked_block(i, found) * ROWS, True, S_LAYOUT,
                )  # fmt: skip
                count += 1
            for i in range(0, whole // 2):
                for j in gl.static_range(2):
                    weights, s = step(
                        held, shared, (weights, s), count, end, scale, place, fixed,
                        whole_block(2 * i + j, found) * ROWS, False, S_LAYOUT,
                    )  # fmt: skip
                    count += 1
            if whole % 2 == 1:
                weights, s = step(
                    held, shared, (weights, s), count, end, scale, place, fixed,
                    whole_block(whole - 1, found) * ROWS, False, S_LAYOUT,
                )  # fmt: skip
                count += 1
        tile = told_following(tile, turn, tile_buffers, tile_ready, tile_empty, KEYS // 16, DYNAMIC)
        turn += 1
        at = gl.cast(head, gl.int64) * columns + k
        total = gl.convert_layout(gl.sum(weights, 1), gl.SliceLayout(1, S_LAYOUT))
        gl.store(sums + at, total, mask=k < columns)


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
def attention_columns_gluon(
    q_desc, k_desc, shift_desc, sums, counter, tiles, heads, sections, key_tiles, kv_heads, group,
    scale, rows, columns, numbers, inputs,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, DYNAMIC: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    k_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, KEYS, D], k_desc.layout)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    shift_buffers = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, 1, 1, ROWS], shift_desc.layout
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    barriers = barriers_of(STAGES, CONSUMERS)
    fence_async_shared()

    shared = (
        (k_buffers, q_buffers, shift_buffers, tile_buffers),
        barriers,
        (tiles, heads, sections, key_tiles, kv_heads, group, rows, columns),
        numbers,
        inputs,
    )
    results = (sums, scale)
    sources = (q_desc, k_desc, shift_desc, counter)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (results, shared, DYNAMIC, 0)),
                (consume, (results, shared, DYNAMIC, 1)),
                (produce, (sources, shared, DYNAMIC)),
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
                (produce, (sources, shared, DYNAMIC)),
            ],
            [KEYS // 16, KEYS // 16, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
