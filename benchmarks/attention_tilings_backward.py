"""Tilings of the attention backward, each kernel checked and timed, and the backward as a whole.

One command, ``python -m benchmarks.attention_tilings_backward --out DIR``. Kernels compile in a
pool of processes first. Parts: "keys" makes dk and dv, "rows" makes dq; "whole" is all of a
backward with the default tilings. "TF" counts 2 B H Sq Sk D operations, half for causal, for each
of a part's products, and for five of a whole. "error" is the largest relative error by the norm
against SDPA's gradients, which are rounded as well: up to 6e-3 is rounding. "same": three runs gave
the same bits. ``--kinds masks`` checks and times masked scores with the default tilings; their
errors are against fp32.
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
Options = tuple[Any, ...]  # the fields of a Tiling
CASES: tuple[Case, ...] = (
    ("d128 causal", 4, 16, 16, 4096, 128, True),
    ("d64 causal", 4, 32, 32, 4096, 64, True),
    ("d128 full", 2, 16, 16, 8192, 128, False),
    ("d256 causal", 4, 8, 8, 4096, 256, True),
    ("d128 causal 4:1", 4, 32, 8, 4096, 128, True),
    ("d128 causal 16k", 1, 16, 16, 16384, 128, True),
)
PRODUCTS = {"keys": 4, "rows": 3, "whole": 5}
FIELDS = ["case", "part", "tiling", "us", "tflops", "error", "same", "failure"]
LIMIT = 1e-2


BOTH = (False, True)
FORMS = tuple(itertools.product(BOTH, BOTH))


def _tile(
    m: int, n: int, warps: int, *stages: int, forms: Sequence[tuple[bool, bool]] = ((True, False),)
) -> list[Options]:
    return [(m, n, warps, s, *form) for s in stages for form in forms]


TRIED: dict[int, dict[str, list[Options]]] = {
    64: {
        "keys": [
            *_tile(64, 64, 4, 3, forms=FORMS), *_tile(64, 64, 4, 2, 4),
            *_tile(64, 128, 8, 3, forms=FORMS[2:]), *_tile(128, 64, 4, 2),
            *_tile(128, 128, 8, 2), *_tile(64, 64, 8, 3), (64, 64, 4, 3, True, False, 16),
            (64, 64, 4, 3, True, False, 8), (64, 64, 4, 3, True, False, 128),
        ],
        "rows": [
            *_tile(64, 64, 4, 3, forms=FORMS), *_tile(64, 64, 4, 2, 4), *_tile(128, 64, 8, 3),
            *_tile(64, 128, 4, 2, 3), *_tile(128, 64, 4, 3), (64, 64, 4, 3, True, False, 8),
        ],
    },
    128: {
        "keys": [
            *_tile(64, 64, 4, 2, forms=FORMS), *_tile(64, 128, 8, 3, forms=FORMS),
            *_tile(64, 128, 8, 2, 4), *_tile(64, 64, 4, 3), *_tile(32, 64, 4, 3),
            (64, 64, 4, 2, True, False, 16), (64, 64, 4, 2, True, False, 8),
            (64, 64, 4, 2, True, False, 128), (64, 128, 8, 3, True, False, 8),
        ],
        "rows": [
            *_tile(128, 64, 8, 3, forms=FORMS), *_tile(128, 64, 8, 4), *_tile(128, 32, 8, 4),
            *_tile(64, 64, 4, 2, forms=FORMS[2:]), *_tile(128, 128, 8, 2), *_tile(64, 128, 4, 2),
            (128, 64, 8, 3, True, False, 8), (128, 64, 8, 3, True, False, 128),
        ],
    },
    256: {
        "keys": [
            *_tile(64, 64, 8, 1, 2, forms=FORMS[2:]), *_tile(32, 64, 8, 2, 3),
            *_tile(64, 64, 8, 2, forms=FORMS[:1]),
            (64, 64, 8, 2, True, False, 32, True), (64, 64, 8, 2, False, False, 32, True),
            (32, 128, 8, 2, True, False, 32, True), (64, 64, 4, 2, True, False, 32, True),
            (64, 128, 8, 1, True, False, 32, True),
        ],
        "rows": [
            *_tile(64, 64, 8, 2, forms=FORMS[2:]), *_tile(64, 64, 4, 1, 2), *_tile(128, 32, 8, 2),
            *_tile(128, 64, 8, 1), *_tile(64, 32, 4, 2),
        ],
    },
}  # fmt: skip


def label(options: Options) -> str:
    """Options in one word."""
    more = [name for name, on in zip(("merged", "early"), options[4:6], strict=True) if on]
    near = [f"near={options[6]}"] if options[6:7] not in ((), (32,)) else []
    apart = ["apart"] if options[7:] == (True,) else []
    return " ".join(["x".join(map(str, options[:4])), *more, *near, *apart])


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


MASKS = ("window", "sinks", "softcap", "alibi", "bias", "slots", "documents")


def masked(name: str, B: int, H: int, S: int, d: int) -> tuple[Any, list[Any], list[bool]]:
    """(text of a causal score, its inputs, which of them have a gradient)."""
    import torch

    from inductor_ext.ops import _attention_score as attention_score

    def draw(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    inputs: list[Any] = []
    if name == "alibi":
        inputs = [-(2.0 ** -torch.linspace(1, 8, H, device="cuda")).view(1, H, 1, 1)]
    elif name == "bias":
        inputs = [draw(1, H, S, S)]
    elif name == "slots":
        inputs = [draw(B, H, 1, S)]
    elif name == "documents":
        ids = (torch.arange(S, device="cuda") * 7 // S).int()
        inputs = [ids.view(1, 1, S, 1), ids.view(1, 1, 1, S)]

    def score(
        s: Any, b: Any, h: Any, q: Any, k: Any, rows: Any, columns: Any, n: Any, x: Any
    ) -> Any:
        r, away = s * d**-0.5, q < k
        if name == "window":
            away = away | (q - k >= 1024)
        if name == "sinks":
            away = away | ((q - k >= 1024) & (k >= 4))
        if name == "softcap":
            r = 30 * torch.tanh(r / 30)
        if name == "alibi":
            r = r + x[0] * (k - q)
        if name in ("bias", "slots"):
            r = r + x[0]
        if name == "documents":
            away = away | (x[0] != x[1])
        return r.masked_fill(away, float("-inf"))

    return attention_score.write(score, inputs), inputs, [name in ("bias", "slots") for _ in inputs]


def mask_row(case: Case, name: str) -> dict[str, Any]:
    """A masked score, checked with few tokens and timed."""
    import torch
    from inductor_ext.templates import attention_backward_launch, attention_launch
    from inductor_ext.templates.attention_program import Input

    from inductor_ext.ops import _attention_score as attention_score
    from inductor_ext.ops import _attention_translate as attention_translate

    title, B, H, _, S, D, _ = case
    row: dict[str, Any] = {"case": f"{title} {name}", "part": "whole", "tiling": "default"}

    def call_of(case: Case, S: int) -> tuple[Any, ...]:
        q, k, v, do = draw(case, S)
        text, inputs, asked = masked(name, q.shape[0], H, S, D)
        kinds = tuple(
            Input(x.dtype, "".join(a for a, n in zip("bhqk", x.shape, strict=True) if n > 1))
            for x in inputs
        )
        program = attention_translate.program(text, kinds, 0, "zero", exact=False)
        out, lse = attention_launch.forward(q, k, v, inputs, (), program, "ieee")
        needed = (True,) * 3 + tuple(asked)
        call = lambda: attention_backward_launch.backward(  # noqa: E731
            do, None, q, k, v, inputs, (), program, out, lse, needed, "ieee"
        )
        return call, text, inputs, asked, (q, k, v, do)

    small = (case[0], 1, *case[2:])
    call, text, inputs, asked, (q, k, v, do) = call_of(small, 1000)
    *found, grads = call()
    again = call()
    row["same"] = all(map(torch.equal, [*found, *grads], [*again[:3], *again[3]]))
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    own = [x.float().requires_grad_() if a else x for x, a in zip(inputs, asked, strict=True)]
    s = leaves[0] @ leaves[1].mT
    places = attention_score.positions(s.shape, s.device)
    p = attention_score.read(text)(s, *places, 1000, 1000, (), own).softmax(-1)
    leaves += [x for x in own if x.requires_grad]
    right = torch.autograd.grad(p @ leaves[2], leaves, do.float())
    given = [*found, *(g for g in grads if g.numel())]
    row["error"] = max(
        ((g.float() - r).norm() / r.norm()).item() for g, r in zip(given, right, strict=True)
    )
    call = call_of(case, S)[0]
    kept = {"window": 1024 * S - 512 * 1024, "sinks": 1024 * S - 512 * 1024}.get(name, S * S / 2)
    kept = S * S / 14 if name == "documents" else kept
    row["us"] = _timed(call)
    row["tflops"] = 10.0 * B * H * kept * D / row["us"] / 1e6
    return row


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

    def run(self, options: Options) -> Callable[[], None]:
        """A call that makes the part's results."""
        chosen = self.launch.Tiling(*options)
        if self.part == "keys":
            return lambda: self.call.keys(self.dk, self.dv, {}, chosen)
        return lambda: self.call.queries(self.dq, {}, {}, chosen)

    def results(self) -> dict[str, Any]:
        """What was written."""
        return {"dk": self.dk, "dv": self.dv} if self.part == "keys" else {"dq": self.dq}


