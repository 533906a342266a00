"""Texts that every part of a scan's kernel is made of."""

from __future__ import annotations

from dataclasses import dataclass

from . import scan_states
from .scan_program import Program

BITS = {"int1": 1, "int32": 1, "fp32": 1, "int64": 2, "fp64": 2}  # 32-bit words of a state
TYPES = scan_states.TYPES


@dataclass(frozen=True)
class Layout:
    """How tensors lie. ``axis``: that of the time in a tile. ``lane_dims``: how many numbers make
    a lane's. ``strides``: per tensor (inputs, then outputs) the kinds of its strides along the time
    and the lane dimensions, outermost first: 0, 1, or None for an argument. ``shared``: a scan is
    cut among programs. ``ascending``: a reversed scan's tile is in the order of memory.
    ``ahead``: a program loads a tile before it is done with the last one; where a scan is cut, asks
    for another's. ``stripes``: programs that share a scan have several tiles of it each, and
    tell the total of one so many of their turns early; 0 where each has one tile."""

    axis: int
    lane_dims: int
    strides: tuple[tuple[int | None, ...], ...]
    shared: bool
    ascending: bool
    ahead: bool
    stripes: int = 0

    @property
    def flat(self) -> bool:
        """Whether a tile is a piece of one lane, without an axis of lanes. What a program knows
        about its lane are scalars then, which have no layout: the compiler else converts, or
        computes twice, whole tiles for the sake of one of their elements."""
        return self.shared and self.axis == 1

    @property
    def along(self) -> int:
        """The axis of the time in a tile or window."""
        return 0 if self.flat else self.axis


def words_of(program: Program) -> int:
    """64-bit words that hold a state."""
    return sum(BITS[kind] for kind in program.states)


def indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line for line in text.splitlines() if line.strip())


def leaves(prefix: str, program: Program) -> str:
    return scan_states.leaves(prefix, program.states)


def scanned_by(program: Program, axis: int, reverse: bool) -> str:
    states, group = leaves("s", program), scan_states.group("s", program.states)
    return f"{states} = tl.associative_scan({group}, {axis}, combine, reverse={reverse})"


def last_of(program: Program, to: str, where: str, layout: Layout) -> str:
    """The state at the one position where ``where`` holds, bit for bit."""
    call = "picked" if layout.flat else f"picked{layout.axis}"
    return scan_states.picked(program.states, to, "s", call, where)
