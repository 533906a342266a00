"""Pointwise nodes as Triton statements: numbers as torch's, rounding as the graph has it."""

import linecache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext import scan_operations, scan_pointwise
from inductor_ext.testing import run_kernel_interpreted

N = 64


def values():
    """Floats with the special ones, positive ones, 16-bit ones, whole numbers, truth values."""
    torch.manual_seed(0)
    x = torch.randn(N)
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    y, whole = torch.randn(N), torch.randint(-5, 6, (N,))
    return {
        "x": x,
        "y": y,
        "p": y.abs() + 0.1,
        "b": x.bfloat16(),
        "i": whole,
        "i8": whole.to(torch.int8),
        "m": y > 0,
        "d": y.double(),
    }


def traced(fn, inputs):
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    given = list(graph.find_nodes(op="placeholder"))
    return graph, given, [n for n in graph.nodes if n.op == "call_function"]


def translated(fn, names):
    """(fn's result, that of its statements in the interpreter, the statements)."""
    inputs = [values()[name] for name in names]
    graph, given, nodes = traced(fn, inputs)
    text, of = scan_pointwise.translate(nodes, {n: f"x{i}" for i, n in enumerate(given)})
    out = graph.output_node().args[0]
    stored = scan_operations.stored_type(out.meta["val"].dtype)
    lines = [f"x{i} = tl.load(p{i} + o)" for i in range(len(given))]
    lines += [*text.splitlines(), f"tl.store(q + o, {of(out)}.to({stored}))"]
    pointers = ", ".join(f"p{i}" for i in range(len(given)))
    head = f"@triton.jit\ndef kernel({pointers}, q, N: tl.constexpr):"
    source = "\n    ".join([head, "o = tl.arange(0, N)", *lines])
    scope = {}
    imports = "import triton\nimport triton.language as tl\n"
    source = f"{imports}from triton.language.extra import libdevice\n{source}"
    name = f"<translation {hash(source)}>"
    linecache.cache[name] = (0, None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), scope)
    want = fn(*inputs)
    got = torch.empty(want.shape, dtype=want.dtype)
    run_kernel_interpreted(scope["kernel"], (1,), *inputs, got, N=N)
    return want, got, text


CASES = {
    "relu": (lambda x: x.relu() * 2 - 1, "x"),
    "relu_8_bit": (lambda x: x.relu() * 100, "i8"),
    "maximum_nan": (lambda y, x: torch.maximum(y, x), "y x"),
    "minimum_nan": (lambda x, y: torch.minimum(x, y), "x y"),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), "x"),
    "clamp_8_bit": (lambda x: x.clamp(min=-1), "i8"),
    "where": (lambda x: torch.where(x > 0, x, -1.0), "x"),
    "int_times_float": (lambda i, y: i * y, "i y"),
    "int_times_number": (lambda i: i * 2.5, "i"),
    "int_over_int": (lambda i: i / 3, "i"),
    "floored": (lambda i: i // 3 + i % 3, "i"),
    "wraps_around": (lambda i: i * 100 + 3, "i8"),
    "logic": (lambda i: (i > 2) | (i < -4), "i"),
    "not": (lambda i: torch.logical_not(i), "i"),
    "invert": (lambda m: ~m, "m"),
    "invert_whole": (lambda i: ~i, "i"),
    "bool_times_int": (lambda m, i: m * i, "m i"),
    "bool_to_float": (lambda m: m.float(), "m"),
    "compare_mixed": (lambda y, i: y > i, "y i"),
    "compare_16_bit": (lambda b: b > 0.3, "b"),
    "alpha": (lambda x, y: torch.add(x, y, alpha=3), "x y"),
    "number_minus": (lambda x: 2 - x, "x"),
    "reciprocal": (lambda p: 1 / p, "p"),
    "exponentials": (lambda y: torch.sigmoid(y) + torch.exp(y) + y.tanh(), "y"),
    "logarithms": (lambda p: torch.log(p) + torch.log1p(p) + p.rsqrt(), "p"),
    "powers": (lambda p: p**3 + p**2 + p**4 + p**0.5, "p"),
    "power": (lambda p: p**2.5, "p"),
    "sign": (lambda y: y.sign() + y.abs(), "y"),
    "special": (lambda x: x.isnan() | x.isinf(), "x"),
    "double": (lambda d: d * 0.1 + 1 / 3, "d"),
    "to_double": (lambda y: y.double() * 0.1, "y"),
    "to_int": (lambda y: y.to(torch.int64), "y"),
    "to_bool": (lambda i: i.to(torch.bool), "i"),
    "addcmul": (lambda y: torch.addcmul(y, y, y, value=0.5), "y"),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(name):
    fn, names = CASES[name]
    want, got, _ = translated(fn, names.split())
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_a_conversion_to_16_bits_rounds_and_arithmetic_in_16_bits_does_not():
    want, got, text = translated(lambda x: x.bfloat16().float() * 3, ["x"])
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert text.count("tl.bfloat16") == 1
    want, got, text = translated(lambda b: (b * 1.37 + 0.11).float(), ["b"])
    assert "tl.bfloat16" not in text
    exact = values()["b"].float() * 1.37 + 0.11
    torch.testing.assert_close(got, exact, equal_nan=True)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda i: i // -3, "i"),
        (lambda i: i << 2, "i"),
        (lambda x: x.cumsum(0), "x"),
        (lambda x: torch.special.erfinv(x), "x"),
        (lambda x: x.to(torch.float8_e5m2).float(), "x"),
        (lambda x: x + torch.randn_like(x), "x"),
    ],
)
def test_what_is_not_known_is_not_translated(fn, name):
    _, given, nodes = traced(fn, [values()[name]])
    with pytest.raises(scan_operations.Unknown):
        scan_pointwise.translate(nodes, {n: f"x{i}" for i, n in enumerate(given)})


def test_a_combine_function_is_a_text_of_states():
    a = [torch.rand(3), torch.rand(3).bfloat16()]
    graph, *_ = traced(lambda p, q, r, s: [p * r, (r * q + s).to(q.dtype)], [*a, *a])
    text = scan_pointwise.combine(graph)
    assert text.splitlines()[-2].startswith("r0 = ") and text.splitlines()[-1].startswith("r1 = ")
    scope = {}
    body = text.replace(".to(tl.bfloat16)", ".bfloat16()").replace(".to(tl.float32)", ".float()")
    exec(body, scope | dict(a0=a[0], a1=a[1], b0=a[0], b1=a[1]), scope)
    assert torch.equal(scope["r0"], a[0] * a[0])


def test_a_combine_that_changes_a_dtype_has_no_text():
    graph, *_ = traced(lambda p, q: [(p > q).float().double()], [torch.rand(3), torch.rand(3)])
    with pytest.raises(scan_operations.Unknown, match=r"from torch\.float32 to torch\.float64"):
        scan_pointwise.combine(graph)
