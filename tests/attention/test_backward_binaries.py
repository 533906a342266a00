"""Machine code of attention's backward for an H200, of the default tilings. No card needed."""

import re

import pytest
import torch
from backward_programs import SCORES
from inductor_ext.templates import attention_backward_launch as launch
from inductor_ext.templates import attention_documents

from inductor_ext.testing import launch_binaries

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def binaries(name, head, value, group=1, dtype=BF16, aligned=True):
    """By name, of sequences that fill a card."""
    score = SCORES[name]
    sizes = {"b": 2, "h": 8, "q": 4096, "k": 4096}

    def tensor(heads, dim):
        return meta(2, heads, 4096, dim + (not aligned), dtype=dtype)[..., :dim]

    q, k, v = tensor(8, head), tensor(8 // group, head), tensor(8 // group, value)
    out, lse = tensor(8, value), meta(2, 8, 4096, dtype=FP32)
    inputs = [
        meta(*(sizes[a] if a in axes else 1 for a in "bhqk"), dtype=kind)
        for axes, kind, _ in score.inputs
    ]
    needed = [True] * 3 + [wanted for *_, wanted in score.inputs]

    def run():
        launch.backward(
            out, None, q, k, v, inputs, score.numbers, score.program, out, lse, needed, "ieee"
        )

    return {b.name: b for b in launch_binaries(run, launch, attention_documents)}


@pytest.mark.parametrize(
    ("name", "head", "value"),
    [("causal", 128, 128), ("causal", 64, 64), ("window", 128, 128), ("scale", 128, 128),
     ("causal slot bias", 128, 128), ("documents", 128, 128), ("softcap", 64, 64),
     ("learned bias", 128, 128), ("causal", 96, 96), ("causal", 192, 128),
     ("causal", 256, 256)],
)  # fmt: skip
def test_default_tilings(name, head, value):
    found = binaries(name, head, value, group=4)
    for kernel in found.values():
        # A few words of the keys kernel's scalars, outside of its loops.
        assert kernel.spills <= 32 and kernel.shared_bytes <= 227 << 10
        assert re.search(r"\b(red|atom)\.", kernel.ptx) is None
    for kernel in (found["attention_keys"], found["attention_rows"]):
        assert "wgmma" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx
        assert kernel.widest_store == 16
    keys = found["attention_keys"]
    # p^T and ds^T stay in registers: nothing but the last tiles goes through shared memory.
    loop = keys.ptx[: keys.ptx.rindex("wgmma.mma_async")]
    assert head > 128 or not re.search(r"\bst\.shared\.v4|\bstmatrix", loop)
    if head <= 128 and name not in ("learned bias", "scale"):  # two programs on a multiprocessor
        assert keys.shared_bytes <= 113 << 10 and keys.num_warps == 4
    assert found["statistics_kernel"].widest_load == 16


@pytest.mark.parametrize(("dtype", "aligned"), [(FP32, True), (BF16, False)])
def test_without_16_bits_or_descriptors(dtype, aligned):
    """fp32 by three products of TF32, and rows that are no multiple of 16 bytes."""
    for kernel in binaries("causal", 64, 64, dtype=dtype, aligned=aligned).values():
        assert kernel.shared_bytes <= 227 << 10
        assert kernel.uses_tensor_cores or kernel.name == "statistics_kernel"
