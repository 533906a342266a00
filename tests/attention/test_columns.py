"""Sums of attention's weights over rows, in the interpreter: against fp64."""

import pytest
import torch
from backward_programs import SCORES, attention, draw_inputs
from inductor_ext.templates import attention_documents
from inductor_ext.templates import attention_launch as launch
from inductor_ext.templates.attention_launch import Tiling

from inductor_ext.testing import launches_interpreted

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = Tiling(16, 32, 4, 2)


def draw(rows, columns, head, dtype, heads=4, kv_heads=2):
    return (
        torch.randn(2, heads, rows, head, dtype=dtype),
        torch.randn(2, kv_heads, columns, head, dtype=dtype),
    )


def weights(score, q, k, inputs):
    """(lse, weights [B, Hkv, G, Sq, Sk]) in fp64: values of ones and zeros give them."""
    heads, kv_heads, columns = q.shape[1], k.shape[1], k.shape[2]
    ones = torch.eye(columns, dtype=torch.float64).expand(2, kv_heads, columns, columns)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    out, lse = attention(score, q.double(), k.double(), ones, wide)
    return lse, out.unflatten(1, (kv_heads, heads // kv_heads))


def judge(score, q, k, inputs, first_row, chosen=SMALL, **more):
    lse, each = weights(score, q, k, inputs)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    with launches_interpreted(launch, attention_documents):
        given = q, k, lse.float(), inputs, score.numbers, score.program, "ieee", first_row, chosen
        sums, again = (launch.columns(*given, **more) for _ in range(2))
    torch.use_deterministic_algorithms(before)
    right = each[:, :, :, first_row:].sum((2, 3))
    assert torch.equal(sums, again) and sums.dtype == FP32
    assert (sums - right).norm() <= 2e-6 * right.norm()
    return sums, lse


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("first_row", [0, 21])
def test_scores(name, first_row):
    score = SCORES[name]
    q, k = draw(45, 45, 16, BF16, 2, 1)
    judge(score, q, k, draw_inputs(score, 2, 2, 45, 45), first_row)


@pytest.mark.parametrize(
    ("rows", "columns", "head", "first_row"),
    [(1, 1, 64, 0), (113, 203, 96, 81), (130, 257, 80, 0), (64, 20, 192, 63), (20, 33, 256, 1)],
)
def test_shapes_with_the_tiles_of_a_card(rows, columns, head, first_row):
    q, k = draw(rows, columns, head, BF16)
    judge(SCORES["lower right"], q, k, [], first_row, None)


@pytest.mark.parametrize("heads", [(6, 1), (3, 3)])
def test_a_group_is_summed_and_weights_of_a_row_are_one(heads):
    q, k = draw(33, 50, 16, FP32, *heads)
    sums, lse = judge(SCORES["causal"], q, k, [], 5)
    expected = torch.full((2, heads[1]), 28.0 * heads[0] / heads[1])
    assert lse.isfinite().all()
    torch.testing.assert_close(sums.sum(-1), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "kv_heads"), [("causal", 2), ("learned bias", 4)])
def test_few_rows_by_a_pass_over_the_keys(name, kv_heads):
    """Programs of two tiles and of one or three, for all heads of a group."""
    score = SCORES[name]
    q, k = draw(70, 70, 16, BF16, 4, kv_heads)
    judge(score, q, k, draw_inputs(score, 2, 4, 70, 70), 57, programs=8)


def test_rows_that_keep_nothing_add_nothing():
    q, k = draw(50, 20, 16, FP32)
    sums, lse = judge(SCORES["lower right"], q, k, [], 10)
    assert (lse == -torch.inf).any() and sums.isfinite().all()


def test_one_head_of_any_length():
    q, k, program = torch.randn(1, 1, 33, 16), torch.randn(1, 1, 40, 16), SCORES["scale"].program
    lse = (q @ k.mT * program.scale).logsumexp(-1)
    with launches_interpreted(launch):
        found = launch.columns(q, k, lse, [], [], program, "ieee", 5, SMALL)
    torch.testing.assert_close(found.sum(), torch.tensor(28.0), rtol=1e-5, atol=0)


def test_nothing():
    q, k = draw(9, 9, 16, FP32)
    lse = torch.zeros(2, 4, 9)
    with launches_interpreted(launch):
        none = launch.columns(q, k, lse, [], [], SCORES["scale"].program, "ieee", 9)
        assert none.shape == (2, 2, 9) and not none.any()
        empty = launch.columns(q, k[:, :, :0], lse, [], [], SCORES["scale"].program, "ieee", 0)
        assert empty.shape == (2, 2, 0)
