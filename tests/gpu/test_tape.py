"""Calls that repeat the launches of an earlier one, on a card: the bits of a call that decides."""

import gc
import pathlib
import sys

import pytest
import torch
from inductor_ext.templates import tilings

from inductor_ext import ops
from inductor_ext.ops import _classes
from inductor_ext.ops._tape import Taped

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_attention import draw, options

pytestmark = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ["window and sinks", "documents", "bias", "padding", "slot bias", "alibi"]


def played():
    return sum(t.played for t in gc.get_objects() if issubclass(type(t), Taped))


def check(call, at_least):
    """``call(seed)`` gives the same with tapes as with none. Returns nothing."""
    decided = []
    for seed in range(3):
        tilings.forget()
        decided.append(call(seed))
    tilings.forget()
    call(0), call(1)
    before = played()
    for seed, right in enumerate(decided):
        torch.full((1 << 22,), torch.nan, device="cuda")  # what the next allocations find
        mine = call(seed)
        for one, other in zip(mine, right, strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
    assert played() - before >= 3 * at_least


def of_seed(seed, kind, rows, columns, dtype, dim=64, asked=()):
    """(tensors, arguments, names of those with gradients), which follow from a seed."""
    torch.manual_seed(seed)
    tensors = draw(2, 8, 4, rows, columns, dim, dim, dtype)
    given, _, names = options(kind, 2, 8, 4, rows, columns, dtype)
    return tensors, dict(given) | dict.fromkeys(asked, True), names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, rows, dim", [(BF16, 513, 128), (FP32, 300, 64)])
def test_attention(kind, dtype, rows, dim):
    def call(seed):
        tensors, given, names = of_seed(seed, kind, rows, rows, dtype, dim, ("return_lse",))
        tensors = [t.requires_grad_() for t in tensors]
        for n in names:
            given[n] = given[n].detach().requires_grad_()
        found = ops.attention(*tensors, **given)
        leaves = [*tensors, *(given[n] for n in names)]
        grads = torch.autograd.grad(found, leaves, [torch.randn_like(t) for t in found])
        return [*(t.detach() for t in found), *grads]

    check(call, 2)


@pytest.mark.parametrize("rows", [513, 4096])
def test_plain(rows):
    """cuDNN's kernel and that of warps with roles."""

    def call(seed):
        tensors, given, _ = of_seed(seed, "causal", rows, rows, BF16, 128, ("return_lse",))
        with torch.no_grad():
            return ops.attention(*tensors, **given)

    check(call, 1)


def test_dropout():
    def call(seed):
        tensors, given, _ = of_seed(seed, "window and sinks", 400, 400, BF16)
        tensors = [t.requires_grad_() for t in tensors]
        out = ops.attention(*tensors, **given, dropout=0.2)
        return [out.detach(), *torch.autograd.grad(out, tensors, torch.randn_like(out))]

    check(call, 2)


@pytest.mark.parametrize("kind", ["causal", "slot bias", "documents"])
def test_decode_and_columns(kind):
    def call(seed):
        (q, k, v), given, _ = of_seed(seed, kind, 3, 700, BF16)
        with torch.no_grad():
            return ops.attention(q, k, v, **given, return_lse=True, return_colsum=True)

    check(call, 2)


def test_pages():
    def call(seed):
        torch.manual_seed(seed)
        q = torch.randn(3, 8, 1, 64, device="cuda", dtype=BF16)
        k, v = (torch.randn(40, 16, 2, 64, device="cuda", dtype=BF16) for _ in range(2))
        table = torch.randperm(40, device="cuda")[:30].view(3, 10)
        lengths = torch.randint(1, 160, (3,), device="cuda")
        with torch.no_grad():
            out = ops.attention(q, k, v, causal=True, lengths=lengths, block_table=table)
        return [out]

    check(call, 1)


def test_lists():
    def call(seed):
        torch.manual_seed(seed)
        q = torch.randn(2, 4, 16, 576, device="cuda", dtype=BF16)
        kv = torch.randn(2, 3000, 576, device="cuda", dtype=BF16)
        indices = torch.randint(0, 3000, (2, 4, 512), device="cuda", dtype=torch.int32)
        with torch.no_grad():
            found = ops.sparse_attention(q, kv, indices, scale=0.04, d_v=512)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    check(call, 1)


def with_gradients(fn, *tensors):
    tensors = [t.requires_grad_() for t in tensors]
    out = fn(*tensors)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.randn_like(out))]


def connections(make):
    X, Y = (torch.randn(s, **make) for s in ((70, 4, 512), (70, 512)))
    W, scale, base = (
        torch.randn(24, 2048, device="cuda") * 0.02,
        *(torch.rand(n, device="cuda") for n in (3, 24)),
    )
    U, post, comb = ops.mhc_pre(X, W, scale, base)
    return [U, post, comb, ops.mhc_post(X, Y, post, comb)]


def cross_entropy(make):
    target = torch.randint(5000, (300,), device="cuda")
    logits = torch.randn(300, 5000, **make)
    return with_gradients(lambda x: ops.cross_entropy(x, target, label_smoothing=0.1), logits)


def softmax(make):
    return with_gradients(ops.softmax, torch.randn(300, 5000, **make))


def linear(make):
    tensors = [torch.randn(2, 4, 700, 64, **make) for _ in range(3)]
    return with_gradients(ops.linear_attention, *tensors)


def strided_classes(make):
    x, target = torch.randn(3, 150, 5000, **make), torch.randint(150, (15000,), device="cuda")
    a, b = (torch.rand(15000, device="cuda") for _ in "ab")
    found = _classes.class_rows_and_gradient(x, target, a, None, b, None, 0.7, 0.0)
    return [*found, *_classes.class_statistics(x, 0.7, 0.0)]


@pytest.mark.parametrize(
    "fn, at_least",
    [(connections, 2), (cross_entropy, 1), (softmax, 2), (linear, 2), (strided_classes, 2)],
)
def test_others(fn, at_least):
    def call(seed):
        torch.manual_seed(seed)
        return fn({"device": "cuda", "dtype": BF16})

    check(call, at_least)


def test_captured():
    """A graph that is captured while tapes are played."""
    tensors, given, _ = of_seed(0, "window and sinks", 513, 513, BF16)
    with torch.no_grad():
        right = ops.attention(*tensors, **given)
        for _ in range(3):
            ops.attention(*tensors, **given)
        before = played()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.attention(*tensors, **given)
        assert played() == before + 1
        out.zero_()
        graph.replay()
        assert torch.equal(out, right)


def test_other_streams():
    tensors, given, _ = of_seed(0, "causal", 2048, 2048, BF16, 128, ("return_lse",))
    with torch.no_grad():
        for _ in range(3):
            right = ops.attention(*tensors, **given, window=100)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = ops.attention(*tensors, **given, window=100)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
