"""One compiled frame for every number of tokens, one included: the recipe of the router example."""

import importlib.util
import pathlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_ext.testing import compile_for, run_interpreted

TOKENS = (1, 2, 7, 8, 9, 16, 17, 33, 65, 130)
HIDDEN, EXPERTS, TOP = 2048, 32, 4

_path = pathlib.Path(__file__).parents[2] / "examples" / "moe_router.py"
_spec = importlib.util.spec_from_file_location("moe_router_example", _path)
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


def router(scoring):
    return example.Router(HIDDEN, EXPERTS, TOP, scoring)


def hidden(tokens):
    return torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)


def right(module, x, out):
    """Weights and experts against fp64. Where two experts score alike either may be taken."""
    weights, experts = out
    logits = x.double() @ module.gate.weight.double().t()
    scores = logits.sigmoid() if module.scoring == "sigmoid" else logits.softmax(-1)
    assert experts.shape == (len(x), TOP) and experts.dtype == torch.int64
    ranked = (scores + module.bias.double()).gather(-1, experts)
    best = torch.topk(scores + module.bias.double(), TOP).values
    # The logits are rounded to bf16: half a unit of the last of 8 bits, of values up to about 4.
    torch.testing.assert_close(ranked, best, rtol=0, atol=0.02)
    assert all(len(set(row)) == TOP for row in experts.tolist())
    taken = scores.gather(-1, experts)
    wanted = taken / taken.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), wanted, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_one_generated_program_is_right_at_every_number(scoring):
    module = router(scoring)
    with example.any_tokens():
        code = compile_for("h200", module, example.first_call(HIDDEN))
    assert code.frames == 1 and not code.stopped and len(code.graphs) == 1
    (decision,) = code.decisions
    assert decision.fired and len(decision.ranges) > 3
    assert decision.ranges[0].lo == 1 and decision.ranges[-1].hi == max(example.TOKENS)
    for tokens in TOKENS:
        x = hidden(tokens)
        right(module, x, run_interpreted(code, x))


def test_the_judge_sees_a_wrong_expert():
    module, x = router("sigmoid"), hidden(8)
    weights, experts = module(x)
    right(module, x, (weights, experts))
    with pytest.raises(AssertionError):
        right(module, x, (weights, (experts + 1) % EXPERTS))
    with pytest.raises(AssertionError):
        right(module, x, (weights.flip(-1), experts))


@pytest.mark.codegen
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_dynamo_compiles_one_frame(scoring):
    """Without a card the lowering leaves the site to stock; what counts is Dynamo's guards."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    module = router(scoring)
    compiled = torch.compile(module, backend=counter)
    with example.any_tokens():
        compiled(example.first_call(HIDDEN))
    # Later calls need neither the marks nor the setting.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (*TOKENS, *reversed(TOKENS)):
            x = hidden(tokens)
            right(module, x, compiled(x))
    assert counter.frame_count == 1


def test_without_the_recipe_there_are_two():
    """What the recipe is for: it may go when torch no longer makes a special case of one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(router("sigmoid"), backend=counter)
    for tokens in (16, 1):
        x = hidden(tokens)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        compiled(x)
    assert counter.frame_count == 2
