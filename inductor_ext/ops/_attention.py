"""Softmax attention with any score: out = softmax(score(scale q k^T)) v, without the scores in
memory.

The score is a line of aten operations (``attention_score``) that the operation carries. A kernel
generated around it, cuDNN or torch functions compute it, as ``_attention_choice`` says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat, compat_attention
from inductor_ext.compat import float32_precision
from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _attention_choice as choice
from inductor_ext.ops import _attention_composed as composed
from inductor_ext.ops import _attention_options as options_of
from inductor_ext.ops._attention_conditions import LARGEST_PLACE
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.templates.attention_dropout import Dropout
from inductor_ext.templates.attention_program import Input, Program

# --- what is computed, and by what ----------------------------------------------------------------


def kernels_apply(q: Tensor) -> bool:
    """Whether kernels may compute on a tensor's device."""
    return q.is_cuda


def program_of(
    q: Tensor, inputs: Sequence[Tensor], numbers: Sequence[Any], score: str, empty: str,
    dropout: float = 0.0,
) -> Program | None:  # fmt: skip
    """The score as a kernel computes it for q's dtype and device; None where none can: kernels add
    places to numbers in 32 bits."""
    if not kernels_apply(q) or any(abs(n) >= LARGEST_PLACE for n in numbers):
        return None
    read = tuple(Input(x.dtype, _axes(x)) for x in inputs)
    return _program(score, read, len(numbers), empty, q.dtype == torch.float32, dropout != 0)


@functools.lru_cache(maxsize=1024)
def _program(
    score: str, inputs: tuple[Input, ...], numbers: int, empty: str, exact: bool,
    dropout: bool = False,
) -> Program | None:  # fmt: skip
    from inductor_ext.ops import _attention_translate as translate  # needs triton

    try:
        found = translate.program(score, inputs, numbers, empty, exact)
    except translate.NoProgram:
        return None
    likely = found.likely and dataclasses.replace(found.likely, dropout=dropout)
    return dataclasses.replace(found, dropout=dropout, likely=likely)


def _axes(x: Tensor) -> str:
    """The axes that an input varies along."""
    return "".join(
        a for a, n, s in zip("bhqk", x.shape, x.stride(), strict=True) if n != 1 and s != 0
    )


@functools.lru_cache(maxsize=256)
def _sdpa_form(program: Program) -> str:
    """What SDPA calls such a score where there are as many rows as keys: "full", "causal" or ""."""
    if program.scale is None or program.inputs or program.numbers or program.dropout:
        return ""
    if not program.keep:
        return "full"
    for causal in ("lower_right", "upper_left"):
        score = options_of.score_of(options_of.Options(program.scale, causal=causal), 1, 1)
        if _program(score.text, (), 0, program.empty, True) == program:
            return "causal"
    return ""


def sdpa_form(score: str, empty: str) -> tuple[str, float]:
    """What SDPA calls a score of no inputs and numbers ("full", "causal" or ""), and its scale."""
    program = _program(score, (), 0, empty, True)
    return ("", 1.0) if program is None else (_sdpa_form(program), program.scale or 1.0)


def _plain(program: Program | None, q: Tensor, k: Tensor) -> str:
    """Whether SDPA has this score: "full", "causal" or ""."""
    form = "" if program is None else _sdpa_form(program)
    return form if form == "full" or q.shape[2] == k.shape[2] else ""


def _case(
    q: Tensor, k: Tensor, v: Tensor, program: Program | None, differentiated: bool = False
) -> choice.Case:  # fmt: skip
    plain = _plain(program, q, k)
    return choice.Case(
        on_card=kernels_apply(q),
        capability=compat.device_capability(q.device) if q.is_cuda else (0, 0),
        dtype=q.dtype, heads=q.shape[1], own_heads=k.shape[1], rows=q.shape[2],
        columns=k.shape[2], dim=q.shape[3], value_dim=v.shape[3], plain=plain,
        has_program=program is not None,
        cudnn=bool(plain)
        and compat_attention.cudnn_takes(q, k, v, plain == "causal", differentiated),
        gluon=bool(plain) and _by_gluon(q, k, v, program),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dropout=program is not None and program.dropout,
    )  # fmt: skip


