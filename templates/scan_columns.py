"""A tile of columns: its texts, and why it is cut once more.

A tile is PIECES x RUN x LANES; piece p has the tile's positions p RUN to (p + 1) RUN - 1. The
compiler lays neighbouring lanes over threads, then pieces, and the positions of a piece over the
registers of one thread. So a piece is scanned by one thread, without a shuffle, and only the totals
of pieces, one in RUN positions, meet. A reversed scan runs through the same rows the other way.

What a program carries from tile to tile is the state in front of piece 0, which is where the total
of the last piece comes to lie when totals move on by one piece. Where lanes are so few that threads
have to read on along the time for whole sectors, a piece is one position, and totals are results.

A chunk of a scan that is cut has PARTS tiles. Its pieces are PARTS RUN positions long, and a tile
is RUN positions of each of them: threads go through their pieces without meeting, first for the
totals of pieces, then from what precedes each.
"""

from __future__ import annotations

from . import scan_states

TIME = """piece = tl.arange(0, PIECES)[:, None]
run = tl.arange(0, RUN)[None, :, None]
time = piece[:, :, None] * RUN + run"""
# where a scan is cut: the first tile's, counted from the chunk's beginning
STEP = """piece = tl.arange(0, PIECES)[:, None]
run = tl.arange(0, RUN)[None, :, None]
step = piece[:, :, None] * (RUN * PARTS) + run"""
LANES = """lane = (block * LANES + tl.arange(0, LANES)).to(tl.int64)[None, :]
live = lane < lanes
across = lane[None]
here = live[None]"""
CARRIED = "[PIECES, LANES]"  # the shape of what a program carries


def _scanned(states: tuple[str, ...]) -> list[str]:
    """Scan each piece: ``s``; the totals of pieces: ``d``."""
    s = scan_states.group("s", states)
    return [
        f"{scan_states.leaves('s', states)} = tl.associative_scan({s}, 1, combine)",
        scan_states.picked(states, "d", "s", "picked_run", "run == RUN - 1"),
    ]


def _moved(states: tuple[str, ...], of: str = "d") -> list[str]:
    """``f``: the totals ``of`` pieces one piece further, the last one at piece 0."""
    lines = []
    for i, kind in enumerate(states):
        if kind == "int1":
            lines.append(f"f{i} = moved({of}{i}.to(tl.int32), PIECES).to(tl.int1)")
        else:
            lines.append(f"f{i} = moved({of}{i}, PIECES)")
    return lines


def carried(states: tuple[str, ...], there: str) -> str:
    """From a tile's states ``s`` to the scan of each piece, to the scan ``d`` of their totals
    behind the carried ``c``, which is one where ``there`` holds, and to the next ``c``."""
    q, c, d = (scan_states.leaves(prefix, states) for prefix in "qcd")
    count = range(len(states))
    moved = _moved(states)
    for i in count:
        moved += [f"q{i} = f{i}", f"f{i} = tl.where(piece == 0, c{i}, f{i})", f"c{i} = q{i}"]
    last = scan_states.picked(states, "c", "d", "picked0", "piece == PIECES - 1").splitlines()
    last += [f"c{i} = tl.broadcast_to(c{i}, {CARRIED})" for i in count]
    lines = [
        *_scanned(states),
        f"{q} = combine({c}, {d})",
        f"first = (piece == 0) & ({there})",
        *(f"d{i} = tl.where(first, q{i}, d{i})" for i in count),
        f"{d} = tl.associative_scan({scan_states.group('d', states)}, 0, combine)",
        *_branch(last, moved),
    ]
    return "\n".join(lines)


def _branch(single: list[str], several: list[str]) -> list[str]:
    """Statements where a piece is a single position, and where it is several."""
    return ["if RUN == 1:", *(f"    {x}" for x in single), "else:", *(f"    {x}" for x in several)]


