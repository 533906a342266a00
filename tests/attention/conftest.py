"""Shared by the tests of attention: helpers beside the tests are found, and all is seeded."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
