"""Tilings of the attention forward, each checked and timed.

One command, ``python -m benchmarks.attention_tilings --kinds fwd --out DIR``. Kernels compile in a
pool of processes first. "error" is the relative error by the norm against SDPA, which rounds to
bf16 as well: up to about 4e-3 is rounding. "TF" counts 4 B H Sq Sk D operations, half for causal.
``--kinds masks`` checks and times masked scores with the default tilings; their errors are against
fp32.
"""

from __future__ import annotations

import argparse
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
LOG2E = 1.4426950408889634


def _grid(**values: Sequence[Any]) -> list[Options]:
    return [tuple(zip(values, v, strict=True)) for v in itertools.product(*values.values())]


def _tile(
    m: int, n: int, warps: int, stages: Sequence[int], **more: Sequence[Any]
) -> list[Options]:
    return _grid(block_m=(m,), block_n=(n,), warps=(warps,), stages=stages, **more)


BOTH = (False, True)
TRIED: dict[int, list[Options]] = {
    64: [
        *_tile(128, 64, 4, (3,), late=BOTH, merged=BOTH),
        *_tile(128, 128, 8, (2, 3), late=BOTH, merged=BOTH),
        *_tile(128, 128, 4, (2,), merged=(True,)),
        *_tile(64, 128, 4, (2, 3), late=BOTH),
        *_tile(64, 64, 4, (3,), late=(True,)),
        *_tile(128, 64, 8, (2,), halves=(2,), lagged=BOTH),
        *_tile(64, 64, 4, (2, 3), halves=(2,), lagged=(True,)),
        *_tile(128, 128, 8, (2,), late=(True,), near=(4, 8, 1000)),
    ],
    128: [
        *_tile(128, 128, 8, (2, 3), late=BOTH, merged=BOTH),
        *_tile(128, 64, 8, (2, 3), late=BOTH, merged=BOTH),
        *_tile(128, 64, 4, (2,), merged=(True,)),
        *_tile(64, 64, 4, (2, 3), late=BOTH),
        *_tile(64, 128, 4, (2,), late=(True,)),
        *_tile(128, 64, 8, (2, 3), halves=(2,), lagged=BOTH),
        *_tile(128, 32, 8, (3,), halves=(2,), lagged=(True,)),
        *_tile(128, 128, 8, (2,), late=(True,), near=(4, 8, 1000)),
    ],
    256: [
        *_tile(128, 64, 8, (2,), late=BOTH, merged=BOTH),
        *_tile(128, 32, 8, (2, 3), late=BOTH),
        *_tile(64, 64, 4, (2,), late=BOTH),
        *_tile(64, 64, 8, (2,), late=BOTH),
    ],
}


def label(options: Options) -> str:
    """Options in one word."""
    values = dict(options)
    shape = "x".join(str(values.pop(k)) for k in ("block_m", "block_n", "warps", "stages"))
    extra = [k if v is True else f"{k}={v}" for k, v in values.items() if v is not False]
    return " ".join([shape, *extra])


def program_of(name: str, d: int) -> Any:
    """A program by its name: "full", "causal", or one of ``MASKS``."""
    from inductor_ext.templates.attention_program import Input, Program, Span

    factor = d**-0.5 * LOG2E
    scaled: dict[str, Any] = {"scale": d**-0.5, "score": f"r = s * {factor!r}"}
    past: dict[str, Any] = {
        "keep": "keep = q >= k", "row_spans": (Span("0", "q1 + 1", "0", "q0 + 1"),)
    }  # fmt: skip
    import torch

    if name == "full":
        return Program(**scaled)
    if name == "causal":
        return Program(**scaled, **past)
    if name == "window":
        span = Span("q0 - 1023", "q1 + 1", "q1 - 1023", "q0 + 1")
        return Program(**scaled, keep="keep = (q >= k) & (q - k < 1024)", row_spans=(span,))
    if name == "sinks":
        spans = (
            Span("0", "tl.minimum(q1 + 1, 4)", "0", "tl.minimum(q0 + 1, 4)"),
            Span("q0 - 1023", "q1 + 1", "q1 - 1023", "q0 + 1"),
        )
        keep = "keep = (q >= k) & ((q - k < 1024) | (k < 4))"
        return Program(**scaled, keep=keep, row_spans=spans)
    if name == "softcap":
        tanh = f"1.0 - 2.0 / (1.0 + tl.math.exp2(s * {2 * factor / 30!r}))"
        return Program(score=f"r = {30 * LOG2E!r} * ({tanh})", **past)
    if name == "alibi":
        slope = f"x0 * {LOG2E!r} * (k - q).to(tl.float32)"
        return Program((Input(torch.float32, "h"),), score=f"r = s * {factor!r} + {slope}", **past)
    axes = {"bias": "hqk", "slots": "hk"}[name]
    bias = f"x0.to(tl.float32) * {LOG2E!r}"
    return Program((Input(torch.bfloat16, axes),), score=f"r = s * {factor!r} + {bias}", **past)


MASKS = ("window", "sinks", "softcap", "alibi", "bias", "slots")


def inputs_of(name: str, H: int, S: int) -> list[Any]:
    """The tensors that a program of ``program_of`` reads."""
    import torch

    if name == "alibi":
        return [-(2.0 ** -torch.linspace(1, 8, H, device="cuda")).view(1, H, 1, 1)]
    shape = {"bias": (1, H, S, S), "slots": (1, H, 1, S)}.get(name)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16)] if shape else []


