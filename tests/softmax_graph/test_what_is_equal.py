"""What a loss's algebra takes for equal, and what it must not: values, roundings, sums, targets."""

import re

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from inductor_ext.lowerings import fused_loss, linear_loss

import inductor_ext
from inductor_ext import registry
from inductor_ext.testing import compile_for, run_interpreted

BF16 = torch.bfloat16
N, V = 6, 1031
FUSED = ("fused_loss", "linear_cross_entropy")


@pytest.fixture(autouse=True)
def alone(clean_setting):
    with registry.only(*FUSED):
        yield


def logits(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (N, V))).mul(2).to(dtype)


def targets(*shape):
    return torch.randint(0, V, shape or (N,))


def confident(x, y, most):
    """Logits whose targets' entries tower above the others."""
    x = x.clone()
    x[torch.arange(len(y)), y] = torch.linspace(most / 2, most, len(y)).to(x.dtype)
    return x


def taken(code):
    return [
        d.lowering for d in code.decisions if d.fired and d.chosen in ("one sweep", "one chunk")
    ]


def as_eager(fn, *inputs, rtol=2e-5, atol=2e-6):
    """Assert that results and the first input's gradient are those of eager; returns the code."""
    x = inputs[0].detach().requires_grad_()
    code = compile_for("h200", fn, x, *inputs[1:], grad=True)
    expected = fn(x, *inputs[1:])
    expected = expected if isinstance(expected, tuple) else (expected,)
    ones = [torch.ones_like(r) for r in expected if r.requires_grad]
    got, gradients = run_interpreted(code, x, *inputs[1:], grad_outputs=ones)
    got = got if isinstance(got, tuple) else (got,)
    (gradient,) = torch.autograd.grad([r for r in expected if r.requires_grad], x, ones)
    pairs = zip((*got, gradients["args[0]"]), (*expected, gradient), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs.detach(), rtol=rtol, atol=atol)
    return code


# --- targets --------------------------------------------------------------------------------------


def shifted_both_ways(x, y, c):
    rows, columns = (y + c[None, :]).view(-1), (y + c[:, None]).view(-1)
    return F.cross_entropy(x.view(-1, V), rows) + F.cross_entropy(x.view(-1, V), columns)


def masked_both_ways(x, y, c):
    m = c > 0
    rows, columns = (torch.where(mask, y, -100).view(-1) for mask in (m[None, :], m[:, None]))
    return F.cross_entropy(x.view(-1, V), rows) + F.cross_entropy(x.view(-1, V), columns)


@pytest.mark.parametrize("loss", [shifted_both_ways, masked_both_ways])
def test_targets_broadcast_along_other_dimensions_differ(loss):
    y = torch.randint(0, 300, (3, 3))
    assert not taken(as_eager(loss, logits(3, 3, V), y, torch.tensor([0, 5, 0])))


def test_targets_in_other_shapes_are_equal():
    def loss(x, y, c):
        logp = F.log_softmax(x.view(-1, V), -1)
        nll, same = (y + c).view(-1, 1), (y.view(-1) + c.view(-1))[:, None]
        return -logp.gather(-1, nll).mean() - 0.1 * logp.gather(-1, same).sum()

    y, c = torch.randint(0, 300, (2, 3, 3))
    assert taken(as_eager(loss, logits(3, 3, V), y, c)) == ["fused_loss"]


def contrastive(x):
    return F.cross_entropy(x / 0.07, torch.zeros(len(x), dtype=torch.long, device=x.device))


def one_target(x, y):
    return -F.log_softmax(x, -1).gather(-1, y[:1].view(1, 1).expand(len(x), 1)).mean()


def one_target_of_a_layer(h, w, y):
    return one_target(F.linear(h, w), y)


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (contrastive, ((N, V),)),
        (one_target, ((N, V), ())),
        (one_target_of_a_layer, ((N, 24), (V, 24), ())),
    ],
)
def test_one_target_for_all_rows(loss, inputs):
    inputs = [logits(*shape) if shape else targets() for shape in inputs]
    assert len(taken(as_eager(loss, *inputs))) == 1


# --- conversions ----------------------------------------------------------------------------------


class Quantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return (g * 127).to(torch.int32).float() / 127


def by_whether_lse(x, y):
    lse = x.logsumexp(-1)
    return (lse * (lse.detach() - 8).bool()).mean()


def by_whole_lse(x, y):
    lse = x.logsumexp(-1)
    return (F.cross_entropy(x, y, reduction="none") + 0.1 * lse * lse.detach().long()).mean()


def with_whole_gradient(x, y):
    return F.cross_entropy(Quantized.apply(x), y, reduction="sum")


@pytest.mark.parametrize("loss", [by_whether_lse, by_whole_lse, with_whole_gradient])
def test_whole_numbers_and_conditions_are_not_the_value(loss):
    assert not taken(as_eager(loss, logits(), targets()))


def test_other_sums_of_converted_logits():
    def loss(x, y):
        kept = x.detach()
        sums = [
            kept.bool().sum(-1), kept.int().sum(-1), kept.to(torch.int8).sum(-1),
            kept.int().float().sum(-1),
        ]  # fmt: skip
        return F.cross_entropy(x, y, label_smoothing=0.1), *sums

    assert taken(as_eager(loss, logits(), targets())) == ["fused_loss"]


