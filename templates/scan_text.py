"""The text of one scan's kernel, written around the texts of a ``scan_program.Program``.

A tile is LANES x TIME, the time last where that is how tensors lie in memory ("rows"), or
TIME x LANES ("columns"). A lane is one scan; lanes are numbered over all other dimensions. Where a
scan is one program's ("looped") the program goes from tile to tile and carries a state; where it is
cut among programs ("shared") they tell each other totals as ``scan`` describes.
"""

from __future__ import annotations

import functools
import linecache
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from . import scan
from .scan_program import Program

try:
    from triton.language.extra import libdevice
except ImportError:  # without a GPU's driver triton may have none
    libdevice = None

BITS = {"int1": 1, "int32": 1, "fp32": 1, "int64": 2, "fp64": 2}  # 32-bit words of a state
TYPES = {"int1": "int1", "int32": "int32", "fp32": "float32", "int64": "int64", "fp64": "float64"}


@dataclass(frozen=True)
class Layout:
    """How tensors lie. ``axis``: that of the time in a tile. ``lane_dims``: how many numbers make
    a lane's. ``strides``: per tensor (inputs, then outputs) the kinds of its strides along the time
    and the lane dimensions, outermost first: 0, 1, or None for an argument. ``shared``: a scan is
    cut among programs. ``ascending``: a reversed scan's tile is in the order of memory."""

    axis: int
    lane_dims: int
    strides: tuple[tuple[int | None, ...], ...]
    shared: bool
    ascending: bool


def words_of(program: Program) -> int:
    """64-bit words that hold a state."""
    return sum(BITS[kind] for kind in program.states)


def _indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line for line in text.splitlines() if line.strip())


def _leaves(prefix: str, program: Program) -> str:
    return ", ".join(f"{prefix}{i}" for i in range(len(program.states)))


def _names(program: Program) -> list[str]:
    return [f"x{i}" for i in range(len(program.inputs))] + [
        f"y{i}" for i in range(len(program.outputs))
    ]


def _offset(name: str, kinds: tuple[int | None, ...], parts: list[str]) -> str:
    """The sum of index times stride over ``parts`` (names of indices)."""
    terms = []
    for kind, part, suffix in zip(kinds, parts, ["t", *range(len(parts) - 1)], strict=True):
        if kind != 0:
            terms.append(part if kind == 1 else f"{part} * {name}_{suffix}")
    return " + ".join(terms) or "0"


def arguments(program: Program, layout: Layout) -> list[str]:
    """Names of the entry's arguments: tensors, the workspace of a shared scan, numbers."""
    names = _names(program)
    numbers = ["lanes", "length", *(f"n{i}" for i in range(1, layout.lane_dims))]
    for name, kinds in zip(names, layout.strides, strict=True):
        for kind, suffix in zip(kinds, ["t", *range(layout.lane_dims)], strict=True):
            if kind is None:
                numbers.append(f"{name}_{suffix}")
    return [*names, *(["workspace"] if layout.shared else []), *numbers]


def _combine(program: Program) -> str:
    leaves = f"{_leaves('a', program)}, {_leaves('b', program)}"
    return (
        f"@triton.jit\ndef combine({leaves}):\n{_indented(program.combine)}\n"
        f"    return {_leaves('r', program)}\n"
    )


def _scanned(program: Program, axis: int, reverse: bool) -> str:
    leaves = _leaves("s", program)
    group = leaves if len(program.states) == 1 else f"({leaves})"
    return f"{leaves} = tl.associative_scan({group}, {axis}, combine, reverse={reverse})"


def _last(program: Program, to: str, where: str, axis: int) -> str:
    """The state at the one position where ``where`` holds, bit for bit."""
    lines = []
    for i, kind in enumerate(program.states):
        bits = {"fp32": "int32", "fp64": "int64"}.get(kind)
        state = f"s{i}.to(tl.{bits}, bitcast=True)" if bits else f"s{i}.to(tl.int32)"
        if kind == "int64":
            state = f"s{i}"
        back = f"tl.{TYPES[kind]}, bitcast=True" if bits else f"tl.{TYPES[kind]}"
        lines.append(f"{to}{i} = picked({state}, {where}, {axis}).to({back})")
    return "\n".join(lines)


def _publish(program: Program) -> str:
    lines, word = [], 0
    for i, kind in enumerate(program.states):
        plane = f"words + {word} * plane"
        if BITS[kind] == 2:
            state = f"e{i}.to(tl.int64, bitcast=True)" if kind == "fp64" else f"e{i}"
            lines.append(f"put({plane}, at, live, low_bits({state}), call)")
            lines.append(f"put(words + {word + 1} * plane, at, live, high_bits({state}), call)")
        else:
            cast = "tl.int32, bitcast=True" if kind == "fp32" else "tl.int32"
            lines.append(f"put({plane}, at, live, e{i}.to({cast}), call)")
        word += BITS[kind]
    body = _indented("\n".join(lines))
    return (
        "@triton.jit\n"
        f"def publish(words, plane, at, live, call, {_leaves('e', program)}):\n{body}\n"
    )


