"""Masks of a dtype's least number beside tensors: what they mask is skipped, and rows that keep
nothing but such numbers are right none the less."""

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

LEAST, INF = torch.finfo(torch.bfloat16).min, float("inf")
B, HEADS, OWN, SIZE, HEAD = 1, 2, 1, 80, 16


def causal(s, q, k, x):
    return s * 0.25 + x[0] + torch.where(q >= k, 0.0, LEAST)


def window(s, q, k, x):
    return torch.where((q >= k) & (q - k < 20) & (x[0] < 2), s * 0.25, LEAST)


def drawn(axes):
    shape = [n if a in axes else 1 for a, n in zip("bhqk", (B, HEADS, SIZE, SIZE), strict=True)]
    return torch.randn(shape)


def padded(axes):
    """Numbers, of which the first keys' are the least: rows that see no others are uniform."""
    x = drawn(axes)
    x[..., :40] = LEAST
    return x


def holes(axes):
    """Rows of the least number, and one that sees nothing but -inf."""
    x = drawn(axes)
    x[:, -1:, 70:72] = LEAST
    x[:, :1, 3, :4] = -INF if "k" in axes else LEAST
    return x


CASES = {
    "pairs with holes": (causal, "hqk", holes),
    "left padding": (causal, "bk", padded),
    "per row": (causal, "hq", holes),
    "a filled window": (window, "bk", lambda axes: drawn(axes).abs()),
}


def program_of(name, size=SIZE):
    score, axes, draw = CASES[name]
    x = draw(axes)

    def fn(s, b, h, q, k, rows, columns, numbers, inputs):
        return score(s, q, k, inputs)

    text = attention_score.write(fn, [x])
    return x, attention_translate.program(text, (Input(x.dtype, axes),), 0, "zero", True)


def test_what_skips_nothing_stays_arithmetic():
    """A mask of padding alone."""

    def fn(s, b, h, q, k, rows, columns, numbers, inputs):
        return torch.where(inputs[0], s * 0.25, LEAST)

    pad = torch.ones(B, 1, 1, SIZE, dtype=torch.bool)
    text = attention_score.write(fn, [pad])
    program = attention_translate.program(text, (Input(torch.bool, "k"),), 0, "zero", True)
    assert not program.keep and program.likely is None


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    x, program = program_of(name)
    assert program.likely is not None and program.likely.keep and not program.keep
    asked = CASES[name][0] is causal
    q, do = (torch.randn(B, HEADS, SIZE, HEAD) for _ in range(2))
    k, v = (torch.randn(B, OWN, SIZE, HEAD) for _ in range(2))
    if name == "left padding":
        do[:, 0, :40] = 0  # a loss that leaves padding out
    leaves = [t.double().requires_grad_() for t in (q, k, v, x)]
    at = torch.arange(SIZE)
    wide_k, wide_v = (t.expand(-1, HEADS, -1, -1) for t in leaves[1:3])
    scores = CASES[name][0](leaves[0] @ wide_k.mT, at[:, None], at[None, :], leaves[3:])
    scores = scores.float().double()
    expected, dlse = torch.softmax(scores, -1) @ wide_v, torch.randn(B, HEADS, SIZE)
    # torch's own logsumexp has the weight 1 for every key of a row of least numbers.
    total = (scores - scores.detach().amax(-1, keepdim=True)).exp().sum(-1).log()
    torch.autograd.backward([expected, total], [do.double(), dlse.double()])
    modules = attention_launch, attention_backward_launch, attention_documents, attention_far
    with launches_interpreted(*modules):
        out, lse = attention_launch.forward(q, k, v, [x], [], program, "ieee")
        *found, (dx,) = attention_backward_launch.backward(
            do, dlse, q, k, v, [x], [], program, out, lse, [True] * 3 + [asked], "ieee"
        )
    torch.testing.assert_close(out, expected.detach().float(), rtol=0, atol=3e-6)
    for mine, leaf in zip([*found, dx][: 3 + asked], leaves, strict=False):
        torch.testing.assert_close(mine, leaf.grad.float(), rtol=0, atol=4e-6)
