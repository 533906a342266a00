"""A plan in force: what is chosen by it, what falls back, and what the cache key knows."""

import os
import warnings

import pytest
import torch

import inductor_ext
from inductor_ext import active_plan, choosing, config, registry
from inductor_ext.plan import Box, PlanError
from inductor_ext.testing import compile_for

K, N = 7168, 256
FAR = "split7_64x128x128_w4_s4_pdl"  # a tiling far down the heuristic's ranking at M = 4


def box(choice, times=None, **bounds):
    return Box(tuple(bounds.items()), choice, times or {})


def product(a, b):
    return (a @ b).relu()


def half(*size):
    return torch.empty(*size, dtype=torch.bfloat16, device="meta")


def decide(fn=product, *args, **kwargs):
    (decision,) = compile_for("h200", fn, *args or (half(4, K), half(K, N)), **kwargs).decisions
    return decision


def test_the_plan_decides_and_its_times_are_reported(make_plan):
    times = {"4": {"stock": 6.0, FAR: 2.0}, "64": {"stock": 1.0, FAR: 9.0}}
    inductor_ext.load_plan(make_plan(box(FAR, times, m=(1, 64)), n=N, k=K))
    decision = decide()
    assert (decision.chosen, decision.source, decision.fired) == (FAR, "plan", True)
    assert decision.speedup == 3.0
    assert "m=1..64" in decision.reason
    # Stock by the plan is stock.
    inductor_ext.load_plan(make_plan(box("stock", m=(1, 64)), n=N, k=K))
    assert (decide().chosen, decide().source, decide().fired) == ("stock", "plan", False)


@pytest.mark.codegen
def test_the_generated_kernel_is_the_one_named(make_plan):
    inductor_ext.load_plan(make_plan(box("split14_32x16x128_w2_s4", m=(1, 64)), n=N, k=K))
    source = compile_for("h200", product, half(4, K), half(K, N)).source
    assert "BLOCK_M : tl.constexpr = 32" in source and "BLOCK_N : tl.constexpr = 16" in source
    assert "launch_pdl" not in source


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("fn", "args", "key"),
    [
        (product, (half(4, K), half(K, N)), {}),
        (product, (half(4, K), half(N, K).t()), {"layout": "row,column"}),
        (product, (half(K, 4).t(), half(K, N)), {"layout": "column,row"}),
        (product, (half(4, 2 * K)[:, ::2], half(K, N)), {"layout": "other,row"}),
        (torch.addmm, (half(N), half(4, K), half(K, N)), {"op": "addmm"}),
        (
            lambda a, b: torch.mm(a, b, out_dtype=torch.float32),
            (half(4, K), half(K, N)),
            {"dtype": "bfloat16->float32"},
        ),
        (
            lambda a, b: torch.softmax(a @ b, -1),
            (half(4, K), half(K, N)),
            {"op": "mm+row_reduction"},
        ),
    ],
    ids=["mm", "column", "transposed", "other", "addmm", "out_dtype", "rows"],
)
def test_the_key_of_a_site(fn, args, key, make_plan):
    inductor_ext.load_plan(make_plan(box(FAR, m=(4, 4)), n=N, k=K, **key))
    assert decide(fn, *args).source == "plan"


def test_batched_products_have_two_ranges(make_plan):
    args = half(3, 4, K), half(3, K, 64)
    name = "split7_16x64x128_w2_s4"
    inductor_ext.load_plan(make_plan(box(name, m=(1, 8), batch=(3, 4)), op="bmm", n=64, k=K))
    assert decide(torch.bmm, *args).chosen == name
    more = decide(torch.bmm, half(5, 4, K), half(5, K, 64))
    assert more.source == "heuristic"
    assert more.reason.startswith("not in the plan: m=4 batch=5 lies in none of its ranges; ")


def test_what_is_not_covered_falls_back_and_says_so(make_plan):
    by_heuristic = decide().chosen
    inductor_ext.load_plan(make_plan(box(FAR, m=(5, 64)), n=N, k=K))
    decision = decide()
    assert (decision.chosen, decision.source) == (by_heuristic, "heuristic")
    assert decision.reason.startswith("not in the plan: m=4 lies in none of its ranges; ")


SMALL_K = half(16, 256), half(256, 16)  # K is below what the rule believes in
SPLIT = "split2_16x16x128_w2_s1"


@pytest.mark.parametrize("n", [16, None])
def test_the_plan_decides_where_the_rule_would_not_look(make_plan, n):
    """A static site asks the plan first; also where the plan has ranges of what is static here."""
    assert decide(product, *SMALL_K).source == ""
    bounds, sizes = ({}, {"n": n}) if n else ({"n": (1, 64)}, {})
    times = {"16": {"stock": 6.0, SPLIT: 2.0}} if n else {}
    inductor_ext.load_plan(make_plan(box(SPLIT, times, m=(1, 64), **bounds), k=256, **sizes))
    code = compile_for("h200", product, *SMALL_K)
    (decision,) = code.decisions
    assert (decision.chosen, decision.source, decision.fired) == (SPLIT, "plan", True)
    assert "SPLITS" in code.source and decision.speedup == (3.0 if n else None)
    inductor_ext.load_plan(make_plan(box("stock", m=(1, 64)), k=256, n=16))
    decision = decide(product, *SMALL_K)
    assert (decision.chosen, decision.source, decision.fired) == ("stock", "plan", False)


