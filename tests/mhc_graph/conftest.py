"""Shared: attention is off, and a failure inside a lowering is an error."""

import sys
from pathlib import Path

import pytest
import torch
from inductor_ext.lowerings import mhc_post

import inductor_ext

# The benchmarks' forms, and the modules beside this one.
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def clean_setting(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(mhc_post, "LEAST_BYTES", 0)
    with inductor_ext.config.patch(strict=True), inductor_ext.disable("attention"):
        yield
