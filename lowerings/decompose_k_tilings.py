"""How a Decompose-K problem is cut, and when cutting it pays: numbers only.

The ranking is a model of the H200 fitted to measurements (benchmarks/NOTES.md); names of candidates
say the tiling.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence


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


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def split_size(k: int, splits: int, block_k: int) -> int:
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
    rblock = pow2(splits)
    # A pipelined small tile is bound by latency, and fewer warps leave more programs per SM.
    small = area <= 256 or (tiles_k > 1 and area <= 512)
    num_warps = 2 if small else 4
    if itemsize == 2 and tiles_k == 1 and block_m == block_n == 32:
        num_warps = 8  # nothing to pipeline: more threads are more loads at once
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


# What the ranking of tilings costs, fitted to 49 problems on an H200 (benchmarks/NOTES.md).
_REFILL_NS = 1020  # a further filling of the four pipeline stages
_SM_BYTES_PER_NS = 209  # into one SM
_L2_BYTES_PER_NS = 50000  # out of the L2, re-reads included
_PARTIAL_BYTES_PER_NS = {2: 3850, 4: 2240}  # partials written and read back
_PREFETCH_NS = 1600  # what fetching B ahead of the wait saves
# Without tensor cores, by elements of a tile: (ns until products flow, products per ns of an SM).
_FMA = {256: (2900, 50), 512: (2700, 50), 1024: (2400, 88), 2048: (5000, 150)}


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
    splits = -(-k // per_split)
    programs = -(-m // block_m) * -(-n // block_n) * batch * splits
    waves = programs / sms
    # Where a program fills an SM, or its units, one program too many is a second wave for all.
    if itemsize == 4 or _tiling(m, n, k, batch, itemsize, shape).fills_an_sm(itemsize):
        waves = math.ceil(waves)
    partials = 2 * splits * m * n * batch * 4 / _PARTIAL_BYTES_PER_NS[itemsize]
    if itemsize == 4:
        start, products = _FMA[block_m * block_n]
        return start + waves * block_m * block_n * per_split / products + partials + 0.25 * programs
    read = (min(block_m, m) + min(block_n, n)) * per_split * itemsize
    refills = max(per_split / _block_k(per_split, itemsize) / 4, 1) - 1
    ahead = block_m >= m and (prefetch == "columns" or (prefetch == "rows" and block_n >= n))
    return (
        max(
            refills * _REFILL_NS,
            read * max(1.0, waves) / _SM_BYTES_PER_NS,
            read * programs / _L2_BYTES_PER_NS,
        )
        + partials
        + 0.25 * programs
        - (_PREFETCH_NS if ahead else 0.0)
    )


def _shapes(
    m: int, n: int, k: int, batch: int, itemsize: int, sms: int
) -> list[tuple[int, int, int]]:
    """(tile rows, tile columns, elements of K per split) that make sense for these sizes."""
    longest = pow2(-(-k // 128))  # elements per split where 128 splits are not enough

    def lengths(block_m: int, block_n: int) -> list[int]:
        found = {64, 128, 256, 512, 1024, 2048} | ({longest} if longest > 2048 else set())
        if itemsize == 4:  # bound by arithmetic: also what makes one wave exactly
            tiles = -(-m // block_m) * -(-n // block_n) * batch
            wave = -(-k * tiles // (64 * sms)) * 64
            found |= {wave} if wave <= 2048 else set()
        return sorted(found)

    return [
        (block_m, block_n, per_split)
        for block_m in (64, 32, 16)
        for block_n in (16, 32, 64, 128)
        if block_m <= max(pow2(m), 16)
        and block_n <= max(pow2(n), 16)
        and not (itemsize == 4 and block_m * block_n > 2048)
        for per_split in lengths(block_m, block_n)
        if 2 <= -(-k // per_split) <= 128
    ]


def tilings(
    m: int, n: int, k: int, batch: int, itemsize: int, sms: int, prefetch: str = ""
) -> list[Tiling]:
    """Tilings worth trying for a problem with these sizes, the heuristic's pick first.

    ``prefetch`` is how B can be fetched ahead: "rows", "columns" (see ``_prefetchable``) or "".
    """
    shapes = _shapes(m, n, k, batch, itemsize, sms)
    if itemsize == 4:  # FMA, not tensor cores: rows of A beyond M would be multiplied too
        shapes.reverse()
    sizes = m, n, k, batch
    # Of equals the one that reads less, where arithmetic alone is predicted; then the order above,
    # since the sort is stable.
    shapes.sort(
        key=lambda s: (
            _predicted_ns(sizes, itemsize, sms, prefetch, s),
            s[0] + s[1] if itemsize == 4 else 0,
        )
    )
    # Several lengths of K can come to the same splits.
    return list(dict.fromkeys(_tiling(m, n, k, batch, itemsize, shape) for shape in shapes))


def worth_it(m: int, n: int, k: int, batch: int, itemsize: int, sms: int) -> str | None:
    """None where splitting K is expected to win against cuBLAS, else why not.

    On the H200 the split won by 1.9x or more from K = 1024 on while the output had up to 16 tiles
    of 64x64, and by 1.25x at 32; from 40 on, two waves of programs or few splits are level with the
    library (benchmarks/NOTES.md).
    """
    tiles = -(-m // 64) * -(-n // 64) * batch
    if k < 1024:
        return f"K={k} is below 1024: one pass over it costs less than a second kernel"
    if k < 4 * max(m, n):
        return f"K={k} is below 4 x max(M, N)={4 * max(m, n)}: the partials cost too much"
    if 3.6 * tiles > sms:
        return f"{tiles} output tiles of 64x64 occupy {sms} SMs well enough"
    return None


def rows_name(t: Tiling) -> str:
    return f"{t.name}_rowwise"


def names_of(t: Tiling, itemsize: int, pdl: bool) -> list[str]:
    """Candidates with the generic sum that a tiling makes, the heuristic's first."""
    if not pdl:
        return [t.name]
    pair = [f"{t.name}_pdl", f"{t.name}_pdl_late"]
    return [*(pair if t.fills_an_sm(itemsize) else pair[::-1]), t.name]


