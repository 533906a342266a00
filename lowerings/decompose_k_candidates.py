"""Decompose-K's problem and its candidates: from a name to IR.

Everything that is emitted is put together here; the numbers are in decompose_k_tilings.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from inductor_ext.lowerings.decompose_k_tilings import (
    CANDIDATE,
    DotTiling,
    Tiling,
    dot_named,
    dot_tiling,
    dot_wins,
    few_splits,
    names_of,
    pow2,
    rows_name,
    split_size,
    tiling_named,
    tilings,
)
from inductor_ext.templates import decompose_k as kernels

from inductor_ext import choosing, compat, compat_ir, config, matching

NAME = "decompose_k"
aten = torch.ops.aten

PARTIAL = compat_ir.Template(
    "inductor_ext_decompose_k_partial", kernels.partial_grid, kernels.PARTIAL, alone=True
)
REDUCE = compat_ir.Template("inductor_ext_decompose_k_reduce", kernels.reduce_grid, kernels.REDUCE)
DOT = compat_ir.Template("inductor_ext_decompose_k_dot", kernels.dot_grid, kernels.DOT)


@dataclasses.dataclass(frozen=True)
class Problem:
    """C[batch, M, N] = A[batch, M, K] B[batch, K, N]; sizes may be symbolic."""

    a: Any
    b: Any
    out_dtype: torch.dtype

    @property
    def batch(self) -> Any | None:
        size = self.a.get_size()
        return size[0] if len(size) == 3 else None

    @property
    def m(self) -> Any:
        return self.a.get_size()[-2]

    @property
    def k(self) -> Any:
        return self.a.get_size()[-1]

    @property
    def n(self) -> Any:
        return self.b.get_size()[-1]

    @property
    def sizes(self) -> list[Any]:
        return [self.m, self.n, self.k] + ([] if self.batch is None else [self.batch])

    @property
    def out_size(self) -> list[Any]:
        return ([] if self.batch is None else [self.batch]) + [self.m, self.n]

    @property
    def dtype(self) -> torch.dtype:
        return self.a.get_dtype()

    def __str__(self) -> str:
        lead = "" if self.batch is None else f"{self.batch},"
        name = str(self.dtype).removeprefix("torch.")
        return f"[{lead}{self.m},{self.k}]x[{lead}{self.k},{self.n}] {name}"


class Traced(matching.Traced):
    """A factor in the fx graph."""

    def fetched(self) -> str:
        """As ``_prefetchable``: how the factor could be fetched ahead, or ""."""
        value, source = self.node.meta["val"], matching.viewed(self.node)
        size, stride = self.get_size(), [compat.expr(s) for s in value.stride()]
        parts = (*size, *stride, compat.expr(value.storage_offset()))
        if source.op not in ("placeholder", "get_attr") or len(size) != 2:
            return ""
        if not all(compat.is_static(part) for part in parts):
            return ""
        itemsize = value.dtype.itemsize
        return _fetched(size, stride, int(value.storage_offset()) * itemsize, itemsize)


def extremes(p: Problem) -> list[tuple[int, int, int, int]]:
    """(m, n, k, batch) at the traced sizes and at the upper ends of the symbolic ones."""
    here = tuple(compat.hint(s) for s in (p.m, p.n, p.k, p.batch or 1))
    ends = tuple(
        compat.hint(s) if name == "k" else (compat.upper_bound(s) or compat.hint(s))
        for name, s in zip("mnkb", (p.m, p.n, p.k, p.batch or 1), strict=True)
    )
    return [here] if here == ends else [here, ends]  # type: ignore[list-item]


def _prefetchable(p: Problem, b: Any) -> str:
    """How B could be fetched into L2 while the predecessor still runs: "rows", "columns" or "".

    Only an operand this graph does not compute (weights), in pieces aligned to 16 bytes: bulk
    prefetches of many small pieces cost more than they bring.
    """
    if p.batch is not None or not compat_ir.is_aligned_graph_input(b):
        return ""
    size, stride, offset = b.get_size(), b.get_stride(), b.get_layout().offset
    if not all(compat.is_static(s) for s in (*size, *stride, offset)):
        return ""
    return _fetched(size, stride, int(offset) * p.dtype.itemsize, p.dtype.itemsize)


def _fetched(size: Sequence[Any], stride: Sequence[Any], offset: int, itemsize: int) -> str:
    """The same for B [K, N] by its sizes and strides; ``offset`` in bytes."""
    if offset % 16:
        return ""
    if [int(s) for s in stride] == [int(size[1]), 1]:
        return "rows"
    if int(stride[0]) == 1 and int(stride[1]) * itemsize % 16 == 0:
        return "columns"
    return ""


def has_layout(x: Any) -> bool:
    return isinstance(x, Traced) or compat_ir.has_layout(x)


def along_k(p: Problem) -> bool:
    """Whether B's columns are contiguous in memory: the weight of a Linear."""
    return has_layout(p.b) and compat.hint(p.b.get_stride()[-2]) == 1


