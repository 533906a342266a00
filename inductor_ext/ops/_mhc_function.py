"""mHC as functions: what the operations of ``_mhc`` compute, for any program."""

from __future__ import annotations

import math

from torch import Tensor

from inductor_ext.ops import _mhc as operations
from inductor_ext.ops import _mhc_checks as checks
from inductor_ext.ops import _mhc_composed as composed
from inductor_ext.ops._rows import beside

MOST_PARTIALS = 16


def _weighted(X: Tensor, W: Tensor, norm_weight: Tensor | None) -> Tensor:
    """W with the columns of ``norm_weight`` multiplied in, in the wider of the two dtypes."""
    if norm_weight is None:
        return W
    checks.check_residual(X)
    checks.check(
        "norm_weight", norm_weight, (X.shape[-2] * X.shape[-1],), X, checks.wide_or_bf16(X)
    )
    return W * norm_weight


def mhc_pre(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, *, iters: int = 20, rms_eps: float = 1e-6,
    pre_eps: float = 1e-6, sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
    norm_weight: Tensor | None = None, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer's input and its coefficients from the residual streams.

        u = vec(X)    r = rsqrt(sum(u^2) / (n H) + rms_eps)    z = r (W u)
        pre  = sigmoid(scale[0] z_pre + base_pre) + pre_eps             U = sum_i pre_i X_i
        post = post_mult sigmoid(scale[1] z_post + base_post)
        comb = sinkhorn(scale[2] z_comb + base_comb)

    Args:
        X: [..., n, H], n = 2, 4 or 8, bf16, fp16, fp32 or fp64, the last dimension dense, else
            it is copied. fp64, CPU tensors and what runs under transforms of ``torch.func`` that
            are not compiled are composed of torch functions.
        W: [n (n + 2), n H] fp32 or bf16; rows pre | post | comb, comb row by row as [in, out].
        scale: [3]. base: [n (n + 2)]. fp32. (All of them fp64 for fp64.)
        iters: rounds of Sinkhorn, 1 or more; ``sinkhorn`` has them.
        rms_eps, pre_eps, sinkhorn_eps: 0 or more.
        norm_weight: [n H] fp32 or bf16, the weight of the norm: multiplies the columns of W.
        powers: how Sinkhorn begins, as for ``sinkhorn``.

    Returns U [..., H] in the dtype of X, rounded once from fp32, post [..., n] and comb
    [..., n, n] in fp32. The product with W has the precision of torch's float32 matmul setting.
    Gradients of all inputs; those of gradients are composed. No tokens are fine. Deterministic, and
    a token's results have the same bits among any number of up to 1024 tokens, and among any larger
    number.

    Raises ValueError or TypeError for what does not fit.
    """
    W = _weighted(X, W, norm_weight)
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    checks.check_pre(X, W, scale, base, *options)
    if not operations.kernels_apply(X):
        return composed.pre(X, W, scale, base, *options, powers)[:3]
    with beside(X):
        return operations._pre(X, W, scale, base, *options, powers)[:3]


def mhc_pre_from_mixes(
    mixes: Tensor, sqrsum: Tensor | None, X: Tensor, scale: Tensor, base: Tensor, *,
    iters: int = 20, rms_eps: float = 1e-6, pre_eps: float = 1e-6, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What follows the projection in ``mhc_pre``, for who brings a projection of their own.

    Args:
        mixes: [S, T, n (n + 2)] fp32, parts of W u, that is without r; S = 1 to 16 are summed.
        sqrsum: [S, T] fp32, parts of sum(u^2); None computes it from X, which is another read.
        X: [..., n, H] of T tokens. scale, base and the rest: as for ``mhc_pre``.

    Returns (U, post, comb) as ``mhc_pre``. Gradients of all tensors, composed of torch functions.
    Deterministic.

    Raises ValueError or TypeError for what does not fit.
    """
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    checks.check_gates(X, scale, base, *options)
    n = X.shape[-2]
    tokens = math.prod(X.shape[:-2])
    if mixes.dim() != 3 or not 1 <= mixes.shape[0] <= MOST_PARTIALS:
        raise ValueError(
            f"mixes is expected as [S, T, {n * (n + 2)}] with S = 1 to {MOST_PARTIALS}, got "
            f"{list(mixes.shape)}"
        )
    checks.check("mixes", mixes, (mixes.shape[0], tokens, n * (n + 2)), X)
    if sqrsum is not None:
        checks.check("sqrsum", sqrsum, (mixes.shape[0], tokens), X)
    if not operations.kernels_apply(X):
        return operations._composed_from_mixes(mixes, sqrsum, X, scale, base, *options, powers)
    with beside(X):
        return operations._from_mixes(mixes, sqrsum, X, scale, base, *options, powers)


def mhc_post(X: Tensor, Y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The residual streams behind a layer: ``X'_j = post_j Y + sum_i comb[i, j] X_i``.

    Args:
        X: [..., n, H], as for ``mhc_pre``. Y: [..., H] in the dtype of X, the layer's output.
        post: [..., n], comb: [..., n, n] as [in, out], fp32 or bf16, of any strides: a transposed
            comb is a view.

    Returns X' in shape and dtype of X, computed in fp32 and rounded once: one read of X and Y, one
    write. Gradients of all inputs; those of gradients are composed. Deterministic.

    Raises ValueError or TypeError for what does not fit.
    """
    checks.check_post(X, Y, post, comb)
    if not operations.kernels_apply(X):
        return composed.post(X, Y, post, comb)
    with beside(X):
        return operations._post(X, Y, post, comb)


def mhc_post_pre(
    X: Tensor, Y: Tensor, post: Tensor, comb: Tensor, W: Tensor, scale: Tensor, base: Tensor, *,
    iters: int = 20, rms_eps: float = 1e-6, pre_eps: float = 1e-6, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0, norm_weight: Tensor | None = None, powers: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``mhc_post`` of one layer and ``mhc_pre`` of the next: (X', U, post', comb').

    X' is rounded to the dtype of X before it is projected. Arguments, determinism and errors
    are those of the two functions; the gradient adds up in fp32 what comes to X' from both sides.
    On Hopper, from 2^24 / H tokens of 4 streams in bf16 on, X' is projected where it is made: U,
    post' and comb' have bits of their own there, the same among any number of so many tokens.
    """
    W = _weighted(X, W, norm_weight)
    options = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult
    checks.check_post(X, Y, post, comb)
    checks.check_pre(X, W, scale, base, *options)
    if not operations.kernels_apply(X):
        return composed.post_pre(X, Y, post, comb, W, scale, base, *options, powers)[:4]
    with beside(X):
        return operations._post_pre(X, Y, post, comb, W, scale, base, *options, powers)[:4]


def mhc_collapse(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float = 1e-6,
    pre_eps: float = 1e-6, norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A layer's input, and columns of which coefficients of any other form can be made.

        z = r (W u) as in ``mhc_pre``
        U = sum_i (sigmoid(scale z_i + base_i) + pre_eps) X_i  of the first n columns

    Args:
        X: [..., n, H]. W: [columns, n H], n to 80 columns. scale: [1]. base: [n], the pre gates'.
            The rest as for ``mhc_pre``.

    Returns U [..., H] in the dtype of X and all of z [..., columns] in fp32. Gradients, precision,
    determinism and errors as for ``mhc_pre``; of few columns or many, each has the same bits.
    """
    W = _weighted(X, W, norm_weight)
    options = rms_eps, pre_eps
    checks.check_collapse(X, W, scale, base, *options)
    if not operations.kernels_apply(X):
        U, mixes, sqrsum = composed.collapse(X, W, scale, base, *options)
    else:
        with beside(X):
            U, mixes, sqrsum = operations._collapse(X, W, scale, base, *options)
    return U, composed.normalised(mixes, sqrsum, X.shape[-2] * X.shape[-1], rms_eps)


def mhc_head(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float = 1e-6,
    pre_eps: float = 1e-6, norm_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The model's output from its residual streams: the pre gates alone.

    Args:
        X: [..., n, H]. W: [n, n H]. scale: [1]. base: [n]. The rest as for ``mhc_pre``.

    Returns ``U = sum_i (sigmoid(scale z_i + base_i) + pre_eps) X_i`` [..., H] in the dtype of X.
    Gradients, precision, determinism and errors as for ``mhc_pre``.
    """
    W = _weighted(X, W, norm_weight)
    checks.check_head(X, W, scale, base, rms_eps, pre_eps)
    if not operations.kernels_apply(X):
        return composed.collapse(X, W, scale, base, rms_eps, pre_eps)[0]
    with beside(X):
        return operations._collapse(X, W, scale, base, rms_eps, pre_eps)[0]


def sinkhorn(logits: Tensor, *, iters: int = 20, eps: float = 1e-6, powers: bool = False) -> Tensor:
    """A nearly doubly stochastic matrix: ``softmax(logits)``, columns and rows normalised in turn.

        C = softmax over the last axis + eps;   C = C / (column sums + eps)
        iters - 1 times:   C = C / (row sums + eps);   C = C / (column sums + eps)

    Args:
        logits: [..., n, n], n = 2, 4 or 8, fp16, bf16, fp32 or fp64.
        iters: 1 or more. eps: 0 or more.
        powers: begin with exp(logits) / (its row sums + eps), in place of the softmax + eps.

    Returns C in shape and dtype of the logits, computed in fp32 (fp64 for fp64), with a gradient.
    Deterministic. Raises ValueError or TypeError for what does not fit.
    """
    checks.check_residual(logits)
    if logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits is expected as [..., n, n], got {list(logits.shape)}")
    checks.check_iters(iters)
    checks.check_number("eps", eps)
    if not operations.kernels_apply(logits):
        return operations._rounded_sinkhorn(logits, iters, eps, powers)
    with beside(logits):
        return operations._sinkhorn(logits, iters, eps, powers)
