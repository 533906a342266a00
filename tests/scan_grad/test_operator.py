"""The operation of any combine function and its gradient, against loops in fp64."""

import combines as c
import pytest
import torch

from inductor_ext.ops import _combine, _combine_programs
from inductor_ext.ops import _combine_text as texts


def text_of(combine, xs):
    slices = [torch.empty(3, dtype=x.dtype) for x in xs]
    return texts.write(lambda *args: list(combine(*args)), slices)


COMBINES = pytest.mark.parametrize("combine", c.COMBINES, ids=lambda f: f.__name__)


@COMBINES
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_values_and_gradients_are_those_of_a_loop(combine, reverse):
    for length in (1, 2, 5, 8):
        xs = c.leaves(c.COMBINES[combine], 2, length, 3)
        got = _combine.associative_scan(xs, text_of(combine, xs), 1, reverse)
        expected = c.loop(combine, xs, 1, reverse)
        torch.testing.assert_close(got, expected)
        for chosen in c.one_hot_and_all(len(xs)):
            weights = [
                torch.randn_like(y) if use else None
                for y, use in zip(expected, chosen, strict=True)
            ]
            torch.testing.assert_close(*(c.gradients(ys, weights, xs) for ys in (got, expected)))


@COMBINES
def test_kernels_agree_with_a_loop(combine):
    """Programs in the interpreter, of both directions, with results that have no gradient."""
    for reverse, shape, dim in ((False, (2, 9, 3), 1), (True, (3, 5), 1), (False, (6, 2), 0)):
        xs = c.leaves(c.COMBINES[combine], *shape)
        text = text_of(combine, xs)
        expected = c.loop(combine, xs, dim, reverse)
        plain = [x.detach() for x in xs]
        dtypes = tuple(x.dtype for x in xs)
        with c.kernels_on_cpu():
            got = _combine.associative_scan(plain, text, dim, reverse)
            torch.testing.assert_close(got, expected)
            for chosen in c.one_hot_and_all(len(xs)):
                weights = [
                    torch.randn_like(y) if use else None
                    for y, use in zip(expected, chosen, strict=True)
                ]
                present = [i for i, use in enumerate(chosen) if use]
                found = _combine._backward(
                    [weights[i] for i in present], plain, got, text, dim, reverse, present
                )
                leaves = _combine_programs.reached(text, dtypes, present)[1]
                gradients = c.gradients(expected, weights, xs)
                for i, gradient in enumerate(gradients):
                    if i in leaves:
                        torch.testing.assert_close(found[leaves.index(i)], gradient)
                    else:
                        assert not gradient.any()


@pytest.mark.parametrize(
    "combine", [c.affine, c.online_softmax, c.complex_product], ids=lambda f: f.__name__
)
def test_gradients_of_gradients(combine):
    xs = c.leaves(2, 2, 4)
    text = text_of(combine, xs)
    for reverse in (False, True):
        fn = lambda *xs: _combine.associative_scan(xs, text, 1, reverse)  # noqa: B023, E731
        assert torch.autograd.gradcheck(fn, xs)
        assert torch.autograd.gradgradcheck(fn, xs)


def test_the_operation_is_registered_as_torch_expects():
    xs = c.leaves(2, 4, 3)
    torch.library.opcheck(_combine._scan, (xs, text_of(c.affine, xs), 0, True))


@pytest.mark.parametrize("kernels", [False, True], ids=["composed", "kernels"])
def test_16_bit_leaves_are_carried_in_fp32(kernels):
    """Sums and their gradients are rounded once; more complicated ones read rounded results."""
    for combine, count in ((c.addition, 1), (c.affine, 2)):
        xs = c.leaves(count, 2, 300, dtype=torch.bfloat16)
        plain = [x.detach() for x in xs]
        text = text_of(combine, xs)
        wide = [x.detach().double().requires_grad_() for x in xs]
        expected = c.loop(combine, wide, 1)
        weights = [torch.rand(2, 300).bfloat16() for _ in xs]
        gradients = c.gradients(expected, weights, wide)
        if kernels:
            with c.kernels_on_cpu():
                got = _combine.associative_scan(plain, text, 1)
                found = _combine._backward(weights, plain, got, text, 1, False, [*range(count)])
        else:
            got = _combine.associative_scan(xs, text, 1)
            found = torch.autograd.grad(got, xs, weights)
        for mine, reference in zip((*got, *found), (*expected, *gradients), strict=True):
            assert mine.dtype == torch.bfloat16
            error = (mine.double() - reference).abs()
            if combine is c.addition:
                assert (error <= 1.001 * 2**-8 * reference).all()
            else:
                assert error.max() < 2**-7 * reference.abs().max()


def test_integers_and_truths_among_the_leaves():
    """The position of the maximum: a leaf without a gradient that depends on one with it."""

    def argmax(v0, i0, w0, v1, i1, w1):
        later = v1 >= v0
        return torch.where(later, v1, v0), torch.where(later, i1, i0), w0 | w1

    values = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    xs = [values, torch.arange(7).expand(3, 7), torch.rand(3, 7) < 0.3]
    got = _combine.associative_scan(xs, text_of(argmax, xs), 1)
    expected = torch.cummax(values, 1)
    assert torch.equal(got[1], expected.indices) and got[2].dtype == torch.bool
    weight = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(
        *(torch.autograd.grad((v * weight).sum(), values)[0] for v in (got[0], expected.values))
    )


def test_bad_texts_and_leaves():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"leaves of one shape .* got \[4, 3\] and \[4, 2\]"):
        _combine.associative_scan([x, x[:, :2]], text_of(c.affine, [x, x]), 0)
    for text in (
        "a0, a1, __import__",
        "v0 = add.Tensor(a0, b9); v0",
        "v0 = sum.default(a0); v0",
        "(",
    ):
        with pytest.raises(ValueError, match="expected the text of a combine function of 1 leaves"):
            texts.read(text, 1)
