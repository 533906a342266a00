"""Fresh processes for the tests: torch is imported once, every test script runs in a fork of that.

A process of its own for each script would spend most of its time importing torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what is beside the tests is found

# Reads one JSON line per script, forks, and answers with one JSON line. Neither inductor_ext nor a
# compile has run in the parent, so a fork is what a new process is, torch's import aside.
_PARENT = """
import json, os, sys, traceback
import torch, torch._dynamo, torch._inductor.compile_fx, torch._inductor.lowering

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(job["env"])
        sys.path[:0] = job["path"]
        try:
            exec(compile(job["script"], "<script>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(status), file=answers, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """What a script printed (both streams), and the JSON value on its last line, if it is one."""

    status: int
    output: str

    @property
    def result(self) -> Any:
        assert self.status == 0, self.output
        return json.loads(self.output.splitlines()[-1])


def _environment(cache: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("INDUCTOR_EXT_", "TORCH_"))}
    return {
        **env,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def _parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path_factory.mktemp("inductor")),
        cwd=tmp_path_factory.mktemp("cwd"),
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def fresh(_parent: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Done]:
    """``fresh(script, env=, path=)`` runs a script in a process that has not seen inductor_ext.

    torch is imported. Inductor's caches are in the test's own folder, shared by its scripts.
    """
    assert _parent.stdin is not None and _parent.stdout is not None

    def run(script: str, env: dict[str, str] | None = None, path: tuple[Path, ...] = ()) -> Done:
        output = tmp_path / "output.txt"
        job = {
            "script": textwrap.dedent(script),
            "env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), **(env or {})},
            "path": [str(p) for p in path],
            "output": str(output),
        }
        _parent.stdin.write(json.dumps(job) + "\n")
        _parent.stdin.flush()
        answer = _parent.stdout.readline()
        assert answer, "the parent process died"
        return Done(int(answer), output.read_text())

    return run
