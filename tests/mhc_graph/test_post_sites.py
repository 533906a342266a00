"""Which spellings of a post are recognised, and what is left alone and why."""

import pytest
import torch
from inductor_ext.lowerings import mhc_post
from mhc_programs import edited, judge_all, post_inputs, with_gradients

from benchmarks import mhc_forms
from inductor_ext.testing import compile_for


def outer(post, y):
    return post.unsqueeze(-1) * y.unsqueeze(-2)


def by_product(x, y, post, comb):
    return (outer(post, y) + comb.mT @ x.float()).to(x.dtype)


def by_products_only(x, y, post, comb):
    return (post.unsqueeze(-1) @ y.float().unsqueeze(-2) + comb.mT @ x.float()).to(x.dtype)


def by_other_sum(x, y, post, comb):
    mixed = (comb.mT.unsqueeze(-1) * x.float().unsqueeze(-3)).sum(-2)
    return (mixed + y.float().unsqueeze(-2) * post.unsqueeze(-1)).to(x.dtype)


def by_one_einsum(x, y, post, comb):
    mixed = torch.einsum("bsij,bsih->bsjh", comb, x.float())
    return (torch.einsum("bsj,bsh->bsjh", post, y.float()) + mixed).to(x.dtype)


def of_flat_tokens(x, y, post, comb):
    tokens = x.flatten(0, 1).float()
    mixed = torch.bmm(comb.flatten(0, 1).transpose(1, 2), tokens)
    own = post.flatten(0, 1)[..., None] * y.flatten(0, 1)[:, None]
    return (own + mixed).to(x.dtype).view(x.shape)


def of_16_bit_coefficients(x, y, post, comb):
    return mhc_forms.huggingface_post(x, y, post, comb)


ACCEPTED = {
    **mhc_forms.POST,
    "[out, in]": mhc_forms.transposed_post,
    "product": by_product,
    "products only": by_products_only,
    "other sum": by_other_sum,
    "einsum": by_one_einsum,
    "flat tokens": of_flat_tokens,
}


def named(fn):
    """The same with the names of arguments that the program's inputs have."""

    def post_of(x, y, post, comb):
        return fn(x, y, post, comb)

    return post_of


@pytest.mark.codegen
@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_spellings_that_mean_the_same(name, dynamic):
    fn, args = named(ACCEPTED[name]), post_inputs()
    sizes = {i: {1: None} for i in range(4)} if dynamic else None
    program = edited(fn, *args, dynamic=sizes)
    assert program.operations == ["mhc_post"], program.decisions
    (decision,) = program.decisions
    assert decision.fired and decision.chosen == "mhc_post"
    if not dynamic:
        rounding = torch.bfloat16 if name == "huggingface" else None
        judge_all(with_gradients(program.run(fn), args), fn, args, rounding)


@pytest.mark.parametrize("tokens", [(0,), (1,), (1, 1), (4,), (4, 24)])
def test_tokens_as_many_as_streams_or_one(tokens):
    fn, args = named(mhc_forms.huggingface_post), post_inputs(tokens)
    program = edited(fn, *args)
    assert program.operations == ["mhc_post"]
    if tokens != (0,):
        judge_all(with_gradients(program.run(fn), args), fn, args, torch.bfloat16)


def test_the_orientation_is_read_off():
    why = {
        name: edited(ACCEPTED[name], *post_inputs()).decisions[0].reason
        for name in ("deepseek", "huggingface", "vllm", "[out, in]")
    }
    plain = "one read of the streams, one write"
    assert why == {
        "deepseek": plain,
        "huggingface": plain,
        "vllm": plain,
        "[out, in]": plain + "; the matrix is [out, in]",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", mhc_forms.POST)
def test_dtypes(form, dtype):
    fn, args = named(mhc_forms.POST[form]), post_inputs((3, 2, 2), 2, 32, dtype)
    program = edited(fn, *args)
    assert program.operations == ["mhc_post"]
    rounding = dtype if form == "huggingface" else None
    judge_all(with_gradients(program.run(fn), args), fn, args, rounding)


def test_coefficients_rounded_by_the_program_stay_rounded():
    program = edited(mhc_forms.huggingface_post, *post_inputs())
    (args,) = program.calls("mhc_post")
    found = [n.meta["example_value"].dtype for n in args]
    assert found == [torch.bfloat16] * 4


def without_output(x, y, post, comb):
    return (torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=-3)).to(x.dtype)


def other_output(x, y, post, comb):
    return mhc_forms.deepseek_post(x, y.float() * 1.5, post, comb)


def twice(x, y, post, comb):
    mixed = torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=-3)
    return (outer(post, y) + mixed + mixed).to(x.dtype)


def static_matrix(x, y, post, comb):
    return mhc_forms.deepseek_post(x, y, post, comb[0, 0])


def reversed_streams(x, y, post, comb):
    return mhc_forms.deepseek_post(x.flip(-2), y, post, comb.flip(-1))


def mixture_returned(x, y, post, comb):
    mixed = torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=-3)
    return (outer(post, y) + mixed).to(x.dtype), mixed


def written_to(x, y, post, comb):
    comb = comb * 1
    out = mhc_forms.deepseek_post(x, y, post, comb)
    comb.add_(1)
    return out, comb


REFUSED = {
    "no output": (without_output, []),
    "fp32 output": (other_output, ["the layer's output is torch.float32 beside torch.bfloat16"]),
    "the mixture twice": (twice, []),
    "one matrix for all tokens": (
        static_matrix,
        ["the streams are mixed by a matrix without tokens"],
    ),
    "mixture returned": (mixture_returned, ["output uses a value in between"]),
    "written to": (written_to, []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_left_alone(name):
    fn, reasons = REFUSED[name]
    program = edited(fn, *post_inputs())
    assert program.operations == []
    assert program.left == reasons


def test_few_streams_are_left_to_stock(monkeypatch):
    monkeypatch.setattr(mhc_post, "LEAST_BYTES", 2**20)
    program = edited(named(mhc_forms.POST["deepseek"]), *post_inputs())
    assert program.operations == []
    assert program.left == ["so few streams are mixed by stock as fast"]


def test_attention_over_four_tokens_is_no_site():
    def attention(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v + v

    q = torch.randn(2, 3, 4, 64).bfloat16().requires_grad_()
    program = edited(attention, q, q.detach(), q.detach())
    assert program.operations == [] and program.decisions == []


@pytest.mark.codegen
@pytest.mark.parametrize("form", mhc_forms.POST)
def test_generated_code(form):
    code = compile_for("h200", mhc_forms.POST[form], *(t.detach() for t in post_inputs()))
    assert code.extern_calls == [] and code.stopped == ""
    assert [k.name.rsplit("_", 1)[0] for k in code.kernels][-1] == "post_kernel"
    # post and comb are rounded by the program first.
    assert len(code.kernels) == (3 if form == "huggingface" else 1)