def exact(name: str, q: Any, k: Any, v: Any, inputs: Sequence[Any]) -> Any:
    """A masked case in fp32, for few rows and keys."""
    import torch

    S, d = q.shape[2:]
    i, j = (torch.arange(S, device="cuda").view(shape) for shape in ((S, 1), (1, S)))
    r = (q.float() @ k.float().mT) * d**-0.5
    keep = i >= j
    if name in ("window", "sinks"):
        keep = keep & ((i - j < 1024) | ((j < 4) if name == "sinks" else (j < 0)))
    if name == "softcap":
        r = 30 * torch.tanh(r / 30)
    if name == "alibi":
        r = r + inputs[0] * (j - i)
    if name in ("bias", "slots"):
        r = r + inputs[0].float()
    return r.masked_fill(~keep, float("-inf")).softmax(-1) @ v.float()


def launch(case: Case, name: str, options: Options | None) -> Callable[..., Any]:
    """A call of (q, k, v, *inputs) that gives the output."""
    from inductor_ext.templates import attention_launch

    program = program_of(name, case[4])
    chosen = None if options is None else attention_launch.Tiling(**dict(options))

    def call(q: Any, k: Any, v: Any, *inputs: Any) -> Any:
        return attention_launch.forward(q, k, v, inputs, (), program, "ieee", chosen)[0]

    return call


def draw(case: Case, S: int | None = None) -> tuple[Any, ...]:
    """Fresh q, k, v."""
    import torch

    _, B, H, size, D, _ = case
    shape = (B, H, S or size, D)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def compile_one(case: Case, name: str, options: Options | None) -> str:
    """Launch once on a small input, for Triton's cache."""
    import torch

    from inductor_ext.compat_launch import direct_launches

    with direct_launches():
        inputs = inputs_of(name, case[2], 256)
        launch(case, name, options)(*draw(case, 256), *inputs)
    torch.cuda.synchronize()
    return label(options or ())


def tasks(kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    """What ``compile_one`` is called with."""
    found: list[tuple[Any, ...]] = []
    if "fwd" in kinds:
        for case in CASES:
            name = "causal" if case[5] else "full"
            found += [(case, name, options) for options in TRIED[case[4]]]
    if "masks" in kinds:
        found += [(CASES[i], name, None) for i in (0, 2) for name in MASKS]
    return found


def _timed(call: Callable[..., Any], inputs: tuple[Any, ...], flops: float) -> dict[str, float]:
    from inductor_ext import measure

    us = measure.time_graph(call, [inputs], rounds=9, calls=2)
    return {"us": us, "tflops": flops / us / 1e6}


def _error(got: Any, truth: Any) -> float:
    difference = got.float() - truth.float()
    return (difference.norm() / truth.float().norm()).item()


def rows(kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A CSV row per case and tiling, SDPA's own forms among them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from inductor_ext import measure

    for case in CASES if "fwd" in kinds else ():
        name, B, H, S, D, causal = case
        torch.manual_seed(0)
        inputs = draw(case)
        flops = 4.0 * B * H * S * S * D / (2 if causal else 1)
        truth = sdpa(*inputs, is_causal=causal)
        peers = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        for peer, backend in peers.items():
            row: dict[str, Any] = {"case": name, "tiling": peer}
            try:
                with sdpa_kernel(backend):
                    row |= _timed(lambda q, k, v: sdpa(q, k, v, is_causal=causal), inputs, flops)  # noqa: B023
            except Exception as error:
                row["failure"] = measure.one_line(error)
            yield row
        for options in TRIED[D]:
            row = {"case": name, "tiling": label(options)}
            try:
                call = launch(case, "causal" if causal else "full", options)
                row["error"] = _error(call(*inputs), truth)
                row |= _timed(call, inputs, flops)
            except Exception as error:
                row["failure"] = measure.one_line(error)
            yield row
    for case in (CASES[0], CASES[2]) if "masks" in kinds else ():
        name, B, H, S, D, _ = case
        for mask in MASKS:
            row = {"case": f"{name} {mask}", "tiling": "default"}
            try:
                torch.manual_seed(0)
                call = launch(case, mask, None)
                small = (*draw((name, 1, H, 2000, D, True)), *inputs_of(mask, H, 2000))
                row["error"] = _error(call(*small), exact(mask, *small[:3], small[3:]))
                inputs = (*draw(case), *inputs_of(mask, H, S))
                kept = S * S / 2
                if mask in ("window", "sinks"):
                    kept = 1024 * S - 512 * 1024
                row |= _timed(call, inputs, 4.0 * B * H * kept * D)
            except Exception as error:
                row["failure"] = measure.one_line(error)
            yield row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--kinds", type=common.names_of(("fwd", "masks")), default=["fwd"], help="fwd, masks")
    add("--out", type=Path, default=Path("attention_tilings"), help="folder of the CSV file")
    add("--workers", type=int, default=14, help="processes that compile")
    args = parser.parse_args(argv)
    common.run_in_pool(compile_one, tasks(args.kinds), args.workers, None)

    from tqdm import tqdm

    from inductor_ext.compat_launch import direct_launches

    file = common.CsvFile(args.out / "attention_tilings.csv", FIELDS)
    found = []
    with direct_launches():
        for row in tqdm(rows(args.kinds), "timed", mininterval=5, file=sys.stderr):
            file.write(row)
            found.append(row)
    file.close()
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
