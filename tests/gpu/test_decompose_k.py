"""Decompose-K on the card: `pytest -m gpu tests/gpu`. About two minutes on an H200."""

import copy
import shutil
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import inductor_ext
from inductor_ext import report

pytestmark = pytest.mark.gpu
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def r(*size, dtype=BF16):
    return torch.randn(size, device="cuda").to(dtype)


def weight(*size, dtype=BF16, k=None):
    return (torch.randn(size, device="cuda") * (k or size[0]) ** -0.5).to(dtype)


def integers(*size, high=5, dtype=FP32):
    """Small whole numbers around 0: their products sum exactly, whatever the order."""
    return torch.randint(-(high // 2), high // 2 + 1, size, device="cuda").to(dtype)


def relu_mm(a, b):
    return torch.relu(a @ b)


def router(x, w, bias):
    return F.linear(x, w, bias).sigmoid()


# --- numbers --------------------------------------------------------------------------------------

SHAPES = [
    (16, 16, 8192),
    (16, 16, 32768),
    (48, 48, 20480),
    (64, 64, 32768),
    (1, 2, 4096),
    (1, 257, 2053),
    (257, 17, 2053),
    (799, 17, 8192),
    (17, 17, 32749),
    (16, 16, 32776),
]


def leaky_mm(a, b):
    return F.leaky_relu(a @ b)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_shapes(m, n, k, compile_and_fire, judge, poison):
    args = r(m, k), weight(k, n)
    compiled, out = compile_and_fire(leaky_mm, *args)
    judge(leaky_mm, args, out)
    for _ in range(3):
        poison()
        assert torch.equal(compiled(*args), out)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32768), (17, 33, 2053)])
def test_dtypes(dtype, m, n, k, compile_and_fire, judge):
    args = r(m, k, dtype=dtype), weight(k, n, dtype=dtype)
    compiled, out = compile_and_fire(relu_mm, *args)
    judge(relu_mm, args, out)
    assert torch.equal(compiled(*args), out)


def test_tf32_where_the_setting_allows_it(compile_and_fire, judge):
    torch.set_float32_matmul_precision("high")
    args = r(64, 8192, dtype=FP32), weight(8192, 64, dtype=FP32)
    _, out = compile_and_fire(relu_mm, *args)
    judge(relu_mm, args, out, tf32=True)
    exact = relu_mm(*(t.double() for t in args))
    assert (out - exact).norm() / exact.norm() > 1e-5  # not ieee


@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_router(tokens, compile_and_fire, judge):
    args = r(tokens, 7168), weight(256, 7168, k=7168), r(256)
    compiled, out = compile_and_fire(router, *args)
    judge(router, args, out)
    assert torch.equal(compiled(*args), out)


def gelu_residual(x, w, bias, skip):
    return F.gelu(torch.addmm(bias, x, w, alpha=0.5, beta=2)) + skip


def fp8_and_its_source(x, w, scale):
    y = torch.relu(x @ w)
    return y, (y.float() * scale).clamp(-448, 448).to(FP8)


def softmax(x, w):
    return (x @ w).float().softmax(-1)


def rms_norm(x, w, gain):
    y = (x @ w).float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(BF16) * gain


def wide_output(x, w):
    return torch.mm(x, w, out_dtype=FP32)


def layouts(x, w):
    return x.t()[3:20, 8:8200] @ w[5:8197, 1:34]


EPILOGUES = {
    "gelu and residual": (gelu_residual, (17, 8192), (8192, 33), (17, 1), (17, 33)),
    "fp8 and its source": (fp8_and_its_source, (16, 8192), (8192, 64), ()),
    "softmax": (softmax, (64, 8192), (8192, 256)),
    "rms norm": (rms_norm, (17, 8192), (8192, 33), (33,)),
    "wide output": (wide_output, (17, 2053), (2053, 33)),
    "layouts": (layouts, (8210, 40), (8200, 40)),
}


@pytest.mark.parametrize("case", EPILOGUES)
def test_epilogues(case, compile_and_fire, judge):
    fn, x, w, *extra = EPILOGUES[case]
    args = [r(*x), weight(*w), *(r(*s, dtype=FP32 if s == () else BF16) for s in extra)]
    compiled, out = compile_and_fire(fn, *args)
    narrow = {"fp8 and its source": None, "wide output": FP32}
    judge(fn, args, out, rounding=narrow.get(case, BF16))
    again = compiled(*args)
    for first, second in zip(
        *(o if isinstance(o, tuple) else (o,) for o in (out, again)), strict=True
    ):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("batch", [2, 5])
def test_batches(batch, compile_and_fire, judge):
    args = r(batch, 1, 24), r(batch, 17, 4099), weight(batch, 4099, 24, k=4099)
    _, out = compile_and_fire(torch.baddbmm, *args)
    judge(torch.baddbmm, args, out)


