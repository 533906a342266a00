"""Launches of ``attention_keys_gluon`` and ``attention_rows_gluon``, the Hopper kernels of
attention's backward: where they apply, their tiles, their tensor maps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from .attention_gluon_launch import (
    MOST_STAGED,
    applies,
    copied_values,
    described,
    input_values,
    module_of,
    scored,
    shared_by_batches,
    staged,
    staged_bytes,
    staged_maps,
    standing,
)
from .attention_program import LOG2E, Program
from .tilings import tunable

PARTS = {"keys": "k", "columns": "k", "rows": "q"}  # the axis that a kernel's programs lie along


@dataclass(frozen=True)
class Tile:
    """``consumers`` that hold ``held`` keys (or rows) each, against blocks of ``streamed`` rows (or
    keys), of which ``stages`` are copied ahead. ``dynamic``: programs take the next tile that
    nobody has taken; else there is a program per tile. ``section_bytes``: of what is streamed that
    stays in the L2."""

    streamed: int = 64
    held: int = 64
    consumers: int = 2
    stages: int = 3
    dynamic: bool = True
    section_bytes: int = 40 * 2**20

    def __post_init__(self) -> None:
        if self.stages < 2:  # a block is held until the scores of the next one are there
            raise ValueError(f"stages is expected as 2 or more, got {self.stages}")

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread of a consumer and of the producer: the 64K of a multiprocessor."""
        return (240, 24) if self.consumers == 2 else (160, 32)


_TUNED = {"scaled": "section_bytes", "warps": "", "stages": "stages", "flipped": "dynamic"}


@tunable("attention", "backward_keys_gluon", "rows columns heads", **_TUNED)
def keys_tile(program: Program, d: int) -> Tile:
    """Of dk and dv; ``d``: the wider of D and Dv."""
    matrix = any({"q", "k"} <= set(x.axes) for x in program.inputs)
    return Tile(stages=3 if matrix else 4)


@tunable("attention", "backward_rows_gluon", "rows columns heads", **_TUNED)
def rows_tile(program: Program, d: int, matrix: bool = False) -> Tile:
    """Of dq; ``matrix``: whether something along rows and keys is copied, or stored."""
    return Tile() if matrix else Tile(128, stages=2)


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    return {"rows": q.shape[2], "columns": k.shape[2], "heads": q.shape[0] * q.shape[1]}


def takes(
    part: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, inputs: Sequence[Tensor],
    program: Program, pairs: Sequence[int] = (),
) -> bool:  # fmt: skip
    """Whether the launch of a part takes these arguments; ``pairs``: the inputs whose gradient is
    stored for each pair. Reads no values and launches nothing."""
    copied = copied_by(part, program, inputs)
    loop = "k" if part == "rows" else "q"
    return (
        applies(q, k, v, program)
        and applies(do, k, v, program)
        and program.factor is not None
        and not program.documents
        and all(loop not in x.axes or i in copied for i, x in enumerate(program.inputs))
        and _matrices_fit(inputs, program, copied)
        and (not pairs or _storable(q, inputs, program, pairs))
    )


