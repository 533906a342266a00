"""The benchmark of scans: what it calls right, and its report."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks import scan as bench  # noqa: E402

SMALL = [
    bench.Case("cumsum", (4, 9), 1),
    bench.Case("cumsum", (4, 9), 0, "bf16"),
    bench.Case("cumsum", (9,), 0, "int64"),
    bench.Case("reversed", (4, 9), 1),
    bench.Case("cummax", (4, 9), 1),
    bench.Case("logcumsumexp", (4, 9), 1),
    bench.Case("cumprod", (4, 9), 1, kind="bwd"),
    bench.Case("recurrence", (2, 4, 9), 2),
    bench.Case("recurrence", (2, 9, 4), 1, kind="bwd"),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.name} {c.kind}")
def test_right_is_told_from_wrong(case, monkeypatch):
    for maker in ("randn", "randint"):
        make = getattr(torch, maker)
        monkeypatch.setattr(torch, maker, lambda *a, m=make, device, **k: m(*a, **k))
    inputs = [x.requires_grad_(case.kind == "bwd") for x in bench.draw(case)]
    given = bench.incoming(case) if case.kind == "bwd" else None
    results = bench.by_ours(case)(*inputs)
    if case.kind == "bwd":
        results = torch.autograd.grad(results, inputs, given)
    results = results if isinstance(results, tuple) else (results,)
    allowed = bench.LARGEST_ERROR[case.dtype]
    assert bench.error(case, results, inputs, given) <= allowed
    spoiled = results[0].detach().clone()
    spoiled.view(-1)[-1] += 3
    assert bench.error(case, (spoiled, *results[1:]), inputs, given) > allowed


def test_the_report_counts_right_results_only(tmp_path):
    rows = [
        {"case": "c", "kind": "fwd", "column": c, "us": us, "percent": 50, "check": check}
        for c, us, check in (("ours", 2, "ok"), ("plugin", 2, "ok"), ("compile", 1, "wrong"))
    ]
    bench.report(rows, tmp_path, "scan")
    assert "| c | fwd | 2 | 2 | 50 | - |" in (tmp_path / "scan_summary.md").read_text()


def test_the_shipped_report_is_of_the_shipped_figures(tmp_path):
    results = ROOT / "benchmarks" / "results"
    with open(results / "scan.csv") as file:
        bench.report(list(csv.DictReader(file)), tmp_path, "scan")
    made = (tmp_path / "scan_summary.md").read_text()
    assert made == (results / "scan_summary.md").read_text()


def test_cases_can_be_listed_without_a_card():
    command = [sys.executable, "-m", "benchmarks.scan", "--list", "--cases", "recurrence"]
    for shard, count in (("1/1", 5), ("1/2", 3), ("2/2", 2)):
        whole = [*command, "--shard", shard]
        run = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=True)
        assert len(run.stdout.splitlines()) == count and "bwd" in run.stdout
