"""The formulas of mHC once more, inputs of a realistic scale, and how results are judged.

The fixtures ``way`` and ``every_way`` run a test by torch functions, the latter by the kernels in
Triton's interpreter too, and with ``pytest -m gpu`` both run it by the kernels on a card.
"""

import contextlib
import importlib
import pkgutil

import pytest
import torch

from inductor_ext import compat_runtime, measure, templates
from inductor_ext.ops import _mhc, _mhc_backward
from inductor_ext.testing import launches_interpreted

N = 4
EPS = 1e-6


def launching_modules():
    """The modules of mHC's kernels that launch some."""
    names = [m.name for m in pkgutil.iter_modules(templates.__path__) if m.name.startswith("mhc_")]
    modules = [importlib.import_module(f"{templates.__name__}.{name}") for name in names]
    return [m for m in modules if hasattr(m, "wrap_triton")]


@contextlib.contextmanager
def kernels():
    """Within: the kernels compute on CPU tensors, in the interpreter."""
    with launches_interpreted(*launching_modules()), pytest.MonkeyPatch.context() as patch:
        for module in (_mhc, _mhc_backward):
            patch.setattr(module, "kernels_apply", on_any_device)
        yield


def on_any_device(X):
    return X.dtype != torch.float64 and not compat_runtime.under_functorch()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def run(request):
    contexts = {
        "composed": contextlib.nullcontext, "kernels": kernels, "card": lambda: torch.device("cuda")
    }  # fmt: skip
    with contexts[request.param]():
        yield request.param


CARD = pytest.param("card", marks=pytest.mark.gpu)


@pytest.fixture(name="way", params=["composed", CARD])
def _way(request):
    """By torch functions, or by the kernels on a card."""
    yield from run(request)


@pytest.fixture(name="every_way", params=["composed", "kernels", CARD])
def _every_way(request):
    """By the kernels in the interpreter as well, which take a second or more."""
    yield from run(request)


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


def drawn(lead, n=N, hidden=24, dtype=torch.bfloat16):
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