def copied_by(part: str, program: Program, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """The inputs that a part's kernel copies into shared memory, those along the loop's axis."""
    if part == "columns":
        return ()
    found = staged(program, inputs)
    return found if part == "rows" else tuple(i for i in found if "q" in program.inputs[i].axes)


def _matrices_fit(inputs: Sequence[Tensor], program: Program, copied: tuple[int, ...]) -> bool:
    """Whether there is shared memory for what is copied along rows and keys: one of 16 bits."""
    matrices = [i for i in copied if "q" in program.inputs[i].axes]
    return len(matrices) <= 1 and all(inputs[i].element_size() == 2 for i in matrices)


def _storable(
    q: Tensor, inputs: Sequence[Tensor], program: Program, pairs: Sequence[int]
) -> bool:  # fmt: skip
    """Whether the gradient for each pair is ds itself, and every pair has one."""
    (i, *more) = pairs
    everything = [("0", "columns", "0", "columns")]
    spans = [(s.lo, s.hi, s.full_lo, s.full_hi) for s in program.row_spans]
    same = f"d{i} = g" in program.gradient.splitlines() and inputs[i].dtype == q.dtype
    return not more and same and spans == everything


def functions(
    part: str, program: Program, copied: tuple[int, ...] = ()
) -> dict[str, tuple[str, list[str], str]]:
    """(arguments, statements, result) of the functions that are a program's own; see
    ``attention_gluon_launch.functions``. What varies along the loop's axis is ``copied``."""
    numbers = [f"n{i} = numbers[{i}]" for i in range(program.numbers)]
    held = [i for i in range(len(program.inputs)) if i not in copied]
    values = [f"x{i} = fixed[{at}]" for at, i in enumerate(held)]
    values += [f"x{i} = moving[{at}]" for at, i in enumerate(copied)]
    spans = program.column_spans if part != "rows" else program.row_spans
    bounds = [b for s in spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    along = "k0, k1, columns, rows" if part != "rows" else "q0, q1, rows, columns"
    common = "b, h, rows, columns, numbers, fixed, moving"
    score = [*numbers, *values, *program.score.splitlines()] if scored(program) else []
    keep = [*numbers, *values, *program.keep.splitlines()] if program.keep else []
    axis = PARTS[part]
    everything = "q < rows" if part != "rows" else "k < columns"
    return {
        "spans": (f"{along}, numbers", numbers, f"({', '.join(bounds)},)"),
        "along_rows": (f"inputs, b, h, {axis}", *standing(program, axis, copied)),
        "staged_places": ("b, h, q, k", [], copied_values(program, copied)),
        "score": (f"s, q, k, {common}", score, "r" if score else "s"),
        "keep": (f"q, k, {common}", keep, "keep" if keep else everything),
    }


def define(part: str, program: Program, copied: tuple[int, ...] = ()) -> ModuleType:
    """A fresh copy of the module of a kernel with a program's functions."""
    spans = program.column_spans if part != "rows" else program.row_spans
    constants = {
        "SCORED": scored(program),
        "SPANS": len(spans),
        "STAGED": len(copied),
        "BATCHES_BESIDE": shared_by_batches(program, copied),
    }
    return module_of(f"attention_{part}_gluon", functions(part, program, copied), constants)


kernels = functools.cache(define)


def common(
    q: Tensor, k: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int], program: Program,
    tile: Tile, blocks: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    """Arguments that every kernel has; ``blocks``: query rows and keys."""
    row_block, key_block = blocks
    consumer, producer = tile.registers
    return {
        "q_desc": described(q, [1, 1, row_block, q.shape[3]]),
        "k_desc": described(k, [1, 1, key_block, k.shape[3]]),
        "group": q.shape[1] // k.shape[1],
        "scale": 1.0 if scored(program) else (program.scale or 0.0) * LOG2E,
        "rows": q.shape[2],
        "columns": k.shape[2],
        "numbers": tuple(numbers),
        "inputs": input_values(program, inputs),
        "STAGES": tile.stages,
        "CONSUMERS": tile.consumers,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "num_warps": tile.held // 16,
    }


def _common(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, tile: Tile, blocks: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    """Arguments that both gradient kernels have."""
    row_block, key_block = blocks
    return common(q, k, inputs, numbers, program, tile, blocks) | {
        "v_desc": described(v, [1, 1, key_block, v.shape[3]]),
        "do_desc": described(do, [1, 1, row_block, do.shape[3]]),
        "slope": program.factor,
    }


def schedule(
    part: str, tiles_of_head: int, heads: int, streamed: int, tile: Tile, multiprocessors: int,
    spare: Tensor,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments): who computes which tiles. ``streamed``: bytes of a head."""
    tiles = tiles_of_head * heads
    dynamic = tile.dynamic and tiles > multiprocessors
    counter = torch.zeros(1, dtype=torch.int32, device=spare.device) if dynamic else spare
    return (min(tiles, multiprocessors) if dynamic else tiles,), {
        "counter": counter,
        "tiles": tiles,
        "heads": heads,
        "sections": max(heads // max(1, tile.section_bytes // max(streamed, 1)), 1),
        f"{part}_tiles": tiles_of_head,
        "DYNAMIC": dynamic,
    }


def launch_keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, delta: Tensor, shift: Tensor,
    inputs: Sequence[Tensor], numbers: Sequence[int], program: Program, dk: Tensor, dv: Tensor,
    tile: Tile, multiprocessors: int,
) -> tuple[Any, tuple[int], dict[str, Any]]:  # fmt: skip
    """(kernel, grid, arguments by name): the launch that fills ``dk`` and ``dv``. delta, shift:
    [B, Hq, at least Sq] in fp32, in whole blocks of rows."""
    heads = k.shape[0] * k.shape[1]
    streamed = (q.numel() + do.numel()) // heads * q.element_size()
    arguments = _common(
        q, k, v, do, inputs, numbers, program, tile, (tile.streamed, tile.held)
    )  # fmt: skip
    copied = copied_by("keys", program, inputs)
    maps = staged_maps(program, inputs, copied, tile.streamed, tile.held)
    line = [1, 1, 1, tile.streamed]
    arguments |= {
        "x0_desc": maps[0] if maps else None,
        "STAGED_BYTES": staged_bytes(maps, tile.consumers),
        "shift_desc": described(shift.unsqueeze(2), line),
        "delta_desc": described(delta.unsqueeze(2), line),
        "dk_desc": described(dk, [1, 1, tile.held, dk.shape[3]]),
        "dv_desc": described(dv, [1, 1, tile.held, dv.shape[3]]),
        "kv_heads": k.shape[1],
    }
    each = triton.cdiv(k.shape[2], tile.held * tile.consumers)
    grid, who = schedule("key", each, heads, streamed, tile, multiprocessors, delta)
    return kernels("keys", program, copied).attention_keys_gluon, grid, arguments | who


def launch_rows(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, delta: Tensor, shift: Tensor,
    inputs: Sequence[Tensor], numbers: Sequence[int], program: Program, dq: Tensor, tile: Tile,
    multiprocessors: int, pairs: Tensor | None = None, part: Sequence[slice] | None = None,
) -> tuple[Any, tuple[int], dict[str, Any]]:  # fmt: skip
    """(kernel, grid, arguments by name): the launch that fills ``dq``. pairs: [batches, heads,
    rows, columns] of whole tiles, q's dtype, which become the gradients for pairs of a ``part`` of
    the batches and heads; then dq is filled for those only."""
    of_batches, of_heads = part or (slice(0, q.shape[0]), slice(0, q.shape[1]))
    some = of_batches.stop - of_batches.start, of_heads.stop - of_heads.start
    heads = some[0] * some[1]
    # A group reads the same.
    streamed = (k.numel() + v.numel()) // (q.shape[0] * q.shape[1]) * k.element_size()
    arguments = _common(
        q, k, v, do, inputs, numbers, program, tile, (tile.held, tile.streamed)
    )  # fmt: skip
    copied = copied_by("rows", program, inputs)
    maps = staged_maps(program, inputs, copied, tile.held, tile.streamed)
    arguments |= {f"x{j}_desc": maps[j] if j < len(maps) else None for j in range(MOST_STAGED)}
    arguments |= {
        "pair_desc": None if pairs is None else _flat(pairs, [tile.held, tile.streamed]),
        "PAIRS": pairs is not None,
        "pair_rows": 0 if pairs is None else pairs.shape[2],
        "first_batch": of_batches.start,
        "first_head": of_heads.start,
        "some_batches": some[0],
        "some_heads": some[1],
        "STAGED_BYTES": staged_bytes(maps, tile.consumers),
        "shift_ptr": shift,
        "delta_ptr": delta,
        "padded": shift.shape[2],
        "dq_desc": described(dq, [1, 1, tile.held, dq.shape[3]]),
        "query_heads": q.shape[1],
    }
    each = triton.cdiv(q.shape[2], tile.held * tile.consumers)
    grid, who = schedule("row", each, heads, streamed, tile, multiprocessors, delta)
    return kernels("rows", program, copied).attention_rows_gluon, grid, arguments | who


def _flat(pairs: Tensor, block: list[int]) -> Any:
    """A tensor map of whole tiles, rows of all heads below one another."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(128, 8 * pairs.element_size(), rank=2)
    return TensorDescriptor.from_tensor(pairs.flatten(0, 2), block, layout)


def multiprocessors_of(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, delta: Tensor, shift: Tensor,
    inputs: Sequence[Tensor], numbers: Sequence[int], program: Program, dk: Tensor, dv: Tensor,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv, of k's and v's shapes, for which ``takes`` has to hold; deterministic."""
    tile = tile or keys_tile(program, max(q.shape[3], v.shape[3]), **_sizes(q, k))
    kernel, grid, arguments = launch_keys(
        q, k, v, do, delta, shift, inputs, numbers, program, dk, dv, tile, multiprocessors_of(q)
    )
    kernel[grid](**arguments)


def rows(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, delta: Tensor, shift: Tensor,
    inputs: Sequence[Tensor], numbers: Sequence[int], program: Program, dq: Tensor,
    tile: Tile | None = None, pairs: Tensor | None = None, part: Sequence[slice] | None = None,
) -> None:  # fmt: skip
    """Fill dq, of q's shape, for which ``takes`` has to hold; deterministic. pairs, part: as of
    ``launch_rows``."""
    matrix = any("q" in program.inputs[i].axes for i in staged(program, inputs))
    d = max(q.shape[3], v.shape[3])
    tile = tile or rows_tile(program, d, matrix or pairs is not None, **_sizes(q, k))
    kernel, grid, arguments = launch_rows(
        q, k, v, do, delta, shift, inputs, numbers, program, dq, tile, multiprocessors_of(q), pairs,
        part,
    )  # fmt: skip
    kernel[grid](**arguments)
