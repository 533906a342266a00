"""Private torch names where a program runs and none is lowered: ranks, autograd, transforms."""

from __future__ import annotations

from typing import Any

import torch


def distributed_store() -> tuple[Any, int, int]:
    """(key-value store, rank, world size) of the job; the store is None in a world of one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None, 0, 1
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1:
        return None, 0, 1
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store(), rank, world


def process_group(name: str) -> Any:
    """The process group of this ``group_name``, which is what an operation can be told of it."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
    """Every rank's tensor after the other's along dimension 0 of ``out``."""
    distributed = torch.distributed
    # Named so from 2.13 on, which calls the older name deprecated.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, mine, group=group)


def backward_frees_graph() -> bool:
    """Whether a backward runs, for real and not being traced, that frees its graph behind it."""
    tracing = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if tracing or under_functorch():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


@torch.compiler.assume_constant_result
def _derives_while_traced() -> bool:
    """Whether Dynamo is inside a transform that differentiates; it guards on those around it."""
    from torch._functorch.pyfunctorch import TransformType, retrieve_all_functorch_interpreters

    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return any(i.key() != TransformType.Vmap for i in retrieve_all_functorch_interpreters())


def under_functorch() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) runs, or batched gradients, or forward
    mode, in which an operation of ours would lose its tangent without a word. In a program that
    is traced only derivatives count: Dynamo takes vmap apart."""
    if torch.compiler.is_dynamo_compiling():
        return _derives_while_traced()
    if torch.compiler.is_compiling():
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    # Batched gradients (is_grads_batched) are of an older vmap that is no such interpreter.
    batched = torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")
    return batched or torch._C._functorch.peek_interpreter_stack() is not None
