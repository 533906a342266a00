"""The forward kernels of mHC in the interpreter, against the formulas in fp64."""

import contextlib

import pytest
import reference
import torch
from inductor_ext.templates import mhc_pre, mhc_projection

from inductor_ext import measure, ops
from inductor_ext.ops import _mhc_composed as composed

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPTIONS = {"iters": 20, "rms_eps": 1e-6, "pre_eps": 1e-6, "sinkhorn_eps": 1e-6, "post_mult": 2.0}
OTHERS = {"iters": 3, "rms_eps": 0.03, "pre_eps": 0.02, "sinkhorn_eps": 0.01, "post_mult": 1.3}


def judge(found, truth, eager):
    for mine, right, baseline in zip(found, truth, eager, strict=True):
        verdict = measure.check(mine, right, baseline)
        assert verdict.ok, verdict.reason


def coefficients(T, n, dtype=FP32, seed=5):
    """(post, comb): comb far from symmetric, its rows and columns far from the same."""
    make = torch.Generator().manual_seed(seed)
    post = torch.rand(T, n, generator=make) * 2
    comb = torch.softmax(torch.randn(T, n, n, generator=make) * 2, -1)
    return post.to(dtype), comb.to(dtype)


@pytest.mark.parametrize(
    ("n", "T", "H", "dtype", "w_dtype", "options"),
    [(4, 3, 72, BF16, FP32, OPTIONS), (4, 3, 33, BF16, BF16, OTHERS),
     (4, 3, 24, FP16, FP32, OTHERS), (4, 3, 33, FP32, FP32, OPTIONS),
     (2, 3, 24, BF16, FP32, OPTIONS), (8, 2, 9, BF16, FP32, OTHERS)],
)  # fmt: skip
def test_pre(n, T, H, dtype, w_dtype, options, on_cpu):
    given = reference.draw(T, n, H, dtype, w_dtype=w_dtype)
    with on_cpu():
        found = ops.mhc_pre(*given, **options)
        again = ops.mhc_pre(*given, **options)
    assert all(map(torch.equal, found, again))
    assert [t.dtype for t in found] == [dtype, FP32, FP32]
    eager = composed.pre(*given, *options.values())[:3]
    judge(found, reference.pre(*given, **options), eager)


