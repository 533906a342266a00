"""Launches of chunked linear attention with one decay per head or per token: forward and backward.

One kernel makes o, dq, dk and dv. Where the heads and tiles alone don't fill the card, the tokens
are cut into segments: a first launch finds what each adds to the state, a small one the state in
front of each, and then they run side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from .linear_attention import (
    between_segments_kernel,
    chunk_kernel,
    decay_gradient_kernel,
    strongest_kernel,
)
from .tilings import tunable


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tokens of a chunk, columns of v of a program, warps, pipeline stages, and segments (0: as
    many as fill the card)."""

    chunk: int
    block_v: int
    warps: int
    stages: int
    segments: int = 0


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _roomy(device: torch.device) -> bool:
    """Whether a program can have the shared memory that an H200 gives it, 227 KiB."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 227 << 10


_FIELDS = {"scaled": "block_v", "stages": "stages"}


@tunable("linear_attention", "forward", "dv tokens heads", **_FIELDS)
def tiling(
    dtype: torch.dtype, dk: int, device: torch.device, chunk: int = 0, kept_in_fp32: bool = False
) -> Tiling:
    """What is launched for dk channels, measured on an H200 at 128; ``kept_in_fp32``: where states
    in front of chunks pass through shared memory."""
    depth = triton.next_power_of_2(dk)
    if dtype == torch.float32:
        return Tiling(chunk or 16, 16 if depth > 128 else 32, 4, 1)
    if depth > 128 or not _roomy(device):
        return Tiling(chunk or 64, 32, 4, 1)
    return Tiling(chunk or 64, 32, 4, 2) if kept_in_fp32 else Tiling(chunk or 64, 64, 4, 3)


backward_tiling = tunable("linear_attention", "backward", "tokens heads", **_FIELDS)(tiling.rule)


def _fitted(chosen: Tiling, dv: int) -> Tiling:
    block = min(chosen.block_v, max(16, triton.next_power_of_2(dv)))
    return dataclasses.replace(chosen, block_v=block)


def _segments(
    programs: int, chunks: int, device: torch.device, wanted: int, twice: bool
) -> tuple[int, int]:
    """(segments, chunks of each): two programs for each multiprocessor, or, not ``twice``, one
    where that alone nearly fills the card, since segments read k and v once more."""
    if not wanted:
        card = _processors(device)
        full = not twice and programs >= card * 3 // 4
        wanted = 1 if full else max(2 * card // max(programs, 1), 1)
    each = triton.cdiv(chunks, max(min(wanted, chunks), 1))
    return max(triton.cdiv(chunks, max(each, 1)), 1), each


def rows(t: Tensor) -> Tensor:
    """Memory whose last dimension is dense, with rows near enough for 31 bits in a chunk."""
    near = t.stride(-1) == 1 and abs(t.stride(-2)) < 1 << 23
    return t if near else t.contiguous()


def strides(t: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if t is None else tuple(t.stride()[:count])


def empty_state(q: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty((*q.shape[:2], rows, columns), dtype=torch.float32, device=q.device)


def like(t: Tensor) -> Tensor:
    """Memory of its shape and order of dimensions, the last one dense."""
    out = torch.empty_like(t)
    return out if out.stride(-1) == 1 else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def transposed(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(-1, -2)


def exact(q: Tensor, precision: str) -> str:
    """Of fp32 products: three of TF32 are as exact, and on the tensor cores."""
    return "tf32x3" if q.dtype == torch.float32 and precision == "ieee" else precision


def _matrices(state: Tensor | None) -> Tensor | None:
    """[BH, dk, dv] of [B, H, dk, dv], any strides."""
    return None if state is None else state.flatten(0, 1)


def _decay_strides(decay: Tensor | None) -> tuple[str, tuple[int, int, int]]:
    if decay is None:
        return "", (0, 0, 0)
    if decay.dim() == 1:
        return "head", (0, decay.stride(0), 0)
    return "token", decay.stride()


def _strongest(
    q: Tensor, decay: Tensor | None, chunk: int
) -> tuple[Tensor | None, tuple[bool, ...]]:
    """([B H], the logs of what the chunks that decay most keep, the kinds of heads to launch)."""
    if decay is None or q.dtype != torch.bfloat16:
        return None, (False,)
    batch, heads, tokens = q.shape[:3]
    strides = _decay_strides(decay)[1]
    strongest = torch.empty(batch * heads, dtype=torch.float32, device=q.device)
    wrap_triton(strongest_kernel)[(batch * heads,)](
        decay, strongest, tokens, heads, *strides, CHUNK=chunk, CHUNKS=16, num_warps=4
    )
    return strongest, (True, False)


def attend(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, out: Tensor, scale: float,
    start: Tensor | None, end: Tensor | None, chosen: Tiling, *, reverse: bool = False,
    precision: str = "ieee", states: Tensor | None = None,
    emitted: tuple[Tensor, Tensor] | None = None, anchors: Tensor | None = None,
    twice: bool = False,
) -> None:  # fmt: skip
    """The kernel's ``out`` [B, H, T, dv] of q, k [B, H, T, dk], v [B, H, T, dv].

    decay: None, [H] or [B, H, T]. start, end: [B, H, dk, dv] in fp32, any strides; in reverse they
    are gradients of the states, which have the scale in them. states [BH, chunks, dk, dv] is
    written forward and read in reverse, where ``anchors`` [tiles, BH, chunks] are. emitted: (w, E).
    """
    batch, heads, tokens, dk = q.shape
    dv = v.shape[-1]
    chosen = _fitted(chosen, dv)
    q, k, v = rows(q), rows(k), rows(v)
    start = _matrices(start)
    tiles = triton.cdiv(dv, chosen.block_v)
    chunks = triton.cdiv(tokens, chosen.chunk)
    many = batch * heads
    if not many:
        return
    segments, each = _segments(many * tiles, chunks, q.device, chosen.segments, twice)
    kind, decay_strides = _decay_strides(decay)
    factors = (1.0 / scale, scale) if reverse else (1.0, 1.0)
    constants = {
        "DECAYS": kind, "REVERSE": reverse, "PRECISION": exact(q, precision), "CHUNK": chosen.chunk,
        "BLOCK_K": max(16, triton.next_power_of_2(dk)), "BLOCK_V": chosen.block_v,
        "EVEN_K": dk == max(16, triton.next_power_of_2(dk)), "EVEN_V": dv % chosen.block_v == 0,
        "STAGES": chosen.stages, "num_warps": chosen.warps,
    }  # fmt: skip

    strongest, kinds = _strongest(q, decay, chosen.chunk)

    def launch(
        first: Tensor | None, last: Tensor | None, log: Tensor | None, segments: int,
        first_factor: float, last_factor: float, output: bool,
    ) -> None:  # fmt: skip
        """``first``, ``last``: [BH, segments or 1, dk, dv]."""
        w = emitted[0] if emitted and output else None
        for mild in kinds:
            wrap_triton(chunk_kernel)[(many * segments * tiles,)](
                q, k, v, out, decay, strongest, first, last, log, states if output else None, w,
                emitted[1] if emitted and output else None, anchors if output else None, tokens,
                heads, tiles, segments, each, scale, first_factor, last_factor, dk, dv,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
                *decay_strides, *strides(first, 4), *strides(last, 4), *strides(w, 3), MILD=mild,
                OUTPUT=output, STORE_FRONTS=output and states is not None and not reverse,
                EMIT=output and emitted is not None, ANCHOR=output and anchors is not None,
                **constants,
            )  # fmt: skip

    first = None if start is None else start.unsqueeze(1)
    # Only the last segment writes it.
    last = None if end is None else end.view(many, 1, *end.shape[2:]).expand(-1, segments, -1, -1)
    if segments == 1:
        launch(first, last, None, 1, *factors, True)
        return
    wide: Any = {"dtype": torch.float32, "device": q.device}
    local = torch.empty((many, segments - 1, dk, dv), **wide)
    fronts = torch.empty((many, segments, dk, dv), **wide)
    log = torch.empty((many, segments - 1), **wide) if kind else None
    launch(None, local, log, segments - 1, 1.0, 1.0, False)
    block = 256
    blocks = triton.cdiv(dk * dv, block)
    wrap_triton(between_segments_kernel)[(many * blocks,)](
        local, log, start, fronts, segments, blocks, dk * dv, dv, factors[0],
        *strides(start, 3), BLOCK=block, num_warps=2,
    )  # fmt: skip
    launch(fronts, last, None, segments, 1.0, factors[1], True)


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, start: Tensor | None, scale: float,
    precision: str, chunk: int = 0, chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state [B, H, dk, dv] in fp32); chunk: tokens of one, 0 to have it chosen."""
    dk, dv = q.shape[-1], v.shape[-1]
    chosen = chosen or tiling(
        q.dtype, dk, q.device, chunk, dv=dv, tokens=q.shape[2], heads=q.shape[0] * q.shape[1]
    )
    out, end = like(v), empty_state(q, dk, dv)
    attend(q, k, v, decay, out, scale, start, end, chosen, precision=precision, twice=True)
    return out, end


def backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, start: Tensor | None, scale: float,
    precision: str, chunk: int, do: Tensor, dend: Tensor | None, need_decay: bool,
    need_start: bool, chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, ddecay in fp32, dstart in fp32); dend: the gradient of the final state."""
    batch, heads, tokens, dk = q.shape
    dv = v.shape[-1]
    need_decay = need_decay and decay is not None
    wide = need_decay and q.dtype != torch.bfloat16
    chosen = chosen or backward_tiling(
        q.dtype, max(dk, dv), q.device, chunk, wide, tokens=tokens, heads=batch * heads
    )
    dq, dkeys, dvalues = like(q), like(k), like(v)
    dstart = empty_state(q, dk, dv) if need_start else None
    states = anchors = forth = back = None
    many, chunks = batch * heads, triton.cdiv(tokens, chosen.chunk)
    if need_decay:
        tiles = triton.cdiv(dk, _fitted(chosen, dk).block_v)
        kept = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        states = torch.empty((many, chunks, dv, dk), dtype=kept, device=q.device)
        anchors, forth, back = (
            torch.empty((tiles, many, n), dtype=torch.float32, device=q.device)
            for n in (chunks, tokens, tokens)
        )
    options: Any = {"precision": precision}
    attend(
        do, v, k, decay, dq, scale, transposed(start), None, chosen, states=states,
        emitted=None if forth is None else (rows(q), forth), **options,
    )  # fmt: skip
    options |= {"reverse": True}
    attend(
        v, do, q, decay, dkeys, scale, transposed(dend), transposed(dstart), chosen, states=states,
        emitted=None if back is None else (rows(k), back), anchors=anchors, **options,
    )  # fmt: skip
    attend(k, q, do, decay, dvalues, scale, dend, None, chosen, **options)
    ddecay = None
    if need_decay:
        assert decay is not None and anchors is not None
        ddecay = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
        if ddecay.numel():
            wrap_triton(decay_gradient_kernel)[(many * chunks,)](
                forth, back, anchors, ddecay, tokens, chunks, tiles, many * tokens, many * chunks,
                CHUNK=chosen.chunk, num_warps=2,
            )  # fmt: skip
        if decay.dim() == 1:
            ddecay = ddecay.sum((0, 2))
    return dq, dkeys, dvalues, ddecay, dstart
