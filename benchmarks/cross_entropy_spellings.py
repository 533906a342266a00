"""Every spelling of ``cross_entropy_variants`` by stock torch.compile and with the plugin.

One command, ``python -m benchmarks.cross_entropy_spellings``. Times are us, median of one call
between two events with the host ahead and a cold L2: "fwd" without a gradient, "both" forward and
backward. It writes CSV, JSON and a table. The numbers' tests are tests/softmax_graph and
tests/gpu/test_fused_loss.py; here the gradient is compared with stock's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks import cross_entropy_cases as cases_of
from benchmarks.cross_entropy import Timer
from benchmarks.cross_entropy_variants import VARIANTS

SHAPES = ((8192, 128256), (8192, 32000))
FIELDS = [
    "spelling", "rows", "columns", "compile_fwd_us", "compile_both_us", "plugin_fwd_us",
    "plugin_both_us", "difference", "fwd_speedup", "both_speedup",
]  # fmt: skip


def _timed(
    name: str, column: str, inputs: list[Any], timer: Timer
) -> tuple[dict[str, float], Callable[[], Any]]:
    import torch

    written = common.own_code(
        VARIANTS[name].fn, f"{''.join(filter(str.isalnum, name))}_{column}_{inputs[0].shape[1]}"
    )
    program = cases_of.compiled(written, column)

    def both() -> Any:
        out = program(*inputs)
        return torch.autograd.grad(out, inputs[0], torch.ones_like(out))[0]

    def forward() -> Any:
        with torch.no_grad():
            return program(*inputs)

    with cases_of.setting(column):
        both(), forward()
        times = {f"{column}_fwd_us": timer(forward), f"{column}_both_us": timer(both)}
    return times, both


def measure(name: str, rows: int, columns: int, timer: Timer) -> dict[str, Any]:
    """A CSV row."""
    import torch

    torch.manual_seed(0)
    inputs = VARIANTS[name].inputs(rows, columns, torch.bfloat16, cases_of.DEVICE)
    inputs[0] = inputs[0].detach().requires_grad_()
    row: dict[str, Any] = {"spelling": name, "rows": rows, "columns": columns}
    stock, stock_gradient = _timed(name, "compile", inputs, timer)
    plugin, plugin_gradient = _timed(name, "plugin", inputs, timer)
    expected = stock_gradient().float()
    expected -= plugin_gradient()
    row |= stock | plugin | {"difference": (expected.norm() / stock_gradient().norm()).item()}
    for kind in ("fwd", "both"):
        row[f"{kind}_speedup"] = row[f"compile_{kind}_us"] / row[f"plugin_{kind}_us"]
    return row


def _rows(
    names: list[str], shapes: list[tuple[int, int]], budget: common.Budget
) -> Iterator[dict[str, Any]]:
    import torch
    from tqdm import tqdm

    timer = Timer(7)
    work = [(name, *shape) for shape in shapes for name in names]
    for case in tqdm(budget.take(work), "spellings", len(work), mininterval=5):
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        yield measure(*case, timer)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--spellings", type=common.names_of(tuple(VARIANTS)), default=list(VARIANTS))
    add("--shape", choices=[f"{n}x{v}" for n, v in SHAPES], help="one of the two sizes")
    add("--shard", type=common.shard, default=(1, 1), metavar="I/N", help="every N-th spelling")
    add("--budget-seconds", type=float, help="stop before this is used up")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", default="cross_entropy_spellings", help="what the files are called")
    args = parser.parse_args()
    shapes = [s for s in SHAPES if args.shape in (None, f"{s[0]}x{s[1]}")]
    first, step = args.shard
    meta = common.metadata("benchmarks.cross_entropy_spellings")
    table = common.CsvFile(args.out / f"{args.name}.csv", FIELDS)
    rows = []
    for row in _rows(args.spellings[first - 1 :: step], shapes, common.Budget(args.budget_seconds)):
        table.write(row)
        rows.append(row)
    table.close()
    common.write_json(args.out / f"{args.name}.json", meta)
    common.print_table("losses as written", FIELDS, [[r[f] for f in FIELDS] for r in rows])


if __name__ == "__main__":
    main()
