"""tune: which dimension is meant, what is measured at which sizes, and the plan that comes of it.

On a virtual card times come from a model; on the CPU candidates are built, run and checked, and
only their times are made up.
"""

import itertools
import logging
import warnings

import pytest
import torch

import inductor_ext
from inductor_ext import (
    CustomOpConfig,
    choosing,
    compat,
    compat_dynamo,
    compat_ir,
    measure,
    plan_file,
    tuning,
)
from inductor_ext.plan import Plan
from inductor_ext.testing import compile_for

K, N = 7168, 256


def half(*size):
    return torch.empty(*size, dtype=torch.bfloat16, device="meta")


def product(x, w):
    return torch.relu(x @ w)


class Model:
    """Split K wins up to ``edge`` rows, stock beyond; remembers what it was asked."""

    def __init__(self, edge=100):
        self.edge, self.asked = edge, []

    def __call__(self, key, sizes, names):
        self.asked.append((key, dict(sizes), tuple(names)))
        rows = sizes["m"] * sizes.get("batch", 1)
        return {
            name: 10.0 if name == "stock" else (5.0 if rows <= self.edge else 15.0) + 0.001 * i
            for i, name in enumerate(sorted(names))
        }


def tune(fn, *args, dims, model=None, **kwargs):
    return inductor_ext.tune(
        fn, *args, dims=dims, progress=False, _measure=model or Model(), _card="h200", **kwargs
    )


def summary(plan):
    (entry,) = plan.entries
    return [(str(box), box.choice == "stock") for box in entry.boxes]


@pytest.mark.codegen
def test_a_plan_with_ranges_times_and_the_edge_where_it_is(tmp_path):
    model = Model()
    plan = tune(product, half(16, K), half(K, N), dims={"x.0": (1, 8192)}, model=model)
    (entry,) = plan.entries
    assert plan.card == "NVIDIA H200"
    assert str(entry.key) == f"decompose_k mm bfloat16 row,row k={K} n={N}"
    low, stock, beyond = entry.boxes
    assert low.choice != "stock" and stock.choice == beyond.choice == "stock"
    edge = low.bounds[0][1][1]
    assert 88 <= edge <= 112
    assert [str(b) for b in entry.boxes] == [f"m=1..{edge}", f"m={edge + 1}..1024", "m=1025..8192"]
    # Each decision has its times; beyond what the lowering's rule believes in there are none.
    assert {"1", "16", "64"} <= set(low.times) and not beyond.times
    assert all(set(us) == {low.choice, "stock"} for us in low.times.values())
    assert max(sizes["m"] for _, sizes, _ in model.asked) == 1024
    assert entry.max_memory_bytes > 512 << 20
    plan.save(tmp_path / "plan.json")
    assert list(plan_file.check(tmp_path / "plan.json")) == []
    assert Plan.load(tmp_path / "plan.json").lookup(entry.key, {"m": 4}) == low.choice


@pytest.mark.codegen
def test_what_is_tuned_is_chosen(make_plan):
    args = half(16, K), half(K, N)
    plan = tune(product, *args, dims={"x.0": (1, 512)})
    low = plan.entries[0].boxes[0]
    inductor_ext.load_plan(plan)
    for rows, chosen in ((1, low.choice), (16, low.choice), (400, "stock")):
        (decision,) = compile_for("h200", product, half(rows, K), args[1]).decisions
        assert (decision.source, decision.chosen) == ("plan", chosen)
    (decision,) = compile_for("h200", product, *args, dynamic={0: {0: (1, 512)}}).decisions
    assert {r.chosen for r in decision.ranges} == {low.choice, "stock"}


