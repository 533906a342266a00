"""What Triton writes for one pointwise operation: types, literals, a rule per aten operation.

A rule is a function of a translator (see ``scan_pointwise``), which knows the operands' names, and
a node. What is not in the table has no translation: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from .editing import value

aten, prims = torch.ops.aten, torch.ops.prims

# How a dtype is computed with, and how it is stored.
_COMPUTED = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.float32",
    torch.float16: "tl.float32",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
_STORED = {
    **_COMPUTED,
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}


class Unknown(Exception):
    """A node that has no translation; the message is one sentence."""


def is_known_dtype(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be computed with here."""
    return dtype in _COMPUTED


def computed_type(dtype: torch.dtype) -> str:
    """The Triton type that values of a dtype are computed in: "tl.float32" of bf16."""
    if dtype not in _COMPUTED:
        raise Unknown(f"values of {dtype} have no translation")
    return _COMPUTED[dtype]


def stored_type(dtype: torch.dtype) -> str:
    """The Triton type of a dtype in memory."""
    computed_type(dtype)
    return _STORED[dtype]


def literal(number: Any, dtype: torch.dtype) -> str:
    """A number as a Triton scalar of the type that ``dtype`` is computed in."""
    if not isinstance(number, (bool, int, float)):
        raise Unknown(f"{number} is not a number that is known while compiling")
    if dtype == torch.bool:
        text = str(bool(number))
    elif dtype.is_floating_point:
        wide = float(number)
        text = repr(wide) if abs(wide) < float("inf") else f'float("{wide}")'
    else:
        if number != int(number):
            raise Unknown(f"{number} is not a value of {dtype}")
        text = repr(int(number))
    return f"tl.full([], {text}, {computed_type(dtype)})"


# --- one function per kind of operation: (Translator, node) -> expression ----------------------


class Translator(Protocol):
    """What a rule asks for."""

    def operand(self, arg: Any, dtype: torch.dtype) -> str:
        """An argument in the type that ``dtype`` is computed in."""

    def dtype_of(self, arg: Any) -> torch.dtype:
        """The dtype of a node or number."""

    def promoted(self, *args: Any) -> torch.dtype:
        """The dtype that operands of a comparison are compared in."""

    def named(self, expression: str) -> str:
        """A local name of an expression."""


Rule = Callable[[Translator, Any], str]


def _argument(node: Any, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _scaled_infix(symbol: str, swapped: bool = False) -> Rule:
    """a + alpha * b, a - alpha * b."""

    def rule(t: Translator, node: Any) -> str:
        dtype = value(node).dtype
        a, b = (t.operand(arg, dtype) for arg in node.args[:2])
        if swapped:
            a, b = b, a
        alpha = _argument(node, 2, "alpha", 1)
        if dtype == torch.bool:
            raise Unknown("arithmetic of truth values has no translation")
        if alpha == 1:
            return f"{a} {symbol} {b}"
        if swapped:
            return f"{a} {symbol} {b} * {literal(alpha, dtype)}"
        return f"{a} {symbol} {literal(alpha, dtype)} * {b}"

    return rule


def _product(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    a, b = (t.operand(arg, dtype) for arg in node.args[:2])
    return f"{a} & {b}" if dtype == torch.bool else f"{a} * {b}"


def _quotient(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    if not dtype.is_floating_point or node.kwargs.get("rounding_mode") is not None:
        raise Unknown("division to whole numbers has no translation")
    a, b = (t.operand(arg, dtype) for arg in node.args[:2])
    return f"{a} / {b}"


def _comparison(symbol: str) -> Rule:
    """Both operands in the dtype that they promote to."""

    def rule(t: Translator, node: Any) -> str:
        dtype = t.promoted(*node.args[:2])
        a, b = (t.operand(arg, dtype) for arg in node.args[:2])
        return f"{a} {symbol} {b}"

    return rule


def _logical(symbol: str) -> Rule:
    def rule(t: Translator, node: Any) -> str:
        a, b = (t.operand(arg, torch.bool) for arg in node.args[:2])
        return f"{a} {symbol} {b}"

    return rule


def _bitwise(symbol: str) -> Rule:
    def rule(t: Translator, node: Any) -> str:
        dtype = value(node).dtype
        if dtype.is_floating_point:
            raise Unknown("bitwise operations are of whole numbers")
        a, b = (t.operand(arg, dtype) for arg in node.args[:2])
        return f"{a} {symbol} {b}"

    return rule


def _inverted(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    a = t.operand(node.args[0], dtype)
    return f"{a} == 0" if dtype == torch.bool else f"~{a}"


def _not(t: Translator, node: Any) -> str:
    return f"{t.operand(node.args[0], torch.bool)} == 0"


def greater(a: str, b: str, floats: bool = True) -> str:
    """The maximum of two expressions; NaN wins."""
    return f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})" if floats else f"tl.maximum({a}, {b})"


def lesser(a: str, b: str, floats: bool = True) -> str:
    """The minimum of two expressions; NaN wins."""
    return f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})" if floats else f"tl.minimum({a}, {b})"


