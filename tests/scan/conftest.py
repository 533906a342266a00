"""Shared by the scan tests: seeded, and three ways in which the operations are computed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from scan_ways import WAYS, computed


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=WAYS)
def way(request):
    with computed(request.param):
        yield request.param
