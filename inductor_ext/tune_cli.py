"""``python -m inductor_ext tune TARGET``: measure a program on this card, write a plan.

Exit codes: 0; 1 where tuning was interrupted; 2 for bad input, with one sentence on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from . import measure, plan_cli, target, tuning
from .plan import PlanError


def _dim(text: str) -> tuple[str, tuple[int, int]]:
    """Parse NAME=LO:HI, for argparse; ``tune`` judges the bounds."""
    match = re.fullmatch(r"([^=]+)=(\d+):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected NAME=LO:HI like tokens=1:8192, got {text!r}")
    return match[1], (int(match[2]), int(match[3]))


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _gib(text: str) -> int:
    try:
        size = float(text) * 2**30
    except ValueError:
        size = 0.0
    if not 0 < size < 2**60:
        raise argparse.ArgumentTypeError(f"expected a positive number of GiB, got {text!r}")
    return int(size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m inductor_ext tune",
        description="Measure on this card which candidate is fastest at which sizes; write a plan.",
        epilog=target.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="what to tune, see below")
    add(
        "--dims",
        type=_dim,
        action="append",
        required=True,
        metavar="NAME=LO:HI",
        help="a size to vary: x.0 is dimension 0 of argument x, a name without a dot the one "
        "marked dimension; again for another size",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="where the plan goes (JSON)")
    add("--max-ranges", type=_positive, default=8, metavar="N", help="of one site (default: 8)")
    add(
        "--max-memory",
        type=_gib,
        metavar="GIB",
        help="refuse what needs more (default: 80%% of what is free)",
    )
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str]) -> int:
    """Tune a target and write the plan."""
    parser = _parser()
    args = parser.parse_args(argv)
    dims = dict(args.dims)
    if len(dims) < len(args.dims):
        parser.error("expected each --dims once")
    try:
        # What would fail at the end of a long measurement fails now.
        if not args.out.absolute().parent.is_dir() or args.out.is_dir():
            raise PlanError(f"{args.out}: the plan can't be written (no such folder, or a folder).")
        measure.require_cuda()
        fn, arguments = target.load(args.target)
    except (PlanError, RuntimeError, target.TargetError) as error:
        print(error, file=sys.stderr)
        return 2
    tally = tuning.Tally()
    try:
        plan = tuning.tune(
            fn,
            *arguments,
            dims=dims,
            progress=not args.quiet,
            max_ranges=args.max_ranges,
            max_memory=args.max_memory,
            _tally=tally,
        )
    except KeyboardInterrupt:
        print(f"interrupted: {args.out} is not written.", file=sys.stderr)
        return 1
    except (ValueError, MemoryError) as error:  # one sentence each
        print(str(error).rstrip(".") + ".", file=sys.stderr)
        return 2
    except Exception as error:
        print(target.describe_failure(error, f"tuning {args.target}"), file=sys.stderr)
        return 2
    command = f"python -m inductor_ext tune {shlex.join(argv)}"
    plan = dataclasses.replace(plan, command=command)
    try:
        plan.save(args.out)
    except OSError as error:
        print(f"{args.out}: the plan can't be written ({error.strerror}).", file=sys.stderr)
        return 2
    print(f"{args.out}: {plan_cli.headline(plan)}")
    print(f"In force with INDUCTOR_EXT_PLAN={args.out} or inductor_ext.load_plan.")
    print(f"Tuning {tally}.")
    return 0
