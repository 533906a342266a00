"""Which keys a tile of query rows may keep, and which it surely keeps, read off a condition.

Both are spans between affine bounds, for rows ``q0`` to ``q1``. What is kept lies in the spans,
what is full is kept; conditions that are not affine in q and k only make the full part empty.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from inductor_ext.templates.attention_program import Span

from ._attention_conditions import (
    Affine,
    And,
    Atom,
    Condition,
    Floor,
    Or,
    Symbol,
    floor,
    symbol_of,
    text_of,
)

_DISJUNCTS = 32  # of a condition in disjunctive form; beyond that it is everything


@dataclasses.dataclass
class _Part:
    """Conditions that hold together: v >= each of ``lo``, v < each of ``hi``, each of ``given``
    >= 0, and perhaps ``more``."""

    lo: list[Affine] = dataclasses.field(default_factory=list)
    hi: list[Affine] = dataclasses.field(default_factory=list)
    given: list[Affine] = dataclasses.field(default_factory=list)
    more: bool = False


def spans(condition: Condition, along: str) -> tuple[Span, ...]:
    """The spans along "k" for a tile of rows, or along "q" for a tile of keys, in ascending order
    and disjoint."""
    size = "columns" if along == "k" else "rows"
    if condition is False:
        return (Span("0", "0", "0", "0"),)
    disjuncts = [[]] if condition is True else _disjuncts(condition)
    if disjuncts is None:
        return (Span("0", size, "0", "0"),)
    parts = [_part(d, along) for d in disjuncts]
    before, rest = [p for p in parts if not p.lo], [p for p in parts if p.lo]
    found = [_first(before, along, size)] if before else []
    if rest and (not found or found[0].hi != size):
        found.append(_last(rest, along, size, found[0].hi if found else None))
    return tuple(found)


def _disjuncts(condition: Condition) -> list[list[Condition]] | None:
    """Lists of atoms and truths of which one must hold altogether; None where they are too many."""
    if isinstance(condition, Or):
        found = [_disjuncts(part) for part in condition.parts]
        lists = [d for part in found for d in part or []]
        return None if None in found or len(lists) > _DISJUNCTS else lists
    if isinstance(condition, And):
        count, found = 1, [_disjuncts(part) for part in condition.parts]
        for part in found:
            if part is None or (count := count * len(part)) > _DISJUNCTS:
                return None
        return [list(itertools.chain(*choice)) for choice in itertools.product(*found)]  # type: ignore[arg-type]
    if isinstance(condition, Atom) and condition.kind == "!=":
        more, less = condition.number - 1, -condition.number - 1
        return [[Atom(less, ">=")], [Atom(more, ">=")]]
    return [[condition]]


def _part(conditions: Iterable[Condition], along: str) -> _Part:
    part = _Part()
    for condition in conditions:
        if not isinstance(condition, Atom):
            part.more = True
            continue
        sides = [condition.number, -condition.number]
        for number in sides if condition.kind == "==" else sides[:1]:
            _bound(part, number, along)
    return part


def _bound(part: _Part, number: Affine, along: str) -> None:
    """Add the condition that a number is not negative."""
    holders = [s for s, _ in number.terms if _reads(s, along)]
    if not _is_scalar(number) or len(holders) > 1:
        part.more = True
        return
    if not holders:
        part.given.append(number)
        return
    factor, rest, holder = number.of(holders[0]), number.without(holders[0]), holders[0]
    if not isinstance(holder, Floor):
        if factor > 0:  # v >= -rest / factor, rounded up
            part.lo.append(-floor(rest, factor))
        else:
            part.hi.append(floor(rest, -factor) + 1)
        return
    inner = holder.of.without(along)
    if (
        abs(factor) != 1
        or holder.of.of(along) != 1
        or any(_reads(s, _OTHER[along]) for s, _ in inner.terms)
    ):
        part.more = True
    elif factor > 0:  # (v + inner) // by >= -rest
        part.lo.append(-(rest * holder.by) - inner)
    else:  # (v + inner) // by <= rest
        part.hi.append((rest + 1) * holder.by - inner)


def _reads(symbol: Symbol, name: str) -> bool:
    if isinstance(symbol, Floor):
        return any(_reads(s, name) for s, _ in symbol.of.terms)
    return symbol == name


def _is_scalar(number: Affine) -> bool:
    """Whether a number is made of q, k and what a launch has as scalars."""
    inner = [s.of for s, _ in number.terms if isinstance(s, Floor)]
    others = [s for s, _ in number.terms if not isinstance(s, Floor)]
    return all(isinstance(s, str) and s not in ("b", "h") for s in others) and all(
        map(_is_scalar, inner)
    )


# --- texts ----------------------------------------------------------------------------------------


def _first(parts: list[_Part], along: str, size: str) -> Span:
    """One span from 0 over parts without a lower bound. Their full parts all begin at 0."""
    hi = _most([_guarded(p, along, _high(p, along, size, 1), "0", 1) for p in parts], size)
    whole = [p for p in parts if not p.more]
    full = [_guarded(p, along, _high(p, along, size, 0), "0", 0) for p in whole]
    return Span("0", hi, "0", _most(full, size) if full else "0")


def _last(parts: list[_Part], along: str, size: str, start: str | None) -> Span:
    """One span over parts with a lower bound, cut at ``start``. Its full part is of those that
    begin or end together."""
    lo = _least([_guarded(p, along, _low(p, along, 0), size, 1) for p in parts])
    lo = lo if start is None else _most([lo, start])
    hi = _most([_guarded(p, along, _high(p, along, size, 1), "0", 1) for p in parts], size)
    whole = [p for p in parts if not p.more]
    if whole and all(p.lo == whole[0].lo for p in whole):
        begin = _low(whole[0], along, 1)
        ends = [_guarded(p, along, _high(p, along, size, 0), "0", 0) for p in whole]
        end = _most(ends, size)
    elif whole and all(p.hi == whole[0].hi for p in whole):
        begin = _least([_guarded(p, along, _low(p, along, 1), size, 0) for p in whole])
        end = _high(whole[0], along, size, 0)
    else:
        begin = end = lo
    return Span(lo, hi, begin if start is None or begin == lo else _most([begin, start]), end)


def _low(part: _Part, along: str, most: int) -> str:
    return _most([_bound_text(v, along, most) for v in part.lo])


def _high(part: _Part, along: str, size: str, most: int) -> str:
    return _least([_bound_text(v, along, most) for v in part.hi]) if part.hi else size


def _guarded(part: _Part, along: str, bound: str, nothing: str, most: int) -> str:
    """A bound of a part, which is empty unless one (``most``) or all rows of the tile meet what is
    said of rows alone."""
    for number in part.given:
        bound = f"tl.where({_bound_text(number, along, most)} >= 0, {bound}, {nothing})"
    return bound


def _least(texts: list[str]) -> str:
    return _nested("tl.minimum", texts)


def _most(texts: list[str], limit: str = "") -> str:
    """``limit``: what nothing exceeds."""
    return limit if limit in texts else _nested("tl.maximum", texts)


def _nested(function: str, texts: list[str]) -> str:
    first, *more = dict.fromkeys(texts)
    for text in more:
        first = f"{function}({first}, {text})"
    return first


_OTHER = {"k": "q", "q": "k"}


def _bound_text(number: Affine, along: str, most: int) -> str:
    """The least or most that a number is for the tile's places along the other axis."""
    return text_of(_at_end(number, _OTHER[along], most), str)


def _at_end(number: Affine, other: str, most: int) -> Affine:
    result = Affine((), number.constant)
    for symbol, factor in number.terms:
        end, part = most if factor > 0 else 1 - most, symbol_of(symbol)
        if symbol == other:
            part = symbol_of(f"{other}{end}")
        elif isinstance(symbol, Floor):
            part = symbol_of(Floor(_at_end(symbol.of, other, end), symbol.by))
        result = result + part * factor
    return result
