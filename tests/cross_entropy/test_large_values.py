"""Huge finite logits, masked columns of which nothing depends, logits far below a softcap."""

import math

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import ops

FP32 = torch.float32
LOWEST = torch.finfo(FP32).min
HELD, STREAMED = Tile(1, 1, 3, 1), Tile(1, 1, 0, 1)
SMOOTHED = {"label_smoothing": 0.1}


@pytest.fixture(params=["held", "streamed", "split", "separate"])
def computed(request, on_cpu, with_tile, run):
    """``run`` of ``ops.cross_entropy`` on one of the ways of its kernels."""
    way = request.param

    def compute(x, target, *args, **options):
        tile = with_tile(HELD if way == "held" else STREAMED, few=132 if way == "split" else 0)
        fn = ops.cross_entropy
        if way == "separate":
            options["return_lse"] = True
            fn = lambda *a, **k: ops.cross_entropy(*a, **k)[0]  # noqa: E731
        with on_cpu(), tile:
            return run(fn, x, target, *args, **options)

    return compute


def close(ours, theirs, rtol=1e-5, atol=1e-6):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("value", [1e10, -1e10, 1e12, -1e30, LOWEST])
@pytest.mark.parametrize("kind", ["indices", "smoothed", "probabilities"])
def test_a_constant_row_is_uniform(computed, run, value, kind):
    x = torch.full((2, 301), value)
    target = torch.tensor([0, 300])
    if kind == "probabilities":
        target = torch.rand(2, 301)
        target /= target.sum(-1, keepdim=True)
    options = {"reduction": "none"} | (SMOOTHED if kind == "smoothed" else {})
    ours = computed(x, target, **options)
    close(ours, run(F.cross_entropy, torch.zeros(2, 301), target, **options))


def test_a_constant_row_of_distillation(on_cpu):
    for value in (1e10, LOWEST):
        x = torch.full((2, 301), value, requires_grad=True)
        ids, logprobs = torch.tensor([[3, 300], [0, 7]]), torch.zeros(2, 2)
        with on_cpu():
            loss = ops.sparse_distillation_loss(x, ids, logprobs, reduction="none")
            (dx,) = torch.autograd.grad(loss.sum(), x)
        assert loss.tolist() == pytest.approx([math.log(301)] * 2, rel=1e-6)
        assert dx[0, 3].item() == pytest.approx(1 / 301 - 0.5) and dx[0, 0].item() > 0


def test_the_lowest_value_in_a_row_and_as_target(computed, run):
    x = torch.randn(3, 300)
    x[:, 0], x[2, 40:100] = LOWEST, -1e30
    target = torch.tensor([0, 5, 50])
    ours = computed(x, target, reduction="none")
    close(ours, run(F.cross_entropy, x, target, reduction="none"))
    assert ours[0].isfinite().all()


@pytest.mark.parametrize("first", [1, 40, 250])
@pytest.mark.parametrize(("value", "scale"), [(-1e6, 1.0), (-1e9, 0.7), (-1e30, 1.0)])
def test_probabilities_with_masked_columns(computed, formula, run, first, value, scale):
    x, target = torch.randn(4, 300), torch.rand(4, 300)
    x[:, :first], target[:, :first] = value, 0.0
    x[1, 250:260], target[1, 250:260] = value, 0.0
    target[:, 299] += 0.1
    target /= target.sum(-1, keepdim=True)
    options = {"reduction": "none", "scale": scale}
    ours = computed(x, target, **options)
    close(ours, run(formula, x, target, dtype=torch.float64, **options))


@pytest.mark.parametrize("masked", [[3], [*range(290)]])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothing_with_masked_columns_of_weight_zero(computed, formula, run, masked, smoothing):
    x, weight = torch.randn(2, 300), torch.rand(300)
    x[:, masked], weight[masked] = -1e9, 0.0
    target = torch.tensor([3, 295])
    options = {"reduction": "none", "label_smoothing": smoothing}
    ours = computed(x, target, weight, **options)
    close(ours, run(formula, x, target, weight, dtype=torch.float64, **options))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_common_offset_cancels_in_what_is_linear(computed, formula, run, weighted):
    """Also where the target is all that a thread sees, and beside masked columns."""
    x, weight = torch.randn(3, 257).mul(8).round() / 8, torch.rand(257) if weighted else None
    target = torch.tensor([256, 1, 31])
    probabilities = torch.randn(3, 257).softmax(-1)
    probabilities[:, 0] = 0.0
    for offset in (2.0**20, -(2.0**20)):
        moved = x + offset
        for t, options in ((target, SMOOTHED), (probabilities, {})):
            if t is probabilities:
                moved[:, 0] = -1e9
            ours = computed(moved, t, weight, reduction="none", **options)
            theirs = run(
                formula, moved, t, weight, dtype=torch.float64, reduction="none", **options
            )
            close(ours, theirs)


def test_a_target_alone_beside_infinite_columns(computed, run):
    x = torch.full((2, 300), -math.inf)
    x[0, 5], x[1, 5] = -1e3, -1e30
    loss, dx = computed(x, torch.tensor([5, 5]), reduction="none")
    close((loss, dx), run(F.cross_entropy, x, torch.tensor([5, 5]), reduction="none"))
    assert (loss == 0).all()


def test_logits_far_below_a_softcap(computed, formula, run):
    target = torch.tensor([0, 5, 299])
    for size, softcap, rtol in (
        (1e-3, 1000.0, 1e-6), (0.1, 1000.0, 1e-6), (5.0, 1000.0, 1e-6), (190.0, 1000.0, 1e-6),
        (3000.0, 1000.0, 1e-6), (0.1, 30.0, 1e-6), (6.0, 30.0, 1e-5), (100.0, 30.0, 1e-5),
    ):  # fmt: skip
        x = torch.rand(3, 300).sub(0.5).mul(2 * size)
        ours = computed(x, target, softcap=softcap, reduction="none")
        theirs = run(formula, x, target, dtype=torch.float64, softcap=softcap, reduction="none")
        torch.testing.assert_close(
            ours[0].double(), theirs[0], rtol=rtol, atol=5e-7 * min(size, softcap)
        )
        torch.testing.assert_close(ours[1].double(), theirs[1], rtol=1e-3, atol=1e-6)
