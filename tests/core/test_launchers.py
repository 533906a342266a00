"""Kernels with programmatic dependent launch are launched without a C compiler, as Triton would."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from inductor_ext import compat_launch

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(
        not hasattr(driver, "make_launcher"), reason="this Triton builds no launcher per signature"
    ),
]

METADATA = {
    "name": "triton_tem_fused_mm_0",
    "launch_pdl": True,
    "num_ctas": 1,
    "num_warps": 4,
    "shared": 1024,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}


def launcher(*signature, module="torch", **metadata):
    """What Triton's driver makes for a kernel with arguments of these types."""
    src = types.SimpleNamespace(
        signature={f"x{i}": t for i, t in enumerate(signature)},
        fn=types.SimpleNamespace(module=module),
    )
    made = types.SimpleNamespace(**{**METADATA, **metadata})
    return compat_launch.dependent_launch(src, made)


class Driver:
    """A driver that takes down its launches: (configuration, values of the parameters)."""

    def __init__(self):
        self.launches, self.status, self.during = [], 0, lambda: None
        self.here = threading.local()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuLaunchKernelEx = prototype(self._launch)
        self.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4

    def _launch(self, config, function, parameters, extra):
        self.during()
        c = compat_launch.Config.from_address(config)
        attribute = c.attributes[0]
        sizes = (c.x, c.y, c.z, c.block_x, c.block_y, c.block_z, c.shared_bytes, c.stream)
        pdl = (c.attribute_count, attribute.id, attribute.value.on)
        at = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        self.launches.append((sizes, pdl, function))
        self.values = lambda i, kind: kind.from_address(at[i]).value
        self.here.seen = [ctypes.c_uint64.from_address(at[i]).value for i in range(2)]
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"out of memory"


@pytest.fixture
def card(monkeypatch):
    card = Driver()
    monkeypatch.setattr(compat_launch, "_driver", lambda: card)
    return card


def call(run, *args, hooks=(None, None), grid=(8, 14, 1)):
    run(*grid, 77, 88, (4, 1, 1024), "metadata", *hooks, *args)


def test_the_structures_are_those_of_the_driver(tmp_path):
    fields = {"CUlaunchConfig": (compat_launch.Config, {
        "x": "gridDimX", "z": "gridDimZ", "block_x": "blockDimX", "block_z": "blockDimZ",
        "shared_bytes": "sharedMemBytes", "stream": "hStream", "attributes": "attrs",
        "attribute_count": "numAttrs"}),
        "CUlaunchAttribute": (compat_launch.Attribute, {"id": "id", "value": "value"})}  # fmt: skip
    lines, expected = [], []
    for name, (structure, members) in fields.items():
        lines.append(f'printf("%zu ", sizeof({name}));')
        expected.append(ctypes.sizeof(structure))
        for ours, theirs in members.items():
            lines.append(f'printf("%zu ", offsetof({name}, {theirs}));')
            expected.append(getattr(structure, ours).offset)
    lines.append('printf("%d", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);')
    expected.append(compat_launch.PROGRAMMATIC_STREAM_SERIALIZATION)
    source = tmp_path / "sizes.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
        "int main(void) {" + "\n".join(lines) + "}"
    )
    include = str(Path(driver.__file__).parent / "include")
    subprocess.run([os.environ.get("CC", "gcc"), source, "-I", include, "-o", tmp_path / "sizes"],
                   check=True)  # fmt: skip
    said = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    assert [int(n) for n in said.split()] == expected


def test_what_the_driver_is_told(card):
    a, b = torch.zeros(4), torch.zeros(4)
    run = launcher("*bf16", "i32", "constexpr", "*fp32", "fp32", "i64")
    call(run, a, -7, "ignored", b, 0.5, 1 << 40)
    ((sizes, pdl, function),) = card.launches
    assert sizes == (8, 14, 1, 128, 1, 1, 1024, 77) and function == 88
    assert pdl == (1, compat_launch.PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    kinds = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_float, ctypes.c_int64)
    values = [card.values(i, kind) for i, kind in enumerate(kinds)]
    assert values == [a.data_ptr(), -7, b.data_ptr(), 0.5, 1 << 40]
    assert [card.values(i, ctypes.c_void_p) for i in (5, 6)] == [None, None]  # scratch memory


def test_an_address_is_as_good_as_a_tensor(card):
    """As Triton's own launchers take them, and tapes give them."""
    a = torch.zeros(4)
    call(launcher("*bf16", "i32"), a.data_ptr() + 8, 3)
    assert card.values(0, ctypes.c_void_p) == a.data_ptr() + 8


