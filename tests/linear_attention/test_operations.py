"""Linear attention as an operation: fallbacks, compiled programs, transforms, and bad input."""

import linear_attention_reference as reference
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_ext import ops
from inductor_ext.testing import compile_for

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FORMS = ("", "head", "token", "channel")


def ours(q, k, v, g, scale, S):
    return ops.linear_attention(q, k, v, decay=g, scale=scale, initial_state=S, return_state=True)


def doubles(inputs):
    return [None if t is None else t.double() for t in inputs]


@pytest.mark.parametrize("decay", FORMS)
def test_composed(decay):
    inputs = doubles(reference.draw(2, 2, 70, 5, 6, FP32, decay, state=True))
    inputs[3] = None if decay == "" else inputs[3] * 10
    given = [torch.randn(2, 2, 70, 6).double(), torch.randn(2, 2, 5, 6).double()]
    out = ours(*inputs[:4], 0.7, inputs[4])
    right = reference.attention(*inputs[:4], 0.7, inputs[4])
    pairs = [*zip(out, right, strict=True)]
    grads = (reference.gradients(f, inputs, 0.7, given) for f in (ours, reference.attention))
    for mine, truth in [*pairs, *zip(*grads, strict=True)]:
        assert mine.dtype == FP64 and (mine - truth).norm() <= 1e-12 * truth.norm()


@pytest.mark.parametrize("decay", FORMS)
def test_opcheck(decay):
    q, k, v, g, S = (
        None if t is None else t.requires_grad_()
        for t in reference.draw(1, 2, 20, 4, 3, FP32, decay, state=True)
    )
    op = torch.ops.inductor_ext.linear_attention.default
    torch.library.opcheck(op, (q, k, v, g, S, 0.5, 0))
    laid = v.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(op, (q, k, laid, g, None, 0.5, 0))


@pytest.mark.parametrize("decay", ["", "head", "channel"])
def test_gradients_of_gradients(decay):
    inputs = doubles(reference.draw(1, 1, 6, 2, 3, FP32, decay, state=True))
    inputs = [t.requires_grad_() for t in inputs if t is not None]

    def fn(q, k, v, *rest):
        g, S = rest if decay else (None, *rest)
        return ours(q, k, v, g, 0.7, S)

    torch.autograd.gradgradcheck(fn, inputs)


def test_transforms():
    q, k, v, g, _ = reference.draw(3, 2, 10, 4, 4, FP32, "token")
    each = torch.vmap(lambda *t: ops.linear_attention(*(x[None] for x in t[:3]), decay=t[3][None]))
    together = ops.linear_attention(q, k, v, decay=g)
    assert (each(q, k, v, g).squeeze(1) - together).norm() <= 1e-6 * together.norm()
    slope = torch.func.grad(lambda t: ops.linear_attention(t, k, v, decay=g).sum())(q)
    q.requires_grad_()
    ops.linear_attention(q, k, v, decay=g).sum().backward()
    assert (slope - q.grad).norm() <= 1e-6 * q.grad.norm()


def test_a_compiled_program_does_not_depend_on_the_length():
    def fn(q, k, v, g):
        return ops.linear_attention(q, k, v, decay=g, feature_map="elu+1", normalize=True) * 2

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, dynamic=True, fullgraph=True)
    for T in (33, 70, 5, 64):
        q, k, v, g, _ = reference.draw(2, 2, T, 4, 6, FP32, "token")
        q.requires_grad_()
        out, right = compiled(q, k, v, g), fn(q, k, v, g)
        assert (out - right).norm() <= 1e-6 * right.norm()
        mine, other = (torch.autograd.grad(o.sum(), q)[0] for o in (out, right))
        assert (mine - other).norm() <= 1e-5 * other.norm()
    assert counter.frame_count == 1


@pytest.mark.codegen
@pytest.mark.parametrize("decay", ["", "token"])
def test_generated_code(decay):
    q, k, v, g, _ = reference.draw(2, 2, 128, 64, 64, BF16, decay)
    inputs = [t.requires_grad_() for t in (q, k, v, g) if t is not None]

    def fn(q, k, v, g=None):
        return ops.linear_attention(q, k, v, decay=g, feature_map="elu+1")

    code = compile_for("h200", fn, *inputs, grad=True)
    assert code.forward.count("inductor_ext.linear_attention.default.launched(") == 1
    assert code.backward.count("inductor_ext.linear_attention_backward.default.launched(") == 1


def bad(match, kind=ValueError, **changed):
    q, k, v, g, S = reference.draw(2, 3, 4, 5, 6, FP32, "token", state=True)
    given = {"q": q, "k": k, "v": v, "decay": g, "initial_state": S} | changed
    with pytest.raises(kind, match=match):
        ops.linear_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_bad_input():
    bad(r"q is expected as \[B, H, T, D\], got \[2, 3\]", q=torch.ones(2, 3))
    bad(r"k is expected of q's shape \[2, 3, 4, 5\], got \[2, 3, 4, 7\]", k=torch.ones(2, 3, 4, 7))
    bad(r"v is expected as \[2, 3, 4, 'Dv'\], got \[2, 3, 9, 6\]", v=torch.ones(2, 3, 9, 6))
    bad(r"v is expected as torch.float32, as q is, got torch.bfloat16", TypeError,
        v=torch.ones(2, 3, 4, 6).bfloat16())  # fmt: skip
    bad(r"q is expected as fp16, bf16, fp32 or fp64, got torch.int64", TypeError,
        q=torch.ones(2, 3, 4, 5).long())  # fmt: skip
    bad(r"head size of 1 or more", v=torch.ones(2, 3, 4, 0))
    bad(r"k is expected on cpu", k=torch.ones(2, 3, 4, 5, device="meta"))
    bad(r"decay is expected as a number, \[H\].*got \[2, 3, 5\]", decay=torch.zeros(2, 3, 5))
    bad(r"decay is expected as a log of 0 or less, got 0.5", decay=0.5)
    bad(r"decay is expected as a log of 0 or less, got nan", decay=float("nan"))
    bad(r"decay is expected as torch.float32", TypeError, decay=torch.zeros(3, dtype=FP64))
    bad(r"initial_state is expected of shape \[2, 3, 5, 6\], got \[2, 3, 6, 5\]",
        initial_state=torch.ones(2, 3, 6, 5))  # fmt: skip
    bad(r"initial_state is expected of shape \[2, 3, 5, 7\]", normalize=True)
    bad(r"initial_state is expected as torch.float32", TypeError,
        initial_state=torch.ones(2, 3, 5, 6).bfloat16())  # fmt: skip
    bad(r"scale is expected as a finite number other than 0, got 0", scale=0)
    bad(r"chunk is expected as None, 16, 32 or 64, got 48", chunk=48)
    bad(r"feature_map is expected as", feature_map="softmax")
