"""Private names about fx graphs before they are lowered: where values come from, and what Inductor
and AOTAutograd will make of a node."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@functools.cache
def scaled_softmax_patterns() -> Any:
    """The entry of the joint passes that rewrites softmax(scale * x)."""
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.pattern_matcher import PatternMatcherPass

    stock = [p for p in joint_graph.pass_patterns if isinstance(p, PatternMatcherPass)]
    return next(p for p in stock if p is not joint_graph.patterns)


def writes_triton(device: torch.device) -> bool:
    """Whether Inductor writes Triton code for this device."""
    from torch._inductor import config

    return bool(device.type == "cuda" and config.cuda_backend == "triton")


def is_extern(op: Any) -> bool:
    """Whether Inductor calls an operation instead of generating code for it."""
    from torch._inductor import lowering

    return op not in lowering.lowerings or op in lowering.fallbacks


def reads_inlined() -> int:
    """How many reads a pointwise computation may have that Inductor inlines into several uses."""
    from torch._inductor import config

    return int(config.realize_reads_threshold)


def rounds_in_between() -> bool:
    """Whether Inductor rounds what it does not store to the dtype that eager would store."""
    from torch._inductor import config

    return bool(config.emulate_precision_casts)


def into_memory() -> Any:
    """A prim for fx graphs, ``op(x, strides)``: x, computed into a buffer instead of inlined."""
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order


def is_tangent(node: Any) -> bool:
    """Whether an fx node of a joint graph is a gradient that comes in."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def differentiated(graph: Any, tangent: Any) -> list[Any]:
    """The results of a joint graph's forward that a gradient which comes in is the gradient of."""
    desc, results = getattr(tangent.meta.get("desc"), "output", None), graph.output_node()
    descs = results.meta.get("desc")
    if desc is None or descs is None:
        return []
    pairs = zip(results.args[0], descs, strict=True)
    return [n for n, of in pairs if of == desc and isinstance(n, torch.fx.Node)]


def may_be_recomputed(node: Any) -> bool:
    """Whether activation checkpointing has a say in when a node of a joint graph is computed."""
    return node.meta.get("recompute") is not None


def has_memory_budget() -> bool:
    """Whether AOTAutograd may compute anything again in the backward to save memory."""
    from torch._functorch import config

    return config.activation_memory_budget < 1


def is_erased(node: Any) -> bool:
    """Whether an fx node was taken out of its graph."""
    return bool(node._erased)


class Snapshot:
    """An fx graph as it is now: ``restore`` makes it that again, with the same nodes under the same
    names in the same order, also of their users, which decides what later passes do."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._nodes = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, dict(n.meta), list(n.users))
            for n in graph.nodes
        ]
        self._names = {k: copy.copy(v) for k, v in vars(graph._graph_namespace).items()}
        module = graph.owning_module
        self._children = None if module is None else dict(module._modules)

    def restore(self) -> None:
        graph, kept = self._graph, {n for n, *_ in self._nodes}
        new = [n for n in graph.nodes if n not in kept]
        for node, op, target, args, kwargs, name, meta, _ in self._nodes:
            if node._erased:
                # It still points at its former neighbours, and would be taken out between them.
                node._prev = node._next = node
                node._erased = False
            node.op, node.target, node.args, node.kwargs = op, target, args, kwargs
            if node.name != name:
                node.name = name
            node.meta.clear()
            node.meta.update(meta)
        for node in new:
            node.args, node.kwargs = (), {}
        for node in new:
            graph.erase_node(node)
        table = graph._find_nodes_lookup_table = type(graph._find_nodes_lookup_table)()
        for node, *_, users in self._nodes:
            graph._root.prepend(node)  # the last one
            table.insert(node)
            node.users.clear()
            node.users.update(dict.fromkeys(users))
        graph._len = len(self._nodes)
        vars(graph._graph_namespace).update(self._names)
        if self._children is not None:
            graph.owning_module._modules.clear()
            graph.owning_module._modules.update(self._children)
            graph.owning_module.recompile()


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one fake mode share memory, as AOTAutograd compares values."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return bool(StorageWeakRef(one.untyped_storage()) == StorageWeakRef(other.untyped_storage()))


def tensor_meta(tensor: torch.Tensor) -> Any:
    """What passes read of a node's value besides the value."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(tensor)


def apart(fn: Callable[[], Result]) -> Result:
    """``fn()`` in a thread of its own, where nothing is being traced or differentiated."""
    # Without a card, torch 2.11 crashes where fake tensors ask for this in a second thread first.
    torch._C._ensureCUDADeviceGuardSet()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(fn).result()


def functional_graph(fn: Any, tensors: Any, decompose: bool = False) -> Any:
    """``fn`` of tensors, which may take gradients, as aten operations that write nothing;
    ``decompose``: what torch takes apart for every compiler is taken apart."""
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(fn)(*tensors)
    functional = torch.func.functionalize(traced, remove="mutations")
    table = core_aten_decompositions() if decompose else {}
    return make_fx(functional, decomposition_table=table)(*tensors).graph


def pointwise_graph(fn: Any, tensors: Any) -> Any:
    """``fn`` of tensors as aten operations on fake tensors, whose values nothing can depend on."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fake = functools.partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)
    traced = fake(fn)(*tensors)
    targets = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    if not any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets):
        return traced.graph
    functional = torch.func.functionalize(traced, remove="mutations")
    return fake(functional)(*tensors).graph


def known_number(tensor: Any) -> Any:
    """The number that a tensor of one element holds; None where it is not known while compiling."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
        return None
    tensor = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    return None if tensor is None else tensor.item()


def inductor_graph(fn: Any, tensors: Any) -> Any:
    """``fn`` of tensors as a graph of the operations that Inductor has code for."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    trace = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")
    return trace(*tensors).graph
