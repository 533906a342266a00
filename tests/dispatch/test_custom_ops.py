"""A user's operation with a choice per range of one size: measured, given, planned, static.

Times come from a model, so no card is needed; the code is that of a virtual H200.
"""

import itertools
import re

import pytest
import torch
import triton

import inductor_ext
from inductor_ext import CustomOpConfig, active_plan, config, ranged_op
from inductor_ext.plan import Box, Entry, Key, Plan
from inductor_ext.testing import compile_for
from inductor_ext.testing.cards import CARDS

_numbers = itertools.count()


def rows_first(x, y):
    return (x + y) * 2.0


def columns_first(x, y):
    return x * 2.0 + y * 2.0


def slow(x, y):
    return (x + y) + (x + y)


def new_op(on="x", dim=0, *, candidates=(rows_first, columns_first), **registration):
    """2 (x + y), into which Inductor cannot look."""

    @torch.library.custom_op(f"inductor_ext_test::ranged{next(_numbers)}", mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * 2

    op.register_fake(lambda x, y: x + y)  # ties the sizes
    registration.setdefault("dispatch_on", {"tensor_name": on, "dim": dim})
    inductor_ext.register_custom_op_autotuning(
        op, [CustomOpConfig(c) for c in candidates], **registration
    )
    return op


class Model:
    """rows_first wins up to ``edge`` rows, columns_first up to ``second``, stock beyond."""

    def __init__(self, edge=100, second=3000):
        self.edges, self.asked = (edge, second), []

    def __call__(self, key, sizes, names):
        self.asked.append(dict(sizes))
        size = sizes.get("x.0", dict(key.sizes).get("x.0"))
        rank = {"rows_first": 0, "columns_first": 1, "stock": 2, "slow": 5}
        wins = sum(size > edge for edge in self.edges)
        return {name: 5.0 + abs(rank[name] - wins) for name in names}


@pytest.fixture
def model(monkeypatch):
    found = Model()
    monkeypatch.setattr(ranged_op, "_measure", found)
    monkeypatch.setattr(ranged_op, "_found", {})
    return found


@pytest.fixture(autouse=True)
def _clean():
    active_plan.unload_plan()
    with config.patch(shipped_plan=False):
        yield
    active_plan.unload_plan()


X, Y = torch.randn(16, 64), torch.randn(16, 64)
BOTH = {0: {0: (2, 8192)}, 1: {0: (2, 8192)}}


def gate(op):
    return lambda x, y: torch.relu(op(x, y)) + 1


def decide(op, *args, dynamic=BOTH, **kwargs):
    code = compile_for("h200", gate(op), *args or (X, Y), dynamic=dynamic, **kwargs)
    (decision,) = code.decisions
    return code, decision


def rows(decision):
    return [(r.lo, r.hi, r.chosen) for r in decision.ranges]


def kernels_per_branch(code):
    body = code.source[code.source.index("def call") :]
    parts = re.split(r"^\s+(?:if|elif) .*\bs\d+.*:$|^\s+else:$", body, flags=re.MULTILINE)[1:]
    return [len(re.findall(r"\.run\(", part)) for part in parts]


# --- measured -------------------------------------------------------------------------------------


@pytest.mark.codegen
def test_one_branch_around_the_region_with_its_epilogue_fused(model, conditions_of, right_at):
    op = new_op()
    code, decision = decide(op)
    first, second, third = rows(decision)
    assert first[::2] == (2, "rows_first") and second[2] == "columns_first"
    assert third[1:] == (8192, "stock")
    # Known to an eighth where nothing rounder lies between.
    assert 88 <= first[1] <= 112 and 2600 <= second[1] <= 3400
    assert conditions_of(code) == [f"s0 <= {first[1]}", f"s0 <= {second[1]}"]
    assert kernels_per_branch(code) == [1, 1, 1]
    assert code.source.count("= torch.ops.inductor_ext_test") == 1  # stock, in its branch
    assert decision.source == "measured" and decision.fired
    for size in (2, first[1], first[1] + 1, second[1]):
        args = torch.randn(size, 64), torch.randn(size, 64)
        right_at(code, gate(op), args, rounding=torch.float32)


def test_the_times_of_every_range_are_reported(model):
    _, decision = decide(new_op())
    us = {(c.note.split(":")[0], c.name): c.us for c in decision.candidates}
    spans = [r.span() for r in decision.ranges]
    assert us[spans[0], "rows_first"] == 5.0 and us[spans[0], "stock"] == 7.0
    assert us[spans[1], "columns_first"] == 5.0 and us[spans[2], "stock"] == 5.0
    assert all(": measured at " in c.note for c in decision.candidates)
    assert "sizes up to 8192" in decision.reason


def test_every_range_is_scored_inside_and_every_tensor_resized(model):
    _, decision = decide(new_op())
    sizes = {s["x.0"] for s in model.asked}
    for lo, hi, _ in rows(decision):
        assert sum(lo < size < hi for size in sizes) >= 3
    assert all(s["y.0"] == s["x.0"] for s in model.asked) and max(sizes) == 8192


def test_measuring_takes_a_bounded_number_of_sizes(monkeypatch, model):
    """However often the winner changes."""

    def restless(key, sizes, names):
        model.asked.append(sizes["x.0"])
        wins = ["rows_first", "columns_first"][sizes["x.0"].bit_length() % 2]
        return {n: 5.0 if n == wins else 9.0 for n in names}

    monkeypatch.setattr(ranged_op, "_measure", restless)
    _, decision = decide(new_op(), dynamic={0: {0: None}, 1: {0: None}})
    assert 20 < len(set(model.asked)) <= 40 and max(model.asked) == 65536
    assert 4 < len(decision.ranges) <= 8


def test_an_open_size_is_measured_up_to_the_bound(model):
    on = {"tensor_name": "x", "dim": 0, "range_upper_bound": 2048}
    op = new_op(dispatch_on=on)
    _, decision = decide(op, dynamic={0: {0: None}, 1: {0: None}})
    assert max(s["x.0"] for s in model.asked) == 2048
    assert rows(decision)[-1][1:] == (None, "columns_first")


def test_measured_once_per_problem(model):
    op = new_op()
    first = decide(op)[1]
    count = len(model.asked)
    assert decide(op, torch.randn(40, 64), torch.randn(40, 64))[1].ranges == first.ranges
    assert len(model.asked) == count
    decide(op, torch.randn(16, 32), torch.randn(16, 32))
    assert len(model.asked) > count


def test_one_winner_needs_no_branch(model, conditions_of):
    model.edges = (10000, 20000)
    code, decision = decide(new_op())
    assert conditions_of(code) == [] and "size_dispatch" not in code.source
    assert (decision.chosen, decision.source, decision.fired) == ("rows_first", "measured", True)
    assert len(code.kernels) == 1 and rows(decision) == [(2, 8192, "rows_first")]


def test_a_derived_size(model, conditions_of):
    op = new_op()

    def fn(x, y):
        return torch.relu(op(torch.cat([x, x]), torch.cat([y, y])))

    code = compile_for("h200", fn, X, Y, dynamic=BOTH)
    (decision,) = (d for d in code.decisions if d.ranges)
    assert all(s["x.0"] % 2 == 0 for s in model.asked)
    first = rows(decision)[0]
    assert first[2] == "rows_first" and 44 <= first[1] <= 56
    assert conditions_of(code)[0] == f"s0 <= {first[1]}"


@torch.library.custom_op("inductor_ext_test::ranged_pair", mutates_args=())
def pair(x: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    return x * scale, x.sum(-1)


@pair.register_fake
def _(x, scale=2.0):
    return x * scale, x.sum(-1)


@pytest.mark.codegen
def test_several_outputs(model, right_at):
    def rows_first(x, scale=2.0):
        return x * scale, x.sum(-1)

    def columns_first(x, scale=2.0):
        return scale * x, (x * 1.0).sum(-1)

    on = {"tensor_name": "x", "dim": 0}
    configs = [CustomOpConfig(rows_first), CustomOpConfig(columns_first)]
    inductor_ext.register_custom_op_autotuning(pair, configs, dispatch_on=on)

    def fn(x):
        doubled, total = torch.ops.inductor_ext_test.ranged_pair(x)
        return torch.relu(doubled), total + 1

    code = compile_for("h200", fn, X, dynamic={0: {0: (2, 2048)}})
    (decision,) = code.decisions
    assert [r[2] for r in rows(decision)] == ["rows_first", "columns_first"]
    assert kernels_per_branch(code) == [1, 1]
    for size in (3, rows(decision)[0][1] + 1):
        right_at(code, fn, (torch.randn(size, 64),), rounding=torch.float32)


def test_include_fallback_false_never_takes_stock(model):
    op = new_op(include_fallback=False)
    _, decision = decide(op)
    assert [r[2] for r in rows(decision)] == ["rows_first", "columns_first"]


@pytest.mark.parametrize(("size", "chosen"), [(8, "rows_first"), (200, "columns_first")])
def test_a_static_size_takes_the_winner_of_its_range(model, size, chosen):
    args = torch.randn(size, 64), torch.randn(size, 64)
    code, decision = decide(new_op(), *args, dynamic=None)
    assert (decision.chosen, decision.source, decision.ranges) == (chosen, "measured", ())
    assert {c.name: c.us for c in decision.candidates}[chosen] == 5.0
    assert "size_dispatch" not in code.source


# --- split points ---------------------------------------------------------------------------------


def test_split_points_are_the_ranges(model, conditions_of, right_at):
    model.edges = (100, 600)
    op = new_op(split_points=[70, 512])
    code, decision = decide(op)
    assert rows(decision) == [
        (2, 70, "rows_first"),
        (71, 512, "columns_first"),
        (513, 8192, "stock"),
    ]
    assert conditions_of(code) == ["s0 <= 70", "s0 <= 512"]
    for size in (70, 71):
        args = torch.randn(size, 64), torch.randn(size, 64)
        right_at(code, gate(op), args, rounding=torch.float32)


def test_equal_winners_of_neighbouring_split_points_merge(model, conditions_of):
    model.edges = (70, 100000)
    code, decision = decide(new_op(split_points=[10, 70, 512]))
    assert rows(decision) == [(2, 70, "rows_first"), (71, 8192, "columns_first")]
    assert conditions_of(code) == ["s0 <= 70"]
    assert {s["x.0"] for s in model.asked} >= {10, 70, 512, 8192}
    assert len({s["x.0"] for s in model.asked}) == 12  # three sizes in each


def test_split_points_outside_the_bounds_are_not_measured(model):
    bounds = {0: {0: (80, 400)}, 1: {0: (80, 400)}}
    args = torch.randn(100, 64), torch.randn(100, 64)
    _, decision = decide(new_op(split_points=[70, 512]), *args, dynamic=bounds)
    assert rows(decision) == [(80, 400, "columns_first")] and decision.source == "measured"
    assert all(80 <= s["x.0"] <= 400 for s in model.asked)


def test_split_points_are_in_the_size_of_the_tensor(model):
    op = new_op(split_points=[101])

    def fn(x, y):
        return torch.relu(op(torch.cat([x, x]), torch.cat([y, y])))

    (decision,) = compile_for("h200", fn, X, Y, dynamic=BOTH).decisions
    assert [r.hi for r in decision.ranges] == [50, 8192]


# --- plans, force, no card ------------------------------------------------------------------------


def load(op, *found):
    name = op._opoverload._name
    key = Key.of(
        f"{name}_autotuned", f"{op._opoverload}()", "float32,float32", "row,row",
        {"x.1": 64, "y.1": 64},
    )  # fmt: skip
    versions = [".".join(m.__version__.split(".")[:2]) for m in (torch, triton)]
    entry = Entry(key, found, "2026-01-31T12:00:00Z", 1 << 30)
    inductor_ext.load_plan(Plan(CARDS["h200"].name, *versions, (entry,)))


def box(choice, bounds, times=None):
    return Box((("x.0", bounds), ("y.0", bounds)), choice, times or {})


def test_without_a_card_one_choice_for_all(conditions_of):
    code, decision = decide(new_op())
    assert (decision.chosen, decision.source) == ("stock", "heuristic")
    assert conditions_of(code) == [] and rows(decision) == [(2, 8192, "stock")]


def test_a_plan_decides_per_range_and_nothing_is_measured(model, conditions_of):
    op = new_op()
    load(
        op,
        box("columns_first", (1, 33), {"16,16": {"columns_first": 3.0, "stock": 4.0}}),
        box("rows_first", (34, 100)),
        box("gone", (101, 200)),
    )
    code, decision = decide(op)
    assert rows(decision) == [
        (2, 33, "columns_first"),
        (34, 100, "rows_first"),
        (101, 8192, "stock"),
    ]
    assert conditions_of(code) == ["s0 <= 33", "s0 <= 100"] and model.asked == []
    assert decision.source == "plan" and "names gone, which is no candidate" in decision.reason
    assert [c.us for c in decision.candidates[:2]] == [3.0, 4.0]
    assert "at 16,16" in decision.candidates[0].note


def test_a_plan_of_something_else_still_forbids_measuring(model):
    load(new_op(), box("rows_first", (1, 33)))
    _, decision = decide(new_op())
    assert (decision.chosen, decision.source) == ("stock", "heuristic") and model.asked == []
    assert decision.reason.startswith("not in the plan: ")


def test_a_forced_choice_is_not_measured(model, conditions_of):
    op = new_op()
    force = {f"{op._opoverload._name}_autotuned": "columns_first"}
    code, decision = decide(op, force=force)
    assert (decision.chosen, decision.source) == ("columns_first", "forced")
    assert model.asked == [] and conditions_of(code) == []


@pytest.mark.codegen
def test_a_size_that_depends_on_data_is_left_alone(model):
    op = new_op()

    def fn(x, y, n):
        m = n.item()
        torch._check(m >= 2)
        torch._check(m <= 512)
        return torch.relu(op(x[:m], y[:m]))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        code = compile_for("h200", fn, torch.randn(512, 64), torch.randn(512, 64), torch.tensor(20))
    (decision,) = code.decisions
    assert not decision.fired and "depends on data" in decision.reason and model.asked == []


# --- errors ---------------------------------------------------------------------------------------

ON = {"tensor_name": "x", "dim": 0}


@pytest.mark.parametrize(
    ("on", "points", "error", "said"),
    [
        (None, [64], ValueError, "expected dispatch_on with split_points, got split_points alone"),
        ("x", None, TypeError, "expected dispatch_on like .* got str"),
        ({"dim": 0}, None, ValueError, "got none of tensor_name"),
        ({"tensor_name": "x"}, None, ValueError, "got none of dim"),
        ({}, None, ValueError, "got none of tensor_name, dim"),
        ({**ON, "upper": 3}, None, ValueError, "got 'upper'"),
        ({**ON, "tensor_name": "z"}, None, ValueError, r"tensor_name among \['x', 'y'\], got 'z'"),
        ({**ON, "dim": "0"}, None, TypeError, "dim as a whole number, got '0'"),
        ({**ON, "dim": True}, None, TypeError, "dim as a whole number, got True"),
        ({**ON, "range_upper_bound": 0}, None, ValueError, "a whole number >= 1, got 0"),
        (ON, [], ValueError, "at least one split point, got an empty list"),
        (ON, 64, TypeError, "split_points as a list, got int"),
        (ON, [64, 32], ValueError, r"as increasing sizes >= 1, got \[64, 32\]"),
        (ON, [64, 64], ValueError, r"as increasing sizes >= 1, got \[64, 64\]"),
        (ON, [0, 64], ValueError, r"as increasing sizes >= 1, got \[0, 64\]"),
        (ON, [64.0], ValueError, r"as increasing sizes >= 1, got \[64.0\]"),
        (ON, [65536], ValueError, "below range_upper_bound=65536, got 65536"),
        (ON, list(range(1, 9)), ValueError, "expected at most 7 split_points, got 8"),
    ],
)
def test_bad_arguments(on, points, error, said):
    with pytest.raises(error, match=said) as caught:
        new_op(dispatch_on=on, split_points=points)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dynamic", [None, BOTH])
def test_a_dimension_that_the_tensor_has_not(dynamic):
    op = new_op(dim=2)
    with config.patch(strict=True), pytest.raises(Exception, match="dim below 2 for 'x', got 2"):
        decide(op, dynamic=dynamic)
    with config.patch(strict=False), pytest.warns(UserWarning, match="dim below 2 for 'x', got 2"):
        code = compile_for("h200", gate(op), X, Y, dynamic=dynamic)
    assert not any(d.fired for d in code.decisions)


def test_a_negative_dimension_counts_from_the_end(model):
    _, decision = decide(new_op(dim=-2))
    assert [r[2] for r in rows(decision)] == ["rows_first", "columns_first", "stock"]
