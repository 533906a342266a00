"""Softmax of long rows, and its gradient: a row over a group of programs that keep it on the chip.

    y  = 2^((x - anchor) alpha) / total             y  = scale (x - anchor) - log(total)
    dx = scale y (g - sum_j y_j g_j)                dx = scale (g - e^y sum_j g_j)

Where the rows under way in all of a card are more than its L2 holds, a second sweep reads from
memory again. Here GROUP programs share a row, each with SEGMENT columns of it in shared memory, in
a ring of STAGES rows. What they have of a row goes to the others as one 64-bit word, which is 0
until it is there, and is asked for a row later: while it is on its way the next row is reduced, and
the rows behind are copied. So memory never waits for the exchange, and each element is read once.

All programs must be on the card at once: the launch is a cooperative one, which is refused where
they are not. Nothing hangs all the same: who waits for seconds in vain writes NaN. Every program
adds up the words of a row in one order, so all have the same numbers, and the same in every run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD = map(gl.constexpr, range(4))
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def copy_row(ring, stage, sources, row, rows, first, end, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the copy of a program's columns [first, end) of a row."""
    THREADS: gl.constexpr = ring.shape[1]
    E: gl.constexpr = ring.shape[2]
    TENSORS: gl.constexpr = len(sources)
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT))
    element = gl.arange(0, E, gl.SliceLayout(0, LAYOUT))
    for k in gl.static_range(K):
        column = first + (k * THREADS + thread) * E
        live = (column < end) & (row < rows)
        at = gl.expand_dims(column, 1) + gl.expand_dims(element, 0)
        mask = gl.expand_dims(live, 1) & (gl.expand_dims(element, 0) < E)
        for s in gl.static_range(TENSORS):
            base = sources[s][0] + gl.to_tensor(row).to(gl.int64) * sources[s][1]
            place = ring.index((stage * K + k) * TENSORS + s)
            async_copy.async_copy_global_to_shared(place, base + at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def block(ring, stage, k, s, K: gl.constexpr, TENSORS: gl.constexpr, LAYOUT: gl.constexpr):
    """Block k of tensor s of the row in a stage, in fp32."""
    return ring.index((stage * K + k) * TENSORS + s).load(LAYOUT).to(gl.float32)


@gluon.jit
def alive(k, first, end, THREADS: gl.constexpr, E: gl.constexpr, LAYOUT: gl.constexpr):
    """Which threads have columns in block k."""
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT))
    return first + (k * THREADS + thread) * E < end


