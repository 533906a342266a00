"""What a program does with one tile: where it lies, its loads, its scan, its stores, as texts."""

from __future__ import annotations

from dataclasses import replace

from . import scan_columns, scan_forms, scan_logsumexp
from .scan_parts import TYPES, Layout, indented, last_of, leaves, scanned_by
from .scan_program import Program


def names_of(program: Program) -> list[str]:
    return [f"x{i}" for i in range(len(program.inputs))] + [
        f"y{i}" for i in range(len(program.outputs))
    ]


def offset(name: str, kinds: tuple[int | None, ...], parts: list[str]) -> str:
    """The sum of index times stride over ``parts`` (names of indices)."""
    terms = []
    for kind, part, suffix in zip(kinds, parts, ["t", *range(len(parts) - 1)], strict=True):
        if kind != 0:
            terms.append(part if kind == 1 else f"{part} * {name}_{suffix}")
    return " + ".join(terms) or "0"


def arguments(program: Program, layout: Layout) -> list[str]:
    """Names of the entry's arguments: tensors, the workspace of a shared scan, numbers."""
    names = names_of(program)
    numbers = ["lanes", "length", *(f"n{i}" for i in range(1, layout.lane_dims))]
    for name, kinds in zip(names, layout.strides, strict=True):
        for kind, suffix in zip(kinds, ["t", *range(layout.lane_dims)], strict=True):
            if kind is None:
                numbers.append(f"{name}_{suffix}")
    return [*names, *(["workspace", "call"] if layout.shared else []), *numbers]


def lanes(layout: Layout) -> str:
    """What a program scans: its lanes, and the tile ``k`` if others scan some of them as well."""
    lane = "block * LANES + tl.arange(0, LANES)"
    lines = []
    if layout.stripes:
        pass  # the program knows
    elif not layout.shared:
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


def place(program: Program, layout: Layout, k: str = "k") -> str:
    """Where tile ``k`` lies: ``at`` in memory, ``t`` along the scan. Where ``at`` rises by one, it
    is ``start + time``, and what is ``left`` of the tensor decides what is ``inside``. Where
    columns are cut it is chunk ``k``, of ``size`` positions."""
    lines = []
    size = "size" if layout.shared and not layout.axis else "TIME"
    if program.reverse and layout.ascending:
        lines += [f"start = length - ({k} + 1) * TIME", "at = start + time", "t = length - 1 - at"]
        lines += ["left = tl.maximum(-start, 0).to(tl.int32)", "whole = left == 0"]
    else:
        lines += [f"start = {k} * {size}", "t = start + time"]
        lines.append("at = length - 1 - t" if program.reverse else "at = t")
        left = f"tl.minimum(length - start, {size}).to(tl.int32)"
        lines += [f"left = {left}", f"whole = left == {size}"]
    return "\n".join([*lines, f"inside = {live(layout)} & {there(program, layout)}"])


def fetched(program: Program, layout: Layout) -> str:
    """Ask for what the tile ``FETCH`` numbers further reads. Gives ``some`` back."""
    given = [*(f"x{i}_ptr" for i in range(len(program.inputs))), *numbers(program, layout)]
    first = "length - (k + 1) * TIME" if program.reverse else "k * TIME"
    body = [
        "number = number + FETCH",
        lanes(layout),
        f"first = {first}",
        "start = tl.maximum(first, 0)",
        "count = tl.where(live, tl.minimum(first + TIME, length) - start, 0)",
    ]
    parts = ["start", *(f"i{j}" for j in range(layout.lane_dims))]
    for i, (read, kinds) in enumerate(zip(program.inputs, layout.strides, strict=False)):
        if kinds[0] == 1:
            address = f"(x{i}_ptr + ({offset(f'x{i}', kinds, parts)})).to(tl.int64) & -16"
            size = f"((count * {read.dtype.itemsize}) & -16).to(tl.int32)"
            body.append(f"some = fetch(some, {address}, {size})")
    return f"""@triton.jit
def fetched(some, {", ".join(given)}, number, tiles, FETCH: tl.constexpr, TIME: tl.constexpr):
{indented(chr(10).join(body))}
    return some
"""


def live(layout: Layout) -> str:
    return "live" if layout.axis else "here"


def there(program: Program, layout: Layout) -> str:
    return "(time >= left)" if program.reverse and layout.ascending else "(time < left)"


def pointers(name: str, layout: Layout, kinds: tuple[int | None, ...], at: int = 0) -> str:
    """To the elements of a tensor, ``at`` positions further in memory. Neighbours of a piece of one
    lane lie at 32-bit distances from its beginning: a register instead of two, or none."""
    parts = ["at", *(f"i{j}" for j in range(layout.lane_dims))]
    shift = f" {'+' if at > 0 else '-'} {abs(at)}" if at else ""
    if layout.flat and kinds[0] == 1 and layout.ascending:
        parts[0] = f"(start{shift})" if at else "start"
        return f"({name}_ptr + ({offset(name, kinds, parts)})) + time"
    parts[0] = f"(at{shift})" if at else "at"
    return f"{name}_ptr + ({offset(name, kinds, parts)})"


def _either(whole: str, part: str) -> str:
    """What is done with a tile in its middle needs no masks, which would take registers from the
    loads to the stores."""
    return f"if whole:\n{indented(whole)}\nelse:\n{indented(part)}"


def loads(program: Program, layout: Layout, to: str = "x", kept: str = "") -> str:
    """``kept``: how long the L2 is to keep what is read, if not as long as usual."""
    if layout.flat:
        return _either(loaded(program, layout, to, True), loaded(program, layout, to, False))
    return loaded(program, layout, to, False, "", kept)


