"""Calls that are done again from a tape: the same bits as deciding everything anew."""

import pytest
import torch
from inductor_ext.templates import (
    attention_backward_launch,
    attention_decode_launch,
    attention_documents,
    attention_far,
    attention_launch,
)

from inductor_ext.ops import _attention as operation
from inductor_ext.ops import _attention_options as options_of
from inductor_ext.ops import _tape
from inductor_ext.testing import launches_interpreted

MODULES = (
    attention_launch,
    attention_backward_launch,
    attention_decode_launch,
    attention_documents,
    attention_far,
)


class Launch:
    """A launch that is done again in the interpreter, of tensors by their places."""

    def __init__(self, kernel, grid, args, kwargs, compiled, tape):
        self.kernel, self.grid, self.roots = kernel, grid, set()

        def placed(value):
            if isinstance(value, torch.Tensor):
                at = tape.place(value)
                self.roots.add(at.root)
                return at, value.shape, value.stride(), value.dtype
            if hasattr(value, "block_shape"):
                return type(value), placed(value.base), value
            return value

        self.args = [placed(a) for a in args]
        self.kwargs = {n: placed(a) for n, a in kwargs.items()}

    def __call__(self, tensors, addresses):
        def real(value):
            if isinstance(value, tuple) and isinstance(value[0], _tape.Place):
                at, shape, stride, dtype = value
                root = tensors[at.root].view(torch.uint8) if False else tensors[at.root]
                assert root is not None and root.data_ptr() == addresses[at.root]
                offset = root.storage_offset() + at.offset // root.element_size()
                return root.as_strided(shape, stride, offset)
            if isinstance(value, tuple) and isinstance(value[0], type):
                kind, base, like = value
                return kind(real(base), like.shape, like.strides, like.block_shape)
            return value

        args = [real(a) for a in self.args]
        self.kernel[self.grid](*args, **{n: real(a) for n, a in self.kwargs.items()})


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(operation, "kernels_apply", lambda q: True)
    with launches_interpreted(*MODULES):
        yield


def recorded(fn, args):
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a])]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    result, tape = _tape.record(fn, args, tensors, Launch)
    assert not isinstance(tape, str), tape
    return result, tape


def same(mine, right):
    if isinstance(right, torch.Tensor):
        assert mine.stride() == right.stride() and mine.dtype == right.dtype
        assert torch.equal(mine, right)
        return
    assert len(mine) == len(right)
    for one, other in zip(mine, right, strict=True):
        same(one, other)


def draw(rows, columns, heads=4, own=2, d=16, dtype=torch.float32):
    q = torch.randn(2, rows, heads, d, dtype=dtype).transpose(1, 2)
    packed = torch.randn(2, columns, own, 2 * d, dtype=dtype).transpose(1, 2)
    return q, packed[..., :d], packed[..., d:]


def bias(rows, columns):
    return {"bias": torch.randn(1, 4, rows, columns)}


OPTIONS = {
    "causal": lambda rows, columns: {"causal": "lower_right"},
    "bias": bias,
    "documents": lambda rows, columns: {
        "segments": options_of.packed(
            (torch.arange(rows) // 17)[None], (torch.arange(columns) // 17)[None], rows, columns, ""
        )
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [20, 3])
def test_attention(name, rows, on_cpu):
    def call():
        q, k, v = draw(rows, 40)
        options = options_of.Options(scale=0.25, **OPTIONS[name](rows, 40))
        score = options_of.score_of(options, 4, 2)
        return [q, k, v, list(score.inputs), list(score.numbers), score.text, "zero"]

    forward, backward = operation._attention._init_fn, operation._backward._init_fn
    first, second = call(), call()
    _, tape = recorded(forward.fn, first)
    right = forward.fn(*second)
    tensors = [*second[:3], *second[3]]
    same(tape.play(tensors), right)

    def gradients(given, found):
        out, lse = found
        needed = [True] * 3 + [t.is_floating_point() for t in given[3]]
        do = torch.randn(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2)
        return [do, None, *given, out, lse, needed]

    first, second = gradients(first, forward.fn(*first)), gradients(second, right)
    _, tape = recorded(backward.fn, first)
    tensors = [second[0], *tensors, *right]
    same(tape.play(tensors), backward.fn(*second))
