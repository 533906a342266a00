"""``ops.softmax`` and ``ops.log_softmax``: interpreted kernels, composed functions, binaries."""

import contextlib
import math

import pytest
import torch
from inductor_ext.templates import softmax as kernels
from inductor_ext.templates import softmax_split as split
from inductor_ext.templates.softmax import Tile

from inductor_ext import measure, ops
from inductor_ext.testing import compile_for, launch_binaries

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILES = {
    "held": Tile(1, 1, 5, 1),
    "both": Tile(1, 1, 1, 1),
    "streamed": Tile(2, 1, 0, 1),
    "split": None,
}
NAMES = ("softmax", "log_softmax")


def run(name, x, g, dim=-1, scale=1.0, dtype=None):
    """(result, gradient) of torch's function in ``dtype``."""
    own = x.detach().to(dtype or x.dtype).requires_grad_()
    y = getattr(torch, name)(own * scale if scale != 1.0 else own, dim)
    return y.detach(), torch.autograd.grad(y, own, g.to(y.dtype))[0]


def ours(name, x, g, dim=-1, scale=1.0):
    own = x.detach().requires_grad_()
    y = getattr(ops, name)(own, dim, scale=scale)
    return y.detach(), torch.autograd.grad(y, own, g)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("dtype", "columns", "padding"),
    [(BF16, 507, 0), (BF16, 1032, 0), (FP16, 257, 3), (FP32, 600, 0), (FP32, 17, 0), (BF16, 2, 0)],
)
def test_numbers(name, tile, dtype, columns, padding, on_cpu):
    x = (torch.randn(3, columns + padding) * 3).to(dtype)[:, :columns]
    g = torch.randn(3, columns).to(dtype)
    for scale in (1.0, 0.7):
        with on_cpu(TILES[tile]):
            found = ours(name, x, g, scale=scale)
            again = ours(name, x, g, scale=scale)
        assert all(map(torch.equal, found, again))
        truth = run(name, x, g, scale=scale, dtype=torch.float64)
        eager = run(name, x, g, scale=scale)
        for got, reference, baseline in zip(found, truth, eager, strict=True):
            verdict = measure.check(got, reference, baseline)
            assert verdict.ok, verdict.reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("kernel", ["copied", "strided", None])
def test_dimensions(name, dim, kernel, on_cpu):
    x, g = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    with on_cpu(TILES["both"], kernel == "strided") if kernel else contextlib.nullcontext():
        found = ours(name, x, g, dim)
    for mine, theirs in zip(found, run(name, x, g, dim, dtype=torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tile", ["streamed", "split"])
def test_offsets_and_infinities(name, tile, on_cpu):
    x = torch.randn(4, 300)
    x[1, 5:], x[2], x[3, 7] = -math.inf, -math.inf, math.inf
    g = torch.randn(4, 300)
    with on_cpu(TILES[tile]):
        found = ours(name, x, g)
        offset = ours(name, torch.tensor([[2.0, -1.0]]) + 1e6, torch.ones(1, 2))
    for mine, theirs in zip(found, run(name, x, g, dtype=torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    expected = getattr(torch, name)(torch.tensor([[2.0, -1.0]]), -1)
    torch.testing.assert_close(offset[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients(name, on_cpu):
    x, g = torch.randn(3, 40, requires_grad=True), torch.randn(3, 40, requires_grad=True)
    results = []
    for fn, a, b in ((getattr(ops, name), x, g), (getattr(torch, name), x.double(), g.double())):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        with on_cpu(TILES["both"]):
            (da,) = torch.autograd.grad(fn(a, -1), a, b, create_graph=True)
            results.append(torch.autograd.grad(da.square().sum(), (a, b)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("columns", [1000, 50257, 128256])
def test_binaries(log, columns):
    x = torch.empty(8192, columns, dtype=BF16, device="meta")
    forward, backward = launch_binaries(
        lambda: (kernels.forward(x, 1.0, log), kernels.backward(x, x, 1.0, log)), kernels
    )
    for kernel in (forward, backward):
        assert kernel.spills == 0 and kernel.registers <= 128
        assert kernel.widest_load == kernel.widest_store == 16


@pytest.mark.parametrize("log", [True, False])
def test_binaries_of_split_rows(log):
    x = torch.empty(8, 131072, dtype=BF16, device="meta")
    assert split.applies(x) and not split.applies(x.expand(132, 8, -1)[:, 0])
    binaries = launch_binaries(
        lambda: (split.forward(x, 1.0, log), split.backward(x, x, 1.0, log)), split
    )
    assert len(binaries) == 4
    for kernel in binaries:
        assert kernel.spills == 0 and kernel.widest_load == 16


@pytest.mark.codegen
def test_one_kernel_each_way_when_compiled():
    x = torch.empty(64, 1000, dtype=BF16, device="meta", requires_grad=True)
    for dynamic in (None, True):
        code = compile_for("h200", lambda x: ops.softmax(x), x, grad=True, dynamic=dynamic)
        names = [k.name.rpartition("_")[0] for k in code.kernels]
        assert names == ["softmax_kernel", "softmax_backward_kernel"]
        assert all(binary.spills == 0 for binary in code.cross_compile())


@pytest.mark.parametrize(
    ("x", "options", "error"),
    [
        (torch.zeros(2, dtype=torch.int64), {}, TypeError),
        (torch.zeros(2), {"dim": 1}, ValueError),
        (torch.zeros(()), {}, ValueError),
        (torch.zeros(2), {"scale": 0.0}, ValueError),
    ],
)
def test_bad_input(x, options, error):
    with pytest.raises(error, match="expected"):
        ops.softmax(x, **options)
