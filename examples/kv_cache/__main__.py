"""Five ways to keep a small cache of keys and values, compiled and compared with eager.

    python examples/kv_cache

Each is ordinary model code (``decoder``, ``policies``, ``compactor``). The size of a cache is
2 x layers x slots x KV heads x head size x bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich import print as show
from rich.table import Table
from torch import Tensor

import inductor_ext

sys.path.insert(0, str(Path(__file__).parent))

from compactor import Compacted, Compactor
from decoder import Decoder, Policy
from policies import Everything, HeavyHitters, Norms, Sinks, Snapshot

PROMPT, STEPS, BUDGET = 2048, 4, 256


def policies(compactor: Compactor) -> dict[str, Policy]:
    """By name; each leaves BUDGET slots of the prompt, or all."""
    return {
        "everything": Everything(),
        "sinks": Sinks(4, BUDGET - 4),
        "norms": Norms(BUDGET),
        "snapshot": Snapshot(BUDGET - 32, 32),
        "heavy hitters": HeavyHitters(BUDGET),
        "compactor": Compacted(compactor),
    }


@torch.no_grad()
def generated(model: Any, tokens: Tensor, policy: Policy) -> tuple[Tensor, int]:
    """The logits of a prompt and of STEPS tokens behind it; the bytes of the caches."""
    length, found = tokens.shape[1] - STEPS, []
    logits, caches = model(tokens[:, :length], torch.tensor(0, device=tokens.device), None, policy)
    found.append(logits)
    for i in range(length, length + STEPS):
        position = torch.tensor(i, device=tokens.device)
        logits, caches = model(tokens[:, i : i + 1], position, caches, policy)
        found.append(logits)
    return torch.stack(found, 1), sum(c.k.nbytes + c.v.nbytes for c in caches)


def table(model: Decoder, compactor: Compactor, tokens: Tensor, compiled: Any) -> None:
    """The caches' sizes, and how far compiled results are from eager ones."""
    shown = Table("policy", f"cache after {STEPS} tokens", "compiled, off eager")
    for name, policy in policies(compactor).items():
        expected, size = generated(model, tokens, policy)
        off = "-"
        if compiled is not None:
            torch._dynamo.reset()
            got, _ = generated(compiled(model), tokens, policy)
            off = f"{(got.float() - expected.float()).abs().max():.1e}"
        shown.add_row(name, f"{size / 2**10:.0f} KiB", off)
    show(shown)


def main() -> None:
    torch.manual_seed(0)
    on_card = torch.cuda.is_available()
    device = "cuda" if on_card else "cpu"
    dtype = torch.bfloat16 if on_card else torch.float32
    model = Decoder().to(device, dtype)
    compactor = Compactor(BUDGET).to(device, dtype)
    batch, prompt = (4, PROMPT) if on_card else (1, 2 * BUDGET)
    tokens = torch.randint(512, (batch, prompt + STEPS), device=device)
    table(model, compactor, tokens, torch.compile if on_card else None)
    if on_card:
        print(
            inductor_ext.explain(model, tokens, torch.tensor(0, device=device), None, Everything())
        )
        return
    from inductor_ext.testing import compile_for

    with torch.device("meta"):
        model, tokens = Decoder().bfloat16(), torch.zeros(4, PROMPT, dtype=torch.int64)
        first = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        code = compile_for(
            "h200", lambda t, p: model(t, p, None, Snapshot(224, 32))[0], tokens, first
        )
    print(inductor_ext.Report(tuple(d for d in code.decisions if d.lowering == "attention")))


if __name__ == "__main__":
    main()
