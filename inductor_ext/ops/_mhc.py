"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed by learned coefficients.

    u = vec(X)    r = rsqrt(sum(u^2) / (n H) + rms_eps)    z = r (W u)    columns: pre | post | comb
    pre  = sigmoid(s0 z + b) + pre_eps       post = post_mult sigmoid(s1 z + b)
    comb = Sinkhorn(s2 z + b)
    U    = sum_i pre_i X_i                   X'_j = post_j Y + sum_i comb[i, j] X_i

of the DeepSeek-V4 form (arXiv 2512.24880 has the idea). The operations carry their own gradients,
so that autograd and the passes over graphs see one node each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat_launch
from inductor_ext.compat import float32_precision, in_aot_mode
from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _mhc_backward as backward
from inductor_ext.ops import _mhc_checks as checks
from inductor_ext.ops import _mhc_composed as composed
from inductor_ext.ops._opaque import opaque_op, traced_op
from inductor_ext.templates import mhc_gluon_launch as boundary
from inductor_ext.templates import mhc_post as post_kernels
from inductor_ext.templates import mhc_pre as pre_kernels
from inductor_ext.templates.mhc_layout import dense

_FAR = 1 << 23


def kernels_apply(X: Tensor) -> bool:
    """Whether kernels compute on such a residual: on a card, not fp64, under no transform of
    torch.func, none of which knows the operations."""
    return X.is_cuda and X.dtype != torch.float64 and not under_functorch()


# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::mhc_pre_of_any_size")
def _pre_of_any_size(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, precision: str, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mhc_pre`` of X [T, n, H], for programs that do not know T: how the kernels cut their
    work depends on it."""
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if not kernels_apply(X):
        return composed.pre(X, W, scale, base, *options, powers)
    return pre_kernels.pre(X, W, scale, base, *options, precision, powers=powers)


@_pre_of_any_size.register_fake
def _(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, precision: str, powers: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    return pre_kernels.results(X, W.shape[0])


@opaque_op("inductor_ext::mhc_post_pre_of_any_size")
def _post_pre_of_any_size(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, W: Tensor, scale: Tensor, base: Tensor,
    iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    precision: str, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mhc_post_pre`` of X [T, n, H]; no tracer knows the kernel for many tokens."""
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if not boundary.pays(X) or not boundary.aligned(X, Y, W):
        X1 = post_kernels.post(X, Y, post, comb)
        return X1, *pre_kernels.pre(X1, W, scale, base, *options, precision, powers)
    X1, p = boundary.post_and_partials(X, Y, post, comb, W, precision)
    return X1, *pre_kernels.fuse(X1, p, dense(scale), dense(base), *options, powers=powers)


@_post_pre_of_any_size.register_fake
def _(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, W: Tensor, scale: Tensor, base: Tensor,
    iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    precision: str, powers: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(X), *pre_kernels.results(X, W.shape[0])


@opaque_op("inductor_ext::mhc_collapse_of_any_size")
def _collapse_of_any_size(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mhc_collapse`` of X [T, n, H], likewise."""
    if not kernels_apply(X):
        return composed.collapse(X, W, scale, base, rms_eps, pre_eps)
    return pre_kernels.collapse(X, W, scale, base, rms_eps, pre_eps, precision)


@_collapse_of_any_size.register_fake
def _(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float,
    precision: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return pre_kernels.results(X, W.shape[0], head=True)


def _pre_of(X: Tensor, powers: bool, *given: Any) -> Any:
    """(U, post, comb, mixes, sqrsum) of X [T, n, H] by kernels."""
    if not isinstance(X.shape[0], int):
        return _pre_of_any_size(X, *given, float32_precision(), powers)
    with _launching(X):
        return pre_kernels.pre(X, *given, float32_precision(), powers)


@traced_op("inductor_ext::mhc_pre")
def _pre(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    checks.check_pre(X, W, scale, base, iters, rms_eps, pre_eps, sinkhorn_eps, post_mult)
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if not kernels_apply(X):
        return composed.pre(X, W, scale, base, *options, powers)
    return _leading(X.shape[:-2], _pre_of(_tokens(X, 2), powers, W, scale, base, *options))


@traced_op("inductor_ext::mhc_pre_from_mixes")
def _from_mixes(
    mixes: Tensor, sqrsum: Tensor | None, X: Tensor, scale: Tensor, base: Tensor, iters: int,
    rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if not kernels_apply(X):
        return _composed_from_mixes(mixes, sqrsum, X, scale, base, *options, powers)
    sums = mixes.contiguous(), None if sqrsum is None else sqrsum.contiguous()
    with _launching(X):
        found = pre_kernels.from_mixes(*sums, _tokens(X, 2), scale, base, *options, powers)
    return _leading(X.shape[:-2], found[:3])


@traced_op("inductor_ext::mhc_post")
def _post(X: Tensor, Y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    checks.check_post(X, Y, post, comb)
    if not kernels_apply(X):
        return composed.post(X, Y, post, comb)
    with _launching(X):
        found = post_kernels.post(_tokens(X, 2), _tokens(Y, 1), _small(post, 1), _small(comb, 2))
    return found.reshape(X.shape)


@traced_op("inductor_ext::mhc_post_pre")
def _post_pre(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, W: Tensor, scale: Tensor, base: Tensor,
    iters: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    checks.check_post(X, Y, post, comb)
    checks.check_pre(X, W, scale, base, iters, rms_eps, pre_eps, sinkhorn_eps, post_mult)
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    if not kernels_apply(X):
        return composed.post_pre(X, Y, post, comb, W, scale, base, *options, powers)
    operands = _tokens(X, 2), _tokens(Y, 1), _small(post, 1), _small(comb, 2)
    many = not isinstance(operands[0].shape[0], int) or boundary.pays(operands[0])
    if many and not in_aot_mode() and boundary.applies(operands[0], operands[1], W):
        found = _post_pre_of_any_size(
            *operands, W, scale, base, *options, float32_precision(), powers
        )
        return found[0].reshape(X.shape), *_leading(X.shape[:-2], found[1:])
    with _launching(X):
        X1 = post_kernels.post(*operands)
    found = _pre_of(X1, powers, W, scale, base, *options)
    return X1.reshape(X.shape), *_leading(X.shape[:-2], found)


@traced_op("inductor_ext::mhc_collapse")
def _collapse(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    checks.check_collapse(X, W, scale, base, rms_eps, pre_eps)
    if not kernels_apply(X):
        return composed.collapse(X, W, scale, base, rms_eps, pre_eps)
    given = _tokens(X, 2), W, scale, base, rms_eps, pre_eps, float32_precision()
    if not isinstance(given[0].shape[0], int) and not in_aot_mode():
        return _leading(X.shape[:-2], _collapse_of_any_size(*given))
    with _launching(X):
        return _leading(X.shape[:-2], pre_kernels.collapse(*given))


@traced_op("inductor_ext::sinkhorn")
def _sinkhorn(logits: Tensor, iters: int, eps: float, powers: bool = False) -> Tensor:
    if not kernels_apply(logits):
        return _rounded_sinkhorn(logits, iters, eps, powers)
    n = logits.shape[-1]
    with _launching(logits):
        found = pre_kernels.sinkhorn(logits.reshape(-1, n, n), iters, eps, powers)
    return found.reshape(logits.shape)


def _tokens(t: Tensor, kept: int) -> Tensor:
    """One dimension of tokens in front of the last ``kept``, of which the last is dense.

    128 tokens are within 31 bits, as the kernels ask.
    """
    flat = t.reshape(-1, *t.shape[t.dim() - kept :])
    far = any(isinstance(s, int) and s >= _FAR for s in flat.stride())
    return flat if flat.stride(-1) == 1 and not far else flat.contiguous()


def _launching(X: Tensor) -> Any:
    """Where nothing traces the operation its kernels are launched directly, each dependent on the
    one before."""
    plain = type(X) in (Tensor, torch.nn.Parameter) and X.is_cuda
    return compat_launch.direct_launches() if plain else contextlib.nullcontext()


def _small(t: Tensor, kept: int) -> Tensor:
    return t.reshape(-1, *t.shape[t.dim() - kept :])  # any strides


def _leading(lead: Any, found: Any) -> Any:
    return tuple(t.reshape((*lead, *t.shape[1:])) for t in found)


# --- gradients ------------------------------------------------------------------------------------


def _composed_gradients(fn: Callable[..., Any], tensors: Any, options: Any, grads: Any) -> Any:
    """Those of ``fn(*tensors, *options)`` as differentiable functions, for ``create_graph``."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Nodes of their own: differentiating an input itself would run through what made it.
        own = [t.view_as(t) for t in tensors]
        own = [t if t.requires_grad else t.detach().requires_grad_() for t in own]
        outputs = fn(*own, *options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if g is not None]
        return torch.autograd.grad(
            [o for o, _ in pairs], own, [g.to(o.dtype) for o, g in pairs], create_graph=again,
            allow_unused=True,
        )  # fmt: skip


def _differentiable() -> bool:
    return torch.is_grad_enabled() or under_functorch()


def _setup_pre(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _grad_pre(ctx: Any, dU: Any, dpost: Any, dcomb: Any, *_: Any) -> Any:
    saved, none = ctx.saved_tensors, (None,) * len(ctx.options)
    if dU is None and dpost is None and dcomb is None:
        return (None,) * 4 + none
    if _differentiable():
        grads = _composed_gradients(composed.pre, saved[:4], ctx.options, (dU, dpost, dcomb))
    else:
        given: Any = (*saved, dU, dpost, dcomb, *ctx.options)
        grads = backward.pre_backward(*given)
    return (*grads, *none)


_pre.register_autograd(_grad_pre, setup_context=_setup_pre)


def _setup_from_mixes(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = inputs[5:]
    ctx.save_for_backward(*inputs[:5])
    ctx.set_materialize_grads(False)


def _grad_from_mixes(ctx: Any, *grads: Any) -> Any:
    mixes, sqrsum, *others = ctx.saved_tensors
    none = (None,) * len(ctx.options)
    if all(g is None for g in grads):
        return (None,) * 5 + none
    if sqrsum is None:
        dmixes, *rest = _composed_gradients(
            lambda m, *more: _composed_from_mixes(m, None, *more), (mixes, *others), ctx.options,
            grads,
        )  # fmt: skip
        return (dmixes, None, *rest, *none)
    found = _composed_gradients(_composed_from_mixes, (mixes, sqrsum, *others), ctx.options, grads)
    return (*found, *none)


_from_mixes.register_autograd(_grad_from_mixes, setup_context=_setup_from_mixes)


def _composed_from_mixes(
    mixes: Tensor, sqrsum: Tensor | None, X: Tensor, scale: Tensor, base: Tensor, *options: Any
) -> Any:
    total = composed.wide(X).square().sum((-2, -1)) if sqrsum is None else sqrsum.sum(0)
    whole = mixes.sum(0).reshape(*X.shape[:-2], mixes.shape[-1])
    return composed.from_mixes(whole, total.reshape(X.shape[:-2]), X, scale, base, *options)


def _setup_post(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _grad_post(ctx: Any, dX1: Any) -> Any:
    if _differentiable():
        return _composed_gradients(composed.post, ctx.saved_tensors, (), (dX1,))
    given: Any = (*ctx.saved_tensors, dX1)
    return backward.post_backward(*given)


_post.register_autograd(_grad_post, setup_context=_setup_post)


def _setup_post_pre(ctx: Any, inputs: Any, output: Any) -> None:
    X, Y, post, comb, W, scale, base, *ctx.options = inputs
    X1, _, _, _, mixes, sqrsum = output
    ctx.save_for_backward(X, Y, post, comb, X1, W, scale, base, mixes, sqrsum)
    ctx.mark_non_differentiable(mixes, sqrsum)
    ctx.set_materialize_grads(False)


def _grad_post_pre(ctx: Any, dX1: Any, dU: Any, dpost: Any, dcomb: Any, *_: Any) -> Any:
    saved, none = ctx.saved_tensors, (None,) * len(ctx.options)
    X, Y, post, comb, _, W, scale, base, _, _ = saved
    given = dX1, dU, dpost, dcomb
    if all(g is None for g in given):
        return (None,) * 7 + none
    if _differentiable():
        inputs = X, Y, post, comb, W, scale, base
        return (*_composed_gradients(composed.post_pre, inputs, ctx.options, given), *none)
    if dU is None and dpost is None and dcomb is None:
        return (*backward.post_backward(X, Y, post, comb, dX1), None, None, None, *none)
    everything: Any = (*saved, *given, *ctx.options)
    return (*backward.post_pre_backward(*everything), *none)


_post_pre.register_autograd(_grad_post_pre, setup_context=_setup_post_pre)


def _setup_collapse(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.set_materialize_grads(False)


def _grad_collapse(ctx: Any, dU: Any, dmixes: Any, dsqrsum: Any) -> Any:
    saved, none = ctx.saved_tensors, (None, None)
    grads = dU, dmixes, dsqrsum
    if all(g is None for g in grads):
        return (None,) * 4 + none
    if _differentiable():
        return (*_composed_gradients(composed.collapse, saved[:4], ctx.options, grads), *none)
    given: Any = (*saved, *grads, *ctx.options)
    return (*backward.collapse_backward(*given), *none)


_collapse.register_autograd(_grad_collapse, setup_context=_setup_collapse)


def _setup_sinkhorn(ctx: Any, inputs: Any, output: Any) -> None:
    logits, *ctx.options = inputs
    ctx.save_for_backward(logits)


def _grad_sinkhorn(ctx: Any, dcomb: Any) -> Any:
    (logits,) = ctx.saved_tensors
    if _differentiable():
        (found,) = _composed_gradients(_rounded_sinkhorn, (logits,), ctx.options, (dcomb,))
        return found, None, None, None
    return backward.sinkhorn_backward(logits, dcomb, *ctx.options), None, None, None


_sinkhorn.register_autograd(_grad_sinkhorn, setup_context=_setup_sinkhorn)


def _rounded_sinkhorn(logits: Tensor, *options: Any) -> Tensor:
    return composed.sinkhorn(logits, *options).to(logits.dtype)
