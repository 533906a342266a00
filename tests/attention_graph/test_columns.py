"""Sums of weights without the weights: by SnapKV's window, and one step's row."""

import pytest
import torch
from edits import OP, edited, wide
from spellings import GQA, INF, MHA, arguments, causal, repeated

from inductor_ext import measure

STEP = (("B", "H", 1, "D"), "BGSD", "BGSD", "BGS")


def weighted(q, k, v, sums, masked=True):
    n = q.shape[1] // k.shape[1]
    scores = q @ repeated(k, n).mT * 0.125
    if masked:
        scores = scores.masked_fill(causal(q), -INF)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ repeated(v, n), sums(weights, k)


def by_group(weights, k):
    b, _, rows, columns = weights.shape
    return weights.view(b, k.shape[1], -1, rows, columns)


SUMS = {
    "a window, then a group": (
        GQA, lambda w, k: by_group(w[..., -16:, :].sum(-2, keepdim=True), k).sum(2)),
    "a group and a window": (GQA, lambda w, k: by_group(w, k)[..., -16:, :].sum((2, 3))),
    "a window": (GQA, lambda w, k: w[:, :, -16:].sum(dim=2)),
    "all rows": (MHA, lambda w, k: w.sum(-2)),
    "the mean of all": (MHA, lambda w, k: w.float().mean(dim=-2)),
}  # fmt: skip


def judge(found, fn, args):
    exact, plain = fn(*wide(args)), fn(*args)
    for one in zip(found, exact, plain, strict=True):
        verdict = measure.check(*one)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_rows(name, card_here):
    shapes, sums = SUMS[name]
    args = [a.detach() for a in arguments(shapes, torch.bfloat16, tokens=48)]

    def fn(q, k, v):
        return weighted(q, k, v, sums)

    out, text, decisions = edited(fn, args)
    assert [d.fired for d in decisions] == [True], decisions
    assert OP in text and "attention_columns.default(" in text and "softmax" not in text
    judge(out, fn, args)


@pytest.mark.parametrize(
    "use",
    [
        lambda weights, k: by_group(weights, k).sum(2),
        lambda weights, k: by_group(weights, k)[..., 0, :].float().amax(2),
    ],
    ids=["sum", "maximum"],
)
def test_one_row(use, card_here):
    args = [a.detach() for a in arguments(STEP, torch.float32, tokens=48)]

    def fn(q, k, v, history):
        out, used = weighted(q, k, v, use, masked=False)
        return out, history + used.reshape(history.shape)

    out, text, _ = edited(fn, args)
    assert OP in text and "attention_columns.default(" in text and "softmax" not in text
    judge(out, fn, args)


@pytest.mark.parametrize(
    "use", [lambda w, k: w.sum(1), lambda w, k: w[:, :, :16].sum(2), lambda w, k: w.amax(2)],
    ids=["over heads", "over the first rows", "a maximum"],
)  # fmt: skip
def test_other_uses_are_left(use, card_here):
    args = [a.detach() for a in arguments(MHA, torch.float32, tokens=48)]
    _, text, (decision,) = edited(lambda q, k, v: weighted(q, k, v, use), args)
    assert OP not in text and "uses a value in between" in decision.reason


def test_sums_that_take_gradients_are_left(card_here):
    args = arguments(MHA, torch.float32, tokens=48)
    _, text, _ = edited(lambda q, k, v: weighted(q, k, v, SUMS["all rows"][1]), args, grad=True)
    assert OP not in text
