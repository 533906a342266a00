"""The package's own scans in a graph: what is around them is fused, their gradients too."""

import pytest
import torch

from inductor_ext import ops
from inductor_ext.testing import compile_for

R, N = 5, 130
TAKEN = "an operation of this package"


def arguments(*names):
    made = {
        "x": torch.randn(R, N),
        "a": torch.randn(R, N),
        "h": torch.randn(R),
        "r": torch.rand(R, N) < 0.1,
    }
    return [made[name] for name in names]


# (program, arguments, lines of the forward, lines of the backward)
FUSED = {
    "reverse_sum": (
        lambda x: ops.scan(x * 2, "sum", dim=1, reverse=True) + 1,
        "x",
        ["scan_rows reads=1 writes=1"],
        ["scan_rows reads=1 writes=1"],
    ),
    "recurrence": (
        lambda a, x: ops.linear_recurrence(a.sigmoid(), x * 2, dim=1).tanh(),
        "a x",
        ["scan_rows reads=2 writes=3"],  # its factors and itself are saved
        None,
    ),
    "recurrence_from_a_state": (
        lambda a, x, h: ops.linear_recurrence(a.sigmoid(), x, h, dim=1, reverse=True) * x,
        "a x h",
        ["scan_rows reads=3 writes=3"],
        None,
    ),
    "product": (
        lambda x: ops.scan(x.sigmoid(), "prod", dim=1),
        "x",
        ["scan_rows reads=1 writes=2"],
        ["scan_rows reads=4 writes=1"],
    ),
}


@pytest.mark.codegen
@pytest.mark.parametrize("name", FUSED)
def test_in_training(name, launches, run):
    fn, names, forward, backward = FUSED[name]
    args = [t.requires_grad_() for t in arguments(*names.split())]
    code = compile_for("h200", fn, *args, grad=True)
    found = [d for d in code.decisions if d.lowering == "scan"]
    assert len(found) == 2 and all(d.fired and d.reason.startswith(TAKEN) for d in found)
    parts = launches(code).split("backward\n")
    assert parts[0].split("\n  ")[1:] == [*forward[:-1], f"{forward[-1]}\n"]
    if backward is not None:
        assert parts[1].split() == " ".join(backward).split()
    g = torch.randn(R, N)
    out, grads = run(code, *args, grad_outputs=[g])
    wide = [t.detach().double().requires_grad_() for t in args]
    want = fn(*wide)
    want.backward(g.double())
    assert (out.double() - want).norm() <= 1e-5 * want.norm()
    for i, one in enumerate(wide):
        assert (grads[f"args[{i}]"].double() - one.grad).norm() <= 1e-5 * one.grad.norm()


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("op", ["sum", "max", "logsumexp"])
def test_segments(op, exclusive, launches, run):
    x, r = arguments("x", "r")

    def fn(x, r):
        return ops.scan(x * 0.5, op, dim=1, segments=r, exclusive=exclusive).exp()

    code = compile_for("h200", fn, x, r)
    assert launches(code).count("scan_rows") == 1
    torch.testing.assert_close(run(code, x, r), fn(x, r))


@pytest.mark.codegen
def test_any_size(launches, run):
    def fn(a, x):
        return ops.linear_recurrence(a.sigmoid(), x * 2, dim=1).tanh()

    code = compile_for("h200", fn, *arguments("a", "x"), dynamic=True)
    assert code.frames == 1 and launches(code) == "inference\n  scan_rows reads=2 writes=1\n"
    a, x = torch.randn(3, 77), torch.randn(3, 77)
    torch.testing.assert_close(run(code, a, x), fn(a, x))
