"""Decompose-K: matrix products with tiny M, N and huge K, split along K.

Recognises mm, addmm, bmm and baddbmm (with their out_dtype overloads) at lowering time and emits
the partial products and the sum over them as two IR nodes, so that Inductor fuses whatever
pointwise region follows into the sum. The kernels are in templates/decompose_k.py.
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
    pick,
    pow2,
    rows_name,
    split_size,
    tiling_named,
    tilings,
    worth_it,
)
from inductor_ext.templates import decompose_k as kernels

from inductor_ext import choosing, compat, compat_ir, config, dispatch, matching, plan, registry

NAME = "decompose_k"
aten = torch.ops.aten

PARTIAL = compat_ir.Template(
    "inductor_ext_decompose_k_partial", kernels.partial_grid, kernels.PARTIAL
)
REDUCE = compat_ir.Template("inductor_ext_decompose_k_reduce", kernels.reduce_grid, kernels.REDUCE)
DOT = compat_ir.Template("inductor_ext_decompose_k_dot", kernels.dot_grid, kernels.DOT)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def _why_not(p: Problem) -> str | None:
    """A reason to leave the problem alone that no measurement could change."""
    device = p.a.get_device()
    if device is None or device.type != "cuda" or p.b.get_device() != device:
        return "not on one CUDA device"
    if p.dtype not in DTYPES or p.b.get_dtype() != p.dtype:
        return f"operands are {p.dtype} and {p.b.get_dtype()}; bf16, fp16 or fp32 are handled"
    if p.out_dtype not in (p.dtype, torch.float32):
        return f"output dtype {p.out_dtype} is not one aten offers for {p.dtype}"
    if compat.has_unbacked(p.sizes):
        return "a size depends on data"
    if compat.device_capability(device)[0] < 8:
        return "the card is older than sm_80"
    return None


def _unbounded(p: Problem) -> str | None:
    """A reason where one choice for all sizes would meet sizes of any magnitude."""
    for name, size in zip(("M", "N", "batch"), (p.m, p.n, p.batch), strict=True):
        if size is not None and compat.upper_bound(size) is None:
            return (
                f"{name} has no upper bound (mark_dynamic(max=) gives one): large sizes would lose"
            )
    return None


def _extremes(p: Problem) -> list[tuple[int, int, int, int]]:
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


def _has_layout(x: Any) -> bool:
    return isinstance(x, _Traced) or compat_ir.has_layout(x)


def _along_k(p: Problem) -> bool:
    """Whether B's columns are contiguous in memory: the weight of a Linear."""
    return _has_layout(p.b) and compat.hint(p.b.get_stride()[-2]) == 1


def _can_dot(p: Problem) -> bool:
    """Whether one kernel without a split can be offered: a few rows at most, B along K."""
    rows = compat.upper_bound(p.m)
    return p.batch is None and rows is not None and rows <= 4 and _along_k(p)


def _is_ieee(p: Problem) -> bool:
    return p.dtype is torch.float32 and compat.float32_precision() == "ieee"


def _launch(p: Problem) -> tuple[bool, str]:
    """Whether PDL is used, and how B can then be fetched ahead."""
    pdl = config.pdl and compat.device_capability(p.a.get_device())[0] >= 9
    return pdl, _prefetchable(p, p.b) if pdl and compat_ir.has_layout(p.b) else ""


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
    m, n, k, batch = _extremes(p)[0]
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
    m, n, k, batch = _extremes(p)[0]
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


def _layout(x: Any) -> str:
    if not _has_layout(x):
        return "row"  # it will be computed into memory of its own
    return choosing.layout(x.get_stride())


def _described(op_name: str, p: Problem, rowwise: bool) -> choosing.Problem:
    """The problem as plans know it: ranges over M and the batch, and over what else is dynamic."""
    dtype = str(p.dtype).removeprefix("torch.")
    if p.out_dtype != p.dtype and op_name in ("mm", "bmm"):  # with a bias the sum is fp32 always
        dtype += "->" + str(p.out_dtype).removeprefix("torch.")
    op = f"{op_name}+row_reduction" if rowwise else op_name
    sizes = {"m": p.m, "n": p.n, "k": p.k} | ({} if p.batch is None else {"batch": p.batch})
    static = {s: int(v) for s, v in sizes.items() if s in "nk" and compat.is_static(v)}
    key = plan.Key.of(NAME, op, dtype, f"{_layout(p.a)},{_layout(p.b)}", static)
    dims = {name: size for name, size in sizes.items() if name not in static}

    def plausible() -> bool:
        here, sms = _extremes(p)[0], compat.multiprocessors(p.a.get_device())
        return 0 not in here and worth_it(*here, p.dtype.itemsize, sms) is None

    return choosing.Problem(
        key,
        dims,
        functools.partial(named, p),
        lambda: [c.name for c in candidates(p)],
        plausible,
    )


