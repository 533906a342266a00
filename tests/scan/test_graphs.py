"""The operations as nodes of programs: their registration, and no recompile for another length."""

import pytest
import torch
from scan_reference import OPS, PAIRS, first, recurrence, scan
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from inductor_ext import ops
from inductor_ext.ops import _recurrence, _scan


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


FLAGS = torch.tensor([False, False, True, False, True])


@pytest.mark.parametrize("op", [*OPS, *PAIRS])
@pytest.mark.parametrize("resets", [None, FLAGS.expand(3, 5)])
def test_scan_is_a_good_operation(op, resets):
    for x in (drawn(3, 5), drawn(5, 3).t(), drawn(1, 5).expand(3, 5), drawn(3, 11)[:, ::2][:, 1:]):
        if op in PAIRS:
            opcheck(_scan._scan_with_index, (x, resets, op, 1, False, False))
        else:
            opcheck(_scan._scan, (x, resets, op, 1, True, False, None))
        if op != "sum" and op not in PAIRS:
            x, g = x.detach(), torch.ones((), dtype=x.dtype).expand(3, 5)
            y = first(ops.scan(x, op))
            opcheck(_scan._backward, (g, x, y, resets, op, 1, False, False))


def test_linear_recurrence_is_a_good_operation():
    for a in (drawn(3, 5), drawn(1, 5).expand(3, 5), drawn(5, 3).t()):
        for h0 in (None, drawn(3)):
            opcheck(_recurrence._recurrence, (a, drawn(3, 5), h0, 1, False))
            opcheck(_recurrence._recurrence, (drawn(3, 5), a, h0, 1, True))
            h = ops.linear_recurrence(a, a, h0).detach()
            given = torch.ones_like(h), a.detach(), h, h0 if h0 is None else h0.detach()
            opcheck(_recurrence._backward, (*given, 1, False))


def test_one_program_for_all_lengths():
    def fn(x, a, cu):
        y = ops.scan(x, "logsumexp", 1, segments=cu) + ops.scan(x, "prod", 1, reverse=True)
        return ops.linear_recurrence(a, y, dim=1), ops.scan(x, "cummax", 1, exclusive=True)[1]

    def loop(x, a, flags):
        y = scan(x, "logsumexp", 1, flags=flags)[0] + scan(x, "prod", 1, reverse=True)[0]
        return recurrence(a, y, dim=1), scan(x, "cummax", 1, exclusive=True)[1]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, dynamic=True, fullgraph=True)
    for n in (7, 12, 33):
        x, a = drawn(2, n), drawn(2, 1)
        cu = torch.tensor([0, 3, 3, n])
        flags = torch.zeros(2, n, dtype=torch.bool)
        flags[:, 3] = True
        results = []
        for run, segments in ((compiled, cu), (loop, flags)):
            h, positions = run(x, a, segments)
            grads = torch.autograd.grad(h.square().sum(), (x, a))
            results.append((h, positions, *grads))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "fn", [lambda x: ops.scan(x, "prod"), lambda x: ops.linear_recurrence(x, x)]
)
def test_derivatives_inside_a_compiled_function(fn):
    """An operation would lose its tangent without a word; outside of a transform it is kept."""

    def both(x):
        slope = torch.func.grad(lambda x: fn(x).sin().sum())(x)
        return torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1], slope, fn(x)

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    x = drawn(3, 5).detach()
    got = torch.compile(both, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, both(x))
    assert sum("inductor_ext" in str(n.target) for n in graphs[0].graph.nodes) == 1
