"""Row sums around a softmax in closed form: losses in one sweep, their gradients without one.

Forward: a sum over the row of log-probabilities, whatever they are weighted with, needs no sweep of
its own behind the one for the maximum and the sum of exponentials (``row_sums`` has the algebra).
Backward: the gradient of a log_softmax needs the row sum of what comes in, which for targets
(an index per row, probabilities, smoothing, any weights) is known; what is left is pointwise: the
logits are read once, their gradient is written once, and nothing of that size is stored in between.
"""

from __future__ import annotations

from typing import Any

import torch

# Imported to be registered first: the sums are over what it leaves.
from inductor_ext.lowerings import softmax as softmax
from inductor_ext.lowerings.row_forms import NotLinear
from inductor_ext.lowerings.row_sums import Rows
from inductor_ext.lowerings.softmax_cores import constant, cores, is_long, site, why_not

from inductor_ext import choosing, compat, editing, matching, registry, report
from inductor_ext.editing import same_shape, value

aten, prims = torch.ops.aten, torch.ops.prims
NAME = "cross_entropy"

# What moves elements about: a computation that Inductor finds too long is not inlined into one.
_MOVES = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided_scatter.default,
    aten.constant_pad_nd.default,
    aten.index_put.default,
    aten.cat.default,
}
_SUMS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}


def _reduced(node: Any) -> list[int]:
    """The dimensions that a sum or mean reduces."""
    rank = value(node.args[0]).dim()
    dims = node.args[1] if len(node.args) > 1 else None
    return [d % rank for d in dims] if dims else list(range(rank))


def _keeps(node: Any) -> bool:
    return bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))


def _is_moved(node: Any) -> bool:
    """Whether what is computed from a node pointwise ends in a copy to other places (the gradient
    of shifted logits), where it would be stored in between if it were not inlined."""
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user.target in _MOVES:
                return True
            if user not in seen and (matching.is_pointwise(user) or matching.is_view(user)):
                seen.add(user)
                stack.append(user)
    return False


def _stored(row: Any, editor: editing.Editor) -> Any:
    """A row value in memory."""
    strides = value(row).stride()
    if not strides or not all(isinstance(s, int) for s in strides):
        return row
    return editor.call(compat.into_memory(), row, list(strides))


def _store_rows(node: Any, rows: Rows) -> None:
    """Put the row values in memory that a gradient as large as the logits is computed from."""
    seen, stack = {node}, [node]
    while stack:
        user = stack.pop()
        for source in user.all_input_nodes:
            if source in seen or not rows.depends(source)[1]:
                continue
            seen.add(source)
            if not rows.is_row(source):
                stack.append(source)
            elif matching.is_pointwise(matching.viewed(source)):
                rows.editor.before(source.next)  # one for all its users
                user.replace_input_with(source, _stored(source, rows.editor))


def _fold(node: Any, rows: Rows) -> None:
    """Put the sum over the row, then over what else ``node`` reduces, in its place."""
    editor = rows.editor
    editor.before(node)
    total = rows.sum(rows.form(node.args[0]))
    if rows.depends(node.args[0])[1] and _is_moved(node):
        # Row values to load, as the sum was: all of their computation for each element might be too
        # much for Inductor to inline.
        _store_rows(node.args[0], rows)
        editor.before(node)
        total = _stored(total, editor)
    mean, others = node.target in (aten.mean.dim, aten.mean.default), _reduced(node)
    if mean:
        total = rows.mean(total)
    if others != [rows.dim]:
        overload = aten.mean.dim if mean else aten.sum.dim_IntList
        total = editor.call(overload, total, others, _keeps(node))
    elif not _keeps(node):
        total = editor.call(aten.squeeze.dim, total, rows.dim)
    node.replace_all_uses_with(editor.to(total, value(node).dtype))
    editing.erase_unused(rows.graph, [node])


