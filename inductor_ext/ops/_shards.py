"""Cross entropy of rows whose classes lie over the ranks of a process group.

Each rank reads its own columns, once, for a few numbers of each row (``launch.shard_statistics``);
one all-gather lets every rank merge all of them in the order of the ranks, so that every rank has
the same loss bit for bit; the gradient of a rank's columns follows from the merged numbers without
another word. Where shards' sizes are not known from a DTensor, a second all-gather of one integer a
rank tells each where its classes begin: on the card, so that nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from inductor_ext import compat_runtime
from inductor_ext.ops import _composed as composed
from inductor_ext.ops import _rows
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import INDEX, Loss
from inductor_ext.templates import cross_entropy_launch as launch

_IGNORED = -1  # the local target of an ignored row; of another shard's: the number of columns
_SIZE_BITS = 40  # of a shard's number of columns, below what the ranks must agree on


class Shard(NamedTuple):
    """This rank's part of the classes: the group's name; its first class and the number of all,
    which are -1 where only an exchange tells them."""

    group: str
    start: int = -1
    classes: int = -1


def shard_of(group: Any) -> Shard | None:
    """The shard of the ``group`` argument of an operation; None without a group."""
    if group is None:
        return None
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group is expected to be a torch.distributed.ProcessGroup that holds this rank, got "
            f"{group!r}"
        )
    if compat_runtime.under_functorch():
        raise RuntimeError(
            "no transform of torch.func, nor batched gradients, is expected around a loss over a "
            "group, got one"
        )
    return Shard(group.group_name)


# --- what ranks tell each other -------------------------------------------------------------------


def gathered(mine: Tensor, group: str) -> Tensor:
    """[ranks, *shape] of a tensor of the same shape on every rank."""
    process_group = compat_runtime.process_group(group)
    ranks = process_group.size()
    out = torch.empty((ranks * mine.shape[0], *mine.shape[1:]), dtype=mine.dtype,
                      device=mine.device)  # fmt: skip
    if mine.numel():
        compat_runtime.all_gather(out, mine.contiguous(), process_group)
    return out.reshape(ranks, *mine.shape)


def summed(mine: Tensor, group: str) -> Tensor:
    """The sum over the ranks, in place."""
    if mine.numel():
        dist.all_reduce(mine, group=compat_runtime.process_group(group))
    return mine


def place_of(shard: Shard, columns: int, like: Tensor, agreed: Any) -> tuple[Any, Any]:
    """(first class of this rank, number of classes): numbers, or tensors after an exchange.

    Fails an assertion on the device (ValueError on a CPU) if ``agreed`` differs between ranks.
    """
    if shard.start >= 0:
        return shard.start, shard.classes
    code = zlib.crc32(repr(agreed).encode()) >> 10
    mine = torch.full((1,), code << _SIZE_BITS | columns, dtype=torch.int64, device=like.device)
    every = gathered(mine, shard.group)[:, 0]
    said = "every rank of the group is expected to bring the same rows, dtype and options"
    same = every >> _SIZE_BITS == code
    if like.device.type == "cpu":
        others = (~same).nonzero()[:, 0].tolist()
        if others:
            raise ValueError(f"{said}, got others on ranks {others}; this one has {agreed}")
    else:
        torch._assert_async(same.all(), said)
    sizes = every & ((1 << _SIZE_BITS) - 1)
    return sizes[: compat_runtime.process_group(shard.group).rank()].sum(), sizes.sum()


def local_targets(target: Tensor, ignore_index: int, start: Any, classes: Any, columns: int) -> Any:
    """Targets as columns of this shard, int64: ``columns`` if another shard's, -1 if ignored."""
    target = target.long()
    counts = target != ignore_index
    inside = (target >= 0) & (target < classes)
    torch._assert_async((inside | ~counts).all(), "a target is not in [0, number of classes)")
    here = target - start
    here = torch.where((here >= 0) & (here < columns), here, columns)
    return torch.where(counts & inside, here, _IGNORED)


# --- rows, by kernels or composed -----------------------------------------------------------------


def statistics(loss: Loss, x: Tensor, local: Tensor, weight: Tensor | None) -> Tensor:
    """[K, N], what this shard has of each row: ``templates.cross_entropy_shards`` says what."""
    if _rows.kernels_apply(x):
        own = dataclasses.replace(loss, ignore_index=_IGNORED)
        return launch.shard_statistics(own, x, local, weight)
    counts = (local != _IGNORED)[:, None]
    x = composed.logits_of(torch.where(counts, x, 0), 1.0, loss.softcap)
    single = local[:, None] == torch.arange(x.shape[1], device=x.device)
    found = (local >= 0) & (local < x.shape[1])
    x_t = torch.where(found, torch.where(single, x, 0).sum(1), -math.inf)
    others = x.masked_fill(single, -math.inf)
    shift = F.pad(others, (0, 1), value=-math.inf).amax(1)  # there may be no columns
    total = torch.exp((others - _anchor(shift)[:, None]) * loss.scale).sum(1)
    shares = [shift, total, x_t]
    w = x.new_ones(x.shape[1]) if weight is None else composed.wide(weight).to(x.dtype)
    if loss.smoothing:
        reference = _anchor(torch.maximum(shift, x_t))
        shares += [((x - reference[:, None]) * w).sum(1), w.sum().expand(x.shape[0])]
    if weight is not None:
        shares.append(torch.where(single, w, 0).sum(1))
    return torch.stack(shares)


