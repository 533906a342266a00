"""Shared: seeded, and a failure inside a lowering is an error."""

import sys
from pathlib import Path

import pytest
import torch

import inductor_ext

sys.path[:0] = [str(Path(__file__).parent)]  # the module beside this one


@pytest.fixture(autouse=True)
def clean_setting():
    torch.manual_seed(0)
    with inductor_ext.config.patch(strict=True):
        yield
