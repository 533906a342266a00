"""Operations for joint graphs, in which a loss and the gradient of its logits are one program.

The gradient of logits x [N, V] of a loss by cross entropy, z-loss, label smoothing is, for one
incoming number g,

    z     = scale c tanh(x / c)        c: the softcap; z = scale x where it is 0
    p_j   = exp(z_j - lse)             A = a0 + a1 lse
    dx_j  = g (dz_j/dx_j) (A p_j - b [j = t] - c)

with factors a0, a1, b, c [N] that are known before the logits are. ``rows_and_gradient`` makes it
for g = 1 in the sweep that takes the softmax's statistics; ``scaled_gradient`` multiplies by g.
No operation here has an autograd formula: they stand in graphs that are differentiated already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops import _composed as composed
from inductor_ext.ops import _rows
from inductor_ext.ops._linear_chunks import by_chunks, empty_gradients
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates import scaling

# Inductor may pad the rows of logits that it makes, as it does for its own kernels.
_ANY_STRIDES = (torch.Tag.flexible_layout,)


@opaque_op("inductor_ext::rows_and_gradient", tags=_ANY_STRIDES)
def rows_and_gradient(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(peak, total, below, picked, dx) of logits x [N, V].

    Args:
        x: bf16, fp16 or fp32 for the kernels, any strides; fp64 and CPU tensors are composed of
            torch functions.
        target: [N] int32 or int64, any stride; what is not in [0, V) is no column.
        a0, a1, b, c: [N] fp32 (fp64 for fp64). None stands for zeros.
        scale: positive. softcap: positive, or 0 for none.

    Returns peak [N] = max_j z_j, total [N] = sum_j exp(z_j - peak), below [N] = sum_j (z_j - peak)
    (no elements without c, as only then a loss holds that sum), picked [N], z at the target and 0
    where there is none, fp32 (fp64 for fp64), and dx [N, V] in x's dtype, with x's strides where
    its rows are padded a little, else contiguous.
    Infinities and NaN are in all of them as torch has them, but the dx of a row whose factors are
    all 0 is 0. Deterministic. Raises ValueError or TypeError for what does not fit.
    """
    _check(x.shape, x.dtype, target, (a0, a1, b, c), scale, softcap)
    return _of_rows(x, target, a0, a1, b, c, scale, softcap)


