"""Shared by the plan tests: a clean setting, and plans that fit what runs here."""

import pytest
import torch
import triton

from inductor_ext import active_plan, config, registry
from inductor_ext.plan import Box, Entry, Key, Plan
from inductor_ext.testing.cards import CARDS

MEASURED = "2026-01-31T12:00:00Z"


TORCH, TRITON = (".".join(m.__version__.split(".")[:2]) for m in (torch, triton))


@pytest.fixture(autouse=True)
def _clean():
    """No plan is in force before and after, and the shipped one has no say."""
    active_plan.unload_plan()
    with registry.enable("decompose_k"), config.patch(shipped_plan=False):
        yield
    active_plan.unload_plan()


def box(choice, times=None, **bounds):
    """``box("stock", m=(1, 8))``."""
    return Box(tuple(bounds.items()), choice, times or {})


@pytest.fixture
def make_plan():
    """``make_plan(boxes..., op=, layout=, dtype=, card=, **sizes)``: a plan of one entry."""

    def make(
        *boxes,
        op="mm",
        dtype="bfloat16",
        layout="row,row",
        card=CARDS["h200"].name,
        torch_version=TORCH,
        triton_version=TRITON,
        measured=MEASURED,
        lowering="decompose_k",
        **sizes,
    ):
        key = Key.of(lowering, op, dtype, layout, sizes)
        entries = (Entry(key, boxes, measured, 1 << 30),) if boxes else ()
        return Plan(card, torch_version, triton_version, entries)

    return make
