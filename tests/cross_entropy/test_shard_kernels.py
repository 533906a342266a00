"""The kernels of sharded classes in the interpreter: ranks one after the other in one process."""

import math
import types

import pytest
import torch
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates.cross_entropy_launch import INDEX, Loss, Tile

from inductor_ext import compat_runtime
from inductor_ext.ops import _rows, _shards
from inductor_ext.testing import launch_binaries

BF16, FP32 = torch.bfloat16, torch.float32
TILES = {
    "streamed": Tile(1, 1, 0, 1),
    "wide": Tile(2, 1, 0, 1),
    "split": Tile(1, 1, 0, 1),
}
OPTIONS = {
    "plain": {},
    "z-loss and scale": {"z_loss": 1e-2, "scale": 0.7},
    "everything": {"softcap": 8.0, "scale": 1.5, "z_loss": 1e-3, "label_smoothing": 0.1},
}


@pytest.fixture
def ranks(on_cpu, with_tile, monkeypatch):
    """``ranks(x, target, weight, sizes, ...)``: (loss, dx), merged by the kernel."""
    monkeypatch.setattr(_shards, "_merged_by_kernel", lambda every: every.dtype == FP32)

    def run(x, target, weight, sizes, tile="streamed", g=None, g_lse=None, in_place=False,
            reduction="mean", ignore_index=-100, label_smoothing=0.0, scale=1.0, softcap=0.0,
            z_loss=0.0):  # fmt: skip
        loss = Loss(INDEX, ignore_index, label_smoothing, scale, softcap, z_loss,
                    reduction == "mean")  # fmt: skip
        classes, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [x[:, a : a + n] for a, n in zip(starts, sizes, strict=True)]
        weights = [None if weight is None else weight[a : a + n].contiguous()
                   for a, n in zip(starts, sizes, strict=True)]  # fmt: skip
        local = [_shards.local_targets(target, ignore_index, a, classes, n)
                 for a, n in zip(starts, sizes, strict=True)]  # fmt: skip
        with on_cpu(), with_tile(TILES[tile], few=132 if tile == "split" else 0):
            shares = [_shards.statistics(loss, *of, w)
                      for *of, w in zip(parts, local, weights, strict=True)]  # fmt: skip
            every, merged = torch.stack(shares), []
            for own in local:
                of_target, sums = _shards.sums_of(loss, every, own, weight is not None, classes)
                merged.append((*_shards.merged(loss, every, own, of_target, sums), sums))
            for found, first in zip(merged, merged[:1] * len(merged), strict=True):
                for a, b in zip(found, first, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num())
            losses, _, stats, sums = merged[0]
            g = torch.ones(1).expand(len(x)) if g is None else g
            dx = []
            for part, own, w in zip(parts, local, weights, strict=True):
                own_x = part.clone() if in_place else part
                out = own_x if in_place else None
                dx.append(_shards.gradient(loss, g, g_lse, own_x, own, w, stats, sums, out))
        total = losses if reduction == "none" else losses.sum()
        return total.to(x.dtype), torch.cat(dx, 1)

    return run


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("weighted", [False, True])
def test_options(option, tile, weighted, ranks, judge):
    dtype = BF16 if tile == "split" else FP32
    # Rows on and off 16 bytes; and a shard of one class, which is not the kernels'.
    sizes = (304, 96, 257, 1) if weighted else (512, 1008)
    x = (torch.randn(3, sum(sizes)) * 3).to(dtype)
    target = torch.tensor([5, -100, sum(sizes) - 1])
    weight = torch.rand(sum(sizes)) if weighted else None
    reduction = "none" if tile == "wide" else "mean"
    g = torch.randn(3) if reduction == "none" else None
    options = {"reduction": reduction, **OPTIONS[option]}
    ours = ranks(x, target, weight, sizes, tile, g=g, in_place=tile == "streamed", **options)
    judge(ours, x, target, weight, g=g, **options)


def test_a_target_of_another_shard_writes_nothing_behind_a_short_row(ranks, judge):
    # The last of the eight rows begins seven elements before a boundary, and has five.
    x, target = torch.randn(8, 95).to(BF16), torch.full((8,), 50)
    judge(ranks(x, target, None, (5, 90)), x, target, None)


