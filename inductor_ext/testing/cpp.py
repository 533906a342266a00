"""AOTInductor's C++ programs for a card that is not there; whether a C++ compiler takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from inductor_ext import compat_virtual, report
from inductor_ext.compat_patches import private
from inductor_ext.testing.cards import card as find_card
from inductor_ext.testing.compiling import _captured_tensors, _check_tensor, _Choices, _Trace


@dataclasses.dataclass(frozen=True)
class CppProgram:
    """What AOTInductor would compile, and the kernel binaries that would go into the package."""

    source: str
    kernel_files: list[str]
    decisions: list[report.Decision]


def package_for(
    card: str,
    module: torch.nn.Module,
    *args: torch.Tensor,
    dynamic_shapes: tuple[Mapping[int, Any], ...] | None = None,
    options: dict[str, Any] | None = None,
) -> CppProgram:
    """What ``aoti_compile_and_package(torch.export.export(module, args))`` compiles on ``card``.

    The kernels are cross-compiled, the C++ is not compiled and nothing is packaged. ``args``, the
    module's parameters and its buffers are as for ``compile_for``, ``dynamic_shapes`` as for
    ``torch.export.export``, ``options`` Inductor's configuration.

    Raises ValueError as ``compile_for`` does, and whatever torch.export or Inductor raise.
    """
    target = find_card(card)
    choices, trace = _Choices({}), _Trace()
    packages: list[tuple[str, list[str]]] = []

    def on_package(cpp: str, kernel_files: list[str]) -> str:
        packages.append((cpp, kernel_files))
        return "<virtual card>"

    with (
        compat_virtual.virtual_card(
            target, choices.choose, trace.on_code, trace.on_copy, on_package
        ) as on_card,
        report.collect() as decisions,
        contextlib.ExitStack() as stack,
        torch.no_grad(),
    ):
        for i, arg in enumerate(args):
            _check_tensor(arg, f"argument {i}")
        fakes = tuple(on_card(arg) for arg in args)
        for name, real, put in _captured_tensors(module):
            _check_tensor(real, name)
            put(on_card(real))
            stack.callback(put, real)
        program = torch.export.export(module, fakes, dynamic_shapes=dynamic_shapes)
        private("torch._inductor:aot_compile")(_one_fake_mode(program), fakes, options=options)
        ((source, kernel_files),) = packages
        return CppProgram(source, kernel_files, list(decisions))


def _one_fake_mode(program: Any) -> Any:
    """The exported module with its tensors in the mode that it was traced in."""
    module = program.module()
    traced = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    signature = program.graph_signature
    for names, table in (
        (signature.inputs_to_parameters, "_parameters"),
        (signature.inputs_to_buffers, "_buffers"),
    ):
        for placeholder, path in names.items():
            owner, _, leaf = path.rpartition(".")
            tensor = traced[placeholder]
            if table == "_parameters":
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            getattr(module.get_submodule(owner), table)[leaf] = tensor
    return module


# CUDA's half-precision headers choose between host and device code with a header of another
# package. What they choose is of no account where only the program's own text is checked.
_TARGET = "#pragma once\n#define NV_IF_TARGET(...)\n#define NV_IF_ELSE_TARGET(...)\n"


def no_cpp_check() -> str:
    """Why ``cpp_errors`` can't be asked on this machine; empty where it can."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "Python's headers are not there"
    if not os.path.exists(os.path.join(_triton_headers(), "cuda_runtime_api.h")):
        return "this triton brings no CUDA headers"
    return ""


def _triton_headers() -> str:
    import triton

    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "include")


def cpp_errors(source: str) -> str:
    """What a C++ compiler says against a program generated for C++; empty if nothing.

    Against the headers of this torch, templates instantiated, no code generated.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "nv"))
        with open(os.path.join(folder, "nv", "target"), "w") as file:
            file.write(_TARGET)
        torch_headers = os.path.join(os.path.dirname(torch.__file__), "include")
        site = os.path.dirname(os.path.dirname(torch.__file__))
        headers = [
            *glob.glob(os.path.join(site, "nvidia", "cu*", "include")),
            torch_headers,
            os.path.join(torch_headers, "torch", "csrc", "api", "include"),
            sysconfig.get_path("include"),
            _triton_headers(),
            folder,
        ]
        command = ["g++", "-std=c++20", "-fsyntax-only", "-w", "-DUSE_CUDA", "-x", "c++", "-"]
        command += [f"-I{path}" for path in headers]
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=300)
    return done.stderr if done.returncode else ""