def _extreme(pick: Callable[[str, str, bool], str]) -> Rule:
    def rule(t: Translator, node: Any) -> str:
        dtype = value(node).dtype
        a, b = (t.operand(arg, dtype) for arg in node.args[:2])
        if dtype == torch.bool:
            return f"{a} | {b}" if pick is greater else f"{a} & {b}"
        return pick(a, b, dtype.is_floating_point)

    return rule


def _clamped(low: int | None, high: int | None) -> Rule:
    def rule(t: Translator, node: Any) -> str:
        dtype = value(node).dtype
        out = t.operand(node.args[0], dtype)
        lower = None if low is None else _argument(node, low, "min")
        upper = None if high is None else _argument(node, high, "max")
        if dtype == torch.bool:
            raise Unknown("truth values are not clamped")
        for bound, pick in ((lower, greater), (upper, lesser)):
            if bound is not None:
                out = t.named(pick(out, t.operand(bound, dtype), dtype.is_floating_point))
        return out

    return rule


def _call(text: str, floats: bool = True) -> Rule:
    """A function of one value, ``{}`` in the text; ``floats``: of floating-point values only."""

    def rule(t: Translator, node: Any) -> str:
        dtype = value(node).dtype
        if floats and not dtype.is_floating_point:
            raise Unknown(f"{node.target} of {dtype} has no translation")
        if dtype in (torch.bool, torch.uint8):
            raise Unknown(f"{node.target} of {dtype} has no translation")
        a = t.operand(node.args[0], dtype)
        return text.replace("{}", a)

    return rule


def _predicate(text: str) -> Rule:
    """A truth about one floating-point value."""

    def rule(t: Translator, node: Any) -> str:
        dtype = t.dtype_of(node.args[0])
        if not dtype.is_floating_point:
            raise Unknown(f"{node.target} of {dtype} has no translation")
        return text.replace("{}", t.operand(node.args[0], dtype))

    return rule


def _call2(text: str) -> Rule:
    def rule(t: Translator, node: Any) -> str:
        dtype = value(node).dtype
        if not dtype.is_floating_point:
            raise Unknown(f"{node.target} of {dtype} has no translation")
        a, b = (t.operand(arg, dtype) for arg in node.args[:2])
        return text.replace("{0}", a).replace("{1}", b)

    return rule


def _power(t: Translator, node: Any) -> str:
    dtype, exponent = value(node).dtype, node.args[1]
    if dtype in (torch.bool, torch.uint8) or isinstance(exponent, torch.fx.Node):
        raise Unknown(f"{node.target} of {dtype} has no translation")
    a = t.operand(node.args[0], dtype)
    if exponent in (1, 2, 3, 4):
        if exponent == 4:
            a = t.named(f"{a} * {a}")
        return " * ".join([a] * (2 if exponent == 4 else int(exponent)))
    if not dtype.is_floating_point:
        raise Unknown(f"powers of whole numbers to {exponent} have no translation")
    if exponent == 0.5:
        return f"libdevice.sqrt({a})"
    if exponent == -0.5:
        return f"libdevice.rsqrt({a})"
    if exponent == -1:
        return f"{literal(1, dtype)} / {a}"
    return f"libdevice.pow({a}, {literal(exponent, dtype)} + tl.zeros_like({a}))"


