"""What the Hopper kernels of attention share: a program's own functions, tiles and blocks, rings.

What a score is, what it reads, what is kept, and where, are the functions that stand first here: a
launch has a copy of this module in which they are those of its ``attention_program.Program``, and
of a kernel's module, whose imports are of that copy. A kernel that holds keys and goes over rows
has rows and keys exchanged: ``spans`` are those of ``Program.column_spans`` there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

if hasattr(tma, "async_load"):  # triton 3.9
    load, store = tma.async_load, tma.async_store
else:
    load, store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

SCORED = gl.constexpr(False)  # whether the score is more than the products times ``scale``
SPANS = gl.constexpr(1)
DOCUMENTS = gl.constexpr(False)
STAGED = gl.constexpr(0)  # how many inputs are copied into shared memory
BATCHES_BESIDE = gl.constexpr(False)  # a head's batches, which share a matrix, are neighbours


@gluon.jit
def spans(q0, q1, rows, columns, numbers):
    """lo, hi, full_lo, full_hi of each of ``Program.row_spans``."""
    return 0, columns, 0, columns


@gluon.jit
def origins(inputs, b, h, q0):
    """Pointers to row ``q0`` of the inputs that vary along the keys."""
    return (b,)


@gluon.jit
def along_rows(inputs, b, h, q):
    """The values of the inputs that do not vary along the keys."""
    return (b,)


@gluon.jit
def along_keys(inputs, at, q, k0, k, limit, MASKED: gl.constexpr):
    """The values of the other ones: of rows ``q`` and keys ``k`` behind ``at`` and ``k0``. With
    MASKED keys from ``limit`` on are not read."""
    return (k0,)


@gluon.jit
def staged_places(b, h, q, k):
    """Where the block of each staged input begins, four numbers for each."""
    return (b,)


@gluon.jit
def score(s, q, k, b, h, rows, columns, numbers, fixed, moving):
    """``Program.score``, of the values of ``along_rows``, and of ``along_keys`` with those of
    ``staged_values`` behind."""
    return s


@gluon.jit
def keep(q, k, b, h, rows, columns, numbers, fixed, moving):
    """``Program.keep``."""
    return k < columns


@gluon.jit
def tile_of(tile, heads, sections, row_tiles):
    """(number of the row tile, head) of a tile: the heads in so many sections, whose K and V stay
    in the L2 cache; in each the longest rows first and the heads innermost."""
    size = heads // sections
    larger = heads % sections  # so many sections have a head more
    border = larger * (size + 1) * row_tiles
    behind = tile >= border
    tile -= gl.where(behind, border, 0)
    first = gl.where(behind, larger * (size + 1), 0)
    size += gl.where(behind, 0, 1)
    first += tile // (size * row_tiles) * size
    tile = tile % (size * row_tiles)
    return row_tiles - 1 - tile // size, first + tile % size


@gluon.jit
def key_tile_of(tile, heads, sections, key_tiles):
    """(number of the key tile, head) of a tile: as ``tile_of``, but a causal mask's longest tiles
    are the first ones."""
    key_tile, head = tile_of(tile, heads, sections, key_tiles)
    return key_tiles - 1 - key_tile, head


@gluon.jit
def blocks_of(tile, ROWS: gl.constexpr, N: gl.constexpr, b, h, rows, columns, numbers, documents):
    """(number of blocks that need a mask, of those kept whole, spans) of a row tile, at least one
    block in all. A span is (first block, masked ones in front, whole ones, masked ones)."""
    bounds = spans(tile * ROWS, gl.minimum(tile * ROWS + ROWS, rows) - 1, rows, columns, numbers)
    if DOCUMENTS:
        hull = documents[0] + b * documents[1] + h * documents[2] + tile * 4
        least = gl.load(hull)
        most = gl.load(hull + 1)
        full_least = gl.load(hull + 2)
        full_most = gl.load(hull + 3)
    found = ()
    done = 0
    all_masked = 0
    all_whole = 0
    for i in gl.static_range(SPANS):
        lo = bounds[4 * i]
        hi = gl.minimum(bounds[4 * i + 1], columns)
        full_lo = bounds[4 * i + 2]
        full_hi = gl.minimum(bounds[4 * i + 3], columns)
        if DOCUMENTS:
            lo = gl.maximum(lo, least)
            hi = gl.minimum(hi, most)
            full_lo = gl.maximum(full_lo, full_least)
            full_hi = gl.minimum(full_hi, full_most)
        # A block that two spans touch is the first one's.
        first = gl.maximum(gl.maximum(lo, 0) // N, done)
        size = gl.maximum((gl.maximum(hi, 0) + N - 1) // N - first, 0)
        front = gl.minimum(gl.maximum((gl.maximum(full_lo, 0) + N - 1) // N - first, 0), size)
        whole = gl.minimum(gl.maximum(gl.maximum(full_hi, 0) // N - first - front, 0), size - front)
        masked = size - whole
        done = first + size
        all_masked += masked
        all_whole += whole
        found = found + (first, front, whole, masked)  # type: ignore[assignment]
    return gl.maximum(all_masked, gl.where(all_whole == 0, 1, 0)), all_whole, found


@gluon.jit
def masked_block(i, found):
    """The ``i``-th block that needs a mask; 0 where there is none."""
    block = 0
    for j in gl.static_range(SPANS):
        here = (i >= 0) & (i < found[4 * j + 3])
        at = found[4 * j] + i + gl.where(i < found[4 * j + 1], 0, found[4 * j + 2])
        block = gl.where(here, at, block)
        i -= found[4 * j + 3]
    return block


@gluon.jit
def whole_block(i, found):
    """The ``i``-th block that is kept whole."""
    block = 0
    for j in gl.static_range(SPANS):
        here = (i >= 0) & (i < found[4 * j + 2])
        block = gl.where(here, found[4 * j] + found[4 * j + 1] + i, block)
        i -= found[4 * j + 2]
    return block


@gluon.jit
def block_of(i, masked, found):
    """The ``i``-th block of all."""
    return gl.where(i < masked, masked_block(i, found), whole_block(i - masked, found))


@gluon.jit
def place_in_ring(count, ready, empty, size, STAGES: gl.constexpr):
    """The place of the ``count``-th copies, once it is empty; they are of ``size`` bytes."""
    place = count % STAGES
    # A ring's first lap waits for the phase before the first, which counts as complete.
    mbarrier.wait(empty.index(place), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(place), size)
    return place


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
def tell_following(
    tile, turn, counter, tile_buffers, tile_ready, tile_empty, DYNAMIC: gl.constexpr
):
    """The tile behind ``tile`` for the producer, which tells the consumers."""
    if DYNAMIC:
        following = gl.num_programs(0) + gl.atomic_add(counter, 1)
        mbarrier.wait(tile_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        tell(tile_buffers.index(turn & 1), following)
        mbarrier.arrive(tile_ready.index(turn & 1), count=1)
    else:
        following = tile + gl.num_programs(0)
    return following


@gluon.jit
def told_following(
    tile, turn, tile_buffers, tile_ready, tile_empty, WARPS: gl.constexpr, DYNAMIC: gl.constexpr
):
    """The tile behind ``tile`` for a consumer of so many warps."""
    if DYNAMIC:
        mbarrier.wait(tile_ready.index(turn & 1), (turn >> 1) & 1)
        tile = told(tile_buffers.index(turn & 1), WARPS)
        mbarrier.arrive(tile_empty.index(turn & 1), count=1)
    else:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def scores_of(held, ring_buffers, ready, count, S_LAYOUT: gl.constexpr):
    """Start the scores of the ``count``-th block of a ring beside the rows held, [HELD, BLOCK]."""
    STAGES: gl.constexpr = ring_buffers.shape[0]
    BLOCK: gl.constexpr = ring_buffers.shape[3]
    HELD: gl.constexpr = held.shape[0]
    ring = count % STAGES
    mbarrier.wait(ready.index(ring), (count // STAGES) & 1)
    other = ring_buffers.index(ring).reshape((BLOCK, ring_buffers.shape[4])).permute((1, 0))
    s = gl.zeros((HELD, BLOCK), gl.float32, layout=S_LAYOUT)
    return warpgroup_mma(held, other, s, use_acc=False, is_async=True)


@gluon.jit
def along(buffers, ring, LAYOUT: gl.constexpr):
    """The numbers of a block's rows, [1, ROWS]."""
    ROWS: gl.constexpr = buffers.shape[4]
    numbers = buffers.index(ring).reshape((ROWS,)).load(gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(numbers, 0)


@gluon.jit
def staged_buffers(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of blocks of an input: one for all consumers, or one for each one's rows."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    EACH: gl.constexpr = STAGES if ROWS == 1 else STAGES * CONSUMERS
    shape: gl.constexpr = [EACH, 1, 1, ROWS, desc.block_type.shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers_of(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Barriers that say when there is something and when it is used up: of what each consumer
    holds, of a ring of blocks, of the next two tiles."""
    held_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    held_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(held_ready.index(c), count=1)
        mbarrier.init(held_empty.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS)
    return held_ready, held_empty, ready, empty, tile_ready, tile_empty


@gluon.jit
def copy_staged(
    maps, buffers, barrier, place, b, h, q0, k0, ROWS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Start the copies of the staged inputs' blocks of rows from ``q0`` and keys from ``k0``."""
    at = staged_places(b, h, q0, k0)
    for j in gl.static_range(STAGED):
        if maps[j].block_type.shape[2] == 1:
            where = [at[4 * j], at[4 * j + 1], at[4 * j + 2], at[4 * j + 3]]
            load(maps[j], where, barrier, buffers[j].index(place))
        else:
            for c in gl.static_range(CONSUMERS):
                where = [at[4 * j], at[4 * j + 1], at[4 * j + 2] + c * ROWS, at[4 * j + 3]]
                load(maps[j], where, barrier, buffers[j].index(place * CONSUMERS + c))


@gluon.jit
def staged_values(
    buffers, place, WHICH: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """A consumer's blocks of the staged inputs in a place of the ring, [1 or ROWS, N]."""
    found = ()
    for j in gl.static_range(STAGED):
        ROWS: gl.constexpr = buffers[j].shape[3]
        if ROWS == 1:
            block = buffers[j].index(place)
        else:
            block = buffers[j].index(place * CONSUMERS + WHICH)
        found = found + (block.reshape((ROWS, N)).load(LAYOUT),)  # type: ignore[assignment]
    return found


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """Pairs of neighbours along the keys as one int32 each, rounded. A loop that carried 16-bit
    values would take the pairs apart and put them together again."""
    even, odd = gl.split(gl.reshape(p, (p.shape[0], p.shape[1] // 2, 2)))
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"  # type: ignore[no-redef]
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
