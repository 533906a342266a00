"""The gradients of the mHC operations: kernels in the interpreter, against fp64 autograd."""

import contextlib
import pathlib
import sys

import pytest
import torch
from inductor_ext.templates import (
    mhc_post_backward,
    mhc_pre_backward,
    mhc_sinkhorn_backward,
)

from inductor_ext import measure
from inductor_ext.ops import _mhc_backward as backward
from inductor_ext.ops import _mhc_composed as composed
from inductor_ext.testing import launches_interpreted

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import reference

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 1e-6, 1e-6, 1e-6, 2.0
NAMES = {
    "pre": ("dX", "dW", "dscale", "dbase"),
    "collapse": ("dX", "dW", "dscale", "dbase"),
    "post": ("dX", "dY", "dpost", "dcomb"),
    "post_pre": ("dX", "dY", "dpost", "dcomb", "dW", "dscale", "dbase"),
}


@contextlib.contextmanager
def kernels(ranges=2):
    """The kernels run on CPU tensors in the interpreter; memory is NaN before it is written."""
    modules = mhc_pre_backward, mhc_post_backward, mhc_sinkhorn_backward
    cut = mhc_pre_backward.Tile
    with launches_interpreted(*modules), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "kernels_apply", backward.shapes_apply)
        patch.setattr(mhc_pre_backward, "_SHORTEST", 1)
        patch.setattr(
            mhc_pre_backward, "tile", lambda n, *_, **__: cut(16, 64, 2, ranges, 4, n // 2)
        )
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def operands(T, n, H, dtype, w_dtype=FP32, *, head=False, sharp=False):
    """(X, W, scale, base) and (Y, post, comb); ``sharp``: rows of comb near one-hot."""
    torch.manual_seed(0)
    X, W, scale, base = reference.draw(T, n, H, dtype, w_dtype=w_dtype, head=head)
    if sharp:
        base[2 * n :] += 25 * torch.eye(n).roll(1, 1).flatten()
    post, comb = torch.rand(T, n) * 2, torch.rand(T, n, n) + torch.eye(n).roll(1, 1) * 2
    return (X, W, scale, base), (torch.randn(T, H).to(dtype), post, comb)


def grads_of(outputs, grads, inputs):
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if g is not None]
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def leaves(tensors, dtype=None):
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def mixes_of(X, W):
    u, dtype = X.double().flatten(-2), FP64 if X.dtype == FP64 else FP32
    return (u @ W.double().mT).to(dtype), u.square().sum(-1).to(dtype)


def pre(given, grads, iters):
    """(ours, fp64's, eager's) gradients of pre."""
    wide, own = leaves(given, FP64), leaves(given)
    truth = grads_of(reference.pre(*wide, iters=iters), grads, wide)
    eager = grads_of(composed.pre(*own, iters, *EPS)[:3], grads, own)
    return backward.pre_backward(*given, *mixes_of(*given[:2]), *grads, iters, *EPS), truth, eager


def post_pre(given, boundary, grads, iters):
    X, W, scale, base = given
    all_of = (X, *boundary, W, scale, base)
    wide, own = leaves(all_of, FP64), leaves(all_of)
    outputs = reference.post_pre(*wide, dtype=X.dtype, iters=iters)
    X1 = outputs[0].detach().to(X.dtype)
    truth = grads_of(outputs, grads, wide)
    eager = grads_of(composed.post_pre(*own, iters, *EPS)[:4], grads, own)
    saved = X, *boundary, X1, W, scale, base, *mixes_of(X1, W)
    return backward.post_pre_backward(*saved, *grads, iters, *EPS), truth, eager


def judge(name, found):
    dtype = found[0][0].dtype
    for part, got, truth, eager in zip(NAMES[name], *found, strict=True):
        # The gradient that reaches a post through the next pre is rounded to X's dtype before.
        before = name == "post_pre" and part in ("dpost", "dcomb")
        verdict = measure.check(got, truth, eager, rounding=dtype if before else None)
        assert verdict.ok, f"{part}: {verdict.reason}"


def pre_grads(T, n, H, dtype):
    return torch.randn(T, H).to(dtype), torch.randn(T, n), torch.randn(T, n, n)


CASES = {
    "even": (32, 4, 64, BF16, FP32),
    "odd": (19, 4, 69, BF16, BF16),
    "one token": (1, 4, 64, BF16, FP32),
    "two streams": (33, 2, 72, FP16, FP32),
    "eight streams": (5, 8, 64, BF16, FP32),
    "fp32": (18, 4, 36, FP32, BF16),
}


