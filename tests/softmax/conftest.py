"""Shared by the softmax tests: seeded, and the kernels on CPU tensors in the interpreter."""

import contextlib

import pytest
import torch
from inductor_ext.templates import class_softmax_launch, softmax, softmax_split

from inductor_ext.ops import _rows, _softmax
from inductor_ext.testing import launches_interpreted


@pytest.fixture(autouse=True)
def clean_setting():
    torch.manual_seed(0)


@contextlib.contextmanager
def on_cpu(tile, strided=False):
    """The kernels apply to CPU tensors, run on them in the interpreter, and have this tile.

    None: rows are split. ``strided``: classes that are not the last dimension are read as they lie.
    """
    with (
        launches_interpreted(softmax, softmax_split, class_softmax_launch),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(_softmax, "kernels_apply", _rows.shapes_apply)
        patch.setattr(softmax, "tile", lambda *_, **__: tile)
        patch.setattr(softmax, "_from_the_end", lambda *_: tile.held == 1)
        patch.setattr(softmax_split, "applies", lambda x: tile is None)
        patch.setattr(class_softmax_launch, "applies", lambda x: strided)
        yield


@pytest.fixture(name="on_cpu")
def _on_cpu():
    return on_cpu
