"""``ops.scan`` and ``ops.linear_recurrence`` on the card: sizes that fill it, bits, neighbours."""

import itertools

import pytest
import torch

from inductor_ext import measure, ops
from inductor_ext.ops import _scan_composed as composed
from inductor_ext.ops import _scan_gradients as gradients

pytestmark = pytest.mark.gpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
# Each is a kernel of its own to compile: all operations on these, a sum and a recurrence on all.
FEW = [((1 << 24,), 0), ((4096, 8191), 1), ((65536, 128), 0)]
SHAPES = [*FEW, ((1_000_003,), 0), ((8, 1 << 20), 1), ((1 << 20, 2), 0), ((8, 4096, 257), 1)]
OPS = ("sum", "prod", "max", "min", "logsumexp")


def drawn(shape, dtype, op="sum"):
    if op == "prod":
        return (1 + 2e-4 * torch.randn(shape, device="cuda")).to(dtype)
    if op in ("max", "min", "cummax", "cummin"):
        return torch.randint(-(2**20), 2**20, shape, device="cuda").to(dtype)
    return torch.randn(shape, device="cuda").to(dtype)


def some_flags(shape):
    return torch.rand(shape, device="cuda") < 1e-3


def assert_near(got, truth):
    verdict = measure.check(got, truth, truth.to(got.dtype))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "dim"),
    [
        *((op, FP32, *where) for op in OPS for where in (SHAPES if op == "sum" else FEW)),
        *(("sum", BF16, *where) for where in FEW),
    ],
)
def test_scans(op, dtype, shape, dim, poison):
    x = drawn(shape, dtype, op)
    for reverse, exclusive, flags in ((False, False, None), (True, True, some_flags(shape))):
        order = dim, reverse, exclusive
        poison()
        y = ops.scan(x, op, *order, flags)
        assert_near(y, composed.scan(x.double(), flags, op, *order, FP64))


@pytest.mark.parametrize(("shape", "dim"), FEW)
@pytest.mark.parametrize("reverse", [False, True])
def test_positions(shape, dim, reverse, poison):
    x = torch.randint(-3000, 3000, shape, device="cuda").to(BF16)
    flags = some_flags(shape) if reverse else None
    poison()
    values, positions = ops.scan(x, "cummin", dim, reverse, segments=flags)
    expected = composed.scan_with_index(x, flags, "cummin", dim, reverse, False)
    assert torch.equal(values, expected[0]) and torch.equal(positions, expected[1])


@pytest.mark.parametrize(("shape", "dim"), FEW)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_integers(dtype, shape, dim, poison):
    x = torch.randint(0, 2, shape, device="cuda").to(dtype)
    if dtype != torch.bool:
        x = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, device="cuda")
        x = x.to(dtype)
    poison()
    assert torch.equal(ops.scan(x, "sum", dim), x.cumsum(dim))


@pytest.mark.parametrize(("shape", "dim"), FEW)
@pytest.mark.parametrize("op", OPS)
def test_gradients(op, shape, dim, poison):
    x, g = drawn(shape, FP32, op).requires_grad_(), drawn(shape, FP32)
    for reverse, exclusive, flags in ((False, False, None), (True, True, some_flags(shape))):
        order = dim, reverse, exclusive
        y = ops.scan(x, op, *order, flags)
        g = torch.where(y.detach().isinf(), 0, g)
        poison()
        (dx,) = torch.autograd.grad(y, x, g)
        if op == "sum":
            truth = composed.scan(g.double(), flags, "sum", dim, not reverse, exclusive, FP64)
        else:
            wide = x.detach().double()
            Y = composed.scan(wide, flags, op, *order, FP64)
            truth = gradients.gradient(g.double(), wide, Y, flags, op, *order)
        if op == "logsumexp":  # as accurate as y, whose last place is 1e-6 of it
            assert (dx - truth).norm() <= 1e-4 * truth.norm()
        else:
            assert_near(dx, truth)


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "reverse"),
    [
        *((*where, FP32, i % 2 == 1) for i, where in enumerate(SHAPES)),
        *((*where, BF16, i % 2 == 0) for i, where in enumerate(FEW)),
    ],
)
def test_recurrences(shape, dim, dtype, reverse, poison):
    a = (0.9 + 0.1 * torch.rand(shape, device="cuda")).to(dtype).requires_grad_()
    b = drawn(shape, dtype).requires_grad_()
    h0 = drawn([n for d, n in enumerate(shape) if d != dim], dtype).requires_grad_()
    g = drawn(shape, dtype)
    poison()
    h = ops.linear_recurrence(a, b, h0, dim, reverse)
    poison()
    found = torch.autograd.grad(h, (a, b, h0), g)
    wide = [t.detach().double() for t in (a, b, h0)]
    truth = composed.recurrence(*wide, dim, reverse)
    assert_near(h.detach(), truth)
    before = composed.shifted(truth, dim, -1 if reverse else 1, 0)
    edge = shape[dim] - 1 if reverse else 0
    before.select(dim, edge).copy_(wide[2])
    after = composed.shifted(wide[0], dim, 1 if reverse else -1, 0)
    G = composed.recurrence(after, g.double(), None, dim, not reverse)
    truths = G * before, G, (wide[0] * G).select(dim, edge)
    for mine, theirs in zip(found, truths, strict=True):
        if dtype == BF16:  # h and the gradient of b are rounded before they are multiplied
            assert (mine - theirs).abs().max() <= 2**-7 * theirs.abs().max()
        else:
            assert_near(mine, theirs)


