"""The Hopper kernel of dk and dv: its numbers and barriers emulated, and its machine code."""

import dataclasses
import re

import pytest
import torch
from backward_programs import SCORES
from inductor_ext.templates import attention_backward_gluon_launch as launch
from inductor_ext.templates import attention_gluon_launch
from inductor_ext.templates.attention_backward_gluon_launch import Tile
from inductor_ext.templates.attention_program import Input
from keys_cases import NAMES, Problem

from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(problem, tile=Tile(), programs=2, delay=0.0):  # noqa: B008
    given, results = problem.arguments()
    _, grid, arguments = launch.launch(*given, tile, programs)
    program = problem.score.program
    interpret(lambda: launch.define(program).attention_keys_gluon, grid[0], arguments, delay)
    problem.judge(results)


@pytest.mark.parametrize("name", NAMES)
def test_every_score(name):
    check(Problem(name, 1, 2, 1, 150, 280, 64, 64))


@pytest.mark.parametrize(
    ("tile", "delay"),
    [(Tile(), 0.003), (Tile(stages=2), 0.0), (Tile(rows=128, dynamic=False), 0.0),
     (Tile(consumers=3, stages=2), 0.003)],
)  # fmt: skip
def test_every_tile_computes_gradients_and_ends(tile, delay):
    check(Problem("causal", 2, 4, 2, 300, 391, 64, 128, FP16), tile, delay=delay)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 700), (257, 5)])
def test_odd_sizes(rows, columns):
    """Among them rows that keep nothing, and keys that no row keeps."""
    check(Problem("lower right", 1, 2, 2, rows, columns, 128, 64))


def test_what_it_takes(monkeypatch):
    q = torch.empty(1, 2, 8, 64, dtype=BF16)
    assert not launch.takes(q, q, q, q, SCORES["causal"].program)  # on no Hopper
    monkeypatch.setattr(attention_gluon_launch, "_hopper", lambda device: True)
    monkeypatch.setattr(attention_gluon_launch, "available", lambda: True)
    for name, score in SCORES.items():
        assert launch.takes(q, q, q, q, score.program) == (name in (*NAMES, "shared slot bias"))
    causal = SCORES["causal"].program
    assert not launch.takes(q, q, q, q.expand(3, 2, 8, 64)[:, :1], causal)  # a step of 0
    assert not launch.takes(q, q, q, q.float(), causal)
    assert not launch.takes(q, q, q, q, dataclasses.replace(causal, dropout=True))


ALIBI = dataclasses.replace(
    SCORES["causal"].program, inputs=(Input(FP32, "h"),), scale=None, slope=0.1,
    score="tmp = k.to(tl.float32) - q.to(tl.float32)\nr = s * 0.127 + tmp * x0",
)  # fmt: skip


@pytest.mark.skipif(not attention_gluon_launch.available(), reason="another Triton")
@pytest.mark.parametrize(
    ("program", "d"), [(SCORES["causal"].program, 128), (ALIBI, 128), (SCORES["scale"].program, 64)]
)
def test_machine_code(program, d):
    tensors = [torch.empty(2, 4, 1000, d, dtype=BF16, device="meta") for _ in range(6)]
    sums = torch.empty(2, 4, 1024, device="meta")
    inputs = [torch.empty(1, 4, 1, 1, device="meta") for _ in program.inputs]
    kernel, _, arguments = launch.launch(
        *tensors[:4], sums, sums, inputs, (), program, *tensors[4:], Tile(), 4
    )
    binary, sass = gluon_binary(kernel, arguments)
    assert binary.target == "sm_90a" and binary.shared_bytes <= 227 << 10
    # Scalars of a tile, and of the producer: loops over blocks touch few of them.
    assert binary.spills <= 128 and len(re.findall(r"\b(LDL|STL)\b", _innermost(sass))) <= 4
    assert re.search(r"\b(red|atom)\.global\.add\.f", binary.ptx) is None
    # Products follow one another: the assembler has not put a wait behind each of them.
    assert sass.count("DEPBAR.LE gsb0") <= 10 < sass.count("HGMMA")


def _innermost(sass):
    """The instructions between the first and the last product of a loop over whole blocks."""
    lines = sass.splitlines()
    at = [i for i, line in enumerate(lines) if "HGMMA" in line]
    waits = [i for i, line in enumerate(lines) if "DEPBAR.LE gsb0" in line]
    return "\n".join(lines[max(waits[2], at[0]) : waits[4]])
