"""A gated linear recurrence, h_t = a_t h_(t-1) + b_t, trained through ``associative_scan``.

Ordinary model code; the import is all that concerns the plugin. torch's own gradient of such a scan
takes a for something that only goes into a: of a loss on h it gives a no gradient (2.11 to 2.15).
With the plugin it is right, and one scan the other way.
"""

import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

import inductor_ext

BATCH, TOKENS, WIDTH = 8, 4096, 2048


def after(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """First one step, then the other."""
    return first[0] * second[0], second[0] * first[1] + second[1]


class RecurrentBlock(nn.Module):
    """[B, T, WIDTH] to the same: gates of each token, and a state that they carry on."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        forget, write = self.gates(x).float().chunk(2, -1)
        a = torch.exp(-8.0 * torch.nn.functional.softplus(self.decay) * torch.sigmoid(forget))
        b = torch.sqrt(1.0 - a * a) * torch.sigmoid(write) * x.float()
        h = associative_scan(after, (a, b), 1, combine_mode="pointwise")[1]
        return x + self.out(h.to(x.dtype))


def step(model: nn.Module, x: Tensor) -> float:
    """Forward and backward; ms."""
    for _ in range(3):
        model.zero_grad()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(x).float().square().mean().backward()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def on_a_card() -> None:
    """A training step, timed, and the decays' gradient beside that of a loop over few tokens."""
    model = RecurrentBlock().cuda()
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
    print(inductor_ext.explain(model, x))
    print(f"a training step with the plugin: {step(torch.compile(model), x):.2f} ms")
    print(f"the decays' gradient: {model.decay.grad.norm():.2e}")


def without_a_card() -> None:
    """The same step for an H200."""
    from inductor_ext.testing import compile_for, outline

    with torch.device("meta"):
        model, x = RecurrentBlock(), torch.empty(BATCH, TOKENS, WIDTH)
    code = compile_for("h200", model, x, grad=True)
    print(inductor_ext.Report(tuple(d for d in code.decisions if d.lowering.startswith("scan"))))
    print(outline(code))


if __name__ == "__main__":
    torch.manual_seed(0)
    on_a_card() if torch.cuda.is_available() else without_a_card()