def test_the_gradient_of_lse(ranks):
    x, target = torch.randn(2, 700), torch.tensor([650, 2])
    g_lse = torch.tensor([0.5, -2.0])
    options = {"label_smoothing": 0.1, "reduction": "none"}
    _, dx = ranks(x, target, None, (300, 400), g=torch.zeros(2), g_lse=g_lse, **options)
    torch.testing.assert_close(dx, g_lse[:, None] * x.softmax(1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tile", ["streamed", "split"])
def test_extremes(tile, ranks, formula, run):
    x = torch.randn(9, 700)
    x[0] = 0.0
    x[0, 400] = 40.0  # a confident target
    x[1] += 1e6
    x[2, ::3] = -math.inf  # columns
    x[3, :] = -math.inf  # a row
    x[4, 400] = -math.inf  # the target
    x[5, :] = -math.inf
    x[5, 400] = 2.0  # all but the target
    x[6, 400] = math.inf
    x[7:] -= 1e6
    x[7, :300] = -math.inf  # a shard without the target
    x[8, 300:] = -math.inf  # the one with the target
    target = torch.full((9,), 400)
    ours = ranks(x, target, None, (300, 400), tile, reduction="none")
    truth = run(formula, x, target, reduction="none", dtype=torch.float64)
    for mine, theirs in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, equal_nan=True, rtol=1e-5, atol=1e-7)
    expected = math.log1p(699 * math.exp(-40))
    assert ours[0][0].item() == pytest.approx(expected, rel=1e-5)
    assert ours[1][0, 0].item() == pytest.approx(math.exp(-40), rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tile", ["streamed", "split"])
def test_ignored_rows_may_hold_anything(tile, reduction, ranks):
    x, target, weight = torch.randn(4, 700), torch.tensor([3, 2, 650, 2]), torch.rand(700)
    args = (target, weight, (300, 400), tile)
    options = {"reduction": reduction, "ignore_index": 2, **OPTIONS["everything"]}
    clean = ranks(x, *args, **options)
    x[1], x[3, 310] = math.nan, math.inf
    found = ranks(x, *args, **options)
    assert all(map(torch.equal, found, clean))
    assert (found[1][[1, 3]] == 0).all() and (found[1][[0, 2]] != 0).all()
    loss, dx = ranks(x, torch.full((4,), 2), *args[1:], **options)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    assert (dx == 0).all()


def test_kernels_and_composed_functions_share_the_same_numbers(on_cpu, with_tile):
    x, weight = torch.randn(4, 300) * 3, torch.rand(300)
    loss = Loss(INDEX, smoothing=0.1, softcap=5.0, scale=1.3)
    local = torch.tensor([7, 300, 299, -1])
    composed = _shards.statistics(loss, x, local, weight)
    with on_cpu(), with_tile(TILES["streamed"]):
        kernel = _shards.statistics(loss, x, local, weight)
    assert kernel.shape == composed.shape == (launch.shared_rows(loss, True), 4)
    torch.testing.assert_close(kernel[:, :3], composed[:, :3], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(kernel[3:, 3], composed[3:, 3] * torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("loss", [Loss(INDEX, mean=True), Loss(INDEX, smoothing=0.1, softcap=30.0)])
def test_binaries(loss):
    """As wide as the kernels of whole rows, and no spills."""
    x = torch.empty(8192, 16032, dtype=BF16, device="meta")
    local = torch.empty(8192, dtype=torch.int64, device="meta")
    shape = (8, launch.shared_rows(loss, False), 8192)
    every, sums = torch.empty(shape, device="meta"), torch.empty(4, device="meta")
    stats, g = torch.empty(4, 8192, device="meta"), torch.empty(8192, device="meta")
    kernels = launch_binaries(
        lambda: (
            launch.shard_statistics(loss, x, local, None),
            launch.merge_shards(loss, every, local, None, sums),
            launch.backward(loss, g, None, x, local, None, None, stats, sums[:3], total=sums[3:]),
        ),
        launch,
    )
    names = ["statistics_kernel", "merge_shards_kernel", "gradient_kernel"]
    assert [k.name for k in kernels] == names and all(k.spills == 0 for k in kernels)
    statistics, _, gradient = kernels
    assert statistics.widest_load == gradient.widest_load == gradient.widest_store == 16
    assert statistics.registers <= 128 and gradient.registers <= 64


@pytest.mark.parametrize("loss", [Loss(INDEX, mean=True), Loss(INDEX, smoothing=0.1, softcap=30.0)])
def test_nothing_waits_for_the_card(loss, monkeypatch):
    """Tensors without memory have no values to wait for."""

    class Launched:
        def __init__(self, kernel):
            launched.append(kernel.__name__)

        def __getitem__(self, grid):
            return lambda *args, **options: None

    launched = []
    monkeypatch.setattr(launch, "wrap_triton", Launched)
    monkeypatch.setattr(_rows, "kernels_apply", _rows.shapes_apply)
    monkeypatch.setattr(_shards, "_merged_by_kernel", lambda every: True)
    ranks = types.SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    monkeypatch.setattr(compat_runtime, "process_group", lambda name: ranks)
    monkeypatch.setattr(compat_runtime, "all_gather", lambda out, mine, group: None)
    x = torch.empty(300, 1000, dtype=BF16, device="meta")
    target = torch.empty(300, dtype=torch.int64, device="meta")
    weight, g = torch.empty(1000, device="meta"), torch.empty(300, device="meta")
    place = _shards.place_of(_shards.Shard("the group"), 1000, x, "options")
    local = _shards.local_targets(target, -100, *place, 1000)
    every = _shards.gathered(_shards.statistics(loss, x, local, weight), "the group")
    of_target, sums = _shards.sums_of(loss, every, local, True, place[1])
    _, _, stats = _shards.merged(loss, every, local, of_target, sums)
    dx = _shards.gradient(loss, g, None, x, local, weight, stats, sums)
    assert dx.shape == x.shape and dx.device == x.device
    assert launched == ["statistics_kernel", "merge_shards_kernel", "gradient_kernel"]
