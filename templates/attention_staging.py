"""Where a staged backward keeps ds between the kernel that makes it and the one that reads it.

A tile of keys has a stripe: its keys by the rows of its span, cut out at multiples of ROWS rows, in
the dtype of q. Stripes of the tiles n and T - 1 - n lie one behind the other in one line, so that
a triangle takes half a square. Lines are those of one head below each other, then those of the
next. A tile of rows reads a stripe only where it was written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .attention_program import Program, Span

ROWS = 128  # what rows of stripes begin and end at multiples of; no tile of rows is larger
PARAMETERS = ["staged_desc"]


def whole(spans: Sequence[Span]) -> list[Span]:
    """The span of rows so that all of the stripe is written: what is not kept is 0 there, also the
    keys that do not exist. For loops up to the padded number of rows."""
    (span,) = spans
    lo = f"tl.maximum({span.lo}, 0) // {ROWS} * {ROWS}"
    hi = f"tl.cdiv(tl.minimum({span.hi}, rows), {ROWS}) * {ROWS}"
    full_hi = f"tl.where(k_start + BLOCK_N > columns, 0, tl.minimum({span.full_hi}, rows))"
    return [Span(lo, hi, span.full_lo, full_hi)]


def _extent(span: Span, prefix: str) -> str:
    """Statements that assign the first row and the number of rows of the stripe of k0 to k1."""
    return f"""{prefix}_a = tl.maximum({span.lo}, 0) // {ROWS} * {ROWS}
{prefix}_e = tl.cdiv(tl.minimum({span.hi}, rows), {ROWS}) * {ROWS}
{prefix}_n = tl.maximum({prefix}_e - {prefix}_a, 0)"""


def place(program: Program, tile: str, block: str) -> str:
    """Statements: the stripe of a tile of ``block`` keys; ``k0`` and ``k1`` are left its own."""
    (span,) = program.column_spans
    return f"""stripe = {tile}
stripes = tl.cdiv(columns, {block})
beside = stripes - 1 - stripe
k0 = beside * {block}
k1 = tl.minimum(k0 + {block}, columns) - 1
{_extent(span, "beside")}
k0 = stripe * {block}
k1 = tl.minimum(k0 + {block}, columns) - 1
{_extent(span, "stripe")}
line = tl.minimum(stripe, beside) * {block}
shift_rows = tl.where(stripe > beside, beside_n, 0) - stripe_a
lines = tl.cdiv(stripes, 2) * {block}"""


def slot(kv_head: str, member: str) -> str:
    """A statement: which of the heads at hand this is."""
    return f"slot = ({kv_head}) * group + {member}"


def store(name: str) -> str:
    return f"staged_desc.store([slot * lines + line, shift_rows + q_start], {name})"


def load(name: str, within: str) -> str:
    """``name`` becomes the tile from row ``q_start``; outside of what was written it is 0, since
    descriptors give that beyond the end."""
    return f"""there = (q_start >= stripe_a) & (q_start < stripe_a + stripe_n)
from_row = tl.where(there, shift_rows + q_start, {1 << 30})
{name} = staged_desc.load([slot * lines + line + {within}, from_row])"""


# ----------------------------------------------------------------------------------------
# how much memory that is


class _Numbers:
    """Integers as Triton computes with them: a quotient is rounded towards 0."""

    def __init__(self, value: Any) -> None:
        self.value = value.value if isinstance(value, _Numbers) else np.asarray(value, np.int64)

    def __floordiv__(self, other: Any) -> _Numbers:
        other = _Numbers(other).value
        return _Numbers(np.sign(self.value) * np.sign(other) * (abs(self.value) // abs(other)))

    def __rfloordiv__(self, other: Any) -> _Numbers:
        return _Numbers(other) // self

    def __mod__(self, other: Any) -> _Numbers:
        return self - self // other * other

    def __neg__(self) -> _Numbers:
        return _Numbers(-self.value)


def _operator(name: str) -> Any:
    return lambda self, other: _Numbers(getattr(self.value, name)(_Numbers(other).value))


for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "and", "or"):
    setattr(_Numbers, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("add", "sub", "mul"):
    setattr(_Numbers, f"__r{_name}__", _operator(f"__r{_name}__"))


class _Language:
    """What spans use of ``tl``."""

    @staticmethod
    def minimum(a: Any, b: Any) -> _Numbers:
        return _Numbers(np.minimum(_Numbers(a).value, _Numbers(b).value))

    @staticmethod
    def maximum(a: Any, b: Any) -> _Numbers:
        return _Numbers(np.maximum(_Numbers(a).value, _Numbers(b).value))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> _Numbers:
        chosen = np.where(_Numbers(condition).value, _Numbers(a).value, _Numbers(b).value)
        return _Numbers(chosen)

    @staticmethod
    def cdiv(a: Any, b: Any) -> _Numbers:
        return (_Numbers(a) + _Numbers(b) - 1) // b


@functools.lru_cache(4096)
def size(
    program: Program, rows: int, columns: int, numbers: tuple[int, ...], block: int
) -> tuple[int, int]:
    """(lines of a head, rows of a line), of tiles of ``block`` keys."""
    (span,) = program.column_spans
    stripes = -(-columns // block)
    k0 = np.arange(stripes) * block
    names: dict[str, Any] = {f"n{i}": _Numbers(n) for i, n in enumerate(numbers)}
    names |= {"tl": _Language, "rows": _Numbers(rows), "columns": _Numbers(columns)}
    names |= {"k0": _Numbers(k0), "k1": _Numbers(np.minimum(k0 + block, columns) - 1)}
    exec(_extent(span, "stripe"), names)
    each = np.broadcast_to(names["stripe_n"].value, stripes)
    both = each + np.where(np.arange(stripes) * 2 == stripes - 1, 0, each[::-1])
    return -(-stripes // 2) * block, max(int(both.max()), ROWS)