def _by_gluon(q: Tensor, k: Tensor, v: Tensor, program: Program | None) -> bool:
    """Whether a plain score's kernel is the Gluon one, and is long enough for what its launch
    takes the host."""
    from inductor_ext.templates import attention_gluon_launch as gluon
    from inductor_ext.templates import attention_launch as launch

    if program is None or not launch.by_gluon(q, k, v, (), program):
        return False
    return gluon.pays(q, k, v)


def _like(q: Tensor, last: Any, device: Any = None) -> Tensor:
    """Memory of q's shape, but for the last dimension, and q's order of dimensions."""
    make: Any = {"device": device or q.device}
    if last is q.shape[-1] or last == q.shape[-1]:
        out = torch.empty_like(q, **make)
        return out if out.stride(-1) == 1 else q.new_empty(q.shape, **make)
    if q.stride(1) < q.stride(2):  # [B, S, H, D] transposed
        out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], last), **make)
        return out.transpose(1, 2)
    return q.new_empty((*q.shape[:3], last), **make)


def _laid(found: Tensor, q: Tensor) -> Tensor:
    """What was found, in the strides that the operation promises: those of ``_like``."""
    last = found.shape[-1]
    same = found.stride() == q.stride() or found.stride() == _like(q, last, "meta").stride()
    return found if same and found.dtype == q.dtype else _like(q, last).copy_(found)


# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::attention", taped=True)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor], numbers: list[int], score: str,
    empty: str, seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``seed`` ([1], int64, on q's device) decides which weights are dropped out."""
    if q.numel() == 0 or k.shape[2] == 0:
        return _nothing(q, v, empty)
    program = program_of(q, inputs, numbers, score, empty, dropout)
    chosen = choice.forward(_case(q, k, v, program))
    if chosen == "composed":
        out, lse = _results(q, v)
        composed.forward(q, k, v, inputs, numbers, score, empty, out, lse, drop(seed, dropout))
        return out, lse
    assert program is not None
    if chosen == "cudnn":
        assert program.scale is not None
        out, lse = compat_attention.cudnn_forward(q, k, v, bool(program.keep), program.scale)
    elif chosen == "decode":
        from inductor_ext.templates import attention_decode_launch as decode

        out, lse = decode.decode(q, k, v, inputs, numbers, program, float32_precision())
    else:
        from inductor_ext.templates import attention_launch as launch

        out, lse = launch.forward(
            q, k, v, inputs, numbers, program, float32_precision(), dropout=drop(seed, dropout)
        )
    return _laid(out, q), lse.contiguous()


def drop(seed: Tensor | None, probability: float) -> Dropout | None:
    """What the kernels and the composed functions take of a seed; None for no dropout."""
    if seed is None:
        return None
    return Dropout(seed, probability)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _like(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=wide)


def _nothing(q: Tensor, v: Tensor, empty: str) -> tuple[Tensor, Tensor]:
    """Of no query rows or no keys."""
    out, lse = _results(q, v)
    return out.fill_(math.nan if empty == "nan" else 0.0), lse.fill_(-math.inf)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor], numbers: list[int], score: str,
    empty: str, seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _results(q, v)


@opaque_op("inductor_ext::attention_backward", taped=True)
def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor],
    numbers: list[int], score: str, empty: str, out: Tensor, lse: Tensor, needed: list[bool],
    seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """``needed``: of q, k, v and of each input; what is not needed comes empty."""
    if q.numel() == 0 or k.shape[2] == 0:
        dq, dk, dv, own = _places(q, k, v, inputs, needed)
        return dq.zero_(), dk.zero_(), dv.zero_(), [t.zero_() for t in own]
    given, inputs = inputs, [_collapsed(x) for x in inputs]
    program = program_of(q, inputs, numbers, score, empty, dropout)
    case = _case(q, k, v, program, True)
    chosen = choice.backward(case, of_lse=dlse is not None)
    found: list[Tensor]
    if chosen == "cudnn":
        assert program is not None and program.scale is not None
        found = [*compat_attention.cudnn_backward(
            _laid(do, out), q, k, v, out, lse, bool(program.keep), program.scale
        )]  # fmt: skip
        dinputs = []  # there are no inputs
    elif chosen == "kernel":
        from inductor_ext.templates import attention_backward_launch as launch

        assert program is not None
        # An input that is only compared has a gradient of 0, which no kernel writes.
        of_inputs = [n and i in program.differentiable for i, n in enumerate(needed[3:])]
        *found, dinputs = launch.backward(
            do, dlse, q, k, v, inputs, numbers, program, out, lse, [*needed[:3], *of_inputs],
            float32_precision(), dropout=drop(seed, dropout),
        )  # fmt: skip
        dinputs = [
            f if there else x.new_zeros(()).expand(x.shape)
            for f, there, x in zip(dinputs, of_inputs, inputs, strict=True)
        ]
    else:
        *found, dinputs = composed.backward(
            do, dlse, q, k, v, inputs, numbers, score, needed, drop(seed, dropout)
        )  # fmt: skip
    dq, dk, dv = (
        _laid(part, t) if need else t.new_empty(0)
        for part, t, need in zip(found, (q, k, v), needed, strict=False)
    )
    others = zip(dinputs, given, needed[3:], strict=True)
    return dq, dk, dv, [_spread(part, x) if need else x.new_empty(0) for part, x, need in others]


