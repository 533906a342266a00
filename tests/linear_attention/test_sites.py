"""Spellings of causal linear attention with T x T scores, recognised in front of autograd."""

import pytest
import torch

import inductor_ext
from inductor_ext.testing import compile_for

B, H, T, K, V = 2, 8, 2048, 64, 32
OP = "inductor_ext.linear_attention.default("
WRITTEN = "inductor_ext.linear_attention.default.launched("


def mask(q):
    return torch.ones(T, T, dtype=torch.bool, device=q.device).tril()


SPELLINGS = {
    "tril": lambda q, k, v: torch.tril(q @ k.transpose(-1, -2)) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT * 0.125).masked_fill(~mask(q), 0.0) @ v,
    "triu": lambda q, k, v: (q @ k.mT).masked_fill(
        torch.triu(torch.ones(T, T, device=q.device), 1).bool(), 0) @ v,
    "where": lambda q, k, v: torch.where(mask(q), q @ k.mT / 8, 0.0) @ v,
    "product": lambda q, k, v: ((q @ k.mT) * mask(q).to(q.dtype)[None, None] * 0.5) @ v,
    "feature map": lambda q, k, v: torch.tril(
        (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT) @ v,
    "flat": lambda q, k, v: torch.tril(torch.bmm(
        q.flatten(0, 1), k.flatten(0, 1).mT)).bmm(v.flatten(0, 1)),
    "packed": lambda q, k, v: torch.tril(
        q.transpose(1, 2).contiguous().transpose(1, 2) @ k.permute(0, 1, 3, 2)) @ v * 0.3,
    "states, einsum": lambda q, k, v: torch.einsum(
        "bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)),
    "states, transposed": lambda q, k, v: torch.einsum(
        "bthed,bthd->bthe", torch.einsum("bthe,bthd->bthed", v.transpose(1, 2),
                                         k.transpose(1, 2)).cumsum(-4), q.transpose(1, 2)),
    "states, broadcast": lambda q, k, v: (
        q[..., None] * (k[..., None] * v[..., None, :]).cumsum(-3)).sum(-2),
    "states, products": lambda q, k, v: (
        q.unsqueeze(-2) @ (k.unsqueeze(-1) @ v.unsqueeze(-2)).cumsum(2)).squeeze(-2),
    "states of shared keys": lambda q, k, v: torch.einsum(
        "bhtd,bhtde->bhte", q, torch.einsum("btd,bhte->bhtde", k[:, 0], v).cumsum(2)),
}  # fmt: skip

OTHERS = {
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.tril(torch.einsum("bhid,bhjd->bhij", q, k)), v),
    "softmax": lambda q, k, v: torch.softmax(torch.tril(q @ k.mT), -1) @ v,
    "no mask": lambda q, k, v: (q @ k.mT) @ v,
    "other diagonal": lambda q, k, v: torch.tril(q @ k.mT, -1) @ v,
    "the upper triangle": lambda q, k, v: torch.where(mask(q), 0.0, q @ k.mT) @ v,
    "filled with one": lambda q, k, v: (q @ k.mT).masked_fill(~mask(q), 1.0) @ v,
    "scores are used": lambda q, k, v: ((s := torch.tril(q @ k.mT)) @ v, s),
    "wider scores": lambda q, k, v: torch.tril((q @ k.mT).float()).sin().to(q.dtype) @ v,
    "an unknown mask": lambda q, k, v: (q @ k.mT).masked_fill(q[:1, :1, :, :1] > 0, 0.0) @ v,
    "a copy that is written to": lambda q, k, v: (
        (s := torch.tril(q @ k.mT).clone()), s[..., 0].zero_(), s @ v)[-1],
    "a mask that is written to": lambda q, k, v: (
        (m := torch.ones(T, T, device=q.device)), m[5].zero_(),
        (q @ k.mT).masked_fill(torch.tril(m) == 0, 0.0) @ v)[-1],
    "a mask of one column": lambda q, k, v: (
        (q @ k.mT) * torch.ones(T, 1, device=q.device, dtype=q.dtype).tril()) @ v,
    "fewer queries": lambda q, k, v: torch.tril(
        q[..., : T // 2, :].contiguous() @ k.mT) @ v + (v @ v.mT).sum(),
    "detached scores": lambda q, k, v: torch.tril(q @ k.mT).detach() @ v,
    "heads of nothing": lambda q, k, v: torch.tril(q[..., :0] @ k[..., :0].mT) @ v,
    "few tokens": lambda q, k, v: torch.tril(q[..., :256, :] @ k[..., :256, :].mT)
    @ v[..., :256, :],
}  # fmt: skip

OTHER_STATES = {
    "along heads": lambda q, k, v: torch.einsum(
        "bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(1)),
    "in fp32": lambda q, k, v: torch.einsum(
        "bhtd,bhtde->bhte", q.float(),
        torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2, dtype=torch.float32)),
    "of later tokens": lambda q, k, v: torch.einsum(
        "bhtd,bhtde->bhte", q[:, :, 1:],
        torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)[:, :, :-1]),
    "states are used": lambda q, k, v: (
        (s := torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)),
        torch.einsum("bhtd,bhtde->bhte", q, s)),
    "written to": lambda q, k, v: (
        (s := torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)), s[:, :, 5].zero_(),
        torch.einsum("bhtd,bhtde->bhte", q, s))[-1],
    "a copy that is written to": lambda q, k, v: (
        (s := torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2).clone()), s[:, :, 5].zero_(),
        torch.einsum("bhtd,bhtde->bhte", q, s))[-1],
    "detached": lambda q, k, v: torch.einsum(
        "bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2).detach()),
}  # fmt: skip


