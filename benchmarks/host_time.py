"""What attention costs the host and the card, by size: where replacing it pays.

    python -m benchmarks.host_time --out FOLDER

A causal attention with a soft cap, written out (scores in memory), compiled with the plugin and
without, forward alone and with its gradients; "operation": the operations alone, forward or
backward, as a program calls them. "host": microseconds in which a call is handed to the card, with
nothing to wait for; "decided": with every launch decided anew. "card": of a CUDA graph of the same
call. Thresholds are taken away, so that small sizes are replaced too.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import time
from pathlib import Path
from typing import Any

# batch, heads, rows, head size
SIZES = ((4, 16, 512, 64), (4, 16, 1024, 64), (1, 16, 1024, 64), (2, 32, 1024, 128))


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


@contextlib.contextmanager
def decided() -> Any:
    """Nothing is repeated from a tape."""
    from inductor_ext import compat_replay

    before, compat_replay.is_watched = compat_replay.is_watched, lambda: True
    try:
        yield
    finally:
        compat_replay.is_watched = before


def both(call: Any) -> dict[str, float]:
    """A call's host time as it is, and decided."""
    for _ in range(4):
        call()
    found = {"host_us": round(host_us(call), 1)}
    with decided():
        call()
        return found | {"decided_us": round(host_us(call), 1)}


def operations(size: tuple[int, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Of the operations alone: forward, backward."""
    import torch

    import inductor_ext  # noqa: F401

    batch, heads, rows, dim = size
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, do = (torch.randn(batch, heads, rows, dim, **make) for _ in range(4))
    score = f"v0 = lt.Tensor(q, k); v1 = mul.Tensor(s, {dim**-0.5}); v2 = tanh.default(v1); "
    score += "v3 = where.ScalarSelf(v0, -inf, v2); v3"
    given = (q, k, v, [], [], score, "zero")
    ops = torch.ops.inductor_ext
    forward, backward = ops.attention.default.launched, ops.attention_backward.default.launched
    with torch.no_grad():
        out, lse = forward(*given, None, 0.0)
        rest = (out, lse, [True] * 3, None, 0.0)
        return (
            both(lambda: forward(*given, None, 0.0)),
            both(lambda: backward(do, None, *given, *rest)),
        )


def measured(size: tuple[int, ...], training: bool, plugin: bool) -> dict[str, Any]:
    import torch
    from inductor_ext.lowerings import attention_replacement as sites

    import inductor_ext

    batch, heads, rows, dim = size
    make = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": training}
    q, k, v = (torch.randn(batch, heads, rows, dim, **make) for _ in range(3))
    seed = torch.randn_like(q)
    sites.LEAST_STATIC = 0, 0
    torch._dynamo.reset()
    fn = torch.compile(lambda q, k, v: attention(q, k, v))
    with inductor_ext.enable("attention") if plugin else inductor_ext.disable():
        call = (lambda: step(fn, (q, k, v), seed)) if training else (lambda: fn(q, k, v))
        call()
        found: dict[str, Any] = both(call)
        if not plugin:
            del found["decided_us"]
        return found | {"card_us": round(card_us(call), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    columns = ("size", "training", "program", "host_us", "decided_us", "card_us")
    with (args.out / "host_time.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()

        def write(size: tuple[int, ...], training: bool, program: str, found: Any) -> None:
            row = {"size": "x".join(map(str, size)), "training": training, "program": program}
            writer.writerow(row | found)
            file.flush()
            print(row, found, flush=True)

        for size in SIZES:
            for training, found in zip((False, True), operations(size), strict=True):
                write(size, training, "operation", found)
            for training in (False, True):
                for program in ("plugin", "compile"):
                    write(size, training, program, measured(size, training, program == "plugin"))


if __name__ == "__main__":
    main()
