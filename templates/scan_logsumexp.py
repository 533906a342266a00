"""Scans of log(sum of exp): a tile's as a plain sum where that is as good as the pairs are.

A state is (m, c), for m + log(1 + c), as ``scan_forms`` has it: combining two costs an exponential
and a dozen instructions, three times an element. Relative to one number M of the tile it is

    mass_t = sum over u <= t of exp(x_u - M),        y_t = M + log(mass_t)

which is an addition. It holds while the first mass is far from underflow (x_0 or what is carried
above M - FAR), and is off by what fp32 resolves at M, at most twice that of the tile's largest
result if one of them is above LEAST in magnitude. Other tiles (values that rise steeply,
infinities, NaN, results near 0) take the pairs. Of rows only: a tile of columns has as many M as
lanes, and not enough registers.
"""

from __future__ import annotations

from . import scan_forms
from .scan_program import Program

FAR, LEAST = 40.0, 0.5
_LOG2E = 1.4426950408889634


def applies(program: Program) -> bool:
    """Whether the states of a program are those of the form, in fp32."""
    form = scan_forms.PAIRS
    return program.combine == form and program.states == ("fp32", "fp32")


def masses(axis: int, flat: bool, first: str, last: str, backwards: bool, carried: bool) -> str:
    """From a tile's states, and what is ``carried`` (c0, c1; nothing where c0 is -inf), to the
    number M, ``top``, the ``mass`` of each position, the last one, ``total``, and whether they are
    good enough, ``plain``. ``first`` and ``last`` are the ends in the order of the scan."""
    keep = "" if flat else ", keep_dims=True"
    carry = f" + (1.0 + c1) * tl.exp2((c0 - top) * {_LOG2E})" if carried else ""
    lines = [
        f'top = tl.max(tl.where(inside, s0, float("-inf")), {axis}{keep})',
        f'low = tl.max(tl.where({first}, s0, float("-inf")), {axis}{keep})',
        *(["top = tl.maximum(top, c0)", "low = tl.maximum(low, c0)"] if carried else []),
        f"mass = tl.where(inside, (1.0 + s1) * tl.exp2((s0 - top) * {_LOG2E}), 0.0)",
        *([f"mass = tl.where({first}, mass{carry}, mass)"] if carried else []),
        f"mass = tl.cumsum(mass, {axis}, reverse={backwards})",
        f"total = tl.sum(tl.where({last}, mass, 0.0), {axis}{keep})",
        f"plain = (low > top - {FAR}) & {_large('top', 'top + tl.log(total)')}",
        'plain = plain & (total == total) & (top < float("inf"))',
    ]
    if not flat:
        lines.append("plain = tl.min((plain | (live == 0)).to(tl.int32)) == 1")
    return "\n".join(lines)


def _large(least: str, end: str) -> str:
    """Whether a tile's last result is above LEAST in magnitude."""
    return f"(({least} > {LEAST}) | ({end} < -{LEAST}))"


RESULTS = """s0 = top + tl.log(mass)
s1 = tl.zeros_like(s0)"""
# What is carried on, or told to others: the largest, and the others relative to it
TOTAL = """{0}0 = top
{0}1 = total - 1.0"""
# The masses of a tile behind (p0, p1), if the tile is no further below it than FAR
BEHIND = f"""both = tl.maximum(top, p0)
scale = tl.exp2((top - both) * {_LOG2E})
offset = (1.0 + p1) * tl.exp2((p0 - both) * {_LOG2E})
whole = plain & (tl.maximum(low, p0) > both - {FAR}) & (p0 == p0) & (p0 < float("inf"))
whole = whole & {_large("both", "both + tl.log(total * scale + offset)")}"""
WHOLE = """s0 = both + tl.log(mass * scale + offset)
s1 = tl.zeros_like(s0)"""
