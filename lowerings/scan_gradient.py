"""``scan_gradient``: gradients of ``associative_scan`` and ``cumprod``, in front of AOTAutograd.

torch's own gradient of several leaves takes every leaf for one that only goes into its own result:
grad(a) of h = a h' + b is 0 for a loss on h. Before 2.15 it also costs T^2 for one leaf. Where a
gradient is recorded the scan is replaced by an operation with the right one, linear in T; where
the combine function has none that is known, the gradient raises. ``cumprod``'s is right but slow.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from inductor_ext.lowerings import sites

from inductor_ext import compat_fx, compat_ir, compat_pre_grad, registry
from inductor_ext.ops import (
    _combine,
    _cumprod,  # noqa: F401  (defines the operation)
    _recurrence,
)
from inductor_ext.ops import _combine_text as texts
from inductor_ext.shadow import value_of

NAME = "scan_gradient"
SCAN = _combine._scan._opoverload
RECURRENCE = _recurrence._recurrence._opoverload
PRODUCT = torch.ops.inductor_ext.cumprod.default
REFUSAL = _combine._no_gradient._opoverload
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rewrite(graph: Any) -> None:
    """The pass over a graph of torch functions."""
    scans = [n for n in graph.nodes if n.target is torch.ops.higher_order.associative_scan]
    products = [n for n in graph.nodes if n.target in (torch.cumprod, "cumprod")]
    if not scans and not products:
        return
    recording = _recording(graph)
    differentiated = [n for n in scans if recording[n] and any(map(_has_gradient, n.args[1]))]
    products = [n for n in products if recording[n] and n.args and _has_gradient(n.args[0])]
    modes = [compat_pre_grad.fake_mode_of(value_of(n)) for n in graph.nodes]
    mode = next((m for m in modes if m is not None), None)
    if mode is None:
        return
    with compat_pre_grad.replaying(mode):
        for scan in scans:
            if _is_mismatched(scan):
                _reject(scan)
            elif scan in differentiated:
                _replace(graph, scan)
        for product in products:
            _replace_product(graph, product)
    graph.lint()
    graph.owning_module.recompile()


def _has_gradient(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _recording(graph: Any) -> dict[Any, bool]:
    """Whether gradients are recorded where a node runs."""
    found, now = {}, torch.is_grad_enabled()
    for node in graph.nodes:
        if compat_pre_grad.sets_gradients(node.target):
            now = bool(node.args[0])
        found[node] = now
    return found


def _is_mismatched(scan: Any) -> bool:
    shapes = [value_of(x).shape for x in scan.args[1]]
    return any(shape != shapes[0] for shape in shapes)


def _reject(scan: Any) -> None:
    """Inductor gives every result the first leaf's shape. Our operation says what it expects, where
    AOTAutograd runs it."""
    xs = list(scan.args[1])
    scan.target, scan.args = SCAN, (xs, ", ".join(f"a{i}" for i in range(len(xs))), 0, False)
    site = sites.describe(f"associative_scan of {len(xs)}", xs[0], value_of(xs[0]))
    sites.fired(NAME, "refusal", site, "its leaves have several shapes")


def _replace(graph: Any, scan: Any) -> None:
    xs = list(scan.args[1])
    site = sites.describe(f"associative_scan of {len(xs)}", xs[0], value_of(xs[0]))
    try:
        text = _text(graph, scan, xs)
    except Exception as error:
        reason = str(error)
        if not isinstance(error, texts.NotPointwise):
            reason = f"its combine function was not understood ({type(error).__name__}: {error})"
        if len(xs) > 1:  # torch's would be wrong
            _refuse(graph, scan, f"the gradient of this associative_scan is not known: {reason}")
            sites.fired(NAME, "refusal", site, reason)
        else:
            sites.leave(NAME, site, reason)
        return
    _Edit(graph, scan, xs, text).apply()
    sites.fired(NAME, "operation", site, "its gradient is linear in the length")


def _text(graph: Any, scan: Any, xs: Sequence[Any]) -> str:
    """The combine function, checked to have a gradient. Raises NotPointwise."""
    function = getattr(graph.owning_module, scan.args[0].target)
    leaves = [value_of(x) for x in xs]
    if any(leaf.dtype.is_complex for leaf in leaves):
        raise texts.NotPointwise("it has a complex leaf")
    for node in function.graph.nodes:
        if _cuts_gradients(node.target):
            raise texts.NotPointwise(f"its combine function has a gradient of its own ({node})")
    lifted = function.graph.find_nodes(op="placeholder")[2 * len(xs) :]
    read = next((n for n in lifted if n.users), None)
    if read is not None:
        raise texts.NotPointwise(f"its combine function reads {read.name} from outside")
    others = [None] * len(lifted)
    text = texts.write(lambda *args: list(function(*args, *others)), [leaf[0] for leaf in leaves])
    texts.jacobian(text, tuple(texts.wide(leaf.dtype) for leaf in leaves))
    return text


def _cuts_gradients(target: Any) -> bool:
    """Whether a node's gradient may be another than that of what it computes."""
    detaches = target in ("detach", "detach_", torch.detach, torch.Tensor.detach)
    return (
        detaches
        or compat_pre_grad.sets_gradients(target)
        or compat_pre_grad.is_higher_order(target)
    )


