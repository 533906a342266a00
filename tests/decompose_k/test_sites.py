"""Where the split fires, and what is left to stock for which reason."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import inductor_ext
from inductor_ext import compat
from inductor_ext.testing import compile_for, outline

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def t(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def mm(a, b):
    return a @ b


def fired(code):
    """The one decision of a program that is two templates and nothing else."""
    (decision,) = code.decisions
    assert decision.fired, decision.reason
    assert [k.kind for k in code.kernels] == ["template", "template"], outline(code)
    assert code.calls == [k.name for k in code.kernels]
    return decision


def left(code):
    """The reason of the one decision of a program whose site is stock's."""
    (decision,) = code.decisions
    assert not decision.fired and decision.chosen == "stock"
    assert not any(k.kind == "template" for k in code.kernels)
    return decision.reason


def same_text(code, other):
    """Byte for byte, but for the running number that Inductor gives each graph."""
    mask = re.compile(r"\b\d+_(inference|forward|backward)\b")
    return mask.sub("", code.source) == mask.sub("", other.source)


A, B = t(16, 2048), t(2048, 16)
SITES = {
    "mm": ("mm", mm, A, B),
    "mm fp16": ("mm", mm, t(16, 2048, dtype=FP16), t(2048, 16, dtype=FP16)),
    "mm fp32": ("mm", mm, t(16, 2048, dtype=FP32), t(2048, 16, dtype=FP32)),
    "mm bf16 to fp32": ("mm", lambda a, b: torch.mm(a, b, out_dtype=FP32), A, B),
    "addmm bias [N]": ("addmm", torch.addmm, t(16), A, B),
    "addmm bias [1]": ("addmm", torch.addmm, t(1), A, B),
    "addmm bias [M,1]": ("addmm", torch.addmm, t(16, 1), A, B),
    "addmm bias [M,N]": ("addmm", torch.addmm, t(16, 16), A, B),
    "addmm bias []": ("addmm", torch.addmm, t(()), A, B),
    "addmm alpha beta": (
        "addmm",
        lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=2),
        *(t(16), A, B),
    ),
    "addmm beta 0": ("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0), t(16), A, B),
    "addmm bf16 to fp32": (
        "addmm",
        lambda c, a, b: torch.addmm(c, a, b, out_dtype=FP32),
        *(t(16, dtype=FP32), A, B),
    ),
    "bmm": ("bmm", torch.bmm, t(2, 16, 2048), t(2, 2048, 16)),
    "bmm expanded": ("bmm", lambda a, b: a @ b.expand(2, -1, -1), t(2, 16, 2048), t(1, 2048, 16)),
    "bmm bf16 to fp32": (
        "bmm",
        lambda a, b: torch.bmm(a, b, out_dtype=FP32),
        *(t(2, 16, 2048), t(2, 2048, 16)),
    ),
    "baddbmm": ("baddbmm", torch.baddbmm, t(2, 16, 16), t(2, 16, 2048), t(2, 2048, 16)),
    "baddbmm bias [N]": (
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, alpha=2, beta=0.5),
        *(t(16), t(2, 16, 2048), t(2, 2048, 16)),
    ),
    "linear": ("mm", F.linear, A, t(24, 2048)),
    "linear bias": ("addmm", F.linear, A, t(24, 2048), t(24)),
    "linear 3-d": ("addmm", F.linear, t(2, 4, 2048), t(24, 2048), t(24)),
    "matmul broadcast": ("mm", torch.matmul, t(2, 4, 2048), t(2048, 24)),
    "column A": ("mm", lambda a, b: a.t() @ b, t(2048, 16), B),
    "column B": ("mm", lambda a, b: a @ b.t(), A, t(16, 2048)),
    "sliced": ("mm", lambda a, b: a[:, 8:2056] @ b[:2048, :16], t(16, 2064), t(2050, 40)),
    "every second": ("mm", lambda a, b: a[:, ::2] @ b[::2], t(16, 4096), t(4096, 16)),
    "offset": ("mm", lambda a, b: a[3:19] @ b[1:2049, 3:19], t(20, 2048), t(2049, 20)),
    "expanded rows": ("mm", lambda a, b: a.expand(16, 2048) @ b, t(1, 2048), B),
    "expanded columns": ("mm", lambda a, b: a @ b.expand(2048, 16), A, t(2048, 1)),
    "one tensor twice": ("mm", lambda a: a @ a.t(), A),
    "M is 1": ("mm", mm, t(1, 2048), t(2048, 256)),
    "N is 1": ("mm", mm, A, t(2048, 1)),
    "K prime": ("mm", mm, t(16, 32749), t(32749, 16)),
    "K unaligned": ("mm", mm, t(16, 32776), t(32776, 16)),
    "router": ("mm", F.linear, t(256, 7168), t(256, 7168)),
    "mHC projection": ("mm", mm, t(768, 28672, dtype=FP32), t(28672, 24, dtype=FP32)),
}


