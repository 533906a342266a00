"""Measured choices, on the CPU: candidates are built, run and checked, only times are made up.

The operations consist of matrix products, library calls on a CPU: nothing has to be built for it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import (
    CustomOpConfig,
    choosing,
    compat,
    compat_ir,
    config,
    measure,
    region,
    register_custom_op_autotuning,
)

_numbers = itertools.count()


def right(x, w):
    return torch.mm(x, w)


def also_right(x, w):
    return torch.mm(w.t(), x.t()).t()


def wrong(x, w):
    return torch.mm(w, x)


def failing(x, w):
    raise RuntimeError("this candidate cannot do it")


def new_op(*candidates, **registration):
    """A fresh operation x @ w of square matrices with these candidates."""

    @torch.library.custom_op(f"inductor_ext_test::measured{next(_numbers)}", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    if candidates:
        registration["configs"] = [CustomOpConfig(c) for c in candidates]
    register_custom_op_autotuning(product, **registration)
    return product


class Card:
    """A card whose measurements are ``times`` (us by candidate)."""

    def __init__(self) -> None:
        self.times: dict[str, float | str] = {}
        self.calls: list[list[str]] = []
        self.inputs: list[Any] = []

    def compare(
        self, calls: dict[str, Callable[..., Any]], inputs: Any, **how: Any
    ) -> dict[str, Any]:
        self.calls.append(list(calls))
        self.inputs = list(inputs)
        found = {name: self.times.get(name, 10.0) for name in calls}
        return {
            n: t if isinstance(t, str) else measure.Timing(us=t, spread_us=0.0, n=1)
            for n, t in found.items()
        }


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    monkeypatch.setattr(compat, "on_real_card", lambda: True)
    monkeypatch.setattr(measure, "compare", found.compare)
    monkeypatch.setattr(choosing, "_measured", {})
    return found


X, W = torch.randn(8, 8), torch.randn(8, 8)


def decide(fn, *args) -> Any:
    """The one decision on a custom operation when ``fn`` is compiled; its result is checked too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamo_pgo")
        found = inductor_ext.explain(fn, *args)
    torch.testing.assert_close(torch.compile(fn)(*args), fn(*args))
    (decision,) = (d for d in found.decisions if d.lowering != "decompose_k")
    return decision


def notes(decision) -> dict[str, str]:
    return {c.name: c.note for c in decision.candidates}


def test_the_fastest_right_candidate_is_emitted(card):
    card.times = {"stock": 9.0, "right": 5.0, "also_right": 3.0}
    decision = decide(new_op(right, also_right), X, W)
    assert (decision.fired, decision.chosen, decision.source) == (True, "also_right", "measured")
    assert {c.name: c.us for c in decision.candidates} == card.times
    assert decision.speedup == 3.0 and "fastest of 3" in decision.reason
    assert card.calls[0] == ["stock", "right", "also_right"]


def test_a_wrong_candidate_is_not_even_timed(card):
    card.times = {"stock": 9.0, "wrong": 1.0, "right": 5.0}
    decision = decide(new_op(wrong, right), X, W)
    assert decision.chosen == "right" and card.calls == [["stock", "right"]]
    assert notes(decision)["wrong"].startswith("wrong: ")
    assert notes(decision)["right"] == ""


@pytest.mark.parametrize("strict", [True, False])
def test_a_failing_candidate_is_reported_and_the_rest_goes_on(card, strict):
    card.times = {"stock": 9.0, "failing": 1.0, "right": 5.0}
    with config.patch(strict=strict), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decision = decide(new_op(failing, right), X, W)
    assert decision.chosen == "right" and card.calls == [["stock", "right"]]
    assert "this candidate cannot do it" in notes(decision)["failing"]


def test_a_candidate_with_other_outputs_never_wins(card):
    def narrow(x, w):
        return torch.mm(x, w)[:, :4]

    card.times = {"stock": 9.0, "narrow": 1.0, "right": 5.0}
    with config.patch(strict=True):
        decision = decide(new_op(narrow, right), X, W)
    assert decision.chosen == "right" and card.calls == [["stock", "right"]]
    assert notes(decision)["narrow"].startswith("failed: ")


