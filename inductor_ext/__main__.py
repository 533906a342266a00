"""``python -m inductor_ext COMMAND``: one row of ``COMMANDS`` per command."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """``entry`` is "module:function"; it is called with the arguments after the command's name and
    returns an exit status (None counts as 0). It is imported only when the command is given."""

    entry: str
    help: str


COMMANDS = {
    "demo": Command(
        "inductor_ext.demo:main", "compile the MoE-router example, show what it became"
    ),
    "doctor": Command("inductor_ext.doctor:main", "check this machine and this installation"),
    "explain": Command(
        "inductor_ext.explain_cli:main", "what a compile decides and why; JSON, plot"
    ),
    "tune": Command("inductor_ext.tune_cli:main", "measure a program here, write a plan"),
    "plan": Command("inductor_ext.plan_cli:main", "show, check, merge or compare plan files"),
    "bench": Command("inductor_ext.__main__:bench", "run this checkout's benchmarks (on a card)"),
}


def bench(argv: Sequence[str]) -> int:
    """Run the benchmarks of the checkout that this package belongs to, one process each."""
    parser = argparse.ArgumentParser("python -m inductor_ext bench", description=bench.__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run (default: all)")
    wanted = parser.parse_args(argv).names
    root = Path(__file__).resolve().parent.parent
    found = sorted((root / "benchmarks").glob("*.py"))
    scripts = [p.stem for p in found if '__name__ == "__main__"' in p.read_text(encoding="utf-8")]
    if not scripts:
        return _error("bench needs a checkout of the repository: the wheel holds no benchmarks.")
    if unknown := [name for name in wanted if name not in scripts]:
        return _error(f"There is no benchmark {unknown[0]!r}; there are: {', '.join(scripts)}.")
    import torch

    if not torch.cuda.is_available():
        return _error("bench needs a CUDA card, and torch finds none here.")
    failed = []
    for name in wanted or scripts:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=root).returncode:
            failed.append(name)
    return _error(f"These benchmarks failed: {', '.join(failed)}.") if failed else 0


def _error(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    rows = "\n".join(f"  {name:8}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "python -m inductor_ext",
        usage="%(prog)s COMMAND ...",
        epilog=f"commands (each has its own --help):\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        parser.print_help()
        return 2
    args = parser.parse_args(arguments)
    module, function = COMMANDS[args.command].entry.split(":")
    return getattr(importlib.import_module(module), function)(args.arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
