"""Sums of attention's weights over query rows, written around an ``attention_program.Program``.

    sums[b, g, k] = sum over heads h of group g and rows q >= first_row of 2^(r[q, k] - lse2[q])

A program owns BLOCK_N keys of one group and goes through the rows of all heads of the group, from
the log-sum-exp that the forward left; values are not read. One program adds in one order, so sums
are the same in every run. Tiles are [keys, rows], so that rows are added within threads.

Of few rows ("few") that is a program per tile of keys, which waits for it, uses it once and ends.
Then a program goes through ``each`` of them, the next ones on their way meanwhile; the last heads
come first, whose keys a forward in front has left in L2.
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
    """The operands, the ``precision`` of products of fp32, and what is read by descriptors: inputs,
    and the log-sum-exp (``lse``). ``few``: the rows from ``first_row`` on are at most BLOCK_M;
    ``alone``: those of a group's only head, which stay."""

    q: Operand
    k: Operand
    precision: str = ""
    described: tuple[int, ...] = ()
    lse: bool = False
    few: bool = False
    alone: bool = False


def few(program: Program) -> bool:
    """Whether few rows see nearly all keys, so that every tile of them has something to add."""
    return len(program.row_spans) == 1 and program.row_spans[0].lo == "0" and not program.documents


def parameters(program: Program, layout: Layout) -> list[str]:
    """Names of the kernel's parameters, in order, compile-time ones left out."""
    lse = "lse_desc" if layout.lse else "lse_ptr"
    names = [*layout.q.parameters, *layout.k.parameters, lse, "sums_ptr"]
    names += ["rows", "columns", "heads", "group", "first_row"]
    names += ["each"] if layout.few else []
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
weights = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)"""

_PLACE_OF_FEW = """parts = tl.cdiv(tl.cdiv(columns, BLOCK_N), each)
part = tl.program_id(0) % parts
bg = (tl.num_programs(0) - 1 - tl.program_id(0)) // parts
groups = heads // group
b = bg // groups
first_key = part * each * BLOCK_N
count = tl.minimum(tl.cdiv(columns - first_key, BLOCK_N), each)
ql = tl.arange(0, BLOCK_M)[None, :]
kl = tl.arange(0, BLOCK_N)[:, None]
sums = tl.zeros([BLOCK_N], tl.float32)"""


def _keys(layout: Layout) -> list[str]:
    return [
        f"kt{i} = {layout.k.load(i, 'k_start', 'BLOCK_N', 'columns')}"
        for i in range(len(layout.k.pieces))
    ]


def _rows(program: Program, layout: Layout, full: bool) -> str:
    """A tile of rows of head ``turn`` of the group: ``qt0, ...`` and ``lse``, in units of log 2."""
    limit = "" if full else "rows"
    inside = "" if full else "(at >= first_row) & (at < rows)"
    if layout.lse:
        lse = ["lse = lse_desc.load([b * heads + h, q_start]).reshape(BLOCK_M)"]
        lse += [] if full else [f"lse = tl.where({inside}, lse, float('inf'))"]
    else:
        where = "lse_ptr + tl.cast(b * heads + h, tl.int64) * rows + at"
        mask = "" if full else f", {inside}, other=float('inf')"
        lse = [f"lse = tl.load({where}{mask})"]
    return joined(
        "h = bg % groups * group + turn",
        layout.q.at(),
        text.inputs_at(program, described=layout.described),
        *(
            f"qt{i} = {layout.q.load(i, 'q_start', 'BLOCK_M', limit)}"
            for i in range(len(layout.q.pieces))
        ),
        "at = q_start + tl.arange(0, BLOCK_M)",
        *lse,
        # Finite, so that a row that keeps nothing, whose scores are -inf, adds nothing.
        f"lse = tl.maximum(lse * {LOG2E!r}, -3e38, propagate_nan=tl.PropagateNan.ALL)",
    )


def _weights(program: Program, layout: Layout, full: bool) -> str:
    """``p`` of the tile of rows and the tile of keys."""
    count = range(len(layout.q.pieces))
    options = f', input_precision="{layout.precision}"' if layout.precision else ""
    lines = [
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
    return joined(*lines, "p = tl.math.exp2(r - lse[None, :])")


_STORE = """at_k = k_start + tl.arange(0, BLOCK_N)
tl.store(sums_ptr + tl.cast(bg, tl.int64) * columns + at_k, sums, at_k < columns)"""


def body(program: Program, layout: Layout) -> str:
    """The kernel's text below its head."""
    if layout.few:
        return _body_of_few(program, layout)
    tiles = text.loops(
        program.column_spans, "q", "rows", "BLOCK_M", least="first_row",
        hull="doc" if program.documents else "",
    )  # fmt: skip
    # Added up over the rows of a tile only once.
    full, partial = (
        joined(_rows(program, layout, f), _weights(program, layout, f), "weights += p")
        for f in (True, False)
    )
    return joined(
        _PLACE,
        hull("doc", "tile") if program.documents else "",
        layout.k.at(head="bg % groups"),
        *_keys(layout),
        tiles.head,
        tiles.full(full, turns="group"),
        tiles.partial(partial, turns="group"),
        "sums = tl.sum(weights, 1)",
        _STORE,
    )


def _body_of_few(program: Program, layout: Layout) -> str:
    rows = _rows(program, layout, False)
    step = joined(
        "" if layout.alone else "turn = step % group",
        "k_start = first_key + step // group * BLOCK_N",
        *_keys(layout),
        "" if layout.alone else rows,
        _weights(program, layout, False),
        "sums = tl.where(turn == 0, 0.0, sums) + tl.sum(p, 1)",
        _STORE.replace("at_k < columns", "(at_k < columns) & (turn == group - 1)"),
    )
    return joined(
        _PLACE_OF_FEW,
        # A descriptor's rows begin at 16 bytes.
        "q_start = first_row // 4 * 4" if layout.lse else "q_start = first_row",
        layout.k.at(head="bg % groups"),
        joined("turn = 0", rows) if layout.alone else "",
        f"for step in tl.range(0, count * group, num_stages=STAGES):\n{text.indented(step)}",
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
        unspecialised=["rows", "columns", "first_row", "each", *numbers],
    )
