"""``linear_recurrence``: a first-order linear recurrence along one dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _scan_checks as checks
from inductor_ext.ops import _scan_composed as composed
from inductor_ext.ops import _scan_programs as programs
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import beside
from inductor_ext.templates.scan_launch import launch

# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::linear_recurrence")
def _recurrence(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    h = _result(b)
    if programs.kernels_apply(b):
        program = programs.recurrence(b.dtype, h0 is not None, reverse)
        launch(program, [a, b, *_along(h0, b, dim)], [h], dim)
    else:
        h.copy_(composed.recurrence(a, b, h0, dim, reverse))
    return h


@_recurrence.register_fake
def _(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    return _result(b)


@opaque_op("inductor_ext::linear_recurrence_backward")
def _backward(
    g: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """(da, db) of the incoming gradient g of h."""
    da, db = _result(h), _result(h)
    if programs.kernels_apply(h):
        program = programs.recurrence_backward(h.dtype, g.dtype, h0 is not None, reverse)
        launch(program, [g, a, h, *_along(h0, h, dim)], [da, db], dim)
        return da, db
    for own, found in zip((da, db), _gradients(g, a, h, h0, dim, reverse), strict=True):
        own.copy_(found)
    return da, db


@_backward.register_fake
def _(
    g: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    return _result(h), _result(h)


def _along(h0: Tensor | None, h: Tensor, dim: int) -> list[Tensor]:
    """h0 in the shape of h, without memory of its own."""
    return [] if h0 is None else [h0.unsqueeze(dim).expand(h.shape)]


def _result(like: Tensor) -> Tensor:
    return torch.empty_like(like)


# --- gradients ------------------------------------------------------------------------------------


def recurrence(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """``linear_recurrence`` of checked arguments of one shape."""
    if under_functorch():
        return composed.recurrence(a, b, h0, dim, reverse)
    with beside(b):
        return _recurrence(a, b, h0, dim, reverse)


def _gradients(
    g: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """(da, db) by torch functions and the recurrence itself, differentiable.

    G_t = g_t + a_(t+1) G_(t+1),   db_t = G_t,   da_t = G_t h_(t-1)
    """
    before = -1 if reverse else 1
    wide = composed.wide_dtype(h.dtype)
    following = composed.shifted(a.to(wide), dim, -before, 0)
    G = recurrence(following, g.to(wide), None, dim, not reverse)
    previous = composed.shifted(h, dim, before, 0)
    if h0 is not None and h.shape[dim] > 0:
        last = h.shape[dim] - 1
        rest = previous.narrow(dim, 0 if reverse else 1, last)
        edge = h0.unsqueeze(dim)
        previous = torch.cat([rest, edge] if reverse else [edge, rest], dim)
    return (G * previous.to(wide)).to(a.dtype), G.to(h.dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    a, _, h0, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(a, output, h0)


def _grad(ctx: Any, g: Any) -> Any:
    a, h, h0 = ctx.saved_tensors
    dim, reverse = ctx.dim, ctx.reverse
    if torch.is_grad_enabled() or under_functorch():  # create_graph, batched gradients
        da, db = _gradients(g, a, h, h0, dim, reverse)
    else:
        da, db = _backward(g, a, h, h0, dim, reverse)
    dh0 = None
    if h0 is not None and ctx.needs_input_grad[2]:
        # As a sum over at most one position, since there may be none.
        n = h.shape[dim]
        first = slice(max(n - 1, 0), n) if reverse else slice(0, 1)
        at = (slice(None),) * dim + (first,)
        dh0 = (a[at] * db[at]).sum(dim)
    return da, db, dh0, None, None


_recurrence.register_autograd(_grad, setup_context=_setup)


# --- function -------------------------------------------------------------------------------------


def linear_recurrence(
    a: Tensor, b: Tensor, h0: Tensor | None = None, dim: int = -1, reverse: bool = False
) -> Tensor:
    """``h_t = a_t h_(t-1) + b_t`` along ``dim``, from ``h_(-1) = h0``, or 0.

    Args:
        a, b: fp16, bf16, fp32 or fp64, of one dtype and device, in any layout, of shapes that
            broadcast to one, which is that of h: a decay per channel or per head is not copied.
        h0: the shape of h without ``dim``; with ``reverse`` it comes behind the last position.
        dim: the dimension of time, counted in the shape of h.
        reverse: from the last position to the first, ``h_t = a_t h_(t+1) + b_t``.

    Returns h in the dtype of b, carried in fp32 (fp64 for fp64) and rounded once. Gradients of a, b
    and h0: one scan the other way, linear in time; those of gradients are made of the same scans.
    CPU tensors and transforms of ``torch.func`` are composed of torch functions. A length of 0 is
    fine. Deterministic. Products of a are formed on the way, so that h may be NaN where such a
    product overflows and h itself would not.

    Raises ValueError or TypeError for what does not fit.
    """
    checks.check_recurrence(a, b, h0)
    a, b = checks.broadcast(a, b)
    dim = checks.checked_dim("b", b, dim)
    if h0 is not None:
        checks.check_initial(b, h0, dim)
    return recurrence(a, b, h0, dim, reverse)
