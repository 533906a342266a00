"""Attention's forward in the interpreter: out and lse against fp64, by eager's own error."""

import dataclasses
import itertools

import pytest
import torch
from backward_programs import SCORES, attention, draw_inputs
from inductor_ext.templates import attention_documents, attention_text
from inductor_ext.templates import attention_launch as launch
from inductor_ext.templates.attention_launch import Tiling
from inductor_ext.templates.attention_program import Span

from inductor_ext import measure
from inductor_ext.testing import launches_interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, MERGED = Tiling(16, 16, 4, 2), Tiling(16, 32, 4, 2, merged=True)


@pytest.fixture(autouse=True)
def poisoned():
    """``torch.empty`` gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def ours(score, q, k, v, inputs=(), chosen=PLAIN, precision="ieee", empty="zero"):
    program = dataclasses.replace(score.program, empty=empty)
    with launches_interpreted(launch, attention_documents):
        return launch.forward(q, k, v, inputs, score.numbers, program, precision, chosen)


def draw(rows, columns, head=16, value=None, dtype=BF16, batch=2, heads=4, kv_heads=2):
    q = torch.randn(batch, heads, rows, head, dtype=dtype)
    k = torch.randn(batch, kv_heads, columns, head, dtype=dtype)
    return q, k, torch.randn(batch, kv_heads, columns, value or head, dtype=dtype)


def truth(score, q, k, v, inputs=()):
    """(out, lse) in fp64, and eager's."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = attention(score, q.double(), k.double(), v.double(), wide)
    return exact, attention(score, q, k, v, inputs)


def judge(score, q, k, v, inputs=(), rtol=1e-6, **options):
    (right, right_lse), (eager, _) = truth(score, q, k, v, inputs)
    (out, lse), again = (ours(score, q, k, v, inputs, **options) for _ in range(2))
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    assert out.dtype == q.dtype and out.shape == right.shape
    verdict = measure.check(out, right, eager, rounding=None if q.dtype == FP32 else q.dtype)
    assert verdict.ok, verdict.reason
    none = right_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, none) and not out[none].any()
    torch.testing.assert_close(lse[~none].double(), right_lse[~none], rtol=rtol, atol=2e-6)
    return out, lse


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("dtype", "chosen"), [(BF16, PLAIN), (FP32, MERGED)])
def test_scores(name, dtype, chosen):
    score = SCORES[name]
    q, k, v = draw(45, 45, dtype=dtype, heads=2, kv_heads=1)
    judge(score, q, k, v, draw_inputs(score, 2, 2, 45, 45), chosen=chosen)


@pytest.mark.parametrize("name", ["scale", "sinks", "softcap", "documents", "learned bias"])
@pytest.mark.parametrize("chosen", [MERGED, dataclasses.replace(PLAIN, near=0)])
def test_forms(name, chosen):
    score = SCORES[name]
    q, k, v = draw(50, 64, dtype=FP16, batch=1, heads=2, kv_heads=2)
    judge(score, q, k, v, draw_inputs(score, 1, 2, 50, 64), chosen=chosen)


SHAPES = [
    (1, 1, 64, 64), (17, 5, 16, 16), (113, 203, 96, 96), (64, 128, 192, 128), (130, 257, 80, 80),
    (257, 1, 72, 64), (40, 70, 160, 32), (20, 33, 576, 512),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "head", "value"), SHAPES)
@pytest.mark.parametrize("name", ["lower right", "window"])
def test_shapes_with_the_tiles_of_a_card(rows, columns, head, value, name):
    q, k, v = draw(rows, columns, head, value, batch=1)
    judge(SCORES[name], q, k, v, chosen=None)


@pytest.mark.parametrize("heads", [(6, 1), (6, 3), (3, 3)])
def test_groups(heads):
    q, k, v = draw(33, 41, heads=heads[0], kv_heads=heads[1])
    judge(SCORES["causal slot bias"], q, k, v, [torch.randn(2, heads[0], 1, 41)])


@pytest.mark.parametrize("chosen", [PLAIN, MERGED])
@pytest.mark.parametrize("name", ["lower right", "learned bias"])
def test_rows_that_keep_nothing(name, chosen):
    """Of more rows than keys, and where a bias is -inf."""
    score = SCORES[name]
    q, k, v = draw(50, 20)
    inputs = draw_inputs(score, 2, 4, 50, 20)
    for x in inputs:
        x[:, :, 3:20] = -torch.inf
    out, lse = judge(score, q, k, v, inputs, chosen=chosen)
    none = lse == -torch.inf
    assert none.any() and not none.all()
    nan, same = ours(score, q, k, v, inputs, chosen=chosen, empty="nan")
    assert nan[none].isnan().all() and torch.equal(nan[~none], out[~none])
    assert torch.equal(same, lse)


@pytest.mark.parametrize("factor", [30.0, 1e4])
def test_huge_scores(factor):
    q, k, v = draw(40, 40, dtype=FP32)
    judge(SCORES["causal"], q * factor, k, v, rtol=1e-5)
    judge(SCORES["negative scale"], q * factor, k, v, rtol=1e-5)


