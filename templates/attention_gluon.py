"""The attention forward for Hopper: copies, products and softmax by warps of their own.

A tile is ROWS query rows of each of CONSUMERS consumers, against all the keys that its span names.
One warp copies blocks of N keys into a ring of STAGES places in shared memory, K of a block
together with V of the one before. A consumer starts the scores of a block, then the product of the
one before with V, and does the softmax of its scores while that product runs. With PINGPONG
consumers take turns in starting products, so that one's softmax lies beside the others' products
(Shah et al., FlashAttention-3, 2024).

What a score reads along the keys is copied beside K where a tensor map can describe it: as loads
of the consumers it would stand in registers beside the scores.

Of a tile's blocks those that need a mask come first, then those that are kept whole.
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
    along_keys,
    along_rows,
    block_of,
    blocks_of,
    copy_staged,
    keep,
    load,
    masked_block,
    origins,
    packed,
    place_in_ring,
    score,
    staged_buffers,
    staged_values,
    store,
    tell_following,
    tile_of,
    told,
    unpacked,
    whole_block,
)

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def batch_and_head(head, batches, query_heads):
    """The place of a tile's ``head``."""
    if BATCHES_BESIDE:
        return head % batches, head // batches
    else:
        return head // query_heads, head % query_heads


@gluon.jit
def produce(sources, shared, DYNAMIC: gl.constexpr, STAGED_BYTES: gl.constexpr):
    """Start all copies into shared memory, and tell the consumers which tile follows."""
    q_desc, k_desc, v_desc, maps, counter = sources
    buffers, barriers, sizes, numbers, _inputs, documents = shared
    q_buffers, k_buffers, v_buffers, _o_buffers, tile_buffers, input_buffers = buffers
    q_ready, q_empty, ready, empty, _turns, tile_ready, tile_empty = barriers
    tiles, heads, sections, row_tiles, batches, query_heads, group, rows, columns = sizes
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    STAGES: gl.constexpr = k_buffers.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes + STAGED_BYTES
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        following = tell_following(
            tile, turn, counter, tile_buffers, tile_ready, tile_empty, DYNAMIC
        )
        row_tile, head = tile_of(tile, heads, sections, row_tiles)
        b, h = batch_and_head(head, batches, query_heads)
        kv = h // group
        masked, whole, found = blocks_of(
            row_tile, ROWS * CONSUMERS, N, b, h, rows, columns, numbers, documents
        )
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_ready.index(c), q_desc.block_type.nbytes)
            load(
                q_desc,
                [b, h, (row_tile * CONSUMERS + c) * ROWS, 0],
                q_ready.index(c),
                q_buffers.index(c),
            )
        turn += 1
        q0 = row_tile * CONSUMERS * ROWS
        k0 = block_of(0, masked, found) * N
        place = place_in_ring(count, ready, empty, K_BYTES, STAGES)
        load(k_desc, [b, kv, k0, 0], ready.index(place), k_buffers.index(place))
        copy_staged(maps, input_buffers, ready.index(place), place, b, h, q0, k0, ROWS, CONSUMERS)
        count += 1
        for i in range(1, masked + whole):
            v0 = k0
            k0 = block_of(i, masked, found) * N
            size: gl.constexpr = K_BYTES + v_desc.block_type.nbytes
            place = place_in_ring(count, ready, empty, size, STAGES)
            load(k_desc, [b, kv, k0, 0], ready.index(place), k_buffers.index(place))
            copy_staged(
                maps, input_buffers, ready.index(place), place, b, h, q0, k0, ROWS, CONSUMERS
            )
            load(v_desc, [b, kv, v0, 0], ready.index(place), v_buffers.index(place))
            count += 1
        place = place_in_ring(count, ready, empty, v_desc.block_type.nbytes, STAGES)
        load(v_desc, [b, kv, k0, 0], ready.index(place), v_buffers.index(place))
        count += 1
        tile = following


