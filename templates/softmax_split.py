"""Softmax and log-softmax of few, long rows: every row split over programs, in two kernels.

The first leaves each split's (shift, total), or its sum for the backward; every program of the
second merges those of its row, exactly and in one order, and writes its own split, which it reads
out of L2. ``softmax`` has the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from .row_softmax import fold, highest, meet
from .softmax import LOG2E, _slope, _term, _value

_PROGRAMS = 264  # two for each multiprocessor of an H200
_WARPS, _R = 4, 4


@triton.jit
def _columns(columns, splits, COLUMNS_OF: tl.constexpr, BLOCK: tl.constexpr):
    """(row, split, its columns, which of them there are)."""
    row = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    c = part * BLOCK + tl.arange(0, BLOCK)
    return row, part, c, c < columns // COLUMNS_OF * COLUMNS_OF


@triton.jit
def statistics_kernel(
    X, PARTIALS, x_stride, columns, splits, scale, COLUMNS_OF: tl.constexpr, R: tl.constexpr,
    THREADS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # a double in programs that Inductor writes
    row, part, c, inside = _columns(columns, splits, COLUMNS_OF, R * THREADS * E)
    x = tl.load(X + row.to(tl.int64) * x_stride + c, mask=inside, other=-float("inf"))
    x = tl.reshape(x.to(tl.float32), [R, THREADS, E])
    shift = tl.full([THREADS], -float("inf"), tl.float32)
    zeros = tl.zeros([THREADS], tl.float32)
    shift, total = fold(x, highest(x), shift, zeros, scale * LOG2E)
    top = tl.max(shift, 0)
    _, total = meet(shift, total, scale * LOG2E)
    tl.store(PARTIALS + 2 * (row * splits + part), top)
    tl.store(PARTIALS + 2 * (row * splits + part) + 1, total)


@triton.jit
def value_kernel(
    X, Y, PARTIALS, x_stride, y_stride, columns, splits, scale, LOG: tl.constexpr,
    SPLITS: tl.constexpr, COLUMNS_OF: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # a double in programs that Inductor writes
    row, _, c, inside = _columns(columns, splits, COLUMNS_OF, R * THREADS * E)
    i = tl.arange(0, SPLITS)
    at = PARTIALS + 2 * (row * splits + i)
    shift = tl.load(at, mask=i < splits, other=-float("inf"))
    total = tl.load(at + 1, mask=i < splits, other=0.0)
    anchor, total = meet(shift, total, scale * LOG2E)
    x = tl.load(X + row.to(tl.int64) * x_stride + c, mask=inside, other=0.0)
    y = _value(Y, x, scale, anchor, total, LOG)
    tl.store(Y + row.to(tl.int64) * y_stride + c, y, mask=inside)


@triton.jit
def sum_kernel(
    Y, G, PARTIALS, y_stride, g_stride, columns, splits, LOG: tl.constexpr,
    COLUMNS_OF: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    row, part, c, inside = _columns(columns, splits, COLUMNS_OF, R * THREADS * E)
    g = tl.load(G + row.to(tl.int64) * g_stride + c, mask=inside, other=0.0)
    y = g
    if not LOG:
        y = tl.load(Y + row.to(tl.int64) * y_stride + c, mask=inside, other=0.0)
    tl.store(PARTIALS + row * splits + part, tl.sum(_term(y, g, R, THREADS, E, LOG), 0))


@triton.jit
def slope_kernel(
    Y, G, DX, PARTIALS, y_stride, g_stride, dx_stride, columns, splits, scale, LOG: tl.constexpr,
    SPLITS: tl.constexpr, COLUMNS_OF: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # a double in programs that Inductor writes
    row, _, c, inside = _columns(columns, splits, COLUMNS_OF, R * THREADS * E)
    i = tl.arange(0, SPLITS)
    total = tl.sum(tl.load(PARTIALS + row * splits + i, mask=i < splits, other=0.0), 0)
    y = tl.load(Y + row.to(tl.int64) * y_stride + c, mask=inside, other=0.0)
    g = tl.load(G + row.to(tl.int64) * g_stride + c, mask=inside, other=0.0)
    dx = _slope(DX, y, g, total, scale, LOG)
    tl.store(DX + row.to(tl.int64) * dx_stride + c, dx, mask=inside)


def applies(x: torch.Tensor) -> bool:
    """Whether the rows of x are so few and so long that they are split."""
    rows, columns = x.shape
    if not (isinstance(rows, int) and isinstance(columns, int)):
        return False
    return rows < _PROGRAMS // 2 and columns >= 16384


def _options(x: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """(splits of a row, constants of all kernels)."""
    elements, columns = 16 // x.element_size(), x.shape[1]
    r = _R
    while r > 1 and triton.cdiv(columns, r * 32 * _WARPS * elements) * x.shape[0] < _PROGRAMS:
        r //= 2
    options = {"R": r, "THREADS": 32 * _WARPS, "E": elements, "num_warps": _WARPS}
    options["COLUMNS_OF"] = next(p for p in (16, 8, 4, 2, 1) if columns % p == 0)
    return triton.cdiv(columns, r * 32 * _WARPS * elements), options


def forward(x: torch.Tensor, scale: float, log: bool) -> torch.Tensor:
    """As ``softmax.forward``."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    splits, options = _options(x)
    partials = torch.empty((rows, splits, 2), dtype=torch.float32, device=x.device)
    grid = (rows * splits,)
    wrap_triton(statistics_kernel)[grid](
        x, partials, x.stride(0), columns, splits, scale, **options
    )
    wrap_triton(value_kernel)[grid](
        x, y, partials, x.stride(0), y.stride(0), columns, splits, scale, LOG=log,
        SPLITS=triton.next_power_of_2(splits), **options,
    )  # fmt: skip
    return y


def backward(y: torch.Tensor, g: torch.Tensor, scale: float, log: bool) -> torch.Tensor:
    """As ``softmax.backward``."""
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    splits, options = _options(y)
    partials = torch.empty((rows, splits), dtype=torch.float32, device=y.device)
    grid = (rows * splits,)
    wrap_triton(sum_kernel)[grid](
        y, g, partials, y.stride(0), g.stride(0), columns, splits, LOG=log, **options
    )
    wrap_triton(slope_kernel)[grid](
        y, g, dx, partials, y.stride(0), g.stride(0), dx.stride(0), columns, splits, scale,
        LOG=log, SPLITS=triton.next_power_of_2(splits), **options,
    )  # fmt: skip
    return dx
