"""What mHC promises, from its formulas alone: the manifold, constants, values that hurt."""

import math
import sys
from pathlib import Path

import pytest
import torch

from inductor_ext import ops

sys.path.append(str(Path(__file__).parent))

from mhc_formulas import (  # noqa: F401
    EPS,
    N,
    _every_way,
    _seeded,
    _way,
    collapse,
    drawn,
    equal,
    gradients,
    in_fp64,
    judge,
    judge_gradients,
    parameters,
    ref_gates,
    ref_head,
    ref_post,
    ref_post_pre,
    ref_pre,
    ref_sinkhorn,
    seeds_of,
    wide,
)

# --- the manifold ---------------------------------------------------------------------------------


def gain(combs):
    """The largest row or column sum of |C_1 C_2 ...|: how much the residual's mix can amplify."""
    product = torch.eye(combs[0].shape[-1], dtype=torch.float64)
    for c in combs:
        product = product @ c.double()
    return max(product.abs().sum(-1).max().item(), product.abs().sum(-2).max().item())


def test_the_gain_of_60_layers_is_bounded_where_plain_hc_explodes(way):
    tokens, hidden, depth = 3, 32, 60
    x = torch.randn(tokens, N, hidden).bfloat16()
    y = torch.zeros(tokens, hidden).bfloat16()
    combs, plain = [], []
    for _ in range(depth):
        w, scale, base = parameters(N, hidden)
        _, _, comb = ops.mhc_pre(x, w, scale, base)
        mixes = (wide(x).flatten(-2) @ w.t()) / wide(x).flatten(-2).square().mean(-1, True).sqrt()
        plain.append(torch.eye(N) + torch.tanh(mixes[:, 2 * N :]).unflatten(-1, (N, N)))
        x = ops.mhc_post(x, y, torch.ones(tokens, N), comb)
        combs.append(comb)
    assert gain([c[0] for c in plain]) > 100
    for t in range(tokens):
        assert 0.99 < gain([c[t] for c in combs]) <= 1.6
    # A mix of means: the streams come together and keep the size of their mean.
    assert 0.01 < wide(x).abs().mean() < 2


@pytest.mark.parametrize("n", [2, 4, 8])
def test_columns_sum_to_one_and_rows_nearly(way, n):
    x, w, scale, base = torch.randn(5, n, 24).bfloat16(), *parameters(n, 24)
    comb = ops.mhc_pre(x, w, scale, base)[2]
    assert (comb > 0).all()
    torch.testing.assert_close(comb.sum(-2), torch.ones(5, n), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(-1), torch.ones(5, n), rtol=0, atol=5e-2)
    more = ops.mhc_pre(x, w, scale, base, iters=200)[2]
    torch.testing.assert_close(more.sum(-1), torch.ones(5, n), rtol=0, atol=1e-4)


def test_a_transposed_mix_is_far_away(every_way):
    x, y, post, comb, w, scale, base = drawn((6,))
    own = ops.mhc_post(x, y, post, comb).double()
    truth = ref_post(*in_fp64((x, y, post, comb)))
    other = ref_post(*in_fp64((x, y, post, comb.transpose(-1, -2))))
    assert (other - truth).norm() > 50 * (own - truth).norm()
    own = ops.mhc_pre(x, w, scale, base)[2].double()
    truth = ref_pre(*in_fp64((x, w, scale, base)))[2]
    assert (truth.transpose(-1, -2) - truth).norm() > 1e4 * (own - truth).norm()
    # A transposed view is the transposed mix.
    view = comb.transpose(-1, -2)
    assert equal(ops.mhc_post(x, y, post, view), ops.mhc_post(x, y, post, view.contiguous()))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_the_mean_square_is_over_all_streams(way, size):
    x, *_, w, scale, base = drawn((6,))
    x = (x * size).bfloat16()
    own = ops.mhc_pre(x, w, scale, base)
    args = in_fp64((x, w, scale, base))
    truth, other = ref_pre(*args), ref_pre(*args, mean_over=x.shape[-1])
    for o, t, off in zip(own, truth, other, strict=True):
        assert (off - t).norm() > 20 * (o.double() - t).norm()


def test_the_order_of_columns(way):
    """Column by column: a logit of +-30 on one of them, W zero."""
    x, n = torch.randn(2, N, 16).bfloat16(), N
    w, scale = torch.zeros(n * (n + 2), n * 16), torch.ones(3)
    for column in range(2 * n):
        base = torch.full((n * (n + 2),), -30.0)
        base[column] = 30.0
        u, post, _ = ops.mhc_pre(x, w, scale, base)
        if column < n:
            torch.testing.assert_close(u, x[:, column])
        expected = torch.zeros(2, n)
        if column >= n:
            expected[:, column - n] = 2.0
        torch.testing.assert_close(post, expected, atol=1e-5, rtol=0)
    base = torch.zeros(n * (n + 2))
    base[2 * n :] = torch.eye(n)[[1, 2, 3, 0]].flatten() * 40  # in 0 -> out 1, in 1 -> out 2, ...
    comb = ops.mhc_pre(x, w, scale, base)[2]
    torch.testing.assert_close(comb[0], torch.eye(n)[[1, 2, 3, 0]], atol=1e-4, rtol=0)
    after = ops.mhc_post(x, torch.zeros(2, 16).bfloat16(), torch.zeros(2, n), comb)
    torch.testing.assert_close(after[:, [1, 2, 3, 0]], x, atol=2e-2, rtol=0)


