"""The loss of a language model: hidden states to vocabulary, next token, z-loss; and its backward.

Ordinary training code; one line concerns the plugin, its import. The logits of the program as
written are 2 GB in the forward and again in the backward; what is compiled makes loss, and the
gradients of the hidden states and of the head, while it has them.
"""

import torch
import torch.nn.functional as F

import inductor_ext

HIDDEN, VOCABULARY = 4096, 128256


class Head(torch.nn.Module):
    """hidden [B, T, HIDDEN] bf16, tokens [B, T] int64 (-100: not counted) -> mean loss, fp32."""

    def __init__(self, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden).float()
        shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(shifted, tokens[:, 1:].reshape(-1))
        return loss + 1e-4 * torch.logsumexp(shifted, -1).square().mean()


def batch(device: str, rows: int = 8, length: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states that want a gradient, and the tokens, of which some do not count."""
    hidden = torch.randn(rows, length, HIDDEN, dtype=torch.bfloat16, device=device)
    tokens = torch.randint(VOCABULARY, (rows, length), device=device)
    tokens[:, :50] = -100
    return hidden.requires_grad_(), tokens


def on_a_card() -> None:
    """A step of each, compared and timed."""
    head, (hidden, tokens) = Head().cuda(), batch("cuda")
    print(inductor_ext.explain(head, hidden, tokens))
    with inductor_ext.disable():
        stock = torch.compile(head)
        stock(hidden, tokens).backward()
    before = [hidden.grad, head.head.weight.grad]
    hidden.grad = head.head.weight.grad = None
    torch._dynamo.reset()
    compiled = torch.compile(head)
    for _ in range(2):
        hidden.grad = head.head.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        compiled(hidden, tokens).backward()
        end.record()
        end.synchronize()
    print(f"a step: {start.elapsed_time(end):.1f} ms")
    print(f"peak memory: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    for name, own, other in zip(
        ("hidden", "head"), (hidden.grad, head.head.weight.grad), before, strict=True
    ):
        off = (own.float() - other.float()).norm() / other.float().norm()
        print(f"gradient of {name}: {off:.1e} off stock's")


def without_a_card() -> None:
    """The same step for an H200: which decisions fall, and what the program calls."""
    from inductor_ext.testing import compile_for, outline

    with torch.device("meta"):
        head = Head()
        hidden, tokens = batch("meta")
    code = compile_for("h200", head, hidden, tokens, grad=True)
    print(inductor_ext.Report(tuple(code.decisions)))
    print(outline(code))


if __name__ == "__main__":
    torch.manual_seed(0)
    on_a_card() if torch.cuda.is_available() else without_a_card()