def test_a_candidate_that_other_sizes_offer_is_compared_too():
    """A tiling that only large M offers is measured, and chosen, at small M, if fast there."""
    offered: dict[int, tuple] = {}
    best = "split7_64x128x128_w4_s4_pdl"

    def model(key, sizes, names):
        offered.setdefault(sizes["m"], names)  # the first time: what the size itself offers
        return {n: 3.0 if n == best else 10.0 if n == "stock" else 5.0 for n in names}

    plan = tune(product, half(16, K), half(K, N), dims={"x.0": (1, 512)}, model=model)
    assert best not in offered[1] and best in offered[256]
    assert [b.choice for b in plan.entries[0].boxes] == [best]


def test_what_the_rule_takes_between_two_coarse_sizes_is_measured_there():
    """The best at 300 to 900 rows, and only third at the coarse sizes around (256 and 1024)."""
    ruled = "split7_64x128x128_w4_s4_pdl"

    def model(key, sizes, names):
        inside = 300 <= sizes["m"] <= 900
        mine = 4.0 if inside else 12.0
        return {n: mine if n == ruled else 10.0 if n == "stock" else 11.0 for n in names}

    plan = tune(product, half(16, K), half(N, K).t(), dims={"x.0": (1, 8192)}, model=model)
    (entry,) = plan.entries
    found = [box for box in entry.boxes if box.choice == ruled]
    assert len(found) == 1 and found[0].covers({"m": 512}), summary(plan)


def test_what_is_far_behind_is_not_compiled_for_every_size():
    model = Model(edge=8)
    tune(product, half(16, K), half(K, N), dims={"x.0": (1, 512)}, model=model)
    names = {sizes["m"]: names for _, sizes, names in model.asked}
    assert len(names[2]) > 1 and names[96] == ("stock",)


def test_derived_sizes_leave_no_gap():
    def fn(x, w):
        return torch.relu(torch.cat([x, x]) @ w)

    boxes = tune(fn, half(16, K), half(K, N), dims={"x.0": (1, 128)}).entries[0].boxes
    bounds = [b.bounds[0][1] for b in boxes]
    assert bounds[0][0] == 2 and bounds[-1][1] == 257
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(bounds))


def test_two_dimensions_make_boxes():
    def fn(x, w):
        return torch.bmm(x, w)

    args = half(4, 8, K), half(4, K, 64)
    dims = {"x.1": (1, 64), "x.0": (1, 48)}
    (entry,) = tune(fn, *args, dims={"x.1": (1, 64)}).entries
    assert entry.dims == ("batch", "m") and entry.boxes[0].bounds[0] == ("batch", (4, 4))

    (entry,) = tune(fn, *args, dims=dims, model=Model(256)).entries
    batches = sorted({dict(box.bounds)["batch"] for box in entry.boxes})
    assert batches == [(1, 2), (3, 6), (7, 17), (18, 48)]
    for batch, m in itertools.product((1, 4, 17, 48), (1, 7, 64)):
        assert entry.box_at({"batch": batch, "m": m}) is not None
    assert entry.box_at({"batch": 1, "m": 8}).choice != "stock"
    assert entry.box_at({"batch": 40, "m": 60}).choice == "stock"


def test_sites_without_the_dimension_and_sites_twice():
    def fn(x, w, a):
        return product(x, w).sum() + product(x * 2, w).sum() + product(a, w).sum()

    args = half(16, K), half(K, N), half(8, K)
    plan = tune(fn, *args, dims={"x.0": (1, 64)})
    entry = plan.entries[0]
    assert len(plan.entries) == 1  # one problem: also at 8 rows, which its ranges cover
    assert entry.dims == ("m",)


# --- which dimension is meant ---------------------------------------------------------------------


def test_a_free_name_is_the_marked_dimension():
    def fn(w, x):
        return x @ w

    x = half(16, K)
    torch._dynamo.mark_dynamic(x, 0)
    plan = tune(fn, half(K, N), x, dims={"tokens": (1, 64)})
    assert "x.0=1..64" in plan.command


def test_a_free_name_is_else_dimension_0_of_the_first_tensor_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="inductor_ext"):
        tune(product, half(16, K), half(K, N), dims={"tokens": (1, 64)})
    assert "'tokens' is taken as dimension 0 of 'x', the first tensor" in caplog.text


