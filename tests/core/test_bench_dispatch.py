"""The benchmark of range dispatch: its command line, a whole run on a pretended card, merging."""

import functools
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from inductor_ext import measure

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks import common, dispatch  # noqa: E402

ISSUE = (1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 128, 256, 512, 768, 4096, 16384)


@pytest.fixture
def pretended_card(monkeypatch, tmp_path):
    """Graphs that run their body at capture and at replay; every replay "takes" 2 us per call."""

    def capture(body, warm):
        warm()
        results = body()

        def replay():
            for old, new in zip(results, body(), strict=True):
                old.copy_(new)

        return types.SimpleNamespace(replay=replay), results

    monkeypatch.setattr(measure, "require_cuda", lambda: None)
    monkeypatch.setattr(measure, "_capture", capture)
    monkeypatch.setattr(measure, "replay_us", lambda captured: 2.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "rotate", functools.partial(measure.rotate, l2_bytes=100_000))
    monkeypatch.setattr(measure, "ceilings", lambda: measure.Ceilings(1e6, 1e8, 1e7))
    monkeypatch.setattr(dispatch, "DEVICE", "cpu")
    monkeypatch.setattr(dispatch, "HIDDEN", 512)
    monkeypatch.setattr(dispatch, "EXPERTS", 8)
    monkeypatch.setattr(dispatch, "TOKENS", (1, 3, 16))
    monkeypatch.setattr(dispatch, "HOST_PAIRS", 3)
    monkeypatch.setattr(dispatch, "HOST_TOKENS", 3)
    monkeypatch.setattr(dispatch, "_settings", lambda: None)
    meta = {"card": "pretended", "torch": "0", "triton": "0"}
    monkeypatch.setattr(common, "metadata", lambda _: dict(meta))
    torch._dynamo.reset()


@pytest.mark.usefixtures("pretended_card")
def test_a_whole_run_writes_csv_json_and_summary(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path)])
    with torch.no_grad():
        dispatch.main()
    rows = common.read_csv(tmp_path / "dispatch.csv")
    assert sorted((r["suite"], int(r["tokens"])) for r in rows) == [
        (suite, t) for suite in ("sigmoid", "softmax") for t in (1, 3, 16)
    ]
    for row in rows:
        assert row["failure"] == ""
        for column in dispatch.COLUMNS:
            assert row[f"{column}_check"] == "ok", row
            assert float(row[f"{column}_us"]) == 2.0
        assert float(row["ours_vs_best_stock"]) == 1.0
    meta = json.loads((tmp_path / "dispatch.json").read_text())
    assert meta["sizes_measured"] == 6 and set(meta["ranges"]) == {"sigmoid", "softmax"}
    summary = (tmp_path / "dispatch_summary.md").read_text()
    # Without a card the plugin leaves the sites to stock: no ranges.
    assert "| 16 | - | - | 2.00 | 2.00 | 2.00 | 2.00 | 1.00x | 1.00x |" in summary
    assert "independent calls" in capsys.readouterr().out
    dispatch.merge([tmp_path / "dispatch.csv"], tmp_path / "merged")
    assert common.read_csv(tmp_path / "merged" / "dispatch.csv") == rows
    assert summary in (tmp_path / "merged" / "dispatch_summary.md").read_text()


@pytest.mark.usefixtures("pretended_card")
def test_a_wrong_column_is_told_and_never_counted():
    case = dispatch.Case("sigmoid", 3)
    right = dispatch.site("sigmoid")
    programs = {"compile": right, "ours": lambda x, w, b: right(x, w, b) + 0.25}
    columns = ["eager", "compile", "ours"]
    row = dispatch.measure_case(case, programs, columns, [(1, 8, "a"), (9, None, "b")], 2)
    assert row["compile_check"] == "ok" and row["ours_check"].startswith("error 0.2")
    assert (row["ours_range"], row["ours_choice"]) == ("1..8", "a")
    assert row["ours_vs_compile"] != row["ours_vs_compile"]  # NaN
    assert "| 3 | 1..8 | a | 2.00 | 2.00 | - | - | - |" in dispatch.markdown([row], columns, [])
    assert set(row) <= set(dispatch.fields(columns))


def test_the_range_around_a_number_of_tokens():
    spans = [(1, 8, "a"), (9, 64, "b"), (65, None, "stock")]
    asked = {t: dispatch.span_at(spans, t) for t in (1, 8, 9, 64, 65, 10**6)}
    assert (
        list(asked.values()) == [("1..8", "a")] * 2 + [("9..64", "b")] * 2 + [("65..", "stock")] * 2
    )
    assert dispatch.span_at([], 5) == dispatch.span_at(spans, 0) == ("", "")


