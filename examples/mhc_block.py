"""Two layers with manifold-constrained hyper-connections (mHC) in the form of DeepSeek-V4.

Ordinary model code; its import is all that concerns the plugin. Stock compiles a training step to
87 kernels in the forward and 278 in the backward, products aside; with the plugin it is 14 and 16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inductor_ext

STREAMS, HIDDEN, ITERS, EPS = 4, 4096, 20, 1e-6


class HyperConnection(nn.Module):
    """The residual x [..., STREAMS, HIDDEN] around a sublayer of [..., HIDDEN]."""

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        n, columns = STREAMS, STREAMS * (STREAMS + 2)
        self.sublayer = sublayer
        self.fn = nn.Parameter(torch.randn(columns, n * HIDDEN) * (n * HIDDEN) ** -0.5)
        self.scale = nn.Parameter(torch.ones(3))
        self.base = nn.Parameter(torch.randn(columns) * 0.5)

    def pre(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = STREAMS
        flat = x.flatten(-2).float()
        rsqrt = torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        mixes = F.linear(flat, self.fn) * rsqrt
        pre = torch.sigmoid(mixes[..., :n] * self.scale[0] + self.base[:n]) + EPS
        post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        comb = mixes[..., 2 * n :] * self.scale[2] + self.base[2 * n :]
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + EPS
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        for _ in range(ITERS - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + EPS)
            comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        u = torch.sum(pre.unsqueeze(-1) * flat.view(x.shape), dim=-2)
        return u.to(x.dtype), post, comb

    def forward(self, x: Tensor) -> Tensor:
        u, post, comb = self.pre(x)
        y = self.sublayer(F.rms_norm(u, (HIDDEN,)))
        mixed = torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=-3)
        return (post.unsqueeze(-1) * y.unsqueeze(-2) + mixed).to(x.dtype)


class Feedforward(nn.Module):
    """Stands in for attention and experts."""

    def __init__(self, width: int = 2 * HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * width, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(width, HIDDEN, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


def block() -> nn.Module:
    """Two layers."""
    return nn.Sequential(HyperConnection(Feedforward()), HyperConnection(Feedforward()))


def residual(device: str, tokens: int = 4096) -> Tensor:
    """The first residual: an embedding, once per stream."""
    x = torch.randn(tokens, 1, HIDDEN, device=device, dtype=torch.bfloat16)
    return x.expand(tokens, STREAMS, HIDDEN).contiguous().requires_grad_()


def step(model: nn.Module, x: Tensor) -> float:
    """Forward and backward; ms."""
    for _ in range(3):
        x.grad = None
        model.zero_grad()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(x).float().square().mean().backward()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def on_a_card() -> None:
    """A training step, stock and with the plugin, compared and timed."""
    model, x = block().cuda(), residual("cuda")
    print(inductor_ext.explain(model, x))
    with inductor_ext.disable():
        print(f"stock compile: {step(torch.compile(model), x):.2f} ms")
    before = x.grad
    torch._dynamo.reset()
    print(f"with the plugin: {step(torch.compile(model), x):.2f} ms")
    off = (x.grad.float() - before.float()).norm() / before.float().norm()
    print(f"gradient of the residual: {off:.1e} off stock's")


def without_a_card() -> None:
    """The same step for an H200: which decisions fall, and what the program calls."""
    from inductor_ext.testing import compile_for, outline

    with torch.device("meta"):
        model, x = block(), residual("meta")
    code = compile_for("h200", model, x, grad=True)
    print(inductor_ext.Report(tuple(code.decisions)))
    print(outline(code))


if __name__ == "__main__":
    torch.manual_seed(0)
    on_a_card() if torch.cuda.is_available() else without_a_card()
