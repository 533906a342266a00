"""Losses on logits whose gradient is made in the forward, from unmodified code.

In a joint graph, where forward and backward are one, the gradient of cross entropy (mean or sum,
ignored rows, smoothing, z-loss, softcap, scale, in any spelling) is the incoming number g times
something that is known while a row of logits is on the card. So one operation reads the logits once
and writes that; the backward multiplies it by g, which moves nothing where g is 1. Stock reads the
logits twice more. Where nothing but the loss reads the logits of a linear layer, their memory
becomes their gradient's.

Rows that are ignored get a gradient of 0 whatever they hold, also where eager multiplies NaN by 0.
That of another row whose maximum is infinite or NaN is NaN, as that of a softmax is; the gradient
of ``logsumexp`` alone is in eager NaN at the infinities only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings import classes_strided, linear_loss, loss_gradient, loss_rows
from inductor_ext.lowerings.loss_gradient import Gradient, NoForm
from inductor_ext.lowerings.loss_rows import (
    check_rounding,
    check_size,
    is_contiguous,
    key_of,
    levels_of,
    reached,
)
from inductor_ext.lowerings.scaled_gradient import SCALED, lower_scaled
from inductor_ext.lowerings.softmax_cores import (
    LONG,
    Core,
    cores,
    is_long,
    lies_in_memory,
    site,
    why_not,
)

from inductor_ext import choosing, compat_fx, editing, registry, report
from inductor_ext.editing import value
from inductor_ext.ops import _classes

aten = torch.ops.aten
NAME, LINEAR = "fused_loss", "linear_cross_entropy"
STRIDED = _classes.class_rows_and_gradient._opoverload


def _losses(graph: Any, numbers: editing.Numbers, longer: int = LONG) -> list[list[Core]]:
    """The groups of softmaxes with equal logits, of rows ``longer`` than that, that may be those of
    a loss."""
    groups: dict[Any, list[Core]] = {}
    for core in cores(graph, numbers):
        if is_long(core.x, core.dim, longer):
            last = core.dim == value(core.x).dim() - 1
            key = key_of(levels_of(core.x, numbers), numbers) if last else core.x
            groups.setdefault((key, last), []).append(core)
    return list(groups.values())


def _check_logits(group: list[Core]) -> None:
    """Raise where logits can't be a site."""
    x, dim = group[0].x, group[0].dim
    if dim != value(x).dim() - 1:
        raise NoForm("the classes are not the last dimension")
    reason = why_not(x, dim)
    if reason is not None:
        raise NoForm(reason)
    if compat_fx.has_memory_budget():
        raise NoForm("to keep to its memory budget, the backward might compute it again")
    if any(compat_fx.may_be_recomputed(n) for core in group for n in (core.peak, core.total)):
        raise NoForm("activation checkpointing computes it again in the backward")


def _check_gradient(gradient: Gradient, numbers: editing.Numbers) -> None:
    """Raise where a gradient of the form is left."""
    forms = gradient.forms
    strided = classes_strided.memory_of(gradient.x) is not None
    check_size(value(gradient.x), loss_rows.LEAST_STRIDED_BYTES if strided else None)
    check_rounding(forms.graph, numbers, forms.levels[gradient.level])
    if value(gradient.x).dtype == torch.float16:
        raise NoForm("an fp16 gradient may underflow before the scale of the loss reaches it")
    if compat_fx.may_be_recomputed(gradient.x):
        raise NoForm("activation checkpointing computes its logits again in the backward")


def _emit_rows(gradient: Gradient, numbers: editing.Numbers) -> None:
    """The gradient of logits in memory."""
    if classes_strided.memory_of(gradient.x) is not None:
        _emit_strided(gradient)
        return
    if not loss_gradient.rows_of(gradient.x):
        raise NoForm("the logits are not rows of one memory")
    if not lies_in_memory(gradient.x):
        raise NoForm("its logits are computed where they are read, and would have to be stored")
    is_result = any(n.op == "output" for n in loss_gradient.behind_views(gradient.node))
    if is_result and not is_contiguous(value(gradient.x)):
        raise NoForm("its gradient would be copied: the logits' rows are padded")
    emitter = loss_gradient.Emitter(gradient)
    target, factors = emitter.ready()
    x, columns = gradient.x, value(gradient.x).shape[-1]
    if value(x).dim() != 2:
        x = emitter.editor.call(aten.view.default, x, [-1, columns])
    scales = gradient.scale, gradient.softcap
    op = torch.ops.inductor_ext.rows_and_gradient.default
    *rows, dx = emitter.operation(op, x, target, *factors, *scales)
    emitter.statistics(*rows)
    emitter.scaled(dx, gradient.node)
    emitter.done([gradient.node])


def _emit_strided(gradient: Gradient) -> None:
    """The gradient of logits in memory whose classes are strided there."""
    logits, along = classes_strided.memory_of(gradient.x)
    emitter = loss_gradient.Emitter(gradient)
    target, factors = emitter.ready()
    call, shape = emitter.editor.call, value(logits).shape
    sizes = emitter.forms.sizes(shape)
    x = logits
    if along != 1 or len(shape) != 3:
        before = emitter.forms.sizes([math.prod(shape[:along])])
        x = call(aten.view.default, x, [*before, sizes[along], -1])
    scales = gradient.scale, gradient.softcap
    *rows, dx = emitter.operation(STRIDED, x, target, *factors, *scales)
    emitter.statistics(*rows)
    emitter.scaled(dx, gradient.node, strided=(sizes, gradient.x.args[1]))
    emitter.done([gradient.node])


