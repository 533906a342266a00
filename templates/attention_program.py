"""What one attention kernel computes around its two products, as data.

    r[q, k] = score(s[q, k]),  s = q k^T in fp32        kept where ``keep``
    out = softmax over k of r, times v;                 lse = log of the sum of exp(r)

The texts are Triton statements of fp32 tiles [M, N] (query rows x key columns). They see ``tl``,
``libdevice``, ``s``, the scalars ``b`` and ``h`` (batch, query head), ``q`` and ``k`` (int32 row
and column numbers, [M, 1] and [1, N], or transposed, or either order of a tile: values are
broadcast), ``rows`` and ``columns`` (Sq, Sk), the numbers ``n0, n1, ...`` and the inputs' values
``x0, x1, ...`` there, as stored, not yet widened. Names of their own begin with ``tmp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

LOG2E = 1.4426950408889634
# What a row's log-sum-exp is above, if a dtype's least number in its scores leaves no weight.
LOWEST = -1e24


@dataclass(frozen=True)
class Input:
    """A tensor [B, H, Sq, Sk] that the score reads; ``axes`` are those of "bhqk" that it varies
    along: along the others it is broadcast, and has a stride of 0."""

    dtype: torch.dtype
    axes: str


@dataclass(frozen=True)
class Span:
    """Keys that query rows ``q0`` to ``q1`` (inclusive) may keep, as Triton expressions of the
    scalars ``q0, q1, rows, columns, n0, ...``: [lo, hi), and [full_lo, full_hi) inside it where
    every row keeps every key. Not clamped to [0, columns), and may be empty.
    With rows and columns exchanged (``Program.column_spans``) the scalars are ``k0, k1``."""

    lo: str
    hi: str
    full_lo: str
    full_hi: str


@dataclass(frozen=True)
class Program:
    """``scale``: where the score is nothing but scale * s, that factor; else None.
    ``score``: statements that assign ``r``, the score in units of log 2 (times LOG2E), of ``s``.
    ``keep``: statements that assign ``keep`` (int1), or "" where everything is kept.
    ``row_spans``: disjoint spans of keys in ascending order for a tile of rows; ``column_spans``
    the same of rows for a tile of keys. Outside of them nothing is kept.
    ``documents``: the numbers of two inputs (one along q, one along k, of whole numbers) whose
    values must be equal for a pair to be kept, or None: tiles of other documents are skipped. The
    full parts of spans take them for equal: a kernel cuts them to tiles of one document.
    ``gradient``: statements that assign ``ds``, the gradient for ``s``, of ``g``, that for the
    score in natural units, and all that ``score`` sees; and ``d0``, ``d2``, ... for each input
    of ``differentiable``, per pair, fp32, of the shape of a tile or narrower.
    ``slope``: where ``ds`` is ``g`` times one number, that number; else None.
    ``empty``: what a row that keeps nothing gives, "zero" or "nan"; its lse is -inf.
    ``dropout``: whether weights are dropped out, as ``attention_dropout`` says; lse is of all.
    ``likely``: where masks are a dtype's least number, which is no mask for a row of nothing else:
    the same with -inf in its place. What that makes of a row is right if its lse is above LOWEST.
    """

    inputs: tuple[Input, ...] = ()
    numbers: int = 0
    scale: float | None = None
    score: str = ""
    keep: str = ""
    row_spans: tuple[Span, ...] = (Span("0", "columns", "0", "columns"),)
    column_spans: tuple[Span, ...] = (Span("0", "rows", "0", "rows"),)
    documents: tuple[int, int] | None = None
    gradient: str = ""
    differentiable: tuple[int, ...] = ()
    empty: str = "zero"
    slope: float | None = None
    dropout: bool = False
    # Not in its name: a plan knows a program as it was before it was known to have one.
    likely: Program | None = field(default=None, repr=False)

    @property
    def skips(self) -> bool:
        """Whether there are tiles that places, or documents, say nothing is kept of."""
        whole = all((span.lo, span.hi) == ("0", "columns") for span in self.row_spans)
        return not whole or self.documents is not None

    @property
    def factor(self) -> float | None:
        """The number that ``ds`` is times ``g``, where it is one."""
        return self.scale if self.slope is None else self.slope

    @property
    def kind(self) -> str:
        """In a few words, for an entry of a plan."""
        words = ["scored" if self.scale is None else "scaled"]
        words += ["masked"] if self.keep else []
        words += ["documents"] if self.documents else []
        words += ["dropout"] if self.dropout else []
        words += [given.axes or "number" for given in self.inputs]
        return "-".join(words)
