"""``python -m inductor_ext demo``: the main job on this machine, with a card or without."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from . import measure, registry, report
from .testing import compile_for, run_interpreted

_HIDDEN, _EXPERTS, _TOKENS = 7168, 256, 64


class Router(torch.nn.Module):
    """A mixture-of-experts router: sigmoid(x Wᵀ) + bias over [tokens, 7168] x [7168, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(_EXPERTS, _HIDDEN) * _HIDDEN**-0.5)
        self.bias = torch.nn.Parameter(torch.randn(_EXPERTS) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.linear(x, self.weight)
        return torch.sigmoid(scores.float()) + self.bias.float()


def main(argv: list[str]) -> int:
    """Print the report, the kernels and their facts; check the numbers; time on a card."""
    parser = argparse.ArgumentParser("inductor_ext demo", description=__doc__)
    parser.add_argument("--card", default="h200", help="virtual card to generate code for")
    options = parser.parse_args(argv)
    console = Console(width=120, highlight=False)
    torch.manual_seed(0)
    router = Router().to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(_TOKENS, _HIDDEN, dtype=torch.bfloat16)

    console.rule(
        f"MoE router [{_TOKENS},{_HIDDEN}]x[{_HIDDEN},{_EXPERTS}] on a virtual {options.card}"
    )
    code = compile_for(options.card, router, x)
    console.print(str(report.Report(tuple(code.decisions))), markup=False)
    kernels = {k.name: k for k in code.kernels}
    table = Table(title="generated kernels, cross-compiled", title_justify="left")
    for name in ("kernel", "kind", "warps", "registers", "spills", "shared", "tensor cores", "PDL"):
        table.add_column(name)
    for binary in code.cross_compile():
        table.add_row(
            binary.name,
            kernels[binary.name].kind,
            str(binary.num_warps),
            str(binary.registers),
            str(binary.spills),
            f"{binary.shared_bytes} B",
            "yes" if binary.uses_tensor_cores else "no",
            "yes" if binary.has_pdl else "no",
        )
    console.print(table)

    # Fewer tokens: the interpreter runs every program of the grid in Python.
    few = x[:4].contiguous()
    with torch.no_grad():
        got = run_interpreted(compile_for(options.card, router, few), few)
        ok = _judge(console, "Triton interpreter", router, few, got)

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8:
        ok &= _on_card(console, router.cuda(), x.cuda())
    else:
        console.print("No CUDA card here: nothing was timed. The same command on a card times it.")
    return 0 if ok else 1


def _judge(
    console: Console, where: str, router: Router, x: torch.Tensor, got: torch.Tensor
) -> bool:
    """Compare with fp64, by twice the error of eager in the same dtype."""
    weight, bias = router.weight.double(), router.bias.double()
    reference = torch.sigmoid(x.double() @ weight.t()) + bias
    eager = router(x)
    verdict = measure.check(got, reference, eager, rounding=x.dtype)
    console.print(
        f"{where}: {'right' if verdict.ok else 'WRONG: ' + verdict.reason} "
        f"(max error {(got.double() - reference).abs().max().item():.1e} against fp64, "
        f"eager {(eager.double() - reference).abs().max().item():.1e})"
    )
    return verdict.ok


def _on_card(console: Console, router: Router, x: torch.Tensor) -> bool:
    """Run it, check it and time it against eager and stock torch.compile, cold, by graph replay."""
    with torch.no_grad():
        ours = torch.compile(router)
        ok = _judge(console, torch.cuda.get_device_name(), router, x, ours(x))
        # A function of its own: Dynamo keeps compiled code per function.
        stock = torch.compile(
            lambda t: torch.sigmoid((t @ router.weight.t()).float()) + router.bias
        )
        with registry.disable():
            stock(x)
        calls = {"eager": router, "torch.compile": stock, "torch.compile + inductor_ext": ours}
        times = measure.compare(calls, (x,))
    table = Table(title="one call, CUDA-graph replay, cold L2", title_justify="left")
    table.add_column("what")
    table.add_column("us", justify="right")
    for name, timing in times.items():
        table.add_row(name, timing if isinstance(timing, str) else f"{timing.us:.2f}")
    console.print(table)
    return ok
