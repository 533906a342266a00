"""Launches of attention of few query rows over many keys. See ``attention_decode``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.library import wrap_triton

from . import attention_decode
from .attention_program import Program
from .dependent import launched
from .tilings import tunable

ROWS = 64  # query rows of a KV head, at most
# Blocks of a program from which heads of their own are measured to be faster. Of fewer the merge
# weighs more, whose programs crowd on the multiprocessors that are left over.
LONG = 32
# Query rows of a tile, at least. Of more of a KV head its own programs are measured to be slower.
TILE_ROWS = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """``block``: keys of a block; ``per_sm``: programs of a multiprocessor; ``least``: blocks that
    are worth a program of their own; ``programs``: of the card, 0 to have it chosen."""

    block: int
    warps: int
    stages: int
    keys_first: bool
    per_sm: int = 2
    least: int = 4
    programs: int = 0


def fits(q: torch.Tensor, k: torch.Tensor, paged: bool = False) -> bool:
    """Whether the query rows of a KV head are few enough."""
    heads = k.shape[2] if paged else k.shape[1]
    return q.dtype in _DTYPES and q.shape[1] // max(heads, 1) * q.shape[2] <= ROWS


@tunable(
    "attention", "decode", "lines keys of",
    scaled="block least", stages="stages", counted="per_sm", flipped="keys_first",
)  # fmt: skip
def tiling(dtype: torch.dtype, dim: int, value_dim: int, rows: int, few: bool = False) -> Tiling:
    """The tile for heads like these and ``rows`` of a KV head; ``few``: no more KV heads than
    multiprocessors.

    A program alone on its multiprocessor, with more blocks on the way, leaves fewer parts to merge;
    of two, one computes while the other goes from a head to the next.
    """
    bytes_of_key = (dim + value_dim) * dtype.itemsize
    if dtype == torch.float32:
        return Tiling(32 if bytes_of_key <= 1024 else 16, 8 if rows > 16 else 4, 3, False)
    if bytes_of_key > 1024:
        return Tiling(32, 8, 3, False, per_sm=1)
    if rows > 16:
        few = bytes_of_key <= 512
        return Tiling(32, 4 if few else 8, 4 if few else 3, False, 2 if few else 1, least=8)
    if bytes_of_key > 512:
        return Tiling(32, 4, 3, True, least=8)
    if bytes_of_key <= 256:
        return Tiling(64, 4, 4, True)
    return Tiling(64, 4, 4, True, per_sm=1) if few else Tiling(64, 4, 3, True)


def division(
    lines: int, blocks: int, most: int, least: int, rows: int = 1, ragged: bool = False
) -> tuple[int, int]:
    """(programs, parts) for ``lines`` heads of ``blocks`` each, or at most: programs of every head
    alone; or as many as there may be, ``most``, and 0, where that would leave over a tenth idle or
    have them end soon, or where a KV head has more than TILE_ROWS ``rows``."""
    programs = max(min(most, lines * blocks // least), 1)
    if ragged:
        return programs, 0
    parts = min(most // lines, max(blocks // least, 1))
    apart = rows <= TILE_ROWS and blocks >= LONG * parts
    if apart and parts * lines >= 0.9 * programs:
        return parts * lines, parts
    heads = triton.cdiv(lines, programs)  # of a program
    even = lines % heads == 0 and lines // heads >= 0.9 * programs
    return (lines // heads if even else programs), 0


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _dense(t: torch.Tensor, keys: int) -> torch.Tensor:
    """Memory whose last dimension is dense, with rows of dimension ``keys`` near enough for 31 bits
    in a block."""
    near = (t.stride(-1) == 1 or t.shape[-1] == 1) and abs(t.stride(keys)) < 1 << 23
    return t if near else t.contiguous()


def _like(q: torch.Tensor, value_dim: int) -> torch.Tensor:
    """[B, Hq, Sq, Dv] with q's order of dimensions in memory, the last one dense."""
    if q.shape[-1] == value_dim:
        out = torch.empty_like(q)
        if out.stride(-1) == 1:
            return out
    batch, heads, rows, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, rows, heads, value_dim)).transpose(1, 2)
    return q.new_empty((batch, heads, rows, value_dim))


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Sequence[torch.Tensor],
    numbers: Sequence[int], program: Program, precision: str, *,
    lengths: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    chosen: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, Hq, Sq, Dv] as q lies, lse [B, Hq, Sq] in fp32), of Sq * Hq / Hkv <= 64.

    q [B, Hq, Sq, D]; k, v [B, Hkv, Sk, D or Dv], or with ``block_table`` [B, pages of a sequence]
    (int32) pages [pages, page_size, Hkv, D or Dv]; ``lengths`` [B] (int32, needed with pages): keys
    of each sequence, which the score knows as ``columns``. ``inputs``: 4-D, broadcastable to
    [B, Hq, Sq, Sk]. A length below 0 or above what there is room for gives NaN.
    """
    batch, heads, rows, dim = q.shape
    paged = block_table is not None
    kv_heads = k.shape[2] if paged else k.shape[1]
    value_dim = v.shape[-1]
    out = _like(q, value_dim)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse
    q, k, v = _dense(q, 2), *(_dense(t, 1 if paged else 2) for t in (k, v))
    group, lines = heads // kv_heads, batch * kv_heads
    few = lines <= _processors(q.device)
    page_size = k.shape[1] if paged else 0
    capacity = block_table.shape[1] * page_size if block_table is not None else k.shape[2]
    chosen = chosen or tiling(
        q.dtype, dim, value_dim, rows * group, few,
        lines=lines, keys=capacity, of="pages" if paged else "keys",
    )  # fmt: skip
    pages = "" if not paged else "many" if page_size % chosen.block else "one"
    most = chosen.programs or chosen.per_sm * _processors(q.device)
    blocks, ragged = triton.cdiv(capacity, chosen.block), lengths is not None
    programs, parts = division(lines, blocks, most, chosen.least, rows * group, ragged)
    keys_first = chosen.keys_first and q.itemsize == 2
    layout = attention_decode.Layout(dim, value_dim, ragged, pages, keys_first, parts > 0)
    decode_kernel, merge_kernel = attention_decode.kernels(program, layout)
    slots = (programs + lines) * rows * group
    partial = torch.empty((slots, value_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((slots, 2), dtype=torch.float32, device=q.device)

    values: dict[str, Any] = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "partial_ptr": partial, "stats_ptr": stats,
        "out_ptr": out, "lse_ptr": lse, "lengths_ptr": lengths, "table_ptr": block_table,
        "batches": batch, "kv_heads": kv_heads, "group": group, "rows": rows, "capacity": capacity,
        "page_size": page_size, "programs": programs, "parts": parts,
        "table_b": 0 if block_table is None else block_table.stride(0),
    }  # fmt: skip
    for name, t in (("q", q), ("out", out)):
        values |= dict(zip((f"{name}_b", f"{name}_h", f"{name}_q"), t.stride(), strict=False))
    for name, t in (("k", k), ("v", v)):
        order = "bkh" if paged else "bhk"
        values |= {f"{name}_{axis}": n for axis, n in zip(order, t.stride(), strict=False)}
    for i, t in enumerate(inputs):
        values[f"x{i}_ptr"] = t
        values |= {f"x{i}_{axis}": n for axis, n in zip("bhqk", t.stride(), strict=True)}
    values |= {f"n{i}": n for i, n in enumerate(numbers)}

    common: dict[str, Any] = {"BLOCK": chosen.block, "LEAST": chosen.least}
    given = {n: values[n] for n in attention_decode.arguments(program, layout)}
    launched(decode_kernel, wrap_triton(decode_kernel), q, (programs,))(
        **given, **common, ROWS=max(TILE_ROWS, triton.next_power_of_2(rows * group)),
        STAGES=chosen.stages,
        PRECISION=_precision(q.dtype, precision), num_warps=chosen.warps,
    )  # fmt: skip
    given = {n: values[n] for n in attention_decode.merge_arguments(program, layout)}
    expected = triton.next_power_of_2(parts or min(programs, programs // lines + 2))
    launched(merge_kernel, wrap_triton(merge_kernel), q, (lines * group * rows,))(
        **given, **common, SLOTS=max(2, min(expected, 64)),
        WIDE=triton.next_power_of_2(value_dim), num_warps=4 if expected > 8 else 1,
    )  # fmt: skip
    return out, lse


def _precision(dtype: torch.dtype, precision: str) -> str:
    """Three products of TF32 are as exact as those of fp32, and on the tensor cores."""
    return "tf32x3" if dtype == torch.float32 and precision == "ieee" else "tf32"
