"""``python -m inductor_ext explain``: targets, table, JSON, plot, errors in one sentence."""

import itertools
import json
import re
import sys
import textwrap

import pytest
import torch

import inductor_ext
from inductor_ext import active_plan, config, plots, report, target
from inductor_ext.__main__ import main
from inductor_ext.plan import Box, Entry, Key, Plan
from inductor_ext.testing.cards import CARDS

PROGRAM = """
import torch

def relu_mm(a, b):
    return torch.relu(a @ b)

def skinny():
    meta = dict(dtype=torch.bfloat16, device="meta")
    return relu_mm, (torch.empty(16, 4096, **meta), torch.empty(4096, 32, **meta))

def dynamic():
    fn, (a, b) = skinny()
    torch._dynamo.mark_dynamic(a, 0, min=2, max=512)
    return fn, (a, b)

def small():
    return torch.nn.Linear(16, 4), [torch.randn(8, 16)]

def wants(n):
    return n

def empty():
    return ()

def number():
    return 3

def unpacked():
    return relu_mm, torch.ones(2)

def breaks():
    raise KeyError("no such weights")

def leaves():
    raise SystemExit("usage: something")

def wrong_shapes():
    return relu_mm, (torch.randn(2, 3), torch.randn(2, 3))

not_a_function = 3
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    active_plan.unload_plan()
    with config.patch(shipped_plan=False):
        yield
    active_plan.unload_plan()


def run(capsys, *argv):
    code = main(["explain", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


# --- targets --------------------------------------------------------------------------------------


def test_a_function_of_a_file_and_of_a_module(program, tmp_path, monkeypatch):
    fn, args = target.load(f"{program}:small")
    assert isinstance(fn, torch.nn.Linear) and len(args) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    fn, args = target.load("program:skinny")
    assert fn.__name__ == "relu_mm" and args[0].shape == (16, 4096)


def test_a_file_may_import_its_neighbours_and_bear_any_name(tmp_path):
    (tmp_path / "neighbour_of_the_target.py").write_text("def twice(x):\n    return 2 * x\n")
    path = tmp_path / "torch.py"
    path.write_text(
        "import torch\nfrom neighbour_of_the_target import twice\n"
        "def make():\n    return twice, (torch.ones(2),)\n"
    )
    fn, (x,) = target.load(f"{path}:make")
    assert fn(x).tolist() == [2.0, 2.0] and sys.modules["torch"] is torch


BAD_TARGETS = {
    "program.py": "expected a target like file.py:function or module:function, got 'program.py'.",
    ":make": "expected a target like file.py:function",
    "{}:": "expected a target like file.py:function",
    "absent.py:make": "absent.py: there is no such file.",
    "no_such_module_here:make": "there is no module 'no_such_module_here' on the path",
    "torch.no_such_part:make": "there is no module 'torch.no_such_part' on the path",
    "{}:make": "has no 'make'; its functions without arguments are skinny, dynamic, small, ",
    "{}:not_a_function": "expected a function as {}:not_a_function, got int.",
    "{}:wants": "to be called without arguments, and it takes (n); return",
    "{}:empty": "expected {}:empty to return (callable, args), got a tuple of nothing.",
    "{}:number": "to return (callable, args), got int.",
    "{}:unpacked": "to return (callable, args), got a tuple of function, Tensor.",
    "{}:breaks": "{}, line 32: {}:breaks raised KeyError: 'no such weights'.",
    "{}:leaves": "{}, line 35: {}:leaves raised SystemExit: usage: something.",
    "{}:wrong_shapes": "compiling {}:wrong_shapes raised ",
}


@pytest.mark.parametrize("wanted", BAD_TARGETS)
def test_what_is_wrong_with_a_target_is_one_sentence(wanted, program, capsys):
    code, out, err = run(capsys, wanted.format(program))
    assert code == 2 and out == ""
    *logged, sentence = err.splitlines()  # torch may log a failing compile itself
    assert sentence.endswith(".") and not (logged and "compiling" not in sentence), err
    assert BAD_TARGETS[wanted].replace("{}", program) in sentence


BROKEN_FILES = {
    "def make(:\n    pass\n": "line 1: invalid syntax.",
    "import no_such_module_here\n": "line 1: {} raised ModuleNotFoundError: No module named",
    "x = 1\n\nraise ValueError('first.\\nsecond')\n": "line 3: {} raised ValueError: first.",
}


@pytest.mark.parametrize("text", BROKEN_FILES)
def test_a_broken_file_is_named_with_its_line(text, tmp_path, monkeypatch):
    path = tmp_path / "broken_target.py"
    path.write_text(text)
    with pytest.raises(target.TargetError) as caught:
        target.load(f"{path}:make")
    wanted = BROKEN_FILES[text].replace("{}", str(path))
    assert str(caught.value).startswith(f"{path}, {wanted}") and "\n" not in str(caught.value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(target.TargetError, match=r"^(importing broken_target raised|/.*line 1)"):
        target.load("broken_target:make")


# --- the table and JSON ---------------------------------------------------------------------------


def test_on_this_machine(program, capsys, tmp_path):
    code, out, err = run(capsys, f"{program}:small", "--json", str(tmp_path / "out.json"))
    assert (code, err) == (0, "") and "inductor_ext decisions" in out
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["sites"].startswith("addmm [8,16]x[16,4]") and row["fired"] is False


@pytest.mark.codegen
def test_on_a_virtual_card_with_ranges(program, capsys, tmp_path):
    path = tmp_path / "out.json"
    code, out, err = run(capsys, f"{program}:dynamic", "--card", "h200", "--json", str(path))
    assert (code, err) == (0, "")
    (row,) = json.loads(path.read_text())
    assert row["fired"] and len(row["ranges"]) > 2 and row["speedup"] is None
    spans = [(r["lo"], r["hi"]) for r in row["ranges"]]
    assert (spans[0][0], spans[-1][1]) == (2, 512)
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(spans))
    assert all(r["chosen"] in out.replace("\n", "") or len(r["chosen"]) > 20 for r in row["ranges"])
    # What the docstring of to_json promises, and nothing besides.
    fields = report.Report.to_json.__doc__
    assert all(re.search(rf"\n *{name} ", fields) for name in row)
    assert set(row["ranges"][0]) == {"size", "lo", "hi", "chosen", "and_also"}
    assert set(row["candidates"][0]) == {"name", "us", "note"}


def test_an_unknown_card_is_one_sentence(program, capsys):
    code, _, err = run(capsys, f"{program}:skinny", "--card", "h2000")
    assert code == 2 and err.count("\n") == 1 and "h2000" in err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_can_not_be_written_is_known_before_compiling(option, program, capsys):
    if option == "--plot":
        pytest.importorskip("matplotlib")
    code, out, err = run(capsys, f"{program}:small", option, "/no/such/folder/x.png")
    assert code == 2 and out == "" and err.count("\n") == 1 and "no such folder" in err


def test_json_that_can_not_be_written(program, capsys, tmp_path):
    code, out, err = run(capsys, f"{program}:small", "--json", str(tmp_path))
    assert (code, out, err) == (2, "", f"{tmp_path}: can't be written (it is a folder).\n")
    code, _, err = run(capsys, f"{program}:small", "--json", "/dev/full")
    assert (code, err) == (2, "/dev/full: can't be written (No space left on device).\n")


@pytest.mark.parametrize("command", ["explain", "tune", "plan", ""])
def test_help_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([*([command] if command else []), "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and max(map(len, out.splitlines())) <= 80
    if command in ("explain", "tune"):
        assert "(callable, args)" in out and "mark_dynamic" in out
        example = textwrap.dedent(out[out.index("  def router") :])
        compile(example, "help", "exec")


# --- plots ----------------------------------------------------------------------------------------

FAST, FASTER = "split14_16x32x128_w2_s4_pdl_late", "split16_16x16x128_w2_s1_pdl_late"


def entry(*boxes, **sizes):
    key = Key.of("decompose_k", "mm", "bfloat16", "row,row", sizes)
    return Entry(key, boxes, "2026-01-31T12:00:00Z", 1 << 30)


def one_entry():
    return entry(
        Box((("m", (1, 8)),), FASTER, {"1": {"stock": 5.0, FASTER: 2.0}, "8": {FASTER: 2.5}}),
        Box((("m", (9, 64)),), FAST, {"16": {"stock": 5.5, FAST: 3.0}}),
        Box((("m", (65, None)),), "stock"),
        k=4096,
        n=32,
    )


def test_panels_of_an_entry():
    (panel,) = plots.of_entry(one_entry())
    assert panel.size == "m" and panel.title == "decompose_k mm bfloat16 row,row k=4096 n=32"
    assert panel.ranges == [(1, 8, FASTER), (9, 64, FAST), (65, None, "stock")]
    assert panel.lines == {
        "stock": [(1, 5.0), (16, 5.5)],
        FASTER: [(1, 2.0), (8, 2.5)],
        FAST: [(16, 3.0)],
    }


def test_panels_of_an_entry_over_two_sizes():
    bands = ((1, 2), (3, None))
    boxes = [
        Box((("batch", band), ("m", span)), name, {f"{band[0]},{span[0]}": {name: 2.0}})
        for band in bands
        for span, name in (((1, 8), FAST), ((9, 99), "stock"), ((100, None), FAST))
    ]
    first, second = plots.of_entry(entry(*boxes, k=4096))
    assert first.title.endswith("batch=1..2") and second.title.endswith("batch=3..")
    assert [r[:2] for r in second.ranges] == [(1, 8), (9, 99), (100, None)]
    assert second.lines == {FAST: [(1, 2.0), (100, 2.0)], "stock": [(9, 2.0)]}


def test_panels_of_decisions():
    def decision(**changes):
        return report.Decision("decompose_k", True, "a", "why", "mm", **changes)

    ranges = report.SizeRange("s0", 2, 9, "a"), report.SizeRange("s0", 10, None, "stock")
    (panel,) = plots.of_decision(decision(ranges=ranges))
    assert panel.size == "s0" and panel.ranges == [(2, 9, "a"), (10, None, "stock")]
    times = report.CandidateTime("a", 2.0), report.CandidateTime("b", note="wrong")
    (panel,) = plots.of_decision(decision(candidates=times))
    assert panel.bars == {"a": 2.0} and not panel.ranges
    assert plots.of_decision(decision(candidates=times[1:])) == []
    also = report.SizeRange("s0", 2, 9, "a", (("s1", 1, None),))
    (panel,) = plots.of_decision(decision(ranges=(also,)))
    assert panel.title == "decompose_k mm s1 1.."


def colours(path):
    from matplotlib import image

    return {tuple(c) for c in (image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)}


@pytest.mark.parametrize("end", ["png", "svg", "pdf"])
def test_a_plot_is_drawn(end, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{end}"
    ranges = (report.SizeRange("s0", 0, 0, "a"), report.SizeRange("s0", 1, None, "stock"))
    decision = report.Decision("decompose_k", True, "a", "why", "mm [s0,4]", ranges=ranges)
    bars = plots.Panel("static", bars={"a": 2.0, "stock": 5.0})
    plots.draw([*plots.of_entry(one_entry()), *plots.of_decision(decision), bars], path, "title")
    if end == "png":
        assert {(31, 119, 180), (255, 127, 14)} <= colours(path)  # lines of two candidates
    elif end == "svg":
        text = path.read_text()
        assert all(f"<!-- {name} -->" in text for name in (FAST, FASTER, "us", "stock"))
    else:
        assert path.read_bytes().startswith(b"%PDF")


def test_what_is_drawn(tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    lines, edges = {}, []
    plot, line = axes.plot, axes.axvline

    def watched(self, x, y, **how):
        lines[how["label"]] = list(zip(x, y, strict=True))
        return plot(self, x, y, **how)

    monkeypatch.setattr(axes, "plot", watched)
    monkeypatch.setattr(axes, "axvline", lambda s, x, **how: edges.append(x) or line(s, x, **how))
    (panel,) = plots.of_entry(one_entry())
    plots.draw([panel], tmp_path / "plot.png", "title")
    assert lines == panel.lines and edges == [8.5, 64.5]


def test_what_can_not_be_plotted_is_one_sentence(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(plots.PlotError, match=r"end in one of .*png.*, got .*plot\.what\.$"):
        plots.draw([plots.Panel("x")], tmp_path / "plot.what", "t")
    with pytest.raises(plots.PlotError, match="there is nothing to plot"):
        plots.draw([], tmp_path / "plot.png", "t")


def test_without_matplotlib_one_sentence_says_how_to_get_it(program, capsys, monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.json"
    Plan(CARDS["h200"].name, "2.13", "3.7", (one_entry(),)).save(path)
    wanted = 'a plot needs matplotlib, which is not installed (pip install "inductor_ext[plot]").\n'
    plot = str(tmp_path / "x.png")
    assert run(capsys, f"{program}:small", "--plot", plot) == (2, "", wanted)
    assert main(["plan", "show", str(path), "--plot", plot]) == 2
    assert capsys.readouterr() == ("", wanted)


def test_the_plan_in_force_is_plotted(program, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    wanted = f"{program}:dynamic", "--card", "h200", "--plot", str(path)
    inductor_ext.load_plan(Plan(CARDS["h200"].name, "2.13", "3.7", (one_entry(),)), force=True)
    code, _, err = run(capsys, *wanted)
    assert (code, err) == (0, "")
    text = path.read_text()
    assert "<!-- decompose_k mm bfloat16 row,row k=4096 n=32 -->" in text  # what was measured
    assert "[s" in text and "not timed" in text  # what this program branches on


def test_nothing_to_plot(program, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, f"{program}:small", "--plot", str(tmp_path / "x.png"))
    assert code == 2 and "inductor_ext decisions" in out
    assert err.count("\n") == 1 and "nothing to plot" in err and not list(tmp_path.glob("*.png"))


def test_plan_show_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "a.json", tmp_path / "a.svg"
    Plan(CARDS["h200"].name, "2.13", "3.7", (one_entry(),)).save(path)
    assert main(["plan", "show", str(path), "--plot", str(plot)]) == 0
    assert "1 problems, 3 ranges" in capsys.readouterr().out
    assert "k=4096 n=32" in plot.read_text()
