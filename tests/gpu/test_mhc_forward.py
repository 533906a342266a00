"""The forward of mHC on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import pathlib
import sys

import pytest
import torch
from inductor_ext.templates import mhc_gluon_launch, mhc_projection

from inductor_ext import measure, ops
from inductor_ext.ops import _mhc  # noqa: F401  registers the operations
from inductor_ext.ops import _mhc_composed as composed

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "mhc"))
import reference

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V4 = (20, 1e-6, 1e-6, 1e-6, 2.0)


def draw(T, n, H, dtype=BF16, w_dtype=FP32):
    given = reference.draw(T, n, H, dtype, w_dtype=w_dtype)
    post, comb = torch.rand(T, n) * 2, torch.softmax(torch.randn(T, n, n) * 2, -1)
    Y = torch.randn(T, H).to(dtype)
    return tuple(t.cuda() for t in given), tuple(t.cuda() for t in (Y, post, comb))


def judge(found, wide, eager, rows):
    """By fp64, some tokens at a time."""
    for first in range(0, rows, 1024):
        part = slice(first, first + 1024)
        for mine, right, baseline in zip(found, wide(part), eager(part), strict=True):
            verdict = measure.check(mine[part], right, baseline)
            assert verdict.ok, verdict.reason


def doubles(*tensors):
    return [t.double() for t in tensors]


@pytest.mark.parametrize(
    ("T", "n", "H", "dtype", "w_dtype"),
    [(4096, 4, 7168, BF16, FP32), (8192, 4, 4096, BF16, BF16), (1, 4, 7168, BF16, FP32),
     (257, 4, 4096, BF16, FP32), (799, 4, 799, BF16, FP32), (17, 4, 7168, FP16, FP32),
     (1030, 4, 4096, FP32, FP32), (1030, 2, 4096, BF16, FP32), (515, 8, 4096, BF16, FP32),
     (130, 8, 333, FP16, BF16)],
)  # fmt: skip
def test_everything(T, n, H, dtype, w_dtype, poison):
    (X, W, scale, base), (Y, post, comb) = draw(T, n, H, dtype, w_dtype)
    runs = []
    for _ in range(3):
        poison()
        pre = torch.ops.inductor_ext.mhc_pre(X, W, scale, base, *V4)
        X1 = ops.mhc_post(X, Y, post, comb)
        both = torch.ops.inductor_ext.mhc_post_pre(X, Y, post, comb, W, scale, base, *V4)
        head = ops.mhc_head(X, W[:n], scale[:1], base[:n])
        runs.append([*pre, X1, *both, head])
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    apart = torch.ops.inductor_ext.mhc_pre(X1, W, scale, base, *V4)
    assert torch.equal(both[0], X1)
    for mine, other in zip(both[1:], apart, strict=True):
        verdict = measure.check(mine, other.double(), other)
        assert verdict.ok, verdict.reason
    wide = doubles(W, scale, base)
    judge(
        pre,
        lambda s: composed.pre(X[s].double(), *wide, *V4),
        lambda s: composed.pre(X[s], W, scale, base, *V4),
        T,
    )
    judge(
        [X1],
        lambda s: [composed.post(*doubles(X[s], Y[s], post[s], comb[s]))],
        lambda s: [composed.post(X[s], Y[s], post[s], comb[s])],
        T,
    )
    judge(
        [head],
        lambda s: composed.collapse(X[s].double(), wide[0][:n], wide[1][:1], wide[2][:n], *V4[1:3])[
            :1
        ],
        lambda s: composed.collapse(X[s], W[:n], scale[:1], base[:n], *V4[1:3])[:1],
        T,
    )


@pytest.mark.parametrize("H", [4096, 7168])
def test_a_projection_that_fills_the_card_is_exact(H):
    # A miscompiled pipeline is wrong by 1e-4 to 3e-3, at full occupancy only, and not every time.
    (X, W, scale, base), _ = draw(4096, 4, H)
    u, w = X.double().flatten(1), W.double()
    mixes, sqrsum = u @ w.T, u.square().sum(-1)
    for _ in range(10):
        *_, mine, squares = torch.ops.inductor_ext.mhc_pre(X, W, scale, base, *V4)
        assert (mine - mixes).norm() <= 3e-6 * mixes.norm()
        assert (squares - sqrsum).abs().max() <= 1e-5 * sqrsum.max()


@pytest.mark.parametrize(("T", "H"), [(2500, 7168), (4096, 7168), (3333, 5120)])
def test_streams_that_are_projected_where_they_are_made(T, H):
    """To the bit what post makes, at full occupancy, time and again; not quite whole tiles too."""
    (X, *site), given = draw(T, 4, H)
    X1 = ops.mhc_post(X, *given)
    mixes = torch.cat([x.double() @ site[0].double().T for x in X1.flatten(1).split(512)])
    first = torch.ops.inductor_ext.mhc_post_pre(X, *given, *site, *V4)
    assert torch.equal(first[0], X1)
    assert (first[4] - mixes).norm() <= 3e-6 * mixes.norm()
    for _ in range(10):
        again = torch.ops.inductor_ext.mhc_post_pre(X, *given, *site, *V4)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize(("n", "H", "dtype"), [(4, 7168, BF16), (8, 4096, BF16), (4, 4096, FP32)])
def test_a_token_has_the_same_bits_among_any_number(n, H, dtype):
    (X, W, scale, base), (Y, post, comb) = draw(4096, n, H, dtype)

    def run(part):
        pre = torch.ops.inductor_ext.mhc_pre(X[part], W, scale, base, *V4)
        given = X[part], Y[part], post[part], comb[part]
        both = torch.ops.inductor_ext.mhc_post_pre(*given, W, scale, base, *V4)
        return [t[:1] for t in (*pre, ops.mhc_post(*given), *both)]

    few, large = mhc_projection.FEW, 1 + mhc_gluon_launch.LEAST // H
    many = []
    for sizes in ((1, 7, 33, 128, 200, 512, few), (few + 1, 2000), (large, large + 100)):
        if sizes[-1] > 3000:
            continue
        first, *others = (run(slice(1000, 1000 + tokens)) for tokens in sizes)
        for tokens, other in zip(sizes[1:], others, strict=True):
            assert all(map(torch.equal, first, other)), tokens
        many += [first] if sizes[0] > few else []
    # Of pre and post there is no third group.
    assert all(map(torch.equal, many[0][:7], many[-1][:7]))


def test_tf32():
    (X, W, scale, base), _ = draw(4096, 4, 4096)
    torch.set_float32_matmul_precision("high")
    mine = torch.ops.inductor_ext.mhc_pre(X, W, scale, base, *V4)[3]
    right = X.double().flatten(1) @ W.double().T
    assert (mine - right).norm() <= 5e-4 * right.norm()


def test_a_chain_of_layers_without_a_pause(poison):
    """Each kernel starts while the one before it ends; nothing may be read too early."""
    (X, W, scale, base), (Y, _, _) = draw(64, 4, 4096)
    runs = []
    for wait in (True, False):
        poison()
        x = X
        for _ in range(12):
            U, post, comb = ops.mhc_pre(x, W, scale, base)
            if wait:
                torch.cuda.synchronize()
            x = ops.mhc_post(x, U + Y, post, comb)
            if wait:
                torch.cuda.synchronize()
            x = ops.mhc_post_pre(x, U, post, comb, W, scale, base)[0]
        runs.append(x)
    assert torch.equal(*runs)


@pytest.mark.parametrize("T", [1, 600])
def test_in_a_graph_and_compiled(T):
    (X, W, scale, base), (Y, _, _) = draw(T, 4, 4096)

    def layer(X, Y):
        U, post, comb = ops.mhc_pre(X, W, scale, base)
        return U, ops.mhc_post(X, Y, post, comb)

    eager = layer(X, Y)
    assert all(map(torch.equal, eager, torch.compile(layer)(X, Y)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(X, Y)
    for t in captured:
        t.fill_(torch.nan)
    graph.replay()
    assert all(map(torch.equal, eager, captured))
