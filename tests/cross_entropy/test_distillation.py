"""``ops.sparse_distillation_loss``: kernels in the interpreter and composed, against a loop."""

import contextlib
import math

import pytest
import torch
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import measure, ops

TILE = Tile(1, 1, 1, 1)


def by_hand(x, ids, logprobs, target, scale=1.0, target_logprob=0.0):
    """The losses of the rows, one at a time."""
    out = []
    for row, columns, logs, t in zip(
        x, ids.tolist(), logprobs.tolist(), target.tolist(), strict=True
    ):
        pairs = [(c, q) for c, q in zip(columns, logs, strict=True) if q > -math.inf]
        if t == -100:
            out.append((row * 0).sum())
            continue
        if t not in [c for c, _ in pairs]:
            pairs.append((t, target_logprob))
        w = torch.tensor([q for _, q in pairs], dtype=x.dtype).softmax(0)
        out.append(-(w * (row * scale).log_softmax(0)[[c for c, _ in pairs]]).sum())
    return torch.stack(out)


def draw(rows=5, columns=300, k=6, dtype=torch.float32):
    x = (torch.randn(rows, columns) * 2).to(dtype)
    ids = torch.stack([torch.randperm(columns)[:k] for _ in range(rows)])
    logprobs = torch.randn(rows, k).log_softmax(-1)
    target = torch.randint(0, columns, (rows,))
    target[1], target[2] = ids[1, 3], -100
    logprobs[3, 2] = -math.inf
    target[3] = ids[3, 2]  # there, but unused: inserted
    ids[4, 1] = ids[4, 0]  # twice
    return x, ids, logprobs, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("way", ["fused", "split", "composed"])
def test_numbers(dtype, reduction, way, on_cpu, with_tile):
    x, ids, logprobs, target = draw(dtype=dtype)
    own = x.clone().requires_grad_()
    kernels = contextlib.nullcontext() if way == "composed" else on_cpu()
    with kernels, with_tile(TILE, few=132 if way == "split" else 0):
        loss = ops.sparse_distillation_loss(
            own, ids, logprobs, target, reduction=reduction, scale=0.5, target_logprob=-1.0
        )
        loss.sum().backward()
    results = []
    for wide in (torch.float64, dtype):
        y = x.to(wide).requires_grad_()
        rows = by_hand(y, ids, logprobs, target, 0.5, -1.0)
        total = rows if reduction == "none" else rows.sum()
        total = total / 4 if reduction == "mean" else total
        total.sum().backward()
        results.append((total.detach(), y.grad))
    for got, truth, eager in zip((loss.detach(), own.grad), *results, strict=True):
        verdict = measure.check(got, truth, eager)
        assert verdict.ok, verdict.reason


def test_ignored_rows_may_hold_anything(on_cpu, with_tile):
    x, ids, logprobs, target = draw()
    x[2] = math.nan
    for kernels in (True, False):
        own = x.clone().requires_grad_()
        with on_cpu() if kernels else contextlib.nullcontext(), with_tile(TILE):
            loss = ops.sparse_distillation_loss(own, ids, logprobs, target)
            loss.backward()
        assert loss.isfinite() and (own.grad[2] == 0).all() and own.grad.isfinite().all()


def test_many_entries_without_a_target(on_cpu, with_tile):
    x = torch.randn(3, 300, requires_grad=True)
    ids = torch.stack([torch.randperm(300)[:200] for _ in range(3)])
    logprobs = torch.randn(3, 200)
    with on_cpu(), with_tile(TILE):  # beyond what the kernels take
        loss = ops.sparse_distillation_loss(x, ids, logprobs)
    expected = -(logprobs.softmax(1) * x.log_softmax(1).gather(1, ids)).sum(1).mean()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (1, torch.zeros(4, 6, dtype=torch.int64), ValueError),
        (1, torch.zeros(5, 6), TypeError),
        (2, torch.zeros(5, 7), ValueError),
        (3, torch.zeros(5), TypeError),
        (0, torch.zeros(5, 3, 2), ValueError),
    ],
)
def test_bad_input(index, value, error):
    args = list(draw())
    args[index] = value
    with pytest.raises(error, match="expected"):
        ops.sparse_distillation_loss(*args)


def test_ids_out_of_range_are_an_error():
    x, ids, logprobs, target = draw()
    ids[0, 0] = 300
    with pytest.raises(RuntimeError, match="id or a target"):
        ops.sparse_distillation_loss(x, ids, logprobs, target)
