"""The artifact ``inductor_ext_decisions`` in torch's structured trace."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_ext import report

SCRIPT = """
import torch, inductor_ext
from inductor_ext import report
from inductor_ext.testing import compile_for
bf16 = torch.bfloat16
skinny = torch.randn(16, 32768, dtype=bf16), torch.randn(32768, 16, dtype=bf16)
wide = torch.randn(1024, 1024, dtype=bf16), torch.randn(1024, 1024, dtype=bf16)
found = []

def compiled(fn, *args, **options):
    code = compile_for("h200", fn, *args, **options)
    found.append([report.as_row(d) for d in code.decisions])
    return code

compiled(lambda a, b, c, d: (a @ b, c @ d), *skinny, *wide)
compiled(lambda a: a + 1, wide[0])
dynamic = {0: {0: (2, 4096)}}
assert len(compiled(lambda a, b: torch.relu(a @ b), *skinny, dynamic=dynamic).decisions) == 1
layer = torch.nn.Linear(32768, 16, dtype=bf16)
compiled(layer, skinny[0].clone().requires_grad_(), grad=True)
import json; print(json.dumps(found))
"""


def artifacts(folder: Path) -> list[tuple[dict, str]]:
    """(metadata, payload) of every artifact of ours: a line of JSON, then lines behind a tab."""
    found = []
    for path in folder.iterdir():
        records = re.split(r"\n(?!\t)", path.read_text())
        for record in records:
            head, _, payload = record.partition("\n")
            metadata = json.loads(head[head.index("{") :]) if "{" in head else {}
            if metadata.get("artifact", {}).get("name") == report.ARTIFACT:
                found.append((metadata, payload.replace("\n\t", "\n").removeprefix("\t")))
    return found


def traced(script: str, folder: Path, tmp_path: Path) -> list:
    """The script's result, from a process of its own: torch reads TORCH_TRACE at import."""
    folder.mkdir()
    env = {"TORCH_TRACE": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.codegen
def test_each_compile_leaves_its_decisions(tmp_path):
    folder = tmp_path / "trace"
    decisions = traced(SCRIPT, folder, tmp_path)
    found = artifacts(folder)
    assert report.ARTIFACT == "inductor_ext_decisions"
    assert all(m["artifact"]["encoding"] == "json" for m, _ in found)
    assert all("frame_id" in m for m, _ in found)  # tlparse sorts by it
    two, none, ranges, training = decisions
    assert none == [] and len(two) == 2 and ranges[0]["ranges"] and len(training) == 3
    rows = [json.loads(payload) for _, payload in found]
    # One artifact per graph: a forward and its backward are two.
    assert rows[:2] == [two, ranges]
    assert [row for part in rows[2:] for row in part] == training
    assert len(rows) == 4 and all(len(p.splitlines()) == len(r) + 2 for (_, p), r in zip(
        found, rows, strict=True))  # fmt: skip


def test_a_decision_outside_a_graph_and_no_listener(tmp_path):
    script = """
from torch._logging._internal import trace_log
from inductor_ext import report
report.record(report.Decision("one", False, "stock", "why", "mm"))
with report.muted():
    report.record(report.Decision("muted", False, "stock", "why", "mm"))
trace_log.handlers.clear()
report.record(report.Decision("two", False, "stock", object(), "mm"))  # is not written, so no error
print("[]")
"""
    folder = tmp_path / "trace"
    traced(script, folder, tmp_path)
    ((_, payload),) = artifacts(folder)
    assert [d["lowering"] for d in json.loads(payload)] == ["one"]
