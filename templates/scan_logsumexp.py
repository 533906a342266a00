"""Scans of log(sum of exp): a tile's as a plain sum where that is as good as the pairs are.

A state is (m, c), for m + log(1 + c), as ``scan_forms`` has it: combining two costs an exponential
and a dozen instructions, three times an element. Relative to one number M of the tile it is

    mass_t = sum over u <= t of exp(x_u - M),        y_t = M + log(mass_t)

which is an addition. It holds while the first mass is far from underflow (x_0 or what is carried
above M - FAR), and is off by what fp32 resolves at M, at most twice that of the tile's largest
result if one of them is above LEAST in magnitude. Other tiles (values that rise steeply,
infinities, NaN, results near 0) take the pairs. Of rows that one program scans: a tile of columns
has as many M as lanes, and not enough registers; of a scan that is cut, totals are pairs anyway.
"""

from __future__ import annotations

from . import scan_forms
from .scan_program import Program

FAR, LEAST = 40.0, 0.5
_LOG2E = 1.4426950408889634


def applies(program: Program) -> bool:
    """Whether the states of a program are those of the form, in fp32."""
    return program.combine == scan_forms.PAIRS and program.states == ("fp32", "fp32")


def masses(first: str, last: str, backwards: bool) -> str:
    """From the states of a tile of rows, and what is carried (c0, c1; nothing where c0 is -inf), to
    the number M, ``top``, the ``mass`` of each position, the last one, ``total``, and whether they
    are good enough, ``plain``. ``first`` and ``last`` are the ends in the order of the scan."""
    return f"""top = tl.max(tl.where(inside, s0, float("-inf")), 1, keep_dims=True)
low = tl.maximum(tl.max(tl.where({first}, s0, float("-inf")), 1, keep_dims=True), c0)
top = tl.maximum(top, c0)
carried = (1.0 + c1) * tl.exp2((c0 - top) * {_LOG2E})
mass = tl.where(inside, (1.0 + s1) * tl.exp2((s0 - top) * {_LOG2E}), 0.0)
mass = tl.cumsum(tl.where({first}, mass + carried, mass), 1, reverse={backwards})
total = tl.sum(tl.where({last}, mass, 0.0), 1, keep_dims=True)
plain = (low > top - {FAR}) & ((top > {LEAST}) | (top + tl.log(total) < -{LEAST}))
plain = plain & (total == total) & (top < float("inf"))
plain = tl.min((plain | (live == 0)).to(tl.int32)) == 1"""


RESULTS = """s0 = top + tl.log(mass)
s1 = tl.zeros_like(s0)"""
# What is carried on: the largest, and the others relative to it
TOTAL = """c0 = top
c1 = total - 1.0"""
