"""A gradient that the forward made for an incoming gradient of 1, multiplied by the real one.

In a backward graph such a gradient is a saved tensor. Where AOTAutograd has found that nobody sees
it again (a donated buffer: the runtime refuses a backward that keeps its graph) and nothing else in
the graph reads it, it is scaled where it lies, by a kernel that leaves at once if the factor is 1:
known on the card only. Elsewhere the product is a pointwise operation, which fuses.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_ext import compat, compat_ir, report
from inductor_ext.ops import _joint

SCALED = _joint.scaled_gradient._opoverload
IN_PLACE = _joint.scale_gradient_._opoverload


def _why_not(made: Any, g: Any) -> str | None:
    """Why ``made`` is not scaled in place."""
    node = compat.current_node()
    if not compat_ir.is_donated(made):
        return "it is no saved tensor that the program gives away"
    if not compat_ir.has_dense_rows(made):
        return "its elements do not lie side by side"
    if node is None or len(node.args[0].users) > 1:
        return "something else reads what is scaled"
    if made.get_device() != g.get_device():
        return "the factor is on another device"
    return None


def lower_scaled(name: str, made: Any, g: Any) -> Any:
    """What a lowering called ``name`` makes of it."""
    why_not = _why_not(made, g)
    sizes = "x".join(str(s) for s in made.get_size())
    here = f"scaled gradient {sizes} {str(made.get_dtype()).removeprefix('torch.')}"
    if why_not is None:
        compat_ir.call_custom(IN_PLACE, made, g)
        why = "nothing is moved where the incoming gradient is 1"
        report.record(report.Decision(name, True, "in place", why, here, source="heuristic"))
        return made
    report.record(report.Decision(name, True, "product", why_not, here, source="heuristic"))
    dtype = torch.float64 if made.get_dtype() == torch.float64 else torch.float32
    factor = compat_ir.to_dtype(compat_ir.view(g, []), dtype)
    product = compat_ir.call(torch.ops.aten.mul.Tensor, compat_ir.to_dtype(made, dtype), factor)
    return compat_ir.to_dtype(product, made.get_dtype())
