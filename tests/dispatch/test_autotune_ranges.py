"""Max-autotune on a dynamic size: its ranges are measured, within bounds, and remembered.

Times come from a model, so no card is needed; the code is that of a virtual H200.
"""

import os

import pytest
import torch

import inductor_ext
from inductor_ext import active_plan, choosing, compat, config, measured_ranges, plan_cache, report
from inductor_ext.plan import Box, Entry, Key, Plan
from inductor_ext.testing import compile_for
from inductor_ext.testing.cards import CARDS

BF16 = torch.bfloat16
K, N = 7168, 256
BEST = "split7_64x128x128_w4_s4_pdl"  # no rule picks it for few rows
AUTOTUNE = "max-autotune-no-cudagraphs"


class Model:
    """BEST wins up to ``edge`` rows, stock beyond."""

    def __init__(self, edge=100):
        self.edge, self.asked = edge, []

    def __call__(self, key, sizes, names):
        self.asked.append(sizes["m"])
        fast = 5.0 if sizes["m"] <= self.edge else 15.0
        return {n: 10.0 if n == "stock" else fast + (n != BEST) for n in names}


@pytest.fixture
def model(monkeypatch):
    found = Model()
    monkeypatch.setattr(measured_ranges, "_measure", found)
    active_plan.unload_plan()
    with config.patch(shipped_plan=False):
        yield found
    active_plan.unload_plan()


def t(*size):
    return torch.empty(*size, dtype=BF16, device="meta")


def product(x, w):
    return torch.relu(x @ w)


def decide(rows=16, bounds=(2, 8192), mode=AUTOTUNE, fn=product, w=(K, N)):
    code = compile_for("h200", fn, t(rows, K), t(*w), dynamic={0: {0: bounds}}, mode=mode)
    (decision,) = code.decisions
    return code, decision


def rows(decision):
    return [(r.lo, r.hi, r.chosen) for r in decision.ranges]


@pytest.mark.codegen
def test_ranges_are_measured_within_a_stated_number_of_sizes(model, conditions_of, right_at):
    code, decision = decide()
    edge = decision.ranges[0].hi
    assert 88 <= edge <= 112
    assert rows(decision) == [(2, edge, BEST), (edge + 1, 8192, "stock")]
    assert conditions_of(code) == [f"s0 <= {edge}"]
    assert decision.source == "measured" and f"{edge + 1}..1024 measured at" in decision.reason
    # One step beyond what the rule believes in, and no further.
    assert (
        "not measured (" in decision.reason and "1025..8192): by the heuristic" in decision.reason
    )
    assert max(model.asked) == 1024 and len(set(model.asked)) <= measured_ranges.MAX_SIZES
    assert {c.us for c in decision.candidates if c.name == BEST} >= {5.0}
    w = (torch.randn(K, N) * K**-0.5).to(BF16)
    right_at(code, product, (torch.randn(3, K).to(BF16), w))


def test_one_winner_everywhere_needs_no_branch(model, conditions_of):
    model.edge = 10**6
    code, decision = decide(bounds=(2, 1024))
    assert conditions_of(code) == [] and rows(decision) == [(2, 1024, BEST)]
    assert (decision.chosen, decision.source) == (BEST, "measured")


def test_another_compile_and_another_process_measure_nothing(model, monkeypatch):
    _, first = decide()
    count = len(model.asked)
    decide(rows=40)
    assert len(model.asked) == count
    monkeypatch.setattr(measured_ranges, "_found", {})  # a process that has measured nothing
    _, again = decide()
    assert len(model.asked) == count and again.ranges == first.ranges
    assert again.candidates == first.candidates and again.source == "measured"
    # It is another problem: other sizes, other settings, another card, a cut file.
    decide(w=(K, 128))
    assert len(model.asked) > count
    count = len(model.asked)
    monkeypatch.setattr(measured_ranges, "_found", {})
    with torch._inductor.config.patch(epilogue_fusion=False):
        decide()
    assert len(model.asked) > count
    count = len(model.asked)
    monkeypatch.setattr(measured_ranges, "_found", {})
    for path in plan_cache.folder().iterdir():
        os.truncate(path, 10)
    decide()
    assert len(model.asked) > count