def _folded(program: Program, axis: int) -> str:
    """All of ``count`` published states from ``at`` on, combined."""
    lines = [
        f"j = tl.arange(0, GROUP){'[None, :]' if axis else '[:, None]'}",
        "mask = live & (j < count)",
        "at = at + j.to(tl.int64) * step",
    ]
    word = 0
    for i, kind in enumerate(program.states):
        low = f"get(words + {word} * plane, at, mask, call)"
        if BITS[kind] == 2:
            high = f"get(words + {word + 1} * plane, at, mask, call)"
            both = f"joined({low}, {high})"
            lines.append(
                f"s{i} = {both}{'.to(tl.float64, bitcast=True)' if kind == 'fp64' else ''}"
            )
        else:
            cast = "tl.float32, bitcast=True" if kind == "fp32" else f"tl.{TYPES[kind]}"
            lines.append(f"s{i} = {low}.to({cast})")
        word += BITS[kind]
    lines.append(_scanned(program, axis, False))
    lines.append(_last(program, "s", "j == count - 1", axis))
    lines.append(f"return {_leaves('s', program)}")
    return (
        "@triton.jit\n"
        "def folded(words, plane, at, step, live, call, count, GROUP: tl.constexpr):\n"
        f"{_indented(chr(10).join(lines))}\n"
    )


def _tile(program: Program, layout: Layout) -> str:
    """From tile ``k``'s inputs to scanned states ``s0, ...`` of the tile alone."""
    ascending = not program.reverse or layout.ascending
    lines = []
    if program.reverse and ascending:
        lines += ["at = length - (k + 1) * size + time", "t = length - 1 - at"]
    else:
        lines.append("t = k * size + time")
        lines.append("at = length - 1 - t" if program.reverse else "at = t")
    there = "(at >= 0)" if program.reverse else "(at < length)"
    lines.append(f"inside = live & {there}")
    for i, (given, kinds) in enumerate(zip(program.inputs, layout.strides, strict=False)):
        parts = ["at", *(f"i{j}" for j in range(layout.lane_dims))]
        limits = [] if all(kind == 0 for kind in kinds[1:]) else ["live"]
        if kinds[0] != 0:
            limits.append(there)
        ahead = given.shift if program.reverse else -given.shift  # in memory
        if ahead:
            parts[0] = f"(at {'+' if ahead > 0 else '-'} {abs(ahead)})"
            limits.append(f"(at < length - {ahead})" if ahead > 0 else f"(at >= {-ahead})")
        masked = f", {' & '.join(limits)}, other={given.fill}" if limits else ""
        offset = _offset(f"x{i}", kinds, parts)
        lines.append(f"x{i} = tl.load(x{i}_ptr + ({offset}){masked})")
    lines.append(program.produce)
    for i, kind in enumerate(program.states):
        lines.append(f"s{i} = tl.broadcast_to(s{i}.to(tl.{TYPES[kind]}), inside.shape)")
    lines.append(_scanned(program, layout.axis, program.reverse and ascending))
    return "\n".join(lines)


def _after(program: Program, before: str, there: str) -> str:
    """Put the state ``before`` in front of those of the tile where ``there`` holds."""
    leaves = _leaves("q", program)
    lines = [f"{leaves} = combine({_leaves(before, program)}, {_leaves('s', program)})"]
    for i in range(len(program.states)):
        lines.append(f"s{i} = tl.where({there}, q{i}, s{i})")
    return "\n".join(lines)


def _stores(program: Program, layout: Layout) -> str:
    lines = [program.consume]
    first = len(program.inputs)
    parts = ["at", *(f"i{j}" for j in range(layout.lane_dims))]
    for i in range(len(program.outputs)):
        offset = _offset(f"y{i}", layout.strides[first + i], parts)
        lines.append(f"tl.store(y{i}_ptr + ({offset}), y{i}, inside)")
    return "\n".join(lines)


def _end(program: Program, layout: Layout) -> str:
    """Where a tile's last state is."""
    return "time == 0" if program.reverse and layout.ascending else "time == TIME - 1"


def _looped(program: Program, layout: Layout) -> str:
    where = _end(program, layout)
    start = "\n".join(
        f"c{i} = tl.zeros(lane.shape, tl.{TYPES[kind]})" for i, kind in enumerate(program.states)
    )
    body = "\n".join(
        [
            _tile(program, layout),
            _after(program, "c", "k > 0"),
            _last(program, "c", where, layout.axis),
            _stores(program, layout),
        ]
    )
    return f"""{start}
for k in range(0, tl.cdiv(length, TIME)):
{_indented(body)}"""


