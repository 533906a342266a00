"""The text of a long scan by programs that stay: program p has the tiles p, p + PROGRAMS, ...

There are as many programs as a card runs at a time; several scans have the same share of them each.
A program asks for a tile's inputs some turns early, for the L2, and copies them into shared memory
at the end of the turn before it reads them; a tile's total is published at least a turn before
others look for it.

What precedes tile k is what preceded tile k - PROGRAMS, which its program remembers, and the totals
from there to k, one window, in an order that depends on nothing but positions.

A total that is late, because its program is not running yet, is computed by whoever has looked
PATIENCE times, and soon from then on. Each begins with another of those that are missing, so
that they are shared out among who is there; whoever computes one, its bits are the same.

All tiles in the loop are whole, so that nothing of them is masked; what is left over at the end of
the scan is its program's, behind the loop, and has no total that others would look for.
"""

from __future__ import annotations

from . import scan_forms, scan_logsumexp, scan_states, scan_tile
from .scan_parts import TYPES, Layout, indented, last_of, leaves, scanned_by, words_of
from .scan_program import Program
from .scan_totals import states_of

_SHORT = 4  # looks of who has waited in vain once

_NEUTRAL = {"r0 = a0 + b0": "0", "r0 = a0 * b0": "1"}  # else a state may count twice, or order does


def applies(program: Program, strides: tuple[tuple[int | None, ...], ...]) -> bool:
    """Whether all tensors are rows without gaps, and read where they are scanned."""
    return all(kinds[0] in (0, 1) for kinds in strides) and not any(
        given.shift for given in program.inputs
    )


def _totals(program: Program) -> str | None:
    """What combines states to a total in any order; None where there is no such thing."""
    return scan_forms.in_any_order(program.states, program.combine)


def functions(program: Program, layout: Layout) -> list[str]:
    """What the entry calls."""
    whole = _totals(program)
    parts = []
    if whole is not None:
        both = f"{leaves('a', program)}, {leaves('b', program)}"
        parts.append(
            f"@triton.jit\ndef total_of({both}):\n{indented(whole)}\n    return "
            f"{leaves('r', program)}\n"
        )
    if layout.ahead:
        parts.append(_fetched(program, layout))
    return [*parts, _before(program, layout, True), _before(program, layout, False)]


def _total(program: Program, layout: Layout, k: str) -> str:
    """From the states of tile ``k`` to what they come to, ``e``."""
    if scan_tile.by_masses(program, layout):
        sums, _ = scan_tile.masses(program, layout)
        nothing = ", ".join(f"tl.zeros([], tl.{TYPES[kind]})" for kind in program.states)
        exactly = scan_tile.exactly(program, layout, "e", k, "False", False, nothing)
        total = scan_logsumexp.total("e", "top", "mass_of_all")
        return f"{sums}\n{total}\nif not good:\n    {exactly}"
    if _totals(program) is not None:
        group = scan_states.group("s", program.states)
        return f"{leaves('e', program)} = tl.reduce({group}, 0, total_of)"
    end = last_of(program, "e", scan_tile.end(program, layout), layout)
    return f"{scan_tile.scanned(program, layout)}\n{end}"


def _kept(program: Program, layout: Layout) -> list[str]:
    """What is known of a tile from its total on."""
    names = [f"x{i}" for i in range(len(program.inputs))]
    if scan_tile.by_masses(program, layout):
        return [*names, "top", "begins", "mass", "mass_of_all"]
    scanned = _totals(program) is None
    return [*names, *(f"s{i}" for i in range(len(program.states)) if scanned)]


def _results(program: Program, layout: Layout, k: str, whole: bool) -> str:
    """From there and the state ``c`` in front of tile ``k`` to what is stored."""
    if scan_tile.by_masses(program, layout):
        plain = scan_tile.plain(program)
        return "\n".join(
            [
                scan_tile.masses(program, layout)[1],
                f'p0 = tl.where({k} > 0, c0, float("-inf"))',
                "p1 = c1",
                scan_logsumexp.carried("p", False),
                "if plain:",
                indented(f"{scan_logsumexp.RESULTS}\n{scan_tile.stored(plain, layout, whole)}"),
                "else:",
                "    " + scan_tile.exactly(program, layout, "p", k, f"{k} > 0", True),
            ]
        )
    scan = ""
    if _totals(program) is not None:
        scan = f"{scan_tile.states(program)}\n{scan_tile.scanned(program, layout)}"
    after = scan_tile.after(program, "c", f"{k} > 0")
    after = f"{after}\n{_handed_on(program)}"
    return f"{scan}\n{after}\n{scan_tile.stored(program, layout, whole)}"


