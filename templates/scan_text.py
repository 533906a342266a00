"""The text of one scan's kernel, written around the texts of a ``scan_program.Program``.

A tile is LANES x TIME, the time last where that is how tensors lie in memory ("rows"), or
TIME x LANES ("columns"). A lane is one scan; lanes are numbered over all other dimensions. Where a
scan is one program's ("looped") the program goes from tile to tile and carries a state; where it is
cut among programs ("shared") they tell each other totals as ``scan`` describes.
"""

from __future__ import annotations

import functools
import linecache
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from . import scan, scan_columns, scan_forms, scan_logsumexp, scan_states
from .scan_program import Program

try:
    from triton.language.extra import libdevice
except ImportError:  # without a GPU's driver triton may have none
    libdevice = None

HELPERS = [
    "put",
    "get",
    "absent",
    "pause",
    "low_bits",
    "high_bits",
    "joined",
    "picked",
    "picked0",
    "picked1",
    "picked_run",
    "moved",
]
BITS = {"int1": 1, "int32": 1, "fp32": 1, "int64": 2, "fp64": 2}  # 32-bit words of a state
TYPES = scan_states.TYPES


@dataclass(frozen=True)
class Layout:
    """How tensors lie. ``axis``: that of the time in a tile. ``lane_dims``: how many numbers make
    a lane's. ``strides``: per tensor (inputs, then outputs) the kinds of its strides along the time
    and the lane dimensions, outermost first: 0, 1, or None for an argument. ``shared``: a scan is
    cut among programs. ``ascending``: a reversed scan's tile is in the order of memory.
    ``ahead``: a program loads a tile before it is done with the last one."""

    axis: int
    lane_dims: int
    strides: tuple[tuple[int | None, ...], ...]
    shared: bool
    ascending: bool
    ahead: bool

    @property
    def flat(self) -> bool:
        """Whether a tile is a piece of one lane, without an axis of lanes. What a program knows
        about its lane are scalars then, which have no layout: the compiler else converts, or
        computes twice, whole tiles for the sake of one of their elements."""
        return self.shared and self.axis == 1

    @property
    def along(self) -> int:
        """The axis of the time in a tile or window."""
        return 0 if self.flat else self.axis


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
    return [*names, *(["workspace", "call"] if layout.shared else []), *numbers]


def _combine(program: Program) -> str:
    leaves = f"{_leaves('a', program)}, {_leaves('b', program)}"
    return (
        f"@triton.jit\ndef combine({leaves}):\n{_indented(program.combine)}\n"
        f"    return {_leaves('r', program)}\n"
    )


def _scanned(program: Program, axis: int, reverse: bool) -> str:
    group = scan_states.group("s", program.states)
    leaves = _leaves("s", program)
    return f"{leaves} = tl.associative_scan({group}, {axis}, combine, reverse={reverse})"


def _last(program: Program, to: str, where: str, layout: Layout) -> str:
    """The state at the one position where ``where`` holds, bit for bit."""
    call = "picked" if layout.flat else f"picked{layout.axis}"
    return scan_states.picked(program.states, to, "s", call, where)


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