def compile_one(case: Case, part: str, options: Options) -> str:
    """Launch once on a small input, for Triton's cache."""
    import torch

    from inductor_ext.compat_launch import direct_launches

    if part == "masks":
        with direct_launches():
            mask_row((case[0], 1, *case[2:4], 1024, *case[5:]), options[0])
        return str(options[0])
    small = (case[0], 1, *case[2:4], 256, *case[5:])
    with direct_launches():
        tensors = draw(small)
        q, k, v, _ = tensors
        prepared = Part(small, part, tensors, *forward(q, k, v, case[6]))
        prepared.run(options)()
    torch.cuda.synchronize()
    return label(options)


def tasks(cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    """What ``compile_one`` is called with; cases that differ in sizes share kernels."""
    found = {}
    for case in cases:
        for part, tried in TRIED[case[5]].items():
            for options in tried:
                found[case[5:], part, options[:6], options[7:]] = (case, part, options)
    return list(found.values())


def _timed(call: Callable[[], Any]) -> float:
    from inductor_ext import measure

    return measure.time_graph(call, [()], rounds=7, calls=1)


def _errors(found: dict[str, Any], truth: dict[str, Any]) -> float:
    worst = 0.0
    for name, got in found.items():
        right = truth[name].float()
        worst = max(worst, ((got.float() - right).norm() / right.norm()).item())
    return worst


def _tried(prepared: Part, options: Options, truth: dict[str, Any], flops: float) -> dict[str, Any]:
    import torch

    run = prepared.run(options)
    runs = []
    for _ in range(3):
        for name in ("dq", "dk", "dv"):
            getattr(prepared, name).fill_(torch.nan)
        run()
        runs.append({name: t.clone() for name, t in prepared.results().items()})
    same = all(torch.equal(runs[0][name], other[name]) for other in runs[1:] for name in runs[0])
    us = _timed(run)
    error = _errors(runs[0], truth)
    return {"us": us, "tflops": flops / us / 1e6, "error": error, "same": same}


def _whole(case: Case, tensors: tuple[Any, ...], out: Any, lse: Any) -> Callable[[], Any]:
    from inductor_ext.templates import attention_backward_launch as launch

    q, k, v, do = tensors
    program = program_of(case[6], case[5])
    return lambda: launch.backward(
        do, None, q, k, v, (), (), program, out, lse, (True,) * 3, "ieee"
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
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        out, lse = forward(q.detach(), k.detach(), v.detach(), causal)
        leaves = [q, k, v]
        truth: dict[str, Any] = {}
        peers = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for peer, backend in peers.items():
            row: dict[str, Any] = {"case": name, "part": "whole", "tiling": peer}
            try:
                with sdpa_kernel(backend):
                    result = sdpa(q, k, v, is_causal=causal, enable_gqa=Hq != Hkv)

                def back(result: Any = result) -> Any:
                    return torch.autograd.grad(result, leaves, tensors[3], retain_graph=True)  # noqa: B023

                truth = dict(zip(("dq", "dk", "dv"), back(), strict=True))
                back()
                us = _median(back)
                row |= {"us": us, "tflops": 5 * flops / us / 1e6}
            except Exception as error:
                row["failure"] = measure.one_line(error)
            yield row
        row = {"case": name, "part": "whole", "tiling": "default"}
        try:
            call = _whole(case, tensors, out, lse)
            found = [call() for _ in range(3)]
            row["same"] = all(map(torch.equal, found[0] + found[0], found[1] + found[2]))
            row["error"] = _errors(dict(zip(("dq", "dk", "dv"), found[0], strict=True)), truth)
            del found
            row["us"] = _timed(call)
            row["tflops"] = 5 * flops / row["us"] / 1e6
        except Exception as error:
            row["failure"] = measure.one_line(error)
        yield row
        for part in parts:
            prepared = Part(case, part, tensors, out, lse)
            for options in TRIED[D][part]:
                row = {"case": name, "part": part, "tiling": label(options)}
                try:
                    row |= _tried(prepared, options, truth, PRODUCTS[part] * flops)
                except Exception as error:
                    row["failure"] = measure.one_line(error)
                yield row


def mask_rows(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A CSV row per masked score."""
    import torch

    from inductor_ext import measure

    for case in cases:
        for name in MASKS:
            torch.manual_seed(0)
            try:
                yield mask_row(case, name)
            except Exception as error:
                title = f"{case[0]} {name}"
                failure = measure.one_line(error)
                yield {"case": title, "part": "whole", "tiling": "default", "failure": failure}


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
    add("--kinds", type=common.names_of(("bwd", "whole", "masks")), default=["bwd"])
    add("--cases", type=common.names_of(names), default=list(names[:3]), help=", ".join(names))
    add("--out", type=Path, default=Path("attention_backward"), help="folder of the CSV file")
    add("--workers", type=int, default=14, help="processes that compile")
    add("--budget-seconds", type=float, help="time for timing")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if case[0] in args.cases]
    parts = ("keys", "rows") if "bwd" in args.kinds else ()
    compiled = tasks(cases) if parts else []
    if "masks" in args.kinds:
        compiled += [(c, "masks", (m,)) for c in cases[:2] for m in MASKS]
    if compiled:
        common.run_in_pool(compile_one, compiled, args.workers, None)

    from tqdm import tqdm

    from inductor_ext.compat_launch import direct_launches

    file = common.CsvFile(args.out / "attention_tilings_backward.csv", FIELDS)
    found = []
    with direct_launches():
        series: list[Iterator[dict[str, Any]]] = []
        if {"bwd", "whole"} & set(args.kinds):
            series.append(rows(cases, parts))
        if "masks" in args.kinds:
            series.append(mask_rows([case for case in cases if case[6] and case[2] == case[3]][:2]))
        every = itertools.chain(*series)
        timed = tqdm(every, "timed", mininterval=5, file=sys.stderr)
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
