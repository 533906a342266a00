"""Finding the edges: a rule is bisected exactly, noisy times make no slivers."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_ext.ranges import OPEN_END, Range, find_measured_ranges, find_ranges

REPRODUCIBLE = settings(derandomize=True, deadline=None, max_examples=60, database=None)


def covers(ranges, lo, hi):
    """Without gaps or overlaps, from lo to hi."""
    assert ranges[0].lo == lo and ranges[-1].hi == hi
    assert all(b.lo == a.hi + 1 for a, b in itertools.pairwise(ranges))
    assert all(r.lo <= (r.hi if r.hi is not None else r.lo) for r in ranges)


# --- a rule ---------------------------------------------------------------------------------------


@st.composite
def steps(draw):
    """Distinct starts at least an eighth apart, as the sweep promises to see, and their answers."""
    lo = draw(st.integers(0, 40))
    starts, at = [lo], lo
    for _ in range(draw(st.integers(0, 6))):
        at = at + 1 + draw(st.integers(max(at, 16) // 7, 4 * max(at, 16)))
        starts.append(at)
    hi = at + 1 + draw(st.integers(max(at, 16) // 7, 3000))
    return lo, hi, starts


@REPRODUCIBLE
@given(steps())
def test_every_change_of_a_rule_is_found_exactly(case):
    lo, hi, starts = case

    def pick(size):
        return str(sum(size >= s for s in starts))

    found = find_ranges(pick, lo, hi)
    assert [r.lo for r in found] == starts
    assert all(r.choice == pick(r.lo) == pick(r.hi) for r in found)
    covers(found, lo, hi)


def test_several_changes_between_two_points_of_the_sweep_are_found():
    # 200 and 210 lie inside one step, and the answers at its ends differ.
    found = find_ranges(lambda n: "a" if n < 205 else "b" if n < 210 else "c", 1, 1000)
    assert [(r.lo, r.choice) for r in found] == [(1, "a"), (205, "b"), (210, "c")]


def test_equal_answers_are_one_range_and_the_last_is_open():
    assert find_ranges(lambda n: "a", 3, None) == [Range(3, None, "a")]
    found = find_ranges(lambda n: "a" if n <= 65 else "b", 1, None)
    assert found == [Range(1, 65, "a"), Range(66, None, "b")]
    assert 10**9 in found[1] and 66 not in found[0] and 65 in found[0]
    assert find_ranges(lambda n: str(n >= OPEN_END), 1, None)[-1].lo == OPEN_END


def test_the_narrowest_ranges_go_first_and_join_the_wider_neighbour():
    def pick(n):
        return "a" if n <= 8 else "b" if n <= 9 else "c" if n <= 1000 else "d"

    assert find_ranges(pick, 1, 4096, max_ranges=3) == [
        Range(1, 8, "a"),
        Range(9, 1000, "c"),
        Range(1001, 4096, "d"),
    ]
    assert [r.choice for r in find_ranges(pick, 1, 4096, max_ranges=1)] == ["c"]
    # What lay on both sides of an absorbed range is one range afterwards.
    same = find_ranges(lambda n: "x" if n == 100 else "a", 1, 4096, max_ranges=2)
    assert same == [Range(1, 4096, "a")]


@pytest.mark.parametrize(
    ("lo", "hi", "limit"), [(-1, 4, 8), (5, 4, 8), (1, 4, 0)], ids=["negative", "empty", "none"]
)
def test_bad_bounds(lo, hi, limit):
    with pytest.raises(ValueError, match=r"^expected "):
        find_ranges(str, lo, hi, max_ranges=limit)
    with pytest.raises(ValueError, match=r"^expected "):
        find_measured_ranges(lambda n: {"a": 1.0}, lo, hi, max_ranges=limit)


def test_one_size_is_one_range():
    assert find_ranges(str, 7, 7) == [Range(7, 7, "7")]
    (only,) = find_measured_ranges(lambda n: {"a": 2.0, "b": 1.0}, 7, 7)
    assert (only.lo, only.hi, only.choice, only.times) == (7, 7, "b", {7: {"a": 2.0, "b": 1.0}})


# --- times ----------------------------------------------------------------------------------------


class Card:
    """Candidates that cost ``start + slope * n`` us, read with uniform noise; counts its calls."""

    def __init__(self, models, noise=0.0, seed=0):
        self.models, self.noise, self.calls = models, noise, 0
        self.random = random.Random(seed)

    def true(self, size):
        return {name: start + slope * size for name, (start, slope) in self.models.items()}

    def __call__(self, size):
        self.calls += 1
        spread = self.noise
        return {
            n: t * (1 + self.random.uniform(-spread, spread)) for n, t in self.true(size).items()
        }


CROSSING = {"a": (2, 0.05), "b": (5, 0.01), "c": (9, 0.004)}  # at 75 and 667


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_true_crossovers_are_recovered(noise):
    tolerance = 1.15 if noise < 0.05 else 1.3
    for seed in range(10):
        found = find_measured_ranges(Card(CROSSING, noise, seed), 1, 8192)
        assert [r.choice for r in found] == ["a", "b", "c"]
        covers(found, 1, 8192)
        for r, edge in zip(found, (75, 667), strict=False):
            assert edge / tolerance <= r.hi <= edge * tolerance


def test_a_crossover_between_neighbours_is_exact_and_edges_are_round():
    found = find_measured_ranges(lambda n: {"a": 1.0 + (n > 6), "b": 1.5}, 1, 4096)
    assert [r.hi for r in found] == [6, 4096]
    found = find_measured_ranges(lambda n: {"a": 1.0 + (n > 64), "b": 1.5}, 1, 4096)
    assert [r.hi for r in found] == [64, 4096]


@REPRODUCIBLE
@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.floats(2, 20), st.floats(0.0005, 0.05)),
        min_size=2,
    ),
    st.integers(0, 10**6),
)
def test_noise_makes_no_slivers(models, seed):
    """Straight lines: a candidate's time is the least on one interval, so it is chosen once."""
    card = Card(models, 0.05, seed)
    found = find_measured_ranges(card, 1, 8192)
    chosen = [r.choice for r in found]
    assert len(chosen) == len(set(chosen))
    covers(found, 1, 8192)
    # What is chosen loses by no more than the margin and what 8 readings of such noise leave open.
    for r in found:
        for size in r.times:
            true = card.true(size)
            assert true[r.choice] <= 1.15 * min(true.values())
    assert card.calls <= 8 * (26 + 8 * 8)


