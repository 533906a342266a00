# mypy: disable-error-code="assignment"
"""Causal linear attention with one decay per head or per token, a chunk of tokens at a time.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T        o_t = scale q_t S_t

With G the running sum of g inside a chunk and S the state in front of it

    o_i = scale (e^{G_i} q_i S + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) v_j)
    S  <- e^{G_last} S + sum_j e^{G_last - G_j} k_j v_j^T

``REVERSE`` runs from the last chunk to the first with D for S, the sum over what follows:

    o_i = scale (e^{G_last - G_i} q_i D + sum_{j >= i} e^{G_j - G_i} (q_i . k_j) v_j)
    D  <- e^{G_last} D + sum_j e^{G_j} k_j v_j^T

Gradients are this kernel with other roles: dq of (do, v, k), dk of (v, do, q) in reverse, dv of
(k, q, do) in reverse; with those of the decays, see ``linear_attention_gradients``. The exponents
are sums of decays, never differences that could be positive. Decays per head are read as decays per
token, those per channel (``linear_attention_channel``) as scales of the state between chunks.

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
def sums_kernel(
    DECAY, UNTIL, BEHIND, STRONGEST_OF, tokens, heads, blocks, padded, g_b, g_h, g_t,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sums of decays inside chunks: UNTIL [BH, padded] of a token and those in front of it, BEHIND
    of those behind it. STRONGEST_OF [BH, blocks]: of the chunk of the block that decays (or grows)
    most, the log of what it keeps (or less)."""
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    DECAY += bh // heads * g_b + bh % heads * g_h
    i = tl.arange(0, CHUNK)[None, :]
    t = block.to(tl.int64) * (CHUNKS * CHUNK) + tl.arange(0, CHUNKS)[:, None] * CHUNK + i
    g = as_decay(tl.load(DECAY + t * g_t, mask=t < tokens, other=0.0), WIDE)
    follows = (i < CHUNK - 1) & (t + 1 < tokens)
    later = as_decay(tl.load(DECAY + (t + 1) * g_t, mask=follows, other=0.0), WIDE)
    tl.store(UNTIL + bh * padded + t, tl.cumsum(g, 1))
    tl.store(BEHIND + bh * padded + t, tl.cumsum(later, 1, reverse=True).to(tl.float32))
    size = tl.where(g == g, tl.abs(g), float("inf"))  # NaN is not mild
    tl.store(STRONGEST_OF + bh * blocks + block, -tl.max(tl.sum(size, 1), 0).to(tl.float32))


