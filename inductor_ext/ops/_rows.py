"""Cross entropy of rows as torch operations: loss and lse of logits [N, V], and their gradients.

``Loss`` says what is summed over a row. ``losses_of`` is differentiable; where the loss is a mean
or a sum, ``loss_with_gradient`` makes the gradient in the forward, so that the logits are read
once. Where the kernels do not apply, both are composed of torch functions.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from inductor_ext import compat_runtime
from inductor_ext.ops import _composed as composed
from inductor_ext.ops._opaque import traced_op
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates.cross_entropy_launch import DENSE, INDEX, NONE, SPARSE, Loss

__all__ = ["DENSE", "INDEX", "NONE", "SPARSE", "Loss", "loss_with_gradient", "losses_of"]

_SPARSE_LIMIT = 128  # entries of a row: the gradient compares each with each


def kernels_apply(x: Tensor, entries: Any = 0) -> bool:
    """Whether the kernels compute on rows such as ``x``'s."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    return shapes_apply(x, entries)


def shapes_apply(x: Tensor, entries: Any = 0) -> bool:
    """What the kernels ask besides a card and a dtype: two columns at least, not too many entries
    in a row, and no transform of torch.func, none of which knows the operations."""
    columns = x.shape[1]
    if compat_runtime.under_functorch():
        return False
    if isinstance(columns, int) and columns < 2:
        return False
    return not (isinstance(entries, int) and entries > _SPARSE_LIMIT)


def composed_losses(
    loss: Loss, x: Tensor, target: Tensor | None, q: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N]) by torch functions, differentiable any number of times."""
    z_of: Any = None
    ce_of: Any = None
    counts = None
    if loss.kind == INDEX:
        assert target is not None
        rows, lse, w, counts = composed.rows_by_index(
            x, target, weight, loss.ignore_index, loss.smoothing, loss.scale, loss.softcap
        )
        if loss.mean:
            ce_of = 1.0 / torch.where(counts, w, 0.0).sum()
            z_of = 1.0 / counts.sum()
    elif loss.kind == DENSE:
        assert q is not None
        rows, lse = composed.rows_by_distribution(
            x, q, weight, loss.smoothing, loss.scale, loss.softcap
        )
    elif loss.kind == SPARSE:
        assert not loss.mean  # the caller has it in q
        assert target is not None and q is not None
        entries = (q != 0).any(1)
        counts = entries
        x = torch.where(entries[:, None], x, 0)
        rows, lse = composed.rows_by_entries(x, target, q, loss.scale, loss.softcap)
        lse = torch.where(entries, lse, 0.0)
    else:
        z = composed.logits_of(x, loss.scale, loss.softcap)
        lse = torch.logsumexp(z, -1)
        rows = torch.zeros_like(lse)
    if loss.mean and loss.kind != INDEX:
        ce_of = z_of = 1.0 / torch.full((), x.shape[0], dtype=rows.dtype, device=x.device)
    out = composed.reduced(rows, lse, ce_of, z_of, loss.z_loss, counts)
    if loss.mean and counts is not None:
        # 0/0 where nothing counts: NaN in the sum, but nothing in the gradient.
        out = torch.where(counts, out, 0.0 * torch.where(counts.any(), 0.0, torch.nan))
    return out, lse


def _loss(
    kind: int, ignore_index: int, smoothing: float, scale: float, softcap: float, z_loss: float,
    mean: bool,
) -> Loss:  # fmt: skip
    return Loss(kind, ignore_index, smoothing, scale, softcap, z_loss, mean)


def unpacked(loss: Loss) -> tuple[int, int, float, float, float, float, bool]:
    """A loss as the operations are told of it."""
    return (
        loss.kind, loss.ignore_index, loss.smoothing, loss.scale, loss.softcap, loss.z_loss,
        loss.mean,
    )  # fmt: skip


@traced_op("inductor_ext::cross_entropy_forward")
def _forward(
    x: Tensor, target: Tensor | None, q: Tensor | None, weight: Tensor | None, kind: int,
    ignore_index: int, smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss = _loss(kind, ignore_index, smoothing, scale, softcap, z_loss, mean)
    return launch.forward(loss, x, target, q, weight)


@traced_op("inductor_ext::cross_entropy_backward")
def _backward(
    g: Tensor, g_lse: Tensor | None, x: Tensor, target: Tensor | None, q: Tensor | None,
    weight: Tensor | None, stats: Tensor, counts: Tensor, kind: int, ignore_index: int,
    smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> Tensor:  # fmt: skip
    loss = _loss(kind, ignore_index, smoothing, scale, softcap, z_loss, mean)
    return launch.backward(loss, g, g_lse, x, target, q, weight, stats, counts)


@traced_op("inductor_ext::cross_entropy_forward_backward")
def _forward_backward(
    x: Tensor, target: Tensor | None, q: Tensor | None, weight: Tensor | None, kind: int,
    ignore_index: int, smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = _loss(kind, ignore_index, smoothing, scale, softcap, z_loss, mean)
    losses, dx = launch.forward_backward(loss, x, target, q, weight)
    return losses.sum(), dx


def _composed_gradient(loss: Loss, saved: Any, g: Tensor | None, g_lse: Tensor | None) -> Tensor:
    """The gradient as a differentiable function, for ``create_graph`` and under transforms."""
    x, target, q, weight = saved
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # A node of its own: differentiating x itself would run through what made it.
        own = x.view_as(x)
        outputs = composed_losses(loss, own, target, q, weight)
        pairs = [(o, d) for o, d in zip(outputs, (g, g_lse), strict=True) if d is not None]
        wanted = [d.to(o.dtype) for o, d in pairs]
        (dx,) = torch.autograd.grad([o for o, _ in pairs], [own], wanted, create_graph=again)
    return dx


def _setup_forward(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, q, weight, *options = inputs
    _, _, stats, counts = output
    ctx.options = options
    ctx.save_for_backward(x, target, q, weight, stats, counts)
    ctx.mark_non_differentiable(stats, counts)
    ctx.set_materialize_grads(False)


def _grad_forward(ctx: Any, g: Any, g_lse: Any, *_: Any) -> Any:
    x, target, q, weight, stats, counts = ctx.saved_tensors
    none = (None,) * (3 + len(ctx.options))
    if g is None and g_lse is None:
        return (None, *none)
    # create_graph, batched gradients
    if torch.is_grad_enabled() or compat_runtime.under_functorch():
        loss = _loss(*ctx.options)
        return (_composed_gradient(loss, (x, target, q, weight), g, g_lse), *none)
    if g is None:
        g = torch.zeros(1, dtype=torch.float32, device=x.device).expand(x.shape[0])
    dx = _backward(g, g_lse, x, target, q, weight, stats, counts, *ctx.options)
    return (dx, *none)


_forward.register_autograd(_grad_forward, setup_context=_setup_forward)


def _setup_fused(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, q, weight, *options = inputs
    ctx.options = options
    ctx.save_for_backward(x, target, q, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or the backward is handed a zero gradient of dx, [N, V]


def _grad_fused(ctx: Any, g: Any, _: Any) -> Any:
    x, target, q, weight, dx = ctx.saved_tensors
    none = (None,) * (3 + len(ctx.options))
    if g is None:
        return (None, *none)
    if torch.is_grad_enabled():  # create_graph
        loss = _loss(*ctx.options)
        rows = g.expand(x.shape[0])
        return (_composed_gradient(loss, (x, target, q, weight), rows, None), *none)
    return (scaled(dx, g), *none)


_forward_backward.register_autograd(_grad_fused, setup_context=_setup_fused)


def scaled(dx: Tensor, g: Tensor) -> Tensor:
    """``dx g`` for a gradient dx that was made for g = 1, on the way of a backward.

    Where the graph is freed behind the backward nobody sees dx again, and it is scaled in place, by
    a kernel that moves nothing if g is 1: known on the card only.
    """
    if launch_applies(dx) and compat_runtime.backward_frees_graph():
        from inductor_ext.templates import scaling

        scaling.scale_in_place(dx, g)
        return dx
    return dx * g.to(dx.dtype) if dx.dtype == torch.float64 else (dx.float() * g).to(dx.dtype)


def launch_applies(x: Tensor) -> bool:
    """Whether a kernel may be launched on ``x`` right now."""
    return x.is_cuda


def losses_of(
    loss: Loss, x: Tensor, target: Tensor | None, q: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N]) in fp32, differentiable by x; of a mean, the rows' parts of it.

    A gradient of gradients is composed of torch functions.
    """
    if not kernels_apply(x, target.shape[-1] if loss.kind == SPARSE else 0):  # type: ignore[union-attr]
        return composed_losses(loss, x, target, q, weight)
    with beside(x):
        rows, lse, _, _ = _forward(_dense_rows(x), target, q, weight, *unpacked(loss))
    return rows, lse


