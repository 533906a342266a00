"""Structural walking of the fx graph being lowered: what follows an operation, and how.

Nothing here matches spellings. A region is grown from a node along its users while each step
computes an output element from one element of each input; what stops it decides what can fuse.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from . import compat

_POINTWISE_EXTRA = {torch.ops.prims.convert_element_type.default}
_VIEWS = {
    operator.getitem,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.expand.default,
}


def is_pointwise(node: Any) -> bool:
    """Whether an fx node computes each output element from one element of each input."""
    target = node.target
    return node.op == "call_function" and (
        target in _POINTWISE_EXTRA or torch.Tag.pointwise in getattr(target, "tags", ())
    )


def pointwise_region(node: Any, limit: int = 32) -> list[Any]:
    """The nodes that Inductor can fuse behind ``node``: pointwise or views, reached from it."""
    region = {node: None}
    for later in _after(node):
        if len(region) > limit:
            break
        if (is_pointwise(later) or later.target in _VIEWS) and any(
            source in region for source in later.all_input_nodes
        ):
            region[later] = None
    return list(region)


def _after(node: Any) -> Iterator[Any]:
    later = node.next
    while later.op != "root":
        yield later
        later = later.next


_ROW_REDUCTIONS = {
    "aten.amax.default",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.amin.default",
    "aten.sum.dim_IntList",
    "aten.mean.dim",
    "aten.var_mean.correction",
    "aten._softmax.default",
    "aten._log_softmax.default",
    "prims.prepare_softmax_online.default",
}


def feeds_row_reduction(limit: int = 8192) -> bool:
    """Whether the pointwise region behind the current node ends in a reduction over its last
    dimension, of a length that one program can hold."""
    node = compat.current_node()
    if node is None:
        return False
    value = node.meta.get("val")
    if value is None or not isinstance(value.shape[-1], int) or value.shape[-1] > limit:
        return False
    region = set(pointwise_region(node))
    return any(
        user.op == "call_function" and str(user.target) in _ROW_REDUCTIONS and _over_last(user)
        for member in region
        for user in member.users
    )


def _over_last(node: Any) -> bool:
    source = node.all_input_nodes[0].meta.get("val")
    if source is None or len(node.args) < 2:
        return False
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    return [d % source.dim() for d in dims if isinstance(d, int)] == [source.dim() - 1]


def consumers_key() -> str:
    """What follows the current node, as text: part of the key of a measurement."""
    node = compat.current_node()
    if node is None:
        return ""
    parts = []
    for member in pointwise_region(node):
        value = member.meta.get("val")
        parts.append(f"{member.target}:{getattr(value, 'dtype', '')}:{member.args[1:]}")
    strides = [
        f"{tuple(s.meta['val'].shape)}/{s.meta['val'].stride()}"
        for s in node.all_input_nodes
        if isinstance(s.meta.get("val"), torch.Tensor)
    ]
    return ";".join(strides + parts)
