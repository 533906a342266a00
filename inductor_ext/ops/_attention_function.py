"""``ops.attention``: every mask, bias and cache of softmax attention, as one score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from inductor_ext.ops import _attention_calls as calls
from inductor_ext.ops import _attention_checks as checks
from inductor_ext.ops import _attention_options as options_of
from inductor_ext.ops._rows import is_zero


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

    A query row that keeps no key gives 0, as in ``scaled_dot_product_attention``. One that is
    masked throughout by finite numbers (-1e9 and the like) is uniform, as in eager, in its
    gradients too. Tiles of places are skipped where the mask is bool, -inf, or -1e30 and less.

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
            bool, True where a key is kept. -inf drops a key. What is expanded is not copied; its
            gradient is right in sum, at the first place of what was expanded.
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
            the above is this then. Needed with ``block_table``. Not looked at by the host: what
            rows of a length below 0 or over Sk give is not defined.
        dropout: probability with which a weight is 0, the others scaled up: 0, or of 2^-10 to
            1 - 2^-10 in steps of 2^-16. Each call takes a seed from torch's generator; what is
            dropped follows from it and from places (Philox4x32-7), so that nothing is stored for
            the backward. It is not what ``F.dropout`` would drop. lse is that of all scores. Where
            nothing else is asked for but ``causal``, SDPA's own dropout.
        return_lse: return the log-sum-exp of the scores (with ``sink``), natural logarithm.
        return_colsum: return the sum of the weights that each key got, over the rows and the heads
            of its group. Not with ``dropout``. No gradients pass through it.
        colsum_rows: sum over so many last rows only (SnapKV's window); None for all.

    Returns out [B, Hq, Sq, Dv] in q's dtype and order of dimensions in memory, or a tuple (out, lse
    [B, Hq, Sq], column sums [B, Hkv, Sk]) of those asked for, lse and sums in fp32 (fp64 for fp64).

    16-bit products accumulate in fp32, weights are rounded to the inputs' dtype before the product
    with v; fp32 products are as ``torch.set_float32_matmul_precision`` says. Gradients of q, k, v,
    bias, slot_bias, sink and floating score_inputs, any number of times, also through lse. Memory
    is linear in Sq and Sk, but for gradients of gradients and transforms of torch.func.
    Deterministic under ``torch.use_deterministic_algorithms``; else plain scores go to cuDNN, whose
    gradients are not. A compiled program does not depend on B, Sq, Sk, window or sinks.

    Raises ValueError or TypeError for what does not fit. (FlashAttention-2, arXiv 2307.08691.)
    """
    checks.check_heads(q, k, v, block_table is not None)
    checks.check_numbers(scale, softcap, dropout)
    checks.check_flags(return_lse=return_lse, return_colsum=return_colsum)
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
    if lengths is not None:
        out, lse = calls.of_lengths(q, k, v, block_table, lengths, score, dropout)
    else:
        out, lse = calls.attend(q, k, v, score.inputs, score.numbers, score.text, dropout)
    if sink is not None:
        own_sink = sink.to(lse.dtype)[:, None]
        out = (out * torch.sigmoid(lse - own_sink).unsqueeze(-1)).to(q.dtype)
        lse = torch.logaddexp(lse, own_sink)
    results: list[Tensor] = [out]
    if return_lse:
        results.append(lse)
    if return_colsum:
        k, _, text, inputs = calls.dense(k, v, block_table, lengths, score)
        first = 0 if colsum_rows is None else q.shape[2] - colsum_rows
        results.append(calls.column_sums(q, k, lse, inputs, score.numbers, text, first))
    return tuple(results) if len(results) > 1 else out
