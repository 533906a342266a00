"""Dropout of attention's weights: which are dropped, by whom, and what that gives."""

import dataclasses
import math
import re

import pytest
import torch
from attention_reference import attention as formula
from backward_programs import SCORES, draw_inputs, gradients
from inductor_ext.templates import (
    attention_backward_launch,
    attention_documents,
    attention_far,
    attention_launch,
)
from inductor_ext.templates.attention_dropout import Dropout

from inductor_ext import measure, ops
from inductor_ext.ops import _attention as operation
from inductor_ext.ops import _attention_dropout as drawing
from inductor_ext.testing import launch_binaries, launches_interpreted

BF16, FP32 = torch.bfloat16, torch.float32
Forward, Backward = attention_launch.Tiling, attention_backward_launch.Tiling
SEED = 0x1234567890ABCDEF


def dropout(probability=0.3, seed=SEED):
    return Dropout(torch.tensor([seed]), probability)


def dropping(name):
    score = SCORES[name]
    return dataclasses.replace(score, program=dataclasses.replace(score.program, dropout=True))


def forward(score, q, k, v, inputs, chosen, drop):
    with launches_interpreted(attention_launch, attention_documents):
        return attention_launch.forward(
            q, k, v, inputs, score.numbers, score.program, "ieee", chosen, drop
        )


def backward(score, q, k, v, inputs, do, dlse, out, lse, drop, needed=None, **tilings):
    needed = needed or [True] * 3 + [wanted for *_, wanted in score.inputs]
    with launches_interpreted(attention_backward_launch, attention_far, attention_documents):
        return attention_backward_launch.backward(
            do, dlse, q, k, v, inputs, score.numbers, score.program, out, lse, needed, "ieee",
            dropout=drop, **tilings,
        )  # fmt: skip


# --- which pairs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [Forward(16, 16, 4, 1), Forward(64, 32, 4, 1, merged=True)])
def test_forward_draws_by_place(chosen):
    """Whatever the tiles. Weights are equal, values unit vectors, so that out is what is kept."""
    score, drop = dropping("scale"), dropout()
    q, k, v = (
        torch.zeros(2, 2, 40, 16),
        torch.zeros(2, 1, 33, 16),
        torch.eye(33).expand(2, 1, -1, -1),
    )
    out, lse = forward(score, q, k, v, [], chosen, drop)
    kept = drawing.kept(drop, 2, 2, 0, 40, 33)
    torch.testing.assert_close(out, kept * drop.scale / 33)
    torch.testing.assert_close(lse, torch.full((2, 2, 40), math.log(33)))


def test_blocks_of_rows_draw_alike():
    drop = dropout()
    whole = drawing.kept(drop, 2, 3, 0, 70, 50)
    parts = [drawing.kept(drop, 2, 3, at, 35, 50) for at in (0, 35)]
    assert torch.equal(torch.cat(parts, 2), whole)


def test_known_words():
    """Philox4x32-7's answers to its authors' test vectors."""
    names = ["zeros", "ones"]
    counters = [0, 0xFFFFFFFF]
    found = {}
    for name, n in zip(names, counters, strict=True):
        counter = tuple(torch.tensor([n]) for _ in range(4))
        seed = torch.tensor([0 if n == 0 else -1])
        found[name] = [int(w) for w in drawing._philox(counter, seed, 7)]
    assert found["zeros"] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert found["ones"] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


@pytest.mark.parametrize("probability", [0.1, 0.75])
def test_share_and_independence(probability):
    """The kept share of heads, rows and keys has a coin's mean and variance; neighbours along any
    axis, and other seeds, are uncorrelated. Bounds are 5 standard deviations."""
    kept = drawing.kept(dropout(probability), 2, 4, 0, 128, 128).double()
    p = 1 - probability
    spread = math.sqrt(p * (1 - p))
    assert abs(kept.mean() - p) <= 5 * spread / math.sqrt(kept.numel())
    for over in ((2, 3), (0, 1, 3), (0, 1, 2)):
        means = kept.mean(over).flatten()
        of_one = kept.numel() / means.numel()
        assert (means - p).abs().max() <= 5 * spread / math.sqrt(of_one)
        ratio = means.var() * of_one / (p * (1 - p))
        assert abs(ratio - 1) <= 5 * math.sqrt(2 / (means.numel() - 1))
    z = (kept - p) / spread
    others = [z.roll(n, d) for d, n in ((0, 1), (1, 1), (2, 1), (3, 1), (2, 8), (3, 8), (3, 16))]
    for seed in (SEED + 1, SEED ^ (1 << 40)):  # both words of a seed count
        other = drawing.kept(dropout(probability, seed), 2, 4, 0, 128, 128)
        others.append((other.double() - p) / spread)
    for other in others:
        assert abs((z * other).mean()) <= 5 / math.sqrt(z.numel())


@pytest.mark.parametrize("probability", [2**-10, 0.1, 0.25, 0.5, 1 - 2**-10])
def test_steps_of_probabilities(probability):
    """Within half a step, and scaled by what is kept, not by what was asked for."""
    drop = dropout(probability)
    share = (drop.below + 2**15) / 2**16
    assert abs(share - (1 - probability)) <= 2**-17 and drop.scale * share == pytest.approx(1)
    passed = drop.values()["drop_below"]
    assert -(2**31) <= passed < 2**31 and passed == drop.below * 2**16


# --- numbers --------------------------------------------------------------------------------------

CASES = [
    ("scale", 33, 20, 16, BF16), ("lower right", 20, 40, 96, FP32), ("documents", 40, 40, 16, BF16),
    ("causal slot bias", 33, 33, 16, FP32), ("learned bias", 20, 33, 16, FP32),
    ("temperature", 33, 20, 16, FP32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "columns", "head", "dtype"), CASES)
