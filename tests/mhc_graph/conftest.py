"""Shared: every mHC lowering is on, attention off, and a failure inside one is an error."""

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
    names = ("mhc_pre", "mhc_post", "mhc_post_pre")
    strict = inductor_ext.config.patch(strict=True)
    with strict, inductor_ext.enable(*names), inductor_ext.disable("attention"):
        yield
