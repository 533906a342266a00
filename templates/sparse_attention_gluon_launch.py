"""Launch of ``sparse_attention_gluon``."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
import triton

from .attention_gluon_launch import _hopper, available

HEADS = 16
WIDTH = 128


@dataclass(frozen=True)
class Shape:
    """``entries`` of a list and ``warps`` of a program."""

    entries: int
    warps: int


SHAPES = (Shape(64, 4), Shape(128, 8))


def shape(
    q: torch.Tensor, kv: torch.Tensor, dv: int, lines: int, topk: int, processors: int
) -> Shape | None:
    """What a program has where each multiprocessor has one program at most; None where the kernel
    does not compute it: of 16 heads or fewer, in 16 bits, of values in slabs of WIDTH numbers, of
    lists that are cut. Arguments as of ``sparse_attention_launch.attend``."""
    if not (available() and _hopper(q.device) and q.dtype in (torch.bfloat16, torch.float16)):
        return None
    rest = q.shape[3] - dv
    if q.shape[2] > HEADS or dv % WIDTH or rest not in (0, 64):
        return None
    # Copies of 16 bytes.
    strides = *q.stride()[:3], *kv.stride()[:2]
    if any(s % 16 for s in strides) or q.data_ptr() % 16 or kv.data_ptr() % 16:
        return None
    for found in SHAPES:
        splits = triton.cdiv(topk, found.entries)
        if splits > 1 and lines * splits <= processors:
            return found
    return None


@functools.cache
def _kernel() -> Any:
    return importlib.import_module(".sparse_attention_gluon", __package__).gather_kernel


def launch(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, parts: torch.Tensor,
    stats: torch.Tensor, scale: float, chosen: Shape,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """(kernel, arguments by name but for PDL): the launch, of a program per part, that fills
    ``parts`` [B T, splits, H, dv] and ``stats`` [B T, splits, H, 2]. ``scale``: in units of
    log 2."""
    _, tokens, heads, dim = q.shape
    dv = parts.shape[3]
    return _kernel(), {
        "Q": q, "KV": kv, "INDICES": indices, "OUT": parts, "STATS": stats, "tokens": tokens,
        "heads": heads, "entries": kv.shape[1], "topk": indices.shape[2], "part": chosen.entries,
        "scale": scale, **dict(zip(("q_b", "q_t", "q_h"), q.stride(), strict=False)),
        **dict(zip(("kv_b", "kv_s"), kv.stride(), strict=False)),
        **dict(zip(("i_b", "i_t"), indices.stride(), strict=False)),
        "DV": dv, "REST": dim - dv, "ENTRIES": chosen.entries, "HEADS": HEADS, "WIDTH": WIDTH,
        "SPLITS": parts.shape[1], "WARPS": chosen.warps, "num_warps": chosen.warps,
    }  # fmt: skip