@gluon.jit
def share_of(ring, stage, first, end, alpha, KIND: gl.constexpr, K: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    """What a program has of a row, as a word that is not 0."""
    THREADS: gl.constexpr = ring.shape[1]
    E: gl.constexpr = ring.shape[2]
    OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if KIND == SOFTMAX or KIND == LOG_SOFTMAX:
        top = gl.full([THREADS], -float("inf"), gl.float32, OF)
        for k in gl.static_range(K):
            x = gl.max(block(ring, stage, k, 0, K, 1, LAYOUT), 1)
            top = gl.maximum(top, gl.where(alive(k, first, end, THREADS, E, LAYOUT), x, top))
        peak = gl.max(top, 0)
        anchor = gl.where(peak == -float("inf"), 0.0, peak)
        total = gl.zeros([THREADS], gl.float32, OF)
        for k in gl.static_range(K):
            x = block(ring, stage, k, 0, K, 1, LAYOUT)
            e = gl.sum(gl.exp2((x - anchor) * alpha), 1)
            total += gl.where(alive(k, first, end, THREADS, E, LAYOUT), e, 0.0)
        low = gl.sum(total, 0).to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
        high = peak.to(gl.int32, bitcast=True).to(gl.int64)
    else:
        total = gl.zeros([THREADS], gl.float32, OF)
        TENSORS: gl.constexpr = 2
        for k in gl.static_range(K):
            g = block(ring, stage, k, 1, K, TENSORS, LAYOUT)
            if KIND == SOFTMAX_BACKWARD:
                g *= block(ring, stage, k, 0, K, TENSORS, LAYOUT)
            total += gl.where(alive(k, first, end, THREADS, E, LAYOUT), gl.sum(g, 1), 0.0)
        low = gl.sum(total, 0).to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
        high = gl.full([], 1, gl.int64)
    return (high << 32) | low


@gluon.jit
def words_of(WORDS, row, patience, GROUP: gl.constexpr, PADDED: gl.constexpr, LAYOUT: gl.constexpr):
    """(the words of a row, which of them there are, the patience left): waited for, but not longer
    than ``patience`` looks."""
    lane = gl.arange(0, PADDED, LAYOUT)
    at = WORDS + gl.to_tensor(row).to(gl.int64) * GROUP + lane
    words = gl.load(at, mask=lane < GROUP, other=1, volatile=True)
    missing = gl.max((words == 0).to(gl.int32), 0)
    looks = 0
    while (missing != 0) & (looks < patience):
        words = gl.load(at, mask=lane < GROUP, other=1, volatile=True)
        missing = gl.max((words == 0).to(gl.int32), 0)
        looks += 1
    return words, lane < GROUP, gl.where(missing != 0, 0, patience)


@gluon.jit
def write_row(
    ring, stage, Y, y_stride, row, first, end, words, there, scale, alpha, KIND: gl.constexpr,
    K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A program's columns of the result's row."""
    THREADS: gl.constexpr = ring.shape[1]
    E: gl.constexpr = ring.shape[2]
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT))
    element = gl.arange(0, E, gl.SliceLayout(0, LAYOUT))
    low = words.to(gl.int32).to(gl.float32, bitcast=True)
    low = gl.where(words == 0, float("nan"), low)  # in vain
    anchor = 0.0
    if KIND == SOFTMAX or KIND == LOG_SOFTMAX:
        high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        high = gl.where(there, high, -float("inf"))
        peak = gl.max(high, 0)
        anchor = gl.where(peak == -float("inf"), 0.0, peak)
        low *= gl.exp2((high - anchor) * alpha)
    total = gl.sum(gl.where(there, low, 0.0), 0)
    of_log = gl.log2(total) * -LN2
    Y += gl.to_tensor(row).to(gl.int64) * y_stride
    for k in gl.static_range(K):
        if KIND == SOFTMAX:
            x = block(ring, stage, k, 0, K, 1, LAYOUT) - anchor
            y = gl.exp2(x * alpha) / total
        elif KIND == LOG_SOFTMAX:
            x = block(ring, stage, k, 0, K, 1, LAYOUT) - anchor
            y = gl.fma(x, gl.full_like(x, 0.0) + scale, gl.full_like(x, 0.0) + of_log)
        else:
            y = block(ring, stage, k, 0, K, 2, LAYOUT)
            g = block(ring, stage, k, 1, K, 2, LAYOUT)
            if KIND == SOFTMAX_BACKWARD:
                y = y * (g - total) * scale
            else:
                y = (g - gl.exp2(y * LOG2E) * total) * scale
        column = first + (k * THREADS + thread) * E
        at = gl.expand_dims(column, 1) + gl.expand_dims(element, 0)
        mask = gl.expand_dims(column < end, 1) & (gl.expand_dims(element, 0) < E)
        gl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@gluon.jit
def group_kernel(
    X, G, Y, WORDS, rows, columns, x_stride, g_stride, y_stride, segment, scale,
    KIND: gl.constexpr, GROUP: gl.constexpr, PADDED: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, E: gl.constexpr, PATIENCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, E], [32, 1], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TWO: gl.constexpr = KIND == SOFTMAX_BACKWARD or KIND == LOG_SOFTMAX_BACKWARD
    TENSORS: gl.constexpr = 2 if TWO else 1
    ring = gl.allocate_shared_memory(
        X.dtype.element_ty, [STAGES * K * TENSORS, 32 * WARPS, E], SHARED
    )
    x_stride, g_stride, y_stride = x_stride // E * E, g_stride // E * E, y_stride // E * E
    segment = segment // E * E
    alpha = scale * LOG2E
    part = gl.program_id(0) % GROUP
    group = gl.program_id(0) // GROUP
    groups = gl.num_programs(0) // GROUP
    first = part * segment
    end = gl.minimum(first + segment, columns)
    if TWO:
        sources = (X, x_stride), (G, g_stride)
    else:
        sources = ((X, x_stride),)  # type: ignore[assignment]
    for s in gl.static_range(STAGES - 1):
        copy_row(ring, s, sources, group + s * groups, rows, first, end, K, LAYOUT)
    count = (rows - group + groups - 1) // groups
    stage = 0
    patience = gl.to_tensor(PATIENCE)
    for i in range(0, count + 1):
        row = group + i * groups
        if i < count:
            async_copy.wait_group(STAGES - 2)
            word = share_of(ring, stage, first, end, alpha, KIND, K, LAYOUT)
            gl.store(WORDS + gl.to_tensor(row).to(gl.int64) * GROUP + part, word)
        before = (stage + STAGES - 1) % STAGES
        if i > 0:
            words, there, patience = words_of(WORDS, row - groups, patience, GROUP, PADDED, LANES)
            write_row(
                ring, before, Y, y_stride, row - groups, first, end, words, there, scale, alpha,
                KIND, K, LAYOUT,
            )  # fmt: skip
        ahead = row + (STAGES - 1) * groups
        copy_row(ring, before, sources, ahead, rows, first, end, K, LAYOUT)
        stage = (stage + 1) % STAGES
