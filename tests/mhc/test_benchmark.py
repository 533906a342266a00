"""The benchmark's command line: a whole run on a pretended card."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_ext import measure

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

sys.path.append(str(Path(__file__).parent))

from mhc_formulas import kernels  # noqa: E402

from benchmarks import common, mhc, mhc_cases, mhc_tilings  # noqa: E402


class Timer:
    """Runs a call on every input set, which "takes" 10 us."""

    def __init__(self, repeats):
        pass

    def __call__(self, call, sets):
        for s in sets:
            call(*s)
        return 10.0

    def chained(self, call, inputs):
        call(*inputs)
        return 12.0


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def pretended_card(monkeypatch):
    """Tiny shapes on the CPU."""
    torch.manual_seed(0)
    monkeypatch.setattr(measure, "require_cuda", lambda: None)
    monkeypatch.setattr(measure, "ceilings", lambda: measure.Ceilings(1e6, 1e8, 1e7))
    monkeypatch.setattr(measure, "rotate", lambda inputs: [tuple(inputs)] * 2)
    monkeypatch.setattr(measure, "capture_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(mhc, "Timer", Timer)
    monkeypatch.setattr(mhc, "_release", lambda: None)  # takes longer than the rest
    monkeypatch.setattr(mhc_cases, "DEVICE", "cpu")
    monkeypatch.setattr(mhc_cases, "CHUNK", 4)
    monkeypatch.setattr(mhc_cases, "CHECKED", 3)
    meta = {"card": "pretended", "torch": "0", "triton": "0", "date": "today"}
    monkeypatch.setattr(common, "metadata", lambda _: dict(meta))


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["x", *map(str, argv)])
    mhc.main()


@pytest.mark.usefixtures("pretended_card")
def test_a_whole_run_and_a_merge(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(common, "plot_panels", lambda path, *rest, **_: drawn.append(path.name))
    options = ("--columns", "ours,eager", "--out", tmp_path)
    run(monkeypatch, "--tokens", "6", "--hidden", "16", *options)
    rows = common.read_csv(tmp_path / "mhc.csv")
    assert len(rows) == 2 * len(mhc_cases.STAGES)
    for row in rows:
        assert row["check"] == "ok" and row["us"] == "10", row
        if row["stage"].startswith("chain"):
            assert row["net_us"] == "0"
    latency = {(r["stage"], r["column"]) for r in rows if r["chain_us"]}
    assert latency == {(s, "ours") for s in ("pre", "post", "kronecker", "post_pre", "chain")}
    assert "## post_pre_bwd" in (tmp_path / "mhc_summary.md").read_text()

    run(monkeypatch, "--tokens", "4100,1", "--hidden", "8", "--stage", "post", "--name", "more",
        *options)  # fmt: skip
    run(monkeypatch, "--merge", tmp_path / "mhc.csv", tmp_path / "more.csv", "--out", tmp_path)
    assert drawn == ["mhc.png", "more.png", "mhc.png"]
    merged = common.read_csv(tmp_path / "mhc.csv")
    assert len(merged) == len(rows) + 4
    # 18 H + 80 bytes a token, at 1e6 bytes per us.
    assert {r["percent"] for r in merged if r["tokens"] == "4100"} == {"9.184"}
    summary = (tmp_path / "mhc_summary.md").read_text()
    assert "- missed: post 1x8 ours 10 us (at most 3 us)" in summary
    assert "- missed: post 4100x8 ours 9.18% (at least 90%)" in summary


@pytest.mark.usefixtures("pretended_card")
@pytest.mark.parametrize("stage", ["post", "post_pre_bwd"])
def test_a_column_that_is_wrong_is_reported(monkeypatch, stage):
    case = mhc_cases.Case(stage, 9, 16)
    right = mhc_cases.ours(case.function)

    def wrong(*args):
        outs = right(*args)
        return (outs[0] * 1.05, *outs[1:])

    monkeypatch.setattr(mhc_cases, "ours", lambda _: wrong)
    (row,) = mhc.measure_case(case, ["ours"], Timer(1))
    assert "allowed" in row["check"]


@pytest.mark.usefixtures("pretended_card")
def test_a_failure_is_a_row(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(mhc_cases, "ours", lambda _: broken)
    (row,) = mhc.measure_case(mhc_cases.Case("pre", 2, 16), ["ours"], Timer(1))
    assert row["failure"] == "RuntimeError: no such kernel"


@pytest.mark.usefixtures("pretended_card")
@pytest.mark.parametrize("stage", ["pre", "post_pre_bwd"])
def test_the_truth_in_chunks_is_that_of_all_tokens(monkeypatch, stage):
    case = mhc_cases.Case(stage, 14, 16)
    inputs = mhc_cases.draw(case)
    outs = mhc_cases.exact(case.function)(*(i.double() for i in inputs))
    given = mhc_cases.seeds(case, outs)
    chunked = mhc_cases.truth(case, inputs, given)
    monkeypatch.setattr(mhc_cases, "CHUNK", 100)
    for a, b in zip(chunked, mhc_cases.truth(case, inputs, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_bytes_are_those_of_the_tensors():
    """pre reads X twice; its gates and statistics are 380 bytes; W is read once."""
    case = mhc_cases.Case("pre", 100, 64)
    assert case.bytes == 100 * (2 * 8 * 64 + 2 * 64 + 80 + 200) + 24 * 256 * 4
    chain = mhc_cases.Case("chain", 100, 64).bytes
    parts = {s: mhc_cases.Case(s, 100, 64).bytes for s in ("pre", "post_pre", "post")}
    assert chain == parts["pre"] + 3 * parts["post_pre"] + parts["post"]
    both = mhc_cases.Case("chain_both", 100, 64).bytes
    parts |= {s: mhc_cases.Case(s, 100, 64).bytes for s in ("pre_bwd", "post_pre_bwd", "post_bwd")}
    assert both == chain + parts["pre_bwd"] + 3 * parts["post_pre_bwd"] + parts["post_bwd"]


@pytest.mark.usefixtures("pretended_card")
@pytest.mark.parametrize("kernel", ["fuse", "slabs", "pre_bwd"])
def test_tilings_launch_the_kernels_and_compare(monkeypatch, tmp_path, kernel):
    monkeypatch.setattr(mhc_tilings, "TRIED", {k: v[1:2] for k, v in mhc_tilings.TRIED.items()})
    with kernels():
        run(monkeypatch, "--tilings", "--tokens", "3", "--hidden", "16", "--kernel", kernel,
            "--out", tmp_path)  # fmt: skip
    default, other = common.read_csv(tmp_path / "mhc_tilings.csv")
    assert default["options"] == "default" != other["options"]
    for row in (default, other):
        assert row["us"] == "10" and float(row["error"]) < 1e-5 and float(row["error_16"]) < 1e-2


@pytest.mark.usefixtures("pretended_card")
def test_a_tiling_that_is_wrong_shows(monkeypatch):
    right = mhc_tilings.KERNELS["projection"].launch

    def launch(options, *inputs):
        return right(options, *inputs) * (1 + 1e-4 * bool(options))

    monkeypatch.setattr(mhc_tilings.KERNELS["projection"], "launch", launch)
    with kernels():
        default, other = mhc_tilings.measure("projection", 3, 16, Timer(1), [{"LOG": 1}])
    assert default["error"] < 1e-5 < other["error"]


def test_list_answers_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "benchmarks.mhc", "--list", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "pre 4096x7168 ours eager"
    assert "| torch\n" not in done.stderr
