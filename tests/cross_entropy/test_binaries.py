"""Machine code for an H200, of the shapes that are measured. No card needed."""

import re

import pytest
import torch
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates.cross_entropy_launch import DENSE, INDEX, SPARSE, Loss

from inductor_ext.testing import launch_binaries

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def index(rows):
    return meta(rows, dtype=torch.int64)


def fused(loss, x, target=None, q=None, weight=None):
    return launch_binaries(lambda: launch.forward_backward(loss, x, target, q, weight), launch)[-1]


VARIANTS = {
    "plain": Loss(INDEX, mean=True),
    "smoothing": Loss(INDEX, mean=True, smoothing=0.1),
    "z-loss": Loss(INDEX, mean=True, z_loss=1e-4),
    "softcap": Loss(INDEX, mean=True, softcap=30.0),
    "soft targets": Loss(DENSE, mean=True),
    "distillation": Loss(SPARSE),
}


@pytest.mark.parametrize("columns", [32000, 128256])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_in_one_kernel(variant, columns):
    x, loss = meta(8192, columns), VARIANTS[variant]
    target = None if loss.kind == DENSE else index(8192)
    q = meta(8192, columns) if loss.kind == DENSE else None
    if loss.kind == SPARSE:
        target, q = meta(8192, 21, dtype=torch.int64), meta(8192, 21, dtype=FP32)
    kernel = fused(loss, x, target, q)
    assert kernel.name == "fused_kernel" and kernel.target == "sm_90a"
    assert kernel.spills == 0 and kernel.widest_load == kernel.widest_store == 16
    # Two programs of 8 warps, or one of 16, on a multiprocessor at least.
    assert kernel.registers <= 128
    assert re.search(r"\b(red|atom)\.", kernel.ptx) is None


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(65536, 1000, BF16), (8192, 50257, BF16), (4096, 262144, BF16), (8192, 129920, BF16),
     (4096, 32000, FP32), (4096, 128256, FP32)],
)  # fmt: skip
def test_other_shapes(rows, columns, dtype):
    kernel = fused(VARIANTS["plain"], meta(rows, columns, dtype=dtype), index(rows))
    assert kernel.spills == 0 and kernel.registers <= 128
    assert kernel.widest_load == kernel.widest_store == 16


@pytest.mark.parametrize("columns", [1000, 50257, 128256])
def test_forward_and_backward_apart(columns):
    loss, x, target = VARIANTS["plain"], meta(8192, columns), index(8192)
    stats, counts, g = meta(4, 8192, dtype=FP32), meta(2, 8, dtype=FP32), meta(8192, dtype=FP32)
    forward = launch_binaries(lambda: launch.forward(loss, x, target, None, None), launch)[-1]
    (backward,) = launch_binaries(
        lambda: launch.backward(loss, g, None, x, target, None, None, stats, counts), launch
    )
    assert forward.spills == backward.spills == 0
    assert forward.widest_load == backward.widest_load == backward.widest_store == 16
    assert forward.registers <= 128 and backward.registers <= 64


def test_few_rows_are_split():
    kernels = launch_binaries(
        lambda: launch.forward_backward(VARIANTS["plain"], meta(8, 131072), index(8), None, None),
        launch,
    )
    names = ["count_kernel", "statistics_kernel", "merge_kernel", "gradient_kernel"]
    assert [k.name for k in kernels] == names
    assert all(k.spills == 0 for k in kernels)


def test_targets_are_asserted_on_the_device():
    (kernel,) = launch_binaries(
        lambda: launch.count(VARIANTS["plain"], index(8), None, 8, 100, meta(1)), launch
    )
    assert "__assertfail" in kernel.ptx and kernel.spills == 0


def test_offsets_are_64_bits_wide():
    kernel = fused(VARIANTS["plain"], meta(40000, 128256), index(40000))
    assert "mul.wide.s32" in kernel.ptx or "mul.lo.s64" in kernel.ptx


def test_as_many_partial_sums_for_every_number_of_rows():
    """A program compiled for any number of rows has one shape for what is kept for the backward."""
    shapes = set()

    def count(rows):
        counts = launch.count(Loss(INDEX), index(rows), None, rows, 7, meta(1))
        shapes.add(tuple(counts.shape))

    for rows in (1, 1025, 70000):
        launch_binaries(lambda rows=rows: count(rows), launch)
    assert len(shapes) == 1
