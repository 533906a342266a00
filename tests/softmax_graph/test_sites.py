"""Where the rewriting fires, where it does not and what it says, and that off means stock."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.lowerings import loss_rows

import inductor_ext
from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext import compat_fx, registry
from inductor_ext.testing import compile_for
from inductor_ext.testing.generated import kernels_of

BF16 = torch.bfloat16
N, V = 512, 8192


def logits(*shape, dtype=BF16):
    return torch.empty(*(shape or (N, V)), dtype=dtype, device="meta", requires_grad=True)


def targets(*shape):
    return torch.empty(*(shape or (N,)), dtype=torch.long, device="meta")


def smoothed(x, y):
    return F.cross_entropy(x, y, label_smoothing=0.1)


def decisions(fn, *args, grad=True, **options):
    return compile_for("h200", fn, *args, grad=grad, **options).decisions


def why_left(found):
    return [d.reason for d in found if not d.fired]


def outcome(found):
    return [(d.lowering, d.fired) for d in found]


@pytest.mark.codegen
def test_one_decision_per_site():
    found = decisions(lambda x, y: smoothed(x * 2, y), logits(), targets())
    assert [(d.lowering, d.fired, d.chosen) for d in found] == [
        ("softmax", True, "row_statistics"),
        ("cross_entropy", True, "closed form"),
        ("cross_entropy", True, "closed form"),
    ]
    assert found[0].sites == "softmax [512,8192] bfloat16 over dimension 1"
    assert found[2].sites == "row sum of the gradient [512,8192] bfloat16 over dimension 1"


def test_rows_in_registers_are_no_site():
    assert decisions(smoothed, logits(N, 1024), targets()) == []
    assert decisions(smoothed, logits(N, 1025), targets()) != []


def test_a_graph_without_softmax_is_not_looked_at():
    assert decisions(lambda x: (x.float() ** 2).sum(-1).exp().mean(), logits()) == []


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, y: 2 * F.softmax(x, -1), "tangents_1 is not linear"),
        (lambda x, y: (F.log_softmax(x, -1) * F.log_softmax(x, -1)).sum(-1), "reads them again"),
        (lambda x, y: F.log_softmax(x, -1).square().sum(-1), "pow is not linear"),
        (lambda x, y: F.cross_entropy(x, y), "stock moves no bytes for it"),
    ],
)
def test_sums_that_stay_say_why(fn, reason):
    assert any(reason in why for why in why_left(decisions(fn, logits(), targets())))


# --- where the statistics are made ----------------------------------------------------------------

FORWARDS = {
    "softmax": lambda x, y: F.softmax(x, -1),
    "log_softmax": lambda x, y: F.log_softmax(x.float(), -1),
    "cross entropy": lambda x, y: F.cross_entropy(x.float(), y),
    "temperature": lambda x, y: F.cross_entropy(x / 0.7, y, reduction="none"),
    "score": lambda x, y: F.log_softmax(x.float(), -1).gather(-1, y[:, None]),
    "twice": lambda x, y: F.cross_entropy(x, y) + x.logsumexp(-1).square().mean(),
    "by hand": lambda x, y: (x - x.amax(-1, keepdim=True)).exp().sum(-1),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_inference_reads_the_logits_once_for_them(name, sweeps):
    with torch.no_grad():
        code = compile_for("h200", FORWARDS[name], logits(), targets())
    assert outcome(code.decisions) == [("softmax", True)]
    if name == "softmax":  # tests/softmax_graph/test_values.py
        assert "softmax_forward" in code.source and not sweeps(code.source, V)
        return
    written = ["pointwise loops=0 loads=1 stores=1"] if name == "log_softmax" else []
    assert sweeps(code.source, V) == ["row_statistics loads=1 stores=0", *written]


@pytest.mark.parametrize("fn", [FORWARDS["log_softmax"], FORWARDS["cross entropy"], smoothed])
def test_nothing_is_computed_per_entry_that_a_row_has_once(fn):
    code = compile_for("h200", fn, logits(), targets(), grad=True)
    kernels = kernels_of(code.forward) + kernels_of(code.backward)
    whole = [k.source for k in kernels if re.search(rf"// {V}\b|r0_\d+ \+ {V}\*x", k.source)]
    assert whole and not any("math.log(" in source for source in whole)


@pytest.mark.codegen
def test_logits_of_a_product_and_never_twice(sweeps):
    """The backward has the statistics from the forward."""

    def loss(h, w, y):
        return F.cross_entropy((h @ w.t()).float(), y, reduction="none")

    code = compile_for("h200", loss, logits(N, 64), logits(V, 64), targets(), grad=True)
    assert ("softmax", True) in outcome(code.decisions)
    assert sweeps(code.forward, V) == ["row_statistics loads=1 stores=0"]
    assert "row_statistics" not in code.backward


def test_shifted_rows_are_those_of_the_memory(sweeps):
    def loss(x, y):
        return F.cross_entropy(x[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten())

    with torch.no_grad():
        code = compile_for("h200", loss, logits(4, 256, V), targets(4, 256))
    assert "row_statistics.default(reinterpret_tensor(arg0_1, (1024, 8192)" in code.source


class Kept(torch.nn.Module):
    def forward(self, h, w, y):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda h, w: F.cross_entropy(h @ w.t(), y), h, w, use_reentrant=False)


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (smoothed, lambda: (logits(dtype=torch.float64), targets()), "torch.float64"),
        (lambda x: F.softmax(x, 1), lambda: (logits(2, V, 8),), "not the last dimension"),
        (lambda x: F.softmax(x + 1, -1), lambda: (logits(),), "computed where they are read"),
        (lambda x: F.softmax(x * -2, -1), lambda: (logits(),), "scale is not positive"),
        (lambda x: F.softmax(x[:, 1:9], -1), lambda: (logits(4, N, V),), "a part of the rows"),
        (lambda x: F.softmax(x.mT, -1), lambda: (logits(V, N),), "computed where they are read"),
        (Kept(), lambda: (logits(N, 64), logits(V, 64), targets()), "activation checkpointing"),
    ],
    ids=["fp64", "middle", "computed", "negative", "few rows", "transposed", "checkpoint"],
)
def test_left_alone(fn, args, reason):
    left = [d for d in decisions(fn, *args()) if d.lowering == "softmax"]
    assert len(left) == 1 and not left[0].fired and reason in left[0].reason


def test_few_logits_are_left_alone(monkeypatch):
    monkeypatch.setattr(loss_rows, "LEAST_BYTES", 2**25)
    (left,) = decisions(FORWARDS["softmax"], logits().detach(), targets(), grad=False)
    assert not left.fired and "as fast as a kernel is launched" in left.reason


def test_rows_that_are_swept_again_are_left_without_a_backward():
    def loss(x, t):  # weights that are computed where they are read
        return -(F.log_softmax(x.float(), -1) * t.sigmoid().sqrt()).sum(-1).mean()

    with torch.no_grad():
        left, *_ = decisions(loss, logits(), logits(), grad=False)
    assert not left.fired and "sweeps the rows again" in left.reason


def test_what_another_lowering_would_sum_is_left_where_that_is_off():
    with inductor_ext.disable("cross_entropy"):
        (left,) = decisions(smoothed, logits(), targets())
    assert not left.fired and "sweeps the rows again" in left.reason


@pytest.mark.codegen
def test_a_package_has_no_python():
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True):
        (left,) = decisions(FORWARDS["softmax"], logits(), targets(), grad=False)
    assert not left.fired and "C++ wrapper" in left.reason


# --- switches -------------------------------------------------------------------------------------


def is_ours(entry):
    """Not torch's, and not of a lowering that another test has left in the list."""
    own = isinstance(entry, registry._GuardedPass)
    return own and entry.lowering.name in ("softmax", "cross_entropy")


