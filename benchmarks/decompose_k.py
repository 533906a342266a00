"""Decompose-K against eager, stock torch.compile and the decomposition written in user code.

One command, ``python -m benchmarks.decompose_k``, measures every column of a shape in one process:
each candidate is compiled afresh, checked against fp64 in a CUDA graph with poisoned outputs, then
timed by graph replay with cold L2, all candidates in turn, as independent calls and as a dependent
chain (net of its producer). It writes CSV, JSON and a plot and prints a summary. Times are us.

Columns
  eager          the function as written
  compile        stock torch.compile, default mode (the plugin's lowering disabled)
  max_autotune   stock torch.compile, max-autotune-no-cudagraphs
  decomposition  bmm over S parts + sum(0) + epilogue in user code, stock compile, best correct S
  ours           torch.compile, default mode, with the plugin
  unfused        the plugin's product, then the epilogue as a compiled function of its own
  ours_max       max-autotune-no-cudagraphs with the plugin (only when named in --columns)
  ours_early     ours, the sum releasing its successor at once (only when named)
  ours_late      ours, the sum releasing its successor after its wait (only when named)
  floor          the larger of bytes over copy bandwidth and flops over matmul rate

Suites: relu_bf16, bf16, fp16, fp32 (precision "highest"): A[M,K] @ B[K,N], both row-major.
router: sigmoid(x @ w.T) + bias, bf16, w in nn.Linear layout [N,K]. mhc: (x @ w.T).float() with bf16
x and w [24,K]: eager rounds the product to bf16 before the cast, so the 16-bit error rule applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

LOWERING = "decompose_k"
DEVICE = "cuda"
COLUMNS = ("eager", "compile", "max_autotune", "decomposition", "ours", "unfused")
NAMED = ("ours_max", "ours_early", "ours_late")
STOCK = ("eager", "compile", "max_autotune")
PLUGIN = ("ours", "unfused", *NAMED)
FORCED = {"ours_early": ".*_pdl", "ours_late": ".*_pdl_late"}
MAX_AUTOTUNE = ("max_autotune", "ours_max")
WINS_OVER = ("best_stock", "decomposition")
HOST_TIMED = ("eager", "compile", "ours")
SPLITS = (8, 16, 32, 64, 128)
SQUARE_SPLITS = (64, 128)  # the best of the five in each of 24 squares measured
DRAWS = 4  # input sets of different values that every candidate is checked on
REPEATS = 12
QUICK_CASES, QUICK_REPEATS = 3, 10
COMPILE_REPEATS, COMPILE_WARMUP = 7, 2


# --- cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of a suite. ``layout`` is the weight's: "kn" row-major [K,N], "nk" nn.Linear's."""

    suite: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    epilogue: str

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def bytes(self) -> int:
        """Each input read once, the output written once."""
        size = 4 if self.dtype == "float32" else 2
        bias = self.n if self.epilogue == "sigmoid_bias" else 0
        out = 4 if self.epilogue == "float" else size
        return size * (self.m * self.k + self.k * self.n + bias) + out * self.m * self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def _square(suite: str, dtype: str, epilogue: str) -> tuple[Case, ...]:
    depths = (8192, 12288, 16384, 20480, 24576, 28672, 32768)
    return tuple(
        Case(suite, mn, mn, k, dtype, "kn", epilogue) for mn in (16, 32, 48, 64) for k in depths
    )


SUITES: dict[str, tuple[Case, ...]] = {
    "relu_bf16": _square("relu_bf16", "bfloat16", "relu"),
    "bf16": _square("bf16", "bfloat16", "none"),
    "fp16": _square("fp16", "float16", "none"),
    "fp32": _square("fp32", "float32", "none"),
    "router": tuple(
        Case("router", t, 256, 7168, "bfloat16", "nk", "sigmoid_bias")
        for t in (1, 8, 16, 64, 256, 768)
    ),
    "mhc": tuple(
        Case("mhc", t, 24, 28672, "bfloat16", "nk", "float") for t in (1, 64, 256, 1024, 4096)
    ),
}

# A graph of projections and heads of different sizes, each of which is split.
MODEL_SIZES = (
    *((256, 7168), (128, 4096), (64, 8192), (24, 28672)),
    *((192, 6144), (160, 5120), (96, 4096), (320, 10240)),
)
MODEL = tuple(Case("model", 64, n, k, "bfloat16", "nk", "relu") for n, k in MODEL_SIZES)

