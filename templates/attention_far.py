"""Rows whose log-sum-exp lies far from 0, for attention's backward.

A row whose keys are all masked by a finite number (-1e9, the least of a dtype) is uniform, and its
lse = m + log2 l has no digits left for log2 l. The backward needs both: p = 2^(r - m) / l. So for
such rows the scores are gone through once more: ``shift`` is m and ``factor`` 1 / l, of others
lse2 and 1. All that p meets is linear in do and dlse, which take the factor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from . import attention_documents, attention_forward, attention_text
from .attention_forward import Layout
from .attention_program import LOG2E, Program
from .attention_text import indented, joined, score_values

FAR = 4096.0  # where fp32 resolves 2^-11 of a power of 2
_NUMBER = re.compile(r"\d+\.?\d*(?:e[+-]?\d+)?")
BLOCK_M, BLOCK_N = 64, 32


def applies(program: Program) -> bool:
    """Whether rows may lie that far: by what is read along keys, or by a number in the score."""
    if program.scale is not None:
        return False
    read = any(x.dtype.is_floating_point and "k" in x.axes for x in program.inputs)
    return read or any(float(n) > FAR for n in _NUMBER.findall(program.score))


def _parameters(program: Program, layout: Layout) -> list[str]:
    names = [*layout.q.parameters, *layout.k.parameters]
    names += ["lse_ptr", "shift_ptr", "factor_ptr", "rows", "columns", "heads", "group"]
    if program.documents:
        names += ["doc_ptr", "doc_b", "doc_h"]
    return names + attention_text.score_parameters(program, layout.described)


_PLACE = """tiles = tl.cdiv(rows, BLOCK_M)
tile = tl.program_id(0) % tiles
bh = tl.program_id(0) // tiles
b = bh // heads
h = bh % heads
q_start = tile * BLOCK_M
q0 = q_start
q1 = tl.minimum(q_start + BLOCK_M, rows) - 1
ql = tl.arange(0, BLOCK_M)[:, None]
kl = tl.arange(0, BLOCK_N)[None, :]
at = q_start + tl.arange(0, BLOCK_M)
place = tl.cast(bh, tl.int64) * rows + at
lse = tl.load(lse_ptr + place, at < rows, other=0.0)"""


def _again(program: Program, layout: Layout) -> str:
    """m and l of a tile of rows, as the forward has them."""
    tiles = attention_text.loops(
        program.row_spans, "k", "columns", "BLOCK_N", hull="doc" if program.documents else ""
    )

    def one(how: str) -> str:
        limit = "" if how == "full" else "columns"
        return joined(
            attention_forward.scores(layout, limit),
            attention_forward.score(program, layout, how),
            attention_forward.softmax(program, how != "full"),
        )

    queries = [
        f"qt{i} = {layout.q.load(i, 'q_start', 'BLOCK_M', 'rows')}"
        for i in range(len(layout.q.pieces))
    ]
    return joined(
        attention_forward.hull("doc", "tile") if program.documents else "",
        layout.q.at(),
        layout.k.at(head="h // group"),
        attention_text.inputs_at(program, described=layout.described),
        *queries,
        tiles.head,
        tiles.full(one("full")),
        tiles.partial(one("partial")),
        f"far = (tl.abs(lse) > {FAR}) & (l > 0)",
        "shift = tl.where(far, m, shift)",
        "factor = tl.where(far, 1.0 / l, factor)",
    )


@functools.cache
def kernel(program: Program, layout: Layout) -> Any:
    """The kernel, ready to be launched."""
    numbers = [f"n{i}" for i in range(program.numbers)]
    body = joined(
        _PLACE,
        f'shift = tl.where(lse == float("-inf"), float("inf"), lse * {LOG2E!r})',
        "factor = tl.full([BLOCK_M], 1.0, tl.float32)",
        'm = tl.full([BLOCK_M], float("-inf"), tl.float32)',
        "l = tl.zeros([BLOCK_M], tl.float32)",
        'if tl.max(tl.where(lse == float("-inf"), 0.0, tl.abs(lse)), 0) > ' + f"{FAR}:",
        indented(_again(program, layout)),
        "tl.store(shift_ptr + place, shift, at < rows)",
        "tl.store(factor_ptr + place, factor, at < rows)",
    )
    return attention_text.kernel_of(
        "attention_far", _parameters(program, layout), attention_forward.CONSTANTS, body,
        unspecialised=["rows", "columns", *numbers],
    )  # fmt: skip


def launch(
    q: Tensor, k: Tensor, lse: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, layout: Layout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(shift, factor) [B, Hq, Sq] in fp32; a row that keeps nothing has the shift inf."""
    batch, heads, rows = q.shape[:3]
    shift, factor = torch.empty_like(lse), torch.empty_like(lse)
    values = layout.q.values(q, BLOCK_M) | layout.k.values(k, BLOCK_N)
    values |= {
        "lse_ptr": lse, "shift_ptr": shift, "factor_ptr": factor, "rows": rows,
        "columns": k.shape[2], "heads": heads, "group": heads // k.shape[1],
    }  # fmt: skip
    values |= score_values(program, inputs, numbers, layout.described, (BLOCK_M, BLOCK_N))
    if program.documents:
        found = attention_documents.hulls(program, inputs, "q", BLOCK_M)
        values |= attention_documents.hull_values(found)
    wrap_triton(kernel(program, layout))[(triton.cdiv(rows, BLOCK_M) * batch * heads,)](
        **values, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=1, num_warps=4, num_stages=1,
    )  # fmt: skip
    return shift, factor