def _can_dot(p: Problem) -> bool:
    """Whether one kernel without a split can be offered: a few rows at most, B along K."""
    rows = compat.upper_bound(p.m)
    return p.batch is None and rows is not None and rows <= 4 and along_k(p)


def is_ieee(p: Problem) -> bool:
    return p.dtype is torch.float32 and compat.float32_precision() == "ieee"


def _launch(p: Problem) -> tuple[bool, str]:
    """Whether PDL is used, and how B can then be fetched ahead."""
    pdl = config.pdl and compat.device_capability(p.a.get_device())[0] >= 9
    if not pdl or isinstance(p.b, Traced):
        return pdl, p.b.fetched() if pdl else ""
    return pdl, _prefetchable(p, p.b) if compat_ir.has_layout(p.b) else ""


def _emit(
    p: Problem, tiling: Tiling, pdl: bool, *, generated_sum: bool = False, early: bool = False
) -> Any:
    """IR of C from our partial-product kernel and a sum over the splits."""
    a, b = compat_ir.realize(p.a), compat_ir.realize(p.b)
    wide = any(compat.too_large_for_int32(x) for x in (a, b)) or compat.exceeds_int32(
        tiling.splits, *p.out_size
    )
    index = "tl.int64" if wide else "tl.int32"
    static_k = compat.is_static(p.k)
    k_split = split_size(int(p.k), tiling.splits, tiling.block_k) if static_k else 0
    ahead = _prefetchable(p, b) if pdl and k_split else ""
    rows = compat.upper_bound(p.m)
    if ahead and (rows is None or rows > tiling.block_m):
        ahead = ""  # every row of tiles would ask again
    if ahead == "rows" and int(p.n) > tiling.block_n:
        ahead = ""  # every tile would ask again, in pieces of a row
    precision = compat.float32_precision() if p.dtype is torch.float32 else "tf32"
    partials = PARTIAL.emit(
        [a, b],
        [tiling.splits, *p.out_size],
        torch.float32,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLITS=tiling.splits,
        K_SPLIT=k_split,
        EVEN_M=compat.statically_divisible(p.m, tiling.block_m),
        EVEN_N=compat.statically_divisible(p.n, tiling.block_n),
        EVEN_K=static_k and int(p.k) == k_split * tiling.splits,
        BATCHED=p.batch is not None,
        PRECISION=f"'{precision}'",
        ROUND_TF32=p.dtype is torch.float32 and precision == "tf32",
        INDEX=index,
        PDL=pdl,
        PREFETCH_ROWS=ahead == "rows",
        PREFETCH_COLUMNS=ahead == "columns",
        PIECES=pow2(-(-k_split // 64)) if ahead == "rows" else tiling.block_n,
    )
    if generated_sum:
        return compat_ir.sum_unrolled(partials, p.out_dtype)
    return REDUCE.emit(
        [compat_ir.realize(partials)],
        p.out_size,
        p.out_dtype,
        num_warps=tiling.reduce_warps,
        num_stages=1,
        XBLOCK=tiling.xblock,
        RBLOCK=pow2(tiling.splits),
        SPLITS=tiling.splits,
        EVEN_X=compat.statically_divisible(math.prod(p.out_size), tiling.xblock),
        BATCHED=p.batch is not None,
        INDEX=index,
        PDL=pdl,
        EARLY=early,
        FLAT="'idx_x'",
    )


def _emit_bmm(p: Problem, splits: int) -> Any:
    """IR of C from a cuBLAS bmm with fp32 output and Inductor's generated reduction."""
    m, n, k = p.m, p.n, int(p.k)
    part = k // splits
    a = compat_ir.call(aten.permute.default, compat_ir.view(p.a, [m, splits, part]), [1, 0, 2])
    b = compat_ir.view(p.b, [splits, part, n])
    if p.dtype is torch.float32:
        partials = compat_ir.call_stock(aten.bmm.default, a, b)
    else:
        partials = compat_ir.call_stock(aten.bmm.dtype, a, b, torch.float32)
    total = compat_ir.call(aten.sum.dim_IntList, partials, [0])
    return compat_ir.to_dtype(total, p.out_dtype)


def _emit_dot(p: Problem, tiling: DotTiling, pdl: bool) -> Any:
    """IR of C from one kernel in which every program sums over all of K."""
    a, b = compat_ir.realize(p.a), compat_ir.realize(p.b)
    wide = any(compat.too_large_for_int32(x) for x in (a, b))
    aligned = compat.is_static(p.k) and int(p.k) * p.dtype.itemsize % 16 == 0
    return DOT.emit(
        [a, b],
        p.out_size,
        p.out_dtype,
        num_warps=tiling.num_warps,
        num_stages=1,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        EVEN_N=compat.statically_divisible(p.n, tiling.block_n),
        EVEN_K=compat.statically_divisible(p.k, tiling.block_k),
        INDEX="tl.int64" if wide else "tl.int32",
        PDL=pdl,
        PREFETCH=pdl and aligned and _prefetchable(p, b) == "columns",
    )


def named(p: Problem, name: str) -> choosing.Candidate | None:
    """The candidate of this name, also where ``candidates`` does not offer it; None: there is none.

    Rows of a tile beyond M are allowed, because a plan's range holds sizes on both sides.
    """
    match = CANDIDATE.fullmatch(name)
    if match is None:
        return None
    m, n, k, batch = extremes(p)[0]
    if match["splits"]:
        splits = int(match["splits"])
        if p.batch is not None or not compat.is_static(p.k) or compat.ahead_of_time():
            return None
        fits = splits > 1 and k % splits == 0 and k // splits >= 64
        emit = functools.partial(_emit_bmm, p, splits)
        return choosing.Candidate(name, emit) if fits else None
    pdl, _ = _launch(p)
    if match["dot"]:
        dot, launch = dot_named(match), bool(match["dot_how"])
        if dot is None or not _can_dot(p) or (launch and not pdl):
            return None
        return choosing.Candidate(name, functools.partial(_emit_dot, p, dot, launch))
    how = match["how"]
    if how.startswith("_pdl") and not pdl:
        return None
    tiling = tiling_named(match, m, n, k, batch, p.dtype.itemsize)
    if tiling is None:
        return None
    settings = {
        "": {"pdl": False},
        "_pdl": {"pdl": True, "early": True},
        "_pdl_late": {"pdl": True},
        "_rowwise": {"pdl": pdl, "generated_sum": True},
    }[how]
    return choosing.Candidate(name, functools.partial(_emit, p, tiling, **settings))


def candidates(p: Problem) -> list[choosing.Candidate]:
    """Every candidate but stock, the heuristic's pick first."""
    m, n, k, batch = extremes(p)[0]
    device = p.a.get_device()
    pdl, ahead = _launch(p)
    itemsize = p.dtype.itemsize
    ranked = tilings(m, n, k, batch, itemsize, compat.multiprocessors(device), ahead)
    found = ranked[:6]
    forced = choosing.forced_choice(NAME)
    if forced is not None:
        found += [
            t for t in ranked[6:] if any(re.fullmatch(forced, n) for n in names_of(t, 0, True))
        ]
    emits = {"": (False, False), "_pdl": (True, True), "_pdl_late": (True, False)}
    out = []
    for tiling in found:
        for name in names_of(tiling, itemsize, pdl):
            launch, early = emits[name.removeprefix(tiling.name)]
            out.append(
                choosing.Candidate(name, functools.partial(_emit, p, tiling, launch, early=early))
            )
    dot = dot_tiling(m, n, k, compat.multiprocessors(device)) if _can_dot(p) else None
    if dot is not None:
        single = [
            choosing.Candidate(
                name, functools.partial(_emit_dot, p, dot, name.endswith("_pdl_late"))
            )
            for name in dot.names(pdl)
        ]
        out = single + out if dot_wins(m, n, k, itemsize) else out + single
    rows = [few] if (few := few_splits(ranked)) is not None else []
    if forced is not None:
        rows += [t for t in ranked if t.splits <= 64 and re.fullmatch(forced, rows_name(t))]
    for tiling in dict.fromkeys(rows):
        emit = functools.partial(_emit, p, tiling, pdl, generated_sum=True)
        out.append(choosing.Candidate(rows_name(tiling), emit))
    if p.batch is None and compat.is_static(p.k) and not compat.ahead_of_time():
        for splits in (16, 32, 64, 128):
            if k % splits == 0 and k // splits >= 64:
                out.append(
                    choosing.Candidate(
                        f"bmm_split{splits}", functools.partial(_emit_bmm, p, splits)
                    )
                )
    return out