def _places(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Memory for the gradients."""
    dq, dk, dv = (
        _like(t, t.shape[-1]) if need else t.new_empty(0)
        for t, need in zip((q, k, v), needed, strict=False)
    )
    others = zip(inputs, needed[3:], strict=True)
    return dq, dk, dv, [x.new_empty(x.shape if need else 0) for x, need in others]


def _collapsed(x: Tensor) -> Tensor:
    """An input with a size of 1 wherever it is expanded."""
    for dim in range(4):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x


def _spread(found: Tensor, x: Tensor) -> Tensor:
    """An input's gradient, dense. Of that of an expanded input only the sum along those dimensions
    means anything: it is at the first place, as a slice's would be."""
    if found.shape == x.shape and found.dtype == x.dtype and found.is_contiguous():
        return found
    whole = x.new_zeros(x.shape)
    place = whole
    for dim in range(4):
        place = place.narrow(dim, 0, found.shape[dim])
    place.copy_(found)
    return whole


@_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor],
    numbers: list[int], score: str, empty: str, out: Tensor, lse: Tensor, needed: list[bool],
    seed: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    return _places(q, k, v, inputs, needed)


@opaque_op("inductor_ext::attention_columns", taped=True)
def _columns(
    q: Tensor, k: Tensor, lse: Tensor, inputs: list[Tensor], numbers: list[int], score: str,
    first_row: int,
) -> Tensor:  # fmt: skip
    sums = _sums(q, k)
    if q.numel() == 0 or k.shape[2] == 0 or first_row >= q.shape[2]:
        return sums.zero_()
    program = program_of(q, inputs, numbers, score, "zero")
    case = _case(q, k, q, program)
    if choice.forward(case) == "composed":
        composed.columns(q, k, lse, inputs, numbers, score, first_row, sums)
        return sums
    from inductor_ext.templates import attention_launch as launch

    return launch.columns(
        q, k, lse, inputs, numbers, program, float32_precision(), first_row
    ).contiguous()


def _sums(q: Tensor, k: Tensor) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((q.shape[0], k.shape[1], k.shape[2]), dtype=wide)


@_columns.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor, inputs: list[Tensor], numbers: list[int], score: str,
    first_row: int,
) -> Tensor:  # fmt: skip
    return _sums(q, k)