def _folded(program: Program, layout: Layout) -> str:
    """The published states at ``at``, a window's first ``count``, combined in this order, and
    the first of the tiles ``first`` whose words are still missing after ``patience`` looks
    (``k`` if none is). All words of a state are asked for at once."""
    count = words_of(program)
    words = [f"w{i}" for i in range(count)]
    missing = " | ".join(f"absent({w}, call)" for w in words)
    loads = [
        f"{w} = tl.load(words + {i} * plane + at, mask=mask, other=none, volatile=True)"
        for i, w in enumerate(words)
    ]
    again = [
        f"{w} = tl.where(missing, tl.load(words + {i} * plane + at, mask=missing, other=none, "
        f"volatile=True), {w})"
        for i, w in enumerate(words)
    ]
    look = [f"missing = {missing}", "wait = tl.max(missing.to(tl.int32))"]
    lines = [
        "mask = live & (j < count)",
        "none = tl.full(at.shape, 0, tl.int64) + (call << 32)",
        *loads,
        *look,
        "looks = tl.full([], 0, tl.int32)",
        "while (wait != 0) & (looks < patience):",
        _indented("\n".join([*again, *look, "wait = pause(wait)", "looks += 1"])),
        "late = k",
        "if wait != 0:",
        "    late = tl.min(tl.where(missing, first, k))",
    ]
    word = 0
    for i, kind in enumerate(program.states):
        low = f"get(w{word})"
        if BITS[kind] == 2:
            both = f"joined({low}, get(w{word + 1}))"
            lines.append(
                f"s{i} = {both}{'.to(tl.float64, bitcast=True)' if kind == 'fp64' else ''}"
            )
        else:
            cast = "tl.float32, bitcast=True" if kind == "fp32" else f"tl.{TYPES[kind]}"
            lines.append(f"s{i} = {low}.to({cast})")
        word += BITS[kind]
    lines.append(_scanned(program, layout.along, False))
    lines.append(_last(program, "s", "j == count - 1", layout))
    lines.append(f"return {_leaves('s', program)}, late")
    return (
        "@triton.jit\n"
        "def folded(words, plane, at, first, j, live, call, count, k, patience):\n"
        f"{_indented(chr(10).join(lines))}\n"
    )


def _lanes(layout: Layout) -> str:
    """What a program scans: its lanes, and the tile ``k`` if others scan some of them as well."""
    lane = "block * LANES + tl.arange(0, LANES)"
    lines = []
    if not layout.shared:
        lines.append("block = tl.program_id(0).to(tl.int64)")
    elif not layout.lane_dims:
        lines += ["block = number * 0", "k = number"]
    elif layout.axis:  # a row's tiles follow one another in memory
        lines += ["block = number // tiles", "k = number % tiles"]
    else:  # lanes do
        lines += ["block = number % blocks", "k = number // blocks"]
    if layout.flat:
        lines += ["lane = block", "live = lane < lanes"]
    elif layout.axis:
        lines += [f"lane = {lane}[:, None].to(tl.int64)", "live = lane < lanes"]
    else:
        lines.append(scan_columns.LANES)
    rest = "lane" if layout.axis else "across"
    for i in reversed(range(1, layout.lane_dims)):
        lines.append(f"i{i} = {rest} % n{i}")
        lines.append(f"r{i} = {rest} // n{i}")
        rest = f"r{i}"
    if layout.lane_dims:
        lines.append(f"i0 = {rest}")
    return "\n".join(lines)


def _place(program: Program, layout: Layout, k: str = "k") -> str:
    """Where tile ``k`` lies: ``at`` in memory, ``t`` along the scan. Where ``at`` rises by one, it
    is ``start + time``, and what is ``left`` of the tensor decides what is ``inside``."""
    lines = []
    if program.reverse and layout.ascending:
        lines += [f"start = length - ({k} + 1) * TIME", "at = start + time", "t = length - 1 - at"]
        lines += ["left = tl.maximum(-start, 0).to(tl.int32)", "whole = left == 0"]
    else:
        lines += [f"start = {k} * TIME", "t = start + time"]
        lines.append("at = length - 1 - t" if program.reverse else "at = t")
        lines += ["left = tl.minimum(length - start, TIME).to(tl.int32)", "whole = left == TIME"]
    return "\n".join([*lines, f"inside = {_live(layout)} & {_there(program, layout)}"])


def _live(layout: Layout) -> str:
    return "live" if layout.axis else "here"


def _there(program: Program, layout: Layout) -> str:
    return "(time >= left)" if program.reverse and layout.ascending else "(time < left)"


