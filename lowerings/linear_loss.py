"""Losses of a linear layer's outputs, whose logits exist in one operation only.

Where logits are h W^T + bias and nothing but the loss reads them, one operation makes them, and in
their memory their gradient, with the loss's statistics and the gradients of h, W and bias. More
logits than it makes at once are left: it would take chunks of rows, which are slower than stock.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from inductor_ext.lowerings import loss_gradient
from inductor_ext.lowerings.loss_gradient import Gradient, NoForm

from inductor_ext import compat, compat_fx
from inductor_ext.editing import Numbers, same_shape, value
from inductor_ext.ops._linear_chunks import MEMORY, chunk_rows

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.addmm.default}


@dataclasses.dataclass
class Linear:
    """x = h w^T + bias, and the nodes that are the gradients of h, w, w^T and bias."""

    h: Any
    w: Any
    bias: Any
    dh: list[Any] = dataclasses.field(default_factory=list)
    dw: list[Any] = dataclasses.field(default_factory=list)
    dw_t: list[Any] = dataclasses.field(default_factory=list)
    db: list[Any] = dataclasses.field(default_factory=list)
    sizes: list[Any] = dataclasses.field(default_factory=list)  # of the logits


def is_linear(x: Any) -> bool:
    """Whether logits come straight out of a linear layer."""
    return x.target in _PRODUCTS and not x.kwargs


def _transposed(node: Any) -> Any:
    """a of a^T; None for anything else."""
    flipped = node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [-1, -2])
    return node.args[0] if flipped or node.target is aten.t.default else None


def _settled(node: Any) -> Any:
    """A matrix without pairs of transpositions, and views of its own shape."""
    while True:
        inner = _transposed(node)
        twice = None if inner is None else _transposed(inner)
        if twice is not None:
            node = twice
        elif node.target is aten.view.default and same_shape(
            value(node).shape, value(node.args[0]).shape
        ):
            node = node.args[0]
        else:
            return node


def match(gradient: Gradient, numbers: Numbers) -> Linear:
    """The linear layer in front of a loss; raises NoForm where something else needs the logits or
    their gradient."""
    if not is_linear(gradient.x):
        raise NoForm("its logits are not all that comes out of the layer")
    *bias, h, w_t = gradient.x.args
    w = _transposed(w_t)
    if w is None:
        raise NoForm("its weight is not [V, H]")
    linear = Linear(h, w, bias[0] if bias else None)
    if bias and value(bias[0]).dim() != 1:
        raise NoForm("its bias is not [V]")
    if len({value(n).dtype for n in (h, w, *bias)}) > 1:
        raise NoForm("it is of mixed dtypes")
    rows, hidden, classes = value(h).shape[0], value(h).shape[1], value(w).shape[0]
    rows, hidden, classes = (compat.hint(compat.expr(n)) for n in (rows, hidden, classes))
    if chunk_rows(rows, hidden, classes, value(h).dtype.itemsize, MEMORY) < rows:
        raise NoForm(
            "all of its logits at once take more memory, but less time than chunks: "
            "ops.linear_cross_entropy makes them in chunks"
        )
    linear.sizes = _check_logits(gradient)

    def same(a: Any, b: Any) -> bool:
        return numbers.of(_settled(a)) is numbers.of(_settled(b))

    for user in loss_gradient.behind_views(gradient.node):
        dx = next(n for n in user.all_input_nodes if gradient.forms.kind(n)[0] == "whole")
        if not same_shape(value(dx).shape, value(gradient.x).shape):
            raise NoForm(f"{user} reads the gradient of the logits")
        if user.target is aten.mm.default and user.args[0] is dx and same(user.args[1], w):
            linear.dh.append(user)
        elif user.target is aten.mm.default and user.args[1] is dx and _is_t(user.args[0], h, same):
            linear.dw_t.append(user)
        elif _transposed(user) is not None:
            for product in user.users:
                reads = product.target is aten.mm.default and product.args[0] is user
                if not reads or not same(product.args[1], h):
                    raise NoForm(f"{product} reads the gradient of the logits")
                linear.dw.append(product)
        elif linear.bias is not None and _is_sum(user, value(linear.bias).dtype):
            linear.db.append(user)
        else:
            raise NoForm(f"{user} reads the gradient of the logits")
    if any(map(compat_fx.may_be_recomputed, (*linear.dh, *linear.dw, *linear.dw_t))):
        raise NoForm("activation checkpointing has a say in its gradient")
    return linear


def _is_t(node: Any, h: Any, same: Any) -> bool:
    inner = _transposed(node)
    return inner is not None and same(inner, h)


def _is_sum(node: Any, dtype: torch.dtype) -> bool:
    """Whether a node sums over the rows, into the bias's dtype."""
    return (
        node.target is aten.sum.dim_IntList
        and list(node.args[1]) in ([0], [-2])
        and value(node).dtype == dtype
    )


def _check_logits(gradient: Gradient) -> list[Any]:
    """Raise where something uses the logits that is not replaced; returns uses of their sizes."""
    forms = gradient.forms
    replaced = {node for node, _ in (*gradient.sums, *gradient.picks)}
    replaced |= {gradient.node}
    for core in forms.group:
        replaced |= {core.total, core.peak}
        if core.peak.target is not aten.amax.default and len(core.peak.args[0].users) == 1:
            replaced.add(core.peak.args[0])
    seen: dict[Any, None] = {}
    sizes, stack = [], [gradient.x]
    while stack:
        for user in stack.pop().users:
            if user in replaced or user in seen:
                continue
            seen[user] = None
            if user.target is aten.sym_size.int:
                sizes.append(user)
                continue
            if forms.kind(user)[0] != "whole" or user.op != "call_function":
                raise NoForm(f"{user} reads the logits as well")
            stack.append(user)
    return sizes


def emit(gradient: Gradient, linear: Linear) -> None:
    """Put the operation in the place of the layer, of its loss's softmaxes and of its gradients."""
    emitter = loss_gradient.Emitter(gradient)
    for node in linear.sizes:
        emitter.sized(node)
    target, factors = emitter.ready()
    wanted = [bool(linear.dh), bool(linear.dw or linear.dw_t), bool(linear.db)]
    peak, total, below, picked, dh, dw, db = emitter.operation(
        torch.ops.inductor_ext.linear_rows_and_gradient.default,
        linear.h,
        linear.w,
        linear.bias,
        target,
        *factors,
        wanted,
        MEMORY,
        gradient.scale,
        gradient.softcap,
    )
    emitter.statistics(peak, total, below, picked)
    for made, nodes in ((dh, linear.dh), (dw, linear.dw), (db, linear.db)):
        for node in nodes:
            emitter.scaled(made, node)
    for node in linear.dw_t:
        emitter.scaled(dw, node, transposed=True)
    emitter.done([*linear.dh, *linear.dw, *linear.dw_t, *linear.db, gradient.node])
