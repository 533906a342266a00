"""The text of decode's kernels: few query rows over many keys, around an ``attention_program``.

    per slice i of the keys:  m_i = max r,  l_i = sum 2^(r - m_i),  o_i = sum 2^(r - m_i) v
    merged, exactly:          m = max m_i,  l = sum l_i 2^(m_i - m),  out = sum o_i 2^(m_i - m) / l

All query rows of a KV head (its group of heads times the rows of the query) are one tile. The keys
that any of them may keep are cut into blocks; the blocks of all KV heads of all sequences, each of
the sequence's own length, stand in one line that is cut into equal slices, one per program. So
programs end together whatever the lengths are. Where all lengths are one and hardly a program is
left over, every head has ``parts`` of its own instead: going from one head to the next a program
fills its ring of blocks anew, which costs more than the card's few idle programs. A program's part
of one head has the slot "program + head" of the workspace, which no other pair has since both only
grow along the line; the merge finds the slots of a head by the same arithmetic. No atomics: the
same bits every run.

Both kernels wait for the one in front of them before they read any memory, and no sooner. Asking
for the first keys in L2 ahead of the queries was slower (``cp.async.bulk.prefetch`` by rows).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .attention_program import LOG2E, Program
from .attention_text import Piece, indented, joined, kernel_of, pieces
from .dependent import in_turn

LOCALS = ("b", "h", "q", "k")  # axes of an input, in the order of its strides


@dataclass(frozen=True)
class Layout:
    """What a kernel is generated for. ``dim``, ``value_dim``: sizes of a head of k and of v.
    ``ragged``: sequences have lengths. ``pages``: "" where k and v are [B, Hkv, Sk, D]; else they
    are pages found by a table, and a block of keys lies in "one" of them or in "many".
    ``keys_first``: tiles are keys x rows, so that the keys fill the 64 rows of a wgmma. ``apart``:
    a program has keys of one head only; not of ragged sequences."""

    dim: int
    value_dim: int
    ragged: bool = False
    pages: str = ""
    keys_first: bool = False
    apart: bool = False


def _numbers(program: Program) -> list[str]:
    return [f"n{i}" for i in range(program.numbers)]


def arguments(program: Program, layout: Layout) -> list[str]:
    """Names of the decode kernel's arguments but the compile-time ones."""
    names = ["q_ptr", "k_ptr", "v_ptr", "partial_ptr", "stats_ptr"]
    names += [f"x{i}_ptr" for i in range(len(program.inputs))]
    names += _where(layout)
    names += ["page_size", "table_ptr", "table_b"] if layout.pages else []
    names += ["q_b", "q_h", "q_q", "k_b", "k_h", "k_k", "v_b", "v_h", "v_k"]
    for i, given in enumerate(program.inputs):
        names += [f"x{i}_{axis}" for axis in LOCALS if axis in given.axes]
    return [*names, *_numbers(program)]


def merge_arguments(program: Program, layout: Layout) -> list[str]:
    """Names of the merge kernel's arguments but the compile-time ones."""
    names = ["partial_ptr", "stats_ptr", "out_ptr", "lse_ptr", *_where(layout)]
    names += [] if layout.apart else ["programs"]
    return [*names, "out_b", "out_h", "out_q", *_numbers(program)]


def _where(layout: Layout) -> list[str]:
    lengths = ["lengths_ptr"] if layout.ragged else []
    parts = ["parts"] if layout.apart else []
    return [*lengths, "batches", "kv_heads", "group", "rows", "capacity", *parts]


# --- which blocks there are -----------------------------------------------------------------------


def _helpers(program: Program, layout: Layout) -> dict[str, Any]:
    """Functions of the kernels: ``span0, ...`` of ``columns`` gives the limits of a span, its first
    block and how many there are; ``blocks`` those of all; ``window`` those of 128 sequences."""
    numbers, given = _numbers(program), ["columns", "rows", *_numbers(program)]
    called = ", ".join([*given, "BLOCK"])
    found: dict[str, Any] = {}
    counts = []
    for i, span in enumerate(program.row_spans):
        body = f"""q0 = 0
q1 = rows - 1
lo = tl.minimum(tl.maximum({span.lo}, 0), columns).to(tl.int32)
hi = tl.minimum({span.hi}, columns).to(tl.int32)
first = lo // BLOCK
count = tl.where(hi > lo, (hi + BLOCK - 1) // BLOCK - first, 0)
return lo, hi, first, count"""
        found[f"span{i}"] = kernel_of(f"span{i}", given, ["BLOCK"], body)
        counts.append(f"_, _, _, count = span{i}({called})\ntotal += count")
    body = joined("total = columns * 0", *counts, "return total")
    found["blocks"] = kernel_of("blocks", given, ["BLOCK"], body, dict(found))
    if layout.ragged:
        body = f"""j = i + tl.arange(0, 128)
columns = tl.load(lengths_ptr + j, mask=j < batches, other=0)
columns = tl.where((columns < 0) | (columns > capacity), 0, columns)
return j, tl.where(j < batches, blocks({called}), 0)"""
        given = ["lengths_ptr", "i", "batches", "capacity", "rows", *numbers]
        found["window"] = kernel_of("window", given, ["BLOCK"], body, dict(found))
    return found


