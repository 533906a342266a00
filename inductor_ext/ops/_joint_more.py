"""Temporary: what ops/_joint.py does not hold yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inductor_ext.ops import _joint
from inductor_ext.ops._linear_cross_entropy import _empty_gradients


@torch.library.custom_op("inductor_ext::linear_rows_and_gradient", mutates_args=())
def linear_rows_and_gradient(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, a0: Tensor, a1: Tensor | None,
    b: Tensor, c: Tensor | None, wanted: Sequence[bool], memory: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x = torch.nn.functional.linear(h, w, bias)
    peak, total, below, dx = _joint._composed(x, target, a0, a1, b, c, scale, softcap)
    z = _joint.composed.logits_of(x, scale, softcap)
    has = (target >= 0) & (target < x.shape[1])
    picked = z.gather(1, torch.where(has, target, 0)[:, None])[:, 0]
    picked = torch.where(has, picked, 0.0)
    none = [w.new_empty(0) for _ in range(3)]
    dh = torch.mm(dx, w) if wanted[0] else none[0]
    dw = torch.mm(dx.t(), h) if wanted[1] else none[1]
    db = dx.sum(0, dtype=torch.float32).to(w.dtype) if wanted[2] else none[2]
    return peak, total, below, picked, dh, dw, db


@linear_rows_and_gradient.register_fake
def _(h, w, bias, target, a0, a1, b, c, wanted, memory, scale, softcap):
    rows = [h.new_empty(h.shape[0], dtype=torch.float32) for _ in range(4)]
    if c is None:
        rows[2] = h.new_empty(0, dtype=torch.float32)
    return *rows, *_empty_gradients(h, w, bias, wanted)


@torch.library.custom_op("inductor_ext::scaled_gradient", mutates_args=())
def scaled_gradient(made: Tensor, g: Tensor) -> Tensor:
    return (made * g.reshape(()).to(torch.float32)).to(made.dtype)


@scaled_gradient.register_fake
def _(made, g):
    return torch.empty_like(made)
