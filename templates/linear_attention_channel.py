# mypy: disable-error-code="assignment"
"""Causal linear attention with a decay per token and channel of the key, a chunk at a time.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale q_t S_t

As ``linear_attention``, with the decays inside the products: between tokens i and j of a chunk a
channel d is kept by e^{G_i[d] - G_j[d]}, one exponential per pair and channel, of a sum of decays.
Factors e^{G_i} and e^{-G_j} would be one product, and the second overflows.

``keyed_kernel`` makes o and, in reverse, dv of (k, q, do): the decayed channels are summed over.
``valued_kernel`` makes dq of (do, v, k) and, in reverse, dk of (v, do, q): the decayed channels are
the columns of what is made, and of the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .linear_attention import as_decay, product_with_state


@triton.jit
def sums_of_decays(DECAY, i, d, g_t, count, d_here, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """(G, the sum of what follows in the chunk, the whole sum), base 2: [CHUNK, d] twice, [d]."""
    at = DECAY + (i[:, None] * g_t + d[None, :])
    g = as_decay(tl.load(at, mask=(i < count)[:, None] & d_here[None, :], other=0.0), WIDE)
    follows = (i + 1 < count) & (i < CHUNK - 1)
    later = tl.load(at + g_t, mask=follows[:, None] & d_here[None, :], other=0.0)
    suffix = tl.cumsum(as_decay(later, WIDE), 0, reverse=True).to(tl.float32)
    return tl.cumsum(g, 0), suffix, tl.sum(g, 0).to(tl.float32)


@triton.jit
def kept_between(G, earlier, REVERSE: tl.constexpr):
    """[i, j, d]: what channel d keeps from the earlier of two tokens to the later."""
    between = G[None, :, :] - G[:, None, :] if REVERSE else G[:, None, :] - G[None, :, :]
    return tl.exp2(tl.where(earlier[:, :, None], between, 0.0).to(tl.float32))


@triton.jit
def keyed_kernel(
    Q, K, V, OUT, DECAY, START, END, tokens, heads, tiles, scale, start_factor, end_factor, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t,
    start_bh, start_k, start_v, end_bh, end_k, end_v,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """OUT of all chunks in turn, for one head and one tile of v's columns."""
    WIDE: tl.constexpr = K.dtype.element_ty == tl.float32
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = tl.arange(0, CHUNK)
    k = tl.arange(0, BLOCK_K)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k_here, v_here = k < dk, v < dv
    state_here = k_here[:, None] & v_here[None, :]
    Q += b * q_b + h * q_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    OUT += b * o_b + h * o_h
    DECAY += b * g_b + h * g_h
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if START is not None:
        at_front = START + bh * start_bh + k[:, None] * start_k + v[None, :] * start_v
        state = tl.load(at_front, mask=state_here, other=0.0) * start_factor
    earlier = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]
    chunks = (tokens + CHUNK - 1) // CHUNK
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSE else step
        origin = (chunk * CHUNK).to(tl.int64)
        count = tokens - chunk * CHUNK
        here = i < count
        q_chunk, k_chunk = Q + origin * q_t, K + origin * k_t
        decays = DECAY + origin * g_t
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for first in range(0, BLOCK_K, PART):
            d = first + tl.arange(0, PART)
            there = here[:, None] & (d < dk)[None, :]
            queries = tl.load(q_chunk + (i[:, None] * q_t + d[None, :]), mask=there, other=0.0)
            keys = tl.load(k_chunk + (i[:, None] * k_t + d[None, :]), mask=there, other=0.0)
            at = decays + (i[:, None] * g_t + d[None, :])
            G = tl.cumsum(as_decay(tl.load(at, mask=there, other=0.0), WIDE), 0)
            pairs = queries.to(tl.float32)[:, None, :] * keys.to(tl.float32)[None, :, :]
            scores += tl.sum(pairs * kept_between(G, earlier, REVERSE), 2)
        G, suffix, total = sums_of_decays(decays, i, k, g_t, count, k_here, CHUNK, WIDE)
        prefix = tl.exp2(G.to(tl.float32))
        suffix = tl.exp2(suffix)
        there = here[:, None] & k_here[None, :]
        queries = tl.load(q_chunk + (i[:, None] * q_t + k[None, :]), mask=there, other=0.0)
        keys = tl.load(k_chunk + (i[:, None] * k_t + k[None, :]), mask=there, other=0.0)
        dtype: tl.constexpr = K.dtype.element_ty
        queries = (queries.to(tl.float32) * (suffix if REVERSE else prefix)).to(dtype)
        keys = (keys.to(tl.float32) * (prefix if REVERSE else suffix)).to(dtype)
        there = here[:, None] & v_here[None, :]
        at = V + origin * v_t + (i[:, None] * v_t + v[None, :])
        values = tl.load(at, mask=there, other=0.0)
        lower = tl.where(earlier, scores, 0.0).to(dtype)
        out = product_with_state(queries, state, PRECISION)
        out = tl.dot(lower, values, out, input_precision=PRECISION) * scale
        at = OUT + origin * o_t + (i[:, None] * o_t + v[None, :])
        tl.store(at, out.to(OUT.dtype.element_ty), mask=there)
        state *= tl.exp2(total)[:, None]
        state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
    if END is not None:
        at = END + bh * end_bh + k[:, None] * end_k + v[None, :] * end_v
        tl.store(at, state * end_factor, mask=state_here)