@opaque_op("inductor_ext::attention_ragged", taped=True)
def _ragged(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor,
    inputs: list[Tensor], numbers: list[int], score: str, empty: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of keys that each sequence has ``lengths`` of, which are ``columns`` in the score, dense or
    in pages [pages, page size, Hkv, D]; for inference."""
    if kernels_apply(q):
        from inductor_ext.templates import attention_decode_launch as decode

        program = program_of(q, inputs, numbers, score, empty)
        fits = decode.fits(q, k, block_table is not None)
        if program is not None and fits and q.numel() and k.numel():
            table = None if block_table is None else block_table.to(torch.int32)
            out, lse = decode.decode(
                q, k, v, inputs, numbers, program, float32_precision(),
                lengths=lengths.to(torch.int32), block_table=table,
            )  # fmt: skip
            return _laid(out, q), lse.contiguous()
    if block_table is not None:
        k, v = gathered(k, block_table), gathered(v, block_table)
    score, inputs = options_of.with_lengths(score, lengths, inputs)
    return _attention(q, k, v, inputs, numbers, score, empty)


@_ragged.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor,
    inputs: list[Tensor], numbers: list[int], score: str, empty: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _results(q, v)


def gathered(pages: Tensor, block_table: Tensor) -> Tensor:
    """[B, Hkv, most pages * page size, D] of pages [pages, page size, Hkv, D]."""
    return pages[block_table.long()].flatten(1, 2).transpose(1, 2)


# --- gradients ------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, read, ctx.numbers, ctx.score, ctx.empty, seed, ctx.dropout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(seed, q, k, v, *output, *read)


def _grad(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    seed, q, k, v, out, lse, *inputs = ctx.saved_tensors
    # An empty list counts as one of tensors; arguments that were left out have no gradient.
    rest: Any = (None if ctx.numbers else [], *[None] * (len(ctx.needs_input_grad) - 5))
    if do is None and dlse is None:
        return None, None, None, [None] * len(inputs), *rest
    if do is None:
        do = torch.zeros_like(out)
    needed = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[3]]
    if torch.is_grad_enabled() or under_functorch():
        dq, dk, dv, *dinputs = _again(ctx, seed, (q, k, v, *inputs), do, dlse)
        return dq, dk, dv, dinputs, *rest
    dq, dk, dv, dinputs = _backward(
        do, dlse, q, k, v, inputs, ctx.numbers, ctx.score, ctx.empty, out, lse, needed, seed,
        ctx.dropout,
    )  # fmt: skip
    dq, dk, dv, *dinputs = (
        g if n else None for g, n in zip((dq, dk, dv, *dinputs), needed, strict=True)
    )
    return dq, dk, dv, dinputs, *rest


def _again(ctx: Any, seed: Tensor | None, tensors: Any, do: Tensor, dlse: Tensor | None) -> Any:
    """The gradients as differentiable functions, for ``create_graph``."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Nodes of their own: differentiating an input itself would run through what made it.
        own: Any = [t.view_as(t) for t in tensors]
        floating = [t.dtype.is_floating_point for t in own]
        own = [
            t.detach().requires_grad_() if f and not t.requires_grad else t
            for t, f in zip(own, floating, strict=True)
        ]
        out, lse = composed.attention(
            own[0], own[1], own[2], own[3:], ctx.numbers, ctx.score, ctx.empty,
            drop(seed, ctx.dropout),
        )  # fmt: skip
        pairs = [(out, do)] if dlse is None else [(out, do), (lse, dlse.to(lse.dtype))]
        leaves = [t for t, f in zip(own, floating, strict=True) if f]
        grads = iter(torch.autograd.grad(
            [o for o, _ in pairs], leaves, [d for _, d in pairs], create_graph=again,
            allow_unused=True,
        ))  # fmt: skip
        return [next(grads) if f else None for f in floating]


_attention.register_autograd(_grad, setup_context=_setup)


@_attention.register_vmap
def _(
    info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor],
    numbers: list[int], score: str, empty: str, seed: Tensor | None = None, dropout: float = 0.0,
) -> Any:  # fmt: skip
    """In a compiled program, where a vmap is a larger batch."""
    if seed is not None:
        raise NotImplementedError("dropout is expected outside of vmap, got it in one")
    if re.search(r"\bb\b", score):
        raise NotImplementedError("a score that reads b is expected outside of vmap, got it in one")
    count = info.batch_size

    def folded(t: Tensor, dim: int | None) -> Tensor:
        return (t.expand(count, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)

    def folded_input(x: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return x if x.shape[0] == 1 else folded(x, None)
        x = x.movedim(dim, 0)
        return folded(x.expand(-1, batch, *x.shape[2:]), 0)

    dims = in_dims[3] if isinstance(in_dims[3], (list, tuple)) else [None] * len(inputs)
    batch = q.shape[0] if in_dims[0] is None else q.movedim(in_dims[0], 0).shape[1]
    read = [folded_input(x, dim) for x, dim in zip(inputs, dims, strict=True)]
    q, k, v = (folded(t, dim) for t, dim in zip((q, k, v), in_dims, strict=False))
    out, lse = _attention(q, k, v, read, numbers, score, empty)
    return (out.unflatten(0, (count, batch)), lse.unflatten(0, (count, batch))), (0, 0)
