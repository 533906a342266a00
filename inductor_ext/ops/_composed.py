"""The operations composed of torch functions: on a CPU, for dtypes without kernels, and for
gradients of gradients. Computed in fp32 (fp64 for fp64), differentiable any number of times."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that it is computed in."""
    return x if x.dtype == torch.float64 else x.float()


def logits_of(x: Tensor, scale: float, softcap: float) -> Tensor:
    """``scale c tanh(x / c)``, or ``scale x`` where ``softcap`` is 0."""
    z = wide(x)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return z if scale == 1.0 else z * scale


def lse_of(z: Tensor) -> Tensor:
    """Log-sum-exp of rows whose gradient is 0, not NaN, where a row is -inf throughout."""
    empty = (z == -math.inf).all(-1)
    lse = torch.logsumexp(z.masked_fill(empty[:, None], 0.0), -1)
    return torch.where(empty, -math.inf, lse)


def rows_by_index(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, lse, class weight of the target, whether the row counts) of every row."""
    counts = target != ignore_index
    inside = (target >= 0) & (target < x.shape[1])
    torch._assert_async((inside | ~counts).all(), "a target is not in [0, number of classes)")
    counts = counts & inside
    t = torch.where(counts, target, 0).long()[:, None]
    z = logits_of(torch.where(counts[:, None], x, 0), scale, softcap)
    top = z.detach().amax(-1, keepdim=True)
    shifted = z - torch.where(top == -math.inf, 0, top)
    own = shifted.gather(1, t)[:, 0]
    margin = lse_of(shifted.scatter(1, t, -math.inf)) - own
    ce = F.softplus(margin, threshold=80.0)
    # A row without a softmax has no gradient either, at no column.
    none = ce.isnan()
    ce = torch.where(none, torch.where(none[:, None], z, 0).sum(-1) * math.nan, ce)
    w = torch.ones_like(ce) if weight is None else wide(weight)[t[:, 0]].to(ce.dtype)
    loss = (1.0 - smoothing) * w * ce
    if smoothing:
        all_w = torch.ones_like(z[0]) if weight is None else wide(weight).to(ce.dtype)
        each = ce[:, None] - (shifted - own[:, None])
        loss = loss + smoothing / x.shape[1] * (all_w * each).sum(-1)
    lse = ce + own + torch.where(top == -math.inf, 0, top)[:, 0]
    zero = torch.zeros_like(loss)
    return torch.where(counts, loss, zero), torch.where(counts, lse, zero), w, counts


def rows_by_distribution(
    x: Tensor, q: Tensor, weight: Tensor | None, smoothing: float, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """(loss, lse) of every row against probabilities."""
    z = logits_of(x, scale, softcap)
    top = z.detach().amax(-1, keepdim=True)
    shifted = z - torch.where(top == -math.inf, 0, top)
    q = wide(q).to(z.dtype)
    if smoothing:
        q = q * (1.0 - smoothing) + smoothing / x.shape[1]
    if weight is not None:
        q = q * weight.to(z.dtype)
    shifted_lse = torch.logsumexp(shifted, -1)
    lse = shifted_lse + torch.where(top == -math.inf, 0, top)[:, 0]
    return (q * (shifted_lse[:, None] - shifted)).sum(-1), lse


def rows_by_entries(
    x: Tensor, columns: Tensor, q: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """(loss, lse) of every row against ``q`` [N, K] at ``columns`` [N, K]; q = 0: no entry."""
    z = logits_of(x, scale, softcap)
    top = z.detach().amax(-1, keepdim=True)
    shifted = z - torch.where(top == -math.inf, 0, top)
    lse = torch.logsumexp(shifted, -1)
    used = q != 0
    at = shifted.gather(1, torch.where(used, columns, 0).long())
    each = torch.where(used, q.to(z.dtype) * (lse[:, None] - at), 0.0)
    return each.sum(-1), lse + torch.where(top == -math.inf, 0, top)[:, 0]


def reduced(
    loss: Tensor, lse: Tensor, of_ce: Any, of_z: Any, z_loss: float, counts: Tensor | None
) -> Tensor:
    """``loss of_ce + z_loss lse^2 of_z`` of every row that counts."""
    out = loss if of_ce is None else loss * of_ce
    if z_loss:
        penalty = z_loss * lse.square() * (1.0 if of_z is None else of_z)
        out = out + (penalty if counts is None else torch.where(counts, penalty, 0.0))
    return out