def without_plugin(monkeypatch, fn, *args):
    from torch._inductor.fx_passes import joint_graph

    others = [p for p in joint_graph.pass_patterns if not is_ours(p)]
    assert len(others) == len(joint_graph.pass_patterns) - 2
    with monkeypatch.context() as patch:
        patch.setattr(joint_graph, "pass_patterns", others)
        return compile_for("h200", fn, *args, grad=True)


def text(code):
    """Byte for byte, but for the running number that Inductor gives each graph."""
    return re.sub(r"(# AOT ID: ).*", r"\1", code.source)


@pytest.mark.codegen
def test_disabled_is_stock_byte_for_byte(monkeypatch):
    variant = VARIANTS["z-loss, softcap, smoothing"]
    args = logits(), targets()
    stock = without_plugin(monkeypatch, variant.fn, *args)
    with inductor_ext.disable("softmax", "cross_entropy"):
        disabled = compile_for("h200", variant.fn, *args, grad=True)
    assert text(disabled) == text(stock) and disabled.decisions == []
    assert text(compile_for("h200", variant.fn, *args, grad=True)) != text(stock)


def test_all_are_on_after_the_import(fresh_status):
    state = {name: on for name, on, _ in fresh_status}
    assert all(
        state[name] for name in ("softmax", "cross_entropy", "fused_loss", "linear_cross_entropy")
    )


