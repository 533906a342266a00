"""Attention in a graph: softmax(f(q k^T)) v.

A site is found from its last product backwards: weights, scores, first product. Which dimension is
the batch, which are the heads, and which heads share keys follows from what q, k and v vary along.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from inductor_ext.lowerings.attention_places import (
    VIEWS,
    Axes,
    Index,
    NoPlace,
    Place,
)
from inductor_ext.lowerings.attention_scores import Scores
from inductor_ext.lowerings.attention_softmax import Reader, Weights, may_hold
from inductor_ext.lowerings.attention_values import Value
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import NoSite

from inductor_ext.shadow import Shadow

_MOVES = (
    *VIEWS,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)


@dataclasses.dataclass
class Site:
    """What was read around one softmax. ``result`` is the node of the program that is replaced, its
    elements at ``place``; ``rows`` those axes of it that may be query rows."""

    seen: Shadow
    axes: Axes
    result: Any
    place: Place
    keys: Index
    rows: Index
    weights: Weights
    value: tuple[Any, Place]
    scores: Scores | None = None
    score: Value | None = None


def sites(seen: Shadow, reader: Reader) -> Any:
    """(last product, its site or NoSite) of everything that looks like attention."""
    for node in seen.graph.nodes:
        if node.target not in (aten.bmm.default, aten.mm.default) or is_call(node.meta["made_in"]):
            continue
        for side in (0, 1):
            if not may_hold(node.args[side]):
                continue
            try:
                site = _site(seen, reader, node, side)
            except (NoPlace, NoSite) as reason:
                yield node, NoSite(str(reason))
            else:
                if site is not None:
                    yield node, site


def _result(seen: Shadow, product: Any) -> Any:
    """The first node of the program that is the product, perhaps in another shape."""
    node = product
    while node not in seen.first:
        users = list(node.users)
        if len(users) != 1 or users[0].target not in _MOVES:
            raise NoSite("the result is used inside a function of torch")
        node = users[0]
    return node


def _site(seen: Shadow, reader: Reader, product: Any, side: int) -> Site | None:
    axes = Axes()
    result = _result(seen, product)
    place = at = tuple(axes.new(size) for size in shape_of(result))
    node = result
    while node is not product:
        below = axes.below(node, at)
        assert below is not None
        node, at = below
    *batch, first, second = at
    weights_node, value_node = product.args[side], product.args[1 - side]
    keys = axes.new(shape_of(weights_node)[-1 if side == 0 else -2])
    rows, channels = (first, second) if side == 0 else (second, first)
    if side == 0:
        weights_at, value_at = (*batch, rows, keys), (*batch, keys, channels)
    else:
        weights_at, value_at = (*batch, keys, rows), (*batch, channels, keys)
    weights = reader.weights(axes, weights_node, weights_at, keys)
    if weights is None:
        return None
    if seen.is_mutated(product):
        raise NoSite("the result is written to in this graph")
    if any(map(seen.is_mutated, _until(weights_node, weights.scores))):
        raise NoSite("its weights are written to in this graph")
    return Site(seen, axes, result, place, keys, rows, weights, (value_node, value_at))


def _until(node: Any, end: Any) -> set[Any]:
    """``node`` and what it is made of, as far as ``end``."""
    stack, known = [node], set()
    while stack:
        at = stack.pop()
        if at is not end and at not in known:
            known.add(at)
            stack.extend(at.all_input_nodes)
    return known


def is_call(node: Any) -> bool:
    """Whether a node of a program calls torch's own attention."""
    target = node.target
    own = torch.ops.aten.scaled_dot_product_attention.default
    return target is own or getattr(target, "__name__", "") == "scaled_dot_product_attention"


def read(site: Site, whole: bool = False) -> None:
    """Read the scores of a site. ``whole``: masks are inputs as the program has them."""
    before: set[Any] | None = None
    if whole:
        assert site.scores is not None
        before = {n for n, _ in site.scores.product.parts}

    def made(only: Any) -> Scores:
        return Scores(site.seen, site.axes, site.keys, site.rows, before, only)

    scores = made(None)
    try:
        site.score = scores.read(site.weights.scores, site.weights.place)
    except NoSite:
        if not scores.several:
            raise
        scores = _one_of(site, made, scores.several)
    if not scores.product.parts:
        raise NoSite("its weights are of no product")
    scores.check()
    site.scores = scores


def _one_of(site: Site, made: Any, several: set[Any]) -> Scores:
    """Of several products that are no sum, one is that of q and k, the others are tensors."""
    last: NoSite = NoSite("its scores are made of several products")
    for node in sorted(several, key=list(site.seen.graph.nodes).index):
        scores = made(node)
        try:
            site.score = scores.read(site.weights.scores, site.weights.place)
            scores.check()
        except NoSite as reason:
            last = reason
        else:
            if scores.product.parts:
                return scores
    raise last