def _pointers(name: str, layout: Layout, kinds: tuple[int | None, ...], at: int = 0) -> str:
    """To the elements of a tensor, ``at`` positions further in memory. Neighbours of a piece of one
    lane lie at 32-bit distances from its beginning: a register instead of two, or none."""
    parts = ["at", *(f"i{j}" for j in range(layout.lane_dims))]
    shift = f" {'+' if at > 0 else '-'} {abs(at)}" if at else ""
    if layout.flat and kinds[0] == 1 and layout.ascending:
        parts[0] = f"(start{shift})" if at else "start"
        return f"({name}_ptr + ({_offset(name, kinds, parts)})) + time"
    parts[0] = f"(at{shift})" if at else "at"
    return f"{name}_ptr + ({_offset(name, kinds, parts)})"


def _either(whole: str, part: str) -> str:
    """What is done with a tile in its middle needs no masks, which would take registers from the
    loads to the stores."""
    return f"if whole:\n{_indented(whole)}\nelse:\n{_indented(part)}"


def _loads(program: Program, layout: Layout, to: str = "x", kept: str = "") -> str:
    """``kept``: how long the L2 is to keep what is read, if not as long as usual."""
    if layout.flat:
        return _either(_loaded(program, layout, to, True), _loaded(program, layout, to, False))
    return _loaded(program, layout, to, False, kept)


def _loaded(program: Program, layout: Layout, to: str, whole: bool, kept: str = "") -> str:
    lines = []
    for i, (given, kinds) in enumerate(zip(program.inputs, layout.strides, strict=False)):
        free = whole or all(kind == 0 for kind in kinds[1:])
        limits = [] if free else [_live(layout)]
        if kinds[0] != 0 and not whole:
            limits.append(_there(program, layout))
        ahead = given.shift if program.reverse else -given.shift  # in memory
        if ahead:
            limits.append(f"(at < length - {ahead})" if ahead > 0 else f"(at >= {-ahead})")
        masked = f", {' & '.join(limits)}, other={given.fill}" if limits else ""
        pointers = _pointers(f"x{i}", layout, kinds, ahead)
        policy = f', eviction_policy="{kept}"' if kept and not free and kinds[0] != 0 else ""
        lines.append(f"{to}{i} = tl.load({pointers}{masked}{policy})")
    return "\n".join(lines)


def _states(program: Program) -> str:
    """From a tile's inputs to its states."""
    lines = [program.produce]
    for i, kind in enumerate(program.states):
        lines.append(f"s{i} = tl.broadcast_to(s{i}.to(tl.{TYPES[kind]}), inside.shape)")
    return "\n".join(lines)


def _tile(program: Program, layout: Layout) -> str:
    """From a tile's states to their scan, of the tile alone."""
    return _scanned(program, layout.along, program.reverse and layout.ascending)


def _taken(program: Program) -> str:
    return "\n".join(f"x{i} = next{i}" for i in range(len(program.inputs)))


def _after(program: Program, before: str, there: str) -> str:
    """Put the state ``before`` in front of those of the tile where ``there`` holds."""
    leaves = _leaves("q", program)
    lines = [f"{leaves} = combine({_leaves(before, program)}, {_leaves('s', program)})"]
    for i in range(len(program.states)):
        lines.append(f"s{i} = tl.where({there}, q{i}, s{i})")
    return "\n".join(lines)


def _stores(program: Program, layout: Layout, kept: str = "") -> str:
    policy = f', eviction_policy="{kept}"' if kept else ""
    first = len(program.inputs)
    stores = []
    for i in range(len(program.outputs)):
        pointers = _pointers(f"y{i}", layout, layout.strides[first + i])
        stores.append(f"tl.store({pointers}, y{i}, inside{policy})")
    part = "\n".join(stores)
    if layout.flat:
        part = _either(part.replace(", inside)", ")"), part)
    return f"{program.consume}\n{part}"


def _end(program: Program, layout: Layout) -> str:
    """Where a tile's last state is."""
    return "time == 0" if program.reverse and layout.ascending else "time == TIME - 1"


def _by_masses(program: Program, layout: Layout) -> bool:
    """Whether tiles are scanned as plain sums where that is good enough."""
    return scan_logsumexp.applies(program) and (
        layout.flat or bool(layout.axis and not layout.shared)
    )