def sums_of(loss: Loss, every: Tensor, local: Tensor, weighted: bool, classes: Any) -> Any:
    """(class weight of each target [N] or None, [4] sums as ``launch.merge_shards`` has them)."""
    number = (local != _IGNORED).sum().to(every.dtype)
    # One rank has a target's weight, all others 0.
    weight = every[:, -1].sum(0) if weighted else None
    spread = everyone = torch.zeros_like(number)
    if loss.smoothing and every.shape[2]:
        spread = loss.smoothing / (spread + classes)
        everyone = every[:, 4, 0].sum()
    total = number if weight is None else weight.sum()
    return weight, torch.stack([total, number, spread, everyone])


def merged(
    loss: Loss, every: Tensor, local: Tensor, weight: Tensor | None, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], lse [N], statistics [4, N]) from what all shards have of the rows.

    Not by what a rank's own columns are: every rank must merge in the same way.
    """
    if _merged_by_kernel(every):
        own = dataclasses.replace(loss, ignore_index=_IGNORED)
        return launch.merge_shards(own, every, local, weight, sums)
    counts = local != _IGNORED
    shift, total, targets = every[:, 0], every[:, 1], every[:, 2]
    # -inf from all is a target's own. From several shards, which were given different targets, it
    # is none: NaN says so.
    found = (targets != -math.inf).sum(0)
    x_t = torch.where(targets == -math.inf, 0, targets).sum(0)
    x_t = torch.where(found == 0, -math.inf, torch.where(found == 1, x_t, math.nan))
    top = shift.amax(0)
    others = (total * torch.exp((shift - _anchor(top)) * loss.scale)).sum(0)
    margin = others.log() - (x_t - _anchor(top)) * loss.scale
    ce = torch.where(x_t == math.inf, math.nan, F.softplus(margin, threshold=80.0))
    top = torch.where(others > 0, top, -math.inf)
    anchor = _anchor(torch.maximum(top, x_t))
    total = others * torch.exp((top - anchor) * loss.scale) + torch.exp((x_t - anchor) * loss.scale)
    mass = torch.full_like(ce, 1.0 - loss.smoothing)
    mass = mass if weight is None else mass * weight
    losses = mass * ce
    if loss.smoothing:
        reference = _anchor(torch.maximum(shift, targets))
        linear = (every[:, 3] + every[:, 4] * (reference - anchor)).sum(0)
        losses = losses + sums[2] * (sums[3] * total.log() - loss.scale * linear)
        mass = mass + sums[2] * sums[3]
    lse = loss.scale * anchor + total.log()
    of_ce, of_z = _denominators(loss, sums)
    losses = losses * of_ce + loss.z_loss * lse.square() * of_z
    # 0/0, as in torch, where no row counts.
    losses = torch.where(counts, losses, 0.0 * of_ce)
    kept = (anchor, total, margin, mass)
    stats = [torch.where(counts, t, d) for t, d in zip(kept, (0.0, 1.0, 0.0, 0.0), strict=True)]
    return losses, torch.where(counts, lse, 0.0), torch.stack(stats)


def gradient(
    loss: Loss, g: Tensor, g_lse: Tensor | None, x: Tensor, local: Tensor, weight: Tensor | None,
    stats: Tensor, sums: Tensor, dx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of this shard's logits in their dtype; written to ``dx``, which may be x."""
    if _rows.kernels_apply(x):
        own = dataclasses.replace(loss, ignore_index=_IGNORED)
        return launch.backward(
            own, g, g_lse, x, local, None, weight, stats, sums[:3], dx=dx, total=sums[3:]
        )
    anchor, total, margin, mass = (t[:, None] for t in stats)
    counts = (local != _IGNORED)[:, None]
    clean = composed.wide(torch.where(counts, x, 0))
    z = composed.logits_of(clean, 1.0, loss.softcap)
    of_ce, of_z = _denominators(loss, sums)
    g_ce = g[:, None].to(z.dtype) * of_ce
    lse = loss.scale * anchor + total.log()
    per_p = 2.0 * loss.z_loss * lse * of_z * g[:, None].to(z.dtype)
    if g_lse is not None:
        per_p = per_p + g_lse[:, None].to(z.dtype)
    dz = torch.exp((z - anchor) * loss.scale) * ((g_ce * mass + per_p) / total)
    w = z.new_ones(z.shape[1]) if weight is None else composed.wide(weight).to(z.dtype)
    single = local[:, None] == torch.arange(z.shape[1], device=z.device)
    # With the target's own part of the loss as one number, which does not cancel.
    per_p = per_p + g_ce * sums[2] * sums[3]
    target = per_p * torch.sigmoid(-margin)
    target = target - g_ce * (1.0 - loss.smoothing) * w * torch.sigmoid(margin)
    dz = torch.where(single, target, dz) - g_ce * sums[2] * w
    if loss.softcap:
        dz = dz * (1.0 - torch.tanh(clean / loss.softcap).square())
    out = torch.where(counts, loss.scale * dz, 0.0).to(x.dtype)
    return out if dx is None else dx.copy_(out)


