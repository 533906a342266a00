"""Branches over ranges of sizes on the card: one program for every number of tokens."""

import random
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import inductor_ext
from inductor_ext import measure, report

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
TOKENS = (1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 128, 256, 512, 768, 4096, 16384)
HIDDEN, EXPERTS = 7168, 256


def sigmoid_router(x, w, bias):
    return torch.sigmoid(F.linear(x, w).float()) + bias


def softmax_router(x, w, bias):
    return F.linear(x, w).float().softmax(-1) + bias


ROUTERS = {"sigmoid": sigmoid_router, "softmax": softmax_router}


def hidden(tokens):
    return torch.randn(tokens, HIDDEN, device="cuda").to(BF16)


def constants():
    w = (torch.randn(EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5).to(BF16)
    return w, torch.randn(EXPERTS, device="cuda") * 0.1


def compile_for_any(fn, w, bias, **options):
    """(program, its ranges, the frame counter) after a first call with one token.

    With backed_size_oblivious, and one token first, torch makes no special case of one.
    """
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(fn, **(options or {"backend": counter}))
    x = hidden(1)
    torch._dynamo.mark_dynamic(x, 0, min=1, max=max(TOKENS))
    with (
        torch.fx.experimental._config.patch(backed_size_oblivious=True),
        report.collect() as decisions,
    ):
        compiled(x, w, bias)
    (decision,) = decisions
    assert decision.fired and len(decision.ranges) > 2, decision
    return compiled, decision.ranges, counter


def around_edges(ranges):
    """The last size of every range but the last, and the first of the next."""
    return sorted({t for r in ranges[:-1] for t in (r.hi, r.hi + 1)})


@pytest.mark.parametrize("scoring", ROUTERS)
def test_right_at_every_number_of_tokens_from_one_frame(scoring, judge, poison):
    fn = ROUTERS[scoring]
    w, bias = constants()
    compiled, ranges, counter = compile_for_any(fn, w, bias)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in sorted({*TOKENS, *around_edges(ranges)}):
            x = hidden(tokens)
            poison()
            out = compiled(x, w, bias)
            judge(fn, (x, w, bias), out, rounding=BF16)
            assert torch.equal(out, compiled(x, w, bias))
    assert counter.frame_count == 1


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*CUDAGraph.*")
def test_reduce_overhead_on_both_sides_of_an_edge(judge):
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    w, bias = constants()
    counters.clear()
    (compiled, ranges, _), codes = run_and_get_code(
        lambda: compile_for_any(sigmoid_router, w, bias, mode="reduce-overhead")
    )
    partitions = [re.findall(r"^\s*def partition_(\d+)", code, re.MULTILINE) for code in codes]
    assert all(found in ([], ["0"]) for found in partitions), partitions  # not split
    edge = ranges[0].hi
    last = ranges[-1].lo
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (edge, edge + 1, last - 1, last) * 3:  # warm, captured, replayed
            torch.compiler.cudagraph_mark_step_begin()
            x = hidden(tokens)
            out = compiled(x, w, bias).clone()
            judge(sigmoid_router, (x, w, bias), out, rounding=BF16)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_manual_capture_on_both_sides_of_an_edge(judge):
    w, bias = constants()
    compiled, ranges, _ = compile_for_any(sigmoid_router, w, bias)
    for tokens in around_edges(ranges):
        x = hidden(tokens)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compiled(x, w, bias)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x, w, bias)
        for _ in range(2):
            x.copy_(hidden(tokens))
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            judge(sigmoid_router, (x, w, bias), out, rounding=BF16)


# --- serving --------------------------------------------------------------------------------------


