"""Launches of the cross-entropy kernels: which tile for which vocabulary, and how many programs.

Numbers of rows and columns may be symbolic (``torch.SymInt``); what depends on the value of one is
decided only where it is a plain number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch.library import wrap_triton

from . import cross_entropy, cross_entropy_rows, cross_entropy_shards, row_gradient
from .tilings import tunable

NONE, INDEX, DENSE, SPARSE = (
    kind.value
    for kind in (
        cross_entropy.NONE, cross_entropy.INDEX, cross_entropy.DENSE, cross_entropy.SPARSE
    )
)  # fmt: skip
STATISTICS = cross_entropy.STATISTICS.value
SAVED = row_gradient.SAVED.value

_FEW = 132  # rows, below which one program per row leaves multiprocessors idle
_COUNT_BLOCK, _COUNT_PROGRAMS = 1024, 64
_PADDING = 128  # elements, more than a row is padded by


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block is ``r * 32 warps * (elements of 16 bytes)`` columns; ``held`` blocks of a row stay
    in registers between its two sweeps; loads run ``stages`` blocks ahead."""

    r: int
    warps: int
    held: int
    stages: int
    maxnreg: int | None = None


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is summed over a row: ``templates.cross_entropy`` has the formula."""

    kind: int
    ignore_index: int = -100
    smoothing: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    z_loss: float = 0.0
    mean: bool = False


@tunable("cross_entropy", "fused", "columns rows of", scaled="r", counted="held")
def fused_tile(columns: Any, itemsize: int, capped: bool = False, smooth: bool = False) -> Tile:
    """The tile for loss and gradient in one program per row.

    A row of up to 8192 logits of 16 bits stays in registers. A longer one is read again, from L2
    for the most part, which is faster than holding all or a part of it: more programs share a
    multiprocessor (benchmarks/NOTES.md).
    """
    if not isinstance(columns, int):
        return Tile(2, 8, 0, 1)
    elements = 16 // itemsize
    # Blocks of a row that registers hold beside what it is worked on with: a softcap takes more.
    most = 2 if capped else 4
    for warps, r in ((1, 4), (4, 1), (4, 2)):
        block = r * 32 * warps * elements
        if columns <= (block if warps == 1 else most * block):
            return Tile(r, warps, triton.cdiv(columns, block), 1)
    if columns * itemsize <= 32768:
        return Tile(2, 8, 0, 1)
    if columns * itemsize > 131072 and columns % elements == 0:
        # A block that fills the registers of all warps of a multiprocessor: few rows under way, so
        # that those stay in L2 between their sweeps.
        return Tile(2 if capped or smooth else 4, 32, 0, 1)
    return Tile(4, 8, 0, 1)


@tunable("cross_entropy", "read", "columns rows of", scaled="r")
def read_tile(columns: Any, itemsize: int) -> Tile:
    """The tile for the statistics alone."""
    if isinstance(columns, int):
        for warps, r in ((1, 4), (4, 2), (4, 4)):
            if columns <= r * 32 * warps * (16 // itemsize):
                return Tile(r, warps, 0, 1)
    return Tile(4, 8, 0, 1)


@tunable("cross_entropy", "gradient", "columns rows of", scaled="r")
def gradient_tile(columns: Any, itemsize: int) -> Tile:
    """The tile for the gradient from saved statistics."""
    if isinstance(columns, int) and columns <= 4 * 32 * (16 // itemsize):
        return Tile(4, 1, 0, 1)
    return Tile(2, 8, 0, 1)


def _layout(x: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    """What the kernels know of alignment: ALIGNED, SAME, COLUMNS_OF, E."""
    elements = 16 // x.element_size()
    columns, strides = x.shape[1], [t.stride(0) for t in (x, *others)]
    known = all(isinstance(s, int) for s in (columns, *strides))
    return {
        "COLUMNS_OF": next(p for p in (16, 8, 4, 2, 1) if columns % p == 0) if known else 1,
        "ALIGNED": known and all(s % elements == 0 for s in strides),
        "E": elements,
    }


def _same(x: torch.Tensor, dx: torch.Tensor) -> bool:
    strides = x.stride(0), dx.stride(0)
    return all(isinstance(s, int) for s in strides) and strides[0] == strides[1]


def _block(tile: Tile, elements: int) -> int:
    return tile.r * 32 * tile.warps * elements


def _held(tile: Tile, columns: Any, layout: dict[str, Any]) -> dict[str, Any]:
    """How many blocks of a row registers hold, how many of them whole, and if any are streamed."""
    if not isinstance(columns, int):
        return {"HELD": tile.held, "WHOLE": 0, "STREAM": True}
    block = _block(tile, layout["E"])
    sure = columns if layout["ALIGNED"] else columns - layout["E"] + 1
    whole = max(0, min(tile.held, sure // block))
    return {"HELD": tile.held, "WHOLE": whole, "STREAM": tile.held * block < columns}


def _shape_of(tile: Tile) -> dict[str, Any]:
    options = {"R": tile.r, "THREADS": 32 * tile.warps, "STAGES": tile.stages}
    options["num_warps"] = tile.warps
    if tile.maxnreg is not None:
        options["maxnreg"] = tile.maxnreg
    return options


def _sides(
    loss: Loss, x: Any, target: Any, q: Any, weight: Any, total: Any = None
) -> tuple[list[Any], list[Any]]:
    """(pointer arguments T, Q, W, W_SUM; t_stride, q_stride, K); x stands in where none is used.

    ``total`` is the sum of the class weights where x has not all classes."""
    if total is None and weight is not None:
        total = weight.sum(dtype=torch.float32)
    if total is None and loss.smoothing:
        total = x.new_full((), x.shape[1], dtype=torch.float32)
    pointers = [target, q, weight, total]
    strides = [
        target.stride(0) if target is not None else 0,
        q.stride(0) if q is not None else 0,
        target.shape[1] if loss.kind == SPARSE else 0,
    ]
    return [x if p is None else p for p in pointers], strides


def _constants(loss: Loss, x: Any, weight: Any, counts: Any, k: Any) -> dict[str, Any]:
    return {
        "KIND": loss.kind,
        "WEIGHTED": weight is not None,
        "SMOOTH": loss.smoothing != 0,
        "CAPPED": loss.softcap != 0,
        "MEAN": loss.mean,
        "PROGRAMS": _COUNT_PROGRAMS,
        "K_BLOCK": max(16, triton.next_power_of_2(k)) if loss.kind == SPARSE else 1,
    }


def _numbers(loss: Loss) -> list[float]:
    return [loss.scale, loss.softcap or 1.0, 1.0 - loss.smoothing, loss.smoothing, loss.z_loss]


def count(loss: Loss, target: Any, weight: Any, rows: Any, columns: Any, like: Any) -> torch.Tensor:
    """[2, programs] partial sums over the rows that count: of their class weights, of ones. As many
    for every number of rows, which a compiled program may not know.

    Asserts on the device that every target is a column or ``ignore_index``.
    """
    if loss.kind != INDEX:
        return torch.full((2, 1), rows, dtype=torch.float32, device=like.device)
    programs = _COUNT_PROGRAMS
    counts = torch.empty((2, programs), dtype=torch.float32, device=like.device)
    wrap_triton(cross_entropy.count_kernel)[(programs,)](
        target, target if weight is None else weight, counts, rows, columns, loss.ignore_index,
        programs, WEIGHTED=weight is not None, BLOCK=_COUNT_BLOCK, num_warps=8,
    )  # fmt: skip
    return counts


def forward(
    loss: Loss, x: torch.Tensor, target: Any, q: Any, weight: Any, counts: Any = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(loss [N], lse [N], statistics [4, N], counts) of logits [N, V], all fp32: one read."""
    rows, columns = x.shape
    if counts is None:
        counts = count(loss, target, weight, rows, columns, x)
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    stats = torch.empty((STATISTICS, rows), dtype=torch.float32, device=x.device)
    _read(loss, x, target, q, weight, counts, losses, lse, stats, tile)
    return losses, lse, stats, counts


