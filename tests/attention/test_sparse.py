"""Attention over lists of entries: the kernels in the interpreter and the operation, by fp64."""

import contextlib
import math

import pytest
import torch
from inductor_ext.templates import sparse_attention_launch as launch

from inductor_ext import measure, ops
from inductor_ext.ops import _sparse_attention
from inductor_ext.testing import launch_binaries, launches_interpreted

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@contextlib.contextmanager
def kernels(chosen=None):
    """Kernels apply to CPU tensors, in the interpreter, with workspaces and results of NaN."""

    def nan(*sizes, **options):
        return torch.full(*sizes, math.nan, **options)

    with launches_interpreted(launch), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sparse_attention, "kernels_apply", lambda q, d_v: launch.fits(q, d_v))
        patch.setattr(launch.torch, "empty", nan)
        if chosen is not None:
            patch.setattr(launch, "tiling", lambda *_, **__: chosen)
        yield


def tile(splits, block=16, heads=16):
    return launch.Tiling(block, heads, 4, 2, splits)


def formula(q, kv, indices, scale, d_v):
    """(out, lse) token by token of q [T, H, D], in q's dtype but for the softmax."""
    outs, lses = [], []
    for t in range(q.shape[0]):
        entries = kv[indices[t][indices[t] >= 0].long()]
        s = (q[t] @ entries.T).to(FP64 if q.dtype == FP64 else FP32) * scale
        outs.append(s.softmax(-1).to(q.dtype) @ entries[:, :d_v])
        lses.append(s.logsumexp(-1) if len(entries) else s.new_full((q.shape[1],), -math.inf))
    return torch.stack(outs), torch.stack(lses)


def draw(T, H, D, S, K, dtype):
    q, kv = torch.randn(T, H, D).to(dtype), torch.randn(S, D).to(dtype)
    indices = torch.randint(0, S, (T, K), dtype=torch.int32)
    indices[torch.rand(T, K) < 0.2] = -1
    return q, kv, indices


def judge(found, q, kv, indices, scale, d_v):
    right = formula(q.double(), kv.double(), indices, scale, d_v)
    eager = formula(q, kv, indices, scale, d_v)
    for mine, truth, baseline, rounding in zip(found, right, eager, (None, q.dtype), strict=True):
        verdict = measure.check(mine, truth, baseline.to(mine.dtype), rounding=rounding)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("splits", [1, 4, 60])
@pytest.mark.parametrize(
    ("H", "D", "d_v", "K", "dtype"),
    [(16, 576, 512, 80, BF16), (5, 80, 64, 70, FP16), (40, 48, 32, 33, BF16), (3, 32, 32, 1, FP32)],
)
def test_sizes(splits, H, D, d_v, K, dtype):
    inputs = draw(3, H, D, 100, K, dtype)
    with kernels(tile(splits)):
        found = ops.sparse_attention(*inputs, scale=0.1, d_v=d_v, return_lse=True)
    assert found[0].dtype == dtype and found[1].dtype == FP32
    judge(found, *inputs, 0.1, d_v)


@pytest.mark.parametrize("on_kernels", [True, False])
def test_padding_and_sequences(on_kernels):
    """All padding, none, in parts of their own; sequences with caches of their own or a shared."""
    q, kv, indices = draw(6, 4, 48, 50, 40, BF16)
    indices[0], indices[1, 16:], indices[2, :24] = -1, -1, -1
    with kernels(tile(3)) if on_kernels else contextlib.nullcontext():
        given = {"scale": 0.2, "d_v": 32, "return_lse": True}
        out, lse = ops.sparse_attention(q, kv, indices, **given)
        shared = ops.sparse_attention(q.view(2, 3, 4, 48), kv, indices.view(2, 3, 40), **given)
        caches = torch.stack([kv.flip(0), kv])
        apart = ops.sparse_attention(q.view(2, 3, 4, 48), caches, indices.view(2, 3, 40), **given)
        nothing = ops.sparse_attention(q, kv, indices[:, :0], **given)
    judge((out, lse), q, kv, indices, 0.2, 32)
    assert not out[0].any() and (lse[0] == -math.inf).all()
    assert torch.equal(shared[0].flatten(0, 1), out) and torch.equal(shared[1].flatten(0, 1), lse)
    assert torch.equal(apart[0][1], out[3:])
    judge([x[0] for x in apart], q[:3], kv.flip(0), indices[:3], 0.2, 32)
    assert not nothing[0].any() and (nothing[1] == -math.inf).all()


@pytest.mark.parametrize("on_kernels", [True, False])
def test_indices_of_no_entry_are_nan(on_kernels):
    q, kv, indices = draw(4, 4, 48, 50, 40, BF16)
    right = ops.sparse_attention(q, kv, indices, scale=0.2, d_v=32)
    indices[1, 30], indices[2, 3] = 50, -2
    with kernels(tile(3)) if on_kernels else contextlib.nullcontext():
        out, lse = ops.sparse_attention(q, kv, indices, scale=0.2, d_v=32, return_lse=True)
    assert out[[1, 2]].isnan().all() and lse[[1, 2]].isnan().all()
    assert out[[0, 3]].isfinite().all() and (out - right)[[0, 3]].abs().max() < 0.02


