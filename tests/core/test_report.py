"""What the plugin says about its decisions: explain, printed reports, logs, collectors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import inductor_ext
from inductor_ext import report
from inductor_ext.testing import compile_for

BF16 = torch.bfloat16
SKINNY = torch.randn(16, 32768, dtype=BF16), torch.randn(32768, 16, dtype=BF16)
WIDE = torch.randn(1024, 1024, dtype=BF16), torch.randn(1024, 1024, dtype=BF16)


def relu_mm(a, b):
    return torch.relu(a @ b)


def decision(name="one", **changes):
    return report.Decision(
        **{
            "lowering": name,
            "fired": True,
            "chosen": "a",
            "reason": "why",
            "sites": "mm",
            **changes,
        }
    )


# --- decisions ------------------------------------------------------------------------------------


def test_a_site_that_fired():
    (found,) = compile_for("h200", relu_mm, *SKINNY).decisions
    assert (found.lowering, found.fired, found.source) == ("decompose_k", True, "heuristic")
    assert found.sites == "mm [16,32768]x[32768,16] bfloat16"
    assert found.chosen in [c.name for c in found.candidates] and found.reason
    assert found.candidates[0].name == "stock"
    assert {(c.us, c.note) for c in found.candidates} == {(None, "not timed")}
    assert found.speedup is None


def test_a_site_that_was_left_alone():
    (found,) = compile_for("h200", relu_mm, *WIDE).decisions
    assert (found.fired, found.chosen, found.source, found.candidates) == (False, "stock", "", ())
    assert "K=1024 is below 4 x max(M, N)=4096" in found.reason


def test_a_forced_site():
    code = compile_for("h200", relu_mm, *SKINNY, force={"decompose_k": "bmm_split32"})
    (found,) = code.decisions
    assert (found.chosen, found.source, found.reason) == (
        "bmm_split32",
        "forced",
        "forced to bmm_split32",
    )
    with pytest.raises(ValueError, match="forced to no_such, which matches none of split"):
        compile_for("h200", relu_mm, *SKINNY, force={"decompose_k": "no_such"})


def test_what_a_candidate_emits_is_not_decided_on_again(monkeypatch):
    from inductor_ext.lowerings import decompose_k

    everything = decompose_k.candidates

    def library_first(problem):
        return sorted(everything(problem), key=lambda c: not c.name.startswith("bmm_split32"))

    monkeypatch.setattr(decompose_k, "candidates", library_first)
    code = compile_for("h200", relu_mm, *SKINNY)
    assert [d.chosen for d in code.decisions] == ["bmm_split32"]
    assert len(code.extern_calls) == 1 and len(code.calls) == 2


@pytest.mark.codegen
def test_every_site_of_a_graph_is_reported():
    code = compile_for("h200", lambda a, b, c, d: (a @ b).sum() + (c @ d).sum(), *SKINNY, *WIDE)
    assert [d.fired for d in code.decisions] == [True, False]


def test_speedup():
    times = report.CandidateTime("stock", 6.0), report.CandidateTime("a", 2.0)
    assert decision(candidates=times).speedup == 3.0
    assert decision(candidates=times[:1]).speedup is None
    assert decision(candidates=times[1:]).speedup is None
    assert decision(chosen="stock", candidates=times).speedup == 1.0


# --- the printed table ----------------------------------------------------------------------------


def printed(decisions) -> str:
    """The text of a printed table, one column after the other and without blanks."""
    text = str(report.Report(tuple(decisions)))
    assert max(map(len, text.splitlines())) <= 120
    rows = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    return "".join("".join(column) for column in zip(*rows, strict=True))


def shows(decisions, *parts: str) -> bool:
    text = "".join(printed(decisions).split())
    return all("".join(part.split()) in text for part in parts)


def test_a_report_fits_120_columns_and_leaves_nothing_out():
    code = compile_for("h200", lambda a, b, c, d: (a @ b, c @ d), *SKINNY, *WIDE)
    for found in code.decisions:
        assert shows(code.decisions, found.lowering, found.sites, found.chosen, found.reason)


def test_long_names_are_folded():
    site = "baddbmm [128,16,1048576]x[128,1048576,16] bfloat16"
    name = "split128_16x16x64_w2_s4_pdl_late_" * 3
    times = report.CandidateTime("stock", 1234.5), report.CandidateTime(name, 617.25)
    reason = "wrong: " + "x" * 150
    found = decision(sites=site, chosen=name, candidates=times, reason=reason)
    assert shows([found], site, name, reason, "1234.50stock", "617.25" + name, "2.00x")


def test_the_table_shows_times_and_notes():
    candidates = (
        report.CandidateTime("stock", 6.04),
        report.CandidateTime("fast", 2.0),
        report.CandidateTime("bad", note="wrong: largest difference 1"),
    )
    text = str(report.Report((decision(chosen="fast", source="measured", candidates=candidates),)))
    assert max(map(len, text.splitlines())) <= 120
    for part in ("mm", "2.00 fast", "6.04 stock", "3.02x", "measured", "wrong: largest", "why"):
        assert part in text
    assert "no site was looked at" in str(report.Report(()))


def test_the_reason_of_a_timed_site_has_room():
    times = (
        report.CandidateTime("stock", 6.0),
        report.CandidateTime("split128_16x16x256_w2_s4_pdl", 2.0),
    )
    reason = "fastest of 12 timed with the 3 fused operations that follow"
    text = str(report.Report((decision(chosen=times[1].name, candidates=times, reason=reason),)))
    assert "3.00x" in text and "speed-up" in text
    assert all(word in text for word in reason.split())


def test_brackets_are_printed_as_they_are():
    """Sizes are in brackets, which rich takes for markup where a letter follows."""
    text = str(report.Report((decision(sites="mm [s0,64]x[64,8]", reason="[/] :art:"),)))
    assert "mm [s0,64]x[64,8]" in text and "[/] :art:" in text


# --- explain --------------------------------------------------------------------------------------


def test_explain_on_a_cpu_says_why_the_site_was_left_alone():
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    found = inductor_ext.explain(relu_mm, a, b)
    (only,) = found.decisions
    assert not only.fired and only.reason == "not on one CUDA device"
    assert shows(found.decisions, only.sites, "stock", "not on one CUDA device")


def test_explain_with_nothing_to_look_at_says_so():
    found = inductor_ext.explain(lambda x: x + 1, torch.randn(4))
    assert found.decisions == () and "no site was looked at" in str(found)
    with inductor_ext.disable():
        assert inductor_ext.explain(relu_mm, torch.randn(8, 16), torch.randn(16, 4)).decisions == ()


def test_explain_decides_anew_each_time():
    args = torch.randn(8, 16), torch.randn(16, 4)
    first = inductor_ext.explain(relu_mm, *args)
    assert first.decisions and inductor_ext.explain(relu_mm, *args) == first
    compiled = torch.compile(relu_mm)
    compiled(*args)
    assert inductor_ext.explain(compiled, *args) == first
    assert inductor_ext.explain(torch.compile(relu_mm, dynamic=True), *args).decisions


def test_explain_takes_modules_and_keywords():
    x = torch.randn(8, 16)
    model = torch.nn.Linear(16, 4)
    (plain,) = inductor_ext.explain(model, x).decisions
    assert plain.sites.startswith("addmm [8,16]x[16,4]")
    (compiled,) = inductor_ext.explain(torch.compile(model), input=x).decisions
    assert compiled == plain
    bound = torch.compile(model).forward
    assert inductor_ext.explain(bound, x).decisions == (plain,)


def test_explain_leaves_torch_as_it_was():
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    def settings():
        return inductor.save_config_portable(), dynamo.save_config(), torch.is_grad_enabled()

    before, collectors = settings(), len(report._collectors)
    model = torch.nn.Linear(16, 4)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    inductor_ext.explain(model, torch.randn(8, 16))
    with pytest.raises(Exception, match=r"same reduction dim|cannot be multiplied"):
        inductor_ext.explain(model, torch.randn(8, 17))
    assert settings() == before and len(report._collectors) == collectors
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_compiled_function_still_runs_after_explain():
    x = torch.randn(8, 16)
    compiled = torch.compile(lambda x: torch.tanh(x) + 1)
    want = compiled(x)
    inductor_ext.explain(compiled, x)
    torch.testing.assert_close(compiled(x), want)


# --- logs -----------------------------------------------------------------------------------------


def test_decisions_are_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "inductor_ext"):
        code = compile_for("h200", lambda a, b, c, d: (a @ b, c @ d), *SKINNY, *WIDE)
    lines = [r.getMessage() for r in caplog.records if r.name == "inductor_ext"]
    fired, left = code.decisions
    assert lines == [
        f"decompose_k {fired.sites}: {fired.chosen} ({fired.reason})",
        f"decompose_k {left.sites}: left to stock ({left.reason})",
    ]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "inductor_ext"):
        compile_for("h200", relu_mm, *SKINNY)
    debug = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert [line.split()[1].rstrip(":") for line in debug if line.startswith("  candidate")] == [
        c.name for c in fired.candidates
    ]


@pytest.mark.codegen
def test_torch_logs(tmp_path: Path):
    """A process of its own: torch reads TORCH_LOGS when it is imported."""
    script = """
