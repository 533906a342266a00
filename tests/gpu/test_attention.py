"""Attention on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import contextlib
import math
import pathlib
import sys

import pytest
import torch

from inductor_ext import compat_attention, measure, ops

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "attention"))
import attention_reference as reference

pytestmark = pytest.mark.gpu
CARD = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def draw(B, heads, own, rows, columns, D, Dv, dtype=BF16):
    """[B, S, H, D] transposed, as models have them."""
    shapes = (B, rows, heads, D), (B, columns, own, D), (B, columns, own, Dv)
    return [torch.randn(s, device=CARD, dtype=dtype).transpose(1, 2) for s in shapes]


def alibi(s, b, h, q, k, slopes):
    return s + slopes * (k - q)


def prefix(s, b, h, q, k):
    return torch.where((q >= k) | (k < 100), s, -math.inf)


def document_ids(size):
    return (torch.arange(size, device=CARD) // 150).to(torch.int32)[None]


def options(name, B, heads, own, rows, columns, dtype):
    """(keyword arguments of ops.attention, of the formula, names of those with gradients)."""
    make = {"device": CARD, "dtype": dtype}
    if name == "alibi":
        slopes = (0.5 ** torch.arange(1, heads + 1, device=CARD)).view(1, -1, 1, 1)
        far = torch.arange(columns, device=CARD) - torch.arange(rows, device=CARD)[:, None]
        given = {"score_mod": alibi, "score_inputs": (slopes,), "causal": True}
        return given, {"extra": slopes * far, "causal": True}, ()
    if name == "prefix":
        at = torch.arange(rows, device=CARD)[:, None], torch.arange(columns, device=CARD)
        return {"score_mod": prefix}, {"bias": (at[0] >= at[1]) | (at[1] < 100)}, ()
    given, own_gradients = {
        "full": ({}, ()),
        "causal": ({"causal": True}, ()),
        "window and sinks": ({"causal": True, "window": (300, 0), "sinks": 5}, ()),
        "documents": (
            {"causal": True, "segments": (document_ids(rows), document_ids(columns))}, ()
        ),
        "bias": ({"bias": torch.randn(1, heads, rows, columns, **make)}, ("bias",)),
        "padding": ({"bias": torch.rand(B, 1, 1, columns, device=CARD) < 0.8}, ()),
        "slot bias": (
            {"slot_bias": torch.randn(B, own, columns, device=CARD), "softcap": 8.0},
            ("slot_bias",),
        ),
        "sink": ({"sink": torch.randn(heads, device=CARD), "causal": True}, ("sink",)),
    }[name]  # fmt: skip
    return given, given, own_gradients


def widened(given):
    return {
        n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for n, t in given.items()
    }


@contextlib.contextmanager
def deterministic():
    """Where cuDNN's gradients, which are not, are refused."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def all_results(fn, tensors, given, names, seeds):
    """out, lse, and the gradients of everything."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    given = dict(given)
    for n in names:
        given[n] = given[n].detach().requires_grad_()
    results = fn(*tensors, **given)
    leaves = [*tensors, *(given[n] for n in names)]
    seeds = [s.to(t.dtype) for t, s in zip(results, seeds, strict=True)]
    grads = torch.autograd.grad(results, leaves, seeds)
    return [*(t.detach() for t in results), *grads]


def judge(mine, right, eager, dtype):
    names = ["out", "lse", "dq", "dk", "dv", "other"]
    for name, x, truth, baseline in zip(names, mine, right, eager, strict=False):
        # What is fp32 here is made of products that were rounded to the inputs' dtype.
        narrow = dtype if x.dtype == FP32 and dtype != FP32 else None
        verdict = measure.check(x, truth, baseline.to(x.dtype), rounding=narrow)
        assert verdict.ok, (name, verdict.reason)


def check_option(name, shape, dtype, poison, runs=3):
    B, heads, own, rows, columns, _, _ = shape
    tensors = draw(*shape, dtype)
    given, theirs, names = options(name, B, heads, own, rows, columns, dtype)
    seeds = torch.randn(B, heads, rows, shape[6], device=CARD, dtype=dtype)
    seeds = seeds, 0.1 * torch.randn(B, heads, rows, device=CARD)

    def ours(*t, **o):
        out, lse = ops.attention(*t, **o, return_lse=True)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    def formula(*t, **o):
        out, lse, _ = reference.attention(*t, **o)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    found = []
    for _ in range(runs):
        poison()
        with deterministic():
            found.append(all_results(ours, tensors, given, names, seeds))
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    eager = all_results(formula, tensors, theirs, names, seeds)
    wide = [t.double() for t in tensors]
    right = all_results(formula, wide, widened(theirs), names, [s.double() for s in seeds])
    judge(found[0], right, eager, dtype)


MAIN = (2, 8, 2, 1500, 1500, 128, 128)


@pytest.mark.parametrize(
    "name",
    ["causal", "window and sinks", "documents", "bias", "padding", "slot bias", "sink", "alibi",
     "prefix"],
)  # fmt: skip
def test_options(name, poison):
    """Every kind of score, forward and backward, three times to the same bits."""
    check_option(name, MAIN, BF16, poison)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 6, 2, 799, 1023, 64, 64), BF16), ((1, 4, 4, 1023, 257, 96, 96), BF16),
     ((1, 8, 2, 1000, 1300, 192, 128), FP16), ((1, 4, 2, 515, 300, 64, 64), FP32),
     ((2, 4, 4, 257, 1000, 256, 256), BF16), ((1, 4, 1, 999, 999, 80, 48), BF16)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["causal", "window and sinks"])
def test_shapes(name, shape, dtype, poison):
    check_option(name, shape, dtype, poison, runs=2)


class _Counted:
    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("cudnn_forward", "cudnn_backward"):
            real = getattr(compat_attention, name)
            monkeypatch.setattr(compat_attention, name, self._counting(name, real))

    def _counting(self, name, real):
        def call(*args):
            self.calls.append(name)
            return real(*args)

        return call


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("group", [1, 4])
def test_plain_attention_is_cudnns(name, group, poison, monkeypatch):
    counted = _Counted(monkeypatch)
    tensors = draw(2, 8, 8 // group, 2048, 2048, 64, 64)
    given = {"causal": name == "causal"}

    def grads(fn, tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = fn(*leaves, **given)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]

    seed = torch.randn_like(tensors[0])
    poison()
    mine = grads(ops.attention, tensors)
    assert counted.calls == ["cudnn_forward", "cudnn_backward"]
    eager = grads(reference.attention, tensors)
    right = grads(reference.attention, [t.double() for t in tensors])
    for x, truth, baseline in zip(mine, right, eager, strict=True):
        verdict = measure.check(x, truth, baseline)
        assert verdict.ok, verdict.reason
    lse = ops.attention(*tensors, **given, return_lse=True)[1]
    truth = reference.attention(*(t.double() for t in tensors), **given)[1]
    assert (lse - truth).abs().max() <= 1e-4
    counted.calls.clear()
    with deterministic():
        runs = [grads(ops.attention, tensors) for _ in range(3)]
    assert not counted.calls
    assert all(all(map(torch.equal, runs[0], again)) for again in runs[1:])


def test_scores_far_below_zero():
    """Where exp(lse) is 0: cuDNN has returned NaN for such rows."""
    q, k, v = draw(1, 4, 4, 1024, 1024, 128, 128)
    q, k = q.abs() * 6, -k.abs() * 6
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = ops.attention(*leaves, return_lse=True)
    assert lse.max() < -88
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    right = reference.attention(*(t.double() for t in (q, k, v)))[0]
    eager = reference.attention(q, k, v)[0]
    assert measure.check(out.detach(), right, eager).ok


def test_column_sums(poison):
    q, k, v = draw(2, 8, 2, 1500, 1700, 128, 128)
    right = reference.attention(*(t.double() for t in (q, k, v)), causal=True)[2]
    given = {"causal": True, "return_colsum": True}
    for rows in (None, 64, 700):
        poison()
        runs = [ops.attention(q, k, v, **given, colsum_rows=rows)[1] for _ in range(2)]
        truth = right[..., -(rows or 1500) :, :].sum((2, 3))
        assert torch.equal(*runs) and (runs[0] - truth).norm() <= 1e-5 * truth.norm()
        assert abs(runs[0].sum().item() / (2 * 8 * (rows or 1500)) - 1) <= 1e-5


def test_decode_and_pages(poison):
    q, k, v = draw(4, 16, 2, 3, 4096, 128, 128)
    lengths = torch.tensor([4096, 1, 0, 2050], device=CARD)
    right = reference.attention(
        *(t.double() for t in (q, k, v)), causal=True, lengths=lengths.cpu()
    )[0]
    eager = reference.attention(q, k, v, causal=True, lengths=lengths.cpu())[0]
    table = torch.randperm(300, device=CARD)[:256].view(4, 64).int()
    pages = [torch.randn(300, 64, 2, 128, device=CARD, dtype=BF16) for _ in (k, v)]
    for place, t in zip(pages, (k, v), strict=True):
        place[table.long()] = t.transpose(1, 2).unflatten(1, (64, 64))
    given = {"lengths": lengths, "causal": True}
    poison()
    for out in (
        ops.attention(q, k, v, **given),
        ops.attention(q, *pages, block_table=table, **given),
    ):
        verdict = measure.check(out, right, eager)
        assert verdict.ok, verdict.reason


def test_layouts():
    """Heads inside, heads outside, parts of one tensor, places that TMA can't read: same bits."""
    whole = torch.randn(2, 600, 3, 6, 64, device=CARD, dtype=BF16)
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    shifted = [torch.empty(t.numel() + 1, device=CARD, dtype=BF16)[1:].view(t.shape).copy_(t)
               for t in (q, k, v)]  # fmt: skip
    given = {"causal": True, "window": (200, 0)}

    def grads(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = ops.attention(*leaves, **given)
        assert out.stride() == torch.empty_like(leaves[0]).stride()
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    right = grads(*(t.contiguous() for t in (q, k, v)))
    for tensors in ((q, k, v), shifted):
        for x, y in zip(grads(*tensors), right, strict=True):
            assert (x - y).norm() <= 1e-3 * y.norm()


def test_compiled_and_captured():
    """One program for all lengths, also inside a CUDA graph."""

    def fn(q, k, v, beta):
        return ops.attention(q, k, v, causal=True, window=(256, 0), slot_bias=beta).float() * 2

    compiled = torch.compile(fn, dynamic=True, fullgraph=True)
    for i, rows in enumerate((500, 129, 1000)):
        q, k, v = draw(3, 8, 2, rows, rows + 7, 64, 64)
        beta = torch.randn(3, 2, rows + 7, device=CARD)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert torch.equal(compiled(q, k, v, beta), fn(q, k, v, beta))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(q, k, v, beta)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(q, k, v, beta)
    graph.replay()
    assert torch.equal(out, fn(q, k, v, beta))


def test_no_scores_in_memory():
    """Forward and backward at 16k, where one matrix of scores would be 4 GiB."""
    q, k, v = (t.requires_grad_() for t in draw(1, 8, 8, 16384, 16384, 128, 128))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ops.attention(q, k, v, causal=True, window=(4096, 0), softcap=20.0)
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.nbytes
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 16384**2 * 8 * 2


def test_more_than_31_bits():
    """Offsets of the last tokens, and of the last entries of a bias, beyond 2^31."""
    size = (1 << 31) // 64 + 1000
    q = torch.randn(1, 1, size, 64, device=CARD, dtype=BF16)
    out = ops.attention(q, q, q, causal=True, window=(128, 0))
    last = q[:, :, -500:].double()
    right = reference.attention(last, last, last, causal=True, window=(128, 0))[0]
    assert (out[:, :, -300:].double() - right[:, :, -300:]).norm() <= 6e-3 * right.norm()
    del q, out
    size = 24000
    q, k, v = draw(1, 4, 4, size, size, 64, 64)
    bias = torch.randn(1, 4, size, size, device=CARD, dtype=BF16)
    out = ops.attention(q, k, v, bias=bias)[:, -1:, -100:]
    tensors = q[:, -1:, -100:].double(), k[:, -1:].double(), v[:, -1:].double()
    right = reference.attention(*tensors, bias=bias[:, -1:, -100:].double())[0]
    assert (out.double() - right).norm() <= 6e-3 * right.norm()


def with_gradients(fn, tensors, seed):
    """What fn gives, and the gradients of its inputs."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = fn(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


@pytest.mark.parametrize("lost", [False, True])
def test_least_numbers_beside_a_bias(lost, poison):
    """A causal mask of the dtype's least number, added as models add it, is skipped; rows whose
    biases are as low (``lost``) are right too, in every gradient."""
    least = torch.finfo(BF16).min
    q, k, v = draw(2, 8, 8, 1032, 1032, 128, 128)
    bias = torch.randn(1, 8, 1032, 1032, device=CARD, dtype=BF16)
    if lost:
        bias[:, 3, 500:503] = least
        bias[:, 5, :40, :64] = least
    at = torch.arange(1032, device=CARD)

    def score(s, b, h, q, k, x):
        return s + x + torch.where(q >= k, 0.0, least)

    def ours(q, k, v, bias):
        return ops.attention(q, k, v, score_mod=score, score_inputs=(bias,))

    def formula(q, k, v, bias):
        s = (q @ k.mT * 128**-0.5).to(torch.promote_types(q.dtype, FP32)) + bias
        s = s + torch.where(at[:, None] >= at[None, :], 0.0, least)
        return s.float().softmax(-1).to(q.dtype) @ v

    tensors, seed = (q, k, v, bias), torch.randn_like(q)

    poison()
    mine, again = (with_gradients(ours, tensors, seed) for _ in range(2))
    assert all(map(torch.equal, mine, again))
    right = with_gradients(formula, [t.double() for t in tensors], seed)
    judge(mine, right, with_gradients(formula, tensors, seed), BF16)


@pytest.mark.parametrize("form", ["added", "filled", "two ways"])
def test_rows_masked_throughout_by_a_number(form, poison):
    """Such rows are uniform, in every gradient, also where the number is written in two ways."""
    fill = torch.finfo(BF16).min if form == "filled" else -1e9
    tensors = draw(1, 4, 2, 1000, 1000, 128, 128)
    mask = torch.zeros(1, 1, 1000, 1000, device=CARD)
    mask[:, :, 500:504, : 300 if form == "two ways" else 1000] = fill
    mask[:, :, 700:, :64] = fill
    at = torch.arange(1000, device=CARD)

    def score(s, b, h, q, k, *x):
        there = (q >= 500) & (q < 504)
        if form == "added":
            return s + x[0]
        if form == "filled":
            return torch.where(there, fill, s)
        return torch.where(there & (k >= 300), fill, s + x[0])

    inputs = () if form == "filled" else (mask,)

    def ours(q, k, v):
        return ops.attention(q, k, v, score_mod=score, score_inputs=inputs)

    def formula(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        s = (q @ k.mT).to(torch.promote_types(q.dtype, FP32)) * 128**-0.5
        s = score(s, None, None, at[:, None], at[None, :], *inputs)
        return s.float().softmax(-1).to(q.dtype) @ v

    seed = torch.randn_like(tensors[0])

    poison()
    mine, again = (with_gradients(ours, tensors, seed) for _ in range(2))
    assert all(map(torch.equal, mine, again))
    right = with_gradients(formula, [t.double() for t in tensors], seed)
    eager = with_gradients(formula, tensors, seed)
    judge(mine, right, eager, BF16)
    rows = slice(500, 504)  # of small gradients: judged by themselves
    judge(*([t[:, :, rows] for t in found[:2]] for found in (mine, right, eager)), BF16)
