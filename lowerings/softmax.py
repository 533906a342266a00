"""The statistics of long rows of logits by one kernel, for every softmax of these logits.

A softmax over a long row needs its maximum and its sum of exponentials. Inductor finds both in one
sweep that computes more than it reads, or in two, and in more where a scale, a softcap or
logsumexp hides that two softmaxes are of the same logits. Here ``row_statistics`` reads the logits
once; all else stays as the program has it, with its own results for infinities and NaN, and fuses
as it would.

That pays where the logits lie in memory anyway, and are many. What the kernel computes itself (a
scale, a tanh softcap, conversions) may stand in between.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from inductor_ext.lowerings import classes_strided, loss_rows, softmax_gradients, softmax_values
from inductor_ext.lowerings.loss_rows import (
    NARROW,
    Level,
    NoForm,
    RowValues,
    check_rounding,
    check_size,
    is_contiguous,
    key_of,
    levels_of,
    numel,
    reached,
)
from inductor_ext.lowerings.softmax_cores import (
    LONG,
    MEANS,
    SUMS,
    Core,
    cores,
    is_long,
    lies_in_memory,
    put_pair,
    reduced,
    remember,
    replaced,
    row_shape,
    store_rows,
    uncast,
    why_not,
)

from inductor_ext import choosing, compat, compat_fx, editing, matching, registry, report
from inductor_ext.editing import Editor, Numbers, same_shape, value
from inductor_ext.ops import _classes, _joint

aten = torch.ops.aten
NAME = "softmax"
STATISTICS = _joint.row_statistics._opoverload
STRIDED = _classes.class_statistics._opoverload


def check(graph: Any, numbers: Numbers, group: list[Core]) -> None:
    """Raise where the softmaxes are no site."""
    x, dim = group[0].x, group[0].dim
    reason = why_not(x, dim)
    if reason is not None:
        raise NoForm(reason)
    if compat.ahead_of_time():
        raise NoForm("a C++ wrapper can't hold an operation in Python")
    strided = dim != value(x).dim() - 1
    if strided:
        logits = classes_strided.strided(group[0])
        if logits is None:
            raise NoForm("the classes are not the last dimension")
        tangents = any(map(compat_fx.is_tangent, graph.find_nodes(op="placeholder")))
        if logits.target is aten.convolution.default and not tangents:
            raise NoForm("in inference Inductor may lay out convolutions with the channels last")
    if any(compat_fx.may_be_recomputed(n) for core in group for n in (core.peak, core.total)):
        raise NoForm("activation checkpointing computes it again in the backward")
    for core in group:
        if core.peak.target is operator.getitem and any(
            user.args[1] == 1 and user.users for user in core.peak.args[0].users
        ):
            raise NoForm("its argmax needs a sweep as well")
    levels = levels_of(x, numbers)
    check_levels(x, levels, loss_rows.LEAST_STRIDED_BYTES if strided else None)
    check_rounding(graph, numbers, levels[-1])


def check_levels(x: Any, levels: list[Level], least: int | None = None) -> None:
    """Raise NoForm where an operation would not read these logits, of ``least`` bytes."""
    base, scale = levels[-1].base, levels[-1].scale
    if not (0 < scale < math.inf and levels[-1].softcap >= 0):
        raise NoForm("its scale is not positive")
    if not lies_in_memory(base):
        raise NoForm("its logits are computed where they are read")
    tensor = value(base)
    if not (is_contiguous(tensor) or (tensor.dim() == 2 and tensor.stride(1) == 1)):
        raise NoForm("the logits are not rows of one memory")
    if 8 * numel(value(x)) < 7 * numel(tensor):
        raise NoForm("only a part of the rows in memory is used")
    check_size(tensor, least)


def _check_sweeps(graph: Any, numbers: Numbers, group: list[Core]) -> None:
    """Raise where the forward sweeps the rows again for a sum made of the statistics: stock sums
    while it has the row, and was faster (benchmarks/NOTES.md). What ``cross_entropy`` makes of the
    statistics, or in their sweep, is none; where it is weighted by what can't be, the backward
    pays for it."""
    from inductor_ext.lowerings import row_sums  # which is behind this

    folds = registry.is_enabled("cross_entropy")
    x = group[0].x
    totals = {core.total for core in cores(graph, numbers)}
    tangents = [n for n in graph.find_nodes(op="placeholder") if compat_fx.is_tangent(n)]
    made = reached([n for core in group for n in (core.peak, core.total)]) - reached(tangents)
    for node in made - totals:
        if (
            node.target in SUMS
            and same_shape(value(node.args[0]).shape, value(x).shape)
            and value(x).dim() - 1 in reduced(node)
            and not (
                folds
                and (
                    tangents
                    or not _is_weighted(node.args[0], x)
                    or row_sums.closes(graph, numbers, node, group[0].dim)
                )
            )
        ):
            raise NoForm("another sum sweeps the rows again")


def _check_values(graph: Any, group: list[Core], of_tangent: set[Any]) -> None:
    """Raise where values are stored, or summed over their classes, before the backward: classes
    that are strided in memory stock keeps in registers for that, if they are few."""
    x, dim = group[0].x, group[0].dim
    totals = {core.total for core in group}
    made = reached([n for core in group for n in (core.peak, core.total)]) - of_tangent
    for node in made - totals:
        if not isinstance(value(node), torch.Tensor):
            continue
        if node.target in SUMS and same_shape(value(node.args[0]).shape, value(x).shape):
            if dim in reduced(node):
                raise NoForm("another sum sweeps the classes again")
        elif same_shape([value(node).numel()], [value(x).numel()]):
            for user in node.users:
                inside = user.target in (*SUMS, aten.gather.default) or matching.is_view(user)
                if user.op != "output" and (
                    user in of_tangent or inside or matching.is_pointwise(user)
                ):
                    continue
                raise NoForm("its values are stored")


def _emit_strided(graph: Any, numbers: Numbers, group: list[Core]) -> None:
    """Put the statistics of classes that are strided in memory in place of a group's own."""
    x, dim, editor = group[0].x, group[0].dim, Editor(graph)
    last = levels_of(x, numbers)[-1]
    rows = RowValues(graph, numbers, editor, x, [last])
    places = {c.peak if c.peak.target is aten.amax.default else c.peak.args[0] for c in group}
    editor.before(next(node for node in graph.nodes if node in places))
    base = classes_strided.places_apart(rows, last.base, dim)
    operation = editor.call(STRIDED, base, last.scale, last.softcap)
    wanted = rows.sizes(row_shape(x, dim))
    pair = [
        editor.call(aten.view.default, editor.call(operator.getitem, operation, i), wanted)
        for i in range(2)
    ]
    put_pair(editor, group, *pair)
    editing.erase_unused(graph, replaced(group))
    editor.drop_unused()
    store_rows(graph, pair)


