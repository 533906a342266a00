"""The gradient dq of attention for Hopper: copies and products by warps of their own.

A tile is ROWS query rows of each of CONSUMERS consumers, against all the keys that its span names.
One warp copies blocks of N keys and their values into a ring of STAGES places in shared memory. A
consumer holds its rows of q and of the gradient do there, and dq in registers:

    s = q k^T     dP = do v^T     p = exp2(score(s) - lse2)     ds = p * (dP - delta)
    dq += ds k

ds is a left operand as it comes out of registers. The exponentials of a block lie beside dP, and
the scores of the next block are started behind dq. dq leaves through the memory of q. What a score
reads along the keys is copied beside K, as in the forward. With PAIRS ds is also the gradient of an
input for each pair, and stored as such: of some heads of some batches, in whole blocks.

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
    along_rows,
    barriers_of,
    block_of,
    blocks_of,
    copy_staged,
    keep,
    load,
    masked_block,
    place_in_ring,
    score,
    scores_of,
    staged_buffers,
    staged_values,
    store,
    tell_following,
    tile_of,
    told_following,
    whole_block,
)


@gluon.jit
def batch_and_head(head, part):
    """The place of a tile's ``head`` among the heads of a launch."""
    first_batch, first_head, some_batches, some_heads = part
    if BATCHES_BESIDE:
        return first_batch + head % some_batches, first_head + head // some_batches
    else:
        return first_batch + head // some_heads, first_head + head % some_heads


