"""Gradients of ``torch.associative_scan`` and ``cumprod`` compiled on the card, against the CPU in
fp64, at sizes where scans are cut among programs."""

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan

from inductor_ext import measure
from inductor_ext.ops import _combine
from inductor_ext.ops import _combine_text as texts

pytestmark = pytest.mark.gpu

SHAPES = [((8, 4096, 64), 1), ((300, 2051), 1), ((1, 1 << 21), 1), ((4096, 257), 0)]


def affine(earlier, later):
    (a0, h0), (a1, h1) = earlier, later
    return a0 * a1, a1 * h0 + h1


def online_softmax(earlier, later):
    (m0, s0), (m1, s1) = earlier, later
    m = torch.maximum(m0, m1)
    return m, s0 * torch.exp(m0 - m) + s1 * torch.exp(m1 - m)


def complex_product(earlier, later):
    (r0, i0), (r1, i1) = earlier, later
    return r0 * r1 - i0 * i1, r0 * i1 + i0 * r1


def drawn(shape, combine):
    a = torch.rand(shape, device="cuda") * 0.5 + 0.4
    b = torch.randn(shape, device="cuda")
    if combine is complex_product:  # on the unit circle
        angle = b * 0.01
        return angle.cos().requires_grad_(), angle.sin().requires_grad_()
    if combine is online_softmax:
        return b.requires_grad_(), a.requires_grad_()
    return a.requires_grad_(), b.requires_grad_()


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("combine", [affine, online_softmax, complex_product])
def test_gradients(combine, shape, dim):
    torch._dynamo.reset()
    xs = drawn(shape, combine)
    weights = [torch.randn(shape, device="cuda") for _ in xs]
    # Products of as many numbers below 1 vanish: of those only the state is in the loss.
    only_state = combine is affine
    text = texts.write(lambda *args: list(combine(args[:2], args[2:])), [torch.empty(3)] * 2)
    for reverse in (False, True):

        @torch.compile(fullgraph=True)
        def fn(*xs):
            ys = associative_scan(combine, xs, dim, reverse)  # noqa: B023
            return ys[1:] if only_state else ys

        given = weights[1:] if only_state else weights
        found = torch.autograd.grad(fn(*xs), xs, given)
        wide = [x.detach().cpu().double().requires_grad_() for x in xs]
        ys = _combine.associative_scan(wide, text, dim, reverse)
        ys = ys[1:] if only_state else ys
        expected = torch.autograd.grad(ys, wide, [g.cpu().double() for g in given])
        for got, truth in zip(found, expected, strict=True):
            truth = truth.cuda()
            verdict = measure.check(got, truth, truth.float())
            assert verdict.ok, (reverse, verdict.reason)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_products_with_zeros(shape, dim):
    torch._dynamo.reset()
    x = 1 + 2e-4 * torch.randn(shape, device="cuda")
    x[torch.rand(shape, device="cuda") < 1e-3] = 0
    x.requires_grad_()
    g = torch.randn(shape, device="cuda")
    (found,) = torch.autograd.grad(torch.compile(lambda x: x.cumprod(dim))(x), x, g)
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(wide.cumprod(dim), wide, g.double())
    verdict = measure.check(found, truth, truth.float())
    assert verdict.ok, verdict.reason
