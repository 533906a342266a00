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

from . import attention_text as text
from .attention_program import LOG2E, Program
from .attention_text import Operand, indented, joined

CONSTANTS = ["BLOCK_M", "BLOCK_N", "STAGES"]


@dataclass(frozen=True)
class Layout:
    """The operands, the ``precision`` of products of fp32, and the form of the loop.

    ``merged``: one loop over all tiles, whose mask is a branch, in place of one over whole tiles
    and one over the others. ``late``: p of a tile meets v one step later, which lets that product
    run beside the next softmax. ``halves``: a program owns that many blocks of BLOCK_M rows, so
    that the softmax of one runs beside products of another. ``lagged``: the second of two is one
    tile of keys behind the first, which lets its q k^T run beside the first one's softmax as well:
    for ``simple`` scores."""

    q: Operand
    k: Operand
    v: Operand
    precision: str = ""
    merged: bool = False
    halves: int = 1
    lagged: bool = False
    late: bool = False
    described: tuple[int, ...] = ()

    @property
    def out(self) -> Operand:
        return Operand("out", self.v.dim)

    @property
    def rows(self) -> str:
        return f"BLOCK_M * {self.halves}" if self.halves > 1 else "BLOCK_M"


def parameters(program: Program, layout: Layout) -> list[str]:
    """Names of the kernel's parameters, in order, compile-time ones left out."""
    operands = [layout.q, layout.k, layout.v, layout.out]
    names = [name for operand in operands for name in operand.parameters]
    names += ["lse_ptr", "rows", "columns", "heads", "group", "total", "section"]
    if program.documents:
        names += ["doc_ptr", "doc_b", "doc_h"]
    return names + text.score_parameters(program, layout.described)


def _place(layout: Layout) -> str:
    return f"""tiles = tl.cdiv(rows, {layout.rows})
pid = tl.program_id(0)
first = pid // (section * tiles) * section
within = pid % (section * tiles)
beside = tl.minimum(section, total - first)
tile = tiles - 1 - within // beside
bh = first + within % beside
b = bh // heads
h = bh % heads
q0 = tile * ({layout.rows})
q1 = tl.minimum(q0 + {layout.rows}, rows) - 1
ql = tl.arange(0, BLOCK_M)[:, None]
kl = tl.arange(0, BLOCK_N)[None, :]"""


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


def _start(half: int) -> str:
    """The first row of a block of rows."""
    return f"q0 + {half} * BLOCK_M" if half else "q0"


def _softmax(program: Program, u: int, masked: bool) -> str:
    """From ``s`` or ``r`` to ``p``, ``alpha`` and the new m and l of block ``u``."""
    if simple(program):
        factor = repr((program.scale or 0.0) * LOG2E)
        lines = [f"m_new = tl.maximum(m{u}, tl.max(s, 1) * {factor})", "m_safe = m_new"]
        shifted = f"s * {factor} - m_safe[:, None]"
    else:
        lines, shifted = [f"m_new = tl.maximum(m{u}, tl.max(r, 1))"], "r - m_safe[:, None]"
    if masked or not simple(program):
        lines.append('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)')
    lines += [
        f"p = tl.math.exp2({shifted})",
        f"alpha = tl.math.exp2(m{u} - m_safe)",
        f"l{u} = l{u} * alpha + tl.sum(p, 1)",
        f"m{u} = m_new",
    ]
    return "\n".join(lines)


def _score(program: Program, layout: Layout, u: int, how: str, masked: str) -> str:
    """From ``s`` of block ``u`` to what the softmax reads; ``masked``: when to mask, or ""."""
    value = "s" if simple(program) else "r"
    places = f"q_start = {_start(u)}\nq = q_start + ql\nk = k_start + kl"
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
    return joined(before, f"if {masked}:\n{indented(mask)}" if masked else mask)


def _values(layout: Layout, u: int, tiles: str) -> str:
    """acc of block ``u`` rescaled, plus ``p`` times the tiles of v."""
    lines = []
    for i in range(len(layout.v.pieces)):
        lines += [
            f"acc{u}_{i} = acc{u}_{i} * alpha[:, None]",
            f"acc{u}_{i} = tl.dot(p.to({_dtype(layout)}), {tiles}{i}, acc{u}_{i}{_dot(layout)})",
        ]
    return "\n".join(lines)


def _loads(operand: Operand, tiles: str, start: str, limit: str) -> str:
    return "\n".join(
        f"{tiles}{i} = {operand.load(i, start, 'BLOCK_N', limit)}"
        for i in range(len(operand.pieces))
    )


def _product(layout: Layout, u: int) -> str:
    count = range(len(layout.q.pieces))
    keys = [f"kt{i}.T" for i in count]
    return text.product([f"qt{u}_{i}" for i in count], keys, _dot(layout))


def _body(program: Program, layout: Layout, how: str) -> str:
    """One tile of keys; ``how``: "full", "partial" or "merged"."""
    limit = "" if how == "full" else "columns"
    masked = "step >= whole" if how == "merged" else ""
    lines = [_loads(layout.k, "kt", "k_start", limit)]
    lines += [f"s{u} = {_product(layout, u)}" for u in range(layout.halves)]
    for u in range(layout.halves):
        lines += [
            f"s = s{u}",
            _score(program, layout, u, how, masked),
            _softmax(program, u, how != "full"),
        ]
        if not u:
            lines.append(_loads(layout.v, "vt", "k_start", limit))
        lines.append(_values(layout, u, "vt"))
    return joined(*lines)


