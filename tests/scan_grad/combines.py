"""Combine functions, ``torch.associative_scan`` for tensors on the CPU, and a loop in fp64."""

import contextlib

import pytest
import torch
from inductor_ext.templates import scan_launch

from inductor_ext.ops import _combine_programs
from inductor_ext.testing import launches_interpreted


def affine(a0, h0, a1, h1):
    return a0 * a1, a1 * h0 + h1


def affine_turned(h0, a0, h1, a1):
    return h1 + h0 * a1, a0 * a1


def max_plus(m0, s0, m1, s1):
    return torch.maximum(m0 + s1, m1), s0 + s1


def online_softmax(m0, s0, m1, s1):
    m = torch.maximum(m0, m1)
    return m, s0 * torch.exp(m0 - m) + s1 * torch.exp(m1 - m)


def complex_product(r0, i0, r1, i1):
    return r0 * r1 - i0 * i1, r0 * i1 + i0 * r1


def matrix_product(a, b, c, d, e, f, g, h):
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


def addition(x, y):
    return (x + y,)


def product(x, y):
    return (x * y,)


COMBINES = {
    affine: 2,
    affine_turned: 2,
    max_plus: 2,
    online_softmax: 2,
    complex_product: 2,
    matrix_product: 4,
    addition: 1,
    product: 1,
}


def scan(combine, xs, dim=0, reverse=False):
    """As ``torch.associative_scan`` calls the operation, which it refuses to for CPU tensors."""
    xs = tuple(torch.movedim(x, dim, 0) for x in xs)
    if reverse:
        xs = tuple(torch.flip(x, [0]) for x in xs)
    ys = torch.ops.higher_order.associative_scan(combine, xs, ())
    if reverse:
        ys = [y.flip([0]) for y in ys]
    return [torch.movedim(y, 0, dim) for y in ys]


def loop(combine, xs, dim=0, reverse=False):
    """The scan position by position, in fp64."""
    steps = [x.double().unbind(dim) for x in xs]
    order = range(len(steps[0]))
    order = reversed(order) if reverse else order
    ys, state = {}, None
    for t in order:
        here = tuple(s[t] for s in steps)
        state = here if state is None else combine(*state, *here)
        ys[t] = state
    return [torch.stack([ys[t][i] for t in sorted(ys)], dim) for i in range(len(xs))]


def leaves(count, *shape, dtype=torch.float64):
    """Random numbers around 0.65, whose products neither vanish nor explode."""
    return [(torch.rand(*shape).to(dtype) * 0.5 + 0.4).requires_grad_() for _ in range(count)]


def gradients(ys, weights, xs):
    """Of the weighted sum of those results that have a weight; zeros where there is none."""
    pairs = [(y, w) for y, w in zip(ys, weights, strict=True) if w is not None]
    loss = sum((y * w.to(y.dtype)).sum() for y, w in pairs)
    return torch.autograd.grad(
        loss, xs, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def one_hot_and_all(count):
    """Which results are in a loss: each alone, and all."""
    each = [[i == j for j in range(count)] for i in range(count)]
    return each + ([[True] * count] if count > 1 else [])


@contextlib.contextmanager
def kernels_on_cpu():
    """The kernels apply to CPU tensors, and run on them in the interpreter."""
    with launches_interpreted(scan_launch), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_combine_programs, "kernels_apply", lambda x: True)
        yield
