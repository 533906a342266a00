"""Losses on materialised logits, as users write them, with the bytes they have to move.

``VARIANTS`` is a table of functions of (logits, ...); importing it needs no card. ``moved`` counts
bytes per logit in HBM with 16-bit logits (and 16-bit probabilities or teacher logits), nothing
found in L2: (forward, backward) of torch 2.13's code for 4096 x 32000, and of this project's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def _index(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    target = torch.randint(0, v, (n,), device=device)
    return (torch.where(torch.arange(n, device=device) % 8 == 3, -100, target),)


def _valid(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, v, (n,), device=device),)


def _weighted(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return *_index(n, v, dtype, device), torch.rand(v, device=device)


def _probabilities(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, v, device=device).mul(2).softmax(-1).to(dtype),)


def _teacher(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, v, device=device).mul(2).to(dtype),)


def _top_of_teacher(n: int, v: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    logprobs, ids = torch.randn(n, v, device=device).mul(2).log_softmax(-1).topk(64)
    return ids, logprobs


@dataclasses.dataclass(frozen=True)
class Variant:
    """``fn(logits, *rest)`` is a scalar loss (or one per row); ``rest(n, v, dtype, device)``."""

    fn: Callable[..., torch.Tensor]
    rest: Callable[..., tuple[torch.Tensor, ...]]
    stock: tuple[float, float]
    moved: tuple[float, float]

    def inputs(self, n: int, v: int, dtype: torch.dtype, device: str) -> list[Any]:
        """Fresh draws: logits that need a gradient, and what goes with them."""
        logits = torch.randn(n, v, device=device).mul(2).to(dtype).requires_grad_()
        return [logits, *self.rest(n, v, dtype, device)]


def _plain(x, y):
    return F.cross_entropy(x.float(), y)


def _per_row(x, y):
    return F.cross_entropy(x.float(), y, reduction="none")


def _transposed(x, y):
    return F.cross_entropy(x.float()[None].transpose(1, 2), y[None])


def _smoothed(x, y):
    return F.cross_entropy(x.float(), y, label_smoothing=0.1)


def _smoothed_16_bit(x, y):
    return F.cross_entropy(x, y, label_smoothing=0.1)


def _weighted_and_smoothed(x, y, w):
    return F.cross_entropy(x.float(), y, weight=w, label_smoothing=0.1)


def _softcap(x, y):
    return F.cross_entropy(30 * torch.tanh(x.float() / 30), y)


def _logit_scale(x, y):
    return F.cross_entropy(x.float() * 0.25, y)


def _temperature(x, y):
    return F.cross_entropy(x / 0.7, y)


def _z_loss(x, y):
    x = x.float()
    return F.cross_entropy(x, y) + 1e-4 * torch.logsumexp(x, -1).square().mean()


def _z_loss_softcap_smoothed(x, y):
    x = 30 * torch.tanh(x.float() / 30)
    loss = F.cross_entropy(x, y, label_smoothing=0.1)
    return loss + 1e-4 * torch.logsumexp(x, -1).square().mean()


def _soft_targets(x, t):
    return F.cross_entropy(x.float(), t.float())


def _soft_targets_smoothed(x, t):
    return F.cross_entropy(x, t, label_smoothing=0.1)


def _kl(x, t):
    return F.kl_div(F.log_softmax(x.float(), -1), t.float(), reduction="batchmean")


def _kl_teacher(x, q):
    student, teacher = F.log_softmax(x.float() / 2, -1), F.softmax(q.float() / 2, -1)
    return F.kl_div(student, teacher, reduction="batchmean") * 4


def _kl_teacher_log(x, q):
    student, teacher = F.log_softmax(x.float(), -1), F.log_softmax(q.float(), -1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def _kl_top_of_teacher(x, ids, logprobs):
    student = F.log_softmax(x.float(), -1).gather(-1, ids)
    return (logprobs.exp() * (logprobs - student)).sum(-1).mean()


def _gathered(x, y):
    return -F.log_softmax(x.float(), -1).gather(-1, y[:, None]).mean()


def _lse_minus_gathered(x, y):
    x = x.float()
    return (torch.logsumexp(x, -1) - x.gather(-1, y[:, None]).squeeze(-1)).mean()


def _smoothed_by_hand(x, y):
    logp = F.log_softmax(x.float(), -1)
    nll = -logp.gather(-1, y[:, None]).squeeze(-1)
    return (0.9 * nll - 0.1 * logp.mean(-1)).mean()


def _smoothed_by_a_trainer(x, y):
    nlogp = -F.log_softmax(x, -1)
    y = y[:, None]
    padding = y.eq(-100)
    nll = nlogp.gather(-1, y.clamp(min=0)).masked_fill(padding, 0.0)
    smooth = nlogp.sum(-1, keepdim=True, dtype=torch.float32).masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smooth.sum() / (active * nlogp.shape[-1])


def _maximum_by_hand(x, y):
    x = x.float()
    z = x - x.max(-1, keepdim=True).values.detach()
    return -(z - z.exp().sum(-1, keepdim=True).log()).gather(-1, y[:, None]).mean()


def _entropy(x):
    logp = F.log_softmax(x.float(), -1)
    return -(logp.exp() * logp).sum(-1).mean()


VARIANTS: dict[str, Variant] = {
    "plain": Variant(_plain, _index, (2, 4), (2, 4)),
    "per row": Variant(_per_row, _index, (2, 4), (2, 4)),
    "transposed": Variant(_transposed, _index, (2, 4), (2, 4)),
    "label smoothing": Variant(_smoothed, _index, (6, 12), (2, 4)),
    "label smoothing, 16 bit": Variant(_smoothed_16_bit, _index, (6, 12), (2, 4)),
    "class weight, smoothing": Variant(_weighted_and_smoothed, _weighted, (6, 12), (4, 4)),
    "softcap": Variant(_softcap, _index, (6, 4), (2, 4)),
    "logit scale": Variant(_logit_scale, _index, (6, 4), (2, 4)),
    "temperature": Variant(_temperature, _index, (6, 4), (2, 4)),
    "z-loss": Variant(_z_loss, _index, (4, 4), (2, 4)),
    "z-loss, softcap, smoothing": Variant(_z_loss_softcap_smoothed, _index, (10, 12), (2, 4)),
    "soft targets": Variant(_soft_targets, _probabilities, (8, 8), (4, 6)),
    "soft targets, smoothing": Variant(_soft_targets_smoothed, _probabilities, (8, 8), (4, 6)),
    "kl": Variant(_kl, _probabilities, (8, 8), (4, 6)),
    "kl, teacher logits": Variant(_kl_teacher, _teacher, (16, 14), (4, 6)),
    "kl, teacher log": Variant(_kl_teacher_log, _teacher, (12, 8), (4, 6)),
    "kl, top 64 of a teacher": Variant(_kl_top_of_teacher, _top_of_teacher, (2, 16), (2, 4)),
    "gathered": Variant(_gathered, _valid, (2, 16), (2, 4)),
    "logsumexp - gathered": Variant(_lse_minus_gathered, _valid, (4, 12), (2, 4)),
    "smoothing by hand": Variant(_smoothed_by_hand, _valid, (6, 16), (2, 4)),
    "smoothing by a trainer": Variant(_smoothed_by_a_trainer, _index, (6, 10), (2, 4)),
    "maximum by hand": Variant(_maximum_by_hand, _valid, (4, 16), (2, 4)),
    "entropy": Variant(_entropy, lambda *_: (), (6, 6), (2, 4)),
}