def few_splits(ranked: list[Tiling]) -> Tiling | None:
    """The best tiling whose sum can be unrolled: it loads every split by name."""
    return next((t for t in ranked if t.splits <= 64), None)


@dataclasses.dataclass(frozen=True)
class DotTiling:
    """How the kernel without a split is cut: columns of B per program, elements of K per pass."""

    block_n: int
    block_k: int
    num_warps: int = 8

    @property
    def name(self) -> str:
        return f"dot_{self.block_n}x{self.block_k}_w{self.num_warps}"

    def names(self, pdl: bool) -> list[str]:
        """Candidates, the heuristic's first."""
        return [f"{self.name}_pdl_late", self.name] if pdl else [self.name]


def dot_tiling(m: int, n: int, k: int, sms: int) -> DotTiling | None:
    """Without a split, for columns of B that are contiguous in memory; None: too many rows."""
    if m > 4:
        return None
    block_n = max(1, pow2(m * n // (2 * sms)) // 2)
    block_k = min(pow2(k), 16384 // block_n)
    return DotTiling(block_n, block_k, 16 if block_n * block_k >= 8192 else 8)


def dot_wins(m: int, n: int, k: int, itemsize: int) -> bool:
    """Whether one kernel beats two: one pass over K, and few bytes of B read again per row.

    On the H200 at up to 8.4 MB by 1.2 to 1.6x, at 11 MB by nothing, at 15 MB it lost
    (benchmarks/NOTES.md).
    """
    return k <= 8192 and m * n * k * itemsize <= 9_000_000


def pick(names: Sequence[str], rowwise: bool, fma_along_k: bool) -> tuple[str, str]:
    """(candidate, reason) of the heuristic out of ranked names, where splitting K is worth it.

    ``fma_along_k``: B would be read across its rows without tensor cores; on the H200 1x256x7168
    took 13.0 us so, the library 8.1 (benchmarks/NOTES.md).
    """
    rows = next((name for name in names if name.endswith("_rowwise")), None)
    if names[0].startswith("dot_"):
        return names[0], "few rows: one program per column of B, no split"
    if fma_along_k:
        return "stock", "fp32 weights contiguous along K: the library is faster"
    if rowwise and rows is not None:
        return rows, "few output tiles, long K; the sum is fused into the row reduction"
    return names[0], "few output tiles, long K: one wave of programs along K"


CANDIDATE = re.compile(
    r"(?P<stem>split\d+_(?P<bm>\d+)x\d+x\d+_w\d+_s\d+)(?P<how>|_pdl|_pdl_late|_rowwise)"
    r"|bmm_split(?P<splits>\d+)"
    r"|dot_(?P<dot>\d+x\d+_w\d+)(?P<dot_how>|_pdl_late)"
)


def dot_named(match: re.Match[str]) -> DotTiling | None:
    """The tiling without a split in a candidate's name, None where no kernel has these numbers."""
    block_n, block_k, warps = (int(x) for x in re.findall(r"\d+", match["dot"]))
    powers = all(x > 0 and x & (x - 1) == 0 for x in (block_n, block_k, warps))
    fits = powers and block_n * block_k <= 32768 and warps <= 16
    return DotTiling(block_n, block_k, warps) if fits else None


def _can_be_divided(t: Tiling) -> bool:
    """Whether so many warps share a tile evenly and no thread is left without an element."""
    return t.num_warps in (1, 2, 4, 8, 16) and t.block_m * t.block_n >= 32 * t.num_warps


def tiling_named(
    match: re.Match[str], m: int, n: int, k: int, batch: int, itemsize: int
) -> Tiling | None:
    """The tiling in a candidate's name, None where these sizes have none of that name.

    In fp32 any number of splits may be one wave, on a card with as many multiprocessors.
    """
    shapes = _shapes(max(m, int(match["bm"])), n, k, batch, itemsize, 1)
    splits, _, _, block_k, warps = (int(x) for x in re.findall(r"\d+", match["stem"])[:5])
    if itemsize == 4 and splits and block_k:
        meant = split_size(k, splits, block_k)
        shapes += [(*tile, meant) for tile in dict.fromkeys(shape[:2] for shape in shapes)]
    for shape in shapes:
        tiling = dataclasses.replace(_tiling(m, n, k, batch, itemsize, shape), num_warps=warps)
        if tiling.name == match["stem"] and _can_be_divided(tiling):
            return None if match["how"] == "_rowwise" and tiling.splits > 64 else tiling
    return None
