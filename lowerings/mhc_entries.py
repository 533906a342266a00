"""The entries of aten nodes: what each operation makes of the terms of its inputs."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import sympy
import torch
from inductor_ext.lowerings.mhc_arrays import Array, each, joined
from inductor_ext.lowerings.mhc_terms import NARROW, Entries, Terms

from inductor_ext import compat

aten = torch.ops.aten
LARGEST = 256  # entries of a tensor without tokens that are told apart
Found: TypeAlias = Entries | tuple[Entries | None, ...] | None


def shape_of(node: Any) -> list[Any]:
    return [compat.expr(s) for s in node.meta["val"].shape]


def product(sizes: Any) -> Any:
    return sympy.expand(sympy.Mul(*map(sympy.sympify, sizes)))


class Reader:
    """Entries of the nodes that depend on ``source`` [..., n, H], in the order of the graph.

    Tensors without tokens (gates' scales and bases) are read down to where they come from. With
    ``outside`` other tensors of the same tokens are read too (see ``mhc_post``), else what needs
    one has no entries.
    """

    def __init__(self, terms: Terms, source: Any, outside: Callable[..., Any] | None = None):
        shape = shape_of(source)
        self.terms, self.source, self.outside = terms, source, outside
        self.lead_sizes = shape[:-2]
        self.tokens = product(self.lead_sizes)
        self.streams, self.hidden = int(shape[-2]), int(shape[-1])
        self.leaves: list[Any] = []
        self.leads: dict[Any, int] = {}  # of nodes whose inputs do not tell
        streams = [terms.make("stream", i, wide=True) for i in range(self.streams)]
        array = Array((self.streams, 1), streams)
        self.found: dict[Any, Found] = {source: Entries(array, len(shape) - 2, 1)}

    def read(self, node: Any) -> Found:
        """Put down and return the entries of a node whose inputs are read."""
        rule = _RULES.get(node.target)
        found = None if rule is None else rule(self, node)
        if isinstance(found, Entries) and not self._fits(found, node):
            found = None
        if found is not None:
            self.found[node] = found
        return found

    def _fits(self, found: Entries, node: Any) -> bool:
        sizes = shape_of(node)
        return (
            found.lead + found.array.ndim == len(sizes)
            and (found.lead == 0 or product(sizes[: found.lead]) == self.tokens)
            and [sympy.sympify(s) for s in found.shape(self.hidden)] == sizes[found.lead :]
            and node.meta["val"].dtype != torch.float64
        )

    def of(self, node: Any) -> Entries | None:
        """The entries of an input; a tensor without tokens is read now."""
        found = self.found.get(node)
        if isinstance(found, Entries):
            return found
        return None

    def leaf(self, node: Any, lead: int, kind: str, wide: int | None = None) -> Entries | None:
        """A tensor that is told apart entry by entry, or stream by stream."""
        sizes = shape_of(node)[lead:]
        if not all(compat.is_static(s) for s in sizes):
            return None
        sizes = [int(s) for s in sizes]
        if wide is not None:
            if sizes[wide] % self.hidden:
                return None
            sizes[wide] //= self.hidden
        if not 0 < math.prod(sizes) <= LARGEST or not node.meta["val"].is_floating_point():
            return None
        if node not in self.leaves:
            self.leaves.append(node)
        index = self.leaves.index(node)
        numbers = [
            self.terms.make(kind, index, i, wide=wide is not None) for i in range(math.prod(sizes))
        ]
        self.found[node] = found = Entries(Array(sizes, numbers), lead, wide)
        return found

    def parameter(self, node: Any, wide: bool = False) -> Entries | None:
        """The entries of a tensor without tokens, read through views."""
        if node in self.found:
            return self.of(node)
        if node.target in _MOVES or node.target is operator.getitem:
            for source in node.all_input_nodes:
                if source not in self.found:
                    self.parameter(source, wide)
            if isinstance(self.read(node), Entries):
                return self.of(node)
        if node.target in _SPLITS:
            source = node.args[0]
            if self.parameter(source, wide) is not None:
                self.read(node)
            return None
        last = len(shape_of(node)) - 1 if wide else None
        return self.leaf(node, 0, "weight" if wide else "parameter", last)

    def rounded(self, array: Array, node: Any) -> Array:
        """Terms computed in a node's dtype."""
        dtype = node.meta["val"].dtype
        if dtype not in NARROW:
            return array
        return each(lambda t: self.terms.round(t, dtype), array)


# --- moving ---------------------------------------------------------------------------------------


def lead_of_view(reader: Reader, sizes: list[Any], like: list[Any], kept: int) -> int | None:
    """How many dimensions of a viewed tensor are tokens, ``kept`` numbers being left behind them;
    ``like`` are the lead sizes before. Several fit only where there is one token."""
    fits = [
        k
        for k in range(len(sizes) + 1)
        if product(sizes[:k]) == reader.tokens and product(sizes[k:]) == kept
    ]
    for lead in (reader.lead_sizes, like):
        if len(lead) in fits and sizes[: len(lead)] == lead:
            return len(lead)
    return next((k for k in fits if k > 0), None)


def _view(reader: Reader, node: Any) -> Entries | None:
    source = node.args[0]
    entries, sizes = reader.of(source), shape_of(node)
    if entries is None:
        return None
    lead = 0
    if entries.lead:
        like = shape_of(source)[: entries.lead]
        found = lead_of_view(reader, sizes, like, math.prod(entries.shape(reader.hidden)))
        if found is None:
            return None
        lead = found
    tail = sizes[lead:]
    if not all(compat.is_static(s) for s in tail):
        return None
    tail, wide = [int(s) for s in tail], None
    if entries.wide is not None:
        if any(size != 1 for size in entries.array.shape[entries.wide + 1 :]):
            return None
        large = [axis for axis, size in enumerate(tail) if size != 1]
        if not large or tail[large[-1]] % reader.hidden:
            return None
        wide = large[-1]
        tail[wide] //= reader.hidden
    if math.prod(tail) != entries.array.size:
        return None
    return Entries(entries.array.reshape(tail), lead, wide)


def _same(reader: Reader, node: Any) -> Entries | None:
    return reader.of(node.args[0])


_KNOWN = (*NARROW, torch.float32, torch.float64)


def _cast(reader: Reader, node: Any) -> Entries | None:
    entries = reader.of(node.args[0])
    before, after = node.args[0].meta["val"], node.meta["val"]
    if entries is None or before.device != after.device or after.dtype not in _KNOWN:
        return None
    if after.dtype in NARROW and before.dtype != after.dtype:
        return Entries(reader.rounded(entries.array, node), entries.lead, entries.wide)
    return entries


def _unsqueeze(reader: Reader, node: Any) -> Entries | None:
    entries = reader.of(node.args[0])
    if entries is None:
        return None
    axis = node.args[1] % len(shape_of(node)) - entries.lead
    if axis < 0:
        return Entries(entries.array, entries.lead + 1, entries.wide)
    wide = entries.wide
    if wide is not None and axis <= wide:
        wide += 1
    return Entries(entries.array.insert(axis), entries.lead, wide)


def _squeeze(reader: Reader, node: Any) -> Entries | None:
    entries = reader.of(node.args[0])
    if entries is None or len(node.args) < 2:
        return None
    rank = len(shape_of(node.args[0]))
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    axes = [d % rank - entries.lead for d in dims]
    if any(a < 0 for a in axes):
        return None
    axes = [a for a in axes if entries.array.shape[a] == 1 and a != entries.wide]
    wide = entries.wide
    if wide is not None:
        wide -= sum(a < wide for a in axes)
    kept = [s for a, s in enumerate(entries.array.shape) if a not in axes]
    return Entries(entries.array.reshape(kept), entries.lead, wide)


def _expand(reader: Reader, node: Any) -> Entries | None:
    entries, sizes = reader.of(node.args[0]), shape_of(node)
    if entries is None:
        return None
    more = len(sizes) - len(shape_of(node.args[0]))
    lead = entries.lead + more if entries.lead else 0
    if entries.lead and any(s != 1 for s in sizes[:more]):
        return None
    tail = sizes[lead:]
    if not all(compat.is_static(s) for s in tail):
        return None
    tail, wide = [int(s) for s in tail], entries.wide
    if wide is not None:
        wide += len(tail) - entries.array.ndim
        if tail[wide] % reader.hidden:
            return None
        tail[wide] //= reader.hidden
    if math.prod(tail) > LARGEST:
        return None
    return Entries(entries.array.broadcast(tail), lead, wide)


def _permute(reader: Reader, node: Any) -> Entries | None:
    entries = reader.of(node.args[0])
    rank = len(shape_of(node))
    dims = list(range(rank))
    if node.target is aten.permute.default:
        dims = [d % rank for d in node.args[1]]
    elif rank > 1:
        a, b = (d % rank for d in (node.args[1:3] if len(node.args) > 2 else (0, 1)))
        dims[a], dims[b] = dims[b], dims[a]
    if entries is None or dims[: entries.lead] != list(range(entries.lead)):
        return None
    axes = [d - entries.lead for d in dims[entries.lead :]]
    wide = None if entries.wide is None else axes.index(entries.wide)
    return Entries(entries.array.transpose(axes), entries.lead, wide)


def _axis(entries: Entries, node: Any, dim: int) -> int:
    """The axis of the array for a dimension of a node's input; negative for a lead dimension."""
    return dim % (entries.lead + entries.array.ndim) - entries.lead


def _select(reader: Reader, node: Any) -> Entries | None:
    source, dim, index = node.args
    entries = reader.of(source)
    if entries is None:
        return None
    axis = _axis(entries, source, dim)
    if axis < 0 or axis == entries.wide or not isinstance(index, int):
        return None
    wide = entries.wide
    if wide is not None and axis < wide:
        wide -= 1
    return Entries(entries.array.take(axis, index), entries.lead, wide)


_WHOLE = [0, None, None, 1]  # dim, start, end, step


def _slice(reader: Reader, node: Any) -> Entries | None:
    source, dim, start, end, step = list(node.args) + _WHOLE[len(node.args) - 1 :]
    entries = reader.of(source)
    if entries is None or step != 1:
        return None
    axis = _axis(entries, source, dim)
    if axis < 0:
        return entries if shape_of(source) == shape_of(node) else None
    bounds = [start, end]
    if not all(b is None or isinstance(b, int) for b in bounds):
        return None
    return _cut(reader, entries, axis, bounds)


def _cut(reader: Reader, entries: Entries, axis: int, bounds: list[Any]) -> Entries | None:
    size = entries.shape(reader.hidden)[axis]
    begin, end, _ = slice(*bounds).indices(size)
    if axis == entries.wide:
        if begin % reader.hidden or end % reader.hidden:
            return None
        begin, end = begin // reader.hidden, end // reader.hidden
    return Entries(entries.array.cut(axis, begin, max(begin, end)), entries.lead, entries.wide)


def _split(reader: Reader, node: Any) -> Found:
    source = node.args[0]
    entries = reader.of(source)
    if entries is None:
        return None
    named = node.kwargs.get("dim", 0)
    unbinds = node.target is aten.unbind.int
    position = 1 if unbinds else 2
    dim = node.args[position] if len(node.args) > position else named
    axis = _axis(entries, source, dim)
    if axis < 0:
        return None
    size = entries.shape(reader.hidden)[axis]
    if unbinds:
        if axis == entries.wide:
            return None
        wide = entries.wide
        if wide is not None and axis < wide:
            wide -= 1
        return tuple(Entries(entries.array.take(axis, i), entries.lead, wide) for i in range(size))
    parts = node.args[1]
    if isinstance(parts, int):
        parts = [min(parts, size - i) for i in range(0, size, parts)]
    if not all(isinstance(p, int) for p in parts):
        return None
    ends = itertools.accumulate(parts)
    cuts = [[end - part, end] for end, part in zip(ends, parts, strict=True)]
    return tuple(_cut(reader, entries, axis, bounds) for bounds in cuts)


def _getitem(reader: Reader, node: Any) -> Found:
    found = reader.found.get(node.args[0])
    return found[node.args[1]] if isinstance(found, tuple) else None


def _joined(reader: Reader, node: Any) -> Entries | None:
    parts = [reader.of(part) for part in node.args[0]]
    if not parts or any(p is None for p in parts):
        return None
    known = [p for p in parts if p is not None]
    first = known[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    axis = dim % len(shape_of(node)) - first.lead
    if axis < 0 or any((p.lead, p.wide) != (first.lead, first.wide) for p in known):
        return None
    if node.target is aten.stack.default:
        wide = first.wide
        if wide is not None and axis <= wide:
            wide += 1
        return Entries(joined([p.array.insert(axis) for p in known], axis), first.lead, wide)
    return Entries(joined([p.array for p in known], axis), first.lead, first.wide)


_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int)
_MOVES: dict[Any, Callable[[Reader, Any], Found]] = {
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten._reshape_alias.default: _view,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.contiguous.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten._to_copy.default: _cast,
    aten.cat.default: _joined,
    aten.stack.default: _joined,
}
_RULES: dict[Any, Callable[[Reader, Any], Found]] = {
    **_MOVES,
    **dict.fromkeys(_SPLITS, _split),
    operator.getitem: _getitem,
}


def is_move(node: Any) -> bool:
    """Whether a node only moves or converts entries."""
    return node.target in _MOVES


def add_rule(rule: Callable[[Reader, Any], Found], *targets: Any) -> None:
    _RULES.update(dict.fromkeys(targets, rule))
