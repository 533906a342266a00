"""Rows that keep nothing, under masks of -inf and of the least number."""

import pytest
import torch
from edits import OP, edited, wide, with_gradients
from spellings import arguments, positions

from inductor_ext import measure


def kept(q, ones):
    i = positions(q)
    return (i[None, None, None, :] <= i[None, None, :, None]) & (ones[:, None, None, :] > 0)


def chosen(q, k, v, ones):
    scores = torch.where(kept(q, ones), q @ k.mT * 0.125, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def added(q, k, v, ones):
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    mask = torch.where(kept(q, ones), zero, torch.finfo(q.dtype).min)
    return (q @ k.mT * 0.125 + mask).softmax(-1) @ v


def added_twice(q, k, v, ones):
    """Where both masks act the score is -inf."""
    least, i = torch.finfo(torch.float32).min, positions(q)
    one = torch.where(i[None, :] <= i[:, None], 0.0, least).to(q.dtype)
    other = torch.where(ones[:, None, None, :] > 0, 0.0, least).to(q.dtype)
    return (q @ k.mT * 0.125 + one + other).softmax(-1) @ v


def infinite(q, k, v, ones):
    scores = torch.where(kept(q, ones), q @ k.mT * 0.125, -torch.inf)
    return scores.softmax(-1) @ v


def chosen_twice(q, k, v, ones):
    """Of a row that keeps only keys of no use, all keys count."""
    i, least = positions(q), torch.finfo(q.dtype).min
    scores = torch.where(ones[:, None, None, :] > 0, q @ k.mT * 0.125, least)
    return (
        torch.where(i[None, :] - i[:, None] < ones[:, None, :1, None], scores, least).softmax(-1)
        @ v
    )


def inputs(dtype, grad):
    args = arguments(("BHSD", "BGSD", "BGSD", "ones"), dtype, tokens=80, heads=2, groups=2)
    args[3][0, :5], args[3][1] = 0, 0  # rows in front, and a whole sequence, that keep nothing
    return [a if grad else a.detach() for a in args]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "fn", [chosen, chosen_twice, added, added_twice], ids=lambda fn: fn.__name__
)
def test_rows_that_keep_nothing_are_means(fn, grad, card_here):
    args = inputs(torch.float32, grad)
    out, text, _ = edited(fn, args, grad=grad)
    assert OP in text
    # -inf stands for the least number where that is the same, gradients included.
    assert ("mean" in text) == (fn is chosen or (fn is added and not grad))
    exact = wide(args)
    if not grad:
        assert measure.check(out, fn(*exact), fn(*args)).ok
        return
    three = (with_gradients(fn(*a) if a is not args else out, a) for a in (args, exact))
    for one, right, plain in zip(*three, with_gradients(fn(*args), args), strict=True):
        assert measure.check(one, right, plain).ok


def test_a_row_without_any_key_is_nan_as_before(card_here):
    args = inputs(torch.float32, False)
    out, text, _ = edited(infinite, args)
    assert OP in text and torch.equal(out.isnan(), infinite(*args).isnan())
    assert out.isnan().any() and not out.isnan().all()


def test_the_log_sum_exp_of_a_row_that_keeps_nothing_stays_finite(card_here):
    def fn(q, k, v, ones):
        scores = torch.where(kept(q, ones), q @ k.mT * 0.125, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v, torch.logsumexp(scores, -1)

    args = inputs(torch.float32, False)
    (out, lse), text, _ = edited(fn, args)
    right, right_lse = fn(*args)
    none = right_lse < -1e30
    assert OP in text and none.any() and (lse[none] < -1e30).all() and lse.isfinite().all()
    torch.testing.assert_close(lse[~none], right_lse[~none])
    torch.testing.assert_close(out, right)
