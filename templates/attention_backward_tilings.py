"""Which tiles attention's backward takes: rules by program and heads, and what fits."""

from __future__ import annotations

import dataclasses
import functools

import torch

from .attention_program import Program
from .attention_text import pieces
from .tilings import tunable


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Query rows and keys of a tile, warps, pipeline stages; ``merged``, ``early``: as in ``Form``;
    ``near``: MiB that heads which take turns stream, which should stay in the L2; ``apart``: dk and
    dv by two launches, of half the registers each."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    merged: bool = False
    early: bool = False
    near: int = 32
    apart: bool = False


_FIELDS = {"scaled": "block_m block_n near", "stages": "stages", "flipped": "merged"}


def width(dim: int) -> int:
    return sum(piece.size for piece in pieces(dim))


@tunable("attention", "backward_keys", "rows columns heads", **_FIELDS)
def keys_tiling(program: Program, dtype: torch.dtype, head: int, value: int) -> Tiling:
    """Of dk and dv. Small tiles, two programs on a multiprocessor, hide the beginnings and ends of
    programs that are short or unlike; where all is kept wide ones read less (measured at 128)."""
    widest = max(width(head), width(value))
    if dtype == torch.float32:
        rows = 32 if widest <= 128 else 16
        return Tiling(rows, 64, 8, 1, merged=True, apart=widest > 64)
    if widest > 256:
        return Tiling(32, 64, 8, 1, apart=True)
    if widest > 128:
        return Tiling(64, 64, 8, 2, merged=True, early=True)
    if program.dropout:  # draws take registers too
        return Tiling(32 if widest > 64 else 64, 64, 4, 2, merged=True)
    if not program.keep and widest > 64 and not _matrix(program):
        return Tiling(64, 128, 8, 3)
    return Tiling(64, 64, 4, 2 if widest > 64 else 3, merged=_short(program))


@tunable("attention", "backward_rows", "rows columns heads", **_FIELDS)
def rows_tiling(program: Program, dtype: torch.dtype, head: int, value: int) -> Tiling:
    """Of dq."""
    widest = max(width(head), width(value))
    if dtype == torch.float32:
        return Tiling(64, 32 if widest <= 128 else 16, 8, 1, merged=True)
    if widest > 256:
        return Tiling(64, 32, 8, 1, merged=True)
    if widest > 128:
        return Tiling(64, 64, 8, 2, merged=True)
    if _short(program):
        return Tiling(64, 64, 4, 2 if widest > 64 else 3, merged=True)
    if _matrix(program) and widest > 64:
        return Tiling(64, 32, 4, 3)
    return Tiling(128, 64, 8, 3) if widest > 64 else Tiling(64, 64, 4, 3)


def _matrix(program: Program) -> bool:
    """Whether the score reads something along rows and keys."""
    return any({"q", "k"} <= set(given.axes) for given in program.inputs)


def _short(program: Program) -> bool:
    """Whether loops are short wherever they are, so that one is better than two."""
    return program.documents is not None


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fitted(
    chosen: Tiling, held: int, moving: int, pair: int, limit: int, keys_held: bool
) -> Tiling:
    """The tiling, or one with fewer stages, then fewer rows or keys, whose tiles fit into ``limit``
    bytes: ``held`` bytes of a row or key of the tile that stays (a tile of keys if ``keys_held``),
    ``moving`` of one that is streamed, ``pair`` of a pair of both."""
    while True:
        stays, streams = chosen.block_m, chosen.block_n
        if keys_held:
            stays, streams = streams, stays
        each = moving * streams + pair * stays * streams
        exchanged = 2 * stays * streams + 2048
        if held * stays + each * chosen.stages + exchanged <= limit:
            return chosen
        if chosen.stages > 1:
            chosen = dataclasses.replace(chosen, stages=chosen.stages - 1)
        elif max(stays, streams) == 16:
            return chosen
        elif (stays >= streams) != keys_held:
            chosen = dataclasses.replace(chosen, block_m=chosen.block_m // 2)
        else:
            chosen = dataclasses.replace(chosen, block_n=chosen.block_n // 2)
