"""Candidates in generated code: fused when chosen, stock by default, refused when wrong."""

from __future__ import annotations

import warnings

import pytest
import torch

import inductor_ext
from inductor_ext import CustomOpConfig, choosing, config, register_custom_op_autotuning
from inductor_ext.testing import compile_for, run_interpreted


def only(code, name):
    (decision,) = (d for d in code.decisions if d.lowering == name)
    return decision


# --- several outputs ------------------------------------------------------------------------------


@torch.library.custom_op("inductor_ext_test::normed", mutates_args=())
def normed(x: torch.Tensor, eps: float = 1e-3) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) + eps
    return (x / scale).to(x.dtype), scale


@normed.register_fake
def _(x, eps=1e-3):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def rows(x, eps=1e-3):
    scale = x.float().abs().amax(-1, keepdim=True) + eps
    return (x / scale).to(x.dtype), scale


def chunks(x, eps=1e-3, number=4):
    parts = x.float().abs().reshape(*x.shape[:-1], number, -1).amax(-1)
    scale = parts.amax(-1, keepdim=True) + eps
    return (x / scale).to(x.dtype), scale


NORMED = "inductor_ext_test::normed_autotuned"
register_custom_op_autotuning(
    normed,
    configs=[
        CustomOpConfig(rows),
        CustomOpConfig(chunks, number=2),
        CustomOpConfig(chunks, number=8),
        CustomOpConfig(eps=1e-3),
    ],
)


def gated(x):
    y, scale = torch.ops.inductor_ext_test.normed(x)
    return torch.relu(y) + 1, scale * 2


X = torch.randn(37, 256)


def test_stock_on_a_virtual_card():
    code = compile_for("h200", gated, X)
    decision = only(code, NORMED)
    assert code.extern_calls == ["torch.ops.inductor_ext_test.normed.default"]
    assert (decision.fired, decision.chosen, decision.source) == (False, "stock", "heuristic")
    assert "default implementation" in decision.reason
    assert decision.sites == "inductor_ext_test.normed.default [37,256]"
    assert [c.name for c in decision.candidates] == [
        "stock",
        "rows",
        "chunks_number2",
        "chunks_number8",
        "default_eps0.001",
    ]


@pytest.mark.codegen
def test_stock_is_the_code_of_the_switched_off_registration():
    on = compile_for("h200", gated, X).source.split("\n", 1)[1]
    with inductor_ext.disable(NORMED):
        assert compile_for("h200", gated, X).source.split("\n", 1)[1] == on


@pytest.mark.codegen
@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_the_forced_candidate_is_inlined_with_its_epilogue_in_one_kernel(mode):
    code = compile_for("h200", gated, X, mode=mode, force={NORMED: "rows"})
    assert len(code.calls) == 1 and not code.extern_calls
    assert code.kernels[0].kind == "persistent_reduction" and "relu" in code.kernels[0].name
    assert only(code, NORMED).source == "forced"


def test_its_numbers_are_those_of_the_operation():
    for pattern in ("rows", "chunks_number2", "chunks_number8"):
        code = compile_for("h200", gated, X, force={NORMED: pattern})
        for got, want in zip(run_interpreted(code, X), gated(X), strict=True):
            torch.testing.assert_close(got, want)


def test_the_parameters_are_the_candidates():
    two = compile_for("h200", gated, X, force={NORMED: "chunks_number2"})
    eight = compile_for("h200", gated, X, force={NORMED: "chunks_number8"})
    assert two.kernels[0].source != eight.kernels[0].source


def test_a_candidate_without_a_function_calls_the_operation():
    code = compile_for("h200", gated, X, force={NORMED: "default_eps.*"})
    assert code.extern_calls == ["torch.ops.inductor_ext_test.normed.default"]
    assert only(code, NORMED).fired


