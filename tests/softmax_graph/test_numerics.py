"""Every variant's loss and gradient, by the rule for numbers, in Triton's interpreter."""

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext import measure
from inductor_ext.testing import compile_for, run_interpreted

BF16 = torch.bfloat16
N, V = 5, 1283


def fired(code):
    return {d.lowering for d in code.decisions if d.fired}


def same_kinds(got, expected):
    """NaN and infinities where the reference has them, and close elsewhere."""
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, equal_nan=True, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, judged):
    variant = VARIANTS[name]
    assert fired(judged(variant.fn, variant.inputs(N, V, BF16, "cpu")))


@pytest.mark.parametrize(
    "name", ["z-loss, softcap, smoothing", "class weight, smoothing", "soft targets"]
)
def test_fp32_logits_and_other_lengths(name, judged):
    variant = VARIANTS[name]
    assert fired(judged(variant.fn, variant.inputs(3, 2049, torch.float32, "cpu")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_class_dimension_in_the_middle(dtype, judged):
    def loss(x, y, w):
        return F.cross_entropy(x, y, weight=w, label_smoothing=0.2)

    x, y = torch.randn(2, 1283, 3).to(dtype), torch.randint(0, 1283, (2, 3))
    y[1, 1] = -100
    code = judged(loss, [x, y, torch.rand(1283, dtype=dtype)])
    assert [d.fired for d in code.decisions if d.lowering == "cross_entropy"] == [False, True]


def test_several_losses_and_a_second_use_of_the_logits(judged):
    def loss(x, y):
        p = F.softmax(x.float() * 2, -1)
        nll = F.cross_entropy(x.float(), y, reduction="sum", label_smoothing=0.1)
        return (
            nll + x.float().square().mean() + p.square().sum() - F.log_softmax(x.float(), 0).sum()
        )

    judged(loss, [torch.randn(N, V).to(BF16), torch.randint(0, V, (N,))])


def test_targets_of_mixed_kind(judged):
    """A smoothed one-hot as probabilities, weights and a mask over rows, and a temperature."""

    def loss(x, y, w, mask):
        t = F.one_hot(y, V).float() * 0.9 + 0.1 / V
        logp = F.log_softmax(x.float() / 0.5, -1)
        rows = -(t * logp * w).sum(-1)
        return torch.where(mask, rows, 0.0).sum() / mask.sum()

    y, mask = torch.randint(0, V, (N,)), torch.arange(N) % 2 == 0
    judged(loss, [torch.randn(N, V).to(BF16), y, torch.rand(V), mask])


# --- without a gradient ---------------------------------------------------------------------------

FORWARDS = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "temperature": lambda x: F.softmax(x / 0.7, -1),
    "softcap": lambda x: F.log_softmax(4 * torch.tanh(x / 4), -1),
    "logsumexp": lambda x: torch.logsumexp(x * 2, -1),
    "two temperatures": lambda x: F.log_softmax(x, -1)[..., 5] - F.log_softmax(x / 2, -1)[..., 5],
    "by hand": lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1),
    "over all": lambda x: F.log_softmax(x, -1).square().mean(),
}


def forward(fn, x):
    with torch.no_grad():
        code = compile_for("h200", fn, x)
        return run_interpreted(code, x), code


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_forward(name, dtype):
    fn, x = FORWARDS[name], (torch.randn(2, 3, V) * 3).to(dtype)
    out, code = forward(fn, x)
    assert "softmax" in fired(code)
    verdict = measure.check(out, fn(x.double()), fn(x))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_each_hard_row_without_a_gradient(name):
    x, _ = rows()
    same_kinds(forward(FORWARDS[name], x)[0], FORWARDS[name](x))


# --- the numbers that break a loss ----------------------------------------------------------------


def smoothed_rows(x, y):
    return F.cross_entropy(x, y, reduction="none", label_smoothing=0.1)


def negated_mean(x, y):
    return -F.log_softmax(x, -1).mean(-1)


def gathered(x, y):
    return -F.log_softmax(x, -1).gather(-1, y[:, None]).squeeze(-1)


def scaled_logsumexp(x, y):
    return torch.logsumexp(x * 0.5, -1)


def shared(x, y):
    return torch.logsumexp(x, -1) - F.log_softmax(x, -1).gather(-1, y[:, None]).squeeze(-1)