def _late(program: Program, layout: Layout, how: str) -> str:
    """The scores of a tile of keys and the values of the one before."""
    limit = "" if how == "full" else "columns"
    return joined(
        _loads(layout.k, "kt", "k_start", limit),
        f"s = {_product(layout, 0)}",
        _loads(layout.v, "vt", "k_last", limit),
        f"p = carried.to({_dtype(layout)}, bitcast=True)",
        _values(layout, 0, "vt"),
        _score(program, layout, 0, how, "step >= whole" if how == "merged" else ""),
        _softmax(program, 0, how != "full"),
        _carried(layout),
        "k_last = k_start",
    )


def _carried(layout: Layout) -> str:
    """p for the next step, as whole numbers: an operand that is itself carried by a loop would
    pass through shared memory."""
    bits = "tl.int32" if layout.precision else "tl.int16"
    return f"carried = p.to({_dtype(layout)}).to({bits}, bitcast=True)"


def _dtype(layout: Layout) -> str:
    if layout.v.tma:
        return f"{layout.v.name}_desc0.dtype"
    return f"{layout.v.name}_ptr.dtype.element_ty"


def _lagged(program: Program, layout: Layout, how: str) -> str:
    """A tile of keys of the first block, the one before of the second, whose first is all -inf.
    Nothing of a step waits for its last q k^T."""
    limit = "" if how == "full" else "columns"
    return joined(
        _loads(layout.k, "kt", "k_start", limit),
        f"s = {_product(layout, 0)}",
        f"later = {_product(layout, 1)}",
        _score(program, layout, 0, how, ""),
        _softmax(program, 0, how != "full"),
        _loads(layout.v, "vt", "k_start", limit),
        _values(layout, 0, "vt"),
        "k_next = k_start\nk_start = k_last\ns = behind",
        _score(program, layout, 1, how, ""),
        _softmax(program, 1, True),
        _loads(layout.v, "wt", "k_start", limit),
        _values(layout, 1, "wt"),
        "behind = later\nk_last = k_next",
    )


def _steps(program: Program, layout: Layout, tiles: text.Loops) -> str:
    if layout.lagged:
        return joined(
            'behind = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)',
            "k_last = q0 * 0",
            tiles.full(_lagged(program, layout, "full")),
            tiles.partial(
                _lagged(program, layout, "partial"), extra="tl.cdiv(columns, BLOCK_N) * BLOCK_N"
            ),
        )
    if layout.late:
        one = functools.partial(_late, program, layout)
        return joined(
            "p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)",
            _carried(layout),
            "alpha = tl.full([BLOCK_M], 1.0, tl.float32)",
            "k_last = q0 * 0",
            tiles.merged(one("merged"))
            if layout.merged
            else joined(tiles.full(one("full")), tiles.partial(one("partial"))),
            _loads(layout.v, "vt", "k_last", "columns"),
            f"p = carried.to({_dtype(layout)}, bitcast=True)",
            _values(layout, 0, "vt"),
        )
    if layout.merged:
        return tiles.merged(_body(program, layout, "merged"))
    return joined(
        tiles.full(_body(program, layout, "full")), tiles.partial(_body(program, layout, "partial"))
    )


def _end(program: Program, layout: Layout, u: int) -> str:
    lines = [f"l = l{u}", "none = l == 0.0"]
    if program.empty == "zero":
        lines.append("l = tl.where(none, 1.0, l)")
    lines += [
        "inverse = 1.0 / l",
        f'lse = tl.where(none, float("-inf"), (m{u} + tl.math.log2(l)) * 0.6931471805599453)',
        f"q_start = {_start(u)}",
        "at = q_start + tl.arange(0, BLOCK_M)",
        "tl.store(lse_ptr + tl.cast(bh, tl.int64) * rows + at, lse, at < rows)",
        layout.out.at(),
    ]
    for i in range(len(layout.v.pieces)):
        value = f"acc{u}_{i} * inverse[:, None]"
        lines.append(layout.out.store(i, "q_start", "BLOCK_M", "rows", value))
    return joined(*lines)


def _begin(layout: Layout, u: int) -> str:
    lines = [
        f"qt{u}_{i} = {layout.q.load(i, _start(u), 'BLOCK_M', 'rows')}"
        for i in range(len(layout.q.pieces))
    ]
    lines += [
        f"acc{u}_{i} = tl.zeros([BLOCK_M, {piece.size}], tl.float32)"
        for i, piece in enumerate(layout.v.pieces)
    ]
    lines += [
        f'm{u} = tl.full([BLOCK_M], float("-inf"), tl.float32)',
        f"l{u} = tl.zeros([BLOCK_M], tl.float32)",
    ]
    return "\n".join(lines)


def body(program: Program, layout: Layout) -> str:
    """The kernel's text below its head."""
    tiles = text.loops(
        program.row_spans, "k", "columns", "BLOCK_N", hull="doc" if program.documents else ""
    )
    halves = range(layout.halves)
    return joined(
        _place(layout),
        hull("doc", "tile") if program.documents else "",
        layout.q.at(),
        layout.k.at(head="h // group"),
        layout.v.at(head="h // group"),
        text.inputs_at(program, described=layout.described),
        *(_begin(layout, u) for u in halves),
        tiles.head,
        _steps(program, layout, tiles),
        *(_end(program, layout, u) for u in halves),
    )


@functools.cache
def kernel(program: Program, layout: Layout) -> Any:
    """The kernel, ready to be launched with ``parameters`` and ``CONSTANTS``."""
    numbers = [f"n{i}" for i in range(program.numbers)]
    return text.kernel_of(
        "attention_forward",
        parameters(program, layout),
        CONSTANTS,
        body(program, layout),
        unspecialised=["rows", "columns", "total", "section", *numbers],
    )
