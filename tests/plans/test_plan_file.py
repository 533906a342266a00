"""Reading, writing and checking plan files: every fault is one sentence with file and line."""

import json

import pytest

from inductor_ext import plan_file
from inductor_ext.plan import Box, Plan, PlanError


def box(choice, times=None, **bounds):
    return Box(tuple(bounds.items()), choice, times or {})


@pytest.fixture
def plan(make_plan):
    return make_plan(
        box("split14_16x32x128_w2_s4_pdl", {"4": {"stock": 5.6, "other": 2.125}}, m=(1, 8)),
        box("stock", m=(9, None)),
        n=256,
        k=7168,
    )


def test_a_plan_survives_the_file_and_has_one_range_per_line(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan and Plan.load(path).digest == plan.digest
    lines = path.read_text().splitlines()
    assert sum('"choice"' in line for line in lines) == 2
    assert json.loads(path.read_text())["entries"][0]["sizes"] == {"k": 7168, "n": 256}
    assert max(len(line) for line in lines) < 130


def test_the_digest_is_of_the_content(plan, make_plan):
    assert plan.digest != make_plan(box("stock", m=(1, 8)), n=256, k=7168).digest


def test_a_plan_without_entries(make_plan, tmp_path):
    make_plan().save(tmp_path / "empty.json")
    assert Plan.load(tmp_path / "empty.json") == make_plan()


# What is replaced in the file below, by what, the line that is named and what is said of it.
TEXT = """{
  "format": 1,
  "card": "NVIDIA H200",
  "torch": "2.13",
  "triton": "3.6",
  "entries": [
    {
      "lowering": "decompose_k", "op": "mm", "dtype": "bfloat16", "layout": "row,row",
      "sizes": {"k": 7168,
                "n": 256},
      "measured": "2026-01-31T12:00:00Z", "max_memory_bytes": 5,
      "ranges": [
        {"m": [1, 8], "choice": "stock", "times_us": {"4": {"stock": 5.6}}},
        {"m": [9, null],
         "choice": "bmm_split16"}
      ]
    }
  ]
}
"""
FAULTS = {
    "not json": ('"card": "NVIDIA H200",', '"card": "NVIDIA H200"', 4, "not JSON"),
    "format": ('"format": 1', '"format": 2', 2, "expected 1 .* as 'format', got 2"),
    "format true": ('"format": 1', '"format": true', 2, "got true"),
    "missing": ('  "card": "NVIDIA H200",\n', "", 1, "'card' is missing"),
    "unknown key": ('"card"', '"cart": "x", "card"', 3, "unknown key 'cart', expected format, "),
    "version": ('"2.13"', '"2.13.0"', 4, "minor version"),
    "card": ('"NVIDIA H200"', "7", 3, "expected a card's name as 'card', got 7"),
    "lowering": ('"decompose_k"', '"decompose_q"', 8, "unknown lowering 'decompose_q'"),
    "dtype": ('"bfloat16"', "16", 8, "expected one word as 'dtype', got 16"),
    "size": ('"n": 256', '"n": -256', 10, "whole number of at least 0 as 'n', got -256"),
    "size float": ('"n": 256', '"n": 256.5', 10, "as 'n', got 256.5"),
    "entry key": ('"op": "mm"', '"op": "mm", "ops": 1', 8, "unknown key 'ops'"),
    "time": ("2026-01-31T12:00:00Z", "yesterday", 11, "a time like"),
    "memory": ('_bytes": 5', '_bytes": -5', 11, "got -5"),
    "empty": ('"m": [1, 8]', '"m": [8, 1]', 13, "the range is empty, lo 8 is above hi 1"),
    "overlap": ('"m": [9, null]', '"m": [8, null]', 14, "8.. overlaps m=1..8 of line 13"),
    "bounds": ('"m": [1, 8]', '"m": [1]', 13, r"expected \[lo, hi\] as 'm', got \[1\]"),
    "negative": ('"m": [1, 8]', '"m": [-1, 8]', 13, "got -1"),
    "bool": ('"m": [1, 8]', '"m": [true, 8]', 13, "got true"),
    "twice": ('"m": [1, 8]', '"m": [1, 8], "m": [1, 8]', 13, "'m' stands twice"),
    "static": ('"m": [1, 8]', '"n": [1, 8]', 13, "'n' is a static size of this entry"),
    "other dims": ('"m": [9, null]', '"b": [9, null]', 14, "bounds b, the first other sizes"),
    "no bounds": ('"m": [1, 8], ', "", 13, "bounds no size"),
    "no choice": (',\n         "choice": "bmm_split16"', "", 14, "'choice' is missing"),
    "choice": ('"bmm_split16"', "null", 15, "a candidate's name as 'choice', got null"),
    "us": ("5.6", "-5.6", 13, "a positive number of us as 'stock', got -5.6"),
    "us huge": ("5.6", "1" + 400 * "0", 13, "a positive number of us"),
    "point": ('"4"', '"4,4"', 13, "a size for each bound"),
    "no ranges": (TEXT[TEXT.index("[\n        {") : TEXT.index("\n    }")], "[]", 12, "one range"),
    "entries": (TEXT[TEXT.index("[\n    {") : TEXT.index("\n}")], "{}", 6, "expected a list"),
    "no entry": ("    {\n      ", "    7, {\n      ", 7, "expected an object, got 7"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_with_file_and_line(fault, tmp_path):
    old, new, line, said = FAULTS[fault]
    assert TEXT.count(old) >= 1
    path = tmp_path / "plan.json"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(PlanError, match=said) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: ") and message.endswith(".")
    assert "\n" not in message and len(message) < 250
    assert list(plan_file.check(path)) == [message]


def test_a_second_entry_for_one_problem(tmp_path):
    start, end = TEXT.index("    {\n"), TEXT.index("\n  ]\n}")
    path = tmp_path / "plan.json"
    path.write_text(TEXT[:end] + ",\n" + TEXT[start:])
    with pytest.raises(PlanError, match="line 18: a second entry for decompose_k mm"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "can't be read"), (b"\xff\xfe", "not UTF-8"), (b"", "line 1: not JSON"),
     (b"[]", "line 1: expected an object"), (b'{"card": NaN}', "NaN is not JSON"),
     (b"[" * 100_000, "not a plan"), (b'{"card": "\\ud800"}', "not a plan")],
    ids=["absent", "binary", "empty", "list", "nan", "deep", "half a pair"],
)  # fmt: skip
def test_what_is_no_plan_at_all(content, said, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=said) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_users_operations_need_not_be_registered(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(TEXT.replace('"decompose_k"', '"mine::op_autotuned"'))
    assert Plan.load(path).entries[0].key.lowering == "mine::op_autotuned"
    assert list(plan_file.check(path)) == []


def test_check_flags_names_that_the_lowering_can_not_have(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(TEXT.replace("bmm_split16", "bmm_spilt16"))
    assert list(plan_file.check(path)) == [
        f"{path}, line 15: decompose_k has no candidate 'bmm_spilt16'."
    ]
    Plan.load(path)  # another version may know it; the site that would use it says so
    names = "split7_64x128x128_w4_s4", "split7_64x128x128_w4_s4_pdl_late", "stock"
    for name in [*names, "split14_16x32x128_w2_s4_rowwise", "split2_16x16x64_w2_s4_pdl"]:
        path.write_text(TEXT.replace("bmm_split16", name))
        assert list(plan_file.check(path)) == [], name
