"""``ops.linear_recurrence`` against a loop, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_reference import BF16, FP16, FP32, FP64, LAYOUTS, SETTINGS, laid_out, numbers, recurrence
from scan_ways import KERNELS, computed

from inductor_ext import measure, ops


def run(fn, tensors, g):
    """(h, gradients of the tensors)."""
    own = [t.detach().clone().requires_grad_() for t in tensors]
    h = fn(*own)
    return h.detach(), *torch.autograd.grad(h, own, g.to(h.dtype), materialize_grads=True)


def drawn(shape, dim, dtype, layout, initial):
    a = laid_out(lambda s: (torch.rand(s) * 0.7 + 0.3).to(dtype), shape, layout)
    b = laid_out(lambda s: numbers(s, dtype), shape, layout)
    h0 = numbers([s for d, s in enumerate(shape) if d != dim % len(shape)], dtype)
    return [a, b, h0] if initial else [a, b]


DRAWN = given(
    dtype=st.sampled_from((BF16, FP16, FP32, FP64)),
    shape=st.sampled_from(((3, 25), (2, 5, 3), (0, 3), (3, 0), (1, 1), (17,))),
    dim=st.sampled_from((0, 1, -1)),
    reverse=st.booleans(),
    initial=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)


@settings(max_examples=60, **SETTINGS)
@DRAWN
def test_numbers(**given):
    check("composed", **given)


@pytest.mark.parametrize("way", KERNELS)
@settings(max_examples=6, **SETTINGS)
@DRAWN
def test_numbers_of_kernels(way, **given):
    check(way, **given)


def check(way, dtype, shape, dim, reverse, initial, layout):
    dim = dim if dim < len(shape) else 0
    tensors = drawn(shape, dim, dtype, layout, initial)
    g = laid_out(lambda s: numbers(s, dtype), shape, layout)

    def ours(a, b, h0=None):
        return ops.linear_recurrence(a, b, h0, dim, reverse)

    def loop(a, b, h0=None):
        return recurrence(a, b, h0, dim, reverse)

    with computed(way):
        found = run(ours, tensors, g)
    truths = run(loop, [t.double() for t in tensors], g.double())
    eagers = run(loop, tensors, g)
    for got, truth, eager in zip(found, truths, eagers, strict=True):
        verdict = measure.check(got, truth, eager)
        assert verdict.ok, verdict.reason
    if dtype in (BF16, FP16):  # carried in fp32, rounded once
        verdict = measure.check(found[0], truths[0], truths[0].to(dtype))
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("a", "b"), [((5, 1), (2, 5, 4)), ((4,), (2, 5, 4)), ((2, 5, 4), (1, 4))])
def test_broadcasting(a, b, way):
    a, b = torch.rand(a, dtype=FP64), torch.randn(b, dtype=FP64)
    g = torch.randn(2, 5, 4, dtype=FP64)
    found = run(lambda a, b: ops.linear_recurrence(a, b, dim=1), [a, b], g)
    truth = run(lambda a, b: recurrence(a, b, dim=1), [a, b], g)
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_zeros_forget(way):
    a, b = torch.rand(2, 30), torch.randn(2, 30)
    a[:, 11] = 0.0
    h = ops.linear_recurrence(a, b)
    torch.testing.assert_close(h[:, 11:], recurrence(a[:, 11:], b[:, 11:]))


def test_a_of_one_is_a_sum_and_h0_of_a_product(way):
    b = torch.randint(-9, 9, (3, 40)).float()
    assert torch.equal(ops.linear_recurrence(torch.ones(()), b), b.cumsum(1))
    a = torch.randint(-1, 2, (3, 40)).float()
    h = ops.linear_recurrence(a, torch.zeros(()), torch.ones(3))
    assert torch.equal(h, a.cumprod(1))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck(dim, reverse):
    a, b, h0 = drawn((2, 4, 3), dim, FP64, "dense", True)
    tensors = [t.requires_grad_() for t in (a, b, h0)]

    def fn(a, b, h0=None):
        return ops.linear_recurrence(a, b, h0, dim, reverse)

    assert torch.autograd.gradcheck(fn, tensors)
    assert torch.autograd.gradgradcheck(fn, tensors)
    assert torch.autograd.gradgradcheck(fn, tensors[:2])


def test_only_some_inputs_need_gradients(way):
    a, b, h0 = drawn((3, 20), 1, FP32, "dense", True)
    everything = run(ops.linear_recurrence, [a, b, h0], torch.ones(3, 20))[1:]
    for i in range(3):
        tensors = [a.clone(), b.clone(), h0.clone()]
        tensors[i].requires_grad_()
        ops.linear_recurrence(*tensors).sum().backward()
        torch.testing.assert_close(tensors[i].grad, everything[i])


def test_transforms_and_batched_gradients():
    a, b, h0 = drawn((3, 9), 1, FP64, "dense", True)
    g = torch.randn(4, 3, 9, dtype=FP64)
    found = torch.vmap(ops.linear_recurrence)(a, b, h0)
    torch.testing.assert_close(found, recurrence(a, b, h0))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, b)
        tangent = torch.autograd.forward_ad.unpack_dual(ops.linear_recurrence(dual, b)).tangent
    expected = torch.func.jvp(lambda a: recurrence(a, b), (a,), (b,))[1]
    torch.testing.assert_close(tangent, expected)
    a.requires_grad_()
    h = ops.linear_recurrence(a, b, h0)
    each = torch.stack([torch.autograd.grad(h, a, row, retain_graph=True)[0] for row in g])
    torch.testing.assert_close(torch.autograd.grad(h, a, g, is_grads_batched=True)[0], each)