def _segments(rows: Any, columns: Any, block: int) -> tuple[Any, Any]:
    """(segments of a row, columns of one): more than one where rows are few and long."""
    if isinstance(rows, int) and isinstance(columns, int) and rows < _FEW and columns > block:
        segment = block * max(1, columns * rows // (block * 2 * _FEW))
        return triton.cdiv(columns, segment), segment
    return 1, block


def _read(
    loss: Loss, x: Any, target: Any, q: Any, weight: Any, counts: Any, losses: Any, lse: Any,
    stats: Any, tile: Tile | None = None, shard: bool = False,
) -> None:  # fmt: skip
    rows, columns = x.shape
    tile = tile or read_tile(columns, x.element_size(), rows=rows, of="losses")
    layout = _layout(x)
    block = _block(tile, layout["E"])
    splits, segment = _segments(rows, columns, block)
    partials = stats
    if splits > 1:
        shape = (STATISTICS, rows, splits)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    pointers, strides = _sides(loss, x, target, q, weight)
    constants = _constants(loss, x, weight, counts, strides[2])
    sizes = [rows, columns, x.stride(0), *strides, loss.ignore_index, counts.shape[1], splits]
    wrap_triton(cross_entropy_rows.statistics_kernel)[(rows * splits,)](
        x, *pointers, counts, losses, lse, stats, partials, *sizes, segment,
        *_numbers(loss), **constants, SPLIT=splits > 1, SHARD=shard, **layout,
        **_shape_of(tile),
    )  # fmt: skip
    if splits > 1:
        wrap_triton(cross_entropy_rows.merge_kernel)[(rows,)](
            x, *pointers, counts, losses, lse, stats, partials, *sizes, *_numbers(loss),
            **constants, SPLITS=triton.next_power_of_2(splits), SHARD=shard, num_warps=1,
        )  # fmt: skip


def backward(
    loss: Loss, g: Any, g_lse: Any, x: Any, target: Any, q: Any, weight: Any, stats: Any,
    counts: Any, tile: Tile | None = None, dx: Any = None, total: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The gradient of x in its dtype from ``forward``'s statistics: one read, one write.

    ``g`` [N] is the gradient of the losses, ``g_lse`` [N] or None that of lse; any stride. ``dx``,
    if given, is written and may be x itself. With ``total``, the sum of all class weights, x is a
    shard: ``counts`` [3] are the sums and smoothing / classes, the rest is ``merge_shards``'.
    """
    rows, columns = x.shape
    tile = tile or gradient_tile(columns, x.element_size(), rows=rows, of="losses")
    in_place = dx is not None
    if dx is None:
        dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    layout = _layout(x, dx)
    chunk = 2 * _block(tile, layout["E"])
    chunks = triton.cdiv(columns, chunk)
    if in_place:  # all of a row's single logits are read before any is overwritten
        chunk, chunks = chunk * chunks, 1
    pointers, strides = _sides(loss, x, target, q, weight, total)
    constants = _constants(loss, x, weight, counts, strides[2])
    wrap_triton(cross_entropy_rows.gradient_kernel)[(rows * chunks,)](
        x, dx, *pointers, counts, stats, g, x if g_lse is None else g_lse,
        rows, columns, x.stride(0), dx.stride(0), strides[0], strides[1], g.stride(0),
        0 if g_lse is None else g_lse.stride(0), strides[2], loss.ignore_index,
        counts.shape[1] if total is None else 1, chunks, chunk, *_numbers(loss),
        **constants, WITH_G_LSE=g_lse is not None, SHARD=total is not None, **layout,
        SAME=_same(x, dx), **_shape_of(tile),
    )  # fmt: skip
    return dx


def forward_backward(
    loss: Loss, x: Any, target: Any, q: Any, weight: Any, counts: Any = None,
    tile: Tile | None = None, dx: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(losses [N], the gradient of their sum): one read from memory and one write.

    ``dx``, if given, is written and may be x itself.
    """
    rows, columns = x.shape
    if counts is None:
        counts = count(loss, target, weight, rows, columns, x)
    if isinstance(rows, int) and rows < _FEW and dx is None:
        losses, lse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        stats = torch.empty((STATISTICS, rows), dtype=torch.float32, device=x.device)
        _read(loss, x, target, q, weight, counts, losses, lse, stats)
        one = torch.ones(1, dtype=torch.float32, device=x.device).expand(rows)
        return losses, backward(loss, one, None, x, target, q, weight, stats, counts)
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    if dx is None:
        dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    plain = loss.kind == INDEX and loss.smoothing == 0 and weight is None
    tile = tile or fused_tile(
        columns, x.element_size(), loss.softcap != 0, not plain, rows=rows, of="losses"
    )
    layout = _layout(x, dx)
    pointers, strides = _sides(loss, x, target, q, weight)
    constants = _constants(loss, x, weight, counts, strides[2])
    wrap_triton(cross_entropy_rows.fused_kernel)[(rows,)](
        x, dx, *pointers, counts, losses, rows, columns, x.stride(0), dx.stride(0), *strides,
        loss.ignore_index, counts.shape[1], *_numbers(loss), **constants, **layout,
        SAME=_same(x, dx), **_held(tile, columns, layout), **_shape_of(tile),
    )  # fmt: skip
    return losses, dx


def shared_rows(loss: Loss, weighted: bool) -> int:
    """K: how many numbers a shard shares of each row."""
    return 3 + 2 * (loss.smoothing != 0) + weighted


def shard_statistics(loss: Loss, x: Any, target: Any, weight: Any) -> torch.Tensor:
    """What a shard of the classes has of each row, [K, N]: one read of it.

    ``target`` [N] are columns of x; ``loss.ignore_index`` where a row is ignored, the number of
    columns where the target is another shard's. ``cross_entropy_shards`` says what the K are.
    """
    shape = (shared_rows(loss, weight is not None), x.shape[0])
    packed = torch.empty(shape, dtype=torch.float32, device=x.device)
    # No row is finished here: what only that needs is not read.
    counts = packed[:, :1]
    _read(loss, x, target, None, weight, counts, packed, packed, packed, shard=True)
    return packed


def merge_shards(
    loss: Loss, packed: Any, target: Any, weight: Any, sums: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [N], lse [N], statistics [4, N]) of rows from what all shards have of them.

    ``packed`` [shards, K, N]; ``target`` as for ``shard_statistics``; ``weight`` [N] the targets'
    class weights; ``sums`` [4]: of those, of the rows that count, smoothing / classes, and the sum
    of all class weights.
    """
    shards, _, rows = packed.shape
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=packed.device) for _ in range(2))
    stats = torch.empty((STATISTICS, rows), dtype=torch.float32, device=packed.device)
    block = 64
    wrap_triton(cross_entropy_shards.merge_shards_kernel)[(triton.cdiv(rows, block),)](
        packed, target, packed if weight is None else weight, sums, losses, lse, stats,
        shards, packed.shape[1], rows, loss.ignore_index, loss.scale, 1.0 - loss.smoothing,
        loss.z_loss, WEIGHTED=weight is not None, SMOOTH=loss.smoothing != 0, MEAN=loss.mean,
        SHARDS=triton.next_power_of_2(shards), BLOCK=block, num_warps=2,
    )  # fmt: skip
    return losses, lse, stats


def like_rows(x: torch.Tensor) -> torch.Tensor:
    """New memory for the gradient of x [N, V]: with its strides, where rows are padded to begin on
    a boundary (matrix products want that as much), else contiguous."""
    padded = x.stride(1) == 1 and x.shape[1] < x.stride(0) < x.shape[1] + _PADDING
    strides = x.stride() if padded else (x.shape[1], 1)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def rows_and_gradient(
    x: torch.Tensor, target: torch.Tensor, a0: torch.Tensor, a1: torch.Tensor | None,
    b: torch.Tensor, c: torch.Tensor | None, scale: float, softcap: float,
    tile: Tile | None = None, dx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(peak, total, below, picked, dx) of ``row_gradient``: one read of x from memory, one write.

    x [N, V] with unit stride along V; a0, a1, b, c contiguous fp32 [N], None for zeros: without c
    ``below`` is not computed and has no elements. ``picked`` [N] is z at the target, or 0. ``dx``
    has the strides of ``like_rows``; if given, it is written and may be x itself. A given ``tile``
    keeps few rows in one program each.
    """
    rows, columns = x.shape
    below, *others = (
        torch.empty(0 if n == 0 and c is None else rows, dtype=torch.float32, device=x.device)
        for n in range(4)
    )
    peak, total, picked = others
    results = peak, total, below, picked
    z, smooth = a1 is not None, c is not None
    factors = [x if f is None else f for f in (a0, a1, b, c)]
    flags = {"SMOOTH": smooth, "CAPPED": softcap != 0}
    numbers = [scale, softcap or 1.0]
    split = rows < _FEW and dx is None and tile is None
    if dx is None:
        dx = like_rows(x)
    if rows == 0:
        return *results, dx
    layout = _layout(x, dx)
    if split:
        _split(x, dx, target, factors, results, numbers, {"Z": z, **flags})
        return *results, dx
    tile = tile or fused_tile(columns, x.element_size(), softcap != 0, smooth, rows=rows, of="rows")
    wrap_triton(row_gradient.rows_kernel)[(rows,)](
        x, dx, target, *factors, *results, columns, x.stride(0), dx.stride(0), target.stride(0),
        *numbers, Z=z, **flags, **layout, SAME=_same(x, dx), **_held(tile, columns, layout),
        **_shape_of(tile),
    )  # fmt: skip
    return *results, dx


def row_statistics(
    x: torch.Tensor, below: bool, scale: float, softcap: float, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(peak, total, below) [N] of ``row_gradient``, fp32, in one read of x [N, V], whose stride
    along V is 1. ``below`` has no elements unless it is asked for. A given ``tile`` keeps few rows
    in one program each."""
    rows = x.shape[0]
    results = [
        torch.empty(n, dtype=torch.float32, device=x.device)
        for n in (rows, rows, rows if below else 0)
    ]
    peak, total, linear = results
    if rows != 0:
        flags = {"KIND": NONE, "SMOOTH": below, "CAPPED": softcap != 0}
        _statistics(x, x, x, [*results, x], [scale, softcap or 1.0], flags, tile)
    return peak, total, linear


def _statistics(
    x: torch.Tensor, target: torch.Tensor, saved: torch.Tensor, results: list[torch.Tensor],
    numbers: list[float], flags: dict[str, Any], tile: Tile | None = None,
) -> None:  # fmt: skip
    """Write ``results`` (peak, total, below, picked) and ``saved`` in one read of x."""
    rows, columns = x.shape
    layout, whole = _layout(x), tile is not None
    tile = tile or read_tile(columns, x.element_size(), rows=rows, of="statistics")
    block = _block(tile, layout["E"])
    splits, segment = (1, block) if whole else _segments(rows, columns, block)
    split = flags["KIND"] != NONE or splits > 1  # a target's results are only joined
    partials = x
    if split:
        partials = torch.empty((STATISTICS, rows, splits), dtype=torch.float32, device=x.device)
    t_stride = target.stride(0) if flags["KIND"] != NONE else 0
    sizes = [rows, columns, x.stride(0), t_stride, splits]
    wrap_triton(row_gradient.segments_kernel)[(rows * splits,)](
        x, target, partials, *results[:3], *sizes, segment, *numbers, **flags, SPLIT=split,
        **layout, **_shape_of(tile),
    )  # fmt: skip
    if split:
        wrap_triton(row_gradient.join_kernel)[(rows,)](
            x, target, partials, saved, *results, *sizes, *numbers, **flags,
            SPLITS=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip


def _split(
    x: torch.Tensor, dx: torch.Tensor, target: torch.Tensor, factors: list[torch.Tensor],
    results: tuple[torch.Tensor, ...], numbers: list[float], flags: dict[str, bool],
) -> None:  # fmt: skip
    """``rows_and_gradient`` of few rows, several programs to each: two reads."""
    rows, columns = x.shape
    saved = torch.empty((SAVED, rows), dtype=torch.float32, device=x.device)
    of_statistics = {"KIND": INDEX, **{k: flags[k] for k in ("SMOOTH", "CAPPED")}}
    _statistics(x, target, saved, list(results), numbers, of_statistics)
    tile = gradient_tile(columns, x.element_size(), rows=rows, of="rows")
    layout = _layout(x, dx)
    chunk = 2 * _block(tile, layout["E"])
    chunks = triton.cdiv(columns, chunk)
    wrap_triton(row_gradient.spread_kernel)[(rows * chunks,)](
        x, dx, target, *factors, saved, rows, columns, x.stride(0), dx.stride(0),
        target.stride(0), chunks, chunk, *numbers, **flags, **layout, SAME=_same(x, dx),
        **_shape_of(tile),
    )  # fmt: skip
