"""The operation on its kernels, in Triton's interpreter: that what an option becomes, what the
launches are given and what they return fit each other."""

import attention_reference as reference
import pytest
import torch
from inductor_ext.templates import (
    attention_backward_launch,
    attention_decode_launch,
    attention_documents,
    attention_far,
    attention_launch,
)

from inductor_ext import ops
from inductor_ext.ops import _attention as operation
from inductor_ext.testing import launches_interpreted

FP32 = torch.float32


@pytest.fixture
def on_cpu(monkeypatch):
    """Kernels compute on CPU tensors, and the fallback does not."""
    monkeypatch.setattr(operation, "kernels_apply", lambda q: q.dtype == FP32)
    monkeypatch.setattr(operation.composed, "forward", None)
    monkeypatch.setattr(operation.composed, "backward", None)
    monkeypatch.setattr(operation.composed, "columns", None)
    modules = attention_launch, attention_backward_launch, attention_decode_launch
    with launches_interpreted(*modules, attention_documents, attention_far):
        yield


def ids(size):
    return (torch.arange(size) // 17).to(torch.int32)[None]


torch.manual_seed(0)  # of what is drawn here, in front of any fixture
ROWS, COLUMNS, HEADS, OWN = 40, 70, 4, 2
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window and sinks": {"causal": True, "window": (20, 0), "sinks": 3},
    "segments": {"causal": True, "segments": (ids(ROWS), ids(COLUMNS))},
    "bias": {"bias": torch.randn(1, HEADS, ROWS, COLUMNS)},
    "row bias": {"bias": torch.randn(HEADS, ROWS, 1), "causal": "upper_left"},
    "bool bias": {"bias": torch.rand(2, 1, ROWS, COLUMNS) < 0.6},
    "slot bias": {"slot_bias": torch.randn(2, OWN, COLUMNS), "softcap": 3.0},
    "sink": {"sink": torch.randn(HEADS), "causal": True},
    "expanded bias": {"bias": torch.randn(1, 1, 1, COLUMNS).expand(2, HEADS, ROWS, COLUMNS)},
}


def draw(rows=ROWS, columns=COLUMNS, D=16, Dv=32):
    shapes = (2, HEADS, rows, D), (2, OWN, columns, D), (2, OWN, columns, Dv)
    return [torch.randn(s) for s in shapes]


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def relative(mine, right):
    return ((mine.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, on_cpu):
    torch.manual_seed(0)
    q, k, v = (t.requires_grad_() for t in draw())
    given = dict(OPTIONS[name])
    own = [n for n in given if n.endswith("bias") and given[n].is_floating_point()] + (
        ["sink"] if "sink" in given else []
    )
    for n in own:
        given[n] = given[n].clone().requires_grad_()
    leaves = [q, k, v, *(given[n] for n in own)]
    if name == "expanded bias":  # its gradient is asked for in front of the expand
        leaves[3] = given["bias"].detach()[:1, :1, :1].clone().requires_grad_()
        given["bias"] = leaves[3].expand(2, HEADS, ROWS, COLUMNS)
    asked = {"return_lse": True, "return_colsum": True, "colsum_rows": 30}
    out, lse, sums = ops.attention(q, k, v, **given, **asked)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    theirs = {n: wide(t) for n, t in given.items()}
    for n, t in zip(own, doubles[3:], strict=True):
        theirs[n] = t.expand(2, HEADS, ROWS, COLUMNS) if name == "expanded bias" else t
    right = reference.attention(*doubles[:3], **theirs)
    assert relative(out, right[0]) <= 1e-5 and relative(lse, right[1]) <= 1e-5
    assert relative(sums, right[2][:, :, :, -30:].sum((2, 3))) <= 1e-5
    seeds = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out, lse), leaves, seeds)
    truth = torch.autograd.grad(right[:2], doubles, [s.double() for s in seeds])
    for x, y in zip(mine, truth, strict=True):
        assert x.dtype == FP32 and relative(x, y) <= 1e-5
    # Frozen parts
    alone = torch.autograd.grad(ops.attention(q.detach(), k, v.detach(), **given).sum(), k)[0]
    both = torch.autograd.grad(ops.attention(q, k, v, **given).sum(), k)[0]
    assert relative(alone, both.double()) <= 1e-6


def test_few_rows_and_pages(on_cpu):
    torch.manual_seed(0)
    q, k, v = draw(3, 96)
    wide_inputs = [t.double() for t in (q, k, v)]
    out, lse = ops.attention(q, k, v, causal=True, window=(40, 0), return_lse=True)
    right = reference.attention(*wide_inputs, causal=True, window=(40, 0))
    assert relative(out, right[0]) <= 1e-5 and relative(lse, right[1]) <= 1e-5
    lengths, table = torch.tensor([96, 50]), torch.randperm(14)[:12].view(2, 6)
    pages = [torch.randn(14, 16, OWN, t.shape[-1]) for t in (k, v)]
    for place, t in zip(pages, (k, v), strict=True):
        place[table] = t.transpose(1, 2).unflatten(1, (6, 16))
    right = reference.attention(*wide_inputs, causal=True, lengths=lengths)
    dense = ops.attention(q, k, v, causal=True, lengths=lengths)
    paged = ops.attention(q, *pages, causal=True, lengths=lengths, block_table=table)
    assert relative(dense, right[0]) <= 1e-5 and relative(paged, right[0]) <= 1e-5


def test_long_prompts_in_pages_are_gathered(on_cpu):
    torch.manual_seed(0)
    q, k, v = draw(80, 96)
    lengths, table = torch.tensor([96, 85]), torch.arange(12).view(2, 6)
    pages = [t.transpose(1, 2).reshape(12, 16, OWN, t.shape[-1]) for t in (k, v)]
    out = ops.attention(q, *pages, causal=True, lengths=lengths, block_table=table)
    right = reference.attention(*(t.double() for t in (q, k, v)), causal=True, lengths=lengths)
    assert relative(out, right[0]) <= 1e-5
