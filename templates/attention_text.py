"""What the attention kernels' texts share: tiles of tensors, the score, loops over tiles.

A kernel's text is one function. Its scalars are ``b``, ``h``, ``rows``, ``columns``, ``n0, ...``
and the tile's ``q_start`` and ``k_start``; ``ql`` and ``kl`` number a tile's rows and columns,
of shapes that broadcast to a tile ([M, 1] and [1, N], or [1, M] and [N, 1]).
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .attention_program import Program, Span

try:
    from triton.language.extra import libdevice
except ImportError:  # without a GPU's driver triton may have none
    libdevice = None


def indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line for line in text.splitlines() if line.strip())


def joined(*parts: str) -> str:
    """Pieces of text one below the other, empty ones left out."""
    return "\n".join(part for part in parts if part.strip())


# ----------------------------------------------------------------------------------------
# tiles of q, k, v and the like


@dataclass(frozen=True)
class Piece:
    """``size`` columns of a head from ``start``, of which the first ``valid`` are there."""

    start: int
    size: int
    valid: int


@functools.cache
def pieces(dim: int) -> tuple[Piece, ...]:
    """A head cut into powers of two, at least 16, the largest first; a rest is padded to 16."""
    cut, start = [], 0
    while start < dim:
        left = -(-(dim - start) // 16) * 16
        size = 1 << (left.bit_length() - 1)
        cut.append(Piece(start, size, min(size, dim - start)))
        start += size
    return tuple(cut)


@dataclass(frozen=True)
class Operand:
    """A tensor [B, H, S, dim], as a kernel reads or writes tiles of it. ``tma``: through tensor
    descriptors, one per piece of the head; else through a pointer and strides."""

    name: str
    dim: int
    tma: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return pieces(self.dim)

    @property
    def parameters(self) -> list[str]:
        if self.tma:
            return [f"{self.name}_desc{i}" for i in range(len(self.pieces))]
        return [f"{self.name}_{part}" for part in ("ptr", "b", "h", "s")]

    def values(self, tensor: torch.Tensor, block: int) -> dict[str, Any]:
        """What is passed for the parameters, for tiles of ``block`` rows."""
        if not self.tma:
            return dict(zip(self.parameters, [tensor, *tensor.stride()[:3]], strict=True))
        return {
            name: _descriptor(tensor, [1, 1, block, piece.size])
            for name, piece in zip(self.parameters, self.pieces, strict=True)
        }

    def at(self, batch: str = "b", head: str = "h") -> str:
        """Statements in front of loads and stores of one head."""
        n = self.name
        if self.tma:
            return f"{n}_batch = {batch}\n{n}_head = {head}"
        return (
            f"{n}_at = {n}_ptr + tl.cast({batch}, tl.int64) * {n}_b "
            f"+ tl.cast({head}, tl.int64) * {n}_h"
        )

    def load(self, i: int, start: str, block: str, limit: str = "") -> str:
        """An expression: piece ``i`` of ``block`` rows from ``start``, [block, size]. ``limit``:
        the number of rows where some of the tile may be outside, "" where none is (through
        descriptors that is no difference); what is outside is 0."""
        piece, n = self.pieces[i], self.name
        if self.tma:
            where = f"{n}_batch, {n}_head, {start}, {piece.start}"
            return f"{n}_desc{i}.load([{where}]).reshape({block}, {piece.size})"
        masks = [f"({start} + tl.arange(0, {block}) < {limit})[:, None]"] if limit else []
        if piece.valid < piece.size:
            masks.append(f"(tl.arange(0, {piece.size}) < {piece.valid})[None, :]")
        mask = f", {' & '.join(masks)}, other=0.0" if masks else ""
        return f"tl.load({self.address(i, start, block)}{mask})"

    def address(self, i: int, start: str, block: str) -> str:
        """Pointers of piece ``i`` of ``block`` rows from ``start``; no descriptors."""
        piece, n = self.pieces[i], self.name
        column = f"{piece.start} + tl.arange(0, {piece.size})[None, :]"
        inner = f"tl.arange(0, {block})[:, None] * {n}_s + ({column})"
        return f"{n}_at + tl.cast({start}, tl.int64) * {n}_s + ({inner})"

    def store(self, i: int, start: str, block: str, limit: str, value: str) -> str:
        """A statement: the tile's rows below ``limit`` become ``value``; no descriptors."""
        piece, n = self.pieces[i], self.name
        mask = f"({start} + tl.arange(0, {block}) < {limit})[:, None]"
        if piece.valid < piece.size:
            mask += f" & (tl.arange(0, {piece.size}) < {piece.valid})[None, :]"
        value = f"({value}).to({n}_ptr.dtype.element_ty)"
        return f"tl.store({self.address(i, start, block)}, {value}, {mask})"


