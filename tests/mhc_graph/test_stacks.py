"""Layers in a row: what is joined across a sublayer, and programs around the layers."""

import pytest
import torch
import torch.utils.checkpoint
from inductor_ext.lowerings import sites
from mhc_programs import edited, judge_all, post_inputs, pre_inputs, with_gradients
from mhc_variants import build, loop

import inductor_ext
from benchmarks import mhc_forms
from inductor_ext import ops
from inductor_ext.testing import compile_for, run_interpreted

SHORT = mhc_forms.Settings(iters=3)


def stack(form="huggingface", layers=2, hidden=64, **options):
    return mhc_forms.Stack(form, layers, 4, hidden, settings=SHORT, **options)


def tokens(*shape, hidden=64):
    return torch.randn(*shape, hidden).bfloat16()


@pytest.mark.parametrize("form", mhc_forms.PRE)
@pytest.mark.parametrize("dynamic", [None, {0: {1: None}}], ids=["static", "symbolic"])
def test_every_site_of_a_stack(form, dynamic):
    """2 layers are 4 sublayers: 3 boundaries are joined, the last streams go to the head."""
    program = edited(stack(form), tokens(2, 5), dynamic=dynamic)
    expected = ["mhc_pre", *["mhc_post_pre"] * 3, "mhc_post", "mhc_collapse"]
    assert program.operations == expected
    assert program.left == []


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ("mhc_post_pre", ["mhc_pre", "mhc_post", "mhc_pre", "mhc_post", "mhc_collapse"]),
        ("mhc_post", ["mhc_pre", "mhc_pre", "mhc_collapse"]),
        ("mhc_pre", ["mhc_post", "mhc_post"]),
    ],
)
def test_each_is_switched_off_alone(off, expected):
    with inductor_ext.disable(off):
        assert edited(stack(layers=1), tokens(2, 5)).operations == expected


def twice(x, y, post, comb):
    return mhc_forms.deepseek_post(mhc_forms.deepseek_post(x, y, post, comb), y, post, comb)


def test_a_failure_at_one_site_leaves_the_others(monkeypatch):
    edit, failures = sites._edit, []

    def broken(seen, program, replacement):
        if replacement.lowering == "mhc_post" and not failures:
            failures.append(replacement)
            program.before(replacement.place)
            replacement.emit(program)
            raise ValueError("broken")
        edit(seen, program, replacement)

    monkeypatch.setattr(sites, "_edit", broken)
    args = post_inputs(dtype=torch.float32)
    warned = pytest.warns(UserWarning, match="mhc_post failed at .*broken")
    with inductor_ext.config.patch(strict=False), warned:
        program = edited(twice, *args)
    assert program.operations.count("mhc_post") == 1
    judge_all(with_gradients(program.run(twice), args), twice, args)


def boundary(x, y, post, comb, w, scale, base):
    streams = mhc_forms.deepseek_post(x, y, post, comb)
    return streams, *build(loop(2))(streams, w, scale, base)


def boundary_inputs(dtype=torch.bfloat16):
    return [*post_inputs(dtype=dtype), *pre_inputs()[1:]]


def test_streams_that_others_use_are_a_result():
    args = boundary_inputs(torch.float32)
    program = edited(boundary, *args)
    assert program.operations == ["mhc_post_pre"]
    judge_all(with_gradients(program.run(boundary), args), boundary, args)


def test_a_use_before_the_projection_keeps_two_operations():
    def early(x, y, post, comb, w, scale, base):
        streams = mhc_forms.deepseek_post(x, y, post, comb)
        w = w * streams.float().mean()
        return build(loop(2))(streams, w, scale, base)

    program = edited(early, *boundary_inputs())
    assert program.operations == ["mhc_post", "mhc_pre"]
    assert program.left == ["float_1 uses the streams before the projection's inputs exist"]


def two_heads(x, y, post, comb, w, scale, base):
    s = ops.mhc_post(x, y, post, comb)
    return ops.mhc_pre(s, w, scale, base)[0], ops.mhc_pre(s, w * 2, scale, base)[0]


def memory_used_again(x, y, post, comb, w, scale, base):
    y = y + 1
    s = ops.mhc_post(x, y, post, comb)
    y.zero_()
    return s, ops.mhc_pre(s, w, scale, base)[0]


