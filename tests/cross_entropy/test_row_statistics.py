"""The statistics of rows in the interpreter and composed, judged by fp64; machine code."""

import math

import pytest
import torch
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import measure
from inductor_ext.ops import _joint
from inductor_ext.testing import launch_binaries

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WAYS = ("one program", "split", "composed")


@pytest.fixture(params=WAYS)
def compute(request, on_cpu, with_tile):
    """``row_statistics`` on one of its ways."""

    def run(*args):
        if request.param == "composed":
            return _joint.row_statistics(*args)
        with on_cpu(), with_tile(Tile(2, 1, 0, 1), few=132 if request.param == "split" else 0):
            return _joint.row_statistics(*args)

    return run


def truth(x, scale, softcap):
    z = scale * (softcap * torch.tanh(x / softcap) if softcap else x)
    peak = z.amax(1)
    return peak, (z - peak[:, None]).exp().sum(1), (z - peak[:, None]).sum(1)


def judge(found, x, scale=1.0, softcap=0.0):
    references, baselines = truth(x.double(), scale, softcap), truth(x.float(), scale, softcap)
    for name, *one in zip(("peak", "total", "below"), found, references, baselines, strict=True):
        verdict = measure.check(*one)
        assert one[0].dtype == FP32 and verdict.ok, f"{name}: {verdict.reason}"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("columns", [2, 17, 257, 799, 1600])
def test_sizes_and_dtypes(compute, columns, dtype):
    x = (torch.randn(5, columns) * 3).to(dtype)
    found = compute(x, True, 1.0, 0.0)
    judge(found, x)
    assert all(map(torch.equal, found, compute(x, True, 1.0, 0.0)))
    assert all(map(torch.equal, found[:2], compute(x, False, 1.0, 0.0)[:2]))


@pytest.mark.parametrize(("scale", "softcap"), [(0.7, 0.0), (1.0, 5.0), (1.5, 8.0)])
def test_scale_and_softcap(compute, scale, softcap):
    x = torch.randn(3, 997) * 6
    judge(compute(x, True, scale, softcap), x, scale, softcap)


def test_layouts(compute):
    wide = torch.randn(6, 900) * 3
    for x in (wide[:, 3:400], wide[::2, 8:408], wide.t().contiguous().t()[:, :397], wide[:0]):
        found = compute(x, True, 1.0, 0.0)
        assert [t.shape for t in found] == [(len(x),)] * 3
        if len(x):
            judge(found, x)


def test_below_has_no_elements_unless_asked_for(compute):
    assert compute(torch.randn(3, 40), False, 1.0, 0.0)[2].shape == (0,)


def test_infinities_and_nan_are_as_torch_has_them(compute):
    x = torch.randn(8, 997)
    x[0, 5], x[1, 6], x[2, 7], x[3], x[4] = math.nan, math.inf, -math.inf, -math.inf, math.nan
    x[5] -= 1e4  # whole segments masked, the rest far below 0
    x[5, 3:900] = -math.inf
    x[6] = torch.finfo(FP32).min
    for mine, theirs in zip(compute(x, True, 1.0, 0.0), truth(x, 1.0, 0.0), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("offset", [1e6, -1e6, 1e8, -1e8])
def test_offsets_cancel(compute, offset):
    x = torch.randn(3, 997) * 20 + offset
    x[0] = offset
    judge(compute(x, True, 1.0, 0.0), x)


def test_what_torch_checks_of_an_operation():
    checks = ("test_schema", "test_faketensor")
    for x in (torch.randn(4, 30), torch.randn(4, 30, dtype=FP64), torch.randn(4, 30).half()):
        for below in (False, True):
            torch.library.opcheck(_joint.row_statistics, (x, below, 2.0, 0.0), test_utils=checks)


@pytest.mark.parametrize(
    ("shape", "scale", "softcap"), [((4,), 1.0, 0.0), ((4, 9), -1.0, 0.0), ((4, 9), 1.0, math.inf)]
)
def test_bad_input(shape, scale, softcap):
    with pytest.raises(ValueError, match="expected"):
        _joint.row_statistics(torch.zeros(shape), False, scale, softcap)


# --- machine code ---------------------------------------------------------------------------------


def binaries(rows, columns, dtype, below, softcap=0.0):
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    return launch_binaries(lambda: launch.row_statistics(x, below, 1.0, softcap), launch)


@pytest.mark.parametrize(
    ("columns", "dtype", "below", "softcap"),
    [(128256, BF16, False, 0.0), (128256, BF16, True, 30.0), (32000, BF16, False, 0.0),
     (50257, BF16, False, 0.0), (50257, BF16, True, 0.0), (32000, FP32, True, 0.0)],
)  # fmt: skip
def test_one_kernel(columns, dtype, below, softcap):
    (kernel,) = binaries(8192, columns, dtype, below, softcap)
    assert kernel.name == "segments_kernel" and kernel.target == "sm_90a"
    assert kernel.spills == 0 and kernel.widest_load == 16


def test_few_rows_are_split():
    kernels = binaries(8, 131072, BF16, True)
    assert [k.name for k in kernels] == ["segments_kernel", "join_kernel"]
    assert all(k.spills == 0 for k in kernels)
