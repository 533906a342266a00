"""The Hopper kernel of column sums: its numbers and barriers emulated, and its machine code."""

import re

import pytest
import torch
from backward_programs import SCORES, attention, draw_inputs
from inductor_ext.templates import attention_backward_gluon_launch as backward
from inductor_ext.templates import attention_columns_gluon_launch as launch
from inductor_ext.templates import attention_gluon_launch
from inductor_ext.templates.attention_backward_gluon_launch import Tile

from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16 = torch.bfloat16
TILE = Tile(consumers=3, stages=4)


@pytest.mark.parametrize(
    ("name", "tile"),
    [("causal", TILE), ("window", Tile(stages=2)), ("lower right", Tile(128, dynamic=False)),
     ("slot bias", TILE), ("sinks", Tile()), ("slopes", Tile(128))],
)  # fmt: skip
def test_sums(name, tile):
    score, (rows, columns) = SCORES[name], (420, 156)  # 0, 3 or 6 whole blocks, which go in pairs
    q = torch.randn(1, rows, 4, 64).to(BF16).transpose(1, 2)
    k = torch.randn(1, columns, 2, 64).to(BF16).transpose(1, 2)
    inputs = draw_inputs(score, 1, 4, rows, columns)
    wide = [x.double() for x in inputs]
    every = torch.eye(columns, dtype=torch.float64).expand(1, 2, columns, columns)
    weights, lse = attention(score, q.double(), k.double(), every, wide)
    right = weights.sum(2).reshape(1, 2, 2, columns).sum(2)
    sums = torch.full((1, 2, columns), torch.nan)
    _, grid, arguments = launch.launch(
        q, k, launch.shift_of(lse.float()), inputs, score.numbers, score.program, sums, tile, 2
    )
    define = lambda: backward.define("columns", score.program).attention_columns_gluon  # noqa: E731
    interpret(define, grid[0], arguments, 0.002)
    assert (sums - right).abs().max() <= 1e-5 * right.max()


@pytest.mark.skipif(not attention_gluon_launch.available(), reason="another Triton")
def test_machine_code():
    q = torch.empty(2, 4, 1024, 128, dtype=BF16, device="meta")
    lse = torch.empty(2, 4, 1024, device="meta")
    program = SCORES["causal"].program
    kernel, _, arguments = launch.launch(q, q, lse, [], (), program, lse, TILE, 4)
    binary, sass = gluon_binary(kernel, arguments)
    assert binary.spills == 0 and binary.shared_bytes <= 227 << 10
    assert binary.target == "sm_90a" and "red.global" not in binary.ptx
    # Scores are waited for once a block, behind the exponentials of the one before: by a consumer
    # for the first, a masked one, two of a pair, and the one left over.
    assert sass.count("DEPBAR.LE gsb0") == 15 < sass.count("HGMMA")
    # Keys are in registers: a product reads q alone in shared memory.
    assert re.search(r"HGMMA\.64x64x16\.F32\.BF16 R\d+, gdesc", sass) is None