def loss_with_gradient(
    loss: Loss, x: Tensor, target: Tensor | None, q: Tensor | None, weight: Tensor | None
) -> Tensor:
    """The sum of ``losses_of``; where x needs a gradient it is made on the way.

    Not for fp16, whose gradient may underflow before the loss's scale reaches it; not in a compiled
    program, whose backward could not reuse memory that its forward handed over.
    """
    early = (
        x.requires_grad
        and torch.is_grad_enabled()
        and x.dtype != torch.float16
        and not torch.compiler.is_compiling()
        and kernels_apply(x, target.shape[-1] if loss.kind == SPARSE else 0)  # type: ignore[union-attr]
    )
    if early:
        with beside(x):
            total = _forward_backward(_dense_rows(x), target, q, weight, *unpacked(loss))[0]
        return total_of(total, loss.mean, x.shape[0])
    return total_of(losses_of(loss, x, target, q, weight)[0], loss.mean)


def total_of(losses: Tensor, mean: bool, rows: Any = None) -> Tensor:
    """The sum of the losses, of ``rows`` if it is made already; the mean of no rows is NaN."""
    rows = losses.shape[0] if rows is None else rows
    total = losses.sum() if losses.dim() else losses
    return total * math.nan if mean and is_zero(rows) else total


def beside(x: Tensor) -> Any:
    """A context in which the card of x is the current one, on which Triton launches; a backward
    has it so already, and so has a compiled program."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def is_zero(size: Any) -> bool:
    """Whether a size is 0; a dynamic one is taken not to be, and nothing is guarded."""
    return guard_or_false(size == 0)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
