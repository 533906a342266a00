"""The Hopper attention forward on the card: `pytest -m gpu tests/gpu`."""

import pathlib
import sys

import pytest
import torch
from inductor_ext.templates import attention_backward_gluon_launch as backward
from inductor_ext.templates import attention_columns_gluon_launch as column_sums
from inductor_ext.templates import attention_gluon_launch as launch
from inductor_ext.templates.attention_program import Input, Program, Span

from inductor_ext.ops._attention_score import positions, read, write
from inductor_ext.ops._attention_translate import program

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "attention"))
from backward_programs import attention
from hopper_gradients import NAMES, Problem
from score_ways import INF, SCORES, made, score, tensors

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL = Program(scale=0.125, keep="keep = k <= q", row_spans=(Span("0", "q1 + 1", "0", "q0 + 1"),))
CAUSAL_TEXT = (
    "v0 = mul.Tensor(s, 0.125); v1 = le.Tensor(k, q); v2 = where.ScalarOther(v1, v0, -inf); v2"
)


@pytest.fixture(autouse=True)
def hopper():
    if not launch.available() or not launch._hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper card and a Triton of attention_gluon_launch.VERSIONS")


def draw(batch, heads, kv_heads, rows, columns, d, dv, dtype):
    shapes = (batch, rows, heads, d), (batch, columns, kv_heads, d), (batch, columns, kv_heads, dv)
    return [torch.randn(s, device="cuda").to(dtype).transpose(1, 2) for s in shapes]


def composed(text, q, k, v, inputs, numbers, dtype):
    """(out, lse), one batch entry at a time."""
    found = []
    for i in range(q.shape[0]):
        part = [x[i : i + 1] if x.shape[0] > 1 else x for x in inputs]
        sizes = (1, *q.shape[1:3], k.shape[2])
        group = q.shape[1] // k.shape[1]
        kk, vv = (x[i : i + 1].repeat_interleave(group, 1).to(dtype) for x in (k, v))
        wide = [x.to(dtype) if x.is_floating_point() else x for x in part]
        s = (q[i : i + 1].to(dtype) @ kk.mT).double()
        r = read(text)(s, *positions(sizes, "cuda"), *sizes[2:], numbers, wide)
        r = r.double().expand(sizes)
        lse = r.logsumexp(-1)
        p = torch.exp(r - lse.masked_fill(lse == -INF, 0)[..., None])
        found.append((p.to(dtype) @ vv, lse))
    return tuple(map(torch.cat, zip(*found, strict=True)))


def judge(q, k, v, program, text, poison, inputs=(), numbers=()):
    """Three runs agree, and are right by fp64: twice eager's error, and the dtype's rounding."""
    runs = []
    for _ in range(3):
        poison()
        runs.append(launch.forward(q, k, v, inputs, numbers, program))
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    out, lse = runs[0]
    right, right_lse = composed(text, q, k, v, inputs, numbers, torch.float64)
    eager, _ = composed(text, q, k, v, inputs, numbers, q.dtype)
    allowed = 2 * (eager.double() - right).abs().max()
    assert (out.double() - right).abs().max() <= allowed + right.abs().max() * torch.finfo(
        q.dtype
    ).eps
    finite = right_lse > -1e30
    torch.testing.assert_close(lse.double()[finite], right_lse[finite], rtol=1e-5, atol=1e-4)
    assert ((lse == -INF) == (right_lse == -INF)).all()


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "columns", "d", "dv", "dtype"),
    [(2, 16, 16, 2048, 2048, 128, 128, BF16), (2, 16, 4, 2048, 2048, 64, 64, FP16),
     (2, 4, 2, 257, 257, 128, 128, BF16), (1, 4, 1, 799, 799, 64, 128, BF16),
     (1, 2, 2, 1, 1, 128, 128, BF16), (1, 2, 1, 17, 700, 64, 64, FP16),
     (3, 6, 2, 1000, 257, 128, 128, BF16)],
)  # fmt: skip
def test_causal(batch, heads, kv_heads, rows, columns, d, dv, dtype, poison):
    q, k, v = draw(batch, heads, kv_heads, rows, columns, d, dv, dtype)
    judge(q, k, v, CAUSAL, CAUSAL_TEXT, poison)