@gluon.jit
def produce(sources, shared, DYNAMIC: gl.constexpr, STAGED_BYTES: gl.constexpr):
    """Start all copies into shared memory, and tell the consumers which tile follows."""
    q_desc, k_desc, v_desc, do_desc, maps, counter = sources
    buffers, barriers, sizes, part, numbers, _inputs = shared
    q_buffers, do_buffers, k_buffers, v_buffers, tile_buffers, input_buffers, _pairs = buffers
    held_ready, held_empty, ready, empty, tile_ready, tile_empty = barriers
    tiles, heads, sections, row_tiles, _query_heads, group, rows, columns, _padded = sizes
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    STAGES: gl.constexpr = k_buffers.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    HELD_BYTES: gl.constexpr = q_desc.block_type.nbytes + do_desc.block_type.nbytes
    KV_BYTES: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    BYTES: gl.constexpr = KV_BYTES + STAGED_BYTES
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        following = tell_following(
            tile, turn, counter, tile_buffers, tile_ready, tile_empty, DYNAMIC
        )
        row_tile, head = tile_of(tile, heads, sections, row_tiles)
        b, h = batch_and_head(head, part)
        masked, whole, found = blocks_of(
            row_tile, ROWS * CONSUMERS, N, b, h, rows, columns, numbers, ()
        )
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(held_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(held_ready.index(c), HELD_BYTES)
            at = (row_tile * CONSUMERS + c) * ROWS
            load(q_desc, [b, h, at, 0], held_ready.index(c), q_buffers.index(c))
            load(do_desc, [b, h, at, 0], held_ready.index(c), do_buffers.index(c))
        turn += 1
        kv = h // group
        for i in range(0, masked + whole):
            k0 = block_of(i, masked, found) * N
            place = place_in_ring(count, ready, empty, BYTES, STAGES)
            load(k_desc, [b, kv, k0, 0], ready.index(place), k_buffers.index(place))
            load(v_desc, [b, kv, k0, 0], ready.index(place), v_buffers.index(place))
            copy_staged(
                maps, input_buffers, ready.index(place), place, b, h,
                row_tile * CONSUMERS * ROWS, k0, ROWS, CONSUMERS,
            )  # fmt: skip
            count += 1
        tile = following


@gluon.jit
def step(
    held, shared, state, count, end, scale, place, fixed, stored, k0, MASKED: gl.constexpr,
    WHICH: gl.constexpr, PAIRS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A block of keys whose scores are there."""
    q_buffer, do_buffer, shift, delta = held
    buffers, barriers, sizes, _part, numbers, _inputs = shared
    q_buffers, _do_buffers, k_buffers, v_buffers, _told, input_buffers, pair_buffers = buffers
    _held_ready, _held_empty, ready, empty, _tile_ready, _tile_empty = barriers
    _tiles, _heads, _sections, _row_tiles, _query_heads, _group, rows, columns, _padded = sizes
    dq, s = state
    STAGES: gl.constexpr = k_buffers.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    ROWS: gl.constexpr = q_buffer.shape[0]
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    dtype: gl.constexpr = k_buffers.dtype
    b, h, q = place
    ring = count % STAGES
    v = v_buffers.index(ring).reshape((N, v_buffers.shape[4])).permute((1, 0))
    dp = gl.zeros((ROWS, N), gl.float32, layout=S_LAYOUT)
    dp = warpgroup_mma(do_buffer, v, dp, use_acc=False, is_async=True)
    k = gl.expand_dims(k0 + gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
    moving = staged_values(input_buffers, ring, WHICH, CONSUMERS, N, S_LAYOUT)
    if SCORED:
        s = score(s, q, k, b, h, rows, columns, numbers, fixed, moving)
    else:
        s = s * scale
    if MASKED:
        kept = keep(q, k, b, h, rows, columns, numbers, fixed, moving) & (k < columns)
        s = gl.where(kept, s, float("-inf"))
    p = gl.exp2(s - shift)
    dp = warpgroup_mma_wait(0, deps=[dp])
    narrow = (p * (dp - delta)).to(dtype)
    ds = gl.convert_layout(narrow, gl.DotOperandLayout(0, dq.type.layout, 2))
    dq = warpgroup_mma(
        ds, k_buffers.index(ring).reshape((N, k_buffers.shape[4])), dq, is_async=True
    )
    # Behind the last block its own scores once more, which nobody reads.
    s = scores_of(q_buffer, k_buffers, ready, gl.minimum(count + 1, end), S_LAYOUT)
    if PAIRS:
        pair_desc, pair_row = stored
        # The copy out of the block before has to have read its memory.
        tma.store_wait(0)
        pair_buffer = pair_buffers.index(WHICH)
        pair_buffer.store(narrow)
        fence_async_shared()
        store(pair_desc, [pair_row, k0], pair_buffer)
    # Not across a loop's end: the assembler would start one product at a time.
    dq, s = warpgroup_mma_wait(0, deps=[dq, s])
    mbarrier.arrive(empty.index(ring), count=1)
    return dq, s


@gluon.jit
def consume(
    results, shared, DYNAMIC: gl.constexpr, PAIRS: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """ROWS rows of every tile of a program: products, exponentials, the gradient."""
    dq_desc, pair_desc, shift_ptr, delta_ptr, scale, slope, pair_rows = results
    buffers, barriers, sizes, part, numbers, inputs = shared
    q_buffers, do_buffers, k_buffers, _v_buffers, tile_buffers, _staged, _pairs = buffers
    held_ready, held_empty, ready, _empty, tile_ready, tile_empty = barriers
    tiles, heads, sections, row_tiles, query_heads, _group, rows, columns, padded = sizes
    first_batch, first_head, _some_batches, some_heads = part
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    D: gl.constexpr = q_buffers.shape[4]
    V: gl.constexpr = do_buffers.shape[4]
    N: gl.constexpr = k_buffers.shape[3]
    WARPS: gl.constexpr = [ROWS // 16, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, N, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, D, 16])
    dtype: gl.constexpr = k_buffers.dtype

    q_buffer = q_buffers.index(WHICH).reshape((ROWS, D))
    do_buffer = do_buffers.index(WHICH).reshape((ROWS, V))
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row_tile, head = tile_of(tile, heads, sections, row_tiles)
        b, h = batch_and_head(head, part)
        masked, whole, found = blocks_of(
            row_tile, ROWS * CONSUMERS, N, b, h, rows, columns, numbers, ()
        )
        q0 = (row_tile * CONSUMERS + WHICH) * ROWS
        q = q0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        # There are more of both than rows; a consumer may have none.
        at = gl.cast(b * query_heads + h, gl.int64) * padded + q
        shift = gl.load(shift_ptr + at, mask=q < padded, other=float("inf"))
        delta = gl.load(delta_ptr + at, mask=q < padded, other=0.0)
        held = (q_buffer, do_buffer, gl.expand_dims(shift, 1), gl.expand_dims(delta, 1))
        place = (b, h, gl.expand_dims(q, 1))
        # Rows that do not exist read the last one's inputs.
        fixed = along_rows(inputs, b, h, gl.minimum(gl.expand_dims(q, 1), rows - 1))
        end = count + masked + whole - 1
        stored = pair_desc, ((b - first_batch) * some_heads + h - first_head) * pair_rows + q0

        mbarrier.wait(held_ready.index(WHICH), turn & 1)
        s = scores_of(q_buffer, k_buffers, ready, count, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
        dq = gl.zeros((ROWS, D), gl.float32, layout=Q_LAYOUT)
        for i in range(0, masked):
            dq, s = step(
                held, shared, (dq, s), count, end, scale, place, fixed, stored,
                masked_block(i, found) * N, True, WHICH, PAIRS, S_LAYOUT,
            )  # fmt: skip
            count += 1
        for i in range(0, whole):
            dq, s = step(
                held, shared, (dq, s), count, end, scale, place, fixed, stored,
                whole_block(i, found) * N, False, WHICH, PAIRS, S_LAYOUT,
            )  # fmt: skip
            count += 1
        tile = told_following(tile, turn, tile_buffers, tile_ready, tile_empty, ROWS // 16, DYNAMIC)
        turn += 1
        q_buffer.store((dq * slope).to(dtype))
        fence_async_shared()
        store(dq_desc, [b, h, q0, 0], q_buffers.index(WHICH))
        # The copy out has to have read its memory before the next rows come.
        tma.store_wait(0)
        mbarrier.arrive(held_empty.index(WHICH), count=1)


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "heads",
        "sections",
        "row_tiles",
        "query_heads",
        "group",
        "rows",
        "columns",
        "padded",
        "first_batch",
        "first_head",
        "some_batches",
        "some_heads",
        "pair_rows",
    ]
)
def attention_rows_gluon(
    q_desc, k_desc, v_desc, do_desc, dq_desc, x0_desc, x1_desc, pair_desc, shift_ptr, delta_ptr,
    counter, tiles, heads, sections, row_tiles, query_heads, group, scale, slope, rows, columns,
    padded, first_batch, first_head, some_batches, some_heads, pair_rows, numbers, inputs,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, DYNAMIC: gl.constexpr, PAIRS: gl.constexpr,
    STAGED_BYTES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, V], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, V], v_desc.layout)
    maps = ()
    input_buffers = ()
    if STAGED >= 1:
        maps = (x0_desc,)  # type: ignore[assignment]
        input_buffers = (staged_buffers(x0_desc, STAGES, CONSUMERS),)  # type: ignore[assignment]
    if STAGED == 2:
        maps = maps + (x1_desc,)  # type: ignore[assignment]
        more = (staged_buffers(x1_desc, STAGES, CONSUMERS),)
        input_buffers = input_buffers + more  # type: ignore[assignment]
    if PAIRS:
        pair_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, N], pair_desc.layout)
    else:
        pair_buffers = ()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    barriers = barriers_of(STAGES, CONSUMERS)
    fence_async_shared()

    shared = (
        (q_buffers, do_buffers, k_buffers, v_buffers, tile_buffers, input_buffers, pair_buffers),
        barriers,
        (tiles, heads, sections, row_tiles, query_heads, group, rows, columns, padded),
        (first_batch, first_head, some_batches, some_heads),
        numbers,
        inputs,
    )
    results = (dq_desc, pair_desc, shift_ptr, delta_ptr, scale, slope, pair_rows)
    sources = (q_desc, k_desc, v_desc, do_desc, maps, counter)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (results, shared, DYNAMIC, PAIRS, 0)),
                (consume, (results, shared, DYNAMIC, PAIRS, 1)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [ROWS // 16, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (results, shared, DYNAMIC, PAIRS, 0)),
                (consume, (results, shared, DYNAMIC, PAIRS, 1)),
                (consume, (results, shared, DYNAMIC, PAIRS, 2)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [ROWS // 16, ROWS // 16, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
