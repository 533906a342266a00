"""Scans as one kernel each, with what is pointwise around them, where stock does worse.

Stock scans rows that are many at the speed of memory, and fuses as well; those are left. It cuts
a few long scans in tiles that wait for one another, walks columns one by one, hands (value, index)
pairs to ATen, never cuts a scan of several leaves, and turns tensors around by kernels of their
own: there the scan, its pointwise neighbours and its flips become one Triton kernel of the graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings import scan_sites
from inductor_ext.lowerings.scan_members import Site
from inductor_ext.lowerings.scan_places import Step, thawed
from inductor_ext.lowerings.scan_region import CanNotFuse, Fused, fuse, size_of
from inductor_ext.lowerings.scan_statements import Leaf
from inductor_ext.templates import scan_launch

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

aten = torch.ops.aten
NAME = "scan"

# Fewer elements take less time than a launch does; stock may fuse more then.
LEAST_ELEMENTS = 100_000
# Where Inductor cuts a scan: torch's ir.Scan.num_splits and choices.reduction_split_factor, for 132
# multiprocessors. Scans beside each other from which on it does not, along rows and else:
MANY_ROWS, MANY_COLUMNS = 2 * 132, 64 * 132
# Lengths up to which it does not, along rows and, in scans of fewer elements, else:
SHORT_ROW, SHORT_COLUMN, FEW_ELEMENTS = 8192, 128, 32 * 132 * 2048


class _Left(Exception):
    """Why a scan is left to stock."""


def _stock_cuts(length: int, lanes: int, along_rows: bool) -> bool:
    """Whether stock cuts a scan among programs (if it can)."""
    if along_rows:
        return lanes < MANY_ROWS and length > SHORT_ROW
    if lanes >= MANY_COLUMNS or length <= 32:
        return False
    return length * lanes >= FEW_ELEMENTS or length > SHORT_COLUMN


def _along_rows(fused: Fused) -> bool:
    """Whether neighbours in memory are neighbours along the scan."""
    length = value(fused.site.inputs[0]).shape[fused.site.dim]
    if editing.same_size(value(fused.site.inputs[0]).numel(), length):
        return True
    return compat.expr(value(fused.site.inputs[0]).stride(fused.site.dim)) == 1


def _why(fused: Fused) -> str:
    """The reason to fire. Raises _Left with one not to."""
    site = fused.site
    total = size_of(site.inputs[0])
    length = compat.hint(compat.expr(site.shape[site.dim]))
    if scan_sites.is_own(site.node) and site.what != "associative_scan":
        return "an operation of this package"
    if scan_sites.is_beyond_stock(site.node):
        return "stock can't lower its combine function here"
    if total < LEAST_ELEMENTS:
        raise _Left(f"{total} elements are fewer than {LEAST_ELEMENTS}")
    if fused.flips:
        return "stock turns the tensor around by a kernel of its own"
    rows = _along_rows(fused)
    if not _stock_cuts(length, total // length, rows):
        raise _Left(f"stock scans {total // length} lanes of {length} at the speed of memory")
    if scan_sites.is_recurrence(site):
        return "one scan instead of two, which neither under- nor overflows"
    if len(site.program.states) > 1 and site.what != "logcumsumexp":
        return "stock never cuts a scan of several values"
    return "stock cuts the scan" if rows else "stock walks the columns one by one"


def _check(site: Site) -> None:
    """Raise where no kernel is written whatever it brings."""
    tensors = [value(n) for n in site.inputs]
    if not compat_fx.writes_triton(tensors[0].device):
        raise _Left("not Triton code for CUDA")
    sizes = [compat.expr(s) for t in tensors for s in t.shape]
    if compat.has_unbacked(sizes):
        raise _Left("a size depends on data")
    if any(isinstance(s, int) and s == 0 for s in site.shape):
        raise _Left("there is nothing to scan")


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
        laid = scan_launch.plan(
            fused.program,
            list(shape),
            [value(n).stride() for n in inputs],
            [s.strides for s in stored],
            site.dim,
            hint=lambda size: compat.hint(compat.expr(size)),
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
        for i, out in enumerate(stored):
            y = editor.call(operator.getitem, call, f"y{i}_ptr")
            out.node.replace_all_uses_with(self.viewed(y, out.steps))
        compat_user_kernels.sort_graph(self.graph)
        editing.erase_unused(self.graph, [s.node for s in stored])
        ours = {*fused.nodes, site.node}  # all of them have a value and no effect
        for node in reversed(list(self.graph.nodes)):
            if node in ours and not node.users:
                self.graph.erase_node(node)

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


def rewrite(graph: Any) -> None:
    """The pass over a graph behind autograd."""
    scans = [n for n in graph.nodes if scan_sites.is_scan(n)]
    numbers = Numbers(graph) if len(scans) > 1 else None
    for node in scans:
        same = node if numbers is None else numbers.of(node)
        if same is not node:  # stock computes what is equal once, behind this
            node.replace_all_uses_with(same)
            editing.erase_unused(graph, [node])
    # Recurrences come before the scans that they are made of.
    ends = [n for n in graph.nodes if scan_sites.recurrence_of(n)] if numbers is not None else []
    for node in [*ends, *scans]:
        if compat_fx.is_erased(node) or not node.users:
            continue
        here = str(node.target)
        forced = choosing.forced_choice(NAME)
        try:
            if forced is not None and re.fullmatch(forced, choosing.STOCK):
                why = f"forced to {forced}"
                report.record(report.Decision(NAME, False, choosing.STOCK, why, here, "forced"))
                continue
            site = scan_sites.site_of(node)
            here = _label(site)
            _check(site)
            fused = fuse(site)
            why = f"forced to {forced}" if forced is not None else _why(fused)
            _Emitter(graph, fused).emit()
        except (scan_sites.NoSite, CanNotFuse, _Left) as reason:
            choosing.leave(NAME, here, str(reason))
        else:
            source = "heuristic" if forced is None else "forced"
            around = sum(matching.is_pointwise(n) for n in fused.nodes)
            with_what = f", with {around} pointwise operations" if around else ""
            report.record(report.Decision(NAME, True, NAME, why + with_what, here, source))
    editing.check(graph)


compat_scans.trace_long_scans()
registry.register(registry.Lowering(NAME, passes={"post_grad": rewrite}))