def one_hot(x, y):
    return -(F.one_hot(y, x.shape[-1]) * F.log_softmax(x, -1)).sum(-1)


def inside_a_condition(x, y):
    """Odd rows only, and nothing of the others: they may hold NaN."""
    kept = torch.arange(len(y))[:, None] % 2 == 1
    logp = F.log_softmax(x, -1)
    return torch.where(kept.to(x.device), 2.0 * logp, 0.0).sum(-1)


def rows():
    """Rows of logits (fp32) that are hard on the algebra, and a target for each."""
    x = torch.randn(10, V)
    x[1] += 1e6  # a common offset
    x[2] = 1e8
    x[3, 700:] = -torch.inf  # masked columns
    x[4, 5] = torch.inf
    x[5, 6] = torch.nan
    x[6] = -torch.inf
    x[7, :500] = torch.finfo(torch.float32).min / 4  # masked by a large number, sampled entries too
    x[8, 17] = 60.0  # confident
    x[9] = -torch.inf  # few columns left, none of them looked at beforehand
    x[9, 1:101] = torch.randn(100)
    return x, torch.tensor([3, 4, 5, 6, 5, 6, 7, 900, 17, 50])


@pytest.mark.parametrize(
    "loss",
    [smoothed_rows, negated_mean, gathered, scaled_logsumexp, shared, one_hot, inside_a_condition],
)
def test_each_hard_row_gives_what_eager_gives(loss, generated, with_gradient):
    x, y = rows()
    code, *got = generated(loss, [x, y])
    assert fired(code)
    same_kinds(got, with_gradient(loss, [x, y]))


def test_an_offset_does_not_swallow_the_loss(generated):
    """Two logits above a row of very small ones: log(1 + e^-3), and log 2 at 1e8."""

    def loss(x, t):
        return F.cross_entropy(x, t, reduction="none")

    x, t = torch.full((2, V), -1e9), torch.zeros(2, V)
    x[0, :2] = torch.tensor([2.0, -1.0]) + 1e6
    x[1, 0::2] = x[1, 1::2] = 1e8
    t[:, 0] = 1
    _, loss_, gradient = generated(loss, [x, t])
    expected = math.log1p(math.exp(-3)), math.log(V)
    torch.testing.assert_close(loss_, torch.tensor(expected), rtol=1e-3, atol=1e-5)
    assert gradient.isfinite().all()


def test_confident_targets_keep_a_small_loss(judged):
    """Probabilities that are nearly one-hot, on logits that agree with them."""

    def loss(x, t):
        return F.cross_entropy(x, t, reduction="none")

    x = torch.randn(6, V) + torch.tensor([0.0, 1e3, -1e3, 1e5, 0.0, 0.0])[:, None]
    at, gap = torch.arange(6) * 100, torch.tensor([8.0, 12.0, 20.0, 60.0, 1e3, 5.0])
    x[torch.arange(6), at] += gap
    t = torch.full((6, V), 1e-6 / V)
    t[torch.arange(6), at] = 1 - 1e-6
    assert "cross_entropy" in fired(judged(loss, [x, t]))


def test_ignored_rows_may_hold_anything(generated, with_gradient):
    """NaN and infinities in rows that are ignored show nowhere but where eager shows them."""

    def loss(x, y):
        return F.cross_entropy(x, y, label_smoothing=0.1) + F.cross_entropy(x * 0.5, y)

    x, y = rows()
    y[[4, 5, 6]] = -100
    _, *got = generated(loss, [x, y])
    expected = with_gradient(loss, [x, y])
    assert expected[0].isfinite() or expected[0] == torch.inf
    same_kinds(got, expected)


def test_all_rows_ignored(generated, with_gradient):
    def loss(x, y):
        return F.cross_entropy(x, y, label_smoothing=0.1)

    x, y = torch.randn(3, V), torch.full((3,), -100)
    _, *got = generated(loss, [x, y])
    same_kinds(got, with_gradient(loss, [x, y]))


def test_deterministic_and_twice(generated):
    x, y = torch.randn(N, V).to(BF16), torch.randint(0, V, (N,))
    variant = VARIANTS["z-loss, softcap, smoothing"]
    _, *first = generated(variant.fn, [x, y])
    _, *second = generated(variant.fn, [x, y])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