@REPRODUCIBLE
@given(st.integers(0, 10**6))
def test_equal_candidates_never_change_places(seed):
    card = Card({"a": (5, 0.01), "b": (5, 0.01), "c": (5.02, 0.01), "d": (4.99, 0.01)}, 0.05, seed)
    assert len(find_measured_ranges(card, 1, 8192)) == 1


@REPRODUCIBLE
@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.floats(2, 20), st.floats(0.0005, 0.05)),
        min_size=2,
    )
)
def test_without_noise_no_choice_loses_by_the_margin_where_it_was_measured(models):
    card = Card(models)
    found = find_measured_ranges(card, 1, 8192)
    for r in found:
        for times in r.times.values():
            assert times[r.choice] <= 1.03 * min(times.values()) * (1 + 1e-6)
        assert sum(r.lo < size < r.hi for size in r.times) >= min(3, max(r.hi - r.lo - 1, 0))
    assert {a.choice != b.choice for a, b in itertools.pairwise(found)} <= {True}
    sizes = {size for r in found for size in r.times}
    assert card.calls <= len(sizes) + 2 * 3 + 2 * 3 * 3 * len(found)


def test_a_gain_below_the_margin_makes_no_range_and_the_best_mean_wins():
    def score(size):
        return {"a": 1.0, "b": 0.98 if size > 64 else 1.01}

    assert [r.choice for r in find_measured_ranges(score, 1, 8192)] == ["b"]
    assert len(find_measured_ranges(score, 1, 8192, margin=0.0)) == 2


def test_a_default_wins_ties():
    def score(size):
        return {"stock": 1.02, "b": 1.0}

    assert find_measured_ranges(score, 1, 64)[0].choice == "b"
    assert find_measured_ranges(score, 1, 64, default="stock")[0].choice == "stock"


def test_one_wild_reading_makes_no_range():
    for wild in (1, 24, 64, 96, 8192):
        seen = []

        def score(size, wild=wild, seen=seen):
            seen.append(size)
            hiccup = size == wild and seen.count(size) == 1
            return {"a": 3.0 if hiccup else 1.0, "b": 1.2}

        assert [r.choice for r in find_measured_ranges(score, 1, 8192)] == ["a"], wild


def test_a_narrow_range_that_is_real_survives():
    found = find_measured_ranges(lambda n: {"a": 1.0, "b": 0.5 if n == 1 else 2.0}, 1, 8192)
    assert [(r.lo, r.hi, r.choice) for r in found] == [(1, 1, "b"), (2, 8192, "a")]


def test_a_candidate_is_not_chosen_where_it_failed():
    def score(size):
        return {"slow": 5.0} | ({"fast": 1.0} if size <= 256 else {})

    found = find_measured_ranges(score, 1, 4096)
    assert [(r.hi, r.choice) for r in found] == [(256, "fast"), (4096, "slow")]
    with pytest.raises(ValueError, match="no candidate could be timed at size 4096"):
        find_measured_ranges(lambda n: {} if n > 4000 else {"a": 1.0}, 1, 4096)


def test_the_number_of_ranges_is_bounded_and_the_least_important_goes():
    # b's island is worth a factor of 3, c's of 1.2.
    def score(size):
        return {
            "a": 1.0,
            "b": 1 / 3 if 16 <= size <= 31 else 3.0,
            "c": 1 / 1.2 if 256 <= size <= 511 else 3.0,
        }

    assert len(find_measured_ranges(score, 1, 8192)) == 5
    found = find_measured_ranges(score, 1, 8192, max_ranges=3)
    assert [r.choice for r in found] == ["a", "b", "a"]
    assert [r.choice for r in find_measured_ranges(score, 1, 8192, max_ranges=1)] == ["a"]


def test_progress_hears_of_every_call():
    card, heard = Card(CROSSING, 0.02), []
    found = find_measured_ranges(card, 1, 1024, progress=heard.append)
    assert len(heard) == card.calls
    assert {size for r in found for size in r.times} == set(heard)


@pytest.mark.parametrize("most", [4, 10, 20, 40])
def test_no_more_sizes_are_measured_than_stated(most):
    asked = set()

    def score(size):  # changes at two of three octaves: it would like to bisect them all
        asked.add(size)
        return {"a": 1.0, "b": 2.0 if size.bit_length() % 3 else 0.5}

    found = find_measured_ranges(score, 1, 65536, max_ranges=8, max_sizes=most)
    assert most // 2 <= len(asked) <= most and {1, 65536} <= asked
    assert found[0].lo == 1 and found[-1].hi == 65536 and len(found) <= 8
    asked.clear()
    find_measured_ranges(score, 1, 65536, max_ranges=8)
    assert len(asked) > 40
    with pytest.raises(ValueError, match="expected max_sizes >= 4, got 3"):
        find_measured_ranges(score, 1, 8, max_sizes=3)
