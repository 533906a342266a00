"""Shared: attention is on for scores of any size, and a failure inside it is an error."""

import sys
from pathlib import Path

import pytest
import torch
from inductor_ext.lowerings import attention_replacement

import inductor_ext

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def clean_setting(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(attention_replacement, "LEAST_SCORES", 0)
    monkeypatch.setattr(attention_replacement, "LEAST_STATIC", (0, 0))
    with inductor_ext.config.patch(strict=True), inductor_ext.enable("attention"):
        yield


@pytest.fixture
def card_here(monkeypatch):
    """The CPU counts as a card."""
    monkeypatch.setattr(attention_replacement.compat_fx, "writes_triton", lambda device: True)
