"""Gradients of the mHC operations, for the autograd formulas of ``_mhc``.

    z = r raw, r = rsqrt(sqrsum / K + rms_eps)         dz = s dlogit
    draw = r dz,  f = r^2 / K <dz, z>
    dX_i = pre_i dU + W_i^T draw - f X_i                dW = sum_t draw_t X_t^T
    dscale = sum dlogit z,  dbase = sum dlogit          dpre_i = <dU, X_i>

of pre, with streams i and tokens t, and of post

    dY = sum_j post_j dX1_j       dX_i = sum_j comb[i, j] dX1_j
    dpost_j = <dX1_j, Y>          dcomb[i, j] = <X_i, dX1_j>

Every gradient that comes in may be None, for zeros; every one that is returned has the dtype of its
input and was rounded once. Sums are made in a fixed order. Where kernels do not apply, all of it is
composed of torch functions, in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops._composed import wide
from inductor_ext.ops._mhc_composed import shares, without_autocast
from inductor_ext.ops._opaque import traced_op
from inductor_ext.ops._rows import is_zero
from inductor_ext.templates import mhc_post_backward as post_kernels
from inductor_ext.templates import mhc_pre_backward as pre_kernels
from inductor_ext.templates import mhc_sinkhorn_backward as sinkhorn_kernels

Grad: TypeAlias = Tensor | None


def kernels_apply(X: Tensor) -> bool:
    """Whether the kernels compute gradients of such a residual."""
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return X.is_cuda and X.dtype in kinds and shapes_apply(X)


def shapes_apply(X: Tensor) -> bool:
    """What the kernels ask besides a card and a dtype: elements, and no transform of torch.func."""
    return not under_functorch() and not is_zero(X.numel())


@traced_op("inductor_ext::mhc_pre_backward")
def _pre(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, mixes: Tensor, sqrsum: Tensor,
    dU: Tensor | None, dpost: Tensor | None, dcomb: Tensor | None, iters: int, rms_eps: float,
    pre_eps: float, sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return pre_kernels.backward(
        X, W, scale, base, mixes, sqrsum, None, dU, dpost, dcomb, iters, rms_eps, pre_eps,
        sinkhorn_eps, post_mult, powers,
    )  # fmt: skip


@traced_op("inductor_ext::mhc_post_backward")
def _post(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, dX1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return post_kernels.backward(X, Y, post, comb, dX1)


@traced_op("inductor_ext::mhc_post_pre_backward")
def _post_pre(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, X1: Tensor, W: Tensor, scale: Tensor,
    base: Tensor, mixes1: Tensor, sqrsum1: Tensor, dX1: Tensor | None, dU: Tensor | None,
    dpost1: Tensor | None, dcomb1: Tensor | None, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    total, *rest = pre_kernels.backward(
        X1, W, scale, base, mixes1, sqrsum1, dX1, dU, dpost1, dcomb1, iters, rms_eps, pre_eps,
        sinkhorn_eps, post_mult, powers,
    )  # fmt: skip
    return *post_kernels.backward(X, Y, post, comb, total), *rest


@traced_op("inductor_ext::mhc_collapse_backward")
def _collapse(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, mixes: Tensor, sqrsum: Tensor,
    dU: Tensor | None, dmixes: Tensor | None, dsqrsum: Tensor | None, rms_eps: float,
    pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return pre_kernels.backward(
        X, W, scale, base, mixes, sqrsum, None, dU, dmixes, dsqrsum, 1, rms_eps, pre_eps, 0.0, 1.0
    )


@traced_op("inductor_ext::sinkhorn_backward")
def _sinkhorn(
    logits: Tensor, dcomb: Tensor, iters: int, eps: float, powers: bool = False
) -> Tensor:
    return sinkhorn_kernels.sinkhorn_backward(logits, dcomb, iters, eps, powers)


def _flat(t: Tensor, kept: int) -> Tensor:
    """One dimension of tokens in front of the last ``kept``; any strides."""
    return t.reshape(-1, *t.shape[t.dim() - kept :])


def _dense(t: Grad, kept: int) -> Any:
    """As ``_flat``, contiguous."""
    return None if t is None else _flat(t, kept).contiguous()


def pre_backward(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, mixes: Tensor, sqrsum: Tensor,
    dU: Grad, dpost: Grad, dcomb: Grad, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dX, dW, dscale, dbase) of ``mhc_pre``.

    Args:
        X: [..., n, H]. W: [n (n + 2), n H]. scale: [3]. base: [n (n + 2)].
        mixes, sqrsum: [..., n (n + 2)] and [...], as the forward returned them.
        dU: [..., H]. dpost: [..., n]. dcomb: [..., n, n]. None for zeros.
    """
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult, powers
    if kernels_apply(X):
        dx, *rest = _pre(
            _dense(X, 2), W.contiguous(), scale.contiguous(), base.contiguous(), _dense(mixes, 1),
            _dense(sqrsum, 0), _dense(dU, 1), _dense(dpost, 1), _dense(dcomb, 2), *options,
        )  # fmt: skip
        return dx.reshape(X.shape), *rest
    dx, *rest = _composed_pre(X, W, scale, base, mixes, sqrsum, dU, dpost, dcomb, *options)
    return dx.to(X.dtype), *rest


