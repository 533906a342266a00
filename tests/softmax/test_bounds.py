"""``ops.softmax`` and ``ops.log_softmax`` of nothing, and with batched gradients."""

import pytest
import torch
from inductor_ext.templates.softmax import Tile

from inductor_ext import ops


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 0), -1), ((0, 5), 0), ((0, 5), 1), ((2, 0, 3), 2)])
def test_dimensions_of_no_size(name, shape, dim, on_cpu):
    x = torch.empty(shape, requires_grad=True)
    with on_cpu(Tile(1, 1, 1, 1)):
        y = getattr(ops, name)(x, dim)
        y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape and y is not x


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_batched_gradients(name, on_cpu):
    x, g = torch.randn(3, 30, requires_grad=True), torch.randn(4, 3, 30)
    with on_cpu(Tile(1, 1, 1, 1)):
        y = getattr(ops, name)(x)
        (found,) = torch.autograd.grad(y, x, g, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(y, x, own, retain_graph=True)[0] for own in g]
    torch.testing.assert_close(found, torch.stack(each))
