"""Graphs whose weights are dropped out: one operation, that draws as the program did."""

import re

import pytest
import torch
import torch.nn.functional as F
from edits import OP, WRITTEN, edited, wide, with_gradients
from inductor_ext.templates.attention_dropout import Dropout
from spellings import INF, arguments, causal, positions

from inductor_ext import measure
from inductor_ext.ops import _attention_dropout as drawing
from inductor_ext.testing import compile_for

BF16, FP32 = torch.bfloat16, torch.float32
BACKWARD = "inductor_ext.attention_backward.default.launched("
SEED = 11


def hidden(q):
    """Rows see the last 20 keys."""
    at = positions(q)
    return causal(q) | (at[:, None] - at > 20)


def probabilities(q, k):
    s = (q @ k.mT * 0.125).masked_fill(hidden(q), -INF)
    return s.softmax(-1, dtype=None if s.dtype == torch.float64 else torch.float32)


def factors(q, k, p):
    """What the operation multiplies weights by, of the next seed of torch's generator."""
    drop = Dropout(drawing.seed_of(q.device), p)
    return drawing.kept(drop, *q.shape[:2], 0, q.shape[2], k.shape[2]) * drop.scale


# Each is given its dropout, which a reference knows the outcome of.
def behind_the_cast(q, k, v, drop):
    return drop(probabilities(q, k).to(v.dtype), 0.1) @ v


def before_the_cast(q, k, v, drop):
    return drop(probabilities(q, k), 0.1).to(v.dtype) @ v


def einsum(q, k, v, drop):
    weights = drop(probabilities(q, k).to(v.dtype), 0.5)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2)


def beside_a_sink(q, k, v, drop):
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.125
    s = torch.cat([s, v[:, :, :1, :1].expand(-1, -1, s.shape[2], -1)], -1)
    return drop(s.softmax(-1)[..., :-1], 0.25) @ v


FORMS = [behind_the_cast, before_the_cast, einsum, beside_a_sink]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("fn", FORMS)
def test_numbers(fn, dtype, card_here):
    args = arguments(("BHSD",) * 3, dtype, tokens=32)

    def written(q, k, v):
        return fn(q, k, v, F.dropout)

    def given(q, k, v):
        torch.manual_seed(SEED)
        return fn(q, k, v, lambda w, p: w * factors(q, k, p).to(w.dtype))

    torch.manual_seed(SEED)
    out, text, (decision,) = edited(written, args, grad=True)
    assert decision.fired and text.count(OP) == 1
    assert "softmax" not in text and "dropout" not in text
    exact = wide(args)
    right, plain = with_gradients(given(*exact), exact), with_gradients(given(*args), args)
    for a, b, c in zip(with_gradients(out, args), right, plain, strict=True):
        verdict = measure.check(a, b, c)
        assert verdict.ok, verdict.reason


def masked_call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, ~hidden(q), dropout_p=0.1)


def test_calls_with_masks(card_here):
    args = [a.detach() for a in arguments(("BHSD",) * 3, FP32, tokens=32)]
    torch.manual_seed(SEED)
    out, text, _ = edited(masked_call, args)
    assert OP in text and "scaled_dot_product_attention" not in text
    torch.manual_seed(SEED)
    right = (probabilities(*args[:2]) * factors(*args[:2], 0.1)) @ args[2]
    torch.testing.assert_close(out, right)


@pytest.mark.parametrize("masked", [False, True])
def test_what_sdpa_has_is_sdpas(masked, card_here):
    """Its dropout is faster than ours, and what stock would find without a mask."""

    def fn(q, k, v):
        s = q @ k.mT * 0.125
        s = s.masked_fill(causal(q), -INF) if masked else s
        return F.dropout(s.softmax(-1), 0.1) @ v

    args = [a.detach() for a in arguments(("BHSD",) * 3, FP32, tokens=32)]
    _, text, (decision,) = edited(fn, args)
    assert decision.fired and OP not in text and "softmax" not in text
    assert f"dropout_p = 0.1, is_causal = {masked}, scale = 0.125" in text
    mean = sum(edited(fn, args)[0] for _ in range(10)) / 10
    right = F.scaled_dot_product_attention(*args, is_causal=masked)
    assert (mean - right).norm() <= 0.2 * right.norm()


def by_two(q, k, v):
    weights = F.dropout(probabilities(q, k), 0.5)
    return weights @ v - weights @ v.clone()


def of_copies(q, k, v):
    weights = probabilities(q[:, :1], k[:, :1]).expand(-1, v.shape[1], -1, -1)
    return F.dropout(weights, 0.5) @ v


