"""Scans as one kernel each, with what is pointwise around them, where stock does worse.

Stock scans short rows at the speed of memory, and fuses as well; those are left. It loops over
longer ones, cuts a few long scans in tiles that wait for one another, walks columns one by one,
hands (value, index) pairs to ATen, never cuts a scan of several leaves, and turns tensors around by
kernels of their own: there the scan, its pointwise neighbours and its flips become one Triton
kernel of the graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings import scan_rule, scan_sites
from inductor_ext.lowerings.scan_members import Site
from inductor_ext.lowerings.scan_places import Step, thawed
from inductor_ext.lowerings.scan_region import CanNotFuse, Fused, fuse
from inductor_ext.lowerings.scan_rule import Left
from inductor_ext.lowerings.scan_statements import Leaf
from inductor_ext.templates import scan_launch, tilings

from inductor_ext import (
    choosing,
    compat,
    compat_fx,
    compat_scans,
    compat_user_kernels,
    editing,
    matching,
    registry,
    report,
)
from inductor_ext.editing import Editor, Numbers, value
from inductor_ext.ops import _scan_whole

aten = torch.ops.aten
_SCAN = _scan_whole.fused_scan._opoverload
NAME = "scan"


def _check(site: Site) -> None:
    """Raise where no kernel is written whatever it brings."""
    tensors = [value(n) for n in site.inputs]
    if not compat_fx.writes_triton(tensors[0].device):
        raise Left("not Triton code for CUDA")
    sizes = [compat.expr(s) for t in tensors for s in t.shape]
    if compat.has_unbacked(sizes):
        raise Left("a size depends on data")
    if any(isinstance(s, int) and s == 0 for s in site.shape):
        raise Left("there is nothing to scan")


def _label(site: Site) -> str:
    shape = "x".join(str(s) for s in site.shape)
    dtype = str(value(site.inputs[0]).dtype).removeprefix("torch.")
    return f"{site.what} {shape} {dtype} along {site.dim}"


# --- the kernel in the graph --------------------------------------------------------------------


class _Emitter:
    """Puts a kernel in place of the nodes it computes."""

    def __init__(self, graph: Any, fused: Fused) -> None:
        self.graph, self.fused, self.editor = graph, fused, Editor(graph)
        self.order = {n: i for i, n in enumerate(graph.nodes)}

    def size(self, size: Any) -> Any:
        """A size as an argument of a node. Raises CanNotFuse."""
        op: Callable[[Any, Any], Any]
        expr = compat.expr(size)
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        for node in self.graph.nodes:
            if node is self.at:
                break
            if isinstance(value(node), torch.SymInt) and compat.expr(value(node)) == expr:
                return node
        parts = expr.args
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            op, parts = operator.mul, [expr.base] * int(expr.exp)
        elif expr.is_Mul or expr.is_Add:
            op = operator.mul if expr.is_Mul else operator.add
        elif compat_user_kernels.is_floor_division(expr):
            op = operator.floordiv
        elif compat_user_kernels.is_maximum(expr):
            op = torch.sym_max
        else:
            raise CanNotFuse(f"the size {expr} is not made of sizes in the graph")
        total, *others = (self.size(part) for part in parts)
        for other in others:
            total = self.editor.call(op, total, other)
        return total

    def sizes(self, sizes: Any) -> list[Any]:
        return [self.size(s) for s in sizes]

    def viewed(self, node: Any, steps: tuple[Step, ...]) -> Any:
        for step in steps:
            if step.target is None:
                node = self.editor.call(aten.expand.default, node, self.sizes(step.args))
            else:
                target = step.target
                if target is aten.reshape.default:
                    target = aten.view.default
                node = self.editor.call(target, node, *thawed(step.args))
        return node

    def leaf(self, leaf: Leaf) -> Any:
        node = self.viewed(leaf.node, leaf.steps)
        if not editing.same_shape(value(node).shape, self.fused.site.shape):
            node = self.editor.call(aten.expand.default, node, self.sizes(self.fused.site.shape))
        return node

    def emit(self) -> None:
        """Raises CanNotFuse, the graph being as it was."""
        try:
            self._emit()
        except CanNotFuse:
            self.editor.undo()
            raise

    def _emit(self) -> None:
        fused, editor = self.fused, self.editor
        site, stored = fused.site, fused.stored
        self.at = max((s.node for s in stored), key=self.order.__getitem__)
        editor.before(self.at)
        shape = site.shape
        inputs = [self.leaf(leaf) for leaf in fused.leaves]
        if tilings.watcher is not None and tilings.watcher.whole:
            self._replace(self.whole(inputs))
            return
        laid = scan_launch.plan(
            fused.program,
            list(shape),
            [value(n).stride() for n in inputs],
            [s.strides for s in stored],
            site.dim,
            hint=lambda size: compat.hint(compat.expr(size)),
            fetches=scan_launch.can_fetch(value(inputs[0]).device),
            aligned=scan_launch.are_aligned([value(n) for n in inputs]),
            units=scan_launch.units(value(inputs[0]).device),
        )
        like = value(inputs[0])
        with like.fake_mode:
            tensors = {f"x{i}": n for i, n in enumerate(inputs)}
            for i, out in enumerate(stored):
                tensors[f"y{i}"] = editor.call(
                    aten.empty_strided.default,
                    self.sizes(shape),
                    self.sizes(out.strides),
                    dtype=value(out.node).dtype,
                    device=like.device,
                )
                editor.forget()
            if not isinstance(laid.workspace, int) or laid.workspace:
                tensors["workspace"] = editor.call(
                    aten.full.default,
                    [self.size(laid.workspace)],
                    0,
                    dtype=torch.int64,
                    device=like.device,
                )
        constants, arguments = dict(laid.constants), {}
        for name, given in laid.arguments.items():
            if isinstance(given, str):
                arguments[name] = tensors[given]
            else:
                size = self.size(given)
                if isinstance(size, int) and size >= 2**31 and not compat_user_kernels.takes_wide():
                    raise CanNotFuse("this torch gives a kernel no sizes from 2^31 on")
                (constants if isinstance(size, int) else arguments)[name] = size
        written = [n for n, slot in laid.arguments.items() if str(slot)[0] in "yw"]
        call = self.kernel(laid, constants, arguments, written)
        names = [f"y{i}_ptr" for i in range(len(stored))]
        self._replace([editor.call(operator.getitem, call, name) for name in names])

    def _replace(self, results: list[Any]) -> None:
        fused, stored = self.fused, self.fused.stored
        for y, out in zip(results, stored, strict=True):
            out.node.replace_all_uses_with(self.viewed(y, out.steps))
        compat_user_kernels.sort_graph(self.graph)
        editing.erase_unused(self.graph, [s.node for s in stored])
        ours = {*fused.nodes, fused.site.node}  # all of them have a value and no effect
        for node in reversed(list(self.graph.nodes)):
            if node in ours and not node.users:
                self.graph.erase_node(node)

    def whole(self, inputs: list[Any]) -> list[Any]:
        """The results of an operation, for ``tune``."""
        fused, call = self.fused, self.editor.call
        strides = [self.size(s) for out in fused.stored for s in out.strides]
        shape, name = self.sizes(fused.site.shape), _scan_whole.name_of(fused.program)
        with value(inputs[0]).fake_mode:
            made = call(_SCAN, inputs, name, shape, strides, fused.site.dim)
            return [call(operator.getitem, made, i) for i in range(len(fused.stored))]

    def kernel(self, laid: Any, constants: Any, arguments: Any, written: list[str]) -> Any:
        grid = self.sizes(laid.grid)
        target, kwargs = compat_user_kernels.kernel_call(
            laid.configured, constants, grid, arguments
        )
        kwargs["tensors_to_clone"] = written
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, (), kwargs)
        node.meta["val"] = {name: value(arguments[name]) for name in written}
        return node


def _is_result(node: Any) -> bool:
    """Whether a graph gives a node's value, or a view of it."""
    return any(
        user.op == "output"
        or ((matching.is_view(user) or user.target is operator.getitem) and _is_result(user))
        for user in node.users
    )


