"""Gradients of ``ops.scan`` against those of a loop in fp64."""

import math

import pytest
import torch
from hypothesis import settings
from scan_reference import (
    BF16,
    FP16,
    FP32,
    FP64,
    OPS,
    PAIRS,
    SETTINGS,
    drawn,
    first,
    laid_out,
    numbers,
    scan,
    segments_of,
    sized,
)
from scan_ways import KERNELS, computed

from inductor_ext import measure, ops


def gradient(fn, x, g):
    own = x.detach().requires_grad_()
    y = first(fn(own))
    if not y.requires_grad:  # of nothing but identities
        return torch.zeros_like(own)
    g = torch.where(y.detach().isinf(), 0, g.to(y.dtype))  # of an identity
    return torch.autograd.grad(y, own, g, materialize_grads=True)[0]


DRAWN = drawn((BF16, FP16, FP32, FP64), (0, 1))


@settings(max_examples=80, **SETTINGS)
@DRAWN
def test_numbers(**case):
    check("composed", **case)


@pytest.mark.parametrize("way", KERNELS)
@settings(max_examples=10, **SETTINGS)
@DRAWN
def test_numbers_of_kernels(way, **case):
    check(way, **case)


def check(way, op, dtype, n, dim, reverse, exclusive, segments, layout):
    shape = sized(n, dim)
    x = laid_out(lambda s: numbers(s, dtype, op), shape, layout)
    g = laid_out(lambda s: numbers(s, dtype), shape, layout)
    given_segments, flags = segments_of(segments, n, dim, shape)
    order = op, dim, reverse, exclusive
    with computed(way):
        found = gradient(lambda x: ops.scan(x, *order, given_segments), x, g)
    truth = gradient(lambda x: scan(x, *order, flags), x.double(), g.double())
    eager = gradient(lambda x: scan(x, *order, flags), x, g)
    verdict = measure.check(found, truth, eager)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("given", [None, 0, 1, 2])
def test_zeros_of_a_product(given, way):
    x = torch.randn(3, 20, dtype=FP64)
    if given:
        x[:, torch.randint(0, 20, (given,))] = 0.0
        x[1, 0], x[2, 19] = 0.0, 0.0
    elif given == 0:
        x.zero_()
    g = torch.randn(3, 20, dtype=FP64)
    for reverse in (False, True):
        found = gradient(lambda x: ops.scan(x, "prod", reverse=reverse), x, g)  # noqa: B023
        truth = gradient(lambda x: scan(x, "prod", reverse=reverse)[0], x, g)  # noqa: B023
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["max", "min", "cummax", "cummin"])
def test_a_maximum_s_gradient_is_torch_s(op, way):
    x = torch.randint(-3, 4, (4, 25)).float()
    x[1, 3], x[1, 9], x[2, 0], x[3, 5] = math.nan, math.nan, -math.inf, math.inf
    g = torch.randn(4, 25)
    theirs = torch.cummax if op in ("max", "cummax") else torch.cummin
    own = x.clone().requires_grad_()
    theirs(own, 1).values.backward(g)
    found = ops.scan(mine := x.clone().requires_grad_(), op)
    first(found).backward(g)
    torch.testing.assert_close(mine.grad, own.grad)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_logsumexp_of_what_is_far_apart(reverse, way):
    x = torch.randn(5, 24)
    x[0] += torch.arange(24) * 100.0  # each makes the ones before it vanish
    x[1] -= torch.arange(24) * 100.0
    x[2, :7], x[2, 20:] = -math.inf, -math.inf
    x[3] = -30.0
    x[4, 11] = -math.inf
    g = torch.randn(5, 24)

    def finite(x):  # of nothing there is no gradient
        y = ops.scan(x, "logsumexp", reverse=reverse)
        return torch.where(y.isinf(), 0.0, y)

    found = gradient(finite, x, g)
    truth = gradient(lambda x: scan(x, "logsumexp", reverse=reverse)[0], x.double(), g.double())
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), truth.nan_to_num(0.0), rtol=1e-5, atol=1e-6)


def test_infinities_of_a_logsumexp_are_torch_s(way):
    x, g = torch.randn(3, 20), torch.rand(3, 20) + 0.5
    x[0, 7], x[1, 4], x[1, 11], x[2, 19] = math.inf, -math.inf, math.inf, math.inf
    found = gradient(lambda x: ops.scan(x, "logsumexp"), x, g)
    theirs = x.clone().requires_grad_()
    torch.logcumsumexp(theirs, 1).backward(g.masked_fill(x.logcumsumexp(1).isinf(), 0))
    torch.testing.assert_close(found, theirs.grad, equal_nan=True)


