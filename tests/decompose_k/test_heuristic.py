"""How problems are cut, as arithmetic: no torch compile, no card."""

import itertools
import math
import re

import pytest
import torch
from inductor_ext.lowerings import decompose_k
from inductor_ext.lowerings.decompose_k_tilings import (
    CANDIDATE,
    split_size,
    tiling_named,
    tilings,
    worth_it,
)
from inductor_ext.templates import decompose_k as kernels

H200_SMS = 132
SUITE = [
    (n, n, k, 1, itemsize)
    for n in (16, 32, 48, 64)
    for k in (8192, 12288, 16384, 20480, 24576, 28672, 32768)
    for itemsize in (2, 4)
]
ROUTER = [(t, 256, 7168, 1, 2) for t in (1, 8, 16, 64, 256)]  # 768 rows fill the chip
ODD = [
    (m, n, k, 1, 2) for m, n in ((1, 1), (17, 257), (257, 1)) for k in (1031, 2053, 32749, 32776)
]
BATCHED = [(16, 16, 4096, b, 2) for b in (2, 3, 8)]
PROBLEMS = SUITE + ROUTER + ODD + BATCHED + [(768, 24, 28672, 1, 4), (16, 16, 262144, 1, 2)]


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_tiling_is_legal(problem):
    m, n, k, batch, itemsize = problem
    found = tilings(m, n, k, batch, itemsize, H200_SMS)
    assert found and len({t.name for t in found}) == len(found)
    for t in found:
        assert 2 <= t.splits <= 128
        for block in (t.block_m, t.block_n, t.block_k, t.xblock, t.num_warps, t.reduce_warps):
            assert power_of_two(block)
        assert min(t.block_m, t.block_n, t.block_k) >= 16  # what tl.dot takes
        assert t.block_m * t.block_n >= 32 * t.num_warps  # no idle warp in the accumulator
        rblock = 1 << (t.splits - 1).bit_length()
        assert rblock >= t.splits and t.xblock >= 16 and t.xblock * rblock <= 8192
        assert t.num_warps in (1, 2, 4, 8) and t.reduce_warps in (1, 2, 4, 8)
        staged = t.num_stages * (t.block_m + t.block_n) * t.block_k * itemsize
        assert t.num_stages >= 1 and staged <= 227 * 1024  # shared memory of a block on sm_90


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_splits_cover_k_exactly_once_and_none_is_empty(problem):
    m, n, k, batch, itemsize = problem
    for t in tilings(m, n, k, batch, itemsize, H200_SMS):
        size = split_size(k, t.splits, t.block_k)
        assert size % t.block_k == 0
        parts = [min(k, (s + 1) * size) - min(k, s * size) for s in range(t.splits)]
        assert sum(parts) == k and min(parts) > 0 and set(parts[:-1]) <= {size}


@pytest.mark.parametrize("problem", SUITE + ROUTER, ids=str)
def test_what_is_measured_is_taken_and_keeps_the_chip_busy(problem):
    m, n, *_, itemsize = problem
    assert worth_it(*problem, H200_SMS) is None
    pick = tilings(*problem, H200_SMS)[0]
    grid = kernels.partial_grid(
        pick.splits, m, n, {"BLOCK_M": pick.block_m, "BLOCK_N": pick.block_n}, cdiv=cdiv
    )
    assert 32 <= math.prod(grid) <= 600
    if itemsize == 4:  # bound by arithmetic: a second wave takes as long as the first
        assert 64 <= math.prod(grid) <= H200_SMS


def cdiv(a, b):
    return -(-a // b)


def test_grids_cover_the_output():
    meta = {"BLOCK_M": 16, "BLOCK_N": 32, "XBLOCK": 64}
    assert kernels.partial_grid(8, 17, 33, meta, cdiv=cdiv) == (4, 8, 1)
    assert kernels.partial_grid(8, 3, 17, 33, meta, cdiv=cdiv) == (4, 8, 3)
    assert kernels.reduce_grid(17, 33, meta, cdiv=cdiv) == (9, 1, 1)
    assert kernels.reduce_grid(3, 17, 33, meta, cdiv=cdiv) == (27, 1, 1)


def test_the_pick_does_not_depend_on_anything_but_the_problem():
    first = [tilings(*p, H200_SMS) for p in PROBLEMS]
    assert first == [tilings(*p, H200_SMS) for p in PROBLEMS]


@pytest.mark.parametrize(
    ("warps", "there"), [(1, True), (2, True), (16, True), (3, False), (64, False)]
)
def test_a_name_may_say_other_warps_than_the_rule(warps, there):
    """Plans outlive the rule that they were measured beside."""
    sizes = (32, 32, 16384, 1, 2)
    name = f"split64_32x32x64_w{warps}_s4"
    assert name not in [t.name for t in tilings(*sizes, H200_SMS)]
    found = tiling_named(CANDIDATE.fullmatch(name), *sizes)
    assert (found is not None and found.name == name) if there else found is None


LOSES = {
    "below 1024": (16, 16, 1023, 1, 2),
    "4 x max": (16, 1024, 4095, 1, 2),
    "occupy": (2048, 2048, 32768, 1, 2),
    "48 output tiles": (768, 256, 7168, 1, 2),
}


@pytest.mark.parametrize("reason", LOSES)
def test_what_loses_says_so(reason):
    assert reason in worth_it(*LOSES[reason], H200_SMS)


def test_worth_it_only_grows_with_k_and_shrinks_with_the_output():
    sizes = (1, 16, 64, 257, 1024, 4096)
    lengths = (64, 1023, 1024, 4096, 32768, 1 << 20)
    for m, n in itertools.product(sizes, sizes):
        wins = [worth_it(m, n, k, 1, 2, H200_SMS) is None for k in lengths]
        assert wins == sorted(wins)
        if wins[-1]:
            assert worth_it(max(m // 2, 1), n, lengths[-1], 1, 2, H200_SMS) is None
        assert (worth_it(m, n, 32768, 1, 2, H200_SMS) is None) == (
            worth_it(n, m, 32768, 1, 2, H200_SMS) is None
        )


def test_reasons_are_sentences_with_the_numbers():
    reason = worth_it(16, 1024, 2048, 1, 2, H200_SMS)
    assert re.search(r"K=2048 .*4096", reason)


@pytest.mark.parametrize(
    ("op", "first"), [("mm", "self"), ("addmm", "mat1"), ("baddbmm", "batch1")]
)
def test_products_that_are_measured_have_entries_around_one(op, first):
    """Else an exponential behind them overflows, and what is right would be judged wrong."""
    torch.manual_seed(0)
    make = decompose_k.measure_of(op).input_gen_fns[first]
    dense = torch.empty(64, 4096)
    for fake in (dense.bfloat16(), torch.empty(4096, 64).t(), dense[:1].expand(8, -1)):
        x = make(fake)
        assert x.shape == fake.shape and x.stride() == fake.stride() and x.dtype == fake.dtype
        assert 0.8 < (x.float() @ torch.randn(4096, 512)).std() < 1.25
