"""Branches by a plan: its ranges exactly, the rule's between them, and what the report says."""

import pytest
import sympy
import torch

import inductor_ext
from inductor_ext import active_plan, boxes, config, dispatch, known
from inductor_ext.plan import Box, Entry, Key, Plan, PlanError
from inductor_ext.testing import compile_for
from inductor_ext.testing.cards import CARDS

BF16 = torch.bfloat16
K, N = 7168, 256
FAR = "split7_64x128x128_w4_s4_pdl"  # no rule picks it for few rows
NARROW = "split14_16x16x128_w2_s4"
ANY = {0: {0: None}}


@pytest.fixture(autouse=True)
def _clean():
    active_plan.unload_plan()
    with config.patch(shipped_plan=False):
        yield
    active_plan.unload_plan()


def box(choice, times=None, **bounds):
    return Box(tuple(bounds.items()), choice, times or {})


def load(*found, op="mm", layout="row,row", n=N, k=K, lowering="decompose_k"):
    import triton

    torch_version, triton_version = (
        ".".join(m.__version__.split(".")[:2]) for m in (torch, triton)
    )
    key = Key.of(lowering, op, "bfloat16", layout, {"n": n, "k": k})
    entry = Entry(key, found, "2026-01-31T12:00:00Z", 1 << 30)
    inductor_ext.load_plan(Plan(CARDS["h200"].name, torch_version, triton_version, (entry,)))


def t(*size):
    return torch.empty(*size, dtype=BF16, device="meta")


def weight(*size, k=K):
    return (torch.randn(size) * k**-0.5).to(BF16)


def relu_mm(a, b):
    return torch.relu(a @ b)


def compiled(fn=relu_mm, *args, dynamic=ANY):
    code = compile_for("h200", fn, *args or (t(16, K), t(K, N)), dynamic=dynamic)
    (decision,) = code.decisions
    return code, decision


def rows(decision):
    return [(r.lo, r.hi, r.chosen) for r in decision.ranges]


# --- generated code -------------------------------------------------------------------------------


def test_the_ranges_are_the_plans_exactly(conditions_of, right_at):
    """One of a single size, and an edge that no sweep visits."""
    load(
        box(FAR, m=(1, 18)),
        box(NARROW, m=(19, 2000)),
        box(FAR, m=(2001, 2001)),
        box("stock", m=(2002, 8192)),
    )
    code, decision = compiled(relu_mm, t(16, K), t(K, N), dynamic={0: {0: (2, 8192)}})
    assert rows(decision) == [
        (2, 18, FAR),
        (19, 2000, NARROW),
        (2001, 2001, FAR),
        (2002, 8192, "stock"),
    ]
    assert conditions_of(code) == ["s0 <= 18", "s0 <= 2000", "s0 <= 2001"]
    assert decision.source == "plan" and "not in the plan" not in decision.reason
    w = weight(K, N)
    for size in (18, 19):
        right_at(code, relu_mm, (torch.randn(size, K).to(BF16), w))


def test_times_are_reported_for_every_range():
    load(
        box(FAR, {"4": {"stock": 6.0, FAR: 2.0}, "64": {"stock": 7.0, FAR: 5.0}}, m=(1, 64)),
        box("stock", {"512": {"stock": 8.0, FAR: 9.0}}, m=(65, 8192)),
    )
    _, decision = compiled(relu_mm, t(50, K), t(K, N), dynamic={0: {0: (2, 8192)}})
    size = decision.ranges[0].size
    assert [(c.name, c.us, c.note) for c in decision.candidates] == [
        ("stock", 7.0, f"{size} 2..64: measured for the plan at 64"),
        (FAR, 5.0, f"{size} 2..64: measured for the plan at 64"),
        ("stock", 8.0, f"{size} 65..8192: measured for the plan at 512"),
        (FAR, 9.0, f"{size} 65..8192: measured for the plan at 512"),
    ]
    shown = str(inductor_ext.Report((decision,)))
    cells = [line.split("│")[3].strip() for line in shown.splitlines() if line.count("│") == 5]
    first = cells.index(f"{size} 2..64: measured for the plan at 64")
    assert cells[first + 1 : first + 3] == [f"5.00 {FAR}", "7.00 stock"]
    second = cells.index(f"{size} 65..8192: measured for the plan at", first)
    assert cells[second : second + 2] == [cells[second], "512"]
    assert cells[second + 2 : second + 4] == ["8.00 stock", f"9.00 {FAR}"]


