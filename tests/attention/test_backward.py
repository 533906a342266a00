"""Attention's backward in the interpreter: every gradient against fp64, by eager's own error."""

import pytest
import torch
from backward_programs import SCORES, draw_inputs, gradients
from inductor_ext.templates import attention_backward_launch as launch

from inductor_ext import measure
from inductor_ext.testing import launches_interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = {"keys": launch.Tiling(16, 32, 4, 1), "rows": launch.Tiling(32, 16, 4, 1)}


def ours(score, q, k, v, inputs, do, dlse, out, lse, needed=None, precision="ieee", **tilings):
    needed = needed or [True] * 3 + [wanted for *_, wanted in score.inputs]
    with launches_interpreted(launch):
        return launch.backward(
            do, dlse, q, k, v, inputs, score.numbers, score.program, out, lse, needed, precision,
            **(tilings or SMALL),
        )  # fmt: skip


def draw(score, batch, heads, kv_heads, rows, columns, head, value, dtype):
    q = torch.randn(batch, heads, rows, head).to(dtype)
    k = torch.randn(batch, kv_heads, columns, head).to(dtype)
    v = torch.randn(batch, kv_heads, columns, value).to(dtype)
    inputs = draw_inputs(score, batch, heads, rows, columns, dtype)
    do = torch.randn(batch, heads, rows, value).to(dtype)
    return q, k, v, inputs, do, torch.randn(batch, heads, rows)


def judge(score, q, k, v, inputs, do, dlse, rounding=None, **options):
    wide = [t.double() for t in (q, k, v)]
    wide_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    out, lse, right = gradients(
        score, *wide, wide_inputs, do.double(), None if dlse is None else dlse.double()
    )
    eager_out, _, eager = gradients(score, q, k, v, inputs, do, dlse)
    found = [
        ours(score, q, k, v, inputs, do, dlse, eager_out, lse.float(), **options) for _ in range(2)
    ]
    flat = [[*three, *(g for g in grads if g.numel())] for *three, grads in found]
    assert all(map(torch.equal, *flat)) and len(flat[0]) == len(right)
    for mine, truth, baseline in zip(flat[0], right, eager, strict=True):
        narrow = q.dtype if q.dtype != FP32 else None
        verdict = measure.check(mine, truth, baseline.to(mine.dtype), rounding=narrow)
        assert verdict.ok, verdict.reason
    return flat[0]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_scores(name, dtype):
    torch.manual_seed(0)
    score = SCORES[name]
    judge(score, *draw(score, 2, 4, 2, 83, 83, 16, 16, dtype))
