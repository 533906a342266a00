"""What one scan kernel computes, as data: which tensors come in, how a position's state is made of
them, how two states combine, what is written.

The texts are Triton, fp32 or wider inside. They see ``tl``, ``libdevice``, the position ``t`` along
the scan (0 is the first one scanned, also in reverse), ``length``, the values ``x0, x1, ...`` of
the inputs there (as stored, not yet widened), and in ``consume`` the scanned state ``s0, s1, ...``.
Values may be narrower than a tile and are broadcast. Names of their own begin with ``tmp``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Input:
    """A tensor that is read. ``shift`` positions before ``t`` along the scan (1: the previous one,
    -1: the next one); ``fill`` is the literal of positions outside."""

    dtype: torch.dtype
    shift: int = 0
    fill: str = "0"


@dataclass(frozen=True)
class Program:
    """One scan with what is fused before and behind it.

    ``states``: Triton types of the leaves of a state ("fp32", "fp64", "int32", "int64", "int1").
    ``produce``: statements that assign ``s0, s1, ...`` from ``x0, x1, ...``.
    ``combine``: statements that assign ``r0, r1, ...`` from ``a0, ...`` (earlier) and ``b0, ...``.
    ``consume``: statements that assign ``y0, y1, ...``, of the types of ``outputs``.
    ``reverse``: scanned from the last position to the first; results stay at their positions.
    No identity is needed. An exclusive scan is one of inputs shifted by 1.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[torch.dtype, ...]
    states: tuple[str, ...]
    produce: str
    combine: str
    consume: str
    reverse: bool = False

    @property
    def kind(self) -> str:
        """In a few words, for an entry of a plan."""
        read, made = (
            "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            for dtypes in ([given.dtype for given in self.inputs], self.outputs)
        )
        return f"{read}-to-{made}{'-reverse' if self.reverse else ''}"
