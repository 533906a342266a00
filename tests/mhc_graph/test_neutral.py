"""Programs without hyper-connections: not traced, not changed, and stock where all is off."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.lowerings import mhc_post, mhc_pre
from mhc_programs import edited, pre_inputs
from mhc_variants import build, loop

import inductor_ext
from benchmarks import mhc_forms
from inductor_ext import shadow
from inductor_ext.testing import compile_for


def transformer(x, w, up, down):
    """A norm, attention over 4 heads, a gated layer."""
    h = F.rms_norm(x, x.shape[-1:], None, 1e-6)
    q = (h @ w).unflatten(-1, (4, -1)).transpose(1, 2)
    a = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)
    x = x + a @ w
    return x + (F.silu(x @ up) * (x @ up)) @ down


def gated(x, w, up, down):
    """With a sigmoid and a norm."""
    h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    return torch.sigmoid(h @ up) @ down


def router(x, w, up, down):
    """A sigmoid gate over 8 experts: a product as narrow as a gate's."""
    h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    weight, chosen = torch.sigmoid(h.float() @ w[:, :8].float()).topk(2)
    return h * weight.sum(-1, keepdim=True).to(h.dtype), chosen


def inputs():
    def normal(*shape):
        return torch.randn(*shape).bfloat16().requires_grad_()

    return normal(2, 16, 96), normal(96, 96), normal(96, 160), normal(160, 96)


@pytest.mark.parametrize("fn", [transformer, gated])
def test_what_has_no_gates_is_not_traced(fn, monkeypatch):
    def traced(graph):
        raise AssertionError("the program was run once more")

    monkeypatch.setattr(shadow, "trace", traced)
    assert edited(fn, *inputs()).decisions == []


def test_a_router_is_traced_and_left_as_it_is(monkeypatch):
    traced, trace = [], shadow.trace
    before = []

    def count(graph):
        traced.append(graph)
        before.append([(n.name, n.op, n.target, str(n.args), n.meta.keys()) for n in graph.nodes])
        return trace(graph)

    monkeypatch.setattr(shadow, "trace", count)
    program = edited(router, *inputs())
    assert program.decisions == [] and traced == [program.graph]
    now = [(n.name, n.op, n.target, str(n.args), n.meta.keys()) for n in program.graph.nodes]
    assert now == before[0]


def text(code):
    return re.sub(r"# (AOT ID|kernel path): .*", "", code.source)


@pytest.mark.codegen
def test_off_is_stock_byte_for_byte():
    """Off, and with the passes taken away."""
    form, args = build(loop(1)), pre_inputs()
    names = ("mhc_pre", "mhc_post", "mhc_post_pre")
    with inductor_ext.disable(*names):
        off = compile_for("h200", form, *args, grad=False)
    assert not any(d.lowering in names for d in off.decisions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mhc_pre, "may_hold_gates", lambda graph: False)
        patch.setattr(mhc_post, "may_mix_streams", lambda graph: False)
        unlooked = compile_for("h200", form, *args, grad=False)
    assert text(off) == text(unlooked)


def test_a_program_that_cannot_be_followed_is_left(monkeypatch):
    def lost(graph):
        raise shadow.NotFollowed("lost")

    monkeypatch.setattr(shadow, "trace", lost)
    program = edited(mhc_forms.deepseek_pre, *pre_inputs())
    assert program.operations == [] and program.decisions == []


def test_two_compiles_are_one_program():
    """Nothing of a compile is left for the next."""
    args = pre_inputs()
    first = edited(mhc_forms.vllm_pre, *copy.deepcopy([a.detach() for a in args]), grad=False)
    again = edited(mhc_forms.vllm_pre, *copy.deepcopy([a.detach() for a in args]), grad=False)
    assert str(first.graph) == str(again.graph)