def test_results_and_gradients(name, rows, columns, head, dtype):
    """By eager's own error of the same pairs, from fp64; heads share keys."""
    score, drop, one_loop = dropping(name), dropout(), dtype == BF16
    q = torch.randn(1, 2, rows, head).to(dtype)
    k, v = (torch.randn(1, 1, columns, head).to(dtype) for _ in range(2))
    do, dlse = torch.randn(1, 2, rows, head).to(dtype), torch.randn(1, 2, rows)
    inputs = draw_inputs(score, 1, 2, rows, columns)
    factors = drawing.kept(drop, 1, 2, 0, rows, columns).double() * drop.scale
    wide = [t.double() for t in (q, k, v)]
    wide_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    right_out, right_lse, right = gradients(
        score, *wide, wide_inputs, do.double(), dlse.double(), factors
    )
    eager_out, _, eager = gradients(score, q, k, v, inputs, do, dlse, factors)
    out, lse = forward(score, q, k, v, inputs, Forward(16, 32, 4, 1, one_loop), drop)
    tilings = {
        "keys": Backward(16, 32, 4, 1, one_loop, early=one_loop),
        "rows": Backward(32, 16, 4, 1, one_loop, early=one_loop),
    }
    *found, grads = backward(score, q, k, v, inputs, do, dlse, out, lse, drop, **tilings)
    found += [g for g in grads if g.numel()]
    none = right_lse == -torch.inf
    torch.testing.assert_close(lse[~none].double(), right_lse[~none], rtol=1e-6, atol=2e-6)
    results = zip([out, *found], [right_out, *right], [eager_out, *eager], strict=True)
    for i, (mine, truth, baseline) in enumerate(results):
        narrow = dtype if dtype != FP32 else None
        verdict = measure.check(mine, truth, baseline.to(mine.dtype), rounding=narrow)
        assert verdict.ok, f"{i}: {verdict.reason}"


# --- the function ---------------------------------------------------------------------------------


def draw(dtype=torch.float64, rows=20, columns=30):
    q = torch.randn(2, 4, rows, 8, dtype=dtype)
    k, v = (torch.randn(2, 2, columns, 8, dtype=dtype) for _ in range(2))
    return [t.requires_grad_() for t in (q, k, v)]


def test_function_and_formula(monkeypatch):
    """One seed of torch's generator, drawn where it is called; blocks of rows change nothing."""
    q, k, v = draw()
    given = {"causal": True, "softcap": 2.0, "dropout": 0.25, "return_lse": True}
    torch.manual_seed(3)
    out, lse = ops.attention(q, k, v, **given)
    torch.manual_seed(3)
    drop = Dropout(drawing.seed_of(q.device), 0.25)
    _, right_lse, weights = formula(q, k, v, causal=True, softcap=2.0)
    factors = drawing.kept(drop, 2, 4, 0, 20, 30) * drop.scale
    right = (weights.flatten(1, 2) * factors) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close((out, lse), (right, right_lse))
    mine = torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v))
    truth = torch.autograd.grad(right.sin().sum() + right_lse.sum(), (q, k, v))
    torch.testing.assert_close(mine, truth)
    monkeypatch.setattr(operation.composed, "LARGEST_BLOCK", 700)
    torch.manual_seed(3)
    again = ops.attention(q, k, v, **given)
    torch.testing.assert_close(again, (out, lse))
    again = torch.autograd.grad(again[0].sin().sum() + again[1].sum(), (q, k, v))
    torch.testing.assert_close(again, truth)
    assert not torch.equal(ops.attention(q, k, v, **given)[0], out)


def test_gradients_of_gradients():
    def fn(q, k, v):
        torch.manual_seed(3)
        return ops.attention(q, k, v, softcap=2.0, dropout=0.25)

    q, k, v = draw(rows=3, columns=5)
    assert torch.autograd.gradcheck(fn, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, (q, k, v), fast_mode=True)


def test_opcheck():
    q, k, v = draw(FP32, 5, 7)
    op = torch.ops.inductor_ext.attention.default
    seed = torch.tensor([SEED])
    text = "v0 = mul.Tensor(s, 0.5); v0"
    torch.library.opcheck(op, (q, k, v, [], [], text, "zero", seed, 0.25))


# --- machine code ---------------------------------------------------------------------------------


def meta(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def test_machine_code():
    """For an H200: one draw for eight pairs, which go through no shared memory."""
    drop = Dropout(meta(1, dtype=torch.int64), 0.1)
    program = dropping("causal").program
    q, lse = meta(2, 8, 4096, 128), meta(2, 8, 4096, dtype=FP32)

    def launch():
        attention_launch.forward(q, q, q, [], (), program, "ieee", dropout=drop)
        attention_backward_launch.backward(
            q, None, q, q, q, [], (), program, q, lse, [True] * 3, "ieee", dropout=drop
        )

    modules = attention_launch, attention_backward_launch
    kernels = [b for b in launch_binaries(launch, *modules) if b.name != "statistics_kernel"]
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel.spills <= 32 and kernel.shared_bytes <= 227 << 10
        # An exponential for each pair. A draw has seven rounds of two products, the first of rows
        # or keys only, and is for eight pairs; of the transposed tiles for four.
        pairs = kernel.ptx.count("ex2.approx")
        products = len(re.findall(r"mul\.(?:hi|wide)\.u32", kernel.ptx))
        assert pairs < products <= 14 * pairs / (4 if kernel.name == "attention_keys" else 8)
        loop = kernel.ptx[: kernel.ptx.rindex("wgmma.mma_async")]
        assert not re.search(r"\bst\.shared\.v4|\bstmatrix", loop)
