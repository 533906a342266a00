"""``scaled_gradient`` in a backward graph: in place where nobody sees it, a product elsewhere."""

import pytest
import torch
from torch._functorch import config as functorch_config

import inductor_ext
from inductor_ext.ops import _joint
from inductor_ext.testing import compile_for, run_interpreted

IN_PLACE = "torch.ops.inductor_ext.scale_gradient_.default"


def made_with(x):
    """(sum of the rows' log-sum-exp, its gradient for an incoming 1) by an opaque operation."""
    rows = x.new_ones(x.shape[0])
    target = torch.full_like(rows, -1, dtype=torch.int64)
    peak, total, *_, made = torch.ops.inductor_ext.rows_and_gradient.default(
        x, target, rows, None, torch.zeros_like(rows), None, 1.0, 0.0
    )
    return (peak + total.log()).sum(), made


def _scaled(ctx, g):
    return torch.ops.inductor_ext.scaled_gradient.default(*ctx.saved_tensors, g)


class Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        loss, made = made_with(x)
        ctx.save_for_backward(made)
        return loss

    @staticmethod
    def backward(ctx, g):
        return _scaled(ctx, g)


class Seen(torch.autograd.Function):
    """The saved tensor is among the program's results too."""

    @staticmethod
    def forward(ctx, x):
        loss, made = made_with(x)
        ctx.save_for_backward(made)
        ctx.mark_non_differentiable(made)
        return loss, made

    @staticmethod
    def backward(ctx, g, _):
        return _scaled(ctx, g)


class ReadTwice(Made):
    @staticmethod
    def backward(ctx, g):
        (made,) = ctx.saved_tensors
        return _scaled(ctx, g) + 0.5 * made


class ColumnMajor(Made):
    @staticmethod
    def forward(ctx, x):
        loss, made = made_with(x)
        ctx.save_for_backward(made.t().contiguous().t())
        return loss


PROGRAMS = {
    "leaf": lambda x, w: Made.apply(x),
    "product behind": lambda x, w: Made.apply(x @ w),
    "pointwise behind": lambda x, w: Made.apply(3.0 * x.exp() * w),
    "seen": lambda x, w: Seen.apply(x @ w),
    "read twice": lambda x, w: ReadTwice.apply(x @ w),
    "column-major": lambda x, w: ColumnMajor.apply(x @ w),
}


@pytest.fixture(autouse=True)
def on():
    with inductor_ext.config.patch(strict=True), inductor_ext.enable("fused_loss"):
        yield


def first(out):
    return out[0] if isinstance(out, tuple) else out


def chosen(code):
    return [d.chosen for d in code.decisions if d.sites.startswith("scaled gradient")]


def tensors():
    return (torch.randn(6, 6) * 0.5).requires_grad_(), torch.randn(6, 6).requires_grad_()


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("program", "dynamic"),
    [*((program, None) for program in PROGRAMS), ("leaf", {0: {0: (2, 64)}}),
     ("seen", {0: {0: (2, 64)}})],
)  # fmt: skip
def test_in_place_or_a_product(program, dynamic):
    fn, (x, w) = PROGRAMS[program], tensors()
    code = compile_for("h200", fn, x, w, grad=True, dynamic=dynamic)
    in_place = program not in ("seen", "read twice", "column-major")
    assert chosen(code) == (["in place"] if in_place else ["product"])
    assert (IN_PLACE in code.extern_calls) == in_place
    assert ("scaled_gradient.default(" in code.backward) is False
    for g in (1.0, 0.3):
        g = torch.tensor(g)
        _, found = run_interpreted(code, x, w, grad_outputs=[g])
        expected = torch.autograd.grad(first(fn(x, w)), x, g)
        torch.testing.assert_close(found["args[0]"], *expected)


def test_in_place_whatever_is_enabled_when_the_backward_is_compiled():
    """Which is later than the forward, often outside the context that it was compiled in."""
    with inductor_ext.disable():
        code = compile_for("h200", PROGRAMS["leaf"], *tensors(), grad=True)
    assert IN_PLACE in code.extern_calls and "scaled_gradient.default(" not in code.backward


@pytest.mark.codegen
def test_rows_that_inductor_pads():
    """The gradient has the strides of its logits, so that the products behind it are aligned."""
    (x, _), w = tensors(), torch.randn(6, 1025).requires_grad_()
    fn = PROGRAMS["product behind"]
    code = compile_for("h200", fn, x, w, grad=True)
    assert chosen(code) == ["in place"]
    assert code.forward.count("(6, 1025), (1056, 1)") == 2  # logits and gradient
    _, found = run_interpreted(code, x, w, grad_outputs=[torch.tensor(0.3)])
    expected = torch.autograd.grad(fn(x, w), (x, w), torch.tensor(0.3))
    for mine, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_program_that_gives_nothing_away():
    with functorch_config.patch(donated_buffer=False):
        code = compile_for("h200", PROGRAMS["product behind"], *tensors(), grad=True)
    assert chosen(code) == ["product"] and IN_PLACE not in code.extern_calls


def test_as_part_of_a_training_program():
    x, w = tensors()
    fn = torch.compile(PROGRAMS["product behind"])
    for g in (1.0, 3.0, 3.0):
        g = torch.tensor(g)
        expected = torch.autograd.grad(PROGRAMS["product behind"](x, w), (x, w), g)
        for mine, theirs in zip(torch.autograd.grad(fn(x, w), (x, w), g), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    loss = fn(x, w)
    with pytest.raises(RuntimeError, match="retain_graph"):  # AOTAutograd's own check
        loss.backward(retain_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers(dtype):
    made = torch.randn(40, 8).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(_joint.scaled_gradient(made, torch.ones(1)), made)
    scaled = (made.to(wide) * torch.tensor(0.3).to(wide)).to(dtype)
    for g in (torch.tensor(0.3), torch.tensor([0.3])):
        assert torch.equal(_joint.scaled_gradient(made, g), scaled)
    _joint.scale_gradient_(made, torch.tensor(0.3))
    assert torch.equal(made, scaled)
    with pytest.raises(ValueError, match="one element"):
        _joint.scaled_gradient(made, torch.ones(2))
