"""Causal linear attention of torch functions, differentiable any number of times.

A chunk of tokens at a time, in fp32 (fp64 for fp64): what the kernels compute, for CPU tensors,
fp64, transforms of torch.func and gradients of gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops._composed import wide
from inductor_ext.ops._mhc_composed import without_autocast

_CHUNK, _CHUNK_OF_CHANNELS = 64, 16
_STRONGEST = -800.0  # e^-800 is 0 in fp64: a stronger decay is the same one, and infinity cancels


def per_channel(decay: Tensor | None, q: Tensor) -> Tensor | None:
    """[B, H, T, 1 or Dk] of a decay [H], [B, H, T] or [B, H, T, Dk]."""
    if decay is None:
        return None
    g = wide(decay).to(wide(q).dtype)
    g = torch.where(g < _STRONGEST, _STRONGEST, g)
    if g.dim() == 1:
        return g[None, :, None, None].expand(*q.shape[:3], 1)
    return g if g.dim() == 4 else g.unsqueeze(-1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state) of q, k [B, H, T, Dk], v [B, H, T, Dv]."""
    with without_autocast(q):
        return _attention(q, k, v, decay, initial_state, scale)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype, tokens = v.dtype, q.shape[2]
    q, k, v = wide(q) * scale, wide(k), wide(v)
    g = per_channel(decay, q)
    if initial_state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    else:
        state = initial_state.clone()
    chunk = _CHUNK if g is None or g.shape[-1] == 1 else _CHUNK_OF_CHANNELS
    out = []
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        found, state = _chunk(
            q[:, :, part], k[:, :, part], v[:, :, part],
            None if g is None else g[:, :, part], state,
        )  # fmt: skip
        out.append(found)
    whole = torch.cat(out, 2) if out else torch.zeros_like(v)
    return whole.to(dtype), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """(o, the state behind) of one chunk's tokens, with the state in front of them."""
    tokens = q.shape[2]
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    if g is None:
        scores = torch.where(mask, q @ k.transpose(-1, -2), 0.0)
        return scores @ v + q @ state, state + k.transpose(-1, -2) @ v
    # Sums of decays between two tokens, not differences of sums from the start: nothing cancels.
    between = torch.where(mask[..., None], _sums_between(g), 0.0).exp()
    if g.shape[-1] == 1:
        scores = (q @ k.transpose(-1, -2)) * between.squeeze(-1)
    else:
        scores = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, between)
    scores = torch.where(mask, scores, 0.0)
    out = scores @ v + (q * g.cumsum(2).exp()) @ state
    kept = g.sum(2).exp().unsqueeze(-1)
    return out, kept * state + (k * between[:, :, -1]).transpose(-1, -2) @ v


def _sums_between(g: Tensor) -> Tensor:
    """[..., i, j, d]: the sum of g over j < t <= i."""
    tokens = g.shape[2]
    above = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril(-1)
    steps = torch.where(above[..., None], g.unsqueeze(3), 0.0)  # [.., t, j, d]: g_t where t > j
    return steps.cumsum(2)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float, do: Tensor, dstate: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, ddecay, dinitial) by torch functions, also where autograd does not record."""
    given = [q, k, v, decay, initial_state]
    there = [t.detach() for t in given if t is not None]

    def again(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        left = iter(tensors)
        own: Any = [None if t is None else next(left) for t in given]
        return attention(own[0], own[1], own[2], own[3], own[4], scale)

    (out, state), pull = torch.func.vjp(again, *there)
    grads = iter(pull((do.to(out.dtype), torch.zeros_like(state) if dstate is None else dstate)))
    return tuple(None if t is None else next(grads) for t in given)
