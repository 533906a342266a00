"""What looks like attention and is left as it is, with the reason."""

import pytest
import torch
import torch.nn.functional as F
from edits import OP, edited
from inductor_ext.lowerings import attention_replacement
from spellings import INF, SPELLINGS, arguments, causal

import inductor_ext
from inductor_ext.testing import compile_for


def scores(q, k):
    return q @ k.transpose(-1, -2) * 0.125


def returned(q, k, v):
    weights = scores(q, k).softmax(-1)
    return weights @ v, weights


def scores_returned(q, k, v):
    found = scores(q, k)
    return found.softmax(-1) @ v, found


def earlier_value_used(q, k, v):
    found = q @ k.mT
    flat = found.view(-1)
    found *= 0.125
    return found.softmax(-1) @ v, flat * 2


def of_queries(q, k, v):
    return scores(q, k).softmax(-2) @ v


def mixed_heads(q, k, v):
    weights = scores(q, k).softmax(-1)
    return torch.einsum("hg,bgqk->bhqk", v[0, :, :8, 0], weights) @ v


def mixed_scores(q, k, v):
    mixed = torch.einsum("hg,bgqk->bhqk", v[0, :, :8, 0], scores(q, k))
    return mixed.softmax(-1) @ v


def largest_only(q, k, v):
    found = scores(q, k)
    least = found.topk(4, -1).values[..., -1:]
    return found.masked_fill(found < least, -INF).softmax(-1) @ v


def running(q, k, v):
    return scores(q, k).cumsum(-1).softmax(-1) @ v


def masked_afterwards(q, k, v):
    return (scores(q, k).softmax(-1) * causal(q).logical_not()) @ v


def of_a_mask_written_to(q, k, v):
    mask = torch.zeros_like(q[..., :1]).expand(*q.shape[:3], q.shape[2]).contiguous()
    first = mask[..., :1]
    mask.fill_(1.0)
    return (scores(q, k) + mask).softmax(-1) @ v + first


def of_keys_written_to_later(q, k, v):
    keys = k.new_empty(k.shape)
    keys[..., :32] = k[..., :32]
    keys[..., 32:] = k[..., 32:]
    found = q @ keys.transpose(2, 3) * 0.125
    keys[..., :32] = 0
    return found.softmax(-1) @ v + keys


def relative_positions(q, k, v):
    """A key of a distance for each pair (https://arxiv.org/abs/1803.02155)."""
    n = q.shape[2]
    i = torch.arange(n, device=q.device)
    table = k[0, 0].repeat(2, 1)[i[None, :] - i[:, None] + n]
    found = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, table)
    return (found * 0.125).softmax(-1) @ v


def one_more_than_the_sum(q, k, v):
    weights = scores(q, k).exp()
    return (weights / (1 + weights.sum(-1, keepdim=True))) @ v


def wide(q, k, v):
    return scores(q.double(), k.double()).softmax(-1) @ v.double()


OTHERS = {
    returned: "output uses a value in between",
    scores_returned: "output uses a value in between",
    earlier_value_used: "written to in this graph",
    of_queries: "along another dimension than that of the keys",
    mixed_heads: "",
    mixed_scores: "",
    largest_only: "is not pointwise on scores",
    running: "its weights are of no product",
    masked_afterwards: "",
    of_a_mask_written_to: "written to in this graph",
    of_keys_written_to_later: "written to in this graph",
    relative_positions: "its keys are others for each query row",
    one_more_than_the_sum: "",
    wide: "expected in one of fp16, bf16 and fp32",
}


@pytest.mark.parametrize("fn", OTHERS, ids=lambda fn: fn.__name__)
def test_is_left(fn, card_here):
    args = [a.detach() for a in arguments(("BHSD",) * 3, torch.bfloat16, tokens=32)]
    _, text, decisions = edited(fn, args)
    assert OP not in text
    if OTHERS[fn]:
        (decision,) = decisions
        assert not decision.fired and OTHERS[fn] in decision.reason


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "heads": 2}])
def test_plain_calls_are_left_to_torch(options, card_here):
    heads = options.pop("heads", None)
    q, k, v = (torch.randn(2, n, 32, 64) for n in (8, heads or 8, heads or 8))

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads is not None, **options)

    _, text, decisions = edited(fn, [q, k, v])
    assert OP not in text and decisions == []


def test_only_on_a_card():
    fn, shapes = SPELLINGS["window"]
    args = [a.detach() for a in arguments(shapes, torch.float32, tokens=32)]
    _, text, (decision,) = edited(fn, args)
    assert OP not in text and decision.reason == "it is not on a card"


@pytest.mark.parametrize("symbolic", [False, True])
def test_only_where_scores_or_keys_are_large(symbolic, card_here, monkeypatch):
    """Of known sizes, of others, and where a CUDA graph is replayed, each from its own size on."""
    fn, shapes = SPELLINGS["window"]
    args = [a.detach() for a in arguments(shapes, torch.float32, tokens=32, batch=2)]
    dynamic = {i: (0,) for i in range(3)} if symbolic else None
    scores, keys = 2 * 8 * 32 * 32 * 4, 2 * 8 * 32 * 2 * 64 * 4

    def fires(known, other, graphs=False):
        monkeypatch.setattr(
            attention_replacement, "LEAST_REPLAYED" if graphs else "LEAST_STATIC", known
        )
        monkeypatch.setattr(attention_replacement, "LEAST_SCORES", other[0])
        monkeypatch.setattr(attention_replacement, "LEAST_KEYS", other[1])
        with torch._inductor.config.patch({"triton.cudagraphs": graphs}):
            _, text, (decision,) = edited(fn, args, dynamic=dynamic)
        assert (OP in text) is decision.fired
        return decision.fired

    never = scores + 1, keys + 1
    assert not fires(never, never) and not fires(never, never, graphs=True)
    for enough in ((scores, keys + 1), (scores + 1, keys)):
        assert fires(enough, never) is not symbolic
        assert fires(never, enough) is symbolic
        assert fires(enough, never, graphs=True)


def test_heads_that_have_no_kernels(card_here):
    def fn(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    args = [torch.randn(1, 1, 16, n, requires_grad=True) for n in (320, 320, 16)]
    _, text, (decision,) = edited(fn, args, grad=True)
    assert OP not in text and "its heads are of 320" in decision.reason
    assert OP in edited(fn, args)[1]


@pytest.mark.codegen
def test_switched_off():
    fn, shapes = SPELLINGS["window"]
    with inductor_ext.disable("attention"):
        code = compile_for("h200", fn, *arguments(shapes, torch.bfloat16, tokens=256))
    assert OP not in code.source


@pytest.mark.codegen
def test_programs_without_python_hold_no_such_operation():
    fn, shapes = SPELLINGS["window"]
    args = arguments(shapes, torch.bfloat16, tokens=256)
    with torch._inductor.config.patch(cpp_wrapper=True):
        code = compile_for("h200", fn, *(a.detach() for a in args))
    (decision,) = [d for d in code.decisions if d.lowering == "attention"]
    assert not decision.fired and "C++ wrapper" in decision.reason
    assert "inductor_ext" not in code.source