@pytest.mark.parametrize(
    ("fn", "why"), [(by_two, "by another product"), (of_copies, "of repeated weights")]
)
def test_dropouts_that_are_not_one_product_s(fn, why, card_here):
    args = [a.detach() for a in arguments(("BHSD",) * 3, FP32, tokens=32)]
    out, text, decisions = edited(fn, args)
    assert OP not in text and decisions and all(why in d.reason for d in decisions)
    assert fn is not by_two or not out.any()


def test_a_site_that_can_not_be_placed_leaves_the_others(card_here):
    def fn(q, k, v):
        mixed = (q[0] @ k[0].mT).softmax(-1).view(4, -1, q.shape[2])
        other = mixed @ v[0, 0].expand(4, -1, -1)
        return probabilities(q, k) @ v, other

    args = [a.detach() for a in arguments(("BHSD",) * 3, FP32, tokens=32)]
    args = [torch.cat([a] * 6, 1)[:, :6] for a in args]
    _, text, decisions = edited(fn, args)
    assert text.count(OP) == 1 and any(d.fired for d in decisions)


def padded_call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, q[:, :1, None, :, 0] > 0, dropout_p=0.1)


def repeated_call(q, k, v):
    k, v = (t[:, ::2].repeat_interleave(2, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def twice(q, k, v):
    return F.dropout(F.dropout(probabilities(q, k), 0.1), 0.1) @ v


def by_hand(q, k, v):
    weights = probabilities(q, k)
    return (torch.rand_like(weights) > 0.1) * weights @ v / 0.9


def everything(q, k, v):
    return F.dropout(probabilities(q, k), 1.0) @ v


def mask_is_used(q, k, v):
    weights, kept = torch.native_dropout(probabilities(q, k), 0.1, True)
    return weights @ v, kept.sum()


def weights_are_used(q, k, v):
    weights = F.dropout(probabilities(q, k), 0.1)
    return weights @ v, weights.sum(-2)


OTHERS = {
    padded_call: "its mask is none of positions",
    repeated_call: "its mask is none of positions",
    twice: "dropped out twice",
    by_hand: "in a way that is not followed",
    everything: "dropped out with a probability of 1.0",
    mask_is_used: "uses a value in between",
    weights_are_used: "uses a value in between",
}


@pytest.mark.parametrize("fn", OTHERS)
def test_is_left(fn, card_here):
    args = [a.detach() for a in arguments(("BHSD",) * 3, FP32, tokens=32)]
    _, text, (decision,) = edited(fn, args)
    assert OP not in text and not decision.fired and OTHERS[fn] in decision.reason


class Layer(torch.nn.Module):
    """Attention with dropout, and one behind it."""

    def __init__(self):
        super().__init__()
        self.drop, self.behind = torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)

    def forward(self, q, k, v):
        weights = self.drop(probabilities(q, k).to(v.dtype))
        return self.behind(weights @ v)


@pytest.mark.codegen
def test_generated_code():
    """The seed is drawn once and kept for the backward; the other dropout stays Inductor's."""
    args = arguments(("BHSD",) * 3, BF16, tokens=256)
    code = compile_for("h200", Layer(), *args, grad=True)
    (decision,) = [d for d in code.decisions if d.lowering == "attention"]
    assert decision.fired
    assert code.forward.count(WRITTEN) == 1 and code.backward.count(BACKWARD) == 1
    assert "256, 256" not in code.source and "bmm" not in code.source
    (seeded,) = [line for line in code.forward.splitlines() if WRITTEN in line and "buf" in line]
    (used,) = [line for line in code.backward.splitlines() if BACKWARD in line and "buf" in line]
    assert seeded.endswith(", 0.1)") and used.endswith("inductor_randint_default, 0.1)")
    assert "aten.randint" in code.forward and "aten.randint.low_out" not in code.backward
    assert re.search(r"aten\.randint\.low_out\(.*\[2\]", code.forward)  # that of the other one
    out = compile_for("h200", Layer().eval(), *args, grad=True)
    assert "randint" not in out.source and WRITTEN in out.source


def test_eagers_own_numbers_are_left():
    args = arguments(("BHSD",) * 3, BF16, tokens=256)
    with torch._inductor.config.patch(fallback_random=True):
        code = compile_for("h200", Layer(), *args, grad=True)
    (decision,) = [d for d in code.decisions if d.lowering == "attention"]
    assert not decision.fired and "fallback_random" in decision.reason
