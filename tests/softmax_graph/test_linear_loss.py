"""Losses of a linear layer whose logits are never kept whole: numbers, sites, what is left."""

import re

import pytest
import torch
import torch.nn.functional as F

from inductor_ext import registry
from inductor_ext.testing import compile_for

BF16 = torch.bfloat16
B, T, H, V = 2, 5, 24, 1283


@pytest.fixture(autouse=True)
def alone(clean_setting):
    with registry.only("linear_cross_entropy", "fused_loss"):
        yield


def hidden(dtype=BF16, b=B, t=T):
    return torch.randn(b, t, H).to(dtype)


def weight(dtype=BF16):
    return torch.randn(V, H).mul(0.3).to(dtype)


def targets(b=B, t=T):
    y = torch.randint(0, V, (b, t))
    y[0, 1] = -100
    return y


def decided(code):
    return [d for d in code.decisions if d.sites.startswith("loss")]


def check_chunks(code, gradients):
    """One operation in the forward, nothing but scaling in the backward, logits nowhere."""
    (found,) = decided(code)
    assert (found.lowering, found.fired, found.chosen) == (
        "linear_cross_entropy",
        True,
        "one chunk",
    )
    assert re.findall(r"inductor_ext\.(\w+)\.default\(", code.forward) == [
        "linear_rows_and_gradient"
    ]
    calls = re.findall(r"inductor_ext\.(\w+)\.default\(", code.backward)
    assert calls == ["scale_gradient_"] * gradients
    assert "extern_kernels." not in code.source
    assert not re.search(rf"empty_strided_cuda\(\(\d+, {V}\b", code.source)


def plain(h, w, y):
    return F.cross_entropy(F.linear(h, w).view(-1, V).float(), y.view(-1))


def with_bias(h, w, y, bias):
    x = F.linear(h, w, bias).float().view(-1, V)
    return F.cross_entropy(x, y.view(-1), label_smoothing=0.1)


def capped_with_z_loss(h, w, y):
    x = 20 * torch.tanh(F.linear(h, w).float() / 20)
    nll = F.cross_entropy(x.view(-1, V), y.view(-1), reduction="sum")
    return nll / (y != -100).sum() + 1e-3 * torch.logsumexp(x, -1).square().mean()


def shifted(h, w, y):
    x = F.linear(h, w)[:, :-1].float()
    return F.cross_entropy(x.reshape(-1, V), y[:, 1:].reshape(-1))


def matmul_and_scale(h, w, y):
    x = (h.flatten(0, 1) @ w.t()).float() * 0.25
    logp = F.log_softmax(x, -1)
    y = y.flatten()
    return -(logp.gather(-1, y.clamp(min=0)[:, None]).squeeze(-1) * (y >= 0)).mean()


@pytest.mark.parametrize("loss", [plain, capped_with_z_loss, shifted, matmul_and_scale])
def test_gradients_of_hidden_states_and_weight(loss, judged_all):
    code, _ = judged_all(loss, [hidden(torch.float32), weight(torch.float32), targets()])
    check_chunks(code, gradients=2)


def test_gradient_of_the_bias(judged_all):
    inputs = [hidden(torch.float32), weight(torch.float32), targets(), torch.randn(V)]
    code, _ = judged_all(with_bias, inputs)
    check_chunks(code, gradients=3)


@pytest.mark.parametrize("loss", [plain, shifted])
def test_16_bit(loss, generated, with_gradient):
    """The logits are rounded, as those of the layer are: judged by the loss of rounded logits."""
    h, w, y = hidden(), weight(), targets()

    def of_hidden(h):
        return loss(h, w.to(h.device), y.to(h.device))

    code, out, gradient = generated(lambda h, w, y: loss(h, w, y), [h, w, y])
    assert decided(code)[0].fired
    expected, wanted = with_gradient(of_hidden, [h])
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=0)
    error = (gradient.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 8e-3


def test_only_what_is_wanted_is_made():
    def frozen(h, y, w):
        return plain(h, w, y)

    h = torch.empty(B, T, H, dtype=BF16, device="meta", requires_grad=True)
    y = torch.empty(B, T, dtype=torch.long, device="meta")
    w = torch.empty(V, H, dtype=BF16, device="meta")
    code = compile_for("h200", frozen, h, y, w, grad=True)
    check_chunks(code, gradients=1)
    assert "[True, False, False]" in code.forward


def test_a_target_outside_is_still_an_error():
    args = [
        torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype == BF16)
        for shape, dtype in (((B, T, H), BF16), ((V, H), BF16), ((B, T), torch.long))
    ]
    code = compile_for("h200", plain, *args, grad=True)
    assert "a target is no column of the logits" in code.forward


