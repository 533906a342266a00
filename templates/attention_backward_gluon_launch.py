"""Launch of ``attention_backward_gluon``: where it applies, its tiles, its tensor maps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton

from .attention_gluon_launch import (
    applies,
    described,
    input_values,
    module_of,
    scored,
    standing,
)
from .attention_program import LOG2E, Program


@dataclass(frozen=True)
class Tile:
    """``consumers`` of ``keys`` keys each, against blocks of ``rows`` query rows, of which
    ``stages`` are copied ahead. ``dynamic``: programs take the next tile that nobody has taken;
    else there is a program per tile. ``section_bytes``: of q and do that stay in the L2."""

    rows: int = 64
    keys: int = 64
    consumers: int = 2
    stages: int = 3
    dynamic: bool = True
    section_bytes: int = 16 * 2**20

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread of a consumer and of the producer: the 64K of a multiprocessor."""
        return (240, 24) if self.consumers == 2 else (160, 32)


def takes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, program: Program
) -> bool:
    """Whether ``launch`` takes these arguments. Reads no values and launches nothing."""
    return (
        applies(q, k, v, program)
        and applies(do, k, v, program)
        and program.factor is not None
        and not program.documents
        and all("q" not in given.axes for given in program.inputs)
    )


def functions(program: Program) -> dict[str, tuple[str, list[str], str]]:
    """(arguments, statements, result) of the functions that are a program's own; see
    ``attention_gluon_launch.functions``. No input varies along the rows, which is the loop's axis."""
    numbers = [f"n{i} = numbers[{i}]" for i in range(program.numbers)]
    values = [f"x{i} = fixed[{i}]" for i in range(len(program.inputs))]
    bounds = [b for s in program.column_spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    common = "b, h, rows, columns, numbers, fixed, moving"
    score = [*numbers, *values, *program.score.splitlines()] if scored(program) else []
    keep = [*numbers, *values, *program.keep.splitlines()] if program.keep else []
    return {
        "spans": ("k0, k1, columns, rows, numbers", numbers, f"({', '.join(bounds)},)"),
        "along_rows": ("inputs, b, h, k", *standing(program, "k")),
        "score": (f"s, q, k, {common}", score, "r" if score else "s"),
        "keep": (f"q, k, {common}", keep, "keep" if keep else "q < rows"),
    }


def define(program: Program) -> ModuleType:
    """A fresh copy of the module ``attention_backward_gluon`` with a program's functions."""
    constants = {"SCORED": scored(program), "SPANS": len(program.column_spans)}
    return module_of("attention_backward_gluon", functions(program), constants)


kernels = functools.cache(define)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, delta: torch.Tensor,
    shift: torch.Tensor, inputs: Sequence[torch.Tensor], numbers: Sequence[int], program: Program,
    dk: torch.Tensor, dv: torch.Tensor, tile: Tile, multiprocessors: int,
) -> tuple[Any, tuple[int], dict[str, Any]]:  # fmt: skip
    """(kernel, grid, arguments by name): the launch that fills ``dk`` and ``dv``. delta, shift:
    [B, Hq, at least Sq] in fp32, in whole blocks of rows."""
    batch, heads, rows, d = q.shape
    kv_heads, columns, value = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    key_tiles = triton.cdiv(columns, tile.keys * tile.consumers)
    tiles = key_tiles * batch * kv_heads
    held = max(1, tile.section_bytes // (rows * group * (d + value) * q.element_size()))
    dynamic = tile.dynamic and tiles > multiprocessors
    consumer, producer = tile.registers
    arguments = {
        "q_desc": described(q, [1, 1, tile.rows, d]),
        "k_desc": described(k, [1, 1, tile.keys, d]),
        "v_desc": described(v, [1, 1, tile.keys, value]),
        "do_desc": described(do, [1, 1, tile.rows, value]),
        "shift_desc": described(shift.unsqueeze(2), [1, 1, 1, tile.rows]),
        "delta_desc": described(delta.unsqueeze(2), [1, 1, 1, tile.rows]),
        "dk_desc": described(dk, [1, 1, tile.keys, d]),
        "dv_desc": described(dv, [1, 1, tile.keys, value]),
        "counter": torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else delta,
        "tiles": tiles,
        "heads": batch * kv_heads,
        "sections": max(batch * kv_heads // held, 1),
        "key_tiles": key_tiles,
        "kv_heads": kv_heads,
        "group": group,
        "scale": 1.0 if scored(program) else (program.scale or 0.0) * LOG2E,
        "slope": program.factor,
        "rows": rows,
        "columns": columns,
        "numbers": tuple(numbers),
        "inputs": input_values(program, inputs),
        "STAGES": tile.stages,
        "CONSUMERS": tile.consumers,
        "DYNAMIC": dynamic,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "num_warps": tile.keys // 16,
    }
    grid = (min(tiles, multiprocessors) if dynamic else tiles,)
    return kernels(program).attention_keys_gluon, grid, arguments


def keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, delta: torch.Tensor,
    shift: torch.Tensor, inputs: Sequence[torch.Tensor], numbers: Sequence[int], program: Program,
    dk: torch.Tensor, dv: torch.Tensor, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv, of k's and v's shapes, for which ``takes`` has to hold; deterministic."""
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    kernel, grid, arguments = launch(
        q, k, v, do, delta, shift, inputs, numbers, program, dk, dv, tile or Tile(), count
    )
    kernel[grid](**arguments)
