"""Machine code of the attention forward and of column sums for an H200. No card needed."""

import re

import pytest
import torch
from backward_programs import SCORES
from inductor_ext.templates import attention_documents
from inductor_ext.templates import attention_launch as launch

from inductor_ext.testing import launch_binaries

BF16, FP32 = torch.bfloat16, torch.float32
SHARED = 227 << 10


def meta(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def inputs_of(score, batch, heads, size):
    sizes = dict(zip("bhqk", (batch, heads, size, size), strict=True))
    return [
        meta(*(sizes[axis] if axis in axes else 1 for axis in "bhqk"), dtype=kind)
        for axes, kind, _ in score.inputs
    ]


def forward(name, head, value=None, dtype=BF16, precision="ieee", size=4096):
    score = SCORES[name]
    q, k = meta(4, 16, size, head, dtype=dtype), meta(4, 4, size, head, dtype=dtype)
    v = meta(4, 4, size, value or head, dtype=dtype)
    inputs = inputs_of(score, 4, 16, size)
    *_, kernel = launch_binaries(
        lambda: launch.forward(q, k, v, inputs, score.numbers, score.program, precision),
        launch, attention_documents,
    )  # fmt: skip
    return kernel


CASES = [
    ("scale", 64, None), ("causal", 64, None), ("causal", 96, None), ("causal", 128, None),
    ("softcap", 128, None), ("learned bias", 128, None), ("sinks", 128, None),
    ("documents", 128, None), ("causal", 192, 128), ("causal", 256, None), ("causal", 576, 512),
]  # fmt: skip


@pytest.mark.parametrize(("name", "head", "value"), CASES)
def test_forward(name, head, value):
    kernel = forward(name, head, value)
    # Results of 512 columns fill the registers: a newer Triton spills a few that are read once.
    assert kernel.spills <= (64 if head > 256 else 0) and kernel.shared_bytes <= SHARED
    assert "wgmma.mma_async" in kernel.ptx and "mma.sync.aligned.m16" not in kernel.ptx
    assert "cp.async.bulk.tensor.4d" in kernel.ptx and kernel.widest_store == 16
    assert re.search(r"\b(red|atom)\.global", kernel.ptx) is None
    # Keys and values go from the copies into the products: stored are sums and rows of the result.
    assert len(re.findall(r"\bst\.shared\.v4", kernel.ptx)) <= 32


def test_two_programs_fit_on_a_multiprocessor():
    for head in (64, 128):
        kernel = forward("causal", head)
        assert kernel.shared_bytes + 1024 <= (228 << 10) // 2
        assert kernel.registers * 32 * kernel.num_warps <= (64 << 10) // 2


@pytest.mark.parametrize(("head", "precision"), [(64, "ieee"), (64, "tf32"), (128, "tf32")])
def test_forward_of_fp32(head, precision):
    kernel = forward("causal", head, dtype=FP32, precision=precision)
    assert kernel.spills == 0 and kernel.uses_tensor_cores


def test_a_head_off_16_bytes_is_read_by_pointers():
    kernel = forward("causal", 100)
    assert kernel.spills == 0 and "cp.async.bulk" not in kernel.ptx and "wgmma" in kernel.ptx


@pytest.mark.parametrize(("name", "head"), [("causal", 64), ("causal", 128), ("learned bias", 128)])
def test_columns(name, head):
    score = SCORES[name]
    q, k = meta(4, 16, 4096, head), meta(4, 4, 4096, head)
    inputs = inputs_of(score, 4, 16, 4096)
    (kernel,) = launch_binaries(
        lambda: launch.columns(
            q, k, meta(4, 16, 4096, dtype=FP32), inputs, score.numbers, score.program, "ieee", 0
        ),
        launch,
    )
    assert kernel.spills == 0 and kernel.shared_bytes <= SHARED
    assert "wgmma" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx
    assert re.search(r"\b(red|atom)\.global", kernel.ptx) is None


def test_lengths_are_no_constants():
    """One kernel for every number of rows, keys and heads that go together."""
    texts = {forward("causal", 64, size=size).ptx for size in (1, 257, 4096)}
    assert len(texts) == 1
