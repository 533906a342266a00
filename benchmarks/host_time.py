"""What attention costs the host and the card, by size: where replacing it pays.

    python -m benchmarks.host_time --out FOLDER

A causal attention with a soft cap, written out (scores in memory), compiled with the plugin and
without, forward alone and with its gradients. "host": microseconds in which a call is handed to the
card, with nothing to wait for. "card": of a CUDA graph of the same call. Thresholds are taken away,
so that small sizes are replaced too. ``--decide``: every launch is decided anew ("decided").
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path
from typing import Any

# batch, heads, rows, head size
SIZES = (
    (4, 16, 512, 64), (4, 16, 1024, 64), (1, 16, 1024, 64), (2, 32, 1024, 128), (1, 8, 512, 64),
    (4, 16, 2048, 64), (1, 32, 2048, 128),
)  # fmt: skip


def attention(q: Any, k: Any, v: Any) -> Any:
    import torch

    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = 30 * torch.tanh(scores / 30)
    rows = torch.arange(q.shape[2], device=q.device)
    scores = scores.masked_fill(rows > rows[:, None], float("-inf"))
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v


def step(fn: Any, tensors: Any, seed: Any) -> Any:
    import torch

    return torch.autograd.grad(fn(*tensors), tensors, seed)


def host_us(call: Any, calls: int = 60) -> float:
    """Of one call; the median of five loops, none of which fills the card's queue."""
    import torch

    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return sorted(found)[2]


def card_us(call: Any, calls: int = 5) -> float:
    """Of one call in a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    found = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / calls * 1e3)
    return sorted(found)[3]


def measured(size: tuple[int, ...], training: bool, plugin: bool, decide: bool) -> dict[str, Any]:
    import torch
    from inductor_ext.lowerings import attention_sites as sites

    import inductor_ext
    from inductor_ext import compat_replay

    batch, heads, rows, dim = size
    make = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": training}
    q, k, v = (torch.randn(batch, heads, rows, dim, **make) for _ in range(3))
    seed = torch.randn_like(q)
    sites.LEAST_STATIC = 0, 0
    torch._dynamo.reset()
    fn = torch.compile(lambda q, k, v: attention(q, k, v))
    with inductor_ext.enable("attention") if plugin else inductor_ext.disable():
        fn(q, k, v)
        call = (lambda: step(fn, (q, k, v), seed)) if training else (lambda: fn(q, k, v))
        for _ in range(4):
            call()
        found = {"host_us": round(host_us(call), 1)}
        if decide:
            before, compat_replay.is_watched = compat_replay.is_watched, lambda: True
            call()
            found["decided_us"] = round(host_us(call), 1)
            compat_replay.is_watched = before
        found["card_us"] = round(card_us(call), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--decide", action="store_true")
    args = parser.parse_args()
    path = args.out / "host_time.csv"
    columns = ("size", "training", "program", "host_us", "decided_us", "card_us")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for size in SIZES:
            for training in (False, True):
                for program in ("plugin", "compile"):
                    plugin = program == "plugin"
                    row = {"size": "x".join(map(str, size)), "training": training}
                    try:
                        found = measured(size, training, plugin, plugin and args.decide)
                    except RuntimeError as error:
                        print(size, training, program, error, file=sys.stderr)
                        continue
                    writer.writerow(row | {"program": program} | found)
                    file.flush()
                    print(row, program, found, flush=True)


if __name__ == "__main__":
    main()
