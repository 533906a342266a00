"""The attention forward for Hopper: copies, products and softmax by warps of their own.

A tile is ROWS query rows of each of CONSUMERS consumers, against all the keys that its span names.
One warp copies K and V into rings of STAGES blocks of N keys in shared memory; a consumer starts
the scores of a block, then the product of the block before with V, and does the softmax of its
scores while that product runs. With PINGPONG consumers take turns in starting products, so that
one's softmax lies beside the others' products (Shah et al., FlashAttention-3, 2024).

Blocks are taken from the last to the first: the one at the diagonal is masked, then come whole
ones, then those that a window cuts. A program takes tiles ``program, program + programs, ...``.
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

if hasattr(tma, "async_load"):  # triton 3.9
    load, store = tma.async_load, tma.async_store
else:
    load, store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def span(q0, q1, rows, columns, numbers):
    """Of a program: ``Program.row_spans``' one span. Replaced by ``kernel``."""
    return 0, columns, 0, columns


@gluon.jit
def keep(q, k, rows, columns, numbers):
    """Of a program: ``Program.keep``. Replaced by ``kernel``."""
    return k < columns


@gluon.jit
def tile_of(tile, heads, section, row_tiles):
    """(number of the row tile, head) of a tile: sections of heads whose K and V stay in the L2
    cache, in each the longest rows first and the heads innermost."""
    per_section = section * row_tiles
    first = (tile // per_section) * section
    size = gl.minimum(section, heads - first)
    inside = tile % per_section
    return row_tiles - 1 - inside // size, first + inside % size


@gluon.jit
def blocks_of(q0, q1, rows, columns, numbers, N: gl.constexpr):
    """Blocks [lo, hi) of keys, at least one, of which [full_lo, full_hi) are kept whole."""
    q1 = gl.minimum(q1, rows - 1)
    lo, hi, full_lo, full_hi = span(q0, q1, rows, columns, numbers)
    lo = gl.maximum(lo, 0) // N
    hi = (gl.minimum(hi, columns) + N - 1) // N
    lo = gl.minimum(lo, (columns - 1) // N)
    hi = gl.maximum(hi, lo + 1)
    full_hi = gl.maximum(gl.minimum(gl.minimum(full_hi, columns) // N, hi), lo)
    full_lo = gl.minimum(gl.maximum((gl.maximum(full_lo, 0) + N - 1) // N, lo), full_hi)
    return lo, hi, full_lo, full_hi


@gluon.jit
def copy(desc, b, h, row, ready, empty, buffers, count, STAGES: gl.constexpr):
    """Start the copy of the ``count``-th block into its place in a ring."""
    place = count % STAGES
    # A ring's first lap waits for the phase before the first, which counts as complete.
    mbarrier.wait(empty.index(place), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(place), desc.block_type.nbytes)
    load(desc, [b, h, row, 0], ready.index(place), buffers.index(place))


@gluon.jit
def tell(buffer, number):
    """Write a number to shared memory, by one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffer.store(gl.full([1], number, gl.int32, layout=layout))


@gluon.jit
def told(buffer, WARPS: gl.constexpr):
    """The number that ``tell`` wrote."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(buffer.load(layout), 0)


@gluon.jit
def produce(sources, shared, DYNAMIC: gl.constexpr):
    q_desc, k_desc, v_desc, counter = sources
    buffers, barriers, sizes, numbers = shared
    q_buffers, k_buffers, v_buffers, _o_buffers, tile_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _turns, tile_ready, tile_empty = barriers
    tiles, heads, section, row_tiles, query_heads, group, rows, columns = sizes
    CONSUMERS: gl.constexpr = q_buffers.shape[0]
    ROWS: gl.constexpr = q_buffers.shape[3]
    STAGES: gl.constexpr = k_buffers.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        if DYNAMIC:
            following = gl.num_programs(0) + gl.atomic_add(counter, 1)
            mbarrier.wait(tile_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
            tell(tile_buffers.index(turn & 1), following)
            mbarrier.arrive(tile_ready.index(turn & 1), count=1)
        else:
            following = tile + gl.num_programs(0)
        row_tile, head = tile_of(tile, heads, section, row_tiles)
        b = head // query_heads
        h = head % query_heads
        kv = h // group
        q0 = row_tile * (ROWS * CONSUMERS)
        lo, hi, _, _ = blocks_of(q0, q0 + ROWS * CONSUMERS - 1, rows, columns, numbers, N)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_ready.index(c), q_desc.block_type.nbytes)
            load(q_desc, [b, h, q0 + c * ROWS, 0], q_ready.index(c), q_buffers.index(c))
        turn += 1
        copy(k_desc, b, kv, (hi - 1) * N, k_ready, k_empty, k_buffers, count, STAGES)
        for i in range(1, hi - lo):
            k0 = (hi - 1 - i) * N
            copy(k_desc, b, kv, k0, k_ready, k_empty, k_buffers, count + 1, STAGES)
            copy(v_desc, b, kv, k0 + N, v_ready, v_empty, v_buffers, count, STAGES)
            count += 1
        copy(v_desc, b, kv, lo * N, v_ready, v_empty, v_buffers, count, STAGES)
        count += 1
        tile = following


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """Pairs of neighbours along the keys as one int32 each, rounded. A loop that carried 16-bit
    values would take the pairs apart and put them together again."""
    even, odd = gl.split(gl.reshape(p, (p.shape[0], p.shape[1] // 2, 2)))
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        asm, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(p, dtype: gl.constexpr, layout: gl.constexpr):
    """The pairs of ``packed`` again, as a product's left operand."""
    even = (p & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (p >> 16).to(gl.int16).to(dtype, bitcast=True)
    both = gl.reshape(gl.join(even, odd), (p.shape[0], p.shape[1] * 2))
    return gl.convert_layout(both, layout)


@gluon.jit
def softmax(
    s, m, total, scale, q, k0, rows, columns, numbers, MASKED: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """exp2 of a block's scores less the running maximum, which is in units of the products."""
    layout: gl.constexpr = s.type.layout
    if MASKED:
        k = gl.expand_dims(k0 + gl.arange(0, N, layout=gl.SliceLayout(0, layout)), 0)
        kept = keep(gl.expand_dims(q, 1), k, rows, columns, numbers) & (k < columns)
        s = gl.where(kept, s, float("-inf"))
    highest = gl.maximum(m, gl.max(s, 1))
    base = highest
    if MASKED:
        base = gl.where(highest == float("-inf"), 0.0, highest)
    p = gl.exp2(s * scale - gl.expand_dims(base * scale, 1))
    decay = gl.exp2((m - base) * scale)
    return p, highest, total * decay + gl.sum(p, 1), decay


@gluon.jit
def step(
    q_buffer, buffers, barriers, o, p, m, total, count, steps, scale, q, k0, rows, columns, numbers,
    MASKED: gl.constexpr, PINGPONG: gl.constexpr, WHICH: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of block ``count + 1`` and the product of block ``count`` with V, then the softmax."""
    _q_buffers, k_buffers, v_buffers, _o_buffers, _tile_buffers = buffers
    _q_ready, _q_empty, k_ready, k_empty, v_ready, v_empty, turns, _tile_ready, _tile_empty = (
        barriers
    )
    CONSUMERS: gl.constexpr = _q_buffers.shape[0]
    STAGES: gl.constexpr = k_buffers.shape[0]
    ROWS: gl.constexpr = o.shape[0]
    N: gl.constexpr = k_buffers.shape[3]
    O_LAYOUT: gl.constexpr = o.type.layout
    kn = (count + 1) % STAGES
    vn = count % STAGES
    mbarrier.wait(k_ready.index(kn), ((count + 1) // STAGES) & 1)
    if PINGPONG:
        mbarrier.wait(turns.index(WHICH), (steps & 1) ^ (1 if WHICH == 0 else 0))
    s = gl.zeros((ROWS, N), gl.float32, layout=S_LAYOUT)
    k = k_buffers.index(kn).reshape((N, k_buffers.shape[4])).permute((1, 0))
    s = warpgroup_mma(q_buffer, k, s, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(vn), (count // STAGES) & 1)
    v = v_buffers.index(vn).reshape((N, v_buffers.shape[4]))
    left: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    o = warpgroup_mma(unpacked(p, k_buffers.dtype, left), v, o, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index((WHICH + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    e, m, total, decay = softmax(s, m, total, scale, q, k0, rows, columns, numbers, MASKED, N)
    # Passes at once: a branch that the assembler does not move the softmax behind.
    mbarrier.wait(v_ready.index(vn), (count // STAGES) & 1)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(k_empty.index(kn), count=1)
    mbarrier.arrive(v_empty.index(vn), count=1)
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT)), 1)
    # Not before: it would take the registers of the operand that is still read, and the assembler
    # would start one product at a time.
    p = packed(e, k_buffers.dtype)
    return o, p, m, total


@gluon.jit
def consume(
    results, shared, PINGPONG: gl.constexpr, NAN: gl.constexpr, LEFT: gl.constexpr,
    DYNAMIC: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    out_desc, lse, scale = results
    buffers, barriers, sizes, numbers = shared
    q_buffers, k_buffers, v_buffers, o_buffers, tile_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _turns, tile_ready, tile_empty = barriers
    tiles, heads, section, row_tiles, query_heads, _group, rows, columns = sizes
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
        row_tile, head = tile_of(tile, heads, section, row_tiles)
        first = row_tile * (ROWS * CONSUMERS)
        lo, hi, full_lo, full_hi = blocks_of(
            first, first + ROWS * CONSUMERS - 1, rows, columns, numbers, N
        )
        q0 = first + WHICH * ROWS
        q = q0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))

        mbarrier.wait(q_ready.index(WHICH), turn & 1)
        place = count % STAGES
        mbarrier.wait(k_ready.index(place), (count // STAGES) & 1)
        s = gl.zeros((ROWS, N), gl.float32, layout=S_LAYOUT)
        k = k_buffers.index(place).reshape((N, D)).permute((1, 0))
        s = warpgroup_mma(q_buffer, k, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(place), count=1)
        m = gl.full((ROWS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        e, m, total, _ = softmax(
            s, m, total, scale, q, (hi - 1) * N, rows, columns, numbers, True, N
        )
        p = packed(e, dtype)
        o = gl.zeros((ROWS, V), gl.float32, layout=O_LAYOUT)

        for j in range(full_hi, hi - 1):
            k0 = (hi - 2 - (j - full_hi)) * N
            o, p, m, total = step(
                q_buffer, buffers, barriers, o, p, m, total, count, steps, scale, q, k0, rows,
                columns, numbers, True, PINGPONG, WHICH, S_LAYOUT,
            )  # fmt: skip
            count += 1
            steps += 1
        for _j in range(full_lo, gl.minimum(full_hi, hi - 1)):
            o, p, m, total = step(
                q_buffer, buffers, barriers, o, p, m, total, count, steps, scale, q, 0, rows,
                columns, numbers, False, PINGPONG, WHICH, S_LAYOUT,
            )  # fmt: skip
            count += 1
            steps += 1
        if LEFT:
            left = gl.minimum(full_lo, hi - 1)
            for j in range(lo, left):
                o, p, m, total = step(
                    q_buffer, buffers, barriers, o, p, m, total, count, steps, scale, q,
                    (left - 1 - (j - lo)) * N, rows, columns, numbers, True, PINGPONG, WHICH,
                    S_LAYOUT,
                )  # fmt: skip
                count += 1
                steps += 1
        mbarrier.arrive(q_empty.index(WHICH), count=1)
        if DYNAMIC:
            mbarrier.wait(tile_ready.index(turn & 1), (turn >> 1) & 1)
            tile = told(tile_buffers.index(turn & 1), ROWS // 16)
            mbarrier.arrive(tile_empty.index(turn & 1), count=1)
        else:
            tile += gl.num_programs(0)
        turn += 1

        place = count % STAGES
        mbarrier.wait(v_ready.index(place), (count // STAGES) & 1)
        v = v_buffers.index(place).reshape((N, V))
        o = warpgroup_mma(unpacked(p, dtype, P_LAYOUT), v, o, is_async=True)
        nothing: gl.constexpr = float("nan") if NAN else 0.0
        factor = gl.where(total == 0.0, nothing, 1.0 / total)
        found = (m * scale + gl.log2(total)) * LN2
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(place), count=1)
        count += 1
        gl.store(lse + gl.cast(head, gl.int64) * rows + q, found, mask=q < rows)
        o = o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT)), 1)
        # The copy out of the tile before has to have read its buffer.
        tma.store_wait(0)
        o_buffer = o_buffers.index(WHICH)
        o_buffer.reshape((ROWS, V)).store(o.to(dtype))
        fence_async_shared()
        store(out_desc, [head // query_heads, head % query_heads, q0, 0], o_buffer)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "heads",
        "section",
        "row_tiles",
        "query_heads",
        "group",
        "rows",
        "columns",
    ]
)
def attention_gluon(
    q_desc, k_desc, v_desc, out_desc, lse, counter, tiles, heads, section, row_tiles, query_heads,
    group, scale, rows, columns, numbers, N: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr, NAN: gl.constexpr,
    LEFT: gl.constexpr, DYNAMIC: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, V], v_desc.layout)
    o_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, V], out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
        mbarrier.init(turns.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    shared = (
        (q_buffers, k_buffers, v_buffers, o_buffers, tile_buffers),
        (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns, tile_ready, tile_empty),
        (tiles, heads, section, row_tiles, query_heads, group, rows, columns),
        numbers,
    )
    results = (out_desc, lse, scale)
    sources = (q_desc, k_desc, v_desc, counter)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (results, shared, PINGPONG, NAN, LEFT, DYNAMIC, 0)),
                (produce, (sources, shared, DYNAMIC)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (results, shared, PINGPONG, NAN, LEFT, DYNAMIC, 0)),
                (consume, (results, shared, PINGPONG, NAN, LEFT, DYNAMIC, 1)),
                (produce, (sources, shared, DYNAMIC)),
            ],
            [ROWS // 16, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (results, shared, PINGPONG, NAN, LEFT, DYNAMIC, 0)),
                (consume, (results, shared, PINGPONG, NAN, LEFT, DYNAMIC, 1)),
                (consume, (results, shared, PINGPONG, NAN, LEFT, DYNAMIC, 2)),
                (produce, (sources, shared, DYNAMIC)),
            ],
            [ROWS // 16, ROWS // 16, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
