"""``compile_for``: what is generated, for which function, on which card."""

import pytest
import torch
from torch.export import Dim

from inductor_ext.testing import CARDS, compile_for

MAX = "max-autotune-no-cudagraphs"


def mm_relu(x, w):
    return torch.relu(x @ w)


def test_inference_is_one_library_call_and_one_kernel():
    code = compile_for("h200", mm_relu, torch.randn(32, 64), torch.randn(64, 16))
    assert code.calls == ["extern_kernels.mm", "triton_poi_fused_relu_0"]
    assert code.extern_calls == ["extern_kernels.mm"]
    assert [k.kind for k in code.kernels] == ["pointwise"]
    assert code.frames == 1 and code.graph_kinds == ["inference"] and not code.stopped
    assert code.backward == "" and code.forward == code.source


@pytest.mark.parametrize("card", sorted(CARDS))
def test_code_names_the_card(card):
    code = compile_for(card, torch.sin, torch.randn(64))
    target = CARDS[card]
    assert f"cc={target.capability}," in code.source
    assert f"multi_processor_count={target.multi_processor_count}," in code.source


def test_function_sees_the_card():
    def fn(x):
        assert x.is_cuda and not x.is_meta and x.device.index == 0
        scale = 2.0 if torch.cuda.get_device_capability(x.device) >= (9, 0) else 3.0
        return x * torch.tensor(scale, device=x.device) + torch.zeros(8, device=x.device)

    assert "2.0" in compile_for("h100", fn, torch.randn(4, 8)).source
    assert "3.0" in compile_for("a100", fn, torch.randn(4, 8)).source


def test_meta_tensors_strides_and_offsets_are_kept():
    x = torch.empty(1000, 64, dtype=torch.bfloat16, device="meta")[3:, ::2]
    code = compile_for("h200", lambda x: x + 1, x)
    assert "(997, 32), (64, 2)" in code.source and "bf16" in code.source


def test_training_has_forward_and_backward():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128))
    code = compile_for("h200", model, torch.randn(32, 64), grad=True)
    assert code.graph_kinds == ["forward", "backward"] and code.frames == 1
    assert "extern_kernels.addmm" in code.forward and "gelu_backward" in code.backward
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_no_grad_by_default():
    code = compile_for("h200", torch.nn.Linear(8, 8), torch.randn(4, 8))
    assert code.graph_kinds == ["inference"]


def test_closure_and_global_tensors_are_on_the_card():
    w = torch.randn(64, 16)
    code = compile_for("h200", lambda x: x @ w + GLOBAL, torch.randn(32, 64))
    assert code.frames == 1 and not code.stopped and w.device.type == "cpu"
    assert GLOBAL.device.type == "cpu"


GLOBAL = torch.randn(16)


@pytest.mark.parametrize("size", [(2, 128), Dim("rows", min=2, max=128), None])
def test_dynamic_dimension(size):
    code = compile_for("h200", lambda x: x * 2, torch.randn(32, 64), dynamic={0: {0: size}})
    assert "arg0_1, arg1_1 = args" in code.source and code.frames == 1


def test_marked_dimension_stays_marked():
    x = torch.randn(32, 64)
    torch._dynamo.mark_dynamic(x, 0, min=4, max=64)
    assert "arg0_1, arg1_1 = args" in compile_for("h200", lambda x: x * 2, x).source


def test_sizes_of_an_earlier_compile_do_not_matter():
    def fn(x):
        return x + 1

    for rows in (8, 16):
        assert f"({rows}, 4)" in compile_for("h200", fn, torch.randn(rows, 4)).source


def test_graph_break_goes_on_with_the_second_graph():
    def fn(x, w):
        y = torch.relu(x @ w)
        torch._dynamo.graph_break()
        return y.sum(-1)

    code = compile_for("h200", fn, torch.randn(32, 64), torch.randn(64, 16))
    assert code.frames == 2 and len(code.graphs) == 2
    assert [k.kind for k in code.kernels] == ["pointwise", "persistent_reduction"]


def test_what_depends_on_data_stops_with_a_reason():
    code = compile_for("h200", lambda x: (x + 1).nonzero().sum(), torch.randn(8))
    assert "nonzero" in code.stopped


def test_several_outputs():
    code = compile_for("h200", lambda x: (x + 1, x.sum(0), x.t()), torch.randn(32, 64))
    assert len(code.program.output_refs) == 3 and code.frames == 1


def test_autotuning_takes_the_library_unless_forced():
    args = torch.randn(256, 256), torch.randn(256, 256)
    stock = compile_for("h200", mm_relu, *args, mode=MAX)
    assert stock.extern_calls == ["extern_kernels.mm"] and stock.autotuned["mm"][0] == "mm"
    forced = compile_for("h200", mm_relu, *args, mode=MAX, force={"mm": "BLOCK_M=64"})
    assert not forced.extern_calls and [k.kind for k in forced.kernels] == ["template"]
    assert "BLOCK_M : tl.constexpr = 64" in forced.source
    assert "mm_relu" in forced.kernels[0].name


def test_options_reach_the_compiler():
    code = compile_for("h200", lambda x: x.sum(), torch.randn(64), options={"max_fusion_size": 1})
    assert code.frames == 1
    with pytest.raises(RuntimeError, match="no_such_option"):
        compile_for("h200", torch.sin, torch.randn(4), options={"no_such_option": 1})


def test_attention_is_the_kernel_of_the_card():
    q = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)
    code = compile_for("h200", torch.nn.functional.scaled_dot_product_attention, q, q, q)
    assert code.extern_calls == ["torch.ops.aten._scaled_dot_product_flash_attention.default"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"card": "h300"}, r"one of|out of.*a100.*got 'h300'"),
        ({"mode": "fast"}, "got 'fast'"),
        ({"grad": True}, "requires a gradient for grad=True, got none"),
        ({"force": {"mm": "x"}}, r"autotuned \(\[\]\), got 'mm'"),
        ({"mode": MAX, "force": {"mm": "no_such"}}, "out of .*'triton_mm_0'.*got 'no_such'"),
        ({"dynamic": {5: {0: None}}}, r"arguments 0\.\.1, got 5"),
        ({"fn": 3}, "a function or a module, got int"),
    ],
)
def test_bad_arguments_say_what_was_expected(kwargs, message):
    call = {"card": "h200", "fn": mm_relu, **kwargs}
    args = torch.randn(32, 64), torch.randn(64, 16)
    with pytest.raises(ValueError, match=message):
        compile_for(call.pop("card"), call.pop("fn"), *args, **call)


def test_tensors_elsewhere_are_refused():
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(4, device="cuda")
    with pytest.raises(ValueError, match="plain dense tensors, got a FakeTensor"):
        compile_for("h200", torch.sin, fake)
    with pytest.raises(ValueError, match="got a Tensor of layout"):
        compile_for("h200", torch.sin, torch.randn(4, 4).to_sparse())
