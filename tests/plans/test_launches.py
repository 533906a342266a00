"""Plans and ``tune`` on what operations launch: an operation that runs on the CPU stands for all.

Its "kernel" is torch code that takes the tiling it was given; only times are made up.
"""

import dataclasses
import itertools
import json
import threading

import pytest
import torch
from inductor_ext.templates import tilings
from inductor_ext.templates.tilings import HEURISTIC

import inductor_ext
from inductor_ext import (
    active_plan,
    choosing,
    config,
    plan_file,
    planned_launches,
    registry,
    tuning_launches,
)
from inductor_ext.ops._opaque import opaque_op, traced_op
from inductor_ext.plan import Box, Plan, PlanError
from inductor_ext.plan_cli import main as plan_command
from inductor_ext.testing import compile_for


@dataclasses.dataclass(frozen=True)
class Tiling:
    block: int
    warps: int = 4
    fast: bool = False


@tilings.tunable("softmax", "test", "rows", scaled="block", flipped="fast")
def tiling(columns, dtype) -> Tiling:
    return Tiling(64 if columns < 100 else 128)


launched = []
meanwhile = []  # what another thread does while an operation runs


def run(x, factor):
    if meanwhile:
        thread = threading.Thread(target=meanwhile.pop())
        thread.start(), thread.join()
    chosen = tiling(x.shape[1], x.dtype, rows=x.shape[0])
    launched.append(chosen)
    assert chosen.block != 32, "a candidate that fails"
    return x * (factor + chosen.fast)  # and one that is wrong


@opaque_op("inductor_ext_test::doubled")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return run(x, 2)


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


@doubled.register_autograd
def _(ctx, g):
    return doubled(g[:, :4]).repeat(1, 2)  # a problem of its own


@traced_op("inductor_ext_test::tripled")
def tripled(x: torch.Tensor) -> torch.Tensor:
    return run(x, 3)


BEST = "block=128,warps=4,fast=0"


def times(key, sizes, names):
    """The larger block wins beyond 100 rows."""
    fast = 5.0 if sizes["rows"] > 100 else 12.0
    return {n: fast if n == BEST else 10.0 if n == HEURISTIC else 11.0 for n in names}


def tune(fn, *args, timer=times, **kwargs):
    kwargs = {"dims": {"x.0": (1, 512)}, **kwargs}
    return inductor_ext.tune(fn, *args, progress=False, _measure=timer, **kwargs)


@pytest.fixture(autouse=True)
def _forget():
    launched.clear()
    yield
    tilings.forget()


@pytest.fixture
def plan(make_plan):
    """Made by hand: the larger block for 97 to 512 rows of 8."""
    boxes = (
        Box((("rows", (1, 96)),), HEURISTIC, {"4": {HEURISTIC: 10.0, BEST: 12.0}}),
        Box((("rows", (97, 512)),), BEST, {"128": {HEURISTIC: 10.0, BEST: 5.0}}),
    )
    how = {"lowering": "softmax", "op": "test", "dtype": "float32", "layout": "any"}
    return make_plan(*boxes, **how, columns=8)


def test_names_are_read_back_and_neighbours_differ_in_one_step():
    found = tiling.candidates((8, torch.float32), {"rows": 4})
    assert list(found) == [
        "block=64,warps=4,fast=0", "block=32,warps=4,fast=0", BEST, "block=64,warps=2,fast=0",
        "block=64,warps=8,fast=0", "block=64,warps=4,fast=1",
    ]  # fmt: skip
    for name, one in found.items():
        assert tilings.name_of(one) == name
    assert all(not launch.fault(n) for launch in planned_launches.launches().values()
               for n in _names(launch))  # fmt: skip


def test_what_a_tilings_class_refuses_is_no_candidate():
    """The rule's own stands at the edge of what there is."""

    @dataclasses.dataclass(frozen=True)
    class Staged:
        stages: int
        warps: int = 4

        def __post_init__(self):
            if self.stages < 2:
                raise ValueError(f"stages is expected as 2 or more, got {self.stages}")

    def rule(columns):
        return Staged(2)

    launch = tilings.Tunable(rule, "softmax", "test", "", {"stages": "stages", "warps": "warps"})
    assert list(launch.candidates((8,), {})) == [
        "stages=2,warps=4", "stages=3,warps=4", "stages=2,warps=2", "stages=2,warps=8",
    ]  # fmt: skip


def _names(launch):
    """A name with every field that there has to be."""
    return [",".join(f"{field}=1" for field in launch.named)]


@pytest.mark.parametrize("op", [doubled, tripled], ids=["opaque", "traced"])
def test_ranges_of_a_launch(op):
    def fn(x):
        return op(x)

    (entry,) = tune(fn, torch.randn(16, 8)).entries
    assert str(entry.key) == "softmax test float32 any columns=8"
    low, high = entry.boxes
    edge = low.bounds[0][1][1]
    assert (low.choice, high.choice) == (HEURISTIC, BEST) and 88 <= edge <= 112
    assert [str(b) for b in entry.boxes] == [f"rows=1..{edge}", f"rows={edge + 1}..512"]
    assert all(set(us) == {HEURISTIC, BEST} for us in high.times.values())


