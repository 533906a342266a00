# mypy: disable-error-code="assignment"
"""Gradients of linear attention with one decay per token, every chunk by itself.

With S the state in front of a chunk, D what follows it (the gradient of the state behind it, less
the scale), G the running sums of its decays, w_ij = e^{G_i - G_j}, P_ij = (q_i . k_j) (do_i . v_j)

    dq_i = scale (sum_{j <= i} w_ij (do_i . v_j) k_j + e^{G_i} do_i S^T)
    dk_j = scale (sum_{i >= j} w_ij (do_i . v_j) q_i + e^{G_last - G_j} v_j D^T)

(dv is ``chunk_kernel``'s, which finds D on the way.)
g_t scales what goes from tokens in front of t to t and those behind it:

    dg_t = scale (sum_{j < t <= i} w_ij P_ij + sum_{i >= t} q_i . e^{G_i} do_i S^T
                  + sum_{j < t} k_j . e^{G_last - G_j} v_j D^T + e^{G_last} <S, D>)

The first is a suffix sum of the row sums less the column sums of one matrix, w_ij P_ij off its
diagonal, so that what cancels are the same numbers; nothing else cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .linear_attention import BOUND, as_decay, product_with_state


@triton.jit
def summed(which, x):
    """Sums of the rows of x, weighted by whole numbers: fp32 in three parts that bf16 holds."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    which = which.to(tl.bfloat16)
    return tl.dot(which, high, tl.dot(which, middle, tl.dot(which, low)))


