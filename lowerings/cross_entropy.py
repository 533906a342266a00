"""Row sums around a softmax in closed form: the loss's, and that of its gradient.

Forward: the sum of a row of log-probabilities comes with the row's maximum out of the operation
that ``softmax`` puts in (``row_sums`` has the algebra). What is weighted reads the logits again.
Backward: the gradient of a log_softmax needs the row sum of what comes in, which for targets
(an index per row, probabilities, smoothing, any weights) is known; what is left is pointwise: the
logits are read once, their gradient is written once, and nothing of that size is stored in between.
So is the gradient of several entries of a row (``scattered_gradient``).
Where stock moves no more than that, it is left.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings import scattered_gradient
from inductor_ext.lowerings.row_forms import NotLinear, OneHot
from inductor_ext.lowerings.row_sums import Rows
from inductor_ext.lowerings.softmax import STATISTICS  # registered first: the sums are behind it
from inductor_ext.lowerings.softmax_cores import (
    MEANS,
    SUMS,
    constant,
    cores,
    is_long,
    reduced,
    remembered,
    site,
    stored,
    why_not,
)

from inductor_ext import choosing, compat_fx, editing, matching, registry, report
from inductor_ext.editing import same_shape, value

aten, prims = torch.ops.aten, torch.ops.prims
NAME = "cross_entropy"

# Computed where they are used, besides what torch tags as pointwise.
_COMPUTED = {
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.full.default,
    prims.iota.default,
}


def _keeps(node: Any) -> bool:
    return bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))


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
                user.replace_input_with(source, stored(source, rows.editor))


def _put(node: Any, rows: Rows, total: Any) -> None:
    """Put a sum over the row, summed over what else ``node`` reduces, in its place."""
    editor = rows.editor
    mean, others = node.target in MEANS, reduced(node)
    if mean:
        total = rows.mean(total)
    if others != [rows.dim]:
        overload = aten.mean.dim if mean else aten.sum.dim_IntList
        total = editor.call(overload, total, others, _keeps(node))
    elif not _keeps(node):
        total = editor.call(aten.squeeze.dim, total, rows.dim)
    node.replace_all_uses_with(editor.to(total, value(node).dtype))
    editing.erase_unused(rows.graph, [node])


def _fold(node: Any, rows: Rows) -> None:
    """Put the sum over the row in its place, made of what is known."""
    rows.editor.before(node)
    total = rows.sum(rows.form(node.args[0]))
    if rows.depends(node.args[0])[1]:
        # Row values to load, as the sum was: pointwise code would compute them for each entry.
        _store_rows(node.args[0], rows)
        rows.editor.before(node)
        total = stored(total, rows.editor)
    _put(node, rows, total)


def _sweeps_memory(node: Any, rows: Rows, compared: set[Any]) -> bool:
    """Whether Inductor moves something as large as the logits to sum a gradient over the row: it
    reads that, or stores what is summed because its computation reads much. A one-hot alone is
    computed where it is summed, and again where it is used."""
    read, seen, stack = 0, {node}, [node]
    while stack:
        source = stack.pop()
        if source in compared:
            return True
        if source.target in _COMPUTED or matching.is_pointwise(source) or matching.is_view(source):
            new = [n for n in source.all_input_nodes if n not in seen]
            seen.update(new)
            stack.extend(new)
        elif constant(source) is None and isinstance(value(source), torch.Tensor):
            if same_shape([value(source).numel()], [value(rows.logits[0]).numel()]):
                return True
            read += 1
    form = rows.form(node)
    one_hot = all(len(k.factors) == 1 and isinstance(k.factors[0], OneHot) for k in form)
    return not one_hot or read > compat_fx.reads_inlined()


def _look_at(node: Any, rows: Rows, compared: set[Any]) -> None:
    """Fold one sum over ``rows``, or report why it stays."""
    reduces, of_gradient = rows.depends(node.args[0])
    if not reduces and not of_gradient:
        return  # nothing of a softmax
    here = site(rows.logits[0], rows.dim, "row sum of the gradient" if of_gradient else "row sum")
    rows.editor.before(node)
    try:
        if of_gradient and not _sweeps_memory(node.args[0], rows, compared):
            raise NotLinear("stock moves no bytes for it")
        _fold(node, rows)
    except NotLinear as why:
        choosing.leave(NAME, here, str(why))
    else:
        reason = "known beforehand" if of_gradient else "made of the rows' statistics"
        report.record(report.Decision(NAME, True, "closed form", reason, here, source="heuristic"))
    rows.forget()


def _compare_instead_of_scatter(rows: Rows) -> set[Any]:
    """The gradient of a gather, one value per row scattered into zeros, as a comparison with the
    column: pointwise, where Inductor would fill the zeros and add atomically. (The gather has found
    that the index is in range.) Returns what was put there."""
    graph, shape, dim, editor = rows.graph, rows.shape, rows.dim, editing.Editor(rows.graph)
    compared = set()
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
        compared.add(placed)
        node.replace_all_uses_with(editor.to(placed, value(node).dtype))
        editing.erase_unused(graph, [node])
    return compared


def _place_entries(rows: Rows) -> None:
    """The gradient of several entries of a row, put into a gradient that was written without."""
    if scattered_gradient.place(rows.graph, rows.shape, rows.dim):
        here = site(rows.logits[0], rows.dim, "gradient of entries")
        why = "no zeros to add to: they are placed in what is written"
        report.record(report.Decision(NAME, True, "entries placed", why, here, source="heuristic"))


def _groups(graph: Any, numbers: editing.Numbers) -> list[tuple[list[Any], int]]:
    """(logits of equal shape, the dimension) of the softmaxes that may be worth a look."""
    every = (*cores(graph, numbers), *(core for _, core in remembered(graph)))
    found = dict.fromkeys((numbers.of(core.x), core.dim) for core in every)
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
    if not any(
        graph.find_nodes(op="call_function", target=t) for t in (aten.exp.default, STATISTICS)
    ):
        return
    numbers = editing.Numbers(graph)
    for logits, dim in _groups(graph, numbers):
        shape = value(logits[0]).shape
        rows = Rows(graph, numbers, editing.Editor(graph), logits, dim)
        _place_entries(rows)
        compared = _compare_instead_of_scatter(rows)
        totals = {core.total for core in cores(graph, numbers)}
        sums = [
            node
            for node in list(graph.nodes)
            if node.target in SUMS
            and node not in totals
            and same_shape(value(node.args[0]).shape, shape)
            and dim in reduced(node)
            and value(node).dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        for node in sums:
            if node.users:  # else erased meanwhile
                _look_at(node, rows, compared)
        rows.weighted.merge()
    editing.check(graph)


registry.register(registry.Lowering(NAME, passes={"early_joint": rewrite}))