def test_a_candidate_that_cannot_be_timed_is_reported(card):
    card.times = {"stock": 9.0, "right": "out of memory"}
    decision = decide(new_op(right), X, W)
    assert decision.chosen == "stock" and notes(decision)["right"] == "out of memory"


def test_stock_wins_a_tie(card):
    card.times = {"stock": 5.0, "right": 5.0}
    decision = decide(new_op(right), X, W)
    assert (decision.fired, decision.chosen, decision.source) == (False, "stock", "measured")


@pytest.mark.parametrize(("us", "chosen"), [(5.1, "stock"), (4.9, "right")])
def test_the_speedup_that_is_asked_for(card, us, chosen):
    card.times = {"stock": 10.0, "right": us}
    assert decide(new_op(right, min_speedup_threshold=2.0), X, W).chosen == chosen


def test_stock_stays_where_it_cannot_be_timed(card):
    card.times = {"stock": "no graph", "right": 1.0}
    decision = decide(new_op(right), X, W)
    assert (
        decision.chosen == "stock" and decision.reason == "stock could not be timed here (no graph)"
    )


def test_the_choice_is_remembered_for_the_same_problem(card):
    card.times = {"right": 5.0}
    op = new_op(right)
    first = decide(op, X, W)
    assert decide(op, X, W) == first and len(card.calls) == 1
    decide(op, torch.randn(16, 8), W)
    assert len(card.calls) == 2, "other sizes are another problem"
    decide(op, X.t(), W)
    assert len(card.calls) == 3, "other strides are another problem"
    decide(op, X.double(), W.double())
    assert len(card.calls) == 4, "another dtype is another problem"
    decide(lambda x, w: (op(x, w) @ w)[1:], X, W)
    assert len(card.calls) == 4, "what does not fuse is no part of the problem"
    register_custom_op_autotuning(op, configs=[CustomOpConfig(also_right)])
    decide(op, X, W)
    assert len(card.calls) == 5, "other candidates are another problem"


def test_a_measurement_reports_one_decision_and_forgets_what_it_forced(card):
    op = new_op(right, also_right)
    with inductor_ext.disable("decompose_k"):
        found = inductor_ext.explain(op, X, W)
    assert len(found.decisions) == 1
    assert choosing.forced_choice(found.decisions[0].lowering) is None


def test_two_sites_are_measured_one_by_one(card):
    card.times = {"right": 5.0}
    op = new_op(right)
    found = inductor_ext.explain(lambda x, w: op(op(x, w)[:4], w), X, W)
    ours = [d for d in found.decisions if d.lowering != "decompose_k"]
    assert [d.chosen for d in ours] == ["right", "right"] and len(card.calls) == 2


def test_inputs_are_made_by_the_users_functions(card):
    """This candidate is right for the data it is meant for only."""

    def identity(x, w):
        return x.clone()

    def eye(fake):
        assert tuple(fake.shape) == (8, 8)
        return torch.eye(8)

    card.times = {"identity": 1.0}
    plain = decide(new_op(identity, right), X, W)
    assert plain.chosen == "stock" and notes(plain)["identity"].startswith("wrong")
    op = new_op(identity, right, input_gen_fns={"w": eye})
    assert decide(op, X, torch.eye(8)).chosen == "identity"
    assert torch.equal(card.inputs[1], torch.eye(8)) and not torch.equal(card.inputs[0], X)


def test_random_inputs_are_like_the_arguments(card):
    decide(new_op(right), X.t().bfloat16(), W.bfloat16())
    assert [(i.shape, i.stride(), i.dtype) for i in card.inputs] == [
        ((8, 8), (1, 8), torch.bfloat16),
        ((8, 8), (8, 1), torch.bfloat16),
    ]