@triton.jit
def distances(g, i, CHUNK: tl.constexpr):
    """Sums of decays from the middle of the chunk to each token, negative in front of it."""
    j = i[None, :]
    until = (j >= CHUNK // 2) & (j <= i[:, None])
    behind = (j < CHUNK // 2) & (j > i[:, None])
    return summed(tl.where(until, 1.0, tl.where(behind, -1.0, 0.0)), g)


@triton.jit
def channel_gradients_kernel(
    Q, K, V, DO, DECAY, FIRSTS, SECONDS, STRONGEST_OF, FRONTS, FOLLOWS, DQ, DK, GRAD, tokens, heads,
    parts, scale, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, g_b, g_h, g_t,
    dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    CHUNK: tl.constexpr, PART: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DQ, DK and, unless None, GRAD [BH, T, dk] of the decays, of one chunk of one mild head in
    bf16, by parts of the channels; Q, K, FIRSTS, SECONDS: ``scaled_kernel``'s."""
    chunks = (tokens + CHUNK - 1) // CHUNK
    bh = tl.program_id(0).to(tl.int64) // chunks
    if tl.load(STRONGEST_OF + bh) <= BOUND:
        return
    chunk = tl.program_id(0) % chunks
    b, h = bh // heads, bh % heads
    origin = (chunk * CHUNK).to(tl.int64)
    dtype: tl.constexpr = K.dtype.element_ty
    i = tl.arange(0, CHUNK)
    here = i < tokens - chunk * CHUNK
    v = tl.arange(0, BLOCK_V)
    v_here = v < dv
    values_here = here[:, None] & v_here[None, :]
    Q += b * q_b + h * q_h + origin * q_t
    K += b * k_b + h * k_h + origin * k_t
    V += b * v_b + h * v_h + origin * v_t
    DO += b * do_b + h * do_h + origin * do_t
    DECAY += b * g_b + h * g_h + origin * g_t
    DQ += b * dq_b + h * dq_h + origin * dq_t
    DK += b * dk_b + h * dk_h + origin * dk_t
    FRONTS += (bh * chunks + chunk) * (dk * dv)
    FOLLOWS += (bh * chunks + chunk) * (dk * dv)
    values = tl.load(V + (i[:, None] * v_t + v[None, :]), mask=values_here, other=0.0)
    do = tl.load(DO + (i[:, None] * do_t + v[None, :]), mask=values_here, other=0.0)
    dscores = tl.dot(do, tl.trans(values))
    own = tl.sum(tl.where(i[:, None] == i[None, :], dscores, 0.0), 1)
    later = i[:, None] > i[None, :]
    given = tl.where(later, dscores, 0.0).to(dtype)
    for part in tl.range(0, parts, num_stages=1):
        d = part * PART + tl.arange(0, PART)
        d_here = d < dk
        there = here[:, None] & d_here[None, :]
        queries = tl.load(Q + (i[:, None] * q_t + d[None, :]), mask=there, other=0.0)
        keys = tl.load(K + (i[:, None] * k_t + d[None, :]), mask=there, other=0.0)
        g = tl.load(DECAY + (i[:, None] * g_t + d[None, :]), mask=there, other=0.0)
        distance = distances(as_decay(g, False), i, CHUNK)
        first = tl.load(FIRSTS + (bh * chunks + chunk) * dk + d, mask=d_here, other=0.0)
        second = tl.load(SECONDS + (bh * chunks + chunk) * dk + d, mask=d_here, other=0.0)
        at = d[:, None] * dv + v[None, :]
        state_here = d_here[:, None] & v_here[None, :]
        front = tl.load(FRONTS + at, mask=state_here, other=0.0)
        follows = tl.load(FOLLOWS + at, mask=state_here, other=0.0)
        inward = tl.dot(do, tl.trans(front)) * tl.exp2(first)[None, :]
        outward = tl.dot(values, tl.trans(follows)) * tl.exp2(second)[None, :]
        dqueries = tl.dot(given, keys, inward)
        dkeys = tl.dot(tl.trans(given), queries, outward)
        wide_q, wide_k = queries.to(tl.float32), keys.to(tl.float32)
        if GRAD is not None:
            # <S, D> in front of the chunk: through it, and with its own queries.
            across = tl.sum(front.to(tl.float32) * follows.to(tl.float32), 1)
            anchor = tl.exp2(first + second) * across + tl.sum(wide_q * inward, 0)
            sums = summed(tl.where(later, 1.0, 0.0), wide_q * dqueries - wide_k * dkeys)
            at = (bh * tokens + origin) * dk + (i[:, None] * dk + d[None, :])
            tl.store(GRAD + at, (anchor[None, :] - sums) * scale, mask=there)
        dqueries = (dqueries + own[:, None] * wide_k) * (tl.exp2(distance) * scale)
        at = DQ + (i[:, None] * dq_t + d[None, :])
        tl.store(at, dqueries.to(DQ.dtype.element_ty), mask=there)
        dkeys = (dkeys + own[:, None] * wide_q) * (tl.exp2(-distance) * scale)
        at = DK + (i[:, None] * dk_t + d[None, :])
        tl.store(at, dkeys.to(DK.dtype.element_ty), mask=there)


@triton.jit
def token_gradients_kernel(
    Q, K, V, DO, UNTIL, BEHIND, FRONTS, FOLLOWS, DQ, DK, GRAD, tokens, heads, padded, parts,
    scale, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """DQ, DK and GRAD [BH, T] of the decays, of one chunk of one head, by parts of the channels;
    FRONTS, FOLLOWS [BH, chunks, dk, dv]: S and D."""
    chunks = (tokens + CHUNK - 1) // CHUNK
    bh = tl.program_id(0).to(tl.int64) // chunks
    chunk = tl.program_id(0) % chunks
    b, h = bh // heads, bh % heads
    origin = (chunk * CHUNK).to(tl.int64)
    dtype: tl.constexpr = K.dtype.element_ty
    i = tl.arange(0, CHUNK)
    here = i < tokens - chunk * CHUNK
    v = tl.arange(0, BLOCK_V)
    v_here = v < dv
    values_here = here[:, None] & v_here[None, :]
    Q += b * q_b + h * q_h + origin * q_t
    K += b * k_b + h * k_h + origin * k_t
    V += b * v_b + h * v_h + origin * v_t
    DO += b * do_b + h * do_h + origin * do_t
    DQ += b * dq_b + h * dq_h + origin * dq_t
    DK += b * dk_b + h * dk_h + origin * dk_t
    FRONTS += (bh * chunks + chunk) * (dk * dv)
    FOLLOWS += (bh * chunks + chunk) * (dk * dv)
    # All that is read at once before what waits for it.
    k = tl.arange(0, BLOCK_K)
    keys_here = here[:, None] & (k < dk)[None, :]
    values = tl.load(V + (i[:, None] * v_t + v[None, :]), mask=values_here, other=0.0)
    do = tl.load(DO + (i[:, None] * do_t + v[None, :]), mask=values_here, other=0.0)
    all_queries = tl.load(Q + (i[:, None] * q_t + k[None, :]), mask=keys_here, other=0.0)
    all_keys = tl.load(K + (i[:, None] * k_t + k[None, :]), mask=keys_here, other=0.0)
    G = tl.load(UNTIL + bh * padded + origin + i)
    total = tl.load(UNTIL + bh * padded + origin + CHUNK - 1).to(tl.float32)
    until = tl.exp2(G.to(tl.float32))
    behind = tl.exp2(tl.load(BEHIND + bh * padded + origin + i))
    earlier = i[:, None] >= i[None, :]
    weights = tl.exp2(tl.where(earlier, G[:, None] - G[None, :], 0.0).to(tl.float32))
    dscores = tl.dot(do, tl.trans(values), input_precision=PRECISION)
    dscores = tl.where(earlier, dscores * weights, 0.0)
    given = dscores.to(dtype)
    scores = tl.dot(all_queries, tl.trans(all_keys), input_precision=PRECISION)
    pairs = tl.where(i[:, None] > i[None, :], scores * dscores, 0.0)
    inward_of = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    outward_of = tl.zeros([CHUNK], tl.float32)
    across = 0.0
    for part in tl.range(0, parts, num_stages=1):
        d = part * PART + tl.arange(0, PART)
        there = here[:, None] & (d < dk)[None, :]
        queries = tl.load(Q + (i[:, None] * q_t + d[None, :]), mask=there, other=0.0)
        keys = tl.load(K + (i[:, None] * k_t + d[None, :]), mask=there, other=0.0)
        at = d[:, None] * dv + v[None, :]
        state_here = (d < dk)[:, None] & v_here[None, :]
        front = tl.load(FRONTS + at, mask=state_here, other=0.0)
        follows = tl.load(FOLLOWS + at, mask=state_here, other=0.0)
        dqueries = product_with_state(do, tl.trans(front), PRECISION) * until[:, None]
        dkeys = product_with_state(values, tl.trans(follows), PRECISION) * behind[:, None]
        inward_of += tl.sum(queries.to(tl.float32) * dqueries, 1)
        outward_of += tl.sum(keys.to(tl.float32) * dkeys, 1)
        states = front.to(tl.float32) * follows.to(tl.float32)
        across += tl.sum(tl.sum(states, 1), 0)
        dqueries = tl.dot(given, keys, dqueries, input_precision=PRECISION) * scale
        at = DQ + (i[:, None] * dq_t + d[None, :])
        tl.store(at, dqueries.to(DQ.dtype.element_ty), mask=there)
        dkeys = tl.dot(tl.trans(given), queries, dkeys, input_precision=PRECISION) * scale
        at = DK + (i[:, None] * dk_t + d[None, :])
        tl.store(at, dkeys.to(DK.dtype.element_ty), mask=there)
    # What tokens in front of t send out, and what t and those behind it take in.
    ends = tl.where(i[:, None] > i[None, :], outward_of[None, :], inward_of[None, :])
    found = tl.sum(ends, 1) + tl.exp2(total) * across
    tl.store(GRAD + bh * tokens + origin + i, found * scale, mask=here)
