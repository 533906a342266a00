"""A tile of columns: its texts, and why it is cut once more.

A tile is PIECES x RUN x LANES; piece p has the tile's positions p RUN to (p + 1) RUN - 1. The
compiler lays neighbouring lanes over threads, then pieces, and the positions of a piece over the
registers of one thread. So a piece is scanned by one thread, without a shuffle, and only the totals
of pieces, one in RUN positions, meet. A reversed scan runs through the same rows the other way.

What a program carries from tile to tile is the state in front of piece 0, which is where the total
of the last piece comes to lie when totals move on by one piece.
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


def _totals(states: tuple[str, ...]) -> list[str]:
    """Scan the totals: ``d``; ``f`` is what they are one piece further, the last one at piece 0."""
    d = scan_states.group("d", states)
    lines = [f"{scan_states.leaves('d', states)} = tl.associative_scan({d}, 0, combine)"]
    for i, kind in enumerate(states):
        if kind == "int1":
            lines.append(f"f{i} = moved(d{i}.to(tl.int32), PIECES).to(tl.int1)")
        else:
            lines.append(f"f{i} = moved(d{i}, PIECES)")
    return lines


def _put(states: tuple[str, ...], there: str) -> list[str]:
    """Put the state ``f`` in front of those of each piece; in front of the first is something
    where ``there`` holds."""
    q, s = scan_states.leaves("q", states), scan_states.leaves("s", states)
    wide = ", ".join(f"f{i}[:, None, :]" for i in range(len(states)))
    lines = [f"{q} = combine({wide}, {s})", f"there = (({there}) | (piece > 0))[:, None]"]
    return lines + [f"s{i} = tl.where(there, q{i}, s{i})" for i in range(len(states))]


def carried(states: tuple[str, ...], there: str) -> str:
    """From a tile's states ``s`` to the scan of each piece, its totals ``d`` behind the carried
    ``c``, which there is where ``there`` holds, and the next ``c``."""
    q, c, d = (scan_states.leaves(prefix, states) for prefix in "qcd")
    lines = [*_scanned(states), f"{q} = combine({c}, {d})", f"first = (piece == 0) & ({there})"]
    lines += [f"d{i} = tl.where(first, q{i}, d{i})" for i in range(len(states))]
    lines += _totals(states)
    for i in range(len(states)):
        lines += [f"q{i} = f{i}", f"f{i} = tl.where(piece == 0, c{i}, f{i})", f"c{i} = q{i}"]
    return "\n".join(lines)


def looped(states: tuple[str, ...], there: str) -> str:
    """The same, and to the scan of the whole tile behind what is carried."""
    return "\n".join([carried(states, there), *_put(states, there)])


def chunk(states: tuple[str, ...]) -> str:
    """What is carried out of a chunk: ``e``."""
    return scan_states.picked(states, "e", "c", "picked0", "piece == 0")


def begun(states: tuple[str, ...]) -> str:
    """``c`` becomes ``p``, what is in front of the chunk."""
    return "\n".join(f"c{i} = tl.broadcast_to(p{i}, {CARRIED})" for i in range(len(states)))


def zeros(states: tuple[str, ...]) -> str:
    types = [scan_states.TYPES[kind] for kind in states]
    return "\n".join(f"c{i} = tl.zeros({CARRIED}, tl.{kind})" for i, kind in enumerate(types))


def total(states: tuple[str, ...]) -> str:
    """From a tile's states ``s`` to the scan of each piece, and to the tile's total ``e``."""
    last = scan_states.picked(states, "e", "d", "picked0", "piece == PIECES - 1")
    return "\n".join([*_scanned(states), *_totals(states), last])


def after(states: tuple[str, ...]) -> str:
    """Put ``p``, the state in front of the tile where there is any, in front of its pieces."""
    q, p, f = (scan_states.leaves(prefix, states) for prefix in "qpf")
    lines = [f"{q} = combine({p}, {f})"]
    for i in range(len(states)):
        lines.append(f"q{i} = tl.where(piece == 0, p{i}, q{i})")
        lines.append(f"f{i} = tl.where(k > 0, q{i}, f{i})")
    return "\n".join(lines + _put(states, "k > 0"))