def test_saved_sums(on_cpu):
    X, W, scale, base = reference.draw(5, 4, 72)
    with on_cpu():
        found = torch.ops.inductor_ext.mhc_pre(X, W, scale, base, *OPTIONS.values())[3:]
    u = X.double().flatten(1)
    for mine, right in zip(found, (u @ W.double().T, u.square().sum(-1)), strict=True):
        assert (mine - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("weighted", [BF16, FP32])
def test_weight_of_the_norm(weighted, on_cpu):
    X, W, scale, base = reference.draw(3, 4, 24)
    weight = (torch.rand(96) + 0.5).to(weighted)
    with on_cpu():
        found = ops.mhc_pre(X, W, scale, base, norm_weight=weight)
        head = ops.mhc_head(X, W[:4], scale[:1], base[:4], norm_weight=weight)
    truth = reference.pre(X, W, scale, base, norm_weight=weight)
    judge(found, truth, [t.to(f.dtype) for t, f in zip(truth, found, strict=True)])
    right = reference.head(X, W[:4], scale[:1], base[:4], norm_weight=weight)
    judge([head], [right], [right.to(BF16)])


@pytest.mark.parametrize(
    ("dtype", "w_dtype"), [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP32), (FP32, BF16)]
)
def test_tf32(dtype, w_dtype, on_cpu):
    given = reference.draw(4, 4, 40, dtype, w_dtype=w_dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with on_cpu():
            found = torch.ops.inductor_ext.mhc_pre(*given, *OPTIONS.values())[3]
    finally:
        torch.set_float32_matmul_precision(before)
    u, W = given[0].double().flatten(1), given[1].double()
    error = (found - u @ W.T).norm() / (u @ W.T).norm()
    assert error < 5e-4


@pytest.mark.parametrize(("partials", "squares"), [(1, True), (3, True), (16, True), (3, False)])
def test_from_mixes(partials, squares, on_cpu):
    X, W, scale, base = reference.draw(5, 4, 48)
    u = X.double().flatten(1)
    shares = torch.rand(partials, 5, 1)
    shares /= shares.sum(0)
    mixes = (shares * (u @ W.double().T)).float()
    sqrsum = (shares[..., 0] * u.square().sum(-1)).float() if squares else None
    with on_cpu():
        found = ops.mhc_pre_from_mixes(mixes, sqrsum, X, scale, base)
    eager = composed.pre(X, W, scale, base, *OPTIONS.values())[:3]
    judge(found, reference.pre(X, W, scale, base), eager)


@pytest.mark.parametrize("coefficient_dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("n", "H", "dtype"),
    [(4, 24, BF16), (4, 17, BF16), (2, 33, FP16), (8, 24, FP32)],
)
def test_post(n, H, dtype, coefficient_dtype, on_cpu):
    X, Y = reference.draw(5, n, H, dtype)[0], torch.randn(5, H).to(dtype)
    post, comb = coefficients(5, n, coefficient_dtype)
    turned = comb.transpose(-1, -2)
    with on_cpu():
        found = [ops.mhc_post(X, Y, post, c) for c in (comb, turned)]
    assert not torch.equal(*found)
    truth = [reference.post(X, Y, post, c) for c in (comb, turned)]
    judge(found, truth, [composed.post(X, Y, post, c) for c in (comb, turned)])


@pytest.mark.parametrize(("n", "H", "dtype"), [(4, 33, BF16), (2, 24, FP16)])
def test_post_pre(n, H, dtype, on_cpu):
    X, W, scale, base = reference.draw(3, n, H, dtype)
    Y = torch.randn(3, H).to(dtype)
    post, comb = coefficients(3, n)
    with on_cpu():
        found = ops.mhc_post_pre(X, Y, post, comb, W, scale, base, **OTHERS)
        X1 = ops.mhc_post(X, Y, post, comb)
        apart = ops.mhc_pre(X1, W, scale, base, **OTHERS)
    assert torch.equal(found[0], X1)
    assert all(map(torch.equal, found[1:], apart))
    # X' is rounded before it is projected.
    truth, eager = (
        reference.pre(X1, W, scale, base, **OTHERS),
        composed.pre(X1, W, scale, base, *OTHERS.values()),
    )
    judge(found[1:], truth, eager[:3])
    judge([X1], [reference.post(X, Y, post, comb)], [composed.post(X, Y, post, comb)])


@pytest.mark.parametrize(("n", "H", "dtype"), [(4, 24, BF16), (2, 33, FP16)])
def test_head(n, H, dtype, on_cpu):
    given = reference.draw(5, n, H, dtype, head=True)
    with on_cpu():
        found = ops.mhc_head(*given, rms_eps=0.01, pre_eps=0.02)
    truth = reference.head(*given, rms_eps=0.01, pre_eps=0.02)
    judge([found], [truth], composed.collapse(*given, 0.01, 0.02)[:1])


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("iters", [1, 20])
def test_sinkhorn(n, dtype, iters, on_cpu):
    logits = (torch.randn(3, 2, n, n) * 3).to(dtype)
    with on_cpu():
        found = ops.sinkhorn(logits, iters=iters, eps=1e-3)
    truth = reference.sinkhorn(logits, iters, 1e-3)
    judge([found], [truth], [truth.to(dtype)])


@pytest.mark.parametrize("way", ["few", "many", "squares", "composed"])
def test_powers_of_e(way, on_cpu, monkeypatch):
    """Sinkhorn from exp(logits), whose first row sums have an eps that is felt."""
    X, W, scale, base = reference.draw(3, 4, 16)
    base = base - 4.0
    options = dict(OPTIONS, iters=3, sinkhorn_eps=0.05)
    monkeypatch.setattr(mhc_pre, "FEW", 0 if way == "many" else 64)
    with on_cpu() if way != "composed" else contextlib.nullcontext():
        if way == "squares":
            u = X.double().flatten(-2)
            sums = (u @ W.double().T).float()[None], u.square().sum(-1).float()[None]
            found = ops.mhc_pre_from_mixes(*sums, X, scale, base, **options, powers=True)
        else:
            found = ops.mhc_pre(X, W, scale, base, **options, powers=True)
    wide = reference.pre(X, W, scale, base, **options, powers=True)
    judge(found, wide, composed.pre(X, W, scale, base, *options.values(), True)[:3])
    without = reference.pre(X, W, scale, base, **options)
    assert (wide[2] - without[2]).abs().max() > 1e-2


def test_sinkhorn_of_powers(on_cpu):
    logits = torch.randn(9, 4, 4) * 3
    logits[0] -= 95.0  # exp is 0 in fp32, the eps is all there is
    logits[1] += 100.0  # and here more than fp32 holds
    with on_cpu():
        found = ops.sinkhorn(logits, iters=3, eps=1e-2, powers=True)
    truth = reference.sinkhorn(logits, 3, 1e-2, powers=True)
    judge([found], [truth], [truth.float()])


def test_a_token_has_the_same_bits_among_any_number(on_cpu, monkeypatch):
    X, W, scale, base = reference.draw(70, 2, 130)
    post, comb = coefficients(70, 2)
    Y = torch.randn(70, 130).to(BF16)
    same = {"GROUPS": 8, "num_warps": 4, "num_stages": 1}
    tilings = iter(
        same | {"BM": rows, "LOG": log, "BEFORE": before}
        for rows, log, before in [(64, 0, False), (128, 2, True), (64, 1, True), (64, 3, False)]
    )
    monkeypatch.setattr(mhc_projection, "tiling", lambda *_, **__: next(tilings))
    runs = []
    for first, last in [(66, 67), (0, 70), (63, 70), (66, 67)]:
        part = slice(first, last)
        with on_cpu():
            found = torch.ops.inductor_ext.mhc_pre(X[part], W, scale, base, *OPTIONS.values())
        runs.append([t[66 - first] for t in found])
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    with on_cpu():
        many = ops.mhc_post(X, Y, post, comb)
        one = ops.mhc_post(X[66:67], Y[66:67], post[66:67], comb[66:67])
    assert torch.equal(many[66:67], one)


def test_leading_dimensions_and_views(on_cpu):
    _, W, scale, base = reference.draw(6, 4, 24)
    one = torch.randn(2, 3, 1, 24).to(BF16).expand(2, 3, 4, 24)  # a first layer's streams
    wide = torch.randn(2, 3, 24, 4).to(BF16).transpose(-1, -2)
    Y = torch.randn(3, 2, 24).to(BF16).transpose(0, 1)
    post, comb = coefficients(6, 4)
    post, comb = post.view(2, 3, 4), comb.view(2, 3, 4, 4).transpose(-1, -2)
    for view in (one, wide):
        with on_cpu():
            found = ops.mhc_pre(view, W, scale, base)
            found = *found, ops.mhc_post(view, Y, post, comb)
            both = ops.mhc_post_pre(view, Y, post, comb, W, scale, base)
        truth = *reference.pre(view, W, scale, base), reference.post(view, Y, post, comb)
        eager = (
            *composed.pre(view, W, scale, base, *OPTIONS.values())[:3],
            composed.post(view, Y, post, comb),
        )
        judge(found, truth, eager)
        assert torch.equal(both[0], found[3]) and both[3].shape == (2, 3, 4, 4)


def test_no_tokens(on_cpu):
    X, W, scale, base = reference.draw(1, 4, 40)
    X, Y = X[:0], torch.empty(0, 40, dtype=BF16)
    post, comb = torch.empty(0, 4), torch.empty(0, 4, 4)
    for context in (on_cpu, torch.no_grad):
        with context():
            U, p, c = ops.mhc_pre(X, W, scale, base)
            assert (U.shape, p.shape, c.shape) == ((0, 40), (0, 4), (0, 4, 4))
            assert ops.mhc_post(X, Y, post, comb).shape == (0, 4, 40)
            assert ops.mhc_post_pre(X, Y, post, comb, W, scale, base)[1].shape == (0, 40)
            assert ops.mhc_head(X, W[:4], scale[:1], base[:4]).shape == (0, 40)
            assert ops.sinkhorn(comb).shape == (0, 4, 4)
            mixes = torch.empty(3, 0, 24)
            assert ops.mhc_pre_from_mixes(mixes, None, X, scale, base)[0].shape == (0, 40)


def test_not_finite(on_cpu):
    X, W, scale, base = reference.draw(3, 4, 40)
    X[1, 2, 7] = torch.inf
    with on_cpu():
        U, post, comb = ops.mhc_pre(X, W, scale, base)
    assert U[1].isnan().any() and U[[0, 2]].isfinite().all()
    assert post[1].isnan().all() and comb[1].isnan().all() and comb[[0, 2]].isfinite().all()
