"""The plans that are shipped: in order, and each choice is one that can be emitted."""

from pathlib import Path

import pytest
import torch

import inductor_ext
from inductor_ext import active_plan, plan_file, plans
from inductor_ext.plan import Plan
from inductor_ext.testing import compile_for

FILES = sorted(Path(plans.__file__).parent.glob("*.json"))


def product_of(entry):
    """An mm of bf16 with the layout of a Linear's weight, and the entry's static sizes."""
    assert (entry.key.dtype, entry.key.layout) == ("bfloat16", "row,column")
    sizes = dict(entry.key.sizes)
    x, w = (torch.empty(r, sizes["k"], dtype=torch.bfloat16) for r in (64, sizes["n"]))
    score = {"mm": torch.relu, "mm+row_reduction": lambda z: z.float().softmax(-1)}[entry.key.op]
    return (lambda x, w: score(x @ w.t())), (x, w)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_in_order_and_says_how_it_was_made(path):
    assert list(plan_file.check(path)) == []
    plan = Plan.load(path)
    assert plan.command and plan.entries and active_plan.shipped(plan.card) is not None
    for entry in plan.entries:
        for box in entry.boxes:
            # Never behind stock where it was measured.
            assert all(
                us[box.choice] <= us.get("stock", us[box.choice]) for us in box.times.values()
            )


@pytest.mark.codegen
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_choice_is_emitted(path):
    inductor_ext.load_plan(path, force=True)
    for entry in Plan.load(path).entries:
        fn, args = product_of(entry)
        code = compile_for(path.stem, fn, *args, dynamic={0: {0: (2, 16384)}})
        (decision,) = code.decisions
        for box in entry.boxes:  # neighbours of one choice are one range
            ((_, (lo, hi)),) = box.bounds
            found = {r.chosen for r in decision.ranges if r.lo <= hi and r.hi >= max(lo, 2)}
            assert found == ({box.choice} if hi >= 2 else set()), (box, decision.ranges)
