"""Manifold-constrained hyper-connections composed of torch functions, differentiable any number of
times: what the operations of ``_mhc`` compute where their kernels do not apply.

In fp32, fp64 where X is. Rounded once, at the end, to the dtype of X.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops._composed import wide


def shares(logits: Tensor, eps: float, powers: bool) -> Tensor:
    """Powers of e over their sums along the last axis; with ``powers`` over these plus eps."""
    if not powers or eps == 0.0:
        return logits.softmax(-1)
    peak = logits.detach().amax(-1, keepdim=True)
    found = torch.exp(logits - peak)
    return found / (found.sum(-1, keepdim=True) + eps * torch.exp(-peak))


def sinkhorn(logits: Tensor, iters: int, eps: float, powers: bool = False) -> Tensor:
    """[..., n, n]: ``shares``, without ``powers`` plus eps, columns, then rows and columns in
    turn."""
    comb = shares(wide(logits), eps, powers)
    comb = comb if powers else comb + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def projection(X: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """(W u [..., columns], sum of u^2 [...]) with u = vec(X), in torch's float32 precision."""
    u = wide(X).flatten(-2)
    with without_autocast(u):
        return u @ wide(W).mT.to(u.dtype), u.square().sum(-1)


def without_autocast(t: Tensor) -> Any:
    """A context in which products of fp32 tensors such as ``t`` are not rounded."""
    kind = t.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


def apply(X: Tensor, gates: Tensor) -> Tensor:
    """``sum_i gates_i X_i``."""
    return (wide(X) * gates.unsqueeze(-1)).sum(-2).to(X.dtype)


def normalised(mixes: Tensor, sqrsum: Tensor, size: int, rms_eps: float) -> Tensor:
    return mixes * torch.rsqrt(sqrsum / size + rms_eps).unsqueeze(-1)


def coefficients(
    z: Tensor, scale: Tensor, base: Tensor, n: int, iters: int, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(pre [..., n], post [..., n], comb [..., n, n]) of normalised mixes z [..., n (n + 2)]."""
    gates = torch.sigmoid(scale[0] * z[..., :n] + base[:n]) + pre_eps
    post = post_mult * torch.sigmoid(scale[1] * z[..., n : 2 * n] + base[n : 2 * n])
    logits = (scale[2] * z[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))
    return gates, post, sinkhorn(logits, iters, sinkhorn_eps, powers)


def from_mixes(
    mixes: Tensor, sqrsum: Tensor, X: Tensor, scale: Tensor, base: Tensor, iters: int,
    rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n = X.shape[-2]
    z = normalised(mixes, sqrsum, n * X.shape[-1], rms_eps)
    gates, post, comb = coefficients(
        z, scale, base, n, iters, pre_eps, sinkhorn_eps, post_mult, powers
    )
    return apply(X, gates), post, comb


def pre(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(U, post, comb, mixes, sqrsum)."""
    mixes, sqrsum = projection(X, W)
    U, post, comb = from_mixes(
        mixes, sqrsum, X, scale, base, iters, rms_eps, pre_eps, sinkhorn_eps, post_mult, powers
    )
    return U, post, comb, mixes, sqrsum


def post(X: Tensor, Y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``X'_j = post_j Y + sum_i comb[i, j] X_i``."""
    x, y, gates, c = wide(X), wide(Y), wide(post), wide(comb)
    total = gates.unsqueeze(-1) * y.unsqueeze(-2)
    for i in range(X.shape[-2]):  # no product, whose precision is a setting
        total = total + c[..., i, :, None] * x[..., i, None, :]
    return total.to(X.dtype)


def post_pre(
    X: Tensor, Y: Tensor, gates: Tensor, comb: Tensor, W: Tensor, scale: Tensor, base: Tensor,
    iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(X', U, post', comb', mixes', sqrsum')."""
    X1 = post(X, Y, gates, comb)
    return X1, *pre(X1, W, scale, base, iters, rms_eps, pre_eps, sinkhorn_eps, post_mult, powers)


def collapse(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(U, mixes, sqrsum)."""
    n = X.shape[-2]
    mixes, sqrsum = projection(X, W)
    z = normalised(mixes[..., :n], sqrsum, n * X.shape[-1], rms_eps)
    return apply(X, torch.sigmoid(scale * z + base) + pre_eps), mixes, sqrsum
