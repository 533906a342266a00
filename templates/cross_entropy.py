"""Cross entropy of rows of logits x against a distribution q over their columns.

    z    = scale c tanh(x / c)           c: the softcap; z = scale x without one
    loss = sum_j q_j (lse - z_j) + z_loss lse^2
    dz_j = p_j (sum_j q_j + 2 z_loss lse) - q_j          dx_j = dz_j dz/dx

    INDEX   q_j = w_t (1 - eps) [j = t] + w_j eps / C    t: the target, w: class weights
    DENSE   q_j = w_j (t_j (1 - eps) + eps / C)          t: a distribution, read beside x
    SPARSE  q   = K values at K given columns            repeated columns add up
    NONE    q   = 0                                      only lse is wanted

An INDEX target's own column is kept out of the running sum. With S the sum over the others and
margin d = log S - z_t,

    lse - z_t = softplus(d)     p_t - 1 = -sigmoid(d)     p_t = sigmoid(-d)

so a confident row keeps a loss and a gradient down to what fp32 can hold, and a common offset of
the logits cancels in d. What of the loss is linear in the logits is summed relative to the running
maximum s of a row, which moves on the way:

    linear = sum_j q_j (x_j - s)    mass = sum_j q_j    s -> s':  linear += mass (s - s')

so no column's logit is a reference that a mask of -1e9 could make useless. The gradient at single
columns (the target's, the sparse ones') is stored a second time, behind a barrier: the block stores
need no comparison per element.

One program per row, or per (row, split). No atomics: the same bits every run. A row whose target
is ignored, or that has no SPARSE entry, is not swept, so what it holds does not matter; its
gradient is stored as 0.

SHARD: x holds some of an INDEX row's classes, and ``cross_entropy_shards`` merges what each shard
has of the row. A target at or past the last column is another shard's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .row_softmax import anchor_of, fold, highest, meet, soft_cap

NONE, INDEX, DENSE, SPARSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LN2, LOG2E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)
STATISTICS = tl.constexpr(4)  # anchor, total, margin, mass: what the gradient needs of a row


@triton.jit(debug=True)
def count_kernel(
    T, W, COUNTS, rows, columns, ignore_index, programs,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """COUNTS [2, programs]: sums of w_t, and numbers, of the rows that count. Checks the range."""
    weight = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * BLOCK, rows, programs * BLOCK):
        i = first + tl.arange(0, BLOCK)
        t = tl.load(T + i, mask=i < rows, other=ignore_index).to(tl.int64)
        counts = (t != ignore_index) & (i < rows)
        valid = (t >= 0) & (t < columns)
        tl.device_assert(valid | (counts == 0), "a target is not in [0, number of classes)")
        if WEIGHTED:
            weight += tl.load(W + t, mask=counts & valid, other=0.0).to(tl.float32)
        number += counts.to(tl.float32)
    tl.store(COUNTS + programs + tl.program_id(0), tl.sum(number, 0))
    if WEIGHTED:
        number = weight
    tl.store(COUNTS + tl.program_id(0), tl.sum(number, 0))


@triton.jit
def denominators(COUNTS, programs, MEAN: tl.constexpr, PROGRAMS: tl.constexpr):
    """What a row's cross entropy, and its z-loss, is multiplied with."""
    if MEAN:
        i = tl.arange(0, PROGRAMS)
        weight = tl.sum(tl.load(COUNTS + i, mask=i < programs, other=0.0), 0)
        number = tl.sum(tl.load(COUNTS + programs + i, mask=i < programs, other=0.0), 0)
        return 1.0 / weight, 1.0 / number
    else:
        return 1.0, 1.0