def _total(layout: Layout, numbers: str) -> str:
    """``total``: blocks of all; ``slices``: programs that have some; ``per``, ``rest``: slice i has
    ``per`` of them, and one more where i < rest."""
    if layout.ragged:
        counted = f"""total = 0
for i in range(0, batches, 128):
    _, each = window(lengths_ptr, i, batches, capacity, rows, {numbers}BLOCK)
    total += tl.sum(each, 0)
total = total * kv_heads"""
    else:
        counted = f"""each = blocks(capacity, rows, {numbers}BLOCK)
total = each * batches * kv_heads"""
    return f"""{counted}
slices = tl.maximum(tl.minimum(programs, total // LEAST), 1)
per = total // slices
rest = total % slices"""


def _apart(numbers: str) -> str:
    """``share``: parts of a head that have blocks; part i has ``per`` of them, and one more where
    i < rest."""
    return f"""each = blocks(capacity, rows, {numbers}BLOCK)
share = tl.maximum(tl.minimum(parts, each // LEAST), 1)
per = each // share
rest = each % share"""


def _slice(layout: Layout, numbers: str) -> str:
    """``at``, ``end``: a program's blocks; ``head`` and ``before`` as ``_first`` says."""
    if layout.apart:
        return f"""{_apart(numbers)}
head = program // parts
part = program % parts
before = head * each
at = before + part * per + tl.minimum(part, rest)
end = tl.where(part < share, at + per + (part < rest).to(tl.int32), at)"""
    return f"""programs = tl.num_programs(0)
{_total(layout, numbers)}
at = program * per + tl.minimum(program, rest)
end = tl.where(program < slices, at + per + (program < rest).to(tl.int32), at)
{_first(layout, numbers)}"""


def _first(layout: Layout, numbers: str) -> str:
    """``head``: the KV head, counted over all sequences, of block ``at``; ``before``: blocks in
    front of it."""
    if not layout.ragged:
        return "head = at // tl.maximum(each, 1)\nbefore = head * each"
    return f"""sequence = 0
before = 0
seen = 0
for i in range(0, batches, 128):
    j, each = window(lengths_ptr, i, batches, capacity, rows, {numbers}BLOCK)
    ends = (seen + tl.cumsum(each, 0)) * kv_heads
    passed = (j < batches) & (ends <= at)
    sequence += tl.sum(passed.to(tl.int32), 0)
    before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
    seen += tl.sum(each, 0)
of_head = blocks(
    tl.load(lengths_ptr + tl.minimum(sequence, batches - 1)), rows, {numbers}BLOCK
)
passed_heads = (at - before) // tl.maximum(of_head, 1)
head = sequence * kv_heads + passed_heads
before += passed_heads * of_head"""


def _columns(layout: Layout) -> str:
    """``columns``: keys of sequence ``b``."""
    if not layout.ragged:
        return "columns = capacity"
    return """columns = tl.load(lengths_ptr + b)
impossible = (columns < 0) | (columns > capacity)
columns = tl.where(impossible, 0, columns)"""


# --- a block --------------------------------------------------------------------------------------


def _start(program: Program, to: str, block: str) -> str:
    """``to``: the first key of a block, counted from the head's first."""
    lines, before = [], "0"
    for i in range(len(program.row_spans)):
        here = f"(first{i} + {block} - {before}) * BLOCK"
        if i == 0:
            lines.append(f"{to} = {here}")
        else:
            lines.append(f"{to} = tl.where({block} >= {before}, {here}, {to})")
        before = f"({before} + count{i})" if i else "count0"
    return "\n".join(lines)


def _limits(program: Program) -> str:
    """``low``, ``high``: the span of a block."""
    lines, before = ["low = lo0", "high = hi0"], "count0"
    for i in range(1, len(program.row_spans)):
        lines.append(f"low = tl.where(block >= {before}, lo{i}, low)")
        lines.append(f"high = tl.where(block >= {before}, hi{i}, high)")
        before = f"{before} + count{i}"
    return "\n".join(lines)


