"""Calls of torch's own attention that stock code serves badly: with a mask, which is read whole and
keeps the fast kernels away, or with keys and values that were repeated for groups of heads."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from inductor_ext.lowerings.attention_places import Axes, Index, Place, dtype_of, equal
from inductor_ext.lowerings.attention_replacement import Plan, operands
from inductor_ext.lowerings.attention_scores import Scores
from inductor_ext.lowerings.attention_sites import Site, is_call
from inductor_ext.lowerings.attention_softmax import Weights, check_dropout
from inductor_ext.lowerings.attention_values import Call, Number, Position, Product, Value
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import NoSite

from inductor_ext.shadow import Shadow


def _signature(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: Any = False, scale: Any = None, enable_gqa: Any = False,
) -> None:  # fmt: skip
    """Of ``scaled_dot_product_attention``."""


def calls(seen: Shadow) -> Any:
    """(call, its plan, NoSite, or None where stock does well) of every call."""
    for node in seen.order:
        if node.op != "call_function" or not is_call(node):
            continue
        try:
            yield node, _plan(seen, node)
        except NoSite as reason:
            yield node, reason


def _plan(seen: Shadow, node: Any) -> Plan | None:
    bound = inspect.signature(_signature).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    q, k, v = (seen.of.get(given[name]) for name in ("query", "key", "value"))
    out = seen.of.get(node)
    if q is None or k is None or v is None or out is None:
        raise NoSite("it is not followed")
    dropout = given["dropout_p"]
    if not isinstance(dropout, (int, float)):
        raise NoSite("how many of its weights are dropped is not known while compiling")
    check_dropout(dropout)
    if not all(isinstance(given[name], bool) for name in ("is_causal", "enable_gqa")):
        raise NoSite("whether it is causal is not known while compiling")
    if len({dtype_of(t) for t in (q, k, v, out)}) > 1:
        raise NoSite("q, k, v and the result are of different dtypes")
    axes = Axes()
    place = tuple(axes.new(size) for size in shape_of(out))
    *batch, rows, values = place
    keys, channels = axes.new(shape_of(k)[-2]), axes.new(shape_of(q)[-1])
    whole = (*batch, rows, keys)
    drawn = [out] if dropout else []
    weights = Weights(None, whole, "zero", [], dropout=float(dropout), drawn=drawn)
    site = Site(seen, axes, out, place, keys, rows, weights, (v, ()))
    site.scores = scores = Scores(seen, axes, keys, rows)
    kv = _kv(axes, batch, shape_of(k)) if given["enable_gqa"] else batch
    site.value = v, _at(axes, v, (*kv, keys, values))
    parts = [(q, _at(axes, q, (*batch, rows, channels)), k, _at(axes, k, (*kv, keys, channels)))]
    site.score = _score(seen, scores, given, whole, shape_of(q)[-1])
    scores.check()
    plan = operands(site, parts, [channels])
    repeated = bool(plan.shared) and not given["enable_gqa"]
    if dropout and (given["attn_mask"] is None or scores.inputs):
        # cuDNN's dropout is faster backward: no tiles are skipped that would make up for that.
        raise NoSite("its weights are dropped out, and its mask is none of positions")
    return plan if given["attn_mask"] is not None or repeated else None


def _kv(axes: Axes, batch: list[Index], sizes: list[Any]) -> list[Index]:
    """The heads of keys: those of queries are groups of them."""
    own, heads = sizes[-3], batch[-1]
    total = axes.size(heads.axes)
    if equal(own, total):
        return batch
    inner = total / own if not isinstance(own, int) else total // own
    return [*batch[:-1], Index(axes.cut(heads.axes, [own, inner])[0])]


def _at(axes: Axes, node: Any, place: Place) -> Place:
    """Where a factor is read: broadcast along leading sizes of 1."""
    sizes = shape_of(node)
    place = place[len(place) - len(sizes) :]
    return tuple(Index() if size == 1 else i for size, i in zip(sizes, place, strict=True))


def _score(seen: Shadow, scores: Scores, given: Any, whole: Place, width: Any) -> Value:
    scale = given["scale"]
    if scale is None:
        if not isinstance(width, int) and not width.is_number:
            raise NoSite("the size of its heads is symbolic")
        scale = 1 / math.sqrt(int(width))
    if not isinstance(scale, (int, float)):
        raise NoSite("its scale is no number known while compiling")
    found: Value = Call(scores=True, op=aten.mul.Tensor, args=(Product(), float(scale)))
    lost = Number(number=-math.inf)
    if given["is_causal"]:
        kept: Value = Call(
            op=aten.le.Tensor, args=(Position(index=whole[-1]), Position(index=whole[-2]))
        )
        found = Call(scores=True, op=aten.where.self, args=(kept, found, lost))
    mask = given["attn_mask"]
    if mask is None:
        return found
    node = seen.of.get(mask)
    if node is None:
        raise NoSite("its mask is not followed")
    read = scores.read(node, _at(scores.axes, node, whole))
    if dtype_of(node) == torch.bool:
        return Call(True, read.tensors, aten.where.self, (read, found, lost))
    return Call(True, read.tensors, aten.add.Tensor, (found, read))
