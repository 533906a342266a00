"""The gradients of mHC on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import pytest
import torch

from inductor_ext import measure
from inductor_ext.ops import _mhc_backward as backward
from inductor_ext.ops import _mhc_composed as composed

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ITERS, EPS = 20, (1e-6, 1e-6, 1e-6, 2.0)
SIZES = [
    (8192, 4, 4096, BF16, FP32),
    (4096, 4, 7168, BF16, FP32),
    (16384, 4, 4096, BF16, FP32),
    (3333, 4, 5120, BF16, FP32),
    (799, 4, 4096, BF16, BF16),
    (257, 4, 1001, BF16, FP32),
    (17, 4, 7168, BF16, FP32),
    (1, 4, 4096, BF16, FP32),
    (2048, 2, 4096, FP16, FP32),
    (1024, 8, 2048, BF16, FP32),
    (2048, 4, 4096, FP32, FP32),
]


def randn(*size, dtype=FP32):
    return torch.randn(*size, device="cuda").to(dtype)


def operands(T, n, H, dtype, w_dtype):
    """(X, W, scale, base) and (Y, post, comb), a token's size and a stream's of its own."""
    columns = n * (n + 2)
    X = randn(T, n, H) * randn(T, 1, 1).mul(0.5).exp()
    X *= torch.linspace(0.5, 2.0, n, device="cuda")[:, None]
    W = randn(columns, n * H) / (n * H) ** 0.5
    comb = torch.rand(T, n, n, device="cuda") + 2 * torch.eye(n, device="cuda").roll(1, 1)
    given = X.to(dtype), W.to(w_dtype), torch.rand(3, device="cuda") + 0.5, randn(columns)
    return given, (randn(T, H, dtype=dtype), torch.rand(T, n, device="cuda") * 2, comb)


def grads_of(fn, inputs, grads, dtype=None):
    own = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    outputs = fn(*own)
    return torch.autograd.grad(outputs, own, [g.to(o.dtype) for g, o in zip(grads, outputs)])  # noqa: B905


def judge(run, fn, inputs, grads, poison, rounded=()):
    """Three runs of the same bits, right by fp64 and by eager's own error; ``rounded``: gradients
    that eager rounds to the dtype of X on the way."""
    runs = []
    for _ in range(3):
        poison()
        runs.append(run())
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    truth = grads_of(fn, inputs, grads, torch.float64)
    eager = grads_of(fn, inputs, grads)
    for k, (got, right, baseline) in enumerate(zip(runs[0], truth, eager, strict=True)):
        dtype = inputs[0].dtype if k in rounded else None
        # Few numbers, each the sum over all tokens, may cancel: there eager's own error counts too.
        few = got.numel() <= 80
        verdict = measure.check(got, right, baseline, rounding=dtype, tf32=few)
        assert verdict.ok, f"gradient {k}: {verdict.reason}"


def mixes_of(X, W):
    u = X.double().flatten(-2)
    return (u @ W.double().mT).float(), u.square().sum(-1).float()


@pytest.mark.parametrize(("T", "n", "H", "dtype", "w_dtype"), SIZES)
def test_pre(T, n, H, dtype, w_dtype, poison):
    given, _ = operands(T, n, H, dtype, w_dtype)
    grads = randn(T, H, dtype=dtype), randn(T, n), randn(T, n, n)
    saved = *given, *mixes_of(*given[:2])
    judge(
        lambda: backward.pre_backward(*saved, *grads, ITERS, *EPS),
        lambda *own: composed.pre(*own, ITERS, *EPS)[:3],
        given, grads, poison,
    )  # fmt: skip


@pytest.mark.parametrize(("T", "n", "H", "dtype", "w_dtype"), SIZES[1:5])
@pytest.mark.parametrize("columns", [12, 24, 32])
def test_collapse(T, n, H, dtype, w_dtype, columns, poison):
    """The gates alone, of more columns, whose sums have gradients too."""
    (X, W, scale, base), _ = operands(T, n, H, dtype, w_dtype)
    given = X, torch.cat([W, W.flip(1)])[:columns].contiguous(), scale[:1], base[:n]
    grads = randn(T, H, dtype=dtype), randn(T, columns), randn(T) / H
    saved = *given, *mixes_of(*given[:2])
    judge(
        lambda: backward.collapse_backward(*saved, *grads, *EPS[:2]),
        lambda *own: composed.collapse(*own, *EPS[:2]),
        given, grads, poison,
    )  # fmt: skip


@pytest.mark.parametrize(("T", "n", "H", "dtype", "w_dtype"), SIZES)
def test_post(T, n, H, dtype, w_dtype, poison):
    (X, *_), boundary = operands(T, n, H, dtype, w_dtype)
    grad = randn(T, n, H, dtype=dtype)
    judge(
        lambda: backward.post_backward(X, *boundary, grad),
        lambda *own: (composed.post(*own),),
        (X, *boundary), (grad,), poison,
    )  # fmt: skip


@pytest.mark.parametrize(("T", "n", "H", "dtype", "w_dtype"), SIZES)
def test_post_pre(T, n, H, dtype, w_dtype, poison):
    (X, *of_pre), boundary = operands(T, n, H, dtype, w_dtype)
    grads = randn(T, n, H, dtype=dtype), randn(T, H, dtype=dtype), randn(T, n), randn(T, n, n)
    X1 = composed.post(X, *boundary)
    saved = X, *boundary, X1, *of_pre, *mixes_of(X1, of_pre[0])

    def function(x, y, post, comb, *rest):
        wide = composed.post(x, y, post, comb)
        rounded = wide + (X1.to(wide.dtype) - wide.detach())
        return rounded, *composed.pre(rounded, *rest, ITERS, *EPS)[:3]

    judge(
        lambda: backward.post_pre_backward(*saved, *grads, ITERS, *EPS),
        function, (X, *boundary, *of_pre), grads, poison, (2, 3),
    )  # fmt: skip


@pytest.mark.parametrize("n", [2, 4, 8])
def test_sinkhorn(n, poison):
    logits, grad = randn(50001, n, n) * 3, randn(50001, n, n)
    judge(
        lambda: (backward.sinkhorn_backward(logits, grad, ITERS, 1e-6),),
        lambda x: (composed.sinkhorn(x, ITERS, 1e-6),),
        (logits,), (grad,), poison,
    )  # fmt: skip


def test_offsets_beyond_32_bits(poison):
    """More than 2^31 elements: what the last tokens get is what they get alone."""
    T, n, H, few = 80000, 4, 7168, 64
    given, boundary = operands(few, n, H, BF16, FP32)
    grads = randn(few, n, H, dtype=BF16), randn(few, H, dtype=BF16), randn(few, n), randn(few, n, n)
    X, W, scale, base = given
    mixes, sqrsum = mixes_of(X, W)

    def many(t):
        return torch.cat([t.new_zeros(T - few, *t.shape[1:]), t])

    alone = backward.post_pre_backward(
        X, *boundary, X, W, scale, base, mixes, sqrsum, *grads, ITERS, *EPS
    )
    big = many(X)
    poison()
    found = backward.post_pre_backward(
        big, *map(many, boundary), big, W, scale, base, many(mixes), many(sqrsum),
        *map(many, grads), ITERS, *EPS,
    )  # fmt: skip
    for mine, wanted in zip(found[:4], alone[:4], strict=True):
        assert torch.equal(mine[-few:], wanted)
    assert measure.check(found[4], alone[4].double(), alone[4]).ok