def _masses(program: Program, layout: Layout) -> str:
    backwards = program.reverse and layout.ascending
    first = "time == TIME - 1" if backwards else "time == 0"
    return scan_logsumexp.masses(
        first, _end(program, layout), backwards, layout.along, not layout.flat
    )


def _plain(program: Program) -> Program:
    """What is done with results that are numbers already."""
    return replace(program, consume=program.consume.replace(scan_forms.LOGARITHM, "s0"))


def _lane_names(program: Program, layout: Layout) -> list[str]:
    """What one has to know of a lane to reach its elements."""
    names = _names(program)
    numbers = [n for n in arguments(program, layout) if n not in (*names, "workspace", "call")]
    lane = ["lane", "live", *(f"i{i}" for i in range(layout.lane_dims))]
    return [*(f"{n}_ptr" for n in names), *numbers, *lane]


def _exact(program: Program, layout: Layout) -> str:
    """Scan tile ``k`` without another thought, piece by piece, so that few registers are taken
    where that is rare; the state ``c`` lies in front of it if ``there`` is one. Gives the last."""
    c = _leaves("c", program)
    time = "" if layout.flat else "[None, :]"
    body = [
        _place(program, layout, "turn"),
        _loads(program, layout),
        _states(program),
        _tile(program, layout),
        _after(program, "c", "there | (turn > begin)"),
        _last(program, "c", _end(program, layout), layout),
        "if STORE:",
        _indented(_stores(program, layout)),
    ]
    return f"""@triton.jit
def exact(
    {", ".join(_lane_names(program, layout))}, k, there, {c}, STORE: tl.constexpr,
    TILE: tl.constexpr, TIME: tl.constexpr
):
    time = tl.arange(0, TIME){time}
    begin = k * (TILE // TIME)
    for turn in range(begin, begin + TILE // TIME):
{_indented(chr(10).join(body), 8)}
    return {c}
"""


def _exactly(
    program: Program, layout: Layout, to: str, k: str, there: str, store: bool, state: str = ""
) -> str:
    given = ", ".join(_lane_names(program, layout))
    state = state or _leaves(to, program)
    return f"{_leaves(to, program)} = exact({given}, {k}, {there}, {state}, {store}, TIME, PIECE)"


def _looped(program: Program, layout: Layout) -> str:
    """One program scans its lanes from tile to tile. With ``ahead`` the next tile is loaded while
    one is scanned."""
    zeros = "\n".join(
        f"c{i} = tl.zeros(lane.shape, tl.{TYPES[kind]})" for i, kind in enumerate(program.states)
    )
    tiles = "range(0, tl.cdiv(length, TIME))"
    loads = [_place(program, layout, "(zero + k)"), _loads(program, layout)]
    first: list[str] = []
    if layout.ahead:
        first = [_place(program, layout, "zero"), _loads(program, layout, "next")]
        loads = [
            _taken(program),
            _place(program, layout, "(zero + k + 1)"),
            _loads(program, layout, "next"),
            _place(program, layout, "(zero + k)"),
        ]
    scanned = [
        _tile(program, layout),
        _after(program, "c", "k > 0"),
        _last(program, "c", _end(program, layout), layout),
    ]
    scanned.append(_stores(program, layout))
    if not layout.axis:
        zeros = scan_columns.zeros(program.states)
        scanned = [scan_columns.looped(program.states, "k > 0"), _stores(program, layout)]
        tiles = "tl.range(0, tl.cdiv(length, TIME), num_stages=STAGES)"
    if _by_masses(program, layout):
        scanned = [
            _masses(program, layout),
            'c0 = tl.where(k > 0, c0, float("-inf"))',
            scan_logsumexp.carried("c", True),
            "if plain:",
            _indented(scan_logsumexp.RESULTS + "\n" + _stores(_plain(program), layout)),
            _indented(scan_logsumexp.total("c", "peak", "sum")),
            "else:",
            "    " + _exactly(program, layout, "c", "k", "k > 0", True),
        ]
    body = [*loads, _states(program), *scanned]
    parts = [_lanes(layout), "zero = tl.full([], 0, tl.int64)", zeros, *first, f"for k in {tiles}:"]
    return "\n".join([*parts, _indented("\n".join(body))])


