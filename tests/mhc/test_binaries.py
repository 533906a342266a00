"""Machine code of the mHC kernels for an H200, of the shapes that are measured. No card needed."""

import re

import pytest
import torch
from inductor_ext.templates import mhc_post, mhc_pre, mhc_projection, mhc_slabs

from inductor_ext.testing import launch_binaries

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V4 = (20, 1e-6, 1e-6, 1e-6, 2.0)
MODULES = mhc_post, mhc_pre, mhc_projection, mhc_slabs


def meta(*size, dtype=FP32):
    return torch.empty(*size, dtype=dtype, device="meta")


def weights(n, H, w_dtype=FP32):
    columns = n * (n + 2)
    return meta(columns, n * H, dtype=w_dtype), meta(3), meta(columns)


def binaries(fn):
    return {b.name: b for b in launch_binaries(fn, *MODULES)}


@pytest.mark.parametrize(
    ("T", "n", "H", "dtype", "w_dtype", "precision"),
    [(1, 4, 7168, BF16, FP32, "ieee"), (256, 4, 7168, BF16, FP32, "ieee"),
     (4096, 4, 7168, BF16, FP32, "ieee"), (8192, 4, 4096, BF16, FP32, "tf32"),
     (4096, 4, 4096, BF16, BF16, "ieee"),
     (4096, 4, 4096, FP32, FP32, "ieee"), (4096, 4, 4096, FP16, FP32, "ieee")],
)  # fmt: skip
def test_pre(T, n, H, dtype, w_dtype, precision):
    x = meta(T, n, H, dtype=dtype)
    found = binaries(lambda: mhc_pre.pre(x, *weights(n, H, w_dtype), *V4, precision))
    cut = dtype == BF16 and w_dtype == FP32 and T > 128
    names = ["projection_kernel", "fuse_kernel"] + ["cut_kernel"] * cut + ["comb_kernel"] * (T > 64)
    assert sorted(found) == sorted(names)
    for kernel in found.values():
        assert kernel.spills == 0 and re.search(r"\b(red|atom)\.", kernel.ptx) is None
    projection, fuse = found["projection_kernel"], found["fuse_kernel"]
    for kernel in (projection, fuse):
        assert kernel.widest_load == kernel.widest_store == 16
    assert "wgmma" in projection.ptx and not fuse.uses_tensor_cores
    # Three programs of 8 warps on a multiprocessor, each with a token.
    assert fuse.registers <= (80 if n == 4 and T > 512 and dtype != FP16 else 180)


@pytest.mark.parametrize(("n", "columns"), [(2, 2), (4, 32)])
def test_collapse_of_few_tokens(n, columns):
    """Two kernels, whatever the number of columns up to 32."""
    x, w = meta(7, n, 4096, dtype=BF16), meta(columns, n * 4096)
    found = binaries(lambda: mhc_pre.collapse(x, w, meta(1), meta(n), 1e-6, 1e-6, "ieee"))
    assert sorted(found) == ["fuse_kernel", "projection_kernel"]
    assert "wgmma" in found["projection_kernel"].ptx
    assert all(kernel.spills == 0 for kernel in found.values())


@pytest.mark.parametrize(("n", "dtype"), [(4, BF16), (2, FP16), (8, BF16), (4, FP32)])
def test_post(n, dtype):
    x, y = meta(4096, n, 7168, dtype=dtype), meta(4096, 7168, dtype=dtype)
    comb = meta(4096, n, n).transpose(-1, -2)
    (kernel,) = binaries(lambda: mhc_post.post(x, y, meta(4096, n), comb)).values()
    assert kernel.spills == 0 and kernel.widest_load == kernel.widest_store == 16


def test_slabs():
    T, n, H = 4096, 4, 7168
    x, (_, scale, base) = meta(T, n, H, dtype=BF16), weights(n, H)
    run = lambda: mhc_slabs.fuse(x, meta(8, T, 24), meta(8, T), scale, base, *V4)  # noqa: E731
    (kernel,) = binaries(run).values()
    assert kernel.spills == 0 and kernel.widest_load == kernel.widest_store == 16
    assert kernel.registers <= 80


def test_projection_of_eight_streams():
    x, (w, _, _) = meta(4096, 8, 4096, dtype=BF16), weights(8, 4096)
    kernel = binaries(lambda: mhc_projection.partials(x, w, "ieee"))["projection_kernel"]
    assert kernel.spills == 0 and "wgmma" in kernel.ptx and kernel.widest_load == 16


def test_sinkhorn_stays_in_registers():
    (kernel,) = binaries(lambda: mhc_pre.sinkhorn(meta(4096, 4, 4), 20, 1e-6)).values()
    assert kernel.spills == 0 and kernel.shared_bytes == 0
