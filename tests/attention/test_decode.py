"""Decode's kernels in the interpreter, against fp64, and their machine code for an H200."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import decode_reference as reference
from inductor_ext.templates import attention_decode_launch as launch

from inductor_ext import measure
from inductor_ext.testing import launch_binaries, launches_interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Results and workspaces begin as NaN."""

    def nan(*sizes, **options):
        return torch.full(*sizes, math.nan, **options)

    monkeypatch.setattr(launch, "LONG", 1)
    monkeypatch.setattr(launch.torch, "empty", nan)
    monkeypatch.setattr(launch, "_like", lambda q, size: _nan_like(q, size))


def _nan_like(q, size, like=launch._like):
    return like(q, size).fill_(math.nan)


def tile(block=32, keys_first=True, least=1, programs=5):
    return launch.Tiling(block, 4, 2, keys_first, least=least, programs=programs)


def run(q, k, v, kind, inputs=(), *, chosen=None, precision="ieee", **given):
    with launches_interpreted(launch):
        return launch.decode(
            q, k, v, inputs, [], kind.program, precision, chosen=chosen or tile(), **given
        )


def judge(found, tensors, kind, inputs=(), lengths=None):
    wide = [t.double() for t in tensors]
    right = reference.attention(*wide, kind, inputs, lengths)
    eager = reference.attention(*tensors, kind, inputs, lengths)
    narrow = tensors[0].dtype
    for mine, truth, baseline, rounding in zip(found, right, eager, (None, narrow), strict=True):
        verdict = measure.check(mine, truth, baseline.to(mine.dtype), rounding=rounding)
        assert verdict.ok, verdict.reason


