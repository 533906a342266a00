"""``python -m inductor_ext doctor``: what it prints, and when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_ext import __main__ as command_line
from inductor_ext import compat, doctor, registry


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plugin in order, on a machine without a card."""
    monkeypatch.setattr(registry, "status", lambda: [("decompose_k", True, "")])
    monkeypatch.setattr(registry, "self_check", lambda: [("cache key", True, "hashed")])
    monkeypatch.setattr(compat, "pass_slots", lambda: {"joint_custom_pre_pass": None})
    monkeypatch.setattr(doctor, "has_card", lambda: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INDUCTOR_EXT_PLAN", raising=False)


def line_with(text: str, *words: str) -> str:
    lines = [line for line in text.splitlines() if all(w in line for w in words)]
    assert lines, f"no line has all of {words} in\n{text}"
    return lines[0]


def test_a_machine_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import triton

    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    line_with(out, "torch", torch.__version__, "<2.16", "ok")
    line_with(out, "triton", triton.__version__, "ok")
    line_with(out, "none: code generation for virtual cards works", "note")
    line_with(out, "decompose_k", "enabled", "ok")
    line_with(out, "ptxas", "release", "ok")
    line_with(out, "joint_custom_pre_pass", "free", "ok")
    line_with(out, "Inductor's cache", os.environ["TORCHINDUCTOR_CACHE_DIR"], "ok")
    line_with(out, "cache key", "hashed", "ok")
    assert out.splitlines()[-1] == "All checks passed."


def test_as_a_command(tmp_path: Path) -> None:
    """The real registry and slots, in a process of its own: nothing of the tests is in the way."""
    done = subprocess.run(
        [sys.executable, "-m", "inductor_ext", "doctor"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "All checks passed."
    line_with(done.stdout, "Self check")


def test_a_failed_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("cache key", True, ""), ("lowering of aten.mm", False, "replaced after the import")]
    monkeypatch.setattr(registry, "self_check", lambda: rows)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    line_with(out, "cache key", "in place", "ok")
    line_with(out, "lowering of aten.mm", "replaced after the import", "bad")
    assert out.splitlines()[-1] == "cannot work: lowering of aten.mm: replaced after the import"


def test_a_check_that_raises_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[tuple[str, bool, str]]:
        raise RuntimeError("no [such] hook")

    monkeypatch.setattr(registry, "status", broken)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    line_with(out, "failed itself: RuntimeError: no [such] hook", "bad")
    line_with(out, "cache key", "ok")


def a_users_pass(graph: object) -> None: ...


class AUsersPass:
    def __call__(self, graph: object) -> None: ...


def test_occupied_slots_are_shown_and_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slots = {
        "post_grad_custom_post_pass": a_users_pass,
        "pre_grad_custom_pass": [AUsersPass(), a_users_pass],
        "external_matmul": [],
        "joint_custom_post_pass": doctor.main,
    }
    monkeypatch.setattr(compat, "pass_slots", lambda: slots)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    line_with(out, "post_grad_custom_post_pass", f"{__name__}.a_users_pass", "note")
    line_with(
        out, "pre_grad_custom_pass", f"{__name__}.AUsersPass, {__name__}.a_users_pass", "note"
    )
    line_with(out, "external_matmul", "free", "ok")
    line_with(out, "joint_custom_post_pass", "inductor_ext.doctor.main", "ok")


def test_a_disabled_lowering_names_what_disabled_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("decompose_k", False, "INDUCTOR_EXT_DISABLE")]
    monkeypatch.setattr(registry, "status", lambda: rows)
    assert doctor.main([]) == 0
    line_with(capsys.readouterr().out, "decompose_k", "disabled: INDUCTOR_EXT_DISABLE", "note")


@pytest.mark.parametrize(
    "version, ok",
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.3+cu132", True),
        ("2.16.0", False),
        ("3.0", False),
    ],
)
def test_supported_torch(version: str, ok: bool) -> None:
    assert doctor.supported("torch", version)[0] is ok
    assert compat.supported(version) is ok  # what the import goes by


def test_an_unsupported_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert doctor.main([]) == 1
    line_with(capsys.readouterr().out, "triton", "3.5.1", ">=3.6", "bad")


@pytest.mark.parametrize("card, code", [(True, 1), (False, 0)])
def test_no_compiler_matters_only_where_something_is_launched(
    monkeypatch: pytest.MonkeyPatch, card: bool, code: int
) -> None:
    monkeypatch.setattr(doctor, "has_card", lambda: card)
    monkeypatch.setitem(doctor.SECTIONS, "Card", lambda: [])
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "not found" in doctor.compiler().value
    assert doctor.main([]) == code


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # A file where a folder has to be made: root, too, fails there.
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert doctor.main([]) == 1
    line_with(capsys.readouterr().out, "Inductor's cache", "cannot be written", "bad")


def test_a_plan_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_PLAN", str(tmp_path / "plan.json"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    line_with(out, "INDUCTOR_EXT_PLAN", "plan.json: the plan can't be read", "bad")


def test_a_broken_ptxas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 3, "", "")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert doctor.main([]) == 1
    line_with(capsys.readouterr().out, "ptxas", "exit code 3", "bad")


def test_the_dispatcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == 2
    help_text = capsys.readouterr().out
    for name, command in command_line.COMMANDS.items():
        line_with(help_text, name, command.help)
    with pytest.raises(SystemExit) as exit_of_argparse:
        command_line.main(["nonsense"])
    assert exit_of_argparse.value.code == 2
    assert command_line.main(["doctor"]) == 0


SCRIPT = 'if __name__ == "__main__": pass\n'


def test_bench_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "inductor_ext"
    monkeypatch.setattr(command_line, "__file__", str(package / "__main__.py"))
    assert command_line.bench([]) == 2
    assert "needs a checkout" in capsys.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "scan.py").write_text(SCRIPT)
    (tmp_path / "benchmarks" / "shared.py").touch()
    assert command_line.bench(["nope"]) == 2
    assert "There is no benchmark 'nope'; there are: scan." in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command_line.bench([]) == 2
    assert "needs a CUDA card" in capsys.readouterr().err


def test_bench_runs_each_script_and_names_those_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "inductor_ext" / "__main__.py"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "good.py").write_text(SCRIPT + "open('ran', 'w').close()")
    (tmp_path / "benchmarks" / "bad.py").write_text(SCRIPT + "raise SystemExit(3)")
    (tmp_path / "benchmarks" / "shared.py").write_text("raise SystemExit(4)")
    assert command_line.bench(["good"]) == 0
    assert (tmp_path / "ran").exists()
    assert command_line.bench([]) == 2
    assert "These benchmarks failed: bad." in capsys.readouterr().err
