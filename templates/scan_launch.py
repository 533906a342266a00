"""How a ``scan_program.Program`` is laid out over a card's programs, and its launch.

Dimensions that every tensor walks alike are merged. A scan is one program's where there are lanes
enough to keep the card busy, else it is cut among programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch.library import wrap_triton

from . import scan, scan_forms, scan_logsumexp, scan_stripes, scan_text
from .scan_program import Program
from .tilings import tunable

Size = Any  # int or SymInt
ROWS = 128  # lanes that keep a card busy; with fewer, long scans are cut
SHORT = 4096  # positions up to which cutting a scan costs more than it brings
LONG = 1 << 26  # positions from which there are tiles enough for large ones
FEW = 8  # rows up to which programs that stay share them, from 2^24 positions of all rows on
STAY = 1 << 24
CHUNK, AHEAD = 1 << 16, 1 << 16  # bytes that a cut of columns reads, and that are loaded early
# Tiles of a row that are one group, and groups that are read tile by tile: 360 tiles, about what a
# card has under way. Twelve groups and 32 groups of groups are one window of 512 words.
GROUP, DEPTH = 40, 9
# Tiles ahead of which a piece of a row is asked for: one for each multiprocessor, or half of what
# runs at a time, so that it is there when its program begins and few others have come since.
FETCH = 132


@dataclass(frozen=True)
class Tiling:
    """``lanes`` x ``time`` positions per tile, by ``warps``; ``group`` tiles per published group,
    0 where a program scans all of its lanes. ``ascending``: a reversed scan of rows turns a tile
    around in registers, else in its addresses. ``ahead``: how many tiles who goes from one to the
    next loads early: one of rows, in registers; of columns in shared memory. ``depth``: groups
    whose tiles are read one by one, about what a card runs at a time. ``parts``: tiles of columns
    that have a total together, where a scan is cut. ``fetch``: how many tiles further a program of
    a piece of a row asks for inputs, for the L2.

    ``stripes``: programs for each multiprocessor that stay and share long rows, 0 where there is
    one for each tile; all of them have to be on the card at once, so that 8 warps, of which no
    program's registers keep a multiprocessor, are the most. Of them, ``stages``: buffers of a
    tile's inputs and one; ``early``: how many tiles of its own ahead a program tells a total;
    ``fetch``: how many ahead it asks for inputs."""

    lanes: int
    time: int
    warps: int
    group: int = 0
    ascending: bool = True
    ahead: int = 0
    depth: int = 0
    parts: int = 1
    fetch: int = 0
    stripes: int = 0
    stages: int = 2
    early: int = 1

    def __post_init__(self) -> None:
        if self.stripes * self.warps > 8:
            raise ValueError(
                f"expected at most 8 warps of programs that stay on a multiprocessor, not "
                f"{self.stripes * self.warps}"
            )


@dataclass(frozen=True)
class Launch:
    """One launch. ``arguments``: by the entry's names; "x0_ptr" and so on for tensors, as the slot
    of a tensor ("x0", "y0", "workspace"), numbers as they are. ``workspace``: int64 words, zero
    before the first launch, which later launches may use again one after the other, each with a
    ``call`` of its own from 1 to 2^31 - 1."""

    kernel: Any
    grid: tuple[Size, int, int]
    arguments: dict[str, Any]
    constants: dict[str, int]
    warps: int
    workspace: Size

    @property
    def configured(self) -> Any:
        """The kernel with its number of warps, for a graph."""
        return _configured(self.kernel, self.warps)


@functools.cache
def _configured(kernel: Any, warps: int) -> Any:
    return triton.autotune([triton.Config({}, num_warps=warps)], key=[])(kernel)


def _is(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal, without asking for it."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return torch.fx.experimental.symbolic_shapes.statically_known_true(a == b)


def _cdiv(a: Size, b: int) -> Size:
    return (a + b - 1) // b


def _merged(
    shape: Sequence[Size], strides: Sequence[Sequence[Size]], dim: int
) -> list[tuple[Size, list[Size]]]:
    """The lane dimensions, outermost first, neighbours that all tensors walk alike made one."""
    order = [d for d in range(len(shape)) if d != dim and not _is(shape[d], 1)]
    walk = strides[-1]  # an output's
    if all(isinstance(walk[d], int) for d in order):
        order.sort(key=lambda d: -walk[d])
    lanes: list[tuple[Size, list[Size]]] = []
    for d in order:
        own = [s[d] for s in strides]
        if lanes:
            size, outer = lanes[-1]
            if all(_is(a, b * shape[d]) for a, b in zip(outer, own, strict=True)):
                lanes[-1] = (size * shape[d], own)
                continue
        lanes.append((shape[d], own))
    return lanes


def _kind(stride: Size) -> int | None:
    return 0 if _is(stride, 0) else 1 if _is(stride, 1) else None


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@tunable("scan", "scan", "lanes length", scaled="lanes time", flipped="ahead")
def tiling(program: Program, axis: int, lanes: int, length: int) -> Tiling:
    """The tile for sizes like these, as measured on an H200 (benchmarks/NOTES.md)."""
    held = len(program.inputs) + len(program.states)  # values per position, more or less
    shifted = any(given.shift for given in program.inputs)
    if axis:
        if length > SHORT and lanes < ROWS:
            return _stripes(program, held, lanes, length) or _shared_row(program, held, length)
        if length <= SHORT and not shifted:
            time = _power(length)
            few = max(1, min(_power(lanes), 1024 // time))
            return Tiling(few, time, max(1, min(8, few * time // (512 if held <= 3 else 1024))))
        # an input that is read at another position as well has narrow loads
        time, warps = (512, 2) if shifted else {3: (2048, 8)}.get(held, (4096, 4))
        if scan_logsumexp.applies(program):
            time, warps = 2048, 4
        if held == 2 and lanes < 8 * ROWS:
            time, warps = 8192, 8
        if program.reverse and not shifted:
            time, warps = min(time, 4096), 4
        time = min(time, _power(length))
        few = max(1, min(_power(lanes), 512 // time))
        warps = max(1, min(warps, few * time // 256))
        return Tiling(few, time, warps, 0, not (program.reverse and shifted), int(length > time))
    return _columns(program, held, lanes, length)


def _columns(program: Program, held: int, lanes: int, length: int) -> Tiling:
    """Whole sectors of 64 bytes and more, and as many bytes under way as a multiprocessor needs."""
    entries = 4096 if held <= 4 else 1024 if held > 6 else 2048
    if any(kind in ("fp64", "int64") for kind in program.states):
        entries //= 2
    read = sum(given.dtype.itemsize for given in program.inputs)
    if length > SHORT // 4 and -(-lanes // 16) < ROWS:
        wide = min(_power(lanes), 32)
        time = entries // (2 * wide if wide < 8 else wide)
        few = 2 if wide < 8 else 3  # chunks for each multiprocessor, all under way at a time
        chunk = min(CHUNK, lanes * length * read // (few * ROWS))
        return Tiling(wide, time, 4, 8, parts=max(1, _floor(chunk // (wide * time * read))))
    wide, warps = 16, 4
    if lanes >= 32 * ROWS:
        wide = 32 if lanes < 128 * ROWS else 64
        if lanes < 64 * ROWS and held <= 2:  # a program on each multiprocessor
            entries, warps = 2 * entries, 8
    wide = min(_power(lanes), wide)
    time = min(_power(length), entries // wide)
    ahead = 1 if len(program.inputs) > 1 else min(3, AHEAD // (wide * time * read))
    ahead = ahead if length > time else 0
    return Tiling(wide, time, max(1, min(warps, wide * time // 256)), ahead=ahead)


def _floor(n: int) -> int:
    return 1 << max(0, n.bit_length() - 1)


def _pieces(program: Program, tile: Tiling) -> int:
    """Into how many pieces a tile of columns is cut: as many as threads have different positions
    of, which load and store 16 bytes of neighbouring lanes each."""
    narrowest = min(
        [given.dtype.itemsize for given in program.inputs] + [y.itemsize for y in program.outputs]
    )
    if tile.lanes * narrowest < 32:  # less than a sector: neighbours in memory to neighbours
        return tile.time
    beside = max(1, tile.lanes * narrowest // 16)  # threads for the lanes of one position
    return max(1, min(tile.time, 32 * tile.warps // beside))


def _stripes(program: Program, held: int, lanes: int, length: int) -> Tiling | None:
    """By programs that stay, where that was measured to be faster."""
    sizes = {given.dtype.itemsize for given in program.inputs}
    if program.reverse or held > 4 or scan_logsumexp.applies(program):
        return None
    if lanes > FEW or lanes * length < STAY:
        return None
    single = held == 2 and scan_text.words_of(program) == 1
    if single and sizes == {2}:
        if len({made.dtype.itemsize for made in program.outputs}) > 1:  # two scans, which spill
            return None
        return Tiling(1, 8192, 4, stripes=2, early=2, fetch=3)
    if sizes != {4}:
        return None
    stages = 3 if scan_forms.has_positions(program.states, program.combine) else 2
    return Tiling(1, 8192 if single else 4096, 4, stripes=2, stages=stages, fetch=2)


def _shared_row(program: Program, held: int, length: int) -> Tiling:
    if held > 2 or scan_text.words_of(program) > 1:
        entries = 4096 if held <= 4 else 1024 if held > 6 else 2048
        if scan_logsumexp.applies(program):
            entries = 8192
        return Tiling(1, entries, 4, GROUP, depth=DEPTH, fetch=FETCH)
    entries = 16384 if length >= LONG else 8192 if length >= LONG // 16 else 4096
    return Tiling(1, entries, 4, GROUP, depth=DEPTH, fetch=FETCH)


def plan(
    program: Program,
    shape: Sequence[Size],
    input_strides: Sequence[Sequence[Size]],
    output_strides: Sequence[Sequence[Size]],
    dim: int,
    hint: Callable[[Size], int] = int,
    choice: Tiling | None = None,
    fetches: bool = True,
    aligned: bool = True,
    units: int = 132,
) -> Launch:
    """Lay out ``program`` over tensors of ``shape`` (no size 0) scanned along ``dim``.

    Strides are counted in elements; 0 where an input is broadcast. ``hint`` gives a likely value of
    a symbolic size: the tile is chosen by it, and is right for every value. ``fetches``: whether
    the card can be asked for what will be read (``can_fetch``). ``aligned``: whether all tensors
    begin at multiples of 16 bytes (``are_aligned``). ``units``: multiprocessors of the card.
    """
    strides = [list(s) for s in (*input_strides, *output_strides)]
    lane_dims = _merged(shape, strides, dim)
    along = [s[dim] for s in strides]
    length = shape[dim]
    inner = [row for _, row in lane_dims[-1:]]
    beside = inner[0] if inner else [0] * len(strides)
    axis = int(sum(_is(s, 1) for s in along) >= sum(_is(s, 1) for s in beside) or not lane_dims)
    lanes: Size = 1
    for size, _ in lane_dims:
        lanes = lanes * size
    if choice is None:
        choice = tiling(program, axis, hint(lanes), hint(length))
    kinds = tuple(
        (_kind(along[j]), *(_kind(row[j]) for _, row in lane_dims)) for j in range(len(strides))
    )
    if choice.stripes and not (
        axis
        and fetches
        and isinstance(lanes, int)  # as many programs as a card holds share them
        and scan_stripes.applies(program, kinds)
        and aligned
        and _in_step(program, lane_dims, length)
    ):
        held = len(program.inputs) + len(program.states)
        choice = _shared_row(program, held, hint(length))
    if axis and choice.group:  # a piece of one lane
        choice = replace(choice, lanes=1)
    ascending = choice.ascending and bool(axis)  # rows of a tile of columns lie apart anyway
    layout = scan_text.Layout(
        axis,
        len(lane_dims),
        kinds,
        bool(choice.group),
        ascending,
        bool(axis and (choice.fetch and fetches if choice.group else choice.ahead)),
    )
    if choice.stripes:
        layout = replace(layout, shared=True, ahead=bool(choice.fetch), stripes=choice.early)
    values: dict[str, Any] = {"lanes": lanes, "length": length, "workspace": "workspace", "call": 1}
    values |= {f"n{i}": size for i, (size, _) in enumerate(lane_dims)}
    names = [f"x{i}" for i in range(len(program.inputs))]
    names += [f"y{i}" for i in range(len(program.outputs))]
    for j, name in enumerate(names):
        values[name] = name
        values[f"{name}_t"] = along[j]
        values |= {f"{name}_{i}": row[j] for i, (_, row) in enumerate(lane_dims)}
    given = {
        f"{n}_ptr" if n in names else n: values[n] for n in scan_text.arguments(program, layout)
    }
    blocks = _cdiv(lanes, choice.lanes)
    constants = {"LANES": choice.lanes, "TIME": choice.time}
    if not axis:
        pieces = _pieces(program, choice)
        constants |= {"PIECES": pieces, "RUN": choice.time // pieces}
        if choice.group and pieces == choice.time:  # a chunk is one tile, which is held
            choice = replace(choice, parts=1)
        constants |= {"PARTS": choice.parts} if choice.group else {"STAGES": 1 + choice.ahead}
    if "PIECE" in scan_text.constants_of(program, layout):
        constants["PIECE"] = min(choice.time, 128 * choice.warps)
    words: Size = 0
    if choice.stripes:
        programs = max(1, choice.stripes * units // lanes)
        constants |= {"PROGRAMS": programs, "STAGES": choice.stages}
        constants["PATIENCE"] = max(1, scan.PATIENCE // 8)  # all are there at once, or will be late
        if layout.ahead:
            constants["FETCH"] = choice.fetch
        constants["WINDOW"] = _power(max(programs, 64 * choice.warps))
        del constants["LANES"]
        words = scan_text.words_of(program) * lanes * _cdiv(length, choice.time)
        blocks = lanes * programs
    elif choice.group:
        constants["GROUP"] = choice.group
        if axis:
            constants["PATIENCE"] = scan.PATIENCE
        constants["DEPTH"] = choice.depth
        if layout.ahead:
            constants["FETCH"] = choice.fetch
        few = (choice.depth + 3) * choice.group
        constants["WINDOW"] = _power(max(few + 8, 64 * choice.warps // choice.lanes))
        constants["SUPERS"] = constants["WINDOW"] - few
        tiles = _cdiv(length, choice.time * (1 if axis else choice.parts))
        groups = _cdiv(tiles, choice.group)
        kept = tiles + groups + _cdiv(groups, choice.group)
        words = scan_text.words_of(program) * lanes * kept + (0 if axis else 2)  # a ticket
        blocks = blocks * tiles
    return Launch(
        scan_text.kernel(program, layout), (blocks, 1, 1), given, constants, choice.warps, words
    )


def _in_step(program: Program, lanes: Sequence[tuple[Size, list[Size]]], length: Size) -> bool:
    """Whether all whole tiles are known to begin at multiples of 16 bytes if tensors do."""
    if program.reverse and not (isinstance(length, int) and length % 16 == 0):
        return False
    dtypes = [given.dtype for given in program.inputs] + list(program.outputs)
    return all(
        isinstance(stride, int) and stride * dtype.itemsize % 16 == 0
        for _, row in lanes
        for stride, dtype in zip(row, dtypes, strict=True)
    )


def are_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are known to begin at multiples of 16 bytes."""
    offsets = [(x.storage_offset(), x.itemsize) for x in tensors]
    return all(isinstance(at, int) and at * size % 16 == 0 for at, size in offsets)