def test_merging_keeps_ranges_and_host_costs_of_both(tmp_path):
    for suite in dispatch.SUITES:
        row = {"suite": suite, "case": "64", "tokens": 64}
        row |= {f"{c}_us": 2.0 for c in dispatch.COLUMNS}
        row |= {f"{c}_check": "ok" for c in dispatch.COLUMNS}
        table = common.CsvFile(tmp_path / f"{suite}.csv", list(row))
        table.write(row)
        table.close()
        host = {"suite": suite, "ranges": 2, "branches_us": 1.0, "with_branches_us": 3.0}
        host |= {"without_us": 2.0, "spread_us": 0.1, "pairs": 5}
        meta = {"card": "c", "torch": "t", "triton": "r", "host": [host]}
        meta["ranges"] = {suite: [[1, 8, "a"], [9, None, "stock"]]}
        common.write_json(tmp_path / f"{suite}.json", meta)
    dispatch.merge([tmp_path / f"{suite}.csv" for suite in dispatch.SUITES], tmp_path / "all")
    meta = json.loads((tmp_path / "all" / "dispatch.json").read_text())
    assert set(meta["ranges"]) == set(dispatch.SUITES) and len(meta["host"]) == 2
    summary = (tmp_path / "all" / "dispatch_summary.md").read_text()
    assert all(f"branches, {suite}, 2 ranges: 1.00 us" in summary for suite in dispatch.SUITES)


@pytest.mark.usefixtures("pretended_card")
def test_the_branch_is_the_difference_of_two_programs(monkeypatch):
    asked = []

    def alone(suite, column, bounds, first):
        asked.append((suite, column, bounds, first))
        return "without", []

    times = iter([(30.0, 29.0), (40.0, 28.0), (31.0, 29.5)])
    pair = []

    def host_overhead(call, *inputs):
        if not pair:
            pair.extend(next(times))
        return pair.pop(0)

    monkeypatch.setattr(dispatch, "dynamic", alone)
    monkeypatch.setattr(measure, "host_overhead", host_overhead)
    spans = [(1, 2, "a"), (3, 8, "b"), (9, None, "stock")]
    found = dispatch.branch_cost("with", "sigmoid", spans)
    assert asked == [("sigmoid", "ours", (3, 8), 3)]
    assert found["branches_us"] == 1.5 and found["pairs"] == 3 and found["ranges"] == 3
    assert (found["with_branches_us"], found["without_us"]) == (31.0, 29.0)
    text = dispatch.markdown([], dispatch.COLUMNS, [found])
    assert "sigmoid, 3 ranges: 1.50 us a call (31.0 with, 29.0 without" in text
    monkeypatch.setattr(dispatch, "dynamic", lambda *a, **k: ("without", spans))
    with pytest.raises(RuntimeError, match="expected no branch within"):
        dispatch.branch_cost("with", "sigmoid", spans)


def test_any_beginning_of_a_run_is_representative():
    assert dispatch.TOKENS == ISSUE
    cases = dispatch.ordered(dispatch.SUITES, quick=False)
    assert sorted((c.suite, c.tokens) for c in cases) == [
        (suite, t) for suite in dispatch.SUITES for t in ISSUE
    ]
    assert {c.suite for c in cases[:2]} == set(dispatch.SUITES)
    early = [c.tokens for c in cases[:8]]
    assert min(early) < 16 and max(early) >= 256


def test_the_plot_has_a_line_per_column_and_the_edges(monkeypatch, tmp_path):
    from inductor_ext import plots

    drawn = []
    monkeypatch.setattr(plots, "draw", lambda panels, *rest: drawn.extend(panels))
    row = {"suite": "sigmoid", "case": "64", "tokens": "64"}
    for column in dispatch.COLUMNS:
        row |= {f"{column}_us": "2.5", f"{column}_check": "ok"}
    meta = {"card": "c", "torch": "t", "triton": "r", "ranges": {"sigmoid": [[1, 8, "a"]]}}
    dispatch.write(tmp_path, "dispatch", [row], meta)
    (panel,) = drawn  # no dependent chain was measured
    assert panel.lines == {c: [(64, 2.5)] for c in dispatch.COLUMNS}
    assert panel.ranges == [(1, 8, "a")]


def _command(*args):
    command = [sys.executable, "-m", "benchmarks.dispatch", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_help_list_and_bad_arguments_need_no_card():
    assert "--prewarm" in _command("--help").stdout
    assert len(_command("--list").stdout.splitlines()) == 2 * len(ISSUE)
    assert len(_command("--list", "--suite", "softmax", "--quick").stdout.splitlines()) == 3
    assert "fast came" in _command("--list", "--columns", "eager,fast").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_running_without_a_card_ends_in_one_sentence():
    answer = _command("--quick")
    assert answer.returncode == 1
    assert answer.stderr.strip().splitlines()[-1].startswith("Measuring needs a CUDA card")


def test_bench_lists_what_is_a_benchmark(capsys):
    from inductor_ext.__main__ import main

    assert main(["bench", "no_such"]) == 2
    there = (
        "attention, attention_decode, attention_dropout, attention_gluon, attention_tilings, "
        "attention_tilings_backward, cross_entropy, cross_entropy_spellings, decompose_k, "
        "decompose_k_floor, dispatch, host_time, linear_attention, mhc, plan, scan."
    )
    assert f"there are: {there}" in capsys.readouterr().err