def test_ten_thousand_calls_of_random_size(judge):
    w, bias = constants()
    compiled, ranges, counter = compile_for_any(sigmoid_router, w, bias)
    draw = random.Random(0)
    most = 2 * ranges[-1].lo
    pool = hidden(most)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for r in ranges:  # what a library allocates at its first call is not growth
            x = pool[: min(r.hi or most, most)]
            judge(sigmoid_router, (x, w, bias), compiled(x, w, bias), rounding=BF16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for i in range(10_000):
            tokens = int(2 ** draw.uniform(0, most.bit_length() - 1))
            out = compiled(pool[:tokens], w, bias)
            if i % 500 == 0:
                judge(sigmoid_router, (pool[:tokens], w, bias), out, rounding=BF16)
        del out
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    assert counter.frame_count == 1


# --- ahead of time --------------------------------------------------------------------------------

BUILD = """
import sys, torch, torch.nn.functional as F
import inductor_ext
from inductor_ext import report

which, path, cases = sys.argv[1:]
torch.manual_seed(0)

class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = (torch.randn(256, 7168, device="cuda") * 7168**-0.5).bfloat16()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return torch.sigmoid(F.linear(x, self.weight).float())

def draw(tokens):
    return torch.randn(tokens, 7168, device="cuda").bfloat16()

model = Router()
tokens = torch.export.Dim("tokens", min=2, max=4096)
if which == "stock":
    inductor_ext.disable()
lean = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
with report.collect() as decisions, torch.no_grad():
    program = torch.export.export(model, (draw(64),), dynamic_shapes=({0: tokens},))
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=lean)
ranges = [(r.hi, r.chosen) for d in decisions for r in d.ranges]
if which == "ours":
    assert decisions[0].fired and len(ranges) > 2, decisions
sizes = sorted({2, 7, 700, 4096, *(t for hi, _ in ranges[:-1] for t in (hi, hi + 1))})
inputs = [draw(t) for t in sizes]
with torch.no_grad():
    wide = [torch.sigmoid(x.double() @ model.weight.double().t()) for x in inputs]
    torch.save([inputs, wide, [model(x) for x in inputs], ranges], cases)
"""

LOAD = """
import sys, torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "inductor_ext":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
which, path, cases = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(path)
*cases, ranges = torch.load(cases)

def run(x):
    out = loaded(x)
    return out[0] if isinstance(out, (list, tuple)) else out

def kernels(x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(x)
        torch.cuda.synchronize()
    on_card = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return frozenset(e.name for e in on_card if not e.name.startswith("Mem"))

ran = {}
for x, wide, eager in zip(*cases, strict=True):
    got = run(x)
    error, allowed = ((t.double() - wide).abs().max().item() for t in (got, eager))
    assert got.shape == eager.shape and got.dtype == eager.dtype
    assert error <= 2 * allowed + 2**-9, (len(x), error, allowed)
    assert torch.equal(got, run(x))
    chosen = next((c for hi, c in ranges if hi is None or len(x) <= hi), "stock")
    ran.setdefault(chosen, []).append(kernels(x))
print(ran)
if which == "ours":  # each range runs kernels of its own
    assert set(ran) == {chosen for _, chosen in ranges} and len(ran) > 2
    assert all(all(found) for found in ran.values())
    of = list(ran.values())
    assert not any(set(a) & set(b) for i, a in enumerate(of) for b in of[:i])
assert "inductor_ext" not in sys.modules
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_package_with_a_dynamic_dimension_runs_without_the_plugin(check_package):
    check_package(BUILD, LOAD)


# --- max-autotune ---------------------------------------------------------------------------------


def relu_mm(a, b):
    return torch.relu(a @ b)


def test_max_autotune_measures_the_ranges_of_a_dynamic_site(judge, own_caches):
    b = (torch.randn(4096, 32, device="cuda") / 64).to(BF16)

    def compiled_for(rows):
        torch._dynamo.reset()
        x = torch.randn(rows, 4096, device="cuda").to(BF16)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
        program = torch.compile(relu_mm, mode="max-autotune-no-cudagraphs")
        # A program out of Inductor's cache would decide nothing.
        again = torch._inductor.config.patch(fx_graph_cache=False)
        with again, report.collect() as decisions:
            program(x, b)
        return program, decisions[0]

    program, decision = compiled_for(8)
    assert decision.fired and decision.source == "measured", decision
    times = {c.name: c.us for c in decision.candidates}
    assert times["stock"] and all(times[r.chosen] for r in decision.ranges), decision
    for rows in sorted({2, 3, 16, *around_edges(decision.ranges)}):
        x = torch.randn(rows, 4096, device="cuda").to(BF16)
        judge(relu_mm, (x, b), program(x, b))
    _, again = compiled_for(12)  # remembered
    assert [(r.lo, r.hi, r.chosen) for r in again.ranges] == [
        (r.lo, r.hi, r.chosen) for r in decision.ranges
    ]


# --- plans ----------------------------------------------------------------------------------------


def test_what_is_tuned_is_compiled_without_measuring(judge, own_caches, monkeypatch, tmp_path):
    a = torch.randn(16, 4096, device="cuda").to(BF16)
    b = (torch.randn(4096, 32, device="cuda") / 64).to(BF16)
    plan = inductor_ext.tune(relu_mm, a, b, dims={"a.0": (1, 16)}, progress=False, max_ranges=3)
    (entry,) = plan.entries
    assert plan.card == torch.cuda.get_device_name() and 1 <= len(entry.boxes) <= 3
    assert all(box.times for box in entry.boxes), entry
    assert dict(entry.boxes[0].bounds)["m"][0] == 1 and dict(entry.boxes[-1].bounds)["m"][1] == 16
    plan.save(tmp_path / "plan.json")

    def measuring(*args, **kwargs):
        raise AssertionError("something was measured")

    monkeypatch.setattr(measure, "compare", measuring)
    monkeypatch.setattr(measure, "capture", measuring)
    inductor_ext.load_plan(tmp_path / "plan.json")
    try:
        for rows in (2, 16):  # a product of one row is no matrix product when it gets here
            torch._dynamo.reset()
            x = torch.randn(rows, 4096, device="cuda").to(BF16)
            with report.collect() as decisions:
                out = torch.compile(relu_mm, mode="max-autotune-no-cudagraphs", dynamic=False)(x, b)
            (decision,) = decisions
            assert decision.source == "plan", decision
            assert decision.chosen == plan.lookup(entry.key, {"m": rows})
            judge(relu_mm, (x, b), out)
        torch._dynamo.reset()
        x = a.clone()
        torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
        with report.collect() as decisions:
            out = torch.compile(relu_mm)(x, b)
        judge(relu_mm, (x, b), out)
        (decision,) = decisions
        chosen = {r.chosen for r in decision.ranges} or {decision.chosen}
        assert chosen <= {box.choice for box in entry.boxes}, decision
    finally:
        inductor_ext.unload_plan()
