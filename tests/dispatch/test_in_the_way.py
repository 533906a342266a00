"""What branching leaves alone: CUDA graphs, other choices, stock where something is off."""

import re

import pytest
import torch

import inductor_ext
from inductor_ext import compat, compat_dispatch, config, dispatch, matching
from inductor_ext.testing import compile_for, outline

BF16 = torch.bfloat16
ANY = {0: {0: None}}


def t(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def relu_mm(a, b):
    return torch.relu(a @ b)


ARGS = t(16, 4096), t(4096, 32)


def same_text(code, other):
    mask = re.compile(r"\b\d+_(inference|forward|backward)\b")
    return mask.sub("", code.source) == mask.sub("", other.source)


def without_the_plugin(monkeypatch):
    """Inductor's own lowerings and passes."""
    from torch._inductor.fx_passes import post_grad

    own = [p for p in post_grad.pass_patterns if not isinstance(p, dispatch.Pass)]
    assert len(own) < len(post_grad.pass_patterns)
    monkeypatch.setattr(post_grad, "pass_patterns", own)
    for op in ("mm", "addmm", "bmm", "baddbmm"):
        for overload in ("default", "dtype"):
            target = getattr(getattr(torch.ops.aten, op), overload)
            stock = compat.lowering_of(target).__wrapped__
            monkeypatch.setitem(compat._lowering_table(), target, stock)


@pytest.mark.codegen
def test_disabled_is_stock_byte_for_byte(monkeypatch):
    ours = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    with inductor_ext.disable("decompose_k"):
        disabled = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    assert disabled.decisions == [] and not same_text(ours, disabled)
    without_the_plugin(monkeypatch)
    assert same_text(disabled, compile_for("h200", relu_mm, *ARGS, dynamic=ANY))


def test_two_compiles_give_the_same_text():
    first, second = (compile_for("h200", relu_mm, *ARGS, dynamic=ANY) for _ in range(2))
    assert same_text(first, second)


def test_static_sizes_have_no_branch():
    code = compile_for("h200", relu_mm, *ARGS)
    assert code.decisions[0].ranges == () and "size_dispatch" not in code.source


def test_forced_choice_is_one_choice_for_all_sizes():
    bounded = {0: {0: (2, 64)}}
    code = compile_for("h200", relu_mm, *ARGS, dynamic=bounded, force={"decompose_k": "split.*"})
    assert len(code.calls) == 2 and not re.search(r"if s\d+", code.source)


# Inductor warns that graphs of changing sizes are captured once per size.
@pytest.mark.codegen
@pytest.mark.filterwarnings("ignore:.*CUDAGraph.*")
@pytest.mark.parametrize(
    "options", [{"triton.cudagraphs": True, "graph_partition": p} for p in (True, False)]
)
def test_cuda_graph_is_not_split(options, monkeypatch):
    from torch._inductor.graph import GraphLowering

    reasons = []
    codegen = GraphLowering.codegen

    def watched(graph):
        result = codegen(graph)
        reasons.append(graph.disable_cudagraphs_reason)
        return result

    monkeypatch.setattr(GraphLowering, "codegen", watched)

    def fn(a, b, c):
        return torch.relu(a @ b).cumsum(0) + (a.sin() @ c)

    args = (*ARGS, t(4096, 32))
    code = compile_for("h200", fn, *args, dynamic=ANY, options=options)
    products = [d for d in code.decisions if d.lowering == "decompose_k"]
    assert [len(d.ranges) > 1 for d in products] == [True, True]
    assert reasons == [None]
    partitions = re.findall(r"^def partition_(\d+)", code.source, re.MULTILINE)
    assert partitions == (["0"] if options["graph_partition"] else [])
    if options["graph_partition"]:
        inside = code.source[code.source.index("def partition_0") :]
        inside = inside[: inside.index("async_compile.wait")]
        assert inside.count("else:") == 2 and "self.partitions[0]" in code.source


def test_branches_select_no_device_again():
    code = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    assert code.source.count("torch.cuda._DeviceGuard(0)") == 1
    body = code.source[code.source.index("if s") :]
    assert "assert_size_stride" not in body[: body.index("return")]


@pytest.mark.codegen
def test_no_memory_is_allocated_for_what_is_fused():
    code = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    allocated = re.findall(r"^\s+(range\w+) = empty_strided_cuda", code.source, re.MULTILINE)
    assert allocated
    for name in allocated:
        assert re.search(rf"(run|mm)\(.*\b{name}\b", code.source), name


def test_size_that_depends_on_data_is_left_to_stock():
    def fn(x, w, n):
        m = n.item()
        torch._check(m >= 2)
        torch._check(m <= 512)
        return torch.relu(x[:m] @ w)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        code = compile_for("h200", fn, t(512, 4096), t(4096, 32), torch.tensor(20))
    (decision,) = code.decisions
    assert not decision.fired and "depends on data" in decision.reason
    assert "size_dispatch" not in code.source


def broken(*args, **kwargs):
    raise RuntimeError("a bug in here")


BREAK = {
    "growing the region": (matching, "fusible_region"),
    "finding the ranges": (dispatch, "boxes_of"),
    "copying the region": (matching.Region, "copy"),
    "lowering a branch": (compat_dispatch, "lower_branch"),
    "emitting the node": (compat_dispatch, "emit"),
}


@pytest.mark.parametrize("what", BREAK)
def test_failure_leaves_stock(what, monkeypatch):
    with inductor_ext.disable():
        stock = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    monkeypatch.setattr(*BREAK[what], broken)
    with (
        inductor_ext.config.patch(strict=False),
        pytest.warns(UserWarning, match=r"decompose_k failed at .*a bug in here"),
    ):
        code = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    assert outline(code) == outline(stock)
    assert "a bug in here" in code.decisions[0].reason
    with pytest.raises(Exception, match="a bug in here"):
        compile_for("h200", relu_mm, *ARGS, dynamic=ANY)


@pytest.mark.codegen
def test_wrapper_that_can_not_branch_keeps_one_choice(monkeypatch):
    monkeypatch.setattr(compat_dispatch, "can_branch", lambda: "the wrapper is of another kind")
    code = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    (decision,) = code.decisions
    assert not decision.fired and decision.reason == "the wrapper is of another kind"
    assert code.calls[0] == "extern_kernels.mm"


@pytest.mark.codegen
@pytest.mark.parametrize("rows", [1 << 20, 1 << 26])
def test_traced_beyond_32_bit_offsets(rows):
    """A branch's assumed size must not decide the width of an index that is then guarded."""

    def fn(x, w, b):
        return torch.relu(x @ w)[:, None, :] * b.view(1, 64, 1)

    code = compile_for("h200", fn, t(rows, 2048), t(2048, 64), t(64, 1), dynamic=ANY)
    assert len(code.decisions[0].ranges) > 2 and "elif s" in code.source


@pytest.mark.codegen
def test_memory_planning_is_left_alone():
    """Its pools span the program: a branch not taken would have allocated them."""
    code = compile_for("h200", relu_mm, *ARGS, dynamic=ANY, options={"memory_planning": True})
    (decision,) = code.decisions
    assert not decision.fired and "memory planning" in decision.reason
    assert not re.search(r"if s\d+", code.source)


def test_no_branch_where_cpp_would_lack_its_kernels(monkeypatch):
    """One choice for bounded sizes, else stock with the reason."""
    monkeypatch.setattr(compat_dispatch, "lacks_kernels", lambda: True)
    code = compile_for("h200", relu_mm, *ARGS, dynamic=ANY)
    (decision,) = code.decisions
    assert not decision.fired and "no upper bound" in decision.reason
    assert not re.search(r"if s\d+ <=", code.source)
    code = compile_for("h200", relu_mm, *ARGS, dynamic={0: {0: (2, 64)}})
    (decision,) = code.decisions
    assert decision.fired and not re.search(r"if s\d+ <=", code.source)


@pytest.mark.codegen
def test_branches_ask_no_guard_of_sizes_they_never_see():
    """32 bits do not hold offsets of 524288 x 7168 elements; the branches end at some 100 rows."""
    x, w = (torch.empty(size, dtype=torch.bfloat16) for size in ((8, 7168), (7168, 256)))

    def fn(x, w):
        return torch.relu(x @ w)

    code = compile_for("h200", fn, x.to("meta"), w.to("meta"), dynamic={0: {0: (2, 524288)}})
    (decision,) = code.decisions
    assert decision.fired and decision.ranges[-1].hi == 524288


def test_a_branch_whose_candidate_fails_is_reported_as_stock(monkeypatch):
    from inductor_ext.lowerings import decompose_k_candidates

    emit = decompose_k_candidates._emit

    def failing(p, tiling, *args, **kwargs):
        if tiling.block_m == 16:
            raise RuntimeError("no such tile today")
        return emit(p, tiling, *args, **kwargs)

    monkeypatch.setattr(decompose_k_candidates, "_emit", failing)
    x, w = (
        torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((8, 7168), (256, 7168))
    )
    with config.patch(strict=False), pytest.warns(UserWarning, match="no such tile today"):
        code = compile_for("h200", lambda x, w: x @ w.t(), x, w, dynamic={0: {0: (2, 8192)}})
    (decision,) = code.decisions
    assert decision.fired and "no such tile today" in decision.reason
    assert not any("_16x" in r.chosen for r in decision.ranges)
    assert any("_32x" in r.chosen for r in decision.ranges) and decision.ranges[1].chosen == "stock"
