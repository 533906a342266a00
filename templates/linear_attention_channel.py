# mypy: disable-error-code="assignment"
"""Causal linear attention with a decay per token and channel of the key, a chunk at a time.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale q_t S_t

Between tokens i > j of a chunk a channel is kept by e^{g_{j+1} + .. + g_i}. Factors of a product,
e^{G_i} and e^{-G_j}, would overflow; one exponential per pair and channel would be too many. So
pairs are taken by blocks of 2, 4, 8, .. tokens: i in the upper half of a block and j in the lower
meet in the block's middle m, where e^{g_{m+1} + .. + g_i} and e^{g_{j+1} + .. + g_m} are both at
most 1 (for decays of at most 0), one exponential per token and channel. log2(chunk) products on
tensor cores make all pairs. The sums grow with the blocks, so that none is a difference.

In bf16, which has fp32's range, all pairs meet in the middle of the chunk in one product (``MILD``)
where no channel of the chunk decays by more than 2^-60 from there to either end, or to it. Scaled
to the middles of their chunks (``scaled_kernel``), q and k have no decays but those from middle to
middle, and ``chunk_kernel`` computes heads all of whose chunks are mild.

Of other heads ``states_kernel`` goes through the chunks in order for the state in front of each (in
reverse: the gradient of the state behind each); all else is independent of other chunks:
``outputs_kernel``, and ``gradients_kernel`` for everything that is asked of a chunk. Mild chunks
have launches of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .linear_attention import BOUND, as_decay, product_with_state


@triton.jit
def from_middle(g, i, CHUNK: tl.constexpr):
    """(sums of decays from the middle of the chunk to each token, negative in front of it; those of
    the two halves, [d] each)."""
    lower = (i < CHUNK // 2)[:, None]
    first = tl.sum(tl.where(lower, g, 0.0), 0)
    second = tl.sum(tl.where(lower, 0.0, g), 0)
    return tl.cumsum(g, 0) - first[None, :], first, second


@triton.jit
def scaled_kernel(
    Q, K, DECAY, Q_OUT, K_OUT, FIRSTS, SECONDS, STRONGEST, tokens, heads, tiles, dk,
    q_b, q_h, q_t, k_b, k_h, k_t, g_b, g_h, g_t, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one chunk of one head and one tile of channels: q and k [BH, T, dk] decayed from and to
    the middle of the chunk; FIRSTS, SECONDS [BH, chunks, dk], the sums of the halves' decays;
    STRONGEST [BH, chunks, tiles], twice the log of what the half keeps that decays (or grows) most
    (or less)."""
    tile = tl.program_id(0) % tiles
    chunks = (tokens + CHUNK - 1) // CHUNK
    chunk = tl.program_id(0) // tiles % chunks
    bh = (tl.program_id(0) // (tiles * chunks)).to(tl.int64)
    b, h = bh // heads, bh % heads
    origin = (chunk * CHUNK).to(tl.int64)
    i = tl.arange(0, CHUNK)
    d = tile * BLOCK + tl.arange(0, BLOCK)
    d_here = d < dk
    there = (i < tokens - chunk * CHUNK)[:, None] & d_here[None, :]
    DECAY += b * g_b + h * g_h + origin * g_t
    Q += b * q_b + h * q_h + origin * q_t
    K += b * k_b + h * k_h + origin * k_t
    g = tl.load(DECAY + (i[:, None] * g_t + d[None, :]), mask=there, other=0.0)
    queries = tl.load(Q + (i[:, None] * q_t + d[None, :]), mask=there, other=0.0).to(tl.float32)
    keys = tl.load(K + (i[:, None] * k_t + d[None, :]), mask=there, other=0.0).to(tl.float32)
    g = as_decay(g, False)
    distance, first, second = from_middle(g, i, CHUNK)
    at = (bh * tokens + origin) * dk + (i[:, None] * dk + d[None, :])
    tl.store(Q_OUT + at, (queries * tl.exp2(distance)).to(Q_OUT.dtype.element_ty), mask=there)
    tl.store(K_OUT + at, (keys * tl.exp2(-distance)).to(K_OUT.dtype.element_ty), mask=there)
    at = (bh * chunks + chunk) * dk + d
    tl.store(FIRSTS + at, first, mask=d_here)
    tl.store(SECONDS + at, second, mask=d_here)
    size = tl.where(g == g, tl.abs(g), float("inf"))  # NaN is not mild
    lower = (i < CHUNK // 2)[:, None]
    halves = tl.maximum(
        tl.sum(tl.where(lower, size, 0.0), 0), tl.sum(tl.where(lower, 0.0, size), 0)
    )
    tl.store(STRONGEST + (bh * chunks + chunk) * tiles + tile, -2.0 * tl.max(halves, 0))


@triton.jit
def states_kernel(
    K, V, DECAY, START, END, FRONTS, STRONGEST_OF, tokens, heads, k_tiles, v_tiles, start_factor,
    end_factor, dk, dv, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    start_bh, start_k, start_v, end_bh, end_k, end_v,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FRONTS [BH, chunks, dk, dv]: the state in front of every chunk; END: behind the last. Of
    heads that are not mild by STRONGEST_OF [BH], of all where it is None.

    REVERSE, of (q, do): what follows every chunk, sum_i e^{..} q_i do_i^T, and END in front of the
    first.
    """
    v_tile = tl.program_id(0) % v_tiles
    k_tile = tl.program_id(0) // v_tiles % k_tiles
    bh = (tl.program_id(0) // (v_tiles * k_tiles)).to(tl.int64)
    if STRONGEST_OF is not None:
        if tl.load(STRONGEST_OF + bh) > BOUND:
            return
    b, h = bh // heads, bh % heads
    i = tl.arange(0, CHUNK)
    k = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    v = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k_here, v_here = k < dk, v < dv
    state_here = k_here[:, None] & v_here[None, :]
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    DECAY += b * g_b + h * g_h
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if START is not None:
        at_front = START + bh * start_bh + k[:, None] * start_k + v[None, :] * start_v
        state = tl.load(at_front, mask=state_here, other=0.0) * start_factor
    chunks = (tokens + CHUNK - 1) // CHUNK
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        origin = (chunk * CHUNK).to(tl.int64)
        count = tokens - chunk * CHUNK
        at = FRONTS + (bh * chunks + chunk) * (dk * dv) + (k[:, None] * dv + v[None, :])
        tl.store(at, state.to(FRONTS.dtype.element_ty), mask=state_here)
        there = (i < count)[:, None] & k_here[None, :]
        at = DECAY + origin * g_t + (i[:, None] * g_t + k[None, :])
        g = as_decay(tl.load(at, mask=there, other=0.0), False)
        if REVERSE:
            kept = tl.cumsum(g, 0)
        else:
            follows = (i + 1 < count) & (i < CHUNK - 1)
            later = tl.load(at + g_t, mask=follows[:, None] & k_here[None, :], other=0.0)
            kept = tl.cumsum(as_decay(later, False), 0, reverse=True)
        at = K + origin * k_t + (i[:, None] * k_t + k[None, :])
        keys = tl.load(at, mask=there, other=0.0)
        keys = (keys.to(tl.float32) * tl.exp2(kept)).to(K.dtype.element_ty)
        at = V + origin * v_t + (i[:, None] * v_t + v[None, :])
        values = tl.load(at, mask=(i < count)[:, None] & v_here[None, :], other=0.0)
        state *= tl.exp2(tl.sum(g, 0))[:, None]
        state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
    if END is not None:
        at = END + bh * end_bh + k[:, None] * end_k + v[None, :] * end_v
        tl.store(at, state * end_factor, mask=state_here)


@triton.jit
def other_half(t, i, half):
    """Row i of it is row i + half or i - half of ``t``, of the other half of a block of two."""
    return tl.gather(t, tl.broadcast_to((i ^ half)[:, None], t.shape), 0)


@triton.jit
def met(i, half):
    """[i, j]: i in the upper and j in the lower half of the same block of two halves."""
    upper = (i & half) != 0
    same = (i // (2 * half))[:, None] == (i // (2 * half))[None, :]
    return same & upper[:, None] & (upper == 0)[None, :]


@triton.jit
def is_other(STRONGEST, at, k_tiles, MILD: tl.constexpr):
    """Whether a chunk is one of the other kernel."""
    strongest = tl.load(STRONGEST + at * k_tiles)
    for tile in range(1, k_tiles):
        strongest = tl.minimum(strongest, tl.load(STRONGEST + at * k_tiles + tile))
    return (strongest > BOUND) != MILD


@triton.jit
def outputs_kernel(
    Q, K, V, OUT, DECAY, FRONTS, STRONGEST, STRONGEST_OF, tokens, heads, k_tiles, scale, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, BLOCK_V: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    """OUT of one chunk of one head that is not mild by STRONGEST_OF [BH], by parts of the
    channels."""
    chunks = (tokens + CHUNK - 1) // CHUNK
    bh = tl.program_id(0).to(tl.int64) // chunks
    chunk = tl.program_id(0) % chunks
    if STRONGEST is not None:
        if tl.load(STRONGEST_OF + bh) > BOUND:
            return
        if is_other(STRONGEST, tl.program_id(0).to(tl.int64), k_tiles, MILD):
            return
    b, h = bh // heads, bh % heads
    origin = (chunk * CHUNK).to(tl.int64)
    dtype: tl.constexpr = K.dtype.element_ty
    i = tl.arange(0, CHUNK)
    here = i < tokens - chunk * CHUNK
    v = tl.arange(0, BLOCK_V)
    v_here = v < dv
    Q += b * q_b + h * q_h + origin * q_t
    K += b * k_b + h * k_h + origin * k_t
    V += b * v_b + h * v_h + origin * v_t
    OUT += b * o_b + h * o_h + origin * o_t
    DECAY += b * g_b + h * g_h + origin * g_t
    FRONTS += (bh * chunks + chunk) * (dk * dv)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    out = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for part in tl.range(0, PARTS, num_stages=1):
        d = part * PART + tl.arange(0, PART)
        there = here[:, None] & (d < dk)[None, :]
        queries = tl.load(Q + (i[:, None] * q_t + d[None, :]), mask=there, other=0.0)
        keys = tl.load(K + (i[:, None] * k_t + d[None, :]), mask=there, other=0.0)
        queries, keys = queries.to(tl.float32), keys.to(tl.float32)
        g = tl.load(DECAY + (i[:, None] * g_t + d[None, :]), mask=there, other=0.0)
        g = as_decay(g, False)
        if MILD:
            distance, first, _ = from_middle(g, i, CHUNK)
            kept = tl.exp2(distance)
            left = (queries * kept).to(dtype)
            right = (keys * tl.exp2(-distance)).to(dtype)
            pairs = tl.dot(left, tl.trans(right), input_precision=PRECISION)
            scores += tl.where(i[:, None] >= i[None, :], pairs, 0.0)
            prefix = kept * tl.exp2(first)[None, :]
        else:
            # Of a token's block, the token's own included: up to it, and behind it.
            until = g
            behind = tl.zeros([CHUNK, PART], tl.float32)
            own = tl.sum(queries * keys, 1)
            scores += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
            for level in tl.range(0, LEVELS, num_stages=1):
                upper = ((i & (1 << level)) != 0)[:, None]
                kept = tl.exp2(tl.where(upper, until, behind))
                left = tl.where(upper, queries * kept, 0.0).to(dtype)
                right = tl.where(upper, 0.0, keys * kept).to(dtype)
                pairs = tl.dot(left, tl.trans(right), input_precision=PRECISION)
                scores += tl.where(met(i, 1 << level), pairs, 0.0)
                other = other_half(until + behind, i, 1 << level)
                until += tl.where(upper, other, 0.0)
                behind += tl.where(upper, 0.0, other)
            prefix = tl.exp2(until)
        queries = (queries * prefix).to(dtype)
        at = FRONTS + (d[:, None] * dv + v[None, :])
        state = tl.load(at, mask=(d < dk)[:, None] & v_here[None, :], other=0.0)
        out += product_with_state(queries, state, PRECISION)
    there = here[:, None] & v_here[None, :]
    values = tl.load(V + (i[:, None] * v_t + v[None, :]), mask=there, other=0.0)
    out = tl.dot(scores.to(dtype), values, out, input_precision=PRECISION) * scale
    tl.store(OUT + (i[:, None] * o_t + v[None, :]), out.to(OUT.dtype.element_ty), mask=there)


@triton.jit
def gradients_kernel(
    Q, K, V, DECAY, DO, FRONTS, BEHINDS, STRONGEST, STRONGEST_OF, DQ, DK, DV, GRAD, tokens, heads,
    k_tiles, scale, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, do_b, do_h, do_t,
    dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, BLOCK_V: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    """DQ, DK, DV and, unless None, GRAD [BH, T, dk] of the decays, of one chunk of one head.

    FRONTS, BEHINDS: the states in front of every chunk and the gradients of those behind it. With
    e_i = q_i dq_i - k_i dk_i, both without the term of the token with itself, which could be the
    only large one and cancels,

        dg_t = <S, D> in front of the chunk - sum over i < t in it of e_i
    """
    chunks = (tokens + CHUNK - 1) // CHUNK
    bh = tl.program_id(0).to(tl.int64) // chunks
    chunk = tl.program_id(0) % chunks
    if STRONGEST is not None:
        if tl.load(STRONGEST_OF + bh) > BOUND:
            return
        if is_other(STRONGEST, tl.program_id(0).to(tl.int64), k_tiles, MILD):
            return
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
    DECAY += b * g_b + h * g_h + origin * g_t
    DO += b * do_b + h * do_h + origin * do_t
    DQ += b * dq_b + h * dq_h + origin * dq_t
    DK += b * dk_b + h * dk_h + origin * dk_t
    DV += b * dv_b + h * dv_h + origin * dv_t
    FRONTS += (bh * chunks + chunk) * (dk * dv)
    BEHINDS += (bh * chunks + chunk) * (dk * dv)
    values = tl.load(V + (i[:, None] * v_t + v[None, :]), mask=values_here, other=0.0)
    do = tl.load(DO + (i[:, None] * do_t + v[None, :]), mask=values_here, other=0.0)
    dscores = tl.dot(do, tl.trans(values), input_precision=PRECISION)
    downs = tl.sum(tl.where(i[:, None] == i[None, :], dscores, 0.0), 1)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    dvalues = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for part in tl.range(0, PARTS, num_stages=1):
        d = part * PART + tl.arange(0, PART)
        there = here[:, None] & (d < dk)[None, :]
        queries = tl.load(Q + (i[:, None] * q_t + d[None, :]), mask=there, other=0.0)
        keys = tl.load(K + (i[:, None] * k_t + d[None, :]), mask=there, other=0.0)
        queries, keys = queries.to(tl.float32), keys.to(tl.float32)
        g = tl.load(DECAY + (i[:, None] * g_t + d[None, :]), mask=there, other=0.0)
        g = as_decay(g, False)
        distance, first, second = from_middle(g, i, CHUNK)
        own = tl.sum(queries * keys, 1)
        scores += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
        if MILD:
            kept, undone = tl.exp2(distance), tl.exp2(-distance)
            left, right = (queries * kept).to(dtype), (keys * undone).to(dtype)
            later = i[:, None] > i[None, :]
            found = tl.dot(left, tl.trans(right), input_precision=PRECISION)
            scores += tl.where(later, found, 0.0)
            given = tl.where(later, dscores, 0.0).to(dtype)
            dqueries = kept * tl.dot(given, right, input_precision=PRECISION)
            dkeys = undone * tl.dot(tl.trans(given), left, input_precision=PRECISION)
            prefix = kept * tl.exp2(first)[None, :]
            suffix = undone * tl.exp2(second)[None, :]
        else:
            until = g
            behind = tl.zeros([CHUNK, PART], tl.float32)
            dqueries = tl.zeros([CHUNK, PART], tl.float32)
            dkeys = tl.zeros([CHUNK, PART], tl.float32)
            for level in tl.range(0, LEVELS, num_stages=1):
                upper = ((i & (1 << level)) != 0)[:, None]
                pair = met(i, 1 << level)
                kept = tl.exp2(tl.where(upper, until, behind))
                left = tl.where(upper, queries * kept, 0.0).to(dtype)
                right = tl.where(upper, 0.0, keys * kept).to(dtype)
                found = tl.dot(left, tl.trans(right), input_precision=PRECISION)
                scores += tl.where(pair, found, 0.0)
                given = tl.where(pair, dscores, 0.0).to(dtype)
                dqueries += kept * tl.dot(given, right, input_precision=PRECISION)
                dkeys += kept * tl.dot(tl.trans(given), left, input_precision=PRECISION)
                other = other_half(until + behind, i, 1 << level)
                until += tl.where(upper, other, 0.0)
                behind += tl.where(upper, 0.0, other)
            prefix, suffix = tl.exp2(until), tl.exp2(behind)
        state_here = (d < dk)[:, None] & v_here[None, :]
        at = d[:, None] * dv + v[None, :]
        front = tl.load(FRONTS + at, mask=state_here, other=0.0)
        follows = tl.load(BEHINDS + at, mask=state_here, other=0.0)
        # Of what is in front of the chunk, and of what is behind it.
        inward = prefix * product_with_state(do, tl.trans(front), PRECISION)
        dqueries += inward
        dkeys += suffix * product_with_state(values, tl.trans(follows), PRECISION)
        dvalues += product_with_state((keys * suffix).to(dtype), follows, PRECISION)
        if GRAD is not None:
            # <S, D> in front: through the chunk, and with its own queries.
            across = tl.sum(front.to(tl.float32) * follows.to(tl.float32), 1)
            anchor = tl.exp2(first + second) * across + tl.sum(queries * inward, 0)
            sums = tl.cumsum(queries * dqueries - keys * dkeys, 0)
            sums = tl.gather(sums, tl.broadcast_to(tl.maximum(i - 1, 0)[:, None], sums.shape), 0)
            found = anchor[None, :] - tl.where(i[:, None] == 0, 0.0, sums)
            at = (bh * tokens + origin) * dk + (i[:, None] * dk + d[None, :])
            tl.store(GRAD + at, found * scale, mask=there)
        dqueries = (dqueries + downs[:, None] * keys) * scale
        dkeys = (dkeys + downs[:, None] * queries) * scale
        at = DQ + (i[:, None] * dq_t + d[None, :])
        tl.store(at, dqueries.to(DQ.dtype.element_ty), mask=there)
        at = DK + (i[:, None] * dk_t + d[None, :])
        tl.store(at, dkeys.to(DK.dtype.element_ty), mask=there)
    given = tl.trans(scores.to(dtype))
    dvalues = tl.dot(given, do, dvalues, input_precision=PRECISION) * scale
    at = DV + (i[:, None] * dv_t + v[None, :])
    tl.store(at, dvalues.to(DV.dtype.element_ty), mask=values_here)
