"""Losses whose gradient is made in the forward: numbers, and what the generated code does."""

import re

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext import registry

BF16 = torch.bfloat16
N, V = 5, 1283
OF_THE_FORM = [
    "plain", "label smoothing", "label smoothing, 16 bit", "softcap", "logit scale", "temperature",
    "z-loss", "z-loss, softcap, smoothing", "gathered", "logsumexp - gathered", "smoothing by hand",
    "smoothing by a trainer", "maximum by hand",
]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(clean_setting):
    with registry.only("fused_loss"):
        yield


def calls(source):
    return re.findall(
        r"= torch\.ops\.inductor_ext\.(\w+)\.default\(|ops\.inductor_ext\.(\w+_)\.", source
    )


def check_fused(code, sweeps, times=1):
    """The logits are read by the operation alone, once, and their gradient is written by it."""
    found = [d for d in code.decisions if d.chosen in ("one sweep", "stock")]
    assert [d.fired for d in found] == [True] * times
    assert calls(code.forward) == [("rows_and_gradient", "")] * times
    assert sweeps(code.forward, V) == []
    # The backward has no kernel, but for the one that leaves if the incoming gradient is 1.
    assert calls(code.backward) == [("", "scale_gradient_")] * times
    assert ".run(" not in code.backward


def logits(dtype=BF16, *shape):
    return torch.randn(*(shape or (N, V))).mul(2).to(dtype)


def targets(*shape):
    return torch.randint(0, V, shape or (N,))


@pytest.mark.parametrize("name", OF_THE_FORM)
def test_variant(name, judged, sweeps):
    variant = VARIANTS[name]
    check_fused(judged(variant.fn, variant.inputs(N, V, BF16, "cpu")), sweeps)


# --- spellings that are not in the table ----------------------------------------------------------


def masked_mean(x, y):
    keep = (y % 3 != 0).float()
    return (F.cross_entropy(x.float(), y, reduction="none") * keep).sum() / keep.sum()


def z_loss_where_it_counts(x, y):
    x, counts = x.float(), y != 7
    lse = torch.logsumexp(x, -1)
    nll = lse - x.gather(-1, y[:, None]).squeeze(-1)
    return ((nll + 1e-3 * lse**2) * counts).sum() / counts.sum()


def one_hot(x, y):
    t = F.one_hot(y, V).float() * 0.9 + 0.1 / V
    return -(t * F.log_softmax(x.float(), -1)).sum(-1).mean()


def indexed(x, y):
    rows = torch.arange(len(y), device=x.device)
    return -F.log_softmax(x.float(), -1)[rows, y].mean()


def summed_nll(x, y):
    return F.nll_loss(F.log_softmax(x.float(), -1), y, ignore_index=3, reduction="sum")


def penalty_alone(x, y):
    return torch.logsumexp(x.float() * 0.5, -1).square().mean()


def divided(x, y):
    return F.cross_entropy(x.float(), y, reduction="sum") / (y != -100).sum() / 4


def without_its_maximum(x, y):
    x = x.float()
    x = x - x.amax(-1, keepdim=True).detach()
    return (x.exp().sum(-1).log() - x.gather(-1, y[:, None]).squeeze(-1)).mean()


def first_of_one(x, y):
    z = x.float()
    return (z.logsumexp(-1) - z.gather(-1, y[:, None])[:, 0]).mean()


SPELLINGS = [
    without_its_maximum, masked_mean, z_loss_where_it_counts, indexed, summed_nll, penalty_alone,
    divided, first_of_one,
]  # fmt: skip


