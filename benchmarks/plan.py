"""The plan that is shipped for a card: every target below tuned on it, merged and saved.

One command, ``python -m benchmarks.plan --out inductor_ext/plans/h200.json``. The file is written
after every target, so that a run cut short leaves a valid plan; the targets of an earlier run can
be completed with ``--skip N``, or with ``--merge``, which goes on with the file.

Targets are the operations that models contain with these sizes, over the tokens in flight: scores
of mixture-of-experts routers and projections of manifold-constrained hyper-connections; and in
``plan_launches`` what the package's own operations launch. ``--prewarm N`` first compiles the
kernels of all in N processes, side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.plan_launches import LAUNCHES, Program

DEVICE = "cuda"
TOKENS = (1, 16384)
TRACED_AT = 64


@dataclasses.dataclass(frozen=True)
class Target:
    """A Linear without bias, [T,k] x [n,k] -> [T,n], and what follows it."""

    name: str
    k: int
    n: int
    score: str = "sigmoid"  # a router's scores and its bias in fp32; "" for fp32 results
    dtype: str = "bfloat16"
    tokens: tuple[int, int] = TOKENS
    parts = 1

    def program(self) -> Program:
        import torch

        dtype = getattr(torch, self.dtype)
        x = torch.randn(TRACED_AT, self.k, device=DEVICE) * self.k**-0.5
        w = torch.randn(self.n, self.k, device=DEVICE)
        bias = torch.randn(self.n, device=DEVICE) * 0.01

        def sigmoid(x: Any, w: Any, bias: Any) -> Any:
            return (x @ w.t()).float().sigmoid() + bias

        def softmax(x: Any, w: Any, bias: Any) -> Any:
            return (x @ w.t()).float().softmax(-1) + bias

        def projection(x: Any, w: Any, bias: Any) -> Any:
            return (x @ w.t()).float()

        fn = {"sigmoid": sigmoid, "softmax": softmax, "": projection}[self.score]
        return fn, (x.to(dtype), w.to(dtype), bias), {"x.0": self.tokens}


TARGETS = (
    Target("router of 256 experts, hidden 7168", 7168, 256),
    Target("mHC projection, 4 streams of 7168", 28672, 24, score=""),
    Target("router of 384 experts, hidden 7168", 7168, 384),
    Target("router of 128 experts, hidden 4096", 4096, 128),
    Target("mHC projection, 4 streams of 4096", 16384, 24, score=""),
    Target(
        "softmax router of 256 experts, hidden 7168", 7168, 256, score="softmax", tokens=(1, 256)
    ),
    Target("router of 16 experts, hidden 5120", 5120, 16),
    Target("router of 128 experts, hidden 2880", 2880, 128),
    Target("router of 8 experts, hidden 4096", 4096, 8),
    Target("router of 32 experts, hidden 2880", 2880, 32),
    Target("router of 128 experts, hidden 2048", 2048, 128),
    *LAUNCHES,
)


def _prewarm(name: str, part: int, parts: int) -> None:
    """Run candidates of a target once: their kernels are in Triton's cache then. Of its launches
    every ``parts``-th candidate."""
    from inductor_ext.templates import tilings

    import inductor_ext
    from inductor_ext import measure

    # In a process of its own.
    def untimed(candidates: Any, inputs: Any, **_: Any) -> dict[str, measure.Timing]:
        return {name: measure.Timing(1.0, 0.0, 1) for name in candidates}

    every = tilings.Tunable.candidates

    def some(launch: Any, facts: Any, given: Any) -> dict[str, Any]:
        ruled, *others = every(launch, facts, given).items()
        return dict([ruled, *others[part::parts]])

    measure.compare = untimed  # type: ignore[assignment]
    tilings.Tunable.candidates = some  # type: ignore[method-assign]
    target = next(t for t in TARGETS if t.name == name)
    fn, inputs, dims = target.program()
    inductor_ext.tune(fn, *inputs, dims=dims, progress=False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "benchmarks.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    default = Path(__file__).parent / "results" / "plan.json"
    add("--out", type=Path, default=default, metavar="FILE", help="where the plan goes (JSON)")
    add("--merge", action="store_true", help="keep what the file has and these don't cover anew")
    add("--only", metavar="TEXT", help="targets whose name has this regular expression in it")
    add("--prewarm", type=int, default=0, metavar="N", help="compile first, in N processes")
    add("--prewarm-only", action="store_true", help="stop then")
    add("--skip", type=int, default=0, metavar="N", help="leave out the first N targets")
    add("--budget-seconds", type=float, help="start no target after this is used up")
    add("--list", action="store_true", help="print the targets in their order and stop")
    args = parser.parse_args()
    targets = [t for t in TARGETS[args.skip :] if re.search(args.only or "", t.name)]
    if args.list:
        for target in targets:
            print(target.name)
        return

    import inductor_ext
    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as error:
        sys.exit(str(error))
    if args.prewarm:
        tasks = [(t.name, i, t.parts) for t in reversed(targets) for i in range(t.parts)]
        common.run_in_pool(_prewarm, tasks, args.prewarm, args.budget_seconds)
    if args.prewarm_only:
        return
    failed: list[str] = []
    only = f"--only {shlex.quote(args.only)} " if args.only else ""
    command = f"python -m benchmarks.plan {only}--out {args.out.name}"
    plan = inductor_ext.Plan.load(args.out) if args.merge and args.out.exists() else None
    if plan is not None:  # it says what made all that it holds
        command = " ; ".join(dict.fromkeys([*plan.command.split(" ; "), command]))
    for target in common.Budget(args.budget_seconds).take(targets):
        print(target.name, file=sys.stderr)
        fn, inputs, dims = target.program()
        start = time.monotonic()
        try:
            tuned = inductor_ext.tune(fn, *inputs, dims=dims, progress=False)
        except Exception as error:  # the others are tuned all the same
            failed.append(f"{target.name}: {measure.one_line(error)}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        seconds = time.monotonic() - start
        print(f"{len(tuned.entries)} entries in {seconds:.1f} s", file=sys.stderr, flush=True)
        plan = tuned if plan is None else plan.merge(tuned)
        plan = dataclasses.replace(plan, command=command)
        plan.save(args.out)
    if plan is not None:
        print(f"{args.out}: {len(plan.entries)} entries")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