def test_splits_change_rounding_only():
    inputs = draw(2, 4, 48, 60, 100, FP32)
    outs = []
    for splits in (1, 2, 7):
        with kernels(tile(splits)):
            outs.append(ops.sparse_attention(*inputs, scale=0.2, d_v=32))
    for out in outs[1:]:
        assert (out - outs[0]).norm() <= 1e-6 * out.norm()


def test_entries_beside_it_are_not_read():
    q, kv, indices = draw(2, 4, 48, 60, 32, BF16)
    used = torch.zeros(60, dtype=torch.bool)
    used[indices[indices >= 0].long()] = True
    with kernels(tile(2)):
        out = ops.sparse_attention(q, kv, indices, scale=0.2, d_v=32)
        hidden = torch.where(used[:, None], kv, math.nan)
        assert torch.equal(ops.sparse_attention(q, hidden, indices, scale=0.2, d_v=32), out)


# --- the operation --------------------------------------------------------------------------------


def test_gradients():
    q, kv, indices = draw(3, 2, 4, 6, 5, FP64)
    indices[1] = -1
    q, kv = q.requires_grad_(), kv.requires_grad_()

    def fn(q, kv):
        out, lse = ops.sparse_attention(q, kv, indices, scale=0.5, d_v=3, return_lse=True)
        return out, lse[[0, 2]]

    assert torch.autograd.gradcheck(fn, (q, kv))
    assert torch.autograd.gradgradcheck(fn, (q, kv))
    torch.autograd.grad(ops.sparse_attention(q, kv, indices, scale=0.5, d_v=3).sum(), q)


def test_registration():
    q, kv, indices = draw(3, 2, 6, 9, 5, FP32)
    given = (q[None].requires_grad_(), kv[None].requires_grad_(), indices[None], 0.5, 4)
    torch.library.opcheck(torch.ops.inductor_ext.sparse_attention, given)


def test_compiled_for_any_length():
    frames = 0

    def backend(graph, example):
        nonlocal frames
        frames += 1
        return graph

    torch._dynamo.reset()
    fn = torch.compile(
        lambda *t: ops.sparse_attention(*t, scale=0.5, d_v=32), dynamic=True, backend=backend
    )
    for T, S, K in ((5, 40, 7), (9, 50, 8), (33, 41, 6)):
        inputs = draw(T, 2, 48, S, K, FP32)
        assert torch.equal(fn(*inputs), ops.sparse_attention(*inputs, scale=0.5, d_v=32))
    assert frames == 1


BAD = {
    "q is expected as [T, H, D]": {"q": torch.zeros(4, 8)},
    "q is expected as fp16": {"q": torch.zeros(2, 4, 8, dtype=torch.int64)},
    "kv is expected as torch.float32": {"kv": torch.zeros(9, 8, dtype=FP64)},
    "indices is expected as torch.int32": {"indices": torch.zeros(2, 5, dtype=torch.int64)},
    "kv is expected on cpu": {"kv": torch.zeros(9, 8, device="meta")},
    "kv is expected as [S, D]": {"kv": torch.zeros(1, 9, 8)},
    "kv is expected with 8 numbers": {"kv": torch.zeros(9, 7)},
    "indices is expected as [2, K]": {"indices": torch.zeros(3, 5, dtype=torch.int32)},
    "d_v is expected between 1 and D = 8": {"d_v": 9},
    "scale is expected as a finite number": {"scale": math.inf},
    "kv is expected as a tensor, got list": {"kv": [[0.0]]},
    "scale is expected as a number, got NoneType": {"scale": None},
    "scale is expected as a number, got bool": {"scale": True},
    "d_v is expected as a whole number, got float": {"d_v": 4.0},
    "return_lse is expected as True or False, got int": {"return_lse": 1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    given = {
        "q": torch.zeros(2, 4, 8), "kv": torch.zeros(9, 8), "scale": 1.0, "d_v": 4,
        "indices": torch.zeros(2, 5, dtype=torch.int32),
    }  # fmt: skip
    given |= BAD[message]
    with pytest.raises((ValueError, TypeError)) as caught:
        ops.sparse_attention(given.pop("q"), given.pop("kv"), given.pop("indices"), **given)
    assert str(caught.value).startswith(message)


def test_a_tile_of_one_stage():
    with pytest.raises(ValueError, match="stages is expected as 2 or more, got 1"):
        launch.Tiling(64, 16, 8, 1)


# --- machine code ---------------------------------------------------------------------------------


def test_binaries():
    def meta(*sizes, dtype=BF16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    given = meta(1, 8, 16, 576), meta(1, 65536, 576), meta(1, 8, 2048, dtype=torch.int32)
    gather, merge = launch_binaries(lambda: launch.attend(*given, 0.1, 512, "ieee"), launch)
    assert gather.spills == merge.spills == 0
    assert "wgmma" in gather.ptx and gather.widest_load == 16 and "cp.async" in gather.ptx
    # Blocks of entries, each there once, beside the queries and the probabilities.
    assert gather.shared_bytes <= 2 * 32 * 576 * 2 + (24 << 10)


def test_what_a_tiling_refuses_is_no_candidate():
    for dtype, dim, heads in ((BF16, 576, 128), (FP32, 64, 16)):
        sizes = {"lines": 8, "topk": 2048}
        found = launch.tiling.candidates((dtype, dim, heads), sizes).values()
        assert len(found) > 3 and all(tiling.stages > 1 for tiling in found)
