"""Attention with dropout, side by side: ``python -m benchmarks.attention_dropout``.

Columns
  ours      inductor_ext's kernels of this score; undropped: the same with no dropout
  cudnn     scaled_dot_product_attention by cuDNN, fa2 by FlashAttention-2, where they have the mask
  plugin    torch.compile of the program as models write it, with the plugin
  compile   the same without it

``tflops`` counts two products of every pair that the mask keeps, five for a backward; ``peak_mib``
is what a step, forward and backward, adds to the memory at its peak. Results are judged by
``tests/gpu/test_attention_dropout.py``; what is dropped is another draw for every column.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common

# name: batch, heads, heads of keys, tokens, size of a head, window
CASES = {
    "causal 128": (4, 16, 16, 4096, 128, None),
    "causal 64": (4, 32, 32, 4096, 64, None),
    "causal 128, 4:1": (1, 32, 8, 4096, 128, None),
    "window 1024, 128": (4, 16, 16, 4096, 128, 1024),
}
COLUMNS = ("ours", "undropped", "cudnn", "fa2", "plugin", "compile")
FIELDS = ["case", "kind", "column", "p", "us", "tflops", "peak_mib", "failure"]
P = 0.1


def _model(window: int | None) -> Callable[..., Any]:
    """Attention as Hugging Face's models write it, the mask made in the program."""
    import torch
    import torch.nn.functional as F

    from benchmarks.attention_cases import repeated

    def model(q: Any, k: Any, v: Any) -> Any:
        group, n = q.shape[1] // k.shape[1], q.shape[2]
        k, v = repeated(k, group), repeated(v, group)
        at = torch.arange(n, device=q.device)
        keep = at[:, None] >= at
        if window is not None:
            keep = keep & (at[:, None] - at < window)
        mask = torch.where(keep, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
        s = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
        p = F.dropout(F.softmax(s, -1, dtype=torch.float32).to(q.dtype), P)
        return torch.matmul(p, v).transpose(1, 2).contiguous().transpose(1, 2)

    return model


def _call(column: str, window: int | None) -> Callable[..., Any] | None:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from inductor_ext import ops

    if column in ("ours", "undropped"):
        p = P if column == "ours" else 0.0
        ends = None if window is None else (window - 1, 0)

        def ours(q: Any, k: Any, v: Any) -> Any:
            # The log-sum-exp keeps this from SDPA.
            return ops.attention(q, k, v, causal=True, window=ends, dropout=p, return_lse=True)[0]

        return ours
    if column in ("plugin", "compile"):
        return torch.compile(common.own_code(_model(window), column), dynamic=False)
    if window is not None:
        return None
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[column]

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=P, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


@contextlib.contextmanager
def _setting(column: str) -> Any:
    """The plugin as a column has it; no cuDNN beside our own kernels."""
    import torch

    import inductor_ext

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and column != "undropped")
    try:
        with inductor_ext.enable() if column == "plugin" else inductor_ext.disable():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def measure_column(case: str, column: str, timing: bool = True) -> list[dict[str, Any]]:
    """CSV rows of a forward and a backward; without ``timing`` what compiles is compiled."""
    import torch

    from benchmarks.attention import timed
    from inductor_ext import measure

    batch, heads, own, n, dim, window = CASES[case]
    row = {"case": case, "column": column, "p": 0.0 if column == "undropped" else P}
    rows = [row | {"kind": kind} for kind in ("fwd", "bwd")]
    pairs = n * (n + 1) / 2 if window is None else n * window - window * (window - 1) / 2
    torch.manual_seed(0)
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (
        torch.randn(batch, n, h, dim, **make).transpose(1, 2).requires_grad_()
        for h in (heads, own, own)
    )
    do = torch.randn_like(q)
    try:
        with _setting(column):
            fn = _call(column, window)
            if fn is None:
                return []
            # A backward that may be called again, from the first time on.
            torch.autograd.grad(fn(q, k, v), (q, k, v), do, retain_graph=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = fn(q, k, v)
            torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            if not timing:
                return rows

            def backward() -> Any:
                return torch.autograd.grad(out, (q, k, v), do, retain_graph=True)

            for row, call, products in zip(
                rows, (lambda: fn(q, k, v), backward), (2, 5), strict=True
            ):
                us = timed(call)
                flops = products * 2 * batch * heads * dim * pairs
                row |= {"us": us, "tflops": flops / us * 1e-6, "peak_mib": peak}
    except Exception as failure:
        rows[0]["failure"] = measure.one_line(failure)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "benchmarks.attention_dropout", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--columns", type=common.names_of(COLUMNS), default=list(COLUMNS), help="comma-separated")
    add("--cases", default="", help="only cases whose name has this in it")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--warm", action="store_true", help="only compile")
    args = parser.parse_args()
    import torch

    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as failure:
        sys.exit(str(failure))
    jobs = [(case, column) for case in CASES if args.cases in case for column in args.columns]
    if not args.warm:
        common.write_json(
            args.out / "attention_dropout.json", common.metadata("benchmarks.attention_dropout")
        )
        table = common.CsvFile(args.out / "attention_dropout.csv", FIELDS)
    for case, column in jobs:
        torch._dynamo.reset()
        for row in measure_column(case, column, not args.warm):
            print(*row.values(), flush=True)
            if not args.warm:
                table.write(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