@triton.jit
def valued_kernel(
    Q, K, V, OUT, DECAY, START, END, FRONTS, W, E, GRAD, tokens, heads, tiles, scale, start_factor,
    end_factor, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t,
    start_bh, start_k, start_v, end_bh, end_k, end_v, w_b, w_h, w_t,
    REVERSE: tl.constexpr, DIFFERENTIATE: tl.constexpr, EVERY: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """OUT of all chunks in turn, for one head and one tile of its columns, which the decays are of.

    DIFFERENTIATE, forward: E [BH, T, dv] gets w_i out_i without the term i = j, and FRONTS
    [BH, groups, dk, dv] the state in front of every EVERYth chunk, counted from the end. In reverse
    GRAD [BH, T, dv], the gradient of the decays, is made of them. With e_i = q_i dq_i - k_i dk_i

        dg_t = <S, D> in front of the chunk - sum over i < t in it of e_i
             = dg of the next chunk's first token + sum over i >= t in it of e_i

    the first where FRONTS has S. Behind the last token <S, D> is not dg of anything.
    """
    WIDE: tl.constexpr = K.dtype.element_ty == tl.float32
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    i = tl.arange(0, CHUNK)
    k = tl.arange(0, BLOCK_K)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k_here, v_here = k < dk, v < dv
    state_here = k_here[:, None] & v_here[None, :]
    Q += b * q_b + h * q_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    OUT += b * o_b + h * o_h
    DECAY += b * g_b + h * g_h
    if DIFFERENTIATE:
        W += b * w_b + h * w_h
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if START is not None:
        at_front = START + bh * start_bh + k[:, None] * start_k + v[None, :] * start_v
        state = tl.load(at_front, mask=state_here, other=0.0) * start_factor
    earlier = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]
    if DIFFERENTIATE:
        earlier = earlier & (i[:, None] != i[None, :])
    anchor = tl.zeros([BLOCK_V], tl.float32)
    chunks = (tokens + CHUNK - 1) // CHUNK
    groups = (chunks + EVERY - 1) // EVERY
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSE else step
        origin = (chunk * CHUNK).to(tl.int64)
        count = tokens - chunk * CHUNK
        here = i < count
        kept = (chunks - 1 - chunk) % EVERY == 0
        if DIFFERENTIATE:
            fronts = FRONTS + (bh * groups + (chunks - 1 - chunk) // EVERY) * (dk * dv)
            fronts += k[:, None] * dv + v[None, :]
            if not REVERSE and kept:
                tl.store(fronts, state.to(FRONTS.dtype.element_ty), mask=state_here)
        G, suffix, total = sums_of_decays(
            DECAY + origin * g_t, i, v, g_t, count, v_here, CHUNK, WIDE
        )
        prefix = tl.exp2(G.to(tl.float32))
        suffix = tl.exp2(suffix)
        there = here[:, None] & k_here[None, :]
        at = Q + origin * q_t + (i[:, None] * q_t + k[None, :])
        queries = tl.load(at, mask=there, other=0.0)
        at = K + origin * k_t + (i[:, None] * k_t + k[None, :])
        keys = tl.load(at, mask=there, other=0.0)
        there = here[:, None] & v_here[None, :]
        at = V + origin * v_t + (i[:, None] * v_t + v[None, :])
        values = tl.load(at, mask=there, other=0.0).to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        out = product_with_state(queries, state, PRECISION) * (suffix if REVERSE else prefix)
        lower = tl.where(earlier, scores, 0.0)
        pairs = lower[:, :, None] * values[None, :, :] * kept_between(G, earlier, REVERSE)
        out = (out + tl.sum(pairs, 1)) * scale
        if DIFFERENTIATE:
            at = W + origin * w_t + (i[:, None] * w_t + v[None, :])
            product = tl.load(at, mask=there, other=0.0).to(tl.float32) * out
            at = (bh * tokens + origin) * dv + (i[:, None] * dv + v[None, :])
            if REVERSE:
                difference = tl.load(E + at, mask=there, other=0.0) - product
            else:
                tl.store(E + at, product, mask=there)
            own = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), 1) * scale
            out += own[:, None] * values
        at = OUT + origin * o_t + (i[:, None] * o_t + v[None, :])
        tl.store(at, out.to(OUT.dtype.element_ty), mask=there)
        state *= tl.exp2(total)[None, :]
        values = (values * (prefix if REVERSE else suffix)).to(K.dtype.element_ty)
        state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
        if DIFFERENTIATE and REVERSE:
            if kept:
                front = tl.load(fronts, mask=state_here, other=0.0).to(tl.float32)
                anchor = tl.sum(front * state, 0) * scale
                before = i[:, None, None] > i[None, :, None]
                found = anchor[None, :] - tl.sum(tl.where(before, difference[None, :, :], 0.0), 1)
            else:
                found = tl.cumsum(difference, 0, reverse=True) + anchor[None, :]
                anchor = tl.sum(tl.where(i[:, None] == 0, found, 0.0), 0)
            at = (bh * tokens + origin) * dv + (i[:, None] * dv + v[None, :])
            tl.store(GRAD + at, found, mask=there)
    if END is not None:
        at = END + bh * end_bh + k[:, None] * end_k + v[None, :] * end_v
        tl.store(at, state * end_factor, mask=state_here)