# torch 2.11 cannot trace this overload, nor any release so far baddbmm's.
UNTRACEABLE = {"addmm bf16 to fp32"} if torch.__version__.startswith("2.11.") else set()


@pytest.mark.codegen
@pytest.mark.parametrize("case", [c for c in SITES if c not in UNTRACEABLE])
def test_fires(case):
    op, fn, *args = SITES[case]
    decision = fired(compile_for("h200", fn, *args))
    assert decision.sites.startswith(f"{op} [") and decision.source == "heuristic"
    assert decision.reason and len(decision.candidates) > 4


def test_candidates_are_named_in_the_report():
    names = [c.name for c in compile_for("h200", mm, A, B).decisions[0].candidates]
    assert names[0] == "stock" and len(set(names)) == len(names)
    for pattern in (
        r"split\d+_.*_pdl",
        r"split\d+_\d+x\d+x\d+_w\d+_s\d",
        ".*_rowwise",
        r"bmm_split\d+",
    ):
        assert any(re.fullmatch(pattern, n) for n in names), pattern


LEFT = {
    "float64": ("float64", mm, t(16, 2048, dtype=torch.float64), t(2048, 16, dtype=torch.float64)),
    "int": ("int32", mm, t(16, 2048, dtype=torch.int32), t(2048, 16, dtype=torch.int32)),
    "K is 0": ("size is zero", mm, t(16, 0), t(0, 16)),
    "M is 0": ("size is zero", mm, t(0, 2048), B),
    "N is 0": ("size is zero", mm, A, t(2048, 0)),
    "small K": ("K=256", mm, t(16, 256), t(256, 16)),
    "K hardly longer than N": (r"4 x max", mm, t(16, 2048), t(2048, 1024)),
    "M and N fill the chip": ("occupy", mm, t(1024, 8192), t(8192, 1024)),
    "large batch": ("occupy", torch.bmm, t(64, 16, 2048), t(64, 2048, 16)),
}


@pytest.mark.codegen
@pytest.mark.parametrize("case", LEFT)
def test_left_alone_with_a_reason(case):
    reason, fn, *args = LEFT[case]
    code = compile_for("h200", fn, *args)
    assert re.search(reason, left(code))
    with inductor_ext.disable():
        assert same_text(code, compile_for("h200", fn, *args))


@pytest.mark.codegen
def test_disabled_is_stock_byte_for_byte(monkeypatch):
    args = t(16), A, B
    ours = compile_for("h200", torch.addmm, *args)
    with inductor_ext.disable("decompose_k"):
        disabled = compile_for("h200", torch.addmm, *args)
    assert disabled.decisions == [] and not same_text(ours, disabled)
    for op in ("mm", "addmm", "bmm", "baddbmm"):
        for overload in ("default", "dtype"):
            target = getattr(getattr(torch.ops.aten, op), overload)
            stock = compat.lowering_of(target).__wrapped__
            monkeypatch.setitem(compat._lowering_table(), target, stock)
    assert same_text(disabled, compile_for("h200", torch.addmm, *args))
    monkeypatch.undo()
    assert same_text(ours, compile_for("h200", torch.addmm, *args))


def precision_of(code):
    return re.findall(r"PRECISION : tl.constexpr = '(\w+)'", code.source)


