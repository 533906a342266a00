"""Launch of ``attention_gluon``: what it computes, its tiles, its tensor maps."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import linecache
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from . import attention_documents
from .attention_program import LOG2E, Program
from .attention_text import describable, unexpanded
from .tilings import tunable

# Versions of Triton whose Gluon compiles the kernel and on which it was checked on a card.
VERSIONS = ("3.6.",)
DIMS = (64, 128)
# K and V of the heads that programs work on together: what stays in a cache of 50 MB.
SECTION_BYTES = 16 * 2**20
SHARED_BYTES = 227 << 10
MOST_STAGED = 2  # inputs that are copied into shared memory


@dataclass(frozen=True)
class Tile:
    """``consumers`` of 16 * ``warps`` query rows each, against blocks of ``keys`` keys, of which
    ``stages`` are copied ahead. ``pingpong``: consumers take turns in starting products.
    ``schedule``: "each" is a program per tile; else one per multiprocessor takes tiles, every so
    manyth ("static") or the next that nobody has taken ("dynamic"). ``in_place``: the output leaves
    by the memory of q, so that the next tile's q comes later; where D is Dv."""

    keys: int = 128
    consumers: int = 2
    warps: int = 4
    stages: int = 2
    pingpong: bool = True
    schedule: str = "dynamic"
    section_bytes: int = SECTION_BYTES
    in_place: bool = False

    @property
    def rows(self) -> int:
        return 16 * self.warps * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread of a consumer and of the producer: the 64K of a multiprocessor."""
        return (232, 40) if self.warps * self.consumers <= 8 else (160, 32)


@tunable(
    "attention", "forward_gluon", "rows columns heads",
    scaled="keys section_bytes", warps="", stages="stages", flipped="pingpong",
)  # fmt: skip
def default_tile(program: Program, d: int, copied: tuple[int, ...] = ()) -> Tile:
    """The tile for a program and a head dimension of 64 or 128; ``copied``: the staged inputs."""
    matrices = [program.inputs[i] for i in copied if "q" in program.inputs[i].axes]
    if matrices:
        # More rows for a block of keys: what is read of a matrix comes on top of K and V.
        pair = sum(given.dtype.itemsize for given in matrices)
        wide = Tile(pingpong=False, in_place=True)
        for tile in (wide, Tile(64, 3, pingpong=False), Tile(64, stages=3, pingpong=False)):
            if _shared_bytes(tile, d, pair) <= SHARED_BYTES:
                return tile
        return Tile(64, pingpong=False)
    # Registers: what is not staged stands beside the scores. Small blocks leave out more documents.
    loaded = any("k" in x.axes and i not in copied for i, x in enumerate(program.inputs))
    if loaded or program.documents:
        return Tile(keys=64, stages=4, pingpong=loaded and d == 128)
    return Tile(pingpong=not copied) if d == 128 else Tile(stages=4, pingpong=False)


def _shared_bytes(tile: Tile, d: int, pair: int) -> int:
    """About the shared memory of a tile of 16-bit heads of d, and ``pair`` bytes for each pair of
    a row and a key."""
    block = tile.keys * (4 * d + tile.rows * pair)
    own = (2 if tile.in_place else 4) * tile.rows * d
    return own + tile.stages * block + 2048


def available() -> bool:
    """Whether the Triton at hand is one that the kernel is known to work with."""
    return triton.__version__.startswith(VERSIONS)


@functools.cache
def speakable(program: Program) -> bool:
    """Whether Gluon knows all functions that a program's statements call."""
    from triton.experimental.gluon import language

    spans = [t for s in program.row_spans for t in (s.lo, s.hi, s.full_lo, s.full_hi)]
    text = "\n".join([program.score, program.keep, *spans])
    names = set(re.findall(r"\btl\.(\w+)", text))
    return "libdevice" not in text and all(hasattr(language, name) for name in names)


def scored(program: Program) -> bool:
    """Whether a score is more than a positive factor, which a maximum can be taken through."""
    return program.scale is None or program.scale <= 0


def mapped(x: torch.Tensor) -> bool:
    """Whether a tensor map can describe a tensor: steps of 16 bytes, none of them 0."""
    step = 16 // x.element_size()
    # Without memory (a fake tensor) there is an offset only.
    real = x.untyped_storage().device.type != "meta"
    where = x.data_ptr() if real else x.storage_offset() * x.element_size()
    return (
        x.stride(-1) == 1
        and where % 16 == 0
        and all(
            n == 1 or (s > 0 and s % step == 0)
            for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
    )


def applies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program) -> bool:
    """Whether ``forward`` takes these arguments. Reads no values and launches nothing."""
    return (
        available()
        and not program.dropout
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] in DIMS
        and v.shape[-1] in DIMS
        and 0 not in (*q.shape, *k.shape)
        and all(mapped(x) for x in (q, k, v))
        and speakable(program)
        and _hopper(q.device)
    )


