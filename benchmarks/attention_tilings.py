"""Tilings of the attention forward, each checked and timed.

One command, ``python -m benchmarks.attention_tilings --kinds fwd --out DIR``. Kernels compile in a
pool of processes first. "error" is the relative error by the norm against SDPA, which rounds to
bf16 as well: up to about 4e-3 is rounding. "TF" counts 4 B H Sq Sk D operations, half for causal.
``masks`` are scores of other kinds, checked against fp32; ``columns`` sums of weights, checked by
the number of rows; ``compare`` the chosen tiling of each score beside the Gluon kernel's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

Case = tuple[str, int, int, int, int, bool]  # name, B, H, S, D, causal
Options = tuple[tuple[str, Any], ...]
CASES: tuple[Case, ...] = (
    ("d128 causal", 4, 16, 4096, 128, True),
    ("d128 full", 2, 16, 8192, 128, False),
    ("d64 causal", 4, 32, 4096, 64, True),
    ("d256 causal", 4, 16, 4096, 256, True),
)
FIELDS = ["case", "tiling", "us", "tflops", "error", "failure"]
LIMIT = 1e-2


def _grid(**values: Sequence[Any]) -> list[Options]:
    return [tuple(zip(values, v, strict=True)) for v in itertools.product(*values.values())]


def _tile(
    m: int, n: int, warps: int, stages: Sequence[int], **more: Sequence[Any]
) -> list[Options]:
    return _grid(block_m=(m,), block_n=(n,), warps=(warps,), stages=stages, **more)


MERGED = {"merged": (True,)}
TRIED: dict[int, list[Options]] = {
    64: [
        *_tile(64, 128, 4, (2,), merged=(False, True)),
        *_tile(64, 64, 4, (3, 4), merged=(False, True)),
        *_tile(128, 64, 4, (3,), **MERGED),
        *_tile(64, 128, 4, (2,), near=(8, 48)),
    ],
    128: [
        *_tile(128, 128, 8, (3,), **MERGED),
        *_tile(128, 64, 4, (2,), **MERGED),
        *_tile(128, 32, 4, (3, 4), merged=(False, True)),
        *_tile(64, 64, 4, (3,), merged=(False, True)),
        *_tile(64, 64, 4, (3,), near=(8, 48)),
        *_tile(128, 128, 8, (3,), **MERGED, near=(8, 48)),
    ],
    256: [*_tile(128, 64, 8, (2,), merged=(False, True)), *_tile(128, 64, 8, (2,), near=(8, 48))],
}
MASKED: dict[int, list[Options]] = {
    64: [
        *_tile(64, 128, 4, (2,), merged=(False, True)),
        *_tile(64, 64, 4, (3,), merged=(False, True)),
        *_tile(128, 64, 4, (3,), **MERGED),
        *_tile(64, 64, 4, (2,)),
    ],
    128: [
        *_tile(128, 128, 8, (3,), **MERGED),
        *_tile(128, 64, 4, (2,), **MERGED),
        *_tile(64, 64, 4, (3,), merged=(False, True)),
        *_tile(64, 64, 4, (2,)),
        *_tile(128, 64, 8, (3,)),
    ],
}
COLUMNS: dict[int, list[Options]] = {
    d: [
        *_tile(64, 128, 4, (2, 3)),
        *_tile(64, 64, 4, (2, 3)),
        *_tile(128, 128, 8, (2,)),
        *_tile(128, 64, 4, (2,)),
        *_tile(32, 128, 4, (3,)),
    ]
    for d in (64, 128)
}


def label(options: Options) -> str:
    """Options in one word."""
    values = dict(options)
    if "chosen" in values:
        return str(values["chosen"])
    shape = "x".join(str(values.pop(k)) for k in ("block_m", "block_n", "warps", "stages"))
    extra = [k if v is True else f"{k}={v}" for k, v in values.items() if v is not False]
    return " ".join([shape, *extra])


def _score(name: str, d: int) -> Callable[..., Any]:
    """The score "full", "causal", or one of ``MASKS``, as a user writes it."""
    import torch

    def score(
        s: Any, b: Any, h: Any, q: Any, k: Any, rows: Any, columns: Any, n: Any, x: Any
    ) -> Any:
        r = s * d**-0.5
        if name == "full":
            return r
        keep = q >= k
        if name in ("window", "sinks"):
            near = q - k < 1024
            keep = keep & ((near | (k < 4)) if name == "sinks" else near)
        if name == "documents":
            keep = keep & (x[0] == x[1])
        if name == "softcap":
            r = 30 * torch.tanh(r / 30)
        if name == "alibi":
            r = r + x[0] * (k - q)
        if name in ("bias", "slots"):
            r = r + x[0]
        return torch.where(keep, r, -torch.inf)

    return score


@functools.cache
def program_of(name: str, d: int) -> Any:
    """The program of a score by its name, as recognition writes it."""
    from inductor_ext.templates.attention_program import LOG2E, Input, Program, Span

    factor = d**-0.5 * LOG2E
    scaled: dict[str, Any] = {"scale": d**-0.5, "score": f"r = s * {factor!r}"}
    past: dict[str, Any] = {
        "keep": "keep = q >= k",
        "row_spans": (Span("0", "q1 + 1", "0", "q0 + 1"),),
        "column_spans": (Span("k0", "rows", "k1", "rows"),),
    }
    near = Span("q0 - 1023", "q1 + 1", "q1 - 1023", "q0 + 1")
    given = tuple(
        Input(dtype, "".join(a for a, n in zip("bhqk", shape, strict=True) if n > 1))
        for shape, dtype in _shapes(name, 4, 8)
    )
    if name == "full":
        return Program(**scaled)
    if name == "causal":
        return Program(**scaled, **past)
    if name == "documents":
        past["keep"] = "keep = (q >= k) & (x0 == x1)"
        return Program(given, documents=(0, 1), **scaled, **past)
    if name == "window":
        return Program(**scaled, keep="keep = (q >= k) & (q - k < 1024)", row_spans=(near,))
    if name == "sinks":
        first = Span("0", "tl.minimum(q1 + 1, 4)", "0", "tl.minimum(q0 + 1, 4)")
        keep = "keep = (q >= k) & ((q - k < 1024) | (k < 4))"
        return Program(**scaled, keep=keep, row_spans=(first, near))
    if name == "softcap":
        instruction = '"tanh.approx.f32 $0, $1;", "=f,f"'
        options = "dtype=tl.float32, is_pure=True, pack=1"
        tanh = f"tl.inline_asm_elementwise({instruction}, [s * {d**-0.5 / 30!r}], {options})"
        return Program(score=f"r = {tanh} * {30 * LOG2E!r}", **past)
    added = {
        "alibi": f"x0 * {LOG2E!r} * (k.to(tl.float32) - q.to(tl.float32))",
        "bias": f"x0.to(tl.float32) * {LOG2E!r}",
        "slots": f"x0.to(tl.float32) * {LOG2E!r}",
    }
    return Program(given, score=f"r = s * {factor!r} + {added[name]}", **past)


KINDS = ("fwd", "masks", "columns", "compare")
MASKS = ("window", "sinks", "softcap", "alibi", "bias", "slots", "documents")


def _shapes(name: str, H: int, S: int) -> list[tuple[tuple[int, ...], Any]]:
    import torch

    shapes: dict[str, list[tuple[tuple[int, ...], Any]]] = {
        "alibi": [((1, H, 1, 1), torch.float32)],
        "bias": [((1, H, S, S), torch.bfloat16)],
        "slots": [((1, H, 1, S), torch.bfloat16)],
        "documents": [((1, 1, S, 1), torch.int32), ((1, 1, 1, S), torch.int32)],
    }
    return shapes.get(name, [])


def inputs_of(name: str, H: int, S: int) -> list[Any]:
    """The tensors that a program of ``program_of`` reads."""
    import torch

    if name == "alibi":
        return [-(2.0 ** -torch.linspace(1, 8, H, device="cuda")).view(1, H, 1, 1)]
    if name == "documents":  # of 1 to 2047 positions, the same in every run
        ends = torch.randint(1, 2048, (64,), generator=torch.Generator().manual_seed(1)).cumsum(0)
        ids = torch.searchsorted(ends, torch.arange(S), right=True).int().cuda()
        return [ids.view(1, 1, S, 1), ids.view(1, 1, 1, S)]
    return [torch.randn(s, device="cuda").to(dtype) for s, dtype in _shapes(name, H, S)]


def exact(name: str, q: Any, k: Any, v: Any, inputs: Sequence[Any]) -> Any:
    """A masked case in fp32, for few rows and keys."""
    import torch

    S, d = q.shape[2:]
    i, j = (torch.arange(S, device="cuda").view(shape) for shape in ((S, 1), (1, S)))
    s = q.float() @ k.float().mT
    wide = [x.float() for x in inputs]
    return _score(name, d)(s, None, None, i, j, S, S, (), wide).softmax(-1) @ v.float()


def pairs(name: str, S: int, inputs: Sequence[Any]) -> float:
    """How many pairs of a row and a key are kept."""
    if name in ("window", "sinks"):
        return 1024 * S - 512 * 1024
    if name == "documents":
        sizes = inputs[0].view(-1).unique(return_counts=True)[1]
        return float((sizes.double() ** 2).sum() / 2)
    return S * S if name == "full" else S * S / 2


PLAIN, GLUON = (("chosen", "plain"),), (("chosen", "gluon"),)


def launch(case: Case, name: str, options: Options) -> Callable[..., Any]:
    """A call of (q, k, v, *inputs) that gives the output; options may be ``PLAIN``, ``GLUON``."""
    import torch
    from inductor_ext.templates import attention_gluon_launch, attention_launch

    program, d = program_of(name, case[4]), case[4]
    if options == PLAIN:
        chosen = attention_launch.tiling(program, torch.bfloat16, d, d)
    elif options != GLUON:
        chosen = attention_launch.Tiling(**dict(options))

    def call(q: Any, k: Any, v: Any, *inputs: Any) -> Any:
        if options == GLUON:
            return attention_gluon_launch.forward(q, k, v, inputs, (), program)[0]
        return attention_launch.forward(q, k, v, inputs, (), program, "ieee", chosen)[0]

    return call


def draw(case: Case, S: int | None = None) -> tuple[Any, ...]:
    """Fresh q, k, v."""
    import torch

    _, B, H, size, D, _ = case
    shape = (B, H, S or size, D)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def compile_one(case: Case, name: str, options: Options) -> str:
    """Launch once on a small input, for Triton's cache."""
    import torch

    from inductor_ext.compat_launch import direct_launches

    with direct_launches():
        inputs = inputs_of(name, case[2], 256)
        launch(case, name, options)(*draw(case, 256), *inputs)
    torch.cuda.synchronize()
    return label(options)


