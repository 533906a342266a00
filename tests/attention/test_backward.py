"""Attention's backward in the interpreter: every gradient against fp64, by eager's own error."""

import dataclasses

import pytest
import torch
from backward_programs import SCORES, draw_inputs, gradients
from inductor_ext.templates import attention_backward_launch as launch
from inductor_ext.templates import attention_documents, attention_far

from inductor_ext import measure
from inductor_ext.testing import launches_interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Tiling = launch.Tiling
TWO_LOOPS = {"keys": Tiling(16, 32, 4, 1), "rows": Tiling(32, 16, 4, 1)}
ONE_LOOP = {
    "keys": Tiling(32, 16, 4, 1, merged=True, early=True),
    "rows": Tiling(16, 32, 4, 1, merged=True, early=True),
}


def ours(score, q, k, v, inputs, do, dlse, out, lse, needed=None, **tilings):
    needed = needed or [True] * 3 + [wanted for *_, wanted in score.inputs]
    with launches_interpreted(launch, attention_far, attention_documents):
        return launch.backward(
            do, dlse, q, k, v, inputs, score.numbers, score.program, out, lse, needed, "ieee",
            **tilings,
        )  # fmt: skip


def draw(score, rows, columns, head=16, value=16, dtype=FP32, batch=1, heads=2, kv_heads=1):
    q = torch.randn(batch, heads, rows, head).to(dtype)
    k = torch.randn(batch, kv_heads, columns, head).to(dtype)
    v = torch.randn(batch, kv_heads, columns, value).to(dtype)
    inputs = draw_inputs(score, batch, heads, rows, columns)
    do = torch.randn(batch, heads, rows, value).to(dtype)
    return q, k, v, inputs, do, torch.randn(batch, heads, rows)


def judge(score, q, k, v, inputs, do, dlse, **options):
    wide = [t.double() for t in (q, k, v)]
    wide_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    wide_dlse = None if dlse is None else dlse.double()
    _, lse, right = gradients(score, *wide, wide_inputs, do.double(), wide_dlse)
    out, _, eager = gradients(score, q, k, v, inputs, do, dlse)
    given = score, q, k, v, inputs, do, dlse, out, lse.float()
    *found, grads = ours(*given, **options)
    found += [g for g in grads if g.numel()]
    assert [g.shape for g in found] == [g.shape for g in right]
    for mine, truth, baseline in zip(found, right, eager, strict=True):
        narrow = q.dtype if q.dtype != FP32 else None
        verdict = measure.check(mine, truth, baseline.to(mine.dtype), rounding=narrow)
        assert verdict.ok, verdict.reason
    return given, found


def flat(result):
    *found, grads = result
    return [*found, *(g for g in grads if g.numel())]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("dtype", "tilings"), [(FP32, ONE_LOOP), (BF16, TWO_LOOPS)])
def test_scores(name, dtype, tilings):
    score = SCORES[name]
    judge(score, *draw(score, 70, 70, dtype=dtype), **tilings)


@pytest.mark.parametrize(
    ("rows", "columns", "head", "value"),
    [(1, 1, 16, 16), (17, 5, 80, 16), (5, 70, 96, 16), (113, 131, 16, 48), (64, 128, 64, 64)],
)
@pytest.mark.parametrize("name", ["lower right", "slot bias"])
def test_sizes(rows, columns, head, value, name):
    score = SCORES[name]
    judge(score, *draw(score, rows, columns, head, value), **ONE_LOOP)


@pytest.mark.parametrize(("head", "value"), [(128, 128), (192, 128), (576, 512)])
def test_default_tilings(head, value):
    score = SCORES["causal"]
    judge(score, *draw(score, 150, 150, head, value, BF16, heads=1))


@pytest.mark.parametrize("name", ["lower right", "learned bias", "temperature"])
def test_groups_and_batches(name):
    score = SCORES[name]
    tensors = draw(score, 20, 20, batch=2, heads=6, kv_heads=2)
    judge(score, *tensors, **TWO_LOOPS)
    *more, dlse = tensors
    judge(score, *more, None, **ONE_LOOP)
    judge(score, *more[:4], torch.zeros_like(more[4]), dlse, **ONE_LOOP)


@pytest.mark.parametrize(
    ("name", "matrices"),
    [("learned bias", 1), ("learned bias", 6), ("bias of a batch", 4), ("one bias", 3),
     ("full bias", 5)],
)  # fmt: skip
def test_pairs_come_in_parts(name, matrices, monkeypatch):
    """Gradients for pairs of so many matrices are in memory at a time, in whatever order."""
    monkeypatch.setattr(launch, "PAIR_BYTES", matrices * 128 * 128 * 4)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # memory is NaN before
    try:
        score = SCORES[name]
        judge(score, *draw(score, 20, 30, batch=3, heads=2, kv_heads=1), **ONE_LOOP)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "batch"), [("full bias", 2), ("two biases", 2)])
def test_pairs_of_whole_tiles(name, batch, monkeypatch):
    """Where nothing is summed they are stored where they belong."""
    monkeypatch.setattr(launch, "PAIR_BYTES", 2 * 128 * 128 * 4)
    score = SCORES[name]
    judge(score, *draw(score, 128, 128, batch=batch), **ONE_LOOP)