def _fetched(program: Program, layout: Layout) -> str:
    """Ask for what tile ``k`` reads, if there is one. Gives ``some`` back."""
    names = [*(f"x{i}_ptr" for i in range(len(program.inputs))), *_numbers(layout)]
    parts = ["start", *_numbers(layout)]
    body = ["start = " + ("length - (k + 1) * TIME" if program.reverse else "k * TIME")]
    for i, (read, kinds) in enumerate(zip(program.inputs, layout.strides, strict=False)):
        if kinds[0] == 1:
            address = f"(x{i}_ptr + ({scan_tile.offset(f'x{i}', kinds, parts)})).to(tl.int64) & -16"
            size = f"tl.where(k < tiles, TIME * {read.dtype.itemsize}, 0)"
            body.append(f"some = fetch(some, {address}, {size})")
    return "\n".join(
        [
            "@triton.jit",
            f"def fetched(some, {', '.join([*names, *scan_tile.numbers(program, layout)])}, k, "
            "tiles, TIME: tl.constexpr):",
            indented("\n".join(body)),
            "    return some\n",
        ]
    )


def _numbers(layout: Layout) -> list[str]:
    return [f"i{i}" for i in range(layout.lane_dims)]


def _handed_on(program: Program) -> str:
    """Scanned states go to the threads that store them, where results are wider than what is read
    and each thread stores fewer of them: the compiler else scans in the order of the stores, with
    more exchanges, or in both."""
    if scan_forms.has_positions(program.states, program.combine):
        return "s1 = tl.gather(s1, time, 0)"
    read = min(given.dtype.itemsize for given in program.inputs)
    if len(program.states) == 1 and all(y.itemsize > read for y in program.outputs):
        return "s0 = tl.gather(s0, time, 0)"
    return ""


def _held(program: Program, layout: Layout) -> list[str]:
    """What is known of two tiles, by name."""
    return [
        f"kept{turn}_{name}"
        for turn in range(layout.stripes + 1)
        for name in _kept(program, layout)
    ]


def _held_again(program: Program, layout: Layout) -> list[str]:
    lines = []
    for turn in range(layout.stripes + 1):
        k = f"(k + {turn} * PROGRAMS)"
        lines += [
            _place(program, layout, f"(zero + {k})"),
            scan_tile.loaded(program, layout, "x", True, f"({k} < tiles)"),
            scan_tile.states(program),
            _total(program, layout, f"(zero + {k})"),
            *(f"kept{turn}_{name} = {name}" for name in _kept(program, layout)),
        ]
    return lines


def _place(program: Program, layout: Layout, k: str) -> str:
    return scan_tile.place(program, layout, k) + "\ninside = time >= 0"


def _before(program: Program, layout: Layout, holds: bool) -> str:
    """The state that the tiles from k - PROGRAMS, or the first, to k - 1 come to. ``holds``:
    whoever asks holds tile k and those of which it has told the total since. Who computes another's
    total reads them again, so that no register has to be kept for what rarely happens."""
    given = ", ".join(scan_tile.lane_names(program, layout))
    held = _held(program, layout) if holds else []
    words = [f"w{i}" for i in range(words_of(program))]
    look = [f"missing = {' | '.join(f'absent({w}, call)' for w in words)}"]
    look.append("wait = tl.max(missing.to(tl.int32))")
    again = [
        f"{w} = tl.where(missing, tl.load(words + {i} * plane + tile, mask=missing, other=0, "
        f"volatile=True), {w})"
        for i, w in enumerate(words)
    ] + look
    late = [
        _place(program, layout, "(zero + late)"),
        scan_tile.loaded(program, layout, "x", True),
        scan_tile.states(program),
        _total(program, layout, "(zero + late)"),
    ]
    s = scan_states.group("s", program.states)
    if _totals(program) is None:
        fold = [scanned_by(program, 0, False), last_of(program, "s", "j == count - 1", layout)]
    else:
        neutral = _NEUTRAL.get(program.combine)
        fold = [] if neutral is None else [f"s0 = tl.where(j < count, s0, {neutral})"]
        fold += [f"{leaves('s', program)} = tl.reduce({s}, 0, total_of)"]
    body = [
        "zero = tl.full([], 0, tl.int64)",
        "time = tl.arange(0, TIME)",
        *look,
        "wait = tl.where(k > 0, wait, 0)",  # the first tile has nothing in front of it
        "if wait != 0:",
        "    looks = tl.full([], 0, tl.int32)",
        "    while (wait != 0) & (looks < patience):",
        indented("\n".join(["wait = pause(wait)", *again, "looks += 1"]), 8),
        "    if wait != 0:",
        "        while wait != 0:",
        indented(
            "\n".join(
                [
                    f"patience = tl.minimum(patience, {_SHORT})",
                    "order = tl.cumsum(missing.to(tl.int32), 0)",
                    "mine = missing & (order == k % tl.max(order) + 1)",
                    "late = tl.max(tl.where(mine, tile, 0))",
                    *late,
                    f"publish(words, plane, late, live, call, {leaves('e', program)})",
                    *again,
                ]
            ),
            12,
        ),
        *(indented(text, 8) for text in _held_again(program, layout) if holds),
        states_of(program),
        *fold,
        f"return {', '.join([leaves('s', program), 'patience', *held])}",
    ]
    constants = ", ".join(f"{c}: tl.constexpr" for c in _inner(program, layout))
    name = "before" if holds else "before_the_rest"
    return (
        f"@triton.jit\ndef {name}({', '.join([given, *held])}, words, plane, k, j, tile, count, "
        f"{', '.join(words)}, call, patience, tiles, {constants}):\n"
        f"{indented(chr(10).join(body))}\n"
    )


