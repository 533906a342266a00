"""What Inductor's compile workers are given, when, and how often: on every supported torch."""

import re

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from inductor_ext import compat_ir
from inductor_ext.testing import compile_for

pytestmark = pytest.mark.codegen
BF16 = torch.bfloat16


@pytest.fixture(name="given")
def _given(monkeypatch):
    """(name, text) of each kernel in the order in which workers are given them."""
    given = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: True))
    monkeypatch.setattr(AsyncCompile, "wakeup", classmethod(lambda cls: None))
    monkeypatch.setattr(
        AsyncCompile, "triton", lambda self, name, text, *a, **k: given.append((name, text))
    )
    monkeypatch.setattr(compat_ir, "on_real_card", lambda: True)
    return given


def asked_for(code):
    """name: text of the kernels that the program asks for when it is loaded."""
    found = re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code.source, re.S)
    return dict(found)


def relu_mm(x, w):
    return torch.relu(x @ w)


def behind_others(x, w, bias):
    y = torch.sigmoid(x + 1)
    return torch.addmm(bias, y, w.t()).softmax(-1), y.sum(0)


SITES = {
    "alone": (relu_mm, (64, 4096), (4096, 64)),
    "ragged": (relu_mm, (48, 8195), (8195, 40)),
    "behind others": (behind_others, (64, 7168), (256, 7168), (256,)),
    "batched": (torch.bmm, (2, 16, 8192), (2, 8192, 32)),
    "few rows": (lambda x, w: torch.relu(x @ w.t()), (1, 7168), (256, 7168)),
}


@pytest.mark.parametrize("name", SITES)
def test_no_kernel_is_compiled_twice(name, given):
    fn, *sizes = SITES[name]
    code = compile_for("h200", fn, *(torch.empty(s, dtype=BF16) for s in sizes))
    assert {text for _, text in given} == set(asked_for(code).values())


def test_the_product_is_begun_before_anything_is_scheduled(given):
    compile_for(
        "h200", behind_others, *(torch.empty(s, dtype=BF16) for s in SITES["behind others"][1:])
    )
    assert given[0][0] == "triton_tem_inductor_ext_decompose_k_partial"
    assert "tl.dot" in given[0][1]


def test_equal_products_anywhere_are_one_text(given):
    """Not what they are called or what surrounds them: a process compiles it once."""
    x, w = torch.empty(64, 4096, dtype=BF16), torch.empty(4096, 64, dtype=BF16)
    alone = asked_for(compile_for("h200", relu_mm, x, w))
    both = compile_for(
        "h200", lambda x, w, v: (x.exp(), torch.sigmoid(x @ w), x @ v), x, w, w.clone()
    )
    products = [{t for t in texts.values() if "tl.dot" in t} for texts in (alone, asked_for(both))]
    assert products[0] == products[1] and len(products[0]) == 1


def test_the_kernel_has_whatever_name_a_graph_calls_it():
    code = compile_for("h200", relu_mm, *(torch.empty(s, dtype=BF16) for s in SITES["alone"][1:]))
    product, total = code.kernels
    assert product.name == "triton_tem_fused_mm_0"
    assert "def triton_tem_inductor_ext_decompose_k_partial(" in product.source
    assert "def triton_tem_fused_mm_relu_1(" in total.source
    scope: dict = {}
    exec(product.source.partition("import triton")[0], scope)
    scope["triton_tem_inductor_ext_decompose_k_partial"] = "it"
    assert scope["__getattr__"]("triton_tem_fused_mm_7") == "it"
    with pytest.raises(AttributeError):
        scope["__getattr__"]("__path__")


def test_where_the_name_is_needed_it_is_inductors():
    code = compile_for(
        "h200",
        relu_mm,
        *(torch.empty(s, dtype=BF16) for s in SITES["alone"][1:]),
        options={"cpp_wrapper": True},
    )
    assert "inductor_ext_decompose_k_partial" not in code.source
