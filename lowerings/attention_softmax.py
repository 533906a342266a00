"""Weights of attention: what of the graph is a softmax along keys, and what it is a softmax of."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from inductor_ext.lowerings.attention_places import Axes, Index, Place, is_view
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import NoSite
from inductor_ext.templates.attention_dropout import LARGEST, LEAST

from inductor_ext.editing import Numbers

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SOFTMAX = {aten._softmax.default: "nan", aten._safe_softmax.default: "zero"}


@dataclasses.dataclass
class Weights:
    """``scores`` at ``place`` are what the softmax is of; ``empty`` what a row that keeps nothing
    gives; ``sinks`` are scores of columns that are left out of the result, with their places;
    ``passed`` the values between the product with v and the scores; ``totals`` the log-sum-exps of
    the scores: (value, whether it keeps the dimension, the values in between). ``parts`` are the
    weights, in every form, with their places; ``softmax`` is the first of them. ``dropout`` is the
    probability with which they are dropped out, ``drawn`` the values that this is made of."""

    scores: Any
    place: Place
    empty: str
    passed: list[Any]
    sinks: list[tuple[Any, Place]] = dataclasses.field(default_factory=list)
    totals: list[tuple[Any, bool, list[Any]]] = dataclasses.field(default_factory=list)
    parts: list[tuple[Any, Place]] = dataclasses.field(default_factory=list)
    softmax: Any = None
    softmax_place: Place = ()
    dropout: float = 0.0
    drawn: list[Any] = dataclasses.field(default_factory=list)


def _varies(axes: Axes, place: Place) -> set[Any]:
    return {axis for index in axes.now(place) for axis in index.axes}


class Reader:
    """Finds weights behind a factor of a product."""

    def __init__(self, graph: Any) -> None:
        self.numbers = Numbers(graph)
        self._totals = [n for n in graph.nodes if n.target is aten.logsumexp.default]

    def weights(self, axes: Axes, node: Any, place: Place, keys: Index) -> Weights | None:
        """None where a value is no softmax along ``keys``. Raises NoSite, NoPlace."""
        passed: list[Any] = []
        parts: list[tuple[Any, Place]] = []
        dropped, drawn, dropped_at = 0.0, list[Any](), place
        while True:
            passed.append(node)
            parts.append((node, place))
            found = self._softmax(node)
            if found is not None:
                scores, dim, empty = found
                if dropped and not _varies(axes, dropped_at) <= _varies(axes, place):
                    raise NoSite("its dropout is of repeated weights")
                weights = Weights(
                    scores, place, empty, passed, parts=parts, softmax=node, softmax_place=place,
                    dropout=dropped, drawn=drawn,
                )  # fmt: skip
                return self._of_scores(axes, weights, dim, keys)
            dropout = _dropout(node)
            if dropout is not None:
                whole, probability = dropout
                if probability and dropped:
                    raise NoSite("its weights are dropped out twice")
                if probability:
                    drawn.append(node)
                    dropped_at = place
                dropped, node = dropped or probability, whole.args[0]
                continue
            if node.target is aten._to_copy.default and _is_float(node.args[0], node):
                node = node.args[0]
                continue
            below = None if node.target is aten.detach.default else axes.below(node, place)
            if below is None:
                return None
            node, place = below

    def _of_scores(self, axes: Axes, found: Weights, dim: int, keys: Index) -> Weights:
        place = axes.now(found.place)
        dim %= len(place)
        if place[dim].axes != axes.flat(keys.axes):
            raise NoSite("the softmax is along another dimension than that of the keys")
        found.scores, found.place, whole = found.scores, place, place[dim].whole
        while True:
            below = self._unshifted(found.scores, dim)
            if below is None and found.scores.target is aten._to_copy.default:
                below = found.scores.args[0] if _is_float(found.scores.args[0]) else None
            if below is None:
                break
            found.passed.append(found.scores)
            found.scores = below
        if not whole:
            self._without_sinks(axes, found, dim)
        for total in self._totals:
            if self._same(total.args[0], found.scores) and _dim(total, found.scores) == dim:
                between = []
                node = total.args[0]
                while node is not found.scores and node.target in (*_KEPT, aten._to_copy.default):
                    between.append(node)
                    node = node.args[0]
                found.totals.append((total, _keeps(total), between))
        return found

    def _without_sinks(self, axes: Axes, found: Weights, dim: int) -> None:
        """Scores joined with columns whose weights are not used."""
        node, place = found.scores, found.place
        if node.target is not aten.cat.default:
            raise NoSite("a part of the weights is used")
        parts, along = node.args[0], (node.args[1] if len(node.args) > 1 else 0)
        if along % len(place) != dim:
            raise NoSite("a part of the weights is used")
        begin, inner = 0, None
        for part in parts:
            size = shape_of(part)[dim]
            if begin == place[dim].offset and size == axes.size(place[dim].axes):
                inner = part
            elif size == 1:
                where = (*place[:dim], Index(), *place[dim + 1 :])
                found.sinks.append((part, where))
            else:
                raise NoSite("the weights of a part of the scores are not used")
            begin = begin + size
        if inner is None:
            raise NoSite("a part of the weights is used")
        found.passed.append(node)
        found.scores, found.empty = inner, "zero"  # a sink is always kept
        found.place = (*place[:dim], Index(place[dim].axes), *place[dim + 1 :])

    # --- softmaxes --------------------------------------------------------------------------------

    def _softmax(self, node: Any) -> tuple[Any, int, str] | None:
        """(scores, dimension, what an empty row gives)."""
        if node.target in _SOFTMAX:
            return node.args[0], node.args[1], _SOFTMAX[node.target]
        if node.target is aten.exp.default:
            return self._of_logarithm(node.args[0])
        if node.target is aten.div.Tensor and not node.kwargs:
            return self._quotient(*node.args)
        if node.target is aten.mul.Tensor:
            for one, other in (node.args, node.args[::-1]):
                if _is(other, aten.reciprocal.default):
                    return self._quotient(one, other.args[0])
        return None

    def _of_logarithm(self, node: Any) -> tuple[Any, int, str] | None:
        """exp of a log-softmax, or of x - logsumexp(x)."""
        node = _converted(node)
        if _is(node, aten._log_softmax.default):
            return node.args[0], node.args[1], "nan"
        if not _is(node, aten.sub.Tensor) or node.kwargs:
            return None
        x, total = node.args[0], _plain(node.args[1])
        if not _is(total, aten.logsumexp.default) or not _keeps(total):
            return None
        dim = _dim(total, x)
        same = self._same(x, total.args[0])
        return (x, dim, "nan") if same and dim is not None else None

    def _quotient(self, above: Any, below: Any) -> tuple[Any, int, str] | None:
        """exp(x) / sum of exp(x)."""
        if not isinstance(above, torch.fx.Node) or not isinstance(below, torch.fx.Node):
            return None
        above, total = _converted(above), _plain(below)
        if not _is(above, aten.exp.default) or not _is(total, aten.sum.dim_IntList):
            return None
        if not _keeps(total) or not self._same(above, total.args[0]):
            return None
        dim = _dim(total, above)
        return None if dim is None else (above.args[0], dim, "nan")

    def _same(self, one: Any, other: Any) -> bool:
        return bool(self.numbers.of(_converted(one)) is self.numbers.of(_converted(other)))

    def _unshifted(self, node: Any, dim: int) -> Any:
        """x of x - max(x): a softmax does not change where its rows are shifted."""
        if not _is(node, aten.sub.Tensor) or node.kwargs:
            return None
        x, row = node.args
        if not isinstance(row, torch.fx.Node) or not isinstance(x, torch.fx.Node):
            return None
        row = _plain(row)
        row = row.args[0] if _is(row, aten.detach.default) else row
        if _is(row, operator.getitem) and row.args[1] == 0:
            row = row.args[0]
        if row.target not in (aten.amax.default, aten.max.dim) or not _keeps(row):
            return None
        rank = len(shape_of(x))
        return x if _dim(row, x) == dim % rank and self._same(x, row.args[0]) else None


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target


def _is_float(*nodes: Any) -> bool:
    return all(n.meta["val"].dtype in _FLOATS for n in nodes)


_KEPT = (aten.clone.default, aten.alias.default)
_REPEATS = (aten.expand.default, aten.expand_as.default)


def _converted(node: Any) -> Any:
    """A value in front of what leaves its numbers, or rounds them."""
    while node.target in _KEPT or (node.target is aten._to_copy.default and _is_float(node)):
        node = node.args[0]
    return node


def _plain(node: Any) -> Any:
    """A row's value in front of views that leave its shape or repeat it."""
    while isinstance(node, torch.fx.Node):
        below = _converted(node)
        if below.target in _REPEATS:
            below = below.args[0]
        elif below.target is aten.unsqueeze.default and not _keeps(_converted(below.args[0])):
            return below
        if below is node:
            break
        node = below
    return node