def _inner(program: Program, layout: Layout) -> list[str]:
    masses = ["PIECE"] if scan_tile.by_masses(program, layout) else []
    return ["TIME", "PROGRAMS", *masses]


def constants_of(program: Program, layout: Layout) -> list[str]:
    fetch = ["FETCH"] if layout.ahead else []
    return [*_inner(program, layout), "WINDOW", "PATIENCE", "STAGES", *fetch]


def body(program: Program, layout: Layout) -> str:
    e, u, q = leaves("e", program), leaves("u", program), leaves("q", program)
    c = leaves("c", program)
    kept, count = _kept(program, layout), range(len(program.states))
    last = layout.stripes
    words = [f"w{i}" for i in range(words_of(program))]

    def front(k: str, holds: bool) -> str:
        """``c`` moves on to what is in front of tile ``k``."""
        names = scan_tile.lane_names(program, layout)
        held = _held(program, layout) if holds else []
        looked = ["j", "tile", "count", *words, "call", "patience", "tiles"]
        inner = ["words", "plane", k, *looked, *_inner(program, layout)]
        name = "before" if holds else "before_the_rest"
        found = ", ".join([u, "patience", *held])
        lines = [f"{found} = {name}({', '.join([*names, *held, *inner])})"]
        lines.append(f"{q} = combine({c}, {u})")
        lines += [f"c{i} = tl.where({k} > PROGRAMS, q{i}, u{i})" for i in count]
        return "\n".join(lines)

    def looked(k: str) -> str:
        """Ask for the totals in front of tile ``k``, in a branch lest the compiler ask for them
        where it asks for inputs."""
        lines = [
            f"count = tl.minimum({k}, PROGRAMS)",
            f"tile = tl.maximum({k} - count + tl.minimum(j, count - 1), 0)",
            *(f"{w} = tl.zeros([WINDOW], tl.int64)" for w in words),
            f"if {k} > 0:",
            *(
                f"    {w} = tl.load(words + {i} * plane + tile, volatile=True)"
                for i, w in enumerate(words)
            ),
        ]
        return "\n".join(lines)

    def total(k: str) -> str:
        place = _place(program, layout, f"(zero + {k})")
        loads = scan_tile.loaded(program, layout, "x", True, f"({k} < tiles)")
        total = _total(program, layout, f"(zero + {k})")
        shown = f"publish(words, plane, {k}, {k} < tiles, call, {e})"
        return "\n".join([place, loads, scan_tile.states(program), total, shown])

    def asked(k: str) -> list[str]:
        if not layout.ahead:
            return []
        names = [*(f"x{i}_ptr" for i in range(len(program.inputs))), *_numbers(layout)]
        names += scan_tile.numbers(program, layout)
        return [f"patience = fetched(patience, {', '.join(names)}, zero + {k}, tiles, TIME)"]

    turn = [
        f"next = k + {last} * PROGRAMS",
        *asked("k + FETCH * PROGRAMS"),
        looked("k"),
        total("next"),
        *(f"kept{last}_{name} = {name}" for name in kept),
        front("k", True),
        *(f"{name} = kept0_{name}" for name in kept),
        _place(program, layout, "(zero + k)"),
        _results(program, layout, "(zero + k)", True),
        *(f"kept{t}_{name} = kept{t + 1}_{name}" for t in range(last) for name in kept),
    ]
    rest = [
        looked("tiles"),
        front("tiles", False),
        scan_tile.place(program, layout, "(zero + tiles)"),
        scan_tile.loaded(program, layout, "x", False),
        scan_tile.states(program),
        _total(program, layout, "(zero + tiles)"),
        _results(program, layout, "(zero + tiles)", False),
    ]
    begin = []
    if layout.ahead:
        begin.append(f"for far in tl.static_range({last}, FETCH):")
        begin += [f"    {line}" for line in asked("number + far * PROGRAMS")]
    for t in range(last):
        begin += [total(f"(number + {t} * PROGRAMS)"), *(f"kept{t}_{n} = {n}" for n in kept)]
    parts = [
        "zero = tl.full([], 0, tl.int64)",
        "block = (tl.program_id(0) // PROGRAMS).to(tl.int64)",
        scan_tile.lanes(layout),
        "call = tl.full([], call, tl.int64)",
        "j = tl.arange(0, WINDOW)",
        "patience = tl.full([], PATIENCE, tl.int32)",
        "number = tl.program_id(0) % PROGRAMS",
        "tiles = ((zero + length) // TIME).to(tl.int32)",
        "words = workspace + lane * tiles",
        "plane = lanes * tiles",
        *(f"c{i} = tl.zeros([], tl.{TYPES[kind]})" for i, kind in enumerate(program.states)),
        *begin,
        "for k in tl.range(number, tiles, PROGRAMS, num_stages=STAGES):",
        indented("\n".join(turn)),
        "if (length % TIME != 0) & (tiles % PROGRAMS == number):",
        indented("\n".join(rest)),
    ]
    return "\n".join(parts)
