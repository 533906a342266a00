"""Offsets, confident targets, infinities, ignored rows: kernels and composed functions alike."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import ops

FP32, BF16 = torch.float32, torch.bfloat16
HELD, STREAMED = Tile(1, 1, 3, 1), Tile(1, 1, 0, 1)


@pytest.fixture(params=["held", "streamed", "split", "separate", "composed"])
def computed(request, on_cpu, with_tile, run):
    """``run`` of ``ops.cross_entropy``, on one of its ways."""
    way = request.param

    def compute(x, target, *args, **options):
        tile = with_tile(HELD if way == "held" else STREAMED, few=132 if way == "split" else 0)
        if way == "separate":
            options["return_lse"] = True
        fn = ops.cross_entropy
        if options.get("return_lse"):
            fn = lambda *a, **k: ops.cross_entropy(*a, **k)[0]  # noqa: E731
        with contextlib.nullcontext() if way == "composed" else on_cpu(), tile:
            return run(fn, x, target, *args, **options)

    return compute


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_common_offset_cancels(computed, smoothing):
    x = torch.tensor([[2.0, -1.0]])
    target = torch.tensor([0])
    expected = F.cross_entropy(x.double(), target, label_smoothing=smoothing).item()
    for offset in (0.0, 1e6, -1e6):
        loss, dx = computed(x + offset, target, label_smoothing=smoothing)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert dx.sum().abs() < 1e-7
    if not smoothing:
        assert loss.item() == pytest.approx(0.048587, rel=1e-4)
    loss, dx = computed(torch.tensor([[1e8, 1e8]]), target)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert dx.tolist() == [pytest.approx([-0.5, 0.5])]


@pytest.mark.parametrize("margin", [17.0, 20.0, 40.0, 80.0])
def test_a_confident_target_keeps_loss_and_gradient(computed, margin):
    x = torch.zeros(1, 300)
    x[0, 123] = margin
    loss, dx = computed(x, torch.tensor([123]))
    expected = math.log1p(299 * math.exp(-margin))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert dx[0, 123].item() == pytest.approx(math.expm1(-expected), rel=1e-5)
    assert dx[0, 0].item() == pytest.approx(math.exp(-margin - expected), rel=1e-5)


def test_infinite_logits_are_as_in_torch(computed, formula, run):
    x = torch.randn(6, 300)
    x[0, ::3] = -math.inf  # columns
    x[1, :] = -math.inf  # a row
    x[2, 5] = -math.inf  # the target
    x[3, :] = -math.inf
    x[3, 5] = 2.0  # all but the target
    x[4, 7] = math.inf
    x[5, 5] = math.inf
    target = torch.full((6,), 5)
    ours = computed(x, target, reduction="none")
    torchs = run(formula, x, target, reduction="none", dtype=torch.float64)
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine.double(), theirs, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_thread_that_sees_only_minus_infinity(computed, formula, run):
    x = torch.full((2, 1200), -math.inf)
    x[0, 1100:], x[1, :40] = 1.0, 2.0
    target = torch.tensor([1150, 3])
    loss, dx = computed(x, target)
    truth, truth_dx = run(formula, x, target, dtype=torch.float64)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(dx.double(), truth_dx, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_may_hold_anything(computed, reduction, options):
    x = torch.randn(5, 300)
    target = torch.tensor([3, -100, 299, -100, -100])
    clean = computed(x, target, reduction=reduction, **options)
    x[1], x[3], x[4, 7] = math.nan, math.inf, -math.inf
    loss, dx = computed(x, target, reduction=reduction, **options)
    assert torch.equal(loss, clean[0]) and torch.equal(dx, clean[1])
    assert (dx[[1, 3, 4]] == 0).all() and (dx[[0, 2]] != 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_row_counts(computed, reduction):
    x, target = torch.randn(3, 300), torch.full((3,), -100)
    loss, dx = computed(x, target, reduction=reduction)
    theirs = F.cross_entropy(x, target, reduction=reduction)
    torch.testing.assert_close(loss, theirs, equal_nan=True)
    assert (dx == 0).all()


def test_every_weight_is_zero(computed):
    loss, _ = computed(torch.randn(3, 300), torch.tensor([1, 1, -100]), torch.zeros(300))
    assert loss.isnan()


@pytest.mark.parametrize("bad", [-1, 300, 2**33])
def test_a_target_out_of_range_is_an_error(computed, bad):
    with pytest.raises((AssertionError, RuntimeError), match="target"):
        computed(torch.randn(3, 300), torch.tensor([1, bad, 2]))


def test_sizes_that_are_hardly_there(computed):
    loss, dx = computed(torch.randn(2, 1), torch.zeros(2, dtype=torch.int64))
    assert loss.item() == 0 and (dx == 0).all()
    loss, dx = computed(torch.randn(0, 7), torch.zeros(0, dtype=torch.int64), reduction="sum")
    assert loss.item() == 0 and dx.shape == (0, 7)


def test_padding_has_no_part_in_a_softcap(computed, formula, run):
    """Padded columns capped after they were masked would add e^-1 each."""
    x, target = torch.zeros(1, 507), torch.tensor([3])
    loss, _ = computed(x, target, softcap=1.0)
    assert loss.item() == pytest.approx(math.log(507), rel=1e-6)


def test_large_fp16(computed, judge):
    x = (torch.randn(3, 300) * 2e4).to(torch.float16)
    target = torch.randint(0, 300, (3,))
    judge(computed(x, target, reduction="none"), x, target, reduction="none")
