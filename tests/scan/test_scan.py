"""``ops.scan`` against a loop: values and positions, over everything that can be asked for."""

import math

import pytest
import torch
from hypothesis import settings
from scan_reference import (
    BF16,
    FP16,
    FP32,
    FP64,
    PAIRS,
    SETTINGS,
    drawn,
    laid_out,
    numbers,
    scan,
    segments_of,
    sized,
)
from scan_ways import KERNELS, computed

from inductor_ext import measure, ops

FLOATS = (BF16, FP16, FP32, FP64)
INTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


DRAWN = drawn((*FLOATS, *INTS), (0, 1, -1))


@settings(max_examples=100, **SETTINGS)
@DRAWN
def test_numbers(**case):
    check("composed", **case)


@pytest.mark.parametrize("way", KERNELS)
@settings(max_examples=12, **SETTINGS)
@DRAWN
def test_numbers_of_kernels(way, **case):
    check(way, **case)


def check(way, op, dtype, n, dim, reverse, exclusive, segments, layout):
    if op == "logsumexp" and dtype not in FLOATS:
        return
    shape = sized(n, dim)
    x = laid_out(lambda s: numbers(s, dtype, op), shape, layout)
    given_segments, flags = segments_of(segments, n, dim, shape)
    with computed(way):
        y = ops.scan(x, op, dim, reverse, exclusive, given_segments)
    wide = x.double() if dtype.is_floating_point else x
    values, positions = scan(wide, op, dim, reverse, exclusive, flags)
    if op in PAIRS:
        assert torch.equal(y[1], positions)
        y = y[0]
    assert y.shape == x.shape
    if not dtype.is_floating_point:
        assert y.dtype == values.dtype and torch.equal(y, values)
        return
    assert y.dtype == dtype
    verdict = measure.check(y, values, values.to(dtype))  # rounded once
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("op", "theirs"),
    [
        ("sum", torch.cumsum),
        ("prod", torch.cumprod),
        ("logsumexp", torch.logcumsumexp),
        ("cummax", torch.cummax),
        ("cummin", torch.cummin),
    ],
)
def test_nan_and_inf_as_torch(op, theirs, way):
    x = torch.randint(-3, 4, (8, 23)).float()
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        x[row, torch.randint(0, 23, (3,))] = value
    x[3], x[4, :9], x[5, 4], x[5, 9], x[6, 2], x[6, 3] = (
        -math.inf, -math.inf, math.inf, -math.inf, math.nan, math.inf,
    )  # fmt: skip
    for dim in (0, 1):
        mine, expected = ops.scan(x, op, dim), theirs(x, dim)
        if op in PAIRS:
            assert torch.equal(mine[1], expected.indices)
            mine, expected = mine[0], expected.values
        torch.testing.assert_close(mine, expected, equal_nan=True)


_ROWS = {
    "near": lambda x, t: x,
    "rising": lambda x, t: x + 30 * t,
    "falling": lambda x, t: x - 30 * t,
    "far": lambda x, t: x + 1e6,
    "late": lambda x, t: torch.where(t < 9, -math.inf, x),
    "small": lambda x, t: torch.where(t == 0, 0, -20 - x.abs()),  # exp(-20) counts beside 1
    "NaN": lambda x, t: torch.where(t == 40, math.nan, x),
    "inf": lambda x, t: torch.where(t == 40, math.inf, x),
}


@pytest.mark.parametrize("reverse", [False, True])
def test_tiles_of_any_values_have_their_logsumexp(reverse, way):
    kinds = [f(torch.randn(70), torch.arange(70.0)) for f in _ROWS.values()]
    x = torch.stack([x.flip(0) if reverse else x for x in kinds])
    ys = ops.scan(x, "logsumexp", 1, reverse)
    for name, x, y in zip(_ROWS, kinds, ys, strict=True):
        y = y.flip(0) if reverse else y
        verdict = measure.check(y, x.double().logcumsumexp(0), x.logcumsumexp(0))
        assert verdict.ok, f"{name}: {verdict.reason}"


def test_suffix_sums_behind_large_values_are_exact(way):
    x = torch.cat([torch.full((32,), 1e8), torch.ones(32)])
    y = ops.scan(x, "sum", reverse=True)
    assert y[32:].tolist() == list(range(32, 0, -1))
    cu = torch.tensor([0, 32, 32, 64])
    y = ops.scan(x, "sum", segments=cu)
    assert y[32:].tolist() == list(range(1, 33))
    y = ops.scan(x, "sum", segments=cu, exclusive=True)
    assert y[32:].tolist() == list(range(32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_integers_wrap_around(op, dtype, way):
    x = numbers((2, 40), dtype)
    theirs = {"sum": torch.cumsum, "prod": torch.cumprod}[op]
    assert torch.equal(ops.scan(x, op), theirs(x, 1))
    assert torch.equal(ops.scan(x, op, dtype=dtype), theirs(x, 1, dtype=dtype))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(BF16, FP32), (FP32, BF16), (torch.int32, FP32), (torch.bool, torch.int32), (FP32, FP64)],
)
def test_dtype_of_the_result(given, dtype, way):
    x = numbers((3, 30), given)
    truth, _ = scan(x.to(FP64 if dtype.is_floating_point else torch.int64), "sum")
    y = ops.scan(x, "sum", dtype=dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y, truth.to(dtype))
    y, positions = ops.scan(x, "cummax", dtype=dtype)
    torch.testing.assert_close(y, torch.cummax(x.to(dtype), 1).values)
    assert torch.equal(positions, torch.cummax(x.to(dtype), 1).indices)


def test_16_bits_are_accumulated_in_fp32(way):
    x = torch.full((1, 40), 1 / 32, dtype=BF16)
    x[:, 0] = 8.0  # to which bf16 adds no 1/32
    y = ops.scan(x, "sum")
    assert torch.equal(y, (8 + torch.arange(40) / 32).to(BF16).expand(1, -1))


@pytest.mark.parametrize("shape", [(30,), (2, 3, 5), (0, 4), (3, 0)])
def test_any_number_of_dimensions(shape, way):
    x = torch.randn(shape)
    for dim in range(-len(shape), len(shape)):
        torch.testing.assert_close(ops.scan(x, "sum", dim), x.cumsum(dim))
        flipped = x.flip(dim).cumsum(dim).flip(dim)
        torch.testing.assert_close(ops.scan(x, "sum", dim, reverse=True), flipped)


def test_the_result_lies_as_the_input_does(way):
    x = torch.randn(1, 3, 5).permute(2, 0, 1)
    assert ops.scan(x, "sum", 0).stride() == x.stride()
    assert ops.scan(x, "cummax", 0)[1].stride() == x.stride()
    assert ops.linear_recurrence(x, x, dim=0).stride() == x.stride()


def test_the_input_stays_as_it_was(way):
    x = torch.randn(3, 20)
    before = x.clone()
    y = ops.scan(x[:, :1], "max")
    assert torch.equal(x, before) and y.data_ptr() != x.data_ptr()
