"""The generated kernels' numbers, run in Triton's interpreter and judged by fp64."""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from inductor_ext.lowerings import decompose_k_candidates as decompose_k

from inductor_ext.testing import compile_for, run_interpreted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def r(*size, dtype=BF16):
    return torch.randn(size).to(dtype)


def weight(*size, dtype=BF16, k=None):
    """Entries of scale K**-0.5, so that the product is of scale 1."""
    return (torch.randn(size) * (k or size[0]) ** -0.5).to(dtype)


def relu_mm(a, b):
    return torch.relu(a @ b)


SIZES = [
    (1, 2, 2048),
    (1, 257, 1100),
    (257, 1, 1100),
    (17, 17, 2048),
    (33, 257, 1031),
    (16, 16, 2053),
    (1, 17, 32749),
    (16, 16, 8200),
    (64, 64, 2048),
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_sizes(m, n, k, compile_and_judge):
    compile_and_judge(lambda a, b: torch.sigmoid(a @ b), (r(m, k), weight(k, n)))


@pytest.mark.parametrize("splits", [2, 3, 5, 7])
def test_even_sizes_with_any_number_of_splits(splits, compile_and_judge):
    """Where no mask is needed the kernel must not name one."""
    compile_and_judge(relu_mm, (r(16, 1024 + 16 * splits), weight(1024 + 16 * splits, 16)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 2048), (17, 33, 2053)])
def test_dtypes(dtype, m, n, k, compile_and_judge):
    compile_and_judge(relu_mm, (r(m, k, dtype=dtype), weight(k, n, dtype=dtype)))


def test_wider_output(compile_and_judge):
    """The sum is not rounded to 16 bits on its way: as good as an fp32 accumulation."""
    code = compile_and_judge(
        lambda a, b: torch.mm(a, b, out_dtype=FP32), (r(17, 2053), weight(2053, 19)), rounding=FP32
    )
    assert len(code.calls) == 2