def test_a_backward_is_tuned_where_an_argument_has_a_gradient():
    def fn(x):
        return doubled(x)

    forward = tune(fn, torch.randn(16, 8))
    both = tune(fn, torch.randn(16, 8, requires_grad=True))
    columns = [[dict(e.key.sizes)["columns"] for e in p.entries] for p in (forward, both)]
    assert columns == [[8], [8, 4]]


def test_only_what_has_to_be_as_large_is_resized():
    def with_another(x, w):
        torch._check(x.shape[0] == w.shape[0])
        return doubled(x), w + 1

    def square(x):
        torch._check(x.shape[0] == x.shape[1])
        return doubled(x)

    (entry,) = tune(with_another, torch.randn(8, 8), torch.randn(8, 3)).entries
    assert dict(entry.key.sizes) == {"columns": 8}  # as many as rows by chance
    (entry,) = tune(square, torch.randn(8, 8)).entries
    assert not entry.key.sizes and str(entry.boxes[0]) == "columns=1..512 rows=1..512"


def test_what_a_program_writes_to_is_not_the_callers():
    def fn(x, state, pair):
        state += 1
        x.mul_(2)
        pair["a"] -= state[:8]
        return doubled(x)

    x, state, pair = torch.randn(16, 8), torch.arange(9.0)[1:], {"a": torch.ones(8)}
    before = x.clone(), state.clone(), pair["a"].clone()
    plan = tune(fn, x, state, pair)
    assert [box.choice for box in plan.entries[0].boxes] == [HEURISTIC, BEST]
    for now, then in zip((x, state, pair["a"]), before, strict=True):
        assert torch.equal(now, then)
    assert not (x._version or state._version or pair["a"]._version)


def test_tune_and_explain_beside_each_other_see_their_own():
    """In two threads: neither changes what the other finds, nor what a third one launches."""
    beside = []

    def aside():
        beside.append(tilings.watcher.whole)  # what is compiled here is compiled as ever
        beside.extend(inductor_ext.explain(lambda x: doubled(x), torch.randn(7, 11)).launches)
        beside.append(launched[-1])

    alone = tune(lambda x: doubled(x), torch.randn(16, 8))
    meanwhile.append(aside)
    plan = tune(lambda x: doubled(x), torch.randn(16, 8))
    assert [(e.key, e.boxes) for e in plan.entries] == [(e.key, e.boxes) for e in alone.entries]
    whole, explained, launch = beside
    assert "columns=11 rows=7" in explained.sites and explained.source == HEURISTIC
    assert not whole and launch == Tiling(64)


