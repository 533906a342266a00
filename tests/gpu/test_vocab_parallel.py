"""Losses whose classes lie over the cards of this machine, joined by NCCL; one is a group too."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
RANKS = pathlib.Path(__file__).parents[1] / "cross_entropy" / "vocab_parallel_ranks.py"


@pytest.fixture
def on_cards(tmp_path):
    """``on_cards(check, *args)`` runs a check with a rank on each of one, two or four cards."""

    def run(check, *args):
        world = max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())
        job = {"check": check, "world": world, "folder": str(tmp_path), "args": args,
               "device": "cuda"}  # fmt: skip
        subprocess.run([sys.executable, "-W", "ignore", RANKS], input=json.dumps(job), text=True)
        for rank in range(world):
            kind, value = json.loads((tmp_path / f"rank{rank}.json").read_text())
            assert kind == "value", value

    return run


@pytest.mark.parametrize("rows", [11, 300])
@pytest.mark.parametrize("split", ["unequal", "empty", "large"])
@pytest.mark.parametrize("option", ["plain", "everything"])
def test_numbers(option, split, rows, on_cards):
    on_cards("numbers", split, option, rows)


@pytest.mark.parametrize("check", ["with_lse", "offsets", "confident", "ignored", "linear_parts"])
def test_rows(check, on_cards):
    on_cards(check)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear(dtype, on_cards):
    on_cards("linear", "unequal", dtype)
