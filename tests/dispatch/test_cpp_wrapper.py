"""The branch in a C++ program: cpp_wrapper and AOTInductor, text that a C++ compiler takes."""

import os
import re

import pytest
import torch
import torch.nn.functional as F

from inductor_ext import compat, compat_dispatch
from inductor_ext.testing import compile_for, cpp_errors, no_cpp_check, package_for

BF16 = torch.bfloat16
NO_CHECK = no_cpp_check()
Dim = torch.export.Dim


def t(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def frozen(*size, dtype=BF16):
    return torch.nn.Parameter(t(*size, dtype=dtype), requires_grad=False)


def relu_mm(a, b):
    return torch.relu(a @ b)


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = frozen(256, 7168)

    def forward(self, x):
        return torch.sigmoid(F.linear(x, self.weight).float())


def package_router(**options):
    tokens = Dim("tokens", min=2, max=4096)
    shapes = ({0: tokens},)
    return package_for("h200", Router(), t(64, 7168), dynamic_shapes=shapes, options=options)


def arms_of(source):
    """The conditions of a program's one branch, the last "else", with the text under each."""
    body = re.split(r"\b(?:inductor_entry_impl|::run_impl)\(\n", source)[-1]
    found = re.split(r"^    (?:\} else )?if \((.*s\d.*)\) \{$|^    \} (else) \{$", body, flags=re.M)
    conditions = [a or b for a, b in zip(found[1::3], found[2::3], strict=True)]
    return dict(zip(conditions, found[3::3], strict=True)) if conditions else {}


def work(arm):
    """Names of the kernels and of the library's functions that an arm calls."""
    calls = re.findall(r"\b(?:call_(triton_\w+)|aoti_torch_cuda_(\w+))\(", arm)
    return [kernel or library for kernel, library in calls]


def check_arms(source, decision):
    """One arm per range, each with its epilogue in its last kernel; stock's own is two calls."""
    arms = arms_of(source)
    assert len(arms) == len(decision.ranges) > 3
    for (condition, arm), size_range in zip(arms.items(), decision.ranges, strict=True):
        assert condition == "else" or condition.endswith(f"<= {size_range.hi}")
        calls = work(arm)
        if size_range.chosen == "stock":
            assert calls[0] == "mm_out" and "_poi_" in calls[1] and len(calls) == 2
        else:
            assert all("_tem_" in call for call in calls) and len(calls) <= 2
            assert re.search("relu|sigmoid", calls[-1])
    return arms


needs_compiler = pytest.mark.skipif(bool(NO_CHECK), reason=NO_CHECK or "-")


@pytest.mark.codegen
@needs_compiler
def test_cpp_wrapper_branches_and_compiles():
    code = compile_for(
        "h200",
        relu_mm,
        t(16, 4096),
        t(4096, 32),
        dynamic={0: {0: None}},
        options={"cpp_wrapper": True},
    )
    check_arms(code.source, code.decisions[0])
    assert cpp_errors(code.source) == ""


@pytest.mark.codegen
@needs_compiler
def test_package_branches_and_compiles():
    package = package_router()
    arms = check_arms(package.source, package.decisions[0])
    assert cpp_errors(package.source) == ""
    # What is defined inside an arm is not visible behind it.
    broken = package.source.replace("RAIIAtenTensorHandle buf1;", "", 1)
    assert "buf1" in cpp_errors(broken)
    called = {call for arm in arms.values() for call in work(arm) if "triton" in call}
    loads = dict(re.findall(r"kernels_\.(\w+) = loadKernel\(\"(.*?)\"", package.source))
    assert set(loads) == called
    assert set(loads.values()) == set(package.kernel_files)
    assert all(os.path.getsize(file) for file in package.kernel_files)


class Several(torch.nn.Module):
    """Two regions, results shared between them and work around them, sizes that are products."""

    def __init__(self):
        super().__init__()
        self.w, self.v, self.bias = frozen(7168, 256), frozen(32, 4096), frozen(32)
        self.register_buffer("e", t(256, dtype=torch.float32))

    def forward(self, x, y, c):
        b, n, _ = x.shape
        before = c.sin() + c[:, :1]
        p = (before.new_zeros(b, n, 1) + x).reshape(b * n, 7168) @ self.w
        p = p.float().softmax(-1)
        q = (p + self.e).reshape(b, n, 256)
        z = F.linear(y, self.v, self.bias)
        return before, q.cumsum(1), p.argmax(-1), torch.relu(z), z.float().exp(), (p * 2).sum()


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(
    compat.minor_version("torch") != "2.13", reason="a minute: once, on the torch of development"
)
def test_several_regions_with_several_results_compile():
    b, n, m = Dim("b", min=2, max=64), Dim("n", min=2, max=64), Dim("m", min=2, max=4096)
    args = t(4, 6, 7168), t(9, 4096), t(4, 6, 48)
    shapes = ({0: b, 1: n}, {0: m}, {0: b, 1: n})
    package = package_for("h200", Several(), *args, dynamic_shapes=shapes)
    products = [d for d in package.decisions if d.lowering == "decompose_k"]
    assert [len(d.ranges) > 2 for d in products] == [True, True]
    assert package.source.count("    } else {\n        // subgraph: ") == 2
    assert cpp_errors(package.source) == ""


@pytest.mark.codegen
def test_branches_only_where_every_arm_has_its_kernels(monkeypatch):
    """A program run once beforehand launches the kernels of one arm."""
    monkeypatch.setattr(compat, "ahead_of_time", lambda: True)
    lazy = torch.__version__.split(".")[:2] >= ["2", "12"]
    for in_package, beforehand, lacking in (
        (True, True, False),
        (True, False, True),
        (False, True, False),
        (False, False, not lazy),
    ):
        monkeypatch.setattr(compat, "in_aot_mode", lambda answer=in_package: answer)
        with torch._inductor.config.patch({"triton.autotune_at_compile_time": beforehand}):
            assert compat_dispatch.lacks_kernels() == lacking
            assert bool(compat_dispatch.can_branch()) == lacking


def test_a_product_of_sizes_in_a_branch_of_a_cpp_program():
    """Kernel calls of a branch are written later, for the graph around: one name, one value."""

    def fn(x, w):
        return torch.bmm(x, w).permute(1, 0, 2).contiguous()

    dynamic = {0: {0: (2, 64), 1: (2, 512)}, 1: {0: (2, 64)}}
    args = t(4, 8, 2048), t(4, 2048, 64)
    code = compile_for("h200", fn, *args, dynamic=dynamic, options={"cpp_wrapper": True})
    (decision,) = code.decisions
    assert decision.fired and len(decision.ranges) > 1
    named = re.findall(r"\b(ps\d+) = ([^;]*);", code.source)
    assert named and len(dict(named)) == len(set(named)), named
