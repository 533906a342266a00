"""Decode and attention over lists of entries: time and GB/s, side by side.

One command, ``python -m benchmarks.attention_decode --out DIR``. Every column's result is compared
with fp64 on two heads, then timed by graph replay with cold L2. It writes CSV, JSON and a table.

Columns
  ours      the kernels of inductor_ext (templates/attention_decode.py, sparse_attention.py)
  sdpa      scaled_dot_product_attention of torch, with grouped heads (dense KV of one length only);
            over lists: entries gathered by torch, then products and a softmax
  flex      FlexAttention, compiled (dense KV of one length only)

``gbs`` counts the keys and values that are kept, the queries and the result, each once; ``percent``
is that at this card's copy speed, over the time. ``--tilings`` instead times the kernels at launch
parameters around the chosen ones. ``--prewarm N`` compiles in N processes first. A kernel that
faults takes the process's context with it: the rest is measured in another, which is what
``--resume`` is for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import common

COLUMNS = ("ours", "sdpa", "flex")
FIELDS = ["case", "column", "tiling", "us", "gbs", "percent", "error", "check", "failure"]
LARGEST_ERROR = 8e-3  # relative, by the norm, of a result in bf16 against fp64


@dataclasses.dataclass(frozen=True)
class Case:
    """``keys`` of a sequence, or with ``ragged`` the longest of lengths drawn evenly; pages of
    ``page`` keys, 0 for none; the last ``window`` keys, 0 for all. With ``listed`` that many
    entries of ``keys`` are on each of ``batch`` tokens' lists, D = 576, 16 heads."""

    name: str
    batch: int
    keys: int
    kv_heads: int = 8
    group: int = 8
    rows: int = 1
    dim: int = 128
    page: int = 0
    ragged: bool = False
    window: int = 0
    listed: int = 0

    @property
    def plain(self) -> bool:
        return not (self.page or self.ragged or self.window or self.rows > 1)


# The most telling first.
CASES = (
    Case("b1-16k", 1, 16384),
    Case("b16-8k", 16, 8192),
    Case("list-8x2048", 8, 65536, listed=2048),
    Case("b64-2k", 64, 2048),
    Case("b16-8k-page64", 16, 8192, page=64),
    Case("b1-128k", 1, 131072),
    Case("b64-16k-ragged-page64", 64, 16384, page=64, ragged=True),
    Case("b64-16k-window1k", 64, 16384, window=1024),
    Case("b16-8k-page16", 16, 8192, page=16),
    Case("b16-8k-rows4", 16, 8192, rows=4),
    Case("b16-8k-d64", 16, 8192, dim=64),
    Case("b16-8k-d256", 16, 8192, dim=256),
    Case("b64-16k-ragged", 64, 16384, ragged=True),
    Case("b1-32k", 1, 32768),
    Case("b1-2k", 1, 2048),
    Case("b16-2k", 16, 2048),
    Case("b16-32k", 16, 32768),
    Case("b64-8k", 64, 8192),
    Case("b64-8k-page256", 64, 8192, page=256),
    Case("b64-32k", 64, 32768),
    Case("b16-8k-ungrouped", 16, 8192, group=1),
    Case("b16-8k-group16", 16, 8192, kv_heads=4, group=16),
    Case("b16-8k-d96", 16, 8192, dim=96),
    Case("list-1x2048", 1, 65536, listed=2048),
    Case("list-64x2048", 64, 65536, listed=2048),
    Case("list-1024x2048", 1024, 65536, listed=2048),
    Case("b16-128k", 16, 131072),
)
TILED = (
    "b1-16k", "b16-8k", "b16-8k-page64", "b64-2k", "list-8x2048", "b16-8k-d64", "b16-8k-rows4",
    "b16-8k-d256",
)  # fmt: skip
# block, warps, stages, keys first, programs of a multiprocessor, blocks of a program at least
TILINGS = (
    (64, 4, 3, True, 2, 4), (64, 4, 4, True, 1, 4), (64, 4, 3, True, 2, 8), (128, 8, 3, True, 1, 2),
    (32, 4, 4, True, 3, 8), (64, 4, 3, False, 2, 4), (32, 4, 4, False, 2, 8),
    (32, 4, 4, False, 3, 8), (64, 4, 4, True, 2, 4), (64, 4, 4, True, 3, 4),
)  # fmt: skip
# block, heads, warps, stages, parts of a list
LIST_TILINGS = (
    (32, 16, 4, 3, 16), (32, 16, 4, 4, 16), (32, 16, 4, 2, 16), (64, 16, 4, 2, 16),
    (64, 16, 8, 2, 16), (32, 16, 4, 3, 32), (32, 16, 4, 2, 32), (64, 16, 4, 2, 32),
)  # fmt: skip


