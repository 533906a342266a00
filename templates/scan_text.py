"""The text of one scan's kernel, written around the texts of a ``scan_program.Program``.

A tile is LANES x TIME, the time last where that is how tensors lie in memory ("rows"), or
TIME x LANES ("columns"). A lane is one scan; lanes are numbered over all other dimensions. Where a
scan is one program's ("looped") the program goes from tile to tile and carries a state; where it is
cut among programs ("shared") they tell each other totals as ``scan`` describes.
"""

from __future__ import annotations

import functools
import linecache
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from . import scan, scan_columns, scan_forms, scan_logsumexp
from .scan_parts import TYPES as TYPES
from .scan_parts import Layout as Layout
from .scan_parts import indented, last_of, leaves, scanned_by
from .scan_parts import words_of as words_of
from .scan_program import Program
from .scan_totals import announced, before, folded, publish

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
    both = f"{leaves('a', program)}, {leaves('b', program)}"
    return (
        f"@triton.jit\ndef combine({both}):\n{indented(program.combine)}\n"
        f"    return {leaves('r', program)}\n"
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
    return f"if whole:\n{indented(whole)}\nelse:\n{indented(part)}"


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
    return scanned_by(program, layout.along, program.reverse and layout.ascending)


def _taken(program: Program) -> str:
    return "\n".join(f"x{i} = next{i}" for i in range(len(program.inputs)))


def _after(program: Program, before: str, there: str) -> str:
    """Put the state ``before`` in front of those of the tile where ``there`` holds."""
    lines = [f"{leaves('q', program)} = combine({leaves(before, program)}, {leaves('s', program)})"]
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
    c = leaves("c", program)
    time = "" if layout.flat else "[None, :]"
    body = [
        _place(program, layout, "turn"),
        _loads(program, layout),
        _states(program),
        _tile(program, layout),
        _after(program, "c", "there | (turn > begin)"),
        last_of(program, "c", _end(program, layout), layout),
        "if STORE:",
        indented(_stores(program, layout)),
    ]
    return f"""@triton.jit
def exact(
    {", ".join(_lane_names(program, layout))}, k, there, {c}, STORE: tl.constexpr,
    TILE: tl.constexpr, TIME: tl.constexpr
):
    time = tl.arange(0, TIME){time}
    begin = k * (TILE // TIME)
    for turn in range(begin, begin + TILE // TIME):
{indented(chr(10).join(body), 8)}
    return {c}
"""


def _exactly(
    program: Program, layout: Layout, to: str, k: str, there: str, store: bool, state: str = ""
) -> str:
    given = ", ".join(_lane_names(program, layout))
    state = state or leaves(to, program)
    return f"{leaves(to, program)} = exact({given}, {k}, {there}, {state}, {store}, TIME, PIECE)"


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
        last_of(program, "c", _end(program, layout), layout),
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
            indented(scan_logsumexp.RESULTS + "\n" + _stores(_plain(program), layout)),
            indented(scan_logsumexp.total("c", "peak", "sum")),
            "else:",
            "    " + _exactly(program, layout, "c", "k", "k > 0", True),
        ]
    body = [*loads, _states(program), *scanned]
    parts = [_lanes(layout), "zero = tl.full([], 0, tl.int64)", zeros, *first, f"for k in {tiles}:"]
    return "\n".join([*parts, indented("\n".join(body))])


def _total(program: Program, layout: Layout, k: str) -> str:
    """From the states of tile ``k`` to their scan and the last of it, ``e``."""
    if not _by_masses(program, layout):
        end = last_of(program, "e", _end(program, layout), layout)
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
            indented(scan_logsumexp.RESULTS + "\n" + _stores(_plain(program), layout)),
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
    e, p = leaves("e", program), leaves("p", program)

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
        indented(results),
        f"    closed({given('k')})",
        "else:",
        "    while late < k:",
        "        for turn in range(late, k + 1):",
        indented(scanned("turn"), 12),
        f"            announced({given('turn')})",
        f"            closed({given('turn')})",
        f"        {p}, late = before({given('k')}, DEPTH, SUPERS)",
        indented(scanned("k")),
        indented(results),
    ]
    return "\n".join(parts)


def _shared_columns(program: Program, layout: Layout) -> str:
    """The same of chunks of PARTS tiles of columns. A chunk is read twice, the second time out of
    L2 and knowing what precedes it: no register holds it while others are waited for, and it may be
    larger than they are."""
    e, p = leaves("e", program), leaves("p", program)

    def given(k: str) -> str:
        return f"words, lane, lanes, length, size, live, j, call, {k}, PATIENCE, {e}, GROUP"

    def tiles(k: str, kept: str, *what: str) -> str:
        place = _place(program, layout, f"({k} * PARTS + part)")
        body = [place, _loads(program, layout, "x", kept), _states(program), *what]
        return "for part in range(0, PARTS):\n" + indented("\n".join(body))

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
        indented(total("turn"), 8),
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
        parts += [publish(program), folded(program, layout)]
        parts += [announced(program, layout), before(program, layout)]
    name = f"scan_{'rows' if layout.axis else 'columns'}"
    # a kernel for all calls, whatever their numbers
    entry = '@triton.jit(do_not_specialize=["call"])' if layout.shared else "@triton.jit"
    parts.append(
        f"{entry}\ndef {name}({given}, {constants}):\n{indented(head)}\n{indented(body)}\n"
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