def units(device: torch.device) -> int:
    """Multiprocessors of a card; elsewhere as many as an H200 has."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_fetch(device: torch.device) -> bool:
    """Whether a card has the instruction of ``scan.fetch``."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


_kept: dict[tuple[torch.device, int], tuple[torch.Tensor, Iterator[int]]] = {}


def workspace(device: torch.device, words: int) -> tuple[torch.Tensor, int]:
    """At least ``words`` int64 words, and the number of a call that no launch on them had yet. They
    are a stream's. While a graph is captured they are the graph's own, cleared by it: it may be
    replayed beside others, and its launches have the same number every time."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int64, device=device), 1
    key = device, torch.cuda.current_stream(device).cuda_stream
    have = _kept.get(key)
    call = 0 if have is None or have[0].numel() < words else next(have[1], 0)
    if have is None or not call:
        words = max(words, 1 << 17 if have is None else have[0].numel())
        have = torch.zeros(words, dtype=torch.int64, device=device), iter(range(2, 1 << 31))
        call = 1
        if type(have[0]) is torch.Tensor:  # what a mode makes (a fake one) is that mode's
            _kept[key] = have
    return have[0], call


def launch(
    program: Program,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    dim: int,
    choice: Tiling | None = None,
) -> None:
    """Run ``program``. All tensors have one shape, inputs expanded where they are broadcast."""
    shape = outputs[0].shape
    if outputs[0].numel() == 0:
        return
    laid = plan(
        program,
        shape,
        [x.stride() for x in inputs],
        [y.stride() for y in outputs],
        dim,
        choice=choice,
        fetches=can_fetch(outputs[0].device),
        aligned=are_aligned([*inputs, *outputs]),
        units=units(outputs[0].device),
    )
    tensors = {f"x{i}": x for i, x in enumerate(inputs)} | {
        f"y{i}": y for i, y in enumerate(outputs)
    }
    given = dict(laid.arguments)
    if laid.workspace:
        tensors["workspace"], given["call"] = workspace(outputs[0].device, laid.workspace)
    given = {n: tensors[v] if isinstance(v, str) else v for n, v in given.items()}
    wrap_triton(laid.kernel)[laid.grid](**given, **laid.constants, num_warps=laid.warps)
