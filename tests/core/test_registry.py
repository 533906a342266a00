"""Registering is additive and seen by every thread; off means stock; failing breaks no compile."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

import inductor_ext
from inductor_ext import compat_ir, config, registry
from inductor_ext.testing import compile_for

aten = torch.ops.aten
BF16 = torch.bfloat16
SKINNY = torch.randn(16, 32768, dtype=BF16), torch.randn(32768, 16, dtype=BF16)


def relu_mm(a, b):
    return torch.relu(a @ b)


def text(code) -> str:
    """The code without what another compile changes: the graph's number, paths of the cache."""
    return re.sub(r"# (AOT ID|kernel path): .*", "", code.source)


def deep_k(code) -> bool:
    return any("decompose_k" in d.lowering and d.fired for d in code.decisions)


_counter = iter(range(1000))


@pytest.fixture
def toy() -> Iterator:
    """``toy(op, lower, **passes)`` registers a lowering under a new name and returns the name.

    What is registered cannot be taken out again: it is off after the test.
    """
    names = []

    def register(op=None, lower=None, first=False, **passes) -> str:
        name = f"test_registry_{next(_counter)}"
        lowering = registry.Lowering(name, {op: lower} if op else {}, passes)
        registry.register(lowering, first=first)
        names.append(name)
        return name

    yield register
    if names:
        inductor_ext.disable(*names)


@contextlib.contextmanager
def not_strict() -> Iterator[None]:
    with config.patch(strict=False):
        yield


def ceil(x):
    return torch.ceil(x) + 1


X = torch.randn(128)


# --- additive -------------------------------------------------------------------------------------


@pytest.mark.codegen
def test_a_lowering_is_used_and_can_decline(toy):
    seen = []

    def cosine(x):
        seen.append(list(x.get_size()))
        return compat_ir.call(aten.cos.default, x) if x.get_size()[0] == 128 else None

    name = toy(aten.ceil.default, cosine)
    assert "tl_math.cos" in compile_for("h200", ceil, X).source
    declined = compile_for("h200", ceil, X[:64])
    assert seen == [[128], [64]] and "cos" not in declined.source
    with inductor_ext.disable(name):
        assert text(declined) == text(compile_for("h200", ceil, X[:64]))
    assert len(seen) == 2


@pytest.mark.codegen
def test_the_entry_that_was_there_is_called_when_ours_declines(toy):
    """Another package's lowering, put there before or after ours, still has its say."""
    from torch._inductor.lowering import lowerings

    op, stock = aten.atan.default, lowerings[aten.atan.default]
    calls = []

    def theirs(tag, below):
        def lowering(*args, **kwargs):
            calls.append(tag)
            return below(*args, **kwargs)

        return lowering

    def ours(x):
        calls.append("ours")

    try:
        lowerings[op] = theirs("before", stock)
        toy(op, ours)
        lowerings[op] = theirs("after", lowerings[op])
        code = compile_for("h200", torch.atan, X)
        assert calls == ["after", "ours", "before"] and len(code.kernels) == 1
    finally:
        lowerings[op] = stock
        del registry._wrapped[op], registry._by_op[op]


def test_lowerings_of_one_operation_are_tried_in_order(toy):
    calls = []

    def says(tag):
        return lambda x: calls.append(tag)

    toy(aten.ceil.default, says("first"))
    toy(aten.ceil.default, says("second"))
    toy(aten.ceil.default, says("in front"), first=True)
    compile_for("h200", ceil, X)
    assert calls == ["in front", "first", "second"]


def test_a_name_is_registered_once(toy):
    name = toy(aten.ceil.default, lambda x: None)
    with pytest.raises(
        ValueError, match=f"expected a new lowering name, got '{name}' a second time"
    ):
        registry.register(registry.Lowering(name))


