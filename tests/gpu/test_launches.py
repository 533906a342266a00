"""tune on a card over what operations launch: right results under every plan it makes."""

import pytest
import torch

import inductor_ext
from inductor_ext import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_what_is_tuned_is_launched_and_right(grad, judge):
    def fn(x):
        return ops.softmax(x)

    x = torch.randn(256, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
    plan = inductor_ext.tune(fn, x, dims={"x.0": (64, 1024)}, progress=False)
    kinds = {(e.key.op, dict(e.key.sizes)["tensors"]) for e in plan.entries}
    assert kinds == ({("rows", 1), ("rows", 2)} if grad else {("rows", 1)})
    for entry in plan.entries:
        assert all("heuristic" in us for box in entry.boxes for us in box.times.values())
    inductor_ext.load_plan(plan)
    try:
        (found,) = inductor_ext.explain(fn, x.detach()).launches
        assert found.source == "plan" and found.candidates
        for rows in (64, 257, 1024):
            own = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16)
            judge(lambda x: x.softmax(-1), (own,), torch.compile(fn)(own))
    finally:
        inductor_ext.unload_plan()
