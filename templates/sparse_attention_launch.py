"""Launches of attention over lists of entries. See ``sparse_attention``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.library import wrap_triton

from .attention_program import LOG2E
from .dependent import launched
from .sparse_attention import gather_kernel, merge_kernel
from .tilings import tunable

LARGEST = 512  # numbers of a value
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """``block``: entries gathered at once; ``heads``: of a program; ``splits``: of a list, 0 to
    have it chosen; ``width``: numbers of an entry that are one product. ``stages``: 2 or more; with
    1 the assembler of triton 3.6 (ptxas 12.8) lets a product read beyond shared memory (64 entries,
    8 warps; that of CUDA 13.0 does not), and none was faster."""

    block: int
    heads: int
    warps: int
    stages: int
    splits: int = 0
    width: int = 128

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"stages is expected as 2 or more, got {self.stages}")


def _power(n: int) -> bool:
    return n & (n - 1) == 0


def fits(q: torch.Tensor, dv: int) -> bool:
    """Whether kernels compute on entries of such sizes: dv 16 to 512, and what is beyond it, too,
    powers of two; in all 1152 bytes or less."""
    rest = q.shape[-1] - dv
    sizes = 16 <= dv <= LARGEST and _power(dv) and (rest == 0 or (rest >= 16 and _power(rest)))
    return sizes and q.dtype in _DTYPES and q.shape[-1] * q.itemsize <= 1152


@tunable("attention", "sparse", "lines topk", scaled="block heads", stages="stages")
def tiling(dtype: torch.dtype, dim: int, heads: int) -> Tiling:
    """The tile for entries like these."""
    wide = 16 if heads <= 16 else 32
    if dtype == torch.float32:
        return Tiling(16, 16, 8, 2)
    if dim <= 256:
        return Tiling(64, wide, 4, 3)
    return Tiling(32, 16, 4, 3) if heads <= 16 else Tiling(64, 32, 8, 2)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _splits(lines: int, topk: int, block: int, device: torch.device) -> int:
    """Parts of a list, so that there is about one program for each multiprocessor, which has two
    blocks to gather, one while it computes on the other."""
    return max(min(_processors(device) // max(lines, 1), triton.cdiv(topk, 2 * block), 32), 1)


def attend(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, dv: int, precision: str,
    chosen: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, T, H, dv] in q's dtype, lse [B, T, H] in fp32) of q [B, T, H, D], kv [B, S, D] (of
    stride 0 where sequences share it), indices [B, T, topk] (int32)."""
    batch, tokens, heads, dim = q.shape
    topk = indices.shape[2]
    out = torch.empty((batch, tokens, heads, dv), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, tokens, heads), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse
    q, kv, indices = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, kv, indices))
    lines, strides = batch * tokens, out.stride()[:3]
    chosen = chosen or tiling(q.dtype, dim, heads, lines=lines, topk=topk)
    of_heads = triton.cdiv(heads, chosen.heads)
    splits = chosen.splits or _splits(lines * of_heads, topk, chosen.block, q.device)
    part = triton.cdiv(triton.cdiv(topk, splits), chosen.block) * chosen.block
    splits = max(triton.cdiv(topk, part), 1) if part else 1
    into, stats, wide = out, None, torch.float32
    if splits > 1:
        into = torch.empty((lines, splits, heads, dv), dtype=wide, device=q.device)
        stats = torch.empty((lines, splits, heads, 2), dtype=wide, device=q.device)
    exact = "tf32x3" if q.dtype == torch.float32 and precision == "ieee" else "tf32"
    common: dict[str, Any] = {"DV": dv, "SPLITS": splits}
    gather = gather_kernel(dv, dim - dv, min(chosen.width, dv))
    launched(gather, wrap_triton(gather), q, (lines * splits, of_heads))(
        q, kv, indices, into, lse, stats, tokens, heads, kv.shape[1], topk, part, scale * LOG2E,
        *q.stride()[:3], *kv.stride()[:2], *indices.stride()[:2], *strides, REST=dim - dv,
        HEADS=chosen.heads, BLOCK=chosen.block, STAGES=chosen.stages, PRECISION=exact,
        num_warps=chosen.warps, **common,
    )  # fmt: skip
    if splits > 1:
        # A program for each whole result, where that is still one for each multiprocessor or so.
        columns = dv if lines * heads >= 128 else min(dv, 128)
        grid = (lines * heads * (dv // columns),)
        launched(merge_kernel, wrap_triton(merge_kernel), q, grid)(
            into, stats, out, lse, tokens, heads, *strides, COLUMNS=columns,
            SLOTS=triton.next_power_of_2(splits), num_warps=4, **common,
        )  # fmt: skip
    return out, lse
