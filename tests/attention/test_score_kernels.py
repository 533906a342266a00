"""Programs of every kind of score in the kernels, in the interpreter, against the score in fp64."""

import pytest
import torch
from inductor_ext.templates import (
    attention_backward_launch,
    attention_documents,
    attention_launch,
)
from score_ways import INF, SCORES, made, score, tensors

from inductor_ext.attention_score import positions, read
from inductor_ext.testing import launches_interpreted

SIZES = 2, 2, 19, 37
FORWARD = attention_launch.Tiling(16, 16, 4, 1)
KEYS = attention_backward_launch.Tiling(16, 32, 4, 1)
ROWS = attention_backward_launch.Tiling(32, 16, 4, 1)


def composed(text, q, k, v, numbers, inputs):
    """(out, lse); rows that keep nothing: 0."""
    s = (q.double() @ k.double().mT).to(q.dtype)
    r = read(text)(s, *positions(SIZES), *SIZES[2:], numbers, inputs).expand(SIZES)
    lse = r.double().logsumexp(-1)
    p = torch.exp(r.double() - lse.masked_fill(lse == -INF, 0)[..., None])
    return p @ v.double(), lse


@pytest.mark.parametrize("name", SCORES)
def test_kernels_compute_what_the_text_says(name):
    text, program = made(score(SCORES[name]))
    batch, heads, rows, columns = SIZES
    inputs, wide = tensors(SIZES), "16" not in text
    q, do = (torch.randn(batch, heads, rows, 16) for _ in range(2))
    k, v = (torch.randn(batch, heads, columns, 16) for _ in range(2))
    leaves = [t.double() if wide else t.clone() for t in (q, k, v)]
    given = [x.double() if wide and x.is_floating_point() else x.clone() for x in inputs]
    needs = [i in program.differentiable for i in range(len(inputs))]
    for x in (*leaves, *(x for x, needed in zip(given, needs, strict=True) if needed)):
        x.requires_grad_()
    out, lse = composed(text, *leaves, [3], given)
    with launches_interpreted(attention_launch, attention_documents):
        found = attention_launch.forward(q, k, v, inputs, [3], program, "ieee", FORWARD)
    close = {"rtol": 1e-4, "atol": 1e-4} if wide else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found[0].double(), out.detach(), **close)
    finite = lse > -1e30  # of a dtype's least numbers only the differences are right
    torch.testing.assert_close(found[1].double()[finite], lse.detach()[finite], **close)
    assert ((found[1] == -INF) == (lse == -INF)).all()

    with launches_interpreted(attention_backward_launch, attention_documents):
        grads = attention_backward_launch.backward(
            do, None, q, k, v, inputs, [3], program, *found, [True] * 3 + needs, "ieee",
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