@pytest.mark.codegen
def test_arguments_keep_their_marks_and_modules_their_names():
    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(half(N, K))

        def forward(self, tokens):
            return torch.nn.functional.linear(tokens, self.weight)

    x = half(16, K)
    plan = tune(Gate(), x, dims={"tokens.0": (1, 64)})
    assert summary(plan)[0][0].startswith("m=1..") and "column" in plan.entries[0].key.layout
    assert compat_dynamo.marked_dynamic(x) == []


X, W = half(16, K), half(K, N)


@pytest.mark.parametrize(
    ("args", "dims", "said"),
    [
        ((X, W), {}, "expected dims like"),
        ((X, W), {"x.0": (8, 4)}, "expected 1 <= lo <= hi for 'x.0', got lo=8 and hi=4"),
        ((X, W), {"x.0": (0, 4)}, "got lo=0 and hi=4"),
        ((X, W), {"x.0": 8}, "as a pair of whole numbers, got 8"),
        ((X, W), {"x.0": (1.0, 8)}, "as a pair of whole numbers"),
        ((X, W), {"y.0": (1, 64)}, "'y.0' to name a tensor argument out of x, w"),
        ((X, W), {"x.2": (1, 64)}, "expected a dimension below 2 in 'x.2', got '2'"),
        ((X, W), {"x.m": (1, 64)}, "got 'm'"),
        ((X, W), {"a": (1, 64), "b": (1, 64)}, 'at most one dimension .* got a, b; write "x.0"'),
        ((X, W), {"x.0": (1, 64), "t": (1, 64)}, "expected each dimension once"),
        ((X, W), {"x.0": (1, 8)}, "'x.0' to be traced at a size within 2..8, got 16"),
        ((X, W), {"t": (20, 80)}, r"'t' \(dimension 0 of 'x'\) to be traced .* 20..80, got 16"),
        ((3, 4), {"t": (1, 64)}, "expected a tensor among the arguments, got none"),
    ],
)
def test_bad_dims(args, dims, said):
    with pytest.raises(ValueError, match=said) as caught:
        tune(product, *args, dims=dims)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 16])
def test_bounds_may_be_one_size(size):
    (entry,) = tune(product, half(max(size, 2), K), half(K, N), dims={"x.0": (size, size)}).entries
    assert [str(box) for box in entry.boxes] == [f"m={size}"]


def test_two_marked_dimensions_are_one_too_many():
    x = half(16, K)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    with pytest.raises(ValueError, match=r'one marked dimension, got "x.0", "x.1": name one'):
        tune(product, x, half(K, N), dims={"tokens": (1, 64)})


def test_a_specialised_dimension():
    def fn(x, w):
        return product(x, w) if x.shape[0] == 16 else x

    with pytest.raises(
        ValueError, match=r"dynamic in the graph, and 'x.0' is specialised"
    ) as caught:
        tune(fn, X, W, dims={"x.0": (1, 64)})
    assert "\n" not in str(caught.value)


def test_a_dimension_that_no_site_depends_on():
    def fn(x, w, unused):
        return product(x, w)

    with pytest.raises(ValueError, match=r"no site depends on 'unused.0'"):
        tune(fn, X, W, half(16, 3), dims={"unused.0": (1, 64)})


def test_memory_is_bounded_and_stated():
    with pytest.raises(
        MemoryError, match=r"at 'x.0' = 512 needs \d+\.\d\d GiB, and max_memory is"
    ) as e:
        tune(product, X, W, dims={"x.0": (1, 512)}, max_memory=1 << 20)
    assert "lower the upper end" in str(e.value)
    entry = tune(product, X, W, dims={"x.0": (1, 512)}, max_memory=1 << 30).entries[0]
    inputs = 2 * (512 * K + K * N)
    assert 512 << 20 < entry.max_memory_bytes < (512 << 20) + 10 * inputs


