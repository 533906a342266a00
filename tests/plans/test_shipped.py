"""The plans that are shipped: in order, and each choice is one that can be emitted."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

import inductor_ext
from inductor_ext import active_plan, plan_file, planned_launches, plans
from inductor_ext.ops import _attention as attention
from inductor_ext.ops import _attention_calls as calls
from inductor_ext.plan import Plan
from inductor_ext.testing import compile_for

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from benchmarks import plan_launches  # noqa: E402

FILES = sorted(Path(plans.__file__).parent.glob("*.json"))


def product_of(entry):
    """An mm of bf16 with the layout of a Linear's weight, and the entry's static sizes."""
    assert (entry.key.dtype, entry.key.layout) == ("bfloat16", "row,column")
    sizes = dict(entry.key.sizes)
    x, w = (torch.empty(r, sizes["k"], dtype=torch.bfloat16) for r in (64, sizes["n"]))
    score = {"mm": torch.relu, "mm+row_reduction": lambda z: z.float().softmax(-1)}[entry.key.op]
    return (lambda x, w: score(x @ w.t())), (x, w)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_in_order_and_says_how_it_was_made(path):
    assert list(plan_file.check(path)) == []
    plan = Plan.load(path)
    assert plan.command and plan.entries and active_plan.shipped(plan.card) is not None
    for entry in plan.entries:
        for box in entry.boxes:
            # Never behind stock, or the rule's tiling, where it was measured.
            for us, default in itertools.product(box.times.values(), ("stock", "heuristic")):
                assert us[box.choice] <= us.get(default, us[box.choice])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_first_compile_does_not_wait_for_every_kernel(path, monkeypatch):
    def imported():
        raise AssertionError("the launches' modules were imported")

    plan = Plan.load(path)
    monkeypatch.setattr(planned_launches, "launches", imported)
    active_plan.shipped.cache_clear()
    assert active_plan.shipped(plan.card).plan == plan


@pytest.mark.codegen
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_choice_is_emitted(path):
    inductor_ext.load_plan(path, force=True)
    for entry in Plan.load(path).entries:
        if entry.key.lowering != "decompose_k":
            continue
        fn, args = product_of(entry)
        code = compile_for(path.stem, fn, *args, dynamic={0: {0: (2, 16384)}})
        (decision,) = code.decisions
        for box in entry.boxes:  # neighbours of one choice are one range
            ((_, (lo, hi)),) = box.bounds
            found = {r.chosen for r in decision.ranges if r.lo <= hi and r.hi >= max(lo, 2)}
            assert found == ({box.choice} if hi >= 2 else set()), (box, decision.ranges)


def has_program(entry):
    launch = planned_launches.launches().get((entry.key.lowering, entry.key.op))
    rule = () if launch is None else launch.signature.parameters.values()
    return any("Program" in str(parameter.annotation) for parameter in rule)


def problem_of(entry, launch, sizes):
    """(facts, the other sizes) of an entry's launch; None where a program is among them."""
    if has_program(entry):
        return None
    words = entry.key.layout.split(",")
    facts = []
    for name, parameter in launch.signature.parameters.items():
        kind = str(parameter.annotation)
        fact = sizes.get(name)
        if "device" in kind:
            fact = torch.device("cpu")
        elif "dtype" in kind:
            fact = getattr(torch, entry.key.dtype)
        elif kind == "bool":
            fact = name in words
        facts.append(fact)
    flags = [w for w in words if w not in launch.signature.parameters]
    more = [n for n in launch.sizes if n not in launch.signature.parameters]
    return facts, {n: sizes[n] if n in sizes else flags[0] for n in more}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_tiling_is_a_candidate_where_it_was_measured(path):
    looked_up, plan = 0, Plan.load(path)
    for entry in plan.entries:
        launch = planned_launches.launches().get((entry.key.lowering, entry.key.op))
        assert launch is not None or entry.key.lowering == "decompose_k", entry.key
        for box in entry.boxes if launch is not None else ():
            for point in box.times:
                at = dict(zip([n for n, _ in box.bounds], map(int, point.split(",")), strict=True))
                problem = problem_of(entry, launch, dict(entry.key.sizes) | at)
                if problem is not None:
                    key = planned_launches.key_of(launch, *problem)
                    assert plan.find(key, {}) == box
                    choices = "heuristic", *launch.candidates(*problem)
                    assert launch.whole(box.choice) in choices, (entry, at)
                    looked_up += 1
    assert looked_up


class Computed(Exception):
    """A program that an operation would have launched."""


@pytest.fixture
def word_of_attention(monkeypatch):
    """A function's attention, as plans name what it computes: nothing is launched."""

    def attend(q, k, v, inputs, numbers, score, dropout=0.0):
        raise Computed(attention.program_of(q, inputs, numbers, score, "zero", dropout))

    def word_of(fn, args):
        with monkeypatch.context() as patched:
            patched.setattr(attention, "kernels_apply", lambda q: True)
            patched.setattr(calls, "attend", attend)
            with pytest.raises(Computed) as computed:
                fn(*args)
        (program,) = computed.value.args
        launch = planned_launches.launches()["attention", "forward"]
        facts = program, torch.bfloat16, 64, 64
        return launch.problem(facts, {"rows": 1, "columns": 1, "heads": 1})[1].split(",")[0]

    return word_of


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_entry_is_left_over(path, monkeypatch, word_of_attention):
    """What a kernel computes may be told by the text of it, which a later change of the kernel
    changes: the entry is then dead, and is to be tuned again, or taken out."""
    monkeypatch.setattr(plan_launches, "DEVICE", "meta")
    dead = {entry.key for entry in Plan.load(path).entries if has_program(entry)}
    for target in plan_launches.LAUNCHES:
        if not dead:
            break
        fn, args, _ = target.program()
        if "causal attention" in target.name:
            word = word_of_attention(fn, args)
            dead = {key for key in dead if word not in key.layout.split(",")}
            continue
        with planned_launches.explained() as met:
            compile_for(path.stem, fn, *args, grad=any(x.requires_grad for x in args))
        words = [d.sites.split()[1:4] for d in met.values()]
        dead = {key for key in dead if [key.op, key.dtype, key.layout] not in words}
    again = f"python -m benchmarks.plan --merge --out {path}"
    assert not dead, f"no launch has these problems ({again}): {', '.join(map(str, dead))}"
