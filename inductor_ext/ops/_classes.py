"""``_joint``'s operations for logits whose classes are strided in memory: x [N, C, D].

A row is a place: row n D + d has the logits x[n, :, d]. Nothing is transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops import _composed as composed
from inductor_ext.ops import _joint, _rows
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.templates import class_softmax_launch as launch


@opaque_op("inductor_ext::class_rows_and_gradient", taped=True)
def class_rows_and_gradient(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(peak, total, below, picked, dx) of logits x [N, C, D], as ``rows_and_gradient`` of the rows
    [N D, C] that a transposed copy would have.

    target, a0, a1, b, c: [N D]; peak ... picked [N D]; dx [N, C, D], contiguous. dtypes, errors,
    infinities and NaN as there. Deterministic.
    """
    rows = _shape(x)
    _joint._check(rows, x.dtype, target, (a0, a1, b, c), scale, softcap)
    if not _rows.kernels_apply(x) or x.shape[2] > launch.MOST:
        *made, dx = _joint._composed(_flat(x), target, a0, a1, b, c, scale, softcap)
        n, classes, places = x.shape
        dx = dx.view(n, places, classes).transpose(1, 2).contiguous()
        peak, total, below, picked = made
        return peak, total, below, picked, dx
    a1, c = (None if f is None else f.contiguous() for f in (a1, c))
    with _rows.beside(x):
        return launch.rows_and_gradient(
            x.contiguous(), target.contiguous(), a0.contiguous(), a1, b.contiguous(), c, scale,
            softcap,
        )  # fmt: skip


@class_rows_and_gradient.register_fake
def _(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _joint._check(_shape(x), x.dtype, target, (a0, a1, b, c), scale, softcap)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return *_joint._like_statistics(a0, c), torch.empty_like(a0), dx


@opaque_op("inductor_ext::class_statistics", taped=True)
def class_statistics(x: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """(peak, total) [N D] of logits x [N, C, D], as ``row_statistics`` has them, in one read.

    Deterministic. Raises ValueError for what does not fit.
    """
    _joint._check_rows(_shape(x), scale, softcap)
    if not _rows.kernels_apply(x) or x.shape[2] > launch.MOST:
        peak, total, _ = _joint._statistics(composed.logits_of(_flat(x), scale, softcap))
        return peak, total
    with _rows.beside(x):
        return launch.statistics(x.contiguous(), scale, softcap)


@class_statistics.register_fake
def _(x: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    shape = _shape(x)
    _joint._check_rows(shape, scale, softcap)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    peak, total = (x.new_empty(shape[0], dtype=dtype) for _ in range(2))
    return peak, total


def _shape(x: Tensor) -> tuple[Any, Any]:
    """(rows, classes)."""
    if x.dim() != 3:
        raise ValueError(f"x is expected as [N, C, D], got {tuple(x.shape)}")
    return x.shape[0] * x.shape[2], x.shape[1]


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(-1, x.shape[1])