@pytest.mark.parametrize("name", [None, "bmm_split16"])
def test_what_neither_plan_nor_rule_splits_says_so(make_plan, name):
    inductor_ext.load_plan(
        make_plan(box(name or SPLIT, m=(1, 64) if name else (1, 8)), k=256, n=16)
    )
    decision = decide(product, *SMALL_K)
    assert (decision.chosen, decision.fired) == ("stock", False)
    said = f"the plan names {name}, which is no candidate here" if name else "m=16 lies in none"
    assert decision.reason.startswith("not in the plan: ") and said in decision.reason
    assert decision.reason.endswith(
        "K=256 is below 1024: one pass over it costs less than a second kernel"
    )


def test_what_is_not_allowed_comes_before_the_plan(make_plan):
    args = half(1, K), half(K, 1)
    assert decide(product, *args).reason == "the output is one element"
    inductor_ext.load_plan(make_plan(box(FAR, m=(1, 64)), k=K, n=1))
    decision = decide(product, *args)
    assert (decision.chosen, decision.fired) == ("stock", False)
    assert decision.reason.startswith(f"the output is one element, so {FAR} is not emitted, which ")
    assert "m=1..64 in the plan names" in decision.reason


def test_where_the_rule_would_not_look_nothing_is_measured(make_plan, monkeypatch):
    monkeypatch.setattr(choosing.compat, "on_real_card", lambda: True)
    monkeypatch.setattr(choosing, "_measure", lambda *a: pytest.fail("measured"))
    assert decide(product, *SMALL_K, mode="max-autotune-no-cudagraphs").source == ""


@pytest.mark.parametrize(
    "name",
    ["nonsense", "split14_16x16x64_w9_s9", "split3_16x32x128_w2_s4", "bmm_split13", f"{FAR}_late2"],
)
def test_an_unknown_candidate_falls_back_and_says_so(name, make_plan):
    by_heuristic = decide().chosen
    inductor_ext.load_plan(make_plan(box(name, m=(1, 64)), n=N, k=K))
    decision = decide()
    assert (decision.chosen, decision.source) == (by_heuristic, "heuristic")
    assert f"names {name}, which is no candidate here" in decision.reason


def test_forcing_comes_before_the_plan(make_plan):
    inductor_ext.load_plan(make_plan(box("stock", m=(1, 64)), n=N, k=K))
    decision = decide(force={"decompose_k": "bmm_split16"})
    assert (decision.chosen, decision.source) == ("bmm_split16", "forced")
    assert decide(force={"decompose_k": FAR}).chosen == FAR  # not on the short list either


def test_the_plan_loaded_last_decides_and_unloading_forgets(make_plan):
    inductor_ext.load_plan(make_plan(box("stock", m=(1, 64)), n=N, k=K))
    inductor_ext.load_plan(make_plan(box(FAR, m=(1, 3)), n=N, k=K))
    assert decide().chosen == "stock"  # the last one does not cover it, the one before does
    inductor_ext.load_plan(make_plan(box(FAR, m=(4, 4)), n=N, k=K))
    assert decide().chosen == FAR
    inductor_ext.unload_plan()
    assert decide().source == "heuristic" and "plan" not in decide().reason


def test_with_a_plan_nothing_is_measured(make_plan, monkeypatch):
    """Max-autotune on a card: the measuring is replaced by an answer that shows it was asked."""
    monkeypatch.setattr(choosing.compat, "on_real_card", lambda: True)
    asked = []

    def measure(lowering, names, key, how):
        asked.append(lowering)
        return "stock", "asked", ()

    monkeypatch.setattr(choosing, "_measure", measure)
    assert decide(mode="max-autotune-no-cudagraphs").source == "measured" and asked
    asked.clear()
    inductor_ext.load_plan(make_plan(box(FAR, m=(1, 2)), n=N, k=K))
    assert decide(mode="max-autotune-no-cudagraphs").source == "heuristic" and not asked


@pytest.mark.codegen
def test_a_dynamic_size_branches_where_the_plan_says(make_plan):
    ranges = box(FAR, m=(1, 16)), box("stock", m=(17, 4096))
    inductor_ext.load_plan(make_plan(*ranges, n=N, k=K))
    decision = decide(dynamic={0: {0: (1, 4096)}})
    assert [(r.hi, r.chosen) for r in decision.ranges] == [(16, FAR), (4096, "stock")]


