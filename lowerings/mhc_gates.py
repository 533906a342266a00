"""The gates of a hyper-connection and its Sinkhorn loop, read off their terms."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from inductor_ext.lowerings.mhc_terms import Terms
from inductor_ext.lowerings.sites import NoSite


@dataclasses.dataclass(frozen=True)
class Logit:
    """``scale * z + base`` of one column: z is a row of a projection times the inverse root mean
    square. Rows are (leaf, transposed, column), scales and bases (leaf, index), or None for z."""

    row: tuple[int, bool, int]
    scale: tuple[int, int] | None
    base: tuple[int, int] | None
    rms_eps: float
    norm_weight: int | None


Matrix: TypeAlias = list[list[int]]


def turned(matrix: Matrix) -> Matrix:
    """The transpose."""
    return [list(row) for row in zip(*matrix, strict=True)]


class Gates:
    """Parses terms over n streams of H numbers each."""

    def __init__(self, terms: Terms, n: int, hidden: int) -> None:
        self.terms, self.n, self.hidden = terms, n, hidden
        self.streams = [terms.make("stream", i, wide=True) for i in range(n)]

    def logit(self, term: int) -> Logit:
        parts = self.terms[term]
        if parts[0] != "add":
            raise NoSite("a gate is not computed from scale * z + base")
        pairs = [p for p in (parts[1:], parts[:0:-1]) if self.terms[p[1]][0] == "parameter"]
        if not pairs:
            raise NoSite("a gate's base is not a parameter")
        product, base = pairs[0]
        factors = {self.terms[f][0]: f for f in self.terms.factors(product)}
        if len(self.terms.factors(product)) != 3 or "projected" not in factors:
            raise NoSite("a gate is not computed from scale * z + base")
        if "rsqrt" not in factors:
            raise NoSite("the norm is not rsqrt(mean of squares + eps)")
        if "parameter" not in factors:
            raise NoSite("a gate's scale is not a parameter")
        scale = self.terms[factors["parameter"]][1:]
        return self._logit(factors, scale, self.terms[base][1:])

    def _logit(self, factors: dict[str, int], scale: Any, base: Any) -> Logit:
        row, norm_weight = self._row(self.terms[factors["projected"]])
        return Logit(row, scale, base, self._eps(factors["rsqrt"]), norm_weight)

    def column(self, term: int) -> Logit | None:
        """A column z by itself; None for other terms, and columns of another norm."""
        factors = {self.terms[f][0]: f for f in self.terms.factors(term)}
        if len(self.terms.factors(term)) != 2 or factors.keys() != {"projected", "rsqrt"}:
            return None
        try:
            return self._logit(factors, None, None)
        except NoSite:
            return None

    def _row(self, projected: tuple[Any, ...]) -> tuple[tuple[int, bool, int], int | None]:
        _, leaf, transposed, column, *inputs = projected
        row = leaf, transposed, column
        if inputs == self.streams:
            return row, None
        weights = set()
        for i, (stream, found) in enumerate(zip(self.streams, inputs, strict=True)):
            rest = [f for f in self.terms.factors(found) if f != stream]
            kind, *where = self.terms[rest[0]] if len(rest) == 1 else (None,)
            if kind != "weight" or where[1] != i:
                raise NoSite("the projection is not of the residual streams")
            weights.add(where[0])
        if len(weights) != 1:
            raise NoSite("the norm's weight is not one tensor")
        return row, weights.pop()

    def _eps(self, rsqrt: int) -> float:
        mean, eps = self.terms.offset(self.terms[rsqrt][1])
        squares = [self.terms.mul(s, s) for s in self.streams]
        width = self.n * self.hidden
        whole = self.terms.over_hidden(squares)
        if mean != self.terms.div(whole, self.terms.constant(width)):
            count = self.terms.constant(1.0 / width)
            if mean != self.terms.mul(whole, count):
                raise NoSite(f"the mean of squares is not over all {width} numbers of a token")
        return eps

    def sigmoid(self, term: int) -> tuple[float, float, int]:
        """(multiplier, offset, argument) of ``multiplier * sigmoid(argument) + offset``."""
        rest, offset = self.terms.offset(term)
        multiplier, inner = 1.0, []
        for factor in self.terms.factors(rest):
            value = self.terms.constant_of(factor)
            if value is None:
                inner.append(factor)
            else:
                multiplier = value
        if len(inner) != 1 or self.terms[inner[0]][0] != "sigmoid":
            raise NoSite("a gate is not a sigmoid")
        return multiplier, offset, self.terms[inner[0]][1]

    def collapse(self, term: int, dtype: str | None) -> list[int] | None:
        """The terms of the gates by stream of ``sum_i gate_i X_i``, rounded once to ``dtype``."""
        if dtype is not None:
            kind, *rounded = self.terms[term]
            if kind != "round" or rounded[0] != dtype:
                return None
            term = rounded[1]
        parts = self.terms.summands(term)
        if len(parts) != self.n:
            return None
        gates = []
        for stream in self.streams:
            for part in parts:
                factors = list(self.terms.factors(part))
                if factors.count(stream) == 1 and len(factors) > 1:
                    factors.remove(stream)
                    gates.append(self.terms.mul(*factors))
        if len(gates) != self.n or any(map(self.terms.is_wide, gates)):
            return None
        return gates

    # --- Sinkhorn ---------------------------------------------------------------------------------

    def _divided(self, matrix: Matrix, by_rows: bool) -> tuple[Matrix, float] | None:
        """(what was divided by its row or column sums, the eps in them)."""
        lines = matrix if by_rows else turned(matrix)
        before, found = [], set()
        for line in lines:
            parts = [self.terms[t] for t in line]
            if any(p[0] != "div" for p in parts):
                return None
            total, eps = self.terms.offset(parts[0][2])
            own = [p[1] for p in parts]
            if len({p[2] for p in parts}) != 1 or total != self.terms.sum(own):
                return None
            before.append(own)
            found.add(eps)
        if len(found) != 1:
            return None
        return (before if by_rows else turned(before)), found.pop()

    def sinkhorn(self, comb: Matrix) -> tuple[Matrix, int, float, bool]:
        """(logits, iterations, eps, whether it begins with powers of e) of a matrix [in, out] whose
        last normalisation is of columns.

        Raises NoSite.
        """
        matrix, steps, seen = comb, 0, []
        while True:
            step = self._divided(matrix, by_rows=steps % 2 == 1)
            if step is None:
                break
            matrix, eps = step
            seen.append(eps)
            steps += 1
        if steps == 0:
            raise NoSite(self._undivided(matrix))
        powers = [self._exponents(row, 0.0 in seen) for row in matrix]
        if None not in powers and steps % 2 == 0 and len(set(seen)) == 1:
            # Divided by the sums of its rows first: without an eps a softmax.
            return [row for row in powers if row is not None], steps // 2, seen[0], seen[0] > 0.0
        logits = []
        for row in matrix:
            parts = [self.terms.offset(t) for t in row]
            softened = self._softened([inner for inner, _ in parts])
            if softened is None:
                raise NoSite(self._start(matrix))
            logits.append(softened)
            seen += [eps for _, eps in parts]
        if steps % 2 == 0:
            raise NoSite("the Sinkhorn loop does not begin with columns")
        if len(set(seen)) != 1:
            listed = ", ".join(f"{e:g}" for e in sorted(set(seen)))
            raise NoSite(f"the Sinkhorn loop adds several eps: {listed}")
        return logits, (steps + 1) // 2, seen[0], False

    def _softened(self, row: list[int]) -> list[int] | None:
        """The logits of a row that is a softmax, as one operation or written out."""
        found = [self.terms[t] for t in row]
        if all(f[0] == "softmax" for f in found):
            logits = [f[1] for f in found]
            return logits if all(list(f[2:]) == sorted(logits) for f in found) else None
        if any(f[0] != "div" for f in found):
            return None
        own = [f[1] for f in found]
        return self._exponents(own) if {f[2] for f in found} == {self.terms.sum(own)} else None

    def _exponents(self, row: list[int], shares: bool = True) -> list[int] | None:
        """The logits of a row of their powers of e; a maximum that all of them have less is no
        matter to their ``shares`` of a sum without an eps."""
        found = [self.terms[t] for t in row]
        if any(f[0] != "exp" for f in found):
            return None
        exponents = [f[1] for f in found]
        summands = [self.terms[e][1:] if self.terms[e][0] == "add" else () for e in exponents]
        shifts = {t for s in summands for t in s if self._is_maximum(t)}
        if not shifts:
            return exponents
        if not shares or len(shifts) > 1 or any(shifts.isdisjoint(s) for s in summands):
            return None
        return [next(t for t in s if t not in shifts) for s in summands]

    def _is_maximum(self, term: int) -> bool:
        factors = self.terms.factors(term)
        kinds = {self.terms[f][0] for f in factors}
        return (
            kinds == {"max", "constant"}
            and self.terms.mul(*factors, self.terms.constant(-1.0)) in factors
        )

    def _undivided(self, matrix: Matrix) -> str:
        """Why a matrix is no step of the loop."""
        divisors = [self.terms[t][2] for row in matrix for t in row if self.terms[t][0] == "div"]
        if any(self.terms[d][0] == "clamp" for d in divisors):
            return "sums in the Sinkhorn loop are clamped, not added eps to"
        if divisors and all(not self.terms.holds(d, "softmax") for d in divisors):
            return "the Sinkhorn loop begins with exp, not with a softmax"
        if divisors and self._divided(matrix, by_rows=True) is not None:
            return "the Sinkhorn loop ends with rows where it begins with them"
        return "a normalisation in the Sinkhorn loop is not a division by sums + eps"

    def _start(self, matrix: Matrix) -> str:
        kinds = {self.terms[t][0] for row in matrix for t in row}
        if "exp" in kinds:
            return "the Sinkhorn loop begins with exp, not with a softmax"
        if "div" in kinds:
            return self._undivided(matrix)
        if any(self.terms.holds(t, "softmax") for t in matrix[0]):
            return "the Sinkhorn loop does not begin with a softmax over rows"
        return f"the Sinkhorn loop begins with {', '.join(sorted(kinds))}, not with a softmax"
