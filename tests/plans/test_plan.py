"""A plan as a value: looking up, merging, comparing."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_ext.plan import Box, Entry, Key, Plan, PlanError, within

REPRODUCIBLE = settings(derandomize=True, deadline=None, max_examples=80, database=None)
OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def box(choice, times=None, **bounds):
    return Box(tuple(bounds.items()), choice, times or {})


def key(op="mm", layout="row,row", dtype="bfloat16", **sizes):
    return Key.of("decompose_k", op, dtype, layout, sizes)


def test_lookup_by_problem_and_size(make_plan):
    plan = make_plan(box("a", m=(1, 8)), box("b", m=(9, 16)), box("c", m=(33, None)), n=256, k=512)
    at = key(n=256, k=512)
    sizes = [1, 8, 9, 16, 17, 32, 33, 10**9]
    found = [plan.lookup(at, {"m": m}) for m in sizes]
    assert found == ["a", "a", "b", "b", None, None, "c", "c"]
    for other in (
        key(n=257, k=512),
        key(k=512, n=256, op="addmm"),
        key(k=512, n=256, layout="row,column"),
        key(k=512, n=256, dtype="float16"),
        key(k=512),
    ):
        assert plan.lookup(other, {"m": 4}) is None
    assert plan.lookup(at, {"m": 4, "batch": 2}) is None


def test_why_a_problem_is_not_covered(make_plan):
    plan = make_plan(box("a", m=(1, 8)), n=256, k=512)
    assert plan.why_not(key(n=256, k=512), {"m": 9}) == "m=9 lies in none of its ranges"
    assert (
        plan.why_not(key(n=1, k=512), {"m": 9}) == "no entry for these sizes of mm bfloat16 row,row"
    )
    assert plan.why_not(key(op="bmm"), {"m": 9}) == "no entry for decompose_k bmm bfloat16 row,row"


def test_a_size_may_be_static_here_and_ranged_in_the_plan(make_plan):
    plan = make_plan(box("a", m=(1, 8), n=(1, 64)), k=512)
    assert plan.lookup(key(n=32, k=512), {"m": 4}) == "a"
    assert plan.lookup(key(n=65, k=512), {"m": 4}) is None
    fixed = make_plan(box("b", m=(1, 8)), n=32, k=512)
    both = plan.merge(fixed)
    # The entry with fewer ranges was measured for just this.
    assert both.lookup(key(n=32, k=512), {"m": 4}) == "b"
    assert both.lookup(key(n=33, k=512), {"m": 4}) == "a"


@REPRODUCIBLE
@given(st.lists(st.tuples(st.sets(st.sampled_from("mnk")), *[st.integers(1, 3)] * 6), max_size=8))
def test_the_entry_with_the_fewest_ranges_around_a_point_decides(drawn):
    """As if every entry were looked at, in their order."""
    entries = []
    for i, (ranged, *ends) in enumerate(drawn):
        lows = dict(zip("mnk", ends, strict=False))
        bounds = {n: (lows[n], lows[n] + ends[3 + j]) for j, n in enumerate("mnk") if n in ranged}
        static = {n: size for n, size in lows.items() if n not in ranged}
        if bounds:
            entries.append(Entry(key(**static), (box(str(i), **bounds),), OLD, 0))
    plan = Plan("card", "2.11", "3.6", tuple(entries))
    for point in itertools.product(range(1, 5), repeat=3):
        sizes = dict(zip("mnk", point, strict=True))

        def holds(entry, sizes=sizes):
            fits = all(sizes[n] == size for n, size in entry.key.sizes)
            return fits and entry.box_at(sizes) is not None

        around = sorted(filter(holds, entries), key=lambda e: len(e.dims))
        expected = [e.boxes[0].choice for e in around]
        m, n, k = point
        assert plan.lookup(key(m=m), {"n": n, "k": k}) == (expected[0] if expected else None)
        along = plan.boxes_of(key(n=n), {"k": k}, ["m"])
        assert [b.choice for b, (bounds,) in along if within(m, bounds)] == expected


def test_a_plan_of_many_problems_looks_at_those_alike_only(make_plan, monkeypatch):
    """A launch looks up every new problem, also one that the plan does not cover."""
    entries = [Entry(key(n=n, k=64), (box("a", m=(1, 8)),), OLD, 0) for n in range(1000)]
    plan, seen, box_at = dataclasses.replace(make_plan(), entries=tuple(entries)), [], Entry.box_at
    monkeypatch.setattr(Entry, "box_at", lambda *given: seen.append(1) or box_at(*given))
    for n, m, chosen in ((999, 8, "a"), (999, 9, None), (1000, 8, None)):
        assert plan.lookup(key(n=n, k=64), {"m": m}) == chosen
    assert len(seen) == 2
    assert plan.why_not(key(n=1000, k=64), {"m": 8}).startswith("no entry for these sizes")


def test_the_nearest_measured_point(make_plan):
    times = {"4": {"a": 1.0}, "64": {"a": 2.0}}
    assert box("a", times, m=(1, 128)).nearest_times({"m": 13}) == ("4", {"a": 1.0})
    assert box("a", times, m=(1, 128)).nearest_times({"m": 32}) == ("64", {"a": 2.0})
    assert box("a", m=(1, 128)).nearest_times({"m": 32}) == ("", {})
    two = box("a", {"4,1": {"a": 1.0}, "4,64": {"a": 2.0}}, m=(1, 8), batch=(1, 64))
    assert two.nearest_times({"m": 4, "batch": 30})[0] == "4,64"


def test_where_plans_overlap_the_newer_measurement_wins(make_plan):
    old = make_plan(box("a", {"4": {"a": 1.0}, "100": {"a": 9.0}}, m=(1, None)), n=8, measured=OLD)
    new = make_plan(box("b", m=(3, 8)), n=8, measured=NEW)
    for merged in (old.merge(new), new.merge(old)):
        (entry,) = merged.entries
        assert entry.boxes == (
            box("a", m=(1, 2)),
            box("b", m=(3, 8)),
            box("a", {"100": {"a": 9.0}}, m=(9, None)),  # the time at 4 is no longer its own
        )
        assert entry.measured == NEW
    # Equally old: the argument wins.
    twin = make_plan(box("c", m=(1, None)), n=8, measured=OLD)
    assert old.merge(twin).lookup(key(n=8), {"m": 4}) == "c"
    assert twin.merge(old).lookup(key(n=8), {"m": 4}) == "a"


def test_merging_keeps_other_problems_and_refuses_other_machines(make_plan):
    one, two = make_plan(box("a", m=(1, 8)), n=8), make_plan(box("a", m=(1, 8)), n=9)
    assert [e.key for e in one.merge(two).entries] == [key(n=8), key(n=9)]
    assert one.merge(make_plan()) == one
    for other in ({"card": "NVIDIA H100"}, {"torch_version": "2.0"}, {"triton_version": "2.0"}):
        with pytest.raises(PlanError, match=r"expected plans of one card and version, got .* and "):
            one.merge(make_plan(box("a", m=(1, 8)), n=8, **other))


def test_the_commands_of_both_are_kept(make_plan):
    one, two = (dataclasses.replace(make_plan(), command=c) for c in ("tune x", "tune y"))
    assert one.merge(two).command == "tune x ; tune y"
    assert one.merge(one).command == "tune x"


@st.composite
def grids(draw):
    """Boxes over m and batch that do not overlap."""
    names, boxes = itertools.count(), []
    for _ in range(draw(st.integers(1, 5))):
        m, b = draw(st.integers(0, 12)), draw(st.integers(0, 12))
        ends = [draw(st.one_of(st.none(), st.integers(lo, 14))) for lo in (m, b)]
        new = box(f"c{next(names)}", m=(m, ends[0]), batch=(b, ends[1]))
        if not any(new.overlaps(other) for other in boxes):
            boxes.append(new)
    return tuple(boxes)


POINTS = [{"m": m, "batch": b} for m in range(17) for b in range(17)]


@REPRODUCIBLE
@given(grids(), grids())
def test_merging_boxes_point_by_point(older, newer):
    at = key("bmm", n=8)
    newer = tuple(Box(b.bounds, f"new {b.choice}") for b in newer)
    old = Plan("x", "2.13", "3.6", (Entry(at, older, OLD, 1),))
    new = Plan("x", "2.13", "3.6", (Entry(at, newer, NEW, 2),))
    merged = old.merge(new)
    assert merged.entries == new.merge(old).entries
    boxes = merged.entries[0].boxes
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    for point in POINTS:
        wanted = new.lookup(at, point) or old.lookup(at, point)
        assert merged.lookup(at, point) == wanted
    # diff says the same: applied to the old plan it gives the new one's choices.
    differing = sum(old.lookup(at, p) != merged.lookup(at, p) for p in POINTS)
    assert bool(old.diff(merged)) == bool(differing)
    assert merged.diff(merged) == []


def test_diff_lists_what_changed_came_and_went(make_plan):
    before = make_plan(box("a", m=(1, 8)), box("b", m=(9, 16)), n=8)
    after = make_plan(box("a", m=(1, 4)), box("c", m=(5, 12)), box("d", m=(17, None)), n=8)
    found = [(c.where, c.before, c.after) for c in before.diff(after)]
    assert found == [
        ("m=5..8", "a", "c"),
        ("m=9..12", "b", "c"),
        ("m=13..16", "b", None),
        ("m=17..", None, "d"),
    ]
    assert [(c.where, c.before, c.after) for c in before.diff(make_plan())] == [
        ("m=1..8", "a", None),
        ("m=9..16", "b", None),
    ]