@pytest.mark.parametrize("case", CASES)
def test_pre(case):
    T, n, H, dtype, w_dtype = CASES[case]
    given, _ = operands(T, n, H, dtype, w_dtype)
    with kernels():
        judge("pre", pre(given, pre_grads(T, n, H, dtype), 5))


@pytest.mark.parametrize("case", CASES)
def test_post_pre(case):
    T, n, H, dtype, w_dtype = CASES[case]
    given, boundary = operands(T, n, H, dtype, w_dtype)
    grads = torch.randn(T, n, H).to(dtype), *pre_grads(T, n, H, dtype)
    with kernels():
        judge("post_pre", post_pre(given, boundary, grads, 5))


@pytest.mark.parametrize("case", CASES)
def test_post(case):
    T, n, H, dtype, w_dtype = CASES[case]
    small, transposed = w_dtype, w_dtype == FP32
    (X, *_), (Y, p, comb) = operands(T, n, H, dtype)
    p, comb = p.to(small), comb.to(small)
    comb = comb.mT if transposed else comb
    inputs, grad = (X, Y, p, comb), torch.randn(T, n, H).to(dtype)
    wide, own = leaves(inputs, FP64), leaves(inputs)
    truth = grads_of([reference.post(*wide)], [grad], wide)
    eager = grads_of([composed.post(*own)], [grad], own)
    with kernels():
        judge("post", (backward.post_backward(*inputs, grad), truth, eager))


@pytest.mark.parametrize("of_sums", [False, True])
@pytest.mark.parametrize("case", ["even", "two streams"])
def test_collapse(case, of_sums):
    """The model's head, and with more columns, of whose sums there are gradients too."""
    T, n, H, dtype, w_dtype = CASES[case]
    (X, W, scale, base), _ = operands(T, n, H, dtype, w_dtype, head=not of_sums)
    given = X, W, scale[:1], base[:n]
    grads = [torch.randn(T, H).to(dtype)]
    if of_sums:
        grads += [torch.randn(T, W.shape[0]), torch.randn(T) / H]
    wide, own = leaves(given, FP64), leaves(given)
    right = reference.head(*wide) if not of_sums else composed.collapse(*wide, *EPS[:2])
    truth = grads_of([right] if not of_sums else right, grads, wide)
    eager = grads_of(composed.collapse(*own, *EPS[:2])[: len(grads)], grads, own)
    saved = *given, *mixes_of(*given[:2])
    grads += [None] * (3 - len(grads))
    for by in (kernels, contextlib.nullcontext):
        with by():
            found = backward.collapse_backward(*saved, *grads, *EPS[:2])
            judge("collapse", (found, truth, eager))


@pytest.mark.parametrize(
    ("n", "iters", "powers"),
    [(2, 20, False), (4, 1, False), (4, 20, False), (4, 21, False), (4, 45, False), (8, 20, False),
     (4, 3, True)],
)  # fmt: skip
def test_sinkhorn(n, iters, powers):
    logits, grad = torch.randn(19, n, n) * 3, torch.randn(19, n, n)
    logits[3] = 30 * torch.eye(n).roll(1, 1)
    wide = logits.double().requires_grad_()
    given = iters, 1e-6, powers
    (truth,) = torch.autograd.grad(composed.sinkhorn(wide, *given), wide, grad.double())
    with kernels():
        got = backward.sinkhorn_backward(logits, grad, *given)
    verdict = measure.check(got, truth, truth.float())
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("by", [kernels, contextlib.nullcontext], ids=["kernels", "composed"])
def test_powers_of_e(by):
    """A Sinkhorn that begins with exp(logits), whose row sums have an eps that is felt."""
    T, n, H = 5, 4, 24
    (X, W, scale, base), _ = operands(T, n, H, BF16)
    given, options = (X, W, scale, base - 4), (3, 1e-6, 1e-6, 0.05, 2.0, True)
    grads = pre_grads(T, n, H, BF16)
    wide, own = leaves(given, FP64), leaves(given)
    names = ("rms_eps", "pre_eps", "sinkhorn_eps", "post_mult", "powers")
    right = reference.pre(*wide, iters=3, **dict(zip(names, options[1:], strict=True)))
    truth = grads_of(right, grads, wide)
    eager = grads_of(composed.pre(*own, *options)[:3], grads, own)
    saved = *given, *mixes_of(*given[:2])
    with by():
        judge("pre", (backward.pre_backward(*saved, *grads, *options), truth, eager))