def test_fp16_and_large_scores():
    score = SCORES["causal"]
    q, *rest = draw(score, 70, 70, dtype=FP16)
    judge(score, q * 20, *rest, **TWO_LOOPS)


@pytest.mark.parametrize("empty", ["zero", "nan"])
@pytest.mark.parametrize("tilings", [ONE_LOOP, TWO_LOOPS])
def test_rows_without_keys(empty, tilings):
    """Their gradients are 0, whatever the forward gave there; so are those of unseen keys."""
    score = SCORES["lower right"]
    score = dataclasses.replace(score, program=dataclasses.replace(score.program, empty=empty))
    given, found = judge(score, *draw(score, 70, 40), **tilings)
    *before, out, lse = given
    out = out.clone()
    out[:, :, :30] = 0.0 if empty == "zero" else torch.nan
    assert (lse[:, :, :30] == -torch.inf).all()
    again = flat(ours(*before, out, lse, **tilings))
    assert all(map(torch.equal, found, again)) and not found[0][:, :, :30].any()
    score = SCORES["two spans"]
    judge(score, *draw(score, 45, 70), **tilings)


def test_same_bits_again():
    score = SCORES["causal slot bias"]
    given, found = judge(score, *draw(score, 70, 70, dtype=BF16, kv_heads=2), **ONE_LOOP)
    assert all(map(torch.equal, found, flat(ours(*given, **ONE_LOOP))))


def test_what_is_not_needed():
    score = SCORES["temperature"]
    given, found = judge(score, *draw(score, 40, 40), **ONE_LOOP)
    for i in range(5):
        needed = [j == i for j in range(5)]
        *some, grads = ours(*given, needed, **ONE_LOOP)
        some += grads
        assert torch.equal(some[i], found[i])
        assert not any(t.numel() for j, t in enumerate(some) if j != i)


def test_layouts():
    """[B, S, H, D] transposed, slices of one projection, what descriptors can't describe, and what
    is not dense in its last dimension: the same bits, in the layout of torch.empty_like."""
    score = SCORES["causal"]
    given, found = judge(score, *draw(score, 40, 40, 24, 24, kv_heads=2), **ONE_LOOP)
    _, q, k, v, inputs, do, *rest = given

    def laid(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    odd = torch.cat([q, k, v, do, q[..., :1]], -1)  # rows of 97 numbers
    layouts = [
        [*map(laid, (q, k, v, do))],
        [*odd.split(24, -1)[:4]],
        [t.mT.contiguous().mT for t in (q, k, v, do)],
        [q, k, v, do[..., :1].expand_as(do)],
    ]
    for q1, k1, v1, do1 in layouts[:3]:
        other = flat(ours(score, q1, k1, v1, inputs, do1, *rest, **ONE_LOOP))
        assert all(map(torch.equal, found, other))
    assert found[0].stride() == q.stride()
    dq, dk, *_ = ours(score, *layouts[0][:3], inputs, layouts[0][3], *rest, **ONE_LOOP)
    assert (dq.stride(), dk.stride()) == (layouts[0][0].stride(), layouts[0][1].stride())
    q, k, v, do = layouts[3]
    same = flat(ours(score, q, k, v, inputs, do.contiguous(), *rest, **ONE_LOOP))
    assert all(map(torch.equal, same, flat(ours(score, q, k, v, inputs, do, *rest, **ONE_LOOP))))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0)])
def test_no_pairs(rows, columns):
    score = SCORES["slot bias"]
    q, k, v, inputs, do, dlse = draw(score, rows, columns)
    lse = torch.full((1, 2, rows), -torch.inf)
    grads = flat(ours(score, q, k, v, inputs, do, dlse, torch.zeros_like(do), lse))
    assert [g.shape for g in grads[:3]] == [t.shape for t in (q, k, v)]
    assert not any(g.any() for g in grads)


def test_a_broadcast_input_has_size_one():
    score = SCORES["shared slot bias"]
    q, k, v, inputs, do, dlse = draw(score, 20, 20)
    with pytest.raises(ValueError, match="expected input 0 to have size 1"):
        wide = [inputs[0].expand(1, 2, 20, 20)]
        ours(score, q, k, v, wide, do, dlse, torch.zeros_like(do), dlse)


@pytest.mark.parametrize("limit", [227 << 10, 163 << 10, 99 << 10])
@pytest.mark.parametrize("keys_held", [True, False])
def test_tiles_fit_the_card(limit, keys_held):
    """Also where a tile of an input of rows and keys is streamed, in fp32."""
    for chosen in (Tiling(64, 128, 8, 3), Tiling(128, 64, 8, 3), Tiling(64, 64, 8, 2)):
        for each in (128, 512, 2048):
            for pair in (0, 4, 16):
                found = launch.fitted(chosen, each, each, pair, limit, keys_held)
                stays, streams = found.block_m, found.block_n
                if keys_held:
                    stays, streams = streams, stays
                moving = streams * each + pair * stays * streams
                assert stays * each + found.stages * moving <= limit
                assert min(stays, streams) >= 16 and found.warps == chosen.warps
    kept = Tiling(64, 64, 4, 2)
    assert launch.fitted(kept, 512, 512, 0, 227 << 10, keys_held) == kept
