"""What the programs of one scan tell each other: totals of tiles, in words that carry their call.

A scan is cut along its length into tiles, one per program. A tile publishes its total; the last
tile of GROUP neighbours publishes that of the group, the last of GROUP groups theirs. What precedes
a tile is then some words of each level, added up in a tree that depends on nothing but positions:
the result has the same bits in every run, and no chain of tiles waits for one another. Of the last
DEPTH groups it is the totals of tiles: who computes now does not wait for one who waits for others.

Cards start programs in the order of their numbers, as far as is known, and nothing promises it. So
none waits forever: whoever looked PATIENCE times for a word computes itself what is missing, from
the first tile that is late to its own. It computes what those tiles' programs would, bit for bit,
and whoever comes later publishes it once more.

Chunks of columns are large, so that their programs take tickets instead, one atomic each: whoever
is waited for has begun, and waiting ends. The word of the tickets carries its call as well.

The longest rows are those of programs that stay and have many tiles each (``scan_stripes``).

A word is 64 bits: the number of the call in the upper half, 32 bits of state in the lower. Reader
and writer need no order between them, and no word needs to be cleared: the workspace is zeroed
once, and no number (from 1 on) is used with it twice.

Workspace: int64 words of tiles, then groups, then groups of groups, for each word of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Looks at words that are missing: a millisecond, of which programs that run need some
# microseconds.
PATIENCE = 1000


@triton.jit
def put(words, at, mask, bits, call):
    """Publish 32 bits of state (an int32)."""
    low = bits.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(words + at, (call << 32) | low, mask)


@triton.jit
def pause(some):
    """``some`` as it came, some tens of nanoseconds later, in which others may use the memory.
    Called pure: what it returns is used, and an impure one would hide from Inductor what a kernel
    writes to."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 40; mov.b32 $0, $1;", "=r,r", [some], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def fetch(some, address, size):
    """``some`` as it came; ``size`` bytes from an address on (both multiples of 16) are under way
    into the L2, by one instruction of one thread, on cards of compute capability 9 and up. Called
    pure as ``pause`` is."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 some, thread, 0;
        setp.gt.and.s32 some, $3, 0, some;
        @some cp.async.bulk.prefetch.L2.global [$2], $3;
        }
        mov.b32 $0, $1;""",
        "=r,r,l,r",
        [some, address, size],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def absent(word, call):
    """Whether a word is not of this call.

    There have to be two words per thread: if a word were held by two threads, one might see it
    before it is published and the other after.
    """
    return (word >> 32) != call


@triton.jit
def get(word):
    """The 32 bits of state in a word (int32)."""
    return word.to(tl.int32)


@triton.jit
def low_bits(value):
    """The lower 32 bits of a 64-bit integer."""
    return (value & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def high_bits(value):
    """The upper 32 bits of a 64-bit integer."""
    return (value >> 32).to(tl.int32)


@triton.jit
def joined(low, high):
    """A 64-bit integer of its halves (int32)."""
    return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def picked(bits, where):
    """The one element (an integer) where ``where`` holds, as a scalar."""
    return tl.sum(tl.where(where, bits, 0))


@triton.jit
def picked0(bits, where):
    """The same for each column of a tile."""
    return tl.sum(tl.where(where, bits, 0), 0, keep_dims=True)


@triton.jit
def picked1(bits, where):
    """The same for each row of a tile."""
    return tl.sum(tl.where(where, bits, 0), 1, keep_dims=True)


@triton.jit
def picked_run(bits, where):
    """The same for each run of a tile of columns (PIECES x RUN x LANES)."""
    return tl.sum(tl.where(where, bits, 0), 1)


@triton.jit
def moved(state, pieces: tl.constexpr):
    """Each row of PIECES x LANES one row further, the last one to the first."""
    row = (tl.arange(0, pieces) + (pieces - 1)) % pieces
    return tl.gather(state, tl.broadcast_to(row[:, None], state.shape), 0)