EPILOGUES: dict[str, Callable[..., Any]] = {
    "none": lambda y: y,
    "relu": lambda y: y.relu(),
    "sigmoid_bias": lambda y, bias: y.sigmoid() + bias,
    "float": lambda y: y.float(),
}


def ordered(suites: Sequence[str], quick: bool, shard: tuple[int, int]) -> list[Case]:
    """The cases of a run in an order of which any beginning is representative."""
    groups = [common.representative(SUITES[s]) for s in suites]
    cases = common.round_robin(g[:QUICK_CASES] if quick else g for g in groups)
    return cases[shard[0] - 1 :: shard[1]]


def draw(case: Case) -> tuple[Any, ...]:
    """Fresh random inputs on the card, scaled so that the product is about N(0, 1)."""
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    dtype = getattr(torch, case.dtype)
    a = (normal(case.m, case.k) * case.k**-0.5).to(dtype)
    w = normal(*((case.n, case.k) if case.layout == "nk" else (case.k, case.n))).to(dtype)
    extra = (normal(case.n).to(dtype),) if case.epilogue == "sigmoid_bias" else ()
    return (a, w, *extra)


def site(case: Case) -> Callable[..., Any]:
    """What a user writes."""
    epilogue, transposed = EPILOGUES[case.epilogue], case.layout == "nk"

    def site(a: Any, w: Any, *extra: Any) -> Any:
        return epilogue(a @ (w.t() if transposed else w), *extra)

    return site


def decomposition(case: Case, splits: int) -> Callable[..., Any]:
    """The same in user code as a sum over ``splits`` partial products kept in fp32."""
    import torch

    epilogue, transposed, part = EPILOGUES[case.epilogue], case.layout == "nk", case.k // splits
    # out_dtype is for 16-bit operands only.
    wide = {} if case.dtype == "float32" else {"out_dtype": torch.float32}

    def decomposition(a: Any, w: Any, *extra: Any) -> Any:
        b = w.t() if transposed else w
        parts_a = a.view(a.shape[0], splits, part).transpose(0, 1)
        partials = torch.bmm(parts_a, b.view(splits, part, b.shape[1]), **wide)
        return epilogue(partials.sum(0).to(a.dtype), *extra)

    return decomposition


def reference(case: Case, inputs: Sequence[Any]) -> Any:
    """The result in fp64, not rounded on the way."""
    exact = dataclasses.replace(case, epilogue="none") if case.epilogue == "float" else case
    return site(exact)(*(t.double() for t in inputs))


# --- candidates -----------------------------------------------------------------------------------


def variants(case: Case, columns: Sequence[str]) -> list[str]:
    """The candidates of a case; "decomposition/32" is the decomposition with 32 parts."""
    out: list[str] = []
    for column in columns:
        if column == "decomposition":
            splits = SQUARE_SPLITS if case.m == case.n else SPLITS
            out += [f"{column}/{s}" for s in splits if case.k % s == 0]
        elif column != "unfused" or case.epilogue != "none":
            out.append(column)
    return out


def build(case: Case, variant: str, inputs: Sequence[Any]) -> tuple[Callable[..., Any], str]:
    """Compile one candidate and run it once; also what the plugin chose, where it decided."""
    import torch

    import inductor_ext
    from inductor_ext import choosing, report

    column, _, splits = variant.partition("/")
    if column == "eager":
        return site(case), ""

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        mode = "max-autotune-no-cudagraphs" if column in MAX_AUTOTUNE else "default"
        own = common.own_code(fn, variant.replace("/", "_"))
        return torch.compile(own, mode=mode, dynamic=False)

    if column == "unfused":
        product = compiled(site(dataclasses.replace(case, epilogue="none")))
        epilogue = compiled(EPILOGUES[case.epilogue])

        def call(a: Any, w: Any, *extra: Any) -> Any:
            return epilogue(product(a, w), *extra)

    elif column == "decomposition":
        call = compiled(decomposition(case, int(splits)))
    else:
        call = compiled(site(case))
    switch = inductor_ext.enable if column in PLUGIN else inductor_ext.disable
    forced = {LOWERING: FORCED[column]} if column in FORCED else {}
    with switch(LOWERING), choosing.force(forced), report.collect() as decisions:
        call(*inputs)
        torch.cuda.synchronize()
    return call, "; ".join(d.chosen if d.fired else f"stock: {d.reason}" for d in decisions)


def _settings() -> None:
    import torch

    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")