def test_several_outputs_are_all_checked(card):
    @torch.library.custom_op("inductor_ext_test::measured_pair", mutates_args=())
    def pair(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ w, w @ x

    pair.register_fake(lambda x, w: (torch.empty_like(x), torch.empty_like(x)))

    def both(x, w):
        return torch.mm(x, w), torch.mm(w, x)

    def second_wrong(x, w):
        return torch.mm(x, w), torch.mm(x, w)

    register_custom_op_autotuning(
        pair, configs=[CustomOpConfig(second_wrong), CustomOpConfig(both)]
    )
    card.times = {"second_wrong": 1.0, "both": 5.0}
    decision = decide(pair, X, W)
    assert decision.chosen == "both" and notes(decision)["second_wrong"].startswith("wrong")


def test_an_operation_without_fp64_is_compared_with_itself(card):
    @torch.library.custom_op("inductor_ext_test::single_only", mutates_args=())
    def single(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x @ w

    single.register_fake(lambda x, w: torch.empty_like(x))
    register_custom_op_autotuning(single, configs=[CustomOpConfig(wrong), CustomOpConfig(right)])
    card.times = {"wrong": 1.0, "right": 5.0}
    decision = decide(single, X, W)
    assert decision.chosen == "right" and "largest difference" in notes(decision)["wrong"]


def test_dynamic_sizes_are_measured_at_the_traced_size_once(card):
    card.times = {"right": 5.0}
    op = new_op(right)
    compiled = torch.compile(op, dynamic=True)
    torch._dynamo.reset()
    for rows in (24, 40, 56):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x, W), x @ W)
    assert len(card.calls) == 1 and tuple(card.inputs[0].shape) == (24, 8)


def test_no_measuring_for_a_virtual_card(card, monkeypatch):
    """A card in the machine makes no difference to the code of a virtual one."""
    from inductor_ext.testing import compile_for

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "compare", card.compare)
    code = compile_for("h200", new_op(right), X, W)
    assert not card.calls and [d.source for d in code.decisions] == ["heuristic"]


# --- a region by itself ---------------------------------------------------------------------------


def make_region(fn, *inputs) -> region.Region:
    gm = torch.fx.experimental.proxy_tensor.make_fx(fn)(*inputs)
    return region.Region(gm, list(inputs), ["x", "w"][: len(inputs)], inputs[0].device)


def build(fn) -> Callable[[], Callable[..., Any]]:
    return lambda: fn


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compile is in progress here, so the mode to leave is none."""
    import contextlib

    monkeypatch.setattr(compat_ir, "no_fake_mode", contextlib.nullcontext)


def test_a_region_keeps_the_order_of_its_candidates(card, as_it_is):
    card.times = {"stock": 4.0, "b": 3.0}

    def raises(*args):
        raise ValueError("first line\nsecond line")

    found = make_region(torch.mm, X, W).compare(
        {
            "a": raises,
            "stock": build(torch.mm),
            "wrong": build(wrong),
            "b": build(torch.mm),
            "nan": build(lambda x, w: torch.mm(x, w).fill_(float("nan"))),
        },
        {},
    )
    assert list(found) == ["a", "stock", "wrong", "b", "nan"]
    assert found["a"] == region.Outcome(None, "failed: ValueError: first line")
    assert (found["stock"].us, found["b"].us) == (4.0, 3.0)
    assert found["wrong"].us is found["nan"].us is None
    assert found["nan"].note.startswith("wrong")


def test_half_precision_is_judged_against_fp64(card, as_it_is):
    """A candidate may round otherwise than eager does; truncating to 5 bits is too much."""
    x, w = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()

    def wide(x, w):
        return (x.float() @ w.float()).bfloat16()

    def coarse(x, w):
        exact = x.float() @ w.float()
        step = 2.0 ** (exact.abs().log2().floor() - 4)
        return ((exact / step).floor() * step).bfloat16()

    found = make_region(torch.mm, x, w).compare(
        {"stock": build(torch.mm), "wide": build(wide), "coarse": build(coarse)}, {}
    )
    assert found["wide"].us is not None and found["coarse"].note.startswith("wrong")


def test_a_region_in_fp64_skips_the_casts_in_it(card, as_it_is):
    """The reference of relu(x w) in bf16 is that of the wide product, not of its rounded values."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(torch.ops.aten.mm.default, (x, w))
    cast = graph.call_function(
        torch.ops.prims.convert_element_type.default, (product, torch.bfloat16)
    )
    graph.output((cast,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    found = region.Region(gm, [X, W], ["x", "w"], X.device)
    (reference,) = found._reference([X, W])
    torch.testing.assert_close(reference, X.double() @ W.double())