def test_an_argument_of_the_call_reaches_the_candidate():
    def fn(x):
        return torch.ops.inductor_ext_test.normed(x, 7.0)[1]

    code = compile_for("h200", fn, X, force={NORMED: "rows"})
    assert "7.0" in code.kernels[0].source
    torch.testing.assert_close(run_interpreted(code, X), fn(X))


def test_in_half_precision():
    x = X.bfloat16()
    code = compile_for("h200", gated, x, force={NORMED: "rows"})
    for got, want in zip(run_interpreted(code, x), gated(x), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


@pytest.mark.codegen
def test_dynamic_sizes_are_one_graph():
    code = compile_for("h200", gated, X, dynamic={0: {0: (2, 512)}}, force={NORMED: "rows"})
    assert code.frames == 1 and len(code.calls) == 1
    for size in (37, 2, 300):
        x = torch.randn(size, 256)
        for got, want in zip(run_interpreted(code, x), gated(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.codegen
def test_several_calls_are_several_sites():
    code = compile_for("h200", lambda x: gated(gated(x)[0])[0], X, force={NORMED: "rows"})
    assert [d.fired for d in code.decisions] == [True, True] and not code.extern_calls


def test_one_unused_output():
    code = compile_for("h200", lambda x: gated(x)[1], X, force={NORMED: "rows"})
    assert len(code.calls) == 1
    torch.testing.assert_close(run_interpreted(code, X), gated(X)[1])


# --- arguments ------------------------------------------------------------------------------------


def define(schema: str, eager, fake=None):
    """An operation from a schema, as custom_op cannot put every kind of argument anywhere."""
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"inductor_ext_test::{name}", fake or eager, lib=LIBRARY)
    return getattr(torch.ops.inductor_ext_test, name).default


LIBRARY = torch.library.Library("inductor_ext_test", "FRAGMENT")

axpy = define("axpy(Tensor x, float alpha, Tensor y) -> Tensor", lambda x, alpha, y: x * alpha + y)
biased = define(
    "biased(Tensor x, *, Tensor bias, float gain=1.0) -> Tensor",
    lambda x, *, bias, gain=1.0: (x + bias) * gain,
)
first = define(
    "first(int n, Tensor x, bool negate=False) -> Tensor", lambda n, x, negate=False: x * n
)
optional = define(
    "optional(Tensor x, Tensor? y=None) -> Tensor", lambda x, y=None: x * 2 if y is None else x + y
)
listed = define("listed(Tensor[] xs) -> Tensor", lambda xs: xs[0] + xs[1])
nothing = define("nothing(int n) -> Tensor", lambda n: torch.ones(n, device="cuda"))


def spelled(op):
    return f"{op._name}_autotuned"


def check(op, candidate, fn, *args):
    """The forced candidate is one kernel with the operation's numbers."""
    register_custom_op_autotuning(op, configs=[CustomOpConfig(candidate)])
    code = compile_for("h200", fn, *args, force={spelled(op): candidate.__name__})
    assert len(code.calls) == 1 and not code.extern_calls
    torch.testing.assert_close(run_interpreted(code, *args), fn(*args))


A, B = torch.randn(8, 64), torch.randn(8, 64)


def test_a_number_between_two_tensors():
    def candidate(x, alpha, y):
        return torch.add(y, x, alpha=alpha)

    check(axpy, candidate, lambda x, y: torch.ops.inductor_ext_test.axpy(x, 3.0, y), A, B)


def test_a_keyword_only_tensor():
    def candidate(x, *, bias, gain=1.0):
        return x * gain + bias * gain

    def fn(x, bias):
        return torch.ops.inductor_ext_test.biased(x, bias=bias, gain=0.5)

    check(biased, candidate, fn, A, B)


def test_a_number_before_the_tensor():
    def candidate(n, x, negate=False):
        return x * float(n)

    check(first, candidate, lambda x: torch.ops.inductor_ext_test.first(3, x), A)


def test_an_optional_tensor():
    def candidate(x, y=None):
        return x + x if y is None else y + x

    check(optional, candidate, lambda x: torch.ops.inductor_ext_test.optional(x), A)
    check(optional, candidate, torch.ops.inductor_ext_test.optional, A, B)


def test_tensors_under_other_names():
    """Inductor passes tensors by position: a candidate may name them as it likes."""

    def candidate(left, right):
        return left * right

    op = define("product(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y)
    check(op, candidate, torch.ops.inductor_ext_test.product, A, B)


def test_one_tensor_twice():
    check(optional, lambda_named, lambda x: torch.ops.inductor_ext_test.optional(x, x), A)


def lambda_named(x, y=None):
    return x * 2 if y is None else x + y


def test_views_as_arguments():
    def fn(x, y):
        return torch.ops.inductor_ext_test.optional(x.t()[3:], y.expand(64, 8)[3:])

    check(optional, lambda_named, fn, A, torch.randn(8))


@pytest.mark.parametrize("op", [listed, nothing], ids=["a list of tensors", "no tensor"])
def test_what_cannot_be_tuned_is_left_alone_with_a_reason(op):
    register_custom_op_autotuning(op, configs=[CustomOpConfig(lambda *args: None)])
    if op is listed:
        code = compile_for("h200", lambda a, b: torch.ops.inductor_ext_test.listed([a, b]), A, B)
        expected = "list of tensors"
    else:
        code = compile_for("h200", lambda a: a + torch.ops.inductor_ext_test.nothing(64), A)
        expected = "no tensor input"
    decision = only(code, spelled(op))
    assert not decision.fired and expected in decision.reason
    assert str(op).replace("inductor_ext_test", "torch.ops.inductor_ext_test") in code.extern_calls


def test_parameters_win_over_the_calls_arguments():
    op = define("scaled(Tensor x, float by=1.0) -> Tensor", lambda x, by=1.0: x * by)

    def candidate(x, by=1.0):
        return x * by

    register_custom_op_autotuning(op, configs=[CustomOpConfig(candidate, by=5.0)])
    code = compile_for(
        "h200",
        lambda x: torch.ops.inductor_ext_test.scaled(x, 2.0),
        A,
        force={spelled(op): "candidate_by5.0"},
    )
    torch.testing.assert_close(run_interpreted(code, A), A * 5)


# --- generators -----------------------------------------------------------------------------------

generated = define(
    "generated(Tensor x, float gain, Tensor y) -> Tensor", lambda x, gain, y: x + y * gain
)


def test_a_generator_gets_the_tensors_by_name():
    seen = []

    def split(x, gain, y, by):
        return x + y * gain

    def generator(fakes):
        seen.append({n: (tuple(f.shape), f.dtype, f.device.type) for n, f in fakes.items()})
        width = fakes["y"].shape[-1]
        return [CustomOpConfig(split, by=by) for by in (2, 4) if width % by == 0]

    register_custom_op_autotuning(generated, config_generator=generator)

    def fn(x, y):
        return torch.ops.inductor_ext_test.generated(x, 0.5, y)

    y = torch.randn(6, dtype=torch.bfloat16)
    code = compile_for("h200", fn, torch.randn(5, 6), y)
    assert seen == [{"x": ((5, 6), torch.float32, "cuda"), "y": ((6,), torch.bfloat16, "cuda")}]
    decision = only(code, spelled(generated))
    assert [c.name for c in decision.candidates] == ["stock", "split_by2"]


def test_a_generator_that_returns_nothing_keeps_stock():
    op = define("empty_generator(Tensor x) -> Tensor", lambda x: x + 1)
    register_custom_op_autotuning(op, config_generator=lambda fakes: [])
    code = compile_for("h200", torch.ops.inductor_ext_test.empty_generator, A)
    decision = only(code, spelled(op))
    assert not decision.fired and decision.reason == "the generator returned no config"
    assert code.extern_calls == ["torch.ops.inductor_ext_test.empty_generator.default"]


def test_a_generator_that_returns_something_else_is_an_error_at_the_site():
    op = define("bad_generator(Tensor x) -> Tensor", lambda x: x + 1)
    register_custom_op_autotuning(op, config_generator=lambda fakes: [plain for plain in (3,)])
    with (
        config.patch(strict=False),
        pytest.warns(UserWarning, match="as a CustomOpConfig, got int"),
    ):
        code = compile_for("h200", torch.ops.inductor_ext_test.bad_generator, A)
    assert code.extern_calls == ["torch.ops.inductor_ext_test.bad_generator.default"]


def test_names_of_candidates_are_unique():
    op = define("same_names(Tensor x) -> Tensor", lambda x: x + 1)

    def make(k):
        def stock(x):
            return x + k

        return CustomOpConfig(stock)

    register_custom_op_autotuning(op, configs=[make(1), make(1)])
    code = compile_for("h200", torch.ops.inductor_ext_test.same_names, A)
    names = [c.name for c in only(code, spelled(op)).candidates]
    assert names == ["stock", "stock_2", "stock_3"]


# --- wrong candidates -----------------------------------------------------------------------------

WRONG = {
    "shape": (lambda x: x[:, :32].contiguous(), r"got torch.float32 \(8, 32\)"),
    "dtype": (lambda x: x.half(), r"got torch.float16 \(8, 64\)"),
    "number": (lambda x: (x, x * 2), r"got torch.float32 \(8, 64\), torch.float32 \(8, 64\)"),
}
wrong = define("wrong(Tensor x) -> Tensor", lambda x: x * 2)


@pytest.mark.parametrize("kind", WRONG)
def test_other_outputs_than_the_operations_are_refused(kind):
    candidate, got = WRONG[kind]
    register_custom_op_autotuning(wrong, configs=[CustomOpConfig(candidate)])
    message = rf"expected outputs torch.float32 \(8, 64\), {got}"
    force = {spelled(wrong): "<lambda>"}
    op = torch.ops.inductor_ext_test.wrong
    with config.patch(strict=True), pytest.raises(Exception, match=message):
        compile_for("h200", op, A, force=force)
    with config.patch(strict=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with choosing.force(force):
            code = compile_for("h200", op, A)
    ours = [w for w in caught if "inductor_ext" in str(w.message)]
    assert len(ours) == 1 and "stock code is used there" in str(ours[0].message)
    assert code.extern_calls == ["torch.ops.inductor_ext_test.wrong.default"]


def test_a_candidate_that_fails_is_reported_once_as_left_to_stock():
    register_custom_op_autotuning(wrong, configs=[CustomOpConfig(WRONG["dtype"][0])])
    op = torch.ops.inductor_ext_test.wrong
    with (
        config.patch(strict=False),
        choosing.force({spelled(wrong): "<lambda>"}),
        pytest.warns(UserWarning, match="expected outputs"),
    ):
        code = compile_for("h200", op, A)
    assert [d.fired for d in code.decisions] == [False]


# --- recursion ------------------------------------------------------------------------------------


@torch.library.custom_op("inductor_ext_test::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


halves.register_fake(torch.empty_like)


def by_halves(x):
    n = x.shape[0] // 2
    return torch.cat(
        [torch.ops.inductor_ext_test.halves(x[:n]), torch.ops.inductor_ext_test.halves(x[n:])]
    )


@pytest.mark.codegen
def test_a_candidate_that_calls_its_operation_gets_the_default_there():
    register_custom_op_autotuning(halves, configs=[CustomOpConfig(by_halves)])
    name = "inductor_ext_test::halves_autotuned"
    code = compile_for("h200", halves, A, force={name: "by_halves"})
    assert code.extern_calls == ["torch.ops.inductor_ext_test.halves.default"] * 2
    assert [d.fired for d in code.decisions] == [True]


def test_a_candidate_made_of_another_tuned_operation():
    outer = define("outer(Tensor x) -> Tensor", lambda x: torch.relu(torch.tanh(x)))

    def through_halves(x):
        return torch.relu(torch.ops.inductor_ext_test.halves(x))

    register_custom_op_autotuning(halves, configs=[CustomOpConfig(lambda x: torch.tanh(x))])
    register_custom_op_autotuning(outer, configs=[CustomOpConfig(through_halves)])
    force = {spelled(outer): "through_halves", "inductor_ext_test::halves_autotuned": "<lambda>"}
    code = compile_for("h200", torch.ops.inductor_ext_test.outer, A, force=force)
    assert len(code.kernels) == 1 and not code.extern_calls
    torch.testing.assert_close(run_interpreted(code, A), torch.relu(torch.tanh(A)))


def test_a_product_inside_a_candidate_is_split_along_k_too():
    """The plugin's other lowerings apply to what a candidate consists of."""
    op = define("product_of(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b)
    register_custom_op_autotuning(op, configs=[CustomOpConfig(torch.mm)])
    a, b = torch.randn(16, 8192, dtype=torch.bfloat16), torch.randn(8192, 16, dtype=torch.bfloat16)
    code = compile_for(
        "h200", torch.ops.inductor_ext_test.product_of, a, b, force={spelled(op): "mm"}
    )
    assert {(d.lowering, d.fired) for d in code.decisions} == {
        (spelled(op), True),
        ("decompose_k", True),
    }


# --- training -------------------------------------------------------------------------------------


@torch.library.custom_op("inductor_ext_test::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@torch.library.custom_op("inductor_ext_test::cubed_backward", mutates_args=())
def cubed_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad * 3 * x * x


cubed.register_fake(torch.empty_like)
cubed_backward.register_fake(lambda grad, x: torch.empty_like(x))
cubed.register_autograd(
    lambda ctx, grad: torch.ops.inductor_ext_test.cubed_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def power(x):
    return x.pow(3)


def power_backward(grad, x):
    return grad * (3 * x.pow(2))


@pytest.mark.codegen
def test_training_tunes_forward_and_backward():
    register_custom_op_autotuning(cubed, configs=[CustomOpConfig(power)])
    register_custom_op_autotuning(cubed_backward, configs=[CustomOpConfig(power_backward)])

    def fn(x):
        return torch.relu(torch.ops.inductor_ext_test.cubed(x))

    x = torch.randn(8, 64, requires_grad=True)
    names = "inductor_ext_test::cubed_autotuned", "inductor_ext_test::cubed_backward_autotuned"
    code = compile_for(
        "h200", fn, x, grad=True, force={names[0]: "power", names[1]: "power_backward"}
    )
    assert code.graph_kinds == ["forward", "backward"] and not code.extern_calls
    assert len(code.kernels) == 2 and {d.lowering for d in code.decisions if d.fired} == set(names)
    grad = torch.randn(8, 64)
    out, grads = run_interpreted(code, x, grad_outputs=[grad])
    (want,) = torch.autograd.grad(fn(x), x, grad)
    torch.testing.assert_close(out, fn(x))
    torch.testing.assert_close(grads["args[0]"], want)


# --- config_patches -------------------------------------------------------------------------------


@pytest.mark.codegen
def test_config_patches_reach_the_candidates_kernels():
    op = define("patched(Tensor x) -> Tensor", lambda x: x.sum(-1))

    def total(x):
        return x.sum(-1)

    register_custom_op_autotuning(
        op, configs=[CustomOpConfig(total, config_patches={"coordinate_descent_tuning": True})]
    )

    def fn(x):
        return torch.ops.inductor_ext_test.patched(x)

    force = {spelled(op): "total_.*"}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        with (
            config.patch(strict=True),
            pytest.raises(Exception, match=r"need torch 2\.12 or newer"),
        ):
            compile_for("h200", fn, A, force=force)
        return
    code = compile_for("h200", fn, A, force=force)
    assert "'coordinate_descent_tuning': True" in code.kernels[0].source
    assert (
        "'coordinate_descent_tuning': True"
        not in compile_for("h200", lambda x: x.sum(-1), A).source
    )
