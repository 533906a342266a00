"""Conditions on the positions of queries and keys: comparisons of affine whole numbers, and, or.

A condition is True, False, an ``Atom`` (an affine number compared with 0), a ``Truth`` (any other
truth value, of a builder's graph), or an ``And`` or ``Or`` of conditions; negations are pushed
down to the atoms. Equal conditions in different spellings (q >= k, not k > q, k - q < 1) are equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from inductor_ext.pointwise_graph import LARGEST_FACTOR, Builder
from inductor_ext.pointwise_values import Const, dtype_of, packet

aten = torch.ops.aten
# Of which any number of tokens fits on no card; sums with numbers beyond may not fit into int32.
LARGEST_PLACE = 1 << 30
_WHOLE = (torch.int32, torch.int64)
_NATURAL = ("b", "h", "q", "k")
_NEVER_NEGATIVE = (*_NATURAL, "rows", "columns", "q0", "q1", "k0", "k1")


@dataclasses.dataclass(frozen=True)
class Floor:
    """of // by, rounded down."""

    of: Affine
    by: int


Symbol = Any  # a name, a Floor, or a node of whole numbers


@dataclasses.dataclass(frozen=True)
class Affine:
    """The sum of coefficients times symbols, plus a constant."""

    terms: tuple[tuple[Symbol, int], ...] = ()
    constant: int = 0

    def __add__(self, other: Affine | int) -> Affine:
        other = other if isinstance(other, Affine) else Affine((), other)
        terms = dict(self.terms)
        for symbol, factor in other.terms:
            terms[symbol] = terms.get(symbol, 0) + factor
        kept = sorted((t for t in terms.items() if t[1]), key=lambda t: order(t[0]))
        return Affine(tuple(kept), self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return Affine()
        return Affine(tuple((s, c * factor) for s, c in self.terms), self.constant * factor)

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        return self + -other

    def of(self, symbol: Symbol) -> int:
        """The coefficient of a symbol."""
        return dict(self.terms).get(symbol, 0)

    def without(self, symbol: Symbol) -> Affine:
        return Affine(tuple(t for t in self.terms if t[0] != symbol), self.constant)

    def replaced(self, symbol: Symbol, by: Affine) -> Affine:
        """This number with another for a symbol, also inside of Floors."""
        result = Affine((), self.constant)
        for own, factor in self.terms:
            part = symbol_of(own)
            if own == symbol:
                part = by
            elif isinstance(own, Floor):
                part = floor(own.of.replaced(symbol, by), own.by)
            result = result + part * factor
        return result


def order(symbol: Symbol) -> tuple[Any, ...]:
    """What symbols are sorted by."""
    if isinstance(symbol, str):
        return (0, symbol)
    if isinstance(symbol, Floor):
        return (1, symbol.by, _affine_order(symbol.of))
    return (2, *symbol.meta["key"])


def _affine_order(number: Affine) -> tuple[Any, ...]:
    return (tuple((order(s), c) for s, c in number.terms), number.constant)


def symbol_of(symbol: Symbol) -> Affine:
    return Affine(((symbol, 1),))


def floor(number: Affine, by: int) -> Affine:
    """number // by, by > 0."""
    whole = Affine(
        tuple((s, c // by) for s, c in number.terms if c % by == 0), number.constant // by
    )
    rest = number - whole * by
    return whole + (symbol_of(Floor(rest, by)) if rest.terms else Affine())


def affine(value: Any) -> Affine | None:
    """A builder's whole number as affine; None where it is not of int32 or int64."""
    if isinstance(value, Const):
        return Affine((), int(value.value)) if isinstance(value.value, int) else None
    if isinstance(value, (int, float)):
        return affine(Const(value))
    if dtype_of(value) not in _WHOLE:
        return None
    if value.op == "placeholder":
        name = str(value.target)
        return symbol_of(value if name.startswith("x") else name)
    kind, args = packet(value), [a for a in value.args]
    parts = [affine(a) if not isinstance(a, torch.dtype) else None for a in args]
    if kind is aten._to_copy and parts[0] is not None:
        return parts[0]
    if kind is aten.neg and parts[0] is not None:
        return -parts[0]
    first, last = (*parts, None)[:2]
    if first is not None and last is not None:
        if kind is aten.add:
            return first + last
        if kind is aten.sub:
            return first - last
        if kind is aten.mul and not (first.terms and last.terms):
            found = first * last.constant if not last.terms else last * first.constant
            # Else a value of 64 bits, which no span is made of
            return (
                found if all(abs(c) < LARGEST_FACTOR for _, c in found.terms) else symbol_of(value)
            )
        if kind is aten.floor_divide and not last.terms and last.constant > 0:
            return floor(first, last.constant)
    return symbol_of(value)


def least(number: Affine) -> int | None:
    """A bound that an affine number is never below, by 0 <= q < rows and 0 <= k < columns; None
    where there is none."""
    reach = sum(-c for _, c in number.terms if c < 0) * LARGEST_PLACE
    places = (*_NATURAL, "rows", "columns")
    if number.constant >= reach > 0 and all(s in places for s, _ in number.terms):
        return number.constant - reach
    bound = number
    for place, size in (("q", "rows"), ("k", "columns")):
        if bound.of(place) < 0:  # place = size - 1 - another place of that axis
            factor = bound.of(place)
            bound = bound.without(place) + (symbol_of(size) - 1) * factor
    total = bound.constant
    for symbol, factor in bound.terms:
        if factor < 0:
            return None
        if symbol in ("rows", "columns"):
            total += factor
        elif isinstance(symbol, Floor):
            inner = least(symbol.of)
            if inner is None:
                return None
            total += factor * (inner // symbol.by)
        elif symbol not in _NATURAL:
            return None
    return total


def text_of(number: Affine, name: Callable[[Symbol], str]) -> str:
    """A number as a Triton expression; ``name`` says what symbols are called."""
    signed: list[tuple[int, str]] = []
    for symbol, factor in number.terms:
        part = _floor_text(symbol, name) if isinstance(symbol, Floor) else name(symbol)
        signed.append((factor, part if abs(factor) == 1 else f"{abs(factor)} * {part}"))
    tiles = [_is_tile(symbol) for symbol, _ in number.terms]
    # Scalars first, so that little is computed per row or pair
    parts = [p for p, tile in zip(signed, tiles, strict=True) if not tile]
    parts += [(number.constant, str(abs(number.constant)))] if number.constant else []
    parts += [p for p, tile in zip(signed, tiles, strict=True) if tile]
    text = ""
    for factor, part in parts:
        sign = "-" if factor < 0 else "+"
        text = f"{text} {sign} {part}" if text else part if factor > 0 else f"-{part}"
    return text or "0"


def _is_tile(symbol: Symbol) -> bool:
    if isinstance(symbol, Floor):
        return any(_is_tile(s) for s, _ in symbol.of.terms)
    return not isinstance(symbol, str) or symbol in _NATURAL


def _floor_text(symbol: Floor, name: Callable[[Symbol], str]) -> str:
    inner, by = f"({text_of(symbol.of, name)})", symbol.by
    terms = symbol.of.terms
    if symbol.of.constant >= 0 and all(c > 0 and s in _NEVER_NEGATIVE for s, c in terms):
        return f"({inner} // {by})"
    # Whole numbers divide towards zero here
    return f"tl.where({inner} % {by} < 0, {inner} // {by} - 1, {inner} // {by})"


# --- conditions -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Atom:
    """``number`` >= 0, == 0 or != 0."""

    number: Affine
    kind: str


@dataclasses.dataclass(frozen=True)
class Truth:
    """A truth value of a builder's graph, or its opposite."""

    node: Any
    negated: bool


@dataclasses.dataclass(frozen=True)
class And:
    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Or:
    parts: tuple[Any, ...]


Condition = bool | Atom | Truth | And | Or


def atom(number: Affine, kind: str) -> Condition:
    """A comparison with 0, decided where it always comes out the same."""
    factors = [abs(c) for _, c in number.terms]
    common = math.gcd(*factors) if factors else 1
    if kind == ">=":
        terms = tuple((s, c // common) for s, c in number.terms)
        number = Affine(terms, number.constant // common)
        low, high = least(number), least(-number)
        if low is not None and low >= 0:
            return True
        return False if high is not None and high > 0 else Atom(number, kind)
    if number.constant % common:
        return kind == "!="
    if number.terms and number.terms[0][1] < 0:
        number = -number
    number = Affine(tuple((s, c // common) for s, c in number.terms), number.constant // common)
    if not number.terms:
        return (number.constant == 0) == (kind == "==")
    if any(bound is not None and bound > 0 for bound in (least(number), least(-number))):
        return kind == "!="
    return Atom(number, kind)


def negated(condition: Condition) -> Condition:
    if isinstance(condition, bool):
        return not condition
    if isinstance(condition, Atom):
        if condition.kind == ">=":
            return atom(-condition.number - 1, ">=")
        return atom(condition.number, "!=" if condition.kind == "==" else "==")
    if isinstance(condition, Truth):
        return Truth(condition.node, not condition.negated)
    parts = [negated(part) for part in condition.parts]
    return any_of(parts) if isinstance(condition, And) else all_of(parts)


def all_of(conditions: Iterable[Condition]) -> Condition:
    return _joined(conditions, And, True)


def any_of(conditions: Iterable[Condition]) -> Condition:
    return _joined(conditions, Or, False)


def _joined(conditions: Iterable[Condition], kind: type, neutral: bool) -> Condition:
    parts: list[Condition] = []
    for condition in conditions:
        parts += condition.parts if isinstance(condition, kind) else [condition]  # type: ignore[union-attr]
    found = list(dict.fromkeys(p for p in parts if not isinstance(p, bool)))
    opposite = any(negated(p) in found for p in found if isinstance(p, (Atom, Truth)))
    if opposite or any(p is (not neutral) for p in parts):
        return not neutral
    found.sort(key=_order)
    if len(found) < 2:
        return found[0] if found else neutral
    return kind(tuple(found))


def _order(condition: Condition) -> tuple[Any, ...]:
    if isinstance(condition, Atom):
        return (0, condition.kind, *_affine_order(condition.number))
    if isinstance(condition, Truth):
        return (1, condition.negated, *condition.node.meta["key"])
    assert isinstance(condition, (And, Or))
    parts = tuple(_order(p) for p in condition.parts)
    return (2, isinstance(condition, Or), len(parts), repr(parts))


_COMPARED: dict[Any, Callable[[Affine, Affine], Condition]] = {
    aten.ge: lambda a, b: atom(a - b, ">="),
    aten.gt: lambda a, b: atom(a - b - 1, ">="),
    aten.le: lambda a, b: atom(b - a, ">="),
    aten.lt: lambda a, b: atom(b - a - 1, ">="),
    aten.eq: lambda a, b: atom(a - b, "=="),
    aten.ne: lambda a, b: atom(a - b, "!="),
}


def condition_of(builder: Builder, value: Any) -> Condition:
    """A builder's truth value as a condition."""
    value = builder.constant(value)
    if isinstance(value, Const):
        return bool(value.value)
    kind = packet(value)
    if kind is aten.bitwise_and:
        return all_of(condition_of(builder, a) for a in value.args)
    if kind is aten.bitwise_or:
        return any_of(condition_of(builder, a) for a in value.args)
    if kind is aten.logical_not:
        return negated(condition_of(builder, value.args[0]))
    if kind in _COMPARED:
        sides = [builder.constant(a) for a in value.args]
        parts = [affine(a) if dtype_of(a) in (None, *_WHOLE) else None for a in sides]
        if parts[0] is not None and parts[1] is not None:
            return _COMPARED[kind](parts[0], parts[1])
    return Truth(value, False)


def always_keeps(condition: Condition) -> bool:
    """Whether every query row provably keeps a key: the first, the last or that of its place."""
    places = (
        Affine(),
        symbol_of("columns") - 1,
        symbol_of("q") + symbol_of("columns") - symbol_of("rows"),
    )
    for place in places:
        inside = all_of((atom(place, ">="), atom(symbol_of("columns") - place - 1, ">=")))
        if all_of((inside, _at(condition, place))) is True:
            return True
    return False


def _at(condition: Condition, place: Affine) -> Condition:
    """A condition at one key."""
    if isinstance(condition, Atom):
        return atom(condition.number.replaced("k", place), condition.kind)
    if isinstance(condition, Truth):
        return "k" not in condition.node.meta["leaves"] and condition
    if isinstance(condition, (And, Or)):
        parts = [_at(part, place) for part in condition.parts]
        return all_of(parts) if isinstance(condition, And) else any_of(parts)
    return condition
