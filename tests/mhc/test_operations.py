"""The mHC operations as torch sees them: registration, gradients, compiled programs."""

import pytest
import reference
import torch

from inductor_ext import ops
from inductor_ext.testing import compile_for

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
        "mhc_head": ([X, W[:n].clone(), scale[:1].clone(), base[:n].clone()], (1e-6, 1e-6)),
        "mhc_pre_from_mixes": (
            [torch.randn(2, T, n * (n + 2), dtype=dtype), torch.rand(2, T, dtype=dtype) + 1, X,
             scale, base],
            (3, *V4[1:]),
        ),
        "sinkhorn": ([torch.randn(T, n, n, dtype=dtype)], (3, 1e-6)),
    }  # fmt: skip
    return given[name]


NAMES = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head", "mhc_pre_from_mixes", "sinkhorn")


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
    kept = {"mhc_pre": 3, "mhc_post_pre": 4, "mhc_head": 1}.get(name)

    def outputs(*given):
        found = op(*given, *options)
        return found[:kept] if isinstance(found, tuple) else found

    assert torch.autograd.gradcheck(outputs, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


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


@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [None, True])
def test_kernels_of_a_compiled_program(dynamic):
    T, n, H = 4096, 4, 1024
    X, Y = torch.empty(T, n, H, dtype=BF16), torch.empty(T, H, dtype=BF16)
    W, scale, base = torch.empty(24, n * H), torch.empty(3), torch.empty(24)

    def layer(X, Y, W, scale, base):
        U, post, comb = ops.mhc_pre(X, W, scale, base)
        return U, ops.mhc_post(X, Y, post, comb)

    with torch.device("meta"):
        code = compile_for("h200", layer, X, Y, W, scale, base, dynamic=dynamic)
    names = [k.name.rpartition("_")[0] for k in code.kernels]
    assert names == ["cut_kernel", "projection_kernel", "fuse_kernel", "post_kernel"]
