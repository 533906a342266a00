"""What is fused into the sum over the splits: the code, and its numbers in Triton's interpreter."""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F

import inductor_ext
from inductor_ext.testing import assert_golden, compile_for, outline, run_interpreted

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
M, N, K = 16, 24, 2048


def r(*size, dtype=BF16):
    return torch.randn(size).to(dtype)


def gelu_tanh(x, w):
    return F.gelu(x @ w, approximate="tanh")


def residual(x, w, bias, skip):
    return F.gelu(F.linear(x, w.t(), bias)) + skip


def fp8(x, w, scale):
    return ((x @ w).float() * scale).clamp(-448, 448).to(FP8)


def fp8_and_its_source(x, w, scale):
    y = torch.relu(x @ w)
    return y, (y.float() * scale).clamp(-448, 448).to(FP8)


def two_outputs(x, w):
    y = x @ w
    return torch.sigmoid(y), torch.tanh(y)


def consumers(x, w, gate):
    y = x @ w
    return torch.relu(y) + gate, y * 2, torch.tanh(y) - gate


def long_chain(x, w, bias, gate):
    y = torch.addmm(bias, x, w)
    y = F.silu(y) * gate
    y = torch.sigmoid(y.float() * 0.5).sqrt() - y.abs().clamp(max=3)
    return torch.where(y > 0, y, y * 0.1).to(torch.float16)


# name: (function, makes what comes after x and w)
POINTWISE = {
    "nothing": (lambda x, w: x @ w, ()),
    "bias": (lambda x, w, b: F.linear(x, w.t(), b), ((N,),)),
    "bias of a column": (lambda x, w, b: torch.addmm(b, x, w, alpha=0.5, beta=2), ((M, 1),)),
    "bias of one": (lambda x, w, b: torch.addmm(b, x, w), ((1,),)),
    "relu": (lambda x, w: torch.relu(x @ w), ()),
    "gelu": (lambda x, w: F.gelu(x @ w), ()),
    "gelu tanh": (gelu_tanh, ()),
    "silu": (lambda x, w: F.silu(x @ w), ()),
    "sigmoid": (lambda x, w: torch.sigmoid(x @ w), ()),
    "tanh": (lambda x, w: torch.tanh(x @ w), ()),
    "clamp": (lambda x, w: (x @ w).clamp(-1, 1), ()),
    "scaling": (lambda x, w: (x @ w) * 0.125, ()),
    "scaling by a tensor": (lambda x, w, s: (x @ w) * s, ((),)),
    "residual": (residual, ((N,), (M, N))),
    "gating": (lambda x, w, g: F.silu(x @ w) * g, ((M, N),)),
    "gating by a transposed view": (lambda x, w, g: torch.tanh(x @ w) * g.t(), ((N, M),)),
    "cast to fp32": (lambda x, w: (x @ w).float(), ()),
    "cast to fp16": (lambda x, w: torch.relu(x @ w).half(), ()),
    "fp8 with a scale": (fp8, ((),)),
    "fp8 and its source": (fp8_and_its_source, ((),)),
    "two outputs": (two_outputs, ()),
    "several consumers": (consumers, ((M, N),)),
    "a long chain": (long_chain, ((N,), (M, N))),
}


def row(fn):
    return lambda x, w: fn((x @ w).float())


def rms_norm(x, w, weight):
    y = (x @ w).float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(BF16) * weight


ROWWISE = {
    "softmax": (row(lambda y: y.softmax(-1)), ()),
    "log softmax": (row(lambda y: y.log_softmax(-1)), ()),
    "rms norm": (row(lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)), ()),
    "rms norm with weight": (rms_norm, ((N,),)),
    "layer norm": (lambda x, w, g: F.layer_norm(x @ w, (N,), g), ((N,),)),
    "largest score": (lambda x, w: torch.sigmoid(x @ w).amax(-1), ()),
    "router": (lambda x, w, b: (F.linear(x, w.t(), b).float()).softmax(-1).amax(-1), ((N,),)),
}
CASES = POINTWISE | ROWWISE


@functools.cache
def compiled(case):
    torch.manual_seed(0)
    fn, sizes = CASES[case]
    args = (
        r(M, K),
        r(K, N) * K**-0.5,
        *(r(*s, dtype=torch.float32 if s == () else BF16) for s in sizes),
    )
    return fn, args, compile_for("h200", fn, *args)


def kinds(code):
    return [k.kind for k in code.kernels]


