"""What the programs of one scan tell each other: totals of tiles, in words that carry their call.

A scan is cut along its length into tiles, one per program, in the order in which programs begin (a
ticket each), so a program only ever waits for some that run already. A tile publishes its total;
the last tile of GROUP neighbours publishes that of the group, the last of GROUP groups theirs. What
precedes a tile is then at most GROUP words of each level, added up in a tree that depends on
nothing but positions: the result has the same bits in every run, and no chain of tiles waits for
one another.

A word is 64 bits: the number of the call in the upper half, 32 bits of state in the lower. Reader
and writer need no order between them, and no word needs to be cleared: the workspace is zeroed
once, and the last program of a call leaves it ready for the next.

Workspace, in int64 words: [0] tickets taken; [16] those of earlier calls, [17] calls so far, in a
line of memory of their own because the first is where all programs meet; from [32] on the words of
the levels.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = 32


@triton.jit
def take(workspace, base, call, last):
    """A ticket of this call: 0, 1, ... ``last``. ``base`` and ``call`` (its number) are what the
    workspace held before the first of them was taken, so the program with the last ticket, which
    knows that all have read them, makes them those of the next call."""
    ticket = tl.atomic_add(workspace, 1, sem="acq_rel") - base
    if ticket == last:
        tl.store(workspace + 16, base + last + 1)
        tl.store(workspace + 17, call)
    return ticket


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
def get(words, at, mask, call):
    """The 32 bits of state published at ``at`` (int32), once all are of this call.

    There have to be two words per thread: if a word were held by two threads, one might see it
    before it is published and the other after.
    """
    stamp = call & 0xFFFFFFFF
    none = tl.full(at.shape, 0, tl.int64) + (call << 32)
    word = tl.load(words + at, mask=mask, other=none, volatile=True)
    missing = ((word >> 32) & 0xFFFFFFFF) != stamp
    wait = tl.max(missing.to(tl.int32))
    while wait != 0:
        word = tl.where(missing, tl.load(words + at, mask=missing, other=none, volatile=True), word)
        missing = ((word >> 32) & 0xFFFFFFFF) != stamp
        wait = pause(tl.max(missing.to(tl.int32)))
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


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
