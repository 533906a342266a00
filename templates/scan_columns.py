"""A tile of columns: its texts, and why it is cut once more.

A tile is PIECES x RUN x LANES; piece p has the tile's positions p RUN to (p + 1) RUN - 1. The
compiler lays neighbouring lanes over threads, then pieces, and the positions of a piece over the
registers of one thread. So a piece is scanned by one thread, without a shuffle, and only the totals
of pieces, one in RUN positions, meet. A reversed scan runs through the same rows the other way.

What a program carries from tile to tile is the state in front of piece 0, which is where the total
of the last piece comes to lie when totals move on by one piece. Where lanes are so few that threads
have to read on along the time for whole sectors, a piece is one position, and totals are results.
"""

from __future__ import annotations

from . import scan_states

TIME = """piece = tl.arange(0, PIECES)[:, None]
run = tl.arange(0, RUN)[None, :, None]
time = piece[:, :, None] * RUN + run"""
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


def _moved(states: tuple[str, ...]) -> list[str]:
    """``f``: the totals ``d`` one piece further, the last one at piece 0."""
    lines = []
    for i, kind in enumerate(states):
        if kind == "int1":
            lines.append(f"f{i} = moved(d{i}.to(tl.int32), PIECES).to(tl.int1)")
        else:
            lines.append(f"f{i} = moved(d{i}, PIECES)")
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


def chunk(states: tuple[str, ...]) -> str:
    """What is carried out of a chunk: ``e``."""
    return scan_states.picked(states, "e", "c", "picked0", "piece == 0")


def begun(states: tuple[str, ...]) -> str:
    """``c`` becomes ``p``, what is in front of the chunk."""
    return "\n".join(f"c{i} = tl.broadcast_to(p{i}, {CARRIED})" for i in range(len(states)))


def zeros(states: tuple[str, ...]) -> str:
    types = [scan_states.TYPES[kind] for kind in states]
    return "\n".join(f"c{i} = tl.zeros({CARRIED}, tl.{kind})" for i, kind in enumerate(types))
