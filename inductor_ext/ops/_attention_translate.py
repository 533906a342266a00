"""Making an attention kernel's Program of a score's text."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext import pointwise_text, scan_operations, scan_pointwise
from inductor_ext.pointwise_graph import Builder
from inductor_ext.pointwise_text import NotPointwise
from inductor_ext.pointwise_values import Const, Value, dtype_of, in_order, leaves, packet
from inductor_ext.templates.attention_program import LOG2E, Input, Program

from ._attention_conditions import (
    Affine,
    And,
    Atom,
    Condition,
    Floor,
    Symbol,
    Truth,
    all_of,
    always_keeps,
    any_of,
    condition_of,
    negated,
    text_of,
)
from ._attention_gradient import GradientBuilder, gradients
from ._attention_score import INDICES, names
from ._attention_spans import spans

aten = torch.ops.aten
_LARGEST = float(torch.finfo(torch.float32).max)
_FAR = 4096.0  # beyond which numbers are meant as masks
_LEAST = -1e30  # a dtype's least number, and what is meant as one
_SIZES = {"b": 2, "h": 3, "q": 5, "k": 7}  # of the meta tensors that values are typed with


class NoProgram(Exception):
    """Why a score has no program; one sentence."""


@functools.lru_cache(maxsize=1024)
def program(
    text: str, inputs: tuple[Input, ...], numbers: int, empty: str, exact: bool = True
) -> Program:
    """The Program of a score's text, of inputs x0, x1, ... and so many numbers n0, n1, ...;
    ``empty``: "zero" or "nan". ``exact``: tanh with an absolute error of 1e-7; else with a relative
    one of 2^-11, by the card's instruction, which is less than that of scores of 16-bit numbers.
    Equal arguments give the same object, and texts that differ only in spelling mostly equal ones.
    Raises NoProgram.
    """
    if empty not in ("zero", "nan"):
        raise NoProgram(f"expected empty to be 'zero' or 'nan', got {empty!r}")
    try:
        return _program(text, inputs, numbers, empty, exact)
    except (NotPointwise, scan_operations.Unknown, ValueError) as error:
        raise NoProgram(f"the score has no Triton program: {error}") from error


def _program(
    text: str, inputs: tuple[Input, ...], numbers: int, empty: str, exact: bool
) -> Program:
    graph, results = pointwise_text.read(text, names(numbers, len(inputs)))
    placeholders = graph.find_nodes(op="placeholder")
    graph.output(results)
    builder = _with_inputs(Builder, inputs, numbers)
    values = {n: builder.inputs[str(n.target)] for n in placeholders}
    (result,) = builder.merge(graph, values)
    (keep, score), likely = _kept(builder, result)
    made = _of(builder, keep, score, inputs, numbers, empty, exact)
    if likely is None:
        return made
    found = _of(builder, *likely, inputs, numbers, empty, exact)
    return dataclasses.replace(made, likely=found) if found.skips else made


def _of(
    builder: Builder, keep: Condition, score: Value, inputs: tuple[Input, ...], numbers: int,
    empty: str, exact: bool,
) -> Program:  # fmt: skip
    """The program of what is kept and the score there."""
    score = builder.convert(score, torch.float32)
    documents, apart = _documents(keep, inputs)
    traced = _with_inputs(GradientBuilder, inputs, numbers)
    ds, others = gradients(traced, score, inputs)

    fast = _with_inputs(_Exact if exact else _Fast, inputs, numbers)
    r = _Writer("tmpr")
    r.assign("r", in_units(fast, fast.take(score), LOG2E), "s")
    d = _Writer("tmpd")
    d.assign("ds", fast.take(ds), "g")
    for i, gradient in others.items():
        d.assign(f"d{i}", fast.take(gradient))
    return Program(
        inputs=inputs,
        numbers=numbers,
        scale=_factor(score, builder.inputs["s"]),
        score=r.text(),
        keep=_keep_text(keep),
        row_spans=spans(apart, "k"),
        column_spans=spans(apart, "q"),
        documents=documents,
        gradient=d.text(),
        differentiable=tuple(others),
        empty=empty,
        slope=_factor(ds, traced.inputs["g"]),
    )


class _Fast(GradientBuilder):
    """A builder that writes what kernels compute quickly: whole numbers become floats per row and
    column, not per pair (places below 2^24 are exact as floats); factors come together."""

    def operation(self, kind: Any, *operands: Value, op: Any = None) -> Value:
        if kind in (aten.add, aten.sub, aten.mul, aten.div) and len(operands) == 2:
            floats = any((dtype_of(a) or torch.int32).is_floating_point for a in operands)
            if floats:
                operands = tuple(
                    self.convert(a, torch.float32) if dtype_of(a) == torch.int32 else a
                    for a in operands
                )
            if kind is aten.mul and floats and not isinstance(operands[1], Const):
                for first, last in (operands, operands[::-1]):
                    outer = packet(first) is aten.mul and _size(first) >= _size(last)
                    inner, factor = map(self.constant, first.args) if outer else (None, None)
                    if isinstance(factor, Const):
                        return self.operation(kind, self.operation(kind, inner, last), factor)
        return super().operation(kind, *operands, op=op)

    def convert(self, value: Value, dtype: torch.dtype, always: bool = False) -> Value:
        kind = packet(value)
        if kind in (aten.add, aten.sub, aten.abs, aten.neg) and dtype == torch.float32:
            parts = [self.constant(a) for a in value.args]
            inner = kind in (aten.abs, aten.neg) or any(_size(p) < _size(value) for p in parts)
            if dtype_of(value) == torch.int32 and leaves(value) <= self._narrow and inner:
                return self.operation(kind, *(self.convert(p, dtype) for p in parts))
        return super().convert(value, dtype, always)


class _Exact(_Fast):
    """With tanh from the exponential: its absolute error is what counts beside exp."""

    def operation(self, kind: Any, *operands: Value, op: Any = None) -> Value:
        if kind is not aten.tanh:
            return super().operation(kind, *operands, op=op)
        double = self.operation(aten.mul, operands[0], Const(2 * LOG2E))
        divisor = self.operation(aten.add, self.call(aten.exp2.default, double), Const(1.0))
        return self.operation(aten.add, self.operation(aten.div, Const(-2.0), divisor), Const(1.0))


def _size(value: Value) -> int:
    """How many axes a value varies along, as a number that grows with them."""
    return 1 if isinstance(value, Const) else int(value.meta["val"].numel())


def _with_inputs(kind: type[Any], inputs: Sequence[Input], numbers: int) -> Any:
    """A builder with the inputs that a program sees; whole numbers of its own are int32."""
    counts = [f"n{i}" for i in range(numbers)]
    builder = kind(like="b", narrow=frozenset({*INDICES, *counts}))
    builder.input("s", torch.empty(tuple(_SIZES.values()), device="meta"))
    for name in (*INDICES, *counts):
        shape = [size if axis == name else 1 for axis, size in _SIZES.items()]
        whole = torch.empty(shape if name in _SIZES else (), dtype=torch.int64, device="meta")
        builder.input(name, whole)
    for i, x in enumerate(inputs):
        shape = [size if axis in x.axes else 1 for axis, size in _SIZES.items()]
        builder.input(f"x{i}", torch.empty(shape, dtype=x.dtype, device="meta"))
    if kind is not Builder:
        builder.input("g", torch.empty(tuple(_SIZES.values()), device="meta"))
    return builder


# --- what is kept ---------------------------------------------------------------------------------


_Split = tuple[Condition, Value]


def _kept(builder: Builder, score: Value) -> tuple[_Split, _Split | None]:
    """A score as a condition, outside of which it is -inf, and its value where that holds; and the
    same with finite masks as -inf, for rows that keep something else, if that is another.

    A finite number that leaves no weight beside any other score is as good as -inf, unless a whole
    row consists of it: then its weights are equal. A tensor that is added may hold it too, as masks
    of padding do, so what is kept must be made of none.
    """
    keep, kept = _split(builder, score, -6.5e4)
    if always_keeps(keep) and _is_far(kept):
        return (keep, kept), None
    # Beside numbers of fp16 the least one of fp16 is not far enough.
    likely, sure = _split(builder, score, _LEAST), _split(builder, score, None)
    return sure, None if likely[0] in (sure[0], False) else likely


def _is_far(value: Any) -> bool:
    """Whether a score is surely no dtype's least number, for dot products that are none: it is made
    of no such number and of no tensor that may hold one."""
    if not isinstance(value, torch.fx.Node):
        return isinstance(value, torch.dtype) or not _excludes(value, -6.5e4)
    if dtype_of(value) == torch.bool:
        return True
    if value.op == "placeholder":
        return str(value.target) == "s" or not dtype_of(value).is_floating_point  # type: ignore[union-attr]
    args = [a if isinstance(a, (torch.fx.Node, torch.dtype)) else Const(a) for a in value.args]
    return all(map(_is_far, args))


def _split(builder: Builder, value: Value, finite: float | None) -> _Split:
    if isinstance(value, Const):
        return not _excludes(value, finite), value
    kind, args = packet(value), [builder.constant(a) for a in value.args]
    if not dtype_of(value).is_floating_point:  # type: ignore[union-attr]
        return True, value
    if kind is aten.where:
        dtype = dtype_of(value)
        branches = [Const(a.value, dtype) if isinstance(a, Const) else a for a in args[1:]]
        (keep_a, a), (keep_b, b) = (_split(builder, v, finite) for v in branches)
        if keep_a is True and keep_b is True:
            return True, value
        condition = condition_of(builder, args[0])
        keep = any_of((all_of((condition, keep_a)), all_of((negated(condition), keep_b))))
        if keep_a is False or keep_b is False:
            return keep, builder.convert(b if keep_a is False else a, dtype)
        return keep, builder.operation(aten.where, args[0], a, b)
    if kind in (aten.add, aten.sub) or (kind is aten.mul and _is_positive(args[1])):
        (keep_a, a), (keep_b, b) = (_split(builder, v, finite) for v in args)
        if kind is aten.sub and keep_b is not True:
            return True, value
        if kind is aten.mul:
            keep_b, b = True, args[1]
        keep = all_of((keep_a, keep_b))
        if keep is True:
            return True, value
        a, b = (Const(0.0, dtype_of(v)) if _excludes(v, finite) else v for v in (a, b))
        return keep, builder.convert(builder.operation(kind, a, b), dtype_of(value))
    if kind is aten._to_copy:
        keep, inner = _split(builder, args[0], finite)
        return keep, value if keep is True else builder.convert(inner, dtype_of(value))
    return True, value


def _is_positive(value: Value) -> bool:
    return isinstance(value, Const) and 1e-4 <= value.value < float("inf")


def _excludes(value: Value, finite: float | None) -> bool:
    """Whether a number as a score leaves no weight: -inf, or a dtype's least; ``finite``: what
    counts as that of fp16, None where no finite number counts."""
    if not isinstance(value, Const) or isinstance(value.value, bool):
        return False
    if finite is None:
        return bool(value.value == -float("inf"))
    return bool(value.value <= (finite if value.dtype is torch.float16 else _LEAST))


def _documents(
    keep: Condition, inputs: Sequence[Input]
) -> tuple[tuple[int, int] | None, Condition]:
    """The inputs of which equality is kept, and what is kept besides."""
    parts = keep.parts if isinstance(keep, And) else (keep,)
    for part in parts:
        if not isinstance(part, Atom) or part.kind != "==" or part.number.constant:
            continue
        terms = part.number.terms
        if sorted(c for _, c in terms) != [-1, 1]:
            continue
        places = [_input_number(symbol) for symbol, _ in terms]
        for i, j in (places, places[::-1]):
            if i is None or j is None:
                continue
            rows, columns = inputs[i].axes, inputs[j].axes
            if "q" in rows and "k" not in rows and "k" in columns and "q" not in columns:
                return (i, j), all_of(p for p in parts if p is not part)
    return None, keep


def _input_number(symbol: Symbol) -> int | None:
    while packet(symbol) is aten._to_copy:
        symbol = symbol.args[0]
        if dtype_of(symbol).is_floating_point:  # type: ignore[union-attr]
            return None
    if getattr(symbol, "op", None) != "placeholder":
        return None
    return int(str(symbol.target)[1:])


# --- units ----------------------------------------------------------------------------------------


def _factor(value: Value, of: Any) -> float | None:
    """The number that a value is ``of`` times; None where it is not."""
    if value is of:
        return 1.0
    if (
        packet(value) is aten.mul
        and value.args[0] is of
        and isinstance(value.args[1], (int, float))
    ):
        return float(value.args[1])
    return None


def in_units(builder: Builder, value: Value, factor: float) -> Value:
    """value * factor, where the factor goes into constants if it can. What is finite stays so."""
    if isinstance(value, Const):
        return Const(_product(value.value, factor), torch.float32)
    if not dtype_of(value).is_floating_point:  # type: ignore[union-attr]
        value = builder.convert(value, torch.float32)
    kind, args = packet(value), [builder.constant(a) for a in value.args]
    if kind in (aten.add, aten.sub):
        return builder.operation(kind, *(in_units(builder, a, factor) for a in args))
    if kind is aten.where:
        branches = [in_units(builder, a, factor) for a in args[1:]]
        return builder.operation(aten.where, args[0], *branches)
    if kind is aten.neg:
        return in_units(builder, args[0], -factor)
    if kind is aten.mul and isinstance(args[1], Const):
        return in_units(builder, args[0], _product(args[1].value, factor))
    if kind is aten.mul and min(map(_size, args)) < _size(value):
        first, last = sorted(args, key=_size)
        return builder.operation(kind, in_units(builder, first, factor), last)
    if kind is aten.div and isinstance(args[0], Const):
        return builder.operation(kind, Const(_product(args[0].value, factor)), args[1])
    value = builder.convert(value, torch.float32)
    product = builder.operation(aten.mul, value, Const(factor))
    if factor > 1 and _is_input(value):  # it may hold a dtype's least number, and -inf
        product.meta["saturates"] = True
    return product


def _product(number: float, factor: float) -> float:
    product = number * factor
    if abs(number) == float("inf"):
        return product
    if factor == LOG2E and abs(number) > _FAR:  # as a tensor's element is multiplied, to be equal
        product = _towards_zero(_narrow(number) * _narrow(factor))
    return max(-_LARGEST, min(product, _LARGEST))


def _narrow(number: float) -> float:
    """In fp32, rounded to nearest."""
    return float(struct.unpack("f", struct.pack("f", max(-_LARGEST, min(number, _LARGEST))))[0])


def _towards_zero(number: float) -> float:
    """In fp32, rounded towards 0."""
    (bits,) = struct.unpack("I", struct.pack("f", nearest := _narrow(number)))
    beyond = abs(nearest) > abs(number)
    return float(struct.unpack("f", struct.pack("I", bits - beyond))[0])


def _is_input(value: Value) -> bool:
    """Whether a value is an input whose range is that of fp32."""
    while packet(value) is aten._to_copy:
        value = value.args[0]
    if value.op != "placeholder" or str(value.target) == "s":
        return False
    return dtype_of(value) in (torch.float32, torch.bfloat16, torch.float64)


# --- texts ----------------------------------------------------------------------------------------


class _Translator(scan_pointwise.Translator):
    """With the exponentials that the kernel's softmax has, and the card's own tanh."""

    def rule(self, node: Any) -> Any:
        quick = _QUICK.get(packet(node))
        if node.meta.get("saturates"):  # rounded towards 0, what is finite stays so
            quick = _instruction(f"mul.rz.f32 $0, $1, 0f{_bits(node.args[1])};")
        if quick is None:
            return super().rule(node)
        return lambda t, node: quick.replace("{}", t.operand(node.args[0], torch.float32))


def _instruction(text: str) -> str:
    """An instruction of one operand, ``{}``."""
    options = "dtype=tl.float32, is_pure=True, pack=1"
    return f'tl.inline_asm_elementwise("{text}", "=f,f", [{{}}], {options})'


def _bits(number: Any) -> str:
    return struct.pack(">f", number).hex().upper()


_QUICK = {
    aten.exp: "tl.exp({})",
    aten.exp2: "tl.exp2({})",
    aten.tanh: _instruction("tanh.approx.f32 $0, $1;"),
}


class _Writer:
    """Statements of builders' nodes."""

    def __init__(self, prefix: str) -> None:
        self._translator = _Translator({}, prefix)
        self._written: set[Any] = set()

    def name(self, node: Any) -> str:
        """The name of a node's value, as it is computed."""
        for part in in_order(node):
            if part not in self._written:
                self._written.add(part)
                if part.op == "placeholder":
                    self._translator.given(part, str(part.target))
                else:
                    self._translator.add(part)
        return self._translator.of(node)

    def assign(self, name: str, value: Value, whole: str | None = None) -> None:
        """``name = value``, of the shape of ``whole`` if one is given."""
        if isinstance(value, Const):
            text = f"tl.full([], {float(value.value)!r}, tl.float32)"
        else:
            text = self.name(value)
        if whole is not None and not leaves(value) & {"s", "g"}:
            text = f"{text} + tl.zeros_like({whole})"
        self._translator.statements.append(f"{name} = {text}")

    def text(self) -> str:
        return "\n".join(self._translator.statements)


