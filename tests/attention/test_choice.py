"""Which implementation is chosen: a table of the rule."""

import dataclasses

import pytest
import torch

from inductor_ext.ops._attention_choice import Case, backward, forward

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PLAIN = Case(
    on_card=True, capability=(9, 0), dtype=BF16, heads=16, own_heads=16, rows=4096, columns=4096,
    dim=128, value_dim=128, plain="causal", has_program=True, cudnn=True, gluon=False,
    deterministic=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "of_forward", "of_backward"),
    [
        ({}, "cudnn", "cudnn"),
        ({"plain": "full", "own_heads": 4}, "cudnn", "cudnn"),
        ({"plain": ""}, "kernel", "kernel"),
        ({"gluon": True}, "kernel", "cudnn"),
        ({"gluon": True, "rows": 1024}, "cudnn", "cudnn"),
        ({"gluon": True, "rows": 2048, "plain": "full"}, "cudnn", "cudnn"),
        ({"gluon": True, "plain": "full"}, "kernel", "cudnn"),
        ({"gluon": True, "dim": 64, "value_dim": 64}, "cudnn", "cudnn"),
        ({"cudnn": False}, "kernel", "kernel"),
        ({"deterministic": True}, "kernel", "kernel"),
        ({"dtype": FP32}, "kernel", "kernel"),
        ({"capability": (8, 0)}, "kernel", "kernel"),
        ({"capability": (10, 0)}, "cudnn", "cudnn"),
        ({"dim": 256, "value_dim": 256}, "cudnn", "cudnn"),
        ({"dim": 576, "value_dim": 512}, "kernel", "composed"),
        ({"dim": 1024, "value_dim": 64}, "composed", "composed"),
        ({"rows": 1}, "decode", "kernel"),
        ({"rows": 8, "own_heads": 2}, "decode", "cudnn"),
        ({"rows": 9, "own_heads": 2}, "cudnn", "cudnn"),
        ({"columns": 1}, "kernel", "kernel"),
        ({"dtype": FP64}, "composed", "composed"),
        ({"on_card": False}, "composed", "composed"),
        ({"has_program": False}, "composed", "composed"),
    ],
)
def test_rule(changed, of_forward, of_backward):
    case = dataclasses.replace(PLAIN, **changed)
    assert (forward(case), backward(case, of_lse=False)) == (of_forward, of_backward)


def test_a_gradient_of_lse_is_not_cudnns():
    assert backward(PLAIN, of_lse=True) == "kernel"
