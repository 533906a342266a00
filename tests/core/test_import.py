"""Importing the plugin leaves the card alone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.codegen

ASKED = """
import os, torch
available = torch.cuda.is_available
asked = []
def is_available():
    asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
    return available()
torch.cuda.is_available = is_available
torch.cuda.init = torch._C._cuda_init = None
import inductor_ext
assert set(asked) <= {"1"}, asked
assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
"""


def test_no_question_for_a_card_that_wakes_it():
    env_free = [sys.executable, "-W", "ignore", "-c", ASKED]
    done = subprocess.run(env_free, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
