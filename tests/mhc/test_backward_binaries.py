"""Machine code of the mHC gradients for an H200, at the sizes that are measured. No card needed."""

import re

import pytest
import torch
from inductor_ext.templates import (
    mhc_post_backward,
    mhc_pre_backward,
    mhc_sinkhorn_backward,
)

from inductor_ext.testing import launch_binaries

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = 20, 1e-6, 1e-6, 1e-6, 2.0


def meta(*size, dtype=FP32):
    return torch.empty(*size, dtype=dtype, device="meta")


def operands(n, H, dtype, T=8192):
    """(X, Y), (post, comb) and (W, scale, base, mixes, sqrsum)."""
    m = n * (n + 2)
    streams = meta(T, n, H, dtype=dtype), meta(T, H, dtype=dtype)
    of_pre = meta(m, n * H), meta(3), meta(m), meta(T, m), meta(T)
    return streams, (meta(T, n), meta(T, n, n)), of_pre


def checked(binaries, names):
    assert [k.name for k in binaries] == names
    for kernel in binaries:
        assert kernel.spills == 0 and kernel.target == "sm_90a"
        assert re.search(r"\b(red|atom)\.", kernel.ptx) is None
    return dict(zip(names, binaries, strict=True))


@pytest.mark.parametrize(
    ("n", "H", "dtype"),
    [(4, 7168, BF16), (2, 4096, BF16), (8, 4096, BF16), (4, 4096, FP32)],
)
@pytest.mark.parametrize("added", [False, True])
def test_pre(n, H, dtype, added):
    (X, Y), small, (W, *rest) = operands(n, H, dtype)
    other = X if added else None
    found = checked(
        launch_binaries(
            lambda: mhc_pre_backward.backward(X, W, *rest, other, Y, *small, *OPTIONS),
            mhc_pre_backward,
        ),
        ["products_kernel", "logits_kernel", "gradient_kernel", "finish_kernel"],
    )
    products, gradient = found["products_kernel"], found["gradient_kernel"]
    assert products.widest_load == 16 and products.registers <= 80
    assert gradient.widest_load == gradient.widest_store == 16 and "mma.sync" in gradient.ptx
    if n < 8 and dtype == BF16:
        # Two or three programs on a multiprocessor; nothing waits for the loads of the next block.
        assert gradient.registers <= (232 if added else 168) and not re.search(
            r"\b(fence|membar)", gradient.ptx
        )
    assert found["finish_kernel"].widest_load == 16
    # Sinkhorn stays inside a warp.
    assert found["logits_kernel"].ptx.count("bar.sync") < 30


@pytest.mark.parametrize(
    ("n", "H", "dtype"),
    [(4, 7168, BF16), (2, 4096, BF16), (8, 4096, BF16), (4, 4096, FP32)],
)
def test_post(n, H, dtype):
    (X, Y), small, _ = operands(n, H, dtype)
    found = checked(
        launch_binaries(lambda: mhc_post_backward.backward(X, Y, *small, X), mhc_post_backward),
        ["post_backward_kernel"],
    )
    kernel = found["post_backward_kernel"]
    assert kernel.widest_load == kernel.widest_store == 16
    # No layout goes through shared memory: what is there is for the last sums.
    assert kernel.shared_bytes <= 128 and kernel.registers <= (128 if n < 8 else 192)


@pytest.mark.parametrize(("n", "iters"), [(2, 20), (4, 20), (4, 45), (8, 20)])
def test_sinkhorn(n, iters):
    logits = meta(8192, n, n)
    (kernel,) = launch_binaries(
        lambda: mhc_sinkhorn_backward.sinkhorn_backward(logits, logits, iters, 1e-6),
        mhc_sinkhorn_backward,
    )
    assert kernel.spills == 0 and kernel.registers <= 168 and kernel.shared_bytes == 0
