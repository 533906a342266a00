"""Attention's dropout on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import math

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates.attention_dropout import Dropout

import inductor_ext
from inductor_ext import measure, ops
from inductor_ext.ops import _attention_dropout as drawing

pytestmark = pytest.mark.gpu
CARD = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32


def formula(q, k, v, bias, keep, factors):
    """Attention of weights with ``factors``, as models write it; (out, lse)."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5 + bias
    s = (s if s.dtype == torch.float64 else s.float()).masked_fill(~keep, -math.inf)
    p = s.softmax(-1).to(q.dtype) * factors.to(q.dtype)
    return p @ v, s.logsumexp(-1)


def results(fn, tensors, seeds):
    leaves = [t.detach().requires_grad_() for t in tensors]
    outs = fn(*leaves)
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, seeds)]


@pytest.mark.parametrize(
    ("dtype", "heads", "own", "rows", "columns", "dim", "window", "p"),
    [(BF16, 8, 2, 1500, 1500, 128, None, 0.1), (BF16, 4, 4, 2048, 2048, 64, 300, 0.5),
     (FP32, 4, 2, 515, 700, 64, None, 0.1), (torch.float16, 4, 4, 777, 1023, 96, 100, 0.5),
     (BF16, 2, 2, 600, 600, 256, None, 0.1)],
)  # fmt: skip
def test_numbers(dtype, heads, own, rows, columns, dim, window, p):
    """Results and all gradients, twice to the same bits, by the rule."""
    torch.manual_seed(0)
    make = {"device": CARD, "dtype": dtype}
    shapes = (2, heads, rows, dim), (2, own, columns, dim), (2, own, columns, dim)
    tensors = [*(torch.randn(s, **make) for s in shapes), torch.randn(1, heads, 1, columns, **make)]
    at = torch.arange(rows, device=CARD)[:, None] + columns - rows
    keys = torch.arange(columns, device=CARD)
    keep = (keys <= at) if window is None else (keys <= at) & (keys >= at - window)
    seeds = torch.randn(2, heads, rows, dim, **make), torch.randn(2, heads, rows, device=CARD)

    def ours(q, k, v, bias):
        torch.manual_seed(3)
        return ops.attention(
            q, k, v, causal=True, window=(window, 0), bias=bias, dropout=p, return_lse=True
        )

    torch.manual_seed(3)
    drop = Dropout(drawing.seed_of(torch.device(CARD)), p)
    factors = drawing.kept(drop, 2, heads, 0, rows, columns) * drop.scale
    found, again = (results(ours, tensors, seeds) for _ in range(2))
    assert all(map(torch.equal, found, again))
    given = keep, factors.double()
    right = results(
        lambda *t: formula(*t, *given), [t.double() for t in tensors], [s.double() for s in seeds]
    )
    eager = results(lambda *t: formula(*t, *given), tensors, seeds)
    for x, truth, baseline in zip(found, right, eager, strict=True):
        narrow = dtype if dtype != FP32 else None
        verdict = measure.check(x, truth, baseline.to(x.dtype), rounding=narrow)
        assert verdict.ok, verdict.reason


def test_more_pairs_than_32_bits():
    """Weights are equal and values of 64 keys unit vectors, so out is what is kept of these."""
    size = 65536
    keys = torch.arange(64, device=CARD) * 1021 + 7
    q = torch.zeros(1, 2, size, 64, device=CARD, dtype=BF16)
    v = torch.zeros_like(q)
    v[:, :, keys, torch.arange(64, device=CARD)] = 1
    torch.manual_seed(3)
    drop = Dropout(drawing.seed_of(q.device), 0.5)
    for first in (0, size // 2 - 32, size - 64):
        kept = drawing.kept(drop, 1, 2, first, 64, size)[..., keys]
        torch.manual_seed(3)
        out = ops.attention(q, q, v, softcap=1.0, dropout=0.5)[:, :, first : first + 64]
        torch.testing.assert_close(out.float(), kept * (2.0 / size))


def model(q, k, v):
    at = torch.arange(q.shape[2], device=q.device)
    back = at[:, None] - at
    s = (q @ k.mT * 0.125).masked_fill((back < 0) | (back > 500), -math.inf)
    return F.dropout(s.softmax(-1, dtype=torch.float32).to(q.dtype), 0.25) @ v


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    """Other draws with each call, the same ones by seed, and gradients of the same draws."""
    torch._dynamo.reset()
    leaves = [torch.randn(2, 16, 2048, 64, device=CARD, dtype=BF16) for _ in range(3)]
    q, k, v = (t.requires_grad_() for t in leaves)
    do = torch.randn_like(q)
    with inductor_ext.enable("attention"):
        compiled = torch.compile(model, mode=mode)

        def run(seed):
            if seed is not None:
                torch.manual_seed(seed)
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(q, k, v)
            (dv,) = torch.autograd.grad(out, v, do)
            return out.detach().clone(), dv.clone()

        for _ in range(3):  # graphs are recorded of calls that hold what later ones hold
            run(None)
        first, second, other = run(3), run(3), run(None)
    assert all(map(torch.equal, first, second)) and not torch.equal(first[0], other[0])
    # out is linear in v: <do, out> = <dv, v> of the same draws only.
    for out, dv in (first, other):
        left, right = (do.double() * out).sum(), (dv.double() * v.detach()).sum()
        assert abs(left - right) <= 1e-2 * (do.double() * out).norm()