@pytest.mark.codegen
def test_an_operation_inductor_has_no_lowering_for_keeps_its_stock_code(toy):
    """Inductor makes a fallback with constraints on the inputs' layout for it at its first call."""
    codes = []
    for number in (1, 2):

        @torch.library.custom_op(f"inductor_ext_test::opaque{number}", mutates_args=())
        def opaque(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        opaque.register_fake(torch.empty_like)
        if number == 2:
            toy(opaque._opoverload, lambda x: None)

        def fn(x, opaque=opaque):
            return opaque(x.flip(0).transpose(1, 3).contiguous()[:, ::2])

        codes.append(text(compile_for("h200", fn, torch.randn(2, 8, 16, 16))))
    assert codes[1].replace("opaque2", "opaque1") == codes[0]


# --- every thread ---------------------------------------------------------------------------------


def test_a_thread_started_before_the_import(fresh):
    script = """
        import json, threading, torch

        ready, imported, out = threading.Event(), threading.Event(), []

        def work():
            ready.set()
            imported.wait()
            from inductor_ext.testing import compile_for
            bf16 = torch.bfloat16
            a, b = torch.randn(16, 32768, dtype=bf16), torch.randn(32768, 16, dtype=bf16)
            code = compile_for("h200", lambda a, b: torch.relu(a @ b), a, b)
            out.append([code.calls, [d.fired for d in code.decisions]])

        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
        import inductor_ext
        imported.set()
        thread.join()
        print(json.dumps(out))
    """
    ((calls, fired),) = fresh(script).result
    assert (
        fired == [True] and len(calls) == 2 and all("decompose_k" in c or "mm" in c for c in calls)
    )


def test_a_thread_started_after_the_import():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(compile_for("h200", relu_mm, *SKINNY)))
    thread.start()
    thread.join()
    assert deep_k(codes[0]) and text(codes[0]) == text(compile_for("h200", relu_mm, *SKINNY))


@pytest.mark.codegen
def test_backward_is_lowered_too():
    """The weight's gradient is the skinny product here: xT[16,32768] g[32768,16]."""
    x = torch.randn(32768, 16, dtype=BF16, requires_grad=True)
    w = torch.randn(16, 16, dtype=BF16, requires_grad=True)
    code = compile_for("h200", lambda x, w: torch.tanh(x @ w), x, w, grad=True)
    assert [d.fired for d in code.decisions] == [False, True, False]
    assert "SPLITS" not in code.forward and "SPLITS" in code.backward


@pytest.mark.codegen
def test_backward_in_another_thread_sees_the_lowering(fresh):
    """The backward is compiled where ``.backward()`` runs: a thread without the importer's context.

    On a CPU, autograd runs in the calling thread; on a card, in a thread of its own. Nobody
    imported or configured anything in either.
    """
    script = """
        import contextvars, json, threading, torch
        from inductor_ext import registry

        seen = []
        registry.register(registry.Lowering("test_mm", {
            torch.ops.aten.mm.default: lambda *a, **k: seen.append(threading.current_thread().name)
        }))
        x, w = torch.randn(4, 8), torch.randn(8, 4, requires_grad=True)
        out = torch.compile(lambda x, w: (x @ w))(x, w).sum()
        forward = list(seen)
        thread = threading.Thread(target=out.backward, name="backward")
        thread.start()
        thread.join()
        print(json.dumps([forward, seen[len(forward):], w.grad is not None]))
    """
    forward, backward, has_grad = fresh(script).result
    assert has_grad and set(forward) == {"MainThread"} and set(backward) == {"backward"}


def test_switching_off_reaches_every_thread():
    codes = []
    with inductor_ext.disable("decompose_k"):
        thread = threading.Thread(
            target=lambda: codes.append(compile_for("h200", relu_mm, *SKINNY))
        )
        thread.start()
        thread.join()
    assert not codes[0].decisions and "extern_kernels.mm" in codes[0].calls


# --- enable and disable ---------------------------------------------------------------------------


def test_as_a_call():
    try:
        inductor_ext.disable("decompose_k")
        assert not compile_for("h200", relu_mm, *SKINNY).decisions
        assert ("decompose_k", False, "disable()") in registry.status()
    finally:
        inductor_ext.enable("decompose_k")
    assert deep_k(compile_for("h200", relu_mm, *SKINNY))
    assert ("decompose_k", True, "") in registry.status()


def test_as_a_context_manager_nested():
    on = registry.is_enabled
    with inductor_ext.disable():
        assert not any(enabled for _, enabled, _ in registry.status())
        with inductor_ext.enable("decompose_k"):
            assert on("decompose_k")
            with inductor_ext.disable("decompose_k"):
                assert not on("decompose_k")
            assert on("decompose_k")
        assert not on("decompose_k")
        with pytest.raises(KeyError), inductor_ext.enable():
            assert all(enabled for _, enabled, _ in registry.status())
            raise KeyError
        assert not on("decompose_k")
    assert on("decompose_k")


def test_only_leaves_one_on(toy):
    name = toy(aten.ceil.default, lambda x: None)
    with registry.only(name):
        assert [n for n, enabled, _ in registry.status() if enabled] == [name]
    assert registry.is_enabled("decompose_k")
    with registry.only():
        assert not any(enabled for _, enabled, _ in registry.status())


@pytest.mark.parametrize("switch", [inductor_ext.enable, inductor_ext.disable])
def test_unknown_names_are_refused_and_nothing_changes(switch):
    before = registry.status()
    with pytest.raises(
        ValueError, match=r"expected lowering names among \[.*'decompose_k'.*got nope$"
    ):
        switch("decompose_k", "nope")
    assert registry.status() == before


