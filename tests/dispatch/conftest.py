"""Shared by the tests of branching on sizes: a clean setting, and programs run at several sizes."""

import copy
import re

import pytest
import torch

import inductor_ext
from inductor_ext import dispatch
from inductor_ext.testing import run_interpreted


def conditions_of(code):
    """The conditions of the generated branches, in order, symbols numbered by appearance."""
    found = re.findall(r"^\s+(?:if|elif) (.*\bs\d+.*):$", code.source, re.MULTILINE)
    numbers = {}

    def renumber(match):
        return f"s{numbers.setdefault(match.group(), len(numbers))}"

    return [re.sub(r"\bs\d+", renumber, condition) for condition in found]


@pytest.fixture(name="conditions_of")
def _conditions_of():
    return conditions_of


@pytest.fixture
def right_at(judge):
    """``right_at(code, fn, args)``: the generated program's numbers for these arguments."""

    def check(code, fn, args, rounding=torch.bfloat16):
        assert not code.stopped and code.frames == 1
        judge(fn, args, run_interpreted(code, *copy.deepcopy(args)), rounding=rounding)

    return check


@pytest.fixture(autouse=True)
def well_formed(monkeypatch):
    """Every graph the pass leaves behind is in order, not only after Inductor has sorted it."""
    apply = dispatch.Pass.apply

    def checked(self, graph):
        count = apply(self, graph)
        graph.lint()
        return count

    monkeypatch.setattr(dispatch.Pass, "apply", checked)


@pytest.fixture(autouse=True)
def clean_setting():
    """Strict and seeded."""
    torch.manual_seed(0)
    with inductor_ext.config.patch(strict=True):
        yield
