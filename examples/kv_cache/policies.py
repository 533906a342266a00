"""What a cache of keys and values keeps: five published ways, as one would write them.

everything      nothing is dropped
sinks           the first and the last positions (StreamingLLM, arXiv 2309.17453)
norms           keys of the smallest norm (arXiv 2406.11430)
snapshot        what the prompt's last rows look at (SnapKV, arXiv 2404.14469)
heavy hitters   what was looked at most so far (H2O, arXiv 2306.14048)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from decoder import GROUP, KV_HEADS, Cache, without
from torch import Tensor


def grouped(weights: Tensor) -> Tensor:
    """The weights of a group's heads added: [B, HEADS, ...] to [B, KV_HEADS, ...]."""
    return weights.unflatten(1, (KV_HEADS, GROUP)).sum(2)


@dataclass(frozen=True)
class Everything:
    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        return cache

    def stepped(self, cache: Cache, weights: Tensor) -> Cache:
        return cache


@dataclass(frozen=True)
class Sinks:
    """The first ``sinks`` and the last ``window`` slots."""

    sinks: int
    window: int

    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        count = cache.k.shape[2]
        last = torch.arange(count - self.window, count, device=cache.k.device)
        first = torch.arange(self.sinks, device=cache.k.device)
        return cache.kept(torch.cat([first, last]).expand(*cache.k.shape[:2], -1))

    def stepped(self, cache: Cache, weights: Tensor) -> Cache:
        return without(cache, torch.full_like(cache.positions[..., 0], self.sinks))


@dataclass(frozen=True)
class Norms(Everything):
    """The ``budget`` keys of the smallest norm."""

    budget: int

    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        least = cache.k.float().norm(dim=-1).topk(self.budget, largest=False).indices
        return cache.kept(least.sort().values)


@dataclass(frozen=True)
class Snapshot(Everything):
    """The last ``window`` slots, and the ``budget`` before them that the rows of the window give
    the most weight, averaged over ``pooled`` neighbours."""

    budget: int
    window: int
    pooled: int = 5

    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        count = cache.k.shape[2] - self.window
        looked = grouped(weights[:, :, -self.window :].float().sum(2))[..., :count]
        looked = F.avg_pool1d(looked, self.pooled, 1, self.pooled // 2)
        best = looked.topk(self.budget).indices.sort().values
        last = torch.arange(count, count + self.window, device=best.device)
        return cache.kept(torch.cat([best, last.expand(*best.shape[:2], -1)], 2))


@dataclass(frozen=True)
class HeavyHitters:
    """``budget`` slots; each token takes the place of the one with the least weight so far."""

    budget: int

    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        history = grouped(weights.float().sum(2))
        best = history.topk(self.budget).indices.sort().values
        return replace(cache, history=history).kept(best)

    def stepped(self, cache: Cache, weights: Tensor) -> Cache:
        assert cache.history is not None
        history = cache.history + grouped(weights.float().sum(2))
        return without(replace(cache, history=history), history[..., :-1].argmin(-1))
