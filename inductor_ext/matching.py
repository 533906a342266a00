"""Structural walking of the fx graph being lowered: what follows an operation, and how.

Nothing here matches spellings. A region is grown from a node along its users while each step
computes an output element from one element of each input; what stops it decides what can fuse.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterator
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


def feeds_row_reduction(node: Any = None, limit: int = 8192) -> bool:
    """Whether the pointwise region behind ``node`` (default: the one being lowered) ends in a
    reduction over its last dimension, of a length that one program can hold."""
    node = compat.current_node() if node is None else node
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


def is_reduction(node: Any) -> bool:
    """Whether an fx node reduces, and Inductor writes code for it."""
    return node.op == "call_function" and str(node.target) in _REDUCTIONS


def _over_last(node: Any) -> bool:
    source = node.all_input_nodes[0].meta.get("val")
    if source is None or len(node.args) < 2:
        return False
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    return [d % source.dim() for d in dims if isinstance(d, int)] == [source.dim() - 1]


def consumers_key(node: Any = None) -> str:
    """What follows a node (default: the one being lowered), as text: for a measurement's key."""
    node = compat.current_node() if node is None else node
    if node is None:
        return ""
    region = {member: f"#{i}" for i, member in enumerate(pointwise_region(node))}

    def told(arg: Any) -> str:
        """An argument without the names of this graph: a member, a tensor's properties, a value."""
        if isinstance(arg, (list, tuple)):
            return f"[{','.join(map(told, arg))}]"
        if not isinstance(arg, torch.fx.Node):
            return str(arg)
        value = arg.meta.get("val")
        if arg in region or not isinstance(value, torch.Tensor):
            return region.get(arg, str(value))
        return f"{value.dtype}{tuple(value.shape)}/{value.stride()}"

    parts = []
    for member, name in region.items():
        later = {str(user.target) for user in member.users if user not in region}
        behind = sorted(later & _REDUCTIONS)  # they fuse too, where ranges are measured
        args = told([*member.args, *member.kwargs.items()])
        parts.append(f"{name}={member.target}{args}->{','.join(behind)}")
    return ";".join(parts)


# --- the whole region behind an operation ---------------------------------------------------------

# Views cost nothing, so a region may have its own copy of one that others use too.
_FREE_VIEWS = (_VIEWS - {operator.getitem}) | {
    torch.ops.aten.alias.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
}
_CONSTANTS = {
    torch.ops.aten.full.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.prims.iota.default,
}
# The numbers follow from the seed and the element's index, wherever they are computed.
_RANDOM = {"inductor_random", "inductor_randint", "inductor_lookup_seed"}
_REDUCTIONS = _ROW_REDUCTIONS | {
    "aten.any.dim",
    "aten.any.default",
    "aten.amax.default",
    "aten.amin.default",
    "aten.mean.default",
    "aten.prod.dim_int",
    "aten.sum.default",
    "aten.var.correction",
}


@dataclasses.dataclass(frozen=True)
class Region:
    """``nodes`` in graph order compute ``outputs`` from ``operands`` (tensors and sizes).

    ``erased`` are the nodes nothing else needs once the region is computed elsewhere, ``later`` the
    nodes outside that depend on the region.
    """

    site: Any
    nodes: tuple[Any, ...]
    operands: tuple[Any, ...]
    outputs: tuple[Any, ...]
    erased: tuple[Any, ...]
    later: tuple[Any, ...]

    def copy(self) -> torch.fx.GraphModule:
        """The region as a graph of its own: a placeholder per operand, a tuple of outputs."""
        root, graph = torch.nn.Module(), torch.fx.Graph()
        copies: dict[Any, Any] = {}
        for i, operand in enumerate(self.operands):
            copies[operand] = graph.placeholder(f"in{i}")
            copies[operand].meta["val"] = operand.meta["val"]
        for i, node in enumerate(self.nodes):
            if node.op == "get_attr":
                setattr(root, f"constant{i}", _attribute(node))
                copies[node] = graph.get_attr(f"constant{i}")
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[out] for out in self.outputs))
        return torch.fx.GraphModule(root, graph)


def _attribute(node: Any) -> Any:
    found = node.graph.owning_module
    for name in node.target.split("."):
        found = getattr(found, name)
    return found