def test_as_an_environment_variable(fresh):
    script = """
        import json, torch, inductor_ext
        from inductor_ext import registry
        from inductor_ext.testing import compile_for
        bf16 = torch.bfloat16
        args = torch.randn(16, 32768, dtype=bf16), torch.randn(32768, 16, dtype=bf16)
        fn = lambda a, b: torch.relu(a @ b)
        off = compile_for("h200", fn, *args)
        with inductor_ext.enable():
            on = compile_for("h200", fn, *args)
        counts = [len(code.decisions) for code in (off, on)]
        print(json.dumps([registry.status(), counts, off.calls]))
    """
    status, decisions, calls = fresh(script, env={"INDUCTOR_EXT_DISABLE": " decompose_k ,"}).result
    assert ["decompose_k", False, "INDUCTOR_EXT_DISABLE"] in status
    assert not any("INDUCTOR_EXT" in why for name, _, why in status if name != "decompose_k")
    assert decisions == [0, 1] and calls == ["extern_kernels.mm", "triton_poi_fused_relu_0"]


CASES = """
    import torch
    from torch.nn.functional import gelu, linear
    bf16, randn = torch.bfloat16, torch.randn
    skinny = randn(16, 32768, dtype=bf16), randn(32768, 16, dtype=bf16)
    x, w = randn(4, 8192, dtype=bf16), randn(8, 8192, dtype=bf16, requires_grad=True)
    bias, batched = randn(8, dtype=bf16), (randn(2, 4, 4096), randn(2, 4096, 4))
    AUTOTUNE = "max-autotune-no-cudagraphs"
    CASES = [
        (lambda a, b: torch.relu(a @ b), skinny, {}),
        (lambda a, b: torch.relu(a @ b), skinny, {"mode": AUTOTUNE}),
        (lambda x, w, b: gelu(linear(x, w, b)), (x, w, bias), {"grad": True}),
        (torch.bmm, batched, {}),
        (torch.baddbmm, (randn(4), *batched), {"dynamic": {1: {1: (2, 64)}}}),
    ]
"""


@pytest.mark.codegen
def test_off_is_the_stock_code_byte_for_byte(fresh):
    """Off, against a process in which the hooks were taken out of Inductor again."""
    script = f"""
        import json, torch, torch._inductor.fx_passes.joint_graph as joint
        import torch._inductor.fx_passes.post_grad as post
        from torch._inductor.lowering import lowerings
        from torch._inductor.codegen.common import custom_backend_passes

        stock, lists = dict(lowerings), [joint.pass_patterns, post.pass_patterns]
        lengths = [len(l) for l in lists]
        import inductor_ext
        from inductor_ext import registry
        if {{stock}}:
            assert dict(lowerings) != stock
            lowerings.clear()
            lowerings.update(stock)
            for l, n in zip(lists, lengths):
                del l[n:]
            del custom_backend_passes["inductor_ext"]
        else:
            noop = lambda *args, **kwargs: None
            passes = dict(joint=noop, post_grad=noop)
            registry.register(registry.Lowering("test_passes", passes=passes))
            inductor_ext.disable()
        from inductor_ext.testing import compile_for
        {CASES.replace("{", "{{").replace("}", "}}").replace(chr(10), chr(10) + "    ")}
        codes = [compile_for("h200", fn, *args, **how) for fn, args, how in CASES]
        assert not any(code.decisions for code in codes)
        print(json.dumps([code.source for code in codes]))
    """
    stock = fresh(script.format(stock=True)).result
    off = fresh(script.format(stock=False)).result
    assert len(stock) == 5 and all(stock)
    for want, got in zip(stock, off, strict=True):
        assert got == want


# --- a failing lowering ---------------------------------------------------------------------------


def broken(x):
    unused = compat_ir.realize(compat_ir.call(aten.cos.default, x))
    raise ArithmeticError(f"no idea about {unused.get_dtype()}")


