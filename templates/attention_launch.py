"""Launches of the attention kernels that stream keys: the forward, and column sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import (
    attention_columns,
    attention_columns_gluon_launch,
    attention_documents,
    attention_forward,
    attention_gluon_launch,
)
from .attention_dropout import Dropout
from .attention_program import Program
from .attention_text import Operand, by_tma, describable, score_values
from .tilings import tunable


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Query rows and keys of a tile, warps, stages of the pipeline; ``merged`` as in
    ``attention_forward.Layout``; ``near``: MiB of keys and values that are streamed at a time,
    which should stay in L2."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    merged: bool = False
    near: int = 16


@tunable(
    "attention", "forward", "rows columns heads",
    scaled="block_m block_n near", stages="stages", flipped="merged",
)  # fmt: skip
def tiling(program: Program, dtype: torch.dtype, d: int, dv: int, tma: bool = True) -> Tiling:
    """What is launched for heads of d and dv numbers; ``tma``: whether descriptors describe q, k
    and v. Measured on an H200 in 16 bits at 64, 128 and 256, by kind of score: mostly two programs
    on a multiprocessor, one of which computes while the other waits. Others are by analogy."""
    widest = max(d, dv)
    axes = [set(given.axes) for given in program.inputs]
    matrix = any({"q", "k"} <= a for a in axes)
    vector = any("k" in a for a in axes)  # copied ahead, where there is no branch around it
    if dtype == torch.float32:
        return Tiling(64, 32, 4, 2) if widest <= 128 else Tiling(16, 16, 4, 1)
    if not tma:
        return Tiling(64, 64, 8, 2) if widest <= 128 else Tiling(64, 32, 8, 2)
    if widest <= 64:
        if program.dropout:
            return Tiling(64, 64, 4, 2)
        if matrix or program.documents:
            return Tiling(64, 64, 4, 3, merged=True)
        whole = len(program.row_spans) == 1 and program.row_spans[0].lo == "0"
        return Tiling(64, 128 if whole and not vector else 64, 4, 2)
    if widest <= 128:
        if matrix:
            return Tiling(128, 64, 8, 3)
        return Tiling(64, 64, 4, 3, merged=vector or attention_forward.simple(program))
    if widest <= 256:
        return Tiling(128, 64, 8, 2, merged=True)
    return Tiling(64, 32, 8, 2, merged=True)


def dense(t: Tensor) -> Tensor:
    """Memory whose last dimension is dense, with rows near enough for 31 bits in a tile."""
    near = t.stride(-1) == 1 and abs(t.stride(-2)) < 1 << 22
    return t if near else t.contiguous()


def like(q: Tensor, last: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory [*q.shape[:3], last] with q's order of dimensions, dense."""
    order = sorted(range(3), key=lambda i: -q.stride(i))
    out = torch.empty([*(q.shape[i] for i in order), last], dtype=dtype or q.dtype, device=q.device)
    return out.permute(*(order.index(i) for i in range(3)), 3)


def products(dtype: torch.dtype, precision: str) -> str:
    """``input_precision`` of products; three of TF32 are as exact as fp32 ("ieee")."""
    if dtype != torch.float32:
        return ""
    return "tf32x3" if precision == "ieee" else precision


def operand(name: str, t: Tensor) -> Operand:
    return Operand(name, t.shape[-1], by_tma(t))


def section(k: Tensor, v: Tensor, heads: int, near: int) -> int:
    """Query heads whose programs run side by side: of ``near`` MiB of keys and values."""
    group = heads // k.shape[1]
    each = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return group * max((near << 20) // max(each, 1), 1)


def by_gluon(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], program: Program
) -> bool:  # fmt: skip
    """Whether ``forward`` takes the kernel of ``attention_gluon``. Launches nothing.

    Heads of 64 are left to this one, and matrices that no tensor map describes."""
    copied = attention_gluon_launch.staged(program, inputs)
    loaded = any(
        {"q", "k"} <= set(given.axes) and i not in copied for i, given in enumerate(program.inputs)
    )
    wide = max(q.shape[3], v.shape[3]) > 64
    return wide and not loaded and attention_gluon_launch.applies(q, k, v, program)


