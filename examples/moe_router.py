"""A mixture-of-experts router: scores = sigmoid(x Wᵀ) + bias over [tokens, 7168] x [7168, 256].

Ordinary model code. The only line that concerns the plugin is the import.
"""

import torch

import inductor_ext


class Router(torch.nn.Module):
    """Expert scores of a token: a linear layer without bias, a sigmoid, a selection bias."""

    def __init__(self, hidden: int = 7168, experts: int = 256) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.bias = torch.nn.Parameter(torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.linear(x, self.weight).float()
        return torch.sigmoid(scores) + self.bias.float()


def main() -> None:
    """Compile for this card, or generate the code of an H200 where there is none."""
    router = Router().to(torch.bfloat16)
    tokens = torch.randn(64, 7168, dtype=torch.bfloat16)
    if torch.cuda.is_available():
        router, tokens = router.cuda(), tokens.cuda()
        with torch.no_grad():
            print(inductor_ext.explain(router, tokens))
            print(torch.compile(router)(tokens).topk(8).indices[0].tolist())
    else:
        from inductor_ext.testing import compile_for, outline

        code = compile_for("h200", router, tokens)
        print(inductor_ext.Report(tuple(code.decisions)))
        print(outline(code))


if __name__ == "__main__":
    main()