def _keep_text(keep: Condition) -> str:
    if keep is True:
        return ""
    if keep is False:
        return "keep = tl.full([], False, tl.int1)"
    writer = _Writer("tmpk")
    text = _condition_text(keep, writer)
    return "\n".join([*filter(None, [writer.text()]), f"keep = {text}"])


def _condition_text(condition: Condition, writer: _Writer) -> str:
    if isinstance(condition, Truth):
        name = writer.name(condition.node)
        return f"({name} == 0)" if condition.negated else name
    if isinstance(condition, Atom):
        return f"({_atom_text(condition, writer)})"
    assert not isinstance(condition, bool)
    symbol = " & " if isinstance(condition, And) else " | "
    return f"({symbol.join(_condition_text(p, writer) for p in condition.parts)})"


def _atom_text(atom: Atom, writer: _Writer) -> str:
    """A comparison with the fastest axis alone on its left."""

    def name(symbol: Symbol) -> str:
        return symbol if isinstance(symbol, str) else writer.name(symbol)

    sides = [s for s, c in atom.number.terms if abs(c) == 1]
    sides.sort(key=lambda s: (s != "k", s != "q", isinstance(s, (str, Floor))))
    if not sides:
        return f"{text_of(atom.number, name)} {atom.kind} 0"
    alone, factor = sides[0], atom.number.of(sides[0])
    rest = atom.number.without(alone) * -factor
    kind = "<=" if atom.kind == ">=" and factor < 0 else atom.kind
    return f"{text_of(Affine(((alone, 1),)), name)} {kind} {text_of(rest, name)}"