# --- rounding -------------------------------------------------------------------------------------


def returned(make):
    def loss(x, y):
        z = make(x)
        return F.cross_entropy(z.float(), y), z.detach()

    return loss


def divided(x):
    return x / 0.07


def rounded(x):
    return x.bfloat16()


def capped(x):
    return 30 * torch.tanh(x / 30)


@pytest.mark.parametrize("others", [FUSED, ("softmax", "cross_entropy"), (*FUSED, "softmax")])
@pytest.mark.parametrize(
    ("make", "dtype", "most"),
    [(divided, BF16, 30.0), (rounded, torch.float32, 60.3), (capped, BF16, 60.0)],
)
def test_rounded_logits_that_are_kept(make, dtype, most, others):
    """The loss would be made of two versions of them: stock's code is left as it is."""
    y = targets()
    x = confident(logits(dtype=dtype), y, most).requires_grad_()
    losses = []
    for names in ((), others):
        with registry.only(*names):
            code = compile_for("h200", returned(make), x, y, grad=True)
            (loss, _), _ = run_interpreted(code, x, y, grad_outputs=[torch.tensor(1.0)])
        assert "inductor_ext" not in code.source
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)


def test_rounded_logits_that_nothing_else_reads():
    """Stock leaves the rounding out, as the operation does: unless it is asked for."""

    def loss(x, y):
        return F.cross_entropy(divided(x).float(), y)

    y = targets()
    x = confident(logits(dtype=BF16), y, 30.0).requires_grad_()
    code = compile_for("h200", loss, x, y, grad=True)
    assert taken(code) == ["fused_loss"]
    got, _ = run_interpreted(code, x, y, grad_outputs=[torch.tensor(1.0)])
    wide = F.cross_entropy(x.detach().double() / 0.07, y)
    torch.testing.assert_close(got.double(), wide, rtol=1e-5, atol=1e-6)
    with inductor_config.patch(emulate_precision_casts=True):
        assert not taken(compile_for("h200", loss, x, y, grad=True))


@pytest.mark.parametrize("others", [FUSED, ("softmax", "cross_entropy")])
def test_picked_from_a_sum_that_is_computed_where_it_is_read(others):
    def loss(a, b, y):
        z = (a + b).float()
        t = z.gather(-1, y[:, None]).squeeze(-1)
        return (z.logsumexp(-1) - t).mean()

    y = targets()
    a = confident(logits(dtype=BF16), y, 30.3).requires_grad_()
    b = logits(dtype=BF16) * 0.05
    with registry.only(*others):
        code = compile_for("h200", loss, a, b, y, grad=True)
        got, _ = run_interpreted(code, a, b, y, grad_outputs=[torch.tensor(1.0)])
    assert "inductor_ext" not in code.source
    wide = F.cross_entropy(a.detach().double() + b.double(), y)
    torch.testing.assert_close(got.double(), wide, rtol=1e-4, atol=1e-5)


def test_the_target_is_picked_by_the_operation():
    code = as_eager(lambda x, y: F.cross_entropy(x / 0.07, y), logits(), targets(), atol=2e-5)
    assert taken(code) == ["fused_loss"]
    runs = [line for line in code.forward.splitlines() if ".run(" in line]
    assert runs and not any("primals_1" in line for line in runs)


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logged_sums_of_logits_stay(smoothing):
    def loss(x, y):
        kept = x.detach()
        sums = kept.sum(-1), kept.mean(-1), kept.double().mean()
        return F.cross_entropy(x, y, label_smoothing=smoothing), *sums

    x, y = logits(), targets()
    x[:, 7] = 1000.0
    y[:] = 7
    code = as_eager(loss, x, y)
    assert taken(code) == ["fused_loss"]
    assert len(re.findall(r"rows_and_gradient\.default\(", code.forward)) == 1


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "make"), [(fused_loss, lambda x, w: x), (linear_loss, F.linear)]
)
def test_one_failure_leaves_the_other_losses_and_nothing_behind(module, make, monkeypatch):
    emit, calls = fused_loss.loss_gradient.Emitter.operation, []

    def fails_once(self, *args):
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("broken")
        return emit(self, *args)

    def loss(x, q, w, y):
        return F.cross_entropy(make(x, w), y) + F.cross_entropy(make(q, w), y)

    x, q = (logits(N, V if module is fused_loss else 24).requires_grad_() for _ in range(2))
    args = x, q, logits(V, 24), targets()
    monkeypatch.setattr(fused_loss.loss_gradient.Emitter, "operation", fails_once)
    with (
        registry.only("fused_loss" if module is fused_loss else "linear_cross_entropy"),
        inductor_ext.config.patch(strict=False),
        pytest.warns(UserWarning, match="broken"),
    ):
        code = compile_for("h200", loss, *args, grad=True)
    assert len(taken(code)) == 1
    # The other's check of its targets, and stock's own in its place.
    assert code.forward.count("a target is no column of the logits") <= 2
    got, _ = run_interpreted(code, *args, grad_outputs=[torch.tensor(1.0)])
    torch.testing.assert_close(got, loss(*args).detach(), rtol=1e-5, atol=1e-5)
