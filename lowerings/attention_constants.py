"""Tensors of a program that are made of nothing but its own numbers, computed while compiling."""

from __future__ import annotations

import operator
from typing import Any

import torch
from inductor_ext.lowerings.mhc_entries import shape_of

from inductor_ext import compat, compat_fx
from inductor_ext.shadow import Shadow

LARGEST = 2**22  # elements of what is computed
_DEPTH = 64


def _is_made_here(seen: Shadow, node: Any, depth: int = 0) -> bool:
    """Whether a value follows from numbers in the graph, of known sizes, and not from what was
    written to memory."""
    if depth > _DEPTH or node.op != "call_function":
        return False
    if seen.is_mutated(node):
        return False
    if node.target is not operator.getitem:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        if torch.Tag.nondeterministic_seeded in target.tags or target.namespace != "aten":
            return False
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(map(compat.is_static, shape_of(node))):
            return False
        if value.numel() > LARGEST or "empty" in str(target):
            return False
    return all(_is_made_here(seen, source, depth + 1) for source in node.all_input_nodes)


def uniform(seen: Shadow, node: Any) -> Any:
    """The number that every element of a constant is; None where that is not so or not known."""
    if not _is_made_here(seen, node) or not node.all_input_nodes:
        return None
    try:
        found = compat_fx.apart(lambda: _computed(node, {}))
    except Exception:  # an operation that is not there for the CPU
        return None
    if not isinstance(found, torch.Tensor) or not found.numel():
        return None
    first = found.flatten()[0]
    return first.item() if bool((found == first).all()) else None


def _computed(node: Any, known: dict[Any, Any]) -> Any:
    if node not in known:
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda source: _computed(source, known)
        )
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        known[node] = node.target(*args, **kwargs)
    return known[node]