# --- which plans are accepted ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"card": "NVIDIA H100 80GB HBM3"}, "measured on NVIDIA H100 80GB HBM3, and this card is"),
        ({"torch_version": "2.10"}, "measured with torch 2.10, and this is 2."),
        ({"triton_version": "2.1"}, "measured with triton 2.1, and this is 3."),
    ],
    ids=["card", "torch", "triton"],
)
def test_a_plan_of_another_machine_is_refused_unless_forced(machine, said, make_plan, monkeypatch):
    monkeypatch.setattr(active_plan.compat, "card_name", lambda: "NVIDIA H200")
    plan = make_plan(box(FAR, m=(1, 64)), n=N, k=K, **machine)
    with pytest.raises(PlanError, match=said) as caught:
        inductor_ext.load_plan(plan)
    assert "force=True" in str(caught.value) and active_plan.user_plans() == ()
    inductor_ext.load_plan(plan, force=True)
    assert decide().chosen == FAR


def test_a_plan_loaded_where_there_is_no_card_is_asked_for_its_card_when_used(
    make_plan, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inductor_ext.load_plan(make_plan(box(FAR, m=(1, 64)), n=N, k=K, card="NVIDIA B200"))
    monkeypatch.undo()
    with config.patch(shipped_plan=False):
        decision = decide()
    assert decision.source == "heuristic"
    assert decision.reason.startswith("not in the plan: it was measured on NVIDIA B200, and this")


def test_the_environment_variable(make_plan, monkeypatch, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    make_plan(box(FAR, m=(1, 64)), n=N, k=K).save(first)
    make_plan(box("stock", m=(1, 64)), n=128, k=K).save(second)
    monkeypatch.setenv("INDUCTOR_EXT_PLAN", os.pathsep.join([str(first), str(second)]))
    active_plan.load_environment()
    assert [p.name for p in active_plan.user_plans()] == [str(first), str(second)]
    assert decide().chosen == FAR and str(first) in decide().reason


def test_a_bad_file_in_the_environment_is_one_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("INDUCTOR_EXT_PLAN", str(tmp_path / "absent.json"))
    with config.patch(strict=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        active_plan.load_environment()
    assert [str(w.message) for w in caught] == [
        f"INDUCTOR_EXT_PLAN is not used: {tmp_path / 'absent.json'}: the plan can't be read "
        "(No such file or directory)."
    ]
    with config.patch(strict=True), pytest.raises(PlanError):
        active_plan.load_environment()


# --- the shipped plan -----------------------------------------------------------------------------


@pytest.fixture
def ship(monkeypatch, tmp_path):
    """Put a plan where the package would have brought it."""

    def put(plan, name="h200.json"):
        (tmp_path / "plans").mkdir(exist_ok=True)
        plan.save(tmp_path / "plans" / name)
        for cached in (active_plan.shipped, active_plan._shipped_digest):
            cached.cache_clear()

    monkeypatch.setattr(active_plan.importlib.resources, "files", lambda package: tmp_path)
    (tmp_path / "plans").mkdir()
    for cached in (active_plan.shipped, active_plan._shipped_digest):
        cached.cache_clear()
    with config.patch(shipped_plan=True):
        yield put
    for cached in (active_plan.shipped, active_plan._shipped_digest):
        cached.cache_clear()


def test_the_shipped_plan_answers_for_what_it_covers(ship, make_plan):
    assert decide().source == "heuristic"
    ship(make_plan(box(FAR, m=(4, 4)), n=N, k=K))
    decision = decide()
    assert (decision.chosen, decision.source) == (FAR, "plan")
    assert "the shipped plan" in decision.reason
    other = decide(product, half(5, K), half(K, N))
    assert other.source == "heuristic" and "plan" not in other.reason
    # The user's comes first, and then the shipped one.
    inductor_ext.load_plan(make_plan(box("stock", m=(4, 4)), n=N, k=K))
    assert decide().chosen == "stock"
    with config.patch(shipped_plan=False):
        inductor_ext.unload_plan()
        assert decide().source == "heuristic"


def test_a_shipped_plan_of_another_version_has_no_say(ship, make_plan):
    ship(make_plan(box(FAR, m=(4, 4)), n=N, k=K, torch_version="2.10"))
    assert decide().source == "heuristic"


def test_the_file_is_found_by_a_word_of_the_cards_name(ship, make_plan):
    ship(make_plan(), "a100.json")
    assert active_plan.shipped("NVIDIA A100-SXM4-80GB") is not None
    assert active_plan.shipped("NVIDIA H200") is None


# --- the cache key --------------------------------------------------------------------------------


@pytest.mark.codegen
def test_plans_are_part_of_the_cache_key(make_plan, ship):
    seen = {registry.revision()}

    def changed():
        before = len(seen)
        seen.add(registry.revision())
        return len(seen) > before

    plan = make_plan(box(FAR, m=(1, 64)), n=N, k=K)
    inductor_ext.load_plan(plan)
    assert changed() and not changed()
    inductor_ext.unload_plan()
    assert not changed()
    inductor_ext.load_plan(plan, force=True)
    assert changed()
    inductor_ext.unload_plan()
    inductor_ext.load_plan(make_plan(box(FAR, m=(1, 63)), n=N, k=K))
    assert changed()
    inductor_ext.unload_plan()
    ship(plan)
    assert changed()
    with config.patch(shipped_plan=False):
        assert changed()
