"""Scans in compiled programs on the card: numbers by fp64, bits, sizes that vary, CUDA graphs."""

import pytest
import torch
import torch._dynamo.testing
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.functional import pad

from inductor_ext import measure, report

pytestmark = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32


def around(x):
    return ((x * 0.5).cumsum(0) - x).tanh()


def turned(x):
    return (x * 2).flip(1).cumsum(1).flip(1) + x


def exclusive(x):
    return pad((x * 0.5).cumsum(-1)[..., :-1], (1, 0)) + x


def columns(x):
    return (x * x[:1]).cumsum(0)


def positions(x):
    return x.cummax(0)


def nucleus(x):
    p = x.softmax(-1)
    return p.cumsum(-1) - p


# (program, shape)
PROGRAMS = {
    "long": (around, (1 << 24,)),
    "odd": (around, (1_000_003,)),
    "turned_rows": (turned, (8192, 4096)),
    "turned_odd_rows": (turned, (799, 4097)),
    "few_rows": (exclusive, (64, 128_256)),
    "few_columns": (columns, (1 << 20, 3)),
    "columns": (columns, (65_536, 128)),
    "middle": (lambda x: x.cumsum(1).relu(), (8, 4096, 257)),
    "pairs": (positions, (1 << 22,)),
    "nucleus": (nucleus, (64, 128_256)),
}


def several(out):
    return out if isinstance(out, tuple) else (out,)


def fired(decisions):
    (found,) = [d for d in decisions if d.lowering == "scan"]
    assert found.fired, found.reason


def compiled(fn, *args, **options):
    """(compiled, its first result); its scan was taken."""
    program = torch.compile(fn, **options)
    with report.collect() as decisions:
        out = program(*args)
    fired(decisions)
    return program, out


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_bits(name, dtype, poison):
    fn, shape = PROGRAMS[name]
    x = torch.randn(shape, device="cuda").to(dtype)
    program, out = compiled(fn, x)
    wide, eager = several(fn(x.double())), several(fn(x))
    for got, want, baseline in zip(several(out), wide, eager, strict=True):
        if got.dtype == torch.int64:
            assert torch.equal(got, want)
            continue
        verdict = measure.check(got, want, baseline)
        assert verdict.ok, verdict.reason
    for _ in range(5):
        poison()
        for one, other in zip(several(out), several(program(x)), strict=True):
            assert torch.equal(one, other)


def test_a_recurrence_of_two_leaves():
    def fn(a, x):
        combine = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])  # noqa: E731
        return associative_scan(combine, (a, x), dim=1, combine_mode="pointwise")[1]

    a = torch.rand(4, 1 << 20, device="cuda") * 0.9
    x = torch.randn_like(a)
    _, out = compiled(fn, a, x)
    wide, h = a.double().cpu(), torch.zeros(4, dtype=torch.float64)
    for t in range(3000):
        h = wide[:, t] * h + x[:, t].double().cpu()
        if t % 500 == 499:
            torch.testing.assert_close(out[:, t].double().cpu(), h, rtol=1e-4, atol=1e-5)


def test_one_program_for_all_lengths():
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    program = torch.compile(around, backend=frames, dynamic=True)
    for length in (1 << 20, 123_457, 7, 2_000_001):
        x = torch.randint(-8, 8, (length,), device="cuda").float()
        torch.testing.assert_close(program(x), around(x), rtol=1e-5, atol=1e-5)
    assert frames.frame_count == 1


def test_in_a_cuda_graph():
    program = torch.compile(around, mode="reduce-overhead")
    for _ in range(6):
        x = torch.randint(-8, 8, (1 << 22,), device="cuda").float()
        got = program(x).clone()
        torch.testing.assert_close(got, around(x), rtol=1e-5, atol=1e-5)


def test_a_gradient():
    x = torch.randn(64, 100_000, device="cuda", requires_grad=True)

    def fn(x):
        return (x * 2).cumsum(1).sin()

    g = torch.randn_like(x)
    torch.compile(fn)(x).backward(g)
    wide = x.detach().double().requires_grad_()
    fn(wide).backward(g.double())
    # In fp32 the sine's argument has lost its last digits.
    assert (x.grad.double() - wide.grad).norm() <= 1e-3 * wide.grad.norm()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_whole_numbers_are_exact(dtype):
    x = torch.randint(-100, 100, (3, 1_000_001), device="cuda").to(dtype)
    _, out = compiled(lambda x: (x * 2).cumsum(1), x)
    assert torch.equal(out, (x * 2).cumsum(1))
