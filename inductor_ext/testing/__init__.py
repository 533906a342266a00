"""Generated code and kernel numerics without a GPU.

``compile_for`` generates the code of a virtual card, ``run_interpreted`` runs it on CPU tensors in
Triton's interpreter, ``GeneratedCode.cross_compile`` builds its kernels for the card, and
``outline`` and ``assert_golden`` compare it with a file. Nothing here needs a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time each is imported on first use
    from inductor_ext.testing.binaries import KernelBinary as KernelBinary
    from inductor_ext.testing.cards import CARDS as CARDS
    from inductor_ext.testing.cards import Card as Card
    from inductor_ext.testing.compiling import compile_for as compile_for
    from inductor_ext.testing.cpp import CppProgram as CppProgram
    from inductor_ext.testing.cpp import cpp_errors as cpp_errors
    from inductor_ext.testing.cpp import no_cpp_check as no_cpp_check
    from inductor_ext.testing.cpp import package_for as package_for
    from inductor_ext.testing.generated import GeneratedCode as GeneratedCode
    from inductor_ext.testing.generated import Kernel as Kernel
    from inductor_ext.testing.golden import assert_golden as assert_golden
    from inductor_ext.testing.golden import normalise as normalise
    from inductor_ext.testing.golden import outline as outline
    from inductor_ext.testing.interpreter import interpret_source as interpret_source
    from inductor_ext.testing.interpreter import run_interpreted as run_interpreted
    from inductor_ext.testing.interpreter import run_kernel_interpreted as run_kernel_interpreted
    from inductor_ext.testing.launches import launch_binaries as launch_binaries
    from inductor_ext.testing.launches import launches_interpreted as launches_interpreted

_HOME = {
    "CARDS": "cards",
    "Card": "cards",
    "CppProgram": "cpp",
    "GeneratedCode": "generated",
    "Kernel": "generated",
    "KernelBinary": "binaries",
    "assert_golden": "golden",
    "compile_for": "compiling",
    "cpp_errors": "cpp",
    "interpret_source": "interpreter",
    "launch_binaries": "launches",
    "launches_interpreted": "launches",
    "no_cpp_check": "cpp",
    "normalise": "golden",
    "outline": "golden",
    "package_for": "cpp",
    "run_interpreted": "interpreter",
    "run_kernel_interpreted": "interpreter",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
