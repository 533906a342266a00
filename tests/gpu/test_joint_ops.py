"""The operations for joint graphs on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import math

import pytest
import torch
from inductor_ext.templates import cross_entropy_launch as launch

import inductor_ext
from inductor_ext import measure
from inductor_ext.ops import _composed as composed
from inductor_ext.ops import _joint, _linear_cross_entropy, _weighted
from inductor_ext.ops._weighted import FINITE, GIVEN, NO, OWN, SOFTMAX, YES

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOSSES = {
    "plain": ({}, 1.0, 0.0),
    "smoothing": ({"smoothing": 0.1}, 1.0, 0.0),
    "everything": ({"smoothing": 0.1, "z_loss": 1e-3}, 1.2, 30.0),
}


def draw(rows, columns, dtype=BF16):
    x = (torch.randn(rows, columns, device="cuda") * 3).to(dtype)
    target = torch.randint(0, columns, (rows,), device="cuda")
    target[1::7] = -100
    return x, target


def factors(target, columns, smoothing=0.0, z_loss=0.0):
    counts = (target >= 0).float() / len(target)
    a1 = 2 * z_loss * counts if z_loss else None
    return counts, a1, counts * (1 - smoothing), counts * smoothing / columns if smoothing else None


def checked(found, x, target, given, scale, softcap):
    """By fp64, some rows at a time; the baseline is the same in fp32, rounded at the end."""
    for first in range(0, x.shape[0], 1024):
        part = slice(first, first + 1024)
        own = [None if f is None else f[part] for f in given]
        wide = [None if f is None else f.double() for f in own]
        truth = _joint._composed(x[part].double(), target[part], *wide, scale, softcap)
        eager = _joint._composed(x[part].float(), target[part], *own, scale, softcap)
        for mine, right, baseline in zip(found, truth, eager, strict=True):
            if right.numel():
                verdict = measure.check(mine[part], right, baseline.to(mine.dtype))
                assert verdict.ok, verdict.reason


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(2048, 32000, BF16), (1024, 128256, BF16), (1000, 50257, BF16), (8, 131072, BF16),
     (1, 128256, BF16), (65536, 1000, BF16), (131, 799, FP16), (300, 17, FP32), (1024, 32000, FP32),
     (200, 128256, FP32)],
)  # fmt: skip
def test_rows_and_gradient(rows, columns, dtype, loss, poison):
    options, scale, softcap = LOSSES[loss]
    x, target = draw(rows, columns, dtype)
    given = factors(target, columns, **options)
    runs = []
    for _ in range(3):
        poison()
        runs.append(launch.rows_and_gradient(x, target, *given, scale, softcap))
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    checked(runs[0], x, target, given, scale, softcap)
    own = x.clone()
    over = launch.rows_and_gradient(own, target, *given, scale, softcap, dx=own)
    checked(over, x, target, given, scale, softcap)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (1.2, 30.0)])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(2048, 128256, BF16), (1000, 50257, BF16), (1, 128256, BF16), (131, 799, FP16),
     (300, 17, FP32), (1024, 32000, FP32)],
)  # fmt: skip
def test_row_statistics(rows, columns, dtype, scale, softcap, poison):
    x, _ = draw(rows, columns, dtype)
    runs = []
    for below in (True, True, False):
        poison()
        runs.append(_joint.row_statistics(x, below, scale, softcap))
    assert all(map(torch.equal, *runs[:2])) and all(map(torch.equal, runs[0][:2], runs[2][:2]))
    for first in range(0, rows, 1024):
        part = slice(first, first + 1024)
        truth = _joint.row_statistics(x[part].double(), True, scale, softcap)
        wide = composed.logits_of(x[part], scale, softcap)
        for mine, *other in zip(runs[0], truth, _joint._statistics(wide), strict=True):
            verdict = measure.check(mine[part], *other)
            assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("kind", "own"), [(OWN, NO), (GIVEN, YES), (SOFTMAX, YES), (SOFTMAX, FINITE)]
)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(2048, 128256, BF16), (1000, 50257, BF16), (131, 799, FP16), (1024, 32000, FP32)],
)
def test_weighted_statistics(rows, columns, dtype, kind, own, poison):
    x, w = (draw(rows, columns, dtype)[0] for _ in range(2))
    w = w.float().softmax(1).to(dtype) if kind == GIVEN else w
    numbers = (1.0, 0.0, 0.5, 0.0) if own == FINITE else (1.2, 30.0, 1.0, 0.0)
    runs = []
    for _ in range(2):
        poison()
        weights = None if kind == OWN else w
        runs.append(_weighted.weighted_statistics(x, weights, kind, own, True, *numbers))
    assert all(map(torch.equal, *runs))
    for first in range(0, rows, 512):
        part = slice(first, first + 512)
        own_w = None if kind == OWN else w[part]
        options = kind, own, True, *numbers
        truth, eager = (
            _weighted._composed(x[part].to(d), None if own_w is None else own_w.to(d), *options)
            for d in (torch.float64, FP32)
        )
        for mine, *other in zip(runs[0], truth, eager, strict=True):
            if mine.numel():
                verdict = measure.check(mine[part], *other)
                assert verdict.ok, verdict.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [8, 200])
def test_rows_may_hold_anything(rows, bad):
    x, target = draw(rows, 5003)
    x[1, 5:7], x[2, :], x[3, 5000] = bad, bad, bad  # row 1 has no factors
    given = factors(target, 5003, smoothing=0.1)
    *rows_of, _, dx = _joint.rows_and_gradient(x, target, *given, 1.0, 0.0)
    assert not dx[1].any() and dx[4:].isfinite().all() and dx[0].any()
    for found in (rows_of, _joint.row_statistics(x, True, 1.0, 0.0)):
        for mine, theirs in zip(found, _joint._statistics(x.float()), strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("memory", [_linear_cross_entropy.MEMORY, 1])
def test_linear_rows_and_gradient(memory, poison):
    h = torch.randn(2500, 512, device="cuda").to(BF16)
    w = (torch.randn(32000, 512, device="cuda") * 0.05).to(BF16)
    target = torch.randint(0, 32000, (2500,), device="cuda")
    given = factors(target, 32000, smoothing=0.1)
    poison()
    peak, total, below, picked, dh, dw, db = _joint.linear_rows_and_gradient(
        h, w, None, target, *given, [True, True, False], memory, 1.0, 0.0
    )
    x = h @ w.t()
    *rows, dx = _joint._composed(x, target, *given, 1.0, 0.0)
    for mine, theirs in zip((peak, total, below, picked), rows, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-2)
    wide = [None if f is None else f.double() for f in given]
    truth = _joint._composed(x.double(), target, *wide, 1.0, 0.0)[-1]
    for mine, right, eager in (
        (dh, truth @ w.double(), dx @ w), (dw, truth.t() @ h.double(), dx.t() @ h)
    ):  # fmt: skip
        verdict = measure.check(mine, right, eager)
        assert verdict.ok, verdict.reason
    assert db.numel() == 0


class _LogSumExp(torch.autograd.Function):
    """The sum of the rows' log-sum-exp, its gradient made in the forward."""

    @staticmethod
    def forward(ctx, x, target, a, b):
        peak, total, *_, made = torch.ops.inductor_ext.rows_and_gradient.default(
            x, target, a, None, b, None, 1.0, 0.0
        )
        ctx.save_for_backward(made)
        return (peak + total.log()).sum()

    @staticmethod
    def backward(ctx, g):
        made = torch.ops.inductor_ext.scaled_gradient.default(*ctx.saved_tensors, g)
        return made, None, None, None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_scaled_in_place(mode):
    x, target = draw(200, 32000)
    x.requires_grad_()
    a, b = torch.ones(200, device="cuda"), torch.zeros(200, device="cuda")
    fn = torch.compile(lambda x: _LogSumExp.apply(x * 2, target, a, b), mode=mode)
    with inductor_ext.enable("cross_entropy"):
        for g in (1.0, 1.0, 3.0, 0.5, 1.0):
            torch.compiler.cudagraph_mark_step_begin()
            (dx,) = torch.autograd.grad(fn(x) * g, x)
            expected = (2 * g * (2 * x.detach().float()).softmax(1)).to(BF16)
            torch.testing.assert_close(dx, expected, rtol=2e-2, atol=1e-5)
