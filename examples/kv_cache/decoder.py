"""A small decoder with random weights whose cache of keys and values somebody else keeps.

Ordinary model code: grouped heads by ``repeat_interleave``, scores, a mask, a softmax in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HEADS, KV_HEADS, SIZE, VOCABULARY = 2, 8, 2, 64, 512
GROUP, WIDTH = HEADS // KV_HEADS, HEADS * SIZE


@dataclass(frozen=True)
class Cache:
    """One layer's: ``k`` (rotated) and ``v`` [B, KV_HEADS, T, SIZE], the ``positions`` of its
    slots [B, KV_HEADS, T], what is added to a slot's scores, ``bias`` [B, KV_HEADS, T] or None,
    and the ``history`` of its weights [B, KV_HEADS, T] or None."""

    k: Tensor
    v: Tensor
    positions: Tensor
    bias: Tensor | None = None
    history: Tensor | None = None

    def kept(self, slots: Tensor) -> Cache:
        """The slots [B, KV_HEADS, T'] of this cache, in their order."""
        wide = slots.unsqueeze(-1).expand(*slots.shape, SIZE)
        narrow = [None if t is None else t.gather(2, slots) for t in (self.bias, self.history)]
        return Cache(
            self.k.gather(2, wide), self.v.gather(2, wide), self.positions.gather(2, slots), *narrow
        )

    def appended(self, k: Tensor, v: Tensor, positions: Tensor) -> Cache:
        """With the slots of new tokens behind."""
        positions = positions.expand(k.shape[:3])
        more = [
            None if t is None else torch.cat([t, t.new_zeros(k.shape[:3])], 2)
            for t in (self.bias, self.history)
        ]
        return Cache(
            torch.cat([self.k, k], 2), torch.cat([self.v, v], 2),
            torch.cat([self.positions, positions], 2), *more,
        )  # fmt: skip


class Policy(Protocol):
    """What a cache keeps."""

    def prefilled(self, cache: Cache, weights: Tensor) -> Cache:
        """After the prompt; ``weights`` [B, HEADS, T, T] are its probabilities."""

    def stepped(self, cache: Cache, weights: Tensor) -> Cache:
        """After a token; ``weights`` [B, HEADS, 1, T]."""


def rotated(x: Tensor, positions: Tensor, sign: float = 1.0) -> Tensor:
    """Rotary embedding of x [B, H, T, SIZE] at positions [B or 1, H or 1, T]; back for sign -1."""
    rates = 10000.0 ** (-torch.arange(0, SIZE, 2, device=x.device) / SIZE)
    angles = positions.unsqueeze(-1) * rates
    cos, sin = angles.cos(), sign * angles.sin()
    one, other = x.float().chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)


def attention(q: Tensor, cache: Cache, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Grouped attention as models write it; and its weights."""
    k = cache.k.repeat_interleave(GROUP, 1)
    v = cache.v.repeat_interleave(GROUP, 1)
    scores = q @ k.transpose(-1, -2) * SIZE**-0.5
    if cache.bias is not None:
        scores = scores + cache.bias.repeat_interleave(GROUP, 1).unsqueeze(-2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return weights @ v, weights


class Layer(nn.Module):
    """Attention and a gated feedforward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, cache: Cache | None, policy: Policy
    ) -> tuple[Tensor, Cache]:
        parts = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        q, k, v = parts.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotated(q, positions), rotated(k, positions)
        if cache is None:
            every = torch.arange(x.shape[1], device=x.device)
            mask = every[:, None] >= every[None, :]
            cache = Cache(k, v, positions.expand(k.shape[:3]))
            y, weights = attention(q, cache, mask)
            cache = policy.prefilled(cache, weights)
        else:
            cache = cache.appended(k, v, positions)
            y, weights = attention(q, cache, None)
            cache = policy.stepped(cache, weights)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, value = self.up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * value), cache


class Decoder(nn.Module):
    """Tokens [B, T] and their first position to the last token's logits and the layers' caches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self, tokens: Tensor, position: Tensor, caches: list[Cache] | None, policy: Policy
    ) -> tuple[Tensor, list[Cache]]:
        x = self.embedding(tokens)
        positions = (position + torch.arange(tokens.shape[1], device=x.device)).view(1, 1, -1)
        kept = []
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, positions, caches[i] if caches else None, policy)
            kept.append(cache)
        return F.rms_norm(x[:, -1], (WIDTH,)) @ self.embedding.weight.T, kept


def without(cache: Cache, slot: Tensor) -> Cache:
    """A cache without one slot [B, KV_HEADS] of each head."""
    count = cache.k.shape[2]
    every = torch.arange(count - 1, device=slot.device)
    return cache.kept(every + (every >= slot.unsqueeze(-1)).long())
