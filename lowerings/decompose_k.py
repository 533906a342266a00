"""Decompose-K: matrix products with tiny M, N and huge K, split along K.

Recognises mm, addmm, bmm and baddbmm (with their out_dtype overloads) at lowering time and emits the
partial products and the sum over them as two IR nodes, so that Inductor fuses whatever pointwise
region follows into the sum. The kernels are in templates/decompose_k.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from inductor_ext import choosing, compat, config, registry
from inductor_ext.templates import decompose_k as kernels

NAME = "decompose_k"
aten = torch.ops.aten

PARTIAL = compat.Template(
    "inductor_ext_decompose_k_partial", kernels.partial_grid, kernels.PARTIAL
)
REDUCE = compat.Template("inductor_ext_decompose_k_reduce", kernels.reduce_grid, kernels.REDUCE)

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
    return -(-(-(-k // splits)) // block_k) * block_k


def tilings(m: int, n: int, k: int, batch: int, itemsize: int, sms: int) -> Iterator[Tiling]:
    """Tilings worth trying, the heuristic's pick first.

    Measured on an H200 (benchmarks/NOTES.md): the pair of kernels is fastest when one wave of about
    one program per SM covers the chip, every program reads 128 to 1024 elements of K, all of it in
    flight at once (as many pipeline stages as K tiles, up to four), with one or two warps for a
    16-row tile and four from 32x64 on.
    """
    fp32 = itemsize == 4
    shapes = []
    for block_m in (16, 32, 64):
        for block_n in (16, 32, 64, 128):
            if block_m > max(_pow2(m), 16) or block_n > max(_pow2(n), 16):
                continue
            if fp32 and block_m * block_n > 32 * 64:
                continue
            shapes.append((block_m, block_n))

    def build(block_m: int, block_n: int, per_split: int) -> Tiling:
        splits = max(-(-k // per_split), 1)
        area = block_m * block_n
        warps = 1 if area <= 256 and fp32 else 2 if area <= 512 else 4
        block_k = 64 if fp32 or per_split < 512 and area <= 512 and per_split != 128 else 128
        block_k = min(block_k, per_split)
        stages = max(min(-(-per_split // block_k), 4 if not fp32 else 3), 1)
        rblock = _pow2(splits)
        xblock = 16 if m * n * batch <= 32 * 32 else 32 if m * n * batch <= 64 * 64 else 64
        if m * n * batch >= 256 * 256:
            xblock = 256 if rblock <= 16 else 128
        xblock = max(min(xblock, 8192 // rblock), 16)
        return Tiling(
            block_m,
            block_n,
            block_k,
            splits,
            warps,
            stages,
            xblock,
            4 if xblock * rblock >= 2048 and rblock >= 128 else 1,
        )

    def cost(shape: tuple[int, int], per_split: int) -> float:
        """Bytes through the busiest SM in element units, plus what each split adds."""
        block_m, block_n = shape
        tiles = -(-m // block_m) * -(-n // block_n) * batch
        splits = -(-k // per_split)
        waves = -(-tiles * splits // sms)
        per_program = (min(block_m, m) + min(block_n, n)) * min(per_split, k) + 8192
        reread = tiles * splits * per_program / sms
        partials = 2 * splits * m * n * batch * 4 / itemsize / sms
        return max(waves * per_program, reread) + partials + 32 * splits

    grid = [
        (cost(shape, per_split), shape, per_split)
        for shape in shapes
        for per_split in (64, 128, 256, 512, 1024, 2048)
        if 4 <= -(-k // per_split) <= 128
    ]
    seen = set()
    for _, (block_m, block_n), per_split in sorted(grid):
        tiling = build(block_m, block_n, per_split)
        if tiling not in seen:
            seen.add(tiling)
            yield tiling


def worth_it(m: int, n: int, k: int, batch: int, itemsize: int, sms: int) -> str | None:
    """None where splitting K is expected to win against cuBLAS, else why not."""
    tiles = -(-m // 64) * -(-n // 64) * batch
    if k < 2048:
        return f"K={k} is small: one pass over it costs less than a second kernel"
    if k < 4 * max(m, n):
        return f"K={k} is less than 4 x max(M, N)={4 * max(m, n)}: the partials cost too much"
    if tiles * 2 > sms:
        return f"{tiles} output tiles of 64x64 already occupy {sms} SMs"
    return None


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
    for name, size in zip(("M", "N", "batch"), (p.m, p.n, p.batch), strict=True):
        if size is not None and compat.upper_bound(size) is None:
            return f"{name} has no upper bound (mark_dynamic(max=) gives one): large sizes would lose"
    return None


def _extremes(p: Problem) -> list[tuple[int, int, int, int]]:
    """(m, n, k, batch) at the traced sizes and at the upper ends of the symbolic ones."""
    here = tuple(compat.hint(s) for s in (p.m, p.n, p.k, p.batch or 1))
    ends = tuple(
        compat.hint(s) if name == "k" else (compat.upper_bound(s) or compat.hint(s))
        for name, s in zip("mnkb", (p.m, p.n, p.k, p.batch or 1), strict=True)
    )
    return [here] if here == ends else [here, ends]  # type: ignore[list-item]


def _emit(p: Problem, tiling: Tiling, pdl: bool, *, generated_sum: bool) -> Any:
    """IR of C from our partial-product kernel and a sum over the splits."""
    a, b = compat.realize(p.a), compat.realize(p.b)
    wide = any(compat.too_large_for_int32(x) for x in (a, b)) or compat.exceeds_int32(
        tiling.splits, *p.out_size
    )
    index = "tl.int64" if wide else "tl.int32"
    static_k = compat.is_static(p.k)
    k_split = _split_size(int(p.k), tiling.splits, tiling.block_k) if static_k else 0
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
        PRECISION=f"'{compat.float32_precision() if p.dtype is torch.float32 else 'tf32'}'",
        INDEX=index,
        PDL=pdl,
    )
    if generated_sum:
        return compat.sum_unrolled(partials, p.out_dtype)
    numel = functools.reduce(lambda x, y: x * y, p.out_size)
    flat = REDUCE.emit(
        [compat.realize(partials)],
        [numel],
        p.out_dtype,
        num_warps=tiling.reduce_warps,
        num_stages=1,
        XBLOCK=tiling.xblock,
        RBLOCK=_pow2(tiling.splits),
        SPLITS=tiling.splits,
        EVEN_X=compat.statically_divisible(numel, tiling.xblock),
        INDEX=index,
        PDL=pdl,
    )
    return compat.view(flat, p.out_size)


def _emit_bmm(p: Problem, splits: int) -> Any:
    """IR of C from a cuBLAS bmm with fp32 output and Inductor's generated reduction."""
    m, n, k = p.m, p.n, int(p.k)
    part = k // splits
    a = compat.call(
        aten.permute.default, compat.view(p.a, [m, splits, part]), [1, 0, 2]
    )
    b = compat.view(p.b, [splits, part, n])
    if p.dtype is torch.float32:
        partials = compat.call(aten.bmm.default, a, b)
    else:
        partials = compat.call(aten.bmm.dtype, a, b, torch.float32)
    total = compat.call(aten.sum.dim_IntList, partials, [0])
    return compat.to_dtype(total, p.out_dtype)


