"""The benchmark's command line: a whole run on a pretended card."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_ext import measure

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks import (  # noqa: E402
    common,
    cross_entropy,
    cross_entropy_cases,
    cross_entropy_spellings,
)


@pytest.fixture
def pretended_card(monkeypatch, tmp_path):
    """Calls run once on the CPU, on tiny shapes, and "take" 10 us."""

    class Timer:
        def __init__(self, repeats):
            pass

        def __call__(self, call):
            call()
            return 10.0

    monkeypatch.setattr(measure, "require_cuda", lambda: None)
    monkeypatch.setattr(measure, "ceilings", lambda: measure.Ceilings(1e6, 1e8, 1e7))
    monkeypatch.setattr(cross_entropy, "Timer", Timer)
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(cross_entropy_cases, "DEVICE", "cpu")
    monkeypatch.setattr(cross_entropy_cases, "SHAPES", ((16, 300), (9, 40)))
    monkeypatch.setattr(cross_entropy_cases, "LINEAR", (24,))
    monkeypatch.setattr(cross_entropy_cases, "HIDDEN", 16)
    monkeypatch.setattr(cross_entropy_cases, "CLASSES", 50)
    meta = {"card": "pretended", "torch": "0", "triton": "0", "date": "today"}
    monkeypatch.setattr(common, "metadata", lambda _: dict(meta))


@pytest.mark.usefixtures("pretended_card")
def test_a_whole_run_writes_csv_json_and_summary(monkeypatch, tmp_path):
    argv = ["x", "--out", str(tmp_path), "--columns", "eager,ours,torch_chunked"]
    monkeypatch.setattr(sys, "argv", argv)
    cross_entropy.main()
    rows = common.read_csv(tmp_path / "cross_entropy.csv")
    suites = [*cross_entropy_cases.PASSES] * 2
    assert sorted(r["suite"] for r in rows if r["column"] == "ours") == sorted([*suites, "linear"])
    for row in rows:
        if row["column"] != "torch_chunked":
            assert row["check"] == "ok", row
            assert row["both_us"] == "10"
    summary = (tmp_path / "cross_entropy_summary.md").read_text()
    assert "## distillation, bwd" in summary and (tmp_path / "cross_entropy.json").exists()


@pytest.mark.usefixtures("pretended_card")
def test_a_column_that_is_wrong_is_reported(monkeypatch):
    wrong = cross_entropy_cases.as_written("smoothing")
    monkeypatch.setattr(cross_entropy_cases, "ours", lambda *_: wrong)
    case = cross_entropy_cases.Case("plain", 16, 300)
    (row,) = cross_entropy.measure_case(case, ["ours"], cross_entropy.Timer(1))
    assert "relative error" in row["check"]


@pytest.mark.usefixtures("pretended_card")
def test_tilings_launch_the_kernels_with_each_tile(monkeypatch, tmp_path, on_cpu):
    monkeypatch.setattr(cross_entropy, "TILED_SHAPES", ((3, 300),))
    sizes = [
        ("both", (1, 1, 1, 1)),
        ("fwd", (2, 1, 0, 1)),
        ("bwd", (1, 1, 0, 1)),
    ]
    monkeypatch.setattr(cross_entropy, "tilings", lambda columns: sizes)
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--tilings"])
    with on_cpu():
        cross_entropy.main()
    rows = common.read_csv(tmp_path / "cross_entropy_tilings.csv")
    assert [r["us"] for r in rows] == ["10"] * 3


@pytest.mark.usefixtures("pretended_card")
def test_spellings_are_timed_and_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(cross_entropy_spellings, "Timer", cross_entropy.Timer)
    monkeypatch.setattr(cross_entropy_spellings, "SHAPES", ((4, 50),))
    argv = ["x", "--out", str(tmp_path), "--spellings", "plain"]
    monkeypatch.setattr(sys, "argv", argv)
    cross_entropy_spellings.main()
    (row,) = common.read_csv(tmp_path / "cross_entropy_spellings.csv")
    assert row["both_speedup"] == "1" and float(row["difference"]) < 1e-2


def test_list_answers_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "benchmarks.cross_entropy", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "plain 8192x32000"
    assert "| torch\n" not in done.stderr
