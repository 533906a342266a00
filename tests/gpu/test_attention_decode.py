"""Decode and attention over lists of entries on the card, at sizes that fill it."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "attention"))
import decode_reference as reference
from inductor_ext.templates import attention_decode_launch as launch

from inductor_ext import compat_launch, measure, ops

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {
    "plain": reference.plain(0.1), "causal": reference.causal(0.1),
    "window": reference.window(0.1, 1000), "sinks": reference.sinks(0.1, 4, 1000),
    "biased": reference.biased(0.1), "documents": reference.documents(0.1),
}  # fmt: skip


def run(q, k, v, kind, inputs=(), **given):
    with compat_launch.direct_launches():
        return launch.decode(q, k, v, inputs, [], kind.program, "ieee", **given)


def draw(*sizes, **options):
    with torch.device("cuda"):
        return reference.draw(*sizes, **options)


def judge(found, tensors, kind, inputs=(), lengths=None, sequences=(0, -1)):
    """Of some sequences, by fp64 and by twice eager's own error."""
    for b in sequences:
        one = slice(b, b + 1 or None)
        part = [t[one] for t in tensors]
        read = [x[one] if x.shape[0] > 1 else x for x in inputs]
        n = None if lengths is None else lengths[one]
        right = reference.attention(*(t.double() for t in part), kind, read, n)
        eager = reference.attention(*part, kind, read, n)
        for mine, truth, baseline, rounding in zip(
            found, right, eager, (None, part[0].dtype), strict=True
        ):
            verdict = measure.check(
                mine[one], truth, baseline.to(mine.dtype), rounding=rounding, tf32=False
            )
            assert verdict.ok, verdict.reason


def check(kind, tensors, poison, laid=None, **given):
    q, k = tensors[:2]
    inputs = [x.cuda() for x in kind.inputs(q.shape[0], q.shape[1], q.shape[2], k.shape[2])]
    runs = []
    for _ in range(3):
        poison()
        runs.append(run(*(laid or tensors), kind, inputs, **given))
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))
    judge(runs[0], tensors, kind, inputs, given.get("lengths"))
    return runs[0]


@pytest.mark.parametrize(
    ("B", "heads", "group", "rows", "Sk", "D", "dtype"),
    [(1, 8, 8, 1, 16384, 128, BF16), (16, 8, 8, 1, 2051, 128, BF16), (64, 8, 1, 1, 799, 128, FP16),
     (4, 2, 16, 4, 4099, 128, BF16), (3, 4, 4, 2, 5000, 64, FP16), (2, 8, 2, 1, 3000, 256, BF16),
     (2, 3, 5, 1, 1025, 96, BF16), (1, 4, 4, 1, 3001, 64, FP32), (1, 1, 1, 1, 1, 128, BF16),
     (1, 1, 16, 1, 5000, 80, BF16)],
)  # fmt: skip
def test_heads(B, heads, group, rows, Sk, D, dtype, poison):
    check(KINDS["causal"], draw(B, heads, group, rows, Sk, D, dtype), poison)


@pytest.mark.parametrize("name", KINDS)
def test_scores(name, poison):
    check(KINDS[name], draw(8, 4, 4, 2, 4103, 128, BF16), poison)


@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
def test_ragged_and_paged(page_size, poison):
    """Also of no key, of one, and of all there is room for; what lies beyond is NaN."""
    n = torch.randint(0, 4097, (40,), dtype=torch.int32, device="cuda")
    n[0], n[1], n[-1], n[-2] = 0, 1, 4096, 4095
    q, k, v = draw(40, 4, 8, 1, 4096, 128, BF16)
    laid = [t.clone() for t in (k, v)]
    for b, length in enumerate(n.tolist()):
        for t in laid:
            t[b, :, length:] = math.nan
    given = {"lengths": n}
    if page_size:
        *laid, given["block_table"] = reference.paged(*laid, page_size)
    out, lse = check(KINDS["causal"], (q, k, v), poison, (q, *laid), **given)
    judge((out, lse), (q, k, v), KINDS["causal"], lengths=n, sequences=(1, 17, 38))
    assert not out[0].any() and (lse[0] == -math.inf).all()


def test_one_long_sequence_among_short_ones(poison):
    n = torch.full((64,), 700, dtype=torch.int32, device="cuda")
    n[40] = 60000
    q = draw(64, 1, 8, 1, 1, 128, BF16)[0]
    k, v = torch.randn(2, 64, 1, 60000, 128, device="cuda", dtype=BF16)
    poison()
    found = run(q, k, v, KINDS["plain"], lengths=n)
    judge(found, (q, k, v), KINDS["plain"], lengths=n, sequences=(0, 39, 40, 41, -1))


def test_slices_change_rounding_only(poison):
    tensors = draw(2, 4, 8, 1, 9000, 128, BF16)
    chosen = launch.tiling(BF16, 128, 128, 8)
    outs = []
    for programs in (1, 5, 132, 264, 5000):
        tile = dataclasses.replace(chosen, least=1, programs=programs)
        outs.append(check(KINDS["causal"], tensors, poison, chosen=tile)[1])
    for lse in outs[1:]:
        assert (lse - outs[0]).abs().max() <= 1e-5