def check(kind, tensors, **given):
    q, k, _ = tensors
    inputs = kind.inputs(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    found = run(*tensors, kind, inputs, **given)
    judge(found, tensors, kind, inputs)
    assert found[0].dtype == q.dtype and found[1].dtype == FP32
    return found


@pytest.mark.parametrize("keys_first", [True, False])
@pytest.mark.parametrize(
    ("dtype", "group", "rows", "D", "Dv"),
    [(BF16, 1, 1, 64, 64), (BF16, 4, 1, 128, 128), (FP16, 8, 3, 64, 32), (BF16, 16, 2, 96, 96),
     (BF16, 5, 1, 80, 72), (FP32, 8, 1, 64, 64), (FP16, 2, 8, 256, 256)],
)  # fmt: skip
def test_heads(keys_first, dtype, group, rows, D, Dv):
    tensors = reference.draw(2, 2, group, rows, 157, D, dtype, Dv)
    check(reference.causal(D**-0.5), tensors, chosen=tile(keys_first=keys_first))


KINDS = {
    "plain": reference.plain(0.2), "causal": reference.causal(0.2),
    "window": reference.window(0.2, 40), "sinks": reference.sinks(0.2, 4, 40),
    "biased": reference.biased(0.2), "documents": reference.documents(0.2),
}  # fmt: skip


@pytest.mark.parametrize("keys_first", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_scores(name, keys_first):
    tensors = reference.draw(2, 2, 4, 2, 157, 32, BF16)
    check(KINDS[name], tensors, chosen=tile(keys_first=keys_first))


@pytest.mark.parametrize("Sk", [1, 31, 257])
def test_lengths_of_keys(Sk):
    check(reference.plain(0.2), reference.draw(1, 2, 2, 1, Sk, 32, BF16))


def test_heads_have_programs_of_their_own(monkeypatch):
    """But for where more than a tenth of the card would idle, of few blocks, of more than 16 query
    rows, and ragged ones."""
    monkeypatch.undo()
    assert launch.division(8, 512, 132, 4) == (128, 16)
    assert launch.division(8, 256, 132, 4) == (132, 0)
    assert launch.division(100, 256, 132, 4) == (132, 0)
    assert launch.division(512, 32, 264, 4) == (256, 0)  # two heads each
    assert launch.division(8, 512, 132, 4, rows=16) == (128, 16)
    assert launch.division(8, 512, 132, 4, rows=17) == (132, 0)
    assert launch.division(128, 256, 264, 8, rows=32) == (264, 0)  # 4 rows of 8 heads
    assert launch.division(8, 512, 132, 4, ragged=True) == (132, 0)


def test_slices():
    """Of one block to all; the same but for the order of the sums. Programs without a block."""
    tensors = reference.draw(2, 3, 4, 1, 300, 32, FP32)
    kind = reference.causal(0.2)
    outs = [
        check(kind, tensors, chosen=tile(programs=n, least=least))
        for n, least in ((1, 1), (7, 1), (60, 1), (90, 1), (60, 8))
    ]
    for out, lse in outs[1:]:
        assert (out - outs[0][0]).norm() <= 1e-6 * out.norm()
        assert (lse - outs[0][1]).abs().max() <= 1e-5


@pytest.mark.parametrize("page_size", [0, 16, 32, 48, 64])
@pytest.mark.parametrize("lengths", [[0, 1, 150, 33, 0], [300, 0, 5, 64, 299], [0] * 5])
def test_ragged_and_paged(page_size, lengths):
    """As many slices as there are, with what lies beyond a sequence NaN."""
    kind = reference.window(0.2, 100)
    q, k, v = reference.draw(5, 2, 4, 2, 300, 32, BF16)
    n = torch.tensor(lengths, dtype=torch.int32)
    given = {"lengths": n}
    laid = [k.clone(), v.clone()]
    for b, length in enumerate(lengths):
        for t in laid:
            t[b, :, length:] = math.nan
    if page_size:
        *laid, given["block_table"] = reference.paged(*laid, page_size)
    found = run(q, *laid, kind, **given)
    judge(found, (q, k, v), kind, lengths=n)
    assert not found[0][n == 0].any() and (found[1][n == 0] == -math.inf).all()


def test_many_sequences():
    """More than are looked at at once."""
    kind = reference.plain(0.2)
    n = torch.randint(0, 20, (140,), dtype=torch.int32)
    q, k, v = reference.draw(140, 1, 1, 1, 20, 16, FP32)
    found = run(q, k, v, kind, lengths=n, chosen=tile(16, programs=9))
    judge(found, (q, k, v), kind, lengths=n)


def test_rows_that_keep_nothing():
    """More rows than keys, bottom right: the first ones see none."""
    tensors = reference.draw(1, 2, 2, 7, 4, 32, BF16)
    for empty in ("zero", "nan"):
        out, lse = check(reference.window(0.2, 3, empty), tensors)
        assert (lse[:, :, :3] == -math.inf).all() and lse[:, :, 3:].isfinite().all()
        assert out[:, :, :3].isnan().all() if empty == "nan" else not out[:, :, :3].any()


def test_impossible_lengths_are_nan():
    q, k, v = reference.draw(4, 1, 2, 1, 70, 32, BF16)
    n = torch.tensor([70, 71, -1, 3], dtype=torch.int32)
    out, lse = run(q, k, v, reference.plain(0.2), lengths=n)
    assert out[[1, 2]].isnan().all() and lse[[1, 2]].isnan().all()
    some = [t[[0, 3]] for t in (q, k, v)]
    judge((out[[0, 3]], lse[[0, 3]]), some, reference.plain(0.2), lengths=n[[0, 3]])


def test_large_scores():
    q, k, v = reference.draw(1, 1, 4, 1, 100, 64, BF16)
    check(reference.plain(1.0), (q * 30, k * 30, v))


def test_layouts():
    """[B, S, H, D] transposed is read as it lies, and the result lies as q does."""
    q, k, v = reference.draw(2, 2, 4, 3, 70, 32, BF16)
    kind = reference.causal(0.2)
    plain = run(q, k, v, kind)
    laid = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    other = run(*laid, kind)
    assert torch.equal(plain[0], other[0]) and torch.equal(plain[1], other[1])
    assert other[0].transpose(1, 2).is_contiguous()
    spread = torch.stack([k, k], -1).flatten(-2)[..., ::2]
    assert spread.stride(-1) == 2 and torch.equal(run(q, spread, v, kind)[1], plain[1])


# --- machine code ---------------------------------------------------------------------------------


def meta(*sizes, dtype=BF16):
    return torch.zeros(0, dtype=dtype, device="meta").new_empty(sizes)


@pytest.mark.parametrize(
    ("D", "rows", "page_size", "dtype"),
    [(128, 1, 0, BF16), (128, 1, 64, BF16), (128, 1, 16, FP16), (128, 8, 256, BF16),
     (64, 1, 0, BF16), (256, 1, 0, BF16), (96, 1, 64, BF16), (128, 1, 0, FP32)],
)  # fmt: skip
def test_binaries(D, rows, page_size, dtype, monkeypatch):
    monkeypatch.undo()
    q, given = meta(16, 64, rows, D, dtype=dtype), {}
    if page_size:
        k = v = meta(4096, page_size, 8, D, dtype=dtype)
        table = meta(16, 16384 // page_size, dtype=torch.int32)
        given = {"block_table": table, "lengths": meta(16, dtype=torch.int32)}
    else:
        k = v = meta(16, 8, 16384, D, dtype=dtype)
    kind = reference.causal(0.1)
    decode, merge = launch_binaries(
        lambda: launch.decode(q, k, v, [], [], kind.program, "tf32", **given), launch
    )
    assert decode.spills == merge.spills == 0
    assert decode.uses_tensor_cores and decode.widest_load == 16 and "cp.async" in decode.ptx
    flight = launch.tiling(dtype, D, D, 8 * rows, few=True)
    per_sm = flight.per_sm
    assert per_sm * (decode.shared_bytes + 1024) <= 228 << 10
    assert per_sm * decode.registers * 32 * decode.num_warps <= 1 << 16
    waiting = flight.per_sm * (flight.stages - 1) * flight.block * 2 * D * dtype.itemsize
    assert waiting >= 40 << 10
