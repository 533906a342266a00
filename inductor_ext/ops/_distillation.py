"""``sparse_distillation_loss``: cross entropy against a teacher's top-k log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inductor_ext.ops import _rows
from inductor_ext.ops._cross_entropy import (
    check_constant,
    check_dtype,
    check_options,
    check_placed,
)


def sparse_distillation_loss(
    logits: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    target: Tensor | None = None,
    *,
    target_logprob: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """``-sum_k w_k log p[id_k]``, p = softmax(scale logits), w the teacher's renormalised top-k.

        w = e^logprobs / sum e^logprobs       dlogits = scale (p sum_k w_k - scatter(w))

    Args:
        logits: [N, V]; fp16, bf16, fp32 or fp64.
        ids: [N, K], int32 or int64, the columns the teacher gives. Repeated ones add up.
        logprobs: [N, K], floating: the teacher's natural logarithms, without a gradient; -inf is an
            unused entry, whose id may be anything. A row without used entries, and without a target
            to insert, counts for nothing and is 0.
        target: [N], int32 or int64, or None: the true class. Where it is not among a row's used
            entries it is inserted with ``target_logprob`` before the weights are renormalised;
            where it is ``ignore_index`` the row counts for nothing and is 0.
        target_logprob: logarithm of what an inserted target weighs before renormalisation, beside
            the teacher's: 0 is a probability of 1.
        reduction: "mean" over the rows that count (NaN if none does), "sum" or "none".
        softcap, scale: as in ``cross_entropy``.

    Returns the loss in the dtype of logits. One read of the logits; the gradient one read and one
    write without an [N, V] temporary and without atomics, by the logits only. More than 128 entries
    a row, CPU tensors, fp64 and gradients of gradients are composed of torch functions.
    Deterministic; nothing waits for the card.

    Raises ValueError or TypeError for what does not fit. Ids or targets outside [0, V) fail an
    assertion on the device.
    """
    check_options(reduction, 0.0, softcap, scale, 0.0)
    if not target_logprob < math.inf:
        raise ValueError(f"target_logprob is expected below infinity, got {target_logprob}")
    _check(logits, ids, logprobs, target)
    columns, used, counts = ids, logprobs.float() > -torch.inf, None
    weights = logprobs.detach().float()
    if target is not None:
        own = target[:, None].to(ids.dtype)
        counts = target != ignore_index
        missing = ~((ids == own) & used).any(1)
        inserted = torch.where(missing, target_logprob, -torch.inf)[:, None]
        columns = torch.cat([ids, torch.where(counts[:, None], own, 0)], 1)
        weights = torch.cat([weights, inserted], 1)
        used = weights > -torch.inf
    inside = (columns >= 0) & (columns < logits.shape[1])
    if counts is not None:
        inside = inside | ~counts[:, None]
    torch._assert_async(
        (inside | ~used).all(), "an id or a target is not in [0, number of columns)"
    )
    valid = used & inside
    # A row without a used entry has NaN weights, which would count as entries at any column.
    q = torch.where(valid, torch.where(valid, weights, -torch.inf).softmax(1), 0.0)
    if counts is not None:
        q = torch.where(counts[:, None], q, 0.0)
    loss = _rows.Loss(_rows.SPARSE, scale=scale, softcap=softcap or 0.0)
    columns, q = columns.contiguous(), q.contiguous()
    if reduction == "none":
        return _rows.losses_of(loss, logits, columns, q, None)[0].to(logits.dtype)
    if reduction == "mean":
        counts = (q != 0).any(1)
        q = torch.where(q != 0, q / counts.sum(), 0.0)
    total = _rows.loss_with_gradient(loss, logits, columns, q, None)
    if reduction == "mean" and counts is not None:
        total = torch.where(counts.any(), total, torch.nan)
    return total.to(logits.dtype)


def _check(logits: Tensor, ids: Tensor, logprobs: Tensor, target: Tensor | None) -> None:
    check_dtype("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits are expected as [N, V], got {tuple(logits.shape)}")
    for name, tensor in (("ids", ids), ("logprobs", logprobs), ("target", target)):
        if tensor is None:
            continue
        check_placed(name, tensor, logits)
        if name == "logprobs":
            check_constant(name, tensor)
            if not tensor.is_floating_point() or tensor.shape != ids.shape:
                raise ValueError(
                    f"logprobs are expected to be floating of shape {tuple(ids.shape)}, got "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        elif tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is expected to be int32 or int64, got {tensor.dtype}")
        elif tensor.dim() != (2 if name == "ids" else 1) or tensor.shape[0] != logits.shape[0]:
            wanted = f"({logits.shape[0]}, K)" if name == "ids" else f"({logits.shape[0]},)"
            raise ValueError(f"{name} is expected as {wanted}, got {tuple(tensor.shape)}")