def _prewarm_one(case: Case, variant: str) -> str:
    import torch
    import torch._inductor.config as inductor_config

    _settings()
    # Workers share the card: what they time is noise and must not be remembered.
    inductor_config.autotune_local_cache = False
    torch._dynamo.reset()
    return build(case, variant, draw(case))[1]


def prewarm(
    cases: Sequence[Case], columns: Sequence[str], workers: int, timeout: float | None
) -> dict[tuple, str]:
    """Fill the compile caches from ``workers`` processes; returns the plugin's choices seen there.

    Leaves out what autotunes by benchmarking, since it would do so on a busy machine.
    """
    quiet = [c for c in columns if c not in (*MAX_AUTOTUNE, "eager")]
    tasks = [(case, v) for case in cases for v in variants(case, quiet)]
    return common.run_in_pool(_prewarm_one, tasks, workers, timeout)


# --- measurement ----------------------------------------------------------------------------------


def verify(case: Case, column: str, call: Callable[..., Any], draws: Any) -> tuple[str, float]:
    """("ok" or what is wrong, largest error over the allowed one), from poisoned graph replays."""
    import torch

    from inductor_ext import measure

    inputs, references, baselines = draws
    worst = 0.0
    for chained in (False, True):
        where = "in a chain: " if chained else ""
        outputs = measure.graph_outputs(call, inputs, chained=chained)
        for out, ref, base in zip(outputs, references, baselines, strict=True):
            verdict = measure.check(out, ref, base, rounding=getattr(torch, case.dtype))
            if verdict.allowed > 0:
                worst = max(worst, verdict.error / verdict.allowed)
            if not verdict.ok:
                return where + verdict.reason, worst
        if column in PLUGIN:  # it promises the same bits every run
            again = measure.graph_outputs(call, inputs, chained=chained)
            if not all(map(torch.equal, outputs, again)):
                return where + "two runs differ in their bits.", worst
    return "ok", worst


def comparison(columns: Sequence[str]) -> common.Comparison:
    """How these columns are set against each other."""
    order = {suite: [c.name for c in cases] for suite, cases in SUITES.items()}
    return common.Comparison(columns, STOCK, order)


def fields(columns: Sequence[str]) -> list[str]:
    """The CSV header for these columns."""
    names = ["suite", "case", "m", "n", "k", "dtype", "layout", "epilogue", "bytes", "flops"]
    names += ["floor_us", "floor_bound", "ours_choice", "ours_fraction_of_floor", "failure"]
    for c in columns:
        names += [f"{c}_{kind}{x}" for kind in common.KINDS for x in ("us", "spread_us")]
        names += [f"{c}_check", f"{c}_error_of_allowed"]
        names += [f"{c}_host_us"] if c in HOST_TIMED else []
    if "decomposition" in columns:
        names += [f"decomposition_{kind}split" for kind in common.KINDS]
    return names + list(comparison(columns).speedups({}))


def measure_case(
    case: Case, columns: Sequence[str], repeats: int, choices: Mapping[tuple, str]
) -> dict[str, Any]:
    """All columns of one shape, as a CSV row."""
    import torch

    from inductor_ext import measure

    torch._dynamo.reset()
    ceilings = measure.ceilings()
    moved = case.bytes / ceilings.copy
    computed = case.flops / ceilings.flops(getattr(torch, case.dtype))
    row: dict[str, Any] = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    row |= {"case": case.name, "bytes": case.bytes, "flops": case.flops}
    row |= {"floor_us": max(moved, computed)}
    row |= {"floor_bound": "bytes" if moved >= computed else "flops"}

    inputs = [draw(case) for _ in range(DRAWS)]
    draws = inputs, [reference(case, i) for i in inputs], [site(case)(*i) for i in inputs]
    calls: dict[str, Callable[..., Any]] = {}
    checks: dict[str, tuple[str, float]] = {}
    for variant in variants(case, columns):
        try:
            calls[variant], choice = build(case, variant, inputs[0])
            if variant == "ours":
                row["ours_choice"] = choice or choices.get((case, variant), "from the cache")
        except Exception as error:
            checks[variant] = measure.one_line(error), float("nan")
    # A recompile here would run under the wrong switch: it must fail, not pass unseen.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for variant, call in list(calls.items()):
            try:
                checks[variant] = verify(case, variant.partition("/")[0], call, draws)
            except Exception as error:
                checks[variant] = measure.one_line(error), float("nan")
                del calls[variant]
        del draws
        timings = {
            kind: measure.compare(calls, inputs[0], repeats=repeats, chained=bool(kind))
            for kind in common.KINDS
        }
        for column in set(HOST_TIMED) & set(calls):
            row[f"{column}_host_us"] = measure.host_overhead(calls[column], *inputs[0])

    for column in columns:
        mine = [v for v in checks if v.partition("/")[0] == column]
        # Where no variant is right, the times of the wrong ones stay, marked by the check.
        right = [v for v in mine if checks[v][0] == "ok"] or mine
        if right:
            row[f"{column}_check"], row[f"{column}_error_of_allowed"] = checks[right[0]]
        for kind, timed in timings.items():
            times = [(t.us, t, v) for v in right if isinstance(t := timed.get(v), measure.Timing)]
            if times:
                us, timing, best = min(times, key=operator.itemgetter(0))
                row[f"{column}_{kind}us"], row[f"{column}_{kind}spread_us"] = us, timing.spread_us
                if column == "decomposition":
                    row[f"decomposition_{kind}split"] = int(best.partition("/")[2])
    versus = comparison(columns)
    row["ours_fraction_of_floor"] = common.ratio(row["floor_us"], versus.time(row, "ours", "")[0])
    return row | versus.speedups(row)


