"""A softmax whose values go to memory as they are: one kernel, one read, one write."""

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.lowerings import softmax_gradients

from inductor_ext import measure
from inductor_ext.testing import compile_for, run_interpreted

BF16 = torch.bfloat16
N, V = 5, 1283


def softmax(x):
    return F.softmax(x, -1)


def log_softmax(x):
    return F.log_softmax(x, -1)


def tempered(x):
    return F.softmax(x / 0.7, -1)


def of_a_copy(x):
    return F.softmax(x.float(), -1).to(x.dtype)


def into_a_product(x):
    w = torch.linspace(-1, 1, 3 * x.shape[-1], device=x.device).view(-1, 3)
    return F.softmax(x, -1) @ w.to(x.dtype)


def chosen(code):
    return [d.chosen for d in code.decisions if d.lowering == "softmax"]


@pytest.mark.codegen
@pytest.mark.parametrize("fn", [softmax, log_softmax, tempered, into_a_product])
def test_values_are_written_by_one_kernel(fn, judged):
    code = judged(fn, [torch.randn(N, V).mul(3).to(BF16)])
    assert chosen(code) == ["softmax_forward"]
    assert "amax" not in code.source and "row_statistics" not in code.source


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_leading_dimensions(dtype, judged):
    assert chosen(judged(log_softmax, [torch.randn(2, 3, V).to(dtype)])) == ["softmax_forward"]


def test_twice_the_log_of_the_sum_is_no_log_softmax():
    def doubled(x):
        shifted = x - x.amax(-1, keepdim=True)
        return torch.sub(shifted, shifted.exp().sum(-1, keepdim=True).log(), alpha=2)

    code = compile_for("h200", doubled, torch.empty(8192, 32768, device="meta"))
    assert "softmax_forward" not in code.source


def left(x):
    return torch.empty(512, 8192, dtype=BF16, device="meta", requires_grad=x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.softmax(x, -1) * 2,  # fuses with the values
        lambda x: F.softmax(x.float(), -1),  # another dtype
        lambda x: F.softmax(x, -1).amax(-1),  # nobody stores the values
        lambda x: (F.softmax(x, -1), F.log_softmax(x, -1)),  # two of one sweep
        lambda x: (F.log_softmax(x, -1), torch.logsumexp(x, -1)),
    ],
)
def test_other_uses_take_the_statistics(fn, grad):
    code = compile_for("h200", fn, left(grad), grad=grad)
    assert chosen(code) == ["row_statistics"] and "softmax_forward" not in code.source


def with_its_gradient(fn, x, g):
    """(values, gradient) of eager, or in fp64."""
    x = x.detach().requires_grad_()
    out = fn(x)
    return out.detach(), torch.autograd.grad(out, x, g)[0]


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("fn", [softmax, log_softmax, tempered])
def test_gradients_of_long_rows_by_one_kernel(fn, dtype, monkeypatch):
    monkeypatch.setattr(softmax_gradients, "STOCK_BYTES", 0)
    x, g = torch.randn(2, 3, V).mul(3).to(dtype), torch.randn(2, 3, V).to(dtype)
    code = compile_for("h200", fn, x.requires_grad_(), grad=True)
    assert chosen(code) == ["softmax_backward", "softmax_forward"]
    assert ".run(" not in code.backward
    out, gradients = run_interpreted(code, x, grad_outputs=[g])
    found = out.detach(), gradients["args[0]"]
    truth, eager = with_its_gradient(fn, x.double(), g.double()), with_its_gradient(fn, x, g)
    for one in zip(found, truth, eager, strict=True):
        verdict = measure.check(*one)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.softmax(x.exp(), -1),  # its gradient is multiplied on
        lambda x: F.softmax(x, -1) * 2,
        lambda x: F.softmax(-x, -1),
    ],
)
def test_gradients_with_more_to_do_are_left(fn, monkeypatch):
    monkeypatch.setattr(softmax_gradients, "STOCK_BYTES", 0)
    assert "softmax_backward" not in chosen(compile_for("h200", fn, left(True), grad=True))


def test_gradients_of_rows_that_stock_finds_in_l2_are_left():
    code = compile_for("h200", softmax, left(True), grad=True)
    assert chosen(code) == ["softmax_forward"]


def test_a_backward_may_read_the_values():
    code = compile_for("h200", softmax, left(True), grad=True)
    assert chosen(code) == ["softmax_forward"]
    assert ".run(" not in code.forward and ".run(" in code.backward


@pytest.mark.codegen
def test_infinities_are_as_in_eager(generated):
    x = torch.randn(4, V)
    x[0, 3], x[1, 7:], x[2], x[3, 5] = torch.inf, -torch.inf, -torch.inf, torch.nan
    code, got, _ = generated(softmax, [x])
    assert chosen(code) == ["softmax_forward"]
    torch.testing.assert_close(got, F.softmax(x, -1), equal_nan=True)


def test_a_viewed_result_is_not_overwritten_by_the_backward():
    """AOTAutograd lets the backward reuse what nobody else has, and looks at memory for that."""
    x, want = torch.randn(2, N, V).requires_grad_(), torch.randn(2 * N, V)

    def flat(x):
        return log_softmax(x).flatten(0, 1)

    code = compile_for("h200", flat, x, grad=True)
    assert chosen(code) == ["softmax_forward"]
    made, gradients = run_interpreted(code, x, grad_outputs=[want])
    torch.testing.assert_close(made, flat(x))
    torch.testing.assert_close(gradients["args[0]"], torch.autograd.grad(flat(x), x, want)[0])
