"""The text of what programs that share a scan tell each other, as ``scan`` describes it."""

from __future__ import annotations

from .scan_parts import BITS, TYPES, Layout, indented, last_of, leaves, scanned_by, words_of
from .scan_program import Program


def publish(program: Program) -> str:
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
    body = indented("\n".join(lines))
    return (
        f"@triton.jit\ndef publish(words, plane, at, live, call, {leaves('e', program)}):\n{body}\n"
    )


def states_of(program: Program) -> str:
    """From words ``w`` to states ``s``."""
    lines, word = [], 0
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
    return "\n".join(lines)


def folded(program: Program, layout: Layout) -> str:
    """The published states at ``at``, a window's first ``count``, combined in this order, and
    the first of the tiles ``first`` whose words are still missing after ``patience`` looks
    (``k`` if none is; columns wait for all). All words of a state are asked for at once."""
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
        "while (wait != 0) & (looks < patience):" if layout.axis else "while wait != 0:",
        indented("\n".join([*again, *look, "wait = pause(wait)", "looks += 1"])),
        "late = k",
    ]
    if layout.axis:
        lines += ["if wait != 0:", "    late = tl.min(tl.where(missing, first, k))"]
    lines.append(states_of(program))
    lines.append(scanned_by(program, layout.along, False))
    lines.append(last_of(program, "s", "j == count - 1", layout))
    lines.append(f"return {leaves('s', program)}, late")
    return (
        "@triton.jit\n"
        "def folded(words, plane, at, first, j, live, call, count, k, patience):\n"
        f"{indented(chr(10).join(lines))}\n"
    )


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


def announced(program: Program, layout: Layout) -> str:
    """Publish the total of tile ``k``; and those of the group and the group of groups that end with
    it, if what they are made of is there."""
    e, u, g = (leaves(prefix, program) for prefix in "eug")
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
        f"{indented(_bases(layout))}\n{indented(announced)}\n\n\n"
        f"@triton.jit\ndef closed({_GIVEN}, {e}, GROUP: tl.constexpr):\n"
        f"{indented(_bases(layout))}\n{indented(body)}\n"
    )


def before(program: Program, layout: Layout) -> str:
    """The state in front of tile ``k`` (any, if it is the first): of groups of groups, then groups,
    then tiles in front of it, in one window. Of the last DEPTH groups it is the tiles, and of the
    last group of groups the groups: of what has just been computed totals are not waited for. And
    the first tile that was waited for in vain, else ``k``."""
    p, u, g = (leaves(prefix, program) for prefix in "pug")
    e = leaves("e", program)
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
{indented(joined)}
return {p}, late"""
    return (
        f"@triton.jit\ndef before({_GIVEN}, {e}, GROUP: tl.constexpr, DEPTH: tl.constexpr, "
        f"SUPERS: tl.constexpr):\n{indented(_bases(layout))}\n{indented(body)}\n"
    )
