"""Timing, the error rule and the benchmark's command line; what needs a card is marked gpu."""

import dataclasses
import functools
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from inductor_ext import measure

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks import common, decompose_k, decompose_k_floor  # noqa: E402

INF = math.inf


# --- the error rule -------------------------------------------------------------------------------


def _half(values):
    return torch.tensor(values, dtype=torch.bfloat16)


def test_half_precision_may_err_twice_as_much_as_eager_plus_half_an_ulp():
    truth = torch.tensor([1.0, 100.0], dtype=torch.float64)
    eager = _half([1.0, 101.0])
    allowed = 2 * 1.0 + 2**-8 * 100
    assert measure.check(_half([1.0, 102.0]), truth, eager).allowed == pytest.approx(allowed)
    assert measure.check(_half([1.0, 102.0]), truth, eager).ok
    verdict = measure.check(_half([1.0, 103.0]), truth, eager)
    assert not verdict.ok and verdict.error == 3.0 and verdict.baseline_error == 1.0
    assert "allowed" in verdict.reason


def test_single_precision_is_judged_by_the_relative_norm():
    truth = torch.ones(100, dtype=torch.float64)
    eager = truth.float()
    assert measure.check(eager + 5e-6, truth, eager).ok
    assert not measure.check(eager + 2e-5, truth, eager).ok
    # tf32 lifts the bound to twice eager's own error, and only where it is allowed.
    coarse = eager + 1e-3
    assert measure.check(eager + 1.9e-3, truth, coarse, tf32=True).ok
    assert not measure.check(eager + 2.1e-3, truth, coarse, tf32=True).ok
    assert not measure.check(eager + 1.9e-3, truth, coarse).ok


def test_a_wide_result_of_a_rounded_product_is_judged_by_the_rounding():
    truth = torch.tensor([1.001, 2.003], dtype=torch.float64)
    eager = truth.bfloat16().float()
    assert measure.check(truth.float(), truth, eager, rounding=torch.bfloat16).ok
    assert measure.check(eager, truth, eager, rounding=torch.bfloat16).ok
    assert not measure.check(eager, truth, eager).ok


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_non_finite_elements_must_match_exactly(bad, dtype):
    truth = torch.tensor([1.0, bad, 3.0], dtype=torch.float64)
    eager = truth.to(dtype)
    assert measure.check(eager.clone(), truth, eager).ok
    for wrong in ([1.0, 2.0, 3.0], [bad, bad, 3.0], [1.0, bad, -bad]):
        verdict = measure.check(torch.tensor(wrong, dtype=dtype), truth, eager)
        assert not verdict.ok and verdict.error == INF
    opposite = torch.tensor([1.0, -bad, 3.0], dtype=dtype)  # NaN has no sign that counts
    assert measure.check(opposite, truth, eager).ok == math.isnan(bad)


def test_overflow_may_be_as_in_eager_or_as_in_the_reference():
    truth = torch.tensor([1e5, 1.0], dtype=torch.float64)  # fp16 ends at 65504
    eager = truth.half()
    assert measure.check(eager.clone(), truth, eager).ok
    assert not measure.check(torch.tensor([65504.0, 1.0]).half(), truth, eager).ok
    # Eager overflowed on the way, the reference did not: the better answer is right, and judged.
    truth, eager = torch.tensor([0.5, 1.0]).double(), torch.tensor([INF, 1.0]).half()
    assert measure.check(torch.tensor([0.5, 1.0]).half(), truth, eager).ok
    assert measure.check(eager.clone(), truth, eager).ok
    assert not measure.check(torch.tensor([0.9, 1.0]).half(), truth, eager).ok


def test_integers_may_be_no_further_off_than_eager():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = torch.tensor([1, 2], dtype=torch.int8)
    assert measure.check(eager.clone(), truth, eager).ok
    assert not measure.check(torch.tensor([1, 3], dtype=torch.int8), truth, eager).ok


def test_shape_dtype_and_reference_are_checked():
    truth = torch.ones(3, dtype=torch.float64)
    assert "shape (2,)" in measure.check(torch.ones(2), truth, truth.float()).reason
    assert not measure.check(torch.ones(3).half(), truth, truth.float()).ok
    assert measure.check(torch.ones(0), torch.ones(0).double(), torch.ones(0)).ok
    with pytest.raises(ValueError, match="float64 or float32"):
        measure.check(torch.ones(3), truth.half(), truth.float())
    with pytest.raises(ValueError, match="one shape"):
        measure.check(torch.ones(3), truth, torch.ones(2))