@triton.jit
def softplus(d):
    # log(1 + e) as 2 atanh(e / (2 + e)): its own series, exact also where e is tiny.
    e = tl.exp(-tl.abs(d))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 11 + s2 * (1.0 / 13 + s2 * (1.0 / 15))
    series = 1.0 + s2 * (1.0 / 3 + s2 * (1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9 + s2 * series))))
    return tl.maximum(d, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(d):
    e = tl.exp(-tl.abs(d))
    return tl.where(d >= 0, 1.0, e) / (1.0 + e)


# --- the statistics of a row ----------------------------------------------------------------------


@triton.jit
def target_of(
    X, T, Q, row, x_stride, t_stride, q_stride, columns, K, ignore_index, cap,
    KIND: tl.constexpr, CAPPED: tl.constexpr, K_BLOCK: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """(column of the target, its logit or -inf, row is skipped).

    Skipped is a row whose target is ignored, and one without SPARSE entries. The column of another
    SHARD's target is -1.
    """
    offset = row.to(tl.int64) * x_stride
    if KIND == INDEX:
        t = tl.load(T + row.to(tl.int64) * t_stride).to(tl.int64)
        if SHARD:
            skipped, absent = t == ignore_index, t >= columns
            t = tl.where(skipped | absent, 0, t)
        else:
            skipped = (t == ignore_index) | (t < 0) | (t >= columns)
            t = tl.where(skipped, 0, t)
        x, _ = soft_cap(tl.load(X + offset + t).to(tl.float32), cap, CAPPED)
        if SHARD:
            t, x = tl.where(absent, -1, t), tl.where(absent, -float("inf"), x)
        return t.to(tl.int32), x, skipped
    else:
        skipped = False
        if KIND == SPARSE:
            k = tl.arange(0, K_BLOCK)
            q = tl.load(Q + row.to(tl.int64) * q_stride + k, mask=k < K, other=0.0)
            skipped = tl.sum((q != 0).to(tl.int32), 0) == 0
        return -1, -float("inf"), skipped


@triton.jit
def distribution(Q, W, c, inside, eps_of, KIND: tl.constexpr, WEIGHTED: tl.constexpr,
                 SMOOTH: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The part of q at the columns c that varies from column to column: all of it, if DENSE."""
    q = 1.0
    if KIND == DENSE:
        q = tl.load(Q + c, mask=inside, other=0.0) if MASKED else tl.load(Q + c)
        q = q.to(tl.float32)
        if SMOOTH:
            q = q * eps_of[0] + eps_of[1]
    if WEIGHTED:
        w = tl.load(W + c, mask=inside, other=0.0) if MASKED else tl.load(W + c)
        q = q * w.to(tl.float32)
    return q


@triton.jit
def reference_of(shift, x_t):
    """What the linear part is relative to: the maximum with the target's logit, of INDEX."""
    return anchor_of(tl.maximum(shift, x_t))


@triton.jit
def gather(state, x_t, alpha, KIND: tl.constexpr, SMOOTH: tl.constexpr):
    """(anchor, total, linear, mass) of a row from those of its threads, or of its splits."""
    shift, total, linear, mass = state
    anchor, total = meet(shift, total, alpha)
    if KIND == DENSE or SMOOTH:
        linear += mass * (reference_of(shift, x_t) - reference_of(tl.max(shift, 0), x_t))
    return anchor, total, tl.sum(linear, 0), tl.sum(mass, 0)


@triton.jit
def absorb(
    x, c0, inside, t, x_t, Q, W, state, alpha, cap, eps_of, ROWS: tl.constexpr,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    THREADS: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A block of logits x, columns from c0 on, into each thread's (shift, total, linear, mass)."""
    shift, total, linear, mass = state
    c = c0 + tl.arange(0, ROWS * THREADS * E)
    x, _ = soft_cap(x.to(tl.float32), cap, CAPPED)
    if MASKED:
        x = tl.where(inside, x, -float("inf"))
    if KIND == DENSE or SMOOTH:
        top = highest(tl.reshape(x, [ROWS, THREADS, E]))
        q = distribution(Q, W, c, inside, eps_of, KIND, WEIGHTED, SMOOTH, MASKED)
        old, new = reference_of(shift, x_t), reference_of(tl.maximum(shift, top), x_t)
        linear += mass * (old - new)
        y = tl.reshape(x, [ROWS, THREADS, E]) - new[None, :, None]
        if KIND != DENSE and not WEIGHTED and not MASKED:
            mass += ROWS * E
        else:
            q = tl.where(inside, q, 0.0) if MASKED else q
            q = tl.reshape(q, [ROWS, THREADS, E])
            mass += tl.sum(tl.sum(q, 2), 0)
            y = q * y
        if MASKED:
            y = tl.where(tl.reshape(inside, [ROWS, THREADS, E]), y, 0.0)
        linear += tl.sum(tl.sum(y, 2), 0)
    if KIND == INDEX:
        # The block that holds the target is one of many: the others compare nothing. The barrier
        # keeps the compiler from turning the branch into comparisons of all of them.
        if (t >= c0) & (t < c0 + ROWS * THREADS * E):
            tl.debug_barrier()
            x = tl.where(c == t, -float("inf"), x)
            if SMOOTH:
                top = highest(tl.reshape(x, [ROWS, THREADS, E]))
    if KIND != DENSE and not SMOOTH:
        top = highest(tl.reshape(x, [ROWS, THREADS, E]))
    shift, total = fold(tl.reshape(x, [ROWS, THREADS, E]), top, shift, total, alpha)
    return shift, total, linear, mass


@triton.jit
def sweep(
    X, x_row, head, edges, first, n, t, x_t, Q, W, alpha, cap, eps_of,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr, STREAM: tl.constexpr,
    R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """(shift, total, linear, mass) of n columns from x_row and of ``edges`` at ``x_row - head``;
    the HELD first blocks. Column ``first + i`` of the row lies at ``x_row + i``."""
    BLOCK: tl.constexpr = R * THREADS * E
    i = tl.arange(0, BLOCK)
    zeros = tl.zeros([THREADS], tl.float32)
    state = (tl.full([THREADS], -float("inf"), tl.float32), zeros, zeros, zeros)
    if not ALIGNED:
        j = tl.arange(0, THREADS * E)
        edge = tl.load(x_row - head + j, mask=j < edges, other=0.0)
        state = absorb(
            edge, first - head, j < edges, t, x_t, Q, W, state, alpha, cap, eps_of, 1,
            KIND, WEIGHTED, SMOOTH, CAPPED, THREADS, E, True,
        )  # fmt: skip
    held = ()
    for k in tl.static_range(HELD):
        if k < WHOLE:
            held = held + (tl.load(x_row + k * BLOCK + i),)  # type: ignore[assignment]
        else:
            held = held + (tl.load(x_row + k * BLOCK + i, mask=k * BLOCK + i < n, other=0.0),)  # type: ignore[assignment]
    for k in tl.static_range(HELD):
        at = k * BLOCK + i
        state = absorb(
            held[k], first + k * BLOCK, at < n, t, x_t, Q, W, state, alpha, cap, eps_of, R,
            KIND, WEIGHTED, SMOOTH, CAPPED, THREADS, E, k >= WHOLE,
        )  # fmt: skip
    if STREAM:
        # What is read again stays in L2, if it can; what is not, makes room.
        POLICY: tl.constexpr = "evict_last" if AGAIN else "evict_first"
        last = HELD * BLOCK + (n - HELD * BLOCK) // BLOCK * BLOCK
        for c in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            x = tl.load(x_row + c + i, eviction_policy=POLICY)
            state = absorb(
                x, first + c, True, t, x_t, Q, W, state, alpha, cap, eps_of, R,
                KIND, WEIGHTED, SMOOTH, CAPPED, THREADS, E, False,
            )  # fmt: skip
        if last < n:
            tail = tl.load(x_row + last + i, mask=last + i < n, other=0.0, eviction_policy=POLICY)
            state = absorb(
                tail, first + last, last + i < n, t, x_t, Q, W, state, alpha, cap, eps_of,
                R, KIND, WEIGHTED, SMOOTH, CAPPED, THREADS, E, True,
            )  # fmt: skip
    return held, state


@triton.jit
def finish(
    X, T, Q, W, W_SUM, row, x_stride, q_stride, t, x_t, shift, total, linear, mass,
    K, scale, alpha, cap, eps_of, z_loss, to_mean,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(loss, lse, anchor, total, margin, mass) of a row from its merged statistics."""
    anchor, margin = shift, 0.0
    if KIND == INDEX:
        d = tl.log2(total) * LN2 - (x_t - anchor) * scale
        ce = tl.where(x_t == float("inf"), float("nan"), softplus(d))  # inf - inf, as in a softmax
        if_others = tl.where(total > 0, anchor, -float("inf"))
        anchor = reference_of(if_others, x_t)
        total = total * tl.exp2((if_others - anchor) * alpha) + tl.exp2((x_t - anchor) * alpha)
        margin = d
        mass = eps_of[0]
        if WEIGHTED:
            mass = mass * tl.load(W + t).to(tl.float32)
        loss = mass * ce
        if SMOOTH:
            everyone = tl.load(W_SUM).to(tl.float32)
            loss += eps_of[1] * (everyone * tl.log2(total) * LN2 - scale * linear)
            mass += eps_of[1] * everyone
    log_total = tl.log2(total) * LN2
    if KIND == NONE:
        loss = 0.0
    elif KIND == DENSE:
        loss = mass * log_total - scale * linear
    elif KIND == SPARSE:
        _, q, x_c, _, used = sparse_of(X, T, Q, row, x_stride, q_stride, K, cap, CAPPED, K_BLOCK)
        mass = tl.sum(q, 0)
        each = log_total - (x_c - anchor) * scale
        loss = tl.sum(tl.where(used, q * each, 0.0), 0)
    lse = anchor * scale + log_total
    return loss * to_mean[0] + z_loss * lse * lse * to_mean[1], lse, anchor, total, margin, mass


@triton.jit
def sparse_of(X, T, Q, row, x_stride, q_stride, K, cap, CAPPED: tl.constexpr,
              K_BLOCK: tl.constexpr):  # fmt: skip
    """(columns, q, logits, their derivative, whether there is one) of a row's K entries.

    T and Q have the same stride.
    """
    k = tl.arange(0, K_BLOCK)
    at = row.to(tl.int64) * q_stride + k
    q = tl.load(Q + at, mask=k < K, other=0.0).to(tl.float32)
    used = (k < K) & (q != 0)
    c = tl.load(T + at, mask=used, other=0).to(tl.int64)
    x = tl.load(X + row.to(tl.int64) * x_stride + c, mask=used, other=0.0).to(tl.float32)
    x, derivative = soft_cap(x, cap, CAPPED)
    return c.to(tl.int32), q, x, derivative, used


# --- the gradient of a row ------------------------------------------------------------------------


@triton.jit
def slope(DX, x, c, inside, Q, W, alpha, anchor, per_exp, per_q, cap, eps_of,
          KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """dx at the columns c, single ones left out: ``per_exp 2^((x - anchor) alpha) - per_q q``."""
    x, derivative = soft_cap(x.to(tl.float32), cap, CAPPED)
    dx = tl.exp2((x - anchor) * alpha) * per_exp
    if KIND == DENSE:
        dx -= per_q * distribution(Q, W, c, inside, eps_of, KIND, WEIGHTED, SMOOTH, MASKED)
    elif KIND == INDEX and SMOOTH:
        q = distribution(Q, W, c, inside, eps_of, KIND, WEIGHTED, SMOOTH, MASKED)
        dx -= per_q * eps_of[1] * q
    if CAPPED:
        dx *= derivative
    return dx.to(DX.dtype.element_ty)


@triton.jit
def write(
    DX, x_row, dx_row, held, head, edges, first, n, Q, W, alpha, anchor, per_exp, per_q, cap,
    eps_of,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr, STREAM: tl.constexpr,
    R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dx of n columns from dx_row, and of what lies before: ``sweep`` the other way."""
    BLOCK: tl.constexpr = R * THREADS * E
    i = tl.arange(0, BLOCK)
    if not ALIGNED:
        j = tl.arange(0, THREADS * E)
        edge = tl.load(x_row - head + j, mask=j < edges, other=0.0)
        dx_edge = slope(DX, edge, first - head + j, j < edges, Q, W, alpha, anchor, per_exp, per_q,
                        cap, eps_of, KIND, WEIGHTED, SMOOTH, CAPPED, True)  # fmt: skip
        tl.store(dx_row - head + j, dx_edge, mask=j < edges)
    for k in tl.static_range(HELD):
        at = k * BLOCK + i
        kept = slope(DX, held[k], first + at, at < n, Q, W, alpha, anchor, per_exp, per_q, cap,
                     eps_of, KIND, WEIGHTED, SMOOTH, CAPPED, k >= WHOLE)  # fmt: skip
        if k < WHOLE:
            tl.store(dx_row + at, kept, eviction_policy="evict_first")
        else:
            tl.store(dx_row + at, kept, mask=at < n, eviction_policy="evict_first")
    if STREAM:
        last = HELD * BLOCK + (n - HELD * BLOCK) // BLOCK * BLOCK
        for c in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            x = tl.load(x_row + c + i, eviction_policy="evict_first")
            dx = slope(DX, x, first + c + i, True, Q, W, alpha, anchor, per_exp, per_q, cap,
                       eps_of, KIND, WEIGHTED, SMOOTH, CAPPED, False)  # fmt: skip
            tl.store(dx_row + c + i, dx, eviction_policy="evict_first")
        if last < n:
            inside = last + i < n
            tail = tl.load(x_row + last + i, mask=inside, other=0.0)
            dx_tail = slope(DX, tail, first + last + i, inside, Q, W, alpha, anchor, per_exp, per_q,
                            cap, eps_of, KIND, WEIGHTED, SMOOTH, CAPPED, True)  # fmt: skip
            tl.store(dx_row + last + i, dx_tail, mask=inside, eviction_policy="evict_first")


@triton.jit
def put_zeros(DX, at, n, BLOCK: tl.constexpr):
    """Store 0 as the gradient of n columns."""
    i = tl.arange(0, BLOCK)
    for c in range(0, n, BLOCK):
        tl.store(at + c + i, tl.zeros([BLOCK], DX.dtype.element_ty), mask=c + i < n)


@triton.jit
def single_slope(
    X, T, Q, W, row, x_stride, q_stride, t, x_t, K, scale, alpha, cap, eps_of,
    anchor, per_exp, per_q, per_p, margin,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(dx, mask) of what a row's single columns hold instead of ``slope``'s.

    ``per_p`` is the factor of p without the target's own part of q; all factors contain scale.
    """
    if KIND == INDEX:
        w = tl.load(W + t).to(tl.float32) if WEIGHTED else 1.0
        x = tl.load(X + row.to(tl.int64) * x_stride + t).to(tl.float32)
        _, derivative = soft_cap(x, cap, CAPPED)
        dx = per_p * sigmoid(-margin) - per_q * eps_of[0] * w * sigmoid(margin)
        if SMOOTH:
            dx -= per_q * eps_of[1] * w
        return dx * derivative, True
    else:
        c, q, x, derivative, used = sparse_of(
            X, T, Q, row, x_stride, q_stride, K, cap, CAPPED, K_BLOCK
        )
        same = (c[:, None] == c[None, :]) & used[None, :]
        q = tl.sum(tl.where(same, q[None, :], 0.0), 1)
        dx = tl.exp2((x - anchor) * alpha) * per_exp - per_q * q
        return dx * derivative, used
