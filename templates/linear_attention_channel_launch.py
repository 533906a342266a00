"""Launches of linear attention with a decay per channel: forward and backward.

A program runs through all tokens of a head for a tile of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from .linear_attention_channel import keyed_kernel, valued_kernel
from .linear_attention_launch import empty_state, exact, like, rows, strides, transposed

CHUNK = 16
EVERY = 4  # chunks between two states that are kept for the gradient of the decays


def _launch(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, out: Tensor, scale: float,
    start: Tensor | None, end: Tensor | None, *, extra: tuple[Any, ...] = (),
    more: tuple[Any, ...] = (), reverse: bool, precision: str, block: int, **constants: Any,
) -> None:  # fmt: skip
    """``kernel`` of q, k [B, H, T, dk], v, out [B, H, T, dv]; states [B, H, dk, dv], any strides.

    In reverse states are gradients, which have the scale in them.
    """
    heads, tokens, dk = q.shape[1:]
    dv = v.shape[-1]
    q, k, v, decay = rows(q), rows(k), rows(v), rows(decay)
    many = q.shape[0] * heads
    if not many:
        return
    first = None if start is None else start.flatten(0, 1)
    last = None if end is None else end.view(many, *end.shape[2:])
    block = min(block, max(16, triton.next_power_of_2(dv)))
    tiles = triton.cdiv(dv, block)
    factors = (1.0 / scale, scale) if reverse else (1.0, 1.0)
    wrap_triton(kernel)[(many * tiles,)](
        q, k, v, out, decay, first, last, *extra, tokens, heads, tiles, scale, *factors, dk, dv,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *decay.stride()[:3],
        *strides(first, 3), *strides(last, 3), *more, REVERSE=reverse,
        PRECISION=exact(q, precision), CHUNK=CHUNK, BLOCK_K=max(16, triton.next_power_of_2(dk)),
        BLOCK_V=block, **constants,
    )  # fmt: skip


def _keyed(*given: Any, **options: Any) -> None:
    q = given[0]
    part = min(32, max(16, triton.next_power_of_2(q.shape[-1])))
    block = 64 if _small(q) else 32
    _launch(keyed_kernel, *given, block=block, PART=part, num_warps=4, **options)


def _valued(
    *given: Any, w: Tensor | None = None, fronts: Tensor | None = None, e: Tensor | None = None,
    grad: Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    block = 32 if _small(given[0]) else 16
    _launch(
        valued_kernel, *given, extra=(fronts, w, e, grad), more=strides(w, 3), block=block,
        DIFFERENTIATE=w is not None, EVERY=EVERY, num_warps=4, **options,
    )  # fmt: skip


def _small(q: Tensor) -> bool:
    return q.element_size() == 2 and q.shape[-1] <= 128


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, scale: float,
    precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state [B, H, dk, dv] in fp32); decay: [B, H, T, dk]."""
    out, end = like(v), empty_state(q, q.shape[-1], v.shape[-1])
    _keyed(q, k, v, decay, out, scale, start, end, reverse=False, precision=precision)
    return out, end


def backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, start: Tensor | None, scale: float,
    precision: str, do: Tensor, dend: Tensor | None, need_decay: bool, need_start: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, ddecay in fp32, dstart in fp32); dend: the gradient of the final state."""
    batch, heads, tokens, dk = q.shape
    dv = v.shape[-1]
    dq, dkeys, dvalues = like(q), like(k), like(v)
    dstart = empty_state(q, dk, dv) if need_start else None
    ddecay = None
    forth: Any = {}
    back: Any = {}
    if need_decay:
        many, groups = batch * heads, triton.cdiv(triton.cdiv(tokens, CHUNK), EVERY)
        kept = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        fronts = torch.empty((many, groups, dv, dk), dtype=kept, device=q.device)
        wide: Any = {"dtype": torch.float32, "device": q.device}
        e = torch.empty((many, tokens, dk), **wide)
        ddecay = torch.empty((batch, heads, tokens, dk), **wide)
        forth = {"w": rows(q), "fronts": fronts, "e": e}
        back = {"w": rows(k), "fronts": fronts, "e": e, "grad": ddecay}
    given: Any = {"precision": precision}
    before, behind = transposed(start), transposed(dend)
    _valued(do, v, k, decay, dq, scale, before, None, reverse=False, **forth, **given)
    _valued(
        v, do, q, decay, dkeys, scale, behind, transposed(dstart), reverse=True, **back, **given
    )
    _keyed(k, q, do, decay, dvalues, scale, dend, None, reverse=True, **given)
    return dq, dkeys, dvalues, ddecay, dstart
