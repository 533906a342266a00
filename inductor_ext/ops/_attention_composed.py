"""Attention of torch functions: the eager form of any score, differentiable any number of times.

In fp32 (fp64 for fp64). ``attention`` is for what records gradients and for transforms; the others,
inside operations, go by blocks of query rows, so that no tensor is Sq x Sk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops._attention_dropout import kept as drawn_of
from inductor_ext.ops._attention_score import read
from inductor_ext.ops._composed import wide
from inductor_ext.ops._mhc_composed import without_autocast
from inductor_ext.ops._rows import is_zero
from inductor_ext.templates.attention_dropout import Dropout

LARGEST_BLOCK = 1 << 25  # scores held at once where no gradient is recorded


def attention(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], numbers: Sequence[Any], score: str,
    empty: str, dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], in one piece."""
    with without_autocast(q):
        scores = _Scores(q, k, inputs, numbers, score)
        weights = scores.kept(dropout, 0, q.shape[2])
        out, lse = _softmax(scores.rows(q, inputs, 0), wide(v), empty, weights)
    return out.to(q.dtype), lse


class _Scores:
    """The scores of blocks of query rows."""

    def __init__(
        self, q: Tensor, k: Tensor, inputs: Sequence[Tensor], numbers: Sequence[Any], score: str
    ) -> None:
        self.keys, self.numbers, self.function = wide(k), numbers, read(score)
        self.batch, self.heads, self.count = q.shape[:3]
        self.columns = k.shape[2]

    def rows(self, q: Tensor, inputs: Sequence[Tensor], first: int, keys: Any = None) -> Tensor:
        """[B, Hq, rows, Sk] of query rows from ``first`` on, and the inputs at these rows."""
        s = _grouped(wide(q), (self.keys if keys is None else keys).mT)

        def along(dim: int, start: Any, stop: Any) -> Tensor:
            shape = [1, 1, 1, 1]
            shape[dim] = -1
            return torch.arange(start, stop, device=q.device).view(shape)

        r = self.function(
            s, along(0, 0, self.batch), along(1, 0, self.heads),
            along(2, first, first + q.shape[2]), along(3, 0, self.columns),
            self.count, self.columns, self.numbers, list(inputs),
        )  # fmt: skip
        return r.to(s.dtype).expand(s.shape)

    def kept(self, dropout: Dropout | None, first: Any, rows: Any) -> Tensor | None:
        """What the weights of query rows from ``first`` on are multiplied by; None for nothing."""
        if dropout is None:
            return None
        drawn = drawn_of(dropout, self.batch, self.heads, first, rows, self.columns)
        return drawn * dropout.scale

    def blocks(self) -> Iterator[slice]:
        """Slices of query rows of which few enough scores exist at once."""
        of_row = max(self.batch * self.heads * self.columns, 1)
        step = max(LARGEST_BLOCK // of_row, 1)
        for first in range(0, self.count, step):
            yield slice(first, min(first + step, self.count))


def _grouped(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows [B, Hq, n, x] times matrices [B, Hkv, x, m], each of which serves Hq // Hkv heads."""
    heads, own = rows.shape[1], matrices.shape[1]
    group = heads // own
    if isinstance(group, int) and group == 1:
        return rows @ matrices
    found = rows.unflatten(1, (own, group)).flatten(2, 3) @ matrices
    return found.unflatten(2, (group, rows.shape[2])).flatten(1, 2)


def _softmax(
    r: Tensor, v: Tensor, empty: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if is_zero(r.shape[-1]):
        return _grouped(r, v), r.new_full(r.shape[:-1], -math.inf)
    top = r.detach().amax(-1, keepdim=True)
    none = top == -math.inf
    p = torch.exp(r - torch.where(none, 0.0, top))
    total = p.sum(-1, keepdim=True)
    total = torch.where(none, 1.0, total)
    out = _grouped(p if weights is None else p * weights, v) / total
    lse = torch.where(none, -math.inf, top + total.log())
    return torch.where(none, math.nan, out) if empty == "nan" else out, lse.squeeze(-1)


def _at(inputs: Sequence[Tensor], rows: slice) -> list[Tensor]:
    """The inputs at a block of query rows."""
    return [x if x.shape[2] == 1 else x[:, :, rows] for x in inputs]


def forward(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], numbers: Sequence[Any], score: str,
    empty: str, out: Tensor, lse: Tensor, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """Writes out and lse."""
    with without_autocast(q):
        scores, values = _Scores(q, k, inputs, numbers, score), wide(v)
        for rows in scores.blocks():
            r = scores.rows(q[:, :, rows], _at(inputs, rows), rows.start)
            weights = scores.kept(dropout, rows.start, r.shape[2])
            found = _softmax(r, values, empty, weights)
            out[:, :, rows].copy_(found[0])
            lse[:, :, rows].copy_(found[1])


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor],
    numbers: Sequence[Any], score: str, needed: Sequence[bool], dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """(dq, dk, dv, gradients of the inputs), wide but dq; ``needed``: of q, k, v and each input."""
    dq = torch.empty_like(q)
    keys, values = wide(k), wide(v)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    wanted = [i for i, need in enumerate(needed[3:]) if need]
    sums = [torch.zeros(inputs[i].shape, dtype=wide(inputs[i]).dtype, device=q.device)
            for i in wanted]  # fmt: skip
    with without_autocast(q):
        scores = _Scores(q, k, inputs, numbers, score)
        for rows in scores.blocks():
            here = _at(inputs, rows)

            def block(
                q: Tensor, k: Tensor, v: Tensor, *own: Tensor, here: Any = here, rows: Any = rows
            ) -> Any:
                given = list(here)
                for i, x in zip(wanted, own, strict=True):
                    given[i] = x
                r = scores.rows(q, given, rows.start, k)
                return _softmax(r, v, "zero", scores.kept(dropout, rows.start, r.shape[2]))

            (out, lse), pull = torch.func.vjp(
                block, wide(q[:, :, rows]), keys, values, *(here[i] for i in wanted)
            )
            seeds = do[:, :, rows].to(out.dtype), torch.zeros_like(lse)
            if dlse is not None:
                seeds = seeds[0], dlse[:, :, rows].to(lse.dtype)
            found = pull(seeds)
            dq[:, :, rows].copy_(found[0])
            dk += found[1]
            dv += found[2]
            for total, i, grad in zip(sums, wanted, found[3:], strict=True):
                part = total if inputs[i].shape[2] == 1 else total[:, :, rows]
                part += grad
    found = dict(zip(wanted, sums, strict=True))
    return dq, dk, dv, [found.get(i, x) for i, x in enumerate(inputs)]


def columns(
    q: Tensor, k: Tensor, lse: Tensor, inputs: Sequence[Tensor], numbers: Sequence[Any],
    score: str, first_row: int, sums: Tensor,
) -> None:  # fmt: skip
    """Writes the sums over query rows from ``first_row`` on, and over a group's heads, of the
    probabilities exp(score - lse)."""
    group = q.shape[1] // k.shape[1]
    sums.zero_()
    with without_autocast(q):
        scores = _Scores(q, k, inputs, numbers, score)
        for block in scores.blocks():
            rows = slice(max(block.start, first_row), block.stop)
            if rows.start >= rows.stop:
                continue
            r = scores.rows(q[:, :, rows], _at(inputs, rows), rows.start)
            norm = lse[:, :, rows, None].to(r.dtype)
            p = torch.exp(r - torch.where(norm == -math.inf, math.inf, norm))
            sums += p.sum(2).unflatten(1, (k.shape[1], group)).sum(2)
