"""Every rank of a job emits the same program: two processes on the CPU, joined by gloo."""

import json
import subprocess
import sys
import textwrap
import time

import pytest

from inductor_ext import agreement

# Imports once, then forks two ranks for each line of input: {"script": ..., "folder": ...}. Each
# writes what it hands to done() into a file of its own.
_PARENT = """
import json, os, sys, traceback
import torch, torch.distributed as dist
import inductor_ext
from inductor_ext import active_plan, agreement, choosing, registry, report

def attempt(call):
    try:
        return ["ok", call()]
    except Exception as error:
        return [type(error).__name__, str(error)]

for line in sys.stdin:
    job = json.loads(line)
    folder = job["folder"]
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            agreement.GATHER_S, agreement.GRACE_S = job["gather"], job["grace"]
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
            )
            def done(value):
                with open(f"{folder}/rank{rank}.json", "w") as out:
                    json.dump(value, out)
                dist.barrier()
            try:
                exec(compile(job["script"], "<script>", "exec"), globals())
            except BaseException:
                with open(f"{folder}/rank{rank}.json", "w") as out:
                    json.dump(traceback.format_exc(), out)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def _parent():
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def two(_parent, tmp_path):
    """``two(script)`` runs a script as two ranks: what each handed to done(), and seconds."""

    def run(script, *, gather=60, grace=60):
        job = {"script": textwrap.dedent(script), "folder": str(tmp_path)}
        started = time.monotonic()
        print(json.dumps({**job, "gather": gather, "grace": grace}), file=_parent.stdin, flush=True)
        assert _parent.stdout.readline() == "done\n"
        took = time.monotonic() - started
        return *(json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1)), took

    return run


def test_ranks_with_one_plan_agree(two, make_plan, tmp_path):
    make_plan().save(tmp_path / "plan.json")
    zero, one, _ = two("""
        done(attempt(lambda: inductor_ext.load_plan(f"{folder}/plan.json").card))
    """)
    assert zero == one == ["ok", "NVIDIA H200"]


def test_a_file_on_one_rank_only_is_an_error_on_both(two, make_plan, tmp_path):
    make_plan().save(tmp_path / "plan0.json")
    zero, one, _ = two("""
        first = attempt(lambda: inductor_ext.load_plan(f"{folder}/plan{rank}.json").card)
        done([first, len(active_plan.user_plans())])
    """)
    (kind, said), loaded = zero
    assert kind == "Disagreement" and loaded == 0
    assert "no plan" in said and "plan1.json: the plan can't be read" in said and "rank 1" in said
    (kind, said), loaded = one
    assert kind == "PlanError" and "plan1.json: the plan can't be read" in said and loaded == 0


def test_different_plans_are_an_error_on_both(two, make_plan, tmp_path):
    for rank, card in enumerate(("NVIDIA H200", "NVIDIA H100")):
        make_plan(card=card).save(tmp_path / f"plan{rank}.json")
    zero, one, _ = two("""
        done(attempt(lambda: inductor_ext.load_plan(f"{folder}/plan{rank}.json").card))
    """)
    assert zero[0] == one[0] == "Disagreement"
    assert "every rank must load the same plan" in zero[1]


def test_a_rank_that_never_loads_one_is_an_error_in_time(two, make_plan, tmp_path):
    make_plan().save(tmp_path / "plan.json")
    zero, one, _ = two(
        """
        if rank == 0:
            done(attempt(lambda: inductor_ext.load_plan(f"{folder}/plan.json").card))
        else:
            done("idle")
        """,
        gather=2,
    )
    assert zero == ["Disagreement", zero[1]] and "rank 1 did not come to load_plan" in zero[1]
    assert one == "idle"


def test_a_plan_in_the_environment_of_one_rank_stops_the_compile(two, make_plan, tmp_path):
    """Not through the fallback to stock: that would be another program on this rank."""
    make_plan().save(tmp_path / "plan.json")
    zero, one, took = two(
        """
        if rank == 0:
            os.environ["INDUCTOR_EXT_PLAN"] = f"{folder}/plan.json"
        active_plan.load_environment()
        inductor_ext.config.strict = False

        def look():
            try:
                return str(active_plan.find(None, {}))
            except Exception as error:
                registry.failed("decompose_k", "a site", error)
                return "stock"
        first = attempt(look)
        dist.barrier()
        done([first, attempt(look)])
        """
    )
    assert zero[0][0] == "Disagreement" and "give every rank the same plan" in zero[0][1]
    # The rank without a plan does not wait, so it may learn of it at its next site.
    assert one[1][0] == "Disagreement"
    assert took < 100


MEASURE = """
    names = ["stock", "a", "b"]
    calls = []
    def here(lowering, names, how):
        calls.append(lowering)
        best = ["a", "b"][rank]
        times = report.CandidateTime(best, 1.5), report.CandidateTime("x", None, "no")
        return best, f"by rank {rank}", times
    choosing._measure_here = here
    ask = lambda key: choosing._measure("decompose_k", ["a", "b"], key, choosing.Measure())
"""


def test_rank_0_measures_and_the_others_follow(two):
    zero, one, _ = two(
        MEASURE
        + """
    if rank == 0:
        import time
        time.sleep(1.5)   # rank 1 comes first, and waits
    found = [ask("k1"), ask("k2"), ask("k1")]
    done([[f[0] for f in found], found[0][1], [t.us for t in found[0][2]], len(calls)])
    """
    )
    assert zero == [["a", "a", "a"], "by rank 0", [1.5, None], 2]
    assert one == [["a", "a", "a"], "by rank 0", [1.5, None], 0]


def test_ranges_that_one_rank_recalls_are_everybodys(two):
    """Rank 0 has them from an earlier process, rank 1 has not."""
    zero, one, _ = two("""
        import pathlib
        from inductor_ext import compat, compat_runtime, plan_cache
        compat.card_name = lambda: "a card"
        plan_cache.folder = lambda: pathlib.Path(folder) / f"cache{rank}"
        asked = []
        measure = lambda value: lambda: asked.append(value) or [value]
        if rank == 0:
            shared = compat_runtime.distributed_store
            compat_runtime.distributed_store = lambda: (None, 0, 1)
            plan_cache.recall("ranges", measure("before"))
            compat_runtime.distributed_store = shared
        dist.barrier()
        done([plan_cache.recall("ranges", measure(f"by rank {rank}")), asked])
    """)
    assert zero == [["before"], ["before"]] and one == [["before"], []]


def test_a_rank_that_compiles_alone_does_not_wait_for_ever(two):
    zero, one, _ = two(
        MEASURE
        + """
    import time
    started = time.monotonic()
    found = [ask(f"only {i}")[0] for i in range(8)] if rank == 1 else []
    done([found, time.monotonic() - started])
    """,
        grace=1.0,
    )
    assert one[0] == ["b"] * 8 and 1.0 <= one[1] < 4.0  # it waits once
    assert zero[0] == []


def test_a_failure_to_measure_is_everybodys(two):
    zero, one, _ = two(
        MEASURE
        + """
    def broken(*args):
        raise ValueError("out of cards")
    choosing._measure_here = broken
    done(attempt(lambda: ask("k")))
    """
    )
    assert zero == ["ValueError", "out of cards"]
    assert (
        one[0] == "RuntimeError"
        and "rank 0 failed to measure" in one[1]
        and "out of cards" in one[1]
    )


def test_a_world_of_one_asks_nobody(monkeypatch):
    assert agreement.gather("x", "a") == ["a"]
    assert agreement.decide("x", lambda: "b") == "b"
    agreement.compare_state("x", "a", wait=True)
