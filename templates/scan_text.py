"""The text of one scan's kernel, written around the texts of a ``scan_program.Program``.

A tile is LANES x TIME, the time last where that is how tensors lie in memory ("rows"), or
TIME x LANES ("columns"). A lane is one scan; lanes are numbered over all other dimensions. Where a
scan is one program's ("looped") the program goes from tile to tile and carries a state; where it is
cut among programs ("shared") they tell each other totals as ``scan`` describes.
"""

from __future__ import annotations

import functools
import linecache
from typing import Any

import triton
import triton.language as tl

from . import scan, scan_columns, scan_forms, scan_logsumexp, scan_stripes, scan_tile
from .scan_parts import TYPES as TYPES
from .scan_parts import Layout as Layout
from .scan_parts import indented, last_of, leaves
from .scan_parts import words_of as words_of
from .scan_program import Program
from .scan_tile import arguments as arguments
from .scan_totals import announced, before, folded, publish

try:
    from triton.language.extra import libdevice
except ImportError:  # without a GPU's driver triton may have none
    libdevice = None

HELPERS = [
    "fetch",
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


def _combine(program: Program) -> str:
    both = f"{leaves('a', program)}, {leaves('b', program)}"
    return (
        f"@triton.jit\ndef combine({both}):\n{indented(program.combine)}\n"
        f"    return {leaves('r', program)}\n"
    )


def _looped(program: Program, layout: Layout) -> str:
    """One program scans its lanes from tile to tile. With ``ahead`` the next tile is loaded while
    one is scanned."""
    zeros = "\n".join(
        f"c{i} = tl.zeros(lane.shape, tl.{TYPES[kind]})" for i, kind in enumerate(program.states)
    )
    tiles = "range(0, tl.cdiv(length, TIME))"
    loads = [scan_tile.place(program, layout, "(zero + k)"), scan_tile.loads(program, layout)]
    first: list[str] = []
    if layout.ahead:
        first = [scan_tile.place(program, layout, "zero"), scan_tile.loads(program, layout, "next")]
        loads = [
            scan_tile.taken(program),
            scan_tile.place(program, layout, "(zero + k + 1)"),
            scan_tile.loads(program, layout, "next"),
            scan_tile.place(program, layout, "(zero + k)"),
        ]
    scanned = [
        scan_tile.scanned(program, layout),
        scan_tile.after(program, "c", "k > 0"),
        last_of(program, "c", scan_tile.end(program, layout), layout),
    ]
    scanned.append(scan_tile.stores(program, layout))
    if not layout.axis:
        zeros = scan_columns.zeros(program.states)
        scanned = [scan_columns.looped(program.states, "k > 0"), scan_tile.stores(program, layout)]
        tiles = "tl.range(0, tl.cdiv(length, TIME), num_stages=STAGES)"
    if scan_tile.by_masses(program, layout):
        scanned = [
            *scan_tile.masses(program, layout),
            'c0 = tl.where(k > 0, c0, float("-inf"))',
            scan_logsumexp.carried("c", True),
            "if plain:",
            indented(
                scan_logsumexp.RESULTS + "\n" + scan_tile.stores(scan_tile.plain(program), layout)
            ),
            indented(scan_logsumexp.total("c", "peak", "sum")),
            "else:",
            "    " + scan_tile.exactly(program, layout, "c", "k", "k > 0", True),
        ]
    body = [*loads, scan_tile.states(program), *scanned]
    parts = [
        scan_tile.lanes(layout),
        "zero = tl.full([], 0, tl.int64)",
        zeros,
        *first,
        f"for k in {tiles}:",
    ]
    return "\n".join([*parts, indented("\n".join(body))])


def _total(program: Program, layout: Layout, k: str) -> tuple[str, str]:
    """From the states of tile ``k`` to what they come to, ``e``, and from there to their scan:
    others wait for the first. It is the scan's last state where order matters."""
    if not scan_tile.by_masses(program, layout):
        if scan_forms.commutes(program.states, program.combine):
            return f"e0 = tl.reduce(s0, {layout.along}, combine)", scan_tile.scanned(
                program, layout
            )
        end = last_of(program, "e", scan_tile.end(program, layout), layout)
        return f"{scan_tile.scanned(program, layout)}\n{end}", ""
    nothing = ", ".join(f"tl.zeros([], tl.{TYPES[kind]})" for kind in program.states)
    sums, scan = scan_tile.masses(program, layout)
    total = [
        sums,
        scan_logsumexp.total("e", "top", "mass_of_all"),
        "if not good:",
        "    " + scan_tile.exactly(program, layout, "e", k, "False", False, nothing),
    ]
    return "\n".join(total), scan


def _results(program: Program, layout: Layout) -> str:
    """From the scan of tile ``k`` and the state ``p`` in front of it to what is stored."""
    if not scan_tile.by_masses(program, layout):
        return f"{scan_tile.after(program, 'p', 'k > 0')}\n{scan_tile.stores(program, layout)}"
    return "\n".join(
        [
            'p0 = tl.where(k > 0, p0, float("-inf"))',
            scan_logsumexp.carried("p", False),
            "if plain:",
            indented(
                scan_logsumexp.RESULTS + "\n" + scan_tile.stores(scan_tile.plain(program), layout)
            ),
            "else:",
            "    " + scan_tile.exactly(program, layout, "p", "k", "k > 0", True),
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

    def total(k: str, fetch: str = "") -> str:
        loaded = [
            scan_tile.place(program, layout, k),
            fetch,
            scan_tile.loads(program, layout),
            scan_tile.states(program),
        ]
        return "\n".join([*loaded, _total(program, layout, k)[0]])

    fetch = ""
    if layout.ahead:
        names = [
            *(f"x{i}_ptr" for i in range(len(program.inputs))),
            *scan_tile.numbers(program, layout),
        ]
        fetch = f"fetched(whole.to(tl.int32), {', '.join(names)}, number, tiles, FETCH, TIME)"
        fetch = f"whole = {fetch} != 0"
    scan, results = _total(program, layout, "k")[1], _results(program, layout)
    parts = [
        _shared_head("1", layout),
        scan_tile.lanes(layout),
        total("k", fetch),
        f"announced({given('k')})",
        scan,
        f"{p}, late = before({given('k')}, DEPTH, SUPERS)",
        "if late == k:",
        indented(results),
        f"    closed({given('k')})",
        "else:",
        "    while late < k:",
        "        for turn in range(late, k + 1):",
        indented(total("turn"), 12),
        f"            announced({given('turn')})",
        f"            closed({given('turn')})",
        f"        {p}, late = before({given('k')}, DEPTH, SUPERS)",
        indented(total("k")),
        indented(scan),
        indented(results),
    ]
    return "\n".join(parts)


def _shared_columns(program: Program, layout: Layout) -> str:
    """The same of chunks of PARTS tiles of columns. A chunk is read twice, the second time out of
    L2 and knowing what precedes it: no register holds it while others are waited for, and it may be
    larger than they are. Few lanes' chunks are single tiles of single positions, and are held.

    Chunks are large, so that a program can afford a ticket: whoever is waited for has begun, and
    none computes another's total, which takes twice the registers of all else."""
    states, e, p = program.states, leaves("e", program), leaves("p", program)
    commutes = scan_forms.commutes(states, program.combine)
    given = f"words, lane, lanes, length, size, live, j, call, k, 0, {e}, GROUP"

    def loaded(time: str, kept: str = "") -> list[str]:
        return [
            f"time = {time}",
            scan_tile.place(program, layout),
            scan_tile.loads(program, layout, "x", kept),
            scan_tile.states(program),
        ]

    def tiles(kept: str, *what: str) -> str:
        body = "\n".join([*loaded("step + part * RUN", kept), *what])
        return "for part in range(0, PARTS):\n" + indented(body)

    def known(*meanwhile: str) -> list[str]:
        return [
            f"announced({given})",
            # at once, since others wait for groups; not if nobody looks at them
            "if tiles > GROUP * (DEPTH + 1):",
            f"    closed({given})",
            *meanwhile,
            f"{p}, late = before({given}, DEPTH, SUPERS)",
        ]

    total, scan = scan_columns.single(states, commutes)
    held = [
        *loaded("step"),
        total,
        *known(scan),
        scan_columns.behind(states),
        scan_tile.stores(program, layout),
    ]
    stores = scan_tile.stores(program, layout, "evict_first")
    read_again = [
        scan_columns.zeros(states),
        tiles("evict_last", scan_columns.summed(states, commutes)),
        scan_columns.chunk(states),
        *known(),
        scan_columns.begun(states),
        tiles("evict_first", scan_columns.continued(states), stores),
    ]
    parts = [
        _shared_head("PARTS", layout),
        "words += 2",
        'tl.atomic_max(workspace, call << 32, sem="relaxed")',
        'number = tl.atomic_add(workspace, 1, sem="relaxed") & 0xFFFFFFFF',
        scan_tile.lanes(layout),
        "if RUN == 1:",
        indented("\n".join(held)),
        "else:",
        indented("\n".join(read_again)),
    ]
    return "\n".join(parts)


@functools.cache
def text(program: Program, layout: Layout) -> str:
    """The functions of the kernel; the entry is the last one."""
    pointers = [*scan_tile.names_of(program)]
    numbers = [n for n in arguments(program, layout) if n not in pointers]
    given = ", ".join([f"{p}_ptr" for p in pointers] + numbers)
    constants = ", ".join(f"{c}: tl.constexpr" for c in constants_of(program, layout))
    shared = _shared if layout.axis else _shared_columns
    shared = scan_stripes.body if layout.stripes else shared
    body = (shared if layout.shared else _looped)(program, layout)
    time = f"time = tl.arange(0, TIME){'' if layout.flat else '[None, :]'}"
    head = scan_columns.STEP if layout.shared else scan_columns.TIME
    head = time if layout.axis else head
    parts = [_combine(program)]
    if scan_tile.by_masses(program, layout):
        parts.append(scan_tile.exact(program, layout))
    if layout.shared and layout.ahead and not layout.stripes:
        parts.append(scan_tile.fetched(program, layout))
    if layout.stripes:
        parts += [publish(program), *scan_stripes.functions(program, layout)]
    elif layout.shared:
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
    if layout.stripes:
        return scan_stripes.constants_of(program, layout)
    shared = ["GROUP", "DEPTH", "SUPERS", "WINDOW"] if layout.shared else []
    shared += ["PATIENCE"] if layout.flat else []
    columns = ["PIECES", "RUN", "PARTS" if layout.shared else "STAGES"]
    pieces = [] if layout.axis else columns
    shared += ["FETCH"] if layout.shared and layout.ahead else []
    masses = ["PIECE"] if scan_tile.by_masses(program, layout) else []
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
