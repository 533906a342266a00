"""Programs of every kind of score in the kernels, in the interpreter, against the score in fp64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inductor_ext.templates import (
    attention_backward_launch,
    attention_documents,
    attention_far,
    attention_launch,
)
from inductor_ext.templates.attention_program import Input
from score_ways import INF, LEAST, SCORES, made, score, tensors, texts

from inductor_ext.ops._attention_score import positions, read, write
from inductor_ext.ops._attention_translate import program
from inductor_ext.testing import launches_interpreted

SIZES = 2, 2, 17, 21
FORWARD = attention_launch.Tiling(16, 16, 4, 1)
KEYS = attention_backward_launch.Tiling(16, 32, 4, 1)
ROWS = attention_backward_launch.Tiling(32, 16, 4, 1)


def composed(text, q, k, v, numbers, inputs):
    """(out, lse); rows that keep nothing: 0."""
    s = (q.double() @ k.double().mT).to(q.dtype)
    r = read(text)(s, *positions(s.shape), *s.shape[2:], numbers, inputs).expand(s.shape)
    lse = r.double().logsumexp(-1)
    p = torch.exp(r.double() - lse.masked_fill(lse == -INF, 0)[..., None])
    return p @ v.double(), lse


@pytest.mark.parametrize("name", SCORES)
def test_kernels_compute_what_the_text_says(name):
    text, made_of = made(score(SCORES[name]))
    batch, heads, rows, columns = SIZES
    inputs, wide = tensors(SIZES), "16" not in text
    q, do = (torch.randn(batch, heads, rows, 16) for _ in range(2))
    k, v = (torch.randn(batch, heads, columns, 16) for _ in range(2))
    leaves = [t.double() if wide else t.clone() for t in (q, k, v)]
    given = [x.double() if wide and x.is_floating_point() else x.clone() for x in inputs]
    needs = [i in made_of.differentiable for i in range(len(inputs))]
    for x in (*leaves, *(x for x, needed in zip(given, needs, strict=True) if needed)):
        x.requires_grad_()
    out, lse = composed(text, *leaves, [3], given)
    with launches_interpreted(attention_launch, attention_documents):
        found = attention_launch.forward(q, k, v, inputs, [3], made_of, "ieee", FORWARD)
    close = {"rtol": 1e-4, "atol": 1e-4} if wide else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found[0].double(), out.detach(), **close)
    finite = lse > -1e30  # of a dtype's least numbers only the differences are right
    torch.testing.assert_close(found[1].double()[finite], lse.detach()[finite], **close)
    assert ((found[1] == -INF) == (lse == -INF)).all()

    with launches_interpreted(attention_backward_launch, attention_far, attention_documents):
        grads = attention_backward_launch.backward(
            do, None, q, k, v, inputs, [3], made_of, *found, [True] * 3 + needs, "ieee",
            keys=KEYS, rows=ROWS,
        )  # fmt: skip
    wanted = [*leaves, *(x for x, needed in zip(given, needs, strict=True) if needed)]
    right = torch.autograd.grad(out, wanted, do.double(), allow_unused=True)
    mine = [*grads[:3], *(d for d, needed in zip(grads[3], needs, strict=True) if needed)]
    for own, grad, leaf in zip(mine, right, wanted, strict=True):
        grad = torch.zeros_like(leaf) if grad is None else grad
        assert own.isfinite().all()
        coarse = {"rtol": 3e-2, "atol": 0.1} if own.dtype == torch.bfloat16 or not wide else close
        torch.testing.assert_close(
            own.double(), torch.where(grad.isnan(), own, grad).double(), **coarse
        )


@pytest.mark.parametrize(("outside", "least"), [(False, LEAST), (True, LEAST), (False, -1e9)])
def test_a_row_of_masks_of_two_kinds_has_equal_weights(outside, least):
    """Padding in front is an added tensor, later keys are a constant."""
    batch, heads, rows, columns = SIZES
    padding = torch.where(torch.arange(columns) < 6, least, 0.0).view(1, 1, 1, columns)

    def masked(s, b, h, q, k, rows, columns, n, x):
        added = s * 0.1 if outside else s * 0.1 + x[0]
        masked = torch.where(k <= q, added, least)
        return masked + x[0] if outside else masked

    text = write(masked, [padding])
    made_of = program(text, (Input(torch.float32, "k"),), 0, "zero")
    q = torch.randn(batch, heads, rows, 16)
    k, v = (torch.randn(batch, heads, columns, 16) for _ in range(2))
    right = read(text)(q @ k.mT, *positions(SIZES), rows, columns, [], [padding]).softmax(-1) @ v
    with launches_interpreted(attention_launch, attention_documents):
        out, _ = attention_launch.forward(q, k, v, [padding], [], made_of, "ieee", FORWARD)
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)


@settings(max_examples=16, derandomize=True, deadline=None, database=None)
@given(
    text=texts(),
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    n=st.integers(-30, 70),
    merged=st.booleans(),
)
def test_tiles_of_random_conditions(text, rows, columns, n, merged):
    generator = torch.Generator().manual_seed(rows)
    inputs = [
        torch.rand(1, 1, rows, columns, generator=generator) > 0.2,
        torch.randint(0, 99, (1, 1, 1, columns), generator=generator),
    ]
    made_of = program(text, (Input(torch.bool, "qk"), Input(torch.int64, "k")), 1, "zero")
    shapes = [(1, 1, rows, 16), (1, 1, columns, 16), (1, 1, columns, 16)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    out, lse = composed(text, *(t.double() for t in (q, k, v)), [n], inputs)
    tiling = dataclasses.replace(FORWARD, merged=merged)
    with launches_interpreted(attention_launch, attention_documents):
        found = attention_launch.forward(q, k, v, inputs, [n], made_of, "ieee", tiling)
    torch.testing.assert_close(found[0].double(), out, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1] == -INF, lse == -INF)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tanh_instruction_is_less_wrong_than_eager(dtype):
    """At the knee of a softcap, with the instruction's error of 2^-11."""
    cap, scale = 15.0, 32**-0.5
    text = write(score(lambda s, **_: cap * torch.tanh(s * (scale / cap))))
    made_of = program(text, (), 0, "zero", exact=False)
    assert "tanh.approx" in made_of.score and "tanh.approx" in made_of.gradient
    q, k, v = (torch.randn(1, 2, n, 32) for n in (33, 40, 40))
    q, k, v, do = (t.to(dtype) for t in (q * cap / 4, k, v, torch.randn(1, 2, 33, 32)))

    def eager(*tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        r = cap * torch.tanh(leaves[0] @ leaves[1].mT * scale / cap)
        out = torch.softmax(r, -1) @ leaves[2]
        return [out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype))]

    with launches_interpreted(attention_launch, attention_backward_launch, attention_far):
        out, lse = attention_launch.forward(q, k, v, [], [], made_of, "ieee", FORWARD)
        *grads, _ = attention_backward_launch.backward(
            do, None, q, k, v, [], [], made_of, out, lse, [True] * 3, "ieee", keys=KEYS, rows=ROWS
        )
    right = eager(*(t.double() for t in (q, k, v)))
    for own, baseline, truth in zip([out, *grads], eager(q, k, v), right, strict=True):
        error, allowed = ((t.double() - truth).abs().max() for t in (own, baseline))
        assert error <= 3 * allowed
