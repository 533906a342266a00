"""Tilings of the attention backward, each kernel checked and timed, and the backward as a whole.

One command, ``python -m benchmarks.attention_tilings_backward --kinds bwd --out DIR``. Kernels
compile in a pool of processes first. Parts: "keys" makes dk and dv, "staged" the same and stores
ds, "rows" makes dq, "product" makes it of the stored ds; "whole" is all of a backward, its tiling
"split" (keys and rows) or "staged" with the memory for ds in MiB. "TF" counts, per product of a
part, 2 B H Sq Sk D operations, half for causal, and five products for a whole. "error" is the
largest relative error by the norm against SDPA's gradients, which are rounded as well: up to 6e-3
is rounding. "same": three runs gave the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

Case = tuple[str, int, int, int, int, int, bool]  # name, B, Hq, Hkv, S, D, causal
Options = tuple[int, int, int, int, bool]  # block_m, block_n, warps, stages, ahead
CASES: tuple[Case, ...] = (
    ("d128 causal", 4, 16, 16, 4096, 128, True),
    ("d64 causal", 4, 32, 32, 4096, 64, True),
    ("d128 full", 2, 16, 16, 8192, 128, False),
    ("d256 causal", 4, 8, 8, 4096, 256, True),
    ("d128 causal 4:1", 4, 32, 8, 4096, 128, True),
    ("d128 causal 16k", 1, 16, 16, 16384, 128, True),
)
PRODUCTS = {"keys": 4, "staged": 4, "rows": 3, "product": 1, "whole": 5}
FIELDS = ["case", "part", "tiling", "us", "tflops", "error", "same", "failure"]
LIMIT = 1e-2
MEMORY = (512, 1024, 2048)


def _grid(*values: Sequence[int], ahead: Sequence[bool] = (False,)) -> list[Options]:
    return [(m, n, w, s, a) for m, n, w, s, a in itertools.product(*values, ahead)]


BOTH = (False, True)
TRIED: dict[int, dict[str, list[Options]]] = {
    64: {
        "keys": [
            *_grid((64,), (128,), (8,), (2, 3), ahead=BOTH),
            *_grid((64,), (64,), (4,), (2, 3), ahead=BOTH),
            *_grid((32,), (128,), (8,), (3,), ahead=BOTH), *_grid((128,), (128,), (8,), (2,)),
        ],
        "rows": [
            *_grid((128,), (64,), (8,), (2, 3), ahead=BOTH), *_grid((128,), (128,), (8,), (2,)),
            *_grid((64,), (64,), (4,), (3,), ahead=BOTH), *_grid((64,), (128,), (4,), (3,)),
        ],
        "product": [
            *_grid((128,), (64, 128), (4, 8), (3, 4)), *_grid((64,), (128,), (4,), (3,)),
        ],
    },
    128: {
        "keys": [
            *_grid((64,), (128,), (8,), (2,), ahead=BOTH), *_grid((64,), (128,), (8,), (3,)),
            *_grid((64,), (64,), (4,), (2,), ahead=BOTH),
            *_grid((32,), (128,), (8,), (2, 3), ahead=BOTH),
            *_grid((32,), (64,), (4,), (2, 3), ahead=BOTH),
        ],
        "rows": [
            *_grid((128,), (64,), (8,), (2, 3), ahead=BOTH), *_grid((128,), (128,), (8,), (2,)),
            *_grid((64,), (64,), (4,), (2, 3), ahead=BOTH),
            *_grid((128,), (32,), (8,), (3,), ahead=BOTH),
        ],
        "product": [
            *_grid((128,), (64,), (4, 8), (3, 4)), *_grid((128,), (128,), (4, 8), (2, 3)),
            *_grid((64,), (128,), (4,), (3,)), *_grid((64,), (64,), (4,), (4,)),
        ],
    },
    256: {
        "keys": [
            *_grid((64,), (64,), (8,), (1, 2)), *_grid((32,), (64,), (8,), (2,), ahead=BOTH),
            *_grid((32,), (128,), (8,), (1,)),
        ],
        "rows": [
            *_grid((64,), (64,), (4, 8), (1, 2)), *_grid((128,), (32,), (8,), (2,)),
            *_grid((128,), (64,), (8,), (1,)),
        ],
        "product": [*_grid((128,), (64,), (8,), (2, 3)), *_grid((64,), (64,), (4,), (3,))],
    },
}  # fmt: skip


def label(options: Options) -> str:
    """Options in one word."""
    return "x".join(map(str, options[:4])) + (" ahead" if options[4] else "")


def program_of(causal: bool, d: int) -> Any:
    """The program of a scaled score."""
    from inductor_ext.templates.attention_program import LOG2E, Program, Span

    scale = d**-0.5
    given: dict[str, Any] = {
        "scale": scale, "score": f"r = s * {scale * LOG2E!r}", "gradient": f"ds = g * {scale!r}"
    }  # fmt: skip
    if not causal:
        return Program(**given)
    return Program(
        **given, keep="keep = q >= k", row_spans=(Span("0", "q1 + 1", "0", "q0 + 1"),),
        column_spans=(Span("k0", "rows", "k1", "rows"),),
    )  # fmt: skip


def draw(case: Case, S: int | None = None) -> tuple[Any, ...]:
    """Fresh q, k, v and do."""
    import torch

    _, B, Hq, Hkv, size, D, _ = case
    return tuple(
        torch.randn((B, heads, S or size, D), device="cuda", dtype=torch.bfloat16)
        for heads in (Hq, Hkv, Hkv, Hq)
    )


def forward(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """(out, lse) by torch."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(q, k, v, is_causal=causal)[:2]


