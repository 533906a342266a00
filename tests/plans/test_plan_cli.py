"""``python -m inductor_ext plan``: what it prints, its exit codes, errors in one sentence."""

import dataclasses
import json
import os
import re

import pytest

import inductor_ext
from inductor_ext import doctor, report
from inductor_ext.__main__ import main
from inductor_ext.plan import Box, Plan


def box(choice, times=None, **bounds):
    return Box(tuple(bounds.items()), choice, times or {})


FAST = "split14_16x32x128_w2_s4_pdl_late"


@pytest.fixture
def plan(make_plan):
    times = {"4": {"stock": 5.6, FAST: 2.8}, "8": {"stock": 6.0, FAST: 2.0}}
    made = make_plan(box(FAST, times, m=(1, 8)), box("stock", m=(9, None)), n=256, k=7168)
    return dataclasses.replace(made, command="python tune_[router].py")


@pytest.fixture
def file(plan, tmp_path):
    plan.save(tmp_path / "a.json")
    return str(tmp_path / "a.json")


def run(capsys, *argv):
    code = main(["plan", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_show(capsys, file):
    code, out, err = run(capsys, "show", file)
    assert (code, err) == (0, "")
    assert "NVIDIA H200, torch" in out and "1 problems, 2 ranges" in out
    assert "made by: python tune_[router].py" in out  # brackets are text
    assert "decompose_k mm bfloat16 row,row k=7168 n=256" in out
    (row,) = (line for line in out.splitlines() if FAST in line)
    assert "m=1..8" in row and "2.80" in row and "2.00x" in row
    assert "3.00x" in out and "m=9.." in out and "at most 1.00 GiB" in out


@pytest.mark.parametrize("columns", [40, 80])
def test_tables_fit_a_terminal(capsys, file, columns, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(capsys, "show", file)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert max(map(len, lines)) <= columns


def test_check(capsys, file, tmp_path):
    code, out, err = run(capsys, "check", file)
    assert (code, err) == (0, "") and "a.json: in order (NVIDIA H200" in out
    bad = tmp_path / "bad.json"
    bad.write_text((tmp_path / "a.json").read_text().replace(FAST + '"', 'splat14"', 1))
    code, out, err = run(capsys, "check", str(bad), file)
    assert code == 1 and "a.json: in order" in out
    assert err.splitlines() == [f"{bad}, line 13: decompose_k has no candidate 'splat14'."]
    code, out, err = run(capsys, "check", str(tmp_path / "absent.json"))
    assert code == 1 and err.count("\n") == 1 and "can't be read" in err


def test_merge(capsys, file, make_plan, tmp_path):
    other, merged = tmp_path / "b.json", tmp_path / "merged.json"
    make_plan(box("stock", m=(1, 4)), n=128, k=7168).save(other)
    code, out, err = run(capsys, "merge", file, str(other), "-o", str(merged))
    assert (code, err) == (0, "") and "2 problems, 3 ranges" in out
    assert Plan.load(merged) == Plan.load(file).merge(Plan.load(other))
    make_plan(card="NVIDIA H100").save(other)
    code, out, err = run(capsys, "merge", file, str(other), "-o", str(merged))
    assert code == 2 and out == "" and err.count("\n") == 1 and "one card and version" in err
    code, out, err = run(capsys, "merge", file, "-o", str(tmp_path / "no" / "where.json"))
    assert code == 2 and "can't be written" in err


def test_diff(capsys, file, make_plan, tmp_path):
    code, out, err = run(capsys, "diff", file, file)
    assert (code, out, err) == (0, "The plans choose alike.\n", "")
    other = tmp_path / "b.json"
    make_plan(box(FAST, m=(1, 16)), n=256, k=7168).save(other)
    code, out, err = run(capsys, "diff", file, str(other))
    assert (code, err) == (1, "")
    assert "m=9..16" in out and "m=17.." in out and "not covered" in out
    make_plan(card="NVIDIA H100").save(other)
    code, out, _ = run(capsys, "diff", file, str(other))
    assert code == 1 and "before: NVIDIA H200" in out and "after:  NVIDIA H100" in out


@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_malformed_file_is_one_sentence_on_stderr(capsys, command, file, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{\n "format": 1,\n}')
    code, out, err = run(capsys, command, str(bad), *([file] if command == "diff" else []))
    assert code == 2 and out == ""
    # Where the comma is that Python 3.13 objects to, or the brace that older ones do.
    assert err.startswith((f"{bad}, line 2: not JSON", f"{bad}, line 3: not JSON"))
    assert err.count("\n") == 1


def test_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan"])
    assert caught.value.code == 2
    capsys.readouterr()


# --- doctor and the report ------------------------------------------------------------------------


def rows(monkeypatch, value):
    monkeypatch.setenv("INDUCTOR_EXT_PLAN", value)
    return [r for r in doctor.caches_and_plans() if r.what == "INDUCTOR_EXT_PLAN"]


def test_doctor_says_which_plan_is_used(monkeypatch, file, tmp_path):
    (row,) = rows(monkeypatch, file)
    assert row.state == "ok" and row.value == f"{file}: 1 problems on NVIDIA H200"
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    good, wrong = rows(monkeypatch, os.pathsep.join([file, str(bad)]))
    assert (
        good.state == "ok" and wrong.state == "bad" and "line 1: expected an object" in wrong.value
    )
    (row,) = rows(monkeypatch, "")
    assert row.state == "ok" and "not set" in row.value


def test_doctor_says_that_a_plan_is_of_another_card(monkeypatch, file):
    monkeypatch.setattr("inductor_ext.compat.card_name", lambda: "NVIDIA H100")
    (row,) = rows(monkeypatch, file)
    assert row.state == "bad" and "this card is NVIDIA H100" in row.value


def test_a_report_as_json():
    times = (
        report.CandidateTime("stock", 6.0),
        report.CandidateTime("a", 2.0),
        report.CandidateTime("b"),
    )
    ranges = (report.SizeRange("s0", 1, None, "a"),)
    fired = report.Decision("decompose_k", True, "a", "why", "mm", "plan", times, ranges)
    left = report.Decision("decompose_k", False, "stock", "why not", "mm")
    one, two = json.loads(inductor_ext.Report((fired, left)).to_json())
    assert one["speedup"] == 3.0 and one["source"] == "plan" and one["fired"] is True
    assert one["candidates"][2] == {"name": "b", "us": None, "note": ""}
    assert one["ranges"][0]["lo"] == 1 and one["ranges"][0]["hi"] is None
    assert two["speedup"] is None and two["candidates"] == []
    assert json.loads(inductor_ext.Report(()).to_json()) == []
