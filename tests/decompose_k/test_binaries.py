"""Facts of the machine code, for the shapes that are measured. No card needed."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F

import inductor_ext
from inductor_ext.testing import compile_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def t(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def relu_mm(a, b):
    return torch.relu(a @ b)


def router(x, w, bias):
    return F.linear(x, w, bias).sigmoid()


def residual(a, b, skip):
    return torch.relu(a @ b) + skip


SHAPES = {
    "16x16x32768": (relu_mm, t(16, 32768), t(32768, 16)),
    "64x64x32768": (relu_mm, t(64, 32768), t(32768, 64)),
    "fp16 32x32x8192": (relu_mm, t(32, 8192, dtype=FP16), t(8192, 32, dtype=FP16)),
    "router 8x256x7168": (router, t(8, 7168), t(256, 7168), t(256)),
    "router 64x256x7168": (router, t(64, 7168), t(256, 7168), t(256)),
    "residual 48x48x8192": (residual, t(48, 8192), t(8192, 48), t(48, 48)),
    "fp32 16x16x32768": (relu_mm, t(16, 32768, dtype=FP32), t(32768, 16, dtype=FP32)),
    "fp32 64x64x32768": (relu_mm, t(64, 32768, dtype=FP32), t(32768, 64, dtype=FP32)),
}


@functools.cache
def kernels(shape, card="h200"):
    """(partial product, sum over the splits), compiled for the card."""
    fn, *args = SHAPES[shape]
    partial, reducer = compile_for(card, fn, *args).cross_compile()
    return partial, reducer


@pytest.mark.codegen
@pytest.mark.parametrize("shape", SHAPES)
def test_partial_product(shape):
    partial, _ = kernels(shape)
    assert partial.target == "sm_90a" and partial.spills == 0
    assert partial.widest_load == 16 and partial.widest_store == 16
    assert partial.uses_tensor_cores == (not shape.startswith("fp32"))  # "highest" is ieee
    assert partial.registers <= 128 and partial.num_warps <= 8
    assert partial.shared_bytes <= 160 * 1024  # of 227 KiB, which a block may have


@pytest.mark.codegen
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_over_the_splits(shape):
    _, reducer = kernels(shape)
    assert reducer.target == "sm_90a" and reducer.spills == 0
    assert reducer.widest_load == 16 and not reducer.uses_tensor_cores
    assert reducer.registers <= 128 and reducer.num_warps <= 4 and reducer.shared_bytes <= 1024


def position(ptx, pattern):
    """Line of the first instruction that matches; None where there is none."""
    lines = (i for i, line in enumerate(ptx.splitlines()) if re.search(pattern, line))
    return next(lines, None)


# "cp.async.bulk.prefetch" brings a line into L2, where it is coherent: it may come before the wait.
LOAD = r"\bld\.(\w+\.)*global|\bcp\.async\.(c[ag]|bulk\.tensor)"
STORE = r"\bst\.(\w+\.)*global|\b(red|atom)\.(\w+\.)*global"


@pytest.mark.codegen
@pytest.mark.parametrize("shape", SHAPES)
def test_pdl_waits_before_it_reads_or_writes(shape):
    for kernel in kernels(shape):
        assert kernel.has_pdl
        wait = position(kernel.ptx, r"\bgriddepcontrol\.wait")
        launch = position(kernel.ptx, r"\bgriddepcontrol\.launch_dependents")
        load, store = position(kernel.ptx, LOAD), position(kernel.ptx, STORE)
        assert None not in (wait, launch, load, store)
        assert wait < min(load, store) and launch < store
        # Every program gets to the wait: no way around it, none out of the kernel before it.
        before = kernel.ptx.splitlines()[:wait]
        assert not any(re.search(r"^\s*(@\S+ )?(bra|ret|exit)\b", line) for line in before)
        assert kernel.ptx.count("griddepcontrol.wait") == 1


@pytest.mark.codegen
@pytest.mark.parametrize("late", [False, True])
def test_when_the_sum_releases_what_follows(late):
    fn, *args = SHAPES["16x16x32768"]
    name = r"split.*_pdl_late" if late else r"split.*_pdl"
    code = compile_for("h200", fn, *args, force={"decompose_k": name})
    partial, reducer = code.cross_compile()
    for kernel, after_the_wait in ((partial, False), (reducer, late)):
        wait = position(kernel.ptx, r"\bgriddepcontrol\.wait")
        launch = position(kernel.ptx, r"\bgriddepcontrol\.launch_dependents")
        assert (launch > wait) == after_the_wait


def test_no_atomics():
    for shape in SHAPES:
        for kernel in kernels(shape):
            assert position(kernel.ptx, r"\b(red|atom)\.") is None


def test_pdl_is_absent_on_a_card_without_it():
    for kernel in kernels("16x16x32768", "a100"):
        assert kernel.target == "sm_80" and not kernel.has_pdl and kernel.spills == 0
        assert kernel.widest_load == 16
    assert kernels("16x16x32768", "a100")[0].uses_tensor_cores


def test_pdl_is_absent_where_it_is_switched_off():
    fn, *args = SHAPES["16x16x32768"]
    with inductor_ext.config.patch(pdl=False):
        code = compile_for("h200", fn, *args)
        assert not any(kernel.has_pdl for kernel in code.cross_compile())


def test_other_cards():
    for card, target in (("h100", "sm_90a"), ("b200", "sm_100a")):
        for kernel in kernels("16x16x32768", card):
            assert kernel.target == target and kernel.has_pdl
            assert kernel.spills == 0 and kernel.widest_load == 16


def test_tf32_uses_tensor_cores():
    torch.set_float32_matmul_precision("high")
    fn, *args = SHAPES["fp32 16x16x32768"]
    partial, _ = compile_for("h200", fn, *args).cross_compile()
    assert partial.uses_tensor_cores and "tf32" in partial.ptx


def test_ragged_k_still_moves_16_bytes():
    partial, reducer = compile_for("h200", relu_mm, t(16, 32776), t(32776, 16)).cross_compile()
    assert partial.widest_load == reducer.widest_load == 16
    assert partial.spills == reducer.spills == 0


def test_odd_sizes_do_not_spill():
    for sizes in ((17, 2053, 257), (1, 32749, 1)):
        m, k, n = sizes
        for kernel in compile_for("h200", relu_mm, t(m, k), t(k, n)).cross_compile():
            assert kernel.spills == 0 and kernel.registers <= 168


def test_sum_fused_into_a_row_reduction():
    args = t(64, 7168), t(256, 7168)
    code = compile_for("h200", lambda x, w: F.linear(x, w).float().softmax(-1), *args)
    partial, rows = code.cross_compile()
    assert partial.has_pdl and partial.spills == rows.spills == 0
    assert partial.widest_load == partial.widest_store == 16
