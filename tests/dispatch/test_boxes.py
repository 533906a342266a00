"""Where a choice changes, as boxes of sizes: arithmetic only."""

import itertools

import pytest
import sympy

from inductor_ext import dispatch
from inductor_ext.dispatch import Axis, Sensitivity, boxes_of

S, B = (sympy.Symbol(n, integer=True, positive=True) for n in ("s0", "s1"))


def inside(box, values):
    return all(
        lo <= v and (hi is None or v <= hi) for v, (lo, hi) in zip(values, box.ends, strict=True)
    )


def test_one_axis_is_cut_where_the_choice_changes():
    def pick(values):
        return "a" if values[0] <= 16 else "b" if values[0] < 100 else "stock"

    boxes = boxes_of([Axis(S, 2, None, 20)], pick)
    assert [(*box.ends, box.choice) for box in boxes] == [
        ((2, 16), "a"),
        ((17, 99), "b"),
        ((100, None), "stock"),
    ]
    assert [box.typical for box in boxes][1] == (20,)  # the size that was traced
    for box in boxes:
        assert inside(box, box.typical) and pick(box.typical) == box.choice


def test_bounds_leave_one_box():
    boxes = boxes_of([Axis(S, 4, 12, 8)], lambda values: "a" if values[0] <= 16 else "b")
    assert [(box.ends, box.choice) for box in boxes] == [(((4, 12),), "a")]


def test_as_many_ranges_as_are_allowed():
    boxes = boxes_of([Axis(S, 1, 4096, 8)], lambda values: f"c{values[0].bit_length()}")
    assert len(boxes) == dispatch.MAX_RANGES
    for left, right in itertools.pairwise(boxes):
        assert left.ends[0][1] + 1 == right.ends[0][0] and left.choice != right.choice


def grid_choice(values):
    rows, batch = values
    return "stock" if rows * batch > 1000 else "small" if rows <= 16 else "large"


@pytest.mark.parametrize("top", [None, 512])
def test_boxes_of_two_axes_cover_every_size_once(top):
    axes = [Axis(S, 2, top, 16), Axis(B, 2, top, 4)]
    boxes = boxes_of(axes, grid_choice)
    assert 3 <= len(boxes) <= dispatch.MAX_RANGES
    assert {box.choice for box in boxes} == {"small", "large", "stock"}
    ends = [2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 500, 512]
    ends += [] if top else [513, 5000, 1 << 22]
    for values in itertools.product(ends, ends):
        (box,) = (b for b in boxes if inside(b, values))
        if box.choice != "stock":  # nothing but stock is right where stock is best
            assert grid_choice(values) != "stock", (values, box)
    assert next(b for b in boxes if inside(b, (16, 4))).choice == "small"
    assert next(b for b in boxes if inside(b, (17, 4))).choice == "large"


def test_neighbours_of_one_choice_are_one_box():
    axes = [Axis(S, 2, 64, 16), Axis(B, 2, 64, 4)]
    boxes = boxes_of(axes, lambda values: "a" if values[0] <= 16 else "b")
    assert [(box.ends, box.choice) for box in boxes] == [
        (((2, 16), (2, 64)), "a"),
        (((17, 64), (2, 64)), "b"),
    ]


@pytest.mark.parametrize(
    ("size", "values", "expected"), [(2 * S, (8,), 16), (S * B, (24,), 24), (S + 1, (3,), 4)]
)
def test_choice_along_the_axis_of_a_derived_size(size, values, expected):
    expr = S if size.free_symbols == {S} else size
    sensitivity = Sensitivity("site", (size,), lambda sizes: str(sizes))
    pick = dispatch.along([Axis(expr, 2, None, 8)], sensitivity)
    assert pick(values) == f"({expected},)"
