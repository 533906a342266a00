"""``linear_cross_entropy`` whose classes lie over the ranks of a process group.

Each rank makes the logits of its own classes, chunk by chunk of the rows, and what ``_shards`` says
of them; one all-gather serves all rows, so that the chunks of a rank are its own affair. The
gradient reads the logits again: where one chunk held all rows they are still there, otherwise they
are made once more. A rank's part of h's gradient is made in fp32 and summed over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext.ops import _rows, _shards
from inductor_ext.ops._linear_chunks import (
    Gradients,
    buffer_of,
    computing,
    empty_gradients,
    logits_into,
    parts_of,
    rows_of_chunk,
)
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import INDEX, Loss, scaled
from inductor_ext.ops._shards import Shard


class _Chunks:
    """The logits of this rank's classes, one chunk of the rows at a time."""

    def __init__(
        self, h: Tensor, w: Tensor, bias: Tensor | None, memory: int, wanted: Sequence[bool]
    ) -> None:
        self.h, self.w, self.bias = h, w, bias
        size = rows_of_chunk(h, w, memory, wanted)
        self.logits, self.parts = buffer_of(h, w, size), parts_of(h.shape[0], size)
        self.made: slice | None = None

    def __getitem__(self, part: slice) -> Tensor:
        """The logits of a part; made, unless they are the last that were. The caller may overwrite
        them if it asks for no part a second time."""
        if part != self.made:
            with computing(self.h):
                logits_into(self.h[part], self.w, self.bias, self.logits)
            self.made = part
        return self.logits[: part.stop - part.start]


