"""Losses on logits whose gradient is made in the forward, from unmodified code.

In a joint graph, where forward and backward are one, the gradient of cross entropy (mean or sum,
ignored rows, smoothing, z-loss, softcap, scale, in any spelling) is the incoming number g times
something that is known while a row of logits is on the card. So one operation reads the logits once
and writes that; the backward multiplies it by g, which moves nothing where g is 1. Stock reads the
logits twice more.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings import loss_gradient
from inductor_ext.lowerings.loss_gradient import Gradient, NoForm
from inductor_ext.lowerings.softmax_cores import Core, cores, is_long, site, why_not

# Registered on import: what a cache holds calls them, without a pass that has run.
from inductor_ext.ops import _joint as _joint
from inductor_ext.ops import _joint_more as _joint_more

from inductor_ext import choosing, compat, editing, registry, report
from inductor_ext.editing import value

aten = torch.ops.aten
NAME = "fused_loss"


def losses(graph: Any) -> list[list[Core]]:
    """The groups of softmaxes with equal logits that may be those of a loss."""
    if not graph.find_nodes(op="call_function", target=aten.exp.default):
        return []
    if not any(compat.is_tangent(node) for node in graph.nodes):
        return []
    numbers = editing.Numbers(graph)
    groups: dict[Any, list[Core]] = {}
    for core in cores(graph, numbers):
        if is_long(core.x, core.dim):
            groups.setdefault((core.x, core.dim), []).append(core)
    return list(groups.values())


def why_left(group: list[Core]) -> str | None:
    """A reason why logits can't be a site."""
    x, dim = group[0].x, group[0].dim
    reason = why_not(x, dim)
    if reason is not None:
        return reason
    if dim != value(x).dim() - 1:
        return "the classes are not the last dimension"
    if any(compat.may_be_recomputed(n) for c in group for n in (c.peak, c.total)):
        return "activation checkpointing computes it again in the backward"
    return None


def why_not_gradient(gradient: Gradient) -> str | None:
    """A reason to leave a gradient of the form."""
    dtype = value(gradient.x).dtype
    if dtype == torch.float16:
        return "an fp16 gradient may underflow before the scale of the loss reaches it"
    if compat.may_be_recomputed(gradient.x):
        return "activation checkpointing computes its logits again in the backward"
    return None


def _emit(gradient: Gradient) -> None:
    emitter = loss_gradient.Emitter(gradient, picks=False)
    target, factors = emitter.ready()
    x, columns = gradient.x, value(gradient.x).shape[-1]
    if value(x).dim() != 2:
        x = emitter.editor.call(aten.view.default, x, gradient.forms.sizes([-1, columns]))
    peak, total, below, dx = emitter.operation(
        torch.ops.inductor_ext.rows_and_gradient.default,
        x,
        target,
        *factors,
        gradient.scale,
        gradient.softcap,
    )
    emitter.statistics(peak, total, below)
    emitter.scaled(dx, gradient.node)
    emitter.done([gradient.node])


def rewrite(graph: Any) -> None:
    """The pass over a joint graph."""
    for group in losses(graph):
        here = site(group[0].x, group[0].dim, "loss")
        reason = why_left(group)
        if reason is None:
            try:
                gradient = loss_gradient.find(graph, editing.Numbers(graph), group)
                if gradient is None:
                    continue
                reason = why_not_gradient(gradient)
                if reason is None and not loss_gradient.rows_of(gradient.x):
                    reason = "the logits are not rows of one memory"
                if reason is None:
                    _emit(gradient)
                else:
                    gradient.forms.editor.drop_unused()
            except NoForm as why:
                reason = str(why)
        if reason is not None:
            choosing.leave(NAME, here, reason)
            continue
        why = "its gradient is made where the logits are read"
        report.record(report.Decision(NAME, True, "one sweep", why, here, source="heuristic"))
    editing.check(graph)


registry.register(
    registry.Lowering(
        NAME, passes={"traced_joint": rewrite}, off="the default, until it has been timed on a card"
    )
)