def test_with_inductors_caches_off_nothing_is_remembered_on_disk(model):
    with compat.without_caches():
        decide()
    assert model.asked and not list(plan_cache.folder().iterdir())


@pytest.mark.parametrize("covers", [True, False])
def test_with_a_plan_nothing_is_measured(model, covers):
    import triton

    versions = [".".join(m.__version__.split(".")[:2]) for m in (torch, triton)]
    key = Key.of("decompose_k", "mm", "bfloat16", "row,row", {"n": N if covers else 64, "k": K})
    entry = Entry(key, (Box((("m", (1, 33)),), BEST),), "2026-01-31T12:00:00Z", 1 << 30)
    inductor_ext.load_plan(Plan(CARDS["h200"].name, *versions, (entry,)))
    _, decision = decide()
    assert model.asked == [] and decision.source == ("plan" if covers else "heuristic")
    assert not covers or rows(decision)[0] == (2, 33, BEST)


def test_where_nothing_is_measured(model):
    assert decide(mode=None)[1].source == "heuristic"
    assert decide(rows=4000, bounds=(2000, 8192))[1].source == ""  # no size is plausible

    def fn(a, b):
        return torch.bmm(a, b)

    dynamic = {0: {0: (2, 64), 1: (2, 64)}, 1: {0: (2, 64)}}
    code = compile_for("h200", fn, t(4, 8, K), t(4, K, 64), dynamic=dynamic, mode=AUTOTUNE)
    assert code.decisions[0].source == "heuristic"  # two sizes vary
    assert model.asked == []


def test_a_derived_size_has_its_edge_in_the_symbol(model, conditions_of):
    code, decision = decide(fn=lambda x, w: torch.relu(torch.cat([x, x]) @ w))
    assert all(m % 2 == 0 for m in model.asked) and 44 <= decision.ranges[0].hi <= 56
    assert conditions_of(code) == [f"s0 <= {decision.ranges[0].hi}"]


def test_static_measurements_are_remembered_by_another_process(monkeypatch):
    asked = []

    def here(lowering, names, how):
        asked.append(names)
        return names[0], "timed", (report.CandidateTime("stock", 2.0),)

    monkeypatch.setattr(choosing, "_measure_here", here)
    monkeypatch.setattr(compat, "card_name", lambda: "a card")
    for process in range(2):
        monkeypatch.setattr(choosing, "_measured", {})
        found = choosing._measure("decompose_k", ["a", "b"], "key", choosing.Measure())
        assert found[:2] == ("a", "timed") and len(asked) == 1, process
    choosing._measure("decompose_k", ["a", "b"], "another key", choosing.Measure())
    assert len(asked) == 2


def test_the_programs_of_a_search_are_not_tuned_by_coordinate_descent(monkeypatch):
    """Each of their kernels would be compiled dozens of times."""
    from torch._inductor import config as inductor_config

    from inductor_ext import region
    from inductor_ext.measured_site import MeasuredSite

    def times(self, values, names, *, quick=False):
        for name in names:
            self._program(values, name)
        return {name: 10.0 if name == "stock" else 5.0 + (name != BEST) for name in names}

    seen = []
    generate = region.Symbolic.generate

    def watched(self, assumed):
        seen.append(inductor_config.coordinate_descent_tuning)
        return generate(self, assumed)

    monkeypatch.setattr(measured_ranges, "_measure", lambda *args: {})
    monkeypatch.setattr(MeasuredSite, "times", times)
    monkeypatch.setattr(region.Symbolic, "generate", watched)
    with config.patch(shipped_plan=False):
        code, decision = decide(rows=4, bounds=(2, 4))
    assert decision.source == "measured" and seen and not any(seen)
    assert "'coordinate_descent_tuning': True" in code.source  # what is emitted
