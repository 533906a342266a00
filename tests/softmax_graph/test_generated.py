"""What the generated code sweeps: loops over the row, reads of the logits, what is stored."""

import re

import pytest
import torch

from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext.testing import assert_golden, compile_for

pytestmark = pytest.mark.codegen
N, V = 4096, 32000
BF16 = torch.bfloat16


def compiled(name, n=N, v=V):
    """The variant's code for tensors without data."""
    variant = VARIANTS[name]
    inputs = [
        torch.empty(
            [n if s == 2 else s for s in x.shape],
            dtype=x.dtype,
            device="meta",
            requires_grad=x.requires_grad,
        )
        for x in variant.inputs(2, v, BF16, "cpu")
    ]
    return compile_for("h200", variant.fn, *inputs, grad=True)


def large_buffers(source):
    """dtypes of the allocations as large as the logits."""
    sizes = rf"\((?:{N}, {V}|{N * V},) ?\)"
    return re.findall(rf"empty_strided_cuda\({sizes}, .*?torch\.(\w+)\)", source)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_swept(name, sweeps):
    code = compiled(name)
    forward, backward = sweeps(code.forward, V), sweeps(code.backward, V)
    text = "\n  ".join(["forward", *forward]) + "\n" + "\n  ".join(["backward", *backward]) + "\n"
    assert_golden(re.sub(r"\W+", "_", name), text)
    moved = tuple(
        2.0 * sum(int(n) for line in part for n in re.findall(r"(?:loads|stores)=(\d+)", line))
        for part in (forward, backward)
    )
    assert moved == VARIANTS[name].moved
    # Nothing as large as the logits is kept from the forward, or made beside their gradient.
    assert large_buffers(code.forward) == []
    assert large_buffers(code.backward) == ["bfloat16"]