@triton.jit
def chunk_kernel(
    Q, K, V, OUT, UNTIL, BEHIND, STRONGEST_OF, FIRSTS, SECONDS, START, END, LOG, FRONTS,
    tokens, heads, tiles, segments, per_segment, padded, scale, start_factor, end_factor, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    start_bh, start_segment, start_k, start_v, end_bh, end_segment, end_k, end_v,
    DECAYS: tl.constexpr,  # "", "token" or "channel"
    MILD: tl.constexpr, REVERSE: tl.constexpr, OUTPUT: tl.constexpr, LOCAL: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The chunks of one segment, for one head and one tile of v's columns.

    STRONGEST_OF [BH]: by which heads are MILD or not; None where one launch is for all. UNTIL and
    BEHIND are ``sums_kernel``'s; with "channel" q, k, FIRSTS and SECONDS are ``scaled_kernel``'s.

    START: the state in front of every segment, or None for 0. END: the state behind it, or None.
    LOCAL: only END is computed, of every segment, and LOG [BH, segments, rows], its decays' sums in
    base 2; rows: dk of decays per channel, else 1. FRONTS [BH, chunks, dk, dv] gets the state in
    front of every chunk, or is None.
    """
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
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if START is not None:
        at_front = START + bh * start_bh + segment * start_segment
        at_front += k[:, None] * start_k + v[None, :] * start_v
        state = tl.load(at_front, mask=state_here, other=0.0) * start_factor
    log = tl.zeros([BLOCK_K if DECAYS == "channel" else 1], tl.float32)
    if DECAYS == "token":
        UNTIL += bh * padded
        BEHIND += bh * padded
    if REVERSE:
        earlier = i[:, None] <= i[None, :]
    else:
        earlier = i[:, None] >= i[None, :]
    for step in tl.range(first, tl.minimum(first + per_segment, chunks), num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        origin = (chunk * CHUNK).to(tl.int64)
        here = i < tokens - chunk * CHUNK
        if FRONTS is not None:
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
        if DECAYS == "channel":
            at = (bh * chunks + chunk) * dk + k
            ahead = tl.load((SECONDS if REVERSE else FIRSTS) + at, mask=k_here, other=0.0)
            after = tl.load((FIRSTS if REVERSE else SECONDS) + at, mask=k_here, other=0.0)
            log += ahead + after
            state *= tl.exp2(ahead)[:, None]
        elif DECAYS == "token":
            G = tl.load(UNTIL + origin + i)
            total = tl.load(UNTIL + origin + CHUNK - 1).to(tl.float32)
            log += total
            if MILD:
                G = total - G if REVERSE else G
                kept = tl.exp2(G - 0.5 * total)
                raised = tl.exp2(0.5 * total - G)
                decayed = tl.exp2(0.5 * total)
                state *= decayed
                values = (values.to(tl.float32) * raised[:, None]).to(keys.dtype)
            else:
                behind = tl.exp2(tl.load(BEHIND + origin + i))
                until = tl.exp2(G.to(tl.float32))
                decayed = tl.exp2(total)
                between = G[None, :] - G[:, None] if REVERSE else G[:, None] - G[None, :]
        if OUTPUT:
            queries = tl.load(
                Q + origin * q_t + (i[:, None] * q_t + k[None, :]),
                mask=here[:, None] & k_here[None, :], other=0.0,
            )  # fmt: skip
            scores = product(queries, tl.trans(keys), PRECISION)
            if DECAYS == "token" and not MILD:
                scores *= tl.exp2(tl.where(earlier, between, 0.0).to(tl.float32))
            out = product_with_state(queries, state, PRECISION)
            if DECAYS == "token" and not MILD:
                out *= (behind if REVERSE else until)[:, None]
            lower = tl.where(earlier, scores, 0.0).to(keys.dtype)
            out = tl.dot(lower, values, out, input_precision=PRECISION)
            if DECAYS == "token" and MILD:
                out *= kept[:, None]
            at = OUT + origin * o_t + (i[:, None] * o_t + v[None, :])
            tl.store(
                at, (out * scale).to(OUT.dtype.element_ty), mask=here[:, None] & v_here[None, :]
            )
        if DECAYS == "token" and not MILD:
            # Read again: triton 3.6 overwrites what is read elementwise and by a pipelined product.
            again = tl.load(
                V + origin * v_t + (i[:, None] * v_t + v[None, :]),
                mask=here[:, None] & v_here[None, :], other=0.0,
            )  # fmt: skip
            values = (again.to(tl.float32) * (until if REVERSE else behind)[:, None]).to(keys.dtype)
            state *= decayed
        state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
        if DECAYS == "channel":
            state *= tl.exp2(after)[:, None]
        elif DECAYS == "token" and MILD:
            state *= decayed
    if END is not None:
        at = END + bh * end_bh + segment * end_segment + k[:, None] * end_k + v[None, :] * end_v
        tl.store(at, state * end_factor, mask=state_here & (LOCAL or segment == segments - 1))
    if LOCAL:
        if DECAYS == "channel":
            at = (bh * segments + segment) * dk + k
            tl.store(LOG + at, log, mask=k_here & (tile == 0))
        elif DECAYS == "token":
            tl.store(LOG + bh * segments + segment + tl.arange(0, 1), log, mask=tile == 0)


@triton.jit
def between_segments_kernel(
    LOCAL, LOG, START, OUT, segments, blocks, size, width, start_factor, start_bh, start_k,
    start_v, log_segment, log_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT [BH, segments, size], the state in front of every segment, of LOCAL [BH, segments - 1,
    size], what every segment but the last adds: OUT_0 = START, OUT_{s+1} = 2^{LOG_s} OUT_s +
    LOCAL_s, LOG per segment or per row."""
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
            state *= tl.exp2(tl.load(LOG + row * log_segment + at // width * log_row, mask=here))
        state += tl.load(LOCAL + row * size + at, mask=here, other=0.0)
        tl.store(OUT + (bh * segments + s + 1) * size + at, state, mask=here)
