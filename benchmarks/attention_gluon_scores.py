"""Scores of many kinds in the Hopper attention forward: checked against fp64, then timed by tile.

TFLOP/s count what is kept by causality or a window, 4 D per pair.
"""

from __future__ import annotations

import argparse
import functools
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.attention_gluon import _at, _watch

WINDOW = 1024
FIELDS = ("case", "d", "tile", "us", "tflops", "check")


def scores() -> dict[str, Any]:
    """Per case: (score, axes and dtype of its inputs, numbers, kept pairs of S x S)."""
    import torch

    inf = float("-inf")
    bf16, fp32 = torch.bfloat16, torch.float32

    def causal(s: int) -> float:
        return s * s / 2

    def everything(s: int) -> float:
        return s * s

    def window(s: int) -> float:
        return s * WINDOW - WINDOW * WINDOW / 2

    return {
        "causal": (lambda s, q, k, h, n, x: torch.where(q >= k, s, inf), [], [], causal),
        "softcap": (
            lambda s, q, k, h, n, x: torch.where(q >= k, torch.tanh(s / 30) * 30, inf),
            [], [], causal,
        ),
        "alibi": (
            lambda s, q, k, h, n, x: torch.where(q >= k, s + x[0] * (k - q), inf),
            [("h", fp32)], [], causal,
        ),
        "window": (
            lambda s, q, k, h, n, x: torch.where((q >= k) & (q - k < n[0]), s, inf),
            [], [WINDOW], window,
        ),
        "sinks": (
            lambda s, q, k, h, n, x: torch.where(
                (q >= k) & ((q - k < n[0]) | (k < n[1])), s, inf
            ),
            [], [WINDOW, 4], window,
        ),
        "bias": (
            lambda s, q, k, h, n, x: torch.where(q >= k, s + x[0], inf),
            [("hqk", bf16)], [], causal,
        ),
        "slots": (
            lambda s, q, k, h, n, x: torch.where(q >= k, s + x[0], inf), [("hk", bf16)], [], causal,
        ),
        "padding": (
            lambda s, q, k, h, n, x: torch.where(x[0] & (q >= k), s, inf),
            [("bk", torch.bool)], [], causal,
        ),
        "mask": (
            lambda s, q, k, h, n, x: torch.where(x[0], s, inf),
            [("qk", torch.bool)], [], everything,
        ),
        "documents": (
            lambda s, q, k, h, n, x: torch.where((x[0] == x[1]) & (q >= k), s, inf),
            [("bq", torch.int32), ("bk", torch.int32)], [], causal,
        ),
    }  # fmt: skip


def tiles(name: str, d: int, brief: bool = False) -> dict[str, Any]:
    """The tiles to try; ``brief``: none but the default."""
    if brief:
        return {"default": None}
    from inductor_ext.templates.attention_gluon_launch import Tile

    wide = Tile(stages=2 if d == 128 else 4, pingpong=d == 128)
    found = {"128x128": wide, "128x64": Tile(keys=64, stages=4, pingpong=d == 128)}
    if name == "causal":
        found["turns"] = Tile(stages=wide.stages, pingpong=not wide.pingpong)
        found["24 MB"] = Tile(stages=wide.stages, section_bytes=24 << 20)
        found["8 MB"] = Tile(stages=wide.stages, section_bytes=8 << 20)
    return found


def inputs_of(name: str, b: int, h: int, s: int) -> list[Any]:
    """Random inputs of a case, at (b, h, s, s); documents of about a quarter of s."""
    import torch

    made = []
    for axes, dtype in scores()[name][1]:
        shape = [n if a in axes else 1 for a, n in zip("bhqk", (b, h, s, s), strict=True)]
        if dtype == torch.bool:
            x = torch.rand(shape, device="cuda") < 0.8
        elif dtype.is_floating_point:
            x = torch.randn(shape, device="cuda").to(dtype)
        else:
            ids = torch.arange(s, device="cuda") // (s // 4 + 1)
            x = ids.to(dtype).view(1, 1, *((-1, 1) if "q" in axes else (1, -1)))
            x = x.expand(shape).contiguous()
        made.append(x)
    return made