def _page(program: Program, layout: Layout, to: str, block: str, limit: str) -> str:
    """Pages that a block's keys lie in, asked for a block ahead of them."""
    if not layout.pages:
        return ""
    lines = [_start(program, "ahead", block)]
    if layout.pages == "one":
        lines.append(f"{to} = tl.load(table + ahead // page_size, mask={limit}, other=0)")
    else:
        lines.append("places = ahead + tl.arange(0, BLOCK)")
        mask = f"(places < columns) & ({limit})"
        lines.append(f"{to} = tl.load(table + places // page_size, mask={mask}, other=0)")
    return "\n".join(lines)


def _place(piece: Piece, spread: str) -> tuple[str, str]:
    """(places in a head of a piece's numbers, a mask of those that are there or "")."""
    place = f"({piece.start} + tl.arange(0, {piece.size})){spread}"
    short = piece.valid < piece.size
    return place, f" & ({place} < {piece.start + piece.valid})" if short else ""


def _tile(name: str, layout: Layout, size: int) -> str:
    """The block's pieces of k or v, [BLOCK, width]; 0 beyond the keys."""
    if layout.pages == "one":
        lines = [
            f"{name}_block = {name}_ptr + page.to(tl.int64) * {name}_b + inner * {name}_h",
            f"{name}_block += (start % page_size).to(tl.int64) * {name}_k",
            f"{name}_at = {name}_block + (tl.arange(0, BLOCK) * {name}_k)[:, None]",
        ]
    elif layout.pages:
        lines = [
            f"{name}_block = page.to(tl.int64) * {name}_b + (key % page_size) * {name}_k",
            f"{name}_at = {name}_ptr + inner * {name}_h + {name}_block[:, None]",
        ]
    else:
        lines = [
            f"{name}_block = {name}_base + start.to(tl.int64) * {name}_k",
            f"{name}_at = {name}_block + (tl.arange(0, BLOCK) * {name}_k)[:, None]",
        ]
    for i, piece in enumerate(pieces(size)):
        place, there = _place(piece, "[None, :]")
        mask = f"there[:, None]{there}"
        lines.append(f"{name}{i}_tile = tl.load({name}_at + {place}, mask={mask}, other=0.0)")
    return "\n".join(lines)


def _scores(layout: Layout) -> str:
    lines = []
    for i in range(len(pieces(layout.dim))):
        pair = f"q{i}_tile, tl.trans(k{i}_tile)"
        if layout.keys_first:
            pair = f"k{i}_tile, tl.trans(q{i}_tile)"
        added = ", s" if i else ""
        lines.append(f"s = tl.dot({pair}{added}, input_precision=PRECISION)")
    return "\n".join(lines)


def _read(program: Program, layout: Layout) -> str:
    lines = []
    for i, given in enumerate(program.inputs):
        parts, limits = [], []
        for axis in LOCALS:
            if axis in given.axes:
                index = axis if axis == "b" else f"{axis}.to(tl.int64)"
                parts.append(f"{index} * x{i}_{axis}")
        if "h" in given.axes or "q" in given.axes:
            limits.append("live")
        if "k" in given.axes:
            limits.append("inside")
        offset, mask = " + ".join(parts) or "0", " & ".join(limits)
        masked = f", mask={mask}, other=0" if mask else ""
        lines.append(f"x{i} = tl.load(x{i}_ptr + {offset}{masked})")
    return "\n".join(lines)


def _score(program: Program, layout: Layout) -> str:
    """``r`` of ``s``; -inf where nothing is kept."""
    if program.scale is not None:
        lines = [f"r = s * {program.scale * LOG2E!r}"]
    else:
        lines = [program.score]
    kept = "inside"
    if program.keep:
        lines.append(program.keep)
        kept = "inside & keep"
    if program.documents is not None:
        lines.append("same = x{} == x{}".format(*program.documents))
        kept += " & same"
    return "\n".join([_read(program, layout), *lines, f"r = tl.where({kept}, r, -float('inf'))"])


def _update(layout: Layout) -> str:
    axis, spread = (0, "[None, :]") if layout.keys_first else (1, "[:, None]")
    lines = [
        f"highest = tl.maximum(top, tl.max(r, {axis}))",
        "shift = tl.where(highest == -float('inf'), 0.0, highest)",
        f"p = tl.exp2(r - shift{spread})",
        "faded = tl.exp2(top - shift)",
        f"sum = sum * faded + tl.sum(p, {axis})",
        "top = highest",
        "p = p.to(v_ptr.dtype.element_ty)",
    ]
    for i in range(len(pieces(layout.value_dim))):
        pair = f"tl.trans(v{i}_tile), p" if layout.keys_first else f"p, v{i}_tile"
        lines.append(f"o{i} = o{i} * faded{spread}")
        lines.append(f"o{i} = tl.dot({pair}, o{i}, input_precision=PRECISION)")
    return "\n".join(lines)


