"""``scan``: cumulative operations of one dimension, also in reverse, exclusive and in segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _scan_checks as checks
from inductor_ext.ops import _scan_composed as composed
from inductor_ext.ops import _scan_gradients as gradients
from inductor_ext.ops import _scan_programs as programs
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import beside
from inductor_ext.templates.scan_launch import launch

# --- operations -----------------------------------------------------------------------------------
# ``resets``: flags of x's shape, True where a segment begins, in the order of memory, also in
# reverse.


@opaque_op("inductor_ext::scan")
def _scan(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    y = _result(x, op, dtype)
    if programs.kernels_apply(x):
        program = programs.scan(x.dtype, resets is not None, op, reverse, exclusive, y.dtype)
        launch(program, _given(x, resets), [y], dim)
    else:
        y.copy_(composed.scan(x, resets, op, dim, reverse, exclusive, y.dtype))
    return y


@_scan.register_fake
def _(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    return _result(x, op, dtype)


@opaque_op("inductor_ext::scan_with_index")
def _scan_with_index(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool
) -> tuple[Tensor, Tensor]:
    values, index = _result(x, op, None), torch.empty_like(x, dtype=torch.int64)
    if programs.kernels_apply(x):
        program = programs.scan(
            x.dtype, resets is not None, op, reverse, exclusive, x.dtype, programs.is_short(x, dim)
        )
        launch(program, _given(x, resets), [values, index], dim)
    else:
        found = composed.scan_with_index(x, resets, op, dim, reverse, exclusive)
        values.copy_(found[0])
        index.copy_(found[1])
    return values, index


@_scan_with_index.register_fake
def _(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool
) -> tuple[Tensor, Tensor]:
    return _result(x, op, None), torch.empty_like(x, dtype=torch.int64)


@opaque_op("inductor_ext::scan_backward")
def _backward(
    g: Tensor, x: Tensor, y: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool,
    exclusive: bool,
) -> Tensor:  # fmt: skip
    """The gradient of x from that of y, for all operations but sum."""
    dx = torch.empty_like(y, dtype=x.dtype)
    if programs.kernels_apply(x):
        program = programs.scan_backward(
            g.dtype, x.dtype, y.dtype, resets is not None, op, reverse, exclusive
        )
        inputs = programs.scan_backward_inputs(g, x, y, resets, op, exclusive)
        launch(program, inputs, [dx], dim)
    else:
        dx.copy_(gradients.gradient(g, x, y, resets, op, dim, reverse, exclusive))
    return dx


@_backward.register_fake
def _(
    g: Tensor, x: Tensor, y: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool,
    exclusive: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(y, dtype=x.dtype)


def _given(x: Tensor, resets: Tensor | None) -> list[Tensor]:
    return [x] if resets is None else [x, resets]


def _result(x: Tensor, op: str, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(x, dtype=dtype or checks.result_dtype(x, op, None))


# --- gradients ------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, resets, ctx.op, ctx.dim, ctx.reverse, ctx.exclusive, *_ = inputs
    ctx.x_dtype = x.dtype
    y = output if isinstance(output, Tensor) else output[0]
    saved = (None, None) if ctx.op == "sum" else (x, y)
    ctx.save_for_backward(*saved, resets)
    if ctx.op in checks.WITH_INDEX:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)


def _grad_of_x(ctx: Any, g: Tensor | None) -> Tensor | None:
    if g is None:
        return None
    x, y, resets = ctx.saved_tensors
    op = {"cummax": "max", "cummin": "min"}.get(ctx.op, ctx.op)
    order = ctx.dim, ctx.reverse, ctx.exclusive
    if ctx.op == "sum":
        return scanned(g, resets, "sum", ctx.dim, not ctx.reverse, ctx.exclusive, ctx.x_dtype)
    if torch.is_grad_enabled() or under_functorch():  # create_graph, batched gradients
        return gradients.gradient(g, x, y, resets, op, *order)
    return _backward(g, x, y, resets, op, *order)


def _grad(ctx: Any, g: Any) -> Any:
    return _grad_of_x(ctx, g), *(None,) * 6


def _grad_with_index(ctx: Any, g: Any, _: Any) -> Any:
    return _grad_of_x(ctx, g), *(None,) * 5


_scan.register_autograd(_grad, setup_context=_setup)
_scan_with_index.register_autograd(_grad_with_index, setup_context=_setup)


# --- function -------------------------------------------------------------------------------------


def scanned(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """``scan`` of checked arguments."""
    order = dim, reverse, exclusive
    if under_functorch():
        if op in checks.WITH_INDEX:
            return composed.scan_with_index(x, resets, op, *order)
        return composed.scan(x, resets, op, *order, dtype)
    with beside(x):
        if op in checks.WITH_INDEX:
            return _scan_with_index(x, resets, op, *order)
        return _scan(x, resets, op, *order, dtype)


def scan(
    x: Tensor, op: str, dim: int = -1, reverse: bool = False, exclusive: bool = False,
    segments: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """``y_t = x_0 + ... + x_t`` along ``dim``, with another operation in the place of +.

    Args:
        x: bool, uint8, int8 to int64, fp16, bf16, fp32 or fp64, in any shape of one dimension or
            more and any layout.
        op: "sum", "prod", "max", "min" or "logsumexp" (floats only); "cummax" and "cummin" give
            positions too.
        dim: the dimension that is scanned.
        reverse: from the last position to the first. Nothing is flipped in memory.
        exclusive: without x_t itself; a segment's first value is the operation's identity: 0, 1,
            -inf or inf, the least or greatest integer, and position -1.
        segments: where the scan begins anew. bool: flags that broadcast to the shape of x, True
            at the first position of a segment, in the order of memory, also in reverse; the first
            position of all begins one anyway. int32 or int64: offsets [number of segments + 1]
            along ``dim``, rising from 0 to its size, the same for all else; segments may be empty.
            Offsets are checked on the CPU only, and not in a compiled program.
        dtype: of the result; x is converted where it is read. By default int64 for a sum or product
            of integers or bools, else that of x.

    Returns y in the shape of x; for "cummax" and "cummin" (y, positions along ``dim``, int64). As
    in torch a NaN wins, the later one of equals is taken, and integers wrap around; "later" is
    along the scan. 16-bit floats are accumulated in fp32 and rounded once.

    Gradients of x for floats, each one scan the other way: of a product without division, so that
    zeros are right; of a maximum or minimum to the element that was taken, without atomics; of a
    logsumexp by factors of at most 1, 0 where x is -inf, from y as it was rounded: off by the
    rounding of y, relatively. CPU tensors, transforms of ``torch.func`` and gradients of gradients
    are composed of torch functions. A size of 0 is fine. Deterministic.

    Raises ValueError or TypeError for what does not fit.
    """
    checks.check_op(op)
    dim = checks.checked_dim("x", x, dim)
    dtype = checks.result_dtype(x, op, dtype)
    resets = None if segments is None else checks.resets_of(x, segments, dim)
    if op not in ("sum", "prod", "logsumexp"):
        x = x.to(dtype)  # a gradient compares what was taken with x
    found = scanned(x, resets, op, dim, reverse, exclusive, dtype)
    return tuple(found) if op in checks.WITH_INDEX else found
