"""The code that is generated: one call, no scores in memory, keys as they are."""

import pytest
import torch
from edits import WRITTEN
from spellings import SPELLINGS, arguments

from inductor_ext.testing import assert_golden, compile_for, outline

pytestmark = pytest.mark.codegen
BACKWARD = "inductor_ext.attention_backward.default.launched("


def compiled(name, grad, **options):
    fn, shapes = SPELLINGS[name]
    return compile_for("h200", fn, *arguments(shapes, torch.bfloat16, tokens=512, **options),
                       grad=grad)  # fmt: skip


@pytest.mark.parametrize("name", ["filled in place", "softcap", "sink column", "einsum", "learned",
                                  "grouped queries", "call with positions"])  # fmt: skip
def test_training(name):
    code = compiled(name, grad=True)
    assert code.forward.count(WRITTEN) == 1 and code.backward.count(BACKWARD) == 1
    for part in (code.forward, code.backward):
        assert "bmm" not in part and "softmax" not in part
        assert "seed=" not in part  # a call by places alone is told apart from others
    (decision,) = [d for d in code.decisions if d.lowering == "attention"]
    assert decision.fired and "512" in decision.sites


def test_no_buffer_of_scores():
    code = compiled("tokens first", grad=False, heads=4)
    assert "512, 512" not in code.source and not code.kernels
    assert_golden("tokens_first", outline(code))
