"""Which losses are taken, which are left and why, and that nothing else changes."""

import re

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.lowerings import loss_rows
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import inductor_ext
from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext import registry
from inductor_ext.testing import compile_for

BF16 = torch.bfloat16
N, V = 512, 8192


@pytest.fixture(autouse=True)
def alone(clean_setting):
    with registry.only("fused_loss"):
        yield


def logits(*shape, dtype=BF16, grad=True):
    return torch.empty(*(shape or (N, V)), dtype=dtype, device="meta", requires_grad=grad)


def targets(*shape):
    return torch.empty(*(shape or (N,)), dtype=torch.long, device="meta")


def compiled(fn, *args, grad=True):
    return compile_for("h200", fn, *args, grad=grad)


def decided(code):
    return [d for d in code.decisions if d.sites.startswith("loss")]


plain = VARIANTS["plain"].fn


@pytest.mark.codegen
def test_one_decision_says_what_and_where():
    (found,) = decided(compiled(plain, logits(), targets()))
    assert (found.lowering, found.fired, found.chosen) == ("fused_loss", True, "one sweep")
    assert found.sites == "loss [512,8192] bfloat16 over dimension 1"


def several_targets(x, y):
    return F.cross_entropy(x.float(), y) + F.cross_entropy(x.float(), y // 2)


def weighted(x, y):
    return F.cross_entropy(x.float(), y, weight=torch.linspace(0.5, 1, V, device=x.device))


def soft(x, y):
    return F.cross_entropy(x.float(), x.detach().float().square())


def with_another_gradient(x, y):
    return F.cross_entropy(x.float(), y) + 1e-4 * x.float().square().mean()


def behind_a_function(x, y):
    return F.cross_entropy(F.relu(x).float(), y)


def focal(x, y):
    logp = F.log_softmax(x.float(), -1).gather(-1, y[:, None]).squeeze(-1)
    return -((1 - logp.exp()).detach() ** 2 * logp).mean()


def per_row(x, y):
    return F.cross_entropy(x.float(), y, reduction="none")


def sum_without_its_maximum(x, y):
    x = x.float()
    return (x - x.amax(-1, keepdim=True).detach()).exp().sum(-1).log().square().mean()


def negative_scale(x, y):
    return F.cross_entropy(x.float() * -2.0, y)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (several_targets, "more than one column of a row stands out"),
        (weighted, "varies along the row"),
        (soft, "varies along the row"),
        (with_another_gradient, "its gradient is not that of a loss alone"),
        (behind_a_function, "where of it is not handled"),
        (focal, "pow of the softmax's statistics is not handled"),
        (per_row, "the gradient that comes in is not one number"),
        (VARIANTS["entropy"].fn, "not linear in the probabilities"),
        (sum_without_its_maximum, "depends on the maximum otherwise than by lse"),
        (negative_scale, "its scale is not positive"),
    ],
)
def test_what_is_not_of_the_form_says_so(loss, reason):
    args = (logits(),) if loss is VARIANTS["entropy"].fn else (logits(), targets())
    code = compiled(loss, *args)
    found = decided(code)
    assert found and not any(d.fired for d in found)
    assert any(reason in d.reason for d in found), [d.reason for d in found]
    assert "inductor_ext" not in code.source


def test_columns_are_not_taken_for_rows_where_there_are_as_many():
    (found,) = decided(compiled(weighted, logits(V, V), targets(V)))
    assert not found.fired and "varies along the row" in found.reason


def test_rows_behind_a_slice_have_a_gradient_of_their_own():
    def loss(x, y):
        shifted = x.float()[:, :-1].reshape(-1, V)
        return F.cross_entropy(shifted, y[:, 1:].flatten()) + 1e-3 * x.float().mean()

    (found,) = decided(compiled(loss, logits(2, 64, V), targets(2, 64)))
    assert not found.fired and "follows a slice of the logits" in found.reason


def middle(x, y):
    return F.cross_entropy(x, y)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((logits(dtype=torch.float16), targets()), "may underflow"),
        ((logits(dtype=torch.float64), targets()), "torch.float64"),
        ((logits(4, V, 8), targets(4, 8)), "not the last dimension"),
    ],
)
def test_logits_that_are_left(args, reason):
    (found,) = decided(compiled(middle, *args))
    assert not found.fired and reason in found.reason


def test_columns_of_a_matrix_are_no_rows_of_memory():
    x = torch.empty(V, N, dtype=BF16, device="meta", requires_grad=True)
    (found,) = decided(compiled(lambda x, y: plain(x.t(), y), x, targets()))
    assert not found.fired


