"""Every example and every Python block of the README runs as written, without a card."""

import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def program(capsys, monkeypatch):
    """``program(path)`` runs a file or a folder as a program, here: what it printed."""

    def run(path: Path) -> str:
        torch._dynamo.reset()
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", [str(path)])
        with torch.random.fork_rng([]):
            runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch._dynamo.reset()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Path, program) -> None:
    out = program(path)
    assert "inductor_ext decisions" in out
    assert "[template]" in out or "[reduction]" in out


def test_caches_of_keys_and_values(program) -> None:
    """Layers' attention, and what a policy sums of its weights, without a matrix of scores."""
    out = program(ROOT / "examples" / "kv_cache")
    assert all(f"{name} " in out for name in ("sinks", "norms", "snapshot", "compactor"))
    assert "no scores in memory" in out and "stock" not in out


def test_demo() -> None:
    """As a command, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "inductor_ext", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Triton interpreter: right" in done.stdout
    assert "triton_tem_fused" in done.stdout


def test_readme_blocks(tmp_path: Path, program) -> None:
    """On the CPU the plugin has nothing to do, but every call must exist and work."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    path = tmp_path / "readme.py"
    path.write_text("\n".join(blocks).replace('"cuda"', '"cpu"'))
    assert "triton_tem_fused" in program(path)


def _section(name: str) -> str:
    readme = (ROOT / "README.md").read_text()
    return readme.split(f"## {name}\n")[1].split("\n## ")[0]


def test_readme_numbers_are_in_the_results() -> None:
    """The figures of Decompose-K's table come from the committed summary, verbatim."""
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", _section("Decompose-K"), re.M)
    summary = (ROOT / "benchmarks/results/decompose_k_summary.md").read_text()
    assert rows
    for name, cells in rows:
        assert f"| `{name}` |{cells}|" in summary


def test_readme_times_by_tokens_are_the_measured_ones() -> None:
    """To three digits: three columns of times for each scoring, a line for each size."""
    table = re.findall(r"^\| (\d+) \|(.*)\|$", _section("Dynamic sizes"), re.M)
    with (ROOT / "benchmarks/results/dispatch.csv").open() as f:
        rows = {(row["suite"], row["tokens"]): row for row in csv.DictReader(f)}
    assert len(rows) == 2 * len(table) > 0
    for tokens, cells in table:
        measured = [
            f"{float(rows[suite, tokens][f'{column}_us']):.3g}"
            for suite in ("sigmoid", "softmax")
            for column in ("ours", "compile", "max_autotune")
        ]
        assert [cell.strip() for cell in cells.split("|")] == measured, tokens


def _times(name: str) -> set[str]:
    """The times of a results file, as a table has them."""
    with (ROOT / "benchmarks/results" / name).open() as f:
        cells = [v for row in csv.DictReader(f) for k, v in row.items() if k.endswith("us") and v]
    return {text for v in cells for text in (f"{float(v):.0f}", f"{float(v):.3g}")}


def test_readme_times_of_losses_are_the_measured_ones() -> None:
    """Each line: two times in us and their ratio, for two sizes."""
    pair = r" (\d+) \| (\d+) \| ([\d.]+)x \|"
    table = re.findall(rf"^\|.*?\|{pair}{pair}$", _section("Softmax and cross entropy"), re.M)
    times = _times("cross_entropy.csv") | _times("cross_entropy_spellings.csv")
    assert len(table) == 18
    for line in table:
        for stock, plugin, ratio in (line[:3], line[3:]):
            assert {stock, plugin} <= times
            assert float(ratio) == pytest.approx(int(stock) / int(plugin), rel=6e-3)


def test_readme_times_of_mhc_are_the_measured_ones() -> None:
    number = r"([\d.]+)(?: \([\d.]+x\))?"
    table = re.findall(rf"^\|.*\| \d+ x \d+ \| {number} \| {number} \|.*\|$", _section("mHC"), re.M)
    assert len(table) == 8 and {t for pair in table for t in pair} <= _times("mhc.csv")


def test_readme_attention_is_as_measured() -> None:
    """Every number of the two tables is one of the summary's, of its own line."""
    summary = (ROOT / "benchmarks/results/attention_summary.md").read_text()
    rows = [row for row in summary.splitlines() if row.startswith("|")]
    names, _, *lines = ([c.strip() for c in row.split("|")[1:-1]] for row in rows)
    measured = {(line[0], line[1]): dict(zip(names, line, strict=True)) for line in lines}
    families = re.findall(r"^\| ([A-H]): [^|]*\|(.*)\|$", _section("Attention"), re.M)
    assert len(families) == 8
    for name, cells in families:
        stock, mine, stock_back, mine_back, peak = (c.strip() for c in cells.split("|"))
        of = {kind: v for (case, kind), v in measured.items() if case.startswith(f"family {name} ")}
        assert [of[k][c] for k in ("fwd", "bwd") for c in ("plugin", "compile")] == [
            mine, stock, mine_back, stock_back,
        ]  # fmt: skip
        assert peak.split(" -> ") == [of["fwd"]["compile MiB"], of["fwd"]["plugin MiB"]]
    known = {
        "causal": "causal B4 H16 S4096 D128",
        "4 heads share one": "causal B4 H16:4 S4096 D128",
        "16384 tokens": "causal B1 H16 S16384 D128",
        "window of 1024": "window B4 H16 S4096 D128",
        "documents": "documents B4 H16 S4096 D128",
        "softcap": "softcap B4 H16 S4096 D128",
        "ALiBi": "alibi B4 H16 S4096 D128",
        "prefix": "prefix B4 H16 S4096 D128",
        "bias per key, not causal": "slot_bias B4 H16 S4096 D128",
        "bias per pair, learned, not causal": "bias B4 H16 S4096 D128",
    }
    for label, case in known.items():
        (cells,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", _section("Attention"), re.M)
        shown = [re.match(r"[\d-]+", c.strip())[0] for c in cells.split("|")]  # type: ignore[index]
        both = [measured[case, kind] for kind in ("fwd", "bwd")]
        assert shown == [one[c] for one in both for c in ("ours", "cudnn", "flex")], label
