"""mHC under autograd, its modes, and the transforms of torch.func."""

import sys
from pathlib import Path

import pytest
import torch
from torch.func import grad, vmap

from inductor_ext import ops

sys.path.append(str(Path(__file__).parent))

from mhc_formulas import (  # noqa: F401
    EPS,
    N,
    _every_way,
    _seeded,
    _way,
    drawn,
    equal,
    gradients,
    in_fp64,
    judge_gradients,
    ref_head,
    ref_post_pre,
    ref_pre,
    ref_sinkhorn,
    same,
    seeds_of,
)

# --- autograd and transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("used", [(0,), (1, 3)], ids=str)
def test_outputs_that_nobody_uses(every_way, used):
    args = drawn((4,))
    seeds = [s if i in used else None for i, s in enumerate(seeds_of(ref_post_pre, args))]
    judge_gradients(ops.mhc_post_pre, ref_post_pre, args, seeds)
    if 3 not in used:
        given = (args[0], *args[4:])
        seeds = [s if i in used else None for i, s in enumerate(seeds_of(ref_pre, given))]
        judge_gradients(ops.mhc_pre, ref_pre, given, seeds)


def test_inputs_that_want_no_gradient(way):
    args = drawn((4,))
    seeds = seeds_of(ref_post_pre, args)
    whole = gradients(ops.mhc_post_pre, args, seeds)
    for i in range(len(args)):
        leaves = [a.detach().requires_grad_(j == i) for j, a in enumerate(args)]
        outs = ops.mhc_post_pre(*leaves)
        wanted = [(o, s) for o, s in zip(outs, seeds, strict=True) if o.requires_grad]
        (got,) = torch.autograd.grad([o for o, _ in wanted], [leaves[i]], [s for _, s in wanted])
        torch.testing.assert_close(got, whole[i], rtol=1e-6, atol=1e-6)


def test_without_gradients_the_bits_are_the_same(way):
    args = drawn((4,))
    leaves = [a.detach().requires_grad_() for a in args]
    recorded = ops.mhc_post_pre(*leaves)
    assert all(o.requires_grad for o in recorded)
    with torch.no_grad():
        silent = ops.mhc_post_pre(*leaves)
    with torch.inference_mode():
        inferred = ops.mhc_post_pre(*args)
        cloned = ops.mhc_post_pre(*(a.clone() for a in args))
    assert not any(o.requires_grad for o in silent)
    for other in (silent, inferred, cloned):
        assert equal([o.detach() for o in recorded], list(other))


def test_autocast_changes_nothing(way):
    args = drawn((4,))
    seeds = seeds_of(ref_post_pre, args)
    plain, grads = ops.mhc_post_pre(*args), gradients(ops.mhc_post_pre, args, seeds)
    with torch.autocast(args[0].device.type, torch.bfloat16):
        cast = ops.mhc_post_pre(*args)
        leaves = [a.detach().requires_grad_() for a in args]
        outs = ops.mhc_post_pre(*leaves)
    inside = torch.autograd.grad(outs, leaves, seeds)  # torch wants a backward outside
    assert equal(list(plain), list(cast))
    assert equal(list(grads), list(inside))


def small(fn):
    """Arguments in fp64 that numerical differentiation can afford."""
    x, y, post, comb, w, scale, base = in_fp64(drawn((2,), 2, 3))
    return {
        "pre": (x, w, scale, base), "post": (x, y, post, comb),
        "post_pre": (x, y, post, comb, w, scale, base),
        "head": (x, w[:2].clone(), scale[:1].clone(), base[:2].clone()),
        "sinkhorn": (torch.randn(2, 3, 3).double()[:, :2, :2].contiguous(),),
    }[fn]  # fmt: skip


FUNCTIONS = {
    "pre": lambda *a: ops.mhc_pre(*a, iters=3), "post": lambda *a: ops.mhc_post(*a),
    "post_pre": lambda *a: ops.mhc_post_pre(*a, iters=3), "head": lambda *a: ops.mhc_head(*a),
    "sinkhorn": lambda *a: ops.sinkhorn(*a, iters=3),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_and_their_gradients_by_differences(name):
    args = [a.requires_grad_() for a in small(name)]
    assert torch.autograd.gradcheck(FUNCTIONS[name], args, fast_mode=True)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], args, fast_mode=True)


