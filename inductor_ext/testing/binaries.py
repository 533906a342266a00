"""Facts about a kernel's machine code for a card that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any, Literal, NamedTuple

from inductor_ext import compat_virtual
from inductor_ext.compat_patches import private
from inductor_ext.testing.generated import GeneratedCode, Kernel

_GLOBAL_ACCESS = re.compile(
    r"\b(?P<op>ld|st)\.(?:relaxed\.|acquire\.|release\.|volatile\.|weak\.)*(?:\w+\.)?global"
    r"(?P<mods>[\w.:]*?)\.(?P<type>[busf]\d+)\b"
)


class KernelBinary(NamedTuple):
    """One Triton kernel compiled for a card.

    ``registers`` per thread; ``spills`` bytes of local memory per thread (0: nothing is spilled);
    ``shared_bytes`` of shared memory per block; ``ptx`` the assembly; ``target`` its architecture
    ("sm_90a"); ``num_warps`` per block; ``config`` the launch configuration as text.
    """

    name: str
    registers: int
    spills: int
    shared_bytes: int
    ptx: str
    target: str
    num_warps: int
    config: str

    @property
    def widest_load(self) -> int:
        """Bytes that one thread moves from global memory in the widest load instruction; 0: none.

        Asynchronous copies (``cp.async``) count; a bulk tensor copy (TMA) counts as 16.
        """
        copies = [int(n) for n in re.findall(r"\bcp\.async\.c[ag]\.[^;]*?,\s*(\d+)", self.ptx)]
        copies += [
            int(n, 16)
            for n in re.findall(r"\bcp\.async\.c[ag]\.[^;]*?,\s*0x([0-9a-fA-F]+)", self.ptx)
        ]
        if "cp.async.bulk" in self.ptx:
            copies.append(16)
        return max([*copies, *_widths(self.ptx, "ld")], default=0)

    @property
    def widest_store(self) -> int:
        """Bytes of the widest store to global memory that one thread makes; 0: none."""
        return max(_widths(self.ptx, "st"), default=0)

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether there is a matrix instruction: ``mma.sync``, ``wgmma`` or ``tcgen05.mma``."""
        return re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", self.ptx) is not None

    @property
    def has_pdl(self) -> bool:
        """Whether the kernel takes part in programmatic dependent launch."""
        return "griddepcontrol" in self.ptx


def _widths(ptx: str, op: str) -> list[int]:
    widths = []
    for access in _GLOBAL_ACCESS.finditer(ptx):
        if access["op"] == op:
            vector = re.search(r"\.v(\d)", access["mods"])
            lanes = int(vector.group(1)) if vector else 1
            widths.append(lanes * int(access["type"][1:]) // 8)
    return widths


def cross_compile(
    code: GeneratedCode, configs: Literal["first", "all"] = "first"
) -> list[KernelBinary]:
    """``GeneratedCode.cross_compile``."""
    if configs not in ("first", "all"):
        raise ValueError(f'cross_compile expected configs "first" or "all", got {configs!r}')
    binaries = []
    with compat_virtual.virtual_device(code.card):
        for kernel in code.kernels:
            binaries += _compile(kernel, configs == "all")
    return binaries


def _compile(kernel: Kernel, every: bool) -> list[KernelBinary]:
    autotuner = compat_virtual.load_kernel(kernel.source)
    chosen = autotuner.configs if every else autotuner.configs[:1]
    return [
        describe(compat_virtual.compile_kernel(autotuner, config), kernel.name, str(config))
        for config in chosen
    ]


def describe(compiled: Any, name: str, config: str = "") -> KernelBinary:
    """The ``KernelBinary`` of what ``triton.compile`` returned for a CUDA target."""
    ptx = compiled.asm["ptx"]
    registers, local = _resources(compiled.asm["cubin"])
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return KernelBinary(
        name=name,
        registers=registers,
        spills=local,
        shared_bytes=compiled.metadata.shared,
        ptx=ptx,
        target=target.group(1) if target else "",
        num_warps=compiled.metadata.num_warps,
        config=config,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread, as the binary itself states them."""
    tool = private("triton:knobs.nvidia.cuobjdump").path
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    finally:
        os.unlink(file.name)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    if "REG" not in usage:
        raise RuntimeError(f"cuobjdump expected to print the registers of a kernel, got {text!r}")
    return int(usage["REG"]), int(usage.get("STACK", 0)) + int(usage.get("LOCAL", 0))
