"""Rows of logits whose classes lie in several shards: what each has of a row, merged.

A shard shares K numbers of a row, [K, N]; x is capped, and p is a class weight or 1:

    0  shift   max of its x without the target's, -inf if there is none
    1  total   sum of 2^((x - shift) alpha), the target's left out
    2  x_t     the target's x, -inf where another shard has it
    3  linear  sum of p (x - max(shift, x_t))    with smoothing
    4  mass    sum of p                          with smoothing
    3 or 5     the target's p, or 0              with class weights

Shift and total are merged as the splits of a row are: relative to the largest shift. Every shard
merges the same numbers in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cross_entropy import INDEX, LOG2E, denominators, finish, reference_of
from .row_softmax import meet


@triton.jit
def merge_shards_kernel(
    PACKED, T, W_T, SUMS, LOSS, LSE, STATS, shards, K, rows, ignore_index, scale, keep, z_loss,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, MEAN: tl.constexpr, SHARDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """SUMS [4]: of the targets' weights, of the rows that count, eps / C, of all weights."""
    # Numbers are doubles in programs that Inductor writes.
    scale, keep = tl.cast(scale, tl.float32), tl.cast(keep, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    alpha = scale * LOG2E
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    skipped = tl.load(T + row, mask=real, other=ignore_index) == ignore_index
    shard = tl.arange(0, SHARDS)[:, None]
    inside = (shard < shards) & real[None, :]
    at = PACKED + shard.to(tl.int64) * K * rows + row[None, :]
    shift = tl.load(at, mask=inside, other=-float("inf"))
    total = tl.load(at + rows, mask=inside, other=0.0)
    targets = tl.load(at + 2 * rows, mask=inside, other=-float("inf"))
    # -inf from all is a target's own. From several shards, which were given different targets, it
    # is none: NaN says so.
    found = tl.sum((targets != -float("inf")).to(tl.int32), 0)
    x_t = tl.sum(tl.where(targets == -float("inf"), 0.0, targets), 0)
    x_t = tl.where(found == 0, -float("inf"), tl.where(found == 1, x_t, float("nan")))
    anchor, merged = meet(shift, total, alpha)
    linear, spread = 0.0, 0.0
    if SMOOTH:
        spread = tl.load(SUMS + 2)
        linear = tl.load(at + 3 * rows, mask=inside, other=0.0)
        mass = tl.load(at + 4 * rows, mask=inside, other=0.0)
        whole = reference_of(tl.max(shift, 0), x_t)
        linear = tl.sum(linear + mass * (reference_of(shift, targets) - whole[None, :]), 0)
    of_ce, of_z = denominators(SUMS, 1, MEAN, 1)
    loss, lse, anchor, merged, margin, mass = finish(
        PACKED, T, PACKED, W_T, SUMS + 3, row, 0, 0, tl.where(real, row, 0), x_t, anchor, merged,
        linear, 0.0, 0, scale, alpha, 1.0, (keep, spread), z_loss, (of_ce, of_z),
        INDEX, WEIGHTED, SMOOTH, False, 1,
    )  # fmt: skip
    # As a row that is not sharded: 0/0 where no row counts.
    tl.store(LOSS + row, tl.where(skipped, 0.0 * of_ce, loss), mask=real)
    tl.store(LSE + row, tl.where(skipped, 0.0, lse), mask=real)
    tl.store(STATS + row, tl.where(skipped, 0.0, anchor), mask=real)
    tl.store(STATS + rows + row, tl.where(skipped, 1.0, merged), mask=real)
    tl.store(STATS + 2 * rows + row, tl.where(skipped, 0.0, margin), mask=real)
    tl.store(STATS + 3 * rows + row, tl.where(skipped, 0.0, mass + tl.zeros_like(x_t)), mask=real)