def meta(*size):
    return torch.empty(*size, dtype=torch.bfloat16, device="meta", requires_grad=True)


def compiled(fn, grad=True):
    inputs = (meta(B, H, T, n).requires_grad_(grad) for n in (K, K, V))
    with inductor_ext.disable("attention"):  # takes one of the others
        return compile_for("h200", fn, *inputs, grad=grad)


@pytest.mark.codegen
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    code = compiled(SPELLINGS[name])
    assert code.forward.count(WRITTEN) == 1 and "bmm" not in code.forward
    assert code.backward.count("inductor_ext.linear_attention_backward.default.launched(") == 1
    (decision,) = [d for d in code.decisions if d.lowering == "linear_attention"]
    assert decision.fired and f"{T}" in decision.sites


@pytest.mark.codegen
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left(name):
    code = compiled(OTHERS[name], grad=name == "detached scores")
    assert WRITTEN not in code.source and "bmm" in code.source


@pytest.mark.parametrize("name", OTHER_STATES)
def test_other_states_are_left(name):
    assert WRITTEN not in compiled(OTHER_STATES[name], grad=name == "detached").source


def test_results_are_laid_out_as_the_program_views_them():
    """Keys that all heads share: a product's result has tokens in front of heads."""

    def merged(q, k, v):
        states = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        out = torch.einsum("bhtd,btde->bhte", q, states)
        return out.transpose(1, 2).view(4, T, H * 64)

    with inductor_ext.disable("attention"):
        inputs = meta(4, H, T, 128), meta(4, T, 128), meta(4, T, 64)
        assert WRITTEN in compile_for("h200", merged, *inputs, grad=True).forward


def test_large_heads_and_few_tokens_are_left():
    """Their states would be as large as the scores."""
    code = compile_for("h200", SPELLINGS["tril"], *(meta(64, 16, 300, 256) for _ in range(3)))
    assert WRITTEN not in code.source
    (left,) = [d for d in code.decisions if d.lowering == "linear_attention"]
    assert "states are as large" in left.reason


@pytest.mark.codegen
@pytest.mark.parametrize("name", SPELLINGS)
def test_numbers(name, monkeypatch):
    """The edited graph computes what the program does, on the CPU."""
    from inductor_ext.lowerings import linear_attention as lowering

    monkeypatch.setattr(lowering, "LEAST_BYTES", 0)
    monkeypatch.setattr(lowering, "TIMED", (torch.float32,))
    monkeypatch.setattr(lowering.compat_fx, "writes_triton", lambda device: True)
    make = torch.Generator().manual_seed(0)
    args = [torch.randn(1, 1, T, n, generator=make) for n in (4, 4, 3)]
    edited = []

    def backend(graph, _):
        lowering.rewrite(graph.graph)
        graph.recompile()
        edited.append(OP in str(graph.code).replace("torch.ops.", ""))
        return graph.forward

    torch._dynamo.reset()
    fn = SPELLINGS[name]
    out, right = torch.compile(fn, backend=backend)(*args), fn(*(t.double() for t in args))
    assert edited == [True] and (out - right).norm() <= 1e-5 * right.norm()
