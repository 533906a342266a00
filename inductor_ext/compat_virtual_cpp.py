"""The test kit's half of ``compat.py`` for C++ wrappers: programs whose kernels nothing can run.

A C++ wrapper names the binaries of its kernels, which Inductor has once it has run each of them.
Here they are cross-compiled instead, and the same facts are handed over: so the C++ text is the one
that a machine with the card gets, and it can be given to a compiler.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Callable
from typing import Any

from inductor_ext.compat_patches import MovedName, Patches, private


def patch_cpp_wrapper(patches: Patches, on_package: Callable[[str, list[str]], str] | None) -> None:
    """Kernels of a C++ wrapper are compiled, not called; packages are handed to ``on_package``."""

    from inductor_ext.testing.generated import kernels_of

    def compile_instead(wrapper: Any) -> None:
        called = set(
            re.findall(r"^\s*(\w+)\.run\(", wrapper.kernel_autotune_calls.getvalue(), re.M)
        )
        for kernel in kernels_of(wrapper.kernel_autotune_defs.getvalue()):
            if kernel.name in called:
                _save_binary(kernel.source)

    python_wrapper = private("torch._inductor.codegen.wrapper:PythonWrapperCodegen")
    patches.set(python_wrapper, "generate_and_run_autotune_block", compile_instead)
    patches.fresh_dict(private("torch._inductor.codecache:CudaKernelParamCache.cache"))

    def compile_package(
        graph: Any, wrapper_code: str, kernel_code: str, *args: Any, **kwargs: Any
    ) -> str:
        if on_package is None:
            raise ValueError("compile_for expected a program to be called, got one to be packaged")
        return on_package(wrapper_code, list(kwargs["additional_files"]))

    compiler = private("torch._inductor.codecache:AotCodeCompiler")
    patches.set(compiler, "compile", staticmethod(compile_package))


def _save_binary(source: str) -> None:
    """What Inductor keeps of a kernel for C++ once it has run: its binary and how to launch it."""
    from inductor_ext.compat_virtual import load_kernel

    autotuner = load_kernel(source)
    config = autotuner.configs[0]
    with private("torch._inductor.config").patch(use_static_cuda_launcher=False):
        result = autotuner._precompile_config(config)
    binary, fn = result.kernel, result.kernel.src.fn
    constexprs = private("torch._inductor.runtime.triton_heuristics:get_constexprs")(fn)
    call_args, def_args, none_args = result._get_arg_lists(fn.arg_names, constexprs)
    fixed = private("torch._inductor.runtime.triton_heuristics:config_to_dict")(config)
    signature = result.compile_meta["signature"]
    launcher = types.SimpleNamespace(
        config=config,
        bin=binary,
        def_args=[a for a in def_args if a not in fixed],
        call_args=[
            a
            for a in call_args
            if signature.get(a, "constexpr") != "constexpr" and a not in none_args
        ],
        global_scratch=getattr(binary.metadata, "global_scratch_size", None),
        profile_scratch=getattr(binary.metadata, "profile_scratch_size", None),
    )
    autotuner.save_gpu_kernel(0, launcher)


def cpp_of(module: str) -> str:
    """The C++ text inside the Python module that is written for a C++ wrapper."""
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "cpp_wrapper_src":
            return str(ast.literal_eval(node.value))
    raise MovedName("inductor_ext.testing expected cpp_wrapper_src = ... in a program, got none")
