"""A softmax whose values go to memory as they are: one kernel, one read, one write."""

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.testing import compile_for

pytestmark = pytest.mark.codegen
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


@pytest.mark.parametrize("fn", [softmax, log_softmax, tempered, into_a_product])
def test_values_are_written_by_one_kernel(fn, judged):
    code = judged(fn, [torch.randn(N, V).mul(3).to(BF16)])
    assert chosen(code) == ["softmax_forward"]
    assert "amax" not in code.source and "row_statistics" not in code.source


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_leading_dimensions(dtype, judged):
    assert chosen(judged(log_softmax, [torch.randn(2, 3, V).to(dtype)])) == ["softmax_forward"]


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


def test_a_backward_may_read_the_values():
    code = compile_for("h200", softmax, left(True), grad=True)
    assert chosen(code) == ["softmax_forward"]
    assert ".run(" not in code.forward and ".run(" in code.backward


def test_infinities_are_as_in_eager(generated):
    x = torch.randn(4, V)
    x[0, 3], x[1, 7:], x[2], x[3, 5] = torch.inf, -torch.inf, -torch.inf, torch.nan
    code, got, _ = generated(softmax, [x])
    assert chosen(code) == ["softmax_forward"]
    torch.testing.assert_close(got, F.softmax(x, -1), equal_nan=True)