def test_calls_in_a_row():
    """Their workspaces are the same memory, and launches overlap."""
    tensors = [draw(2, 8, 8, 1, 3000 + i, 128, BF16) for i in range(12)]
    found = [run(*t, KINDS["plain"]) for t in tensors]
    for mine, given in zip(found, tensors, strict=True):
        judge(mine, given, KINDS["plain"], sequences=(0,))


def test_captured():
    q, k, v = draw(4, 8, 8, 1, 4096, 128, BF16)
    n = torch.tensor([4096, 17, 0, 2000], dtype=torch.int32, device="cuda")
    run(q, k, v, KINDS["causal"], lengths=n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(q, k, v, KINDS["causal"], lengths=n)
    for lengths in ([4096, 17, 0, 2000], [1, 4000, 333, 0]):
        n.copy_(torch.tensor(lengths))
        for x in found:
            x.fill_(math.nan)
        graph.replay()
        judge(found, (q, k, v), KINDS["causal"], lengths=n, sequences=(0, 1, 3))


# --- lists of entries -----------------------------------------------------------------------------


def by_fp64(q, kv, indices, scale, d_v):
    """Of one token: (out, lse)."""
    entries = kv[indices[indices >= 0].long()].double()
    s = q.double() @ entries.T * scale
    return s.softmax(-1) @ entries[:, :d_v], s.logsumexp(-1)


@pytest.mark.parametrize(
    ("T", "H", "D", "d_v", "K", "dtype"),
    [(8, 16, 576, 512, 2048, BF16), (3, 16, 576, 512, 2048, FP16), (1, 128, 576, 512, 2048, BF16),
     (300, 16, 576, 512, 100, BF16), (5, 7, 192, 128, 777, BF16), (4, 16, 96, 64, 500, FP32)],
)  # fmt: skip
def test_lists(T, H, D, d_v, K, dtype, poison):
    q = torch.randn(T, H, D, device="cuda").to(dtype)
    kv = torch.randn(40000, D, device="cuda").to(dtype)
    indices = torch.randint(0, 40000, (T, K), dtype=torch.int32, device="cuda")
    indices[torch.rand(T, K, device="cuda") < 0.1] = -1
    if T > 2:
        indices[1] = -1
        indices[2, 5:] = -1
    runs = []
    for _ in range(3):
        poison()
        runs.append(ops.sparse_attention(q, kv, indices, scale=0.05, d_v=d_v, return_lse=True))
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))
    out, lse = runs[0]
    limit = {BF16: 5e-3, FP16: 1e-3, FP32: 1e-5}[dtype]
    for t in {0, min(2, T - 1), T - 1}:
        right, sums = by_fp64(q[t], kv, indices[t], 0.05, d_v)
        assert ((out[t].double() - right).norm() / right.norm()).item() <= limit
        assert (lse[t] - sums).abs().max().item() <= 1e-4
    if T > 2:
        assert not out[1].any() and (lse[1] == -math.inf).all()


def test_an_index_of_no_entry_is_nan():
    q, kv = torch.randn(8, 16, 576, device="cuda").bfloat16(), torch.randn(999, 576).cuda()
    indices = torch.randint(0, 999, (8, 2048), dtype=torch.int32, device="cuda")
    indices[3, 1999], indices[5, 0] = 999, -2
    out, lse = ops.sparse_attention(q, kv.bfloat16(), indices, scale=0.05, return_lse=True)
    wrong = torch.zeros(8, dtype=torch.bool, device="cuda")
    wrong[[3, 5]] = True
    assert out[wrong].isnan().all() and lse[wrong].isnan().all()
    assert out[~wrong].isfinite().all() and lse[~wrong].isfinite().all()


def test_lists_compiled():
    """Forward and gradients, for any number of tokens and entries."""

    def fn(q, kv, indices):
        return ops.sparse_attention(q, kv, indices, scale=0.05)

    compiled = torch.compile(fn, dynamic=True, fullgraph=True)
    for T, K in ((8, 300), (19, 512), (33, 77)):
        q = torch.randn(T, 16, 576, device="cuda").bfloat16().requires_grad_()
        kv = torch.randn(500 + T, 576, device="cuda").bfloat16().requires_grad_()
        indices = torch.randint(0, 500, (T, K), dtype=torch.int32, device="cuda")
        with torch.compiler.set_stance("fail_on_recompile" if T != 8 else "default"):
            out = compiled(q, kv, indices)
            grads = torch.autograd.grad(out, (q, kv), torch.ones_like(out))
        wide = [t.detach().double().requires_grad_() for t in (q, kv)]
        right = fn(*wide, indices)
        truth = torch.autograd.grad(right, wide, torch.ones_like(right))
        for mine, exact in zip((out, *grads), (right, *truth), strict=True):
            assert ((mine.double() - exact).norm() / exact.norm()).item() <= 1e-2