@rows_and_gradient.register_fake
def _(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(x.shape, x.dtype, target, (a0, a1, b, c), scale, softcap)
    return *_like_statistics(a0, c), torch.empty_like(a0), launch.like_rows(x)


@opaque_op("inductor_ext::row_statistics", tags=_ANY_STRIDES)
def row_statistics(
    x: Tensor, below: bool, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(peak, total, below) of logits x [N, V]: what a softmax needs of its rows, in one read.

    Args:
        x: bf16, fp16 or fp32 for the kernels, any strides; fp64 and CPU tensors are composed of
            torch functions.
        below: whether the third result is made; it has no elements otherwise.
        scale: positive. softcap: positive, or 0 for none.

    Returns peak [N] = max_j z_j, total [N] = sum_j exp(z_j - peak), below [N] = sum_j (z_j - peak),
    fp32 (fp64 for fp64), for infinities and NaN as torch has them. Deterministic. Raises ValueError
    for what does not fit.
    """
    _check_rows(x.shape, scale, softcap)
    if not _rows.kernels_apply(x):
        peak, total, linear = _statistics(composed.logits_of(x, scale, softcap))
        return peak, total, linear if below else linear.new_empty(0)
    x = x if x.stride(1) == 1 else x.contiguous()
    with _rows.beside(x):
        return launch.row_statistics(x, below, scale, softcap)


@row_statistics.register_fake
def _(x: Tensor, below: bool, scale: float, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    _check_rows(x.shape, scale, softcap)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    peak, total = (x.new_empty(x.shape[0], dtype=dtype) for _ in range(2))
    return peak, total, x.new_empty(x.shape[0] if below else 0, dtype=dtype)


def _statistics(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peak = z.amax(1)
    shifted = z - peak[:, None]
    return peak, shifted.exp().sum(1), shifted.sum(1)


@opaque_op("inductor_ext::scaled_gradient", tags=_ANY_STRIDES)
def scaled_gradient(made: Tensor, g: Tensor) -> Tensor:
    """``made g``, in made's dtype and new memory, for a gradient made for g = 1; g has one element.

    Computed in fp32 (fp64 for fp64) and rounded once: bit for bit ``made`` where g is 1. Compiled
    it is ``lowerings.scaled_gradient``, which works in place where nobody can see that. For a g
    that is infinite or NaN, entries of made that are 0 become NaN: also those of ignored rows,
    where torch has 0.
    """
    _check_scale(made, g)
    if _scales(made) and (made.is_contiguous() or (made.dim() == 2 and made.stride(1) == 1)):
        out = made.clone()
        scale_gradient_(out, g)
        return out
    wide = composed.wide(made)
    return (wide * g.reshape(()).to(wide.dtype)).to(made.dtype)


@scaled_gradient.register_fake
def _(made: Tensor, g: Tensor) -> Tensor:
    _check_scale(made, g)
    return torch.empty_like(made)


@opaque_op("inductor_ext::scale_gradient_", mutates_args=("made",))
def scale_gradient_(made: Tensor, g: Tensor) -> None:
    """``scaled_gradient`` where ``made`` lies: on a card a kernel that moves nothing if g is 1.

    There made is dense, or [N, V] with unit stride along V.
    """
    _check_scale(made, g)
    if _scales(made):
        with _rows.beside(made):
            scaling.scale_in_place(made, g)
    else:
        made.copy_(scaled_gradient(made, g))


@scale_gradient_.register_fake
def _(made: Tensor, g: Tensor) -> None:
    _check_scale(made, g)


def _scales(made: Tensor) -> bool:
    """Whether the kernel scales ``made`` (or a dense copy of it)."""
    return _rows.launch_applies(made) and made.dtype != torch.float64


def _check_scale(made: Tensor, g: Tensor) -> None:
    if g.dim() and tuple(g.shape) != (1,) * g.dim():
        raise ValueError(f"g is expected to have one element, got {tuple(g.shape)}")


@opaque_op("inductor_ext::linear_rows_and_gradient")
def linear_rows_and_gradient(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, a0: Tensor, a1: Tensor | None,
    b: Tensor, c: Tensor | None, wanted: Sequence[bool], memory: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(peak, total, below, picked, dh, dw, db) of logits ``h wᵀ + bias``, of which one chunk exists
    at a time.

    Args:
        h: [N, H]; w: [V, H]; bias: [V] or None; of one dtype, to which the logits are rounded.
        target ... c, scale, softcap: as in ``rows_and_gradient``.
        wanted: which of dh, dw, db are made; the others have no elements.
        memory: bytes for the logits of a chunk and, with several, w's gradient in fp32; see
            ``linear_cross_entropy``.

    Returns the statistics of ``rows_and_gradient``, and the gradients for g = 1 in the dtypes of h,
    w and bias; the logits' gradient is rounded to h's dtype on the way, dw and db are added up in
    fp32. Deterministic as far as the library's matrix products are. Raises ValueError or TypeError
    for what does not fit.
    """
    _check((h.shape[0], w.shape[0]), h.dtype, target, (a0, a1, b, c), scale, softcap)

    def visit(part: slice, x: Tensor) -> tuple[Tensor, ...]:
        a1_own, c_own = (None if f is None else f[part] for f in (a1, c))
        own = target[part], a0[part], a1_own, b[part], c_own
        return _of_rows(x, *own, scale, softcap, dx=x)[:4]

    chunks, gradients = by_chunks(h, w, bias, wanted, memory, visit)
    peak, total, below, picked = (torch.cat(rows) for rows in zip(*chunks, strict=True))
    return peak, total, below, picked, *gradients


@linear_rows_and_gradient.register_fake
def _(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, a0: Tensor, a1: Tensor | None,
    b: Tensor, c: Tensor | None, wanted: Sequence[bool], memory: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check((h.shape[0], w.shape[0]), h.dtype, target, (a0, a1, b, c), scale, softcap)
    made = empty_gradients(h, w, bias, wanted)
    return *_like_statistics(a0, c), torch.empty_like(a0), *made


def _of_rows(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float, dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(peak, total, below, picked, dx); ``dx``, if given, is written and may be x itself."""
    if not _rows.kernels_apply(x):
        *rows, made = _composed(x, target, a0, a1, b, c, scale, softcap)
        return *rows, (launch.like_rows(x) if dx is None else dx).copy_(made)
    x = x if x.stride(1) == 1 else x.contiguous()
    a1, c = (None if f is None else f.contiguous() for f in (a1, c))
    with _rows.beside(x):
        return launch.rows_and_gradient(
            x, target, a0.contiguous(), a1, b.contiguous(), c, scale, softcap, dx=dx
        )


def _like_statistics(a0: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    below = a0.new_empty(0) if c is None else torch.empty_like(a0)
    return torch.empty_like(a0), torch.empty_like(a0), below


def _composed(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    z = composed.logits_of(x, scale, softcap)
    peak = z.amax(1)
    shifted = z - peak[:, None]
    e = shifted.exp()
    total = e.sum(1)
    below = z.new_empty(0) if c is None else shifted.sum(1)
    of_lse = 0.0 if a1 is None else a1 * (peak + total.log())
    has = (target >= 0) & (target < x.shape[1])
    t = torch.where(has, target, 0).long()[:, None]
    # The target's column apart: A p - b is (A - b) p - b (1 - p), where nothing cancels if A = b.
    others = e.scatter(1, t, 0.0).sum(1)
    own = ((a0 - b) + of_lse) * e.gather(1, t)[:, 0] / total - b * others / total
    dz = ((a0 + of_lse) / total)[:, None] * e
    dz = dz.scatter(1, t, torch.where(has, own, dz.gather(1, t)[:, 0])[:, None])
    used = (a0 != 0) | (b != 0)
    if a1 is not None:
        used = used | (a1 != 0)
    if c is not None:
        dz = dz - c[:, None]
        used = used | (c != 0)
    derivative = scale
    if softcap:
        derivative = scale / composed.wide(x).div(softcap).cosh().square()
    dx = torch.where(used[:, None], dz * derivative, 0.0)
    picked = torch.where(has, z.gather(1, t)[:, 0], 0.0)
    return peak, total, below, picked, dx.to(x.dtype)


def _check(
    shape: Sequence[Any], dtype: torch.dtype, target: Tensor, factors: Sequence[Tensor | None],
    scale: float, softcap: float,
) -> None:  # fmt: skip
    """Raise unless all fits to logits of this shape and dtype."""
    _check_rows(shape, scale, softcap)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target is expected to be int32 or int64, got {target.dtype}")
    for name, row in zip(("target", "a0", "a1", "b", "c"), (target, *factors), strict=True):
        if row is None:
            continue
        if row.dim() != 1 or row.shape[0] != shape[0]:
            raise ValueError(f"{name} is expected as ({shape[0]},), got {tuple(row.shape)}")
        if name != "target" and row.dtype != wide:
            raise TypeError(f"{name} is expected as {wide} beside {dtype}, got {row.dtype}")


def _check_rows(shape: Sequence[Any], scale: float, softcap: float) -> None:
    """Raise unless these are logits."""
    if len(shape) != 2:
        raise ValueError(f"x is expected as [N, V], got {tuple(shape)}")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale is expected to be a positive number, got {scale}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is expected to be a positive number or 0, got {softcap}")
