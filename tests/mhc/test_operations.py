"""The mHC operations as torch sees them: registration, gradients, compiled programs."""

import functools

import pytest
import reference
import torch
from inductor_ext.templates import mhc_gluon_launch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from inductor_ext import ops
from inductor_ext.testing import compile_for, run_interpreted

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
V4 = (20, 1e-6, 1e-6, 1e-6, 2.0)


def inputs(name, dtype=FP32, T=3, n=2, H=8):
    X, W, scale, base = (t.to(dtype) for t in reference.draw(T, n, H, FP32))
    Y = torch.randn(T, H, dtype=dtype)
    post, comb = torch.rand(T, n, dtype=dtype), torch.rand(T, n, n, dtype=dtype)
    given = {
        "mhc_pre": ([X, W, scale, base], (3, *V4[1:])),
        "mhc_post": ([X, Y, post, comb], ()),
        "mhc_post_pre": ([X, Y, post, comb, W, scale, base], (3, *V4[1:])),
        "mhc_collapse": ([X, W, scale[:1].clone(), base[:n].clone()], (1e-6, 1e-6)),
        "mhc_pre_from_mixes": (
            [torch.randn(2, T, n * (n + 2), dtype=dtype), torch.rand(2, T, dtype=dtype) + 1, X,
             scale, base],
            (3, *V4[1:]),
        ),
        "sinkhorn": ([torch.randn(T, n, n, dtype=dtype)], (3, 1e-6)),
    }  # fmt: skip
    return given[name]


NAMES = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_collapse", "mhc_pre_from_mixes", "sinkhorn")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    tensors, options = inputs(name)
    tensors = [t.requires_grad_() for t in tensors]
    op = getattr(torch.ops.inductor_ext, name).default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, (*tensors, *options), test_utils=tests)


@pytest.mark.parametrize("name", NAMES)
def test_first_and_second_gradients(name):
    tensors, options = inputs(name, FP64, T=2, H=3)
    tensors = [t.requires_grad_() for t in tensors]
    op = getattr(torch.ops.inductor_ext, name)
    kept = {"mhc_pre": 3, "mhc_post_pre": 4}.get(name)

    def outputs(*given):
        found = op(*given, *options)
        return found[:kept] if isinstance(found, tuple) else found

    assert torch.autograd.gradcheck(outputs, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


def test_a_block_of_layers_is_replayed():
    """torch's selective checkpoint keeps a block's first streams and the products in its sublayers:
    the same gradients bit for bit, and nothing of mHC is kept."""
    X, W, scale, base = (t.requires_grad_() for t in reference.draw(5, 4, 16, BF16))
    thin = torch.randn(16, 16).to(BF16).requires_grad_()
    kept = []

    def block(x):
        for _ in range(3):
            u, post, comb = ops.mhc_pre(x, W, scale, base)
            x = ops.mhc_post(x, torch.nn.functional.silu(u @ thin), post, comb)
        return x

    def policy(ctx, op, *args, **options):
        keeps = op is torch.ops.aten.mm.default and args[0].dtype == BF16
        kept.append(keeps)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    stored = torch.autograd.grad(block(X).float().square().sum(), (X, W, scale, base, thin))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    replayed = checkpoint(block, X, use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(replayed.float().square().sum(), (X, W, scale, base, thin))
    assert sum(kept) in (3, 6) and all(map(torch.equal, stored, found))


@pytest.mark.parametrize("used", ["U", "post", "comb"])
def test_only_one_output_is_differentiated(used):
    given = [t.requires_grad_() for t in reference.draw(3, 2, 8, FP32)]
    which = ("U", "post", "comb").index(used)
    found = torch.ops.inductor_ext.mhc_pre(*given, *V4)[which]
    right = reference.pre(*given)[which]
    mine = torch.autograd.grad(found.sin().sum(), given)
    theirs = torch.autograd.grad(right.sin().sum(), given)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_transforms():
    X, W, scale, base = reference.draw(3, 2, 8, FP32)
    mapped = torch.func.vmap(lambda x: ops.mhc_pre(x, W, scale, base)[0])(X)
    torch.testing.assert_close(mapped, ops.mhc_pre(X, W, scale, base)[0])
    slope = torch.func.grad(lambda x: ops.mhc_pre(x, W, scale, base)[0].sum())(X)
    own = X.clone().requires_grad_()
    (right,) = torch.autograd.grad(ops.mhc_pre(own, W, scale, base)[0].sum(), own)
    torch.testing.assert_close(slope, right)


def layer(X, Y, W, scale, base):
    U, post, comb = ops.mhc_pre(X, W, scale, base)
    return U, *ops.mhc_post_pre(X, Y, post, comb, W, scale, base)


@pytest.mark.codegen
def test_kernels_of_a_compiled_program():
    given = [torch.empty(t.shape, dtype=t.dtype) for t in reference.draw(4096, 4, 1024)]
    given.insert(1, torch.empty(4096, 1024, dtype=BF16))
    code = compile_for("h200", layer, *given)
    names = [k.name.rpartition("_")[0] for k in code.kernels]
    pre = ["cut_kernel", "projection_kernel", "fuse_kernel", "comb_kernel"]
    assert sorted(set(names)) == sorted([*pre, "post_kernel"])
    assert code.graphs[0].count(".run(") == 2 * len(pre) + 1


@pytest.mark.codegen
def test_a_boundary_of_wide_layers_is_one_call():
    """X' is projected where it is made: what follows a layer is one operation with launches of its
    own, of any number of tokens."""
    given = [torch.empty(t.shape, dtype=t.dtype) for t in reference.draw(64, 4, 2048)]
    given.insert(1, torch.empty(64, 2048, dtype=BF16))
    code = compile_for("h200", layer, *given, dynamic={0: {0: None}, 1: {0: None}})
    assert code.graphs[0].count("mhc_post_pre_of_any_size.default(") == mhc_gluon_launch.available()


@pytest.mark.codegen
def test_a_compiled_program_of_any_number_of_tokens():
    X, W, scale, base = reference.draw(5, 2, 40)
    given = X, torch.randn(5, 40).to(BF16), W, scale, base
    code = compile_for("h200", layer, *given, dynamic={0: {0: None}, 1: {0: None}})
    assert "mhc_pre_of_any_size" in code.graphs[0]
    more = [torch.cat([t, t]) if i < 2 else t for i, t in enumerate(given)]
    for tensors in (given, more):
        with torch.no_grad():
            right = layer(*tensors)
        for mine, theirs in zip(run_interpreted(code, *tensors), right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
