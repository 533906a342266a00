"""The forward kernel of attention, written around an ``attention_program.Program``.

A program owns BLOCK_M query rows of one head and streams keys and values (FlashAttention-2). Per
row it keeps the running maximum m and sum l of the scores, in units of log 2, and the output:

    m' = max(m, max r);  p = 2^(r - m');  a = 2^(m - m')
    l = a l + sum p;     acc = a acc + p v;    out = acc / l;  lse = (m + log2 l) ln 2

Where the score is ``scale * s``, the scale goes into the exponent's subtraction, one FMA. A row
that has kept nothing has m = -inf, which is never subtracted. Tiles that are kept whole compute no
mask. Programs run longest rows first, the heads of one section side by side, so that heads of one
group, and all tiles of a section, find keys and values in L2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from . import attention_dropout as dropout
from . import attention_text as text
from .attention_program import LOG2E, LOWEST, Program
from .attention_text import Operand, indented, joined

CONSTANTS = ["BLOCK_M", "BLOCK_N", "STAGES"]


@dataclass(frozen=True)
class Layout:
    """The operands, the ``precision`` of products of fp32, and the form of the loop.

    ``merged``: one loop over all tiles, whose mask is a branch, in place of one over whole tiles
    and one over the others. ``described``: inputs read by descriptors. ``again``: only of tiles
    with a row of which the lse of a likely program says that it is not right."""

    q: Operand
    k: Operand
    v: Operand
    precision: str = ""
    merged: bool = False
    described: tuple[int, ...] = ()
    again: bool = False

    @property
    def out(self) -> Operand:
        return Operand("out", self.v.dim)


def parameters(program: Program, layout: Layout) -> list[str]:
    """Names of the kernel's parameters, in order, compile-time ones left out."""
    operands = [layout.q, layout.k, layout.v, layout.out]
    names = [name for operand in operands for name in operand.parameters]
    names += ["lse_ptr", "rows", "columns", "heads", "group", "total", "section"]
    if program.documents:
        names += ["doc_ptr", "doc_b", "doc_h"]
    names += dropout.parameters(program)
    return names + text.score_parameters(program, layout.described)


_PLACE = """tiles = tl.cdiv(rows, BLOCK_M)
pid = tl.program_id(0)
first = pid // (section * tiles) * section
within = pid % (section * tiles)
beside = tl.minimum(section, total - first)
tile = tiles - 1 - within // beside
bh = first + within % beside
b = bh // heads
h = bh % heads
q_start = tile * BLOCK_M
q0 = q_start
q1 = tl.minimum(q_start + BLOCK_M, rows) - 1
ql = tl.arange(0, BLOCK_M)[:, None]
kl = tl.arange(0, BLOCK_N)[None, :]"""

_AGAIN = f"""at = q_start + tl.arange(0, BLOCK_M)
known = tl.load(lse_ptr + tl.cast(bh, tl.int64) * rows + at, at < rows, other=0.0)
if tl.min(known, 0) < {LOWEST!r}:"""


def hull(name: str, tile: str) -> str:
    """Statements that load ``attention_documents``' four numbers of a tile as scalars."""
    at = f"{name}_at = {name}_ptr + b * {name}_b + h * {name}_h + ({tile}) * 4"
    parts = ["lo", "hi", "full_lo", "full_hi"]
    loads = [f"{name}_{part} = tl.load({name}_at + {i})" for i, part in enumerate(parts)]
    return "\n".join([at, *loads])


def simple(program: Program) -> bool:
    """Whether the score is a positive factor times ``s``, which a maximum can be taken through."""
    return program.scale is not None and program.scale > 0


def _dot(layout: Layout) -> str:
    return f', input_precision="{layout.precision}"' if layout.precision else ""


def softmax(program: Program, masked: bool) -> str:
    """From ``s`` or ``r`` to ``p``, ``alpha`` and the new m and l."""
    if simple(program):
        factor = repr((program.scale or 0.0) * LOG2E)
        lines = [f"m_new = tl.maximum(m, tl.max(s, 1) * {factor})", "m_safe = m_new"]
        shifted = f"s * {factor} - m_safe[:, None]"
    else:
        lines, shifted = ["m_new = tl.maximum(m, tl.max(r, 1))"], "r - m_safe[:, None]"
    if masked or not simple(program):
        lines.append('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)')
    lines += [
        f"p = tl.math.exp2({shifted})",
        "alpha = tl.math.exp2(m - m_safe)",
        "l = l * alpha + tl.sum(p, 1)",
        "m = m_new",
    ]
    return "\n".join(lines)