@pytest.mark.codegen
def test_a_lowering_that_raises_leaves_stock_and_warns_once(toy):
    (stock,) = compile_for("h200", ceil, X).kernels
    name = toy(aten.ceil.default, broken)
    with not_strict(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code = compile_for("h200", ceil, X)
    ours = [str(w.message) for w in caught if "inductor_ext" in str(w.message)]
    assert ours == [
        f"inductor_ext: {name} failed at aten.ceil.default (ArithmeticError: no idea about "
        "torch.float32); stock code is used there"
    ]
    (kernel,) = code.kernels  # what the lowering had emitted before it failed is gone
    assert kernel.source.split("def triton_")[1] == stock.source.split("def triton_")[1]
    assert code.calls == [kernel.name]
    (decision,) = (d for d in code.decisions if d.lowering == name)
    assert (decision.fired, decision.chosen, decision.sites) == (
        False,
        "stock",
        "aten.ceil.default",
    )
    assert decision.reason == "the lowering failed: ArithmeticError: no idea about torch.float32"


def test_the_rest_of_the_graph_goes_on(toy):
    toy(aten.ceil.default, broken)
    with not_strict(), pytest.warns(UserWarning, match="failed at aten.ceil.default"):
        code = compile_for("h200", lambda a, b: torch.ceil(torch.relu(a @ b)), *SKINNY)
    assert deep_k(code) and len(code.calls) == 2


def test_the_next_lowering_of_the_operation_gets_its_turn(toy):
    toy(aten.ceil.default, broken)
    toy(aten.ceil.default, lambda x: compat_ir.call(aten.sin.default, x))
    with not_strict(), pytest.warns(UserWarning, match="failed at"):
        assert "tl_math.sin" in compile_for("h200", ceil, X).source


def test_strict_raises(toy):
    name = toy(aten.ceil.default, broken)
    with (
        config.patch(strict=True),
        pytest.raises(
            Exception,
            match=rf"inductor_ext: {name} failed at aten.ceil.default \(ArithmeticError: no idea "
            r"about torch.float32\); INDUCTOR_EXT_STRICT=1 asks for this error",
        ),
    ):
        compile_for("h200", ceil, X)


def test_strict_comes_from_the_environment(fresh):
    script = "import json; from inductor_ext import config; print(json.dumps(config.strict))"
    assert fresh(script, env={"INDUCTOR_EXT_STRICT": "1"}).result is True
    assert fresh(script, env={"INDUCTOR_EXT_STRICT": "0"}).result is False
    assert fresh(script).result is False


# --- graph passes ---------------------------------------------------------------------------------


def ceil_to_cos(graph):
    for node in graph.find_nodes(op="call_function", target=aten.ceil.default):
        node.target = aten.cos.default


@pytest.mark.codegen
def test_a_pass_in_front_of_autograd_is_differentiated(toy):
    """What it puts there has the gradient that is traced."""

    def ceil_to_tanh(graph):
        for node in graph.find_nodes(op="call_function", target=torch.ceil):
            node.target = torch.tanh
        graph.owning_module.recompile()

    name = toy(pre_grad=ceil_to_tanh)
    x = X.clone().requires_grad_()
    code = compile_for("h200", ceil, x, grad=True)
    assert "tanh" in code.forward and "tanh" in code.backward + code.forward
    with inductor_ext.disable(name):
        assert "tanh" not in compile_for("h200", ceil, x, grad=True).source


@pytest.mark.codegen
@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_a_graph_pass_runs_unless_it_is_off(toy, stage):
    name = toy(**{stage: ceil_to_cos})
    assert "tl_math.cos" in compile_for("h200", ceil, X).source
    with inductor_ext.disable(name):
        assert "tl_math.cos" not in compile_for("h200", ceil, X).source


def test_an_unknown_stage_is_refused(toy):
    with pytest.raises(ValueError, match=r"expected a stage among .*joint.*pre_grad.*, got .late."):
        toy(late=lambda graph: None)


@pytest.mark.codegen
@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_graph_pass_that_raises_is_skipped_and_warns_once(toy, stage):
    def fails(graph):
        raise LookupError("lost")

    stock = text(compile_for("h200", ceil, X))
    name = toy(**{stage: fails})
    with not_strict(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code = compile_for("h200", ceil, X)
    ours = [str(w.message) for w in caught if "inductor_ext" in str(w.message)]
    assert ours == [
        f"inductor_ext: {name} failed at {name}_{stage} (LookupError: lost); "
        "stock code is used there"
    ]
    assert text(code) == stock
    assert [(d.lowering, d.fired) for d in code.decisions] == [(name, False)]
    with config.patch(strict=True), pytest.raises(Exception, match="INDUCTOR_EXT_STRICT=1 asks"):
        compile_for("h200", ceil, X)


# --- self check -----------------------------------------------------------------------------------


def test_self_check_finds_a_replaced_lowering():
    from torch._inductor.lowering import lowerings

    assert all(ok for _, ok, _ in registry.self_check())
    ours = lowerings[aten.mm.default]
    lowerings[aten.mm.default] = lambda *args: None
    try:
        bad = [(what, detail) for what, ok, detail in registry.self_check() if not ok]
    finally:
        lowerings[aten.mm.default] = ours
    assert bad == [("lowering of aten.mm.default", "another package replaced it after the import")]