def test_nan_and_inf(compile_and_fire, judge):
    a, b = r(17, 8192), weight(8192, 24)
    a[3, 5], a[4, 6], a[5, 8191] = float("nan"), float("inf"), -float("inf")
    a[6, 7], b[7, 2] = float("inf"), 0  # inf * 0

    def fn(a, b):
        y = a @ b
        return y, torch.relu(y)

    _, out = compile_and_fire(fn, a, b)
    judge(fn, (a, b), out)


def test_offsets_beyond_32_bits(compile_and_fire, judge):
    base = torch.empty(16, 1 << 28, dtype=BF16, device="cuda")  # 8 GiB
    rows = base[:, -8192:]
    rows.copy_(r(16, 8192))
    w = weight(8192, 16)
    _, out = compile_and_fire(relu_mm, rows, w)
    judge(relu_mm, (rows.contiguous(), w), out)


def test_written_into_a_slice(compile_and_fire, judge):
    def fn(out, a, b):
        out[:, 4:28] = a @ b
        return out * 1

    args = r(17, 40), r(17, 8192), weight(8192, 24)
    _, out = compile_and_fire(fn, *copy.deepcopy(args))
    judge(fn, args, out)


def test_two_devices_is_torchs_own_error():
    def message(fn):
        with pytest.raises(Exception, match="device") as error:
            fn(r(16, 8192), torch.ones(8192, 16, dtype=BF16))
        torch._dynamo.reset()
        return str(error.value)

    ours = message(torch.compile(relu_mm))
    with inductor_ext.disable():
        assert message(torch.compile(relu_mm)) == ours


def test_deterministic_algorithms(compile_and_fire, judge):
    args = r(64, 32768), weight(32768, 64)
    compiled, out = compile_and_fire(relu_mm, *args)
    judge(relu_mm, args, out)
    torch.use_deterministic_algorithms(True)
    try:
        first = compiled(*args)
        assert all(torch.equal(compiled(*args), first) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, out)


# --- how it is called -----------------------------------------------------------------------------


