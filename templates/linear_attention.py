# mypy: disable-error-code="assignment"
"""Causal linear attention with one decay per head or per token, a chunk of tokens at a time.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T        o_t = scale q_t S_t

With G the running sum of g inside a chunk and S the state in front of it

    o_i = scale (e^{G_i} q_i S + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) v_j)
    S  <- e^{G_last} S + sum_j e^{G_last - G_j} k_j v_j^T

``REVERSE`` runs from the last chunk to the first with D for S, the sum over what follows:

    o_i = scale (e^{G_last - G_i} q_i D + sum_{j >= i} e^{G_j - G_i} (q_i . k_j) v_j)
    D  <- e^{G_last} D + sum_j e^{G_j} k_j v_j^T

All gradients are this kernel with other roles: dq of (do, v, k), dk of (v, do, q) in reverse, dv of
(k, q, do) in reverse. The exponents are sums of decays, never differences that could be positive.

In bf16, which has fp32's range, heads whose chunks all decay by 2^-120 at most are ``MILD``: with
c_i for G_i, in reverse for G_last - G_i, and r half of the chunk's decay,

    o_i = scale e^{c_i - r} (q_i e^r S + sum_j (q_i . k_j) e^{r - c_j} v_j)
    S  <- e^{G_last - r} (e^r S + sum_j k_j e^{r - c_j} v_j)

so that one v serves both sums, and no pair has an exponential. Heads of either kind have launches
of their own, whose programs for the others end at once. A program has a tile of columns of v and of
the state, and loops over the chunks of its segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
STRONGEST = tl.constexpr(-160.0)  # 2^-160 is 0 in fp32: a stronger decay is the same one
BOUND = tl.constexpr(-120.0)


@triton.jit
def as_decay(g, WIDE: tl.constexpr):
    """The base-2 logarithm of what is kept; in fp64 beside fp32, for the sake of differences."""
    g = g.to(tl.float64 if WIDE else tl.float32) * LOG2_E
    return tl.where(g < STRONGEST, STRONGEST, g)  # NaN stays


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def product_with_state(a, state, PRECISION: tl.constexpr):
    """A state sums over all tokens and can be out of fp16's range: its columns are scaled to 1."""
    if a.dtype == tl.float16:
        largest = tl.max(tl.abs(state), 0)
        largest = tl.where(largest > 0.0, largest, 1.0)[None, :]
        return tl.dot(a, (state * (1.0 / largest)).to(tl.float16)) * largest
    return tl.dot(a, state.to(a.dtype), input_precision=PRECISION)