def every_kind():
    """(what is computed, its inputs) of each family of kernels and states."""
    for shape, dim in (((1 << 22,), 0), ((6, 1 << 19), 1), ((1 << 19, 6), 0), ((2048, 4096), 1)):
        x, a = drawn(shape, FP32), torch.rand(shape, device="cuda")
        yield lambda x, dim=dim: ops.scan(x, "sum", dim), (x,)
        yield lambda x, dim=dim: ops.scan(x, "cummax", dim, True), (x,)
        yield lambda x, dim=dim: ops.scan(x, "logsumexp", dim), (x.double(),)
        yield lambda a, x, dim=dim: ops.linear_recurrence(a, x, dim=dim), (a, x)


def leaves(out):
    return out if isinstance(out, tuple) else (out,)


def test_ten_runs_have_the_same_bits():
    for fn, args in every_kind():
        one = leaves(fn(*args))
        for _ in range(9):
            assert all(map(torch.equal, one, leaves(fn(*args))))


def test_on_a_card_full_of_other_work():
    m = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    v = torch.randn(1 << 26, device="cuda")
    busy, beside = torch.cuda.Stream(), torch.cuda.Stream()
    for fn, args in every_kind():
        alone = leaves(fn(*args))
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            for _ in range(30):
                m @ m
                v.mul(1.5)
        results = []
        for i in range(40):  # on two streams, each with a workspace of its own
            with torch.cuda.stream(beside if i % 2 else torch.cuda.current_stream()):
                results.append(leaves(fn(*args)))
        torch.cuda.synchronize()
        for found in results:
            assert all(map(torch.equal, found, alone))


def test_replayed_from_a_cuda_graph():
    for fn, args in every_kind():
        expected = leaves(fn(*args))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = leaves(fn(*args))
        for _ in range(3):
            for t in found:
                t.zero_()
            graph.replay()
            assert all(map(torch.equal, found, expected))


def test_more_than_31_bits_of_elements():
    n = 2**31 + 12345
    x = torch.ones(n, dtype=torch.int8, device="cuda")
    y = ops.scan(x, "sum")
    for start in range(0, n, 1 << 28):
        part = y[start : start + (1 << 28)]
        assert torch.equal(part, torch.arange(start + 1, start + 1 + len(part), device="cuda"))
    del y
    rows, columns = x[: n // 3 * 3].view(3, -1), x[: n // 3 * 3].view(-1, 3)
    for values, dim in ((rows, 1), (columns, 0)):
        y = ops.scan(values, "sum", dim, reverse=True, dtype=torch.int8)
        whole = (n // 3 + 128) % 256 - 128
        assert bool((y.select(dim, 0) == whole).all() & (y.select(dim, -1) == 1).all())
        steps = y.narrow(dim, 0, n // 3 - 1) - y.narrow(dim, 1, n // 3 - 1)
        assert bool((steps == 1).all())
    values, positions = ops.scan(x, "cummax")
    assert bool((values == 1).all()) and positions[-1] == n - 1 and positions[2**31] == 2**31


@pytest.mark.parametrize("deterministic", [False, True])
def test_offsets_of_segments(deterministic):
    n = 1 << 21
    x = drawn((n, 3), FP32).requires_grad_()
    cu = torch.randint(0, n + 1, (500,), device="cuda").sort().values.int()
    cu[100:110] = cu[100]  # empty ones
    edges = torch.tensor([0, 0], device="cuda"), torch.tensor([n, n], device="cuda")
    cu = torch.cat([edges[0].int(), cu, edges[1].int()])
    torch.use_deterministic_algorithms(deterministic)
    try:
        y = ops.scan(x, "sum", 0, segments=cu)
        (dx,) = torch.autograd.grad(y.square().sum() / 2, x)
    finally:
        torch.use_deterministic_algorithms(False)
    bounds = cu.tolist()
    wide, truth, gradient = x.detach().double(), [], []
    for begin, end in itertools.pairwise(bounds):
        truth.append(wide[begin:end].cumsum(0))
        gradient.append(y[begin:end].detach().double().flip(0).cumsum(0).flip(0))
    assert_near(y.detach(), torch.cat(truth))
    assert_near(dx, torch.cat(gradient))


def test_compiled_without_recompiling():
    def fn(x, a):
        y = ops.scan(x.exp(), "sum", 1, reverse=True)
        return ops.linear_recurrence(a, y, dim=1).tanh()

    compiled = torch.compile(fn, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (4096, 70_001, 3):
            x, a = drawn((32, n), FP32).requires_grad_(), torch.rand(32, n, device="cuda")
            results = []
            for run in (compiled, fn):
                y = run(x, a)
                results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
            for mine, theirs in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
