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


def second_order(earlier, later):
    """v = M v' + w of two numbers."""
    (a, b, c, d, v, w), (e, f, g, h, x, y) = earlier, later
    matrix = e * a + f * c, e * b + f * d, g * a + h * c, g * b + h * d
    return *matrix, e * v + f * w + x, g * v + h * w + y


# How many leaves there are, and of which results a loss is: products of numbers below 1 vanish.
COMBINES = {affine: (2, [1]), online_softmax: (2, [0, 1]), second_order: (6, [4, 5])}


def drawn(shape, combine):
    count = COMBINES[combine][0]
    xs = [torch.randn(shape, device="cuda") for _ in range(count)]
    if combine is affine:
        xs[0] = torch.rand(shape, device="cuda") * 0.5 + 0.4
    if combine is online_softmax:
        xs[1] = torch.rand(shape, device="cuda") + 0.5
    if combine is second_order:
        xs[:4] = [torch.rand(shape, device="cuda") * 0.9 - 0.45 for _ in range(4)]
    return [x.requires_grad_() for x in xs]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("combine", COMBINES)
def test_gradients(combine, shape, dim):
    torch._dynamo.reset()
    count, chosen = COMBINES[combine]
    xs = drawn(shape, combine)
    weights = [torch.randn(shape, device="cuda") for _ in chosen]
    text = texts.write(
        lambda *args: list(combine(args[:count], args[count:])), [torch.empty(3)] * count
    )
    for reverse in (False, True):

        @torch.compile(fullgraph=True)
        def fn(*xs):
            ys = associative_scan(combine, xs, dim, reverse)  # noqa: B023
            return [ys[i] for i in chosen]

        found = torch.autograd.grad(fn(*xs), xs, weights)
        wide = [x.detach().cpu().double().requires_grad_() for x in xs]
        ys = _combine.associative_scan(wide, text, dim, reverse)
        given = [w.cpu().double() for w in weights]
        expected = torch.autograd.grad([ys[i] for i in chosen], wide, given)
        for got, truth in zip(found, expected, strict=True):
            truth = truth.cuda()
            verdict = measure.check(got, truth, truth.float())
            assert verdict.ok, (reverse, verdict.reason)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_products_with_zeros(shape, dim):
    """Of powers of 2, whose products are exact."""
    torch._dynamo.reset()
    draw = torch.rand(shape, device="cuda")
    x = torch.where(draw < 0.1, 2.0, torch.where(draw < 0.2, 0.5, 1.0))
    x = torch.where(draw > 0.99, 0.0, x).requires_grad_()
    g = torch.randn(shape, device="cuda")
    (found,) = torch.autograd.grad(torch.compile(lambda x: x.cumprod(dim))(x), x, g)
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(wide.cumprod(dim), wide, g.double())
    verdict = measure.check(found, truth, truth.float())
    assert verdict.ok, verdict.reason