def fusible_region(
    site: Any, taken: Collection[Any] = frozenset(), limit: int = 64
) -> Region | None:
    """What Inductor may fuse with ``site``: everything behind it that is pointwise, a view or a
    reduction, and what of the same kind computes only their other operands.

    No path leaves the region and comes back. Nodes in ``taken`` stay outside. None where a value
    that crosses the border is neither a tensor nor a size, or has a size that depends on data.
    """
    region = {site: None}
    later: dict[Any, None] = {}
    for node in _after(site):
        sources = node.all_input_nodes
        if not any(s in region or s in later for s in sources):
            continue
        of_tuple = node.target is operator.getitem and sources[0] in region
        fits = of_tuple or (node not in taken and len(region) < limit and _fuses(node, site))
        if fits and not any(s in later for s in sources):
            region[node] = None
        else:
            later[node] = None
    before = [n for n in site.graph.nodes if n not in region]
    feeds_site = {site}  # its factors are in memory in any case: only views of them come along
    for node in reversed(before):
        users = [u for u in node.users if u in region]
        if not users or node in taken or node in later:
            continue
        if _is_free(node):
            region[node] = None
            if any(u in feeds_site for u in users):
                feeds_site.add(node)
        elif (
            (_fuses(node, site) or _is_random(node))
            and len(users) == len(node.users)
            and len(region) < 2 * limit
            and not any(u in feeds_site for u in users)
            and not isinstance(node.meta.get("val"), (tuple, list))
        ):
            region[node] = None
    return _bordered(site, [n for n in site.graph.nodes if n in region], later)


def _bordered(site: Any, nodes: list[Any], later: dict[Any, None]) -> Region | None:
    inside = set(nodes)
    # A free node that something outside uses stays there, with a copy in the region.
    kept: set[Any] = set()
    for node in reversed(nodes):
        if _is_free(node) and any(u not in inside or u in kept for u in node.users):
            kept.add(node)
    behind = {site}
    for node in nodes:
        if any(s in behind for s in node.all_input_nodes):
            behind.add(node)
    outputs = [
        n
        for n in nodes
        if n in behind and n not in kept and any(u not in inside or u in kept for u in n.users)
    ]
    operands = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
    crossing = [n.meta.get("val") for n in (*operands, *outputs)]
    if not outputs or not all(_may_cross(value) for value in crossing):
        return None
    return Region(
        site,
        tuple(nodes),
        tuple(operands),
        tuple(outputs),
        tuple(n for n in nodes if n not in kept and n.op != "get_attr"),
        (*later, *(n for n in kept if n in behind)),
    )


def _may_cross(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not compat.has_unbacked([*map(compat.expr, (*value.shape, *value.stride()))])
    return isinstance(value, torch.SymInt) and not compat.has_unbacked([compat.expr(value)])


def _is_free(node: Any) -> bool:
    if node.op == "get_attr":
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.dim() == 0
    return node.op == "call_function" and (node.target in _FREE_VIEWS or node.target in _CONSTANTS)


def _is_random(node: Any) -> bool:
    return getattr(node.target, "namespace", "") == "prims" and (
        node.target.name().removeprefix("prims::") in _RANDOM
    )


def is_view(node: Any) -> bool:
    """Whether an fx node only looks at memory in another way."""
    return node.op == "call_function" and node.target in _FREE_VIEWS


def _first(node: Any) -> Any:
    """What a node computes; of several outputs the first."""
    values = node.meta.get("val")
    return values[0] if isinstance(values, (tuple, list)) and values else values


def _fuses(node: Any, site: Any) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    first, at_site = _first(node), _first(site)
    if not isinstance(first, torch.Tensor) or first.device != at_site.device:
        return False
    return is_pointwise(node) or node.target in _FREE_VIEWS or str(node.target) in _REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Traced:
    """A tensor in the fx graph, with what lowerings ask of IR."""

    node: Any

    @property
    def value(self) -> Any:
        """The fake tensor."""
        return self.node.meta["val"]

    def get_size(self) -> list[Any]:
        return [compat.expr(s) for s in self.value.shape]

    def get_stride(self) -> list[Any]:
        return [compat.expr(s) for s in self.value.stride()]

    def get_dtype(self) -> torch.dtype:
        return self.value.dtype

    def get_device(self) -> torch.device:
        return self.value.device


def viewed(node: Any) -> Any:
    """What a chain of views begins at."""
    while node.op == "call_function" and node.target in _FREE_VIEWS:
        node = node.all_input_nodes[0]
    return node


def is_bitcast(node: Any) -> bool:
    """Whether a node is, or is a view of, a tensor viewed in another dtype."""
    while node.op == "call_function":
        if node.target is torch.ops.aten.view.dtype:
            return True
        if node.target not in _FREE_VIEWS:
            return False
        node = node.all_input_nodes[0]
    return False
