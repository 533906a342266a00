"""mHC on tensors of any shape and layout."""

import math
import sys
from pathlib import Path

import pytest
import torch

from inductor_ext import ops

sys.path.append(str(Path(__file__).parent))

from mhc_formulas import (  # noqa: F401
    N,
    _every_way,
    _seeded,
    _way,
    drawn,
    equal,
    gradients,
    judge,
    judge_gradients,
    ref_post,
    ref_post_pre,
    ref_pre,
    same,
    seeds_of,
)

# --- shapes and memory ----------------------------------------------------------------------------

LEADS = [(), (2, 1, 3), (3, 0)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_leading_dimensions(every_way, lead):
    x, y, post, comb, w, scale, base = drawn(lead)
    u, p, c = ops.mhc_pre(x, w, scale, base)
    assert (u.shape, p.shape, c.shape) == (y.shape, post.shape, comb.shape)
    assert (u.dtype, p.dtype, c.dtype) == (x.dtype, torch.float32, torch.float32)
    args = (x, y, post, comb, w, scale, base)
    judge(ops.mhc_post_pre, ref_post_pre, *args, iters=2)
    assert ops.mhc_head(x, w[:N].contiguous(), scale[:1], base[:N]).shape == y.shape
    judge_gradients(ops.mhc_post_pre, ref_post_pre, args, iters=2)


def test_no_tokens_have_gradients_of_zeros(way):
    args = drawn((0,))
    for grads, fn in (
        (args, ops.mhc_post_pre), ((args[0], *args[4:]), ops.mhc_pre), (args[:4], ops.mhc_post),
    ):  # fmt: skip
        for g, a in zip(gradients(fn, grads, seeds_of(fn, grads)), grads, strict=True):
            assert g.shape == a.shape and not g.any()


def strided(t):
    """The same values: transposed leading dimensions, every other element, and an odd offset."""
    spread = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), math.nan, dtype=t.dtype)
    spread[..., 1::2] = t
    yield "every other", spread[..., 1::2]
    shifted = torch.full((t.numel() + 1,), math.nan, dtype=t.dtype)
    shifted[1:] = t.flatten()
    yield "offset", shifted[1:].view(t.shape)
    if t.dim() > 1:
        yield "transposed", t.transpose(0, 1).contiguous().transpose(0, 1)
        padded = torch.full((*t.shape[:-1], t.shape[-1] + 3), math.nan, dtype=t.dtype)
        padded[..., : t.shape[-1]] = t
        yield "padded", padded[..., : t.shape[-1]]


@pytest.mark.parametrize("which", range(7))
def test_inputs_of_any_layout(way, which):
    args = drawn((2, 3), hidden=16)
    seeds = seeds_of(ref_post_pre, args, iters=2)
    with torch.no_grad():
        plain = ops.mhc_post_pre(*args, iters=2)
    straight = gradients(ops.mhc_post_pre, args, seeds, iters=2)
    for name, other in strided(args[which]):
        assert torch.equal(other, args[which])
        given = (*args[:which], other, *args[which + 1 :])
        leaves = [g.detach().requires_grad_() for g in given]  # the layouts stay
        outs = ops.mhc_post_pre(*leaves, iters=2)
        for a, b in zip(outs, plain, strict=True):
            torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-6, msg=name)
        for a, b in zip(torch.autograd.grad(outs, leaves, seeds), straight, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=f"gradient, {name}")


def test_incoming_gradients_of_any_layout(every_way):
    args = drawn((2, 3), hidden=16)
    seeds = seeds_of(ref_post_pre, args, iters=2)
    straight = gradients(ops.mhc_post_pre, args, seeds, iters=2)
    layouts = [list(strided(s)) for s in seeds]
    for kind in (2,) if every_way == "kernels" else range(4):
        given = [layout[kind][1] for layout in layouts]
        leaves = [a.detach().requires_grad_() for a in args]
        got = torch.autograd.grad(ops.mhc_post_pre(*leaves, iters=2), leaves, given)
        for a, b in zip(got, straight, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=layouts[0][kind][0])


def test_gradients_that_come_expanded(way):
    """As those of sum() and mean() do."""
    args = [a.requires_grad_() for a in drawn((5,))]
    for fn, given in ((ops.mhc_post_pre, args), (ops.mhc_pre, (args[0], *args[4:]))):
        outs = fn(*given)
        got = torch.autograd.grad(sum(o.sum() for o in outs), given)
        plain = torch.autograd.grad(fn(*given), given, [torch.ones_like(o) for o in outs])
        assert equal(got, plain)
    got = torch.autograd.grad(ops.mhc_post(*args[:4]).sum(), args[:4])
    plain = torch.autograd.grad(ops.mhc_post(*args[:4]), args[:4], torch.ones_like(args[0]))
    assert equal(got, plain)


def test_one_stream_expanded_to_all(every_way):
    """The first layer: a broadcast, whose gradient is the sum over the streams."""
    _, y, post, comb, w, scale, base = drawn((5,))
    h = torch.randn(5, 24).bfloat16()

    def first(fn):
        return lambda h, *rest: fn(h.unsqueeze(-2).expand(5, N, 24), *rest)

    judge_gradients(
        first(ops.mhc_post_pre), first(ref_post_pre), (h, y, post, comb, w, scale, base)
    )
    one = torch.randn(1, N, 24).bfloat16()  # and a token expanded

    def tokens(fn):
        return lambda x, *rest: fn(x.expand(5, N, 24), *rest)

    judge_gradients(tokens(ops.mhc_pre), tokens(ref_pre), (one, w, scale, base))


def test_nothing_is_written_over_or_handed_back(way):
    args = [a.requires_grad_() for a in drawn((3,))]
    kept = [a.detach().clone() for a in args]
    versions = [a._version for a in args]
    outs = (*ops.mhc_post_pre(*args), ops.mhc_post(*args[:4]), *ops.mhc_pre(args[0], *args[4:]))
    grads = torch.autograd.grad(outs, args, [torch.ones_like(o) for o in outs], retain_graph=True)
    again = torch.autograd.grad(outs, args, [torch.ones_like(o) for o in outs])
    assert equal(grads, again)
    assert equal([a.detach() for a in args], kept) and [a._version for a in args] == versions
    memory = [t.untyped_storage().data_ptr() for t in (*args, *outs)]
    assert len(set(memory)) == len(memory)
