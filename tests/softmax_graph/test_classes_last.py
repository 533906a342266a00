"""Losses of classes in the middle that lie last in memory: transposed for ``F.cross_entropy``."""

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.lowerings import loss_rows

import inductor_ext
from inductor_ext.testing import compile_for

V, BF16 = 1283, torch.bfloat16


@pytest.fixture(autouse=True)
def all_on():
    with inductor_ext.enable("fused_loss"):
        yield


def plain(x, y, w):
    return F.cross_entropy(x.transpose(1, 2), y)


def smoothed(x, y, w):
    return F.cross_entropy(x.float().permute(0, 2, 1), y, label_smoothing=0.1, reduction="sum")


def per_row(x, y, w):
    return F.cross_entropy(x.float().transpose(1, 2), y, reduction="none")


def with_z_loss(x, y, w):
    z = 30 * torch.tanh(x.float().transpose(1, 2) / 30)
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(1).square().mean()


def entropy(x, y, w):
    z = x.float().transpose(1, 2)
    return -(z.softmax(1) * z.log_softmax(1)).sum(1).mean()


def with_an_accuracy(x, y, w):
    """What else reads the logits, as trainers do, reads them as before."""
    z = x.float().transpose(1, 2)
    right = (z.detach().argmax(1) == y).float().mean()
    return F.cross_entropy(z, y) + 0.0 * right


def in_four_dimensions(x, y, w):
    z = x.float().unflatten(1, (1, -1)).permute(0, 3, 1, 2)
    return F.cross_entropy(z, y.unflatten(1, (1, -1)))


LOSSES = {
    smoothed: "fused_loss", per_row: "softmax", with_z_loss: "fused_loss",
    entropy: "cross_entropy", with_an_accuracy: "fused_loss", in_four_dimensions: "fused_loss",
}  # fmt: skip


def drawn(n=2, s=3, v=V, dtype=BF16):
    y = torch.randint(0, v, (n, s))
    y[0, 1] = -100
    return [torch.randn(n, s, v).mul(3).to(dtype), y, torch.rand(v)]


@pytest.mark.parametrize("fn", LOSSES)
def test_numbers(fn, judged):
    code = judged(fn, drawn())
    fired = {d.lowering for d in code.decisions if d.fired}
    assert {"classes_last", LOSSES[fn]} <= fired


def test_sizes_that_change(judged):
    first, *rest = drawn(3, 5)
    torch._dynamo.mark_dynamic(first, 1)
    torch._dynamo.mark_dynamic(rest[0], 1)
    code = judged(plain, [first, *rest], run=drawn(3, 7), dynamic=True)
    assert "classes_last" in {d.lowering for d in code.decisions if d.fired}


@pytest.mark.codegen
def test_one_sweep_and_no_copy():
    x = torch.empty(4, 2048, 32000, dtype=BF16, device="meta", requires_grad=True)
    y = torch.empty(4, 2048, dtype=torch.int64, device="meta")
    code = compile_for("h200", plain, x, y, None, grad=True)
    assert "inductor_ext.rows_and_gradient" in str(code.calls)
    assert "262144000" not in "".join(k.source for k in code.kernels)  # nothing of that size


def as_a_result(x, y, w):
    return F.log_softmax(x.float().transpose(1, 2), 1)


def beside_another_tensor(x, y, w):
    z = x.float().transpose(1, 2)
    return F.cross_entropy(z + torch.randn_like(z.contiguous()), y)


@pytest.mark.parametrize("fn", [as_a_result, beside_another_tensor])
def test_what_is_left(fn):
    x, y, w = drawn(8, 16)
    code = compile_for("h200", fn, x.requires_grad_(), y, w, grad=True)
    assert not any(d.fired for d in code.decisions if d.lowering == "classes_last")


def test_small_logits_are_left(monkeypatch):
    monkeypatch.setattr(loss_rows, "LEAST_BYTES", 2**27)
    x, y, w = drawn()
    code = compile_for("h200", plain, x.requires_grad_(), y, w, grad=True)
    assert not any(d.fired for d in code.decisions)
