"""``ops.cross_entropy``'s kernels in the interpreter: the rule of fp64 over options and sizes."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Small tiles, so that rows of a few hundred columns are held, streamed and split as long ones are.
SMALL = {
    "held": Tile(1, 1, 3, 1),
    "held and streamed": Tile(1, 1, 1, 1),
    "streamed": Tile(2, 1, 0, 1),
}


def draw(rows, columns, dtype=BF16, spread=3.0):
    return (torch.randn(rows, columns) * spread).to(dtype)


def indices(rows, columns, dtype=torch.int64):
    target = torch.randint(0, columns, (rows,), dtype=dtype)
    target[:: max(2, rows // 2)] = -100 if rows > 1 else target[0]
    return target


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 5.0, "label_smoothing": 0.2},
    "everything": {"softcap": 8.0, "scale": 1.5, "z_loss": 1e-3, "label_smoothing": 0.1},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["indices", "weighted", "probabilities"])
@pytest.mark.parametrize("shape", [*SMALL, "split"])
def test_options(option, kind, shape, on_cpu, with_tile, run, judge):
    tile = with_tile(SMALL.get(shape, Tile(1, 1, 0, 1)), few=132 if shape == "split" else 0)
    dtype, columns = {"held": (BF16, 507), "split": (BF16, 1001)}.get(shape, (FP32, 400))
    x = draw(3, columns, dtype)
    weight = torch.rand(columns) if kind == "weighted" else None
    target = indices(3, columns)
    if kind == "probabilities":
        target = torch.randn(3, columns).softmax(-1)
    with on_cpu(), tile:
        ours = run(ops.cross_entropy, x, target, weight, **OPTIONS[option])
        again = run(ops.cross_entropy, x, target, weight, **OPTIONS[option])
    assert all(map(torch.equal, ours, again))
    judge(ours, x, target, weight, **OPTIONS[option])


@seed(4)
@settings(
    max_examples=12,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    rows=st.sampled_from([1, 2, 5]),
    columns=st.sampled_from([2, 17, 257, 507, 799, 1000, 1030]),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    integer=st.sampled_from([torch.int32, torch.int64]),
    tile=st.sampled_from(list(SMALL.values())),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    option=st.sampled_from(list(OPTIONS.values())),
    padding=st.sampled_from([0, 1, 8]),
)
def test_any(rows, columns, dtype, integer, tile, reduction, option, padding, on_cpu, with_tile,
             run, judge):  # fmt: skip
    x = draw(rows, columns + padding, dtype)[:, :columns]
    target = indices(rows, columns, integer)
    g = torch.randn(rows) if reduction == "none" else torch.tensor(1.5)
    with on_cpu(), with_tile(tile):
        ours = run(ops.cross_entropy, x, target, g=g, reduction=reduction, **option)
    judge(ours, x, target, g=g, reduction=reduction, **option)
