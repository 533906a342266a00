"""Hand-written Triton kernels on CPU tensors: arithmetic, CUDA's own builtins, addresses."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inductor_ext.testing import run_kernel_interpreted

BF16 = torch.bfloat16


@triton.jit
def scaled(x, scale):
    return x * scale


@triton.jit
def double_kernel(x_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    gdc_wait()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [x_ptr + offsets], tl.int32, False, 1
    )
    tl.store(out_ptr + offsets, scaled(x, scale), mask=offsets < n)
    gdc_launch_dependents()


@triton.jit
def row_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
    x = x.to(tl.float32)
    weights = libdevice.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row, tl.log(weights.sum(axis=0)) + tl.max(x, axis=0))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + columns[None, :], mask=k[:, None] < K, other=0.0)
        total += tl.dot(a, b)
    out = out_ptr + rows[:, None] * N + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty))


@triton.jit
def combine(a_scale, a_shift, b_scale, b_shift):
    return a_scale * b_scale, b_scale * a_shift + b_shift


@triton.jit
def affine_scan_kernel(scale_ptr, shift_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pair = (tl.load(scale_ptr + i), tl.load(shift_ptr + i))
    scanned = tl.associative_scan(pair, 0, combine)
    tl.store(out_ptr + i, scanned[1])


@triton.jit
def add_rows_kernel(
    x_ptr, row_ptr, out_ptr, n, columns: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + columns * i + j, i < n, other=0.0)
    row = tl.load(row_ptr + i, i < n)
    tl.atomic_add(out_ptr + columns * row + j, x, i < n, sem="relaxed")


@pytest.mark.parametrize("rows", [1, 4])
def test_atomics_of_a_block_with_a_broadcast_mask(rows):
    x, row, out = torch.randn(10, 8), torch.randint(0, 4, (10,)), torch.zeros(4, 8)
    run_kernel_interpreted(
        add_rows_kernel, (triton.cdiv(10, rows),), x, row, out, 10, 8, ROWS=rows, BLOCK=8
    )
    torch.testing.assert_close(out, torch.zeros(4, 8).index_add(0, row, x))


def test_pdl_prefetch_and_device_functions_do_no_harm():
    x, out = torch.randn(1000), torch.full((1000,), float("nan"))
    run_kernel_interpreted(double_kernel, (8,), x, out, 1000, 2.0, BLOCK=128, num_warps=4)
    torch.testing.assert_close(out, x * 2)


def test_grid_function_and_autotuned_kernels():
    x, out = torch.randn(1000), torch.empty(1000)
    tuned = triton.autotune([triton.Config({"BLOCK": 256})], key=[])(double_kernel)
    run_kernel_interpreted(
        tuned, lambda meta: (triton.cdiv(1000, meta["BLOCK"]),), x, out, 1000, 3.0, BLOCK=256
    )
    torch.testing.assert_close(out, x * 3)


def test_bf16_arithmetic_rounds_to_nearest_even():
    x, out = torch.randn(1024, dtype=BF16), torch.empty(1024, dtype=BF16)
    run_kernel_interpreted(double_kernel, (1,), x, out, 1024, 1.3, BLOCK=1024)
    torch.testing.assert_close(out, x * torch.tensor(1.3, dtype=BF16), rtol=0, atol=0)


def test_reduction_with_libdevice():
    x, out = torch.randn(5, 300, dtype=torch.float16), torch.empty(5)
    run_kernel_interpreted(row_kernel, (5,), x, out, 300, BLOCK=512)
    torch.testing.assert_close(out, x.float().logsumexp(-1))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float8_e5m2])
def test_dot_accumulates_in_fp32(dtype):
    a, b = torch.randn(16, 4100).to(dtype), torch.randn(4100, 32).to(dtype)
    out = torch.empty(16, 32)
    run_kernel_interpreted(dot_kernel, (1,), a, b, out, 4100, M=16, N=32, BLOCK_K=64)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-3)


def test_scan_with_a_combine_function_that_does_not_commute():
    scale, shift, out = torch.rand(64), torch.randn(64), torch.empty(64)
    run_kernel_interpreted(affine_scan_kernel, (1,), scale, shift, out, BLOCK=64)
    state, expected = 0.0, []
    for a, b in zip(scale.tolist(), shift.tolist(), strict=True):
        state = a * state + b
        expected.append(state)
    torch.testing.assert_close(out, torch.tensor(expected))


def test_access_outside_a_tensor_is_an_error():
    x, out = torch.randn(100), torch.empty(100)
    with pytest.raises(
        IndexError, match=r"double_kernel, program \(0, 0, 0\): load expected.*28 of"
    ):
        run_kernel_interpreted(double_kernel, (1,), x, out, 128, 2.0, BLOCK=128)


def test_compiled_mode_is_back_afterwards():
    x, out = torch.randn(8), torch.empty(8)
    sum_before, load_before = tl.sum, tl.load
    run_kernel_interpreted(double_kernel, (1,), x, out, 8, 2.0, BLOCK=8)
    assert tl.sum is sum_before and tl.load is load_before
    assert not triton.knobs.runtime.interpret
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        scaled(1, 2)
    assert "np" not in scaled.fn.__globals__ and "interpreter_semantic" not in globals()


def test_tensors_elsewhere_are_refused():
    with pytest.raises(ValueError, match="tensors on cpu, got one on meta"):
        run_kernel_interpreted(double_kernel, (1,), torch.empty(8, device="meta"), 0, 8, 2.0, 8)