A, B = (17, 2048), (2048, 24)
LAYOUTS = {
    "row": (lambda a, b: a @ b, A, B),
    "column a": (lambda a, b: a.t() @ b, A[::-1], B),
    "column b": (lambda a, b: a @ b.t(), A, B[::-1]),
    "both columns": (lambda a, b: a.t() @ b.t(), A[::-1], B[::-1]),
    "sliced": (lambda a, b: a[:, 8:2056] @ b[8:2056, 4:28], (17, 2064), (2060, 40)),
    "unaligned slices": (lambda a, b: a[:, 3:2051] @ b[1:2049, 5:29], (17, 2053), (2050, 31)),
    "every second": (lambda a, b: a[::2, ::2] @ b[::2, ::3], (34, 4096), (4096, 72)),
    "expanded rows": (lambda a, b: a.expand(17, -1) @ b, (1, 2048), B),
    "expanded columns": (lambda a, b: a @ b.expand(-1, 24), A, (2048, 1)),
    "expanded K": (lambda a, b: a.expand(-1, 2048) @ b, (17, 1), B),
    "three dimensions": (lambda a, b: a @ b, (2, 5, 2048), B),
    "permuted": (lambda a, b: a.permute(1, 0, 2).reshape(10, 2048) @ b, (5, 2, 2048), B),
    "computed": (lambda a, b: a.sin() @ b.cos(), A, B),
    "flipped": (lambda a, b: a.flip(1) @ b.flip(0), A, B),
    "concatenated": (lambda a, b: torch.cat([a, a], 1) @ torch.cat([b, b]), (17, 1024), (1024, 24)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, compile_and_judge):
    fn, *sizes = LAYOUTS[layout]
    compile_and_judge(fn, tuple(r(*s) * 0.2 for s in sizes))


def test_offset_views_of_one_storage(compile_and_judge):
    base = r(40 * 2048) * 0.2
    a = base.as_strided((17, 2048), (2048, 1), 5 * 2048)
    b = base.as_strided((2048, 16), (1, 2048), 3)  # overlaps a, not 16-byte aligned
    compile_and_judge(relu_mm, (a, b))


def test_one_tensor_twice(compile_and_judge):
    compile_and_judge(lambda a: a @ a.t(), (r(17, 2048) * 0.02,))


def test_written_into_a_slice(compile_and_judge):
    def fn(out, a, b):
        out[:, 4:28] = a @ b
        return out

    compile_and_judge(fn, (r(17, 40), r(17, 2048), weight(2048, 24)))


def test_in_place(compile_and_judge):
    def fn(out, a, b):
        out.addmm_(a, b, alpha=0.5)
        return out * 2

    compile_and_judge(fn, (r(17, 24), r(17, 2048), weight(2048, 24)))


def test_transposed_result(compile_and_judge):
    compile_and_judge(
        lambda a, b: torch.relu(a @ b).t().contiguous(), (r(17, 2048), weight(2048, 24))
    )


BIASES = {
    "[N]": ((24,), {}),
    "[1]": ((1,), {}),
    "[]": ((), {}),
    "[M,1]": ((17, 1), {"alpha": 0.5, "beta": 2}),
    "[1,N]": ((1, 24), {"beta": -1.5}),
    "[M,N]": ((17, 24), {"alpha": -3}),
}


@pytest.mark.parametrize("bias", BIASES)
def test_addmm(bias, compile_and_judge):
    size, factors = BIASES[bias]
    fn = functools.partial(torch.addmm, **factors)
    compile_and_judge(lambda c, a, b: fn(c, a, b), (r(*size), r(17, 2048), weight(2048, 24)))


def test_beta_zero_ignores_a_nan_bias(compile_and_judge):
    bias = torch.full((17, 24), float("nan"), dtype=BF16)
    compile_and_judge(
        lambda c, a, b: torch.addmm(c, a, b, beta=0), (bias, r(17, 2048), weight(2048, 24))
    )


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_bmm(batch, compile_and_judge):
    args = (r(batch, 17, 2053), weight(batch, 2053, 24, k=2053))
    compile_and_judge(lambda a, b: torch.bmm(a, b).tanh(), args)


def test_bmm_of_views(compile_and_judge):
    args = (r(17, 3, 2048), weight(1, 24, 2048, k=2048))
    compile_and_judge(lambda a, b: a.transpose(0, 1) @ b.expand(3, -1, -1).mT, args)


@pytest.mark.parametrize("size", [(24,), (2, 1, 24), (2, 17, 24)])
def test_baddbmm(size, compile_and_judge):
    args = (r(*size), r(2, 17, 2048), weight(2, 2048, 24, k=2048))
    compile_and_judge(lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5, beta=2), args)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_nan_and_inf_end_where_eager_puts_them(dtype, compile_and_judge):
    a, b = r(17, 2053, dtype=dtype), weight(2053, 24, dtype=dtype)
    a[3, 5], a[4, 6], a[5, 2052], a[6, 100] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        float("inf"),
    )
    a[6, 101] = -float("inf")  # inf - inf, or inf + inf, by the signs of b
    b[7, 2] = 0
    a[7, 7] = float("inf")  # inf * 0
    compile_and_judge(lambda a, b: (a @ b, torch.relu(a @ b)), (a, b))


def test_inf_beyond_fp16(compile_and_judge):
    a, b = torch.full((17, 2048), 30.0, dtype=FP16), torch.full((2048, 24), 30.0, dtype=FP16)
    compile_and_judge(lambda a, b: a @ b, (a, b))  # 1.8e6: inf in fp16, as in eager


def test_cancellation(compile_and_judge):
    """Large terms of both signs: the partial products must stay in fp32."""
    a, b = r(17, 2048), torch.ones(2048, 24, dtype=BF16)
    a[:, ::2] = 256.0
    a[:, 1::2] = -256.0
    a[:, 7] = 1.0
    compile_and_judge(lambda a, b: a @ b, (a, b))