# --- values ---------------------------------------------------------------------------------------

VARIANTS = {
    "v4": {},
    "one round": {"iters": 1},
    "two rounds": {"iters": 2},
    "other constants": {
        "rms_eps": 1e-3, "pre_eps": 2e-2, "sinkhorn_eps": 3e-2, "post_mult": 1.0, "iters": 3,
    },
    "no eps": {"rms_eps": 0.0, "pre_eps": 0.0, "sinkhorn_eps": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_constant_is_where_the_formula_has_it(way, options):
    x, y, post, comb, w, scale, base = drawn((5,))
    judge(ops.mhc_pre, ref_pre, x, w, scale, base, **options)
    judge(ops.mhc_post_pre, ref_post_pre, x, y, post, comb, w, scale, base, **options)
    some = {k: v for k, v in options.items() if k in ("rms_eps", "pre_eps")}
    judge(ops.mhc_head, ref_head, x, w[:N].contiguous(), scale[:1], base[:N], **some)


def test_the_gradients_know_every_constant(every_way):
    options = VARIANTS["other constants"]
    x, y, post, comb, w, scale, base = drawn((5,))
    judge_gradients(ops.mhc_pre, ref_pre, (x, w, scale, base), **options)
    judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, y, post, comb, w, scale, base), **options)
    some = {k: v for k, v in options.items() if k in ("rms_eps", "pre_eps")}
    judge_gradients(ops.mhc_head, ref_head, (x, w[:N].contiguous(), scale[:1], base[:N]), **some)


@pytest.mark.parametrize("n, hidden", [(2, 1), (8, 17), (4, 257)])
def test_odd_sizes(way, n, hidden):
    for tokens in (1, 3):
        x, y, post, comb, w, scale, base = drawn((tokens,), n, hidden)
        judge(ops.mhc_pre, ref_pre, x, w, scale, base)
        judge(ops.mhc_post, ref_post, x, y, post, comb)
        judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, y, post, comb, w, scale, base))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_residuals(way, dtype):
    x, y, post, comb, w, scale, base = drawn((5,), dtype=dtype)
    judge(ops.mhc_post_pre, ref_post_pre, x, y, post, comb, w, scale, base)
    judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, y, post, comb, w, scale, base))


def test_fp64_stays_fp64():
    args = in_fp64(drawn((3,)))
    for got, want in zip(ops.mhc_post_pre(*args), ref_post_pre(*args), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_huge_residual(way):
    x, y, post, comb, w, scale, base = drawn((4,))
    x = (x.float() * 1e4).bfloat16()
    judge(ops.mhc_pre, ref_pre, x, w, scale, base)
    judge(ops.mhc_post, ref_post, x, y, post, comb)
    judge_gradients(ops.mhc_pre, ref_pre, (x, w, scale, base))
    judge_gradients(ops.mhc_post, ref_post, (x, y, post, comb))


def test_rows_of_zeros(every_way):
    """r is 1 / sqrt(eps) there, and z 0: the gates are those of the base alone."""
    x, y, post, comb, w, scale, base = drawn((4,))
    x[1] = 0
    x[3, 2] = 0
    u, p, c = ops.mhc_pre(x, w, scale, base)
    _, want_p, want_c = ref_gates(torch.zeros(N * (N + 2)), scale, base, N)
    assert not u[1].any()
    torch.testing.assert_close(p[1], want_p)
    torch.testing.assert_close(c[1], want_c)
    judge_gradients(ops.mhc_pre, ref_pre, (x, w, scale, base))
    judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, 0 * y, post, comb, w, scale, base))


@pytest.mark.parametrize("value", [-math.inf])
def test_what_is_not_finite_stays_in_its_token_and_is_eagers(every_way, value):
    x, y, post, comb, w, scale, base = drawn((5,))
    args = (x, y, post, comb, w, scale, base)
    clean = ops.mhc_post_pre(*args)
    hurt = x.clone()
    hurt[2, 1, 7] = value
    for fn, ref, given in (
        (ops.mhc_pre, ref_pre, (hurt, w, scale, base)),
        (ops.mhc_post, ref_post, (hurt, y, post, comb)),
        (ops.mhc_post_pre, ref_post_pre, (hurt, *args[1:])),
    ):
        own, eager = fn(*given), ref(*given)
        own, eager = (o if isinstance(o, tuple) else (o,) for o in (own, eager))
        for o, e in zip(own, eager, strict=True):
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(o), kind(e))
    others = torch.tensor([0, 1, 3, 4])
    for o, c in zip(ops.mhc_post_pre(hurt, *args[1:]), clean, strict=True):
        assert torch.equal(o[others], c[others])


