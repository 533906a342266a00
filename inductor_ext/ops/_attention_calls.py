"""The operations of attention as functions of tensors: outside of transforms or in them, with keys
that lie in pages or not, with a seed where weights are dropped out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _attention as operation
from inductor_ext.ops import _attention_composed as composed
from inductor_ext.ops import _attention_options as options_of
from inductor_ext.ops._attention_dropout import seed_of
from inductor_ext.ops._rows import beside


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: list[Tensor], numbers: list[Any], score: str,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse), differentiable any number of times, under any transform."""
    seed = seed_of(q.device) if dropout else None
    if under_functorch():
        drop = operation.drop(seed, dropout)
        return composed.attention(q, k, v, inputs, numbers, score, "zero", drop)
    inputs = [_own_elements(x) for x in inputs]
    with beside(q):
        return operation._attention(q, k, v, inputs, numbers, score, "zero", seed, dropout)


def _own_elements(x: Tensor) -> Tensor:
    """An input; an expanded one that will be asked for its own gradient gets memory for it."""
    asked = x.requires_grad and x.is_leaf
    return x.clone(memory_format=torch.contiguous_format) if asked and 0 in x.stride() else x


def of_lengths(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor, score: Any,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same of keys of which each sequence has its own number."""
    tensors = q, k, v, *score.inputs
    if (
        not dropout
        and not under_functorch()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    ):
        with beside(q):
            return operation._ragged(
                q, k, v, block_table, lengths, score.inputs, score.numbers, score.text, "zero"
            )
    k, v, text, inputs = dense(k, v, block_table, lengths, score)
    return attend(q, k, v, inputs, score.numbers, text, dropout)


def dense(
    k: Tensor, v: Tensor, block_table: Tensor | None, lengths: Tensor | None, score: Any
) -> tuple[Tensor, Tensor, str, list[Tensor]]:
    """Keys and values out of their pages, and the score with lengths among its inputs."""
    if block_table is not None:
        k, v = operation.gathered(k, block_table), operation.gathered(v, block_table)
    if lengths is None:
        return k, v, score.text, score.inputs
    return k, v, *options_of.with_lengths(score.text, lengths, score.inputs)


def column_sums(
    q: Tensor, k: Tensor, lse: Tensor, inputs: list[Tensor], numbers: list[Any], score: str,
    first_row: Any,
) -> Tensor:  # fmt: skip
    if under_functorch():
        raise NotImplementedError(
            "return_colsum is expected outside of transforms of torch.func, got it in one"
        )
    with torch.no_grad(), beside(q):
        return operation._columns(
            q.detach(), k.detach(), lse.detach(), [x.detach() for x in inputs], numbers, score,
            first_row,
        )  # fmt: skip