def _first_call(case: Case, variant: str) -> float:
    """Wall clock in s of compiling and running one site."""
    import torch

    inputs = draw(case)
    start = time.perf_counter()
    build(case, variant, inputs)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _first_call_of_model(variant: str) -> float:
    """The same for one graph of ``MODEL``: sites of different sizes, relu(x @ w.t()) each."""
    import torch

    import inductor_ext

    inputs = [draw(case) for case in MODEL]

    def model(pairs: Any) -> Any:
        return [site(case)(*pair) for case, pair in zip(MODEL, pairs, strict=True)]

    compiled = torch.compile(common.own_code(model, variant), dynamic=False)
    switch = inductor_ext.enable if variant == "ours" else inductor_ext.disable
    start = time.perf_counter()
    with switch(LOWERING):
        compiled(inputs)
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compile_times() -> list[dict[str, Any]]:
    """Wall clock of a first call in s, stock against ours in default mode, caches fresh.

    "first" is the first site of all; "later" another site, of half as many rows, compiled after it
    in the same cache directory: they have no kernel in common. "model" is one graph of ``MODEL``.
    The compile workers are up, and variants take turns, the one that begins too.
    """
    import torch
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    firsts = (SUITES["relu_bf16"][-1], SUITES["router"][3])
    seconds: dict[tuple[Any, ...], list[float]] = {}
    for i in range(-COMPILE_WARMUP, COMPILE_REPEATS):
        for variant in ("compile", "ours") if i % 2 else ("ours", "compile"):
            for first in firsts:
                torch._dynamo.reset()
                with fresh_cache():
                    later = dataclasses.replace(first, m=first.m // 2)
                    for which, case in (("first", first), ("later", later)):
                        took = _first_call(case, variant)
                        key = (case.suite, case.name, which, variant)
                        seconds.setdefault(key, []).append(took)
            torch._dynamo.reset()
            with fresh_cache():
                took = _first_call_of_model(variant)
                key = ("model", f"{len(MODEL)} sites", "model", variant)
                seconds.setdefault(key, []).append(took)
        last = " ".join(f"{v}:{name}:{t[-1]:.3f}" for (_, name, _, v), t in seconds.items())
        print(f"round {i}: {last}", file=sys.stderr, flush=True)
        if i == -COMPILE_WARMUP:
            AsyncCompile.wait_pool_ready()
    rows = []
    for suite, name, which, variant in seconds:
        if variant != "ours":
            continue
        times = [seconds[suite, name, which, v][COMPILE_WARMUP:] for v in ("compile", "ours")]
        stock, ours = map(statistics.median, times)
        rows.append(
            {"suite": suite, "case": name, "site": which, "stock_s": stock, "ours_s": ours}
            | {"ours_of_stock": ours / stock, "repeats": COMPILE_REPEATS}
            | {"stock_s_all": " ".join(f"{t:.3f}" for t in times[0])}
            | {"ours_s_all": " ".join(f"{t:.3f}" for t in times[1])}
        )
    return rows


# --- output ---------------------------------------------------------------------------------------


def _title(meta: Mapping[str, Any]) -> str:
    return f"Decompose-K on {meta['card']}, torch {meta['torch']}, triton {meta['triton']}"


def merge(paths: Sequence[Path], out: Path) -> None:
    """Join the CSV and JSON files of several runs, with plot and summary; needs no card.

    Of a case that several hold the last one counts.
    """
    read = [row for path in paths for row in common.read_csv(path)]
    rows = list({(row["suite"], row["case"]): row for row in read}.values())
    files = [json.loads(path.with_suffix(".json").read_text()) for path in paths]
    runs = [run for f in files for run in (f if isinstance(f, list) else [f])]  # merged already
    versus = comparison([c for c in (*COLUMNS, *NAMED) if any(r.get(f"{c}_check") for r in rows)])
    table = common.CsvFile(out / "decompose_k.csv", list(dict.fromkeys(k for r in rows for k in r)))
    for group in versus.grouped(rows).values():
        for row in group:
            table.write(row)
    table.close()
    common.write_json(out / "decompose_k.json", runs)
    shown = ("eager", "compile", "max_autotune", "decomposition")
    rivals = [c for c in shown if c in versus.columns]
    (out / "decompose_k_summary.md").write_text(
        f"{_title(runs[0])}. Geometric mean of the speed-up (wins).\n\n"
        + versus.markdown(rows, rivals)
    )
    versus.plot(out / "decompose_k.png", rows, _title(runs[0]))
    versus.summary(rows, WINS_OVER)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.decompose_k",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", choices=[*SUITES, "all"], default="all")
    known = common.names_of((*COLUMNS, *NAMED))
    add("--columns", type=known, default=list(COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--quick", action="store_true", help=f"{QUICK_CASES} shapes a suite, fewer repeats")
    add("--only", default="", metavar="REGEX", help='only cases like this, "router 8x"')
    add("--shard", type=common.shard, default=(1, 1), help="I/N: every Nth shape from the Ith")
    add("--budget-seconds", type=float, help="stop between shapes before this is used up")
    add("--prewarm", type=int, default=0, metavar="N", help="compile ahead in N processes")
    add("--compile-time", action="store_true", help="measure compile time instead")
    add("--merge", nargs="+", type=Path, metavar="CSV", help="join the files of earlier runs")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    suites = list(SUITES) if args.suite == "all" else [args.suite]
    cases = ordered(suites, args.quick, args.shard)
    cases = [c for c in cases if re.match(args.only, f"{c.suite} {c.name}")]
    if args.list:
        for case in cases:
            print(case.suite, case.name, case.dtype, case.layout, case.epilogue)
        return
    if args.merge:
        merge(args.merge, args.out)
        return

    import torch
    from tqdm import tqdm

    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as error:
        sys.exit(str(error))
    _settings()
    stem = "decompose_k" + ("" if args.suite == "all" else f"_{args.suite}")
    stem += "" if args.shard == (1, 1) else f"_{args.shard[0]}of{args.shard[1]}"
    meta = common.metadata("benchmarks.decompose_k") | {"seed": torch.seed()}
    if args.compile_time:
        rows = compile_times()
        table = common.CsvFile(args.out / "decompose_k_compile_time.csv", list(rows[0]))
        for row in rows:
            table.write(row)
        common.write_json(args.out / "decompose_k_compile_time.json", meta)
        values = [list(r.values()) for r in rows]
        common.print_table("First call, fresh caches", list(rows[0]), values)
        return

    choices: dict[tuple, str] = {}
    if args.prewarm:
        left = budget.left()
        half = None if left is None else left / 2  # the rest is for measuring
        choices = prewarm(cases, args.columns, args.prewarm, half)
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    table = common.CsvFile(args.out / f"{stem}.csv", fields(args.columns))
    rows = []
    repeats = QUICK_REPEATS if args.quick else REPEATS
    for case in tqdm(budget.take(cases), "shapes", len(cases), mininterval=5):
        try:
            row = measure_case(case, args.columns, repeats, choices)
        except Exception as error:
            row = {"suite": case.suite, "case": case.name, "failure": measure.one_line(error)}
        rows.append(row)
        table.write(row)
    table.close()
    meta |= {"shapes_measured": len(rows), "shapes_asked": len(cases)}
    common.write_json(args.out / f"{stem}.json", meta)
    comparison(args.columns).plot(args.out / f"{stem}.png", rows, _title(meta))
    comparison(args.columns).summary(rows, WINS_OVER)


if __name__ == "__main__":
    main()