def _emit_linear(gradient: Gradient, numbers: editing.Numbers) -> None:
    """The gradients of the linear layer that the logits come out of."""
    linear_loss.emit(gradient, linear_loss.match(gradient, numbers))


def _stored(group: list[Core], numbers: editing.Numbers) -> Any:
    """The logits in memory that a group is computed from."""
    return levels_of(group[0].x, numbers)[-1].base


def _take(
    graph: Any, group: list[Core], numbers: editing.Numbers, of_tangent: set[Any],
    emit: Callable[[Gradient, editing.Numbers], None],
) -> bool:  # fmt: skip
    """Rewrite the loss of a group of softmaxes with equal logits; False where it is none. Raises
    NoForm where it is left."""
    _check_logits(group)
    gradient = loss_gradient.find(graph, numbers, of_tangent, group)
    if gradient is None:
        return False
    try:
        with editing.all_or_nothing(graph):
            _check_gradient(gradient, numbers)
            emit(gradient, numbers)
    except Exception:
        gradient.forms.editor.undo()
        raise
    return True


def _take_strided(graph: Any, core: Core, logits: Any) -> bool:
    """``_take`` of a loss over classes that are strided in memory: with its classes last."""
    classes_strided.move(graph, core, logits)
    numbers = editing.Numbers(graph)
    tangents = [node for node in graph.find_nodes(op="placeholder") if compat_fx.is_tangent(node)]
    for group in _losses(graph, numbers, 0):
        memory = classes_strided.memory_of(_stored(group, numbers))
        if memory is not None and memory[0] is logits:
            return _take(graph, group, numbers, reached(tangents), _emit_rows)
    return False


class _NoLoss(Exception):
    """A softmax whose loss is none that is taken, which is no fault."""


def rewrite_strided(graph: Any) -> None:
    """The pass that takes logits in memory whose classes are strided, or leaves all as it was."""
    tangents = [node for node in graph.find_nodes(op="placeholder") if compat_fx.is_tangent(node)]
    if not tangents or not graph.find_nodes(op="call_function", target=aten.exp.default):
        return
    for core in list(cores(graph, editing.Numbers(graph))):
        if any(map(compat_fx.is_erased, (core.x, core.total))):
            continue
        if not classes_strided.is_strided(core):
            continue
        logits = classes_strided.strided(core)
        here = site(core.x, core.dim, "loss", value(logits).dtype)
        try:
            with editing.all_or_nothing(graph):
                if not _take_strided(graph, core, logits):
                    raise _NoLoss
        except _NoLoss:
            continue
        except NoForm as reason:
            choosing.leave(NAME, here, str(reason))
        except Exception as error:
            registry.failed(NAME, here, error)
        else:
            why = "its gradient is made where the logits are read"
            report.record(report.Decision(NAME, True, "one sweep, strided", why, here, "heuristic"))
    editing.check(graph)


def _rewrite(
    graph: Any, name: str, emit: Callable[[Gradient, editing.Numbers], None], chosen: str, why: str
) -> None:
    """Rewrite the losses of a joint graph, or report why one is left."""
    tangents = [node for node in graph.find_nodes(op="placeholder") if compat_fx.is_tangent(node)]
    if not tangents or not graph.find_nodes(op="call_function", target=aten.exp.default):
        return
    numbers, of_tangent = editing.Numbers(graph), reached(tangents)
    for group in _losses(graph, numbers):
        if name == LINEAR and not linear_loss.is_linear(_stored(group, numbers)):
            continue
        if name == NAME and classes_strided.is_strided(group[0]):
            continue  # judged by ``rewrite_strided``
        here = site(group[0].x, group[0].dim, "loss", value(_stored(group, numbers)).dtype)
        try:
            if not _take(graph, group, numbers, of_tangent, emit):
                continue
        except NoForm as reason:
            choosing.leave(name, here, str(reason))
        except Exception as error:
            registry.failed(name, here, error)
            numbers, of_tangent = editing.Numbers(graph), reached(tangents)
        else:
            report.record(report.Decision(name, True, chosen, why, here, source="heuristic"))
            numbers, of_tangent = editing.Numbers(graph), reached(tangents)
    editing.check(graph)


def rewrite_linear(graph: Any) -> None:
    """The pass that takes linear layers in front of a loss, before the other."""
    _rewrite(
        graph,
        LINEAR,
        _emit_linear,
        "one chunk",
        "its gradients are made while its logits are there",
    )


def rewrite(graph: Any) -> None:
    """The pass that takes logits in memory."""
    why = "its gradient is made where the logits are read"
    rewrite_strided(graph)
    _rewrite(graph, NAME, _emit_rows, "one sweep", why)


for _name, _pass in ((LINEAR, rewrite_linear), (NAME, rewrite)):
    registry.register(
        registry.Lowering(
            _name,
            lower={SCALED: functools.partial(lower_scaled, _name)},
            passes={"traced_joint": _pass},
        ),
        first=True,  # of those that scale a gradient
    )