def _body(program: Program, layout: Layout) -> str:
    spread = "[None, :]" if layout.keys_first else "[:, None]"
    other = "[:, None]" if layout.keys_first else "[None, :]"
    lines = [
        _start(program, "start", "block"),
        _limits(program),
        "key = start + tl.arange(0, BLOCK)",
        "there = (key >= low) & (key < high)",
        "page = coming" if layout.pages else "",
        _page(program, layout, "coming", "(block + 1)", "block + 1 < last"),
        _tile("k", layout, layout.dim),
        _tile("v", layout, layout.value_dim),
        _scores(layout),
        f"k = key{other}",
        f"inside = there{other}",
        f"q = row{spread}",
        f"h = query_head{spread}",
        f"live = lives{spread}",
        _score(program, layout),
        _update(layout),
    ]
    return "\n".join(lines)


# --- a program ------------------------------------------------------------------------------------


def _head(program: Program, layout: Layout, numbers: str) -> str:
    """One head's part of a program's slice."""
    spans = range(len(program.row_spans))
    lines = ["b = (head // kv_heads).to(tl.int64)", "inner = (head % kv_heads).to(tl.int64)"]
    lines.append(_columns(layout))
    for i in spans:
        names = f"lo{i}, hi{i}, first{i}, count{i}"
        lines.append(f"{names} = span{i}(columns, rows, {numbers}BLOCK)")
    lines += [
        f"found = {' + '.join(f'count{i}' for i in spans)}",
        "first = tl.maximum(at - before, 0)",
        "last = tl.minimum(end - before, found)",
        "query_head = (inner * group).to(tl.int32) + packed % group",
        "q_base = q_ptr + b * q_b + row.to(tl.int64) * q_q + query_head.to(tl.int64) * q_h",
    ]
    if not layout.ragged:
        lines.append("in_turn(PDL)")
    for i, piece in enumerate(pieces(layout.dim)):
        place, there = _place(piece, "[None, :]")
        mask = f"lives[:, None]{there}"
        lines.append(f"q{i}_tile = tl.load(q_base[:, None] + {place}, mask={mask}, other=0.0)")
    if layout.pages:
        lines.append("table = table_ptr + b * table_b")
        lines.append(_page(program, layout, "coming", "first", "first < last"))
    else:
        lines += [f"{n}_base = {n}_ptr + b * {n}_b + inner * {n}_h" for n in "kv"]
    lines.append("top = tl.full([ROWS], -float('inf'), tl.float32)")
    lines.append("sum = tl.zeros([ROWS], tl.float32)")
    for i, piece in enumerate(pieces(layout.value_dim)):
        shape = f"[{piece.size}, ROWS]" if layout.keys_first else f"[ROWS, {piece.size}]"
        lines.append(f"o{i} = tl.zeros({shape}, tl.float32)")
    lines.append("for block in tl.range(first, last, num_stages=STAGES):")
    lines.append(indented(_body(program, layout)))
    lines.append("slot = (program + head).to(tl.int64) * (rows * group) + packed")
    lines.append("tl.store(stats_ptr + 2 * slot, top, mask=lives)")
    lines.append("tl.store(stats_ptr + 2 * slot + 1, sum, mask=lives)")
    spread, other = ("[None, :]", "[:, None]") if layout.keys_first else ("[:, None]", "[None, :]")
    for i, piece in enumerate(pieces(layout.value_dim)):
        place, there = _place(piece, other)
        mask = f"lives{spread}{there}"
        where = f"partial_ptr + (slot * {layout.value_dim}){spread} + {place}"
        lines.append(f"tl.store({where}, o{i}, mask={mask})")
    lines += ["before += found", "head += 1"]
    return "\n".join(lines)


def _decode(program: Program, layout: Layout, numbers: str) -> str:
    wait = "in_turn(PDL)"
    lines = [
        wait if layout.ragged else "",
        "program = tl.program_id(0)",
        _slice(layout, numbers),
        "packed = tl.arange(0, ROWS)",
        "row = packed // group",
        "lives = packed < rows * group",
        "while (before < end) & (at < end):",
        indented(_head(program, layout, numbers)),
        # In front of the first loads; here for a program that has none.
        "" if layout.ragged else wait,
    ]
    return joined(*lines)


