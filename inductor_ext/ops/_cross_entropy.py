"""``cross_entropy``: every option of ``F.cross_entropy``, and what trainers add."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops import _dtensor, _rows, _shards

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of ``z = scale c tanh(logits / c)`` (``scale logits`` without a softcap).

        loss_n = sum_j q_nj (lse_n - z_nj) + z_loss lse_n^2        lse_n = log sum_j e^(z_nj)

    with q as ``torch.nn.functional.cross_entropy`` has it: of class indices, w_t (1 - eps) at the
    target and w_j eps / C everywhere; of probabilities t_j, w_j (t_j (1 - eps) + eps / C). "mean"
    divides the sum by the sum of w_t of the rows that count (of probabilities: by their number),
    and the z-loss by the number of rows that count.

    Args:
        logits: [C], [N, C] or [N, C, d1, ...]; fp16, bf16, fp32 or fp64. Where the classes are not
            the last dimension they are brought there, which copies. Rows may have any stride.
        target: class indices, int32 or int64, in the shape of logits without C; or probabilities
            in the shape of logits, in any floating dtype, and without a gradient.
        weight: [C], of each class; floating, and without a gradient.
        ignore_index: rows with this target are not read, add nothing, and have the gradient 0.
            Negative beside probabilities, which have no rows to ignore.
        reduction: "mean", "sum" or "none".
        label_smoothing: eps, in [0, 1].
        softcap: c > 0, in units of logits.
        scale: > 0; the inverse of a temperature.
        z_loss: factor of lse^2; not weighted by class.
        return_lse: return ``(loss, lse)``; lse has the rows' shape, is fp32 (fp64 for fp64), is 0
            where a row is ignored, and is differentiable.
        group: a ``torch.distributed.ProcessGroup`` over which the classes lie, in the order of its
            ranks. logits and weight are this rank's classes, of any number, also none; C is the
            number of all. target is of class indices among all, and the same on every rank: where
            it is not, the loss is inf or NaN as soon as no rank, or more than one, has the class
            that it was given for a row.

    With a group every rank has the same loss and lse, bit for bit, and must use them alike: the
    gradient is that of one loss, for this rank's logits. Ranks exchange a few numbers of each row,
    and before that one number each, which tells where their classes begin; all must come to the
    exchange, so that an error on one rank leaves the others waiting. Other rows, dtypes or options
    on another rank are a ValueError, or an assertion on the device if that is a card. There are no
    gradients of gradients (RuntimeError).

    logits may be a DTensor on a mesh of one dimension, sharded on the dimension of classes or
    replicated. The group is then the mesh's, and nothing is exchanged of where classes begin;
    target is a plain tensor or replicated; weight is plain and whole, replicated, or sharded as the
    classes are; results are replicated DTensors; the gradient is placed as logits are. Other
    placements are a ValueError.

    Returns the loss in the dtype of logits; with "none" in the shape of the rows. Computed in fp32
    (fp64 for fp64), from one read of the logits; the gradient from one read and one write. Without
    a group, with "mean" and "sum", the gradient of bf16 and fp32 logits is made in the forward, if
    one is wanted, while a row is on the chip, and kept beside the logits until the backward, which
    raises if the logits were changed in place since. Gradients of gradients are composed of torch
    functions, as is everything on a CPU, in fp64, and under transforms of ``torch.func`` that are
    not compiled. Deterministic; nothing waits for the card. If no row counts, or there is none: as
    in torch, "mean" is NaN, "sum" and "none" are 0.

    Raises ValueError or TypeError for what does not fit. A target outside [0, C) that is not
    ``ignore_index`` fails an assertion on the device, as in torch.
    """
    check_options(reduction, label_smoothing, softcap, scale, z_loss)
    if _dtensor.is_dtensor(logits):
        dim = 0 if logits.dim() == 1 else 1
        x, others, shard, wrap = _dtensor.taken_apart(
            "logits are", logits, dim, {"target": target}, group
        )
        weight = _dtensor.own_weight(weight, shard, logits.device_mesh)
        target = others["target"]
    else:
        _dtensor.without("logits are", {"target": target, "weight": weight})
        x, shard, wrap = logits, _shards.shard_of(group), None
    out = _plain_cross_entropy(
        x, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss,
        return_lse, shard,
    )  # fmt: skip
    return out if wrap is None else wrap(out)