def test_outside_the_plan_the_heuristic_decides_and_the_report_says_where():
    _, by_heuristic = compiled()
    load(box(FAR, m=(33, 100)))
    _, decision = compiled()
    size = decision.ranges[0].size
    assert (33, 100, FAR) in rows(decision) and decision.source == "plan"
    inside = {r[:2] for r in rows(by_heuristic) if r[1] is not None and r[1] <= 32}
    assert inside and inside <= {r[:2] for r in rows(decision)}
    assert rows(decision)[-1][2] == "stock"
    assert "m=33..100 in the plan" in decision.reason
    rest = f"not in the plan: sizes outside its ranges ({size} 2..32, 101..): by the heuristic"
    assert decision.reason.endswith(rest)


def test_a_plan_that_does_not_cover_the_site_is_named_first():
    _, by_heuristic = compiled()
    load(box(FAR, m=(1, 100)), n=128)
    _, decision = compiled()
    assert rows(decision) == rows(by_heuristic) and decision.source == "heuristic"
    assert decision.reason.startswith("not in the plan: no entry for these sizes of mm")


@pytest.mark.parametrize("name", ["nonsense", "split3_16x32x128_w2_s4", "bmm_split13"])
def test_an_unknown_candidate_falls_back_with_the_reason(name):
    _, by_heuristic = compiled()
    load(box(name, m=(1, 100)))
    _, decision = compiled()
    assert rows(decision) == rows(by_heuristic) and decision.source == "heuristic"
    start = f"not in the plan: m=1..100 in the plan names {name}, which is no candidate here"
    assert decision.reason.startswith(start)


def test_ranges_in_a_derived_size(conditions_of):
    def fn(x, w):
        return torch.relu(torch.cat([x, x]) @ w)

    load(box(FAR, m=(2, 101)), box("stock", m=(102, 8193)))
    code, decision = compiled(fn, t(16, K), t(K, N), dynamic={0: {0: (2, 4096)}})
    assert "2*s" in decision.sites and decision.source == "plan"
    assert rows(decision) == [(2, 50, FAR), (51, 4096, "stock")]
    assert conditions_of(code) == ["s0 <= 50"]


@pytest.mark.codegen
def test_rows_and_batch(conditions_of):
    name = "split7_16x64x128_w2_s4"
    load(box(name, m=(1, 100), batch=(3, 3)), op="bmm", n=64)
    code, decision = compiled(
        torch.bmm, t(4, 8, K), t(4, K, 64), dynamic={0: {0: None, 1: None}, 1: {0: None}}
    )
    first = decision.ranges[0]
    bounds = sorted([(first.lo, first.hi), *(b[1:] for b in first.and_also)])
    assert first.chosen == name and bounds == [(2, 100), (3, 3)]
    condition = conditions_of(code)[0]
    assert " == 3" in condition and " <= 100" in condition and " and " in condition
    assert decision.source == "plan" and "not in the plan" in decision.reason
    assert len(decision.ranges) <= dispatch.MAX_RANGES


@pytest.mark.parametrize(
    ("choice", "bounds"), [(FAR, (3, 64)), (FAR, (2, 2000)), (FAR, None), ("stock", (2, 2000))]
)
def test_one_choice_of_the_plan_needs_no_branch(choice, bounds, conditions_of):
    """Also where the heuristic would leave some of the sizes alone."""
    load(box(choice, {"4": {"stock": 6.0, FAR: 2.0}}, m=(1, None)))
    code, decision = compiled(relu_mm, t(16, K), t(K, N), dynamic={0: {0: bounds}})
    assert conditions_of(code) == [] and "size_dispatch" not in code.source
    assert (decision.chosen, decision.source) == (choice, "plan")
    assert [r[2] for r in rows(decision)] == [choice]
    assert {c.name: c.us for c in decision.candidates} == {"stock": 6.0, FAR: 2.0}
    assert ("BLOCK_N : tl.constexpr = 128" in code.source) == (choice == FAR)