def test_a_candidate_that_fails_or_errs_is_left_out(monkeypatch):
    compared = []

    def compare(candidates, inputs, **_):
        compared.append(set(candidates))
        return {}

    monkeypatch.setattr(inductor_ext.measure, "compare", compare)
    monkeypatch.setattr(inductor_ext.measure, "require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    with pytest.raises(ValueError, match=r"no site depends on 'x\.0', nor"):  # none timed
        tune(lambda x: doubled(x), torch.randn(16, 8), timer=None)
    right = {HEURISTIC, BEST, "block=64,warps=2,fast=0", "block=64,warps=8,fast=0"}
    assert compared and all(names == right for names in compared)
    with pytest.raises(MemoryError, match=r"doubled needs \d.\d\d GiB, and max_memory is .* lower"):
        tune(lambda x: doubled(x), torch.randn(16, 8), timer=None, max_memory=1 << 10)


def test_a_plan_chooses_by_the_sizes_and_explain_says_so(plan):
    x = torch.randn(300, 8)
    doubled(x)
    inductor_ext.load_plan(plan, force=True)
    doubled(x), doubled(x[:40]), doubled(x[:, :4])
    inductor_ext.unload_plan()
    doubled(x)
    assert [one.block for one in launched] == [64, 128, 64, 64, 64]

    inductor_ext.load_plan(plan, force=True)
    explained = {}
    for name, rows in (("covered", x), ("not", x.repeat(2, 1))):
        (explained[name],) = inductor_ext.explain(lambda x: doubled(x), rows).launches
    assert (explained["covered"].source, explained["covered"].chosen) == ("plan", BEST)
    assert [c.us for c in explained["covered"].candidates] == [10.0, 5.0]
    assert explained["not"].source == HEURISTIC
    assert explained["not"].reason.startswith("not in the plan: rows=600 lies in none of its range")
    assert "launch test" in str(inductor_ext.explain(lambda x: doubled(x), x))


def test_switching_the_shipped_plan_is_seen_by_launches_of_every_thread(plan, monkeypatch):
    card = active_plan.compat.card_name
    monkeypatch.setattr(active_plan.compat, "card_name", lambda: card() or plan.card)
    shipped = active_plan.Loaded(plan, "a file", False)
    monkeypatch.setattr(active_plan, "shipped", lambda card: shipped)
    x = torch.randn(300, 8, requires_grad=True)
    for on in (False, True, False):
        with config.patch(shipped_plan=on):
            (3 * doubled(x)).sum().backward()  # 300 rows of 8 columns, 300 of 4
            thread = threading.Thread(target=doubled, args=(x,))
            thread.start(), thread.join()
    assert [one.block for one in launched] == [64, 64, 64, 128, 64, 128, 64, 64, 64]


def test_a_plan_is_part_of_the_cache_key(plan):
    before = registry.revision()
    inductor_ext.load_plan(plan, force=True)
    assert registry.revision() != before


def test_a_field_that_came_after_a_plan_has_its_default(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_file.dump(plan).replace(f'"choice": "{BEST}"', '"choice": "block=128"'))
    inductor_ext.load_plan(path, force=True)
    doubled(torch.randn(300, 8))
    assert launched[-1] == Tiling(128)
    (found,) = inductor_ext.explain(lambda x: doubled(x), torch.randn(300, 8)).launches
    assert (found.source, found.chosen) == ("plan", BEST)


def test_an_unknown_candidate_is_refused_with_its_line(plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    for name, why in (
        ("block=128,warps", "is no tiling"),
        ("warps=4,fast=0", "it names no block"),
        (BEST + ",early=1", "no tiling has .early."),
        ("fastest", "is no tiling"),
    ):
        path.write_text(plan_file.dump(plan).replace(f'"choice": "{BEST}"', f'"choice": "{name}"'))
        with pytest.raises(PlanError, match=rf"line 13: softmax test has no .*{why}"):
            Plan.load(path)
        assert plan_command(["check", str(path)]) == 1
    # What is no neighbour of the rule's tiling is launched nowhere, and explain says so.
    odd = "block=4096,warps=4,fast=0"
    path.write_text(plan_file.dump(plan).replace(f'"choice": "{BEST}"', f'"choice": "{odd}"'))
    inductor_ext.load_plan(path, force=True)
    doubled(torch.randn(300, 8))
    assert launched[-1].block == 64
    (found,) = inductor_ext.explain(lambda x: doubled(x), torch.randn(300, 8)).launches
    assert found.source == HEURISTIC and f"names {odd}, which is no candidate" in found.reason


def test_plans_of_launches_merge_and_differ(plan, tmp_path, capsys):
    newer = dataclasses.replace(plan.entries[0], measured="2026-02-01T00:00:00Z",
                                boxes=(Box((("rows", (257, 512)),), HEURISTIC, {}),))  # fmt: skip
    other = dataclasses.replace(plan, entries=(newer,))
    both = plan.merge(other)
    assert [(str(b), b.choice) for b in both.entries[0].boxes] == [
        ("rows=1..96", HEURISTIC), ("rows=97..256", BEST), ("rows=257..512", HEURISTIC),
    ]  # fmt: skip
    (change,) = [c for c in plan.diff(both) if c.after]
    assert (change.where, change.before, change.after) == ("rows=257..512", BEST, HEURISTIC)
    both.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == 1
    assert Plan.load(tmp_path / "plan.json") == both
    assert plan_command(["show", str(tmp_path / "plan.json")]) == 0
    assert BEST in capsys.readouterr().out


def test_the_cost_of_a_look_up_does_not_grow(plan):
    """As many problems as there are sizes: what is kept is bounded."""
    inductor_ext.load_plan(plan, force=True)
    for rows in range(5000):
        tiling(8, torch.float32, rows=rows)
    assert len(tiling._kept) <= 4096
    assert active_plan.speak_of("softmax", "test")


def test_a_choice_is_never_behind_the_rule_where_it_was_measured():
    """Better by a lot nearly everywhere, and behind at a size in between."""

    def timer(key, sizes, names):
        mine = 10.1 if sizes["rows"] == 64 else 5.0
        return {n: mine if n == BEST else 10.0 for n in names}

    (entry,) = tune(lambda x: doubled(x), torch.randn(16, 8), timer=timer).entries
    assert entry.box_at({"rows": 64}).choice == HEURISTIC
    assert {entry.box_at({"rows": n}).choice for n in (1, 256, 512)} == {BEST}
    for box in entry.boxes:
        assert all(us[box.choice] <= us[HEURISTIC] for us in box.times.values())
    bounds = [b.bounds[0][1] for b in entry.boxes]
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(bounds))


@pytest.mark.codegen
def test_a_scan_of_a_graph_is_an_operation_while_it_is_tuned():
    """So that its launch is met when it runs, and not while it is traced."""

    def fn(x):
        return torch.cumsum(x.exp(), -1) * 2

    x = torch.empty(64, 16384)
    recorder = tuning_launches._Recorder(keep=False)
    # As ``tune`` compiles it, by which sites are left to stock.
    with planned_launches.watched(recorder), choosing.recording(lambda *_: None):
        code = compile_for("h200", fn, x, dynamic={0: {0: (16, 8192)}})
    assert code.extern_calls == ["torch.ops.inductor_ext.fused_scan.default"]
    assert not code.kernels  # what is pointwise is in its program
    with planned_launches.explained() as launches:
        code = compile_for("h200", fn, x)
    (found,) = launches.values()
    assert found.lowering == "scan" and "lanes=64 length=16384" in found.sites
    assert code.kernels and not code.extern_calls
