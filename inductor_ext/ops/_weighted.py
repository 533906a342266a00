"""An operation for joint graphs: weighted sums of log-probabilities, in one read of the logits.

With the statistics m (maximum) and s (sum of exponentials) of a row of logits z, log p = z - m -
log s, so that sum_j w_j log p_j = linear - mass log s with linear = sum_j w_j (z_j - m).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inductor_ext.ops import _composed as composed
from inductor_ext.ops import _rows
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.templates import weighted_rows as launch

OWN, GIVEN, SOFTMAX = (k.value for k in (launch.OWN, launch.GIVEN, launch.SOFTMAX))
NO, YES, FINITE = (k.value for k in (launch.NO, launch.YES, launch.FINITE))


@opaque_op("inductor_ext::weighted_statistics", tags=(torch.Tag.flexible_layout,))
def weighted_statistics(
    x: Tensor, w: Tensor | None, kind: int, own: int, below: bool, scale: float, softcap: float,
    w_scale: float, w_softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(peak, total, below, top, mass, linear, own) of logits x [N, V] and weights.

    Args:
        x: bf16, fp16 or fp32 for the kernels, any strides; fp64 and CPU tensors are composed of
            torch functions. z = scale x, or scale softcap tanh(x / softcap).
        w: [N, V] of any floating-point type, None for OWN.
        kind: OWN, the weights are exp(z - peak); GIVEN, they are w; SOFTMAX, they are
            exp(u - top), with logits u of w as z is of x.
        own: NO; YES; FINITE, for SOFTMAX: where a weight is 0, u counts for nothing.
        below: whether the third result is made.
        scale, w_scale: positive. softcap, w_softcap: positive, or 0 for none.

    Returns [N] each, fp32 (fp64 for fp64): peak = max_j z_j, total = sum_j exp(z_j - peak), below =
    sum_j (z_j - peak), top = max_j u_j (SOFTMAX), mass = sum_j w_j (not for OWN), linear =
    sum_j w_j (z_j - peak), own = sum_j xlogy(w_j, w_j) (GIVEN) or
    sum_j w_j ((u_j - top) - (z_j - peak)) (SOFTMAX); no elements where there is none. Infinities
    and NaN as torch's products have them. Deterministic. Raises ValueError or TypeError for what
    does not fit.
    """
    _check(x, w, kind, own, scale, softcap, w_scale, w_softcap)
    if not _rows.kernels_apply(x) or (w is not None and w.dtype == torch.float64):
        return _composed(x, w, kind, own, below, scale, softcap, w_scale, w_softcap)
    x, w = (t if t is None or t.stride(1) == 1 else t.contiguous() for t in (x, w))
    assert x is not None
    with _rows.beside(x):
        made = launch.weighted_statistics(
            x, w, kind, own, below, scale, softcap, w_scale, w_softcap
        )
    return made


@weighted_statistics.register_fake
def _(
    x: Tensor, w: Tensor | None, kind: int, own: int, below: bool, scale: float, softcap: float,
    w_scale: float, w_softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(x, w, kind, own, scale, softcap, w_scale, w_softcap)
    wide = {x.dtype, x.dtype if w is None else w.dtype} & {torch.float64}
    dtype = torch.float64 if wide else torch.float32
    made = True, True, below, kind == SOFTMAX, kind != OWN, True, own != NO
    results = [x.new_empty(x.shape[0] if m else 0, dtype=dtype) for m in made]
    return tuple(results)


def _composed(
    x: Tensor, w: Tensor | None, kind: int, own: int, below: bool, scale: float, softcap: float,
    w_scale: float, w_softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    z = composed.logits_of(x, scale, softcap)
    if w is not None and w.dtype == torch.float64:
        z = z.double()
    peak = z.amax(1)
    y = z - peak[:, None]
    e = y.exp()
    top, mass, self_sum, unused = (z.new_empty(0) for _ in range(4))
    if kind == OWN:
        weights = e
    elif kind == GIVEN:
        assert w is not None
        weights = w.to(z.dtype)
        self_sum = torch.special.xlogy(weights, weights).sum(1)
    else:
        assert w is not None
        u = composed.logits_of(w, w_scale, w_softcap).to(z.dtype)
        top = u.amax(1)
        v = u - top[:, None]
        weights = v.exp()
        if own == FINITE:
            v = torch.where(weights == 0, 0, v)
        self_sum = (weights * (v - y)).sum(1)
    if kind != OWN:
        mass = weights.sum(1)
    linear = (weights * y).sum(1)
    if own == NO:
        self_sum = z.new_empty(0)
    return peak, e.sum(1), y.sum(1) if below else unused, top, mass, linear, self_sum


def _check(
    x: Tensor, w: Tensor | None, kind: int, own: int, scale: float, softcap: float,
    w_scale: float, w_softcap: float,
) -> None:  # fmt: skip
    """Raise unless all fits together."""
    if x.dim() != 2:
        raise ValueError(f"x is expected as [N, V], got {tuple(x.shape)}")
    if kind not in (OWN, GIVEN, SOFTMAX):
        raise ValueError(f"kind is expected to be {OWN}, {GIVEN} or {SOFTMAX}, got {kind}")
    most = {OWN: NO, GIVEN: YES, SOFTMAX: FINITE}[kind]
    if not NO <= own <= most:
        raise ValueError(f"own is expected between {NO} and {most} for kind {kind}, got {own}")
    if (w is None) != (kind == OWN):
        raise ValueError(f"w is expected {'for no' if w is not None else 'for every'} other kind")
    if w is not None and tuple(w.shape) != tuple(x.shape):
        raise ValueError(f"w is expected as {tuple(x.shape)}, got {tuple(w.shape)}")
    if w is not None and not w.is_floating_point():
        raise TypeError(f"w is expected to be floating-point, got {w.dtype}")
    for name, number in (("scale", scale), ("w_scale", w_scale)):
        if not 0.0 < number < math.inf:
            raise ValueError(f"{name} is expected to be a positive number, got {number}")
    for name, number in (("softcap", softcap), ("w_softcap", w_softcap)):
        if not 0.0 <= number < math.inf:
            raise ValueError(f"{name} is expected to be a positive number or 0, got {number}")