def _shared(program: Program, layout: Layout) -> str:
    where = _end(program, layout)
    p, e, u = (_leaves(prefix, program) for prefix in "peu")
    wheres = "\n".join(f"p{i} = tl.where(some, m{i}, u{i})" for i in range(len(program.states)))
    ahead = f"""{_leaves("m", program)} = combine({u}, {p})
{wheres}
some = True"""
    at0, at1, at2 = (
        ("lane * tiles", "lane * groups", "lane * supers") if layout.axis else ["lane"] * 3
    )
    step = "1" if layout.axis else "lanes"
    same = "\n".join(f"p{i} = e{i}\nu{i} = e{i}" for i in range(len(program.states)))
    swap = "\n".join(f"u{i} = tl.where(w == 0, v{i}, m{i})" for i in range(len(program.states)))
    return f"""{_tile(program, layout)}
{_last(program, "e", where, layout.axis)}
groups = tl.cdiv(tiles, GROUP)
supers = tl.cdiv(groups, GROUP)
plane = lanes * (tiles + groups + supers)
words = workspace + 4
words1 = words + lanes * tiles
words2 = words1 + lanes * groups
group = k // GROUP
above = group // GROUP
publish(words, plane, {at0} + k * {step}, live, call, {e})
{same}
some = False
if k % GROUP > 0:
    first = {at0} + group * GROUP * {step}
    {p} = folded(words, plane, first, {step}, live, call, k % GROUP, GROUP)
    some = True
    if k % GROUP == GROUP - 1:
        {e} = combine({p}, {e})
        publish(words1, plane, {at1} + group * {step}, live, call, {e})
if group % GROUP > 0:
    first = {at1} + above * GROUP * {step}
    {u} = folded(words1, plane, first, {step}, live, call, group % GROUP, GROUP)
    if (k % GROUP == GROUP - 1) & (group % GROUP == GROUP - 1):
        {e} = combine({u}, {e})
        publish(words2, plane, {at2} + above * {step}, live, call, {e})
{_indented(ahead)}
if above > 0:
    for w in range(0, above, GROUP):
        first = {at2} + w * {step}
        count = tl.minimum(above - w, GROUP)
        {_leaves("v", program)} = folded(words2, plane, first, {step}, live, call, count, GROUP)
        {_leaves("m", program)} = combine({u}, {_leaves("v", program)})
{_indented(swap, 8)}
{_indented(ahead)}
{_after(program, "p", "k > 0")}
{_stores(program, layout)}
finish(workspace, call, tl.num_programs(0))"""


def _head(layout: Layout) -> str:
    lane, time = ("[:, None]", "[None, :]") if layout.axis else ("[None, :]", "[:, None]")
    lines = ["size = tl.full([], TIME, tl.int64)"]
    if not layout.shared:
        lines += ["block = tl.program_id(0).to(tl.int64)"]
    else:
        lines += ["ticket, call = begin(workspace)", "tiles = tl.cdiv(length, size)"]
        if layout.axis:  # a row's tiles follow one another in memory
            lines += ["block = ticket // tiles", "k = ticket % tiles"]
        else:  # lanes do
            lines += ["blocks = tl.cdiv(lanes, LANES)", "block = ticket % blocks"]
            lines += ["k = ticket // blocks"]
    lines.append(f"lane = block * LANES + tl.arange(0, LANES){lane}")
    lines.append("live = lane < lanes")
    lines.append(f"time = tl.arange(0, TIME){time}")
    rest = "lane"
    for i in reversed(range(1, layout.lane_dims)):
        lines.append(f"i{i} = {rest} % n{i}")
        lines.append(f"r{i} = {rest} // n{i}")
        rest = f"r{i}"
    if layout.lane_dims:
        lines.append(f"i0 = {rest}")
    return "\n".join(lines)


@functools.cache
def text(program: Program, layout: Layout) -> str:
    """The functions of the kernel; the entry is the last one."""
    pointers = [*_names(program)]
    numbers = [n for n in arguments(program, layout) if n not in pointers]
    given = ", ".join([f"{p}_ptr" for p in pointers] + numbers)
    constants = ", ".join(f"{c}: tl.constexpr" for c in constants_of(layout))
    body = _shared(program, layout) if layout.shared else _looped(program, layout)
    parts = [_combine(program)]
    if layout.shared:
        parts += [_publish(program), _folded(program, layout.axis)]
    name = f"scan_{'rows' if layout.axis else 'columns'}"
    parts.append(
        f"@triton.jit\ndef {name}({given}, {constants}):\n"
        f"{_indented(_head(layout))}\n{_indented(body)}\n"
    )
    return "\n\n".join(parts)


def constants_of(layout: Layout) -> list[str]:
    """Names of the entry's compile-time arguments."""
    return ["LANES", "TIME", *(["GROUP"] if layout.shared else [])]


@functools.cache
def kernel(program: Program, layout: Layout) -> Any:
    """The entry, ready to be launched or given to a graph."""
    source = text(program, layout)
    name = f"<inductor_ext scan {kernel.cache_info().currsize}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": "inductor_ext_scan"}
    for helper in ("begin", "finish", "put", "get", "low_bits", "high_bits", "joined", "picked"):
        scope[helper] = getattr(scan, helper)
    exec(compile(source, name, "exec"), scope)
    return scope[f"scan_{'rows' if layout.axis else 'columns'}"]