@pytest.mark.codegen
def test_logits_are_not_stored_for_it():
    def biased(h, w, y):
        return plain(h @ w.t() + w[:, 0], y)

    def some_rows(h, w, y, kept):
        return plain((h @ w.t())[kept], y)

    args = logits(N, 64), logits(V, 64), targets()
    for loss, more in ((biased, ()), (some_rows, (targets(),))):
        (found,) = decided(compiled(loss, *args, *more))
        assert not found.fired and "would have to be stored" in found.reason


@pytest.mark.codegen
def test_a_gradient_is_not_copied_for_its_strides():
    x = torch.empty(N, V + 5, dtype=BF16, device="meta")[:, :V].requires_grad_()
    (found,) = decided(compiled(plain, x, targets()))
    assert not found.fired and "padded" in found.reason


def test_logits_that_are_a_result_have_another_gradient():
    code = compiled(lambda x, y: (plain(x, y), x * 2), logits(), targets())
    (found,) = decided(code)
    assert not found.fired and "rows_and_gradient" not in code.source


def test_no_site_without_a_backward_or_in_registers_or_outside_a_loss():
    def attention(q):
        return torch.matmul(torch.softmax(torch.matmul(q, q.transpose(-2, -1)), -1), q)

    assert compiled(plain, logits(grad=False), targets(), grad=False).decisions == []
    assert compiled(plain, logits(N, 1024), targets()).decisions == []
    assert compiled(attention, logits(2, 2048, 64)).decisions == []


@pytest.mark.codegen
def test_what_checkpointing_computes_again_is_left():
    def inside(h, w, y):
        return checkpoint(lambda h, w, y: plain(h @ w.t(), y), h, w, y, use_reentrant=False)

    def around_the_loss(x, y):
        return checkpoint(plain, x, y, use_reentrant=False)

    def before(h, w, y):
        h = checkpoint(lambda h: F.silu(h @ w[:64]), h, use_reentrant=False)
        return plain(h @ w.t(), y)

    args = logits(N, 64), logits(V, 64), targets()
    (left,) = decided(compiled(inside, *args))
    assert not left.fired and "activation checkpointing" in left.reason
    (left,) = decided(compiled(around_the_loss, logits(), targets()))
    assert not left.fired and "activation checkpointing" in left.reason
    code = compiled(before, *args)
    assert [d.fired for d in decided(code)] == [True]
    assert "rows_and_gradient" not in code.backward


def layer(h, w, y):
    return plain(h @ w.t(), y)


@pytest.mark.codegen
def test_the_partitioner_does_not_make_it_twice():
    with functorch_config.patch(aggressive_recomputation=True):
        code = compiled(layer, logits(N, 64), logits(V, 64), targets())
    assert [d.fired for d in decided(code)] == [True]
    assert len(re.findall(r"rows_and_gradient\.default\(", code.source)) == 1
    assert "rows_and_gradient" in code.forward


@pytest.mark.codegen
def test_a_memory_budget_is_kept_to():
    with functorch_config.patch(activation_memory_budget=0.5):
        (left,) = decided(compiled(layer, logits(N, 64), logits(V, 64), targets()))
    assert not left.fired and "memory budget" in left.reason


def test_few_logits_are_left_alone(monkeypatch):
    monkeypatch.setattr(loss_rows, "LEAST_BYTES", 2**25)
    found = decided(compiled(plain, logits(), targets()))
    assert found and not any(d.fired for d in found)
    assert any("as fast as a kernel is launched" in d.reason for d in found)


@pytest.mark.codegen
def test_disabled_is_stock_byte_for_byte():
    def text(code):
        return re.sub(r"(# AOT ID: ).*", r"\1", code.source)

    args = logits(), targets()
    with registry.only():
        stock = compiled(plain, *args)
    with inductor_ext.disable("fused_loss"):
        disabled = compiled(plain, *args)
    assert text(disabled) == text(stock) and disabled.decisions == []
    assert text(compiled(plain, *args)) != text(stock)


@pytest.mark.codegen
def test_it_looks_before_the_other_rewritings_and_behind_attention():
    from torch._inductor.fx_passes import joint_graph

    entries = joint_graph.pass_patterns
    names = [p.lowering.name for p in entries if isinstance(p, registry._GuardedPass)]
    mine = ["linear_cross_entropy", "fused_loss", "softmax", "cross_entropy"]
    assert [n for n in names if n in mine] == mine
    first = next(i for i, p in enumerate(entries) if isinstance(p, registry._GuardedPass))
    assert entries[first - 1] is joint_graph.patterns
