"""What Inductor's compile workers are given, when, and how often: on every supported torch."""

import re

import pytest
import torch
from inductor_ext.lowerings import decompose_k_ahead
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

import inductor_ext
from inductor_ext import compat_ir, compat_pre_grad
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


class Begin:
    """A pass where a program that is in no cache would be seen; the test kit has no caches."""

    name = "begin"

    def __init__(self, given):
        self.given, self.begun = given, []

    def apply(self, graph):
        decompose_k_ahead.begin(graph.owning_module)
        self.begun = list(self.given)


@pytest.fixture(name="ahead")
def _ahead(given, monkeypatch):
    """What was begun before AOTAutograd."""
    entry = Begin(given)
    monkeypatch.setattr(compat_pre_grad, "_entries", [*compat_pre_grad.entries(), entry])
    return entry


linear = torch.nn.Linear(7168, 256, dtype=BF16)
AHEAD = {
    "a layer of batched rows": (lambda x: torch.relu(linear(x)), (2, 32, 7168)),
    "a computed left factor": (lambda x, w: torch.relu(torch.mm(x + 1, w)), (64, 4096), (4096, 64)),
    "a transposed left factor": (
        lambda x, w, b: torch.addmm(b, x.t(), w),
        (4096, 64),
        (4096, 64),
        (64,),
    ),
}


@pytest.mark.parametrize("name", AHEAD)
def test_what_is_begun_in_front_of_autograd_is_what_the_site_asks_for(name, ahead):
    fn, *sizes = AHEAD[name]
    args = [torch.empty(s, dtype=BF16) for s in sizes]
    code = compile_for("h200", fn, *args, grad=name == "a layer of batched rows")
    ((_, text),) = ahead.begun
    assert text in asked_for(code).values()
    assert [d.fired for d in code.decisions if d.lowering == "decompose_k"][:1] == [True]


NOT_AHEAD = {
    "one that fills the card": (relu_mm, (4096, 4096), (4096, 4096)),
    "rows reduced behind it": (lambda x, w: (x @ w).softmax(-1), (64, 4096), (4096, 64)),
    "a computed right factor": (lambda x, w: x @ w.exp(), (64, 4096), (4096, 64)),
    "a right factor that begins later": (lambda x, w: x @ w[1:], (64, 4095), (4096, 64)),
    "three dimensions": (torch.bmm, (2, 16, 8192), (2, 8192, 32)),
}


@pytest.mark.parametrize("name", NOT_AHEAD)
def test_what_might_be_another_kernel_is_not_begun(name, ahead):
    fn, *sizes = NOT_AHEAD[name]
    compile_for("h200", fn, *(torch.empty(s, dtype=BF16) for s in sizes))
    assert ahead.begun == []


def test_a_failure_ahead_is_the_sites_to_meet(ahead, monkeypatch):
    def fails(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(compat_ir, "begin_kernel_of", fails)
    args = [torch.empty(s, dtype=BF16) for s in SITES["alone"][1:]]
    with inductor_ext.config.patch(strict=False):
        code = compile_for("h200", relu_mm, *args)
    assert [d.fired for d in code.decisions] == [True] and ahead.begun == []


def test_only_programs_in_no_cache_are_looked_at(monkeypatch):
    seen = []
    monkeypatch.setattr(compat_pre_grad, "_on_miss", [seen.append])
    compiled = torch.compile(lambda x: torch.mm(x, x))  # a library call: no kernel is compiled
    with fresh_cache():
        compiled(torch.ones(4, 4))
        assert any(node.op == "placeholder" for node in seen[0].graph.nodes)
        torch._dynamo.reset()
        compiled(torch.ones(4, 4))
    assert len(seen) == 1


def test_where_the_name_is_needed_it_is_inductors():
    code = compile_for(
        "h200",
        relu_mm,
        *(torch.empty(s, dtype=BF16) for s in SITES["alone"][1:]),
        options={"cpp_wrapper": True},
    )
    assert "inductor_ext_decompose_k_partial" not in code.source
