"""A learned compactor of a cache: few slots that attend to many, with a bias for each.

Keys are turned back to position 0, slots attend to keys and values across the whole cache, and
their keys are rotated to positions spread over it. The bias, learned and 0 at first, says how
many old slots a new one stands for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from decoder import KV_HEADS, SIZE, Cache, rotated
from policies import Everything
from torch import Tensor, nn


class Compactor(nn.Module):
    """A cache of any length to ``slots`` slots."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(KV_HEADS, slots, SIZE))
        self.bias = nn.Parameter(torch.zeros(KV_HEADS, slots))
        self.key = nn.Linear(SIZE, SIZE, bias=False)
        self.value = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, cache: Cache) -> Cache:
        batch, _, count, _ = cache.k.shape
        keys = rotated(cache.k, cache.positions, -1.0)
        scores = self.queries @ keys.transpose(-1, -2) * SIZE**-0.5
        weights = F.softmax(scores, -1, dtype=torch.float32).to(keys.dtype)
        slots = self.queries.shape[1]
        spread = torch.arange(slots, device=keys.device) * (count - 1) // max(1, slots - 1)
        positions = spread.expand(batch, KV_HEADS, -1)
        k = rotated(keys_of(weights, keys, self.key), positions)
        bias = self.bias.expand(batch, -1, -1)
        return Cache(k, keys_of(weights, cache.v, self.value), positions, bias)


def keys_of(weights: Tensor, x: Tensor, change: nn.Module) -> Tensor:
    """Means of x by the weights, and a learned change of them."""
    mean = weights @ x
    return mean + change(mean)


class Compacted(Everything):
    """The prompt's slots are compacted, new ones are kept."""

    def __init__(self, compactor: Compactor) -> None:
        self.compactor = compactor

    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        return self.compactor(cache)
