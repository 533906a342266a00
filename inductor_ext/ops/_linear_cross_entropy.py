"""``linear_cross_entropy``: cross entropy of ``h Wᵀ + bias`` whose logits are never kept whole.

The rows go in chunks. A chunk's logits are one matrix product into a buffer, over which the
cross-entropy kernel writes their gradient; two more products make of it the chunk's part of the
gradients of h and W. W's parts are added in fp32 and rounded once. With one chunk the library's own
accumulation is that sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat_runtime
from inductor_ext.ops import _dtensor, _linear_shards, _rows, _shards
from inductor_ext.ops._cross_entropy import (
    REDUCTIONS,
    check_dtype,
    check_options,
    check_placed,
    check_weight,
)
from inductor_ext.ops._linear_chunks import MEMORY, by_chunks, computing, empty_gradients
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import Loss, composed_losses, scaled
from inductor_ext.templates import cross_entropy_launch as launch


@opaque_op("inductor_ext::linear_cross_entropy_with_gradient")
def _with_gradient(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None,
    wanted: Sequence[bool], memory: int, ignore_index: int, smoothing: float, scale: float,
    softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, dh, dW, db) for an incoming gradient of 1; empty where it is not ``wanted``."""
    loss = Loss(_rows.INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    counts = launch.count(loss, target, weight, h.shape[0], w.shape[0], h)

    def visit(part: slice, x: Tensor) -> Tensor:
        return launch.forward_backward(loss, x, target[part], None, weight, counts, dx=x)[0]

    losses, gradients = by_chunks(h, w, bias, wanted, memory, visit)
    return torch.cat(losses).sum(), *gradients


@_with_gradient.register_fake
def _(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Any, wanted: Sequence[bool],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return h.new_empty((), dtype=torch.float32), *empty_gradients(h, w, bias, wanted)


@opaque_op("inductor_ext::linear_cross_entropy_forward")
def _forward(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None, memory: int,
    ignore_index: int, smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(losses [N], lse [N], statistics [4, N], counts [2, 1])."""
    loss = Loss(_rows.INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    counts = launch.count(loss, target, weight, h.shape[0], w.shape[0], h)
    # Of a shape that does not hang on the number of rows, which is symbolic in a compiled program.
    counts = counts.sum(1, keepdim=True)

    def visit(part: slice, x: Tensor) -> Any:
        return launch.forward(loss, x, target[part], None, weight, counts=counts)[:3]

    results, _ = by_chunks(h, w, bias, (False, False, False), memory, visit)
    losses, lse, stats = (torch.cat(r, -1) for r in zip(*results, strict=True))
    return losses, lse, stats, counts


@_forward.register_fake
def _(h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *_: Any) -> Any:
    rows = h.shape[0]
    counts = h.new_empty((2, 1), dtype=torch.float32)
    stats = h.new_empty((launch.STATISTICS, rows), dtype=torch.float32)
    return *(h.new_empty(rows, dtype=torch.float32) for _ in range(2)), stats, counts


@opaque_op("inductor_ext::linear_cross_entropy_backward")
def _backward(
    g: Tensor, g_lse: Tensor | None, h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor,
    weight: Tensor | None, stats: Tensor, counts: Tensor, wanted: Sequence[bool], memory: int,
    ignore_index: int, smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dh, dW, db), empty where it is not ``wanted``; the logits are made once more."""
    loss = Loss(_rows.INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)

    def visit(part: slice, x: Tensor) -> None:
        own_lse = None if g_lse is None else g_lse[part]
        saved = stats[:, part].contiguous()
        launch.backward(loss, g[part], own_lse, x, target[part], None, weight, saved, counts, dx=x)

    return by_chunks(h, w, bias, wanted, memory, visit)[1]


@_backward.register_fake
def _(
    g: Tensor, g_lse: Any, h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Any,
    stats: Tensor, counts: Tensor, wanted: Sequence[bool], *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(h, w, bias, wanted)


# --- autograd -------------------------------------------------------------------------------------


def _composed(loss: Loss, h: Tensor, w: Tensor, bias: Any, target: Tensor, weight: Any) -> Any:
    with computing(h):
        x = torch.nn.functional.linear(h, w, bias)
    return composed_losses(loss, x, target, None, weight)


def _of_gradients(ctx: Any, tensors: Any, g: Any, g_lse: Any) -> Any:
    """Gradients of h, w and bias composed of torch functions: for ``create_graph``, of which they
    are differentiable, and under transforms. None for what wants none."""
    h, w, bias, target, weight = tensors
    again = torch.is_grad_enabled()
    wants = ctx.needs_input_grad[:3]
    with torch.enable_grad():
        own: list[Any] = [None if t is None else t.view_as(t) for t in (h, w, bias)]
        outputs = _composed(Loss(_rows.INDEX, *ctx.options), own[0], own[1], own[2], target, weight)
        pairs = [(o, d) for o, d in zip(outputs, (g, g_lse), strict=True) if d is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs], [t for t, want in zip(own, wants, strict=True) if want],
            [d.to(o.dtype) for o, d in pairs], create_graph=again,
        )  # fmt: skip
    left = iter(found)
    return tuple(next(left) if want else None for want in wants)


def _setup_with_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    h, w, bias, target, weight, _, _, *ctx.options = inputs
    ctx.save_for_backward(h, w, bias, target, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or the backward is handed zero gradients of dh and dW


def _grad_with_gradient(ctx: Any, g: Any, *_: Any) -> Any:
    *tensors, dh, dw, db = ctx.saved_tensors
    rest = (None,) * (4 + len(ctx.options))
    if g is None:
        return (None, None, None, *rest)
    if torch.is_grad_enabled():
        return (*_of_gradients(ctx, tensors, g.expand(tensors[0].shape[0]), None), *rest)
    made = zip((dh, dw, db), ctx.needs_input_grad[:3], strict=True)
    return (*(scaled(t, g) if want else None for t, want in made), *rest)


def _setup_forward(ctx: Any, inputs: Any, output: Any) -> None:
    h, w, bias, target, weight, ctx.memory, *ctx.options = inputs
    ctx.save_for_backward(h, w, bias, target, weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _grad_forward(ctx: Any, g: Any, g_lse: Any, *_: Any) -> Any:
    *tensors, stats, counts = ctx.saved_tensors
    rest = (None,) * (3 + len(ctx.options))
    if g is None and g_lse is None:
        return (None, None, None, *rest)
    if torch.is_grad_enabled() or compat_runtime.under_functorch():
        return (*_of_gradients(ctx, tensors, g, g_lse), *rest)
    if g is None:
        g = torch.zeros(1, device=stats.device).expand(stats.shape[1])
    wanted = [bool(want) for want in ctx.needs_input_grad[:3]]
    made = _backward(g, g_lse, *tensors, stats, counts, wanted, ctx.memory, *ctx.options)
    return (*(t if want else None for t, want in zip(made, wanted, strict=True)), *rest)


_with_gradient.register_autograd(_grad_with_gradient, setup_context=_setup_with_gradient)
_forward.register_autograd(_grad_forward, setup_context=_setup_forward)


# --- the function ---------------------------------------------------------------------------------


def linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    memory: int = MEMORY,
    group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``cross_entropy(h wᵀ + bias, target, ...)`` of which one chunk of logits exists at a time.

    Args:
        h: [..., H]; w: [V, H]; bias: [V] or None; one dtype, bf16, fp16 or fp32 for the kernels.
        target: class indices in the shape of h without H, int32 or int64.
        weight ... return_lse: as in ``cross_entropy``.
        memory: bytes that the logits of a chunk, and the fp32 gradient of w if there are several
            chunks, may take. A chunk has 1024 rows at least, whatever this says.
        group: as in ``cross_entropy``: w, bias and weight are of this rank's classes, h and target
            are the same on every rank. The gradient of h is summed over the group in fp32 (fp64 for
            fp64) before it is rounded; every rank must want it, or none. Logits that do not fit
            into one chunk are made twice, also on a CPU, which keeps none here. w may also be a
            DTensor on a mesh of one dimension, sharded on dimension 0 or replicated; bias is
            placed as w is, h and target are plain or replicated.

    Returns the loss in the dtype of h; with ``return_lse`` the pair (loss, lse). Logits are rounded
    to the dtype of h, as by a linear layer. Gradients of h, w and bias; w's and the bias's are
    added up in fp32 and rounded once to their dtype. With "mean" and "sum" they are made in the
    forward, if any of them is wanted, and kept for the backward, which multiplies them by the
    incoming gradient (rounded once more if that is not a power of two). What wants no gradient
    costs no product. fp16, "none" and ``return_lse`` make the logits again in the backward. CPU
    tensors, fp64, gradients of gradients and transforms of ``torch.func`` that are not compiled are
    composed of torch functions and keep all logits. An autocast changes nothing. Deterministic as
    far as the library's matrix products are; nothing waits for the card. A new number of rows does
    not recompile. If no row counts, or there is none, "mean" is NaN, "sum" and "none" are 0.

    Raises ValueError or TypeError for what does not fit.
    """
    check_options(reduction, label_smoothing, softcap, scale, z_loss)
    if reduction not in REDUCTIONS or memory <= 0:
        raise ValueError(f"memory is expected to be a positive number of bytes, got {memory}")
    loss = Loss(
        _rows.INDEX, ignore_index, label_smoothing, scale, softcap or 0.0, z_loss,
        reduction == "mean",
    )  # fmt: skip
    if not _dtensor.is_dtensor(w):
        _dtensor.without("w is", {"h": h, "target": target, "bias": bias, "weight": weight})
        shard = _shards.shard_of(group)
        return _plain(loss, h, w, target, bias, weight, reduction, return_lse, memory, shard)
    own, others, shard, wrap = _dtensor.taken_apart("w is", w, 0, {"h": h, "target": target}, group)
    bias = _dtensor.own_part("bias", bias, shard, w.device_mesh)
    weight = _dtensor.own_weight(weight, shard, w.device_mesh)
    h, target = others["h"], others["target"]
    return wrap(_plain(loss, h, own, target, bias, weight, reduction, return_lse, memory, shard))


def _plain(
    loss: Loss, h: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None,
    reduction: str, return_lse: bool, memory: int, shard: _shards.Shard | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    _check(h, w, bias, target, weight)
    rows_shape = h.shape[:-1]
    # The kernels know no stride of the targets; H may be 0, so that the rows are counted.
    flat, index = h.reshape(target.numel(), h.shape[-1]), target.reshape(-1).contiguous()
    weight = None if weight is None else weight.detach().contiguous()
    options = _shards.options_of(loss)
    grad = torch.is_grad_enabled()
    wanted = [grad and t is not None and t.requires_grad for t in (h, w, bias)]
    one = reduction != "none" and not return_lse and any(wanted) and h.dtype != torch.float16
    if shard is not None:
        args = (loss, flat, w, bias, index, weight, wanted, memory, shard)
        if one:
            total = _linear_shards.total_with_gradient(*args)
            return _rows.total_of(total, loss.mean, flat.shape[0]).to(h.dtype)
        losses, lse = _linear_shards.losses_of(*args)
    elif not _rows.kernels_apply(w.t()[:1]):
        losses, lse = _composed(loss, flat, w, bias, index, weight)
    elif one:
        with _rows.beside(flat):
            total, *_ = _with_gradient(flat, w, bias, index, weight, wanted, memory, *options)
        return _rows.total_of(total, loss.mean, flat.shape[0]).to(h.dtype)
    else:
        with _rows.beside(flat):
            losses, lse, *_ = _forward(flat, w, bias, index, weight, memory, *options)
    out = losses.reshape(rows_shape) if reduction == "none" else _rows.total_of(losses, loss.mean)
    out = out.to(h.dtype)
    return (out, lse.reshape(rows_shape)) if return_lse else out


def _check(h: Tensor, w: Tensor, bias: Any, target: Tensor, weight: Any) -> None:
    check_dtype("h", h)
    if h.dim() < 1 or w.dim() != 2 or h.shape[-1] != w.shape[1]:
        raise ValueError(
            f"h is expected as [..., H] and w as [V, H], got {tuple(h.shape)} and {tuple(w.shape)}"
        )
    for name, tensor in (("w", w), ("bias", bias), ("target", target)):
        if tensor is not None:
            check_placed(name, tensor, h)
            if name != "target" and tensor.dtype != h.dtype:
                raise TypeError(
                    f"{name} is expected in the dtype of h, {h.dtype}, got {tensor.dtype}"
                )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != w.shape[0]):
        raise ValueError(f"bias is expected as ({w.shape[0]},), got {tuple(bias.shape)}")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target is expected to be int32 or int64, got {target.dtype}")
    if target.shape != h.shape[:-1]:
        raise ValueError(f"target is expected as {tuple(h.shape[:-1])}, got {tuple(target.shape)}")
    check_weight(weight, w.shape[0], h)