def looped(states: tuple[str, ...], there: str) -> str:
    """The same, and to the scan of the whole tile behind what is carried."""
    q, s = scan_states.leaves("q", states), scan_states.leaves("s", states)
    wide = ", ".join(f"f{i}[:, None, :]" for i in range(len(states)))
    put = [f"{q} = combine({wide}, {s})", f"there = (({there}) | (piece > 0))[:, None]"]
    put += [f"s{i} = tl.where(there, q{i}, s{i})" for i in range(len(states))]
    single = [f"s{i} = d{i}[:, None, :]" for i in range(len(states))]
    return "\n".join([carried(states, there), *_branch(single, put)])


def summed(states: tuple[str, ...], commutes: bool) -> str:
    """From a tile's states to the totals ``c`` of its pieces, behind those of the parts before."""
    d, c, q = (scan_states.leaves(prefix, states) for prefix in "dcq")
    lines = ["d0 = tl.reduce(s0, 1, combine)"] if commutes else _scanned(states)
    lines.append(f"{q} = combine({c}, {d})")
    lines += [f"c{i} = tl.where(part > 0, q{i}, d{i})" for i in range(len(states))]
    return "\n".join(lines)


def chunk(states: tuple[str, ...]) -> str:
    """From the totals ``c`` of pieces to their scan, and to its last state, ``e``."""
    c = scan_states.leaves("c", states)
    lines = [
        f"{c} = tl.associative_scan({scan_states.group('c', states)}, 0, combine)",
        scan_states.picked(states, "e", "c", "picked0", "piece == PIECES - 1"),
    ]
    return "\n".join(lines)


def begun(states: tuple[str, ...]) -> str:
    """``c`` becomes what is in front of each piece: ``p`` in front of the chunk ``k``."""
    u, p, f = (scan_states.leaves(prefix, states) for prefix in "upf")
    lines = _moved(states, "c")
    lines.append(f"{u} = combine({p}, {f})")
    for i in range(len(states)):
        lines.append(f"u{i} = tl.where(k > 0, u{i}, f{i})")
        lines.append(f"c{i} = tl.where(piece == 0, p{i}, u{i})")
    return "\n".join(lines)


def continued(states: tuple[str, ...]) -> str:
    """From a tile's states to their scan behind ``c``, and to the next ``c``."""
    q, s = scan_states.leaves("q", states), scan_states.leaves("s", states)
    wide = ", ".join(f"c{i}[:, None, :]" for i in range(len(states)))
    lines = [
        f"{s} = tl.associative_scan({scan_states.group('s', states)}, 1, combine)",
        f"{q} = combine({wide}, {s})",
        "there = ((k + part > 0) | (piece > 0))[:, None]",
        *(f"s{i} = tl.where(there, q{i}, s{i})" for i in range(len(states))),
        scan_states.picked(states, "c", "s", "picked_run", "run == RUN - 1"),
    ]
    return "\n".join(lines)


def single(states: tuple[str, ...], commutes: bool) -> tuple[str, str]:
    """Where a piece is one position: from a tile's states to their total ``e``, and to their scan
    ``d``, of which the total is a part if order matters."""
    d = scan_states.leaves("d", states)
    flat = scan_states.picked(states, "d", "s", "picked_run", "run == 0")
    scan = f"{d} = tl.associative_scan({scan_states.group('d', states)}, 0, combine)"
    if commutes:
        return f"{flat}\ne0 = tl.reduce(d0, 0, combine, keep_dims=True)", scan
    last = scan_states.picked(states, "e", "d", "picked0", "piece == PIECES - 1")
    return "\n".join([flat, scan, last]), ""


def behind(states: tuple[str, ...]) -> str:
    """``s``: the scan ``d`` behind ``p``."""
    q, p, d = (scan_states.leaves(prefix, states) for prefix in "qpd")
    lines = [f"{q} = combine({p}, {d})"]
    lines += [f"s{i} = tl.where(k > 0, q{i}, d{i})[:, None, :]" for i in range(len(states))]
    return "\n".join(lines)


def zeros(states: tuple[str, ...]) -> str:
    types = [scan_states.TYPES[kind] for kind in states]
    return "\n".join(f"c{i} = tl.zeros({CARRIED}, tl.{kind})" for i, kind in enumerate(types))
