"""The plan cache: what is remembered, for which setting, and what is not."""

import os

import pytest
import torch

from inductor_ext import compat, config, matching, plan_cache
from inductor_ext.testing import compile_for


class Counter:
    """Measures by counting how often it was asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return [self.calls]


@pytest.fixture(autouse=True)
def on_a_card(monkeypatch):
    monkeypatch.setattr(compat, "card_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(compat, "caches_on", lambda: True)


def test_a_second_process_reads():
    measure = Counter()
    assert plan_cache.recall("a", measure) == plan_cache.recall("a", measure) == [1]
    assert plan_cache.recall("b", measure) == [2]


def test_another_setting_measures_again(monkeypatch):
    measure = Counter()
    plan_cache.recall("a", measure)
    name = plan_cache.here("a")
    with config.patch(pdl=not config.pdl):
        assert plan_cache.here("a") != name
        assert plan_cache.recall("a", measure) == [2]
    monkeypatch.setattr(compat, "card_name", lambda: "NVIDIA A100")
    assert plan_cache.here("a") != name and plan_cache.recall("a", measure) == [3]


def test_an_accident_is_not_written():
    measure = Counter()
    for call in (1, 2):
        assert plan_cache.recall("a", measure, keep=lambda value: value[0] > 2) == [call]
    assert not list(plan_cache.folder().glob("*"))


@pytest.mark.parametrize("text", ["", "{", "5", "null", "[[1]]", "{}", '{"format": 2, "value": 1}'])
def test_another_file_in_its_place_is_measured_over(text):
    measure = Counter()
    plan_cache.recall("a", measure)
    (path,) = plan_cache.folder().glob("*.json")
    path.write_text(text)
    assert plan_cache.recall("a", measure) == plan_cache.recall("a", measure) == [2]


def test_a_write_that_fails_leaves_nothing(monkeypatch):
    def refuse(*args):
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    assert plan_cache.recall("a", Counter()) == [1]
    assert not list(plan_cache.folder().glob("*"))


@pytest.mark.codegen
def test_what_follows_a_site_is_told_apart_and_names_are_not(monkeypatch):
    asked = []
    ask = matching.consumers_key
    monkeypatch.setattr(matching, "consumers_key", lambda node=None: asked.append(ask(node)) or "")

    def key(fn, *extra):
        args = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in extra]
        x, w = torch.empty(16, 8192, device="meta"), torch.empty(8192, 32, device="meta")
        compile_for("h200", fn, x.bfloat16(), w.bfloat16(), *args)
        return asked.pop()

    row = key(lambda x, w, b: torch.relu(x @ w + b), (32,))
    assert row == key(lambda x, w, unused, b: torch.relu(x @ w + b), (4,), (32,))
    others = [
        key(lambda x, w, b: torch.relu(x @ w + b), (16, 32)),
        key(lambda x, w, b: torch.relu(x @ w + b).sum(-1), (32,)),
        key(lambda x, w, b: torch.relu(b - x @ w), (32,)),
    ]
    assert len({row, *others}) == 4
