"""What the operations launch, compiled for an H200."""

import dataclasses
import re

import pytest
import torch
from inductor_ext.templates import scan_launch

from inductor_ext.ops import _scan_programs as programs
from inductor_ext.testing import launch_binaries

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (4096, 65536), 1


def kernel(program, shape, dim, given, choice=None):
    """The binary of a program whose inputs are of these dtypes and lie densely."""
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for dtype in given]
    outputs = [torch.empty(shape, dtype=dtype, device="meta") for dtype in program.outputs]
    (found,) = launch_binaries(
        lambda: scan_launch.launch(program, inputs, outputs, dim, choice), scan_launch
    )
    return found


@pytest.mark.parametrize(
    "program",
    [
        programs.recurrence(BF16, False, False),
        programs.recurrence_backward(FP32, FP32, True, False),
        programs.scan(FP32, False, "sum", True, False, FP32),
        programs.scan(FP32, False, "logsumexp", False, False, FP32),
        programs.scan(FP32, False, "cummax", False, False, FP32, True),
        programs.scan(torch.bool, True, "max", False, True, torch.bool),
        programs.scan(torch.int64, True, "min", True, True, torch.int64),
        programs.scan_backward(FP32, FP32, FP32, False, "prod", False, False),
        programs.scan_backward(FP32, FP32, FP32, True, "max", False, True),
        programs.scan_backward(BF16, BF16, BF16, True, "logsumexp", True, False),
    ],
    ids=lambda p: f"{len(p.inputs)} inputs, {', '.join(p.states)}",
)
def test_rows_spill_nothing(program):
    binary = kernel(program, *ROWS, [i.dtype for i in program.inputs])
    assert binary.spills == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_a_column_is_scanned_by_threads(reverse):
    """Only totals of pieces go from thread to thread, and loads and stores are of 16 bytes."""
    program = programs.scan(FP32, False, "sum", reverse, False, FP32)
    binary = kernel(program, (4096, 4096), 0, [FP32])
    copies, stores = (len(re.findall(p, binary.ptx)) for p in (r"cp\.async\.cg", r"st\.global\.v4"))
    narrow = re.findall(r"ld\.global|st\.global\.[bfu]|cp\.async\.ca", binary.ptx)
    assert binary.spills == 0 and copies and stores and not narrow
    assert binary.ptx.count("shfl.sync") < 8 * stores  # a scan by shuffles has more than 40


def test_threads_go_through_a_chunk_without_meeting():
    """And there are registers for four programs on a multiprocessor."""
    program = programs.scan(FP32, False, "sum", False, False, FP32)
    binary = kernel(program, (1 << 20, 32), 0, [FP32])
    loop = binary.ptx[: binary.ptx.index("st.global.L1::evict_first")].rsplit("\n$L__BB", 1)[1]
    assert binary.spills == 0 and binary.registers <= 128
    assert "ld.global" in loop and "shfl" not in loop and "bar.sync" not in loop


@pytest.mark.parametrize("reverse", [False, True])
def test_a_long_row_asks_for_what_will_be_read(reverse):
    """By one instruction of one thread, and loads of 16 bytes besides."""
    program = programs.recurrence(FP32, False, reverse)
    tile = scan_launch.Tiling(1, 4096, 4, 40, depth=9, fetch=132)
    asking, without = (
        kernel(program, (1, 1 << 24), 1, [FP32, FP32], choice)
        for choice in (tile, dataclasses.replace(tile, fetch=0))
    )
    assert asking.ptx.count("cp.async.bulk.prefetch.L2") == len(program.inputs)
    assert "cp.async.bulk" not in without.ptx


def test_as_many_programs_stay_as_a_multiprocessor_holds():
    """And a tile's inputs come by copies of 16 bytes, the totals of others by ordinary loads."""
    program = programs.scan(FP32, False, "cummax", False, False, FP32, True)
    tile = scan_launch.tiling(program, 1, 1, 1 << 28)
    binary = kernel(program, (1 << 28,), 0, [FP32])
    registers = -(-binary.registers // 8) * 8 * 32 * tile.warps
    assert tile.stripes * registers <= 65536 and binary.spills == 0
    assert tile.stripes * (binary.shared_bytes + 1024) <= 227 * 1024
    assert "cp.async.cg" in binary.ptx and "cp.async.ca" not in binary.ptx