def post_backward(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, dX1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dX, dY, dpost, dcomb) of ``mhc_post``.

    Args:
        X, dX1: [..., n, H]. Y: [..., H]. post: [..., n]. comb: [..., n, n], any strides.
    """
    if kernels_apply(X):
        found = _post(_dense(X, 2), _dense(Y, 1), _dense(post, 1), _flat(comb, 2), _dense(dX1, 2))
        return _shaped(found, X, Y, post, comb)
    return _composed_post(X, Y, post, comb, wide(dX1))


def post_pre_backward(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, X1: Tensor, W: Tensor, scale: Tensor,
    base: Tensor, mixes1: Tensor, sqrsum1: Tensor, dX1: Grad, dU: Grad, dpost1: Grad,
    dcomb1: Grad, iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float,
    post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dX, dY, dpost, dcomb, dW, dscale, dbase) of ``mhc_post_pre``.

    Args:
        X, Y, post, comb: the operands of post. X1: what post returned, [..., n, H].
        W, scale, base, mixes1, sqrsum1, dU, dpost1, dcomb1: of the pre that follows, whose operand
            is X1; as in ``pre_backward``.
        dX1: the gradient of X1 without its part through the pre, [..., n, H].

    The two parts of X1's gradient are added in fp32 and rounded once, to the dtype of X.
    """
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult, powers
    if kernels_apply(X):
        *found, dw, dscale, dbase = _post_pre(
            _dense(X, 2), _dense(Y, 1), _dense(post, 1), _flat(comb, 2), _dense(X1, 2),
            W.contiguous(), scale.contiguous(), base.contiguous(), _dense(mixes1, 1),
            _dense(sqrsum1, 0), _dense(dX1, 2), _dense(dU, 1), _dense(dpost1, 1),
            _dense(dcomb1, 2), *options,
        )  # fmt: skip
        return *_shaped(found, X, Y, post, comb), dw, dscale, dbase
    dx1, *rest = _composed_pre(X1, W, scale, base, mixes1, sqrsum1, dU, dpost1, dcomb1, *options)
    dx1 = dx1 if dX1 is None else dx1 + dX1
    return *_composed_post(X, Y, post, comb, dx1), *rest


def collapse_backward(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, mixes: Tensor, sqrsum: Tensor, dU: Grad,
    dmixes: Grad, dsqrsum: Grad, rms_eps: float, pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dX, dW, dscale, dbase) of ``mhc_collapse``, whose sums have gradients too.

    Args:
        X: [..., n, H]. W: [columns, n H]. scale: [1]. base: [n]. dU: [..., H].
        mixes, sqrsum: [..., columns] and [...], as the forward returned them; dmixes and dsqrsum
            their gradients. None for zeros.
    """
    options = rms_eps, pre_eps
    if kernels_apply(X):
        dx, *rest = _collapse(
            _dense(X, 2), W.contiguous(), scale.contiguous(), base.contiguous(), _dense(mixes, 1),
            _dense(sqrsum, 0), _dense(dU, 1), _dense(dmixes, 1), _dense(dsqrsum, 0), *options,
        )  # fmt: skip
        return dx.reshape(X.shape), *rest
    dx, *rest = _composed_collapse(X, W, scale, base, mixes, sqrsum, dU, dmixes, dsqrsum, *options)
    return dx.to(X.dtype), *rest


def sinkhorn_backward(
    logits: Tensor, dcomb: Tensor, iters: int, eps: float, powers: bool = False
) -> Tensor:
    """The gradient of ``logits`` [..., n, n] from that of ``sinkhorn(logits)``."""
    if kernels_apply(logits):
        dlogits = _sinkhorn(_dense(logits, 2), _dense(dcomb, 2), iters, eps, powers)
        return dlogits.reshape(logits.shape)
    found = _composed_sinkhorn(wide(logits), wide(dcomb), iters, eps, powers)
    return found.to(logits.dtype)


def _shaped(found: Any, *like: Tensor) -> Any:
    return tuple(t.reshape(own.shape) for t, own in zip(found, like, strict=True))


# --- composed of torch functions ------------------------------------------------------------------


def _composed_sinkhorn(
    logits: Tensor, dcomb: Tensor, iters: int, eps: float, powers: bool
) -> Tensor:
    p = shares(logits, eps, powers)
    c, steps = p if powers else p + eps, []
    for k in range(2 * iters - 1):
        axis = -2 if k % 2 == 0 else -1
        total = c.sum(axis, keepdim=True) + eps
        c = c / total
        steps.append((c, total, axis))
    for c, total, axis in reversed(steps):
        dcomb = (dcomb - (dcomb * c).sum(axis, keepdim=True)) / total
    return p * (dcomb - (dcomb * p).sum(-1, keepdim=True))


def _by_gates(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, z: Tensor, r: Tensor, dU: Tensor,
    pre: Tensor, columns: list[Tensor], dlogit: Tensor, dmixes: Grad = None, dsqrsum: Grad = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients from that of the logits; ``columns[k]`` counts those that scale[k] is for.
    W may have more columns than there are logits, where dmixes are the gradients of all."""
    n, hidden = X.shape[-2:]
    per_column = torch.cat([s.expand(len(c)) for s, c in zip(wide(scale), columns, strict=True)])
    dz = dlogit * per_column
    draw = torch.nn.functional.pad(r * dz, (0, W.shape[0] - dz.shape[-1]))
    norm = r * r / (n * hidden) * (dz * z).sum(-1, keepdim=True)
    if dmixes is not None:
        draw = draw + wide(dmixes)
    if dsqrsum is not None:
        norm = norm - 2 * wide(dsqrsum)[..., None]
    x = wide(X).flatten(-2)
    rows = draw.reshape(-1, draw.shape[-1])
    with without_autocast(X):
        dx = draw @ wide(W) - norm * x
        dw = rows.mT @ x.reshape(-1, n * hidden)
    dx = dx.unflatten(-1, (n, hidden)) + pre[..., None] * dU[..., None, :]
    by_column = (dlogit * z).reshape(-1, z.shape[-1]).sum(0)
    dscale = torch.stack([by_column[c].sum() for c in columns])
    dbase = dlogit.reshape(-1, z.shape[-1]).sum(0)
    return dx, dw.to(W.dtype), dscale.to(scale.dtype), dbase.to(base.dtype)


