"""Few rows of a Linear: one kernel without a split, and where it is not taken."""

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.testing import compile_for, run_interpreted

BF16, FP32 = torch.bfloat16, torch.float32


def r(*size, dtype=BF16):
    return torch.randn(size).to(dtype)


def weight(n, k, dtype=BF16):
    return (torch.randn(n, k) * k**-0.5).to(dtype)


def router(x, w, bias):
    return F.linear(x, w).sigmoid() + bias


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(1, 256, 7168, BF16), (2, 250, 7001, BF16), (1, 1024, 4096, BF16), (3, 24, 1025, FP32)],
)
def test_one_kernel_with_the_epilogue(m, n, k, dtype, compile_and_judge):
    args = r(m, k, dtype=dtype), weight(n, k, dtype), r(n, dtype=dtype)
    code = compile_and_judge(router, args)
    assert code.decisions[0].chosen.startswith("dot_")
    assert len(code.calls) == 1


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (4, 256, 7168),  # every row reads all of B again
        (1, 24, 28672),  # 24 programs with a long way each
        (5, 64, 2048),
    ],
)
def test_otherwise_k_is_split(m, n, k):
    code = compile_for("h200", router, r(m, k), weight(n, k), r(n))
    assert code.decisions[0].chosen.startswith("split")
    assert len(code.calls) == 2


def test_columns_that_are_not_contiguous_are_split():
    code = compile_for("h200", lambda x, w: torch.relu(x @ w), r(1, 4096), r(4096, 64))
    assert code.decisions[0].chosen.startswith("split")


def test_binary():
    code = compile_for("h200", router, r(1, 7168), weight(256, 7168), r(256))
    (kernel,) = code.cross_compile()
    assert kernel.has_pdl and kernel.spills == 0 and kernel.widest_load == 16
    wait = kernel.ptx.index("griddepcontrol.wait")
    assert "ld.global" not in kernel.ptx[:wait]
    assert "cp.async.bulk.prefetch" in kernel.ptx[:wait]


def test_fp32_weights_along_k_are_left_to_the_library_unless_tf32():
    args = r(16, 7168, dtype=FP32), weight(256, 7168, FP32)
    (decision,) = compile_for("h200", F.linear, *args).decisions
    assert not decision.fired and "contiguous along K" in decision.reason
    torch.set_float32_matmul_precision("high")
    (decision,) = compile_for("h200", F.linear, *args).decisions
    assert decision.fired


def test_tf32_operands_are_rounded_not_cut(judge):
    torch.set_float32_matmul_precision("high")
    a, b = r(16, 2048, dtype=FP32), r(2048, 16, dtype=FP32)
    a[0] = 1 + 2.0**-11 + 2.0**-20  # above half of tf32's last place: rounds up, is cut down
    a.view(torch.int32)[1, 0] = 0x7FFFFFFF  # a NaN that adding to its bits would wrap
    a[2, 0] = torch.inf
    code = compile_for("h200", torch.mm, a, b)
    out = run_interpreted(code, a, b)

    def rounded(x):
        x = x.double()
        step = torch.exp2(torch.floor(torch.log2(x.abs())) - 10)
        return torch.where(x.isfinite(), x.sign() * torch.floor(x.abs() / step + 0.5) * step, x)

    expected = rounded(a) @ rounded(b)
    assert out[1].isnan().all() and torch.equal(out[2].double(), expected[2])
    finite = [0, *range(3, 16)]
    assert (out[finite].double() - expected[finite]).norm() < 1e-6 * expected[finite].norm()
