"""Pointwise aten operations as one line of text, so that an operation can carry a function and two
equal functions are equal:

    v0 = mul.Tensor(a0, b0); v1 = mul.Tensor(b0, a1); v2 = add.Tensor(v1, b1); v0, v2
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import torch

aten, prims = torch.ops.aten, torch.ops.prims

# Operations that give one number everywhere: which.
FILLED = {
    aten.full_like.default: lambda node: node.args[1],
    aten.zeros_like.default: lambda node: 0,
    aten.ones_like.default: lambda node: 1,
    aten.scalar_tensor.default: lambda node: node.args[0],
    aten.full.default: lambda node: node.args[1],
    aten.zeros.default: lambda node: 0,
    aten.ones.default: lambda node: 1,
}
CONVERSIONS = {aten._to_copy.default, prims.convert_element_type.default}
# Operations that give their argument's values: the same ones, or broadcast, or of another shape.
SAME = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
}

_UNTAGGED = {aten.floor_divide, aten.where}  # pointwise, but torch does not say so of all overloads


class NotPointwise(Exception):
    """Why a function has no text; one sentence."""


def number(value: Any) -> str:
    """A number, a truth value or a name among the arguments of an operation."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)  # inf and nan are names
    raise NotPointwise(f"{value!r} is not known while compiling")


def operator(op: Any) -> str:
    """The name of an aten operation, "mul.Tensor"; raises NotPointwise for what is not one of its
    arguments, position by position."""
    if op.namespace != "aten" or (
        torch.Tag.pointwise not in op.tags and op.overloadpacket not in _UNTAGGED
    ):
        raise NotPointwise(f"{op} is not pointwise")
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        raise NotPointwise(f"{op} is no function of its arguments")
    return str(op).removeprefix("aten.")


_NAMES = {"inf": math.inf, "nan": math.nan}


def read(text: str, inputs: Sequence[str]) -> tuple[torch.fx.Graph, list[Any]]:
    """A text as a graph with a placeholder for each of ``inputs``, and its results; the graph has
    no output yet. Raises ValueError for what is no text."""
    graph = torch.fx.Graph()
    known: dict[str, Any] = {name: graph.placeholder(name) for name in inputs}
    try:
        *statements, last = ast.parse(text.replace(";", "\n").replace("\n ", "\n")).body
        for statement in statements:
            assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
            call = statement.value
            assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            assert isinstance(call.func.value, ast.Name)
            op = getattr(getattr(aten, call.func.value.id), call.func.attr)
            _check(op)
            args = tuple(_argument(a, known) for a in call.args)
            kwargs = {str(w.arg): _argument(w.value, known) for w in call.keywords}
            known[statement.targets[0].id] = graph.call_function(op, args, kwargs)
        assert isinstance(last, ast.Expr)
        results = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        returned = [known[r.id] for r in results if isinstance(r, ast.Name)]
        assert len(returned) == len(results)
    except (AssertionError, AttributeError, KeyError, SyntaxError) as error:
        raise ValueError(
            f"expected pointwise aten operations of {', '.join(inputs)}, got {text!r}"
        ) from error
    return graph, returned


def _check(op: Any) -> None:
    if op not in (aten.full_like.default, aten._to_copy.default):
        try:
            operator(op)
        except NotPointwise as error:
            raise ValueError(str(error)) from error


def _argument(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.Name) and isinstance(getattr(torch, node.id, None), torch.dtype):
        return getattr(torch, node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_argument(node.operand, known)
    assert isinstance(node, ast.Constant)
    return node.value
