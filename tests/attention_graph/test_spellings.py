"""Every spelling of attention becomes one operation, and computes what it did."""

import pytest
import torch
from edits import OP, edited, wide, with_gradients
from inductor_ext.lowerings import attention as lowering
from spellings import SPELLINGS, arguments

from inductor_ext import measure

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@DTYPES
@pytest.mark.parametrize("name", SPELLINGS)
def test_numbers(name, dtype, card_here):
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


def longer(args, dynamic):
    """Arguments with one token more where that is symbolic."""
    found = []
    for i, a in enumerate(args):
        for dim in dynamic.get(i, ()):
            a = torch.cat([a, a.narrow(dim, 0, 1)], dim)
        found.append(a)
    return found


DYNAMIC = {
    "grouped with mask": {0: (2,), 1: (2,), 2: (2,), 3: (2, 3)},
    "window": {0: (2,), 1: (2,), 2: (2,)},
    "buffer": {0: (2,), 1: (2,), 2: (2,)},
    "cache": {1: (2,), 2: (2,)},
    "added by the product": {0: (2,), 1: (2,), 2: (2,), 3: (2,)},
    "einsum": {0: (1,), 1: (1,), 2: (1,)},
    "packed": {0: (1,)},
    "sink column": {0: (2,), 1: (2,), 2: (2,)},
    "call with positions": {0: (2,), 1: (2,), 2: (2,)},
    "grouped queries": {0: (0, 2), 1: (0, 2), 2: (0, 2)},
}


def whole_blocks(q, k, v):
    count = k.shape[2] // 16 * 16
    last = torch.arange(k.shape[2], device=q.device) >= count
    return (q @ k.mT * 0.125).masked_fill(last, -torch.inf).softmax(-1) @ v


def test_what_is_divided_and_multiplied_is_no_size(card_here):
    """Of 48 tokens the whole blocks of 16 are all of them, of 51 they are not."""
    texts = []

    def backend(graph, _):
        lowering.rewrite(graph.graph)
        graph.recompile()
        texts.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(whole_blocks, backend=backend)
    for tokens in (48, 51):
        args = [a.detach() for a in arguments(("BHSD",) * 3, torch.float32, tokens=tokens)]
        for one in args:
            torch._dynamo.mark_dynamic(one, 2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), whole_blocks(*args))
    assert len(texts) == 1 and OP in texts[0]


@pytest.mark.parametrize("name", DYNAMIC)
def test_symbolic_sizes(name, card_here):
    """One program serves other lengths."""
    fn, shapes = SPELLINGS[name]
    args = [a.detach() for a in arguments(shapes, torch.float32, tokens=48, batch=3)]
    programs = []

    def counted(*args):
        programs.append(0)
        return fn(*args)

    _, text, decisions = edited(counted, args, dynamic=DYNAMIC[name])
    assert [d.fired for d in decisions] == [True], decisions
    assert text.count(OP) == 1 and "softmax" not in text
    more = longer(args, DYNAMIC[name])
    torch.testing.assert_close(edited(fn, more, dynamic=DYNAMIC[name])[0], fn(*more))


def test_a_tensor_of_one_number_widens_what_stands_beside_it(card_here):
    def fn(q, k, v):
        at = torch.arange(k.shape[2], dtype=torch.int8, device=q.device)
        at = at + torch.full((k.shape[2],), 100, dtype=torch.int64, device=q.device)
        return (q @ k.mT * 0.125 + at * 0.1).softmax(-1) @ v

    args = [a.detach() for a in arguments(("BHSD",) * 3, torch.float32, tokens=48)]
    out, text, _ = edited(fn, args)
    assert OP in text
    torch.testing.assert_close(out, fn(*args))


def test_an_expanded_parameter_has_a_gradient_per_element(card_here):
    def fn(q, k, v, bias):
        return (q @ k.mT * 0.125 + bias).softmax(-1) @ v

    args = arguments(("BHSD",) * 3, torch.float32, tokens=48)
    args.append(torch.randn(1, 1, 48, 48).expand(2, 8, 48, 48).requires_grad_())
    out, text, _ = edited(fn, args, grad=True)
    assert OP in text
    for own, right in zip(with_gradients(out, args), with_gradients(fn(*args), args), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)


LOOKED_AT = {
    "clone": lambda out: out.clone().view(-1),
    "reshape": lambda out: out.reshape(out.shape).view(-1),
    "parts of heads": lambda out: out.reshape(*out.shape[:3], 2, -1).view(-1),
    "of another order": lambda out: out.permute(0, 2, 1, 3).view(-1),
}


@pytest.mark.parametrize("look", LOOKED_AT)
def test_a_result_can_be_viewed_as_before(look, card_here):
    """Whatever the order of q in memory."""

    def fn(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.mT * 0.125).softmax(-1)
        turned = look == "of another order"
        return LOOKED_AT[look](
            torch.einsum(f"bhqk,bhkd->{'bqhd' if turned else 'bhqd'}", weights, v)
        )

    args = [a.detach() for a in arguments(("BSHD",) * 3, torch.float32, tokens=48)]
    out, text, _ = edited(fn, args)
    assert OP in text
    torch.testing.assert_close(out, fn(*args))


def test_the_text_does_not_depend_on_sizes(card_here):
    fn, shapes = SPELLINGS["cache"]
    reasons = set()
    for tokens in (48, 80):
        args = [a.detach() for a in arguments(shapes, torch.float32, tokens=tokens)]
        (decision,) = edited(fn, args)[2]
        reasons.add(decision.reason)
    assert len(reasons) == 1 and "columns, rows" in reasons.pop()


def test_masks_of_positions_read_nothing(card_here):
    fn, shapes = SPELLINGS["gathered positions"]
    args = [a.detach() for a in arguments(shapes, torch.float32, tokens=48)]
    (decision,) = edited(fn, args)[2]
    assert "le.Tensor(k, q)" in decision.reason and "x0" not in decision.reason


def test_an_offset_is_a_number_and_no_length_is_compiled_again(card_here):
    """20 steps of a growing cache: the first program is of its sizes, the second of all."""
    texts = []

    def fn(q, k, v, past):
        at = torch.arange(past, past + q.shape[2], device=q.device)
        later = torch.arange(k.shape[2], device=q.device)[None, :] > at[:, None]
        return (q @ k.mT * 0.125).masked_fill(later, -torch.inf).softmax(-1) @ v

    def backend(graph, _):
        lowering.rewrite(graph.graph)
        graph.recompile()
        texts.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend)
    with torch.no_grad():
        for i in range(20):
            q, k, v = torch.randn(2, 4, 16, 32), *torch.randn(2, 2, 4, 64 + i, 32)
            torch.testing.assert_close(compiled(q, k, v, 20 + i), fn(q, k, v, 20 + i))
    assert len(texts) == 2 and all(text.count(OP) == 1 for text in texts)
    assert "add.Tensor(n0, q)" in texts[-1]