def test_slices_of_one_projection(poison):
    qkv = torch.randn(2, 515, 3, 4, 64, device="cuda", dtype=BF16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    assert launch.applies(q, k, v, CAUSAL)
    judge(q, k, v, CAUSAL, CAUSAL_TEXT, poison)


@pytest.mark.parametrize(
    ("name", "d", "heads"),
    [("window", 128, 4), ("sinks and window", 64, 16), ("prefix", 64, 4), ("documents", 128, 16),
     ("padding", 64, 4), ("loaded mask", 64, 4), ("bias", 128, 16), ("alibi", 64, 4),
     ("softcap under a mask", 128, 4)],
)  # fmt: skip
def test_scores(name, d, heads, poison):
    text, found = made(score(SCORES[name]))
    sizes = 2, heads, 610, 777
    inputs = [x.cuda() for x in tensors(sizes)]
    q, k, v = draw(2, heads, heads // 2, 610, 777, d, d, BF16)
    judge(q, k, v, found, text, poison, inputs, [3])


@pytest.mark.parametrize("sizes", [(1, 2, 257, 391), (4, 16, 1024, 1024)])
def test_bias_per_slot(sizes, poison):
    batch, heads, rows, columns = sizes
    slots = torch.randn(1, heads, 1, columns, device="cuda", dtype=BF16)
    text = write(lambda s, b, h, q, k, *rest: s * 0.1 + rest[3][0], [slots], [])
    found = program(text, (Input(BF16, "hk"),), 0, "zero")
    q, k, v = draw(batch, heads, heads, rows, columns, 128, 128, BF16)
    judge(q, k, v, found, text, poison, [slots])


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((2, 3, 610, 776), BF16), ((1, 2, 257, 392), torch.float32), ((4, 16, 1024, 1024), BF16)],
)
def test_bias_per_pair(sizes, dtype, poison):
    batch, heads, rows, columns = sizes
    bias = torch.randn(1, heads, rows, columns, device="cuda", dtype=dtype)
    text = write(lambda s, b, h, q, k, *rest: s * 0.1 + rest[3][0], [bias], [])
    found = program(text, (Input(dtype, "hqk"),), 0, "zero")
    assert launch.staged(found, [bias]) == (0,)
    q, k, v = draw(batch, heads, heads, rows, columns, 128, 128, BF16)
    judge(q, k, v, found, text, poison, [bias])


def test_rows_that_keep_nothing(poison):
    q, k, v = draw(1, 2, 2, 300, 130, 64, 64, BF16)
    text = write(
        lambda s, b, h, q, k, rows, columns, n, x: torch.where(
            q + columns - rows >= k, s * 0.1, -INF
        ), [], [],
    )  # fmt: skip
    for empty, value in (("zero", 0.0), ("nan", torch.nan)):
        out, lse = launch.forward(q, k, v, [], [], program(text, (), 0, empty))
        expected = torch.full_like(out[:, :, :170], value)
        torch.testing.assert_close(out[:, :, :170], expected, rtol=0, atol=0, equal_nan=True)
        assert (lse[:, :, :170] == -INF).all()
        assert out[:, :, 170:].isfinite().all()
    judge(q, k, v, program(text, (), 0, "zero"), text, poison)


@pytest.mark.parametrize(("part", "name"), [(p, n) for p in NAMES for n in NAMES[p]])
@pytest.mark.parametrize(
    ("B", "heads", "kv_heads", "rows", "columns", "d", "dv", "dtype"),
    [(2, 8, 8, 1030, 1030, 128, 128, BF16), (2, 8, 2, 700, 1030, 64, 128, FP16)],
)  # fmt: skip
def test_gradients(part, name, B, heads, kv_heads, rows, columns, d, dv, dtype, poison):
    """dk and dv, and dq, are right, and the same bits in every run."""
    columns += -columns % 8 if "pairs" in name else 0  # else no tensor map describes the matrix
    with torch.device("cuda"):
        problem = Problem(name, B, heads, kv_heads, rows, columns, d, dv, dtype)
    runs = []
    for _ in range(3):
        poison()
        given, results = problem.arguments(part)
        getattr(backward, part)(*given)
        runs.append(results)
    problem.judge(part, runs[0])
    assert all(map(torch.equal, runs[0] * 2, runs[1] + runs[2]))


def test_gradients_of_pairs(poison):
    """Of two heads of all batches; dq of those only."""
    with torch.device("cuda"):
        problem = Problem("pairs", 3, 4, 4, 1030, 1032, 128, 128)
        right = problem.pairs()[:, 1:3]
    runs = []
    for _ in range(3):
        poison()
        given, (dq,) = problem.arguments("rows")
        pairs = torch.full((3, 2, 1152, 1152), torch.nan, device="cuda", dtype=BF16)
        backward.rows(*given, None, pairs, (slice(0, 3), slice(1, 3)))
        runs.append((dq[:, 1:3], pairs[:, :, :1030, :1032]))
        assert dq[:, ::3].isnan().all()
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    assert ((runs[0][1] - right).norm() / right.norm()).item() <= 5e-3
    expected = problem.right[0][:, 1:3]
    assert ((runs[0][0] - expected).norm() / expected.norm()).item() <= 5e-3


@pytest.mark.parametrize("name", ["causal", "window", "slot bias"])
def test_column_sums(name, poison):
    """Of all rows and the heads of a group: by fp64, and the same bits in every run."""
    with torch.device("cuda"):
        problem = Problem(name, 2, 8, 2, 1032, 1030, 128, 64)
        every = torch.eye(1030, dtype=torch.float64).expand(2, 2, 1030, 1030)
        q, k = problem.q.double(), problem.k.double()
        wide = [x.double() for x in problem.inputs]
        weights, lse = attention(problem.score, q, k, every, wide)
    right = weights.sum(2).unflatten(1, (2, 4)).sum(2)
    runs = []
    for _ in range(3):
        poison()
        given = problem.q, problem.k, lse.float(), problem.inputs
        score = problem.score
        runs.append(column_sums.columns(*given, score.numbers, score.program))
    assert (runs[0] - right).abs().max() <= 1e-5 * right.max()
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