@gluon.jit
def read(inputs, at, q, k0, columns, MASKED: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """``along_keys`` of a block."""
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return along_keys(inputs, at, q, k0, k, columns - k0, MASKED)


@gluon.jit
def softmax(
    s, m, total, scale, place, k0, rows, columns, numbers, fixed, moving, MASKED: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """exp2 of a block's scores less the running maximum, which is in units of the scores."""
    layout: gl.constexpr = s.type.layout
    b, h, q = place
    k = gl.expand_dims(k0 + gl.arange(0, N, layout=gl.SliceLayout(0, layout)), 0)
    s = score(s, q, k, b, h, rows, columns, numbers, fixed, moving)
    if MASKED:
        kept = keep(q, k, b, h, rows, columns, numbers, fixed, moving) & (k < columns)
        s = gl.where(kept, s, float("-inf"))
    highest = gl.maximum(m, gl.max(s, 1))
    base = highest
    if MASKED or SCORED:
        base = gl.where(highest == float("-inf"), 0.0, highest)
    p = gl.exp2(s * scale - gl.expand_dims(base * scale, 1))
    decay = gl.exp2((m - base) * scale)
    return p, highest, total * decay + gl.sum(p, 1), decay


@gluon.jit
def step(
    q_buffer, shared, state, count, steps, turn, scale, place, near, at, fixed, k0,
    MASKED: gl.constexpr, PINGPONG: gl.constexpr, WHICH: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a block and the product of the one before with V, then the softmax."""
    buffers, barriers, sizes, numbers, inputs, _documents = shared
    q_buffers, k_buffers, v_buffers, _o_buffers, _tile_buffers, input_buffers = buffers
    q_ready, _q_empty, ready, empty, turns, _tile_ready, _tile_empty = barriers
    _tiles, _heads, _sections, _row_tiles, _batches, _query_heads, _group, rows, columns = sizes
    o, p, m, total = state
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    STAGES: gl.constexpr = k_buffers.shape[0]
    ROWS: gl.constexpr = o.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    O_LAYOUT: gl.constexpr = o.type.layout
    ring = count % STAGES
    mbarrier.wait(ready.index(ring), (count // STAGES) & 1)
    if PINGPONG:
        mbarrier.wait(turns.index(WHICH), (steps & 1) ^ (1 if WHICH == 0 else 0))
    s = gl.zeros((ROWS, N), gl.float32, layout=S_LAYOUT)
    k = k_buffers.index(ring).reshape((N, k_buffers.shape[4])).permute((1, 0))
    s = warpgroup_mma(q_buffer, k, s, use_acc=False, is_async=True)
    v = v_buffers.index(ring).reshape((N, v_buffers.shape[4]))
    left: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    o = warpgroup_mma(unpacked(p, k_buffers.dtype, left), v, o, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index((WHICH + 1) % CONSUMERS), count=1)
    moving = read(inputs, at, near, k0, columns, MASKED, N, S_LAYOUT)
    s = warpgroup_mma_wait(1, deps=[s])
    moving = moving + staged_values(input_buffers, ring, WHICH, CONSUMERS, N, S_LAYOUT)
    e, m, total, decay = softmax(
        s, m, total, scale, place, k0, rows, columns, numbers, fixed, moving, MASKED, N
    )
    # Passes at once, q is there: a branch that the assembler does not move the softmax behind.
    mbarrier.wait(q_ready.index(WHICH), turn & 1)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(empty.index(ring), count=1)
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT)), 1)
    # Not before: it would take the registers of the operand that is still read, and the assembler
    # would start one product at a time.
    p = packed(e, k_buffers.dtype)
    return o, p, m, total


@gluon.jit
def consume(
    results, shared, PINGPONG: gl.constexpr, NAN: gl.constexpr, DYNAMIC: gl.constexpr,
    IN_PLACE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """ROWS rows of every tile of a program: products, softmax, output."""
    out_desc, lse, scale = results
    buffers, barriers, sizes, numbers, inputs, documents = shared
    q_buffers, k_buffers, v_buffers, o_buffers, tile_buffers, input_buffers = buffers
    q_ready, q_empty, ready, empty, _turns, tile_ready, tile_empty = barriers
    tiles, heads, sections, row_tiles, batches, query_heads, _group, rows, columns = sizes
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    STAGES: gl.constexpr = k_buffers.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    D: gl.constexpr = k_buffers.shape[4]
    V: gl.constexpr = v_buffers.shape[4]
    WARPS: gl.constexpr = [ROWS // 16, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    dtype: gl.constexpr = q_buffers.dtype

    q_buffer = q_buffers.index(WHICH).reshape((ROWS, D))
    count = 0
    turn = 0
    steps = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row_tile, head = tile_of(tile, heads, sections, row_tiles)
        b, h = batch_and_head(head, batches, query_heads)
        masked, whole, found = blocks_of(
            row_tile, ROWS * CONSUMERS, N, b, h, rows, columns, numbers, documents
        )
        q0 = (row_tile * CONSUMERS + WHICH) * ROWS
        q = q0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        place = (b, h, gl.expand_dims(q, 1))
        # Rows that do not exist read the last one's inputs.
        near = gl.minimum(gl.expand_dims(q, 1), rows - 1)
        fixed = along_rows(inputs, b, h, near)
        at = origins(inputs, b, h, gl.minimum(q0, rows - 1))
        near -= gl.minimum(q0, rows - 1)

        mbarrier.wait(q_ready.index(WHICH), turn & 1)
        ring = count % STAGES
        k0 = block_of(0, masked, found) * N
        moving = read(inputs, at, near, k0, columns, True, N, S_LAYOUT)
        mbarrier.wait(ready.index(ring), (count // STAGES) & 1)
        s = gl.zeros((ROWS, N), gl.float32, layout=S_LAYOUT)
        k = k_buffers.index(ring).reshape((N, D)).permute((1, 0))
        s = warpgroup_mma(q_buffer, k, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        moving = moving + staged_values(input_buffers, ring, WHICH, CONSUMERS, N, S_LAYOUT)
        mbarrier.arrive(empty.index(ring), count=1)
        count += 1
        m = gl.full((ROWS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        e, m, total, _ = softmax(
            s, m, total, scale, place, k0, rows, columns, numbers, fixed, moving, True, N
        )
        p = packed(e, dtype)
        o = gl.zeros((ROWS, V), gl.float32, layout=O_LAYOUT)

        for i in range(1, masked):
            o, p, m, total = step(
                q_buffer, shared, (o, p, m, total), count, steps, turn, scale, place, near, at,
                fixed, masked_block(i, found) * N, True, PINGPONG, WHICH, S_LAYOUT,
            )  # fmt: skip
            count += 1
            steps += 1
        for i in range(gl.where(masked == 0, 1, 0), whole):
            o, p, m, total = step(
                q_buffer, shared, (o, p, m, total), count, steps, turn, scale, place, near, at,
                fixed, whole_block(i, found) * N, False, PINGPONG, WHICH, S_LAYOUT,
            )  # fmt: skip
            count += 1
            steps += 1
        if not IN_PLACE:
            mbarrier.arrive(q_empty.index(WHICH), count=1)
        if DYNAMIC:
            mbarrier.wait(tile_ready.index(turn & 1), (turn >> 1) & 1)
            tile = told(tile_buffers.index(turn & 1), ROWS // 16)
            mbarrier.arrive(tile_empty.index(turn & 1), count=1)
        else:
            tile += gl.num_programs(0)
        turn += 1

        ring = count % STAGES
        mbarrier.wait(ready.index(ring), (count // STAGES) & 1)
        v = v_buffers.index(ring).reshape((N, V))
        o = warpgroup_mma(unpacked(p, dtype, P_LAYOUT), v, o, is_async=True)
        nothing: gl.constexpr = float("nan") if NAN else 0.0
        factor = gl.where(total == 0.0, nothing, 1.0 / total)
        found_lse = (m * scale + gl.log2(total)) * LN2
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(empty.index(ring), count=1)
        count += 1
        row = gl.cast(b * query_heads + h, gl.int64) * rows
        gl.store(lse + row + q, found_lse, mask=q < rows)
        o = o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT)), 1)
        # The copy out of the tile before has to have read its buffer.
        tma.store_wait(0)
        o_buffer = o_buffers.index(WHICH)
        o_buffer.reshape((ROWS, V)).store(o.to(dtype))
        fence_async_shared()
        store(out_desc, [b, h, q0, 0], o_buffer)
        if IN_PLACE:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(WHICH), count=1)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "heads",
        "sections",
        "row_tiles",
        "batches",
        "query_heads",
        "group",
        "rows",
        "columns",
    ]
)
def attention_gluon(
    q_desc, k_desc, v_desc, out_desc, x0_desc, x1_desc, lse, counter, tiles, heads, sections,
    row_tiles, batches, query_heads, group, scale, rows, columns, numbers, inputs, documents,
    N: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr, NAN: gl.constexpr,
    DYNAMIC: gl.constexpr, IN_PLACE: gl.constexpr, STAGED_BYTES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, V], v_desc.layout)
    if IN_PLACE:
        o_buffers = q_buffers
    else:
        o_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, V], out_desc.layout)
    maps = ()
    input_buffers = ()
    if STAGED >= 1:
        maps = (x0_desc,)  # type: ignore[assignment]
        input_buffers = (staged_buffers(x0_desc, STAGES, CONSUMERS),)  # type: ignore[assignment]
    if STAGED == 2:
        maps = maps + (x1_desc,)  # type: ignore[assignment]
        more = (staged_buffers(x1_desc, STAGES, CONSUMERS),)
        input_buffers = input_buffers + more  # type: ignore[assignment]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
        mbarrier.init(turns.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    shared = (
        (q_buffers, k_buffers, v_buffers, o_buffers, tile_buffers, input_buffers),
        (q_ready, q_empty, ready, empty, turns, tile_ready, tile_empty),
        (tiles, heads, sections, row_tiles, batches, query_heads, group, rows, columns),
        numbers,
        inputs,
        documents,
    )
    results = (out_desc, lse, scale)
    sources = (q_desc, k_desc, v_desc, maps, counter)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (results, shared, PINGPONG, NAN, DYNAMIC, IN_PLACE, 0)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (results, shared, PINGPONG, NAN, DYNAMIC, IN_PLACE, 0)),
                (consume, (results, shared, PINGPONG, NAN, DYNAMIC, IN_PLACE, 1)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [ROWS // 16, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (results, shared, PINGPONG, NAN, DYNAMIC, IN_PLACE, 0)),
                (consume, (results, shared, PINGPONG, NAN, DYNAMIC, IN_PLACE, 1)),
                (consume, (results, shared, PINGPONG, NAN, DYNAMIC, IN_PLACE, 2)),
                (produce, (sources, shared, DYNAMIC, STAGED_BYTES)),
            ],
            [ROWS // 16, ROWS // 16, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
