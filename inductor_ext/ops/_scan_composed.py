"""Scans composed of torch functions: for CPU tensors, under transforms of ``torch.func``, and as
what the kernels are held against. Differentiable any number of times.

``resets`` are flags of x's shape, True where a segment begins, in the order of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

IDENTITY = {"sum": 0, "prod": 1, "logsumexp": -math.inf}


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """What floats of these dtypes are computed in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What a result of this dtype is accumulated in."""
    if dtype.is_floating_point:
        return wide_dtype(dtype)
    return torch.uint8 if dtype == torch.bool else dtype


def identity_of(op: str, dtype: torch.dtype) -> Any:
    """What changes nothing: the value of an exclusive scan in front of a segment's first."""
    if op in IDENTITY:
        return IDENTITY[op]
    largest = op in ("max", "cummax")
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    if dtype == torch.bool:
        return 0 if largest else 1
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def shifted(x: Tensor, dim: int, by: int, fill: Any) -> Tensor:
    """``x[t - by]`` along ``dim``, ``fill`` outside."""
    n = x.shape[dim]
    kept = max(n - abs(by), 0)
    edge = torch.full_like(x.narrow(dim, 0, n - kept), fill)
    inner = x.narrow(dim, 0 if by > 0 else n - kept, kept)
    return torch.cat([edge, inner] if by > 0 else [inner, edge], dim)


def doubled(
    combine: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
    leaves: Sequence[Tensor], dim: int,
) -> list[Tensor]:  # fmt: skip
    """The inclusive scan of a state of several tensors, in steps of 1, 2, 4, ... positions."""
    found = list(leaves)
    n, step = found[0].shape[dim], 1
    while step < n:
        early = [t.narrow(dim, 0, n - step) for t in found]
        late = [t.narrow(dim, step, n - step) for t in found]
        both = combine(early, late)
        heads = [t.narrow(dim, 0, step) for t in found]
        found = [torch.cat([head, t], dim) for head, t in zip(heads, both, strict=True)]
        step *= 2
    return found


def _takes_later(op: str, early: Tensor, late: Tensor) -> Tensor:
    """As torch: a NaN wins, equal values are the later one's."""
    better = late >= early if op in ("max", "cummax") else late <= early
    return better & ~early.isnan() | late.isnan() if late.is_floating_point() else better


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "logsumexp": torch.logaddexp,
}


def _combined(op: str, early: Sequence[Tensor], late: Sequence[Tensor]) -> list[Tensor]:
    if op == "affine":
        return [early[0] * late[0], late[0] * early[1] + late[1]]
    if op in _COMBINE:
        return [_COMBINE[op](early[0], late[0])]
    later = _takes_later(op, early[0], late[0])
    return [torch.where(later, b, a) for a, b in zip(early, late, strict=True)]


def _segmented(op: str, resets: Tensor, leaves: Sequence[Tensor], dim: int) -> list[Tensor]:
    def combine(early: Sequence[Tensor], late: Sequence[Tensor]) -> list[Tensor]:
        (begun, *a), (begins, *b) = early, late
        both = _combined(op, a, b)
        kept = [torch.where(begins, one, two) for one, two in zip(b, both, strict=True)]
        return [begun | begins, *kept]

    return doubled(combine, [resets, *leaves], dim)[1:]


def forward_resets(resets: Tensor, dim: int) -> Tensor:
    """The resets of a reverse scan whose input is flipped: what ended a segment begins it."""
    return shifted(resets.flip(dim), dim, 1, False)


def scan(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The scan of x along ``dim`` in ``dtype``; op is none of those with an index."""
    return _scan(x, resets, op, dim, reverse, exclusive, dtype)[0]


def scan_with_index(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """(values, positions) of ``cummax`` or ``cummin``; -1 is the position of nothing."""
    values, index = _scan(x, resets, op, dim, reverse, exclusive, x.dtype)
    index = index - 1 if exclusive else index
    if reverse:
        index = torch.where(index < 0, index, x.shape[dim] - 1 - index)
    return values, index


def _scan(
    x: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool, exclusive: bool,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    if reverse:
        x = x.flip(dim)
        resets = None if resets is None else forward_resets(resets, dim)
    wide = x.to(accumulator(dtype))
    if exclusive:
        wide = shifted(wide, dim, 1, identity_of(op, dtype))
        if resets is not None:
            wide = wide.masked_fill(resets, identity_of(op, dtype))
    found = _inclusive(wide, resets, op, dim, exclusive)
    found[0] = found[0].to(dtype)
    return [t.flip(dim) for t in found] if reverse else found


def _inclusive(
    x: Tensor, resets: Tensor | None, op: str, dim: int, exclusive: bool
) -> list[Tensor]:
    """Of an input that is shifted already where ``exclusive``: position 0 is that of nothing."""
    with_index = op in ("cummax", "cummin")
    if resets is not None:
        leaves = [x]
        if with_index:
            length = x.shape[dim]
            along = torch.arange(length, device=x.device)
            along = along.reshape(length, *[1] * (x.dim() - 1 - dim)).expand(x.shape)
            leaves.append(along.masked_fill(resets, 0) if exclusive else along)
        return _segmented(op, resets, leaves, dim)
    if op == "sum":
        return [torch.cumsum(x, dim, dtype=x.dtype)]
    if op == "prod":
        return [torch.cumprod(x, dim, dtype=x.dtype)]
    if op == "logsumexp":
        return [torch.logcumsumexp(x, dim)]
    values, index = (torch.cummax if op in ("max", "cummax") else torch.cummin)(x, dim)
    return [values, index] if with_index else [values]


def recurrence(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """``h_t = a_t h_(t-1) + b_t`` in the dtype of b."""
    wide = wide_dtype(b.dtype)
    left, right = a.to(wide), b.to(wide)
    if reverse:
        left, right = left.flip(dim), right.flip(dim)
    if h0 is not None and right.shape[dim] > 0:
        first = left.narrow(dim, 0, 1) * h0.to(wide).unsqueeze(dim)
        rest = right.narrow(dim, 1, right.shape[dim] - 1)
        right = torch.cat([right.narrow(dim, 0, 1) + first, rest], dim)
    h = affine(left, right, None, dim)
    return (h.flip(dim) if reverse else h).to(b.dtype)


def affine(a: Tensor, b: Tensor, resets: Tensor | None, dim: int) -> Tensor:
    """``h_t = a_t h_(t-1) + b_t``; b_t where a segment begins, whatever came before."""
    if resets is not None:
        return _segmented("affine", resets, [a, b], dim)[1]
    return doubled(lambda early, late: _combined("affine", early, late), [a, b], dim)[1]