def _keeps(node: Any) -> bool:
    """Whether a reduction keeps its dimension."""
    given = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim")
    return given is True


def _dim(node: Any, of: Any) -> int | None:
    dims = node.args[1] if len(node.args) > 1 else None
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    rank = len(shape_of(of))
    return dims[0] % rank if len(dims) == 1 and isinstance(dims[0], int) else None


def _dropout(node: Any) -> tuple[Any, float] | None:
    """A node of torch's dropout, and with which probability it drops. Raises NoSite for another
    way to drop."""
    whole = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    if whole.target is aten.native_dropout.default:
        probability = whole.args[1] if whole.args[2] is not False else 0
        if not isinstance(probability, (int, float)):
            raise NoSite("how many of its weights are dropped is not known while compiling")
        check_dropout(probability)
        return whole, float(probability)
    scaled = whole.target in (aten.mul.Tensor, aten.div.Tensor)
    if scaled and any(map(_is_random, whole.all_input_nodes)):
        raise NoSite("its weights are dropped out in a way that is not followed")
    return None


def check_dropout(probability: float) -> None:
    """Raises NoSite for one that kernels have no steps for."""
    if probability != 0 and not LEAST <= probability <= LARGEST:
        raise NoSite(f"its weights are dropped out with a probability of {probability}")


def _is_random(node: Any) -> bool:
    for _ in range(4):
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        if not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return False


def may_hold(node: Any, limit: int = 8) -> bool:
    """Whether a softmax is not far behind a factor of a product, in whatever form."""
    stack = [(node, 0)]
    known = set()
    while stack:
        at, depth = stack.pop()
        if at in known or depth > limit:
            continue
        known.add(at)
        if at.target in _SOFTMAX or at.target in (aten.exp.default, aten._log_softmax.default):
            return True
        tags = getattr(at.target, "tags", ())
        if is_view(at) or torch.Tag.pointwise in tags or at.target in (
            aten._to_copy.default, operator.getitem, aten.native_dropout.default
        ):  # fmt: skip
            stack.extend((n, depth + 1) for n in at.all_input_nodes)
    return False
