"""Shared by all tests: a test marked ``gpu`` is skipped where there is no card."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA card")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