def rewrite(graph: Any) -> None:
    """The pass over a graph behind autograd."""
    scans = [n for n in graph.nodes if scan_sites.is_scan(n)]
    numbers = Numbers(graph) if len(scans) > 1 else None
    for node in scans:
        same = node if numbers is None else numbers.of(node)
        # What is equal is computed once, but two results of a graph are two tensors.
        if same is not node and not (_is_result(node) and _is_result(same)):
            node.replace_all_uses_with(same)
            editing.erase_unused(graph, [node])
    # Recurrences come before the scans that they are made of.
    ends = [n for n in graph.nodes if scan_sites.recurrence_of(n)] if numbers is not None else []
    for node in [*ends, *scans]:
        if compat_fx.is_erased(node) or not node.users:
            continue
        here = str(node.target)
        # While sites are measured, those that plans describe are left to stock; a scan is none.
        forced = None if choosing.is_recording() else choosing.forced_choice(NAME)
        try:
            if forced is not None and re.fullmatch(forced, choosing.STOCK):
                why = f"forced to {forced}"
                report.record(report.Decision(NAME, False, choosing.STOCK, why, here, "forced"))
                continue
            site = scan_sites.site_of(node)
            here = _label(site)
            _check(site)
            fused = fuse(site)
            why = f"forced to {forced}" if forced is not None else scan_rule.why(fused)
            _Emitter(graph, fused).emit()
        except (scan_sites.NoSite, CanNotFuse, Left) as reason:
            choosing.leave(NAME, here, str(reason))
        else:
            source = "heuristic" if forced is None else "forced"
            around = sum(matching.is_pointwise(n) for n in fused.nodes)
            with_what = f", with {around} pointwise operations" if around else ""
            report.record(report.Decision(NAME, True, NAME, why + with_what, here, source))
    editing.check(graph)


compat_scans.trace_long_scans()
registry.register(registry.Lowering(NAME, passes={"post_grad": rewrite}))
