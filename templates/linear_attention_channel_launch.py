"""Launches of linear attention with a decay per channel: forward and backward.

The states in front of all chunks go through memory, as do the gradients of those behind them; all
chunks are then computed side by side.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from .linear_attention_channel import gradients_kernel, outputs_kernel, states_kernel
from .linear_attention_launch import empty_state, exact, like, rows, strides


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tokens of a chunk; rows and columns of a state of one program, its warps and its pipeline's
    stages; of a chunk's outputs and gradients, channels at once and warps."""

    chunk: int
    block_k: int
    block_v: int
    warps: int
    stages: int
    part: int
    output_warps: int
    gradient_part: int
    gradient_warps: int


def tiling(dtype: torch.dtype, size: int) -> Tiling:
    """What is launched for heads of ``size``."""
    if dtype == torch.float32:
        return Tiling(16, 32, 32, 4, 1, 32, 4, 16 if size > 128 else 32, 4)
    if size > 128:
        return Tiling(32, 64, 64, 4, 1, 32, 4, 32, 8)
    return Tiling(64, 64, 64, 4, 2, 32, 4, 32, 8)


def _block(n: int) -> int:
    # On an H200 programs of triton 3.6 with blocks of 32 x 16 read wild addresses, of 32 x 32 not.
    return max(32, triton.next_power_of_2(n))


def _fronts(q: Tensor, v: Tensor, chunk: int) -> Tensor:
    """[BH, chunks, dk, dv]; fp16 has no room for sums over all tokens."""
    kept = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    many, chunks = q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], chunk)
    return torch.empty((many, chunks, q.shape[3], v.shape[3]), dtype=kept, device=q.device)


def _tiles(q: Tensor, chosen: Tiling) -> tuple[int, int]:
    """(rows of a state of one program, programs that share its rows)."""
    block = min(chosen.block_k, _block(q.shape[-1]))
    return block, triton.cdiv(q.shape[-1], block)


def _strongest(fronts: Tensor, q: Tensor, chosen: Tiling) -> Tensor | None:
    """Memory for the strongest decays of chunks; None where all go by blocks."""
    if q.dtype != torch.bfloat16:
        return None
    tiles = _tiles(q, chosen)[1]
    return torch.empty((*fronts.shape[:2], tiles), dtype=torch.float32, device=q.device)


def _states(
    k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, end: Tensor | None, fronts: Tensor,
    strongest: Tensor | None, factors: tuple[float, float], reverse: bool, chosen: Tiling,
    precision: str,
) -> None:  # fmt: skip
    """``fronts``, and ``end`` [B, H, dk, dv] as ``start`` is, of k and v."""
    heads, tokens, dk = k.shape[1:]
    dv, many = v.shape[-1], k.shape[0] * heads
    first = None if start is None else start.flatten(0, 1)
    last = None if end is None else end.view(many, dk, dv)
    (block_k, k_tiles), block_v = _tiles(k, chosen), min(chosen.block_v, _block(dv))
    v_tiles = triton.cdiv(dv, block_v)
    wrap_triton(states_kernel)[(many * k_tiles * v_tiles,)](
        k, v, decay, first, last, fronts, strongest, tokens, heads, k_tiles, v_tiles, *factors, dk,
        dv, *k.stride()[:3], *v.stride()[:3], *decay.stride()[:3], *strides(first, 3),
        *strides(last, 3), REVERSE=reverse, PRECISION=exact(k, precision), CHUNK=chosen.chunk,
        BLOCK_K=block_k, BLOCK_V=block_v, STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip


def _constants(q: Tensor, v: Tensor, chosen: Tiling, part: int, precision: str) -> dict[str, Any]:
    part = min(part, _block(q.shape[-1]))
    return {
        "PRECISION": exact(q, precision), "CHUNK": chosen.chunk,
        "LEVELS": chosen.chunk.bit_length() - 1, "PARTS": triton.cdiv(q.shape[-1], part),
        "PART": part, "BLOCK_V": _block(v.shape[-1]),
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, scale: float,
    precision: str, chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state [B, H, dk, dv] in fp32); decay: [B, H, T, dk]."""
    heads, tokens, dk = q.shape[1:]
    dv = v.shape[-1]
    chosen = chosen or tiling(q.dtype, max(dk, dv))
    out, end, fronts = like(v), empty_state(q, dk, dv), _fronts(q, v, chosen.chunk)
    if not end.numel():
        return out, end
    q, k, v, decay = rows(q), rows(k), rows(v), rows(decay)
    strongest = _strongest(fronts, q, chosen)
    _states(k, v, decay, start, end, fronts, strongest, (1.0, 1.0), False, chosen, precision)
    for mild in (False,) if strongest is None else (True, False):
        if not fronts.numel():
            break
        wrap_triton(outputs_kernel)[(fronts.shape[0] * fronts.shape[1],)](
            q, k, v, out, decay, fronts, strongest, tokens, heads, _tiles(q, chosen)[1], scale, dk,
            dv, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *decay.stride()[:3], **_constants(q, v, chosen, chosen.part, precision), MILD=mild,
            num_warps=chosen.output_warps,
        )  # fmt: skip
    return out, end


def backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, scale: float,
    precision: str, do: Tensor, dend: Tensor | None, need_decay: bool, need_start: bool,
    chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, ddecay in fp32, dstart in fp32); dend: the gradient of the final state."""
    batch, heads, tokens, dk = q.shape
    dv = v.shape[-1]
    chosen = chosen or tiling(q.dtype, max(dk, dv))
    dq, dkeys, dvalues = like(q), like(k), like(v)
    dstart = empty_state(q, dk, dv) if need_start else None
    grad = None
    if need_decay:
        shape = batch, heads, tokens, dk
        grad = torch.empty(shape, dtype=torch.float32, device=q.device)
    fronts, behinds = _fronts(q, v, chosen.chunk), _fronts(q, v, chosen.chunk)
    if not batch * heads:
        return dq, dkeys, dvalues, grad, dstart
    q, k, v, decay, do = rows(q), rows(k), rows(v), rows(decay), rows(do)
    # States kept in reverse are without the scale that their gradients have.
    factors = 1.0 / scale, scale
    _states(q, do, decay, dend, dstart, behinds, None, factors, True, chosen, precision)
    if not fronts.numel():
        return dq, dkeys, dvalues, grad, dstart
    strongest = _strongest(fronts, q, chosen)
    _states(k, v, decay, start, None, fronts, strongest, (1.0, 1.0), False, chosen, precision)
    for mild in (False,) if strongest is None else (True, False):
        wrap_triton(gradients_kernel)[(fronts.shape[0] * fronts.shape[1],)](
            q, k, v, decay, do, fronts, behinds, strongest, dq, dkeys, dvalues, grad, tokens, heads,
            _tiles(q, chosen)[1], scale, dk, dv, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *decay.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
            *dkeys.stride()[:3], *dvalues.stride()[:3],
            **_constants(q, v, chosen, chosen.gradient_part, precision), MILD=mild,
            num_warps=chosen.gradient_warps,
        )  # fmt: skip
    return dq, dkeys, dvalues, grad, dstart
