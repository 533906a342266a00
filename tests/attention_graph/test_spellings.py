"""Every spelling of attention becomes one operation, and computes what it did."""

import pytest
import torch
from inductor_ext.lowerings import attention as lowering
from inductor_ext.lowerings import attention_sites
from spellings import SPELLINGS, arguments

from inductor_ext import measure, report

OP = "inductor_ext.attention.default("
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture
def here(monkeypatch):
    """The CPU counts as a card."""
    monkeypatch.setattr(attention_sites.compat_fx, "writes_triton", lambda device: True)


def edited(fn, args, grad, dynamic=None):
    """(the edited program as a function, its text, decisions); AOTAutograd and Inductor are left
    out."""
    kept = []

    def backend(graph, _):
        with report.collect() as decisions:
            lowering.rewrite(graph.graph)
        graph.recompile()
        kept.append((graph.code, list(decisions)))
        return graph.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        for one, dims in (dynamic or {}).items():
            for dim in dims:
                torch._dynamo.mark_dynamic(args[one], dim)
        out = torch.compile(fn, backend=backend)(*args)
    (one,) = kept
    return out, *one


def wide(args):
    return [
        a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a
        for a in args
    ]


def with_gradients(out, args):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(out.shape, generator=generator).to(out.dtype)
    leaves = [a for a in args if a.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, given.to(out.dtype))]


@DTYPES
@pytest.mark.parametrize("name", SPELLINGS)
def test_numbers(name, dtype, here):
    """In front of autograd, results and gradients of every parameter, by the rule."""
    fn, shapes = SPELLINGS[name]
    args = arguments(shapes, dtype, tokens=48)
    out, text, decisions = edited(fn, args, grad=True)
    assert [(d.lowering, d.fired) for d in decisions] == [("attention", True)], decisions
    assert text.count(OP) == 1 and "softmax" not in text
    found = with_gradients(out, args)
    exact = wide(args)
    right = with_gradients(fn(*exact), exact)
    plain = with_gradients(fn(*args), args)
    for i, (a, b, c) in enumerate(zip(found, right, plain, strict=True)):
        verdict = measure.check(a, b, c)
        assert verdict.ok, f"number {i}: {verdict.reason}"