def _look_at(node: Any, rows: Rows) -> bool:
    """Fold one sum over ``rows``, or report why it stays; returns whether it belongs to the
    forward and would have been a second sweep."""
    reduces, of_gradient = rows.depends(node.args[0])
    if not reduces and not of_gradient:
        return False  # in the first sweep as it is
    what = "row sum of the gradient" if of_gradient else "row sum"
    here = site(rows.logits[0], rows.dim, what)
    try:
        _fold(node, rows)
    except NotLinear as why:
        choosing.leave(NAME, here, f"it is not known without a sweep: {why}")
    else:
        reason = "taken in the sweep for the maximum" if not of_gradient else "known beforehand"
        report.record(report.Decision(NAME, True, "closed form", reason, here, source="heuristic"))
    rows.forget()
    return reduces and not of_gradient


def _compare_instead_of_scatter(rows: Rows) -> None:
    """The gradient of a gather, one value per row scattered into zeros, as a comparison with the
    column: pointwise, where Inductor would fill the zeros and add atomically. (The gather has found
    that the index is in range.)"""
    graph, shape, dim, editor = rows.graph, rows.shape, rows.dim, editing.Editor(rows.graph)
    for node in graph.find_nodes(op="call_function", target=aten.scatter_add.default):
        zeros, along, index, source = node.args
        row = [1 if i == dim else s for i, s in enumerate(shape)]
        if not (
            rows.depends(source)[1]
            and same_shape(value(node).shape, shape)
            and along % len(row) == dim
            and constant(zeros) == 0
            and same_shape(value(index).shape, row)
            and same_shape(value(source).shape, row)
        ):
            continue
        editor.before(node)
        size = shape[dim]
        if not isinstance(size, int):
            size = editor.call(aten.sym_size.int, zeros, dim)
        columns = editor.call(
            prims.iota.default,
            size,
            start=0,
            step=1,
            dtype=torch.int64,
            device=value(node).device,
            requires_grad=False,
        )
        for _ in range(len(row) - 1 - dim):
            columns = editor.call(aten.unsqueeze.default, columns, -1)
        here = editor.call(aten.eq.Tensor, index, columns)
        placed = editor.call(aten.where.ScalarOther, here, source, 0.0)
        node.replace_all_uses_with(editor.to(placed, value(node).dtype))
        editing.erase_unused(graph, [node])


def _groups(graph: Any, numbers: editing.Numbers) -> list[tuple[list[Any], int]]:
    """(logits of equal shape, the dimension) of the softmaxes that may be worth a look."""
    found = dict.fromkeys((core.x, core.dim) for core in cores(graph, numbers))
    groups: list[tuple[list[Any], int]] = []
    for x, dim in found:
        if is_long(x, dim) and why_not(x, dim) is None:
            for logits, other in groups:
                if dim == other and same_shape(value(x).shape, value(logits[0]).shape):
                    logits.append(x)
                    break
            else:
                groups.append(([x], dim))
    return groups


def rewrite(graph: Any) -> None:
    """The pass over a joint graph."""
    if not graph.find_nodes(op="call_function", target=aten.exp.default):
        return
    numbers = editing.Numbers(graph)
    for logits, dim in _groups(graph, numbers):
        shape = value(logits[0]).shape
        rows = Rows(graph, numbers, editing.Editor(graph), logits, dim)
        _compare_instead_of_scatter(rows)
        totals = {core.total for core in cores(graph, numbers)}
        looked = [
            _look_at(node, rows)
            for node in list(graph.nodes)
            if node.target in _SUMS
            and node.users  # else erased meanwhile
            and node not in totals
            and same_shape(value(node.args[0]).shape, shape)
            and dim in _reduced(node)
            and value(node).dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        if any(looked):
            # Their own pattern may no longer find the softmaxes, or sweep twice for each.
            for x in logits:
                group = [c for c in cores(graph, numbers) if c.x is x and c.dim == dim]
                if not all(core.shared for core in group):
                    share(graph, group)
                    why = "its maximum and sum in one sweep, whatever is summed besides"
                    report.record(
                        report.Decision(NAME, True, "online", why, group[0].site(), "heuristic")
                    )
    editing.check(graph)


registry.register(
    registry.Lowering(
        NAME, passes={"early_joint": rewrite}, off="the default, until it has been timed on a card"
    )
)
