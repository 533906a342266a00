"""Softmax attention with any score: out = softmax(score(scale q k^T)) v, without the scores in
memory.

The score is a line of aten operations (``attention_score``) that the operation carries. A kernel
generated around it, cuDNN or torch functions compute it, as ``_attention_choice`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from inductor_ext import attention_score, compat, compat_attention
from inductor_ext.compat import float32_precision, under_functorch
from inductor_ext.ops import _attention_checks as checks
from inductor_ext.ops import _attention_choice as choice
from inductor_ext.ops import _attention_composed as composed
from inductor_ext.ops import _attention_options as options_of
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import beside, is_zero
from inductor_ext.templates.attention_program import Input, Program

# --- what is computed, and by what ----------------------------------------------------------------


def kernels_apply(q: Tensor) -> bool:
    """Whether kernels may compute on a tensor's device."""
    return q.is_cuda


def program_of(inputs: Sequence[Tensor], numbers: Sequence[Any], score: str,
               empty: str) -> Program | None:  # fmt: skip
    """The score as a kernel computes it; None where none can."""
    read = tuple(Input(x.dtype, _axes(x)) for x in inputs)
    try:
        return attention_score.program(score, read, len(numbers), empty)
    except attention_score.NoProgram:
        return None


def _axes(x: Tensor) -> str:
    """The axes that an input varies along."""
    return "".join(
        a for a, n, s in zip("bhqk", x.shape, x.stride(), strict=True) if n != 1 and s != 0
    )


def _plain(program: Program | None, numbers: Sequence[Any], q: Tensor, k: Tensor) -> str:
    """Whether SDPA has this score: "full", "causal" or ""."""
    if program is None or program.scale is None or program.inputs or numbers:
        return ""
    if not program.keep:
        return "full"
    if q.shape[2] != k.shape[2]:
        return ""
    for causal in ("lower_right", "upper_left"):
        score = options_of.score_of(options_of.Options(program.scale, causal=causal), 1, 1)
        if program_of([], [], score.text, program.empty) == program:
            return "causal"
    return ""


def _case(
    q: Tensor, k: Tensor, v: Tensor, numbers: Sequence[Any], program: Program | None
) -> choice.Case:
    plain = _plain(program, numbers, q, k)
    return choice.Case(
        on_card=kernels_apply(q),
        capability=compat.device_capability(q.device) if q.is_cuda else (0, 0),
        dtype=q.dtype, heads=q.shape[1], own_heads=k.shape[1], rows=q.shape[2],
        columns=k.shape[2], dim=q.shape[3], value_dim=v.shape[3], plain=plain,
        has_program=program is not None,
        cudnn=bool(plain) and compat_attention.cudnn_takes(q, k, v, plain == "causal"),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _like(q: Tensor, last: Any) -> Tensor:
    """Memory of q's shape, but for the last dimension, and q's order of dimensions."""
    if last is q.shape[-1] or last == q.shape[-1]:
        out = torch.empty_like(q)
        return out if out.stride(-1) == 1 else q.new_empty(q.shape)
    shape = (*q.shape[:3], last)
    if q.stride(1) < q.stride(2):  # [B, S, H, D] transposed
        return q.new_empty((shape[0], shape[2], shape[1], last)).transpose(1, 2)
    return q.new_empty(shape)


def _into(place: Tensor, found: Tensor) -> Tensor:
    """What was found, in the strides that the operation promises."""
    if found.stride() == place.stride() and found.dtype == place.dtype:
        return found
    return place.copy_(found)


# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor], numbers: list[int], score: str,
    empty: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0 or k.shape[2] == 0:
        return _nothing(q, v, empty)
    program = program_of(inputs, numbers, score, empty) if kernels_apply(q) else None
    chosen = choice.forward(_case(q, k, v, numbers, program))
    if chosen == "composed":
        out, lse = _results(q, v)
        composed.forward(q, k, v, inputs, numbers, score, empty, out, lse)
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

        out, lse = launch.forward(q, k, v, inputs, numbers, program, float32_precision())
    return _into(_like(q, v.shape[-1]), out), lse.contiguous()


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
    empty: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _results(q, v)


@opaque_op("inductor_ext::attention_backward")
def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor],
    numbers: list[int], score: str, empty: str, out: Tensor, lse: Tensor, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    places = [_like(t, t.shape[-1]) for t in (q, k, v)]
    given, inputs = inputs, [_collapsed(x) for x in inputs]
    if q.numel() == 0 or k.shape[2] == 0:
        zero = [p.zero_() for p in places]
        dinputs = [t.zero_() for t in _gradients(given, needed)]
        return zero[0], zero[1], zero[2], dinputs
    program = program_of(inputs, numbers, score, empty) if kernels_apply(q) else None
    known = program is not None and all(
        i in program.differentiable for i, need in enumerate(needed) if need
    )
    case = _case(q, k, v, numbers, program if known else None)
    chosen = choice.backward(case, of_lse=dlse is not None)
    found: list[Tensor]
    if chosen == "cudnn":
        assert program is not None and program.scale is not None
        found = [*compat_attention.cudnn_backward(
            do, q, k, v, out, lse, bool(program.keep), program.scale
        )]  # fmt: skip
        dinputs = []
    elif chosen == "kernel":
        from inductor_ext.templates import attention_backward_launch as launch

        *found, dinputs = launch.backward(
            do, dlse, q, k, v, inputs, numbers, program, out, lse, needed, float32_precision()
        )
    else:
        *found, sums = composed.backward(do, dlse, q, k, v, inputs, numbers, score, needed)
        there = iter(sums)
        dinputs = [next(there) if need else q.new_empty(0) for need in needed]
    dq, dk, dv = (_into(p, f) for p, f in zip(places, found, strict=True))
    if not dinputs:
        dinputs = [q.new_empty(0) for _ in inputs]
    own = _gradients(given, needed)
    for place, part, need in zip(own, dinputs, needed, strict=True):
        if need:
            _spread(place, part)
    return dq, dk, dv, own