def _chosen(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    condition = t.operand(node.args[0], torch.bool)
    a, b = (t.operand(arg, dtype) for arg in node.args[1:3])
    return f"tl.where({condition}, {a}, {b})"


def _converted(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    out = t.operand(node.args[0], dtype)
    if dtype in (torch.bfloat16, torch.float16) and t.dtype_of(node.args[0]) != dtype:
        out = f"{out}.to({stored_type(dtype)}).to({computed_type(dtype)})"
    return out


def _same(t: Translator, node: Any) -> str:
    return t.operand(node.args[0], value(node).dtype)


def _filled(index: int | None, number: Any = None) -> Rule:
    """The same number everywhere: of an argument, or the one given."""

    def rule(t: Translator, node: Any) -> str:
        fill = number if index is None else node.args[index]
        return literal(fill, value(node).dtype)

    return rule


def _fused_multiply_add(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    a, b, c = (t.operand(arg, dtype) for arg in node.args[:3])
    return f"{a} * {b} + {c}"


def _addcmul(t: Translator, node: Any) -> str:
    dtype, factor = value(node).dtype, node.kwargs.get("value", 1)
    a, b, c = (t.operand(arg, dtype) for arg in node.args[:3])
    product = f"{b} * {c}" if factor == 1 else f"{literal(factor, dtype)} * {b} * {c}"
    return f"{a} + {product}"


def _relu(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    a, zero = t.operand(node.args[0], dtype), literal(0, dtype)
    return f"tl.where({a} <= {zero}, {zero}, {a})"  # NaN is not <= 0


def _reciprocal(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    return f"{literal(1, dtype)} / {t.operand(node.args[0], dtype)}"


def _sign(t: Translator, node: Any) -> str:
    dtype = value(node).dtype
    if dtype in (torch.bool, torch.uint8):
        raise Unknown(f"{node.target} of {dtype} has no translation")
    a = t.operand(node.args[0], dtype)
    up, down = (f"({a} {s} 0).to({computed_type(dtype)})" for s in "><")
    return f"{up} - {down}"


def _whole(node: Any, t: Translator) -> tuple[str, int]:
    """A whole number and the constant that it is divided by."""
    dtype, by = value(node).dtype, node.args[1]
    if dtype not in (torch.int32, torch.int64) or type(by) is not int or by < 1:
        raise Unknown(f"{node.target} of {dtype} by {by} has no translation")
    return t.operand(node.args[0], dtype), by


def _floor_divided(t: Translator, node: Any) -> str:
    a, by = _whole(node, t)  # Triton rounds towards zero
    return f"tl.where({a} % {by} < 0, {a} // {by} - 1, {a} // {by})"


def _remainder(t: Translator, node: Any) -> str:
    a, by = _whole(node, t)
    return f"tl.where({a} % {by} < 0, {a} % {by} + {by}, {a} % {by})"


_RULES: dict[Any, Rule] = {
    aten.neg: _call("-{}", floats=False),
    aten.abs: _call("tl.abs({})", floats=False),
    aten.sign: _sign,
    aten.sgn: _sign,
    aten.exp: _call("libdevice.exp({})"),
    aten.exp2: _call("libdevice.exp2({})"),
    aten.expm1: _call("libdevice.expm1({})"),
    aten.log: _call("libdevice.log({})"),
    aten.log1p: _call("libdevice.log1p({})"),
    aten.log2: _call("libdevice.log2({})"),
    aten.log10: _call("libdevice.log10({})"),
    aten.sqrt: _call("libdevice.sqrt({})"),
    aten.rsqrt: _call("libdevice.rsqrt({})"),
    aten.reciprocal: _reciprocal,
    aten.sin: _call("libdevice.sin({})"),
    aten.cos: _call("libdevice.cos({})"),
    aten.atan: _call("libdevice.atan({})"),
    aten.tanh: _call("libdevice.tanh({})"),
    aten.sigmoid: _call("tl.sigmoid({})"),
    aten.relu: _relu,
    aten.erf: _call("libdevice.erf({})"),
    aten.floor: _call("libdevice.floor({})"),
    aten.ceil: _call("libdevice.ceil({})"),
    aten.trunc: _call("libdevice.trunc({})"),
    aten.round: _call("libdevice.nearbyint({})"),
    aten.isnan: _predicate("{} != {}"),
    aten.isinf: _predicate('tl.abs({}) == float("inf")'),
    aten.add: _scaled_infix("+"),
    aten.sub: _scaled_infix("-"),
    aten.rsub: _scaled_infix("-", swapped=True),
    aten.mul: _product,
    aten.div: _quotient,
    aten.pow: _power,
    aten.floor_divide: _floor_divided,
    aten.remainder: _remainder,
    aten.atan2: _call2("libdevice.atan2({0}, {1})"),
    aten.fmod: _call2("libdevice.fmod({0}, {1})"),
    aten.hypot: _call2("libdevice.hypot({0}, {1})"),
    aten.copysign: _call2("libdevice.copysign({0}, {1})"),
    aten.maximum: _extreme(greater),
    aten.minimum: _extreme(lesser),
    aten.clamp: _clamped(1, 2),
    aten.clamp_min: _clamped(1, None),
    aten.clamp_max: _clamped(None, 1),
    aten.eq: _comparison("=="),
    aten.ne: _comparison("!="),
    aten.lt: _comparison("<"),
    aten.le: _comparison("<="),
    aten.gt: _comparison(">"),
    aten.ge: _comparison(">="),
    aten.logical_and: _logical("&"),
    aten.logical_or: _logical("|"),
    aten.logical_xor: _logical("^"),
    aten.logical_not: _not,
    aten.bitwise_and: _bitwise("&"),
    aten.bitwise_or: _bitwise("|"),
    aten.bitwise_xor: _bitwise("^"),
    aten.bitwise_not: _inverted,
    aten.where: _chosen,
    aten.addcmul: _addcmul,
    prims.fma: _fused_multiply_add,
    prims.convert_element_type: _converted,
    aten._to_copy: _converted,
    aten.clone: _same,
    aten.alias: _same,
    aten.full: _filled(1),
    aten.full_like: _filled(1),
    aten.zeros_like: _filled(None, 0),
    aten.ones_like: _filled(None, 1),
    aten.zeros: _filled(None, 0),
    aten.ones: _filled(None, 1),
    aten.scalar_tensor: _filled(0),
}
# Overloads whose arguments mean something else than their packet's rule reads.
_OTHERWISE = {"Scalar_Tensor", "Tensor_Tensor", "Scalar", "Scalar_mode", "Tensor_mode", "decimals"}
_SCALAR_FIRST = {aten.pow, aten.where, aten.div, aten.round}


def rule_of(node: Any) -> Rule | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    rule = _RULES.get(target.overloadpacket)
    if rule is None or (
        target.overloadpacket in _SCALAR_FIRST
        and target._overloadname in _OTHERWISE
        and target not in (aten.div.Scalar, aten.where.Scalar)
    ):
        return None
    return rule