def _refuse(graph: Any, scan: Any, reason: str) -> None:
    """The scan of detached leaves, behind it an operation whose gradient raises."""
    program = sites.Program(graph)
    program.before(scan)
    xs = list(scan.args[1])
    scan.args = (scan.args[0], tuple(program.call("detach", x) for x in xs), *scan.args[2:])
    items = [u for u in scan.users if u.target is operator.getitem]
    program.before(scan.next)
    fresh = [program.call(operator.getitem, scan, i) for i in range(len(xs))]
    results = program.call(REFUSAL, fresh, xs, reason)
    for item in items:
        program.before(item)
        item.replace_all_uses_with(program.call(operator.getitem, results, item.args[1]))
        graph.erase_node(item)


class _Edit:
    """The operation in place of a scan of ``xs``, with the views and flips around it."""

    def __init__(self, graph: Any, scan: Any, xs: list[Any], text: str) -> None:
        self.graph, self.scan, self.text = graph, scan, text
        self.reverse = all(map(_is_flip, xs))
        if self.reverse:
            xs = [x.args[0] for x in xs]
        dims = {_moved(x) for x in xs}
        self.dim = dims.pop() if len(dims) == 1 else 0
        if self.dim:
            xs = [x.args[0] for x in xs]
        self.xs = xs
        self.program = sites.Program(graph)

    def apply(self) -> None:
        self.program.before(self.scan)
        items = [u for u in self.scan.users if u.target is operator.getitem]
        for item in items:
            self._forget_unused(item)
        used = {item.args[1] for item in items if item.users}
        results = self._recurrence(used) or self._scan(used)
        for item in items:
            if item.users:
                self._use(item, results[item.args[1]])
            self.graph.erase_node(item)
        function = self.scan.args[0]
        self.graph.erase_node(self.scan)
        if not function.users:  # what holds a function of its own is not cached
            self.graph.erase_node(function)
            self.graph.owning_module.delete_submodule(function.target)

    def _forget_unused(self, item: Any) -> None:
        """``torch.associative_scan`` turns and moves every result, wanted or not."""
        for user in list(item.users):
            if _is_flip(user) or user.target is torch.movedim:
                self._forget_unused(user)
                if not user.users:
                    self.graph.erase_node(user)

    def _scan(self, used: set[int]) -> dict[int, Any]:
        whole = self.program.call(SCAN, self.xs, self.text, self.dim, self.reverse)
        return {i: self.program.call(operator.getitem, whole, i) for i in used}

    def _recurrence(self, used: set[int]) -> dict[int, Any] | None:
        """h_t = a_t h_(t-1) + b_t, of which nobody wants the products of a."""
        state = texts.affine_leaf(self.text, len(self.xs))
        if state is None or used != {state}:
            return None
        a, b = self.xs[1 - state], self.xs[state]
        if value_of(a).dtype != value_of(b).dtype or value_of(b).dtype not in _REAL:
            return None
        return {state: self.program.call(RECURRENCE, a, b, None, self.dim, self.reverse)}

    def _use(self, item: Any, result: Any) -> None:
        """Put a result, in the order of memory, where ``item`` was, in the order of the scan."""
        if self.dim:
            result = self.program.call(torch.movedim, result, self.dim, 0)
        if self.reverse:
            for user in list(item.users):
                if _is_flip(user):
                    user.replace_all_uses_with(result)
                    self.graph.erase_node(user)
            if item.users:
                result = self.program.call(torch.flip, result, [0])
        if item.users:
            item.replace_all_uses_with(result)


def _is_flip(node: Any) -> bool:
    """Whether a node turns its argument around along the first dimension."""
    return node.target in (torch.flip, "flip") and list(node.args[1:]) == [[0]] and not node.kwargs


def _moved(node: Any) -> int:
    """The dimension that a node brings to the front; 0 where it brings none."""
    if node.target is torch.movedim and len(node.args) == 3 and node.args[2] == 0:
        return int(node.args[1])
    return 0


# --- cumprod --------------------------------------------------------------------------------------


def _replace_product(graph: Any, node: Any) -> None:
    """An operation with a gradient of one kernel for ``cumprod``, whose own is three scans."""
    given = dict(zip(("x", "dim"), node.args, strict=False)) | dict(node.kwargs)
    x, dim, dtype = given["x"], given.get("dim"), given.get("dtype")
    value = value_of(x)
    dtype = value.dtype if dtype is None else dtype
    if compat_pre_grad.fake_mode_of(value) is None or not compat_fx.writes_triton(value.device):
        return
    if not isinstance(dim, int) or value.dim() == 0 or dtype not in _REAL or "out" in given:
        return
    program = sites.Program(graph)
    program.before(node)
    if dtype != value.dtype:
        x = program.call("to", x, dtype)
    node.replace_all_uses_with(program.call(PRODUCT, x, dim % value.dim()))
    graph.erase_node(node)
    site = sites.describe("cumprod", x, value)
    sites.fired(NAME, "operation", site, "its gradient is one scan, which divides by nothing")


# --- code -----------------------------------------------------------------------------------------


def lower_scan(xs: Any, combine: str, dim: int, reverse: bool) -> Any:
    """Inductor's own scan; None where it has none, so that the operation is called."""
    if not compat_fx.writes_triton(xs[0].get_device()):
        return None
    wide = [compat_ir.to_dtype(x, texts.wide(x.get_dtype())) for x in xs]
    ys = compat_ir.scan(texts.read(combine, len(xs)), wide, dim, reverse)
    if ys is None:
        return None
    return [compat_ir.to_dtype(y, x.get_dtype()) for x, y in zip(xs, ys, strict=True)]


registry.register(registry.Lowering(NAME, lower={SCAN: lower_scan}, passes={"pre_grad": rewrite}))
compat_pre_grad.accept_lifted_sizes(lambda: registry.is_enabled(NAME))