# --- inputs ---------------------------------------------------------------------------------------


def test_rotate_keeps_sizes_strides_offsets_values_and_aliasing():
    base = torch.randn(64, 48)
    inputs = (base[3:20, 1::2], base.t(), torch.randn(5).expand(4, 5), 7, torch.ones(3).half())
    sets = measure.rotate(inputs, l2_bytes=100_000)
    assert 20 <= len(sets) <= 22  # 12.3 KB a set, 250 KB wanted
    assert all(a is b for a, b in zip(sets[0], inputs, strict=True))
    for copy in sets[1:]:
        for mine, theirs in zip(copy, inputs, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert mine == theirs
                continue
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            assert mine.stride() == theirs.stride()
            assert mine.storage_offset() == theirs.storage_offset()
            assert torch.equal(mine, theirs)
            assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        assert copy[0].untyped_storage().data_ptr() == copy[1].untyped_storage().data_ptr()


def test_rotate_keeps_between_2_and_512_sets():
    assert len(measure.rotate((torch.ones(1 << 20),), l2_bytes=1000)) == 2
    assert len(measure.rotate((torch.ones(1),), l2_bytes=1 << 30)) == 512
    assert len(measure.rotate((torch.ones(0),), l2_bytes=1000)) == 512
    assert measure.rotate((torch.ones(2, requires_grad=True),), l2_bytes=1)[1][0].requires_grad
    with pytest.raises(ValueError, match="at least one tensor"):
        measure.rotate((3,), l2_bytes=1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_poison_is_nan_in_floats(dtype):
    t = torch.zeros(4, dtype=dtype)
    measure.poison(t)
    assert t.float().isnan().all()


def test_poison_of_integers_and_booleans():
    ints, flags = torch.zeros(3, dtype=torch.int8), torch.zeros(3, dtype=torch.bool)
    measure.poison(ints)
    measure.poison(flags)
    assert (ints == 127).all() and flags.all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_one_sentence_says_so():
    one = torch.ones(2)
    for attempt in (
        lambda: measure.compare({"f": torch.neg}, (one,)),
        lambda: measure.time_graph(torch.neg, [(one,)]),
        lambda: measure.chain_time(torch.neg, (one,)),
        lambda: measure.graph_outputs(torch.neg, [(one,)]),
        lambda: measure.host_overhead(torch.neg, one),
        lambda: measure.rotate((one,)),
        measure.ceilings,
        lambda: measure.copy_floor_us(1e6),
    ):
        with pytest.raises(RuntimeError, match=r"^Measuring needs a CUDA card[^.]*\.$"):
            attempt()


# --- the logic around the graphs, on a pretended card ---------------------------------------------


@pytest.fixture
def pretended_card(monkeypatch):
    """Graphs that run their body at capture and at replay; every replay "takes" 2 us per call."""

    def capture(body, warm):
        warm()
        results = body()

        def replay():  # into the memory of the first time, as a graph does
            for old, new in zip(results, body(), strict=True):
                old.copy_(new)

        return types.SimpleNamespace(replay=replay), results

    monkeypatch.setattr(measure, "require_cuda", lambda: None)
    monkeypatch.setattr(measure, "_capture", capture)
    monkeypatch.setattr(measure, "replay_us", lambda captured: 2.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "rotate", functools.partial(measure.rotate, l2_bytes=100_000))


@pytest.mark.usefixtures("pretended_card")
def test_compare_times_what_works_and_reports_what_raises():
    def broken(a):
        raise ValueError("no such kernel\nsecond line")

    results = measure.compare({"neg": torch.neg, "broken": broken}, (torch.ones(64),), repeats=4)
    assert results["neg"] == measure.Timing(2.0, 0.0, 4)
    assert results["broken"] == "ValueError: no such kernel"
    chain = measure.compare({"neg": torch.neg}, (torch.ones(64),), repeats=4, chained=True)
    assert chain["neg"].us == 0.0  # link and producer "take" the same here
    with pytest.raises(ValueError, match="first input must be a writable tensor"):
        measure.compare({"neg": torch.neg}, (torch.ones(1).expand(4),), chained=True)
    with pytest.raises(ValueError, match="at least 2"):
        measure.compare({"neg": torch.neg}, (torch.ones(64),), repeats=1)


@pytest.mark.usefixtures("pretended_card")
def test_a_graph_holds_whole_passes_over_the_sets():
    seen = []
    sets = measure.rotate((torch.ones(1000),))
    captured = measure.capture(lambda a: seen.append(a.data_ptr()), sets)
    assert captured.calls % len(sets) == 0 and captured.calls >= 200
    assert seen[2:] == [s[0].data_ptr() for s in sets] * (captured.calls // len(sets))


@pytest.mark.usefixtures("pretended_card")
@pytest.mark.parametrize("chained", [False, True])
def test_graph_outputs_are_those_of_each_set_and_inputs_survive(chained):
    sets = [(torch.randn(4, 6)[:, ::2], torch.randn(3, 5)) for _ in range(3)]
    before = [s[0].clone() for s in sets]
    outs = measure.graph_outputs(torch.mm, sets, chained=chained)
    assert len(outs) == 3
    assert all(torch.equal(s[0], b) for s, b in zip(sets, before, strict=True))
    assert all(torch.equal(o, torch.mm(*s)) for o, s in zip(outs, sets, strict=True))
    aliased = measure.graph_outputs(lambda a, w: a, sets)
    assert all(torch.equal(o, s[0]) for o, s in zip(aliased, sets, strict=True))


# --- the benchmark --------------------------------------------------------------------------------


def test_geometric_mean():
    assert common.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(common.geometric_mean([]))


def test_any_beginning_of_a_run_is_representative():
    cases = decompose_k.ordered(["relu_bf16"], quick=False, shard=(1, 1))
    assert sorted(cases, key=str) == sorted(decompose_k.SUITES["relu_bf16"], key=str)
    assert {c.m for c in cases[:6]} == {16, 32, 48, 64}
    everything = decompose_k.ordered(list(decompose_k.SUITES), quick=False, shard=(1, 1))
    assert {c.suite for c in everything[:6]} == set(decompose_k.SUITES)
    shards = [c for i in (1, 2, 3) for c in decompose_k.ordered(["fp32"], False, (i, 3))]
    assert sorted(shards, key=str) == sorted(decompose_k.SUITES["fp32"], key=str)


def test_a_copy_with_its_own_code_keeps_its_closure():
    case = decompose_k.SUITES["relu_bf16"][0]
    one = decompose_k.site(case)
    two = common.own_code(one, "two")
    assert two.__code__ is not one.__code__ and two.__closure__ == one.__closure__
    a, w = torch.randn(2, 4), torch.randn(4, 3)
    assert torch.equal(one(a, w), two(a, w)) and (two(a, w) >= 0).all()


def test_the_budget_stops_between_items(monkeypatch):
    clock = iter([0.0, 0.0, 0.0, 4.0, 4.0, 4.0, 9.0, 9.0]).__next__
    monkeypatch.setattr(common, "time", types.SimpleNamespace(monotonic=clock))
    # Items of 4 and 5 s: after 9 of 12 s there is no room for another 5.
    assert list(common.Budget(12.0).take("abcd")) == ["a", "b"]


def test_a_wrong_result_wins_nothing():
    versus = common.Comparison(["eager", "compile", "ours"], ["eager", "compile"], {})
    row = {"eager_us": 8.0, "eager_check": "ok", "compile_us": 1.0, "compile_check": "error 3."}
    row |= {"ours_us": 4.0, "ours_check": "ok"}
    assert versus.speedups(row)["ours_vs_best_stock"] == 2.0
    assert math.isnan(versus.speedups(row)["ours_vs_compile"])
    assert math.isnan(versus.speedups(row | {"ours_check": "error 3."})["ours_vs_eager"])


@pytest.mark.usefixtures("pretended_card")
def test_a_whole_run_writes_csv_json_and_summary(monkeypatch, tmp_path, capsys):
    cases = tuple(
        decompose_k.Case("fp32", m, m, 264, "float32", layout, "relu")
        for m, layout in ((4, "kn"), (8, "nk"))
    )
    monkeypatch.setattr(decompose_k, "SUITES", {"fp32": cases})
    monkeypatch.setattr(decompose_k, "SQUARE_SPLITS", (8,))
    monkeypatch.setattr(decompose_k, "DEVICE", "cpu")
    ceilings = measure.Ceilings(1e6, 1e8, 1e7)
    monkeypatch.setattr(measure, "ceilings", lambda: ceilings)
    meta = {"card": "pretended", "torch": "0", "triton": "0"}
    monkeypatch.setattr(common, "metadata", lambda _: dict(meta))
    monkeypatch.setattr(decompose_k, "_settings", lambda: None)
    argv = ["x", "--columns", "eager,compile,decomposition,ours,unfused", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    with torch.no_grad():
        decompose_k.main()
    rows = common.read_csv(tmp_path / "decompose_k.csv")
    assert [r["case"] for r in rows] == ["4x4x264", "8x8x264"]
    for row in rows:
        assert row["failure"] == ""
        for column in ("eager", "compile", "decomposition", "ours", "unfused"):
            assert row[f"{column}_check"] == "ok", row
            assert float(row[f"{column}_us"]) == 2.0
        assert row["decomposition_split"] == "8"  # the only one that divides 264
        assert float(row["ours_vs_best_stock"]) == 1.0
    assert (tmp_path / "decompose_k.json").exists()
    assert "independent calls" in capsys.readouterr().out
    decompose_k.merge([tmp_path / "decompose_k.csv"], tmp_path / "merged")
    assert common.read_csv(tmp_path / "merged" / "decompose_k.csv") == rows


def _command(*args):
    command = [sys.executable, "-m", "benchmarks.decompose_k", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_floor_of_two_kernels_is_their_latency_and_the_bytes():
    case = decompose_k.SUITES["relu_bf16"][0]
    short = dataclasses.replace(case, k=decompose_k_floor.SHORT)
    latency = [{"mn": "16", "us": "2", "chain_us": "3", "copy": "1e5"}]
    row = {"suite": "relu_bf16", "case": case.name, "m": "16", "bytes": str(short.bytes + 400_000)}
    row |= {"ours_us": "8", "ours_chain_us": "9", "decomposition_us": "12"}
    row |= {"decomposition_chain_us": "14"}
    (line,) = decompose_k_floor.floors(latency, [row, {"suite": "fp32"}])
    assert (line["floor_us"], line["chain_floor_us"]) == (6, 7)
    assert (line["reached"], line["reachable"], line["chain_reachable"]) == (1.5, 2, 2)


def test_help_list_and_bad_arguments_need_no_card():
    assert "--prewarm" in _command("--help").stdout
    listed = _command("--list").stdout.splitlines()
    assert len(listed) == 4 * 28 + 6 + 5
    assert len(_command("--list", "--suite", "router", "--quick").stdout.splitlines()) == 3
    assert "1 <= i <= n" in _command("--list", "--shard", "3/2").stderr
    assert "fast came" in _command("--list", "--columns", "eager,fast").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_running_without_a_card_ends_in_one_sentence():
    answer = _command("--quick")
    assert answer.returncode == 1
    assert answer.stderr.strip().splitlines()[-1].startswith("Measuring needs a CUDA card")


# --- on a card ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_small_kernel_takes_about_a_microsecond():
    us = measure.time_graph(torch.neg, measure.rotate((torch.randn(256, device="cuda"),)))
    assert 0.3 < us < 10


@pytest.mark.gpu
def test_a_large_copy_runs_near_the_copy_bandwidth():
    source = torch.randn(16 << 20, device="cuda")  # 64 MB read, 64 MB written
    us = measure.time_graph(torch.clone, measure.rotate((source,)))
    assert 0.7 < measure.copy_floor_us(2 * source.nbytes) / us < 1.5


@pytest.mark.gpu
def test_compare_and_chain_on_the_card():
    a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))

    results = measure.compare({"waits": lambda a, b: (a @ b).sum().item(), "mm": torch.mm}, (a, b))
    assert 1 < results["mm"].us < 50 and "waits for the card" in results["waits"]
    assert 1 < measure.chain_time(torch.mm, (a, b)).us < 50
    assert 0.5 < measure.host_overhead(torch.mm, a, b) < 1000


@pytest.mark.gpu
@pytest.mark.parametrize("chained", [False, True])
def test_unwritten_elements_show_as_nan_on_the_card(chained):
    sets = [(torch.randn(64, 64, device="cuda"),) for _ in range(4)]
    whole = measure.graph_outputs(torch.neg, sets, chained=chained)
    assert all(torch.equal(out, -s[0]) for out, s in zip(whole, sets, strict=True))

    def partial(a):
        out = torch.empty_like(a)
        out[1:] = a[1:]
        return out

    if not chained:  # a chain carries the NaN on from link to link
        outs = measure.graph_outputs(partial, sets)
        assert all(o[0].isnan().all() and not o[1:].isnan().any() for o in outs)


@pytest.mark.gpu
def test_a_broken_capture_leaves_the_process_usable():
    program = """
import torch
from inductor_ext import measure

def breaks(a):
    torch.cuda.synchronize()
    return -a

results = measure.compare({"breaks": breaks, "neg": torch.neg}, (torch.randn(256, device="cuda"),))
torch.cuda.empty_cache()
assert isinstance(results["breaks"], str) and results["neg"].us > 0, results
"""
    # In a process of its own, because the allocator's state is the process's.
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