def _composed_pre(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, mixes: Tensor, sqrsum: Tensor,
    dU: Grad, dpost: Grad, dcomb: Grad, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``pre_backward``, dX not rounded."""
    n, hidden = X.shape[-2:]
    lead = X.shape[:-2]
    columns = list(torch.arange(n * (n + 2), device=X.device).split([n, n, n * n]))
    r = torch.rsqrt(wide(sqrsum)[..., None] / (n * hidden) + rms_eps)
    z = wide(mixes) * r
    s, b = wide(scale), wide(base)
    gate = torch.sigmoid(s[0] * z[..., :n] + b[:n])
    post = torch.sigmoid(s[1] * z[..., n : 2 * n] + b[n : 2 * n])
    logits = (s[2] * z[..., 2 * n :] + b[2 * n :]).unflatten(-1, (n, n))
    dU = _or_zeros(dU, z, (*lead, hidden))
    dpost = _or_zeros(dpost, z, (*lead, n))
    dcomb = _or_zeros(dcomb, z, (*lead, n, n))
    dpre = (dU[..., None, :] * wide(X)).sum(-1)
    dlogit = torch.cat(
        [
            dpre * gate * (1 - gate),
            post_mult * dpost * post * (1 - post),
            _composed_sinkhorn(logits, dcomb, iters, sinkhorn_eps, powers).flatten(-2),
        ],
        -1,
    )
    return _by_gates(X, W, scale, base, z, r, dU, gate + pre_eps, columns, dlogit)


def _composed_collapse(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, mixes: Tensor, sqrsum: Tensor, dU: Grad,
    dmixes: Grad, dsqrsum: Grad, rms_eps: float, pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, hidden = X.shape[-2:]
    r = torch.rsqrt(wide(sqrsum)[..., None] / (n * hidden) + rms_eps)
    z = wide(mixes)[..., :n] * r
    gate = torch.sigmoid(wide(scale) * z + wide(base))
    dU = _or_zeros(dU, z, (*X.shape[:-2], hidden))
    dlogit = (dU[..., None, :] * wide(X)).sum(-1) * gate * (1 - gate)
    columns = [torch.arange(n, device=X.device)]
    given = dU, gate + pre_eps, columns, dlogit, dmixes, dsqrsum
    return _by_gates(X, W, scale, base, z, r, *given)


def _composed_post(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, dX1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Sums, no matrix products, whose precision is a setting.
    c, streams = wide(comb), range(X.shape[-2])
    dx = torch.stack([(c[..., i, :, None] * dX1).sum(-2) for i in streams], -2)
    dy = (wide(post)[..., None] * dX1).sum(-2)
    dpost = (dX1 * wide(Y)[..., None, :]).sum(-1)
    dcomb = torch.stack([(wide(X) * dX1[..., j, None, :]).sum(-1) for j in streams], -1)
    return dx.to(X.dtype), dy.to(Y.dtype), dpost.to(post.dtype), dcomb.to(comb.dtype)


def _or_zeros(grad: Grad, like: Tensor, shape: Any) -> Tensor:
    return like.new_zeros(shape) if grad is None else wide(grad)