def test_each_lowering_has_its_own_switch():
    args = logits(), targets()
    scaled = VARIANTS["logit scale"].fn
    with inductor_ext.disable("cross_entropy"):
        assert {d.lowering for d in decisions(scaled, *args)} == {"softmax"}
    with inductor_ext.disable("softmax"):
        assert {d.lowering for d in decisions(scaled, *args)} == {"cross_entropy"}


@pytest.mark.codegen
def test_attention_is_still_recognised():
    """The passes come behind the patterns of fused attention, which want a scaled softmax."""

    def attention(q, k, v):
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / 8, -1), v)

    q = torch.empty(2, 4, 2048, 64, dtype=BF16, device="meta")
    with inductor_ext.disable("attention"):
        code = compile_for("h200", attention, q, q, q)
    assert any("scaled_dot_product" in call for call in code.extern_calls)


@pytest.mark.codegen
def test_the_passes_stand_before_what_hides_a_scaled_softmax():
    from torch._inductor.fx_passes import joint_graph

    entries = joint_graph.pass_patterns
    mine = [i for i, p in enumerate(entries) if is_ours(p)]
    assert [entries[i].lowering.name for i in mine] == ["softmax", "cross_entropy"]
    assert entries.index(joint_graph.patterns) < mine[0]
    assert mine[-1] < entries.index(compat_fx.scaled_softmax_patterns())


# --- symbolic sizes -------------------------------------------------------------------------------


@pytest.mark.codegen
@pytest.mark.parametrize("name", ["z-loss, softcap, smoothing", "class weight, smoothing"])
def test_symbolic_number_of_rows(name, judged):
    variant = VARIANTS[name]
    inputs = variant.inputs(6, 1283, BF16, "cpu")
    other = variant.inputs(11, 1283, BF16, "cpu")
    code = judged(variant.fn, inputs, run=other, dynamic={0: {0: None}, 1: {0: None}})
    assert code.frames == 1
    assert all(d.fired for d in code.decisions if d.lowering == "softmax")
    assert [d.fired for d in code.decisions if d.lowering == "cross_entropy"][-1]


def test_symbolic_length_of_the_row(judged):
    torch.manual_seed(1)
    x, y = torch.randn(4, 1283).to(BF16), torch.randint(0, 1283, (4,))
    other = [torch.randn(4, 2000).to(BF16), torch.randint(0, 2000, (4,))]
    code = judged(smoothed, [x, y], run=other, dynamic={0: {1: None}})
    assert [d.fired for d in code.decisions] == [True, True, True]


@pytest.mark.codegen
@pytest.mark.parametrize("shape", [(8, 131072), (2, 8192, 512)])
def test_nothing_large_is_stored(shape):
    """What is summed is computed in the sweep, not before it."""
    y = targets(*shape[:1], *shape[2:])
    code = compile_for("h200", smoothed, logits(*shape), y, grad=True)
    allocated = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code.forward)
    sizes = [math.prod(int(n) for n in text.split(",") if n.strip()) for text in allocated]
    assert max(sizes) <= math.prod(shape) // 64


def shifted(x, y):
    x, y = x.float()[:, :-1].contiguous(), y[:, 1:].contiguous()
    return F.cross_entropy(x.view(-1, x.shape[-1]), y.view(-1))


def selected(x, y):
    return F.cross_entropy(x.flatten(0, 1)[::2].float(), y.flatten()[::2], label_smoothing=0.1)


@pytest.mark.parametrize("loss", [shifted, selected])
def test_the_gradient_of_a_part_of_the_logits_is_written_once(loss):
    """It is computed where it is put, not stored in between."""
    code = compile_for("h200", loss, logits(2, 256, 32000), targets(2, 256), grad=True)
    allocated = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\), .*?torch\.(\w+)\)", code.backward)
    large = [kind for text, kind in allocated if len(text) > 9]
    assert large == ["bfloat16"]
    assert any(d.fired for d in code.decisions)


def test_numbers_of_shifted_logits(judged):
    torch.manual_seed(2)
    assert judged(shifted, [torch.randn(2, 5, 1283).to(BF16), torch.randint(0, 1283, (2, 5))])
