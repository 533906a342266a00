"""``ops.linear_cross_entropy``: chunks, gradients, memory, and what it says of bad input."""

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates import scaling
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import measure, ops
from inductor_ext.ops import _linear_cross_entropy as linear
from inductor_ext.testing import compile_for, launches_interpreted

TILE = Tile(1, 1, 1, 1)
OPTIONS = {
    "plain": {},
    "everything": {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "scale": 1.2},
    "weighted": {"weight": torch.linspace(0, 1, 130)},
    "rows": {"reduction": "none"},
    "sum": {"reduction": "sum"},
}


def draw(rows=37, dtype=torch.float32, bias=True):
    h, w = torch.randn(rows, 24), torch.randn(130, 24) * 0.5
    tensors = [t.to(dtype).requires_grad_() for t in (h, w, *([torch.randn(130)] if bias else []))]
    target = torch.randint(0, 130, (rows,))
    target[3] = -100
    return tensors, target


def call(tensors, target, g, **options):
    h, w, *bias = tensors
    loss = ops.linear_cross_entropy(h, w, target, *bias, **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    return [loss.detach(), *torch.autograd.grad((loss * g.to(loss.dtype)).sum(), tensors)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_numbers(option, chunks, bias, on_cpu, with_tile, formula, monkeypatch):
    monkeypatch.setattr(linear, "LEAST_ROWS", 16)
    options = OPTIONS[option]
    tensors, target = draw(bias=bias)
    g = torch.randn(37) if option == "rows" else torch.tensor(2.0)
    memory = linear.MEMORY if chunks == 1 else 1000
    with on_cpu(), with_tile(TILE):
        found = call(tensors, target, g, memory=memory, **options)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    loss = formula(F.linear(*wide), target, **options)
    truth = [loss.detach(), *torch.autograd.grad((loss * g.double()).sum(), wide)]
    for mine, theirs in zip(found, truth, strict=True):
        assert ((mine.double() - theirs).norm() / theirs.norm()) < 1e-5


def test_dw_of_many_chunks_is_rounded_once(on_cpu, with_tile, formula, monkeypatch):
    monkeypatch.setattr(linear, "LEAST_ROWS", 8)
    tensors, target = draw(rows=96, dtype=torch.bfloat16, bias=False)
    with on_cpu(), with_tile(TILE):
        found = call(tensors, target, torch.tensor(1.0), memory=1)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    truth = torch.autograd.grad(formula(F.linear(*wide), target), wide)
    own = [t.detach().requires_grad_() for t in tensors]
    eager = torch.autograd.grad(formula(F.linear(*own), target), own)
    for mine, reference, baseline in zip(found[1:], truth, eager, strict=True):
        verdict = measure.check(mine, reference, baseline)
        assert verdict.ok, verdict.reason


def test_lse_half_and_leading_dimensions(on_cpu, with_tile):
    (h, w), target = draw(rows=36, dtype=torch.float16, bias=False)
    shaped = h.detach().reshape(4, 9, 24).requires_grad_()
    with on_cpu(), with_tile(TILE):
        loss, lse = ops.linear_cross_entropy(shaped, w, target.reshape(4, 9), return_lse=True)
        (loss + lse.mean()).backward()
    assert lse.shape == (4, 9) and shaped.grad.shape == (4, 9, 24) and shaped.grad.isfinite().all()
    expected = F.cross_entropy(h.detach().float() @ w.detach().float().t(), target)
    torch.testing.assert_close(loss.float(), expected, rtol=5e-3, atol=0)


def test_kept_graph_and_second_gradient(on_cpu, with_tile):
    tensors, target = draw()
    h, w, bias = tensors
    with on_cpu(), with_tile(TILE):
        loss = ops.linear_cross_entropy(h, w, target, bias)
        first = torch.autograd.grad(loss, tensors, retain_graph=True)
        second = torch.autograd.grad(loss, tensors, torch.tensor(2.0), retain_graph=True)
        (dh,) = torch.autograd.grad(loss, h, create_graph=True)
        ddw = torch.autograd.grad(dh.square().sum(), w)[0]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    loss = F.cross_entropy(F.linear(*wide), target)
    (dh,) = torch.autograd.grad(loss, wide[0], create_graph=True)
    truth = torch.autograd.grad(dh.square().sum(), wide[1])[0]
    torch.testing.assert_close(ddw.double(), truth, rtol=1e-4, atol=1e-8)


def test_composed_on_a_cpu():
    tensors, target = draw()
    found = call(tensors, target, torch.tensor(1.0))
    loss = F.cross_entropy(F.linear(*tensors), target)
    for mine, theirs in zip(found, [loss, *torch.autograd.grad(loss, tensors)], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_chunks():
    budget = linear.MEMORY
    for rows in (1, 1024, 4096):  # one chunk: the library adds up dW
        assert linear.chunk_rows(rows, 4096, 128256, 2, budget) == rows
    rows = linear.chunk_rows(16384, 4096, 128256, 2, budget)
    assert rows >= 1024 and rows % 128 == 0
    assert rows * 128256 * 2 + 4096 * 128256 * 4 <= budget
    assert linear.chunk_rows(16384, 4096, 128256, 2, 1) == 1024
    assert linear.chunk_rows(0, 4096, 128256, 2, budget) == 1


@pytest.mark.codegen
def test_one_operation_for_any_number_of_rows():
    h, w = (torch.empty(n, 32, device="meta", requires_grad=True) for n in (40, 500))
    target = torch.empty(40, dtype=torch.int64, device="meta")
    dynamic = {0: {0: (8, 1000)}, 2: {0: (8, 1000)}}
    fn = lambda h, w, t: ops.linear_cross_entropy(h, w, t)  # noqa: E731
    code = compile_for("h200", fn, h, w, target, grad=True, dynamic=dynamic)
    assert code.extern_calls == [
        "torch.ops.inductor_ext.linear_cross_entropy_with_gradient.default"
    ]


@pytest.mark.parametrize("g", [1.0, 0.37])
@pytest.mark.parametrize("padded", [0, 7])
def test_scaling_in_place(g, padded):
    memory = torch.randn(3, 5000 + padded).bfloat16()
    x, expected = memory[:, :5000], memory.clone()
    expected[:, :5000] = (x.float() * g).bfloat16()
    with launches_interpreted(scaling):
        scaling.scale_in_place(x, torch.tensor(g))
    assert torch.equal(memory, expected)  # and nothing beside it


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"w": torch.zeros(130, 23)}, ValueError),
        ({"w": torch.zeros(130, 24, dtype=torch.float64)}, TypeError),
        ({"bias": torch.zeros(131)}, ValueError),
        ({"target": torch.zeros(36, dtype=torch.int64)}, ValueError),
        ({"target": torch.zeros(37)}, TypeError),
        ({"memory": 0}, ValueError),
        ({"reduction": "avg"}, ValueError),
    ],
)
def test_bad_input(change, error):
    (h, w, bias), target = draw()
    with pytest.raises(error, match="expected"):
        ops.linear_cross_entropy(**({"h": h, "w": w, "bias": bias, "target": target} | change))
