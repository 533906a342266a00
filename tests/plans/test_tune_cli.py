"""``python -m inductor_ext tune``: its arguments, the plan it writes, errors in one sentence."""

import functools
import re

import pytest
import torch

from inductor_ext import measure, tuning
from inductor_ext.__main__ import main
from inductor_ext.plan import Plan

PROGRAM = """
import torch

def product(x, w):
    return torch.relu(x @ w)

def site():
    meta = dict(dtype=torch.bfloat16, device="meta")
    return product, (torch.empty(16, 4096, **meta), torch.empty(4096, 32, **meta))

def breaks():
    meta = dict(dtype=torch.bfloat16, device="meta")
    return product, (torch.empty(16, 4096, **meta), torch.empty(17, 32, **meta))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "my program.py"
    path.write_text(PROGRAM)
    return str(path)


def rows_decide(key, sizes, names):
    """Splitting wins up to 40 rows."""
    return {n: 10.0 if n == "stock" else (5.0 if sizes["m"] <= 40 else 15.0) for n in names}


@pytest.fixture
def pretended_card(monkeypatch):
    """Times of a virtual card, from a rule."""
    monkeypatch.setattr(measure, "require_cuda", lambda: None)
    tune = functools.partial(tuning.tune, _measure=rows_decide, _card="h200")
    monkeypatch.setattr(tuning, "tune", tune)


def run(capsys, *argv):
    code = main(["tune", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.codegen
@pytest.mark.usefixtures("pretended_card")
def test_a_plan_is_written(program, capsys, tmp_path):
    out = tmp_path / "plan.json"
    argv = f"{program}:site", "--dims", "x.0=1:512", "--out", str(out), "--max-ranges", "2"
    code, printed, err = run(capsys, *argv)
    assert code == 0
    assert "measurements" in err and "tune" in err  # the progress bar
    assert re.search(r"bfloat16 at \d+: \d+ timed, fastest stock 10.00 us", err)
    last = r"Tuning took \d+ s: (\d+) sizes, (\d+) candidates, 0 programs compiled\."
    sizes, candidates = map(int, re.fullmatch(last, printed.splitlines()[-1]).groups())
    assert 10 < sizes < 40 and 20 < candidates < 100
    assert f"{out}: NVIDIA H200, torch" in printed and "1 problems, 2 ranges" in printed
    plan = Plan.load(out)
    assert [b.choice == "stock" for b in plan.entries[0].boxes] == [False, True]
    assert plan.command.startswith("python -m inductor_ext tune '") and "x.0=1:512" in plan.command
    code, printed, err = run(capsys, *argv, "--quiet")
    assert code == 0 and err == ""


@pytest.mark.usefixtures("pretended_card")
def test_more_ranges_where_asked(program, capsys, tmp_path, monkeypatch):
    def steps(key, sizes, names):
        band = (sizes["m"].bit_length() // 2) % 2
        return {n: 10.0 if n == "stock" else (5.0 if band else 15.0) for n in names}

    tune = functools.partial(tuning.tune.func, _measure=steps, _card="h200")
    monkeypatch.setattr(tuning, "tune", tune)
    counts = []
    for most in ("2", "6"):
        out = tmp_path / f"{most}.json"
        argv = "--dims", "x.0=1:512", "--out", str(out), "--max-ranges", most, "--quiet"
        assert run(capsys, f"{program}:site", *argv)[0] == 0
        counts.append(len(Plan.load(out).entries[0].boxes))
    assert counts[0] == 2 < counts[1] <= 6


BAD = {
    "x.0=8:1": "expected 1 <= lo <= hi for 'x.0', got lo=8 and hi=1.",
    "x.0=0:8": "expected 1 <= lo <= hi for 'x.0', got lo=0 and hi=8.",
    "x.7=1:8": "expected a dimension below 2 in 'x.7', got '7'.",
    "y.0=1:8": "expected 'y.0' to name a tensor argument out of x, w.",
    "x.0=32:64": "to be traced at a size within 32..64, got 16.",
}


@pytest.mark.usefixtures("pretended_card")
@pytest.mark.parametrize("dims", BAD)
def test_what_is_wrong_with_dims_is_one_sentence(dims, program, capsys, tmp_path):
    out = tmp_path / "plan.json"
    code, printed, err = run(
        capsys, f"{program}:site", "--dims", dims, "--out", str(out), "--quiet"
    )
    assert code == 2 and printed == "" and not out.exists()
    assert err.count("\n") == 1 and err.strip().endswith(BAD[dims]), err


@pytest.mark.usefixtures("pretended_card")
def test_a_program_that_fails_is_one_sentence(program, capsys, tmp_path):
    argv = "--dims", "x.0=1:64", "--out", str(tmp_path / "plan.json"), "--quiet"
    code, _, err = run(capsys, f"{program}:breaks", *argv)
    last = err.splitlines()[-1]  # torch may log a failing compile itself
    assert code == 2 and last.startswith(f"tuning {program}:breaks raised ")
    code, _, err = run(capsys, f"{program}:absent", *argv)
    assert code == 2 and err.count("\n") == 1 and "has no 'absent'" in err


@pytest.mark.usefixtures("pretended_card")
def test_an_interruption_leaves_no_file(program, capsys, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    out = tmp_path / "plan.json"
    code, _, err = run(capsys, f"{program}:site", "--dims", "x.0=1:64", "--out", str(out))
    assert code == 1 and err == f"interrupted: {out} is not written.\n" and not out.exists()


BAD_ARGUMENTS = {
    "--dims tokens": "expected NAME=LO:HI like tokens=1:8192, got 'tokens'",
    "--dims x.0=1:-8": "got 'x.0=1:-8'",
    "--dims x.0=1:8 --dims x.0=1:9": "expected each --dims once",
    "--dims x.0=1:8 --max-ranges 0": "expected a whole number of at least 1, got '0'",
    "--dims x.0=1:8 --max-memory none": "expected a positive number of GiB, got 'none'",
    "--dims x.0=1:8 --max-memory nan": "expected a positive number of GiB, got 'nan'",
    "": "required: --dims",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments(arguments, program, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["tune", f"{program}:site", "--out", "plan.json", *arguments.split()])
    assert caught.value.code == 2 and BAD_ARGUMENTS[arguments] in capsys.readouterr().err


def test_where_the_plan_goes_is_asked_first(program, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "require_cuda", lambda: pytest.fail("measuring has begun"))
    for out in ("/no/such/folder/plan.json", str(tmp_path)):
        code, _, err = run(capsys, f"{program}:site", "--dims", "x.0=1:8", "--out", out)
        assert code == 2 and err.count("\n") == 1 and err.startswith(f"{out}: the plan can't be")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card(program, capsys, tmp_path):
    out = str(tmp_path / "plan.json")
    code, _, err = run(capsys, f"{program}:site", "--dims", "x.0=1:8", "--out", out)
    assert code == 2 and err.startswith("Measuring needs a CUDA card") and err.count("\n") == 1