@triton.jit
def strongest_kernel(
    DECAY, OUT, tokens, heads, g_b, g_h, g_t, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """OUT [BH]: of the chunk that decays (or grows) most, the log of what it keeps (or less)."""
    bh = tl.program_id(0).to(tl.int64)
    DECAY += bh // heads * g_b + bh % heads * g_h
    i = tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    strongest = tl.zeros([CHUNKS], tl.float32)
    for first in range(0, tokens, CHUNKS * CHUNK):
        t = first + i
        g = tl.load(DECAY + t.to(tl.int64) * g_t, mask=t < tokens, other=0.0)
        strongest = tl.minimum(strongest, -tl.sum(tl.abs(as_decay(g, False)), 1))
    tl.store(OUT + bh, tl.min(strongest, 0))


@triton.jit
def chunk_kernel(
    Q, K, V, OUT, DECAY, STRONGEST_OF, START, END, LOG, FRONTS, W, E, ANCHORS,
    tokens, heads, tiles, segments, per_segment, scale, start_factor,
    end_factor, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t,
    start_bh, start_segment, start_k, start_v, end_bh, end_segment, end_k, end_v,
    w_b, w_h, w_t,
    DECAYS: tl.constexpr,  # "", "head" or "token"
    MILD: tl.constexpr, REVERSE: tl.constexpr, OUTPUT: tl.constexpr, STORE_FRONTS: tl.constexpr,
    EMIT: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EVEN_K: tl.constexpr, EVEN_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The chunks of one segment, for one head and one tile of v's columns.

    STRONGEST_OF [BH]: by which heads are MILD or not; None where none is.

    START: the state in front of every segment, or None for 0. END: the state behind it, or None.
    Without OUTPUT only END is computed, and LOG [BH, segments], the sum of a segment's decays in
    base 2.

    STORE_FRONTS: FRONTS [BH, chunks, dk, dv] gets the state in front of every chunk. EMIT: E
    [tiles, BH, T] gets <w_i, o_i> over the tile's columns, the term i = j of o left out, of W
    [B, H, T, dv].
    ANCHOR: ANCHORS [tiles, BH, chunks] gets <FRONTS, D>, D with the chunk in it.
    """
    WIDE: tl.constexpr = K.dtype.element_ty == tl.float32
    tile = tl.program_id(0) % tiles
    segment = tl.program_id(0) // tiles % segments
    bh = (tl.program_id(0) // (tiles * segments)).to(tl.int64)
    if STRONGEST_OF is not None:
        if (tl.load(STRONGEST_OF + bh) > BOUND) != MILD:
            return
    b, h = bh // heads, bh % heads
    i = tl.arange(0, CHUNK)
    k = tl.arange(0, BLOCK_K)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k_here = k < (BLOCK_K if EVEN_K else dk)
    v_here = v < ((tile + 1) * BLOCK_V if EVEN_V else dv)
    state_here = k_here[:, None] & v_here[None, :]
    chunks = (tokens + CHUNK - 1) // CHUNK
    first = segment * per_segment
    Q += b * q_b + h * q_h
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    if OUTPUT:
        OUT += b * o_b + h * o_h
    if EMIT:
        W += b * w_b + h * w_h
    if DECAYS != "":
        DECAY += b * g_b + h * g_h
    if DECAYS == "head":
        g_head = as_decay(tl.load(DECAY), WIDE)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if START is not None:
        at_front = START + bh * start_bh + segment * start_segment
        at_front += k[:, None] * start_k + v[None, :] * start_v
        state = tl.load(at_front, mask=state_here, other=0.0) * start_factor
    log = tl.full([], 0.0, tl.float32)
    if REVERSE:
        earlier = i[:, None] <= i[None, :]
    else:
        earlier = i[:, None] >= i[None, :]
    if EMIT:
        earlier = earlier & (i[:, None] != i[None, :])
    for step in tl.range(first, tl.minimum(first + per_segment, chunks), num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        origin = (chunk * CHUNK).to(tl.int64)
        here = i < tokens - chunk * CHUNK
        if STORE_FRONTS:
            at = FRONTS + (bh * chunks + chunk) * (dk * dv) + (k[:, None] * dv + v[None, :])
            tl.store(at, state.to(FRONTS.dtype.element_ty), mask=state_here)
        keys = tl.load(
            K + origin * k_t + (i[:, None] * k_t + k[None, :]),
            mask=here[:, None] & k_here[None, :], other=0.0,
        )  # fmt: skip
        values = tl.load(
            V + origin * v_t + (i[:, None] * v_t + v[None, :]),
            mask=here[:, None] & v_here[None, :], other=0.0,
        )  # fmt: skip
        if DECAYS != "" and MILD:
            count = tl.minimum(tokens - chunk * CHUNK, CHUNK)
            if DECAYS == "token":
                at = origin * g_t + i * g_t
                g = as_decay(tl.load(DECAY + at, mask=here, other=0.0), WIDE)
                G = tl.cumsum(g, 0)
                total = tl.sum(g, 0)
            else:
                G = tl.minimum(i + 1, count) * g_head
                total = count * g_head
            kept = tl.exp2((total - G if REVERSE else G) - 0.5 * total)
            raised = tl.exp2(0.5 * total - (total - G if REVERSE else G))
            decayed = tl.exp2(0.5 * total)
            log += total
            state *= decayed
            raw = values.to(tl.float32)
            values = (raw * raised[:, None]).to(keys.dtype)
        elif DECAYS != "":
            if DECAYS == "token":
                at = origin * g_t + i * g_t
                g = as_decay(tl.load(DECAY + at, mask=here, other=0.0), WIDE)
                follows = (i + 1 < tokens - chunk * CHUNK) & (i < CHUNK - 1)
                later = as_decay(tl.load(DECAY + at + g_t, mask=follows, other=0.0), WIDE)
                G = tl.cumsum(g, 0)
                total = tl.sum(g, 0).to(tl.float32)
                suffix = tl.cumsum(later, 0, reverse=True).to(tl.float32)
                between = G[None, :] - G[:, None] if REVERSE else G[:, None] - G[None, :]
            else:
                count = tl.minimum(tokens - chunk * CHUNK, CHUNK)
                G = (i + 1) * g_head
                total = (count * g_head).to(tl.float32)
                suffix = (tl.maximum(count - 1 - i, 0) * g_head).to(tl.float32)
                distance = i[None, :] - i[:, None] if REVERSE else i[:, None] - i[None, :]
                between = tl.maximum(distance, 0) * g_head
            prefix = tl.exp2(G.to(tl.float32))
            suffix = tl.exp2(suffix)
            decayed = tl.exp2(total)
            log += total
        if OUTPUT:
            queries = tl.load(
                Q + origin * q_t + (i[:, None] * q_t + k[None, :]),
                mask=here[:, None] & k_here[None, :], other=0.0,
            )  # fmt: skip
            scores = product(queries, tl.trans(keys), PRECISION)
            if DECAYS != "" and not MILD:
                scores *= tl.exp2(tl.where(earlier, between, 0.0).to(tl.float32))
            if EMIT:
                own = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), 1)
            out = product_with_state(queries, state, PRECISION)
            if DECAYS != "" and not MILD:
                out *= (suffix if REVERSE else prefix)[:, None]
            lower = tl.where(earlier, scores, 0.0).to(keys.dtype)
            out = tl.dot(lower, values, out, input_precision=PRECISION)
            if DECAYS != "" and MILD:
                out *= kept[:, None]
            if EMIT:
                # Without the token's own term: it is in two sums whose difference counts.
                weights = tl.load(
                    W + origin * w_t + (i[:, None] * w_t + v[None, :]),
                    mask=here[:, None] & v_here[None, :], other=0.0,
                )  # fmt: skip
                at = (tile.to(tl.int64) * (tl.num_programs(0) // (tiles * segments)) + bh) * tokens
                sums = tl.sum(weights.to(tl.float32) * out, 1) * scale
                tl.store(E + at + origin + i, sums, mask=here)
                if MILD:
                    again = raw
                else:
                    again = tl.load(
                        V + origin * v_t + (i[:, None] * v_t + v[None, :]),
                        mask=here[:, None] & v_here[None, :], other=0.0,
                    )  # fmt: skip
                out += own[:, None] * again.to(tl.float32)
            at = OUT + origin * o_t + (i[:, None] * o_t + v[None, :])
            tl.store(
                at, (out * scale).to(OUT.dtype.element_ty), mask=here[:, None] & v_here[None, :]
            )
        if DECAYS != "" and not MILD:
            factor = prefix if REVERSE else suffix
            # Read again: triton 3.6 overwrites what is read elementwise and by a pipelined product.
            again = tl.load(
                V + origin * v_t + (i[:, None] * v_t + v[None, :]),
                mask=here[:, None] & v_here[None, :], other=0.0,
            )  # fmt: skip
            values = (again.to(tl.float32) * factor[:, None]).to(keys.dtype)
            state *= decayed
        state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
        if DECAYS != "" and MILD:
            state *= decayed
        if ANCHOR:
            at = FRONTS + (bh * chunks + chunk) * (dk * dv) + (k[:, None] * dv + v[None, :])
            front = tl.load(at, mask=state_here, other=0.0).to(tl.float32)
            at = (tile.to(tl.int64) * (tl.num_programs(0) // (tiles * segments)) + bh) * chunks
            tl.store(ANCHORS + at + chunk, scale * tl.sum(tl.sum(front * state, 1), 0))
    if END is not None:
        at = END + bh * end_bh + segment * end_segment + k[:, None] * end_k + v[None, :] * end_v
        last = segment == segments - 1 if OUTPUT else segment >= 0
        tl.store(at, state * end_factor, mask=state_here & last)
    if not OUTPUT:
        if DECAYS != "" and tile == 0:
            tl.store(LOG + bh * segments + segment, log)


@triton.jit
def between_segments_kernel(
    LOCAL, LOG, START, OUT, segments, blocks, size, width, start_factor, start_bh, start_k,
    start_v, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT [BH, segments, size], the state in front of every segment, of LOCAL [BH, segments - 1,
    size], what every segment but the last adds: OUT_0 = START, OUT_{s+1} = 2^{LOG_s} OUT_s +
    LOCAL_s."""
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    state = tl.zeros([BLOCK], tl.float32)
    if START is not None:
        first = START + bh * start_bh + (at // width) * start_k + (at % width) * start_v
        state = tl.load(first, mask=here, other=0.0) * start_factor
    tl.store(OUT + bh * segments * size + at, state, mask=here)
    for s in range(segments - 1):
        row = bh * (segments - 1) + s
        if LOG is not None:
            state *= tl.exp2(tl.load(LOG + row))
        state += tl.load(LOCAL + row * size + at, mask=here, other=0.0)
        tl.store(OUT + (bh * segments + s + 1) * size + at, state, mask=here)


@triton.jit
def decay_gradient_kernel(
    FORWARD, BACKWARD, ANCHORS, OUT, tokens, chunks, tiles, forward_tile, anchor_tile,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dg_t = anchor - sum over i < t in the chunk of (q_i . dq_i - k_i . dk_i), each without the
    term of the token itself; the anchor is <S, D> in front of the chunk: dg of its first token.
    Small where decays are strong, as <S, D> behind the last token is not. Sums over tiles in order.
    """
    bh = tl.program_id(0).to(tl.int64) // chunks
    chunk = tl.program_id(0) % chunks
    i = tl.arange(0, CHUNK)
    t = chunk * CHUNK + i
    here = t < tokens
    before = here & (i > 0)  # the sum leaves the token itself out: it could be the only large one
    total = tl.zeros([CHUNK], tl.float32)
    anchor = 0.0
    for tile in range(tiles):
        at = tile * forward_tile + bh * tokens + t - 1
        total += tl.load(FORWARD + at, mask=before, other=0.0)
        total -= tl.load(BACKWARD + at, mask=before, other=0.0)
        anchor += tl.load(ANCHORS + tile * anchor_tile + bh * chunks + chunk)
    tl.store(OUT + bh * tokens + t, anchor - tl.cumsum(total, 0), mask=here)