def program_of(name: str, d: int, inputs: list[Any]) -> Any:
    """(text of the score, program)."""
    from inductor_ext.templates.attention_program import Input

    from inductor_ext.ops import _attention_score as attention_score
    from inductor_ext.ops import _attention_translate as attention_translate

    score, given, numbers, _ = scores()[name]

    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any, *rest: Any) -> Any:
        _rows, _columns, n, x = rest
        return score(s * d**-0.5, q, k, h, n, x)

    text = attention_score.write(scaled, inputs, numbers)
    read = tuple(Input(dtype, axes) for axes, dtype in given)
    return text, attention_translate.program(text, read, len(numbers), "zero")


def warm(name: str, d: int, tile: str, brief: bool) -> None:
    """Compile a case (in a process of a pool) and run it at a small size."""
    import torch
    from inductor_ext.templates import attention_gluon_launch as launch

    # More tiles than multiprocessors.
    q, k, v = (torch.randn(2, 32, 608, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = inputs_of(name, 2, 32, 608)
    _, program = program_of(name, d, inputs)
    launch.forward(q, k, v, inputs, scores()[name][2], program, tile=tiles(name, d, brief)[tile])
    torch.cuda.synchronize()


def check(name: str, d: int, tile: Any) -> str:
    """What is wrong with a tile's result at (2, 12, 1008), by twice a 16-bit result's error."""
    import torch
    from inductor_ext.templates import attention_gluon_launch as launch

    from inductor_ext.ops import _attention_score as attention_score

    torch.manual_seed(d)
    b, h, s = 2, 12, 1008
    q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = inputs_of(name, b, h, s)
    text, program = program_of(name, d, inputs)
    numbers = scores()[name][2]
    at = attention_score.positions((b, h, s, s), torch.device("cuda"))
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = attention_score.read(text)(
        q.double() @ k.double().mT, *at, s, s, numbers, wide
    ).expand(b, h, s, s)  # fmt: skip
    right = torch.nan_to_num(exact.softmax(3)) @ v.double()
    low = torch.nan_to_num(exact.float().softmax(3)).bfloat16() @ v
    results = [launch.forward(q, k, v, inputs, numbers, program, tile=tile)[0] for _ in range(3)]
    ours, theirs = ((x.double() - right).abs().max().item() for x in (results[0], low))
    if not ours <= 2 * theirs + right.abs().max().item() / 256:
        return f"error {ours:.3g} against {theirs:.3g}"
    return "ok" if all(torch.equal(r, results[0]) for r in results) else "differs by run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--brief", action="store_true", help="default tiles, few lines")
    args = parser.parse_args()
    begun = time.monotonic()
    cases = [(n, d) for n in scores() for d in (128, 64)]
    if args.brief:
        cases = [(n, d) for n, d in cases if d == 128 or n in ("causal", "window")]
    tasks = [(n, d, t, args.brief) for n, d in cases for t in tiles(n, d, args.brief)]
    compiled = common.run_in_pool(warm, tasks, args.workers, 75)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)

    import torch
    import triton
    from inductor_ext.templates import attention_gluon_launch as launch

    threading.Thread(target=_watch, daemon=True).start()
    file = common.CsvFile(args.out / "attention_gluon_scores.csv", FIELDS)
    rows = []
    b, h, s = 4, 16, 4096
    for name, d in cases:
        q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        inputs = inputs_of(name, b, h, s)
        _, program = program_of(name, d, inputs)
        for label, tile in tiles(name, d, args.brief).items():
            _at(f"{name} d{d} {label}")
            try:
                verdict = (
                    check(name, d, tile)
                    if (name, d, label, args.brief) in compiled
                    else "not compiled"
                )
            except Exception as error:
                verdict = f"{type(error).__name__}: {str(error)[:200]}"
            us = float("nan")
            if verdict == "ok":
                call = functools.partial(
                    launch.forward, q, k, v, inputs, scores()[name][2], program, tile=tile
                )
                us = 1e3 * triton.testing.do_bench(call, warmup=15, rep=70, return_mode="median")
            flops = 4 * b * h * d * scores()[name][3](s)
            row = [name, d, label, us, flops / us / 1e6, verdict]
            file.write(dict(zip(FIELDS, row, strict=True)))
            rows.append(row)
    file.close()
    if args.brief:
        for name, d, _, us, tflops, verdict in rows:
            print(f"{name} d{d}: {us:.0f} us, {tflops:.0f} TFLOP/s, {verdict}")
    else:
        common.print_table("attention forward, bf16, 4x16x4096", FIELDS, rows)
    print(f"{time.monotonic() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