@pytest.mark.parametrize(("iters", "sharp"), [(1, False), (20, True)])
def test_rounds_and_sharp_rows(iters, sharp):
    given, _ = operands(5, 4, 24, BF16, sharp=sharp)
    grads = pre_grads(5, 4, 24, BF16)
    with kernels():
        judge("pre", pre(given, grads, iters))


@pytest.mark.parametrize("missing", [(0,), (1, 2), (0, 2), (0, 1)])
def test_gradients_that_are_none(missing):
    given, boundary = operands(3, 4, 24, BF16)
    grads = [None if k in missing else g for k, g in enumerate(pre_grads(3, 4, 24, BF16))]
    with kernels():
        judge("pre", pre(given, grads, 3))
        dx1 = torch.randn(3, 4, 24).to(BF16) if 0 in missing else None
        judge("post_pre", post_pre(given, boundary, (dx1, *grads), 3))


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16])
def test_composed(dtype):
    given, boundary = operands(6, 4, 40, dtype, FP64 if dtype == FP64 else FP32)
    if dtype == FP64:
        given, boundary = ([t.double() for t in some] for some in (given, boundary))
    grads = torch.randn(6, 4, 40).to(dtype), *pre_grads(6, 4, 40, dtype)
    judge("pre", pre(given, grads[1:], 5))
    judge("post_pre", post_pre(given, boundary, grads, 5))


def test_autocast_changes_nothing():
    given, _ = operands(6, 4, 40, FP32)
    saved, grads = (*given, *mixes_of(*given[:2])), pre_grads(6, 4, 40, FP32)
    expected = backward.pre_backward(*saved, *grads, 5, *EPS)
    with torch.autocast("cpu", torch.bfloat16):
        got = backward.pre_backward(*saved, *grads, 5, *EPS)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("tokens", [(2, 3), (0,), (1, 0), ()])
def test_leading_dimensions(tokens):
    """Any of them, also of operands that are not contiguous; no tokens are fine."""
    size = torch.Size(tokens).numel()
    (X, W, scale, base), (Y, p, comb) = operands(size, 4, 64, BF16)
    small = pre_grads(size, 4, 64, BF16)
    flat = X, W, scale, base, *mixes_of(X, W), *small
    apart = (
        *(
            (t, f)
            for t, f in zip((X, Y, *small, *mixes_of(X, W)), (2, 1, 1, 1, 2, 1, 0), strict=True)
        ),
    )
    X, Y, dU, dpost, dcomb, mixes, sqrsum = (
        torch.stack([t, t], -1)[..., 0].reshape((*tokens, *t.shape[t.dim() - kept :]))
        for t, kept in apart
    )
    with kernels():
        got = backward.pre_backward(X, W, scale, base, mixes, sqrsum, dU, dpost, dcomb, 3, *EPS)
        expected = backward.pre_backward(*flat, 3, *EPS)
        of_post = backward.post_backward(
            X, Y, p.reshape(*tokens, 4), comb.reshape(*tokens, 4, 4), X
        )
    for mine, wanted in zip(got, expected, strict=True):
        assert torch.equal(mine.reshape(wanted.shape), wanted)
    assert got[0].shape == X.shape and [g.shape for g in of_post] == [
        X.shape, Y.shape, (*tokens, 4), (*tokens, 4, 4)
    ]  # fmt: skip
    if not size:
        assert all(not g.any() for g in got)


def test_bits():
    """The same of every run; of a token also beside other tokens."""
    given, boundary = operands(40, 4, 64, BF16)
    grads = torch.randn(40, 4, 64).to(BF16), *pre_grads(40, 4, 64, BF16)
    saved = *boundary, given[0], *given[1:], *mixes_of(*given[:2])
    with kernels():
        runs = [backward.post_pre_backward(given[0], *saved, *grads, 5, *EPS) for _ in range(2)]
        few = [t[:7] for t in (*boundary, given[0])]
        mixes = [t[:7] for t in mixes_of(*given[:2])]
        part = backward.post_pre_backward(
            given[0][:7], *few, *given[1:], *mixes, *(g[:7] for g in grads), 5, *EPS
        )
    assert all(map(torch.equal, *runs))
    assert all(torch.equal(a[:7], b) for a, b in zip(runs[0][:4], part[:4], strict=True))