@pytest.mark.parametrize(
    ("setting", "expected"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")]
)
def test_fp32_obeys_the_precision_setting(setting, expected):
    torch.set_float32_matmul_precision(setting)
    code = compile_for("h200", mm, t(16, 2048, dtype=FP32), t(2048, 16, dtype=FP32))
    fired(code)
    assert precision_of(code) == [expected]


def test_fp32_obeys_the_precision_setting_of_the_card():
    args = t(16, 2048, dtype=FP32), t(2048, 16, dtype=FP32)
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert precision_of(compile_for("h200", mm, *args)) == ["tf32" if allowed else "ieee"]


@pytest.mark.codegen
def test_fp32_obeys_the_newer_precision_settings():
    """In a process of its own: torch refuses to mix them with the older ones."""
    script = """
import torch
from inductor_ext import compat
print(compat.float32_precision())  # nothing was ever set
for everywhere, here in (("tf32", "none"), ("ieee", "none"), ("none", "tf32"), ("tf32", "ieee")):
    torch.backends.fp32_precision = everywhere
    torch.backends.cuda.matmul.fp32_precision = here
    print(compat.float32_precision())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["ieee", "tf32", "ieee", "tf32", "ieee"]


def test_operands_cast_in_front_as_autocast_does():
    """Autocast itself needs a card: tests/gpu."""

    def model(x, w, b):
        return F.linear(x.to(BF16), w.to(BF16), b.to(BF16)).relu()

    args = t(8, 7168, dtype=FP32), t(256, 7168, dtype=FP32), t(256, dtype=FP32)
    code = compile_for("h200", model, *args)
    (decision,) = code.decisions
    assert decision.fired and decision.sites == "addmm [8,7168]x[7168,256] bfloat16"
    # Each operand is cast by a kernel of its own; the bias is cast where it is added.
    kinds = [k.kind for k in code.kernels]
    assert kinds == ["pointwise", "pointwise", "template", "template"]


@pytest.mark.codegen
@pytest.mark.parametrize("name", ["M", "N", "batch"])
def test_symbolic_size(name):
    """Branched over (tests/dispatch); within bounds that hold one choice, as a static size."""
    args = (t(4, 16, 4096), t(4, 4096, 32)) if name == "batch" else (t(16, 4096), t(4096, 32))
    where = {"M": {0: {0: None}}, "N": {1: {1: None}}, "batch": {0: {0: None}, 1: {0: None}}}[name]
    fn = torch.bmm if name == "batch" else mm
    code = compile_for("h200", fn, *args, dynamic=where)
    (decision,) = code.decisions
    assert decision.fired and len(decision.ranges) > 2 and code.frames == 1
    last = decision.ranges[-1]
    assert last.hi is None and last.chosen == "stock"
    bounds = {"M": (8, 16), "N": (23, 48), "batch": (2, 4)}[name]
    bounded = {arg: {dim: bounds for dim in dims} for arg, dims in where.items()}
    code = compile_for("h200", fn, *args, dynamic=bounded)
    assert [(r.lo, r.hi) for r in fired(code).ranges] == [bounds]
    assert code.frames == 1


@pytest.mark.parametrize("name", ["M", "N"])
def test_one_choice_for_all_sizes_needs_a_bound(name):
    where = {"M": {0: {0: None}}, "N": {1: {1: None}}}[name]
    with pytest.raises(ValueError, match=f"{name} has no upper bound"):
        compile_for(
            "h200", mm, t(16, 4096), t(4096, 32), dynamic=where, force={"decompose_k": "split.*"}
        )


def test_symbolic_size_whose_largest_value_loses_is_stock_there():
    args = t(16, 4096), t(4096, 512)

    def choices(bounds):
        (decision,) = compile_for("h200", mm, *args, dynamic={0: {0: bounds}}).decisions
        return [r.chosen for r in decision.ranges]

    assert choices((2, 8192)).index("stock") == len(choices((2, 8192))) - 1
    assert "stock" not in choices((2, 256))


@pytest.mark.codegen
def test_symbolic_k():
    code = compile_for("h200", mm, t(16, 4096), t(4096, 16), dynamic={0: {1: None}, 1: {0: None}})
    assert re.search(r"\[16,s\d+\]", fired(code).sites) and code.frames == 1
    short = compile_for("h200", mm, t(16, 512), t(512, 16), dynamic={0: {1: None}, 1: {0: None}})
    assert "K=512" in left(short)


@pytest.mark.codegen
def test_data_dependent_size_is_left_alone():
    def fn(x, w, n):
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= 2048)
        return x[:, :k] @ w[:k]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        code = compile_for("h200", fn, A, B, torch.tensor(2000))
    assert "depends on data" in left(code)


@pytest.mark.codegen
def test_two_devices_is_torchs_own_error():
    def fn(x):
        return x @ torch.ones(2048, 16, device="cpu", dtype=BF16)

    def message():
        with pytest.raises(Exception, match=r"devices?.*cpu|cpu.*devices?") as error:
            compile_for("h200", fn, A)
        return type(error.value), str(error.value)

    ours = message()
    with inductor_ext.disable():
        assert message() == ours


def test_backward_of_a_linear_layer_over_many_tokens():
    layer = torch.nn.Linear(16, 64).to(BF16)
    x = torch.empty(4096, 16, dtype=BF16, requires_grad=True)
    code = compile_for("h200", lambda x: layer(x).relu(), x, grad=True)
    (decision,) = (d for d in code.decisions if d.fired)
    assert decision.sites.startswith("mm [64,4096]x[4096,16]")  # the weight's gradient
    assert code.backward.count("async_compile.triton('triton_tem_") == 2
    assert "triton_tem_" not in code.forward


def test_card_without_pdl_and_pdl_switched_off():
    a100 = compile_for("a100", mm, A, B)
    with inductor_ext.config.patch(pdl=False):
        off = compile_for("h200", mm, A, B)
    for code in (a100, off):
        assert "_pdl" not in fired(code).chosen and "launch_pdl': True" not in code.source
    on = compile_for("h200", mm, A, B)
    assert "_pdl" in fired(on).chosen and on.source.count("launch_pdl': True") == 2


def test_partials_are_neither_zeroed_nor_accumulated_into():
    code = compile_for("h200", mm, A, B)
    assert "workspace" not in code.source and "zero_" not in code.source
    assert "atomic" not in code.source
    (size,) = re.findall(r"empty_strided_cuda\(\((\d+), 16, 16\)", code.source)
    assert f"split{size}_" in code.decisions[0].chosen  # fp32 partials, and the output beside them
    assert code.source.count("empty_strided_cuda((") == 2


@pytest.mark.codegen
def test_64_bit_offsets_where_an_operand_needs_them():
    def index_types(code):
        return {
            i for k in code.kernels for i in re.findall(r"INDEX : tl.constexpr = (\S+)", k.source)
        }

    assert index_types(compile_for("h200", mm, A, B)) == {"tl.int32"}
    rows = t(16, 1 << 28)[:, : 1 << 15]  # the last row begins past 2**31
    assert index_types(compile_for("h200", mm, rows, t(1 << 15, 16))) == {"tl.int64"}


@pytest.mark.parametrize("k", [262152, 1 << 20, 262147])
def test_k_beyond_the_longest_tiling(k):
    """128 splits of 2048 end at K = 262144."""
    code = compile_for("h200", mm, t(16, k), t(k, 16))
    (decision,) = code.decisions
    assert decision.fired and decision.chosen.startswith("split")


def test_one_element_is_left_alone():
    """Inductor drops the mask of a store to one element, so every lane would write it."""
    code = compile_for("h200", mm, t(1, 2048), t(2048, 1))
    assert "one element" in left(code)


def test_failure_inside_falls_back_to_stock_with_one_warning(monkeypatch):
    from inductor_ext.lowerings import decompose_k

    def broken(*args):
        raise RuntimeError("a bug in here")

    monkeypatch.setattr(decompose_k, "worth_it", broken)
    with (
        inductor_ext.config.patch(strict=False),
        pytest.warns(UserWarning, match=r"decompose_k failed at aten.mm.default .*a bug in here"),
    ):
        code = compile_for("h200", mm, A, B)
    assert "a bug in here" in left(code) and code.calls == ["extern_kernels.mm"]
    with pytest.raises(Exception, match="a bug in here"):
        compile_for("h200", mm, A, B)


@pytest.mark.parametrize("stored", [FP16, torch.int16])
def test_an_operand_viewed_in_another_dtype_is_left_alone(stored):
    """The template would bind the buffer in its own dtype."""
    code = compile_for("h200", lambda a, b: a @ b.view(BF16), A, t(2048, 16, dtype=stored))
    assert "view in another dtype" in left(code)


@pytest.mark.parametrize(("offset", "fetched"), [(0, True), (1, False), (3, False), (8, True)])
@pytest.mark.parametrize("linear", [True, False])
def test_weights_are_fetched_ahead_only_where_aligned(offset, fetched, linear):
    """A bulk prefetch takes addresses of 16 bytes' alignment; a parameter may be a view at any."""
    base = torch.empty(2048 * 24 + 8, dtype=BF16)[offset : offset + 2048 * 24]
    w = base.view(24, 2048) if linear else base.view(2048, 24)
    code = compile_for("h200", lambda x, w: x @ (w.t() if linear else w), A, w)
    assert code.decisions[0].fired
    assert ("cp.async.bulk.prefetch" in code.source) == fetched


def test_what_the_epilogue_reads_may_be_beyond_32_bits():
    gate = torch.empty_strided((16, 24), (1 << 28, 1), dtype=BF16, device="meta")
    code = compile_for("h200", lambda a, b, g: torch.relu(a @ b) * g, A, t(2048, 24), gate)
    assert code.decisions[0].fired and len(code.calls) == 2
    reducer = code.kernels[-1].source
    assert "idx_m = ((idx_x // N)).to(tl.int64)" in reducer
