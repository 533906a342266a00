"""Functional operations with gradients, for any program, compiled or not.

Each is a ``torch.library`` operation with kernels for a card and a fallback composed of torch
functions. Imported on first use; importing needs no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time each is imported on first use
    from inductor_ext.ops._attention_function import attention as attention
    from inductor_ext.ops._cross_entropy import cross_entropy as cross_entropy
    from inductor_ext.ops._distillation import sparse_distillation_loss as sparse_distillation_loss
    from inductor_ext.ops._linear_attention import linear_attention as linear_attention
    from inductor_ext.ops._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from inductor_ext.ops._mhc_function import mhc_collapse as mhc_collapse
    from inductor_ext.ops._mhc_function import mhc_head as mhc_head
    from inductor_ext.ops._mhc_function import mhc_post as mhc_post
    from inductor_ext.ops._mhc_function import mhc_post_pre as mhc_post_pre
    from inductor_ext.ops._mhc_function import mhc_pre as mhc_pre
    from inductor_ext.ops._mhc_function import mhc_pre_from_mixes as mhc_pre_from_mixes
    from inductor_ext.ops._mhc_function import sinkhorn as sinkhorn
    from inductor_ext.ops._recurrence import linear_recurrence as linear_recurrence
    from inductor_ext.ops._scan import scan as scan
    from inductor_ext.ops._softmax import log_softmax as log_softmax
    from inductor_ext.ops._softmax import softmax as softmax
    from inductor_ext.ops._sparse_attention import sparse_attention as sparse_attention

_HOME = {
    "attention": "_attention_function",
    "cross_entropy": "_cross_entropy",
    "linear_attention": "_linear_attention",
    "linear_cross_entropy": "_linear_cross_entropy",
    "linear_recurrence": "_recurrence",
    "log_softmax": "_softmax",
    "mhc_collapse": "_mhc_function",
    "mhc_head": "_mhc_function",
    "mhc_post": "_mhc_function",
    "mhc_post_pre": "_mhc_function",
    "mhc_pre": "_mhc_function",
    "mhc_pre_from_mixes": "_mhc_function",
    "scan": "_scan",
    "sinkhorn": "_mhc_function",
    "softmax": "_softmax",
    "sparse_attention": "_sparse_attention",
    "sparse_distillation_loss": "_distillation",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
