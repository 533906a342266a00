"""``softmax`` and ``log_softmax`` of one dimension."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops._cross_entropy import check_dtype
from inductor_ext.ops._opaque import traced_op
from inductor_ext.ops._rows import beside, is_zero, kernels_apply
from inductor_ext.templates import class_softmax_launch as strided
from inductor_ext.templates import row_groups_launch as groups
from inductor_ext.templates import softmax as kernels
from inductor_ext.templates import softmax_split as split


@traced_op("inductor_ext::softmax_forward")
def _forward(x: Tensor, scale: float, log: bool) -> Tensor:
    if not kernels_apply(x):  # a program for a card that is run without one
        return _composed(x, scale, log)
    group = groups.takes(1, x)
    if group is not None:
        return groups.forward(x, scale, log, group)
    chosen = split if split.applies(x) else kernels
    return chosen.forward(x, scale, log)


@traced_op("inductor_ext::class_softmax_forward")
def _forward_strided(x: Tensor, scale: float, log: bool) -> Tensor:
    if not kernels_apply(x):
        return _composed(x, scale, log, 1)
    return strided.forward(x, scale, log)


@traced_op("inductor_ext::class_softmax_backward")
def _backward_strided(y: Tensor, g: Tensor, scale: float, log: bool) -> Tensor:
    if not kernels_apply(y):
        return _composed_gradient(y, g, scale, log, 1)
    return strided.backward(y, g, scale, log)


@traced_op("inductor_ext::softmax_backward")
def _backward(y: Tensor, g: Tensor, scale: float, log: bool) -> Tensor:
    if not kernels_apply(y):
        return _composed_gradient(y, g, scale, log)
    group = groups.takes(1 if log else 2, y, g)
    if group is not None:
        return groups.backward(y, g, scale, log, group)
    chosen = split if split.applies(y) else kernels
    return chosen.backward(y, g, scale, log)


def _composed(x: Tensor, scale: float, log: bool, dim: int = -1) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    z = wide if scale == 1.0 else wide * scale
    return (z.log_softmax(dim) if log else z.softmax(dim)).to(x.dtype)


def _composed_gradient(y: Tensor, g: Tensor, scale: float, log: bool, dim: int = -1) -> Tensor:
    wide, g = y.float(), g.float()
    if log:
        dx = g - wide.exp() * g.sum(dim, keepdim=True)
    else:
        dx = wide * (g - (wide * g).sum(dim, keepdim=True))
    return (dx * scale).to(y.dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.scale, ctx.log = inputs
    ctx.save_for_backward(output)


def _grad(ctx: Any, g: Any) -> Any:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled() or under_functorch():
        # For create_graph: differentiable by g and, through y, by x. And for batched gradients.
        return _composed_gradient(y, g, ctx.scale, ctx.log), None, None
    if g.stride(-1) != 1:
        g = g.contiguous()
    return _backward(y, g, ctx.scale, ctx.log), None, None


def _grad_strided(ctx: Any, g: Any) -> Any:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled() or under_functorch():
        return _composed_gradient(y, g, ctx.scale, ctx.log, 1), None, None
    return _backward_strided(y, g.contiguous(), ctx.scale, ctx.log), None, None


_forward.register_autograd(_grad, setup_context=_setup)
_forward_strided.register_autograd(_grad_strided, setup_context=_setup)


def softmax(x: Tensor, dim: int = -1, *, scale: float = 1.0) -> Tensor:
    """``p_j = e^(scale x_j) / sum_k e^(scale x_k)`` along ``dim``.

    Args:
        x: fp16, bf16, fp32 or fp64, any shape. All but fp64 have kernels on a card; the rest, and
            what runs under transforms of ``torch.func`` that are not compiled, is composed of torch
            functions. A dimension that is not the last is read as it lies if x is contiguous and
            there are enough places beside it, and brought to the end otherwise, which copies.
        dim: the dimension that is normalised.
        scale: > 0; the inverse of a temperature.

    Returns the shape and dtype of x, computed in fp32 (fp64 for fp64): one read and one write; the
    gradient two reads and one write. A row that is -inf throughout gives NaN, as in torch.
    Gradients of gradients are composed of torch functions. Deterministic.

    Raises ValueError or TypeError for what does not fit.
    """
    return _softmax(x, dim, scale, log=False)


def log_softmax(x: Tensor, dim: int = -1, *, scale: float = 1.0) -> Tensor:
    """``log p_j = scale x_j - log sum_k e^(scale x_k)`` along ``dim``; all else as ``softmax``."""
    return _softmax(x, dim, scale, log=True)


def _softmax(x: Tensor, dim: int, scale: float, log: bool) -> Tensor:
    check_dtype("x", x)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale is expected to be a positive number, got {scale}")
    if x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is expected in [{-x.dim()}, {x.dim()}), got {dim}")
    if is_zero(x.numel()):
        return x.clone()
    dim %= x.dim()
    if dim < x.dim() - 1 and x.is_contiguous():
        blocks = x.view(math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))
        if strided.applies(blocks) and kernels_apply(blocks):
            with beside(x):
                return _forward_strided(blocks, scale, log).view(x.shape)
    last = x.movedim(dim, -1)
    rows = last.reshape(-1, last.shape[-1])
    if kernels_apply(rows):
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        with beside(rows):
            out = _forward(rows, scale, log)
    else:
        out = _composed(rows, scale, log)
    return out.reshape(last.shape).movedim(-1, dim)
