"""Scans of log(sum of exp): a tile's as a plain sum where that is as good as the pairs are.

A state is (m, c), for m + log(1 + c), as ``scan_forms`` has it: combining two costs an exponential
and a dozen instructions, three times an element. Relative to one number M of the tile it is

    mass_t = sum over u <= t of exp(x_u - M),        y_t = N + log(mass_t exp(M - N) + exp(p - N))

which is an addition; p is what the tiles in front of it come to, and N the larger of M and p. It
holds while the first of the sums is far from underflow (x_0 or p above N - FAR), and is off by what
fp32 resolves at N, at most twice that of the tile's largest result if one of them is above LEAST in
magnitude. Other tiles (values that rise steeply, infinities, NaN, results near 0) take the pairs,
from memory once more. A tile of columns always does: it has as many M as lanes.
"""

from __future__ import annotations

from . import scan_forms
from .scan_program import Program

FAR, LEAST = 40.0, 0.5
_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453


def applies(program: Program) -> bool:
    """Whether the states of a program are those of the form, in fp32."""
    return program.combine == scan_forms.PAIRS and program.states == ("fp32", "fp32")


def _all(what: str, keep: bool) -> str:
    return f"tl.min(({what} | (live == 0)).to(tl.int32)) == 1" if keep else what


def masses(first: str, axis: int, keep: bool) -> str:
    """From the states of a tile of rows to the number M, ``top``, the ``mass`` of each position
    alone, their sum ``mass_of_all``, and whether they are ``good`` enough for a total. ``first`` is
    the end where the scan begins; ``keep``: a tile has an axis of lanes."""
    over = f"{axis}, keep_dims=True" if keep else f"{axis}"
    return f"""top = tl.max(tl.where(inside, s0, float("-inf")), {over})
begins = tl.max(tl.where({first}, s0, float("-inf")), {over})
mass = tl.where(inside, (1.0 + s1) * tl.exp2((s0 - top) * {_LOG2E}), 0.0)
mass_of_all = tl.sum(mass, {over})
good = (top > {LEAST}) | (top + tl.log(mass_of_all) < -{LEAST})
good = good & (mass_of_all == mass_of_all) & (top < float("inf"))
good = {_all("good", keep)}"""


def scanned(backwards: bool, axis: int) -> str:
    """From each position's own mass to that of all up to it."""
    return f"mass = tl.cumsum(mass, {axis}, reverse={backwards})"


def carried(before: str, keep: bool) -> str:
    """From the masses of a tile and the state ``before`` in front of it (-inf if there is none) to
    the number N, ``peak``, the factor and summand of the masses, their last sum ``sum``, and
    whether they are good enough, ``plain``."""
    b0, b1 = f"{before}0", f"{before}1"
    return f"""peak = tl.maximum(top, {b0})
factor = tl.exp2((top - peak) * {_LOG2E})
summand = (1.0 + {b1}) * tl.exp2(({b0} - peak) * {_LOG2E})
sum = mass_of_all * factor + summand
plain = tl.maximum(begins, {b0}) > peak - {FAR}
plain = plain & ((peak > {LEAST}) | (peak + tl.log(sum) < -{LEAST}))
plain = plain & (sum == sum) & (peak < float("inf"))
plain = {_all("plain", keep)}"""


# By one instruction, off by at most 1.7e-7 or 2.4e-7 of itself; tl.log takes some twenty.
RESULTS = f"""s0 = peak + libdevice.fast_log2f(mass * factor + summand) * {_LN2}
s1 = tl.zeros_like(s0)"""


def total(to: str, top: str, mass: str) -> str:
    """The state of a tile: the largest, and the others relative to it."""
    return f"{to}0 = {top}\n{to}1 = {mass} - 1.0"
