"""A process forked after the import can use the card."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

FORK = """
import os, inductor_ext, torch
child = os.fork()
if not child:
    os._exit(0 if torch.ones(3, device="cuda").sum() == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_fork_after_the_import():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True)
