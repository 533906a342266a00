"""The gradient of a softmax or log_softmax by one kernel, where stock needs more of memory.

    dx = y (g - sum_j y_j g_j)        dx = g - e^y sum_j g_j

Stock reads y and g twice. Up to 64 KB a row, it finds them in L2 the second time and loses nothing;
of longer ones so many are under way that it does not. One kernel keeps fewer under way. Of few
classes that are strided in memory it writes the sum, and reads both again, by two kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings import classes_strided
from inductor_ext.lowerings.loss_gradient import behind_views
from inductor_ext.lowerings.loss_rows import by_number, is_contiguous
from inductor_ext.lowerings.softmax_cores import keeps_value, lies_in_memory, reduced, uncast

from inductor_ext import editing
from inductor_ext.editing import Editor, same_shape, value
from inductor_ext.ops import _softmax

aten, prims = torch.ops.aten, torch.ops.prims
BACKWARD = _softmax._backward._opoverload
STRIDED = _softmax._backward_strided._opoverload
STOCK_BYTES = 65536  # of a row


def _one(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _less_times_sum(b: Any, dim: int) -> tuple[Any, Any] | None:
    """(a, a - b sum(a)) for a sum over dimension ``dim``; b is read in no other product."""
    for product in b.users:
        result = _one(product)
        if result is None:
            continue
        if product.target is aten.neg.default and result.target is prims.fma.default:
            first, total, a = result.args
            if first is not product:
                continue
        elif product.target is aten.mul.Tensor and result.target is aten.sub.Tensor:
            total = product.args[1] if product.args[0] is b else product.args[0]
            a = result.args[0]
            if result.args[1] is not product or result.kwargs:
                continue
        else:
            continue
        if (
            isinstance(total, torch.fx.Node)
            and _is_row_sum(total, a, dim)
            and len(total.users) == 1
        ):
            return a, result
    return None


def _is_row_sum(node: Any, a: Any, dim: int) -> bool:
    """Whether a node is the sum of ``a`` over a dimension, which is kept."""
    keeps = node.target is aten.sum.dim_IntList and len(node.args) > 2 and node.args[2]
    return bool(keeps and node.args[0] is a and reduced(node) == [dim])


def match(y: Any, log: bool, dim: int) -> tuple[Any, Any, float] | None:
    """(g, dx, the factor in dx) of the gradient of the softmax over ``dim`` with the values y in
    memory; None where there is none of this form, or it is best where it is."""
    tensor = value(y)
    columns = tensor.shape[dim]
    if not isinstance(columns, int):
        return None
    if dim == tensor.dim() - 1:
        if columns * tensor.element_size() <= STOCK_BYTES:
            return None
    elif columns > classes_strided.GRADIENT:
        return None
    for wide in (y, *(user for user in y.users if keeps_value(user))):
        for b in (
            (user for user in wide.users if user.target is aten.exp.default) if log else [wide]
        ):
            found = _less_times_sum(b, dim)
            if found is None:
                continue
            g, dx = found
            if not log:
                if g.target is not aten.mul.Tensor or wide not in g.args:
                    continue
                g = g.args[1] if g.args[0] is wide else g.args[0]
            g, (dx, factor) = uncast(g), _end(dx)
            if not isinstance(g, torch.fx.Node) or not lies_in_memory(g):
                continue
            same = value(g).dtype == value(dx).dtype == tensor.dtype
            if not same or not same_shape(value(g).shape, tensor.shape) or factor <= 0:
                continue
            if not is_contiguous(value(g)) or not is_contiguous(value(dx)):
                continue
            if all(u.op == "output" or lies_in_memory(u) for u in behind_views(dx)):
                return g, dx, factor
    return None


def _end(dx: Any) -> tuple[Any, float]:
    """Where a gradient is converted and multiplied by numbers last, and their product."""
    factor = 1.0
    while True:
        user = _one(dx)
        if user is None or user.op != "call_function":
            return dx, factor
        by = by_number(user)
        if by is not None and by[0] is dx:
            factor *= by[1]
        elif not keeps_value(user):
            return dx, factor
        dx = user


def emit(graph: Any, y: Any, log: bool, dim: int, g: Any, dx: Any, factor: float) -> None:
    """Put the operation in place of the gradient."""
    editor = Editor(graph)
    editor.before(dx)
    shape = value(dx).shape
    view = aten.view.default
    if dim < len(shape) - 1:  # y is a view of what the operation for such classes makes
        values, back = y.args
        g = editor.call(view, g, values.args[0].args[1])
        made = editor.call(view, editor.call(STRIDED, values, g, factor, log), back)
    elif len(shape) == 2:
        made = editor.call(BACKWARD, y, g, factor, log)
    else:
        y, g = (editor.call(view, t, [-1, shape[-1]]) for t in (y, g))
        sizes = [s if isinstance(s, int) else editor.call(aten.sym_size.int, dx.args[0], i)
                 for i, s in enumerate(shape)]  # fmt: skip
        made = editor.call(view, editor.call(BACKWARD, y, g, factor, log), sizes)
    dx.replace_all_uses_with(made)
    editing.erase_unused(graph, [dx])