def _bases(layout: Layout) -> str:
    """Where the words of a lane's tiles, groups and groups of groups begin, and the place of tile
    ``k`` among them."""
    at = ("lane * tiles", "lane * groups", "lane * supers") if layout.axis else ["lane"] * 3
    return f"""tiles = tl.cdiv(length, size)
groups = tl.cdiv(tiles, GROUP)
supers = tl.cdiv(groups, GROUP)
group = k // GROUP
base0 = {at[0]}
base1 = lanes * tiles + {at[1]}
base2 = lanes * (tiles + groups) + {at[2]}
plane = lanes * (tiles + groups + supers)"""


_GIVEN = "words, lane, lanes, length, size, live, j, call, k, patience"


def _announced(program: Program, layout: Layout) -> str:
    """Publish the total of tile ``k``; and those of the group and the group of groups that end with
    it, if what they are made of is there."""
    e, u, g = (_leaves(prefix, program) for prefix in "eug")
    step = "" if layout.axis else " * lanes"
    window = "j, live, call"
    body = f"""above = group // GROUP
own = k % GROUP
near = group % GROUP
if own == GROUP - 1:
    tile = group * GROUP + j
    {u}, late = folded(words, plane, base0 + tile{step}, tile, {window}, own, k, patience)
    if late == k:
        {g} = combine({u}, {e})
        publish(words, plane, base1 + group{step}, live, call, {g})
        if near == GROUP - 1:
            tile = above * GROUP + j
            {u}, late = folded(
                words, plane, base1 + tile{step}, tile * GROUP, {window}, near, k, patience
            )
            if late == k:
                {g} = combine({u}, {g})
                publish(words, plane, base2 + above{step}, live, call, {g})"""
    announced = f"publish(words, plane, base0 + k{step}, live, call, {e})"
    return (
        f"@triton.jit\ndef announced({_GIVEN}, {e}, GROUP: tl.constexpr):\n"
        f"{_indented(_bases(layout))}\n{_indented(announced)}\n\n\n"
        f"@triton.jit\ndef closed({_GIVEN}, {e}, GROUP: tl.constexpr):\n"
        f"{_indented(_bases(layout))}\n{_indented(body)}\n"
    )


def _before(program: Program, layout: Layout) -> str:
    """The state in front of tile ``k`` (any, if it is the first): of groups of groups, then groups,
    then tiles in front of it, in one window. Of the last DEPTH groups it is the tiles, and of the
    last group of groups the groups: of what has just been computed totals are not waited for. And
    the first tile that was waited for in vain, else ``k``."""
    p, u, g = (_leaves(prefix, program) for prefix in "pug")
    e = _leaves("e", program)
    step = "" if layout.axis else " * lanes"
    window = "j, live, call"
    count = range(len(program.states))
    joined = "\n".join(f"p{i} = tl.where((w > 0) | (k > 0), g{i}, u{i})" for i in count)
    body = f"""group0 = tl.maximum(group - DEPTH, 0)
super0 = tl.maximum(group0 // GROUP - 1, 0)
far = super0 % SUPERS
near = far + group0 - super0 * GROUP
own = near + k - group0 * GROUP
late = k
{chr(10).join(f"p{i} = e{i}" for i in count)}
if k > 0:
    tile0 = group0 * GROUP + j - near
    tile1 = super0 * GROUP + j - far
    tile2 = super0 - far + j
    is2 = j < far
    is1 = j < near
    {p}, late = folded(
        words,
        plane,
        tl.where(
            is2, base2 + tile2{step}, tl.where(is1, base1 + tile1{step}, base0 + tile0{step})
        ),
        tl.where(is2, tile2 * (GROUP * GROUP), tl.where(is1, tile1 * GROUP, tile0)),
        {window},
        own,
        k,
        patience,
    )
for w in range(0, super0 // SUPERS):
    tile2 = (super0 // SUPERS - 1 - w) * SUPERS + j
    {u}, later = folded(
        words, plane, base2 + tile2{step}, tile2 * (GROUP * GROUP), {window}, SUPERS, k, patience
    )
    late = tl.minimum(late, later)
    {g} = combine({u}, {p})
{_indented(joined)}
return {p}, late"""
    return (
        f"@triton.jit\ndef before({_GIVEN}, {e}, GROUP: tl.constexpr, DEPTH: tl.constexpr, "
        f"SUPERS: tl.constexpr):\n{_indented(_bases(layout))}\n{_indented(body)}\n"
    )


