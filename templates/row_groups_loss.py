"""``row_gradient`` of long rows that groups of programs share, as ``row_groups`` does softmaxes.

What a program has of a row: the maximum and the sum of exponentials of its columns but the
target's. Without smoothing, softcap: those compute more, or exchange more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .row_groups import LN2, LOG2E, alive, block, copy_row, words_of


@gluon.jit
def target_of(X, T, row, rows, x_stride, t_stride, columns):
    """(column of the target, its logit); (-1, -inf) where there is none, or no row."""
    live = row < rows
    t = gl.load(T + gl.to_tensor(row).to(gl.int64) * t_stride, mask=live, other=-1).to(gl.int64)
    has = (t >= 0) & (t < columns)
    at = X + gl.to_tensor(row).to(gl.int64) * x_stride + gl.where(has, t, 0)
    x = gl.load(at, mask=live & has, other=-float("inf")).to(gl.float32)
    return gl.where(has, t, -1).to(gl.int32), x


@gluon.jit
def anchor_of(shift):
    return gl.where(shift == -float("inf"), 0.0, shift)


@gluon.jit
def sigmoid(d):
    e = gl.exp2(-gl.abs(d) * LOG2E)
    return gl.where(d >= 0, 1.0, e) / (1.0 + e)


@gluon.jit
def share_of(ring, stage, t, first, end, alpha, K: gl.constexpr, LAYOUT: gl.constexpr):
    """What a program has of a row, as a word that is not 0."""
    THREADS: gl.constexpr = ring.shape[1]
    E: gl.constexpr = ring.shape[2]
    OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    thread = gl.arange(0, THREADS, OF)
    element = gl.arange(0, E, gl.SliceLayout(0, LAYOUT))
    top = gl.full([THREADS], -float("inf"), gl.float32, OF)
    for k in gl.static_range(K):
        c = gl.expand_dims(first + (k * THREADS + thread) * E, 1) + gl.expand_dims(element, 0)
        x = gl.where(c == t, -float("inf"), block(ring, stage, k, 0, K, 1, LAYOUT))
        inside = alive(k, first, end, THREADS, E, LAYOUT)
        top = gl.maximum(top, gl.where(inside, gl.max(x, 1), top))
    peak = gl.max(top, 0)
    anchor = anchor_of(peak)
    total = gl.zeros([THREADS], gl.float32, OF)
    for k in gl.static_range(K):
        c = gl.expand_dims(first + (k * THREADS + thread) * E, 1) + gl.expand_dims(element, 0)
        x = gl.where(c == t, -float("inf"), block(ring, stage, k, 0, K, 1, LAYOUT))
        e = gl.sum(gl.exp2((x - anchor) * alpha), 1)
        total += gl.where(alive(k, first, end, THREADS, E, LAYOUT), e, 0.0)
    high = peak.to(gl.int32, bitcast=True).to(gl.int64)
    return (high << 32) | (gl.sum(total, 0).to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def statistics_of(words, there, x_t, scale, alpha):
    """(peak, total, anchor, margin) of a row from the words of its programs and its target's logit,
    as ``row_gradient.complete``."""
    low = words.to(gl.int32).to(gl.float32, bitcast=True)
    low = gl.where(words == 0, float("nan"), low)  # in vain
    high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    high = gl.where(there, high, -float("inf"))
    anchor = anchor_of(gl.max(high, 0))
    total = gl.sum(gl.where(there, low * gl.exp2((high - anchor) * alpha), 0.0), 0)
    margin = gl.log2(total) * LN2 - (x_t - anchor) * scale
    if_others = gl.where(total == 0, -float("inf"), anchor)
    top = gl.maximum(if_others, x_t)
    anchor = anchor_of(top)
    total = total * gl.exp2((if_others - anchor) * alpha) + gl.exp2((x_t - anchor) * alpha)
    total = gl.where(total == 0, float("nan"), total)
    known = (total == total) | (gl.abs(top) == float("inf"))
    return gl.where(known, top * scale, float("nan")), total, anchor, margin


@gluon.jit
def put_gradient(
    ring, stage, DX, dx_stride, row, first, end, t, anchor, alpha, per_exp, single, used,
    K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A program's columns of the gradient's row."""
    THREADS: gl.constexpr = ring.shape[1]
    E: gl.constexpr = ring.shape[2]
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT))
    element = gl.arange(0, E, gl.SliceLayout(0, LAYOUT))
    DX += gl.to_tensor(row).to(gl.int64) * dx_stride
    for k in gl.static_range(K):
        column = first + (k * THREADS + thread) * E
        c = gl.expand_dims(column, 1) + gl.expand_dims(element, 0)
        x = block(ring, stage, k, 0, K, 1, LAYOUT)
        dx = gl.where(c == t, single, gl.exp2((x - anchor) * alpha) * per_exp)
        dx = gl.where(used, dx, 0.0)
        mask = gl.expand_dims(column < end, 1) & (gl.expand_dims(element, 0) < E)
        gl.store(DX + c, dx.to(DX.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@gluon.jit
def group_loss_kernel(
    X, DX, T, A0, A1, B, PEAK, TOTAL, PICKED, WORDS, rows, columns, x_stride, dx_stride, t_stride,
    segment, scale, Z: gl.constexpr, GROUP: gl.constexpr, PADDED: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, E: gl.constexpr, PATIENCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, E], [32, 1], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(X.dtype.element_ty, [STAGES * K, 32 * WARPS, E], SHARED)
    x_stride, dx_stride = x_stride // E * E, dx_stride // E * E
    segment = segment // E * E
    alpha = scale * LOG2E
    part = gl.program_id(0) % GROUP
    group = gl.program_id(0) // GROUP
    groups = gl.num_programs(0) // GROUP
    first = part * segment
    end = gl.minimum(first + segment, columns)
    sources = ((X, x_stride),)
    for s in gl.static_range(STAGES - 1):
        copy_row(ring, s, sources, group + s * groups, rows, first, end, K, LAYOUT)
    count = (rows - group + groups - 1) // groups
    stage = 0
    patience = gl.to_tensor(PATIENCE)
    t, x_t = target_of(X, T, group, rows, x_stride, t_stride, columns)
    t_before, x_before = t, x_t
    for i in range(0, count + 1):
        row = group + i * groups
        t_next, x_next = target_of(X, T, row + groups, rows, x_stride, t_stride, columns)
        if i < count:
            async_copy.wait_group(STAGES - 2)
            word = share_of(ring, stage, t, first, end, alpha, K, LAYOUT)
            gl.store(WORDS + gl.to_tensor(row).to(gl.int64) * GROUP + part, word)
        before = (stage + STAGES - 1) % STAGES
        if i > 0:
            row = row - groups
            a0, b = gl.load(A0 + row), gl.load(B + row)
            a1 = 0.0
            used = (a0 != 0) | (b != 0)
            if Z:
                a1 = gl.load(A1 + row)
                used = used | (a1 != 0)
            words, there, patience = words_of(WORDS, row, patience, GROUP, PADDED, LANES)
            peak, total, anchor, margin = statistics_of(words, there, x_before, scale, alpha)
            if part == 0:
                gl.store(PEAK + row, peak)
                gl.store(TOTAL + row, total)
                gl.store(PICKED + row, gl.where(t_before >= 0, x_before * scale, 0.0))
            of_lse = a1 * (anchor * scale + gl.log2(total) * LN2)
            per_exp = (a0 + of_lse) * scale / total
            per_p = ((a0 - b) + of_lse) * scale
            single = per_p * sigmoid(-margin) - scale * b * sigmoid(margin)
            put_gradient(
                ring, before, DX, dx_stride, row, first, end, t_before, anchor, alpha, per_exp,
                single, used, K, LAYOUT,
            )  # fmt: skip
        ahead = group + (i + STAGES - 1) * groups
        copy_row(ring, before, sources, ahead, rows, first, end, K, LAYOUT)
        stage = (stage + 1) % STAGES
        t_before, x_before = t, x_t
        t, x_t = t_next, x_next
