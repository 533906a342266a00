"""Generated code as text that is worth comparing with a file.

``outline`` says what a program does in a few lines: its library calls and kernels in order, what
each kernel fuses and how often it loads and stores. That is what goldens hold: whole kernels differ
between torch versions for no reason of ours. ``normalise`` is for the rare test that needs the
text.

A golden is made with torch 2.13. Where another version's text differs, that version has
its own file beside it. ``make goldens`` (``EXPECTTEST_ACCEPT=1``) writes them.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from pathlib import Path

import torch

from inductor_ext.testing.generated import GeneratedCode, calls_of, kernels_of

GOLDEN_TORCH = "2.13"

_ACCESSES = {"loads": r"\btl\.load\(", "stores": r"\btl\.store\(", "atomics": r"\btl\.atomic_\w+\("}


def outline(code: GeneratedCode) -> str:
    """What the generated programs do, a line per kernel launch or library call.

    ``inference`` (or ``forward``, ``backward``) heads each graph. A kernel's line gives its kind,
    the operators it was made from and how many loads and stores its text has (not for templates and
    kernels that were written by hand: their text is theirs).
    """
    lines: list[str] = []
    for source, graph_kind in zip(code.graphs, code.graph_kinds, strict=True):
        lines.append(graph_kind)
        kernels = {kernel.name: kernel for kernel in kernels_of(source)}
        fused = _fused_ops(source)
        for call in calls_of(source):
            kernel = kernels.get(call)
            if kernel is None:
                lines.append(f"  {call}")
                continue
            parts = [f"  [{kernel.kind}] {', '.join(fused.get(call, ())) or call}"]
            if kernel.kind not in ("template", "user"):
                counts = {n: len(re.findall(p, kernel.source)) for n, p in _ACCESSES.items()}
                parts += [f"{n}={c}" for n, c in counts.items() if c or n != "atomics"]
            lines.append(" ".join(parts))
    return "\n".join(lines) + "\n"


def _fused_ops(source: str) -> dict[str, list[str]]:
    """Operator names behind each kernel, from the comment above its definition."""
    found = {}
    ops: list[str] = []
    for line in source.splitlines():
        comment = re.match(r"# .*Original ATen: \[(.*?)\]", line)
        if comment:
            names = comment.group(1).split(",")
            ops = sorted({n.strip().split(".")[-1] for n in names if n.strip()})
        definition = re.match(r"(\w+) = async_compile\.", line)
        if definition:
            found[definition.group(1)], ops = ops, []
    return found


_DROPPED = re.compile(
    r"^\s*(del \w+|raw_stream\d+ = .*|assert_alignment\(.*|assert_size_stride\(.*|"
    r"\w+ = copy_if_misaligned\(.*|#.*|torch\.cuda\.set_device\(.*|filename=.*|import .*|from .*|"
    r"inductor_meta=.*|triton_meta=.*)$"
)
# Imports and aliases; what surrounds ``call``; the benchmark at the end.
_BOILERPLATE = (
    r"\A.*?^async_compile = AsyncCompile\(\)$",
    r"^empty_strided_p2p = [^\n]*$",
    r"^async_compile\.wait.*?(?=^ *def call)",
    r"^(runner = Runner|def get_args|def benchmark_compiled).*\Z",
)
_NUMBERED = re.compile(
    r"\b(buf|tmp|arg|primals_|tangents_|getitem_|permute_|s|u|ks|workspace_)(\d+)(_1)?\b"
)


def normalise(code_text: str) -> str:
    """Generated text without what says nothing: paths, hashes, device facts, checks, deletions.

    Buffers, arguments, temporaries and size symbols are numbered anew in order of appearance.
    """
    text = re.sub(r"\A.*?^async_compile = AsyncCompile\(\)$", "", code_text, flags=re.M | re.S)
    text = re.sub(r"^empty_strided_p2p = .*?(?=^\w+ = async_compile)", "", text, flags=re.M | re.S)
    text = re.sub(
        r"^async_compile\.wait.*?(?=^    def call|^def call)", "", text, flags=re.M | re.S
    )
    text = re.sub(
        r"^(runner = Runner|def get_args|def benchmark_compiled).*\Z", "", text, flags=re.M | re.S
    )
    lines = [line.split("  # ")[0].rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line and not _DROPPED.match(line)]
    numbers: dict[str, dict[str, int]] = {}

    def renumber(name: re.Match[str]) -> str:
        kind = numbers.setdefault(name.group(1), {})
        return f"{name.group(1)}{kind.setdefault(name.group(2), len(kind))}"

    return _NUMBERED.sub(renumber, "\n".join(lines)) + "\n"


def assert_golden(name: str, text: str, directory: str | Path | None = None) -> None:
    """Compare ``text`` with ``<directory>/<name>.txt``, by default ``goldens/`` beside the caller.

    With ``EXPECTTEST_ACCEPT=1`` the file is written instead. Raises AssertionError with a unified
    diff when they differ or when there is no file.
    """
    folder = Path(directory) if directory is not None else _caller_folder() / "goldens"
    version = ".".join(torch.__version__.split(".")[:2])
    shared = folder / f"{name}.txt"
    own = folder / f"{name}.torch-{version}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        folder.mkdir(parents=True, exist_ok=True)
        if version == GOLDEN_TORCH or not shared.exists():
            shared.write_text(text)
        elif shared.read_text() != text:
            own.write_text(text)
        else:
            own.unlink(missing_ok=True)
        return
    golden = own if own.exists() else shared
    if not golden.exists():
        raise AssertionError(f"expected a golden file {shared.name}, got none: run `make goldens`")
    expected = golden.read_text()
    if expected != text:
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), golden.name, "generated now", lineterm=""
        )
        raise AssertionError(
            "generated code differs from its golden; if that is meant, run `make goldens`\n"
            + "\n".join(diff)
        )


def _caller_folder() -> Path:
    here = Path(__file__)
    return next(Path(f.filename).parent for f in inspect.stack() if Path(f.filename) != here)
