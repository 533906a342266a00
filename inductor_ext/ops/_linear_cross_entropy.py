"""``linear_cross_entropy``: cross entropy of ``h Wᵀ + bias`` whose logits are never kept whole.

The rows go in chunks. A chunk's logits are one matrix product into a buffer, over which the
cross-entropy kernel writes their gradient; two more products make of it the chunk's part of the
gradients of h and W. W's parts are added in fp32 and rounded once. With one chunk the library's own
accumulation is that sum.

How long a chunk is: each reads W twice and W's fp32 gradient, which it also writes, 12 H V bytes
beside 6 H V flops a row, so that C rows are C/2 flops a byte: 1024 rows are 512, where an H200
needs 206 to be kept busy. More rows cost memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat
from inductor_ext.ops import _rows
from inductor_ext.ops._cross_entropy import (
    REDUCTIONS,
    check_dtype,
    check_options,
    check_placed,
    check_weight,
)
from inductor_ext.ops._rows import Loss, composed_losses, scaled
from inductor_ext.templates import cross_entropy_launch as launch

LEAST_ROWS = 1024
MEMORY = 2_500_000_000


def chunk_rows(rows: int, hidden: int, classes: int, itemsize: int, memory: int) -> int:
    """Rows of a chunk: all, if their logits fit into ``memory`` bytes; else what fits beside the
    fp32 sum of W's gradient, in steps of 128, and never less than LEAST_ROWS. All as well, if that
    takes no more. The sum is W's gradient itself, not an addition, where W is fp32."""
    row = classes * itemsize
    added = 0 if itemsize == 4 else 4 * hidden * classes
    fit = max((memory - added) // row // 128 * 128, LEAST_ROWS)
    if rows * row <= max(memory, added + fit * row):
        return max(rows, 1)
    return min(rows, fit)


def _chunk_rows(h: Tensor, w: Tensor, memory: int, wanted: Sequence[bool]) -> int:
    # What is not made needs no sum.
    hidden = h.shape[1] if wanted[1] else 0
    return chunk_rows(h.shape[0], hidden, w.shape[0], h.element_size(), memory)


def _computing(h: Tensor) -> Any:
    """A context in which products are made in the dtype of h, whatever autocast would have."""
    return torch.autocast(h.device.type, enabled=False)


def _logits(h: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """h Wᵀ + bias in their dtype, written into the first rows of ``out``."""
    out = out[: h.shape[0]]
    if bias is None:
        return torch.mm(h, w.t(), out=out)
    return torch.addmm(bias, h, w.t(), out=out)


class _Gradients:
    """dh, dW and db, filled chunk by chunk from the gradient of the chunk's logits."""

    def __init__(
        self, h: Tensor, w: Tensor, bias: Tensor | None, chunks: int, wanted: Sequence[bool]
    ) -> None:
        self.h, self.w, self.bias, self.wanted = h, w, bias, wanted
        self.dh = self.dw = self.db = None
        if wanted[0]:
            self.dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        if wanted[1] and chunks > 1:
            self.dw = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
        if wanted[2] and bias is not None:
            self.db = torch.zeros(bias.shape, dtype=torch.float32, device=w.device)

    def add(self, part: slice, dx: Tensor) -> None:
        with _computing(dx):
            self._add(part, dx)

    def _add(self, part: slice, dx: Tensor) -> None:
        if self.dh is not None:
            torch.mm(dx, self.w, out=self.dh[part])
        h = self.h[part]
        if self.db is not None:
            self.db += dx.sum(0, dtype=torch.float32)
        if not self.wanted[1]:
            return
        if self.dw is None:
            self.dw = torch.mm(dx.t(), h)
        elif h.dtype == torch.float32:
            self.dw.addmm_(dx.t(), h)
        elif h.is_cuda:
            torch.addmm(self.dw, dx.t(), h, out_dtype=torch.float32, out=self.dw)
        else:
            self.dw.addmm_(dx.t().float(), h.float())

    def done(self) -> tuple[Tensor, Tensor, Tensor]:
        """An empty tensor stands for what is not wanted."""
        none, dtype = self.w.new_empty, self.w.dtype
        dh = none(0) if self.dh is None else self.dh
        dw, db = (none(0) if t is None else t.to(dtype) for t in (self.dw, self.db))
        return dh, dw, db


def empty_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``_Gradients`` returns, without values."""
    dh, dw, db = (
        w.new_empty(0)
        if t is None or not want
        else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, want in zip((h, w, bias), wanted, strict=True)
    )
    return dh, dw, db


def _padded(rows: int, columns: int, like: Tensor) -> Tensor:
    """An empty matrix whose rows begin on 16-byte boundaries, as fast matrix products want."""
    whole = 128 // like.element_size()
    aligned = columns * like.element_size() % 16 == 0
    width = columns if aligned else -(-columns // whole) * whole
    return torch.empty((rows, width), dtype=like.dtype, device=like.device)[:, :columns]


def by_chunks(
    h: Tensor, w: Tensor, bias: Tensor | None, wanted: Sequence[bool], memory: int,
    visit: Callable[[slice, Tensor], Any],
) -> tuple[list[Any], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(what ``visit`` returns of each chunk, (dh, dW, db)).

    ``visit(rows, x)`` is handed the chunk's rows and their logits, and leaves the logits' gradient
    in x if any is ``wanted``.
    """
    rows, size = h.shape[0], _chunk_rows(h, w, memory, wanted)
    logits = _padded(size, w.shape[0], h)
    parts = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
    parts = parts or [slice(0, 0)]
    gradients, results = _Gradients(h, w, bias, len(parts), wanted), []
    for part in parts:
        with _computing(h):
            x = _logits(h[part], w, bias, logits)
        results.append(visit(part, x))
        gradients.add(part, x)
    return results, gradients.done()


@torch.library.custom_op("inductor_ext::linear_cross_entropy_with_gradient", mutates_args=())
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


@torch.library.custom_op("inductor_ext::linear_cross_entropy_forward", mutates_args=())
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


@torch.library.custom_op("inductor_ext::linear_cross_entropy_backward", mutates_args=())
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
    with _computing(h):
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
    if torch.is_grad_enabled() or compat.under_functorch():
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
) -> Tensor | tuple[Tensor, Tensor]:
    """``cross_entropy(h wᵀ + bias, target, ...)`` of which one chunk of logits exists at a time.

    Args:
        h: [..., H]; w: [V, H]; bias: [V] or None; one dtype, bf16, fp16 or fp32 for the kernels.
        target: class indices in the shape of h without H, int32 or int64.
        weight ... return_lse: as in ``cross_entropy``.
        memory: bytes that the logits of a chunk, and the fp32 gradient of w if there are several
            chunks, may take. A chunk has 1024 rows at least, whatever this says.

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
    _check(h, w, bias, target, weight)
    rows_shape = h.shape[:-1]
    # The kernels know no stride of the targets; H may be 0, so that the rows are counted.
    flat, index = h.reshape(target.numel(), h.shape[-1]), target.reshape(-1).contiguous()
    loss = Loss(
        _rows.INDEX, ignore_index, label_smoothing, scale, softcap or 0.0, z_loss,
        reduction == "mean",
    )  # fmt: skip
    weight = None if weight is None else weight.detach().contiguous()
    options = (ignore_index, label_smoothing, scale, softcap or 0.0, z_loss, loss.mean)
    grad = torch.is_grad_enabled()
    wanted = [grad and t is not None and t.requires_grad for t in (h, w, bias)]
    if not _rows.kernels_apply(w.t()[:1]):
        losses, lse = _composed(loss, flat, w, bias, index, weight)
    elif reduction != "none" and not return_lse and any(wanted) and h.dtype != torch.float16:
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