def candidates(p: Problem) -> list[choosing.Candidate]:
    """Every candidate but stock, the heuristic's pick first."""
    m, n, k, batch = _extremes(p)[0]
    device = p.a.get_device()
    pdl = config.pdl and compat.device_capability(device)[0] >= 9
    found = list(
        tilings(m, n, k, batch, p.dtype.itemsize, compat.multiprocessors(device))
    )[:8]
    out = []
    for tiling in found:
        if pdl:
            out.append(
                choosing.Candidate(
                    f"{tiling.name}_pdl",
                    functools.partial(_emit, p, tiling, True, generated_sum=False),
                )
            )
        out.append(
            choosing.Candidate(
                tiling.name, functools.partial(_emit, p, tiling, False, generated_sum=False)
            )
        )
    for tiling in found[:1]:
        out.append(
            choosing.Candidate(
                f"{tiling.name}_rowwise",
                functools.partial(_emit, p, tiling, pdl, generated_sum=True),
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
    sms = compat.multiprocessors(p.a.get_device())
    losing = next(
        (why for e in _extremes(p) if (why := worth_it(*e, p.dtype.itemsize, sms))), None
    )
    if losing and choosing.forced_choice(NAME) is None:
        return choosing.leave(NAME, site, losing)
    found = candidates(p)
    rowwise = compat.feeds_row_reduction()

    def heuristic() -> tuple[str, str]:
        if rowwise:
            pick = next(c.name for c in found if c.name.endswith("_rowwise"))
            return pick, "few output tiles, long K; the sum is fused into the row reduction"
        return found[0].name, "few output tiles, long K: one wave of programs along K"

    return choosing.choose(NAME, site, found, heuristic, key=f"{site} {compat.consumers_key()}")


def _mm(a: Any, b: Any, out_dtype: torch.dtype | None = None, *, layout: Any = None) -> Any:
    return _lower("mm", Problem(a, b, out_dtype or a.get_dtype()))


def _bmm(a: Any, b: Any, out_dtype: torch.dtype | None = None, *, layout: Any = None) -> Any:
    return _lower("bmm", Problem(a, b, out_dtype or a.get_dtype()))


def _add_product(
    name: str, bias: Any, a: Any, b: Any, out_dtype: Any, alpha: Any, beta: Any
) -> Any:
    """beta * bias + alpha * A B, added in fp32 on the store of the sum, rounded once."""
    product = _lower(name, Problem(a, b, torch.float32))
    if product is None:
        return None
    if alpha != 1:
        product = compat.call(aten.mul.Tensor, product, alpha)
    if beta != 0:
        bias = compat.to_dtype(bias, torch.float32)
        if beta != 1:
            bias = compat.call(aten.mul.Tensor, bias, beta)
        product = compat.call(aten.add.Tensor, product, bias)
    return compat.to_dtype(product, out_dtype or a.get_dtype())


def _addmm(
    bias: Any, a: Any, b: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, layout: Any = None
) -> Any:
    return _add_product("addmm", bias, a, b, out_dtype, alpha, beta)


def _baddbmm(
    bias: Any, a: Any, b: Any, out_dtype: Any = None, *, beta: Any = 1, alpha: Any = 1, layout: Any = None
) -> Any:
    return _add_product("baddbmm", bias, a, b, out_dtype, alpha, beta)


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
