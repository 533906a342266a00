"""Shared: programs with scans; what is generated for them, in a few lines."""

import re

import pytest
import torch

import inductor_ext
from inductor_ext.testing import compile_for, run_interpreted
from inductor_ext.testing.generated import calls_of, kernels_of


@pytest.fixture(autouse=True)
def clean_setting():
    torch.manual_seed(0)
    with inductor_ext.config.patch(strict=True):
        yield


@pytest.fixture(name="forced")
def _forced():
    return forced


@pytest.fixture(name="launches")
def _launches():
    return launches


@pytest.fixture(name="decision")
def _decision():
    return decision


@pytest.fixture(name="run")
def _run():
    return run_interpreted


def forced(fn, *args, **options):
    """The code of a program whose scans are taken, however small they are."""
    return compile_for("h200", fn, *args, force={"scan": "scan"}, **options)


def launches(code):
    """A line per launch or library call; of a scan also how many tensors it reads and writes."""
    lines = []
    for source, kind in zip(code.graphs, code.graph_kinds, strict=True):
        lines.append(kind)
        kernels = {kernel.name: kernel for kernel in kernels_of(source)}
        for call in calls_of(source):
            kernel = kernels.get(call)
            if kernel is None:
                lines.append(f"  {call}")
            elif kernel.kind != "user":
                lines.append(f"  {kernel.kind}")
            else:
                entry = re.search(r"def (scan_\w+)\((.*?)\)", kernel.source)
                reads, writes = (len(re.findall(rf"\b{c}\d+_ptr", entry[2])) for c in "xy")
                lines.append(f"  {entry[1]} reads={reads} writes={writes}")
    return "\n".join(lines) + "\n"


def decision(code):
    """The one decision about a scan."""
    (found,) = [d for d in code.decisions if d.lowering == "scan"]
    return found
