"""Rows of huge finite values: what is exponentiated is a difference of logits, not of products."""

import math

import pytest
import torch
from inductor_ext.templates.softmax import Tile

from inductor_ext import ops

FP32, BF16 = torch.float32, torch.bfloat16
LOWEST = torch.finfo(FP32).min
TILES = {"held": Tile(1, 1, 5, 1), "streamed": Tile(1, 1, 0, 1), "split": None}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("value", [1e10, -1e10, 1e12, -1e30, LOWEST, -LOWEST])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_constant_row_is_uniform(tile, value, dtype, on_cpu):
    limits = torch.finfo(dtype)
    x = torch.full((2, 601), min(max(value, limits.min), limits.max), dtype=dtype)
    with on_cpu(TILES[tile]):
        p, log_p = ops.softmax(x, -1), ops.log_softmax(x, -1)
    torch.testing.assert_close(p, torch.softmax(x, -1))
    torch.testing.assert_close(log_p, torch.log_softmax(x, -1))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_a_column_of_the_lowest_value(tile, scale, on_cpu):
    x = torch.randn(3, 300)
    x[:, 0], x[1, 70:200] = LOWEST, -1e30
    with on_cpu(TILES[tile]):
        p, log_p = ops.softmax(x, -1, scale=scale), ops.log_softmax(x, -1, scale=scale)
    torch.testing.assert_close(p, torch.softmax(x * scale, -1), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(log_p, torch.log_softmax(x * scale, -1), rtol=1e-5, atol=1e-6)
    assert log_p.isfinite().all()


@pytest.mark.parametrize("tile", TILES)
def test_a_common_offset_cancels(tile, on_cpu):
    offsets = torch.tensor([1e6, 1e8, -1e8, 1e12, -1e12])[:, None]
    steps = torch.tensor([0.0625, 8.0, 8.0, 65536.0, 65536.0])[:, None]  # fp32 has them all
    x = torch.arange(300).remainder(3) * steps
    with on_cpu(TILES[tile]):
        found = ops.log_softmax(x + offsets, -1)
    truth = torch.log_softmax(x.double(), -1)
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", TILES)
def test_infinities_among_large_values(tile, on_cpu):
    x = torch.full((4, 300), 1e30)
    x[0, ::2], x[1], x[2, 7], x[3, 1:] = -math.inf, -math.inf, math.inf, -math.inf
    for name in ("softmax", "log_softmax"):
        with on_cpu(TILES[tile]):
            found = getattr(ops, name)(x, -1)
        theirs = getattr(torch, name)(x, -1)
        torch.testing.assert_close(found, theirs, equal_nan=True)
