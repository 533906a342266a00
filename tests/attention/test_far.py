"""Rows whose keys are all masked by a finite number: uniform, in the gradient as well."""

import pytest
import torch
from inductor_ext.templates import (
    attention_backward_launch,
    attention_documents,
    attention_far,
    attention_launch,
)
from inductor_ext.templates.attention_program import Input

from inductor_ext.ops import _attention_score as attention_score
from inductor_ext.ops import _attention_translate as attention_translate
from inductor_ext.testing import launches_interpreted

ROWS, HALF = 40, torch.finfo(torch.bfloat16).min
MASKED = slice(5, 9)


def added(fill):
    """A mask that is read, and the score."""
    mask = torch.zeros(1, 1, ROWS, ROWS)
    mask[:, :, MASKED] = fill
    mask[:, :, 20:, :7] = fill
    return [mask], lambda s, b, h, q, k, rows, columns, numbers, inputs: s * 0.25 + inputs[0]


def filled(fill):
    """The same rows by a condition of the score."""

    def score(s, b, h, q, k, rows, columns, numbers, inputs):
        return torch.where((q < 5) | (q >= 9), s * 0.25, fill)

    return [], score


@pytest.mark.parametrize("fill", [-1e9, HALF, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("form", [added, filled])
def test_gradients(form, fill):
    q, k, v, do = (torch.randn(1, 2, ROWS, 16) for _ in range(4))
    inputs, score = form(fill)
    text = attention_score.write(score, inputs)
    given = tuple(Input(x.dtype, "qk") for x in inputs)
    program = attention_translate.program(text, given, 0, "zero", True)
    with launches_interpreted(attention_launch, attention_documents):
        out, lse = attention_launch.forward(q, k, v, inputs, [], program, "ieee")
    needed = [True] * 3 + [False] * len(inputs)
    with launches_interpreted(attention_backward_launch, attention_far, attention_documents):
        *found, _ = attention_backward_launch.backward(
            do, None, q, k, v, inputs, [], program, out, lse, needed, "ieee"
        )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT
    at = torch.arange(ROWS)
    scores = score(scores, None, None, at[:, None], at[None, :], ROWS, ROWS, [], inputs)
    expected = torch.softmax(scores, -1) @ leaves[2]
    expected.backward(do)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=2e-6)
    for mine, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=0, atol=4e-6)
    assert found[2].abs().max() > 0


def test_scores_without_large_numbers_take_no_second_look():
    def of(score, *inputs):
        text = attention_score.write(score, list(inputs))
        given = tuple(Input(x.dtype, "k") for x in inputs)
        return attention_translate.program(text, given, 0, "zero", True)

    def causal(s, b, h, q, k, rows, columns, numbers, inputs):
        return torch.where(q >= k, s * 0.125, float("-inf"))

    def capped(s, b, h, q, k, rows, columns, numbers, inputs):
        return 30 * torch.tanh(s / 30)

    assert not attention_far.applies(of(causal))
    assert not attention_far.applies(of(capped))