def test_static_sites_are_as_before():
    load(box(FAR, {"4": {"stock": 6.0, FAR: 2.0}}, m=(1, 100)))
    code = compile_for("h200", relu_mm, t(4, K), t(K, N))
    (decision,) = code.decisions
    assert (decision.chosen, decision.source, decision.ranges) == (FAR, "plan", ())
    assert decision.reason == "m=1..100 in the plan" and "size_dispatch" not in code.source


def test_a_plan_that_can_not_be_loaded_changes_nothing(tmp_path):
    with pytest.raises(PlanError):
        inductor_ext.load_plan(tmp_path / "absent.json")
    _, decision = compiled()
    assert decision.source == "heuristic" and "plan" not in decision.reason


# --- boxes alone ----------------------------------------------------------------------------------

S, B = (sympy.Symbol(n, integer=True, positive=True) for n in ("s0", "s1"))


def cover(axes, sizes, rule, *known_boxes, rest="not in the plan: elsewhere", exists=None):
    found = tuple(
        dispatch.Known(bounds, choice, "plan", str(bounds)) for bounds, choice in known_boxes
    )
    asked = exists or (lambda name: True)
    sensitivity = dispatch.Sensitivity("site", sizes, rule, found, rest, asked)
    return known.cover(axes, sensitivity, boxes.boxes_of)


def spans(found):
    return [(*b.ends[0], b.choice) for b in found.boxes]


AXIS = dispatch.Axis(S, 2, None, 8)


def test_the_first_known_range_decides():
    found = cover([AXIS], (S,), lambda v: "r", (((5, 9),), "a"), (((2, None),), "b"))
    assert spans(found) == [(2, 4, "b"), (5, 9, "a"), (10, None, "b")] and not found.rest


def test_equal_choices_merge_whoever_makes_them():
    found = cover([AXIS], (S,), lambda v: "a" if v[0] > 50 else "b", (((10, 50),), "a"))
    assert spans(found) == [(2, 9, "b"), (10, None, "a")]
    assert found.rest == "not in the plan: elsewhere (s0 2..9, 51..)"
    ((ends, part),) = found.boxes[1].known
    assert ends == ((10, 50),) and part.choice == "a"


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [
        (2 * S, (3, 100), (2, 50)),
        (2 * S + 1, (1, 100), (2, 49)),
        (1000 - S, (700, 900), (100, 300)),
        (S * S, (10, 1 << 44), (4, 1 << 22)),
        (sympy.floor(S / 8), (3, 4), (24, 39)),
        (sympy.floor(S / 8), (3, None), (24, None)),
    ],
)
def test_edges_of_a_derived_size_are_exact(size, bounds, expected):
    axis = AXIS if bounds[1] != 900 else dispatch.Axis(S, 2, 900, 8)
    found = cover([axis], (size,), lambda v: "r", ((bounds,), "a"))
    assert [x[:2] for x in spans(found) if x[2] == "a"] == [expected]


def test_the_rules_edges_go_before_the_plans():
    plan = [(((100 * i, 100 * i + 99),), f"p{i % 2}") for i in range(1, 7)]
    found = cover([AXIS], (S,), lambda v: f"r{v[0].bit_length()}", *plan)
    assert len(found.boxes) == dispatch.MAX_RANGES
    assert [x for x in spans(found) if x[2].startswith("p")] == [
        (100 * i, 100 * i + 99, f"p{i % 2}") for i in range(1, 7)
    ]
    assert spans(found)[0][0] == 2 and spans(found)[-1][1] is None
    assert "of the heuristic dropped: at most 8" in found.dropped and "plan" not in found.dropped


def test_more_plan_ranges_than_are_emitted_say_so():
    plan = [(((2 + 10 * i, 11 + 10 * i),), f"p{i}") for i in range(20)]
    found = cover([dispatch.Axis(S, 2, 201, 8)], (S,), lambda v: "r", *plan)
    assert len(found.boxes) == dispatch.MAX_RANGES and "12 ranges of the plan" in found.dropped
    assert spans(found)[0][0] == 2 and spans(found)[-1][1] == 201
    assert all(a[1] + 1 == b[0] for a, b in zip(spans(found), spans(found)[1:], strict=False))


