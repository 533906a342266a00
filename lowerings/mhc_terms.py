"""What each entry of a small tensor per token is made of, whatever way it is spelled.

A tensor of a hyper-connection has one part per token, *lead* dimensions, and behind them a few
entries (gates, a matrix of streams) or a few streams of H numbers each. Its ``Entries`` hold a term
per entry or stream; equal terms are one number. Slices, views, permutes and concatenations only
move terms, so that column orders, orientations and shapes need no patterns: whatever the program
does, the last matrix of a Sinkhorn loop has terms that say how it came about.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from inductor_ext.lowerings.mhc_arrays import Array

NARROW = (torch.bfloat16, torch.float16)


class Terms:
    """Terms by number: ``(operation, *arguments)``, arguments being numbers of terms or literals.

    Sums of a reduction are in no order, nor are products, which are flat; a number to multiply by
    is one factor. Nothing else is rearranged.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._terms: list[tuple[Any, ...]] = []
        self._wide: list[bool] = []

    def make(self, *term: Any, wide: bool = False) -> int:
        number = self._numbers.get(term)
        if number is None:
            number = self._numbers[term] = len(self._terms)
            self._terms.append(term)
            self._wide.append(wide)
        return number

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return self._terms[number]

    def is_wide(self, number: int) -> bool:
        """Whether a term stands for the H numbers of a stream."""
        return self._wide[number]

    def holds(self, number: int, op: str) -> bool:
        """Whether an operation takes part in a term."""
        seen, stack = set(), [number]
        while stack:
            term = self._terms[stack.pop()]
            if term[0] == op:
                return True
            if term[0] in ("constant", "stream", "parameter", "weight", "coefficient", "projected"):
                continue
            for part in term[1:]:
                if isinstance(part, int) and part not in seen:
                    seen.add(part)
                    stack.append(part)
        return False

    def _of(self, op: str, *numbers: int) -> int:
        return self.make(op, *numbers, wide=any(self._wide[n] for n in numbers))

    def constant(self, value: float) -> int:
        return self.make("constant", float(value))

    def constant_of(self, number: int) -> float | None:
        term = self._terms[number]
        return term[1] if term[0] == "constant" else None

    def factors(self, number: int) -> tuple[int, ...]:
        term = self._terms[number]
        return term[1:] if term[0] == "mul" else (number,)

    def mul(self, *numbers: int) -> int:
        product, rest = 1.0, []
        for number in (f for n in numbers for f in self.factors(n)):
            value = self.constant_of(number)
            if value is None:
                rest.append(number)
            else:
                product *= value
        if product != 1.0 or not rest:
            rest.append(self.constant(product))
        return rest[0] if len(rest) == 1 else self._of("mul", *sorted(rest))

    def add(self, a: int, b: int) -> int:
        x, y = self.constant_of(a), self.constant_of(b)
        if x is not None and y is not None:
            return self.constant(x + y)
        if x == 0.0 or y == 0.0:
            return b if x == 0.0 else a
        return self._of("add", *sorted((a, b)))

    def sub(self, a: int, b: int) -> int:
        return self.add(a, self.mul(b, self.constant(-1.0)))

    def div(self, a: int, b: int) -> int:
        return a if self.constant_of(b) == 1.0 else self._of("div", a, b)

    def sum(self, numbers: list[int]) -> int:
        return numbers[0] if len(numbers) == 1 else self._of("sum", *sorted(numbers))

    def over_hidden(self, numbers: list[int]) -> int:
        """The sum over H of these streams, and over the streams."""
        return self.make("over_hidden", *sorted(numbers))

    def apply(self, op: str, *arguments: Any) -> int:
        """Any other function; arguments that are no terms are to be given as text."""
        wide = any(isinstance(a, int) and self._wide[a] for a in arguments)
        return self.make(op, *arguments, wide=wide)

    def round(self, number: int, dtype: torch.dtype) -> int:
        return self.apply("round", str(dtype), number)

    def summands(self, number: int, through: str | None = None) -> list[int]:
        """What is added up in a term; ``through`` is a dtype to which parts may be rounded."""
        term = self._terms[number]
        if term[0] in ("add", "sum"):
            return [s for part in term[1:] for s in self.summands(part, through)]
        if term[0] == "round" and term[1] == through:
            return self.summands(term[2], through)
        return [number]

    def offset(self, number: int) -> tuple[int, float]:
        """(the rest, the number that is added to it)."""
        term = self._terms[number]
        if term[0] == "add":
            for rest, last in (term[1:], term[:0:-1]):
                value = self.constant_of(last)
                if value is not None:
                    return rest, value
        return number, 0.0


@dataclasses.dataclass(frozen=True)
class Entries:
    """Terms of a tensor of shape ``lead`` dimensions + ``array.shape``; along axis ``wide`` of the
    array an entry stands for H numbers."""

    array: Array
    lead: int
    wide: int | None = None

    def shape(self, hidden: int) -> tuple[int, ...]:
        """Of what is behind the lead dimensions, in numbers."""
        return tuple(
            size * hidden if axis == self.wide else size
            for axis, size in enumerate(self.array.shape)
        )

    def in_lead(self, lead: int) -> Entries | None:
        """The same with ``lead`` lead dimensions, of which the last have size 1."""
        moved = lead - self.lead
        if moved < 0 or any(size != 1 for size in self.array.shape[:moved]):
            return None
        wide = None if self.wide is None else self.wide - moved
        if wide is not None and wide < 0:
            return None
        return Entries(self.array.reshape(self.array.shape[moved:]), lead, wide)

    def padded(self, rank: int) -> Entries | None:
        """The same with an array of ``rank`` axes, the new ones in front."""
        more = rank - self.array.ndim
        if more < 0:
            if any(size != 1 for size in self.array.shape[:-more]) or self.wide is not None:
                return None
            return Entries(self.array.reshape(self.array.shape[-more:]), self.lead)
        wide = None if self.wide is None else self.wide + more
        return Entries(self.array.reshape((1,) * more + self.array.shape), self.lead, wide)