@pytest.mark.parametrize("loss", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_spelling(loss, dtype, judged, sweeps):
    check_fused(judged(loss, [logits(dtype), targets()]), sweeps)


def test_a_number_made_of_the_loss_comes_in(judged):
    """The derivative of what is made of the mean loss is one number to the rows."""

    def perplexity(x, y):
        return F.cross_entropy(x.float(), y).exp()

    code = judged(perplexity, [logits(), targets()])
    assert calls(code.forward) == [("rows_and_gradient", "")]
    assert calls(code.backward) == [("", "scale_gradient_")]


def test_one_hot_targets(judged):
    """Their product with the log-probabilities is summed in a sweep of its own, as it stands."""
    code = judged(one_hot, [logits(), targets()])
    assert calls(code.forward) == [("rows_and_gradient", "")] and ".run(" not in code.backward


def test_a_negative_index_counts_from_the_end(judged, sweeps):
    check_fused(judged(indexed, [logits(), torch.tensor([-1, 3, -V, 0, 7])]), sweeps)


# --- shapes ---------------------------------------------------------------------------------------


def of_tokens(x, y):
    return F.cross_entropy(x.view(-1, V).float(), y.view(-1), label_smoothing=0.1)


def shifted(x, y):
    x, y = x.float()[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return F.cross_entropy(x.view(-1, V), y.view(-1))


def shifted_and_capped(x, y):
    x = 20 * torch.tanh(x[:, :-1].float() / 20)
    loss = F.cross_entropy(x.reshape(-1, V), y[:, 1:].reshape(-1))
    return loss + 1e-3 * torch.logsumexp(x, -1).square().mean()


def every_second(x, y):
    return F.cross_entropy(x.flatten(0, 1)[1::2].float(), y.flatten()[1::2], label_smoothing=0.1)


@pytest.mark.parametrize("loss", [of_tokens, shifted, shifted_and_capped, every_second])
def test_three_dimensions(loss, judged, sweeps):
    x, y = logits(BF16, 2, 4, V), targets(2, 4)
    y[1, 2] = -100
    check_fused(judged(loss, [x, y]), sweeps)


def test_one_row(judged, sweeps):
    check_fused(judged(VARIANTS["label smoothing"].fn, [logits(BF16, 1, V), targets(1)]), sweeps)


def test_logits_inside_a_program(judged):
    """Their gradient goes on into a product."""

    def loss(h, w, y):
        return F.cross_entropy((h @ w).float(), y)

    inputs = [torch.randn(N, 24), torch.randn(24, V), targets()]
    code = judged(loss, inputs)
    assert calls(code.forward) == [("rows_and_gradient", "")]
    assert calls(code.backward) == [("", "scale_gradient_")]


@pytest.mark.parametrize("sizes", [{0: None}, {1: None}, {0: None, 1: None}])
@pytest.mark.parametrize("loss", [of_tokens, shifted])
def test_symbolic_numbers_of_rows(loss, sizes, judged, sweeps):
    def with_targets(x):
        y = torch.arange(x.shape[0] * x.shape[1], device=x.device) * 37 % 997
        return loss(x, y.view(x.shape[:2]))

    b, t = (3 if 0 in sizes else 2), (6 if 1 in sizes else 4)
    code = judged(
        with_targets, [logits(BF16, 2, 4, V)], run=[logits(BF16, b, t, V)], dynamic={0: sizes}
    )
    check_fused(code, sweeps)
    assert code.frames == 1


# --- beside other things --------------------------------------------------------------------------


def test_two_losses_of_their_own_logits(judged_all, sweeps):
    def loss(x, q, y):
        return F.cross_entropy(x.float(), y) + 0.5 * F.cross_entropy(q.float() * 2, (y + 1) % V)

    code, _ = judged_all(loss, [logits(), logits(), targets()])
    check_fused(code, sweeps, times=2)


def test_logits_keep_their_other_users(judged_all):
    def loss(x, y):
        right = x.argmax(-1) == y
        return F.cross_entropy(x.float(), y), right.float().mean(), x.detach().float().amax()

    x, y = logits(), targets()
    code, (_, right, most) = judged_all(loss, [x, y])
    assert calls(code.forward) == [("rows_and_gradient", "")]
    assert right == (x.argmax(-1) == y).float().mean() and most == x.max()


@pytest.mark.parametrize("others", [(), ("softmax", "cross_entropy")])
def test_with_and_without_the_other_rewritings(others, judged, sweeps):
    variant = VARIANTS["z-loss, softcap, smoothing"]
    with registry.only("fused_loss", *others):
        check_fused(judged(variant.fn, variant.inputs(N, V, BF16, "cpu")), sweeps)


# --- the numbers that break a loss ----------------------------------------------------------------


def hard_rows():
    x = torch.randn(9, V)
    x[1] += 1e6  # a common offset
    x[2] = 1e8
    x[3, 700:] = -torch.inf  # masked columns
    x[4, 6] = torch.nan
    x[5] = -torch.inf
    x[6, :500] = torch.finfo(torch.float32).min / 4
    x[7, 17] = 60.0  # confident
    x[8, 5] = torch.inf
    return x, torch.tensor([3, 4, 5, 6, 5, 6, 900, 17, 50])


def smoothed(x, y):
    return F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum")


def gathered(x, y):
    return -F.log_softmax(x, -1).gather(-1, y[:, None]).sum()


def same(got, expected):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, equal_nan=True, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("loss", [smoothed, gathered, one_hot])
@pytest.mark.parametrize("row", range(9))
def test_each_hard_row_gives_what_eager_gives(loss, row, generated, with_gradient):
    x, y = (t[row : row + 1] for t in hard_rows())
    _, *got = generated(loss, [x, y])
    same(got, with_gradient(loss, [x, y]))


def test_ignored_rows_may_hold_anything(generated, with_gradient):
    x, y = hard_rows()
    y[[3, 4, 5, 6, 8]] = -100
    _, *got = generated(smoothed, [x, y])
    loss, gradient = with_gradient(smoothed, [x, y])
    gradient[y == -100] = 0.0  # where eager multiplies NaN by 0
    assert loss.isfinite() and gradient.isfinite().all()
    same(got, (loss, gradient))


def test_rows_outside_a_condition_may_hold_anything(generated, with_gradient):
    """Nothing of them is summed, not even times 0."""
    kept = torch.arange(9) % 2 == 1

    def loss(x, y):
        logp = F.log_softmax(x, -1)
        return -torch.where(kept.to(x.device)[:, None], 2.0 * logp, 0.0).sum(-1).mean()

    x, y = hard_rows()
    x[[3, 5, 7]] = torch.randn(3, V)
    _, *got = generated(loss, [x, y])
    expected, gradient = with_gradient(loss, [x, y])
    gradient[~kept] = 0.0  # where eager multiplies NaN by 0
    assert expected.isfinite() and gradient.isfinite().all()
    same(got, (expected, gradient))


def test_all_rows_ignored(generated, with_gradient):
    def loss(x, y):
        return F.cross_entropy(x, y, label_smoothing=0.1)

    x, y = torch.randn(3, V), torch.full((3,), -100)
    _, *got = generated(loss, [x, y])
    same(got, with_gradient(loss, [x, y]))


def test_an_incoming_gradient_scales(judged_all, sweeps):
    """The loss is scaled outside of what is compiled."""
    from inductor_ext.testing import compile_for, run_interpreted

    x, y = torch.randn(N, V, requires_grad=True), targets()
    code = compile_for("h200", VARIANTS["plain"].fn, x, y, grad=True)
    check_fused(code, sweeps)
    results = {}
    for g in (1.0, 0.25, -3.0):
        _, gradients = run_interpreted(code, x, y, grad_outputs=[torch.tensor(g)])
        results[g] = gradients["args[0]"]
    assert torch.equal(results[0.25], results[1.0] * 0.25)
    torch.testing.assert_close(results[-3.0], results[1.0] * -3.0)
