"""Which spellings of a pre are recognised, what is read off them, what is left alone and why."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from mhc_programs import edited, judge_all, pre_inputs, with_gradients
from mhc_variants import (
    ACCEPTED,
    FORMS,
    PARTLY,
    REFUSED,
    build,
    gates_of,
    loop,
    normalise,
    rms,
    whole,
)

from benchmarks import mhc_forms
from inductor_ext.testing import compile_for, package_for


def options(program):
    """(iterations, eps of the norm, of pre, of the Sinkhorn loop, multiplier) of the one site."""
    (args,) = program.calls("mhc_pre")
    return args[4:]


@pytest.mark.codegen
@pytest.mark.parametrize("form", mhc_forms.PRE)
@pytest.mark.parametrize("dynamic", [None, {0: {1: None}}], ids=["static", "symbolic"])
def test_forms(form, dynamic):
    program = edited(mhc_forms.PRE[form], *pre_inputs(), dynamic=dynamic)
    assert program.operations == ["mhc_pre"]
    (decision,) = program.decisions
    assert decision.fired and decision.chosen == "mhc_pre" and decision.source == "heuristic"
    assert decision.reason == "20 Sinkhorn iterations, eps 1e-06, 1e-06 and 1e-06"
    assert options(program) == (20, 1e-6, 1e-6, 1e-6, 2.0)


@pytest.mark.parametrize("name", ACCEPTED)
def test_spellings_that_mean_the_same(name):
    fn, args = ACCEPTED[name], pre_inputs()
    program = edited(fn, *args)
    assert program.operations == ["mhc_pre"], program.decisions
    judge_all(with_gradients(program.run(fn), args), fn, args)


def test_numbers_are_read_off():
    assert options(edited(ACCEPTED["other numbers"], *pre_inputs())) == (4, 1e-5, 1e-3, 1e-4, 1.5)
    assert options(edited(ACCEPTED["one iteration"], *pre_inputs()))[0] == 1
    plain = options(edited(ACCEPTED["no eps, no multiplier"], *pre_inputs()))
    assert plain[2] == 0.0 and plain[4] == 1.0


@pytest.mark.parametrize("name", PARTLY)
def test_the_gates_alone(name):
    """Where the rest is of another form it stays, and the report says why."""
    fn, why = PARTLY[name]
    args = pre_inputs()
    program = edited(fn, *args)
    assert program.operations == ["mhc_collapse"] and program.left == []
    assert program.decisions[0].reason == f"the gates alone, as {why}; eps 1e-06 and 1e-06"
    judge_all(with_gradients(program.run(fn), args), fn, args)


@pytest.mark.parametrize("name", FORMS)
def test_other_forms(name):
    mix, columns, constant = FORMS[name]
    x, _, scale, _ = pre_inputs()
    w = torch.randn(columns, 256).div(16).requires_grad_()
    y = torch.randn(2, 5, 64).bfloat16()
    args = [x, w, scale, torch.randn(columns).requires_grad_(), y, constant.clone()]
    fn = whole(mix)
    program = edited(fn, *args)
    assert program.operations == ["mhc_collapse", "mhc_post"], program.decisions
    judge_all(with_gradients(program.run(fn), args), fn, args)
    inference = edited(fn, *(a.detach() for a in args), grad=False)
    assert inference.operations == program.operations


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_left_alone(name):
    fn, reason = REFUSED[name]
    program = edited(fn, *pre_inputs())
    assert program.operations == []
    assert program.left == ([] if reason is None else [reason])


@pytest.mark.parametrize("n", [2, 8])
def test_other_numbers_of_streams(n):
    fn, args = build(loop(2)), pre_inputs((7,), n, 48)
    program = edited(fn, *args)
    assert program.operations == ["mhc_pre"]
    judge_all(with_gradients(program.run(fn), args), fn, args)


def test_three_streams_are_no_site():
    assert edited(build(loop(2)), *pre_inputs((7,), 3, 48)).decisions == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", mhc_forms.PRE)
def test_dtypes_and_leading_dimensions(form, dtype):
    fn, args = mhc_forms.PRE[form], pre_inputs((3, 2, 2), 4, 32, dtype)
    program = edited(fn, *args)
    assert program.operations == ["mhc_pre"]
    judge_all(with_gradients(program.run(lambda x, w, scale, base: 0), args), fn, args)


@pytest.mark.parametrize("tokens", [(0,), (1,), (1, 1), (4,), (24,), (4, 24)])
def test_tokens_as_many_as_streams_or_columns_or_one(tokens):
    fn, args = build(loop(2)), pre_inputs(tokens)
    program = edited(fn, *args)
    assert program.operations == ["mhc_pre"]
    if tokens != (0,):
        judge_all(with_gradients(program.run(fn), args), fn, args)


def test_16_bit_weights_stay_16_bit():
    def pre(x, w, scale, base):
        return build(loop(2))(x, w.float(), scale, base)

    x, w, scale, base = pre_inputs()
    program = edited(pre, x, w.detach().bfloat16().requires_grad_(), scale, base)
    (args,) = program.calls("mhc_pre")
    assert args[1].op == "placeholder"


def test_the_weight_of_a_norm_is_multiplied_into_the_projection():
    def pre(x, w, scale, base, weight):
        wide = x.flatten(-2).float()
        mixes = torch.nn.functional.linear(wide * rms(wide) * weight, w)
        return gates_of(mixes, x, wide, scale, base)[1:]

    args = [*pre_inputs(), torch.rand(256) + 0.5]
    program = edited(pre, *args)
    assert program.operations == ["mhc_pre"]
    assert program.decisions[0].reason.endswith("a weighted norm")
    judge_all(with_gradients(program.run(pre), args), pre, args)


def test_a_projection_in_16_bits_is_left_alone():
    """Autocast rounds the residual and the weight."""

    def pre(x, w, scale, base):
        wide = x.flatten(-2)
        mixes = (wide @ w.to(x.dtype).t()).float()
        return gates_of(mixes * rms(wide.float()), x, wide.float(), scale, base)[1:]

    program = edited(pre, *pre_inputs())
    assert program.operations == [] and len(program.left) == 1


def test_the_head():
    x, w, scale, base = (t.detach() for t in pre_inputs())
    args = [x, w[:4].clone(), scale[:1].clone(), base[:4].clone()]
    program = edited(mhc_forms.deepseek_head, *args, grad=False)
    assert program.operations == ["mhc_collapse"]
    assert program.decisions[0].reason == "the head of a model, eps 1e-06 and 1e-06"
    fn = lambda x, w, scale, base: mhc_forms.deepseek_head(x, w, scale, base)  # noqa: E731
    judge_all(with_gradients(program.run(fn), args), fn, args)


def test_a_first_residual_of_equal_streams():
    def first(h, w, scale, base):
        return build(loop(2))(mhc_forms.broadcast(h, 4), w, scale, base)

    _, *parameters = pre_inputs()
    args = [torch.randn(2, 5, 64).bfloat16(), *parameters]
    program = edited(first, *args)
    assert program.operations == ["mhc_pre"]
    judge_all(with_gradients(program.run(first), args), first, args)


def test_a_turned_matrix_can_be_viewed_as_in_eager():
    """[out, in] is a view of the operation's [in, out]."""

    def viewed(x, w, scale, base):
        u, post, comb = build(lambda z: normalise(z.softmax(-2) + 1e-6, -1))(x, w, scale, base)
        return u, post, comb.view(2, 5, 16)

    args = pre_inputs()
    program = edited(viewed, *args)
    assert program.operations == ["mhc_pre"]
    judge_all(with_gradients(program.run(viewed), args), viewed, args)