def _descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    # The stride of a dimension of size 1 is any number, and has to be a fit one.
    strides = [16 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides[:3], 1], block)


def by_tma(tensor: torch.Tensor) -> bool:
    """Whether tensor descriptors can describe it: base and strides are multiples of 16 bytes."""
    size = tensor.element_size()
    if tensor.device.type == "cuda" and not _has_tma(tensor.device):
        return False
    if tensor.numel() == 0 or tensor.stride(-1) != 1:
        return False
    # Without memory (a meta tensor) there is an offset only.
    where = tensor.data_ptr() or tensor.storage_offset() * size
    outer = [
        s * size for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1
    ]
    return where % 16 == 0 and all(s % 16 == 0 and 0 < s < 1 << 40 for s in outer)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def product(left: Sequence[str], right: Sequence[str], options: str = "", start: str = "") -> str:
    """The sum of ``tl.dot`` over pairs of operands, one per piece of a head, after ``start``."""
    value = start
    for a, b in zip(left, right, strict=True):
        value = f"tl.dot({a}, {b}{f', {value}' if value else ''}{options})"
    return value


# ----------------------------------------------------------------------------------------
# the score


DESCRIBED = (torch.bfloat16, torch.float16, torch.float32, torch.int32)


def describable(program: Program, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The inputs along keys, or rows and keys, that tensor descriptors can describe. As ordinary
    loads of a pipelined loop they would be copied element by element, by every thread its own."""
    return tuple(
        i
        for i, (given, tensor) in enumerate(zip(program.inputs, inputs, strict=True))
        if "k" in given.axes and given.dtype in DESCRIBED and by_tma(unexpanded(tensor))
    )


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Of size 1 where it is expanded."""
    for dim in range(4):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def score_parameters(program: Program, described: Sequence[int] = ()) -> list[str]:
    """The kernel's parameters that the score needs: inputs with a stride per axis, or a descriptor
    of each of ``described``, and numbers."""
    names = []
    for i, given in enumerate(program.inputs):
        if i in described:
            names.append(f"x{i}_desc")
        else:
            names += [f"x{i}_ptr", *(f"x{i}_{axis}" for axis in given.axes)]
    return names + [f"n{i}" for i in range(program.numbers)]


def score_values(
    program: Program, inputs: Sequence[torch.Tensor], numbers: Sequence[int],
    described: Sequence[int] = (), blocks: tuple[int, int] = (0, 0),
) -> dict[str, Any]:  # fmt: skip
    """What is passed for ``score_parameters``. inputs: four-dimensional, in "bhqk" order; blocks:
    the rows and columns of a tile, for descriptors."""
    values: dict[str, Any] = {}
    for i, (given, tensor) in enumerate(zip(program.inputs, inputs, strict=True)):
        if i in described:
            block = [1, 1, blocks[0] if "q" in given.axes else 1, blocks[1]]
            values[f"x{i}_desc"] = _descriptor(unexpanded(tensor), block)
            continue
        values[f"x{i}_ptr"] = tensor
        for axis in given.axes:
            values[f"x{i}_{axis}"] = tensor.stride("bhqk".index(axis))
    return values | {f"n{i}": number for i, number in enumerate(numbers)}


def inputs_at(
    program: Program, used: Sequence[int] | None = None, described: Sequence[int] = ()
) -> str:
    """Statements behind every change of ``b`` or ``h``: where the inputs' matrices are."""
    lines = []
    for i in range(len(program.inputs)) if used is None else used:
        if i in described:
            continue
        terms = [f"x{i}_ptr"]
        for axis in program.inputs[i].axes:
            if axis in "bh":
                terms.append(f"tl.cast({axis}, tl.int64) * x{i}_{axis}")
        lines.append(f"x{i}_at = {' + '.join(terms)}")
    return "\n".join(lines)


def input_loads(
    program: Program, q_inside: bool, k_inside: bool, used: Sequence[int] | None = None,
    described: Sequence[int] = (), blocks: tuple[str, str] = ("BLOCK_M", "BLOCK_N"),
    transposed: bool = False,
) -> str:  # fmt: skip
    """Statements that load the inputs of a tile as ``x0, ...``. ``q_inside``, ``k_inside``: all of
    the tile's rows, columns exist; what does not exist is 0. ``transposed``: tiles are
    [columns, rows], which only descriptors have to be told."""
    lines = []
    for i in range(len(program.inputs)) if used is None else used:
        given = program.inputs[i]
        if i in described:
            b, h = ("b" if "b" in given.axes else "0"), ("h" if "h" in given.axes else "0")
            q, rows = ("q_start", blocks[0]) if "q" in given.axes else ("0", "1")
            load = f"x{i}_desc.load([{b}, {h}, {q}, k_start]).reshape({rows}, {blocks[1]})"
            lines.append(f"x{i} = {load}{'.T' if transposed else ''}")
            continue
        far, near, masks = [f"x{i}_at"], [], []
        for axis, inside in (("q", q_inside), ("k", k_inside)):
            if axis not in given.axes:
                continue
            far.append(f"tl.cast({axis}_start, tl.int64) * x{i}_{axis}")
            near.append(f"{axis}l * x{i}_{axis}")
            if not inside:
                masks.append(f"({axis} < {'rows' if axis == 'q' else 'columns'})")
        where = " + ".join(far) + (f" + ({' + '.join(near)})" if near else "")
        mask = f", {' & '.join(masks)}, other=0" if masks else ""
        lines.append(f"x{i} = tl.load({where}{mask})")
    return "\n".join(lines)


def scores(program: Program, masked: bool, q_inside: bool = False, k_inside: bool = True) -> str:
    """Statements from ``s`` to the score ``r`` in units of log 2, -inf where nothing is kept if
    ``masked``: then columns that do not exist are not kept either, and rows neither unless
    ``q_inside``. Needs ``q_start, k_start, ql, kl``; assigns ``q, k, x0, ...`` and ``keep``.

    Programs with a ``scale`` are no exception here: their ``r`` is ``s`` times a constant."""
    k_inside = k_inside and not masked
    lines = [
        "q = q_start + ql",
        "k = k_start + kl",
        input_loads(program, q_inside, k_inside),
        program.score,
    ]
    if masked:
        lines += [kept(program, q_inside), 'r = tl.where(keep, r, float("-inf"))']
    return joined(*lines)


def kept(program: Program, q_inside: bool, k_inside: bool = False) -> str:
    """Statements that assign ``keep`` of a masked tile, int1, of ``q``, ``k`` and the inputs."""
    limits = ([] if q_inside else ["(q < rows)"]) + ([] if k_inside else ["(k < columns)"])
    if not program.keep:
        return f"keep = {' & '.join(limits) or 'q == q'}"
    return joined(program.keep, f"keep = {' & '.join(['keep', *limits])}")


# ----------------------------------------------------------------------------------------
# which tiles


@dataclass(frozen=True)
class Loops:
    """The tiles along one axis: ``head`` are statements in front, ``full`` and ``partial`` give
    the loops over tiles that are kept whole, and over the others, around a body that sees
    ``{axis}_start``."""

    axis: str
    head: str
    starts: tuple[str, str]
    counts: tuple[str, str]

    def _loop(self, start: str, count: str, body: str, options: str, turns: str = "") -> str:
        if turns:
            start = re.sub(r"\bstep\b", f"(step % ({count}))", start)
            body, count = joined(f"turn = step // ({count})", body), f"{turns} * ({count})"
        inner = joined(f"{self.axis}_start = {start}", body)
        tail = f", {options}" if options else ""
        return f"for step in tl.range(0, {count}{tail}):\n{indented(inner)}"

    def full(self, body: str, options: str = "num_stages=STAGES", turns: str = "") -> str:
        """``turns``: so many times over, in one loop; ``turn`` says which it is."""
        return self._loop(self.starts[0], self.counts[0], body, options, turns)

    def partial(self, body: str, options: str = "num_stages=STAGES", turns: str = "") -> str:
        """As ``full``, of the others."""
        return self._loop(self.starts[1], self.counts[1], body, options, turns)

    def merged(self, body: str, options: str = "num_stages=STAGES") -> str:
        """One loop over all tiles; the first ``whole`` of its ``step`` are kept whole."""
        behind = re.sub(r"\bstep\b", "(step - whole)", self.starts[1])
        start = f"tl.where(step < whole, {self.starts[0]}, {behind})"
        loop = self._loop(start, f"whole + {self.counts[1]}", body, options)
        return f"whole = {self.counts[0]}\n{loop}"


def loops(
    spans: Sequence[Span], axis: str, limit: str, block: str, least: str = "0", hull: str = ""
) -> Loops:
    """Loops over tiles of ``block`` along ``axis`` ("k" or "q"), at multiples of ``block``, that
    touch ``spans`` and lie in [least, limit). A tile that two spans touch comes once.

    The spans' own scalars (``q0, q1`` or ``k0, k1``) must be assigned before. ``hull``: the prefix
    of four scalars ``{hull}_lo, _hi, _full_lo, _full_hi`` that cut every span, "" for none; they
    are those of ``attention_documents``."""
    lines: list[str] = []
    before = f"tl.maximum({least}, 0) // {block} * {block}" if least != "0" else "0"
    full_counts: list[str] = []
    partial_counts: list[str] = []
    full_start = partial_start = ""
    for i, span in enumerate(spans):
        a, e, n, left, right = (f"{axis}_{part}{i}" for part in ("a", "e", "n", "l", "r"))
        lo, hi, full_lo, full_hi = span.lo, span.hi, span.full_lo, span.full_hi
        if hull:
            lo, full_lo = f"tl.maximum({lo}, {hull}_lo)", f"tl.maximum({full_lo}, {hull}_full_lo)"
            hi, full_hi = f"tl.minimum({hi}, {hull}_hi)", f"tl.minimum({full_hi}, {hull}_full_hi)"
        if least != "0":
            full_lo = f"tl.maximum({full_lo}, {least})"
        lines += [
            f"{a} = tl.maximum(tl.maximum({lo}, 0) // {block} * {block}, {before})",
            f"{e} = tl.minimum({hi}, {limit})",
            f"{n} = tl.cdiv(tl.maximum({e} - {a}, 0), {block})",
        ]
        starts_full = lo == full_lo == "0"
        if not starts_full:
            lines.append(f"{left} = tl.cdiv(tl.maximum({full_lo} - {a}, 0), {block})")
            lines.append(f"{left} = tl.minimum({left}, {n})")
        lines.append(f"{right} = tl.maximum(tl.minimum({full_hi}, {limit}) - {a}, 0) // {block}")
        lines.append(f"{right} = tl.minimum({right}, {n})")
        if starts_full:
            full = right
        else:
            lines.append(f"{right} = tl.maximum({right}, {left}) - {left}")  # how many are full
            full = right
        lines.append(f"{axis}_f{i} = {full}\n{axis}_p{i} = {n} - {full}")
        before = f"{axis}_done{i}"
        lines.append(f"{before} = {a} + {n} * {block}")
    for i, span in reversed(list(enumerate(spans))):
        lo, full_lo = span.lo, span.full_lo
        starts_full = not hull and least == "0" and lo == full_lo == "0"
        a, left = f"{axis}_a{i}", f"{axis}_l{i}"
        step = "step"
        for j in range(i):
            step = f"({step} - {axis}_f{j})"
        here_full = f"{a} + ({step if starts_full else f'{left} + {step}'}) * {block}"
        pstep = step.replace("_f", "_p")
        behind = f"{pstep} + {axis}_f{i}"
        if not starts_full:
            behind = f"tl.where({pstep} < {left}, {pstep}, {behind})"
        here_partial = f"{a} + ({behind}) * {block}"
        if not full_start:
            full_start, partial_start = here_full, here_partial
        else:
            upto_f = " + ".join(f"{axis}_f{j}" for j in range(i + 1))
            upto_p = " + ".join(f"{axis}_p{j}" for j in range(i + 1))
            full_start = f"tl.where(step < {upto_f}, {here_full}, {full_start})"
            partial_start = f"tl.where(step < {upto_p}, {here_partial}, {partial_start})"
        full_counts.insert(0, f"{axis}_f{i}")
        partial_counts.insert(0, f"{axis}_p{i}")
    return Loops(
        axis,
        joined(*lines),
        (full_start, partial_start),
        (" + ".join(full_counts), " + ".join(partial_counts)),
    )


# ----------------------------------------------------------------------------------------
# the function


def kernel_of(
    name: str, parameters: Sequence[str], constants: Sequence[str], body: str,
    helpers: dict[str, Any] | None = None, unspecialised: Sequence[str] = (),
) -> Any:  # fmt: skip
    """The function ``name`` as a Triton kernel. ``unspecialised``: numbers whose value must not
    cause another compilation."""
    given = ", ".join([*parameters, *(f"{c}: tl.constexpr" for c in constants)])
    source = f"def {name}({given}):\n{indented(body)}\n"
    file = f"<inductor_ext {name} {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": f"inductor_ext_{name}"}
    scope |= helpers or {}
    exec(compile(source, file, "exec"), scope)
    # Not by the decorator, which makes another kind of kernel while Triton interprets: it is kept.
    return triton.JITFunction(scope[name], do_not_specialize=list(unspecialised))


_numbers = iter(range(1 << 62))