@pytest.mark.parametrize("fn", [relu_mm, lambda a, b: (a @ b).float().softmax(-1)])
def test_same_bits_every_run(fn):
    args = (r(17, 2053), weight(2053, 24))
    code = compile_for("h200", fn, *args)
    first, second = (run_interpreted(code, *copy.deepcopy(args)) for _ in range(2))
    assert torch.equal(first, second)
    assert "tl.atomic" not in code.source


def test_the_result_is_the_exact_sum_of_the_splits_in_fp32():
    """Small integers are exact in any order: not one element may be off by anything."""
    a = torch.randint(-4, 5, (17, 2053)).to(BF16)
    b = torch.randint(-4, 5, (2053, 24)).to(BF16)
    code = compile_for("h200", lambda a, b: torch.mm(a, b, out_dtype=FP32), a, b)
    assert torch.equal(run_interpreted(code, a, b), (a.double() @ b.double()).float())


# --- dynamic sizes --------------------------------------------------------------------------------


def linear_relu(x, w, b):
    return torch.relu(F.linear(x, w, b))


def test_dynamic_rows(judge):
    w, b = weight(24, 1500, k=1500), r(24)
    code = compile_for("h200", linear_relu, r(8, 1500), w, b, dynamic={0: {0: (2, 130)}})
    assert code.decisions[0].fired and code.frames == 1
    for m in (2, 16, 33, 130):
        args = (r(m, 1500), w, b)
        judge(linear_relu, args, run_interpreted(code, *args))


def test_dynamic_columns(judge):
    a = r(16, 2048)
    code = compile_for("h200", relu_mm, a, weight(2048, 24), dynamic={1: {1: (2, 128)}})
    assert code.decisions[0].fired
    for n in (2, 17, 100):
        args = (a, weight(2048, n))
        judge(relu_mm, args, run_interpreted(code, *args))


@pytest.mark.parametrize("rowwise", [False, True])
def test_dynamic_k(rowwise, judge):
    """Shorter and longer than traced, down to splits with nothing in them."""
    fn = (lambda a, b: (a @ b).float().softmax(-1)) if rowwise else relu_mm
    code = compile_for(
        "h200", fn, r(16, 2048), weight(2048, 24), dynamic={0: {1: None}, 1: {0: None}}
    )
    assert code.decisions[0].fired
    for k in (2, 1500, 5001):
        args = (r(16, k), weight(k, 24))
        judge(fn, args, run_interpreted(code, *args), rounding=BF16)


def test_dynamic_batch(judge):
    code = compile_for(
        "h200", torch.bmm, r(2, 16, 2048), r(2, 2048, 24), dynamic={0: {0: (2, 6)}, 1: {0: (2, 6)}}
    )
    assert code.decisions[0].fired
    for batch in (2, 5):
        args = (r(batch, 16, 2048), weight(batch, 2048, 24, k=2048))
        judge(torch.bmm, args, run_interpreted(code, *args))


# --- training -------------------------------------------------------------------------------------


def test_gradients():
    """The weight's gradient is a skinny product of 2048 tokens; both are judged."""
    layer = torch.nn.Linear(16, 24)
    x = r(2048, 16, dtype=FP32).requires_grad_()
    code = compile_for("h200", lambda x: layer(x).relu(), x, grad=True)
    assert [d.sites.split()[0] for d in code.decisions if d.fired] == ["mm"]
    upstream = r(2048, 24, dtype=FP32)
    _, gradients = run_interpreted(code, x, grad_outputs=[upstream])
    wide = copy.deepcopy(layer).double()
    x64 = x.detach().double().requires_grad_()
    wide(x64).relu().backward(upstream.double())
    expected = {"args[0]": x64.grad, "layer.weight": wide.weight.grad, "layer.bias": wide.bias.grad}
    assert gradients.keys() == expected.keys()
    for name, reference in expected.items():
        error = (gradients[name].double() - reference).norm() / reference.norm()
        assert error <= 1e-5, name


# --- other choices than the heuristic's -----------------------------------------------------------


