"""The Hopper kernels of gradients: their numbers and barriers emulated, and their machine code."""

import dataclasses
import re

import pytest
import torch
from backward_programs import SCORES, draw_inputs
from hopper_gradients import MATRICES, NAMES, PAIRS, Problem
from inductor_ext.templates import attention_backward_gluon_launch as launch
from inductor_ext.templates import attention_gluon_launch
from inductor_ext.templates.attention_backward_gluon_launch import Tile
from inductor_ext.templates.attention_program import Input

from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


PARTS = ("keys", "rows")


def check(part, problem, tile=Tile(), programs=2, delay=0.0):  # noqa: B008
    given, results = problem.arguments(part)
    _, grid, arguments = getattr(launch, f"launch_{part}")(*given, tile, programs)
    program = problem.score.program
    kernel = f"attention_{part}_gluon"
    copied = launch.copied_by(part, program, problem.inputs)
    define = lambda: getattr(launch.define(part, program, copied), kernel)  # noqa: E731
    interpret(define, grid[0], arguments, delay)
    problem.judge(part, results)


@pytest.mark.parametrize(("part", "name"), [(p, n) for p in PARTS for n in NAMES[p]])
def test_every_score(part, name):
    batches = 2 if name == "causal pairs" else 1  # which lie side by side: the matrix is theirs
    check(part, Problem(name, batches, 2, 1, 90, 152, 64, 64))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("tile", "delay"),
    [(Tile(), 0.003), (Tile(stages=2), 0.0), (Tile(streamed=128, dynamic=False), 0.0),
     (Tile(consumers=3, stages=2), 0.003)],
)  # fmt: skip
def test_every_tile_computes_gradients_and_ends(part, tile, delay):
    check(part, Problem("causal", 2, 2, 1, 200, 391, 64, 128, FP16), tile, delay=delay)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 300), (257, 5)])
def test_odd_sizes(part, rows, columns):
    """Among them rows that keep nothing, and keys that no row keeps."""
    check(part, Problem("lower right", 1, 2, 2, rows, columns, 128, 64))


def test_gradients_of_pairs():
    """Of the second head of both batches, which is all that is touched."""
    problem = Problem("pairs", 2, 2, 1, 90, 72, 64, 64)
    given, (dq,) = problem.arguments("rows")
    pairs = torch.full((2, 1, 128, 128), torch.nan, dtype=BF16)
    part = slice(0, 2), slice(1, 2)
    _, grid, arguments = launch.launch_rows(*given, Tile(), 2, pairs, part)
    program = problem.score.program
    define = lambda: launch.define("rows", program, (0,)).attention_rows_gluon  # noqa: E731
    interpret(define, grid[0], arguments, 0.002)
    right = problem.pairs()[:, 1:]
    assert (pairs[:, :, :90, :72] - right).abs().max() <= 0.01 * right.abs().max()
    assert not pairs[:, :, :90, 72:].any()
    assert dq[:, 0].isnan().all()
    dq[:, 0] = problem.right[0][:, 0]
    problem.judge("rows", (dq,))


@pytest.mark.parametrize("part", PARTS)
def test_what_it_takes(part, monkeypatch):
    q = torch.empty(1, 2, 8, 64, dtype=BF16)
    assert not launch.takes(part, q, q, q, q, (), SCORES["causal"].program)  # on no Hopper
    monkeypatch.setattr(attention_gluon_launch, "_hopper", lambda device: True)
    monkeypatch.setattr(attention_gluon_launch, "available", lambda: True)
    for name, score in (SCORES | MATRICES).items():
        inputs = draw_inputs(score, 1, 2, 8, 8)
        taken = launch.takes(part, q, q, q, q, inputs, score.program)
        assert taken == (name in NAMES[part])
    causal = SCORES["causal"].program
    assert not launch.takes(part, q, q, q, q[:, :1].expand(q.shape), (), causal)  # a step of 0
    assert not launch.takes(part, q, q, q, q.float(), (), causal)
    assert not launch.takes(part, q, q, q, q, (), dataclasses.replace(causal, dropout=True))
    if part == "rows":
        bias = draw_inputs(PAIRS, 1, 2, 8, 8)
        assert launch.takes(part, q, q, q, q, bias, PAIRS.program, (0,))
        half = [bias[0].half()]
        assert not launch.takes(part, q, q, q, q, half, PAIRS.program, (0,))
        assert not launch.takes(
            part,
            q,
            q,
            q,
            q,
            bias,
            dataclasses.replace(PAIRS.program, keep=causal.keep, row_spans=causal.row_spans),
            (0,),
        )  # pairs left out


CAUSAL = SCORES["causal"].program
ALIBI = dataclasses.replace(
    CAUSAL, inputs=(Input(FP32, "h"),), scale=None, slope=0.1,
    score="tmp = k.to(tl.float32) - q.to(tl.float32)\nr = s * 0.127 + tmp * x0",
)  # fmt: skip


@pytest.mark.skipif(not attention_gluon_launch.available(), reason="another Triton")
@pytest.mark.parametrize(
    ("part", "program"),
    [("keys", ALIBI), ("keys", MATRICES["causal pairs"].program), ("rows", CAUSAL)],
    ids=["keys", "matrix", "rows"],
)
def test_machine_code(part, program):
    tensors = [torch.empty(2, 4, 1000, 128, dtype=BF16, device="meta") for _ in range(6)]
    sums = torch.empty(2, 4, 1024, device="meta")
    inputs = [
        torch.empty(
            1, 4, *((1000, 1000) if "q" in x.axes else (1, 1)), dtype=x.dtype, device="meta"
        )
        for x in program.inputs
    ]
    results = tensors[4:] if part == "keys" else tensors[4:5]
    kernel, _, arguments = getattr(launch, f"launch_{part}")(
        *tensors[:4], sums, sums, inputs, (), program, *results, Tile(), 4
    )  # three blocks ahead, which a matrix leaves room for
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