@pytest.mark.parametrize("sizes", [{0: None}, {0: None, 1: None}])
@pytest.mark.parametrize("loss", [shifted, capped_with_z_loss])
def test_symbolic_numbers_of_rows(loss, sizes, judged_all):
    def with_targets(h, w):
        y = torch.arange(h.shape[0] * h.shape[1], device=h.device) * 37 % 997
        return loss(h, w, y.view(h.shape[:2]))

    w = weight(torch.float32)
    run = [hidden(torch.float32, 3, 7 if 1 in sizes else T), w]
    code, _ = judged_all(with_targets, [hidden(torch.float32), w], run=run, dynamic={0: sizes})
    check_chunks(code, gradients=2)
    assert code.frames == 1


# --- what is left ---------------------------------------------------------------------------------


def meta(*shape, dtype=BF16):
    grad = dtype.is_floating_point
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def accuracy(h, w, y):
    x = F.linear(h, w)
    return F.cross_entropy(x.view(-1, V).float(), y.view(-1)), (x.argmax(-1) == y).sum()


def conditional(h, w, y):
    logp = F.log_softmax(F.linear(h, w).flatten(0, 1).float(), -1)
    kept = torch.where((y.flatten() > 5)[:, None], logp, 0.0)
    return -kept.gather(-1, y.flatten()[:, None]).mean()


def one_hot(h, w, y):
    t = F.one_hot(y.flatten(), V).float()
    return -(t * F.log_softmax(F.linear(h, w).flatten(0, 1).float(), -1)).sum(-1).mean()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (accuracy, "argmax reads the logits as well"),
        (conditional, "gather reads the logits as well"),
        (one_hot, "sum_2 reads the logits as well"),
    ],
)
def test_logits_that_something_else_reads_are_kept(loss, reason):
    code = compile_for(
        "h200", loss, meta(B, T, H), meta(V, H), meta(B, T, dtype=torch.long), grad=True
    )
    left, taken = decided(code)
    assert (left.lowering, left.fired, left.reason) == ("linear_cross_entropy", False, reason)
    assert (taken.lowering, taken.fired) == ("fused_loss", True)
    assert "rows_and_gradient" in code.forward and "linear_rows" not in code.source


def test_more_logits_than_one_chunk_holds_are_kept():
    rows = 2_500_000_000 // (2 * V) // T + 1
    code = compile_for(
        "h200", plain, meta(rows, T, H), meta(V, H), meta(rows, T, dtype=torch.long), grad=True
    )
    left, taken = decided(code)
    assert not left.fired and "less time than chunks" in left.reason
    assert (taken.lowering, taken.fired) == ("fused_loss", True)


def test_each_has_its_own_switch():
    args = meta(B, T, H), meta(V, H), meta(B, T, dtype=torch.long)
    for name, chosen in (("linear_cross_entropy", "one chunk"), ("fused_loss", "one sweep")):
        with registry.only(name):
            (found,) = decided(compile_for("h200", plain, *args, grad=True))
        assert (found.lowering, found.chosen) == (name, chosen)


def test_autocast_casts_outside():
    def loss(h, w, y):
        with torch.autocast("cuda", BF16):
            return F.cross_entropy(F.linear(h, w).view(-1, V), y.view(-1))

    args = meta(B, T, H, dtype=torch.float32), meta(V, H, dtype=torch.float32)
    code = compile_for("h200", loss, *args, meta(B, T, dtype=torch.long), grad=True)
    check_chunks(code, gradients=2)


def test_checkpointed_layer_is_left():
    def loss(h, w, y):
        return torch.utils.checkpoint.checkpoint(plain, h, w, y, use_reentrant=False)

    args = meta(B, T, H), meta(V, H), meta(B, T, dtype=torch.long)
    found = decided(compile_for("h200", loss, *args, grad=True))
    assert found and not any(d.fired for d in found)