def _plain_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str,
    label_smoothing: float, softcap: float | None, scale: float, z_loss: float, return_lse: bool,
    shard: _shards.Shard | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    _check_tensors(logits, target, weight, ignore_index)
    if logits.dim() == 1:
        by_class, rows_shape = logits[None], ()
    else:
        by_class = logits.movedim(1, -1)
        rows_shape = tuple(by_class.shape[:-1])
    x = by_class.reshape(math.prod(rows_shape), by_class.shape[-1])
    kind, index, probabilities = _rows.INDEX, None, None
    if shard is not None and target.is_floating_point():
        raise TypeError(
            f"target is expected to be int32 or int64 where the classes are sharded, got "
            f"{target.dtype}"
        )
    if target.is_floating_point():
        kind = _rows.DENSE
        probabilities = target[None] if target.dim() == 1 else target.movedim(1, -1)
        probabilities = probabilities.detach().reshape(x.shape)
        if probabilities.stride(1) != 1:
            probabilities = probabilities.contiguous()
    else:
        index = target.reshape(-1).contiguous()  # the kernels know no stride of it
    loss = _rows.Loss(
        kind, ignore_index, label_smoothing, scale, softcap or 0.0, z_loss, reduction == "mean"
    )
    weight = None if weight is None else weight.detach().contiguous()
    if shard is None and reduction != "none" and not return_lse:
        return _rows.loss_with_gradient(loss, x, index, probabilities, weight).to(logits.dtype)
    if shard is None:
        losses, lse = _rows.losses_of(loss, x, index, probabilities, weight)
    else:
        assert index is not None
        losses, lse = _shards.losses_of(loss, x, index, weight, shard)
    out = losses.reshape(rows_shape) if reduction == "none" else _rows.total_of(losses, loss.mean)
    out = out.to(logits.dtype)
    return (out, lse.reshape(rows_shape)) if return_lse else out


def check_options(
    reduction: str, label_smoothing: float, softcap: float | None, scale: float, z_loss: float
) -> None:
    """Raise ValueError unless each is in its range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction is expected to be "mean", "sum" or "none", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is expected in [0, 1], got {label_smoothing}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is expected to be a positive number or None, got {softcap}")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale is expected to be a positive number, got {scale}")
    if not -math.inf < z_loss < math.inf:
        raise ValueError(f"z_loss is expected to be a finite number, got {z_loss}")


def _check_tensors(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> None:
    check_dtype("logits", logits)
    if logits.dim() == 0:
        raise ValueError("logits are expected to have a dimension of classes, got a scalar")
    classes = logits.shape[0 if logits.dim() == 1 else 1]
    check_placed("target", target, logits)
    if target.is_floating_point():
        check_constant("target", target)
        if ignore_index >= 0:
            raise ValueError(
                f"ignore_index is expected to be negative beside probabilities, got {ignore_index}"
            )
        if target.shape != logits.shape:
            raise ValueError(
                f"probabilities are expected in the shape of logits, {tuple(logits.shape)}, got "
                f"{tuple(target.shape)}"
            )
    elif target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target is expected to be int32, int64 or floating, got {target.dtype}")
    else:
        rows = () if logits.dim() == 1 else (logits.shape[0], *logits.shape[2:])
        if tuple(target.shape) != tuple(rows):
            raise ValueError(
                f"class indices are expected in the shape {tuple(rows)}, got {tuple(target.shape)}"
            )
    check_weight(weight, classes, logits)


def check_weight(weight: Tensor | None, classes: Any, like: Tensor) -> None:
    """Raise unless ``weight`` is None or a floating [classes] beside ``like``."""
    if weight is None:
        return
    check_placed("weight", weight, like)
    check_constant("weight", weight)
    if not weight.is_floating_point() or weight.dim() != 1 or weight.shape[0] != classes:
        raise ValueError(
            f"weight is expected to be floating of shape ({classes},), got {weight.dtype} of shape "
            f"{tuple(weight.shape)}"
        )


def check_placed(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raise unless ``tensor`` is on the device of ``like``."""
    if tensor.device != like.device:
        raise ValueError(f"{name} is expected on {like.device}, got one on {tensor.device}")


def check_constant(name: str, tensor: Tensor) -> None:
    """Raise where a gradient of ``tensor`` is wanted, which would silently be missing."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} is expected without a gradient, got one that requires it")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` has a dtype that the operations compute on."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} is expected as fp16, bf16, fp32 or fp64, got {tensor.dtype}")