def _merged(
    loss: Loss, chunks: _Chunks, target: Tensor, weight: Tensor | None, shard: Shard, wanted: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(losses [N], lse [N], statistics [4, N], sums [4], local targets [N])."""
    h, columns = chunks.h, chunks.w.shape[0]
    bare = weight is None, chunks.bias is None
    agreed = (tuple(h.shape), h.dtype, loss, *bare, bool(wanted[0]))
    first, classes = _shards.place_of(shard, columns, h, agreed)
    local = _shards.local_targets(target, loss.ignore_index, first, classes, columns)
    shares = [_shards.statistics(loss, chunks[p], local[p], weight) for p in chunks.parts]
    every = _shards.gathered(torch.cat(shares, 1), shard.group)
    target_weight, sums = _shards.sums_of(loss, every, local, weight is not None, classes)
    losses, lse, stats = _shards.merged(loss, every, local, target_weight, sums)
    return losses, lse, stats, sums, local


def _gradients(
    loss: Loss, chunks: _Chunks, g: Tensor, g_lse: Tensor | None, weight: Tensor | None,
    stats: Tensor, sums: Tensor, local: Tensor, wanted: Sequence[bool], group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    h = chunks.h
    found = Gradients(h, chunks.w, chunks.bias, len(chunks.parts), wanted, partial=True)
    for part in chunks.parts:
        x = chunks[part]
        own_lse = None if g_lse is None else g_lse[part]
        own_stats = stats[:, part].contiguous()
        _shards.gradient(loss, g[part], own_lse, x, local[part], weight, own_stats, sums, dx=x)
        found.add(part, x)
    if found.dh is not None:
        found.dh = _shards.summed(found.dh, group)
    return found.done()


@opaque_op("inductor_ext::sharded_linear_cross_entropy_with_gradient")
def _with_gradient(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None,
    wanted: Sequence[bool], memory: int, group: str, start: int, classes: int, ignore_index: int,
    smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, dh, dW, db) for an incoming gradient of 1; empty where it is not ``wanted``."""
    loss = Loss(INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    chunks = _Chunks(h, w, bias, memory, wanted)
    shard = Shard(group, start, classes)
    losses, _, stats, sums, local = _merged(loss, chunks, target, weight, shard, wanted)
    one = losses.new_ones(1).expand(h.shape[0])
    made = _gradients(loss, chunks, one, None, weight, stats, sums, local, wanted, group)
    return losses.sum(), *made


@_with_gradient.register_fake
def _(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Any, wanted: Sequence[bool],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    return h.new_empty((), dtype=dtype), *empty_gradients(h, w, bias, wanted)


@opaque_op("inductor_ext::sharded_linear_cross_entropy_forward")
def _forward(
    h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None,
    wanted: Sequence[bool], memory: int, group: str, start: int, classes: int, ignore_index: int,
    smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(losses [N], lse [N], statistics [4, N], sums [4], local targets [N])."""
    loss = Loss(INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    chunks = _Chunks(h, w, bias, memory, (False, False, False))
    return _merged(loss, chunks, target, weight, Shard(group, start, classes), wanted)


@_forward.register_fake
def _(h: Tensor, *_: Any) -> Any:
    return _shards.empty_results(h)


@opaque_op("inductor_ext::sharded_linear_cross_entropy_backward")
def _backward(
    g: Tensor, g_lse: Tensor | None, h: Tensor, w: Tensor, bias: Tensor | None,
    weight: Tensor | None, stats: Tensor, sums: Tensor, local: Tensor, wanted: Sequence[bool],
    memory: int, group: str, ignore_index: int, smoothing: float, scale: float, softcap: float,
    z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dh, dW, db), empty where it is not ``wanted``; the logits are made once more."""
    loss = Loss(INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    chunks = _Chunks(h, w, bias, memory, wanted)
    return _gradients(loss, chunks, g, g_lse, weight, stats, sums, local, wanted, group)


@_backward.register_fake
def _(
    g: Tensor, g_lse: Any, h: Tensor, w: Tensor, bias: Tensor | None, weight: Any, stats: Tensor,
    sums: Tensor, local: Tensor, wanted: Sequence[bool], *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(h, w, bias, wanted)


def _setup_with_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.others = len(inputs) - 3
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or the backward is handed zero gradients of dh and dW


def _grad_with_gradient(ctx: Any, g: Any, *_: Any) -> Any:
    rest = (None,) * ctx.others
    if g is None:
        return (None, None, None, *rest)
    _shards.check_one_gradient()
    made = zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
    return (*(scaled(t, g) if want else None for t, want in made), *rest)


def _setup_forward(ctx: Any, inputs: Any, output: Any) -> None:
    h, w, bias, _, weight, _, ctx.memory, ctx.group, _, _, *ctx.options = inputs
    ctx.others = len(inputs) - 3
    ctx.save_for_backward(h, w, bias, weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _grad_forward(ctx: Any, g: Any, g_lse: Any, *_: Any) -> Any:
    rest = (None,) * ctx.others
    if g is None and g_lse is None:
        return (None, None, None, *rest)
    _shards.check_one_gradient()
    tensors, (stats, sums, local) = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    if g is None:
        g = torch.zeros(1, dtype=stats.dtype, device=stats.device).expand(stats.shape[1])
    wanted = [bool(want) for want in ctx.needs_input_grad[:3]]
    made = _backward(
        g, g_lse, *tensors, stats, sums, local, wanted, ctx.memory, ctx.group, *ctx.options
    )
    return (*(t if want else None for t, want in zip(made, wanted, strict=True)), *rest)


_with_gradient.register_autograd(_grad_with_gradient, setup_context=_setup_with_gradient)
_forward.register_autograd(_grad_forward, setup_context=_setup_forward)


def total_with_gradient(
    loss: Loss, h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None,
    wanted: Sequence[bool], memory: int, shard: Shard,
) -> Tensor:  # fmt: skip
    """The sum of ``losses_of``, with the gradients made on the way."""
    with _rows.beside(h):
        return _with_gradient(
            h, w, bias, target, weight, wanted, memory, *shard,
            *_shards.options_of(loss),
        )[0]  # fmt: skip


def losses_of(
    loss: Loss, h: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, weight: Tensor | None,
    wanted: Sequence[bool], memory: int, shard: Shard,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss [N], lse [N]), the same on every rank; differentiable by h, this rank's w and bias."""
    with _rows.beside(h):
        losses, lse, *_ = _forward(
            h, w, bias, target, weight, wanted, memory, *shard,
            *_shards.options_of(loss),
        )  # fmt: skip
    return losses, lse