def test_a_number_that_is_too_wide_is_refused(card):
    run = launcher("*fp32", "i32")
    with pytest.raises(OverflowError, match="arg1 of a kernel is expected as i32, got 4294967301"):
        call(run, torch.zeros(1), 2**32 + 5)
    call(run, torch.zeros(1), -(2**31))
    assert len(card.launches) == 1


def test_a_thread_without_a_context_gets_the_devices(card, monkeypatch):
    """Nothing that torch does there need have bound one."""
    asked, said = [], [201, 0]
    card.cuDevicePrimaryCtxRetain = lambda at, device: asked.append(device) or 0
    card.cuCtxSetCurrent = lambda context: asked.append("set") or 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        Driver, "status", property(lambda self: said.pop(0), lambda *_: None), raising=False
    )
    call(launcher("*fp32"), torch.zeros(1))
    assert asked == [3, "set"] and len(card.launches) == 2


def test_an_empty_grid_is_not_launched(card):
    call(launcher("*fp32"), torch.zeros(1), grid=(8, 0, 1))
    assert not card.launches


def test_hooks_run_around_the_launch(card):
    heard = []
    hooks = (lambda m: heard.append(("enter", m)), lambda m: heard.append(("exit", m)))
    card.during = lambda: heard.append("launch")
    call(launcher("*fp32"), torch.zeros(1), hooks=hooks)
    assert heard == [("enter", "metadata"), "launch", ("exit", "metadata")]


def test_a_refused_launch_says_why_and_the_next_one_runs(card):
    run = launcher("*fp32")
    card.status = 2
    with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: out of memory$"):
        call(run, torch.zeros(1))
    card.status = 0
    call(run, torch.zeros(1))
    assert len(card.launches) == 2


def test_a_launch_inside_a_launch_has_memory_of_its_own(card):
    run, tensors = launcher("*fp32", "*fp32"), [torch.zeros(1) for _ in range(4)]
    inside = []

    def during():
        if len(inside) < 1:
            inside.append(None)
            call(run, *tensors[2:])
            inside[0] = card.here.seen

    card.during = during
    call(run, *tensors[:2])
    assert inside[0] == [t.data_ptr() for t in tensors[2:]]
    assert card.here.seen == [t.data_ptr() for t in tensors[:2]]


def test_threads_do_not_mix_their_arguments(card):
    run = launcher("*fp32", "*fp32")

    def one(_):
        pair = [torch.zeros(1), torch.zeros(1)]
        call(run, *pair)
        return card.here.seen == [t.data_ptr() for t in pair]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(400)))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "other",
    [{"launch_pdl": False}, {"num_ctas": 2}, {"launch_cooperative_grid": True},
     {"global_scratch_size": 128}, {"profile_scratch_size": 128}, {"name": "a_users_kernel"}],
    ids=str,
)  # fmt: skip
def test_other_kernels_go_through_triton(other, card):
    assert launcher("*fp32", **other) is None


def test_other_arguments_go_through_triton(card):
    for kind in ("tensordesc<fp16[64,64]>", "bf16", ("i32",)):
        assert launcher("*fp32", kind) is None
    assert launcher("*fp32", name="kernel", module="inductor_ext.templates.softmax") is not None


def test_the_import_put_it_in_and_left_tritons_class_what_it_is(card):
    src = types.SimpleNamespace(signature={"x": "*fp32"}, fn=types.SimpleNamespace(module=""))
    made = driver.CudaLauncher(src, types.SimpleNamespace(**METADATA))
    call(made, torch.zeros(1))
    assert len(card.launches) == 1
    assert isinstance(driver.CudaLauncher, type)
    assert driver.CudaLauncher.__mro__[1].__name__ == "CudaLauncher"


def test_a_driver_that_is_up_already_takes_it_too(card, monkeypatch):
    stock = driver.CudaLauncher.__mro__[1]
    active = types.SimpleNamespace(launcher_cls=stock)
    monkeypatch.setattr(driver, "CudaLauncher", stock)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    compat_launch.install()
    assert active.launcher_cls is driver.CudaLauncher is not stock
    for theirs in (None, object()):  # no driver yet, and one that launches in another way
        monkeypatch.setattr(driver, "CudaLauncher", stock)
        monkeypatch.setattr(triton.runtime.driver, "_active", theirs)
        compat_launch.install()
