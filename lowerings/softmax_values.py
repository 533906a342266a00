"""A softmax or log_softmax whose values are all that is made of its statistics: by one kernel.

With the statistics alone in one read of the logits, the values take another. Where they go to
memory in the dtype of the logits as they are, one kernel reads the logits again out of L2.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings import classes_strided
from inductor_ext.lowerings.loss_gradient import behind_views
from inductor_ext.lowerings.loss_rows import Level, RowValues, is_contiguous
from inductor_ext.lowerings.softmax_cores import Core, keeps_value, lies_in_memory

from inductor_ext import editing, matching
from inductor_ext.editing import Editor, Numbers, value
from inductor_ext.ops import _softmax

aten = torch.ops.aten
FORWARD = _softmax._forward._opoverload
STRIDED = _softmax._forward_strided._opoverload


def _only(node: Any, *users: Any) -> bool:
    return set(node.users) == set(users)


def _one(node: Any) -> Any:
    """The only user of a node; None where there are several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _values(core: Core) -> tuple[Any, bool] | None:
    """(the values, whether they are logarithms) that a core is all made for."""
    exp = core.total.args[0]
    if exp.target is not aten.exp.default:
        return None
    shifted, user = exp.args[0], _one(core.total)
    if user is None or shifted.args[1] is not core.peak or not _only(core.peak, shifted):
        return None
    if user.target is aten.div.Tensor and user.args == (exp, core.total):
        return (user, False) if _only(shifted, exp) and _only(exp, core.total, user) else None
    if user.target is aten.log.default:
        y = _one(user)
        plain = y is not None and y.target is aten.sub.Tensor and not y.kwargs  # no alpha
        if plain and y.args == (shifted, user):
            return (y, True) if _only(shifted, exp, y) and _only(exp, core.total) else None
    return None


def written(group: list[Core], levels: list[Level], of_tangent: set[Any]) -> Any:
    """(the values in memory, whether they are logarithms) of a group that is one softmax, all of
    whose values are stored before anything pointwise reads them; None for any other."""
    base = levels[-1].base
    found = _values(group[0]) if len(group) == 1 and not group[0].guarded else None
    if found is None or len(levels) > 1 or levels[-1].softcap:
        return None
    out, log = found
    if value(out).dtype != value(base).dtype:
        out = _one(out)
        if out is None or not keeps_value(out) or value(out).dtype != value(base).dtype:
            return None
    if not is_contiguous(value(out)):
        return None
    for user in behind_views(out):
        if not (user.op == "output" or lies_in_memory(user) or _of_backward(user, of_tangent)):
            return None
    return out, log


def _of_backward(node: Any, of_tangent: set[Any]) -> bool:
    """Whether nothing but the backward reads a node."""
    if node.op == "output" or node in of_tangent:
        return node.op != "output"
    return matching.is_pointwise(node) and all(_of_backward(u, of_tangent) for u in node.users)


def emit(
    graph: Any, numbers: Numbers, core: Core, levels: list[Level], out: Any, log: bool
) -> None:
    """Put the operation in place of the values."""
    editor = Editor(graph)
    rows = RowValues(graph, numbers, editor, core.x, levels)
    editor.before(out)
    base, shape, dim = levels[-1].base, value(core.x).shape, core.dim
    if dim < len(shape) - 1:
        flat, operation = classes_strided.places_apart(rows, base, dim), STRIDED
    else:
        flat, operation = base, FORWARD
        if value(base).dim() != 2:
            flat = editor.call(aten.view.default, base, rows.sizes([-1, value(base).shape[-1]]))
    made = editor.call(operation, flat, levels[-1].scale, log)
    if value(out).dim() != value(made).dim() or dim < len(shape) - 1:
        made = editor.call(aten.view.default, made, rows.sizes(value(out).shape))
    out.replace_all_uses_with(made)
    editing.erase_unused(graph, [out])
    return made
