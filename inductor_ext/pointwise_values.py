"""Values of pointwise graphs: nodes and constants, and what is known of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Const:
    """One number everywhere. Without a dtype it takes part in promotion as a Python number does."""

    value: bool | int | float
    dtype: torch.dtype | None = None


Value = Any  # a node or a Const


def packet(value: Value) -> Any:
    """The operation of a node ("aten.mul" of mul.Tensor); None of anything else."""
    return getattr(getattr(value, "target", None), "overloadpacket", None)


def dtype_of(value: Value) -> torch.dtype | None:
    """The dtype of a node or Const; None of a number without one."""
    return value.dtype if isinstance(value, Const) else value.meta["val"].dtype


def leaves(value: Value) -> frozenset[str]:
    """The names of the inputs that a value is made of."""
    return frozenset() if isinstance(value, Const) else value.meta["leaves"]


def function_of(value: Any, inputs: Sequence[str]) -> torch.fx.GraphModule:
    """A builder's node as a function of inputs by name."""
    graph = torch.fx.Graph()
    placeholders = {name: graph.placeholder(name) for name in inputs}
    copies: dict[Any, Any] = {}
    for node in in_order(value):
        if node.op == "placeholder":
            copies[node] = placeholders[str(node.target)]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[value])
    return torch.fx.GraphModule({}, graph)


def in_order(value: Any) -> list[Any]:
    """The nodes that a node is made of, each behind its arguments, itself last."""
    found: dict[Any, None] = {}
    stack = [(value, False)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            stack += [(a, False) for a in reversed(node.all_input_nodes)]
    return list(found)