def test_an_error_while_measuring_is_not_swallowed():
    def broken(key, sizes, names):
        raise RuntimeError("the card fell off")

    with pytest.raises(RuntimeError, match="the card fell off"):
        tune(product, X, W, dims={"x.0": (1, 64)}, model=broken)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card():
    with pytest.raises(RuntimeError, match=r"^Measuring needs a CUDA card") as caught:
        inductor_ext.tune(product, X, W, dims={"x.0": (1, 64)})
    assert "\n" not in str(caught.value)


def test_a_bar_counts_the_measurements(capsys):
    model = Model()
    inductor_ext.tune(product, X, W, dims={"x.0": (1, 64)}, _measure=model, _card="h200")
    shown = capsys.readouterr().err
    assert "tune" in shown and "mm [s" in shown
    tune(product, X, W, dims={"x.0": (1, 64)})
    assert capsys.readouterr().err == ""


def test_nothing_is_reported_or_left_behind():
    from inductor_ext import report

    with report.collect() as decisions:
        tune(product, X, W, dims={"x.0": (1, 64)})
    assert decisions == []
    assert choosing.forced_choice("decompose_k") is None
    (decision,) = compile_for("h200", product, X, W).decisions
    assert decision.source == "heuristic"


# --- measuring, on the CPU ------------------------------------------------------------------------

_numbers = itertools.count()


def right(x, w):
    return torch.mm(x, w)


def other(x, w):
    return torch.ops.aten.mm.default(x, w)


def wrong_beyond(x, w):
    return torch.mm(x, w) if x.shape[0] <= 20 else torch.mm(x, w) * 2


@pytest.fixture
def card(monkeypatch):
    """A card that takes times from ``times(name, rows)`` and notes the inputs it was given."""

    class Card:
        times = staticmethod(lambda name, rows: 1.0)
        inputs: list = []  # noqa: RUF012

        def compare(self, calls, inputs, **how):
            self.inputs.append([tuple(x.shape) for x in inputs])
            rows = inputs[0].shape[0]
            return {n: measure.Timing(self.times(n, rows), 0.0, 1) for n in calls}

    found = Card()
    found.inputs = []
    monkeypatch.setattr(measure, "require_cuda", lambda: None)
    monkeypatch.setattr(measure, "compare", found.compare)
    monkeypatch.setattr(compat, "on_real_card", lambda: True)
    return found


def new_op(*candidates, **how):
    @torch.library.custom_op(f"inductor_ext_test::tuned{next(_numbers)}", mutates_args=())
    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    op.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    inductor_ext.register_custom_op_autotuning(op, [CustomOpConfig(c) for c in candidates], **how)
    return op


def test_every_tensor_that_shares_the_size_is_resized(card):
    """The check ties both arguments: what is as large as x's dimension is dynamic with it."""
    op = new_op(right, other)

    def fn(x, w):
        torch._check(x.shape[0] == w.shape[1])
        return op(x, w)

    card.times = lambda name, rows: 1.0 if name == ("other" if rows <= 12 else "stock") else 2.0
    plan = inductor_ext.tune(
        fn,
        torch.randn(16, 8),
        torch.randn(8, 16),
        dims={"x.0": (1, 20)},
        progress=False,
        max_memory=1 << 40,
    )
    (entry,) = plan.entries
    assert [(str(b), b.choice) for b in entry.boxes] == [
        ("w.1=1..12 x.0=1..12", "other"),
        ("w.1=13..20 x.0=13..20", "stock"),
    ]
    assert entry.key.op.endswith(".default()") and entry.key.layout == "row,row"
    assert {rows for (rows, _), _ in card.inputs} >= {1, 2, 16, 20}
    assert all(shapes == [(shapes[0][0], 8), (8, shapes[0][0])] for shapes in card.inputs)


