"""Autograd around the operations: kept graphs, several uses, second gradients, torch.compile."""

import re

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import compat_runtime, ops
from inductor_ext.testing import compile_for, run_interpreted

TILE = Tile(1, 1, 1, 1)


def inputs(rows=3, columns=300):
    target = torch.randint(0, columns, (rows,))
    target[0] = -100
    return torch.randn(rows, columns, requires_grad=True), target


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"reduction": "none"}])
def test_a_kept_graph_gives_the_same_twice(options, on_cpu, with_tile):
    x, target = inputs()
    with on_cpu(), with_tile(TILE):
        loss = ops.cross_entropy(x, target, **options)
        loss = loss[0] if isinstance(loss, tuple) else loss
        g = torch.randn_like(loss) if loss.dim() else torch.tensor(3.0)
        (first,) = torch.autograd.grad(loss, x, g, retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(loss, x, 2 * g, retain_graph=True)
        (third,) = torch.autograd.grad(loss, x, g)
    assert torch.equal(first, kept) and torch.equal(third, first)
    torch.testing.assert_close(second, 2 * first, rtol=1e-6, atol=0)


def test_logits_with_other_users_are_left_alone(on_cpu, with_tile):
    x, target = inputs()
    before = x.detach().clone()
    with on_cpu(), with_tile(TILE):
        loss = ops.cross_entropy(x, target) + x.square().sum() + ops.cross_entropy(x, target)
        loss.backward()
    assert torch.equal(x, before)
    y = before.double().requires_grad_()
    (2 * F.cross_entropy(y, target) + y.square().sum()).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients(reduction, on_cpu, with_tile):
    x, target = inputs()
    y = x.detach().double().requires_grad_()
    found = []
    for z, fn in ((x, ops.cross_entropy), (y, F.cross_entropy)):
        with on_cpu(), with_tile(TILE):
            loss = fn(z, target, reduction=reduction).sum()
            (dz,) = torch.autograd.grad(loss, z, create_graph=True)
            found.append(torch.autograd.grad(dz.square().sum(), z)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=1e-8)


def test_composed_functions_pass_gradcheck():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, -100, 6])
    options = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1, "reduction": "none"}
    weight = torch.rand(7, dtype=torch.float64)
    fn = lambda x: ops.cross_entropy(x, target, weight, **options)  # noqa: E731
    assert torch.autograd.gradcheck(fn, x) and torch.autograd.gradgradcheck(fn, x)


@pytest.mark.parametrize("kernels", [True, False])
def test_lse_is_differentiable(kernels, on_cpu, with_tile):
    x, target = inputs()
    y = x.detach().double().requires_grad_()
    if kernels:
        with on_cpu(), with_tile(TILE):
            loss, lse = ops.cross_entropy(x, target, return_lse=True)
            (loss + 0.1 * lse.square().sum()).backward()
    else:
        loss, lse = ops.cross_entropy(x, target, return_lse=True)
        (loss + 0.1 * lse.square().sum()).backward()
    lse = torch.where(target == -100, 0.0, y.logsumexp(-1))
    (F.cross_entropy(y, target) + 0.1 * lse.square().sum()).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-7)


def test_a_gradient_that_nobody_keeps_is_scaled_in_place(on_cpu, with_tile, monkeypatch):
    from inductor_ext.templates import scaling

    from inductor_ext.ops import _rows

    calls = []
    monkeypatch.setattr(_rows, "launch_applies", lambda x: True)
    monkeypatch.setattr(scaling, "scale_in_place", lambda x, g: calls.append(x.mul_(g)))
    x, target = inputs()
    with on_cpu(), with_tile(TILE):
        loss = ops.cross_entropy(x, target)
        (kept,) = torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)
        assert not calls
        (last,) = torch.autograd.grad(loss, x, torch.tensor(3.0))
    assert len(calls) == 1
    torch.testing.assert_close(kept, last, rtol=1e-6, atol=0)
    assert not compat_runtime.backward_frees_graph()  # no backward runs


@pytest.mark.parametrize("shape", [(), (2,), (2, 3, 4)])
@pytest.mark.parametrize("probabilities", [True, False])
def test_dimensions(shape, probabilities, on_cpu, with_tile):
    sizes = (11,) if not shape else (shape[0], 11, *shape[1:])
    x = torch.randn(sizes, requires_grad=True)
    target = torch.randint(0, 11, shape)
    if probabilities:
        target = torch.rand(sizes)
    y = x.detach().double().requires_grad_()
    with on_cpu(), with_tile(TILE):
        loss = ops.cross_entropy(x, target, label_smoothing=0.1)
        loss.backward()
    truth = F.cross_entropy(y, target.double() if probabilities else target, label_smoothing=0.1)
    truth.backward()
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.codegen
@pytest.mark.parametrize("classes", [{}, {1: (16, 4096)}])
def test_compiled_for_any_number_of_rows(classes):
    x, target = torch.randn(40, 300, requires_grad=True), torch.randint(0, 300, (40,))
    dynamic = {0: {0: (8, 1000), **classes}, 1: {0: (8, 1000)}}
    fn = lambda x, t: ops.cross_entropy(x, t, label_smoothing=0.1)  # noqa: E731
    code = compile_for("h200", fn, x, target, grad=True, dynamic=dynamic)
    names = [k.name.rpartition("_")[0] for k in code.kernels if k.kind == "user"]
    assert names == ["count_kernel", "statistics_kernel", "gradient_kernel"]
    # A fraction of a size would be handed over where the launcher expects an integer.
    launches = re.findall(r"(?:statistics|gradient)_kernel\w*\.run\((.*)\)", code.source)
    assert len(launches) == 2 and not any("sym_float" in arguments for arguments in launches), (
        launches
    )
    assert all(binary.spills == 0 for binary in code.cross_compile())
    x, target = torch.randn(33, 300, requires_grad=True), torch.randint(0, 300, (33,))
    loss, gradients = run_interpreted(code, x, target, grad_outputs=[torch.tensor(2.0)])
    y = x.detach().double().requires_grad_()
    (2 * F.cross_entropy(y, target, label_smoothing=0.1)).backward()
    assert loss.item() == pytest.approx(fn(x, target).item(), rel=1e-5)
    torch.testing.assert_close(gradients["args[0]"].double(), y.grad, rtol=1e-5, atol=1e-8)


BAD = {
    "reduction is expected": {"reduction": "avg"},
    "label_smoothing is expected": {"label_smoothing": 1.5},
    "softcap is expected": {"softcap": 0.0},
    "scale is expected": {"scale": -1.0},
    "z_loss is expected": {"z_loss": float("inf")},
    "weight is expected": {"weight": torch.rand(6)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_options(message):
    with pytest.raises(ValueError, match=message):
        ops.cross_entropy(torch.randn(2, 5), torch.tensor([0, 1]), **BAD[message])


@pytest.mark.parametrize(
    ("logits", "target", "error"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), TypeError),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int16), TypeError),
        (torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64), ValueError),
        (torch.zeros(2, 5), torch.zeros(2, 4), ValueError),
        (torch.zeros(()), torch.zeros(()), ValueError),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64, device="meta"), ValueError),
    ],
)
def test_bad_tensors(logits, target, error):
    with pytest.raises(error, match="expected"):
        ops.cross_entropy(logits, target)
