"""Launches of linear attention with a decay per channel: forward and backward.

Mild heads are computed as those without decays are, of q and k scaled once. Of others, and for
gradients, the states in front of all chunks go through memory, as do the gradients of those behind
them; all chunks are then computed side by side.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from . import linear_attention_launch as by_chunks
from .linear_attention_channel import (
    gradients_kernel,
    outputs_kernel,
    scaled_kernel,
    states_kernel,
)
from .linear_attention_gradients import channel_gradients_kernel
from .linear_attention_launch import (
    Decays,
    attend,
    block_of,
    chunk_states,
    empty_state,
    exact,
    like,
    rows,
    strides,
)


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


_by_rule = by_chunks.tiling.rule  # not a plan's, whose chunks could be others
MILD_TILE = 32, 4  # channels at once, warps, of a chunk's gradients


def _tiles(q: Tensor, chosen: Tiling) -> tuple[int, int]:
    """(rows of a state of one program, programs that share its rows)."""
    block = min(chosen.block_k, block_of(q.shape[-1]))
    return block, triton.cdiv(q.shape[-1], block)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """q and k decayed to the middles of their chunks, and the decays between the middles; strongest
    [BH, chunks, tiles]: by which chunks are mild."""

    q: Tensor
    k: Tensor
    decays: Decays
    strongest: Tensor


def _scaled(q: Tensor, k: Tensor, decay: Tensor, chosen: Tiling) -> Scaled | None:
    """None where all goes by blocks."""
    if q.dtype != torch.bfloat16 or not q.numel():
        return None
    batch, heads, tokens, dk = q.shape
    many, chunks, (block, tiles) = (
        batch * heads,
        triton.cdiv(tokens, chosen.chunk),
        _tiles(q, chosen),
    )
    own, keys = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    firsts, seconds, strongest = (
        torch.empty((many, chunks, n), dtype=torch.float32, device=q.device)
        for n in (dk, dk, tiles)
    )
    wrap_triton(scaled_kernel)[(many * chunks * tiles,)](
        q, k, decay, own, keys, firsts, seconds, strongest, tokens, heads, tiles, dk,
        *q.stride()[:3], *k.stride()[:3], *decay.stride()[:3], CHUNK=chosen.chunk, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    decays = Decays(strongest=strongest.amin((1, 2)), firsts=firsts, seconds=seconds)
    return Scaled(own, keys, decays, strongest)


def _of_heads(scaled: Scaled | None) -> tuple[Tensor | None, Tensor | None]:
    """(the strongest decays of chunks, those of heads)."""
    return (None, None) if scaled is None else (scaled.strongest, scaled.decays.strongest)


def _by_chunks(q: Tensor, v: Tensor, chosen: Tiling) -> by_chunks.Tiling:
    return _by_rule(q.dtype, max(q.shape[-1], v.shape[-1]), q.device, chosen.chunk)


def _states(
    k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, end: Tensor | None, fronts: Tensor,
    of_heads: Tensor | None, factors: tuple[float, float], reverse: bool, chosen: Tiling,
    precision: str,
) -> None:  # fmt: skip
    """``fronts``, and ``end`` [B, H, dk, dv] as ``start`` is, of k and v."""
    heads, tokens, dk = k.shape[1:]
    dv, many = v.shape[-1], k.shape[0] * heads
    first = None if start is None else start.flatten(0, 1)
    last = None if end is None else end.view(many, dk, dv)
    (block_k, k_tiles), block_v = _tiles(k, chosen), min(chosen.block_v, block_of(dv))
    v_tiles = triton.cdiv(dv, block_v)
    wrap_triton(states_kernel)[(many * k_tiles * v_tiles,)](
        k, v, decay, first, last, fronts, of_heads, tokens, heads, k_tiles, v_tiles, *factors, dk,
        dv, *k.stride()[:3], *v.stride()[:3], *decay.stride()[:3], *strides(first, 3),
        *strides(last, 3), REVERSE=reverse, PRECISION=exact(k, precision), CHUNK=chosen.chunk,
        BLOCK_K=block_k, BLOCK_V=block_v, STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip


def _constants(q: Tensor, v: Tensor, chosen: Tiling, part: int, precision: str) -> dict[str, Any]:
    part = min(part, block_of(q.shape[-1]))
    return {
        "PRECISION": exact(q, precision), "CHUNK": chosen.chunk,
        "LEVELS": chosen.chunk.bit_length() - 1, "PARTS": triton.cdiv(q.shape[-1], part),
        "PART": part, "BLOCK_V": block_of(v.shape[-1]),
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, scale: float,
    precision: str, chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state [B, H, dk, dv] in fp32); decay: [B, H, T, dk]."""
    heads, tokens, dk = q.shape[1:]
    dv = v.shape[-1]
    chosen = chosen or tiling(q.dtype, max(dk, dv))
    out, end, fronts = like(v), empty_state(q, dk, dv), chunk_states(q, v, chosen.chunk)
    if not end.numel():
        return out, end
    q, k, v, decay = rows(q), rows(k), rows(v), rows(decay)
    scaled = _scaled(q, k, decay, chosen)
    strongest, of_heads = _of_heads(scaled)
    if scaled is not None:
        attend(
            scaled.q, scaled.k, v, scaled.decays, out, scale, start, end, _by_chunks(q, v, chosen),
            precision=precision, kinds=(True,),
        )  # fmt: skip
    _states(k, v, decay, start, end, fronts, of_heads, (1.0, 1.0), False, chosen, precision)
    for mild in (False,) if strongest is None else (True, False):
        if not fronts.numel():
            break
        wrap_triton(outputs_kernel)[(fronts.shape[0] * fronts.shape[1],)](
            q, k, v, out, decay, fronts, strongest, of_heads, tokens, heads, _tiles(q, chosen)[1],
            scale, dk, dv, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
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
    fronts, behinds = chunk_states(q, v, chosen.chunk), chunk_states(q, v, chosen.chunk)
    if not batch * heads:
        return dq, dkeys, dvalues, grad, dstart
    q, k, v, decay, do = rows(q), rows(k), rows(v), rows(decay), rows(do)
    scaled = _scaled(q, k, decay, chosen)
    strongest, of_heads = _of_heads(scaled)
    if scaled is not None:
        options: Any = {"precision": precision, "kinds": (True,)}
        own, keys, decays, tiles = scaled.q, scaled.k, scaled.decays, _by_chunks(q, v, chosen)
        attend(keys, keys, v, decays, None, scale, start, None, tiles, fronts=fronts, **options)
        options |= {"fronts": behinds, "reverse": True}
        attend(keys, own, do, decays, dvalues, scale, dend, dstart, tiles, **options)
        part, warps = MILD_TILE
        wrap_triton(channel_gradients_kernel)[(fronts.shape[0] * fronts.shape[1],)](
            own, keys, v, do, decay, decays.firsts, decays.seconds, of_heads, fronts, behinds, dq,
            dkeys, grad, tokens, heads, triton.cdiv(dk, part), scale, dk, dv, *own.stride()[:3],
            *keys.stride()[:3], *v.stride()[:3], *do.stride()[:3], *decay.stride()[:3],
            *dq.stride()[:3], *dkeys.stride()[:3], CHUNK=chosen.chunk, PART=part,
            BLOCK_V=block_of(dv), num_warps=warps,
        )  # fmt: skip
    # States kept in reverse are without the scale that their gradients have.
    factors = 1.0 / scale, scale
    _states(q, do, decay, dend, dstart, behinds, of_heads, factors, True, chosen, precision)
    if not fronts.numel():
        return dq, dkeys, dvalues, grad, dstart
    _states(k, v, decay, start, None, fronts, of_heads, (1.0, 1.0), False, chosen, precision)
    for mild in (False,) if strongest is None else (True, False):
        wrap_triton(gradients_kernel)[(fronts.shape[0] * fronts.shape[1],)](
            q, k, v, decay, do, fronts, behinds, strongest, of_heads, dq, dkeys, dvalues, grad,
            tokens, heads, _tiles(q, chosen)[1], scale, dk, dv, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *decay.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
            *dkeys.stride()[:3], *dvalues.stride()[:3],
            **_constants(q, v, chosen, chosen.gradient_part, precision), MILD=mild,
            num_warps=chosen.gradient_warps,
        )  # fmt: skip
    return dq, dkeys, dvalues, grad, dstart
