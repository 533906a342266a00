"""Decompose-K: matrix products with tiny M, N and huge K, split along K.

Recognises mm, addmm, bmm and baddbmm (with their out_dtype overloads) at lowering time and emits
the partial products and the sum over them as two IR nodes, so that Inductor fuses whatever
pointwise region follows into the sum. The kernels are in templates/decompose_k.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from inductor_ext.templates import decompose_k as kernels

from inductor_ext import choosing, compat, compat_ir, config, matching, registry

NAME = "decompose_k"
aten = torch.ops.aten

PARTIAL = compat_ir.Template(
    "inductor_ext_decompose_k_partial", kernels.partial_grid, kernels.PARTIAL
)
REDUCE = compat_ir.Template("inductor_ext_decompose_k_reduce", kernels.reduce_grid, kernels.REDUCE)
DOT = compat_ir.Template("inductor_ext_decompose_k_dot", kernels.dot_grid, kernels.DOT)

DOT_WARPS = 8
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


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a problem is cut: the tile of C and of K, the split, and the reducer's block."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    xblock: int
    reduce_warps: int

    def fills_an_sm(self, itemsize: int) -> bool:
        """Whether the pipeline's shared memory leaves no room for a second program on an SM."""
        stage = (self.block_m + self.block_n) * self.block_k * itemsize
        return 2 * stage * self.num_stages > 227 * 1024

    @property
    def name(self) -> str:
        return (
            f"split{self.splits}_{self.block_m}x{self.block_n}x{self.block_k}"
            f"_w{self.num_warps}_s{self.num_stages}"
        )


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _split_size(k: int, splits: int, block_k: int) -> int:
    """Elements of K per split: a multiple of the K tile, so only the last split is ragged."""
    per_split = -(-k // splits)
    return -(-per_split // block_k) * block_k


def _block_k(per_split: int, itemsize: int) -> int:
    """Elements of K per pipeline stage: all of a short split in one, else four or more stages."""
    short = itemsize == 4 or (per_split <= 256 and per_split != 128)
    return min(64 if short else 128, per_split)


def _tiling(
    m: int, n: int, k: int, batch: int, itemsize: int, shape: tuple[int, int, int]
) -> Tiling:
    """Everything else that goes with a tile of C and the elements of K per split."""
    block_m, block_n, per_split = shape
    area, numel = block_m * block_n, m * n * batch
    block_k = _block_k(per_split, itemsize)
    tiles_k = per_split // block_k
    splits = -(-k // per_split)
    rblock = _pow2(splits)
    # A pipelined small tile is bound by latency, and fewer warps leave more programs per SM.
    small = area <= 256 or (tiles_k > 1 and area <= (512 if itemsize == 4 else 1024))
    num_warps = 2 if small else 4
    if numel >= 256 * 256:
        xblock = 256 if rblock <= 16 else 128
    else:
        xblock = 16 if numel <= 32 * 32 else 32 if numel <= 64 * 64 else 64
    xblock = max(min(xblock, 8192 // rblock), 16)
    return Tiling(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        splits=splits,
        num_warps=num_warps,
        num_stages=min(tiles_k, 4),
        xblock=xblock,
        reduce_warps=4 if xblock * rblock >= 2048 and rblock > 64 else 1,
    )


@dataclasses.dataclass(frozen=True)
class _Rates:
    """What the ranking of tilings costs, fitted to 49 problems on an H200 (benchmarks/NOTES.md)."""

    refill_ns: float  # a further filling of the four pipeline stages
    sm_bytes_per_ns: float  # into one SM
    l2_bytes_per_ns: float  # out of the L2, re-reads included
    partial_bytes_per_ns: float  # partials written and read back
    prefetch_ns: float  # what fetching B ahead of the wait saves


_RATES = {2: _Rates(1020, 209, 50000, 3850, 1600), 4: _Rates(143, 80, 8600, 2240, 0)}


def _predicted_ns(
    sizes: tuple[int, int, int, int],
    itemsize: int,
    sms: int,
    prefetch: str,
    shape: tuple[int, int, int],
) -> float:
    """Time that depends on the tiling, for ranking only."""
    m, n, k, batch = sizes
    block_m, block_n, per_split = shape
    rates = _RATES[itemsize]
    splits = -(-k // per_split)
    programs = -(-m // block_m) * -(-n // block_n) * batch * splits
    read = (min(block_m, m) + min(block_n, n)) * per_split * itemsize
    refills = max(per_split / _block_k(per_split, itemsize) / 4, 1) - 1
    partials = 2 * splits * m * n * batch * 4
    ahead = block_m >= m and (prefetch == "columns" or (prefetch == "rows" and block_n >= n))
    return (
        max(
            refills * rates.refill_ns,
            read * max(1.0, programs / sms) / rates.sm_bytes_per_ns,
            read * programs / rates.l2_bytes_per_ns,
        )
        + partials / rates.partial_bytes_per_ns
        + 0.25 * programs
        - (rates.prefetch_ns if ahead else 0.0)
    )


def tilings(
    m: int, n: int, k: int, batch: int, itemsize: int, sms: int, prefetch: str = ""
) -> list[Tiling]:
    """Tilings worth trying for a problem with these sizes, the heuristic's pick first.

    ``prefetch`` is how B can be fetched ahead: "rows", "columns" (see ``_prefetchable``) or "".
    """
    longest = _pow2(-(-k // 128))  # elements per split where 128 splits are not enough
    beyond = (longest,) if longest > 2048 else ()
    shapes = [
        (block_m, block_n, per_split)
        for block_m in (64, 32, 16)
        for block_n in (16, 32, 64, 128)
        for per_split in (64, 128, 256, 512, 1024, 2048, *beyond)
        if block_m <= max(_pow2(m), 16)
        and block_n <= max(_pow2(n), 16)
        and 2 <= -(-k // per_split) <= 128
        and not (itemsize == 4 and block_m * block_n > 2048)
    ]
    if itemsize == 4:  # FMA, not tensor cores: rows of A beyond M would be multiplied too
        shapes.reverse()
    # A stable sort: the order above decides between equals.
    shapes.sort(key=lambda s: _predicted_ns((m, n, k, batch), itemsize, sms, prefetch, s))
    return [_tiling(m, n, k, batch, itemsize, shape) for shape in shapes]


def worth_it(m: int, n: int, k: int, batch: int, itemsize: int, sms: int) -> str | None:
    """None where splitting K is expected to win against cuBLAS, else why not.

    On the H200 the split won by 1.9x or more from K = 1024 on while the output had up to 16 tiles
    of 64x64, by 1.1x at 48 to 64 tiles; the margin is kept (benchmarks/NOTES.md).
    """
    tiles = -(-m // 64) * -(-n // 64) * batch
    if k < 1024:
        return f"K={k} is below 1024: one pass over it costs less than a second kernel"
    if k < 4 * max(m, n):
        return f"K={k} is below 4 x max(M, N)={4 * max(m, n)}: the partials cost too much"
    if 3 * tiles > sms:
        return f"{tiles} output tiles of 64x64 occupy {sms} SMs well enough"
    return None


def _why_not(p: Problem) -> str | None:
    """A reason to leave the problem alone that no measurement could change."""
    device = p.a.get_device()
    if device is None or device.type != "cuda" or p.b.get_device() != device:
        return "not on one CUDA device"
    if p.dtype not in DTYPES or p.b.get_dtype() != p.dtype:
        return f"operands are {p.dtype} and {p.b.get_dtype()}; bf16, fp16 or fp32 are handled"
    if compat_ir.is_bitcast(p.a) or compat_ir.is_bitcast(p.b):
        return "an operand is a view in another dtype"
    if p.out_dtype not in (p.dtype, torch.float32):
        return f"output dtype {p.out_dtype} is not one aten offers for {p.dtype}"
    if compat.has_unbacked(p.sizes):
        return "a size depends on data"
    if compat.device_capability(device)[0] < 8:
        return "the card is older than sm_80"
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
    stride, offset = b.get_stride(), b.get_layout().offset
    if not all(compat.is_static(s) for s in (p.m, p.n, p.k, *stride, offset)):
        return ""
    if int(offset) * p.dtype.itemsize % 16:
        return ""
    if [int(s) for s in stride] == [int(p.n), 1]:
        return "rows"
    if int(stride[0]) == 1 and int(stride[1]) * p.dtype.itemsize % 16 == 0:
        return "columns"
    return ""


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
    k_split = _split_size(int(p.k), tiling.splits, tiling.block_k) if static_k else 0
    ahead = _prefetchable(p, b) if pdl and k_split else ""
    if (ahead and int(p.m) > tiling.block_m) or (ahead == "rows" and int(p.n) > tiling.block_n):
        ahead = ""  # every row of tiles, or every tile in pieces of a row, would ask again
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
        PIECES=_pow2(-(-k_split // 64)) if ahead == "rows" else tiling.block_n,
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
        RBLOCK=_pow2(tiling.splits),
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


@dataclasses.dataclass(frozen=True)
class DotTiling:
    """How the kernel without a split is cut: columns of B per program, elements of K per pass."""

    block_n: int
    block_k: int
    num_warps: int

    @property
    def name(self) -> str:
        return f"dot_{self.block_n}x{self.block_k}_w{self.num_warps}"


def _dot_tiling(p: Problem) -> DotTiling | None:
    """The tiling without a split: few rows, and columns of B that are contiguous in memory."""
    if p.batch is not None or not compat_ir.has_layout(p.b) or not compat.is_static(p.m):
        return None
    if int(p.m) > 4 or compat.hint(p.b.get_stride()[0]) != 1:
        return None
    m, n, k = (compat.hint(s) for s in (p.m, p.n, p.k))
    block_n = max(1, _pow2(m * n // (2 * compat.multiprocessors(p.a.get_device()))) // 2)
    return DotTiling(block_n, min(_pow2(k), 16384 // block_n), DOT_WARPS)


def _dot_wins(p: Problem) -> bool:
    """Whether one kernel beats two: one pass over K, and few bytes of B read again per row.

    On the H200 at up to 8.4 MB by 1.2 to 1.6x, at 11 MB by nothing, at 15 MB it lost
    (benchmarks/NOTES.md).
    """
    m, n, k = (compat.hint(s) for s in (p.m, p.n, p.k))
    return k <= 8192 and m * n * k * p.dtype.itemsize <= 9_000_000


def _fp32_along_k(p: Problem) -> bool:
    """Whether B would be read across its rows without tensor cores.

    On the H200 1x256x7168 took 13.0 us so, the library 8.1 (benchmarks/NOTES.md).
    """
    ieee = p.dtype is torch.float32 and compat.float32_precision() == "ieee"
    return ieee and compat_ir.has_layout(p.b) and compat.hint(p.b.get_stride()[-2]) == 1


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


def candidates(p: Problem) -> list[choosing.Candidate]:
    """Every candidate but stock, the heuristic's pick first."""
    m, n, k, batch = _extremes(p)[0]
    device = p.a.get_device()
    pdl = config.pdl and compat.device_capability(device)[0] >= 9
    ahead = _prefetchable(p, p.b) if pdl and compat_ir.has_layout(p.b) else ""
    ranked = tilings(m, n, k, batch, p.dtype.itemsize, compat.multiprocessors(device), ahead)
    found = ranked[:6]
    # The unrolled sum loads every split by name: 64 of them are as many as a program should hold.
    few = next((t for t in ranked if t.splits <= 64), None)
    out = []
    for tiling in found:
        if pdl:
            early = functools.partial(_emit, p, tiling, True, early=True)
            late = functools.partial(_emit, p, tiling, True)
            pair = [
                choosing.Candidate(f"{tiling.name}_pdl", early),
                choosing.Candidate(f"{tiling.name}_pdl_late", late),
            ]
            out += pair if tiling.fills_an_sm(p.dtype.itemsize) else pair[::-1]
        out.append(choosing.Candidate(tiling.name, functools.partial(_emit, p, tiling, False)))
    dot = _dot_tiling(p)
    if dot is not None:
        single = [choosing.Candidate(dot.name, functools.partial(_emit_dot, p, dot, False))]
        if pdl:
            emit = functools.partial(_emit_dot, p, dot, True)
            single.insert(0, choosing.Candidate(f"{dot.name}_pdl_late", emit))
        out = single + out if _dot_wins(p) else out + single
    if few is not None:
        out.append(
            choosing.Candidate(
                f"{few.name}_rowwise", functools.partial(_emit, p, few, pdl, generated_sum=True)
            )
        )
    if p.batch is None and compat.is_static(p.k) and not compat.ahead_of_time():
        for splits in (16, 32, 64, 128):
            if k % splits == 0 and k // splits >= 64:
                out.append(
                    choosing.Candidate(
                        f"bmm_split{splits}", functools.partial(_emit_bmm, p, splits)
                    )
                )
    return out


def _lower(op_name: str, p: Problem) -> Any:
    """IR of C where splitting K is chosen, None where stock stays."""
    site = f"{op_name} {p}"
    reason = _why_not(p)
    if reason is not None:
        return choosing.leave(NAME, site, reason)
    if any(compat.upper_bound(s) == 0 for s in p.sizes):
        return choosing.leave(NAME, site, "a size is zero")
    if all(compat.upper_bound(s) == 1 for s in p.out_size):
        return choosing.leave(NAME, site, "the output is one element")
    sms = compat.multiprocessors(p.a.get_device())
    losing = next((why for e in _extremes(p) if (why := worth_it(*e, p.dtype.itemsize, sms))), None)
    if losing and choosing.forced_choice(NAME) is None:
        return choosing.leave(NAME, site, losing)
    found = candidates(p)
    rowwise = matching.feeds_row_reduction()

    def heuristic() -> tuple[str, str]:
        pick = next((c.name for c in found if c.name.endswith("_rowwise")), None)
        if rowwise and pick is not None:
            return pick, "few output tiles, long K; the sum is fused into the row reduction"
        if found[0].name.startswith("dot_"):
            return found[0].name, "few rows: one program per column of B, no split"
        if _fp32_along_k(p):
            return choosing.STOCK, "fp32 weights contiguous along K: the library is faster"
        return found[0].name, "few output tiles, long K: one wave of programs along K"

    return choosing.choose(NAME, site, found, heuristic, key=f"{site} {matching.consumers_key()}")


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
    )
)
