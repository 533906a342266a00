"""Rows that groups of programs share: emulated programs that wait for each other, machine code."""

import importlib.util
import math
import re

import pytest
import torch
from inductor_ext.templates import row_groups_launch as groups
from inductor_ext.templates.row_groups_launch import Group

from inductor_ext import measure
from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


SOURCE = groups.kernels().__file__


def define():
    name = "inductor_ext.templates.row_groups_emulated"
    spec = importlib.util.spec_from_file_location(name, SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.group_kernel


def run(kind, x, g, group, programs, delay):
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    grid, given = groups.arguments(KINDS.index(kind), x, g, y, 0.7, group, programs)
    interpret(define, grid, given | {"PATIENCE": 10**6}, delay, together=True)
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
def test_numbers(kind, dtype, group, programs, delay):
    torch.manual_seed(0)
    x, g = torch.randn(5, 520).mul(3), torch.randn(5, 520).to(dtype)
    if kind in ("softmax", "log_softmax"):
        x[1], x[2, 300:], x[3, 7], x[4] = -math.inf, -math.inf, math.nan, x[4] + 1e6
    else:
        x = getattr(x, kind.removesuffix("_backward"))(-1)
    x = x.to(dtype)
    found = run(kind, x, g, group, programs, delay)
    truth, eager = right(kind, x.double(), g.double()), right(kind, x.float(), g.float()).to(dtype)
    judge(found, truth, eager)


def test_who_waits_in_vain_writes_nan():
    x, y = torch.randn(3, 64), torch.zeros(3, 64)
    _, given = groups.arguments(0, x, x, y, 1.0, Group(2, 1, 3), 2)
    kernels = iter([define, lambda: lambda **_: None])  # the second program never comes
    interpret(lambda: next(kernels)(), 2, given | {"PATIENCE": 3}, together=True)
    assert y[:, :32].isnan().all() and not y[:, 32:].any()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("softmax", 262144), ("softmax_backward", 128256), ("log_softmax_backward", 256000)],
)
def test_machine_code(kind, columns):
    x = torch.empty(4096, columns, dtype=BF16, device="meta")
    tensors = 2 if "backward" in kind else 1
    group = groups.group_of(columns, 2, tensors, 2 if kind == "softmax_backward" else 1, 132)
    _, given = groups.arguments(KINDS.index(kind), x, x, x, 1.0, group, 132)
    binary = gluon_binary(groups.kernels().group_kernel, given).binary
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
