"""dispatch_on, on the CPU: candidates are built, run and checked, only their times are made up."""

from __future__ import annotations

import itertools

import pytest
import torch

import inductor_ext
from inductor_ext import (
    CustomOpConfig,
    active_plan,
    choosing,
    compat,
    config,
    measure,
    ranged_op,
    region,
)

_numbers = itertools.count()


def right(x, w):
    return torch.mm(x, w)


def other(x, w):
    return torch.ops.aten.mm.default(x, w)


def wrong_beyond(x, w):
    rows = torch.arange(x.shape[0]).unsqueeze(1)
    return torch.mm(x, w) * torch.where(rows < 20, 1.0, 2.0)


def peeking(x, w):
    return torch.mm(x, w) if x.shape[0] <= 20 else torch.mm(w.t(), x.t()).t()


def new_op(*candidates, **how):
    @torch.library.custom_op(f"inductor_ext_test::by_range{next(_numbers)}", mutates_args=())
    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    op.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    on = {"tensor_name": "x", "dim": 0}
    inductor_ext.register_custom_op_autotuning(
        op, [CustomOpConfig(c) for c in candidates], dispatch_on=on, **how
    )
    return op


@pytest.fixture
def card(monkeypatch):
    """A card that takes times from ``times(name, rows)`` and notes the inputs it was given."""

    class Card:
        def __init__(self):
            self.inputs: list = []

        times = staticmethod(lambda name, rows: 1.0)

        def compare(self, calls, inputs, **how):
            self.inputs.append([tuple(x.shape) for x in inputs])
            rows = inputs[0].shape[0]
            return {n: measure.Timing(self.times(n, rows), 0.0, 1) for n in calls}

    found = Card()
    monkeypatch.setattr(measure, "compare", found.compare)
    monkeypatch.setattr(compat, "on_real_card", lambda: True)
    monkeypatch.setattr(choosing, "_measured", {})
    monkeypatch.setattr(ranged_op, "_found", {})
    active_plan.unload_plan()
    with config.patch(strict=True, shipped_plan=False):
        yield found
    active_plan.unload_plan()


def marked(rows, top=64):
    x, w = torch.randn(rows, 8), torch.randn(8, rows)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=top)
    torch._dynamo.mark_dynamic(w, 1, min=2, max=top)
    return x, w


def compiled(op):
    """``op`` on tensors whose sizes are tied, with the decisions of its compile."""

    def fn(x, w):
        torch._check(x.shape[0] == w.shape[1])
        return op(x, w)

    torch._dynamo.reset()
    return fn, torch.compile(fn)


def ours(decisions):
    (found,) = (d for d in decisions if d.lowering != "decompose_k")
    return found


def test_ranges_are_measured_and_every_tensor_that_shares_the_size_is_resized(card):
    card.times = lambda name, rows: 1.0 if name == ("other" if rows <= 12 else "stock") else 2.0
    fn, call = compiled(new_op(right, other))
    with compat.without_caches(), inductor_ext.report.collect() as decisions:
        for rows in (16, 3, 12, 13, 60):
            x, w = marked(rows)
            torch.testing.assert_close(call(x, w), fn(x, w))
    decision = ours(decisions)
    assert [(r.lo, r.hi, r.chosen) for r in decision.ranges] == [
        (2, 12, "other"),
        (13, 64, "stock"),
    ]
    assert all(shapes == [(shapes[0][0], 8), (8, shapes[0][0])] for shapes in card.inputs)
    assert {shapes[0][0] for shapes in card.inputs} >= {2, 12, 16, 64}


def test_a_candidate_that_is_wrong_somewhere_is_not_chosen_there(card):
    card.times = lambda name, rows: {"wrong_beyond": 1.0, "right": 2.0, "stock": 3.0}[name]
    fn, call = compiled(new_op(wrong_beyond, right))
    with compat.without_caches(), inductor_ext.report.collect() as decisions:
        for rows in (16, 21, 40):
            x, w = marked(rows)
            torch.testing.assert_close(call(x, w), fn(x, w))
    assert [(r.lo, r.hi, r.chosen) for r in ours(decisions).ranges] == [
        (2, 20, "wrong_beyond"),
        (21, 64, "right"),
    ]


def test_a_candidate_that_compares_the_size_in_python_is_left_out(card):
    """It would be traced for one side only: a program for some sizes, or a wrong one."""
    card.times = lambda name, rows: {"peeking": 1.0, "right": 2.0, "stock": 3.0}[name]
    fn, call = compiled(new_op(peeking, right))
    with compat.without_caches(), inductor_ext.report.collect() as decisions:
        for rows in (16, 21, 40):
            x, w = marked(rows)
            torch.testing.assert_close(call(x, w), fn(x, w))
    decision = ours(decisions)
    assert decision.chosen == "right" and "peeking is no candidate" in decision.reason
    assert "compares a dynamic size in Python" in decision.reason


def test_a_static_size_is_measured_as_it_is(card):
    card.times = lambda name, rows: 1.0 if name == ("other" if rows <= 12 else "right") else 2.0
    op = new_op(right, other, split_points=[30])
    for rows, chosen in ((8, "other"), (16, "right")):
        found = inductor_ext.explain(op, torch.randn(rows, 8), torch.randn(8, 4))
        assert (ours(found.decisions).chosen, ours(found.decisions).source) == (chosen, "measured")
    assert card.inputs == [[(8, 8), (8, 4)], [(16, 8), (8, 4)]]


def test_a_plan_comes_before_measuring(card):
    card.times = lambda name, rows: 1.0 if name == "other" else 2.0
    op = new_op(right, other)
    args = torch.randn(16, 8), torch.randn(8, 4)
    plan = inductor_ext.tune(
        lambda x, w: op(x, w), *args, dims={"x.0": (1, 24)}, progress=False, max_memory=1 << 40,
        _measure=lambda key, sizes, names: {n: 1.0 if n == "right" else 2.0 for n in names},
    )  # fmt: skip
    card.inputs.clear()
    inductor_ext.load_plan(plan, force=True)
    torch._dynamo.mark_dynamic(args[0], 0, min=2, max=24)
    found = inductor_ext.explain(lambda x, w: op(x, w), *args)
    decision = ours(found.decisions)
    assert (decision.chosen, decision.source) == ("right", "plan") and card.inputs == []


def test_a_candidate_that_a_generator_does_not_offer_at_a_size_is_not_timed_there(card):
    """Stock would be timed under its name, where each size has a program of its own."""
    card.times = lambda name, rows: 1.0 if name != "stock" else 2.0

    def few_only(fakes):
        rows = fakes["x"].shape[0]
        few = not isinstance(rows, int) or rows <= 12
        return [CustomOpConfig(right), *([CustomOpConfig(other)] if few else [])]

    @torch.library.custom_op("inductor_ext_test::by_generator", mutates_args=())
    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    op.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    timed = {}

    def compare(calls, inputs, **how):
        timed.setdefault(inputs[0].shape[0], set()).update(calls)
        return {n: measure.Timing(card.times(n, 0), 0.0, 1) for n in calls}

    on = {"tensor_name": "x", "dim": 0}
    inductor_ext.register_custom_op_autotuning(op, config_generator=few_only, dispatch_on=on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "compare", compare)
        patch.setattr(region, "symbolic", lambda node: None)
        fn, call = compiled(op)
        with compat.without_caches():
            x, w = marked(16)
            torch.testing.assert_close(call(x, w), fn(x, w))
    assert "other" in timed[8] and "other" not in timed[64] and "right" in timed[64]
