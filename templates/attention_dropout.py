"""Dropout of attention's weights: a pair's fate as a function of a seed and of its place.

    kept[b, h, q, k] = u[b, h, q, k] < (1 - p) 2^16        weights = softmax(r) kept / (1 - p)

u are halves of the words of Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011) under the seed's 64 bits. Its counter holds the head, a group of rows and a
group of keys, so that there is no largest number of pairs, and neither tiles nor the order in which
they come change anything: forward and backward draw alike. A draw's halves are those of eight pairs
whose rows and keys differ in bit 3, and whose keys differ in bit 4. In the accumulator of a product
all of them are one thread's, or four of them where the tile is turned around. So the text draws for
each pair, and the compiler finds the equal draws; places are cut up as it can follow them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .attention_program import Program

ROUNDS = 7
STEPS = 1 << 16
# Probabilities whose steps are fine enough: 1.6% of the least.
LEAST, LARGEST = 2**-10, 1 - 2**-10


@dataclasses.dataclass(frozen=True)
class Dropout:
    """``seed``: one int64 in memory, on the device; ``probability``: of being dropped, of LEAST to
    LARGEST, in steps of 2^-16."""

    seed: Tensor
    probability: float

    @property
    def _kept(self) -> int:
        """How many halves of a word keep a pair."""
        return round((1 - self.probability) * STEPS)

    @property
    def below(self) -> int:
        """A pair is kept if its half, as a signed number, is less."""
        return self._kept - STEPS // 2

    @property
    def scale(self) -> float:
        """What kept weights are multiplied by: the inverse of the share that is kept."""
        return STEPS / self._kept

    def values(self) -> dict[str, Any]:
        """What is passed for ``parameters``. A half is on top of a word where it is compared."""
        return {
            "drop_seed_ptr": self.seed,
            "drop_below": self.below * STEPS,
            "drop_scale": self.scale,
        }


# Numbers that are not to be compiled in.
UNSPECIALISED = ["drop_below"]


def parameters(program: Program) -> list[str]:
    """The parameters of a kernel that draws."""
    return ["drop_seed_ptr", "drop_below", "drop_scale"] if program.dropout else []


def seeded(program: Program) -> str:
    """Statements in front of all draws."""
    if not program.dropout:
        return ""
    return """drop_seed = tl.load(drop_seed_ptr)
drop_low = drop_seed.to(tl.uint32)
drop_high = (drop_seed >> 32).to(tl.uint32)"""


# As ``tl.philox``, whose products are two instructions, one for each half; here they are one.
_PHILOX = """word0 = drop_k.to(tl.uint32)
word1 = drop_q.to(tl.uint32)
word2 = HEAD.to(tl.uint32)
word3 = tl.full([], 0, tl.uint32)
drop_key0 = drop_low
drop_key1 = drop_high
for _ in tl.static_range(ROUNDS):
    drop_product0 = word0.to(tl.uint64) * 0xD2511F53
    drop_product2 = word2.to(tl.uint64) * 0xCD9E8D57
    word0 = (drop_product2 >> 32).to(tl.uint32) ^ word1 ^ drop_key0
    word2 = (drop_product0 >> 32).to(tl.uint32) ^ word3 ^ drop_key1
    word1 = drop_product2.to(tl.uint32)
    word3 = drop_product0.to(tl.uint32)
    drop_key0 = tl.add(drop_key0, 0x9E3779B9, sanitize_overflow=False)
    drop_key1 = tl.add(drop_key1, 0xBB67AE85, sanitize_overflow=False)"""


def draws(program: Program, head: str) -> str:
    """Statements that assign ``drop_factor`` (fp32) of a tile: what weights are multiplied by. Its
    ``q_start`` and ``k_start`` are multiples of its sizes, these of 16. ``head``: b heads + h."""
    if not program.dropout:
        return ""
    # The fifth bit of a key's place is its tile's where that has no more than 16 keys.
    return f"""drop_top = (kl & 16) if BLOCK_N > 16 else ((k_start + kl) & 16)
drop_q = (q_start >> 1) + ((ql >> 4) << 3) + ((ql & 6) + (ql & 1))
drop_k = ((k_start >> 5) << 3) + ((kl >> 5) << 3) + ((kl & 6) + (kl & 1))
{_PHILOX.replace("HEAD", head).replace("ROUNDS", str(ROUNDS))}
drop_near = tl.where((kl & 8) == 0, word0, word1)
drop_far = tl.where((kl & 8) == 0, word2, word3)
drop_word = tl.where((ql & 8) == 0, drop_near, drop_far)
drop_word = tl.where(drop_top == 0, drop_word, drop_word << 16).to(tl.int32, bitcast=True)
drop_factor = tl.where(drop_word < drop_below, drop_scale, 0.0)"""
