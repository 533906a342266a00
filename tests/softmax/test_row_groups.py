"""Rows that groups of programs share: emulated programs that wait for each other, machine code."""

import importlib.util
import math
import re
import sys
import types

import pytest
import torch
from inductor_ext.templates import row_groups_launch as groups
from inductor_ext.templates.row_groups_launch import Group

from inductor_ext import measure
from inductor_ext.ops import _joint
from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


SOURCES = {
    m.__name__.rpartition(".")[2]: m.__file__ for m in (groups.kernels(), groups.loss_kernels())
}
PACKAGE = "row_groups_emulated"


@pytest.fixture(name="define")
def _define(monkeypatch):
    """What executes the kernels' modules afresh, of which one imports the other."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = []
    monkeypatch.setitem(sys.modules, PACKAGE, package)

    def define(kernel):
        for name, file in SOURCES.items():
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", file)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
            if hasattr(module, kernel):
                return getattr(module, kernel)
        raise AssertionError(kernel)

    return define


def run(define, kind, x, g, group, programs, delay):
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    grid, given = groups.arguments(KINDS.index(kind), x, g, y, 0.7, group, programs)
    kernel = lambda: define("group_kernel")  # noqa: E731
    interpret(kernel, grid, given | {"PATIENCE": 10**6}, delay, together=True)
    return y


def right(kind, x, g):
    if kind in ("softmax", "log_softmax"):
        return getattr(x * 0.7, kind)(-1)
    if kind == "softmax_backward":
        return 0.7 * x * (g - (x * g).sum(-1, keepdim=True))
    return 0.7 * (g - x.exp() * g.sum(-1, keepdim=True))


def judge(found, truth, eager):
    assert torch.equal(found.isnan(), truth.isnan())
    finite = truth.isfinite()
    verdict = measure.check(*(torch.where(finite, t, 0) for t in (found, truth, eager)))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "group", "programs", "delay"),
    [(BF16, Group(3, 1, 3), 6, 0.0), (BF16, Group(2, 1, 4), 3, 0.01),
     (FP32, Group(2, 1, 3), 4, 0.01)],
)  # fmt: skip
def test_numbers(kind, dtype, group, programs, delay, define):
    torch.manual_seed(0)
    x, g = torch.randn(5, 520).mul(3), torch.randn(5, 520).to(dtype)
    if kind in ("softmax", "log_softmax"):
        x[1], x[2, 300:], x[3, 7], x[4] = -math.inf, -math.inf, math.nan, x[4] + 1e6
    else:
        x = getattr(x, kind.removesuffix("_backward"))(-1)
    x = x.to(dtype)
    found = run(define, kind, x, g, group, programs, delay)
    truth, eager = right(kind, x.double(), g.double()), right(kind, x.float(), g.float()).to(dtype)
    judge(found, truth, eager)


@pytest.mark.parametrize(
    ("z", "group", "programs", "delay"),
    [(False, Group(3, 1, 3), 6, 0.0), (True, Group(2, 1, 4), 3, 0.01)],
)
def test_loss_and_gradient(z, group, programs, delay, define):
    torch.manual_seed(0)
    n, columns, scale = 7, 520, 0.7
    x = torch.randn(n, columns).mul(3).to(BF16)
    x[1], x[2, 300:], x[3, 7], x[4, 9] = -math.inf, -math.inf, math.nan, 60.0
    target = torch.randint(0, columns, (n,))
    target[2], target[4], target[5], target[6] = 400, 9, -100, columns
    a0, a1, b = torch.rand(n), torch.rand(n) / 10 if z else None, torch.rand(n)
    b[:5] = a0[:5]
    a0[0] = b[0] = 0.0
    dx, rows = torch.full_like(x, torch.nan), [torch.full((n,), torch.nan) for _ in range(3)]
    given = x, dx, target, a0, a1, b, rows, scale, group, programs
    grid, given = groups.loss_arguments(*given)
    kernel = lambda: define("group_loss_kernel")  # noqa: E731
    interpret(kernel, grid, given | {"PATIENCE": 10**6}, delay, together=True)
    wide = [None if f is None else f.double() for f in (a0, a1, b)]
    truth = _joint._composed(x.double(), target, *wide, None, scale, 0.0)
    eager = _joint._composed(x, target, a0, a1, b, None, scale, 0.0)
    for one, i in zip((*rows, dx), (0, 1, 3, 4), strict=True):
        judge(one, truth[i], eager[i])


def test_who_waits_in_vain_writes_nan(define):
    x, y = torch.randn(3, 64), torch.zeros(3, 64)
    _, given = groups.arguments(0, x, x, y, 1.0, Group(2, 1, 3), 2)
    kernels = iter(
        [lambda: define("group_kernel"), lambda: lambda **_: None]
    )  # the second program never comes
    interpret(lambda: next(kernels)(), 2, given | {"PATIENCE": 3}, together=True)
    assert y[:, :32].isnan().all() and not y[:, 32:].any()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("softmax", 262144), ("softmax_backward", 128256), ("log_softmax_backward", 256000),
     ("loss", 262144)],
)  # fmt: skip
def test_machine_code(kind, columns):
    x = torch.empty(4096, columns, dtype=BF16, device="meta")
    tensors = 2 if "backward" in kind else 1
    group = groups.group_of(columns, 2, tensors, 2 if kind == "softmax_backward" else 1, 132)
    if kind == "loss":
        row, target = torch.empty(4096, device="meta"), torch.empty(4096, dtype=torch.int64)
        given = x, x, target.to("meta"), row, None, row, [row, row, row], 1.0, group, 132
        kernel, (_, given) = groups.loss_kernels().group_loss_kernel, groups.loss_arguments(*given)
    else:
        _, given = groups.arguments(KINDS.index(kind), x, x, x, 1.0, group, 132)
        kernel = groups.kernels().group_kernel
    binary = gluon_binary(kernel, given).binary
    assert binary.spills == 0 and binary.registers <= 65536 // (32 * group.warps * group.resident)
    assert binary.widest_load == binary.widest_store == 16
    assert binary.shared_bytes * group.resident <= groups.SHARED_BYTES
    assert re.search(r"\b(red|atom)\.", binary.ptx) is None


def test_which_rows_are_shared():
    def size(columns, itemsize=2, tensors=2, again=2):
        group = groups.group_of(columns, itemsize, tensors, again, 132)
        return group and group.size

    assert [size(v) for v in (32000, 100352, 128256, 151936, 262144)] == [None, None, 16, 10, 16]
    assert [size(v, again=1) for v in (128256, 262144)] == [None, 16]
    assert [size(v, tensors=1, again=1) for v in (128256, 200064, 262144)] == [None, None, 8]
    assert size(65536, itemsize=4) == 16 and size(10**6) is None