def _total(program: Program, layout: Layout, k: str) -> str:
    """From the states of tile ``k`` to their scan and the last of it, ``e``."""
    if not _by_masses(program, layout):
        end = _last(program, "e", _end(program, layout), layout)
        return f"{_tile(program, layout)}\n{end}"
    nothing = ", ".join(f"tl.zeros([], tl.{TYPES[kind]})" for kind in program.states)
    return "\n".join(
        [
            _masses(program, layout),
            scan_logsumexp.total("e", "top", "mass_of_all"),
            "if not good:",
            "    " + _exactly(program, layout, "e", k, "False", False, nothing),
        ]
    )


def _results(program: Program, layout: Layout) -> str:
    """From the scan of tile ``k`` and the state ``p`` in front of it to what is stored."""
    if not _by_masses(program, layout):
        return f"{_after(program, 'p', 'k > 0')}\n{_stores(program, layout)}"
    return "\n".join(
        [
            'p0 = tl.where(k > 0, p0, float("-inf"))',
            scan_logsumexp.carried("p", False),
            "if plain:",
            _indented(scan_logsumexp.RESULTS + "\n" + _stores(_plain(program), layout)),
            "else:",
            "    " + _exactly(program, layout, "p", "k", "k > 0", True),
        ]
    )


def _shared_head(parts: str, layout: Layout) -> str:
    window = "" if layout.axis else "[:, None]"
    return f"""size = tl.full([], TIME * {parts}, tl.int64)
tiles = tl.cdiv(length, size)
blocks = tl.cdiv(lanes, LANES)
words = workspace + 0
call = tl.full([], call, tl.int64)
j = tl.arange(0, WINDOW){window}.to(tl.int64)
number = tl.program_id(0).to(tl.int64)"""


def _shared(program: Program, layout: Layout) -> str:
    """Tiles of one scan are many programs'. One that waits in vain goes through the tiles from the
    first that is late to its own, announces of each what its program would have, and begins again
    with its own: code of its own, so that what rarely runs takes no registers of what always does.
    """
    e, p = _leaves("e", program), _leaves("p", program)

    def given(k: str) -> str:
        return f"words, lane, lanes, length, size, live, j, call, {k}, PATIENCE, {e}, GROUP"

    def scanned(k: str) -> str:
        loaded = [_place(program, layout, k), _loads(program, layout), _states(program)]
        return "\n".join([*loaded, _total(program, layout, k)])

    results = _results(program, layout)
    parts = [
        _shared_head("1", layout),
        _lanes(layout),
        scanned("k"),
        f"announced({given('k')})",
        f"{p}, late = before({given('k')}, DEPTH, SUPERS)",
        "if late == k:",
        _indented(results),
        f"    closed({given('k')})",
        "else:",
        "    while late < k:",
        "        for turn in range(late, k + 1):",
        _indented(scanned("turn"), 12),
        f"            announced({given('turn')})",
        f"            closed({given('turn')})",
        f"        {p}, late = before({given('k')}, DEPTH, SUPERS)",
        _indented(scanned("k")),
        _indented(results),
    ]
    return "\n".join(parts)


