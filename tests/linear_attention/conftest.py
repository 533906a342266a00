"""Shared by the tests of linear attention: seeded, and the kernels on CPU tensors in the
interpreter."""

import contextlib
import pathlib
import sys

import pytest
import torch
from inductor_ext.templates import linear_attention_channel_launch, linear_attention_launch

from inductor_ext.ops import _linear_attention
from inductor_ext.testing import launches_interpreted

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # reference


@pytest.fixture(autouse=True)
def clean_setting():
    torch.manual_seed(0)


@contextlib.contextmanager
def on_cpu():
    """The kernels apply to CPU tensors and run on them in the interpreter."""
    modules = linear_attention_launch, linear_attention_channel_launch
    with launches_interpreted(*modules), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_linear_attention, "kernels_apply", lambda q, v: q.dtype != torch.float64)
        yield


@pytest.fixture(name="on_cpu")
def _on_cpu():
    return on_cpu
