"""A serving loop without a card: calls of random size into one generated program."""

import random

import torch
import torch.nn.functional as F

from inductor_ext.testing import compile_for, run_interpreted


def layer(x, w):
    return F.silu(x @ w)


def test_random_sizes_are_right_and_the_same_every_time(judge):
    w = (torch.randn(2048, 32) * 2048**-0.5).bfloat16()
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        first = torch.empty(1, 2048, dtype=torch.bfloat16)
        code = compile_for("h200", layer, first, w, dynamic={0: {0: (1, 192)}})
    (decision,) = code.decisions
    spans = [(r.lo, r.hi) for r in decision.ranges][:4]
    assert code.frames == 1 and len(spans) == 4
    draw = random.Random(0)
    sizes = [draw.randint(*span) for span in spans for _ in range(3)]
    draw.shuffle(sizes)  # calls go from branch to branch
    outputs = {}
    for size in sizes:
        torch.manual_seed(size)
        x = torch.randn(size, 2048).bfloat16()
        out = run_interpreted(code, x, w)
        judge(layer, (x, w), out)
        assert torch.equal(outputs.setdefault(size, out), out)
    assert len(outputs) < len(sizes)  # some sizes came twice
