"""Generated programs compute what eager computes, on CPU tensors in Triton's interpreter."""

import pytest
import torch

from inductor_ext.testing import compile_for, interpret_source, run_interpreted

MAX = "max-autotune-no-cudagraphs"
BF16 = torch.bfloat16


def check(fn, *args, code=None, rtol=1e-5, atol=1e-5, **kwargs):
    code = code or compile_for("h200", fn, *args, **kwargs)
    with torch.no_grad():
        expected = fn(*(a.clone() for a in args))
    got = run_interpreted(code, *(a.clone() for a in args))
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    return code


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_pointwise_chain(dtype):
    def fn(x):
        y = x.float()
        y = torch.relu(y) * 2 + y.sigmoid().tanh() - torch.nn.functional.gelu(y) + y.rsqrt()
        return (y.exp() + y.erf() * y.log1p().cos()).to(x.dtype)

    check(fn, torch.rand(33, 257).to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("shape", [(17, 257), (3, 5000)])
def test_softmax_persistent_and_looped(shape):
    check(lambda x: x.softmax(-1), torch.randn(shape))


def test_layer_norm():
    check(torch.nn.LayerNorm(257), torch.randn(17, 257))
    check(lambda x: torch.nn.functional.layer_norm(x, (5000,)), torch.randn(3, 5000))


def test_reductions():
    def fn(x):
        return x.sum(), x.mean(0), x.amax(1), x.argmax(1), x.var(1), x.prod(1), x.any(0)

    check(fn, torch.randn(33, 65))


def test_scans():
    check(lambda x: (x.cumsum(1), x.cumsum(0)), torch.randn(9, 65))


def test_nan_travels_through_max():
    x = torch.randn(5, 64)
    x[2, 3] = float("nan")
    code = compile_for("h200", lambda x: x.amax(1), x)
    assert run_interpreted(code, x).isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("force", [None, {"mm": "triton_mm"}])
def test_bf16_matmul_with_epilogue(force):
    a, w = torch.randn(65, 128, dtype=BF16), torch.randn(128, 32, dtype=BF16)

    def fn(a, w):
        return torch.relu(a @ w) * 0.5

    mode = MAX if force else None
    code = check(fn, a, w, mode=mode, force=force, rtol=1e-2, atol=1e-2)
    assert bool(code.extern_calls) == (force is None)


def test_addmm_and_library_layout():
    check(torch.nn.Linear(64, 32).to(BF16), torch.randn(16, 64, dtype=BF16), rtol=1e-2, atol=1e-2)
    conv = torch.nn.Conv2d(3, 4, 3)
    check(lambda x: torch.relu(conv(x)), torch.randn(1, 3, 8, 8))


def test_fp8_rounds_to_nearest_and_saturates():
    x = torch.randn(1000) * 100

    def fn(x):
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float() + 1

    check(fn, x, rtol=0, atol=0)


def test_views_mutation_and_indexing():
    check(lambda x: (x[:, :10], x.t() + 1), torch.randn(17, 33))
    check(lambda i, w: w[i].sum(1), torch.randint(0, 50, (7, 5)), torch.randn(50, 64))
    x = torch.randn(17)
    code = compile_for("h200", lambda x: x.add_(1) * 2, x)
    mine = x.clone()
    torch.testing.assert_close(run_interpreted(code, mine), (x + 1) * 2)
    torch.testing.assert_close(mine, x + 1)


def test_other_sizes_of_a_dynamic_dimension():
    def fn(x):
        return (x * 2).softmax(-1)

    code = compile_for("h200", fn, torch.randn(32, 65), dynamic={0: {0: (2, 128)}})
    for rows in (2, 77, 128):
        check(fn, torch.randn(rows, 65), code=code)


def test_graph_break():
    def fn(x):
        y = torch.relu(x @ x.t())
        torch._dynamo.graph_break()
        return y.sum(-1), y

    assert check(fn, torch.randn(17, 33), rtol=1e-4, atol=1e-4).frames == 2


def test_training_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(33, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    x = torch.randn(17, 33, requires_grad=True)
    gradient = torch.randn(17, 16)
    code = compile_for("h200", model, x, grad=True)
    out, gradients = run_interpreted(code, x, grad_outputs=[gradient])
    expected = model(x)
    torch.testing.assert_close(out, expected.detach())
    named = {"args[0]": x, **dict(model.named_parameters())}
    assert list(gradients) == list(named)
    wanted = torch.autograd.grad(expected, list(named.values()), gradient)
    torch.testing.assert_close(list(gradients.values()), list(wanted), rtol=1e-4, atol=1e-5)


def test_interpret_source_takes_graph_inputs_in_order():
    code = compile_for("h200", lambda a, b: a - b, torch.randn(8), torch.randn(8))
    a, b = torch.randn(8), torch.randn(8)
    (out,) = interpret_source(code.graphs[0], [a, b])
    torch.testing.assert_close(out, a - b)
    with pytest.raises(
        ValueError, match=r"input of size \(8,\) and stride \(1,\), got size \(9,\)"
    ):
        interpret_source(code.graphs[0], [torch.randn(9), b])


def test_bad_arguments_say_what_was_expected():
    x = torch.randn(8)
    code = compile_for("h200", torch.sin, x)
    with pytest.raises(ValueError, match="a tensor on cpu as argument 0, got meta"):
        run_interpreted(code, x.to("meta"))
    with pytest.raises(ValueError, match=r"1 dimensions of .*, got 2"):
        run_interpreted(code, x[None])
    with pytest.raises(ValueError, match="expected 0 grad_outputs, got 1"):
        run_interpreted(code, x, grad_outputs=[x])
    stopped = compile_for("h200", lambda x: x.nonzero() + 1, x)
    with pytest.raises(NotImplementedError, match="followed to its end"):
        run_interpreted(stopped, x)
