"""Tilings of the Hopper attention forward: each checked against SDPA, then timed.

TFLOP/s count the products that the mask keeps: 4 B H D Sq Sk, half of it where causal. A run that
makes no progress for 30 s ends by itself: a kernel may wait for a barrier that nobody completes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import common

CASES = (
    (4, 16, 4096, 128, True),
    (2, 16, 8192, 128, False),
    (4, 32, 4096, 64, True),
    (1, 16, 16384, 128, True),
)
# B, Hq, Hkv, Sq, Sk, D, causal
CHECKS = (
    (1, 2, 2, 128, 128, 128, False),
    (1, 2, 2, 257, 257, 128, True),
    (2, 4, 2, 1000, 1000, 128, True),
    (1, 2, 1, 1000, 257, 128, False),
    (1, 3, 3, 1, 700, 128, False),
    (2, 16, 16, 2048, 2048, 128, True),
    (2, 4, 2, 1000, 1000, 64, True),
    (1, 2, 2, 257, 1000, 64, False),
    (4, 16, 16, 2048, 2048, 64, True),
)
FIELDS = ("case", "variant", "ms", "tflops", "check")
_progress: list[Any] = [time.monotonic(), "start"]


def _watch() -> None:
    while True:
        time.sleep(1)
        if time.monotonic() - _progress[0] > 30:
            print(f"no progress for 30 s in: {_progress[1]}", flush=True)
            os._exit(3)


def _at(what: str) -> None:
    _progress[:] = [time.monotonic(), what]


def variants(d: int) -> dict[str, Any]:
    """The tiles to try for a head dimension."""
    from inductor_ext.templates.attention_gluon_launch import Tile

    if d == 128:
        return {
            "128x128 2 stages": Tile(),
            "no pingpong": Tile(pingpong=False),
            "one program per tile": Tile(schedule="each"),
            "static": Tile(schedule="static"),
            "128x64 4 stages": Tile(keys=64, stages=4),
            "8 warps": Tile(consumers=1, warps=8),
            "192x64 2 stages": Tile(keys=64, consumers=3),
            "sections of 8 MB": Tile(section_bytes=8 << 20),
            "sections of 32 MB": Tile(section_bytes=32 << 20),
        }
    return {
        "128x128 4 stages": Tile(stages=4),
        "128x128 2 stages": Tile(stages=2),
        "no pingpong": Tile(stages=4, pingpong=False),
        "192x128 3 stages": Tile(stages=3, consumers=3),
        "192x128 no pingpong": Tile(stages=3, consumers=3, pingpong=False),
        "128x64 6 stages": Tile(keys=64, stages=6),
        "8 warps": Tile(stages=4, consumers=1, warps=8),
    }


def programs(causal: bool) -> Any:
    """The program of plain or top-left causal attention, scaled by d ** -0.5."""
    from inductor_ext.templates.attention_program import Program, Span

    if not causal:
        return Program(scale=1.0)
    return Program(
        scale=1.0,
        keep="keep = k <= q",
        row_spans=(Span("0", "q1 + 1", "0", "q0 + 1"),),
    )


def scaled(causal: bool, d: int) -> Any:
    """``programs`` with the scale of a head dimension."""
    return dataclasses.replace(programs(causal), scale=d**-0.5)


def warm(d: int, causal: bool, name: str) -> None:
    """Compile a variant (in a process of a pool) and run it at a small size."""
    import torch
    from inductor_ext.templates import attention_gluon_launch as launch

    q, k, v = (torch.randn(1, 64, 600, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    launch.forward(q, k, v, [], [], scaled(causal, d), tile=variants(d)[name])


def check(shape: tuple[Any, ...], tile: Any) -> str:
    """What is wrong with a tile's result at a shape, by the rule of twice SDPA's error, or "ok"."""
    import torch
    from inductor_ext.templates import attention_gluon_launch as launch

    b, hq, hkv, sq, sk, d, causal = shape
    torch.manual_seed(sq + sk + d)
    q = torch.randn(b, sq, hq, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = (
        torch.randn(b, sk, hkv, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(2)
    )
    wide = [x.repeat_interleave(hq // x.shape[1], 1).double() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(2, 3) * d**-0.5
    if causal:
        i, j = (torch.arange(n, device="cuda") for n in (sq, sk))
        scores.masked_fill_(j > i[:, None], -torch.inf)
    lse = scores.logsumexp(3)
    exact = scores.softmax(3) @ wide[2]
    stock = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=hq != hkv
    )
    results = [launch.forward(q, k, v, [], [], scaled(causal, d), tile=tile) for _ in range(3)]
    torch.cuda.synchronize()
    ours, theirs = ((x.double() - exact).abs().max().item() for x in (results[0][0], stock))
    if not ours <= 2 * theirs + exact.abs().max().item() / 256:
        return f"error {ours:.3g} against {theirs:.3g} of SDPA at {shape}"
    if not (results[0][1].double() - lse).abs().max().item() < 1e-4:
        return f"lse is off by {(results[0][1].double() - lse).abs().max().item():.3g} at {shape}"
    if not all(torch.equal(x, y) for r in results[1:] for x, y in zip(r, results[0], strict=True)):
        return f"results differ from run to run at {shape}"
    return "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    begun = time.monotonic()
    names = {d: list(variants(d)) for d in (128, 64)}
    tasks = [(d, c, n) for d in names for c in (True, False) for n in names[d]]
    compiled = common.run_in_pool(warm, tasks, args.workers, 60)
    failed = [t for t in tasks if t not in compiled]
    print(f"compiled in {time.monotonic() - begun:.0f} s; failed: {failed}", flush=True)

    import torch
    import triton
    from inductor_ext.templates import attention_gluon_launch as launch

    threading.Thread(target=_watch, daemon=True).start()
    file = common.CsvFile(args.out / "attention_gluon.csv", FIELDS)
    right: dict[tuple[int, str], str] = {}
    for d in names:
        for name, tile in variants(d).items():
            verdict = "ok" if (d, True, name) in compiled else "not compiled"
            for shape in CHECKS:
                if shape[5] == d and verdict == "ok":
                    _at(f"check of {name} at {shape}")
                    verdict = check(shape, tile)
            right[d, name] = verdict
            print(f"check d{d} {name}: {verdict}", flush=True)
    rows = []
    for b, h, s, d, causal in CASES:
        case = f"{b}x{h}x{s}x{d} {'causal' if causal else 'full'}"
        q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        flops = 4 * b * h * s * s * d / (2 if causal else 1)
        calls: dict[str, Any] = {
            "SDPA": lambda q=q, k=k, v=v, c=causal: (
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)
            )
        }
        for name, tile in variants(d).items():
            if right[d, name] == "ok":
                calls[name] = functools.partial(
                    launch.forward, q, k, v, [], [], scaled(causal, d), tile=tile
                )
        for name, call in calls.items():
            _at(f"timing of {name} at {case}")
            ms = triton.testing.do_bench(call, warmup=20, rep=120, return_mode="median")
            row = {
                "case": case, "variant": name, "ms": ms, "tflops": flops / ms / 1e9,
                "check": right.get((d, name), ""),
            }  # fmt: skip
            file.write(row)
            rows.append([case, name, ms, flops / ms / 1e9])
    file.close()
    common.write_json(
        args.out / "attention_gluon.json", common.metadata("benchmarks.attention_gluon")
    )
    common.print_table("attention forward, bf16", ["case", "variant", "ms", "TFLOP/s"], rows)
    print(f"{time.monotonic() - begun:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
