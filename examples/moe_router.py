"""A mixture-of-experts router: one compiled program from one token (decode) to 16384 (prefill).

Ordinary model code. The only line that concerns the plugin is the import.
"""

import torch

import inductor_ext

TOKENS = (1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 128, 256, 512, 768, 4096, 16384)


class Router(torch.nn.Module):
    """The ``top_k`` experts of every token by score plus bias, and their weights.

    hidden [T, hidden] bf16 -> weights [T, top_k] fp32 that sum to 1, experts [T, top_k] int64.
    ``scoring`` is "sigmoid" or "softmax"; the bias only takes part in the selection.
    """

    def __init__(
        self, hidden: int = 7168, experts: int = 256, top_k: int = 8, scoring: str = "sigmoid"
    ) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, experts, bias=False, dtype=torch.bfloat16)
        self.bias = torch.nn.Parameter(torch.randn(experts) * 0.01)
        self.top_k, self.scoring = top_k, scoring
        self.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(hidden).float()
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        experts = torch.topk(scores + self.bias, self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True), experts


def any_tokens() -> object:
    """A context to compile in: torch then makes no special case of one token, which would be a
    second program, provided that the first call has one token and so asks for none itself."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)


def first_call(hidden: int = 7168, device: str = "cpu") -> torch.Tensor:
    """One token, and the bounds of how many there may be in later calls."""
    tokens = torch.randn(1, hidden, dtype=torch.bfloat16, device=device)
    torch._dynamo.mark_dynamic(tokens, 0, min=1, max=max(TOKENS))
    return tokens


def on_a_card(scoring: str) -> None:
    """Compile once, then call with every number of tokens."""
    router = Router(scoring=scoring).cuda()
    with any_tokens():
        print(inductor_ext.explain(router, first_call(device="cuda")))
        compiled = torch.compile(router)
        compiled(first_call(device="cuda"))
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in TOKENS:
            hidden = torch.randn(count, 7168, dtype=torch.bfloat16, device="cuda")
            difference = (compiled(hidden)[0] - router(hidden)[0]).abs().max()
            print(f"{count:6} tokens: largest difference from eager {difference:.1e}")


def without_a_card(scoring: str) -> None:
    """The same program for an H200: which kernels run in which range of tokens."""
    from inductor_ext.testing import compile_for, outline

    with any_tokens():
        code = compile_for("h200", Router(scoring=scoring), first_call())
    print(inductor_ext.Report(tuple(code.decisions)))
    print(outline(code))


def main() -> None:
    """Both scorings, on this machine's card or for a virtual one."""
    torch.manual_seed(0)
    for scoring in ("sigmoid", "softmax"):
        print(f"\n{scoring} scoring")
        on_a_card(scoring) if torch.cuda.is_available() else without_a_card(scoring)


if __name__ == "__main__":
    main()
