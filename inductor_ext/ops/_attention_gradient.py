"""The gradient of a score, by torch's own autograd, traced once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat_fx
from inductor_ext.pointwise_graph import Builder
from inductor_ext.pointwise_text import NotPointwise
from inductor_ext.pointwise_values import (
    Const,
    Value,
    dtype_of,
    function_of,
    in_order,
    leaves,
    packet,
)
from inductor_ext.templates.attention_program import Input

aten = torch.ops.aten
_SHAPE = (2, 2, 2, 2)
# What is finite where its arguments are.
_BOUNDED = {
    aten.add, aten.sub, aten.mul, aten.neg, aten.where, aten.tanh, aten.sigmoid, aten.abs,
    aten.sign,
    aten.maximum, aten.minimum, aten.clamp_min, aten.clamp_max, aten._to_copy, aten.cos, aten.sin,
    aten.floor_divide, aten.remainder, aten.floor, aten.ceil, aten.round, aten.trunc,
}  # fmt: skip


class GradientBuilder(Builder):
    """A builder with an input ``g``, what is made of which is never rounded to 16 bits."""

    def convert(self, value: Value, dtype: torch.dtype, always: bool = False) -> Value:
        if "g" in leaves(value) and dtype.is_floating_point:
            return value
        return super().convert(value, dtype, always)


def gradients(
    builder: GradientBuilder, score: Value, inputs: Sequence[Input]
) -> tuple[Value, dict[int, Value]]:
    """The gradients for s and for floating-point inputs (by number) of ``g``, that for the score:
    values of ``builder``, which has the score's inputs and ``g``. Each is one per pair, not summed
    over what an input is broadcast along, and 0 where g is 0. Raises NotPointwise."""
    used = leaves(score)
    wanted = [f"x{i}" for i, x in enumerate(inputs) if x.dtype.is_floating_point]
    wanted = [name for name in ("s", *wanted) if name in used]
    if not wanted:
        return Const(0.0), {}
    if used == {"s"} and (score.op == "placeholder" or _is_product(score)):
        factor = Const(1.0) if score.op == "placeholder" else Const(score.args[1])
        return builder.operation(aten.mul, builder.inputs["g"], factor), {}
    order = [name for name in builder.inputs if name != "g"]
    function = function_of(score, order)
    found: list[str] = []

    def derivatives(g: Tensor, *args: Tensor) -> list[Tensor]:
        given = {
            n: a.detach().requires_grad_(n in wanted) for n, a in zip(order, args, strict=True)
        }
        found.clear()
        with torch.enable_grad():
            out = function(*given.values())
            if not out.requires_grad:
                return []
            parts = torch.autograd.grad(
                out, [given[n] for n in wanted], g.to(out.dtype), allow_unused=True
            )
        found.extend(n for n, p in zip(wanted, parts, strict=True) if p is not None)
        return [p for p in parts if p is not None]

    def traced() -> Any:
        samples = [torch.ones(_SHAPE)]
        for name in order:
            val = builder.inputs[name].meta["val"]
            shape = _SHAPE if name in wanted else [min(n, 2) for n in val.shape]
            samples.append(torch.ones(shape, dtype=val.dtype))
        return compat_fx.functional_graph(derivatives, samples, decompose=True)

    try:
        graph = compat_fx.apart(traced)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise NotPointwise(f"torch has no gradient of the score ({reason})") from error
    placeholders = graph.find_nodes(op="placeholder")
    values = dict(zip(placeholders, [builder.inputs[n] for n in ("g", *order)], strict=True))
    results = builder.merge(graph, values)
    of = {n: _guarded(builder, r) for n, r in zip(found, results, strict=True)}
    zero = Const(0.0)
    by_input = {int(n[1:]): r for n, r in of.items() if n != "s" and r != zero}
    return of.get("s", zero), by_input


def _is_product(score: Any) -> bool:
    """Whether a score is a number times s: nothing needs to be traced."""
    first, last = score.args[:2] if packet(score) is aten.mul else (None, None)
    return getattr(first, "op", None) == "placeholder" and isinstance(last, (int, float))


def _guarded(builder: GradientBuilder, value: Value) -> Value:
    """A gradient that is 0 where g is, also where a factor of g is infinite there."""
    if isinstance(value, Const):
        return Const(float(value.value))
    known: dict[Any, bool] = {}
    if all(_is_linear(builder, node, known) for node in in_order(value)):
        return value
    g = builder.inputs["g"]
    return builder.operation(
        aten.where, builder.operation(aten.eq, g, Const(0.0)), Const(0.0), value
    )


def _is_linear(builder: Builder, node: Any, known: dict[Any, bool]) -> bool:
    """Whether a node surely has no infinite factor of g."""
    if "g" not in leaves(node) or node.op == "placeholder":
        return True
    args = [builder.constant(a) for a in node.args if not isinstance(a, torch.dtype)]
    others = [a for a in args if "g" not in leaves(a)]
    if packet(node) is aten.where:
        return all(_is_finite(builder, a, known) for a in others[1:])
    if packet(node) not in (aten.mul, aten.add, aten.sub, aten.neg, aten._to_copy):
        return False
    return all(_is_finite(builder, a, known) for a in others)


def _is_finite(builder: Builder, value: Value, known: dict[Any, bool]) -> bool:
    """Whether a value is finite wherever s is."""
    if isinstance(value, Const):
        return math.isfinite(value.value)
    if value not in known:
        if value.op == "placeholder":
            known[value] = str(value.target) == "s" or not dtype_of(value).is_floating_point  # type: ignore[union-attr]
        elif dtype_of(value) == torch.bool:
            known[value] = True
        else:
            args = [builder.constant(a) for a in value.args if not isinstance(a, torch.dtype)]
            known[value] = packet(value) in _BOUNDED and all(
                _is_finite(builder, a, known) for a in args
            )
    return known[value]