@pytest.mark.parametrize("fn", [two_heads, memory_used_again])
def test_calls_of_a_programs_own_are_in_its_order(fn):
    inputs = [t.detach() for t in boundary_inputs(torch.float32)]
    code = compile_for("h200", fn, *inputs)
    out = run_interpreted(code, *inputs)
    for got, right in zip(out, fn(*(t.double() for t in inputs)), strict=True):
        assert (got - right).norm() <= 1e-5 * right.norm()


def test_gradients_off_for_one_of_two():
    def half(x, y, post, comb, w, scale, base):
        with torch.no_grad():
            streams = mhc_forms.deepseek_post(x, y, post, comb)
        return build(loop(2))(streams, w, scale, base)

    args = boundary_inputs()
    program = edited(half, *args)
    assert program.operations == ["mhc_post", "mhc_pre"]
    assert program.left == ["gradients are recorded for a part of it only"]


def test_a_layer_without_gradients_is_one():
    def frozen(x, w, scale, base, y):
        with torch.no_grad():
            u, post, comb = build(loop(2))(x, w, scale, base)
        return u * y, post, comb

    args = [*pre_inputs(), torch.randn(2, 5, 64).bfloat16().requires_grad_()]
    assert edited(frozen, *args).operations == ["mhc_pre"]


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = stack(layers=1)

    def forward(self, h):
        return torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=False)


def test_a_checkpointed_stack():
    """The layers are a graph of their own inside the program's."""
    program = edited(Checkpointed(), tokens(2, 5).requires_grad_(), graphs=2)
    assert program.operations == ["mhc_pre", "mhc_post_pre", "mhc_post", "mhc_collapse"]


def test_no_new_frames_for_new_numbers_of_tokens():
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    torch._dynamo.reset()
    model = torch.compile(stack(layers=1), backend=backend)
    h = tokens(1, 30)
    torch._dynamo.mark_dynamic(h, 1)
    for count in (30, *range(2, 21)):
        model(h[:, :count] if count != 30 else h)
    assert len(frames) <= 2  # the first with its mark, one without


def test_exported_layers():
    args = tuple(t.detach() for t in pre_inputs())

    class Layer(torch.nn.Module):
        def forward(self, x, w, scale, base):
            return build(loop(2))(x, w, scale, base)

    size = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(Layer(), args, dynamic_shapes=({1: size}, None, None, None))
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    exported.graph_module.recompile()
    program = edited(exported.module(), *args, grad=False, dynamic={0: {1: None}})
    assert program.operations == ["mhc_pre"]


@pytest.mark.codegen
def test_generated_code_of_a_boundary():
    code = compile_for("h200", boundary, *(t.detach() for t in boundary_inputs()))
    names = [k.name.rsplit("_", 1)[0] for k in code.kernels]
    assert code.extern_calls == []
    assert names == ["post_kernel", "projection_kernel", "fuse_kernel"]
    assert [d.lowering for d in code.decisions if d.fired] == [
        "mhc_pre",
        "mhc_post",
        "mhc_post_pre",
    ]


def test_numbers_of_generated_code():
    """The kernels in the interpreter, gradients included."""
    args = boundary_inputs(torch.float32)
    code = compile_for("h200", boundary, *args, grad=True)
    leaves = [a.detach().clone().requires_grad_() for a in args]
    shapes = boundary(*leaves)
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(o.shape, generator=generator).bfloat16().to(o.dtype) for o in shapes]
    out, gradients = run_interpreted(code, *leaves, grad_outputs=given)
    got = [*out, *(gradients[f"args[{i}]"] for i in range(len(args)))]
    judge_all(got, boundary, args)


def test_training_follows_eager():
    """Losses of 20 steps of a small model of the edited program and of eager."""
    torch.manual_seed(3)
    model = stack(layers=1, hidden=32, dtype=torch.float32)
    h, target = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    program = edited(model, h)
    names = [n.target for n in program.graph.nodes if n.op == "placeholder"]
    start = {k: v.detach().clone() for k, v in model.named_parameters()}

    def losses(run):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (run(h) - target).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    own = {_path(k): v for k, v in model.named_parameters()}

    def compiled(h):
        given = [h if n == "L_h_" else own[_of_input(n)] for n in names]
        return program.graph.owning_module(*given)[0]

    eager = losses(model)
    assert eager[-1] < 0.9 * eager[0]
    torch.testing.assert_close(losses(compiled), eager, rtol=1e-4, atol=1e-5)


def _path(name):
    return "".join(c for c in name if c.isalnum())


def _of_input(name):
    for part in ("L_self_", "modules_", "parameters_"):
        name = name.replace(part, "")
    return _path(name)
