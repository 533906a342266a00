"""Shared by the tests of attention: seeded, and their reference importable."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # reference


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