def test_large_values_of_a_logsumexp_s_gradient_do_not_overflow(way):
    x, g = torch.zeros(1, 24), torch.full((1, 24), 1e30)
    found = gradient(lambda x: ops.scan(x + 500, "logsumexp"), x, g)
    truth = gradient(lambda x: scan(x + 500, "logsumexp")[0], x.double(), g.double())
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=0)


def test_what_is_not_finite_in_another_segment_stays_there(way):
    x = torch.randn(2, 20)
    x[0, 7], x[1, 9] = math.nan, math.inf
    cu, without = torch.tensor([0, 5, 12, 20]), torch.tensor([0, 5, 13])
    keep = torch.cat([torch.arange(5), torch.arange(12, 20)])
    orders = ("sum", True), ("prod", False), ("logsumexp", True), ("cummax", False)
    for op, backwards in orders:
        results = []
        for values, segments in ((x, cu), (x[:, keep], without)):
            own = values.clone().requires_grad_()
            y = first(ops.scan(own, op, -1, backwards, backwards, segments))
            torch.where(y.isinf(), 0.0, y).square().sum().backward()
            results.append((y.detach(), own.grad))
        (y, dx), (z, dz) = results
        torch.testing.assert_close(y[:, keep], z)
        torch.testing.assert_close(dx[:, keep], dz)


@pytest.mark.parametrize("op", [*OPS, *PAIRS])
@pytest.mark.parametrize("exclusive", [False, True])
def test_gradcheck(op, exclusive):
    flags = torch.rand(2, 6) < 0.3
    for dim, reverse, segments in ((1, False, flags), (0, True, None), (1, True, flags)):

        def fn(x):
            y = first(ops.scan(x, op, dim, reverse, exclusive, segments))  # noqa: B023
            return torch.where(y.isinf(), 0.0, y)

        x = torch.randn(2, 6, dtype=FP64, requires_grad=True)
        assert torch.autograd.gradcheck(fn, x)
        assert torch.autograd.gradgradcheck(fn, x)


@pytest.mark.parametrize("op", [*OPS, *PAIRS])
def test_gradients_of_gradients_of_zeros_are_those_of_a_loop(op):
    x = torch.randn(2, 7, dtype=FP64)
    x[0, 2], x[1, 1], x[1, 4] = 0.0, 0.0, 0.0
    results = []
    for fn in (lambda x: first(ops.scan(x, op)), lambda x: scan(x, op)[0]):
        own = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(fn(own).square().sum(), own, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), own)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("op", [*OPS, *PAIRS])
def test_transforms_and_batched_gradients(op):
    x, g = torch.randn(3, 9, dtype=FP64), torch.randn(4, 3, 9, dtype=FP64)

    def fn(x):
        return first(ops.scan(x, op, reverse=True))

    torch.testing.assert_close(torch.vmap(fn)(x), fn(x))
    own = x.clone().requires_grad_()
    y = fn(own)
    each = torch.stack([torch.autograd.grad(y, own, row, retain_graph=True)[0] for row in g])
    both = torch.autograd.grad(y, own, g, is_grads_batched=True)[0]
    torch.testing.assert_close(both, each)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, g[0])
        tangent = torch.autograd.forward_ad.unpack_dual(fn(dual)).tangent
    torch.testing.assert_close((tangent * g[1]).sum(), (each[1] * g[0]).sum())
    pulled = torch.func.vjp(fn, x)[1](g[0])[0]
    torch.testing.assert_close(pulled, each[0])


@pytest.mark.parametrize(("given", "result"), [(BF16, FP32), (FP32, BF16), (FP32, FP64)])
def test_the_gradient_has_the_dtype_of_x(given, result, way):
    x, g = torch.rand(2, 20).to(given) + 0.5, torch.randn(2, 20)
    for op in ("sum", "prod", "max", "logsumexp"):
        found = gradient(lambda x: ops.scan(x, op, dtype=result), x, g)  # noqa: B023
        truth = gradient(lambda x: scan(x, op)[0], x.double(), g.double())  # noqa: B023
        assert found.dtype == given
        tolerance = 1e-5 if BF16 not in (given, result) else 0.05
        torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)


def test_positions_have_no_gradient():
    x = torch.randn(3, 9, requires_grad=True)
    values, positions = ops.scan(x, "cummax")
    assert values.requires_grad and not positions.requires_grad
    assert not ops.scan(x, "sum", dtype=torch.int64).requires_grad