import torch, inductor_ext
from inductor_ext.testing import compile_for
bf16 = torch.bfloat16
skinny = torch.randn(16, 32768, dtype=bf16), torch.randn(32768, 16, dtype=bf16)
wide = torch.randn(1024, 1024, dtype=bf16), torch.randn(1024, 1024, dtype=bf16)
compile_for("h200", lambda a, b, c, d: (a @ b, c @ d), *skinny, *wide)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_LOGS": "+inductor_ext", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ours = [
        line
        for line in done.stderr.splitlines()
        if "[inductor_ext]" in line or "decompose_k" in line
    ]
    text = "\n".join(ours)
    assert "decompose_k mm [16,32768]x[32768,16] bfloat16: split" in text, done.stderr
    assert "decompose_k mm [1024,1024]x[1024,1024] bfloat16: left to stock (K=1024 is" in text
    assert "candidate stock: not timed" in done.stderr


# --- collectors -----------------------------------------------------------------------------------


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_collector_sees_every_thread_while_it_is_open():
    with report.collect() as outer:
        report.record(decision("here"))
        with report.collect() as inner:
            in_thread(lambda: report.record(decision("there")))
        report.record(decision("after"))
    report.record(decision("nobody listens"))
    assert [d.lowering for d in outer] == ["here", "there", "after"]
    assert [d.lowering for d in inner] == ["there"]


