"""Kernels written by hand, as ``triton_op``s in a compiled function."""

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from inductor_ext.testing import compile_for, outline, run_interpreted


@triton.jit
def row_sum_kernel(x_ptr, sum_ptr, max_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.store(sum_ptr + row, tl.sum(x.to(tl.float32)))
    tl.store(max_ptr + row, tl.max(tl.where(offsets < columns, x, -float("inf"))))


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def triple_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x * 3, mask=offsets < n)


@triton_op("inductor_ext_test::row_sum_and_max", mutates_args=())
def row_sum_and_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.empty(x.shape[0], device=x.device)
    maxima = torch.empty_like(sums)
    block = triton.next_power_of_2(x.shape[1])
    wrap_triton(row_sum_kernel)[(x.shape[0],)](x, sums, maxima, x.shape[1], BLOCK=block)
    return sums, maxima


@triton_op("inductor_ext_test::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def grid(meta):
        return (triton.cdiv(x.numel(), meta["BLOCK"]),)

    wrap_triton(triple_kernel)[grid](x, out, x.numel())
    return out


def test_two_outputs():
    x = torch.randn(17, 100, dtype=torch.bfloat16)
    code = compile_for("h200", lambda x: row_sum_and_max(x + 1), x)
    assert [k.kind for k in code.kernels] == ["pointwise", "user"]
    assert outline(code).splitlines()[-1] == "  [user] row_sum_kernel_0"
    assert all(binary.spills == 0 for binary in code.cross_compile())
    sums, maxima = run_interpreted(code, x)
    y = (x + 1).float()
    torch.testing.assert_close(sums, y.sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(maxima, y.amax(1))


def test_autotuned_kernel_at_other_sizes():
    code = compile_for(
        "h200", lambda x: triple(x) + 1, torch.randn(16, 100), dynamic={0: {0: (2, 64)}}
    )
    assert len(code.cross_compile(configs="all")) >= 3
    x = torch.randn(33, 100)
    torch.testing.assert_close(run_interpreted(code, x), x * 3 + 1)
