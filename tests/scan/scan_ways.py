"""The ways in which the operations are computed: composed, or by kernels in small tiles."""

import contextlib
import dataclasses
import functools

import pytest
from inductor_ext.templates import scan_launch

from inductor_ext.ops import _scan_programs
from inductor_ext.testing import launches_interpreted

# Tiles so small that a few dozen positions make many, in groups and groups of groups.
TILES = {
    "looped": scan_launch.Tiling(2, 8, 1),
    "shared": scan_launch.Tiling(2, 4, 1, 2, fetch=3),
    "shared, by addresses": scan_launch.Tiling(1, 4, 1, 2, False),
}
KERNELS = tuple(TILES)
WAYS = ("composed", *KERNELS)


def _tile(tile, program, axis, lanes, *_):
    return dataclasses.replace(tile, lanes=min(tile.lanes, lanes))


@contextlib.contextmanager
def computed(way):
    """Within: composed of torch functions, or by kernels in the interpreter, in small tiles."""
    if way == "composed":
        yield
        return
    with launches_interpreted(scan_launch), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scan_programs, "kernels_apply", lambda x: True)
        patch.setattr(scan_launch, "tiling", functools.partial(_tile, TILES[way]))
        yield