def _is_weighted(node: Any, x: Any) -> bool:
    """Whether something as large as the logits x, and not made of them, takes part in ``node``."""
    seen, stack = {x, uncast(x)}, [node]
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        tensor = value(source)
        if matching.is_pointwise(source) or matching.is_view(source):
            stack.extend(source.all_input_nodes)
        elif isinstance(tensor, torch.Tensor) and same_shape([tensor.numel()], [value(x).numel()]):
            return True
    return False


def _emit(graph: Any, numbers: Numbers, group: list[Core]) -> None:
    """Put the operation's results in place of the maxima and sums of softmaxes of equal logits."""
    x, editor = group[0].x, Editor(graph)
    levels = levels_of(x, numbers)
    rows = RowValues(graph, numbers, editor, x, levels)
    last, level = levels[-1], len(levels) - 1
    places = {c.peak if c.peak.target is aten.amax.default else c.peak.args[0] for c in group}
    editor.before(next(node for node in graph.nodes if node in places))
    base = last.base
    if value(base).dim() != 2:
        base = editor.call(aten.view.default, base, rows.sizes([-1, value(base).shape[-1]]))
    shapes = {core.x: rows.sizes(row_shape(core.x, -1)) for core in group}
    for low in levels[1:]:
        rows.sizes(value(low.cut.args[0]).shape[:-1])  # NoForm is raised before the operation is
    operation = editor.call(STATISTICS, base, False, last.scale, last.softcap)
    pair = [rows.lower(editor.call(operator.getitem, operation, i), level) for i in range(2)]
    made = []
    for own, shape in shapes.items():  # in several shapes, maybe
        peak, total = (rows.shaped(row, shape) for row in pair)
        put_pair(editor, [core for core in group if core.x is own], peak, total)
        made.append(Core(own, group[0].dim, peak, total, False))
    editing.erase_unused(graph, replaced(group))
    editor.drop_unused()
    remember(operation, made)
    store_rows(graph, pair)
    for own in shapes:
        _sum_rows_first(editor, own, operation)


