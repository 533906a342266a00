"""The shadow of a program: its aten operations, where its values are, and what is not followed."""

import pytest
import torch
import torch.nn.functional as F

from inductor_ext import shadow

aten = torch.ops.aten


def program(fn, *args, dynamic=None):
    """The graph in front of AOTAutograd."""
    seen = []
    torch._dynamo.reset()

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return seen[0].graph


def targets(seen):
    return [n.target for n in seen.graph.nodes if n.op == "call_function"]


def node(graph, name):
    return next(n for n in graph.nodes if n.name == name)


X, W = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)


def linear(x, w):
    return torch.sigmoid(F.linear(x, w)) * 2


def test_functions_become_operations():
    graph = program(linear, X, W)
    before = str(graph)
    seen = shadow.trace(graph)
    assert targets(seen) == [
        aten.t.default,
        aten.mm.default,
        aten.sigmoid.default,
        aten.mul.Tensor,
    ]
    assert str(graph) == before
    of = seen.of[node(graph, "sigmoid")]
    assert of.target is aten.sigmoid.default and seen.first[of] is node(graph, "sigmoid")
    assert of.meta["val"].shape == (3, 4)


def test_a_program_with_symbolic_sizes_gets_no_guards():
    graph = program(lambda x, w: linear(x, w).reshape(-1), X, W, dynamic=True)
    values = [shadow.value_of(n) for n in graph.nodes if n.op == "placeholder"]
    env = next(v for v in values if isinstance(v, torch.Tensor)).fake_mode.shape_env
    before = len(env.guards)
    seen = shadow.trace(graph)
    assert aten.mm.default in targets(seen) and len(env.guards) == before


def test_equal_values_are_one_node():
    graph = program(lambda x: (x.float().contiguous() + 1, x), X)
    seen = shadow.trace(graph)
    names = [n.name for n in graph.nodes if n in seen.of and n.op != "placeholder"]
    assert len({seen.of[node(graph, name)] for name in names[:-1]}) == 1


def test_what_gradients_are_recorded_of():
    def fn(x):
        with torch.no_grad():
            y = x.sin()
        return y + x.cos()

    graph = program(fn, X)
    seen = shadow.trace(graph)
    assert not seen.grad[node(graph, "y")]
    assert seen.grad[next(n for n in graph.nodes if n.target == "cos")]


def test_autocast_shows_as_conversions_and_ends():
    def fn(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w)

    seen = shadow.trace(program(fn, X, W))
    mm = next(n for n in seen.graph.nodes if n.target is aten.mm.default)
    assert mm.meta["val"].dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_memory_that_is_written_to():
    def fn(x, w):
        y = x * 2
        z = y.view(-1)
        y.add_(1)
        return z + w.sum()

    graph = program(fn, X, W)
    seen = shadow.trace(graph)
    assert seen.is_mutated(seen.of[node(graph, "z")])
    assert not seen.is_mutated(seen.of[node(graph, "l_w_")])
    assert node(graph, "z") in seen.pure
    assert not any(n.target == "add_" for n in seen.pure)


def test_values_one_after_another_in_one_tensor():
    def fn(x, w):
        y = x * 2
        y += 1
        y.mul_(3)
        return y.sum() + w.sum()

    graph = program(fn, X.detach(), W)
    seen = shadow.trace(graph)
    last = next(n for n in graph.nodes if n.target == "mul_")
    assert not seen.mutated and last in seen.settled and last not in seen.pure
    product = next(n for n in seen.graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 3)
    assert seen.first[product] is last and seen.of[last] is product
    assert seen.is_outdated(node(graph, "y")) and not seen.is_outdated(last)


def test_a_write_that_converts_is_no_value():
    def fn(x):
        y = (x * 2).bfloat16()
        y.add_(x)  # of fp32: the sum is rounded
        return y

    graph = program(fn, X.detach())
    seen = shadow.trace(graph)
    assert seen.is_mutated(seen.of[next(n for n in graph.nodes if n.target == "add_")])


def test_the_last_write_to_what_is_assembled():
    def fn(x):
        y = x.new_empty(x.shape)
        y[:, :4] = x[:, 4:]
        y[:, 4:] = x[:, :4]
        return y * 2

    graph = program(fn, X.detach())
    seen = shadow.trace(graph)
    writes = [n for n in graph.nodes if "setitem" in n.name]
    assembled = seen.of[node(graph, "y")]
    assert seen.is_mutated(assembled) and seen.last_write(assembled) is writes[-1]


def test_what_a_function_writes_inside_is_followed():
    """F.rms_norm adds its eps in place to a value of its own."""
    graph = program(lambda x: F.rms_norm(x, (8,), None, 1e-3), X)
    seen = shadow.trace(graph)
    assert not seen.mutated
    assert seen.of[next(n for n in graph.nodes if "rms_norm" in n.name)] is not None


def test_numbers_from_data_are_not_computed_again():
    def fn(x):
        return x[x > 0] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = program(fn, X.detach())
    seen = shadow.trace(graph)
    assert targets(seen)[-1] is aten.mul.Tensor or not any(
        "nonzero" in str(t) for t in targets(seen)
    )


def test_a_function_as_an_argument_is_a_value_of_its_own():
    def fn(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + 1

    graph = program(fn, X.detach())
    seen = shadow.trace(graph)
    assert targets(seen)[-1] is aten.add.Tensor
    assert seen.mutated  # the branches might write to x


def test_a_change_of_shape_in_place_is_not_followed():
    def fn(x):
        y = x * 2
        y.unsqueeze_(0)
        return y

    with pytest.raises(shadow.NotFollowed, match="changes a tensor's shape in place"):
        shadow.trace(program(fn, X.detach()))


def test_a_graph_without_fake_tensors():
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    with pytest.raises(shadow.NotFollowed, match="it holds no fake tensors"):
        shadow.trace(graph)