def test_a_norms_weight_among_those_of_other_layers():
    def first(x, w, scale, base, weights):
        wide = x.flatten(-2).float()
        mixes = F.linear(wide * rms(wide) * weights[0], w)
        return gates_of(mixes, x, wide, scale, base)[1:]

    args = [*pre_inputs(), torch.rand(3, 256).add(0.5).requires_grad_()]
    program = edited(first, *args)
    assert program.operations == ["mhc_pre"]
    judge_all(with_gradients(program.run(first), args), first, args)


def test_streams_in_8_bits_are_no_error():
    def narrow(x, w, scale, base):
        wide = x.flatten(-2).float().to(torch.float8_e4m3fn).float()
        return gates_of(F.linear(wide, w) * rms(wide), x, wide, scale, base)[1:]

    assert edited(narrow, *(t.detach() for t in pre_inputs()), grad=False).operations == []


def test_a_program_out_of_a_cache_finds_the_operations():
    """Passes in front of AOTAutograd do not run where its cache holds the program."""
    code = "import inductor_ext, torch; torch.ops.inductor_ext.mhc_pre_of_any_size.default"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_of_any_number_of_tokens_calls_no_python():
    class Layer(torch.nn.Module):
        def forward(self, x, w, scale, base):
            return build(loop(1))(x, w, scale, base)

    size = torch.export.Dim("tokens", min=2, max=64)
    shapes = ({1: size}, None, None, None)
    args = (t.detach() for t in pre_inputs())
    package = package_for("h200", Layer(), *args, dynamic_shapes=shapes)
    assert "of_any_size" not in package.source
    decision = package.decisions[0]
    why = "a package would call Python for any number of tokens"
    assert decision.reason == f"the gates alone, as {why}; eps 1e-06 and 1e-06"


def test_inference_is_a_site_too():
    assert edited(build(), *pre_inputs(), grad=False).operations == ["mhc_pre"]


def test_a_tensor_on_the_cpu_is_left_alone():
    assert edited(build(loop(1)), *pre_inputs((3,), 4, 16), card=False).decisions == []


@pytest.mark.codegen
def test_generated_code():
    code = compile_for("h200", mhc_forms.huggingface_pre, *pre_inputs(), grad=True)
    assert code.stopped == "" and code.extern_calls == []
    assert len([k for k in code.kernels if k.source in code.forward]) <= 2
    assert [d.lowering for d in code.decisions] == ["mhc_pre"]


def test_generated_code_of_another_form():
    """The gates, what is made of the other columns, the streams behind: no product is stock's."""
    mix, columns, constant = FORMS["factors"]
    x, _, scale, _ = (t.detach() for t in pre_inputs())
    w, base, y = torch.randn(columns, 256), torch.randn(columns), torch.randn(2, 5, 64).bfloat16()
    code = compile_for("h200", whole(mix), x, w, scale, base, y, constant, grad=False)
    assert code.extern_calls == [] and len(code.kernels) <= 7
