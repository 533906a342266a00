"""The states of the scans that have a name, and how two of them combine: texts of
``scan_program``, formula by formula.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

LEAF = re.compile(r"\b([abr])(\d+)\b")


@dataclass(frozen=True)
class Form:
    """``states`` and ``combine`` as in ``Program``; ``lift`` assigns the states of a value ``v``
    (already of the type of the first state) at position ``t``."""

    states: tuple[str, ...]
    combine: str
    lift: str = "s0 = v"


def state_type(dtype: torch.dtype) -> str:
    """The Triton type in which values of ``dtype`` are accumulated. Integers wrap around as the
    narrower type does, because truncation commutes with sums and products."""
    if dtype == torch.float64:
        return "fp64"
    if dtype.is_floating_point:
        return "fp32"
    if dtype == torch.int64:
        return "int64"
    if dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        return "int32"
    raise TypeError(f"expected real numbers to scan, not {dtype}")


def _extreme(name: str, dtype: torch.dtype) -> str:
    call = {"max": "tl.maximum", "min": "tl.minimum"}[name]
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_floating_point else ""
    return f"r0 = {call}(a0, b0{nan})"


def commutes(states: tuple[str, ...], combine: str) -> bool:
    """Whether states are known to combine to the same in any order, but for rounding."""
    dtypes = torch.float32, torch.int32
    extremes = {_extreme(name, dtype) for name in ("max", "min") for dtype in dtypes}
    return len(states) == 1 and combine in {"r0 = a0 + b0", "r0 = a0 * b0", *extremes}


def in_any_order(states: tuple[str, ...], combine: str) -> str | None:
    """What combines states to the same, but for rounding, in any order; None if nothing is known
    to. Of values with positions, which rise along a scan, the later position."""
    if commutes(states, combine):
        return combine
    for sign, beyond in ((">=", ">"), ("<=", "<")):
        if len(states) == 2 and combine == _PAIR.format(sign=sign):
            return _PAIR_IN_ANY_ORDER.format(beyond=beyond)
    return None


def has_positions(states: tuple[str, ...], combine: str) -> bool:
    """Whether a state is a value and its position."""
    return len(states) == 2 and combine in {_PAIR.format(sign=sign) for sign in (">=", "<=")}


# torch keeps the later of equal values, and a NaN for good
_PAIR = """take = (b0 {sign} a0) | (b0 != b0)
r0 = tl.where(take, b0, a0)
r1 = tl.where(take, b1, a1)"""
_PAIR_IN_ANY_ORDER = """same = (b0 == a0) | ((b0 != b0) & (a0 != a0))
beyond = (b0 {beyond} a0) | ((b0 != b0) & (a0 == a0))
take = beyond | (same & (b1 > a1))
r0 = tl.where(take, b0, a0)
r1 = tl.where(take, b1, a1)"""

# exp(s0) * (1 + s1): the largest term stays out of the sum, so that what little the others add to
# it is kept, and one exponential serves two states
PAIRS = """near = tl.where(a0 == b0, 1.0, tl.exp(-tl.abs(a0 - b0)))
later = b0 > a0
r0 = tl.maximum(a0, b0, propagate_nan=tl.PropagateNan.ALL)
r1 = tl.where(later, b1 + (1.0 + a1) * near, a1 + (1.0 + b1) * near)"""
# the logarithm of a state of PAIRS
LOGARITHM = "s0 + libdevice.log1p(s1)"

_AFFINE = """r0 = a0 * b0
r1 = b0 * a1 + b1"""


def form(name: str, dtype: torch.dtype, wide: bool = True) -> Form:
    """The form of a scan of values of ``dtype``.

    sum, prod, max, min: one state. logsumexp: (largest, sum of the others relative to it), with
    ``LOGARITHM`` behind. cummax, cummin: (value, position); the position is an int64, or an int32
    where the caller knows that lengths stay below 2^31 and asks for it by ``wide=False``. affine:
    h = a h + b, states (a, b), scanned b is h.
    """
    kind = state_type(dtype)
    if name in ("sum", "prod"):
        return Form((kind,), f"r0 = a0 {'+' if name == 'sum' else '*'} b0")
    if name in ("max", "min"):
        return Form((kind,), _extreme(name, dtype))
    if name in ("cummax", "cummin"):
        index = "int64" if wide else "int32"
        sign = ">=" if name == "cummax" else "<="
        return Form((kind, index), _PAIR.format(sign=sign), f"s0 = v\ns1 = t.to(tl.{index})")
    if name == "logsumexp":
        return Form((kind, kind), PAIRS, "s0 = v\ns1 = tl.zeros_like(v)")
    if name == "affine":
        return Form((kind, kind), _AFFINE, "")
    raise ValueError(f"expected a scan with a name, not {name!r}")


def segmented(base: Form) -> Form:
    """``base`` with a flag in front (state 0, an int32) that is 1 where a segment begins: what came
    before does not count. The states of ``base`` move up by one, also in ``lift``."""
    combine = LEAF.sub(lambda m: f"{m[1]}{int(m[2]) + 1}", base.combine)
    names = range(1, len(base.states) + 1)
    kept = "\n".join(f"r{i} = tl.where(b0 != 0, b{i}, r{i})" for i in names)
    lift = re.sub(r"\bs(\d+)\b", lambda m: f"s{int(m[1]) + 1}", base.lift)
    return Form(("int32", *base.states), f"{combine}\n{kept}\nr0 = a0 | b0", lift)
