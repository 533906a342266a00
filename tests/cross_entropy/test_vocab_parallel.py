"""Losses whose classes lie over two and four processes on the CPU, joined by gloo."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
DIFFERENT = "every rank of the group is expected to bring the same rows, dtype and options"


@pytest.fixture(scope="module")
def _ranks():
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", HERE / "vocab_parallel_ranks.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def on_ranks(_ranks, tmp_path):
    """``on_ranks(world, check, *args)`` runs a check as that many ranks: what each returned."""

    def run(world, check, *args):
        job = {"check": check, "world": world, "folder": str(tmp_path), "args": args,
               "device": "cpu"}  # fmt: skip
        print(json.dumps(job), file=_ranks.stdin, flush=True)
        assert _ranks.stdout.readline() == "done\n"
        files = [tmp_path / f"rank{rank}.json" for rank in range(world)]
        found = [json.loads(f.read_text()) if f.exists() else ["error", "killed"] for f in files]
        errors = [said for kind, said in found if kind == "error"]
        assert not errors, "\n".join(errors)
        return [value for _, value in found]

    return run


worlds = pytest.mark.parametrize("world", [2, 4])


@pytest.mark.parametrize(
    ("world", "split"), [(2, "unequal"), (2, "empty"), (4, "equal"), (4, "unequal"), (4, "empty")]
)
@pytest.mark.parametrize("option", ["plain", "smoothing", "z-loss and scale", "everything"])
def test_numbers(world, split, option, on_ranks):
    on_ranks(world, "numbers", split, option)


@worlds
@pytest.mark.parametrize("check", ["with_lse", "one_row", "offsets", "confident", "ignored"])
def test_rows(world, check, on_ranks):
    on_ranks(world, check)


@worlds
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinite_logits_are_as_in_torch(world, smoothing, on_ranks):
    on_ranks(world, "infinities", smoothing)


@pytest.mark.parametrize(
    ("world", "split", "dtype"),
    [
        (2, "equal", "float32"),
        (2, "unequal", "bfloat16"),
        (2, "empty", "float64"),
        (4, "unequal", "float32"),
        (4, "empty", "bfloat16"),
    ],
)
def test_linear(world, split, dtype, on_ranks):
    on_ranks(world, "linear", split, dtype)


@worlds
def test_linear_with_frozen_parts_and_lse(world, on_ranks):
    on_ranks(world, "linear_parts")


def test_a_group_that_is_not_the_world(on_ranks):
    for said in on_ranks(4, "part_of_the_world"):
        assert "ProcessGroup that holds this rank" in said


@pytest.mark.parametrize(
    ("which", "kind", "message"),
    [
        ("target", "RuntimeError", r"a target is not in \[0, number of classes\)"),
        ("negative", "RuntimeError", r"a target is not in \[0, number of classes\)"),
        ("rows", "ValueError", DIFFERENT),
        ("options", "ValueError", DIFFERENT),
        ("linear", "ValueError", DIFFERENT),
        ("group", "TypeError", "group is expected to be a torch.distributed.ProcessGroup"),
        ("probabilities", "TypeError", "target is expected to be int32 or int64"),
        ("weight", "ValueError", r"weight is expected to be floating of shape \(10,\)"),
        ("create_graph", "RuntimeError", "one gradient of a loss over a group is expected"),
        ("create_graph of linear", "RuntimeError", "one gradient of a loss over a group"),
        ("functorch", "RuntimeError", "no transform of torch.func"),
    ],
)
def test_errors(which, kind, message, on_ranks):
    for name, said in on_ranks(2, "error", which):
        assert name == kind, said
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(said)


@worlds
def test_targets_that_differ_make_no_loss(world, on_ranks):
    for loss in on_ranks(world, "different_targets"):
        assert not math.isfinite(loss)


@pytest.mark.parametrize(
    ("world", "classes", "replicated"),
    [(2, 12, False), (4, 10, False), (4, 5, False), (2, 10, True)],
)
@pytest.mark.parametrize("check", ["dtensor", "dtensor_linear"])
def test_dtensor(world, check, classes, replicated, on_ranks):
    on_ranks(world, check, classes, replicated)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("rows", "sharded on dimension 1 (the classes) or replicated, got placements (Shard(dim=0"),
        ("group", "no group is expected beside a DTensor"),
        ("target", "target is expected as a tensor, or as a DTensor that is replicated"),
        ("plain logits", "logits are expected as a DTensor beside target"),
        ("plain w", "w is expected as a DTensor beside h"),
        ("bias", "bias is expected as a DTensor [classes] on"),
        ("mesh", "a DTensor on a mesh of one dimension"),
    ],
)
def test_dtensor_errors(which, message, on_ranks):
    for name, said in on_ranks(2, "dtensor_error", which):
        assert name in ("ValueError", "TypeError") and message in said, said


def test_compiled(on_ranks):
    on_ranks(2, "compiled")
