"""The pairs that attention's dropout keeps, as the kernels draw them (``attention_dropout``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.templates.attention_dropout import ROUNDS, Dropout

_LOW = 0xFFFFFFFF
_KEYS, _FACTORS = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)  # of Philox4x32


def seed_of(device: torch.device) -> Tensor:
    """[1] of int64, from the default generator of the device, in a way that CUDA graphs capture."""
    return torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=device)


def kept(
    dropout: Dropout, batch: Any, heads: Any, first: Any, rows: Any, columns: Any
) -> Tensor:  # fmt: skip
    """[B, H, rows, Sk] of bool: whether a pair is kept; of the query rows from ``first`` on."""
    seed = dropout.seed

    def along(start: Any, count: Any, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = -1
        return torch.arange(start, start + count, device=seed.device).view(shape)

    head = along(0, batch, 0) * heads + along(0, heads, 1)
    q, k = along(first, rows, 2), along(0, columns, 3)
    groups = (k >> 5 << 3) + (k & 7), (q >> 4 << 3) + (q & 7)
    words = _philox((*groups, head, torch.zeros_like(head)), seed, ROUNDS)
    near, far = (torch.where(k & 8 == 0, *words[i : i + 2]) for i in (0, 2))
    word = torch.where(q & 8 == 0, near, far)
    half = torch.where(k & 16 == 0, word >> 16, word & 0xFFFF)
    return half - (half >> 15 << 16) < dropout.below


def _philox(counter: tuple[Tensor, ...], seed: Tensor, rounds: int) -> tuple[Tensor, ...]:
    """Philox4x32: four words below 2^32, of four as a counter. In int64: a product's lower 64 bits
    are right whatever their sign."""
    a, b, c, d = counter
    keys = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(rounds):
        of_a, of_c = a * _FACTORS[0], c * _FACTORS[1]
        a, c = (of_c >> 32 & _LOW) ^ b ^ keys[0], (of_a >> 32 & _LOW) ^ d ^ keys[1]
        b, d = of_c & _LOW, of_a & _LOW
        keys = (keys[0] + _KEYS[0]) & _LOW, (keys[1] + _KEYS[1]) & _LOW
    return a, b, c, d
