"""Where a scan's own kernel is faster than what stock makes of it.

Measured on an H200, in parts of the speed of a copy. Stock keeps rows of up to 1024 in registers
and is at 97%. Its loop over longer rows is at 70% of a sum, 45% of a cummax, 14% of a
logcumsumexp, 62% of a recurrence; scans that it cuts in tiles, which wait for one another, are at
35%, columns that it cuts at 4 to 9%, and many columns at 50 to 54%. The kernel here is at 35 to
100%, and at more than 1.6 times of stock's in all but the first.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings import scan_sites
from inductor_ext.lowerings.scan_places import NOWHERE, is_flip_or_view
from inductor_ext.lowerings.scan_region import Fused, size_of

from inductor_ext import compat, editing, matching
from inductor_ext.editing import same_size, value

# Fewer elements take less time than a launch does; stock may fuse more then.
LEAST_ELEMENTS = 100_000
# Rows up to this length stock keeps in registers; shorter columns were not measured, of several
# states up to this one.
PERSISTENT_ROW, SHORT_STATES = 1024, 128
# Where Inductor cuts a scan: torch's ir.Scan.num_splits and choices.reduction_split_factor, for 132
# multiprocessors. Scans beside each other from which on it does not, along rows and else:
MANY_ROWS, MANY_COLUMNS = 2 * 132, 64 * 132
# Lengths up to which it does not, along rows and, in scans of fewer elements, else:
SHORT_ROW, SHORT_COLUMN, FEW_ELEMENTS = 8192, 128, 32 * 132 * 2048


class Left(Exception):
    """Why a scan is left to stock."""


def _stock_cuts(length: int, lanes: int, along_rows: bool) -> bool:
    """Whether stock cuts a scan among programs (if it can)."""
    if along_rows:
        return lanes < MANY_ROWS and length > SHORT_ROW
    if lanes >= MANY_COLUMNS or length <= 32:
        return False
    return length * lanes >= FEW_ELEMENTS or length > SHORT_COLUMN


def _along_rows(fused: Fused) -> bool:
    """Whether neighbours in memory are neighbours along the scan."""
    tensor, dim = value(fused.site.inputs[0]), fused.site.dim
    if editing.same_size(tensor.numel(), tensor.shape[dim]):
        return True
    return compat.expr(tensor.stride(dim)) == 1


def why(fused: Fused) -> str:
    """The reason to fire. Raises Left with one not to."""
    site = fused.site
    total = size_of(site.inputs[0])
    length = compat.hint(compat.expr(site.shape[site.dim]))
    if scan_sites.is_own(site.node) and site.what != "associative_scan":
        return "an operation of this package"
    if scan_sites.is_beyond_stock(site.node):
        return "stock can't lower its combine function here"
    if total < LEAST_ELEMENTS:
        raise Left(f"{total} elements are fewer than {LEAST_ELEMENTS}")
    if fused.flips:
        return "stock turns the tensor around by a kernel of its own"
    rows, lanes = _along_rows(fused), total // length
    cuts = _stock_cuts(length, lanes, rows)
    if not cuts and _meets_reduction(fused):
        raise Left("stock scans in one sweep with a reduction over the same entries")
    several = len(site.program.states) > 1
    least = PERSISTENT_ROW + 1 if rows else SHORT_STATES + several
    if length < least and (rows or several or not cuts):
        raise Left(f"stock scans {lanes} lanes of {length} at the speed of memory")
    if scan_sites.is_recurrence(site):
        return "one scan instead of two, which neither under- nor overflows"
    if several:
        return "stock is at half the speed of memory at best with several values per position"
    if not rows:
        many = "stock loops over many columns at half the speed of memory"
        return "stock walks the columns one by one" if cuts else many
    return "stock cuts the scan" if cuts else "stock loops over rows at 70% of the speed of memory"


def _meets_reduction(fused: Fused) -> bool:
    """Whether the scan reads what a reduction along its lanes makes, or one reads its results."""
    for leaf in fused.leaves:
        if leaf.dim == NOWHERE and _comes_of_reduction(leaf.node, fused):
            return True
    stack: list[Any] = [s.node for s in fused.stored]
    seen: set[Any] = set()
    while stack and len(seen) < 256:
        for user in stack.pop().users:
            if _reduces_lanes(user, fused):
                return True
            if user not in seen and (matching.is_pointwise(user) or is_flip_or_view(user)):
                seen.add(user)
                stack.append(user)
    return False


def _comes_of_reduction(node: Any, fused: Fused) -> bool:
    """Whether a value per lane is made of a reduction along the lanes, as far as can be seen."""
    stack: list[Any] = [node]
    seen: set[Any] = set()
    while stack and len(seen) < 256:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if _reduces_lanes(node, fused):
            return True
        tensor = value(node)
        small = not isinstance(tensor, torch.Tensor) or not _is_as_large(tensor, fused)
        if small:
            stack.extend(node.all_input_nodes)
    return False


def _is_as_large(tensor: Any, fused: Fused) -> bool:
    return same_size(tensor.numel(), value(fused.site.inputs[0]).numel())


def _reduces_lanes(node: Any, fused: Fused) -> bool:
    """Whether a node reduces a tensor as large as the scan's along a dimension as long."""
    if not matching.is_reduction(node) or len(node.args) < 2:
        return False
    tensor, dims = value(node.args[0]), node.args[1]
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    if not isinstance(tensor, torch.Tensor) or len(dims) != 1 or not isinstance(dims[0], int):
        return False
    length = fused.site.shape[fused.site.dim]
    return _is_as_large(tensor, fused) and same_size(tensor.shape[dims[0]], length)
