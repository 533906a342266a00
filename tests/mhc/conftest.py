"""Shared by the mHC tests: seeded, and the kernels on CPU tensors in the interpreter."""

import contextlib
import pathlib
import sys

import pytest
import torch
from inductor_ext.templates import mhc_post, mhc_pre, mhc_projection, mhc_slabs

from inductor_ext.ops import _mhc
from inductor_ext.testing import launches_interpreted

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # reference


@pytest.fixture(autouse=True)
def clean_setting():
    torch.manual_seed(0)


@contextlib.contextmanager
def on_cpu():
    """The kernels apply to CPU tensors and run on them in the interpreter."""
    modules = mhc_projection, mhc_pre, mhc_post, mhc_slabs
    with launches_interpreted(*modules), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_mhc, "kernels_apply", lambda X: X.dtype != torch.float64)
        yield


@pytest.fixture(name="on_cpu")
def _on_cpu():
    return on_cpu
