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

import torch
from torch import Tensor

from inductor_ext.ops import _composed as composed
from inductor_ext.ops import _rows
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates import scaling


@torch.library.custom_op("inductor_ext::rows_and_gradient", mutates_args=())
def rows_and_gradient(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(peak, total, below, dx) of logits x [N, V].

    Args:
        x: bf16, fp16 or fp32 for the kernels, any strides; fp64 and CPU tensors are composed of
            torch functions.
        target: [N] int32 or int64, any stride; what is not in [0, V) is no column.
        a0, a1, b, c: [N] fp32 (fp64 for fp64). None stands for zeros.
        scale: positive. softcap: positive, or 0 for none.

    Returns peak [N] = max_j z_j, total [N] = sum_j exp(z_j - peak), below [N] = sum_j (z_j - peak)
    (no elements without c, as only then a loss holds that sum), fp32 (fp64 for fp64), and dx
    [N, V] in x's dtype, contiguous. Infinities and NaN are in all of them as torch has them, but
    the dx of a row whose factors are all 0 is 0. Deterministic. Raises ValueError or TypeError for
    what does not fit.
    """
    _check(x, target, (a0, a1, b, c), scale, softcap)
    if not _rows.kernels_apply(x):
        return _composed(x, target, a0, a1, b, c, scale, softcap)
    x = x if x.stride(1) == 1 else x.contiguous()
    a0, b = a0.contiguous(), b.contiguous()
    a1, c = (None if f is None else f.contiguous() for f in (a1, c))
    with _rows.beside(x):
        peak, total, below, _, dx = launch.rows_and_gradient(
            x, target, a0, a1, b, c, scale, softcap
        )
    return peak, total, below, dx


@rows_and_gradient.register_fake
def _(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(x, target, (a0, a1, b, c), scale, softcap)
    peak, total, below = (x.new_empty(n, dtype=a0.dtype) for n in _sizes(x, c))
    return peak, total, below, x.new_empty(x.shape)


@torch.library.custom_op("inductor_ext::scaled_gradient", mutates_args=())
def scaled_gradient(made: Tensor, g: Tensor) -> Tensor:
    """``made g``, in made's dtype and new memory, for a gradient made for g = 1; g has one element.

    Computed in fp32 (fp64 for fp64) and rounded once: bit for bit ``made`` where g is 1. Compiled
    it is ``lowerings.scaled_gradient``, which works in place where nobody can see that.
    """
    _check_scale(made, g)
    wide = composed.wide(made)
    return (wide * g.reshape(()).to(wide.dtype)).to(made.dtype)


@scaled_gradient.register_fake
def _(made: Tensor, g: Tensor) -> Tensor:
    _check_scale(made, g)
    return torch.empty_like(made)


@torch.library.custom_op("inductor_ext::scale_gradient_", mutates_args=("made",))
def scale_gradient_(made: Tensor, g: Tensor) -> None:
    """``scaled_gradient`` into dense ``made``: on a card a kernel that moves nothing if g is 1."""
    _check_scale(made, g)
    if _rows.launch_applies(made) and made.dtype != torch.float64:
        with _rows.beside(made):
            scaling.scale_in_place(made, g)
    else:
        made.copy_(scaled_gradient(made, g))


@scale_gradient_.register_fake
def _(made: Tensor, g: Tensor) -> None:
    _check_scale(made, g)


def _check_scale(made: Tensor, g: Tensor) -> None:
    if g.dim() and tuple(g.shape) != (1,) * g.dim():
        raise ValueError(f"g is expected to have one element, got {tuple(g.shape)}")


def _sizes(x: Tensor, c: Tensor | None) -> tuple[int, int, int]:
    return x.shape[0], x.shape[0], 0 if c is None else x.shape[0]


def _composed(
    x: Tensor, target: Tensor, a0: Tensor, a1: Tensor | None, b: Tensor, c: Tensor | None,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
    return peak, total, below, dx.to(x.dtype)


def _check(
    x: Tensor, target: Tensor, factors: tuple[Tensor | None, ...], scale: float, softcap: float
) -> None:
    if x.dim() != 2:
        raise ValueError(f"x is expected as [N, V], got {tuple(x.shape)}")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target is expected to be int32 or int64, got {target.dtype}")
    for name, row in zip(("target", "a0", "a1", "b", "c"), (target, *factors), strict=True):
        if row is None:
            continue
        if row.dim() != 1 or row.shape[0] != x.shape[0]:
            raise ValueError(f"{name} is expected as ({x.shape[0]},), got {tuple(row.shape)}")
        if name != "target" and row.dtype != wide:
            raise TypeError(f"{name} is expected as {wide} beside {x.dtype}, got {row.dtype}")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale is expected to be a positive number, got {scale}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is expected to be a positive number or 0, got {softcap}")