def pays(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel takes long enough that the host, which needs about 0.1 ms to describe
    tensors to the copy engine, is done with the next launch meanwhile."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return pairs * (q.shape[3] + v.shape[3]) >= 1 << 35


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _function(name: str, arguments: str, body: list[str], result: str, module: str) -> Any:
    """A function of the kernel, of ``body``'s statements, whose names are Triton's ``tl``."""
    from triton.experimental import gluon

    lines = "".join(f"    {line}\n" for line in [*body, f"return {result}"])
    source = f"@gluon.jit\ndef {name}({arguments}):\n{lines}"
    file = f"<inductor_ext attention {hashlib.sha1(source.encode()).hexdigest()}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = ModuleType("tl")
    vars(names).update(vars(tl) | vars(gluon.language))
    scope = {"gluon": gluon, "tl": names, "__name__": module}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def _tuple(values: list[str]) -> str:
    """Not an empty one: ``b`` stands in."""
    return f"({', '.join(values or ['b'])},)"


def staged(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The inputs along keys that are copied into shared memory, matrices first."""
    found = describable(program, inputs)
    return tuple(sorted(found, key=lambda i: "q" not in program.inputs[i].axes)[:MOST_STAGED])


def shared_by_batches(program: Program, copied: tuple[int, ...]) -> bool:
    """Whether a matrix is the same for all batches, which is most of what a tile reads."""
    axes = [set(program.inputs[i].axes) for i in copied]
    return any({"q", "k"} <= a and "b" not in a for a in axes)


def standing(
    program: Program, axis: str, copied: Sequence[int] = ()
) -> tuple[list[str], str]:  # fmt: skip
    """(statements, result) of the function that reads inputs that vary along no more of rows and
    keys than ``axis``, whose number it is given, ``copied`` ones left out."""
    values, at = [], 0
    for i, given in enumerate(program.inputs):
        if set(given.axes) <= {"b", "h", axis} and i not in copied:
            terms = [
                f"tl.cast({a}, tl.int64) * inputs[{at + 1 + n}]" for n, a in enumerate(given.axes)
            ]
            values.append(f"tl.load({' + '.join([f'inputs[{at}]', *terms])})")
        at += 1 + len(given.axes)
    return [], _tuple(values)


def _inputs(program: Program, copied: tuple[int, ...]) -> dict[str, tuple[str, list[str], str]]:
    """(arguments, statements, result) of the functions that read inputs. What a kernel gets as
    ``inputs`` are a pointer and the strides along its axes of each."""
    origins: list[str] = []
    keys: list[str] = []
    at = 0
    for i, given in enumerate(program.inputs):
        stride = {axis: f"inputs[{at + 1 + n}]" for n, axis in enumerate(given.axes)}
        head = [f"tl.cast({a}, tl.int64) * {stride[a]}" for a in given.axes if a in "bh"]
        where = " + ".join([f"inputs[{at}]", *head])
        at += 1 + len(given.axes)
        if i in copied:
            continue
        if "k" not in given.axes:
            continue
        far = f" + tl.cast(q0, tl.int64) * {stride['q']}" if "q" in given.axes else ""
        near = f"q * {stride['q']} + " if "q" in given.axes else ""
        start = f"at[{len(origins)}] + tl.cast(k0, tl.int64) * {stride['k']}"
        mask = " & (q == q)" if near else ""  # of the shape of the pointers
        name = f"x{len(origins)}"
        keys += [
            f"{name} = {start} + ({near}k * {stride['k']})",
            f"if MASKED:\n        {name} = tl.load({name}, (k < limit){mask}, other=0)",
            f"else:\n        {name} = tl.load({name})",
        ]
        origins.append(where + far)
    return {
        "origins": ("inputs, b, h, q0", [], _tuple(origins)),
        "along_rows": ("inputs, b, h, q", *standing(program, "q")),
        "along_keys": (
            "inputs, at, q, k0, k, limit, MASKED: tl.constexpr",
            ["b = k0", *keys],
            _tuple([f"x{i}" for i in range(len(origins))]),
        ),
        "staged_places": ("b, h, q, k", [], copied_values(program, copied)),
    }


def copied_values(program: Program, copied: Sequence[int]) -> str:
    """Where blocks of the copied inputs begin."""
    return _tuple([a if a in program.inputs[i].axes else "0" for i in copied for a in "bhqk"])


def functions(program: Program, copied: tuple[int, ...]) -> dict[str, tuple[str, list[str], str]]:
    """(arguments, statements, result) of the functions that are a program's own."""
    numbers = [f"n{i} = numbers[{i}]" for i in range(program.numbers)]
    every = range(len(program.inputs))
    fixed = [i for i in every if "k" not in program.inputs[i].axes]
    moving = [i for i in every if i not in fixed and i not in copied] or [-1]  # see ``_tuple``
    values = [f"x{i} = fixed[{at}]" for at, i in enumerate(fixed)]
    values += [f"x{i} = moving[{at}]" for at, i in enumerate([*moving, *copied]) if i >= 0]
    bounds = [b for s in program.row_spans for b in (s.lo, s.hi, s.full_lo, s.full_hi)]
    common = "b, h, rows, columns, numbers, fixed, moving"
    score = [*numbers, *values, *program.score.splitlines()] if scored(program) else []
    keep = [*numbers, *values, *program.keep.splitlines()] if program.keep else []
    return {
        "spans": ("q0, q1, rows, columns, numbers", numbers, f"({', '.join(bounds)})"),
        **_inputs(program, copied),
        "score": (f"s, q, k, {common}", score, "r" if score else "s"),
        "keep": (f"q, k, {common}", keep, "keep" if keep else "k < columns"),
    }


def module_of(
    kernel: str, own: dict[str, tuple[str, list[str], str]], constants: dict[str, Any]
) -> ModuleType:
    """A fresh copy of the module ``kernel``, whose imports from ``attention_gluon_parts`` are of a
    fresh copy of that, with a program's ``own`` functions and ``constants``."""
    parts = f"{__package__}.attention_gluon_parts"
    shared = _copy_of(parts)
    for function, (arguments, body, result) in own.items():
        setattr(shared, function, _function(function, arguments, body, result, parts))
    for constant, value in constants.items():
        setattr(shared, constant, tl.constexpr(value))
    module: ModuleType = importlib.util.module_from_spec(_spec(f"{__package__}.{kernel}"))
    with _importing:
        before = sys.modules.get(parts)
        sys.modules[parts] = shared
        try:
            _executed(module)
        finally:
            if before is None:
                del sys.modules[parts]
            else:
                sys.modules[parts] = before
    return module


_importing = threading.Lock()


def _spec(name: str) -> Any:
    path = Path(__file__).with_name(f"{name.rpartition('.')[2]}.py")
    return importlib.util.spec_from_file_location(name, path)


def _executed(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    return module


def _copy_of(name: str) -> ModuleType:
    return _executed(importlib.util.module_from_spec(_spec(name)))


def define(program: Program, copied: tuple[int, ...] = ()) -> ModuleType:
    """A fresh copy of the module ``attention_gluon`` with the functions of a program; ``copied``:
    the inputs that are ``staged``."""
    constants = {
        "SCORED": scored(program),
        "SPANS": len(program.row_spans),
        "DOCUMENTS": program.documents is not None,
        "STAGED": len(copied),
        "BATCHES_BESIDE": shared_by_batches(program, copied),
    }
    return module_of("attention_gluon", functions(program, copied), constants)


kernels = functools.cache(define)


@functools.cache
def _shared_layout(bits: int, vector: bool) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(0 if vector else 128, bits, rank=4)


def input_values(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """A pointer and the strides along its axes of each input."""
    read: list[Any] = []
    for given, x in zip(program.inputs, inputs, strict=True):
        read += [x, *(x.stride("bhqk".index(axis)) for axis in given.axes)]
    return tuple(read)


def described(x: torch.Tensor, block: list[int]) -> Any:
    """A tensor map of [B, H, S, D] and its blocks in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _shared_layout(8 * x.element_size(), block[2] == 1)
    # The step of a dimension of one entry is never taken, but has to be one that a map can have.
    strides = [8 if n == 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def _like(q: torch.Tensor, dim: int) -> torch.Tensor:
    """An empty tensor of q's shape but for the last dimension, with q's order in memory."""
    if dim == q.shape[-1]:
        return torch.empty_like(q)
    order = sorted(range(3), key=lambda i: (q.stride(i), -i), reverse=True)
    shape = [q.shape[i] for i in order]
    return q.new_empty([*shape, dim]).permute(*(order.index(i) for i in range(3)), 3)


def staged_maps(
    program: Program, inputs: Sequence[torch.Tensor], copied: Sequence[int], rows: int, keys: int
) -> list[Any]:
    """Tensor maps of the copied inputs, in blocks of a consumer's ``rows`` and of ``keys``."""
    return [
        described(unexpanded(inputs[i]), [1, 1, rows if "q" in program.inputs[i].axes else 1, keys])
        for i in copied
    ]


def staged_bytes(maps: Sequence[Any], consumers: int) -> int:
    """Of the copied inputs in one place of the ring."""
    total = 0
    for one in maps:
        _, _, rows, keys = one.block_shape
        total += (consumers if rows > 1 else 1) * rows * keys * one.base.element_size()
    return total


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int],
    program: Program,
    out: torch.Tensor,
    lse: torch.Tensor,
    tile: Tile,
    multiprocessors: int,
) -> tuple[Any, tuple[int], dict[str, Any]]:
    """(kernel, grid, arguments by name): the launch that fills ``out`` and ``lse``."""
    batch, heads, rows, d = q.shape
    group = heads // k.shape[1]
    columns, dv = k.shape[2], v.shape[3]
    row_tiles = triton.cdiv(rows, tile.rows)
    tiles = row_tiles * batch * heads
    held = max(1, tile.section_bytes // (columns * (d + dv) * k.element_size())) * group
    documents: tuple[Any, ...] = ()
    if program.documents:
        hulls = attention_documents.hulls(program, inputs, "q", tile.rows)
        documents = tuple(attention_documents.hull_values(hulls).values())
    each = 16 * tile.warps
    copied = staged(program, inputs)
    maps = staged_maps(program, inputs, copied, each, tile.keys)
    consumer, producer = tile.registers
    grid = (tiles if tile.schedule == "each" else min(tiles, multiprocessors),)
    # Where every program has one tile there is nothing to be told.
    dynamic = tile.schedule == "dynamic" and tiles > multiprocessors
    arguments = {
        "q_desc": described(q, [1, 1, each, d]),
        "k_desc": described(k, [1, 1, tile.keys, d]),
        "v_desc": described(v, [1, 1, tile.keys, dv]),
        "out_desc": described(out, [1, 1, each, dv]),
        **{f"x{j}_desc": maps[j] if j < len(maps) else None for j in range(MOST_STAGED)},
        "lse": lse,
        "counter": torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else lse,
        "tiles": tiles,
        "heads": batch * heads,
        "sections": max(batch * heads // held, 1),
        "row_tiles": row_tiles,
        "batches": batch,
        "query_heads": heads,
        "group": group,
        "scale": 1.0 if scored(program) else (program.scale or 0.0) * LOG2E,
        "rows": rows,
        "columns": columns,
        "numbers": tuple(numbers),
        "inputs": input_values(program, inputs),
        "documents": documents,
        "N": tile.keys,
        "STAGES": tile.stages,
        "ROWS": each,
        "CONSUMERS": tile.consumers,
        "PINGPONG": tile.pingpong and tile.consumers > 1,
        "NAN": program.empty == "nan",
        "DYNAMIC": dynamic,
        "IN_PLACE": tile.in_place and d == dv,
        "STAGED_BYTES": staged_bytes(maps, tile.consumers),
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "num_warps": tile.warps,
    }
    return kernels(program, copied).attention_gluon, grid, arguments


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int],
    program: Program,
    precision: str = "ieee",
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Hq, Sq, Dv], lse fp32 [B, Hq, Sq]) of q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v
    [B, Hkv, Sk, Dv], bf16 or fp16, D and Dv 64 or 128; deterministic. Products accumulate in fp32,
    whatever ``precision`` says of fp32 inputs. ``applies`` has to hold, else ValueError."""
    if not applies(q, k, v, program):
        raise ValueError(
            "the Gluon attention expected what attention_gluon_launch.applies holds for, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of {q.dtype}, "
            f"triton {triton.__version__}"
        )
    out = _like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    tile = tile or default_tile(
        program, max(q.shape[3], v.shape[3]), staged(program, inputs),
        rows=q.shape[2], columns=k.shape[2], heads=q.shape[0] * q.shape[1],
    )  # fmt: skip
    kernel, grid, arguments = launch(q, k, v, inputs, numbers, program, out, lse, tile, count)
    kernel[grid](**arguments)
    return out, lse