def loaded(
    program: Program, layout: Layout, to: str, whole: bool, there_is: str = "", kept: str = ""
) -> str:
    """The same of a tile that is known to be ``whole``, or not to be; if ``there_is`` one."""
    lines = []
    for i, (given, kinds) in enumerate(zip(program.inputs, layout.strides, strict=False)):
        free = whole or all(kind == 0 for kind in kinds[1:])
        limits = [there_is] if there_is else [] if free else [live(layout)]
        if kinds[0] != 0 and not whole:
            limits.append(there(program, layout))
        ahead = given.shift if program.reverse else -given.shift  # in memory
        if ahead:
            limits.append(f"(at < length - {ahead})" if ahead > 0 else f"(at >= {-ahead})")
        masked = f", {' & '.join(limits)}, other={given.fill}" if limits else ""
        where = pointers(f"x{i}", layout, kinds, ahead)
        policy = f', eviction_policy="{kept}"' if kept and not free and kinds[0] != 0 else ""
        lines.append(f"{to}{i} = tl.load({where}{masked}{policy})")
    return "\n".join(lines)


def states(program: Program) -> str:
    """From a tile's inputs to its states."""
    lines = [program.produce]
    for i, kind in enumerate(program.states):
        lines.append(f"s{i} = tl.broadcast_to(s{i}.to(tl.{TYPES[kind]}), inside.shape)")
    return "\n".join(lines)


def scanned(program: Program, layout: Layout) -> str:
    """From a tile's states to their scan, of the tile alone."""
    return scanned_by(program, layout.along, program.reverse and layout.ascending)


def taken(program: Program) -> str:
    return "\n".join(f"x{i} = next{i}" for i in range(len(program.inputs)))


def after(program: Program, before: str, there: str) -> str:
    """Put the state ``before`` in front of those of the tile where ``there`` holds."""
    lines = [f"{leaves('q', program)} = combine({leaves(before, program)}, {leaves('s', program)})"]
    for i in range(len(program.states)):
        lines.append(f"s{i} = tl.where({there}, q{i}, s{i})")
    return "\n".join(lines)


def stores(program: Program, layout: Layout, kept: str = "") -> str:
    part = _stores(program, layout, False, kept)
    if layout.flat:
        part = _either(_stores(program, layout, True), part)
    return f"{program.consume}\n{part}"


def stored(program: Program, layout: Layout, whole: bool) -> str:
    """The same of a tile that is known to be ``whole``, or not to be."""
    return f"{program.consume}\n{_stores(program, layout, whole)}"


def _stores(program: Program, layout: Layout, whole: bool, kept: str = "") -> str:
    policy = f', eviction_policy="{kept}"' if kept else ""
    mask = "" if whole else ", inside"
    stores = []
    for i, kinds in enumerate(layout.strides[len(program.inputs) :]):
        where = pointers(f"y{i}", layout, kinds)
        stores.append(f"tl.store({where}, y{i}{mask}{policy})")
    return "\n".join(stores)


def end(program: Program, layout: Layout) -> str:
    """Where a tile's last state is."""
    return "time == 0" if program.reverse and layout.ascending else "time == TIME - 1"


def by_masses(program: Program, layout: Layout) -> bool:
    """Whether tiles are scanned as plain sums where that is good enough."""
    return scan_logsumexp.applies(program) and (
        layout.flat or bool(layout.axis and not layout.shared)
    )


def masses(program: Program, layout: Layout) -> tuple[str, str]:
    """Up to the sum of all, and to the scan."""
    backwards = program.reverse and layout.ascending
    first = "time == TIME - 1" if backwards else "time == 0"
    sums = scan_logsumexp.masses(first, layout.along, not layout.flat)
    return sums, scan_logsumexp.scanned(backwards, layout.along)


def plain(program: Program) -> Program:
    """What is done with results that are numbers already."""
    return replace(program, consume=program.consume.replace(scan_forms.LOGARITHM, "s0"))


def numbers(program: Program, layout: Layout) -> list[str]:
    names = [*names_of(program), "workspace", "call"]
    return [n for n in arguments(program, layout) if n not in names]


def lane_names(program: Program, layout: Layout) -> list[str]:
    """What one has to know of a lane to reach its elements."""
    lane = ["lane", "live", *(f"i{i}" for i in range(layout.lane_dims))]
    return [*(f"{n}_ptr" for n in names_of(program)), *numbers(program, layout), *lane]


def exact(program: Program, layout: Layout) -> str:
    """Scan tile ``k`` without another thought, piece by piece, so that few registers are taken
    where that is rare; the state ``c`` lies in front of it if ``there`` is one. Gives the last."""
    c = leaves("c", program)
    time = "" if layout.flat else "[None, :]"
    body = [
        place(program, layout, "turn"),
        loads(program, layout),
        states(program),
        scanned(program, layout),
        after(program, "c", "there | (turn > begin)"),
        last_of(program, "c", end(program, layout), layout),
        "if STORE:",
        indented(stores(program, layout)),
    ]
    return f"""@triton.jit
def exact(
    {", ".join(lane_names(program, layout))}, k, there, {c}, STORE: tl.constexpr,
    TILE: tl.constexpr, TIME: tl.constexpr
):
    time = tl.arange(0, TIME){time}
    begin = k * (TILE // TIME)
    for turn in range(begin, begin + TILE // TIME):
{indented(chr(10).join(body), 8)}
    return {c}
"""


def exactly(
    program: Program, layout: Layout, to: str, k: str, there: str, store: bool, state: str = ""
) -> str:
    given = ", ".join(lane_names(program, layout))
    state = state or leaves(to, program)
    return f"{leaves(to, program)} = exact({given}, {k}, {there}, {state}, {store}, TIME, PIECE)"
