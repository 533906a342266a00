"""What Inductor writes for a card: ``torch.associative_scan`` and ``cumprod`` with gradients."""

import combines as c
import pytest
import torch
from inductor_ext.lowerings import scan_gradient
from torch._higher_order_ops.associative_scan import associative_scan

import inductor_ext
from inductor_ext.testing import compile_for, run_interpreted

T = 37


@pytest.fixture(autouse=True)
def stock_scans():
    """Inductor's own code for a scan itself."""
    with inductor_ext.disable("scan"):
        yield


def generate(fn, xs, **how):
    return compile_for("h200", fn, *(x.detach().requires_grad_() for x in xs), grad=True, **how)


def scanned(combine, xs, reverse=False):
    pair = lambda earlier, later: combine(*earlier, *later)  # noqa: E731
    return associative_scan(pair, tuple(xs), 1, reverse)


@pytest.mark.codegen
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("combine", [c.affine, c.online_softmax], ids=lambda f: f.__name__)
def test_one_scan_each_way(combine, reverse):
    xs = c.leaves(2, 2, T, 3, dtype=torch.float32)
    code = generate(lambda a, b: scanned(combine, (a.sigmoid(), b), reverse), xs)
    assert "tl.associative_scan" in code.forward and not code.extern_calls[1:]
    assert (
        "associative_scan_backward" in code.backward and "tl.associative_scan" not in code.backward
    )
    assert f", 1, {reverse}, [0, 1])" in code.backward  # along the dimension, without flips
    assert f"{T}, {T}" not in code.source
    grads = [torch.randn(2, T, 3) for _ in xs]
    values, found = run_interpreted(code, *xs, grad_outputs=grads)
    wide = [x.detach().double().requires_grad_() for x in xs]
    expected = c.loop(combine, (wide[0].sigmoid(), wide[1]), 1, reverse)
    for got, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(got, reference.float())
    for i, reference in enumerate(c.gradients(expected, grads, wide)):
        torch.testing.assert_close(found[f"args[{i}]"], reference.float())


def test_a_state_that_nobody_else_reads_is_a_recurrence():
    xs = c.leaves(2, 2, T, 3, dtype=torch.float32)
    code = generate(lambda a, b: scanned(c.affine, (a, b))[1], xs)
    names = ["linear_recurrence", "linear_recurrence_backward"]
    assert code.extern_calls == [f"torch.ops.inductor_ext.{name}.default" for name in names]
    assert code.kernels == []


@pytest.mark.codegen
def test_a_symbolic_length():
    """Compiled for one length, right at another."""
    length = torch.export.Dim("length", min=2, max=4096)
    xs, others = (c.leaves(2, 2, t, 3, dtype=torch.float32) for t in (T, 50))
    fn = lambda a, b: scanned(c.online_softmax, (a, b))  # noqa: E731
    code = generate(fn, xs, dynamic={i: {1: length} for i in range(2)})
    grads = [torch.randn(2, 50, 3) for _ in others]
    values, found = run_interpreted(code, *others, grad_outputs=grads)
    wide = [x.detach().double().requires_grad_() for x in others]
    expected = c.loop(c.online_softmax, wide, 1)
    for got, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(got, reference.float())
    for i, reference in enumerate(c.gradients(expected, grads, wide)):
        torch.testing.assert_close(found[f"args[{i}]"], reference.float())


@pytest.mark.codegen
def test_a_gradient_that_is_not_known_is_refused_where_it_is_asked_for(monkeypatch):
    def write(combine, slices):
        raise scan_gradient.texts.NotPointwise("it is too dark to read it")

    monkeypatch.setattr(scan_gradient.texts, "write", write)
    xs = c.leaves(2, 2, T, 3, dtype=torch.float32)
    why = "the gradient of this associative_scan is not known: it is too dark to read it"
    with pytest.raises(Exception, match=why):
        generate(lambda a, b: scanned(c.affine, (a, b))[1], xs)
    code = generate(lambda a, b: scanned(c.affine, (a, b))[1].detach() * a, xs)
    value, found = run_interpreted(code, *xs, grad_outputs=[torch.ones(2, T, 3)])
    h = c.loop(c.affine, xs, 1)[1].float()
    torch.testing.assert_close(value, h * xs[0])
    torch.testing.assert_close(found["args[0]"], h)
    # Of one leaf torch's own is right.
    code = generate(lambda a, b: scanned(c.product, (a,))[0] * b, xs)
    assert "inductor_ext" not in code.source


@pytest.mark.codegen
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products(zeros):
    """Zeros are no case of their own; torch's gradient would be three scans."""
    (x,) = c.leaves(1, 3, T, dtype=torch.float32)
    with torch.no_grad():
        x[0, [5, 20][:zeros]] = 0
    code = generate(lambda x: (2 * x).cumprod(-1, dtype=torch.float64).float(), [x])
    assert code.extern_calls == ["torch.ops.inductor_ext.scan_backward.default"]
    assert "tl.associative_scan" not in code.backward
    g = torch.randn(3, T)
    value, found = run_interpreted(code, x, grad_outputs=[g])
    wide = x.detach().double().requires_grad_()
    expected = torch.stack([(2 * wide[:, : t + 1]).prod(1) for t in range(T)], 1)
    torch.testing.assert_close(value, expected.float())
    torch.testing.assert_close(found["args[0]"], c.gradients([expected], [g], [wide])[0].float())


def test_products_without_a_gradient_are_torchs_own():
    code = compile_for("h200", lambda x: x.cumprod(1), torch.rand(3, T))
    assert "inductor_ext" not in code.source and not code.decisions


def test_disabled_it_leaves_torchs_gradient():
    xs = c.leaves(1, 2, T, dtype=torch.float32)
    with inductor_ext.disable("scan_gradient"):
        code = generate(lambda x: scanned(c.product, (x,))[0] * x.cumprod(1), xs)
    assert "inductor_ext" not in code.source


@pytest.mark.codegen
def test_with_scan_kernels_all_of_it_is_fused():
    """One kernel each way, with what is in front of a scan and behind it."""
    xs = c.leaves(2, 2, T, 3, dtype=torch.float32)

    def fn(scan):
        def loss(a, b):
            p, h = scan(a.sigmoid(), b.tanh())
            return p.sin() + h

        return loss

    with inductor_ext.enable("scan"):
        code = generate(
            fn(lambda *xs: scanned(c.online_softmax, xs, True)), xs, force={"scan": "scan"}
        )
    assert code.extern_calls == []
    for part in (code.forward, code.backward):
        assert part.count("def scan_") == 1 and "def triton_" not in part
    grads = [torch.randn(2, T, 3)]
    (value, found) = run_interpreted(code, *xs, grad_outputs=grads)
    wide = [x.detach().double().requires_grad_() for x in xs]
    expected = fn(lambda *xs: c.loop(c.online_softmax, xs, 1, True))(*wide)
    torch.testing.assert_close(value, expected.float())
    for i, reference in enumerate(c.gradients([expected], grads, wide)):
        torch.testing.assert_close(found[f"args[{i}]"], reference.float())
