"""The kernels for classes that are strided in memory, interpreted and as machine code."""

import math
import re

import pytest
import torch
from inductor_ext.templates import class_softmax_launch as launch
from inductor_ext.templates.class_softmax_launch import Tile

from inductor_ext import measure
from inductor_ext.ops import _classes, _joint
from inductor_ext.testing import launch_binaries, launches_interpreted

BF16, FP32 = torch.bfloat16, torch.float32
TILES = {"a thread has a place": Tile(4, 1, 1), "threads meet": Tile(2, 4, 2)}


def rows(x):
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def drawn(n, classes, places, dtype=BF16):
    torch.manual_seed(0)
    count = n * places
    x = torch.randn(n, classes, places).mul(3).to(dtype)
    x[0, 1, 6] = 60.0  # a confident target
    target = torch.randint(-1, classes + 1, (count,))
    target[6] = 1
    a0, a1, b, c = (torch.rand(count) for _ in range(4))
    b[: count // 2] = a0[: count // 2]
    return x, target, a0, a1 / 10, b, c / 10


def judge(found, truth, eager):
    finite = truth.isfinite()
    assert torch.equal(found.isnan(), truth.isnan())
    kept = (torch.where(finite, t, 0) for t in (found, truth, eager))
    verdict = measure.check(*kept)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("terms", ["", "z", "smooth", "z smooth capped"])
@pytest.mark.parametrize("shape", [(2, 19, 40), (1, 37, 33)])
def test_loss_and_gradient(tile, terms, shape):
    x, target, a0, a1, b, c = drawn(*shape)
    if "smooth" not in terms:
        x[0, 2:, 4] = -math.inf
        x[0, 5, 9] = math.nan
        a0[8] = b[8] = 0  # a row that counts for nothing
        x[0, 3, 8] = math.nan
    factors = a0, a1 if "z" in terms else None, b, c if "smooth" in terms else None
    if "z" in terms:
        a1[8] = 0.0
    scales = 0.7, 5.0 if "capped" in terms else 0.0
    with launches_interpreted(launch):
        *found, dx = launch.rows_and_gradient(x, target, *factors, *scales, TILES[tile])
        peak, total = launch.statistics(x, *scales, TILES[tile])
    wide = [None if f is None else f.double() for f in factors]
    truth = _joint._composed(rows(x).double(), target, *wide, *scales)
    eager = _joint._composed(rows(x), target, *factors, *scales)
    for one in zip((*found, rows(dx)), truth, eager, strict=True):
        judge(*one)
    for one in zip((peak, total), truth[:2], eager[:2], strict=True):
        judge(*one)


def test_the_operation_is_that_of_a_transposed_copy():
    x, target, *factors = drawn(2, 11, 7, FP32)
    *found, dx = _classes.class_rows_and_gradient(x, target, *factors, 1.0, 0.0)
    *others, expected = _joint.rows_and_gradient(rows(x), target, *factors, 1.0, 0.0)
    assert all(map(torch.equal, (*found, rows(dx)), (*others, expected)))
    pair = _classes.class_statistics(x, 1.0, 0.0)
    assert all(map(torch.equal, pair, others))
    with pytest.raises(ValueError, match=r"expected as \[N, C, D\]"):
        _classes.class_statistics(x[0], 1.0, 0.0)


@pytest.mark.parametrize(
    ("shape", "smooth"),
    [((8, 19, 512 * 512), False), ((8, 150, 256 * 256), True), ((16, 1000, 4096), False)],
)
def test_machine_code(shape, smooth):
    x = torch.empty(shape, dtype=BF16, device="meta")
    count = shape[0] * shape[2]
    target = torch.empty(count, dtype=torch.int64, device="meta")
    row = torch.empty(count, dtype=FP32, device="meta")
    (kernel,) = launch_binaries(
        lambda: launch.rows_and_gradient(
            x, target, row, None, row, row if smooth else None, 1.0, 0.0
        ),
        launch,
    )
    assert kernel.spills == 0
    assert kernel.widest_load == kernel.widest_store == 16
    assert kernel.registers <= (255 if smooth else 128)
    assert re.search(r"\b(red|atom)\.", kernel.ptx) is None