def _shared_columns(program: Program, layout: Layout) -> str:
    """The same of chunks of PARTS tiles of columns. A chunk is read twice, the second time out of
    L2 and knowing what precedes it: no register holds it while others are waited for, and it may be
    larger than they are."""
    e, p = _leaves("e", program), _leaves("p", program)

    def given(k: str) -> str:
        return f"words, lane, lanes, length, size, live, j, call, {k}, PATIENCE, {e}, GROUP"

    def tiles(k: str, kept: str, *what: str) -> str:
        place = _place(program, layout, f"({k} * PARTS + part)")
        body = [place, _loads(program, layout, "x", kept), _states(program), *what]
        return "for part in range(0, PARTS):\n" + _indented("\n".join(body))

    def total(k: str) -> str:
        states = program.states
        sums = tiles(k, "evict_last", scan_columns.carried(states, "part > 0"))
        return "\n".join(
            [
                scan_columns.zeros(states),
                sums,
                scan_columns.chunk(states),
                f"announced({given(k)})",
                f"closed({given(k)})",
            ]
        )

    scan = scan_columns.looped(program.states, "own + part > 0")
    parts = [
        _shared_head("PARTS", layout),
        _lanes(layout),
        "own = k",
        total("own"),
        f"{p}, late = before({given('own')}, DEPTH, SUPERS)",
        "while late < own:",
        "    for turn in range(late, own + 1):",
        _indented(total("turn"), 8),
        f"    {p}, late = before({given('own')}, DEPTH, SUPERS)",
        scan_columns.begun(program.states),
        tiles("own", "evict_first", scan, _stores(program, layout, "evict_first")),
    ]
    return "\n".join(parts)


@functools.cache
def text(program: Program, layout: Layout) -> str:
    """The functions of the kernel; the entry is the last one."""
    pointers = [*_names(program)]
    numbers = [n for n in arguments(program, layout) if n not in pointers]
    given = ", ".join([f"{p}_ptr" for p in pointers] + numbers)
    constants = ", ".join(f"{c}: tl.constexpr" for c in constants_of(program, layout))
    shared = _shared if layout.axis else _shared_columns
    body = (shared if layout.shared else _looped)(program, layout)
    time = f"time = tl.arange(0, TIME){'' if layout.flat else '[None, :]'}"
    head = time if layout.axis else scan_columns.TIME
    parts = [_combine(program)]
    if _by_masses(program, layout):
        parts.append(_exact(program, layout))
    if layout.shared:
        parts += [_publish(program), _folded(program, layout)]
        parts += [_announced(program, layout), _before(program, layout)]
    name = f"scan_{'rows' if layout.axis else 'columns'}"
    # a kernel for all calls, whatever their numbers
    entry = '@triton.jit(do_not_specialize=["call"])' if layout.shared else "@triton.jit"
    parts.append(
        f"{entry}\ndef {name}({given}, {constants}):\n{_indented(head)}\n{_indented(body)}\n"
    )
    return "\n\n".join(parts)


def constants_of(program: Program, layout: Layout) -> list[str]:
    """Names of the entry's compile-time arguments."""
    shared = ["GROUP", "DEPTH", "SUPERS", "WINDOW", "PATIENCE"] if layout.shared else []
    columns = ["PIECES", "RUN", "PARTS" if layout.shared else "STAGES"]
    pieces = [] if layout.axis else columns
    masses = ["PIECE"] if _by_masses(program, layout) else []
    return ["LANES", "TIME", *pieces, *shared, *masses]


@functools.cache
def kernel(program: Program, layout: Layout) -> Any:
    """The entry, ready to be launched or given to a graph."""
    source = text(program, layout)
    name = f"<inductor_ext scan {kernel.cache_info().currsize}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": "inductor_ext_scan"}
    for helper in HELPERS:
        scope[helper] = getattr(scan, helper)
    exec(compile(source, name, "exec"), scope)
    return scope[f"scan_{'rows' if layout.axis else 'columns'}"]