def test_a_collector_is_closed_by_an_exception():
    with pytest.raises(KeyError), report.collect() as found:
        raise KeyError
    report.record(decision())
    assert found == []


def test_many_threads_record_at_once():
    with report.collect() as found:
        threads = [
            threading.Thread(
                target=lambda n=n: [report.record(decision(str(n))) for _ in range(200)]
            )
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 1600
    assert {sum(d.lowering == str(n) for d in found) for n in range(8)} == {200}


def test_muting_concerns_one_thread():
    with report.collect() as found:
        with report.muted():
            with report.muted():
                report.record(decision("twice"))
            report.record(decision("muted"))
            in_thread(lambda: report.record(decision("other thread")))
        report.record(decision("later"))
    assert [d.lowering for d in found] == ["other thread", "later"]


def test_two_compiles_at_once_are_told_apart_by_nothing_but_their_sites():
    """A collector is process-wide: compile_for holds a lock, so each code has its own decisions."""
    codes = {}

    def work(n):
        args = torch.randn(16, n, dtype=BF16), torch.randn(n, 16, dtype=BF16)
        codes[n] = compile_for("h200", relu_mm, *args)

    threads = [threading.Thread(target=work, args=(n,)) for n in (8192, 16384)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, code in codes.items():
        assert [d.sites for d in code.decisions] == [f"mm [16,{n}]x[{n},16] bfloat16"]
