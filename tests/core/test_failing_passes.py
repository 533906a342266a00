"""A graph pass that fails when it has begun to edit leaves the graph as it was: stock's code."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan

from inductor_ext import config, registry
from inductor_ext.testing import compile_for

BF16 = torch.bfloat16


def logits():
    return torch.empty(8192, 32768, dtype=BF16, device="meta", requires_grad=True)


def heads(*shape):
    return torch.empty(*shape, dtype=BF16, device="meta")


def with_z_loss(x, y):
    z = 30 * torch.tanh(x.float() / 30)
    return F.cross_entropy(z, y, label_smoothing=0.1) + 1e-4 * z.logsumexp(1).square().mean()


def loss(x, y):
    return F.cross_entropy(x.float(), y)


def scores(q, k, v):
    return (q @ k.mT * 0.125).softmax(-1) @ v


def of_scores(q, k, v):
    return torch.tril(q @ k.mT) @ v


def states(a, b):
    pair = lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1])  # noqa: E731
    return associative_scan(pair, (a, b), 1)[1].sin()


def summed(x):
    return (x * 2).cumsum(1).relu()


TARGETS = torch.empty(8192, dtype=torch.int64, device="meta")
STATES = [torch.empty(4, 64, 2, device="meta", requires_grad=True) for _ in range(2)]
CASES = {
    "attention": (scores, [heads(2, 8, 2048, 64)] * 3),
    "linear_attention": (of_scores, [heads(2, 8, 2048, 64)] * 3),
    "scan_gradient": (states, STATES),
    "scan": (summed, [torch.empty(64, 65536, device="meta")]),
    "softmax|cross_entropy": (with_z_loss, [logits(), TARGETS]),
    "fused_loss": (loss, [logits(), TARGETS]),
}


def generate(name, only):
    fn, args = CASES[name]
    with registry.only(*only):
        return compile_for("h200", fn, *args, grad=any(a.requires_grad for a in args))


def text(code):
    return re.sub(r"# (AOT ID|kernel path): .*", "", code.source)


def nodes(graph):
    return [(n.op, str(n.target), n.name, str(n.args), str(n.kwargs)) for n in graph.nodes]


@pytest.mark.codegen
@pytest.mark.parametrize("name", CASES)
def test_stock_code_byte_for_byte(name, monkeypatch):
    stock, edits = generate(name, []), []
    apply = registry._GuardedPass.apply

    def failing_behind(self, graph):
        before, edit = nodes(graph), self.edit

        def fails(graph):
            edit(graph)
            edits.append(nodes(graph) != before)
            if edits[-1]:
                raise LookupError("lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "edit", fails)
            return apply(self, graph)

    monkeypatch.setattr(registry._GuardedPass, "apply", failing_behind)
    with config.patch(strict=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code = generate(name, name.split("|"))
    assert any(edits)
    assert text(code) == text(stock)
    said = [str(w.message) for w in caught if "inductor_ext" in str(w.message)]
    assert len(said) == sum(edits) and re.match(
        rf"inductor_ext: ({name}) failed at .*lost", said[0]
    )
    assert code.decisions and not any(d.fired for d in code.decisions)
    assert any("LookupError: lost" in d.reason for d in code.decisions)
