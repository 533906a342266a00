"""Decompose-K's partial product, compiled while AOTAutograd traces.

Triton takes longer over a product on tensor cores than Inductor over all of a small graph, so what
a first call waits for is that kernel. Its text depends on the product's operands alone. Where a
program is in no cache its products are read off the graph as it was written, and each is lowered by
itself: a worker is given the kernel then, in front of AOTAutograd. At the site it is asked for by
its text, so nothing is taken on trust: a product that was misread costs a worker's time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from inductor_ext.lowerings.decompose_k_candidates import NAME
from inductor_ext.lowerings.decompose_k_tilings import worth_it

from inductor_ext import choosing, compat, compat_ir, compat_pre_grad, config, registry, report

# A larger graph takes Inductor longer than a kernel takes Triton.
MOST_NODES, MOST_PRODUCTS = 64, 4
DTYPES = (torch.bfloat16, torch.float16)

# target: where the factors are among the arguments
_PRODUCTS: dict[Any, int] = {
    **dict.fromkeys((torch.matmul, operator.matmul, torch.mm, "matmul", "mm"), 0),
    **dict.fromkeys((torch.addmm, "addmm"), 1),
}
_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
_ROW_REDUCTIONS = ("softmax", "norm", "max", "sum", "topk")


def begin(gm: Any) -> None:
    """Give workers the partial products of a program in torch functions that is in no cache."""
    if not registry.is_enabled(NAME) or choosing.is_recording() or compat.wants_measurement():
        return
    if len(gm.graph.nodes) > MOST_NODES or not compat_ir.workers_are_up():
        return
    try:
        with report.muted():
            for a, b in _few(_products(gm.graph)):
                compat_ir.begin_kernel_of(torch.ops.aten.mm.default, a, b)
    except Exception as error:  # what is not begun here is begun at the site
        if config.strict:
            raise
        report.log.debug("the head start of decompose_k failed: %r", error)


def _few(products: Iterator[Any]) -> list[Any]:
    """The first of the different ones."""
    found = {tuple((x.shape, x.stride(), x.dtype) for x in pair): pair for pair in products}
    return list(found.values())[:MOST_PRODUCTS]


def _products(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Fake operands [M, K] and [K, N], as they will be, of products whose right one is an input."""
    inputs = [_value(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    memory = {compat_pre_grad.storage_key(x) for x in inputs if x is not None}
    for node in graph.nodes:
        if compat_pre_grad.enters_autocast(node.target):
            return
        operands = _operands(node)
        if operands is None or any(_reduces_rows(user) for user in node.users):
            continue
        a, b = operands
        if compat_pre_grad.storage_key(b) not in memory or b.storage_offset() != 0:
            continue
        sms = compat.multiprocessors(a.device)
        if worth_it(a.shape[0], b.shape[1], a.shape[1], 1, a.dtype.itemsize, sms) is None:
            yield operands


def _reduces_rows(node: Any) -> bool:
    """Whether a node may end in a reduction of rows, for which another sum is chosen."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(word in name for word in _ROW_REDUCTIONS)


def _operands(node: Any) -> tuple[Any, Any] | None:
    """The factors of a product as matrices; None for other nodes and for sizes that vary."""
    if node.op not in ("call_function", "call_method"):
        return None
    linear = node.target in _LINEAR
    at = 0 if linear else _PRODUCTS.get(node.target)
    if at is None or len(node.args) < at + 2:
        return None
    a, b = (_value(x) for x in node.args[at : at + 2])
    if a is None or b is None or b.dim() != 2 or a.dim() < 2 or a.dtype != b.dtype:
        return None
    sizes = (*a.shape, *a.stride(), *b.shape, *b.stride())
    if a.dtype not in DTYPES or a.device.type != "cuda" or not all(type(s) is int for s in sizes):
        return None
    with compat_pre_grad.replaying(compat_pre_grad.fake_mode_of(a)):
        a = a.detach().reshape(-1, a.shape[-1])
        return a, b.detach().t() if linear else b.detach()


def _value(node: Any) -> Any:
    """The fake tensor of a node."""
    value = getattr(node, "meta", {}).get("example_value")
    return value if compat_pre_grad.fake_mode_of(value) is not None else None


compat_pre_grad.on_cache_miss(begin)