def _parts(layout: Layout, numbers: str) -> str:
    """``lowest``, ``count``: the first program that has blocks of ``head``, and how many do."""
    if layout.apart:
        return f"""{_apart(numbers)}
lowest = head * parts
count = tl.where(each > 0, share, 0)"""
    if layout.ragged:
        counted = f"""before = 0
for i in range(0, batches, 128):
    j, each = window(lengths_ptr, i, batches, capacity, rows, {numbers}BLOCK)
    before += tl.sum(tl.where(j < b, each, 0), 0)
found = blocks(columns, rows, {numbers}BLOCK)
before = before * kv_heads + inner * found"""
    else:
        counted = "found = each\nbefore = head * each"
    return f"""{_total(layout, numbers)}
{counted}
wide = rest * (per + 1)
start = before
end = before + found - 1
lowest = tl.where(start < wide, start // (per + 1), rest + (start - wide) // tl.maximum(per, 1))
most = tl.where(end < wide, end // (per + 1), rest + (end - wide) // tl.maximum(per, 1))
count = tl.where(found > 0, most - lowest + 1, 0)"""


def _merge(program: Program, layout: Layout, numbers: str) -> str:
    failed = "sum = tl.where(impossible, float('nan'), sum)" if layout.ragged else ""
    nothing = "float('nan')" if program.empty == "nan" else "0.0"
    wait = "in_turn(PDL)"
    return f"""{wait if layout.ragged else ""}
packed = tl.program_id(0) % (rows * group)
head = tl.program_id(0) // (rows * group)
b = head // kv_heads
inner = head % kv_heads
{_columns(layout)}
{_parts(layout, numbers)}
d = tl.arange(0, WIDE)
{"" if layout.ragged else wait}
top = tl.full([], -float('inf'), tl.float32)
sum = tl.full([], 0.0, tl.float32)
o = tl.zeros([WIDE], tl.float32)
for i in range(0, count, SLOTS):
    j = i + tl.arange(0, SLOTS)
    slot = (lowest + head + j).to(tl.int64) * (rows * group) + packed
    tops = tl.load(stats_ptr + 2 * slot, mask=j < count, other=-float('inf'))
    sums = tl.load(stats_ptr + 2 * slot + 1, mask=j < count, other=0.0)
    some = (j < count)[:, None] & (d < {layout.value_dim})[None, :]
    where = partial_ptr + (slot * {layout.value_dim})[:, None] + d[None, :]
    partial = tl.load(where, mask=some, other=0.0)
    highest = tl.maximum(top, tl.max(tops, 0))
    shift = tl.where(highest == -float('inf'), 0.0, highest)
    weight = tl.exp2(tops - shift)
    faded = tl.exp2(top - shift)
    sum = sum * faded + tl.sum(weight * sums, 0)
    o = o * faded + tl.sum(weight[:, None] * partial, 0)
    top = highest
{failed}
out = tl.where(sum == 0.0, {nothing}, o / sum)
row = packed // group
query_head = inner * group + packed % group
place = out_ptr + b.to(tl.int64) * out_b + query_head.to(tl.int64) * out_h
place += row.to(tl.int64) * out_q
tl.store(place + d, out.to(out_ptr.dtype.element_ty), mask=d < {layout.value_dim})
lse = tl.where(sum == 0.0, -float('inf'), (top + tl.log2(sum)) * {1 / LOG2E!r})
line = (b.to(tl.int64) * kv_heads * group + query_head) * rows + row
tl.store(lse_ptr + line, lse)"""


@functools.cache
def kernels(program: Program, layout: Layout) -> tuple[Any, Any]:
    """(decode, merge), ready to be launched."""
    numbers = "".join(f"{n}, " for n in _numbers(program))
    helpers = {**_helpers(program, layout), "in_turn": in_turn}
    # What grows from step to step does not make another kernel.
    growing = ["batches", "capacity", *(["parts"] if layout.apart else []), *_numbers(program)]
    decode = kernel_of(
        "decode", arguments(program, layout),
        ["ROWS", "BLOCK", "LEAST", "STAGES", "PRECISION", "PDL"],
        _decode(program, layout, numbers), helpers, growing,
    )  # fmt: skip
    merge = kernel_of(
        "merge", merge_arguments(program, layout), ["SLOTS", "BLOCK", "LEAST", "WIDE", "PDL"],
        _merge(program, layout, numbers), helpers,
        growing if layout.apart else [*growing, "programs"],
    )  # fmt: skip
    return decode, merge