def _merged_by_kernel(every: Tensor) -> bool:
    return every.is_cuda and every.dtype == torch.float32


def _anchor(shift: Tensor) -> Tensor:
    return torch.where(shift == -math.inf, 0.0, shift)


def _denominators(loss: Loss, sums: Tensor) -> Any:
    return (1.0 / sums[0], 1.0 / sums[1]) if loss.mean else (1.0, 1.0)


# --- the operations -------------------------------------------------------------------------------


@opaque_op("inductor_ext::sharded_cross_entropy_forward")
def _forward(
    x: Tensor, target: Tensor, weight: Tensor | None, group: str, start: int, classes: int,
    ignore_index: int, smoothing: float, scale: float, softcap: float, z_loss: float, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(losses [N], lse [N], statistics [4, N], sums [4], local targets [N])."""
    loss = Loss(INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    columns = x.shape[1]
    agreed = (x.shape[0], x.dtype, loss, weight is None)
    first, classes = place_of(Shard(group, start, classes), columns, x, agreed)
    local = local_targets(target, ignore_index, first, classes, columns)
    every = gathered(statistics(loss, x, local, weight), group)
    target_weight, sums = sums_of(loss, every, local, weight is not None, classes)
    losses, lse, stats = merged(loss, every, local, target_weight, sums)
    return losses, lse, stats, sums, local


@_forward.register_fake
def _(x: Tensor, *_: Any) -> Any:
    return empty_results(x)


def empty_results(x: Tensor) -> tuple[Tensor, ...]:
    """What the forward operations return of rows such as x's, without values."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.shape[0]
    shapes = ((rows,), (rows,), (launch.STATISTICS, rows), (4,))
    return *(x.new_empty(s, dtype=dtype) for s in shapes), x.new_empty(rows, dtype=torch.int64)


@opaque_op("inductor_ext::sharded_cross_entropy_backward")
def _backward(
    g: Tensor, g_lse: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, sums: Tensor,
    local: Tensor, ignore_index: int, smoothing: float, scale: float, softcap: float,
    z_loss: float, mean: bool,
) -> Tensor:  # fmt: skip
    loss = Loss(INDEX, ignore_index, smoothing, scale, softcap, z_loss, mean)
    return gradient(loss, g, g_lse, x, local, weight, stats, sums)


@_backward.register_fake
def _(g: Tensor, g_lse: Any, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_one_gradient() -> None:
    """Raise where a gradient of gradients is wanted, or a batch of them."""
    if torch.is_grad_enabled() or compat_runtime.under_functorch():
        raise RuntimeError(
            "one gradient of a loss over a group is expected, got create_graph=True or a batch of "
            "gradients: gather the logits for those"
        )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weight, _, _, _, *ctx.options = inputs
    ctx.save_for_backward(x, weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, g: Any, g_lse: Any, *_: Any) -> Any:
    rest = (None,) * (5 + len(ctx.options))
    if g is None and g_lse is None:
        return (None, *rest)
    check_one_gradient()
    x, weight, stats, sums, local = ctx.saved_tensors
    if g is None:
        g = torch.zeros(1, dtype=stats.dtype, device=x.device).expand(x.shape[0])
    return (_backward(g, g_lse, x, weight, stats, sums, local, *ctx.options), *rest)


_forward.register_autograd(_grad, setup_context=_setup)


def losses_of(
    loss: Loss, x: Tensor, target: Tensor, weight: Tensor | None, shard: Shard
) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N]), the same on every rank; differentiable by this rank's x [N, V]."""
    with _rows.beside(x):
        losses, lse, *_ = _forward(
            x if x.stride(1) == 1 else x.contiguous(), target, weight, *shard,
            *options_of(loss),
        )  # fmt: skip
    return losses, lse


def options_of(loss: Loss) -> tuple[Any, ...]:
    """What the operations are told of a loss: all but its kind."""
    return _rows.unpacked(loss)[1:]
