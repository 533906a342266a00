"""Masks of the least number of a dtype instead of -inf.

Where a row keeps a key, the weights of what is masked so are 0, as with -inf. Where it keeps none,
all its scores are that number, and the row is the mean of all values. So -inf may stand for it, if
rows that keep nothing are given that mean; kernels then know what is kept, and skip the rest. What
is kept must be far from that number: of a row of nothing else all keys count, kept or not.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from inductor_ext.lowerings.attention_values import Call, Input, Number, Value, is_plain
from inductor_ext.lowerings.mhc_entries import aten

LEAST = -1e30  # adding scores of up to 1e22 to less changes nothing in fp32


def _is_least(value: Any) -> bool:
    if not isinstance(value, Number) or not is_plain(value.number):
        return False
    return bool(-math.inf < value.number <= LEAST)


def _is_zero(value: Any) -> bool:
    return isinstance(value, Number) and is_plain(value.number) and value.number == 0


def with_infinity(score: Value, dtypes: list[torch.dtype], trained: bool) -> Value | None:
    """``score`` with -inf for the least number; None where that is not the same, or not known to
    be. ``dtypes`` are those of the inputs. Where a mask is added, rows that keep nothing pass on
    gradients of their scores: not if ``trained``."""
    if not isinstance(score, Call) or len(score.args) < 2:
        return None
    if score.op is aten.where.self:
        chosen = _chosen(score)
        others = [side for side in score.args[1:] if not _is_least(side)]
        return chosen if all(_is_finite(side, dtypes, set()) for side in others) else None
    if score.op is aten.add.Tensor and not score.kwargs and not trained:
        for at, (one, other) in enumerate((score.args, score.args[::-1])):
            mask = _mask(other)
            if mask is not None and _is_finite(one, dtypes, set()):
                args = (one, mask) if at == 0 else (mask, one)
                return dataclasses.replace(score, args=args)
    return None


def _chosen(score: Call) -> Value | None:
    condition, *sides = score.args
    least = [_is_least(side) for side in sides]
    if least.count(True) != 1 or not isinstance(condition, Value) or condition.scores:
        return None
    kept = [Number(number=-math.inf) if lost else s for lost, s in zip(least, sides, strict=True)]
    return dataclasses.replace(score, args=(condition, *kept))


def _mask(value: Any) -> Value | None:
    """where(condition, 0, least), perhaps converted."""
    if not isinstance(value, Call) or value.scores:
        return None
    if value.op is None:
        inner = _mask(value.args[0])
        return None if inner is None else dataclasses.replace(value, args=(inner,))
    if value.op is not aten.where.self or not any(map(_is_zero, value.args[1:])):
        return None
    return _chosen(value)


def _is_finite(value: Any, dtypes: list[torch.dtype], done: set[int]) -> bool:
    """Whether a value is far from the least number for scores that are: it is made of no such
    number, and of no tensor that may hold one."""
    if not isinstance(value, Value):
        return not is_plain(value) or abs(value) < -LEAST
    if id(value) in done:
        return True
    done.add(id(value))
    if isinstance(value, Number):
        return not is_plain(value.number) or abs(value.number) < -LEAST
    if isinstance(value, Input):
        return not dtypes[value.which].is_floating_point
    if isinstance(value, Call):
        return all(_is_finite(arg, dtypes, done) for arg in value.args)
    return True