def test_gradients_of_gradients_of_a_16_bit_residual(way):
    """Under create_graph: a penalty on the gradient by X, differentiated by everything."""
    args = drawn((3,))
    x, rest = args[0], args[4:]

    def penalty(fn, given):
        leaves = [g.detach().clone().requires_grad_() for g in given]
        outs = fn(*leaves)
        torch.manual_seed(5)
        first = torch.autograd.grad(
            outs, leaves[1:], [torch.randn(o.shape).to(o.dtype) for o in outs], create_graph=True
        )
        total = sum(f.square().sum() for f in first)
        return torch.autograd.grad(total, leaves, allow_unused=True)

    given = (x, *rest)
    same(penalty(ops.mhc_pre, given), penalty(ref_pre, in_fp64(given)), penalty(ref_pre, given))


def test_transforms():
    x, y, post, comb, w, scale, base = drawn((3, 2), dtype=torch.float32)
    whole = ops.mhc_post_pre(x, y, post, comb, w, scale, base)
    tokens = (0, 0, 0, 0, None, None, None)
    for a, b in zip(vmap(ops.mhc_post_pre, tokens)(x, y, post, comb, w, scale, base), whole,
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)

    def loss(w, x):
        u, p, c = ops.mhc_pre(x, w, scale, base)
        return u.square().sum() + (p * p).sum() + c.pow(3).sum()

    def ref_loss(w, x):
        u, p, c = ref_pre(x, w, scale, base)
        return u.square().sum() + (p * p).sum() + c.pow(3).sum()

    torch.testing.assert_close(grad(loss)(w, x), grad(ref_loss)(w, x), rtol=1e-4, atol=1e-5)
    per_sample = vmap(grad(loss), (None, 0))(w, x)
    torch.testing.assert_close(per_sample, vmap(grad(ref_loss), (None, 0))(w, x), rtol=1e-4,
                               atol=1e-5)  # fmt: skip
    torch.testing.assert_close(per_sample.sum(0), grad(loss)(w, x), rtol=1e-4, atol=1e-5)
    few = ops.sinkhorn(comb.log())
    jacobian = torch.func.jacrev(ops.sinkhorn)(comb[0, 0].log())
    assert jacobian.shape == (N, N, N, N)
    torch.testing.assert_close(few, ref_sinkhorn(comb.log()))
    head = vmap(ops.mhc_head, (0, None, None, None))(x, w[:N], scale[:1], base[:N])
    torch.testing.assert_close(head, ref_head(x, w[:N], scale[:1], base[:N]))


def test_batched_gradients(way):
    """torch.autograd.grad(is_grads_batched): the backward itself under vmap."""
    x, *_, w, scale, base = drawn((3,), dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (x, w, scale, base)]
    outs = ops.mhc_pre(*leaves)
    seeds = [torch.randn(2, *o.shape) for o in outs]
    both = torch.autograd.grad(outs, leaves, seeds, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        single = torch.autograd.grad(outs, leaves, [s[i] for s in seeds], retain_graph=True)
        for b, s in zip(both, single, strict=True):
            assert (b[i] - s).norm() < 2e-5 * s.norm()  # each may be 1e-5 off


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
CONSTANTS = (3, EPS, EPS, EPS, 2.0)


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post", "mhc_post_pre", "mhc_collapse"])
def test_opcheck(name):
    x, y, post, comb, w, scale, base = (t.requires_grad_() for t in drawn((2, 3), 2, 8))
    args = {
        "mhc_pre": (x, w, scale, base, *CONSTANTS), "mhc_post": (x, y, post, comb),
        "mhc_post_pre": (x, y, post, comb, w, scale, base, *CONSTANTS),
        "mhc_collapse": (x, w, scale.detach()[:1].clone(), base.detach()[:2].clone(), EPS, EPS),
    }[name]  # fmt: skip
    assert ops.mhc_pre  # its import registers the operations
    torch.library.opcheck(getattr(torch.ops.inductor_ext, name).default, args, test_utils=CHECKS)