def forward(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, precision: str, chosen: Tiling | None = None, dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [B, Hq, Sq, Dv] in q's dtype and order of dimensions, lse [B, Hq, Sq] in fp32).

    q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; inputs broadcast to [B, Hq, Sq, Sk].
    precision: of products of fp32, "ieee" or "tf32". dropout: of programs that have one.
    Deterministic.
    """
    q, k, v = dense(q), dense(k), dense(v)
    if program.likely is not None and q.numel() and k.numel():
        found = forward(q, k, v, inputs, numbers, program.likely, precision, chosen, dropout)
        _streamed(q, k, v, inputs, numbers, program, precision, chosen, dropout, *found, again=True)
        return found
    if chosen is None and by_gluon(q, k, v, inputs, program):
        return attention_gluon_launch.forward(q, k, v, inputs, numbers, program, precision)
    out = like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse
    if not k.shape[2]:
        return out.fill_(0.0 if program.empty == "zero" else float("nan")), lse.fill_(-float("inf"))
    _streamed(q, k, v, inputs, numbers, program, precision, chosen, dropout, out, lse)
    return out, lse


def _streamed(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, precision: str, chosen: Tiling | None, dropout: Dropout | None, out: Tensor,
    lse: Tensor, again: bool = False,
) -> None:  # fmt: skip
    """Fill ``out`` and ``lse``; ``again``: where lse says that they are not right."""
    batch, heads, rows, d = q.shape
    columns, dv = k.shape[2], v.shape[3]
    described = describable(program, inputs)
    tma = by_tma(q) and by_tma(k) and by_tma(v)
    sizes = {"rows": rows, "columns": columns, "heads": batch * heads}
    if again:  # mostly of no tile: not to be measured
        chosen = chosen or tiling.rule(program, q.dtype, d, dv, tma)
    chosen = chosen or tiling(program, q.dtype, d, dv, tma, **sizes)
    layout = attention_forward.Layout(
        operand("q", q), operand("k", k), operand("v", v), products(q.dtype, precision),
        chosen.merged, described, again,
    )  # fmt: skip
    values = layout.q.values(q, chosen.block_m) | layout.k.values(k, chosen.block_n)
    values |= layout.v.values(v, chosen.block_n) | layout.out.values(out, chosen.block_m)
    values |= {
        "lse_ptr": lse, "rows": rows, "columns": columns, "heads": heads,
        "group": heads // k.shape[1], "total": batch * heads,
        "section": section(k, v, heads, chosen.near),
    }  # fmt: skip
    values |= score_values(program, inputs, numbers, described, (chosen.block_m, chosen.block_n))
    values |= {} if dropout is None else dropout.values()
    if program.documents:
        found = attention_documents.hulls(program, inputs, "q", chosen.block_m)
        values |= attention_documents.hull_values(found)
    grid = (triton.cdiv(rows, chosen.block_m) * batch * heads,)
    wrap_triton(attention_forward.kernel(program, layout))[grid](
        **values, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, STAGES=chosen.stages,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip


FEW = 64  # rows whose sums are made by a pass over the keys


@tunable("attention", "columns", "keys heads", scaled="block_m block_n", stages="stages")
def columns_tiling(dtype: torch.dtype, d: int, rows: int = FEW + 1) -> Tiling:
    """What is launched for column sums of ``rows`` rows of heads of d numbers; block_m rows meet
    block_n keys."""
    few = min(max(triton.next_power_of_2(rows), 16), FEW)
    if dtype == torch.float32:
        return Tiling(min(few, 32), 64, 4, 2) if d <= 128 else Tiling(16, 32, 4, 1)
    return Tiling(few, 64, 4, 4) if rows <= FEW and d <= 128 else Tiling(64, 64, 4, 2)


def columns_by_gluon(q: Tensor, k: Tensor, lse: Tensor, program: Program) -> bool:
    """Whether the sums over all rows are made by ``attention_columns_gluon``."""
    pays = attention_gluon_launch.pays(q, k, k)
    return pays and attention_columns_gluon_launch.takes(q, k, lse, program)


def columns(
    q: Tensor, k: Tensor, lse: Tensor, inputs: Sequence[Tensor], numbers: Sequence[int],
    program: Program, precision: str, first_row: int, chosen: Tiling | None = None,
    programs: int = 264,
) -> Tensor:  # fmt: skip
    """[B, Hkv, Sk] in fp32: sums of exp(score - lse) over the rows from ``first_row`` on and over
    the heads of a group.

    Arguments as of ``forward``; lse as it gives it. ``programs``: about how many share the keys
    where the rows are few. Rows that keep nothing add 0. Deterministic.
    """
    batch, heads, rows, d = q.shape
    groups, size = k.shape[1:3]
    sums = torch.empty((batch, groups, size), dtype=torch.float32, device=q.device)
    if not sums.numel():
        return sums
    if first_row >= rows:
        return sums.zero_()
    first_row = max(first_row, 0)
    if chosen is None and not first_row and columns_by_gluon(q, k, lse, program):
        return attention_columns_gluon_launch.columns(q, k, lse, inputs, numbers, program)
    chosen = chosen or columns_tiling(q.dtype, d, rows - first_row, keys=size, heads=batch * heads)
    q, k, lse = dense(q), dense(k), lse.contiguous()
    described = describable(program, inputs)
    few = rows - first_row <= chosen.block_m and attention_columns.few(program)
    lines = lse.flatten(0, 1)
    step = rows if len(lines) > 1 else 16  # any, but a fit one
    layout = attention_columns.Layout(
        operand("q", q), operand("k", k), products(q.dtype, precision), described, by_tma(lines),
        few, few and heads == groups,
    )  # fmt: skip
    blocks = chosen.block_m, chosen.block_n
    values = layout.q.values(q, chosen.block_m) | layout.k.values(k, chosen.block_n)
    values |= {
        "sums_ptr": sums, "rows": rows, "columns": size, "heads": heads,
        "group": heads // groups, "first_row": first_row,
    }  # fmt: skip
    values |= (
        {"lse_desc": TensorDescriptor(lines, list(lines.shape), [step, 1], [1, chosen.block_m])}
        if layout.lse
        else {"lse_ptr": lse}
    )
    values |= score_values(program, inputs, numbers, described, blocks)
    if program.documents:
        found = attention_documents.hulls(program, inputs, "k", chosen.block_n)
        values |= attention_documents.hull_values(found)
    parts = tiles = triton.cdiv(size, chosen.block_n)
    if few:
        each = triton.cdiv(tiles, max(programs // (batch * groups), 1))
        parts, values["each"] = triton.cdiv(tiles, each), each
    wrap_triton(attention_columns.kernel(program, layout))[(parts * batch * groups,)](
        **values, BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, STAGES=chosen.stages,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return sums