def test_captured_in_a_cuda_graph(compile_and_fire, judge, poison):
    args = r(16, 32768), weight(32768, 16)
    compiled, _ = compile_and_fire(relu_mm, *args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compiled(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [compiled(*args) for _ in range(4)]
    for _ in range(5):
        args[0].copy_(r(16, 32768))
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        judge(relu_mm, args, outputs[0])
        assert all(torch.equal(out, outputs[0]) for out in outputs)
        assert torch.equal(compiled(*args), outputs[0])


def test_reduce_overhead(compile_and_fire, judge):
    counters.clear()
    args = r(16, 8192), weight(8192, 16)
    compiled, _ = compile_and_fire(relu_mm, *args, mode="reduce-overhead")
    for _ in range(6):
        args = r(16, 8192), args[1]
        torch.compiler.cudagraph_mark_step_begin()
        judge(relu_mm, args, compiled(*args).clone())
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_several_streams_and_threads(compile_and_fire):
    w = weight(8192, 64)
    inputs = [r(64, 8192) for _ in range(4)]
    compiled, _ = compile_and_fire(relu_mm, inputs[0], w)
    expected = [compiled(x, w) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    outputs = [[] for _ in inputs]

    # One thread that feeds all streams in turn.
    for _ in range(50):
        for x, stream, out in zip(inputs, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                out.append(compiled(x, w))
    torch.cuda.synchronize()
    for out, want in zip(outputs, expected, strict=True):
        assert all(torch.equal(o, want) for o in out)

    # A thread for each stream.
    failures = []

    def work(x, stream, want):
        try:
            with torch.cuda.stream(stream):
                mine = [compiled(x, w) for _ in range(50)]
            stream.synchronize()
            if not all(torch.equal(o, want) for o in mine):
                failures.append("a result differs")
        except Exception as error:
            failures.append(repr(error))

    threads = [
        threading.Thread(target=work, args=a) for a in zip(inputs, streams, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_two_programs_in_turn(compile_and_fire):
    args = [(r(16, 8192), weight(8192, 16)), (r(64, 8192), weight(8192, 64))]
    programs = [
        compile_and_fire(relu_mm, *args[0])[0],
        compile_and_fire(lambda a, b: torch.tanh(a @ b), *args[1])[0],
    ]
    expected = [program(*a) for program, a in zip(programs, args, strict=True)]
    outputs = [(programs[0](*args[0]), programs[1](*args[1])) for _ in range(50)]
    for pair in outputs:
        assert torch.equal(pair[0], expected[0]) and torch.equal(pair[1], expected[1])


def test_memory_does_not_grow(compile_and_fire):
    args = r(64, 32768), weight(32768, 64)
    compiled, _ = compile_and_fire(relu_mm, *args)
    for _ in range(3):
        compiled(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        compiled(*args)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


# --- programmatic dependent launch ----------------------------------------------------------------


def dependent_chain(x, w):
    """Each product reads, through a producer of its own, what the one before it wrote."""
    state = torch.zeros(16, 16, device=x.device)
    for _ in range(6):
        a = (torch.remainder(x + state.repeat(1, x.shape[1] // 16), 5.0) - 2).to(BF16)
        state = torch.remainder(torch.mm(a, w, out_dtype=FP32), 7.0) - 3
    return state


def back_to_back(x, w):
    """Products one behind the other, whose partial products share memory."""
    return tuple(torch.mm(x[i], w, out_dtype=FP32) + 1 for i in range(6))


@pytest.mark.parametrize("fn", [dependent_chain, back_to_back])
def test_no_race_between_kernels(fn, compile_and_fire):
    """Whole numbers are exact in any order, so the smallest race shows as a difference."""
    size = (16, 8192) if fn is dependent_chain else (6, 16, 8192)
    dtype = FP32 if fn is dependent_chain else BF16
    w = integers(8192, 16, dtype=BF16)
    inputs = [integers(*size, dtype=dtype) for _ in range(40)]
    expected = [fn(x, w) for x in inputs]
    compiled, _ = compile_and_fire(fn, inputs[0], w)

    def same(outputs):
        flat = [o for out in outputs for o in (out if isinstance(out, tuple) else (out,))]
        want = [o for out in expected for o in (out if isinstance(out, tuple) else (out,))]
        return all(torch.equal(a, b) for a, b in zip(flat, want, strict=True))

    for _ in range(5):
        assert same([compiled(x, w) for x in inputs])  # enqueued without waiting
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [compiled(x, w) for x in inputs]
    for _ in range(20):
        for out in outputs:
            for o in out if isinstance(out, tuple) else (out,):
                o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same(outputs)


def test_pdl_is_used_and_changes_no_bit(compile_and_fire):
    args = integers(64, 8192, dtype=BF16), integers(8192, 64, dtype=BF16)
    with report.collect() as decisions:
        _, on = compile_and_fire(wide_output, *args)
    torch._dynamo.reset()
    with inductor_ext.config.patch(pdl=False):
        _, off = compile_and_fire(wide_output, *args)
    major, _ = torch.cuda.get_device_capability()
    assert ("_pdl" in decisions[0].chosen) == (major >= 9)
    assert torch.equal(on, off)


# --- the compilers around it ----------------------------------------------------------------------


def test_backward():
    """The weight's gradient over 16384 tokens is compiled in autograd's thread."""
    layer = torch.nn.Linear(16, 64, device="cuda", dtype=BF16)
    x = r(16384, 16).requires_grad_()
    upstream = r(16384, 64)

    def gradients(call, layer, x, upstream):
        leaves = (x, *layer.parameters())
        return torch.autograd.grad(call(x), leaves, upstream)

    def model(x):
        return layer(x) * 2

    with report.collect() as decisions:
        got = gradients(torch.compile(model), layer, x, upstream)
    fired = [d.sites for d in decisions if d.fired]
    assert any("[64,16384]x[16384,16]" in site for site in fired), decisions
    eager = gradients(model, layer, x, upstream)
    wide = copy.deepcopy(layer).double()
    exact = gradients(
        lambda x: wide(x) * 2, wide, x.detach().double().requires_grad_(), upstream.double()
    )
    for g, e, reference in zip(got, eager, exact, strict=True):
        verdict = inductor_ext.measure.check(g, reference, e)
        assert verdict.ok, verdict.reason


def test_autocast():
    def model(x, w, b):
        with torch.autocast("cuda", dtype=BF16):
            return torch.relu(F.linear(x, w, b))

    args = r(8, 7168, dtype=FP32), weight(256, 7168, dtype=FP32, k=7168), r(256, dtype=FP32)
    with report.collect() as decisions:
        out = torch.compile(model)(*args)
    assert decisions[0].fired and "bfloat16" in decisions[0].sites
    # What autocast rounds on the way in is the caller's wish.
    rounded = [t.to(BF16).double() for t in args]
    verdict = inductor_ext.measure.check(out, torch.relu(F.linear(*rounded)), model(*args))
    assert out.dtype == BF16 and verdict.ok, verdict.reason


def test_one_graph_for_every_number_of_rows(judge):
    w, b = weight(256, 7168, k=7168), r(256)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(router, backend=counter)
    with report.collect() as decisions:
        for m in (8, 2, 16, 17, 64, 200, 256):
            x = r(m, 7168)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=256)
            judge(router, (x, w, b), compiled(x, w, b))
    assert counter.frame_count == 1
    assert [d.fired for d in decisions] == [True]


def test_unbounded_rows_are_dispatched_by_range(judge):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(relu_mm, backend=counter, dynamic=True)
    w = weight(8192, 16)
    with report.collect() as decisions:
        for m in (8, 16, 3000):
            x = r(m, 8192)
            judge(relu_mm, (x, w), compiled(x, w))
    assert counter.frame_count == 1
    (decision,) = decisions
    assert decision.fired and decision.ranges[-1].hi is None
    assert decision.ranges[-1].chosen == "stock" != decision.ranges[0].chosen


def test_explain():
    args = r(16, 8192), weight(8192, 16)
    explained = inductor_ext.explain(relu_mm, *args)
    (decision,) = explained.decisions
    assert decision.fired and decision.source == "heuristic" and decision.candidates
    assert "inductor_ext decisions" in str(explained)
    (left,) = inductor_ext.explain(relu_mm, r(16, 256), weight(256, 16)).decisions
    assert not left.fired and "K=256" in left.reason


def test_max_autotune(judge):
    """Everything is timed with its epilogue; what wins is right and is not slower than stock."""
    args = r(16, 8192), weight(8192, 16)
    with report.collect() as decisions:
        compiled = torch.compile(relu_mm, mode="max-autotune-no-cudagraphs")
        out = compiled(*args)
    decision = decisions[0]
    times = {c.name: c.us for c in decision.candidates}
    assert decision.source == "measured" and times["stock"] is not None
    wrong = [c for c in decision.candidates if c.us is None]
    assert not wrong, wrong
    assert times[decision.chosen] <= times["stock"] and decision.speedup >= 1
    # What is emitted is what was measured: no site inside the winner is decided anew.
    assert len(decisions) == 1, [(d.sites, d.chosen) for d in decisions]
    judge(relu_mm, args, out)
    assert torch.equal(compiled(*args), out)


@pytest.mark.parametrize("pattern", [r".*_rowwise", "bmm_split16", "split.*_w\\d+_s\\d", "stock"])
def test_forced_candidates(pattern, judge, poison):
    args = r(17, 8192), weight(8192, 33)
    poison()
    with inductor_ext.choosing.force({"decompose_k": pattern}), report.collect() as decisions:
        out = torch.compile(relu_mm)(*args)
    assert decisions[0].source == "forced" and decisions[0].fired == (pattern != "stock")
    judge(relu_mm, args, out)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def built(build):
    """``build()`` and its decisions; skips where stock cannot be built on this machine either."""
    try:
        with report.collect() as decisions:
            result = build()
    except Exception:
        torch._dynamo.reset()
        try:
            with inductor_ext.disable():
                build()
        except Exception as error:
            pytest.skip(f"stock fails here too: {inductor_ext.measure.one_line(error)}")
        raise
    # The lowering applies where the pieces allow, otherwise it says why not.
    assert decisions and all(d.fired or d.reason for d in decisions), decisions
    return result


@needs_compiler
def test_cpp_wrapper(judge):
    args = r(16, 8192), weight(8192, 16)
    compiled = torch.compile(relu_mm, options={"cpp_wrapper": True})
    judge(relu_mm, args, built(lambda: compiled(*args)))
    other = r(16, 8192), args[1]
    judge(relu_mm, other, compiled(*other))


AHEAD_OF_TIME = """
import sys, torch, torch.nn.functional as F
import inductor_ext
from inductor_ext import report

which, path, cases = sys.argv[1:]

class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(64, 7168, device="cuda").bfloat16()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return torch.relu(F.linear(x, self.weight))

def draw():
    return (torch.randn(16, 7168, device="cuda") * 7168**-0.5).bfloat16()

model = Router()
if which == "stock":
    inductor_ext.disable()
lean = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
with report.collect() as decisions:
    program = torch.export.export(model, (draw(),))
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=lean)
assert [d.fired for d in decisions] == ([] if which == "stock" else [True]), decisions
inputs = [draw() for _ in range(3)]
wide = [torch.relu(F.linear(x.double(), model.weight.double())) for x in inputs]
torch.save([inputs, wide, [model(x) for x in inputs]], cases)
"""

LOAD = """
import sys, torch
from inductor_ext import measure

which, path, cases = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(path)
for x, wide, eager in zip(*torch.load(cases), strict=True):
    verdict = measure.check(loaded(x), wide, eager)
    assert verdict.ok, verdict.reason
assert torch.equal(loaded(x), loaded(x))
"""


@needs_compiler
def test_ahead_of_time(check_package):
    check_package(AHEAD_OF_TIME, LOAD)