class Part:
    """One kernel of a case, ready to be launched with other tilings."""

    def __init__(self, case: Case, part: str, tensors: tuple[Any, ...], out: Any, lse: Any) -> None:
        import torch
        from inductor_ext.templates import attention_backward_launch as launch

        self.case, self.part, self.launch = case, part, launch
        q, k, v, do = self.tensors = tensors
        self.out, self.lse = out, lse
        self.program = program_of(case[6], case[5])
        self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (q, k, v))
        self.call = launch._Backward(do, None, q, k, v, (), (), self.program, out, lse, "ieee")

    def stage(self, block: int) -> tuple[Any, int]:
        """(memory, heads) of as many heads of keys as 2 GiB hold."""
        import torch

        lines, width = self.call._stage_size(block)
        group = self.case[2] // self.case[3]
        each = group * lines * width * 2
        heads = max(min((2 << 30) // each, self.case[1] * self.case[3]), 1)
        memory = torch.empty((heads * group * lines, width), dtype=torch.bfloat16, device="cuda")
        return self.launch._Stage(memory, block), heads

    def run(self, options: Options) -> Callable[[], None]:
        """A call that makes the part's results, of all heads or as many as 2 GiB hold."""
        chosen = self.launch.Tiling(*options)
        if self.part == "keys":
            return lambda: self.call.keys(self.dk, self.dv, {}, chosen)
        if self.part == "rows":
            return lambda: self.call.queries(self.dq, {}, chosen)
        if self.part == "staged":
            stage, heads = self.stage(chosen.block_n)
            return lambda: self.call.keys(self.dk, self.dv, {}, chosen, stage, 0, heads)
        keys = self.launch.Tiling(*TRIED[self.case[5]]["keys"][0])
        stage, heads = self.stage(keys.block_n)
        self.call.keys(self.dk, self.dv, {}, keys, stage, 0, heads)
        group = self.case[2] // self.case[3]
        return lambda: self.call.product(self.dq, (), chosen, stage, 0, heads * group)

    def share(self, options: Options) -> float:
        """Of the heads that a call makes."""
        if self.part in ("keys", "rows"):
            return 1.0
        block = options[1] if self.part == "staged" else TRIED[self.case[5]]["keys"][0][1]
        return self.stage(block)[1] / (self.case[1] * self.case[3])

    def results(self, share: float) -> dict[str, Any]:
        """What was written, of the first heads."""
        names = {"keys": ("dk", "dv"), "staged": ("dk", "dv")}.get(self.part, ("dq",))
        found = {}
        for name in names:
            tensor = getattr(self, name).flatten(0, 1)
            found[name] = tensor[: round(share * tensor.shape[0])]
        return found


def compile_one(case: Case, part: str, options: Options) -> str:
    """Launch once on a small input, for Triton's cache."""
    import torch

    from inductor_ext.compat_launch import direct_launches

    small = (case[0], 1, *case[2:4], 256, *case[5:])
    with direct_launches():
        tensors = draw(small)
        prepared = Part(small, part, tensors, *forward(*tensors[:3], case[6]))
        prepared.run(options)()
    torch.cuda.synchronize()
    return label(options)


def tasks(cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    """What ``compile_one`` is called with; cases that differ in sizes share kernels."""
    found = {}
    for case in cases:
        for part in ("staged", "rows", "product", "keys"):
            for options in TRIED[case[5]]["keys" if part == "staged" else part]:
                found[case[5:], part, options] = (case, part, options)
    return list(found.values())


def _timed(call: Callable[[], Any]) -> float:
    from inductor_ext import measure

    return measure.time_graph(call, [()], rounds=7, calls=1)


def _errors(found: dict[str, Any], truth: dict[str, Any]) -> float:
    worst = 0.0
    for name, got in found.items():
        right = truth[name].flatten(0, 1)[: got.shape[0]].float()
        worst = max(worst, ((got.float() - right).norm() / right.norm()).item())
    return worst


def _tried(prepared: Part, options: Options, truth: dict[str, Any], flops: float) -> dict[str, Any]:
    import torch

    share = prepared.share(options)
    run = prepared.run(options)
    runs = []
    for _ in range(3):
        for name in ("dq", "dk", "dv"):
            getattr(prepared, name).fill_(torch.nan)
        run()
        runs.append({name: t.clone() for name, t in prepared.results(share).items()})
    same = all(torch.equal(runs[0][name], other[name]) for other in runs[1:] for name in runs[0])
    us = _timed(run) / share
    error = _errors(runs[0], truth)
    return {"us": us, "tflops": flops / us / 1e6, "error": error, "same": same}


def _whole(
    case: Case, tensors: tuple[Any, ...], out: Any, lse: Any, memory: int
) -> Callable[[], tuple[Any, ...]]:
    from inductor_ext.templates import attention_backward_launch as launch

    q, k, v, do = tensors
    program = program_of(case[6], case[5])
    return lambda: launch.backward(
        do, None, q, k, v, (), (), program, out, lse, (True,) * 3, "ieee", memory=memory
    )[:3]


def rows(cases: Sequence[Case], parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A CSV row per case, part and tiling, SDPA's own backwards among them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from inductor_ext import measure

    for case in cases:
        name, B, Hq, Hkv, S, D, causal = case
        torch.manual_seed(0)
        tensors = draw(case)
        flops = 2.0 * B * Hq * S * S * D / (2 if causal else 1)
        out, lse = forward(*tensors[:3], causal)
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        truth: dict[str, Any] = {}
        peers = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for peer, backend in peers.items():
            row: dict[str, Any] = {"case": name, "part": "whole", "tiling": peer}
            try:
                with sdpa_kernel(backend):
                    result = sdpa(*leaves, is_causal=causal, enable_gqa=Hq != Hkv)

                def back(result: Any = result) -> Any:
                    return torch.autograd.grad(result, leaves, tensors[3], retain_graph=True)  # noqa: B023

                truth = dict(zip(("dq", "dk", "dv"), back(), strict=True))
                back()
                us = _median(back)
                row |= {"us": us, "tflops": 5 * flops / us / 1e6}
            except Exception as error:
                row["failure"] = measure.one_line(error)
            yield row
        for memory in (0, *MEMORY):
            tiling = f"staged {memory}" if memory else "split"
            row = {"case": name, "part": "whole", "tiling": tiling}
            try:
                call = _whole(case, tensors, out, lse, memory << 20)
                found = [call() for _ in range(3)]
                row["same"] = all(map(torch.equal, found[0] + found[0], found[1] + found[2]))
                row["error"] = _errors(
                    {n: t.flatten(0, 1) for n, t in zip(("dq", "dk", "dv"), found[0], strict=True)},
                    truth,
                )
                del found
                row["us"] = _timed(call)
                row["tflops"] = 5 * flops / row["us"] / 1e6
            except Exception as error:
                row["failure"] = measure.one_line(error)
            yield row
        for part in parts:
            prepared = Part(case, part, tensors, out, lse)
            for options in TRIED[D]["keys" if part == "staged" else part]:
                row = {"case": name, "part": part, "tiling": label(options)}
                try:
                    row |= _tried(prepared, options, truth, PRODUCTS[part] * flops)
                except Exception as error:
                    row["failure"] = measure.one_line(error)
                yield row


def _median(call: Callable[[], Any]) -> float:
    """us of a call that can't be captured."""
    import torch

    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    names = tuple(case[0] for case in CASES)
    add("--kinds", type=common.names_of(("bwd", "whole")), default=["bwd"], help="bwd, whole")
    add("--cases", type=common.names_of(names), default=list(names[:3]), help=", ".join(names))
    add("--out", type=Path, default=Path("attention_backward"), help="folder of the CSV file")
    add("--workers", type=int, default=14, help="processes that compile")
    add("--budget-seconds", type=float, help="time for timing")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if case[0] in args.cases]
    parts = ("staged", "product", "keys", "rows") if "bwd" in args.kinds else ()
    if parts:
        common.run_in_pool(compile_one, tasks(cases), args.workers, None)

    from tqdm import tqdm

    from inductor_ext.compat_launch import direct_launches

    file = common.CsvFile(args.out / "attention_tilings_backward.csv", FIELDS)
    found = []
    with direct_launches():
        timed = tqdm(rows(cases, parts), "timed", mininterval=5, file=sys.stderr)
        for row in common.Budget(args.budget_seconds).take(timed):
            file.write(row)
            found.append(row)
    file.close()
    order = list(PRODUCTS)
    for case in dict.fromkeys(row["case"] for row in found):
        of_case = sorted(
            (row for row in found if row["case"] == case),
            key=lambda row: (order.index(row["part"]), row.get("us", 1e30)),
        )
        lines = [[row.get(field, "") for field in FIELDS[1:]] for row in of_case]
        for line in lines:
            if isinstance(line[4], float):
                line[4] = f"{line[4]:.1e}{'' if line[4] < LIMIT else ' WRONG'}"
        common.print_table(case, FIELDS[1:], lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