def score(program: Program, layout: Layout, how: str) -> str:
    """From ``s`` to what the softmax reads."""
    value = "s" if simple(program) else "r"
    places = "q = q_start + ql\nk = k_start + kl"
    loads = text.input_loads(
        program, q_inside=False, k_inside=how == "full", described=layout.described
    )
    mask = joined(
        text.kept(program, q_inside=True), f'{value} = tl.where(keep, {value}, float("-inf"))'
    )
    if simple(program):
        before, mask = "", joined(places, loads, mask)
    else:
        before = joined(places, loads, program.score)
    if how == "full":
        return before
    return joined(before, f"if step >= whole:\n{indented(mask)}" if how == "merged" else mask)


def _dtype(layout: Layout) -> str:
    if layout.v.tma:
        return f"{layout.v.name}_desc0.dtype"
    return f"{layout.v.name}_ptr.dtype.element_ty"


def _loads(operand: Operand, tiles: str, limit: str) -> str:
    return "\n".join(
        f"{tiles}{i} = {operand.load(i, 'k_start', 'BLOCK_N', limit)}"
        for i in range(len(operand.pieces))
    )


def scores(layout: Layout, limit: str) -> str:
    count = range(len(layout.q.pieces))
    queries, keys = [f"qt{i}" for i in count], [f"kt{i}.T" for i in count]
    return joined(
        _loads(layout.k, "kt", limit),
        f"s = {text.product(queries, keys, _dot(layout))}",
    )


def _values(layout: Layout, limit: str) -> str:
    """acc rescaled, plus ``p`` times the tile of v."""
    lines = [_loads(layout.v, "vt", limit)]
    for i in range(len(layout.v.pieces)):
        lines += [
            f"acc{i} = acc{i} * alpha[:, None]",
            f"acc{i} = tl.dot(p.to({_dtype(layout)}), vt{i}, acc{i}{_dot(layout)})",
        ]
    return "\n".join(lines)


def _body(program: Program, layout: Layout, how: str) -> str:
    """One tile of keys; ``how``: "full", "partial" or "merged"."""
    limit = "" if how == "full" else "columns"
    return joined(
        scores(layout, limit),
        score(program, layout, how),
        softmax(program, how != "full"),
        dropout.draws(program, "bh"),
        "p = p * drop_factor" if program.dropout else "",
        _values(layout, limit),
    )


def _steps(program: Program, layout: Layout, tiles: text.Loops) -> str:
    one = functools.partial(_body, program, layout)
    if layout.merged:
        return tiles.merged(one("merged"))
    return joined(tiles.full(one("full")), tiles.partial(one("partial")))


def _end(program: Program, layout: Layout) -> str:
    lines = ["none = l == 0.0"]
    if program.empty == "zero":
        lines.append("l = tl.where(none, 1.0, l)")
    lines += [
        "inverse = 1.0 / l",
        'lse = tl.where(none, float("-inf"), (m + tl.math.log2(l)) * 0.6931471805599453)',
        "at = q_start + tl.arange(0, BLOCK_M)",
        "tl.store(lse_ptr + tl.cast(bh, tl.int64) * rows + at, lse, at < rows)",
        layout.out.at(),
    ]
    for i in range(len(layout.v.pieces)):
        value = f"acc{i} * inverse[:, None]"
        lines.append(layout.out.store(i, "q_start", "BLOCK_M", "rows", value))
    return joined(*lines)


def body(program: Program, layout: Layout) -> str:
    """The kernel's text below its head."""
    tiles = text.loops(
        program.row_spans, "k", "columns", "BLOCK_N", hull="doc" if program.documents else ""
    )
    queries = [
        f"qt{i} = {layout.q.load(i, 'q_start', 'BLOCK_M', 'rows')}"
        for i in range(len(layout.q.pieces))
    ]
    sums = [
        f"acc{i} = tl.zeros([BLOCK_M, {piece.size}], tl.float32)"
        for i, piece in enumerate(layout.v.pieces)
    ]
    whole = joined(
        hull("doc", "tile") if program.documents else "",
        layout.q.at(),
        layout.k.at(head="h // group"),
        layout.v.at(head="h // group"),
        text.inputs_at(program, described=layout.described),
        *queries,
        dropout.seeded(program),
        *sums,
        'm = tl.full([BLOCK_M], float("-inf"), tl.float32)',
        "l = tl.zeros([BLOCK_M], tl.float32)",
        tiles.head,
        _steps(program, layout, tiles),
        _end(program, layout),
    )
    return joined(_PLACE, _AGAIN, indented(whole)) if layout.again else joined(_PLACE, whole)


@functools.cache
def kernel(program: Program, layout: Layout) -> Any:
    """The kernel, ready to be launched with ``parameters`` and ``CONSTANTS``."""
    numbers = [f"n{i}" for i in range(program.numbers)]
    return text.kernel_of(
        "attention_forward",
        parameters(program, layout),
        CONSTANTS,
        body(program, layout),
        unspecialised=["rows", "columns", "total", "section", *numbers, *dropout.UNSPECIALISED],
    )