def test_layouts():
    """Transposed, cut out of something larger, expanded, not dense, not on 16 bytes."""
    q, k, v = draw(40, 48, 32)
    expected = ours(SCORES["causal"], q, k, v)[0]

    def interleaved(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def cut(t):
        return torch.nn.functional.pad(t, (3, 2, 1, 1))[:, :, 1:-1, 3:-2]

    def sparse(t):
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]

    for ways in itertools.product([interleaved, cut, sparse], repeat=2):
        moved = ways[0](q), ways[1](k), ways[0](v)
        assert torch.equal(ours(SCORES["causal"], *moved)[0], expected)
    out = ours(SCORES["causal"], interleaved(q), k, v)[0]
    assert out.stride() == torch.empty_like(interleaved(q)).stride()
    once = k[:1].expand_as(k), v[:1].expand_as(v)
    same = ours(SCORES["causal"], q, *(t.contiguous() for t in once))[0]
    assert torch.equal(ours(SCORES["causal"], q, *once)[0], same)


def test_expanded_inputs():
    score = SCORES["full bias"]
    program = dataclasses.replace(
        score.program, inputs=(dataclasses.replace(score.program.inputs[0], axes="bqk"),)
    )
    q, k, v = draw(40, 48, 16)
    bias = torch.randn(2, 1, 40, 48)
    expected = judge(dataclasses.replace(score, program=program), q, k, v, [bias])[0]
    wide = dataclasses.replace(score, program=program)
    assert torch.equal(ours(wide, q, k, v, [bias.expand(2, 4, 40, 48)])[0], expected)


@pytest.mark.parametrize("ordered", [True, False])
def test_documents_whose_tiles_may_be_whole(ordered):
    """Spans say nothing of documents: what is kept whole is so but for them."""
    whole = (Span("0", "columns", "0", "columns"),)
    score = SCORES["documents"]
    score = dataclasses.replace(
        score, program=dataclasses.replace(score.program, row_spans=whole, column_spans=whole)
    )
    q, k, v = draw(70, 90, batch=1)
    ids = [torch.randint(0, 3, s, dtype=torch.int32) for s in ((1, 1, 70, 1), (1, 1, 1, 90))]
    ids[0] = ids[0].sort(2).values
    if ordered:
        ids[1] = ids[1].sort(3).values
    judge(score, q, k, v, ids)


def test_hulls_of_documents():
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 3, 3], dtype=torch.int32)
    inputs = ids.view(1, 1, 10, 1), ids.view(1, 1, 1, 10)
    with launches_interpreted(attention_documents):
        found = attention_documents.hulls(SCORES["documents"].program, inputs, "q", 2)
    expected = [[0, 3, 0, 3], [0, 7, 0, 0], [3, 7, 3, 7], [3, 8, 0, 0], [8, 10, 8, 10]]
    assert found.tolist() == [[expected]]


def test_worked_example():
    """Two rows of six keys; unnormalised sums and results are known to four digits."""
    q = torch.tensor([[2.0, -1], [-2, 5]])
    k = torch.tensor([[1.0, -2], [0, 3], [4, 1], [-1, 2], [5, 0], [2, -4]])
    v = torch.tensor([[3.0, 0], [1, 2], [-2, 1], [5, -3], [4, 0], [-1, 2]])
    score = dataclasses.replace(
        SCORES["scale"], program=dataclasses.replace(SCORES["scale"].program, scale=1.0)
    )
    out, lse = ours(score, *(t[None, None] for t in (q, k, v)))
    expected = torch.tensor([[3.1766, 0.2698], [1.1897, 1.7629]])
    torch.testing.assert_close(out[0, 0], expected, atol=1e-4, rtol=0)
    sums = torch.tensor([10.0, 15.0]) + torch.tensor([1.1876, 1.0498]).log()
    torch.testing.assert_close(lse[0, 0], sums, atol=1e-4, rtol=0)


def test_nothing():
    for rows, columns in ((0, 5), (5, 0), (0, 0)):
        out, lse = ours(SCORES["causal"], *draw(rows, columns))
        assert out.shape == (2, 4, rows, 16) and not out.any()
        assert (lse == -torch.inf).all()
    assert ours(SCORES["causal"], *draw(5, 0), empty="nan")[0].isnan().all()


@pytest.mark.parametrize(
    ("head", "sizes"),
    [(16, [16]), (64, [64]), (72, [64, 16]), (96, [64, 32]), (160, [128, 32]), (192, [128, 64]),
     (576, [512, 64]), (7, [16]), (112, [64, 32, 16])],
)  # fmt: skip
def test_heads_are_cut_into_powers_of_two(head, sizes):
    cut = attention_text.pieces(head)
    assert [piece.size for piece in cut] == sizes
    assert sum(piece.valid for piece in cut) == head
