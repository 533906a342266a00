"""Compiled programs: gradients, refusals, sizes, caches."""

import combines as c
import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def compiled_gradients(fn, xs, **how):
    torch._dynamo.reset()
    loss = torch.compile(fn, fullgraph=True, **how)(*xs)
    return torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True)


def assert_right(fn, reference, xs):
    expected = torch.autograd.grad(reference(*xs), xs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(compiled_gradients(fn, xs), expected)


def test_the_loss_uses_h_only():
    """pytorch #172568: torch gives grad(a) = 0."""
    xs = [
        (torch.rand(5, dtype=torch.float64) * 0.5 + 0.4).requires_grad_(),
        torch.randn(5, dtype=torch.float64, requires_grad=True),
    ]
    grads = compiled_gradients(lambda a, b: c.scan(c.affine, (a, b))[1].sum(), xs)
    expected = torch.autograd.grad(c.loop(c.affine, xs)[1].sum(), xs)
    assert expected[0].abs().max() > 0.5
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize(
    ("combine", "ways"),
    [
        (c.affine, ((False, [0]), (True, [1]))),
        (c.affine_turned, ((True, [0, 1]),)),
        (c.online_softmax, ((True, [0, 1]), (False, [1]))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_losses_on_some_results(combine, ways):
    xs = c.leaves(c.COMBINES[combine], 3, 6, 2)
    weights = torch.randn(len(xs), 3, 6, 2, dtype=torch.float64)
    for reverse, chosen in ways:

        def loss(ys):
            return sum((ys[i].sin() * weights[i]).sum() for i in chosen)  # noqa: B023

        assert_right(
            lambda *xs: loss(c.scan(combine, [x * x for x in xs], 1, reverse)),  # noqa: B023
            lambda *xs: loss(c.loop(combine, [x * x for x in xs], 1, reverse)),  # noqa: B023
            xs,
        )


def test_a_result_in_the_order_of_the_scan_and_of_memory():
    """One user of a reversed scan turns it around, another does not."""
    xs = c.leaves(2, 6, 2)
    weight = torch.randn(6, 2, dtype=torch.float64)

    def fn(a, b):
        turned = torch.ops.higher_order.associative_scan(c.affine, (a.flip([0]), b.flip([0])), ())
        return (turned[1] * weight).sum() + (turned[1].flip([0]) * turned[0]).sum()

    def reference(a, b):
        p, h = (y.flip(0) for y in c.loop(c.affine, (a, b), 0, True))
        return (h * weight).sum() + (h.flip(0) * p).sum()

    assert_right(fn, reference, xs)


def test_one_scan_feeds_another():
    xs = c.leaves(2, 4, 3)

    def fn(scan):
        def loss(a, b):
            p, h = scan(c.affine, (a, b))
            return scan(c.online_softmax, (p, h), 1, True)[1].sum()

        return loss

    assert_right(fn(c.scan), fn(c.loop), xs)


def test_inside_a_checkpointed_function():
    xs = c.leaves(2, 4, 3)
    assert_right(
        lambda *xs: checkpoint(lambda *xs: c.scan(c.affine, xs)[1], *xs, use_reentrant=False).sum(),
        lambda *xs: c.loop(c.affine, xs)[1].sum(),
        xs,
    )


def test_new_lengths_do_not_compile_again():
    torch._dynamo.reset()
    fn = torch.compile(
        lambda a, b: (lambda p, h: (p * h).sum())(*c.scan(c.affine, (a, b), 1, True)),
        fullgraph=True,
    )
    stats = torch._dynamo.utils.counters["stats"]
    for length in (7, 12, 30):
        xs = c.leaves(2, 2, length, 3)
        for x in xs:
            torch._dynamo.mark_dynamic(x, 1)
        before = stats["unique_graphs"]
        got = torch.autograd.grad(fn(*xs), xs)
        assert (stats["unique_graphs"] > before) == (length == 7)
        p, h = c.loop(c.affine, xs, 1, True)
        torch.testing.assert_close(got, torch.autograd.grad((p * h).sum(), xs))


def test_all_sizes_symbolic():
    """torch before 2.15 takes the sizes that a combine function is given for tensors."""
    for sizes in ((2, 7, 3), (4, 9, 5)):
        xs = c.leaves(2, *sizes)
        fn = lambda a, b: c.scan(c.affine, (a, b), 1)[1].sum()  # noqa: E731
        got = compiled_gradients(fn, xs, dynamic=True)
        expected = torch.autograd.grad(c.loop(c.affine, xs, 1)[1].sum(), xs)
        torch.testing.assert_close(got, expected)


def test_without_a_gradient_the_scan_is_left_alone(monkeypatch):
    """What the graphs of a program hold, seen by a pass behind ours."""
    from inductor_ext.lowerings import scan_gradient

    seen = []
    replace = scan_gradient._replace
    monkeypatch.setattr(scan_gradient, "_replace", lambda *a: (seen.append(a), replace(*a)))
    xs = [x.detach() for x in c.leaves(2, 4, 3)]

    def fn(a, b):
        return c.scan(c.affine, (a, b))[1]

    def outcome(fn, xs):
        torch._dynamo.reset()
        seen.clear()
        try:
            torch.compile(fn, fullgraph=True)(*xs)
        except Exception as error:  # Inductor has no scans on a CPU
            assert "associative_scan" in str(error)
        return len(seen)

    assert outcome(fn, xs) == 0
    with torch.no_grad():
        assert outcome(fn, [x.requires_grad_() for x in xs]) == 0
    assert outcome(fn, xs) == 1


UNKNOWN = "the gradient of this associative_scan is not known: "


@pytest.mark.parametrize("differentiable", [False, True])
def test_leaves_of_several_shapes_are_rejected(differentiable):
    """Inductor alone gives every result the shape of the first leaf."""
    xs = [*c.leaves(1, 5, 1), *c.leaves(1, 5, 3)]
    xs = xs if differentiable else [x.detach() for x in xs]
    fn = torch.compile(lambda a, b: c.scan(c.affine, (a, b))[1].sum())
    with pytest.raises(Exception, match=r"expected leaves of one shape .*\[5, 1\] and \[5, 3\]"):
        fn(*xs)


def test_a_combine_function_that_detaches_has_no_gradient():
    def combine(a0, h0, a1, h1):
        return a0 * a1, a1.detach() * h0 + h1

    with pytest.raises(Exception, match=UNKNOWN + "its combine function has a gradient of its own"):
        compiled_gradients(lambda a, b: c.scan(combine, (a, b))[1].sum(), c.leaves(2, 5, 3))


@pytest.mark.skipif(TORCH < (2, 15), reason="torch itself refuses")
def test_tensors_from_outside_have_no_gradient():
    xs, outside = c.leaves(2, 5, 3), torch.rand(3, dtype=torch.float64)

    def combine(a0, h0, a1, h1):
        return a0 * a1 * outside, a1 * h0 + h1

    with pytest.raises(Exception, match=UNKNOWN + "its combine function reads .* from outside"):
        compiled_gradients(lambda a, b: c.scan(combine, (a, b))[1].sum(), xs)


def test_generated_code_is_kept_in_the_cache():
    """AOTAutograd's cache leaves out what Dynamo made of ``associative_scan``; Inductor's, which
    would leave out graphs that hold it, has both directions."""
    xs = c.leaves(2, 5, 3)

    def fn(a, b):
        p, h = c.scan(c.affine, (a, b))
        return (p + h).sum()

    counters = torch._dynamo.utils.counters  # emptied by the first compile of a process
    with fresh_cache():
        for hits in (0, 2):
            counters.clear()
            assert_right(fn, lambda a, b: sum(c.loop(c.affine, (a, b))).sum(), xs)
            counted = counters["inductor"]
            assert counted["fxgraph_cache_hit"] == hits
            assert counted["fxgraph_cache_bypass"] == 0
