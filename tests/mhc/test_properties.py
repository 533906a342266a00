"""What mHC promises, from its formulas alone: properties, hostile inputs, transforms, bad input.

Every test runs with the operations composed of torch functions and, where it is about numbers, with
the kernels in Triton's interpreter.
"""

import contextlib
import math

import pytest
import torch
from torch.func import grad, vmap

from inductor_ext import measure, ops

N = 4
EPS = 1e-6
NAMES = ("X", "W", "scale", "base")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=["composed", "kernels"])
def way(request):
    """By torch functions, or by the kernels."""
    if request.param == "composed":
        yield request.param
        return
    with request.getfixturevalue("kernels")():
        yield request.param


# --- the formulas, once more ----------------------------------------------------------------------


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def ref_sinkhorn(logits, iters=20, eps=EPS):
    c = wide(logits).softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def ref_gates(z, scale, base, n, *, iters=20, pre_eps=EPS, sinkhorn_eps=EPS, post_mult=2.0):
    pre = torch.sigmoid(scale[0] * z[..., :n] + base[:n]) + pre_eps
    post = post_mult * torch.sigmoid(scale[1] * z[..., n : 2 * n] + base[n : 2 * n])
    logits = (scale[2] * z[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, ref_sinkhorn(logits, iters, sinkhorn_eps)


def collapse(pre, x):
    return sum(pre[..., i, None] * x[..., i, :] for i in range(x.shape[-2])).to(x.dtype)


def ref_pre(x, w, scale, base, *, rms_eps=EPS, mean_over=None, norm_weight=None, **options):
    n, k = x.shape[-2], x.shape[-2] * x.shape[-1]
    u = wide(x).flatten(-2)
    if norm_weight is not None:
        w = w * norm_weight
    r = torch.rsqrt((u * u).sum(-1, keepdim=True) / (mean_over or k) + rms_eps)
    pre, post, comb = ref_gates(r * (u @ wide(w).t()), scale, base, n, **options)
    return collapse(pre, wide(x)).to(x.dtype), post, comb


def ref_post(x, y, post, comb):
    n = x.shape[-2]
    x, y, post, comb, dtype = wide(x), wide(y), wide(post), wide(comb), x.dtype
    rows = [
        post[..., j, None] * y + sum(comb[..., i, j, None] * x[..., i, :] for i in range(n))
        for j in range(n)
    ]
    return torch.stack(rows, -2).to(dtype)


def ref_head(x, w, scale, base, *, rms_eps=EPS, pre_eps=EPS):
    u = wide(x).flatten(-2)
    r = torch.rsqrt((u * u).sum(-1, keepdim=True) / u.shape[-1] + rms_eps)
    pre = torch.sigmoid(scale * (r * (u @ wide(w).t())) + base) + pre_eps
    return collapse(pre, wide(x)).to(x.dtype)


def ref_post_pre(x, y, post, comb, w, scale, base, **options):
    after = ref_post(x, y, post, comb)
    return (after, *ref_pre(after, w, scale, base, **options))


# --- inputs, judgement ----------------------------------------------------------------------------


def parameters(n, hidden, dtype=torch.float32, columns=None):
    columns = columns or n * (n + 2)
    w = torch.randn(columns, n * hidden) * (n * hidden) ** -0.5
    scale = torch.tensor([0.7, 1.3, 1.9])
    return w.to(dtype), scale if columns != n else scale[:1], torch.randn(columns) * 0.7


def drawn(lead, n=N, hidden=48, dtype=torch.bfloat16):
    """X, Y, post, comb (far from symmetric) and the parameters."""
    x = (torch.randn(*lead, n, hidden) * 1.5).to(dtype)
    y = torch.randn(*lead, hidden).to(dtype)
    post = 2 * torch.rand(*lead, n)
    comb = ref_sinkhorn(2.5 * torch.randn(*lead, n, n))
    return x, y, post, comb, *parameters(n, hidden)


def in_fp64(args):
    return [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    ]


def same(got, reference, baseline, where=""):
    """By the fp64 reference and eager's own error; fp32 may be as far off as eager is, twice."""
    got, reference, baseline = (
        o if isinstance(o, tuple | list) else (o,) for o in (got, reference, baseline)
    )
    assert len(got) == len(reference) == len(baseline)
    for i, (g, r, b) in enumerate(zip(got, reference, baseline, strict=True)):
        verdict = measure.check(g, r, b, tf32=True)
        assert verdict.ok, f"{where}{i}: {verdict.reason}"


def judge(fn, ref, *args, **options):
    same(fn(*args, **options), ref(*in_fp64(args), **options), ref(*args, **options))


def gradients(fn, args, seeds, **options):
    """Gradients of sum_i <output_i, seed_i> by every floating-point argument."""
    leaves = [a.detach().clone().requires_grad_() for a in args]
    outs = fn(*leaves, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    pairs = [(o, s.to(o.dtype)) for o, s in zip(outs, seeds, strict=True) if s is not None]
    wanted, given = [o for o, _ in pairs], [s for _, s in pairs]
    return torch.autograd.grad(wanted, leaves, given, allow_unused=True)


def seeds_of(fn, args, **options):
    with torch.no_grad():
        outs = fn(*args, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return [torch.randn(o.shape).to(o.dtype) for o in outs]


def judge_gradients(fn, ref, args, seeds=None, **options):
    seeds = seeds or seeds_of(ref, args, **options)
    got = gradients(fn, args, seeds, **options)
    truth = gradients(ref, in_fp64(args), seeds, **options)
    eager = gradients(ref, args, seeds, **options)
    for g, a in zip(got, args, strict=True):
        assert g is None or (g.dtype == a.dtype and g.shape == a.shape)
    present = [i for i, t in enumerate(truth) if t is not None]
    got, truth, eager = ([t[i] for i in present] for t in (got, truth, eager))
    got = [torch.zeros_like(e) if g is None else g for g, e in zip(got, eager, strict=True)]
    same(got, truth, eager, "gradient ")


def equal(a, b):
    """Bit for bit, NaN being NaN."""
    pairs = zip(a, b, strict=True) if isinstance(a, tuple | list) else [(a, b)]
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        for x, y in pairs
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


def test_a_transposed_mix_is_far_away(way):
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


@pytest.mark.parametrize("options", [VARIANTS["v4"], VARIANTS["other constants"]], ids=["v4", "o"])
def test_the_gradients_know_every_constant(way, options):
    x, y, post, comb, w, scale, base = drawn((5,))
    judge_gradients(ops.mhc_pre, ref_pre, (x, w, scale, base), **options)
    judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, y, post, comb, w, scale, base), **options)
    some = {k: v for k, v in options.items() if k in ("rms_eps", "pre_eps")}
    judge_gradients(ops.mhc_head, ref_head, (x, w[:N].contiguous(), scale[:1], base[:N]), **some)


@pytest.mark.parametrize("n, hidden", [(2, 1), (4, 3), (8, 17), (4, 257)])
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


def test_rows_of_zeros(way):
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_token_and_is_eagers(way, value):
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


# --- shapes and memory ----------------------------------------------------------------------------

LEADS = [(), (1,), (2, 3), (1, 1, 1, 5), (3, 0), (0,)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_leading_dimensions(way, lead):
    x, y, post, comb, w, scale, base = drawn(lead)
    u, p, c = ops.mhc_pre(x, w, scale, base)
    assert (u.shape, p.shape, c.shape) == (y.shape, post.shape, comb.shape)
    assert (u.dtype, p.dtype, c.dtype) == (x.dtype, torch.float32, torch.float32)
    judge(ops.mhc_pre, ref_pre, x, w, scale, base)
    judge(ops.mhc_post, ref_post, x, y, post, comb)
    judge(ops.mhc_post_pre, ref_post_pre, x, y, post, comb, w, scale, base)
    assert ops.mhc_head(x, w[:N].contiguous(), scale[:1], base[:N]).shape == y.shape
    judge_gradients(ops.mhc_post_pre, ref_post_pre, (x, y, post, comb, w, scale, base))


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


def test_memory_of_any_layout(way):
    args = drawn((2, 3))
    with torch.no_grad():
        plain = ops.mhc_post_pre(*args)
    seeds = seeds_of(ref_post_pre, args)
    straight = gradients(ops.mhc_post_pre, args, seeds)
    for i, t in enumerate(args):
        for name, other in strided(t):
            given = (*args[:i], other, *args[i + 1 :])
            assert torch.equal(other, t)
            for a, b in zip(ops.mhc_post_pre(*given), plain, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=f"argument {i}, {name}")
            leaves = [g.detach().requires_grad_() for g in given]  # the layouts stay
            outs = ops.mhc_post_pre(*leaves)
            for a, b in zip(torch.autograd.grad(outs, leaves, seeds), straight, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, msg=f"gradient, {i} {name}")
    leaves = [a.detach().requires_grad_() for a in args]
    for i, s in enumerate(seeds):
        for name, other in strided(s):
            given = (*seeds[:i], other, *seeds[i + 1 :])
            got = torch.autograd.grad(ops.mhc_post_pre(*leaves), leaves, given)
            for a, b in zip(got, straight, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=f"seed {i}, {name}")


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


def test_one_stream_expanded_to_all(way):
    """The first layer: a broadcast, whose gradient is the sum over the streams."""
    _, y, post, comb, w, scale, base = drawn((5,))
    h = torch.randn(5, 48).bfloat16()

    def first(fn):
        return lambda h, *rest: fn(h.unsqueeze(-2).expand(5, N, 48), *rest)

    judge(first(ops.mhc_pre), first(ref_pre), h, w, scale, base)
    judge(first(ops.mhc_post), first(ref_post), h, y, post, comb)
    judge_gradients(
        first(ops.mhc_post_pre), first(ref_post_pre), (h, y, post, comb, w, scale, base)
    )
    one = torch.randn(1, N, 48).bfloat16()  # and a token expanded

    def tokens(fn):
        return lambda x, *rest: fn(x.expand(5, N, 48), *rest)

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


# --- autograd and transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (3,), (1, 3)], ids=str)
def test_outputs_that_nobody_uses(way, used):
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
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.mhc_post_pre(*args)
        leaves = [a.detach().requires_grad_() for a in args]
        outs = ops.mhc_post_pre(*leaves)
        inside = torch.autograd.grad(outs, leaves, seeds)
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
    assert torch.autograd.gradcheck(FUNCTIONS[name], args)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], args)


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
            torch.testing.assert_close(b[i], s, rtol=1e-4, atol=1e-5)


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
CONSTANTS = (3, EPS, EPS, EPS, 2.0)


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head"])
def test_opcheck(name):
    x, y, post, comb, w, scale, base = (t.requires_grad_() for t in drawn((2, 3), 2, 8))
    args = {
        "mhc_pre": (x, w, scale, base, *CONSTANTS), "mhc_post": (x, y, post, comb),
        "mhc_post_pre": (x, y, post, comb, w, scale, base, *CONSTANTS),
        "mhc_head": (
            x, w.detach()[:2].clone().requires_grad_(), scale.detach()[:1].clone(),
            base.detach()[:2].clone(), EPS, EPS,
        ),
    }[name]  # fmt: skip
    assert ops.mhc_pre  # its import registers the operations
    torch.library.opcheck(getattr(torch.ops.inductor_ext, name).default, args, test_utils=CHECKS)


# --- bad input ------------------------------------------------------------------------------------


def bad_calls():
    x, y, post, comb, w, scale, base = drawn((3,))
    mixes, squares = torch.randn(2, 3, 24), torch.rand(2, 3)
    pre, both, from_mixes = ops.mhc_pre, ops.mhc_post_pre, ops.mhc_pre_from_mixes
    three = torch.randn(3, 3, 48).bfloat16()
    return {
        "no streams": lambda: pre(x[0, 0], w, scale, base),
        "three streams": lambda: pre(three, torch.randn(15, 144), scale, torch.randn(15)),
        "integers": lambda: pre(x.int(), w, scale, base),
        "fp8": lambda: pre(x.to(torch.float8_e4m3fn), w, scale, base),
        "columns of W": lambda: pre(x, w[:, :-1], scale, base),
        "rows of W": lambda: pre(x, w[:-1], scale, base),
        "W of H": lambda: pre(x, w[:, :48], scale, base),
        "W of a wrong type": lambda: pre(x, w.half(), scale, base),
        "two scales": lambda: pre(x, w, scale[:2], base),
        "a short base": lambda: pre(x, w, scale, base[:-1]),
        "scale in bf16": lambda: pre(x, w, scale.bfloat16(), base),
        "no rounds": lambda: pre(x, w, scale, base, iters=0),
        "half a round": lambda: pre(x, w, scale, base, iters=1.5),
        "a negative eps": lambda: pre(x, w, scale, base, sinkhorn_eps=-1e-6),
        "NaN for eps": lambda: pre(x, w, scale, base, rms_eps=math.nan),
        "a norm weight of H": lambda: pre(x, w, scale, base, norm_weight=torch.ones(48)),
        "W elsewhere": lambda: pre(x, w.to("meta"), scale, base),
        "Y of another H": lambda: ops.mhc_post(x, y[:, :-1], post, comb),
        "Y of another type": lambda: ops.mhc_post(x, y.float(), post, comb),
        "Y of other tokens": lambda: ops.mhc_post(x, y[:2], post, comb),
        "post with a last 1": lambda: ops.mhc_post(x, y, post[..., None], comb),
        "comb of n": lambda: ops.mhc_post(x, y, post, comb[..., 0]),
        "comb of other tokens": lambda: ops.mhc_post(x, y, post, comb[:1]),
        "comb in fp16": lambda: ops.mhc_post(x, y, post, comb.half()),
        "post elsewhere": lambda: ops.mhc_post(x, y, post.to("meta"), comb),
        "both: W": lambda: both(x, y, post, comb, w[:, :-1], scale, base),
        "both: Y": lambda: both(x, y[..., :-1], post, comb, w, scale, base),
        "both: rounds": lambda: both(x, y, post, comb, w, scale, base, iters=0),
        "head: all columns": lambda: ops.mhc_head(x, w, scale[:1], base),
        "head: three scales": lambda: ops.mhc_head(x, w[:N], scale, base[:N]),
        "17 partials": lambda: from_mixes(torch.randn(17, 3, 24), None, x, scale, base),
        "mixes without partials": lambda: from_mixes(mixes[0], None, x, scale, base),
        "mixes of other tokens": lambda: from_mixes(mixes[:, :2], None, x, scale, base),
        "mixes in bf16": lambda: from_mixes(mixes.bfloat16(), squares, x, scale, base),
        "sums of other partials": lambda: from_mixes(mixes, squares[:1], x, scale, base),
        "a mix that is not square": lambda: ops.sinkhorn(torch.randn(3, 4, 2)),
        "a vector": lambda: ops.sinkhorn(torch.randn(4)),
        "sinkhorn: rounds": lambda: ops.sinkhorn(torch.randn(4, 4), iters=0),
        "sinkhorn: integers": lambda: ops.sinkhorn(torch.ones(4, 4).int()),
    }


BAD = [
    "no streams", "three streams", "integers", "fp8", "columns of W", "rows of W", "W of H",
    "W of a wrong type", "two scales", "a short base", "scale in bf16", "no rounds", "half a round",
    "a negative eps", "NaN for eps", "a norm weight of H", "W elsewhere", "Y of another H",
    "Y of another type", "Y of other tokens", "post with a last 1", "comb of n",
    "comb of other tokens", "comb in fp16", "post elsewhere", "both: W", "both: Y", "both: rounds",
    "head: all columns", "head: three scales", "17 partials", "mixes without partials",
    "mixes of other tokens", "mixes in bf16", "sums of other partials", "a mix that is not square",
    "a vector", "sinkhorn: rounds", "sinkhorn: integers",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name):
    calls = bad_calls()
    assert sorted(calls) == sorted(BAD)
    with pytest.raises((ValueError, TypeError), match="expect") as caught:
        calls[name]()
    assert "\n" not in str(caught.value)


@pytest.fixture
def kernels():
    """The context in which the kernels apply to CPU tensors, in the interpreter."""
    pytest.skip("no kernels yet")
    return contextlib.nullcontext