def test_a_known_candidate_that_does_not_exist_is_left_out():
    asked = []

    def exists(name):
        asked.append(name)
        return False

    rule = lambda v: "r"  # noqa: E731
    found = cover([AXIS], (S,), rule, (((5, 9),), "a"), (((10, 12),), "stock"), exists=exists)
    assert [x for x in spans(found) if x[2] != "r"] == [(10, 12, "stock")] and asked == ["a"]
    assert "names a, which is no candidate here" in found.rest


def inside(found, values):
    return next(
        b.choice
        for b in found.boxes
        if all(
            lo <= v and (hi is None or v <= hi) for v, (lo, hi) in zip(values, b.ends, strict=True)
        )
    )


def test_several_axes_keep_the_plans_boxes():
    axes = [dispatch.Axis(S, 2, 4096, 8), dispatch.Axis(B, 2, 512, 4)]
    plan = [(((7, 100), (3, 3)), "a"), (((2, 50), (2, 9)), "b")]

    def rule(v):
        return "stock" if v[0] * v[1] > 1000 else "small"

    found = cover(axes, (S, B), rule, *plan)
    assert len(found.boxes) <= dispatch.MAX_RANGES and found.rest == "not in the plan: elsewhere"
    for rows_ in (2, 6, 7, 50, 51, 100, 101, 4096):
        for batch in (2, 3, 4, 9, 10, 512):
            expected = "a" if 7 <= rows_ <= 100 and batch == 3 else None
            expected = expected or ("b" if rows_ <= 50 and batch <= 9 else None)
            got = inside(found, (rows_, batch))
            assert got == expected if expected else got in ("stock", "small")
    assert inside(found, (4096, 512)) == "stock"


def test_several_axes_that_the_plan_covers_ask_no_rule():
    axes = [dispatch.Axis(S, 2, 4096, 8), dispatch.Axis(B, 2, 512, 4)]
    plan = [(((1, 100), (1, None)), "a"), (((101, None), (1, None)), "stock")]

    def rule(v):
        raise AssertionError("asked")

    found = cover(axes, (S, B), rule, *plan)
    assert [(b.ends[0], b.choice) for b in found.boxes] == [
        ((2, 100), "a"),
        ((101, 4096), "stock"),
    ]
    assert found.rest == ""


def test_several_axes_at_most():
    axes = [dispatch.Axis(S, 2, 4096, 8), dispatch.Axis(B, 2, 512, 4)]
    plan = [(((10 * i, 10 * i + 5), (2, 4)), f"p{i}") for i in range(1, 12)]
    found = cover(axes, (S, B), lambda v: "r" if v[0] > 9 else "q", *plan)
    assert len(found.boxes) <= dispatch.MAX_RANGES and "4 ranges of the plan" in found.dropped
    assert inside(found, (3000, 300)) == "r"


def test_boxes_of_a_problem_with_some_sizes_fixed():
    """Static sizes of an entry bound the dimension they name; the most particular comes first."""
    ranged = Key.of("l", "mm", "bfloat16", "row,row", {"k": 64})
    special = Key.of("l", "mm", "bfloat16", "row,row", {"k": 64, "m": 7})
    entries = (
        Entry(ranged, (box("a", m=(1, 8), n=(1, 32)), box("b", m=(1, 8), n=(33, 64))), "", 0),
        Entry(special, (box("c", n=(1, 64)),), "", 0),
    )
    plan = Plan("card", "2.13", "3.5", entries)
    key = Key.of("l", "mm", "bfloat16", "row,row", {"k": 64})

    def found(n, k=64):
        key_here = Key.of("l", "mm", "bfloat16", "row,row", {"k": k})
        return [(b.choice, bounds) for b, bounds in plan.boxes_of(key_here, {"n": n}, ["m"])]

    assert found(16) == [("c", ((7, 7),)), ("a", ((1, 8),))]
    assert found(40) == [("c", ((7, 7),)), ("b", ((1, 8),))]
    assert found(65) == [] and found(16, k=128) == []
    assert [b.choice for b, _ in plan.boxes_of(key, {}, ["n", "m"])] == ["c", "a", "b"]
