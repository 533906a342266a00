"""Launch of ``attention_columns_gluon``: where it applies, and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .attention_backward_gluon_launch import Tile, common, kernels, multiprocessors_of, schedule
from .attention_gluon_launch import applies, described, mapped
from .attention_program import LOG2E, Program
from .tilings import tunable


@tunable(
    "attention", "columns_gluon", "rows columns heads",
    scaled="section_bytes", warps="", stages="stages", flipped="dynamic",
)  # fmt: skip
def columns_tile(program: Program, d: int) -> Tile:
    """The tile for heads of 64 or 128."""
    return Tile(consumers=3, stages=4)


def takes(q: Tensor, k: Tensor, lse: Tensor, program: Program) -> bool:
    """Whether ``columns`` takes these arguments. Reads no values and launches nothing."""
    return (
        applies(q, k, k, program)
        and mapped(lse.unsqueeze(2))
        and not program.documents
        and all("q" not in given.axes for given in program.inputs)
    )


def shift_of(lse: Tensor) -> Tensor:
    """[B, Hq, Sq], laid out as ``lse`` is: lse in units of log 2, made once for all keys. Finite of
    a row that keeps nothing, whose scores are -inf, so that it adds nothing; NaN stays."""
    shift = torch.empty_strided(lse.shape, lse.stride(), dtype=lse.dtype, device=lse.device)
    return torch.mul(lse, LOG2E, out=shift).clamp_(min=-3e38)


def launch(
    q: Tensor, k: Tensor, shift: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, sums: Tensor, tile: Tile, multiprocessors: int,
) -> tuple[Any, tuple[int], dict[str, Any]]:  # fmt: skip
    """(kernel, grid, arguments by name): the launch that fills ``sums`` [B, Hkv, Sk], of a
    ``shift_of``."""
    heads = k.shape[0] * k.shape[1]
    streamed = q.numel() // heads * q.element_size()
    each = triton.cdiv(k.shape[2], tile.held * tile.consumers)
    grid, who = schedule("key", each, heads, streamed, tile, multiprocessors, shift)
    arguments = common(q, k, inputs, numbers, program, tile, (tile.streamed, tile.held)) | {
        "shift_desc": described(shift.unsqueeze(2), [1, 1, 1, tile.streamed]),
        "sums": sums,
        "kv_heads": k.shape[1],
    }
    return kernels("columns", program).attention_columns_gluon, grid, arguments | who


def columns(
    q: Tensor, k: Tensor, lse: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """[B, Hkv, Sk] in fp32: sums of exp(score - lse) over all rows and the heads of a group, for
    which ``takes`` has to hold; lse as a forward gives it. Deterministic."""
    sizes = {"rows": q.shape[2], "columns": k.shape[2], "heads": q.shape[0] * q.shape[1]}
    tile = tile or columns_tile(program, q.shape[3], **sizes)
    sums = torch.empty(k.shape[:3], dtype=torch.float32, device=q.device)
    kernel, grid, arguments = launch(
        q, k, shift_of(lse), inputs, numbers, program, sums, tile, multiprocessors_of(q)
    )
    kernel[grid](**arguments)
    return sums