def _collapsed(x: Tensor) -> Tensor:
    """An input with a size of 1 wherever it is expanded."""
    for dim in range(4):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x


def _spread(place: Tensor, found: Tensor) -> None:
    """The gradient of an expanded input: only its sum along those dimensions means anything, as of
    a slice's, so it is at the first place."""
    if place.shape != found.shape:
        place.zero_()
        for dim in range(4):
            place = place.narrow(dim, 0, found.shape[dim])
    place.copy_(found)


def _gradients(inputs: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    return [
        x.new_empty(x.shape) if need else x.new_empty(0)
        for x, need in zip(inputs, needed, strict=True)
    ]


@_backward.register_fake
def _(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor],
    numbers: list[int], score: str, empty: str, out: Tensor, lse: Tensor, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dq, dk, dv = (_like(t, t.shape[-1]) for t in (q, k, v))
    return dq, dk, dv, _gradients(inputs, needed)


@opaque_op("inductor_ext::attention_columns")
def _columns(
    q: Tensor, k: Tensor, lse: Tensor, inputs: list[Tensor], numbers: list[int], score: str,
    first_row: int,
) -> Tensor:  # fmt: skip
    sums = _sums(q, k)
    if q.numel() == 0 or k.shape[2] == 0 or first_row >= q.shape[2]:
        return sums.zero_()
    program = program_of(inputs, numbers, score, "zero") if kernels_apply(q) else None
    case = _case(q, k, q, numbers, program)
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


@opaque_op("inductor_ext::attention_ragged")
def _ragged(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor,
    inputs: list[Tensor], numbers: list[int], score: str, empty: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of keys that each sequence has ``lengths`` of, which are ``columns`` in the score, dense or
    in pages [pages, page size, Hkv, D]; for inference."""
    if kernels_apply(q):
        from inductor_ext.templates import attention_decode_launch as decode

        program = program_of(inputs, numbers, score, empty)
        if program is not None and decode.fits(q, k) and q.numel():
            out, lse = decode.decode(
                q, k, v, inputs, numbers, program, float32_precision(), lengths=lengths,
                block_table=block_table,
            )  # fmt: skip
            return _into(_like(q, v.shape[-1]), out), lse.contiguous()
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
    q, k, v, read, ctx.numbers, ctx.score, ctx.empty = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *read)


def _grad(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    q, k, v, out, lse, *inputs = ctx.saved_tensors
    rest = (None if ctx.numbers else []), None, None  # an empty list counts as one of tensors
    if do is None and dlse is None:
        return None, None, None, [None] * len(inputs), *rest
    if do is None:
        do = torch.zeros_like(out)
    needed = list(ctx.needs_input_grad[3])
    if torch.is_grad_enabled() or under_functorch():
        dq, dk, dv, *dinputs = _again(ctx, (q, k, v, *inputs), do, dlse)
        return dq, dk, dv, dinputs, *rest
    dq, dk, dv, dinputs = _backward(
        do, dlse, q, k, v, inputs, ctx.numbers, ctx.score, ctx.empty, out, lse, needed
    )
    return dq, dk, dv, [g if n else None for g, n in zip(dinputs, needed, strict=True)], *rest


def _again(ctx: Any, tensors: Any, do: Tensor, dlse: Tensor | None) -> Any:
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
            own[0], own[1], own[2], own[3:], ctx.numbers, ctx.score, ctx.empty
        )
        pairs = [(out, do)] if dlse is None else [(out, do), (lse, dlse.to(lse.dtype))]
        leaves = [t for t, f in zip(own, floating, strict=True) if f]
        grads = iter(torch.autograd.grad(
            [o for o, _ in pairs], leaves, [d for _, d in pairs], create_graph=again,
            allow_unused=True,
        ))  # fmt: skip
        return [next(grads) if f else None for f in floating]


_attention.register_autograd(_grad, setup_context=_setup)


# --- public ---------------------------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor], numbers: list[Any], score: str,
    empty: str = "zero",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse), differentiable any number of times, under any transform."""
    if under_functorch():
        return composed.attention(q, k, v, inputs, numbers, score, empty)
    with beside(q):
        return _attention(q, k, v, inputs, numbers, score, empty)


def _of_lengths(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor, score: Any
) -> tuple[Tensor, Tensor]:
    """The same of keys of which each sequence has its own number."""
    tensors = q, k, v, *score.inputs
    if not under_functorch() and not (
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    ):
        with beside(q):
            return _ragged(
                q, k, v, block_table, lengths, score.inputs, score.numbers, score.text, "zero"
            )
    k, v, text, inputs = _dense(k, v, block_table, lengths, score)
    return attend(q, k, v, inputs, score.numbers, text)


def _dense(
    k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor | None, score: Any
) -> tuple[Tensor, Tensor, str, list[Tensor]]:
    """Keys and values out of their pages, and the score with lengths among its inputs."""
    if block_table is not None:
        k, v = gathered(k, block_table), gathered(v, block_table)
    if lengths is None:
        return k, v, score.text, score.inputs
    return k, v, *options_of.with_lengths(score.text, lengths, score.inputs)


def _column_sums(
    q: Tensor, k: Tensor, lse: Tensor, inputs: list[Tensor], numbers: list[Any], score: str,
    first_row: Any,
) -> Tensor:  # fmt: skip
    if under_functorch():
        raise NotImplementedError(
            "return_colsum is expected outside of transforms of torch.func, got it in one"
        )
    with torch.no_grad(), beside(q):
        return _columns(
            q.detach(), k.detach(), lse.detach(), [x.detach() for x in inputs], numbers, score,
            first_row,
        )  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    scale: float | None = None, causal: bool | str = False,
    window: int | tuple[int | None, int | None] | None = None, sinks: int = 0,
    segments: Tensor | tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None,
    slot_bias: Tensor | None = None, softcap: float | None = None, sink: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None, score_inputs: Sequence[Tensor] = (),
    block_table: Tensor | None = None, lengths: Tensor | None = None, dropout: float = 0.0,
    return_lse: bool = False, return_colsum: bool = False, colsum_rows: int | None = None,
) -> Any:  # fmt: skip
    """Softmax attention with masks, biases and caches, none of which is a matrix of scores.

        s = scale q k^T         capped: c tanh(s / c)         plus bias, plus slot_bias
        out = softmax over the kept keys of s, times v

    A query row that keeps no key gives 0, as in ``scaled_dot_product_attention``.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]; one of fp16, bf16, fp32, fp64
            for all. Hq is a multiple of Hkv: query head h reads head h // (Hq / Hkv). Any strides;
            [B, S, H, D] transposed is read as it lies.
        scale: of the products; None for D^-0.5. Not 0.
        causal: True or "lower_right": the last row is at the last key, row i at key i + Sk - Sq;
            "upper_left": row i is at key i, as SDPA's ``is_causal``. Rows see keys up to their own.
        window: (left, right), keys kept in front of and behind a row's place, its own apart; None
            for no end; one number for both. FlashAttention's convention: a window of "the last w
            tokens" is (w - 1, 0). Rows are placed as ``causal`` says, else as "lower_right".
        sinks: so many first keys are kept whatever the window (not against ``causal``).
        segments: only equal segments see each other. Ids [B, S] or [1, S], int32 or int64, or
            offsets [segments + 1] from 0 to S (``cu_seqlens``) of packed sequences; a pair where
            those of rows and keys differ. With a pair of offsets, each segment's last row is at its
            last key (not for "upper_left").
        bias: broadcastable to [B, Hq, Sq, Sk]: added, in q's dtype or fp32 (fp64 for fp64), or
            bool, True where a key is kept. -inf drops a key.
        slot_bias: [B, Hkv, Sk] (B may be 1), added for all rows and heads of a group.
        softcap: c; None for no cap.
        sink: [Hq], a learned logit per head that takes part in the softmax and has no value.
        score_mod: a function (s, b, h, q, k, *score_inputs) -> score of torch's pointwise
            functions: s the score so far in fp32, b, h, q, k int64 indices that broadcast to it.
            It comes before ``causal``, ``window``, ``segments`` and a bool ``bias``. In a compiled
            program it must be a function defined outside of that. A score of -inf drops a key.
        score_inputs: tensors of four dimensions that broadcast to [B, Hq, Sq, Sk].
        block_table: [B, pages of a sequence], int32 or int64: k and v are pages then, [pages, page
            size, Hkv, D], and key j of sequence b is in page ``block_table[b, j // page size]``.
            Entries behind a sequence's end are not looked at, but must be pages.
        lengths: [B], int32 or int64: the keys that each sequence has, from the front; Sk in all of
            the above is this then. Needed with ``block_table``. One over Sk is not noticed.
        dropout: probability with which a weight is 0, the others scaled up, by torch's generator.
            Computed by SDPA where nothing else is asked for but ``causal``, else of torch functions
            with Sq x Sk weights in memory.
        return_lse: return the log-sum-exp of the scores (with ``sink``), natural logarithm.
        return_colsum: return the sum of the weights that each key got, over the rows and the heads
            of its group. Not with ``dropout``. No gradients pass through it.
        colsum_rows: sum over so many last rows only (SnapKV's window); None for all.

    Returns out [B, Hq, Sq, Dv] in q's dtype and order of dimensions in memory, or a tuple (out, lse
    [B, Hq, Sq], column sums [B, Hkv, Sk]) of those asked for, lse and sums in fp32 (fp64 for fp64).

    16-bit products accumulate in fp32, weights are rounded to the inputs' dtype before the product
    with v; fp32 products are as ``torch.set_float32_matmul_precision`` says. Gradients of q, k, v,
    bias, slot_bias, sink and floating score_inputs, any number of times, also through lse. Memory
    is linear in Sq and Sk, but for gradients of gradients and transforms of torch.func. Deterministic
    under ``torch.use_deterministic_algorithms``; else plain scores go to cuDNN, whose gradients are
    not. A compiled program does not depend on B, Sq, Sk, window or sinks.

    Raises ValueError or TypeError for what does not fit. (FlashAttention-2, arXiv 2307.08691.)
    """
    checks.check_heads(q, k, v, block_table is not None)
    checks.check_numbers(scale, softcap, dropout)
    if block_table is not None:
        checks.check_pages(block_table, lengths, q)
    if lengths is not None:
        checks.check_lengths(lengths, q)
    own = k.shape[1] if block_table is None else k.shape[2]
    columns = k.shape[2] if block_table is None else block_table.shape[1] * k.shape[1]
    placed = checks.causal_of(causal)
    ends = (None, None) if window is None else checks.window_of(window)
    checks.check_sinks(sinks)
    checks.check_score_inputs(score_mod, score_inputs, q, columns)
    checks.check_columns_asked(return_colsum, colsum_rows, q.shape[2], dropout)
    if bias is not None:
        bias = checks.check_bias(bias, q, columns)
    if slot_bias is not None:
        checks.check_slot_bias(slot_bias, q, own, columns)
    if sink is not None:
        checks.check_sink(sink, q)
    packed = None
    if segments is not None:
        of_q, of_k = checks.segments_of(segments, q, columns)
        packed = options_of.packed(of_q, of_k, q.shape[2], columns, placed)
    options = options_of.Options(
        scale=guard_scalar(q.shape[-1]) ** -0.5 if scale is None else scale, softcap=softcap,
        bias=bias, slot_bias=slot_bias, causal=placed, window=ends,
        sinks=None if is_zero(sinks) else sinks, segments=packed, score_mod=score_mod,
        score_inputs=tuple(score_inputs),
    )  # fmt: skip
    alone = not return_lse and sink is None and lengths is None and options.plain
    if dropout and alone and (placed != "lower_right" or q.shape[2] == columns):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=placed != "", scale=options.scale,
            enable_gqa=q.shape[1] != own,
        )  # fmt: skip
    score = options_of.score_of(options, q.shape[1], q.shape[1] // own)
    if dropout:
        k, v, text, inputs = _dense(k, v, block_table, lengths, score)
        out, lse = composed.attention(q, k, v, inputs, score.numbers, text, "zero", dropout)
    elif lengths is not None:
        out, lse = _of_lengths(q, k, v, block_table, lengths, score)
    else:
        out, lse = attend(q, k, v, score.inputs, score.numbers, score.text)
    if sink is not None:
        own_sink = sink.to(lse.dtype)[:, None]
        out = (out * torch.sigmoid(lse - own_sink).unsqueeze(-1)).to(q.dtype)
        lse = torch.logaddexp(lse, own_sink)
    results: list[Tensor] = [out]
    if return_lse:
        results.append(lse)
    if return_colsum:
        k, _, text, inputs = _dense(k, v, block_table, lengths, score)
        first = 0 if colsum_rows is None else q.shape[2] - colsum_rows
        results.append(_column_sums(q, k, lse, inputs, score.numbers, text, first))
    return tuple(results) if len(results) > 1 else out