def test_logits_far_out(way):
    """A gate that is shut, a mix that is a permutation: finite, and so are the gradients."""
    x, *_, w, scale, base = drawn((5,))
    hard = scale * 300
    outs = ops.mhc_pre(x, w, hard, base)
    assert all(o.isfinite().all() for o in outs)
    seeds = seeds_of(ref_pre, (x, w, hard, base))
    for g in gradients(ops.mhc_pre, (x, w, hard, base), seeds):
        assert g.isfinite().all()
    comb = ops.sinkhorn(torch.tensor([[[1e4, 0.0], [0.0, 1e4]], [[0.0, 1e4], [1e4, 0.0]]]))
    torch.testing.assert_close(comb, torch.tensor([[[1.0, 0], [0, 1]], [[0, 1], [1.0, 0]]]),
                               atol=1e-4, rtol=0)  # fmt: skip


def test_sinkhorn_by_itself(way):
    for n in (2, 4, 8):
        for lead in ((), (3,), (2, 0), (2, 3)):
            logits = 3 * torch.randn(*lead, n, n)
            judge(ops.sinkhorn, ref_sinkhorn, logits)
            judge_gradients(ops.sinkhorn, ref_sinkhorn, (logits,))
    logits = 3 * torch.randn(4, 4, 5).permute(2, 1, 0)
    judge(ops.sinkhorn, ref_sinkhorn, logits, iters=7, eps=1e-3)
    logits = torch.randn(2, 4, 4)
    logits[1, 2, 3] = -math.inf  # a path that is closed
    judge(ops.sinkhorn, ref_sinkhorn, logits)
    logits[0, 1] = -math.inf
    assert equal(ops.sinkhorn(logits)[0].isnan(), ref_sinkhorn(logits)[0].isnan())


def test_a_weight_in_bf16_is_its_own_value(way):
    x, y, post, comb, w, scale, base = drawn((5,))
    low = w.bfloat16()
    judge(ops.mhc_pre, ref_pre, x, low, scale, base)
    judge_gradients(ops.mhc_pre, ref_pre, (x, low, scale, base))
    judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, y, post, comb, low, scale, base))


def test_a_norm_weight_scales_the_columns_of_w(way):
    x, *_, w, scale, base = drawn((5,))
    norm = 1 + 0.3 * torch.randn(x.shape[-2] * x.shape[-1])

    def with_norm(fn):
        return lambda x, w, scale, base, g: fn(x, w, scale, base, norm_weight=g)

    args = (x, w, scale, base, norm)
    judge(with_norm(ops.mhc_pre), with_norm(ref_pre), *args)
    judge_gradients(with_norm(ops.mhc_pre), with_norm(ref_pre), args)


def test_coefficients_in_bf16_are_computed_with_as_fp32(way):
    x, y, post, comb, *_ = drawn((5,))
    post, comb = post.bfloat16(), comb.bfloat16()
    judge(ops.mhc_post, ref_post, x, y, post, comb)
    judge_gradients(ops.mhc_post, ref_post, (x, y, post, comb))


def test_post_pre_is_post_then_pre(way):
    x, y, post, comb, w, scale, base = drawn((7,))
    after, *rest = ops.mhc_post_pre(x, y, post, comb, w, scale, base)
    assert torch.equal(after, ops.mhc_post(x, y, post, comb))
    again = ops.mhc_pre(after, w, scale, base)  # of the rounded residual, which shows in fp32
    for a, b in zip(rest, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("splits", [1, 3, 16])
def test_from_mixes(way, splits):
    x, *_, w, scale, base = drawn((6,))
    flat = x.float().flatten(-2)
    whole, squares = flat @ w.t(), flat.square().sum(-1)
    shares = torch.rand(splits, 1, 1)
    shares = shares / shares.sum()
    mixes, parts = whole * shares, squares * shares[..., 0]

    def ref(mixes, parts, x, scale, base):
        k = x.shape[-1] * x.shape[-2]
        r = torch.rsqrt(parts.sum(0) / k + EPS)[:, None]
        pre, post, comb = ref_gates(r * mixes.sum(0), scale, base, N)
        return collapse(pre, wide(x)).to(x.dtype), post, comb

    judge(ops.mhc_pre_from_mixes, ref, mixes, parts, x, scale, base)
    judge_gradients(ops.mhc_pre_from_mixes, ref, (mixes, parts, x, scale, base))

    def ref_without(mixes, x, scale, base):
        return ref(mixes, wide(x).flatten(-2).square().sum(-1)[None], x, scale, base)

    def without(mixes, x, scale, base):
        return ops.mhc_pre_from_mixes(mixes, None, x, scale, base)

    judge(without, ref_without, mixes, x, scale, base)
    judge_gradients(without, ref_without, (mixes, x, scale, base))