def draw(case: Case, device: str = "cuda") -> dict[str, Any]:
    """Tensors by name: q, k, v and what else the case has; or q, kv and indices."""
    import torch

    def normal(*sizes: int) -> Any:
        return torch.empty(sizes, device=device, dtype=torch.bfloat16).normal_()

    if case.listed:
        lists = torch.empty(1, case.batch, case.listed, device=device, dtype=torch.int32)
        lists.random_(0, case.keys)
        return {
            "q": normal(1, case.batch, 16, 576), "kv": normal(1, case.keys, 576), "indices": lists
        }  # fmt: skip
    found = {"q": normal(case.batch, case.kv_heads * case.group, case.rows, case.dim)}
    if case.ragged or case.page:
        lengths = torch.full((case.batch,), case.keys, device=device, dtype=torch.int32)
        if case.ragged:
            lengths.random_(1, case.keys + 1)
        found["lengths"] = lengths
    if case.page:
        pages = case.batch * case.keys // case.page
        shape: tuple[int, ...] = (pages, case.page, case.kv_heads, case.dim)
        table = torch.empty(case.batch, pages // case.batch, device=device, dtype=torch.int32)
        if device != "meta":
            table.copy_(torch.randperm(pages, device=device).view_as(table))
        found["block_table"] = table
    else:
        shape = case.batch, case.kv_heads, case.keys, case.dim
    return found | {"k": normal(*shape), "v": normal(*shape)}


def score(case: Case) -> Any:
    """The program: every key, or those that a row sees, in the window, at the end."""
    from inductor_ext.templates.attention_program import Program, Span

    scale, last = case.dim**-0.5, "q + columns - rows"
    if case.window:
        low, high = f"q0 + columns - rows - {case.window - 1}", "q1 + columns - rows + 1"
        keep = f"keep = (k <= {last}) & (k > {last} - {case.window})"
        return Program(scale=scale, keep=keep, row_spans=(Span(low, high, "0", "0"),))
    if case.rows > 1:
        span = Span("0", "q1 + columns - rows + 1", "0", "0")
        return Program(scale=scale, keep=f"keep = k <= {last}", row_spans=(span,))
    return Program(scale=scale)


def ours(case: Case, tiling: tuple | None = None) -> Callable[..., Any]:
    """(out, lse) of ``draw``'s tensors, in its order, by the kernels."""
    from inductor_ext.templates import attention_decode_launch, sparse_attention_launch

    if case.listed:
        made: Any = None if tiling is None else sparse_attention_launch.Tiling(*tiling)
        return lambda q, kv, indices: sparse_attention_launch.attend(
            q, kv, indices, (128 + 64) ** -0.5, 512, "ieee", made
        )
    program = score(case)
    names = [n for n in ("q", "lengths", "block_table", "k", "v") if _has(case, n)]
    made = None if tiling is None else attention_decode_launch.Tiling(*tiling)

    def call(*tensors: Any) -> Any:
        given = dict(zip(names, tensors, strict=True))
        three = (given.pop(n) for n in "qkv")
        return attention_decode_launch.decode(*three, [], [], program, "ieee", chosen=made, **given)

    return call


def _has(case: Case, name: str) -> bool:
    if name == "lengths":
        return case.ragged or case.page > 0
    return name != "block_table" or case.page > 0


def peer(case: Case, column: str) -> Callable[..., Any] | None:
    """Another column's function of ``draw``'s tensors; None where it has none."""
    import torch

    if case.listed:
        return by_gather if column == "sdpa" else None
    if not case.plain:
        return None
    if column == "sdpa":
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: attention(q, k, v, enable_gqa=case.group > 1)
    from torch.nn.attention.flex_attention import flex_attention

    def flex(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, enable_gqa=case.group > 1)

    return torch.compile(common.own_code(flex, "flex"), dynamic=False)


def by_gather(q: Any, kv: Any, indices: Any) -> Any:
    """Over lists, by torch functions."""
    entries = kv[0][indices[0]]
    scores = q[0] @ entries.transpose(-1, -2) * (128 + 64) ** -0.5
    return (scores.float().softmax(-1).to(q.dtype) @ entries[..., :512])[None]


def moved(case: Case, tensors: dict[str, Any]) -> float:
    """Bytes that have to be read and written."""
    if case.listed:
        return case.batch * (case.listed * (576 * 2 + 4) + 16 * (576 + 512) * 2)
    lengths = tensors.get("lengths")
    keys = case.batch * case.keys if lengths is None else int(lengths.sum())
    if case.window:
        keys = case.batch * (case.window + case.rows - 1)
    queries = case.batch * case.group * case.rows * case.kv_heads
    return 2 * case.dim * (2 * keys * case.kv_heads + 2 * queries)


def copies(case: Case, tensors: dict[str, Any]) -> Any:
    """Sets of inputs, of which what is read exceeds the L2: of a cache, what a list names or a
    window keeps."""
    import torch

    from inductor_ext import measure

    stored = sum(t.nbytes for t in tensors.values())
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return measure.rotate(tuple(tensors.values()), int(l2 * stored / moved(case, tensors)))


def error(case: Case, out: Any, t: dict[str, Any]) -> float:
    """The largest relative error of the norm, of the first head of the first sequence and the last
    of the last (of tokens' lists: the first and the last)."""
    import torch

    worst = 0.0
    for b in (0, case.batch - 1):
        if case.listed:
            entries = t["kv"][0][t["indices"][0, b].long()].double()
            p = (t["q"][0, b].double() @ entries.T * (128 + 64) ** -0.5).softmax(-1)
            right, mine = p @ entries[:, :512], out[0, b]
        else:
            head = 0 if b == 0 else case.kv_heads - 1
            n = case.keys if "lengths" not in t else int(t["lengths"][b])
            some = slice(head * case.group, (head + 1) * case.group)
            if case.page:
                at = t["block_table"][b].long()
                k, v = (t[x][at, :, head].flatten(0, 1)[:n].double() for x in "kv")
            else:
                k, v = (t[x][b, head, :n].double() for x in "kv")
            s = t["q"][b, some].double() @ k.T * case.dim**-0.5
            distance = (
                torch.arange(case.rows, device=s.device)[:, None] + n - case.rows
            ) - torch.arange(n, device=s.device)
            kept = distance >= 0 if case.rows > 1 or case.window else distance == distance
            if case.window:
                kept &= distance < case.window
            right, mine = s.masked_fill(~kept, -math.inf).softmax(-1) @ v, out[b, some]
        worst = max(worst, ((mine.double() - right).norm() / right.norm()).item())
    return worst


def measure_column(
    case: Case, column: str, tensors: dict[str, Any], sets: Any, timer: Any, tiling: Any = None
) -> dict[str, Any] | None:
    """A CSV row; None where the column has no such program."""
    import torch

    from inductor_ext import compat_launch, measure

    fn = ours(case, tiling) if column == "ours" else peer(case, column)
    if fn is None:
        return None
    row: dict[str, Any] = {"case": case.name, "column": column}
    row["tiling"] = "" if tiling is None else "-".join(map(str, map(int, tiling)))
    try:
        with torch.no_grad(), compat_launch.direct_launches():
            out = fn(*sets[0])
            out = out[0] if isinstance(out, tuple) else out
            row["error"] = error(case, out, tensors)
            row["check"] = "ok" if row["error"] <= LARGEST_ERROR else "wrong"
            us = timer(fn, sets)
        nbytes = moved(case, tensors)
        row |= {"us": us, "gbs": nbytes / us * 1e-3}
        row["percent"] = 100 * measure.copy_floor_us(nbytes) / us
    except Exception as failure:
        row["failure"] = measure.one_line(failure)
    return row


# --- compiling ahead ------------------------------------------------------------------------------


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Launches compile, for tensors that are not there, what they would run."""
    from inductor_ext.templates import attention_decode_launch, sparse_attention_launch

    def compiled(kernel: Any, wrapped: Any, x: Any, grid: Any) -> Callable[..., Any]:
        return lambda *args, **more: kernel.warmup(
            *args, grid=grid, PDL=True, launch_pdl=True, **more
        )

    modules = attention_decode_launch, sparse_attention_launch
    before = [m.launched for m in modules]
    for m in modules:
        m.launched = compiled
    try:
        yield
    finally:
        for m, function in zip(modules, before, strict=True):
            m.launched = function


def warm(name: str, tiling: tuple | None) -> None:
    """Compile a case's kernels, in a process of its own."""
    from inductor_ext import compat_launch

    case = next(c for c in CASES if c.name == name)
    tensors = draw(case, "meta")
    with compiling_only(), compat_launch.direct_launches():
        ours(case, tiling)(*tensors.values())


# --- command line ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.attention_decode", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    names = [c.name for c in CASES]
    add = parser.add_argument
    add("--cases", type=common.names_of(names), help="comma-separated; all, or the tiled ones")
    add(
        "--columns", type=common.names_of(COLUMNS), default=["ours", "sdpa"], help="comma-separated"
    )
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", help="what the files are called")
    add("--budget-seconds", type=float, help="stop between columns before this is used up")
    add("--prewarm", type=int, default=14, help="compile in this many processes first")
    add("--tilings", action="store_true", help="time launch parameters of the kernels")
    add("--resume", type=int, default=0, help="go on behind this many columns (see below)")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def _jobs(case: Case, args: argparse.Namespace) -> list[tuple[str, tuple | None]]:
    """(column, tiling) to time of a case."""
    if not args.tilings:
        return [(column, None) for column in args.columns]
    grid = LIST_TILINGS if case.listed else TILINGS
    return [("ours", None), *(("ours", t) for t in grid)]


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    wanted = args.cases or (TILED if args.tilings else [c.name for c in CASES])
    cases = [case for case in CASES if case.name in wanted]
    if args.list:
        print("\n".join(case.name for case in cases))
        return
    name = args.name or ("attention_decode_tilings" if args.tilings else "attention_decode")

    import torch
    from tqdm import tqdm

    from benchmarks.mhc import QUICK_REPEATS, Timer
    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as failure:
        sys.exit(str(failure))
    if args.prewarm and not args.resume:
        tasks = [(c.name, t) for c in cases for column, t in _jobs(c, args) if column == "ours"]
        common.run_in_pool(warm, tasks, args.prewarm, None)
    torch.manual_seed(0)
    meta = common.metadata("benchmarks.attention_decode")
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    timer = Timer(QUICK_REPEATS)
    path = args.out / f"{name}.csv"
    rows: list[Any] = common.read_csv(path) if args.resume else []
    table = common.CsvFile(path, FIELDS)
    for row in rows:
        table.write(row)
    done = 0
    for case in budget.take(tqdm(cases, "cases", mininterval=5)):
        jobs = _jobs(case, args)
        done += len(jobs)
        if done <= args.resume:
            continue
        tensors = draw(case)
        sets = copies(case, tensors)
        for i, (column, tiling) in enumerate(jobs):
            if done - len(jobs) + i < args.resume:
                continue
            row = measure_column(case, column, tensors, sets, timer, tiling)
            if row is None:
                continue
            rows.append(row)
            table.write(row)
            if "failure" in row and _lost():
                argv = [a for a in sys.argv[1:] if not a.startswith("--resume")]
                go_on = f"--resume={done - len(jobs) + i + 1}"
                os.execv(
                    sys.executable,
                    [sys.executable, "-m", "benchmarks.attention_decode", *argv, go_on],
                )
        del tensors, sets
        torch.cuda.empty_cache()
    table.close()
    common.write_json(args.out / f"{name}.json", meta)
    common.print_table("decode", FIELDS, [[row.get(f, "") for f in FIELDS] for row in rows])


def _lost() -> bool:
    """Whether the card answers this process no more."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
