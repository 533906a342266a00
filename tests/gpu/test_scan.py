"""``ops.scan`` and ``ops.linear_recurrence`` on the card: sizes that fill it, bits, neighbours.

A kernel is compiled for each operation, order and shape, so that these are few.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from inductor_ext.templates import scan

from inductor_ext import measure, ops
from inductor_ext.ops import _scan_composed as composed
from inductor_ext.ops import _scan_gradients as gradients

pytestmark = pytest.mark.gpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SHAPES = [((1 << 24,), 0), ((4096, 8191), 1), ((65536, 128), 0)]  # 1-D, rows, columns


def drawn(shape, dtype, op="sum", dim=0):
    if op == "prod":  # exact: 2 and 1/2 in turn among 1 and -1
        scaled = torch.rand(shape, device="cuda") < 1e-3
        turn = scaled.cumsum(dim) % 2 == 1
        signs = torch.where(torch.rand(shape, device="cuda") < 0.5, -1.0, 1.0)
        return (signs * torch.where(scaled, torch.where(turn, 2.0, 0.5), 1.0)).to(dtype)
    if op == "max":
        return torch.randint(-(2**20), 2**20, shape, device="cuda").to(dtype)
    return torch.randn(shape, device="cuda").to(dtype)


def some_flags(shape):
    return torch.rand(shape, device="cuda") < 1e-3


def assert_near(got, truth):
    verdict = measure.check(got, truth, truth.to(got.dtype))
    assert verdict.ok, verdict.reason


def leaves(out):
    return out if isinstance(out, tuple) else (out,)


def every_kind(shapes=SHAPES):
    """(what is computed, its inputs): one and two states, 1-D, rows and columns."""
    for shape, dim in shapes:
        x, a = drawn(shape, FP32), torch.rand(shape, device="cuda")
        yield lambda x, dim=dim: ops.scan(x, "sum", dim), (x,)
        yield lambda x, dim=dim: ops.scan(x, "cummax", dim, True), (x,)
        yield lambda x, dim=dim: ops.scan(x, "logsumexp", dim), (x,)
        yield lambda a, x, dim=dim: ops.linear_recurrence(a, x, dim=dim), (a, x)


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


@triton.jit
def holding(x, turns):
    values = tl.load(x + tl.arange(0, 1024))
    for _ in range(turns):
        values = values * 1.000001 + 0.5
    tl.store(x + tl.arange(0, 1024), values)


def test_few_programs_run_at_a_time():
    """Programs that stay are as many as an idle card holds: here others hold most of it for some
    milliseconds, and who runs computes what the late ones would have told."""
    some, busy = torch.ones(1024, device="cuda"), torch.cuda.Stream()
    for fn, args in every_kind(SHAPES[:1]):
        alone = leaves(fn(*args))
        torch.cuda.synchronize()
        for _ in range(3):
            with torch.cuda.stream(busy):
                holding[(200,)](some, 300_000, num_warps=32)
            assert all(map(torch.equal, alone, leaves(fn(*args))))


def test_who_does_not_wait_computes_the_same_bits(monkeypatch):
    """Programs that find a total missing compute it themselves, and publish it as its own would."""
    for fn, args in every_kind():
        with monkeypatch.context() as patch:
            expected = leaves(fn(*args))
            patch.setattr(scan, "PATIENCE", 0)
            for _ in range(3):
                assert all(map(torch.equal, expected, leaves(fn(*args))))


def test_ten_runs_have_the_same_bits():
    for fn, args in every_kind():
        one = leaves(fn(*args))
        for _ in range(9):
            assert all(map(torch.equal, one, leaves(fn(*args))))


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
    whole = (n // 3 + 128) % 256 - 128
    for values, dim in ((rows, 1), (columns, 0)):
        y = ops.scan(values, "sum", dim, reverse=True, dtype=torch.int8)
        assert bool((y.select(dim, 0) == whole).all() & (y.select(dim, -1) == 1).all())
        steps = y.narrow(dim, 0, n // 3 - 1) - y.narrow(dim, 1, n // 3 - 1)
        assert bool((steps == 1).all())
        del y, steps
    values, positions = ops.scan(x, "cummax")
    assert bool((values == 1).all()) and positions[-1] == n - 1 and positions[2**31] == 2**31


@pytest.mark.parametrize("deterministic", [False, True])
def test_offsets_of_segments(deterministic):
    n = 1 << 20
    x = drawn((n, 3), FP32).requires_grad_()
    inner = torch.randint(0, n + 1, (200,), device="cuda").sort().values
    inner[100:110] = inner[100]  # empty ones
    ends = torch.tensor([0, 0, n, n], device="cuda")
    cu = torch.cat([ends[:2], inner, ends[2:]]).int()
    torch.use_deterministic_algorithms(deterministic)
    try:
        y = ops.scan(x, "sum", 0, segments=cu)
        (dx,) = torch.autograd.grad(y, x, y.detach())
    finally:
        torch.use_deterministic_algorithms(False)
    wide, truth, gradient = x.detach().double(), [], []
    for begin, end in itertools.pairwise(cu.tolist()):
        truth.append(wide[begin:end].cumsum(0))
        gradient.append(y[begin:end].detach().double().flip(0).cumsum(0).flip(0))
    assert_near(y.detach(), torch.cat(truth))
    assert_near(dx, torch.cat(gradient))


@pytest.mark.parametrize(
    ("op", "shape", "dim", "plain"),
    [
        (op, *where, (i + j) % 2 == 0)
        for i, op in enumerate(("sum", "prod", "max", "logsumexp"))
        for j, where in enumerate(SHAPES)
    ],
)
def test_values_and_gradients(op, shape, dim, plain, poison):
    x, g = drawn(shape, FP32, op, dim).requires_grad_(), drawn(shape, FP32)
    flags = None if plain else some_flags(shape)
    order = dim, not plain, not plain
    poison()
    y = ops.scan(x, op, *order, flags)
    wide = x.detach().double()
    Y = composed.scan(wide, flags, op, *order, FP64)
    assert_near(y.detach(), Y)
    g = torch.where(Y.isinf(), 0, g)
    poison()
    (dx,) = torch.autograd.grad(y, x, g)
    if op == "sum":
        truth = composed.scan(g.double(), flags, "sum", dim, plain, not plain, FP64)
    else:
        truth = gradients.gradient(g.double(), wide, Y, flags, op, *order)
    if op == "logsumexp":  # as accurate as y, whose last place is 1e-6 of it
        assert (dx - truth).norm() <= 1e-4 * truth.norm()
    else:
        assert_near(dx, truth)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_positions(shape, dim, poison):
    x = torch.randint(-3000, 3000, shape, device="cuda").to(BF16)
    flags = some_flags(shape)
    poison()
    values, positions = ops.scan(x, "cummin", dim, segments=flags)
    expected = composed.scan_with_index(x, flags, "cummin", dim, False, False)
    assert torch.equal(values, expected[0]) and torch.equal(positions, expected[1])


@pytest.mark.parametrize(
    ("dtype", "shape", "dim"),
    [
        (torch.int32, *SHAPES[0]),
        (torch.bool, *SHAPES[1]),
        (torch.int64, *SHAPES[2]),
        (torch.int64, (2**24 + 1,), 0),
    ],
)
def test_integers_as_torch(dtype, shape, dim, poison):
    x = torch.randint(-(2**62), 2**62, shape, device="cuda")
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    poison()
    assert torch.equal(ops.scan(x, "sum", dim), x.cumsum(dim))


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "reverse"),
    [
        *((*where, FP32, i % 2 == 1) for i, where in enumerate(SHAPES)),
        ((8, 4096, 257), 1, BF16, False),
        ((1 << 24,), 0, BF16, True),
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