def _lower(op_name: str, p: Problem) -> Any:
    """IR of C where splitting K is chosen, None where stock stays."""
    site = f"{op_name} {p}"
    reason = _why_not(p)
    if reason is None and (compat_ir.is_bitcast(p.a) or compat_ir.is_bitcast(p.b)):
        reason = "an operand is a view in another dtype"
    if reason is not None:
        return choosing.leave(NAME, site, reason)
    if any(compat.upper_bound(s) == 0 for s in p.sizes):
        return choosing.leave(NAME, site, "a size is zero")
    if all(compat.upper_bound(s) == 1 for s in p.out_size):
        return choosing.leave(NAME, site, "the output is one element")
    sms = compat.multiprocessors(p.a.get_device())
    itemsize = p.dtype.itemsize
    here, *ends = _extremes(p)
    losing = worth_it(*here, itemsize, sms)
    if losing is None or choosing.forced_choice(NAME) is not None:
        losing = _unbounded(p)
    if losing is None and choosing.forced_choice(NAME) is None:
        losing = next((why for e in ends if (why := worth_it(*e, itemsize, sms))), None)
    if losing is not None:
        return choosing.leave(NAME, site, losing)
    found = candidates(p)
    rowwise = matching.feeds_row_reduction()

    def heuristic() -> tuple[str, str]:
        fma = _along_k(p) and _is_ieee(p)
        return pick([c.name for c in found], rowwise, fma)

    return choosing.choose(
        NAME,
        site,
        found,
        heuristic,
        key=f"{site} {matching.consumers_key()}",
        problem=_described(op_name, p, rowwise),
    )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A factor in the fx graph, with what ``Problem`` asks of IR."""

    node: Any

    def get_size(self) -> list[Any]:
        return [compat.expr(s) for s in self.node.meta["val"].shape]

    def get_stride(self) -> list[Any]:
        return [compat.expr(s) for s in self.node.meta["val"].stride()]

    def get_dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def get_device(self) -> torch.device:
        return self.node.meta["val"].device

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


def _sizes(position: int, node: Any) -> dispatch.Sensitivity | None:
    """How the choice at a product in the fx graph depends on M, N and batch."""
    a, b = (_Traced(arg) for arg in node.args[position : position + 2])
    if node.kwargs.get("alpha", 1) == 0 or any(matching.is_bitcast(x.node) for x in (a, b)):
        return None
    p = Problem(a, b, torch.float32)
    if _why_not(p) is not None:
        return None
    sizes = {"m": p.m, "n": p.n, "batch": 1 if p.batch is None else p.batch}
    symbolic = [name for name, size in sizes.items() if not compat.is_static(size)]
    if not symbolic:
        return None
    itemsize, device = p.dtype.itemsize, p.a.get_device()
    sms, k = compat.multiprocessors(device), compat.hint(p.k)
    rowwise = matching.feeds_row_reduction(node)
    pdl = config.pdl and compat.device_capability(device)[0] >= 9
    ahead = b.fetched() if pdl else ""
    single, fma = p.batch is None and _along_k(p), _along_k(p) and _is_ieee(p)
    fixed = {name: int(size) for name, size in sizes.items() if name not in symbolic}
    name, out = node.target.overloadpacket.__name__, node.meta["val"]
    described = _described(name, dataclasses.replace(p, out_dtype=out.dtype), rowwise)

    def choice(values: tuple[int, ...]) -> str:
        at = {**fixed, **dict(zip(symbolic, values, strict=True))}
        problem = (at["m"], at["n"], k, at["batch"])
        planned = choosing.planned_choice(described, at) or ""
        match = CANDIDATE.fullmatch(planned)
        if planned == choosing.STOCK or (
            match and (match["splits"] or match["dot"] or tiling_named(match, *problem, itemsize))
        ):
            return planned
        if 0 in problem or worth_it(*problem, itemsize, sms) is not None:
            return choosing.STOCK
        ranked = tilings(*problem, itemsize, sms, ahead)
        rows = [rows_name(few)] if (few := few_splits(ranked)) is not None else []
        dot = dot_tiling(at["m"], at["n"], k, sms) if single else None
        first = dot.names(pdl) if dot and dot_wins(at["m"], at["n"], k, itemsize) else []
        return pick([*first, *names_of(ranked[0], itemsize, pdl), *rows], rowwise, fma)[0]

    return dispatch.Sensitivity(f"{name} {p}", tuple(sizes[name] for name in symbolic), choice)


def _mm(a: Any, b: Any, out_dtype: torch.dtype | None = None, *, layout: Any = None) -> Any:
    return _lower("mm", Problem(a, b, out_dtype or a.get_dtype()))


def _bmm(a: Any, b: Any, out_dtype: torch.dtype | None = None, *, layout: Any = None) -> Any:
    return _lower("bmm", Problem(a, b, out_dtype or a.get_dtype()))


def _add_product(
    name: str,
    bias: Any,
    a: Any,
    b: Any,
    out_dtype: torch.dtype | None = None,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    layout: Any = None,
) -> Any:
    """beta * bias + alpha * A B, added in fp32 on the store of the sum, rounded once."""
    problem = Problem(a, b, torch.float32)
    if alpha == 0:  # the library does not read A and B then: NaN in them must not show
        return choosing.leave(NAME, f"{name} {problem}", "alpha is 0")
    product = _lower(name, problem)
    if product is None:
        return None
    if alpha != 1:
        product = compat_ir.call(aten.mul.Tensor, product, alpha)
    if beta != 0:
        bias = compat_ir.to_dtype(bias, torch.float32)
        if beta != 1:
            bias = compat_ir.call(aten.mul.Tensor, bias, beta)
        product = compat_ir.call(aten.add.Tensor, product, bias)
    return compat_ir.to_dtype(product, out_dtype or a.get_dtype())


_addmm = functools.partial(_add_product, "addmm")
_baddbmm = functools.partial(_add_product, "baddbmm")

registry.register(
    registry.Lowering(
        NAME,
        lower={
            aten.mm.default: _mm,
            aten.mm.dtype: _mm,
            aten.addmm.default: _addmm,
            aten.addmm.dtype: _addmm,
            aten.bmm.default: _bmm,
            aten.bmm.dtype: _bmm,
            aten.baddbmm.default: _baddbmm,
            aten.baddbmm.dtype: _baddbmm,
        },
        sizes={
            getattr(getattr(aten, op), overload): functools.partial(_sizes, position)
            for op, position in {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.items()
            for overload in ("default", "dtype")
        },
        candidate_name=CANDIDATE,
    )
)