def compile_columns(case: Case, options: Options) -> str:
    """Launch once on a small input, for Triton's cache."""
    import torch

    from inductor_ext.compat_launch import direct_launches

    with direct_launches():
        q, k, _ = draw(case, 256)
        columns(case, options, 0)(q, k, torch.zeros(q.shape[:3], device="cuda"))
    torch.cuda.synchronize()
    return label(options)


def columns(case: Case, options: Options, first_row: int) -> Callable[..., Any]:
    """A call of (q, k, lse) that gives the sums over causal weights."""
    from inductor_ext.templates import attention_launch

    program = program_of("causal", case[4])
    chosen = attention_launch.Tiling(**dict(options))

    def call(q: Any, k: Any, lse: Any) -> Any:
        return attention_launch.columns(q, k, lse, (), (), program, "ieee", first_row, chosen)

    return call


def compile_task(kind: str, *task: Any) -> str:
    """What one process of the pool does."""
    return compile_columns(*task) if kind == "columns" else compile_one(*task)


def tasks(kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    """What ``compile_task`` is called with."""
    found: list[tuple[Any, ...]] = []
    if "fwd" in kinds:
        for case in CASES:
            name = "causal" if case[5] else "full"
            found += [("fwd", case, name, options) for options in TRIED[case[4]]]
    if "masks" in kinds:
        found += [
            ("masks", CASES[i], name, options)
            for i in (0, 2)
            for name in MASKS
            for options in MASKED[CASES[i][4]]
        ]
    if "compare" in kinds:
        found += [
            ("compare", CASES[i], name, options)
            for i in (0, 2)
            for name in ("causal", *MASKS)
            for options in (PLAIN, GLUON)
        ]
    if "columns" in kinds:
        found += [
            ("columns", CASES[i], options) for i in (0, 2) for options in COLUMNS[CASES[i][4]]
        ]
    return found


def _timed(call: Callable[..., Any], inputs: tuple[Any, ...], flops: float) -> dict[str, float]:
    from inductor_ext import measure

    us = measure.time_graph(call, [inputs], rounds=9, calls=2)
    return {"us": us, "tflops": flops / us / 1e6}


def _error(got: Any, truth: Any) -> float:
    difference = got.float() - truth.float()
    return (difference.norm() / truth.float().norm()).item()


def _row(case: str, options: str, run: Callable[[], dict[str, float]]) -> dict[str, Any]:
    from inductor_ext import measure

    row: dict[str, Any] = {"case": case, "tiling": options}
    try:
        row |= run()
    except Exception as error:
        row["failure"] = measure.one_line(error)
    return row


def rows(kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A CSV row per case and tiling, SDPA's own forms among them."""
    for case in CASES if "fwd" in kinds else ():
        yield from _plain(case)
    two = CASES[0], CASES[2]
    for case in two if "masks" in kinds else ():
        for mask in MASKS:
            yield from _masked(case, mask, MASKED[case[4]])
    for case in two if "compare" in kinds else ():
        for mask in ("causal", *MASKS):
            yield from _masked(case, mask, [PLAIN, GLUON])
    for case in two if "columns" in kinds else ():
        yield from _columns(case)


def _plain(case: Case) -> Iterator[dict[str, Any]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    name, B, H, S, D, causal = case
    torch.manual_seed(0)
    inputs = draw(case)
    flops = 4.0 * B * H * S * S * D / (2 if causal else 1)
    sdpa = functools.partial(scaled_dot_product_attention, is_causal=causal)
    truth = sdpa(*inputs)

    def peer(backend: Any) -> dict[str, float]:
        with sdpa_kernel(backend):
            return _timed(sdpa, inputs, flops)

    def ours(options: Options) -> dict[str, float]:
        call = launch(case, "causal" if causal else "full", options)
        return {"error": _error(call(*inputs), truth)} | _timed(call, inputs, flops)

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for which, backend in backends.items():
        yield _row(name, which, functools.partial(peer, backend))
    for options in TRIED[D]:
        yield _row(name, label(options), functools.partial(ours, options))


def _masked(case: Case, mask: str, tried: Sequence[Options]) -> Iterator[dict[str, Any]]:
    import torch

    name, B, H, S, D, _ = case
    torch.manual_seed(0)
    q, k, v = draw((name, 1, H, 2000, D, True))
    read = inputs_of(mask, H, 2000)
    truth = exact(mask, q, k, v, read)
    given = inputs_of(mask, H, S)
    inputs = (*draw(case), *given)
    flops = 4.0 * B * H * pairs(mask, S, given) * D

    def run(options: Options) -> dict[str, float]:
        call = launch(case, mask, options)
        return {"error": _error(call(q, k, v, *read), truth)} | _timed(call, inputs, flops)

    for options in tried:
        yield _row(f"{name} {mask}", label(options), functools.partial(run, options))


def _columns(case: Case) -> Iterator[dict[str, Any]]:
    """Of all rows, and of the last 64. Sums over keys are the number of rows."""
    import torch
    from inductor_ext.templates import attention_launch

    name, B, H, S, D, _ = case
    torch.manual_seed(0)
    q, k, v = draw(case)
    program = program_of("causal", D)
    lse = attention_launch.forward(q, k, v, (), (), program, "ieee")[1]

    def run(options: Options, first_row: int) -> dict[str, float]:
        call = columns(case, options, first_row)
        total = call(q, k, lse).double().sum(-1)
        error = (total / (S - first_row) - 1).abs().max().item()
        kept = 64 * S if first_row else S * S / 2
        return {"error": error} | _timed(call, (q, k, lse), 2.0 * B * H * kept * D)

    for which, first_row in (("all rows", 0), ("64 rows", S - 64)):
        for options in COLUMNS[D]:
            one = functools.partial(run, options, first_row)
            yield _row(f"{name} columns, {which}", label(options), one)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--kinds", type=common.names_of(KINDS), default=["fwd"], help=", ".join(KINDS))
    add("--out", type=Path, default=Path("attention_tilings"), help="folder of the CSV file")
    add("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args(argv)
    common.run_in_pool(compile_task, tasks(args.kinds), args.workers, None)

    from tqdm import tqdm

    from inductor_ext.compat_launch import direct_launches

    file = common.CsvFile(args.out / "attention_tilings.csv", FIELDS)
    found = []
    with direct_launches():
        for row in tqdm(rows(args.kinds), "timed", mininterval=5, file=sys.stderr):
            file.write(row)
            found.append(row)
    file.close()
    if args.kinds == ["compare"]:
        lines = [[row["case"], *(row.get(f, "") for f in FIELDS[1:])] for row in found]
        common.print_table("plain Triton and Gluon", FIELDS, lines)
        return 0
    for case in dict.fromkeys(row["case"] for row in found):
        of_case = sorted(
            (row for row in found if row["case"] == case), key=lambda row: row.get("us", 1e30)
        )
        lines = [[row.get(field, "") for field in FIELDS[1:]] for row in of_case]
        for line in lines:
            if isinstance(line[3], float):
                line[3] = f"{line[3]:.1e}{'' if line[3] < LIMIT else ' WRONG'}"
        common.print_table(case, FIELDS[1:], lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
