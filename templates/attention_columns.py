"""Sums of attention's weights over query rows, written around an ``attention_program.Program``.

    sums[b, g, k] = sum over heads h of group g and rows q >= first_row of 2^(r[q, k] - lse2[q])

A program owns BLOCK_N keys of one group and goes through the rows of all heads of the group, from
the log-sum-exp that the forward left; values are not read. One program adds in one order, so sums
are the same in every run. Tiles are [keys, rows], so that rows are added within threads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from . import attention_text as text
from .attention_forward import hull
from .attention_program import LOG2E, Program
from .attention_text import Operand, joined

CONSTANTS = ["BLOCK_M", "BLOCK_N", "STAGES"]


@dataclass(frozen=True)
class Layout:
    """The operands, the ``precision`` of products of fp32, and the inputs read by descriptors."""

    q: Operand
    k: Operand
    precision: str = ""
    described: tuple[int, ...] = ()


def parameters(program: Program, layout: Layout) -> list[str]:
    """Names of the kernel's parameters, in order, compile-time ones left out."""
    names = [*layout.q.parameters, *layout.k.parameters, "lse_ptr", "sums_ptr"]
    names += ["rows", "columns", "heads", "group", "first_row"]
    if program.documents:
        names += ["doc_ptr", "doc_b", "doc_h"]
    return names + text.score_parameters(program, layout.described)


_PLACE = """tiles = tl.cdiv(columns, BLOCK_N)
tile = tl.program_id(0) % tiles
bg = tl.program_id(0) // tiles
groups = heads // group
b = bg // groups
h = bg % groups * group
k_start = tile * BLOCK_N
k0 = k_start
k1 = tl.minimum(k_start + BLOCK_N, columns) - 1
ql = tl.arange(0, BLOCK_M)[None, :]
kl = tl.arange(0, BLOCK_N)[:, None]
sums = tl.zeros([BLOCK_N], tl.float32)"""


def _body(program: Program, layout: Layout, full: bool) -> str:
    count = range(len(layout.q.pieces))
    options = f', input_precision="{layout.precision}"' if layout.precision else ""
    limit = "" if full else "rows"
    mask = "" if full else ", (at >= first_row) & (at < rows), other=float('inf')"
    lines = [
        "h = bg % groups * group + turn",
        layout.q.at(),
        text.inputs_at(program, described=layout.described),
        *(f"qt{i} = {layout.q.load(i, 'q_start', 'BLOCK_M', limit)}" for i in count),
        f"s = {text.product([f'kt{i}' for i in count], [f'qt{i}.T' for i in count], options)}",
        "q = q_start + ql",
        "k = k_start + kl",
        text.input_loads(
            program, q_inside=full, k_inside=False, described=layout.described, transposed=True
        ),
        program.score,
    ]
    if program.keep and not full:
        lines += [program.keep, 'r = tl.where(keep, r, float("-inf"))']
    lines += [
        "at = q_start + tl.arange(0, BLOCK_M)",
        f"lse = tl.load(lse_ptr + tl.cast(b * heads + h, tl.int64) * rows + at{mask})",
        # A row that keeps nothing adds nothing.
        f'lse = tl.where(lse == float("-inf"), float("inf"), lse * {LOG2E!r})',
        "sums += tl.sum(tl.math.exp2(r - lse[None, :]), 1)",
    ]
    return joined(*lines)


def body(program: Program, layout: Layout) -> str:
    """The kernel's text below its head."""
    tiles = text.loops(
        program.column_spans, "q", "rows", "BLOCK_M", least="first_row",
        hull="doc" if program.documents else "",
    )  # fmt: skip
    return joined(
        _PLACE,
        hull("doc", "tile") if program.documents else "",
        layout.k.at(head="bg % groups"),
        *(
            f"kt{i} = {layout.k.load(i, 'k_start', 'BLOCK_N', 'columns')}"
            for i in range(len(layout.k.pieces))
        ),
        tiles.head,
        tiles.full(_body(program, layout, True), turns="group"),
        tiles.partial(_body(program, layout, False), turns="group"),
        "at_k = k_start + tl.arange(0, BLOCK_N)",
        "tl.store(sums_ptr + tl.cast(bg, tl.int64) * columns + at_k, sums, at_k < columns)",
    )


@functools.cache
def kernel(program: Program, layout: Layout) -> Any:
    """The kernel, ready to be launched with ``parameters`` and ``CONSTANTS``."""
    numbers = [f"n{i}" for i in range(program.numbers)]
    return text.kernel_of(
        "attention_columns",
        parameters(program, layout),
        CONSTANTS,
        body(program, layout),
        unspecialised=["rows", "columns", "first_row", *numbers],
    )