def test_a_candidate_is_compiled_once_for_many_sizes(card, monkeypatch):
    """With the size symbolic, as a branch emits it: by bands up to 4, 16, 32, 64, ..."""
    written = []
    generate = compat_ir.generate_region

    def counting(gm, fakes, assumed):
        written.append([(a.lo, a.hi) for a in assumed.values()])
        return generate(gm, fakes, assumed)

    monkeypatch.setattr(compat_ir, "generate_region", counting)
    op = new_op(right, other)
    card.times = lambda name, rows: 1.0 if name == ("other" if rows <= 14 else "stock") else 2.0
    tally = tuning.Tally()
    plan = inductor_ext.tune(
        lambda x, w: torch.relu(op(x, w)),
        torch.randn(16, 8),
        torch.randn(8, 4),
        dims={"x.0": (1, 40)},
        progress=False,
        max_memory=1 << 40,
        _tally=tally,
    )
    assert [b.choice for b in plan.entries[0].boxes] == ["other", "stock"]
    sizes = {shapes[0][0] for shapes in card.inputs}
    assert len(sizes) > 12 and sizes >= {1, 2, 4, 16, 40}
    bands = [(1, 4), (5, 16), (17, 32), (33, 64)]
    assert {band for (band,) in written} == set(bands)
    # Stock, right and other; from 17 to 32 no size is swept, and two are far behind on both sides.
    assert len(written) == 3 * len(bands) - 2
    assert f"{len(sizes)} sizes, 3 candidates, 10 programs compiled" in str(tally)


def test_a_program_that_would_hold_for_some_sizes_only_is_compiled_for_each(card, caplog):
    """No guard is taken on the user's graph for the sake of measuring."""

    def few_rows(x, w):
        return torch.mm(x, w) if x.shape[0] > 3 else (x.unsqueeze(-1) * w).sum(1)

    op = new_op(few_rows)
    card.times = lambda name, rows: 1.0 if name == "few_rows" else 2.0
    with caplog.at_level(logging.INFO, logger="inductor_ext"):
        plan = inductor_ext.tune(
            lambda x, w: op(x, w),
            torch.randn(16, 8),
            torch.randn(8, 4),
            dims={"x.0": (1, 20)},
            progress=False,
            max_memory=1 << 40,
        )
    assert "few_rows of" in caplog.text and "is compiled for each size" in caplog.text
    assert [b.choice for b in plan.entries[0].boxes] == ["few_rows"]


def test_the_warnings_that_tuning_causes_are_not_shown():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with compat.without_caches():
            warnings.warn("dynamo_pgo force disabled by torch.compiler.config", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert [str(w.message) for w in caught] == ["another"]


def test_a_candidate_that_is_wrong_somewhere_is_not_chosen_there(card):
    op = new_op(wrong_beyond, right)
    card.times = lambda name, rows: {"wrong_beyond": 1.0, "right": 2.0, "stock": 3.0}[name]
    args = torch.randn(16, 8), torch.randn(8, 4)
    plan = inductor_ext.tune(
        lambda x, w: op(x, w), *args, dims={"x.0": (1, 24)}, progress=False, max_memory=1 << 40
    )
    assert [(str(b), b.choice) for b in plan.entries[0].boxes] == [
        ("x.0=1..20", "wrong_beyond"),
        ("x.0=21..24", "right"),
    ]


@pytest.mark.codegen
def test_a_plan_for_a_users_operation_is_used(card, monkeypatch):
    op = new_op(right, other)
    card.times = lambda name, rows: 1.0 if name == "other" else 2.0
    args = torch.randn(16, 8), torch.randn(8, 4)
    plan = inductor_ext.tune(
        lambda x, w: op(x, w), *args, dims={"x.0": (1, 24)}, progress=False, max_memory=1 << 40
    )
    inductor_ext.load_plan(plan, force=True)
    card.inputs.clear()
    found = inductor_ext.explain(lambda x, w: op(x, w), *args)
    (decision,) = (d for d in found.decisions if d.lowering != "decompose_k")
    assert (decision.chosen, decision.source) == ("other", "plan") and card.inputs == []