def _sum_rows_first(editor: Editor, x: Any, operation: Any) -> None:
    """Sum what is made of the statistics over rows first, if it is summed over all: Inductor would
    cut all of it in pieces of one length, which begin anywhere in a row."""
    last = value(x).dim() - 1
    made = reached([operation])
    for node in [n for n in made if n.target in SUMS]:
        source, dims = node.args[0], reduced(node)
        if (
            not same_shape(value(source).shape, value(x).shape)
            or last not in dims
            or len(dims) == 1
            or not {value(source).dtype, value(node).dtype} <= set(NARROW)
        ):
            continue
        editor.before(node)
        editor.forget()
        op = aten.mean.dim if node.target in MEANS else aten.sum.dim_IntList
        total = editor.call(op, editor.to(source, torch.float32), [last], True)
        dims.remove(last)
        total = editor.call(op, total, dims, True)
        keeps = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
        if not keeps:
            total = editor.call(aten.squeeze.dims, total, [*dims, last])
        node.replace_all_uses_with(editor.to(total, value(node).dtype))
        editing.erase_unused(editor.graph, [node])


def below_of(graph: Any, numbers: Numbers, editor: Editor, operation: Any, core: Core) -> Any:
    """The sum of the logits less their maximum over each row, in the shape of ``core``'s maximum,
    out of the operation that makes it; see ``settle``. Raises NoForm."""
    levels = levels_of(core.x, numbers)
    rows = RowValues(graph, numbers, editor, core.x, levels)
    shape = rows.sizes(row_shape(core.x, -1))
    _set_below(operation, True)
    below = editor.call(operator.getitem, operation, 2)
    return rows.shaped(rows.lower(below, len(levels) - 1), shape)


def settle(operation: Any) -> None:
    """Have an operation make the sum of ``below_of`` only if something uses it."""
    _set_below(operation, any(user.args[1] == 2 and user.users for user in operation.users))


def _set_below(operation: Any, below: bool) -> None:
    x, before, *others = operation.args
    if below != before:
        operation.args = (x, below, *others)
        with torch.no_grad():
            operation.meta["val"] = STATISTICS(value(x), below, *others)


def _groups(graph: Any, numbers: Numbers) -> list[list[Core]]:
    """The long softmaxes with equal logits."""
    groups: dict[Any, list[Core]] = {}
    for core in cores(graph, numbers):
        strided = classes_strided.strided(core) is not None
        if is_long(core.x, core.dim, classes_strided.CLASSES - 1 if strided else LONG):
            key: Any = core.x, core.dim
            if core.dim == value(core.x).dim() - 1:
                key = key_of(levels_of(core.x, numbers), numbers)
            groups.setdefault(key, []).append(core)
    return list(groups.values())


def _take_gradient(graph: Any, y: Any, log: bool, dim: int, here: str) -> None:
    """The gradient of a softmax whose values are y, where one kernel is faster than stock."""
    found = softmax_gradients.match(y, log, dim)
    if found is not None:
        softmax_gradients.emit(graph, y, log, dim, *found)
        why = "a row is too long to be in L2 when stock reads it a second time"
        if dim < value(y).dim() - 1:
            why = "a thread has all classes of its places"
        report.record(
            report.Decision(NAME, True, "softmax_backward", why, f"{here}, gradient", "heuristic")
        )


def rewrite(graph: Any) -> None:
    """The pass over a joint graph."""
    if not graph.find_nodes(op="call_function", target=aten.exp.default):
        return
    numbers = Numbers(graph)
    tangents = [n for n in graph.find_nodes(op="placeholder") if compat_fx.is_tangent(n)]
    of_tangent = reached(tangents)
    for group in _groups(graph, numbers):
        here, softmaxes = group[0].site(), len({numbers.of(core.total) for core in group})
        try:
            check(graph, numbers, group)
            levels, dim = levels_of(group[0].x, numbers), group[0].dim
            strided = dim != value(group[0].x).dim() - 1
            whole = None
            if not strided or classes_strided.has_values(group[0]):
                whole = softmax_values.written(group, levels, of_tangent)
            if strided and whole is None:
                _check_values(graph, group, of_tangent)
                _emit_strided(graph, numbers, group)
                why = "one read of the logits"
                report.record(
                    report.Decision(NAME, True, "class_statistics", why, here, "heuristic")
                )
                continue
            if whole is not None:
                y = softmax_values.emit(graph, numbers, group[0], levels, *whole)
                _take_gradient(graph, y, whole[1], dim, here)
            else:
                _check_sweeps(graph, numbers, group)
                _emit(graph, numbers, group)
        except NoForm as reason:
            choosing.leave(NAME, here, str(reason))
        else:
            chosen, why = "row_statistics", "one read of the logits"
            if whole is not None:
                chosen, why = "softmax_forward", "one read of the logits, one write of the values"
            elif softmaxes > 1:
                why = f"one read of the logits for {softmaxes} softmaxes"
            report.record(report.Decision(NAME, True, chosen, why, here, source="heuristic"))
    editing.check(graph)


registry.register(registry.Lowering(NAME, passes={"early_joint": rewrite}))
