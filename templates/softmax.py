"""Softmax and log-softmax of rows, forward and backward, a row per program.

    y  = 2^((x - anchor) alpha) / total             y  = scale (x - anchor) - log(total)
    dx = scale y (g - sum_j y_j g_j)                dx = scale (g - e^y sum_j g_j)

with alpha = scale log2(e); ``row_softmax`` has anchor and total. The first HELD blocks of a row
stay in registers between its two sweeps; the rest is read again, out of L2; from the end, if BACK,
where L2 still has what was read last. No atomics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .row_softmax import fold, highest, meet, row_start
from .tilings import tunable

LN2, LOG2E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)


@triton.jit
def _value(Y, x, scale, anchor, total, LOG: tl.constexpr):
    x = x.to(tl.float32) - anchor
    if LOG:
        y = tl.fma(x, scale, tl.log2(total) * -LN2)
    else:
        y = tl.exp2(x * (scale * LOG2E)) / total
    return y.to(Y.dtype.element_ty)


@triton.jit
def softmax_kernel(
    X, Y, x_stride, y_stride, columns, scale,
    LOG: tl.constexpr, COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr,
    HELD: tl.constexpr, WHOLE: tl.constexpr, STREAM: tl.constexpr, BACK: tl.constexpr,
    R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = R * THREADS * E
    scale = tl.cast(scale, tl.float32)  # a double in programs that Inductor writes
    row = tl.program_id(0)
    columns = columns // COLUMNS_OF * COLUMNS_OF  # what masks are made of, by its divisor
    alpha = scale * LOG2E
    offset, head = row_start(row, x_stride, E, ALIGNED)
    y_offset = row.to(tl.int64) * y_stride + head
    if SAME:
        y_offset = offset
    elif ALIGNED:
        y_offset = tl.multiple_of(y_offset, E)
    x_row, y_row = X + offset, Y + y_offset
    edges, n = tl.minimum(head, columns), tl.maximum(columns - head, 0)
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, THREADS * E)
    shift = tl.full([THREADS], -float("inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    last = HELD * BLOCK + (n - HELD * BLOCK) // BLOCK * BLOCK
    if not ALIGNED:
        edge = tl.load(x_row - head + j, mask=j < edges, other=-float("inf")).to(tl.float32)
        edge_block = tl.reshape(edge, [1, THREADS, E])
        shift, total = fold(edge_block, highest(edge_block), shift, total, alpha)
    held = ()
    for k in tl.static_range(HELD):
        at = k * BLOCK + i
        if k < WHOLE:
            held = held + (tl.load(x_row + at),)  # type: ignore[assignment]
        else:
            held = held + (tl.load(x_row + at, mask=at < n, other=-float("inf")),)  # type: ignore[assignment]
    for k in tl.static_range(HELD):
        kept = tl.reshape(held[k].to(tl.float32), [R, THREADS, E])
        shift, total = fold(kept, highest(kept), shift, total, alpha)
    if STREAM:
        for c in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            x = tl.load(x_row + c + i, eviction_policy="evict_last")
            block = tl.reshape(x.to(tl.float32), [R, THREADS, E])
            shift, total = fold(block, highest(block), shift, total, alpha)
        if last < n:
            tail = tl.load(x_row + last + i, mask=last + i < n, other=-float("inf"))
            tail_block = tl.reshape(tail.to(tl.float32), [R, THREADS, E])
            shift, total = fold(tail_block, highest(tail_block), shift, total, alpha)
    anchor, everyone = meet(shift, total, alpha)
    if not ALIGNED:
        edge = tl.load(x_row - head + j, mask=j < edges, other=0.0).to(tl.float32)
        y_edge = _value(Y, edge, scale, anchor, everyone, LOG)
        tl.store(y_row - head + j, y_edge, mask=j < edges)
    for k in tl.static_range(HELD):
        at = k * BLOCK + i
        y_kept = _value(Y, held[k], scale, anchor, everyone, LOG)
        if k < WHOLE:
            tl.store(y_row + at, y_kept)
        else:
            tl.store(y_row + at, y_kept, mask=at < n)
    if STREAM:
        for step in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            c = last - BLOCK + HELD * BLOCK - step if BACK else step
            x = tl.load(x_row + c + i, eviction_policy="evict_first")
            y = _value(Y, x, scale, anchor, everyone, LOG)
            tl.store(y_row + c + i, y, eviction_policy="evict_first")
        if last < n:
            tail = tl.load(x_row + last + i, mask=last + i < n, other=0.0)
            y_tail = _value(Y, tail, scale, anchor, everyone, LOG)
            tl.store(y_row + last + i, y_tail, mask=last + i < n)


@triton.jit
def _term(y, g, ROWS: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, LOG: tl.constexpr):
    term = g.to(tl.float32)
    if not LOG:
        term *= y.to(tl.float32)
    return tl.sum(tl.sum(tl.reshape(term, [ROWS, THREADS, E]), 2), 0)


@triton.jit
def _slope(DX, y, g, total, scale, LOG: tl.constexpr):
    y, g = y.to(tl.float32), g.to(tl.float32)
    if LOG:
        dx = g - tl.exp2(y * LOG2E) * total
    else:
        dx = y * (g - total)
    return (dx * scale).to(DX.dtype.element_ty)


@triton.jit
def softmax_backward_kernel(
    Y, G, DX, y_stride, g_stride, dx_stride, columns, scale,
    LOG: tl.constexpr, COLUMNS_OF: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr,
    HELD: tl.constexpr, WHOLE: tl.constexpr, STREAM: tl.constexpr, BACK: tl.constexpr,
    R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = R * THREADS * E
    scale = tl.cast(scale, tl.float32)  # a double in programs that Inductor writes
    row = tl.program_id(0)
    columns = columns // COLUMNS_OF * COLUMNS_OF
    offset, head = row_start(row, y_stride, E, ALIGNED)
    g_offset = row.to(tl.int64) * g_stride + head
    dx_offset = row.to(tl.int64) * dx_stride + head
    if SAME:
        g_offset, dx_offset = offset, offset
    elif ALIGNED:
        g_offset, dx_offset = tl.multiple_of(g_offset, E), tl.multiple_of(dx_offset, E)
    y_row, g_row, dx_row = Y + offset, G + g_offset, DX + dx_offset
    edges, n = tl.minimum(head, columns), tl.maximum(columns - head, 0)
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, THREADS * E)
    total = tl.zeros([THREADS], tl.float32)
    last = HELD * BLOCK + (n - HELD * BLOCK) // BLOCK * BLOCK
    if not ALIGNED:
        y_edge = tl.load(y_row - head + j, mask=j < edges, other=0.0)
        g_edge = tl.load(g_row - head + j, mask=j < edges, other=0.0)
        total += _term(y_edge, g_edge, 1, THREADS, E, LOG)
    y_held, g_held = (), ()
    for k in tl.static_range(HELD):
        at = k * BLOCK + i
        if k < WHOLE:
            y_held, g_held = y_held + (tl.load(y_row + at),), g_held + (tl.load(g_row + at),)  # type: ignore[assignment]
        else:
            y_held = y_held + (tl.load(y_row + at, mask=at < n, other=0.0),)  # type: ignore[assignment]
            g_held = g_held + (tl.load(g_row + at, mask=at < n, other=0.0),)  # type: ignore[assignment]
    for k in tl.static_range(HELD):
        total += _term(y_held[k], g_held[k], R, THREADS, E, LOG)
    if STREAM:
        for c in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            g = tl.load(g_row + c + i, eviction_policy="evict_last")
            y = g
            if not LOG:
                y = tl.load(y_row + c + i, eviction_policy="evict_last")
            total += _term(y, g, R, THREADS, E, LOG)
        if last < n:
            y_tail = tl.load(y_row + last + i, mask=last + i < n, other=0.0)
            g_tail = tl.load(g_row + last + i, mask=last + i < n, other=0.0)
            total += _term(y_tail, g_tail, R, THREADS, E, LOG)
    everyone = tl.sum(total, 0)
    if not ALIGNED:
        dx_edge = _slope(DX, y_edge, g_edge, everyone, scale, LOG)
        tl.store(dx_row - head + j, dx_edge, mask=j < edges)
    for k in tl.static_range(HELD):
        at = k * BLOCK + i
        dx_kept = _slope(DX, y_held[k], g_held[k], everyone, scale, LOG)
        if k < WHOLE:
            tl.store(dx_row + at, dx_kept)
        else:
            tl.store(dx_row + at, dx_kept, mask=at < n)
    if STREAM:
        for step in tl.range(HELD * BLOCK, last, BLOCK, num_stages=STAGES):
            c = last - BLOCK + HELD * BLOCK - step if BACK else step
            y = tl.load(y_row + c + i, eviction_policy="evict_first")
            g = tl.load(g_row + c + i, eviction_policy="evict_first")
            dx = _slope(DX, y, g, everyone, scale, LOG)
            tl.store(dx_row + c + i, dx, eviction_policy="evict_first")
        if last < n:
            y_tail = tl.load(y_row + last + i, mask=last + i < n, other=0.0)
            g_tail = tl.load(g_row + last + i, mask=last + i < n, other=0.0)
            dx_tail = _slope(DX, y_tail, g_tail, everyone, scale, LOG)
            tl.store(dx_row + last + i, dx_tail, mask=last + i < n)


# --- launches -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """As ``cross_entropy_launch.Tile``."""

    r: int
    warps: int
    held: int
    stages: int


@tunable("softmax", "rows", "columns rows", scaled="r", counted="held")
def tile(columns: Any, itemsize: int, tensors: int, swept: int) -> Tile:
    """The tile for rows of ``tensors`` that are read, ``swept`` of them by both sweeps.

    Short rows stay in registers. Of the longest so few are under way that what the first sweep has
    read is still in L2 when the second comes (benchmarks/NOTES.md).
    """
    if not isinstance(columns, int):
        return Tile(2, 16, 0, 1)
    elements, most = 16 // itemsize, 4 // tensors
    for warps, r in ((1, 4 // tensors), (4, 1), (4, 2), (8, 2), (16, 2)):
        block = r * 32 * warps * elements
        if tensors * columns * itemsize > (65536 if tensors > 1 else 16384):
            break
        if columns <= (block if warps == 1 else most * block):
            return Tile(r, warps, triton.cdiv(columns, block), 1)
    if columns % elements == 0:
        if swept > 1 and columns * itemsize > 32768:
            return Tile(2, 32, 1 if columns * itemsize > 131072 else 0, 1)
        if columns * itemsize > 131072:
            return Tile(4, 32, 0, 1)
    return Tile(2, 16, 0, 1)


def _layout(chosen: Tile, back: bool, x: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    elements = 16 // x.element_size()
    columns, strides = x.shape[1], [t.stride(0) for t in (x, *others)]
    known = all(isinstance(s, int) for s in (columns, *strides))
    aligned = known and all(s % elements == 0 for s in strides)
    options = {"ALIGNED": aligned, "SAME": known and len(set(strides)) == 1, "E": elements}
    options |= {"COLUMNS_OF": 1, "HELD": chosen.held, "WHOLE": 0, "STREAM": True, "BACK": back}
    if known:
        options["COLUMNS_OF"] = next(p for p in (16, 8, 4, 2, 1) if columns % p == 0)
        block = chosen.r * 32 * chosen.warps * elements
        sure = columns if aligned else columns - elements + 1
        options["WHOLE"] = max(0, min(chosen.held, sure // block))
        options["STREAM"] = chosen.held * block < columns
    options |= {"R": chosen.r, "THREADS": 32 * chosen.warps, "STAGES": chosen.stages}
    return options | {"num_warps": chosen.warps}


def _from_the_end(columns: Any, itemsize: int, beyond: int) -> bool:
    """Whether the second sweep of rows of more bytes than that begins at their end. Shorter ones
    are in L2 whole, where the order of the columns is faster (benchmarks/NOTES.md)."""
    return isinstance(columns, int) and columns * itemsize > beyond


def forward(x: torch.Tensor, scale: float, log: bool, chosen: Tile | None = None) -> torch.Tensor:
    """Softmax of ``scale x``, or its logarithm, over the rows of x [N, V], in the dtype of x."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    chosen = chosen or tile(columns, x.element_size(), 1, 1, rows=rows)
    back = _from_the_end(columns, x.element_size(), 98304)
    wrap_triton(softmax_kernel)[(rows,)](
        x, y, x.stride(0), y.stride(0), columns, scale, LOG=log, **_layout(chosen, back, x, y)
    )
    return y


def backward(
    y: torch.Tensor, g: torch.Tensor, scale: float, log: bool, chosen: Tile | None = None
) -> torch.Tensor:
    """The gradient of x from the result y of ``forward`` and its gradient g, all of one dtype."""
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    chosen = chosen or tile(columns, y.element_size(), 2, 1 if log else 2, rows=rows)
    back = not log and _from_the_end(columns, y.element_size(), 196608)
    wrap_triton(softmax_backward_kernel)[(rows,)](
        y, g, dx, y.stride(0), g.stride(0), dx.stride(0), columns, scale, LOG=log,
        **_layout(chosen, back, y, g, dx),
    )  # fmt: skip
    return dx
