"""The gradient of entries that were gathered from rows of log-probabilities, without their zeros.

A loss of some entries of a row (a teacher's top k) has a gradient that is scattered into zeros as
large as the logits, summed over the row, and read again by the pointwise code that makes the
logits' gradient dx of it. But its sum over the row is that of the entries; dx is pointwise code of
zeros in all other columns; and what it is in an entry's own column is the same code for k values a
row. So dx is written once, without them, and they are put into their columns: each once, ready,
equal ids with the same value, so that nothing is added in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings.loss_rows import counts
from inductor_ext.lowerings.softmax_cores import (
    MEANS,
    NARROW,
    SUMS,
    constant,
    keeps_value,
    reduced,
)

from inductor_ext import editing, matching
from inductor_ext.editing import Editor, same_shape, same_size, value

aten = torch.ops.aten
MOST = 128  # entries of a row: each is compared with each


class _Left(Exception):
    """The gradient is not one of entries alone, or not pointwise behind them."""


def _region(root: Any) -> tuple[list[Any], Any, set[Any]]:
    """(the sums over the row of scattered entries, the last node of the pointwise code behind, and
    all of its nodes)."""
    shape = value(root).shape
    region, sums, ends, stack = {root}, [], [], [root]
    while stack:
        node = stack.pop()
        outside = False
        for user in node.users:
            if user.target in SUMS and user.target not in MEANS and _only_converted(node, root):
                if reduced(user) != [len(shape) - 1]:
                    raise _Left
                sums.append(user)
            elif matching.is_pointwise(user) and same_shape(value(user).shape, shape):
                if user not in region:
                    region.add(user)
                    stack.append(user)
            else:
                outside = True
        if outside:
            ends.append(node)
    if len(ends) != 1 or ends[0] is root or any(user in region for user in ends[0].users):
        raise _Left
    return sums, ends[0], region


def _only_converted(node: Any, root: Any) -> bool:
    while node is not root:
        if not keeps_value(node):
            return False
        node = node.args[0]
    return True


class _Entries:
    """Values in the entries' columns, [.., K], of what has the logits' shape: computed again from
    what lies in memory, so that nothing as large as the logits gets another reader."""

    def __init__(
        self, shape: Any, ids: Any, editor: Editor, known: dict[Any, Any], region: set[Any]
    ) -> None:
        self.shape, self.ids, self.editor = shape, ids, editor
        self.known, self.region = known, region

    def of(self, node: Any) -> Any:
        """The entries of a node, or what they are broadcast from; of anything else itself."""
        if not isinstance(node, torch.fx.Node) or not isinstance(value(node), torch.Tensor):
            return node
        if node not in self.known:
            self.known[node] = self._made(node)
        return self.known[node]

    def _made(self, node: Any) -> Any:
        tensor, call = value(node), self.editor.call
        if not tensor.dim() or same_size(tensor.shape[-1], 1):
            return node
        if counts(node, -1, self.shape[-1]):
            return self.editor.to(self.ids, tensor.dtype)
        if not same_shape(tensor.shape, self.shape):
            raise _Left
        if node.target is aten.expand.default and value(node.args[0]).dim() == tensor.dim():
            return self.of(node.args[0])
        if node.target is aten.expand.default and not value(node.args[0]).dim():
            # A number promotes otherwise than a tensor.
            return call(aten.expand.default, node.args[0], [1] * tensor.dim())
        if matching.is_pointwise(node):
            named = {name: self.of(given) for name, given in node.kwargs.items()}
            return call(node.target, *map(self.of, node.args), **named)
        if node in self.region:  # it has the entries in it
            raise _Left
        return call(aten.gather.default, node, -1, self.ids)


def _place(node: Any, zeros: Any, ids: Any, source: Any) -> None:
    sums, end, region = _region(node)
    shape, users = value(node).shape, list(end.users)
    editor = Editor(node.graph)
    editor.before(node.next)
    wide = editor.to(source, torch.float32)
    equal = editor.call(
        aten.eq.Tensor,
        editor.call(aten.unsqueeze.default, ids, -1),
        editor.call(aten.unsqueeze.default, ids, -2),
    )
    beside = editor.call(aten.unsqueeze.default, wide, -2)
    alike = editor.call(aten.where.ScalarOther, equal, beside, 0.0)
    total = editor.call(aten.sum.dim_IntList, alike, [-1])
    known = {node: editor.to(total, value(node).dtype)}
    totals = []
    for total in sums:
        keeps = len(total.args) > 2 and bool(total.args[2])
        found = editor.call(aten.sum.dim_IntList, wide, [-1], keeps)
        totals.append((total, editor.to(found, value(total).dtype)))
    editor.before(end.next)
    try:
        ready = _Entries(shape, ids, editor, known, region).of(end)
        if not same_shape(value(ready).shape, value(ids).shape):
            raise _Left
        if value(ready).dtype != value(end).dtype:
            raise _Left
    except _Left:
        editor.undo()
        raise
    for total, found in totals:
        total.replace_all_uses_with(found)
    placed = editor.call(aten.scatter.src, end, -1, ids, ready)
    for user in users:
        user.replace_input_with(end, placed)
    node.replace_all_uses_with(zeros)
    editing.erase_unused(node.graph, [node, *sums])


def place(graph: Any, shape: Any, dim: int) -> int:
    """Place the entries of gradients of logits of this shape where they can be; how many were."""
    count = 0
    if dim != len(shape) - 1:
        return 0
    for node in graph.find_nodes(op="call_function", target=aten.scatter_add.default):
        zeros, along, ids, source = node.args
        rows, entries = value(ids).shape[:-1], value(ids).shape[-1:]
        if not (
            same_shape(value(node).shape, shape)
            and {value(node).dtype, value(source).dtype} <= set(NARROW)
            and along % len(shape) == dim
            and constant(zeros) == 0
            and same_shape(rows, shape[:-1])
            and isinstance(entries[0], int)
            and 1 < entries[0] <= MOST
            and same_shape(value(source).shape, value(ids).shape)
        ):
            continue
        try:
            _place(node, zeros, ids, source)
        except _Left:
            continue
        count += 1
    return count