@functools.cache
def candidate_names(m, n, k, batch=None):
    lead = () if batch is None else (batch,)
    args = [torch.empty(*lead, *s, dtype=BF16, device="meta") for s in ((m, k), (k, n))]
    decision = compile_for("h200", torch.matmul, *args).decisions[0]
    return [c.name for c in decision.candidates if c.name != "stock"]


@pytest.mark.parametrize("index", range(20))
def test_every_candidate(index, compile_and_judge):
    names = candidate_names(5, 7, 1040)
    if index >= len(names):
        pytest.skip(f"there are {len(names)} candidates")
    force = {"decompose_k": re.escape(names[index])}
    code = compile_and_judge(relu_mm, (r(5, 1040), weight(1040, 7)), force=force)
    assert code.decisions[0].chosen == names[index] and code.decisions[0].source == "forced"


def test_the_report_lists_no_more_candidates_than_are_tested():
    assert len(candidate_names(5, 7, 1040)) <= 20


@pytest.mark.parametrize("pattern", [r"split\d+_\d+x\d+x\d+_w\d+_s\d", ".*_rowwise"])
def test_candidates_of_a_batch(pattern, compile_and_judge):
    args = (r(2, 17, 2053), weight(2, 2053, 40, k=2053))
    compile_and_judge(lambda a, b: (a @ b).tanh(), args, force={"decompose_k": pattern})


def test_partial_products_by_cublas_are_cublas():
    """The inner bmm is the library's: the plugin does not split it again."""
    a, b = (torch.empty(*s, dtype=BF16, device="meta") for s in ((16, 32768), (32768, 16)))
    code = compile_for("h200", relu_mm, a, b, force={"decompose_k": "bmm_split16"})
    assert "bmm" in code.extern_calls[0] and len(code.calls) == 2
    assert len(code.decisions) == 1


def test_tiling_that_nothing_picks_by_itself(monkeypatch, compile_and_judge):
    """Uneven splits, tall and wide tiles, a reducer block longer than the output."""
    tiling = decompose_k.Tiling(
        block_m=32,
        block_n=64,
        block_k=16,
        splits=7,
        num_warps=4,
        num_stages=3,
        xblock=1024,
        reduce_warps=2,
    )
    monkeypatch.setattr(decompose_k, "tilings", lambda *problem: [tiling])
    code = compile_and_judge(relu_mm, (r(17, 1500), weight(1500, 19)))
    assert code.decisions[0].chosen.startswith("split7_32x64x16")


# --- any problem ----------------------------------------------------------------------------------

EPILOGUES = {
    "none": lambda y, g: y,
    "gelu": lambda y, g: F.gelu(y),
    "gate": lambda y, g: F.silu(y) * g,
    "two": lambda y, g: (torch.sigmoid(y), y + g),
    "wide": lambda y, g: y.float() * 3 - g,
    "softmax": lambda y, g: (y.float() + g).softmax(-1),
}


def laid_out(size, layout, scale):
    rows, columns = size
    if layout == "column":
        return (torch.randn(columns, rows) * scale).to(BF16).t()
    if layout == "slice":
        return (torch.randn(rows + 3, columns + 5) * scale).to(BF16)[2 : rows + 2, 3 : columns + 3]
    return (torch.randn(rows, columns) * scale).to(BF16)


layouts = st.sampled_from(["row", "column", "slice"])


@settings(
    derandomize=True,
    max_examples=12,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failing example is small enough as it is
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(1024, 2400),
    a_layout=layouts,
    b_layout=layouts,
    epilogue=st.sampled_from(sorted(EPILOGUES)),
)
def test_any_problem(m, n, k, a_layout, b_layout, epilogue, compile_and_judge):
    assume(m * n > 1)  # one element is left to stock
    torch.manual_seed(m + 100 * n + 10000 * k)
    args = (laid_out((m, k), a_layout, 1), laid_out((k, n), b_layout, k**-0.5), r(m, n))
    finish = EPILOGUES[epilogue]
    compile_and_judge(lambda a, b, g: finish(a @ b, g), args, rounding=BF16)