@pytest.mark.codegen
@pytest.mark.parametrize("case", POINTWISE)
def test_pointwise_is_two_kernels(case):
    *_, code = compiled(case)
    assert kinds(code) == ["template", "template"] and len(code.calls) == 2, outline(code)
    assert [d.fired for d in code.decisions] == [True]


@pytest.mark.codegen
@pytest.mark.parametrize("case", ROWWISE)
def test_row_local_reduction_is_two_kernels(case):
    *_, code = compiled(case)
    assert kinds(code) == ["template", "persistent_reduction"] and len(code.calls) == 2
    assert code.decisions[0].chosen.endswith("_rowwise")
    assert "row reduction" in code.decisions[0].reason


@pytest.mark.codegen
@pytest.mark.parametrize(("name", "cases"), [("pointwise", POINTWISE), ("rowwise", ROWWISE)])
def test_outlines(name, cases):
    """The golden names what each kernel fuses. How many loads the sum has is the heuristic's."""
    outlines = "\n".join(f"{case}: {outline(compiled(case)[2])}" for case in cases)
    assert_golden(name, re.sub(r" loads=\d+", "", outlines))


@pytest.mark.codegen
@pytest.mark.parametrize("case", CASES)
def test_numbers(case, judge):
    fn, args, code = compiled(case)
    out = run_interpreted(code, *copy.deepcopy(args))
    # A wider result still carries the rounding of the product where eager rounds it.
    narrow = out.dtype if isinstance(out, torch.Tensor) and out.dtype == FP8 else None
    judge(fn, args, out, rounding=None if narrow or case.startswith("fp8") else BF16)


def test_one_element_in_a_thread_does_the_epilogue_once():
    """The gate is read once and the result written once, in the reducer."""
    *_, code = compiled("gating")
    reducer = code.kernels[1].source
    assert reducer.count("tl.load(in_ptr") == 1 and reducer.count("tl.store(") == 1


def stock_after_the_product(fn, *args):
    """The kinds of the kernels that stock generates behind the matrix product."""
    with inductor_ext.disable():
        lines = outline(compile_for("h200", fn, *args)).splitlines()
    product = next(i for i, line in enumerate(lines) if "extern_kernels" in line)
    return [line.split()[0] for line in lines[product + 1 :]]


OWN_KERNEL = {
    "too long a row": (row(lambda y: y.softmax(-1)), (1, 40000), (40000, 9000)),
    "over columns": (row(lambda y: y.softmax(0)), (16, 2048), (2048, 64)),
    "over everything": (lambda x, w: torch.relu(x @ w).sum(), (16, 2048), (2048, 64)),
}


@pytest.mark.parametrize("case", OWN_KERNEL)
def test_other_reductions_are_kernels_of_their_own_as_in_stock(case):
    fn, *sizes = OWN_KERNEL[case]
    args = [torch.empty(*s, dtype=BF16, device="meta") for s in sizes]
    # Rows this long never split by themselves: their output fills the chip.
    force = {"decompose_k": "split.*_pdl"} if case == "too long a row" else None
    lines = outline(compile_for("h200", fn, *args, force=force)).splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names[:2] == ["[template]", "[template]"]
    assert names[2:] == stock_after_the_product(fn, *args)


def test_row_longer_than_a_persistent_program_stays_one_kernel():
    args = [torch.empty(*s, dtype=BF16, device="meta") for s in ((1, 8192), (8192, 2048))]
    code = compile_for("h200", row(lambda y: y.softmax(-1)), *args)
    assert kinds(code) == ["template", "reduction"] and len(code.calls) == 2


def test_largest_scores_of_a_router():
    """top-k is a library call in stock too; the scores it reads are finished in the reducer."""
    args = [torch.empty(*s, dtype=BF16, device="meta") for s in ((8, 7168), (256, 7168))]
    code = compile_for(
        "h200", lambda x, w: torch.topk(torch.sigmoid(F.linear(x, w).float()), 8), *args
    )
    assert kinds(code) == ["template", "template"]
    assert code.extern_calls == ["torch.ops.aten.topk.default"] and len(code.calls) == 3


def test_product_that_something_else_reads_too():
    """The product is stored for the second matmul, with relu fused beside it."""

    def fn(x, w, v):
        y = x @ w
        return torch.relu(y), y @ v

    args = [torch.empty(*s, dtype=BF16, device="meta") for s in ((16, 2048), (2048, 64), (64, 8))]
    code = compile_for("h200", fn, *args)
    assert kinds(code) == ["template", "template"] and code.extern_calls == ["extern_kernels.mm"]
    assert code.kernels[1].source.count("tl.store(") == 2
