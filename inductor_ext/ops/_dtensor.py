"""Arguments that are DTensors, as this rank's tensors and its shard of the classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from inductor_ext.ops import _shards
from inductor_ext.ops._shards import Shard

Wrap = Callable[[Any], Any]


def is_dtensor(tensor: Any) -> bool:
    """Whether this is a DTensor, without importing what defines it."""
    return getattr(tensor, "device_mesh", None) is not None


def taken_apart(
    name: str, sharded: Any, dim: int, others: dict[str, Any], group: Any
) -> tuple[Tensor, dict[str, Any], Shard | None, Wrap]:
    """This rank's tensor of a DTensor whose dimension ``dim`` are the classes.

    ``name`` is what errors call it, with a verb. Returns it; ``others``, each replicated or plain,
    as plain tensors; the shard, None if nothing is sharded; and what makes replicated DTensors of
    results.

    Raises ValueError for other placements, for a mesh of more than one dimension, and for a
    ``group`` beside the mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if group is not None:
        raise ValueError(f"no group is expected beside a DTensor, whose mesh has one, got {group}")
    mesh, placements = sharded.device_mesh, sharded.placements
    split = len(placements) == 1 and placements[0].is_shard(dim)
    if not split and any(not p.is_replicate() for p in placements):
        raise ValueError(
            f"{name} expected as a DTensor on a mesh of one dimension, sharded on dimension {dim} "
            f"(the classes) or replicated, got placements {tuple(placements)}"
        )
    plain = {}
    for other, tensor in others.items():
        plain[other] = tensor
        if not is_dtensor(tensor):
            continue
        if tensor.device_mesh != mesh or not all(p.is_replicate() for p in tensor.placements):
            raise ValueError(
                f"{other} is expected as a tensor, or as a DTensor that is replicated on {mesh}, "
                f"got placements {tuple(tensor.placements)} on {tensor.device_mesh}"
            )
        plain[other] = tensor.to_local(grad_placements=tensor.placements)

    def wrap(out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(wrap(each) for each in out)
        return DTensor.from_local(out, mesh, [Replicate()] * mesh.ndim, run_check=False)

    local = sharded.to_local(grad_placements=placements)
    return local, plain, shard_on(name, sharded, local, dim) if split else None, wrap


def shard_on(name: str, sharded: Any, local: Tensor, dim: int) -> Shard:
    """The shard of a DTensor whose local tensor is ``local``, known without an exchange."""
    mesh, classes = sharded.device_mesh, sharded.shape[dim]
    size = -(-classes // mesh.size())
    start = min(mesh.get_local_rank() * size, classes)
    if local.shape[dim] != min(size, classes - start):
        raise ValueError(
            f"{name} expected to have {min(size, classes - start)} of {classes} classes on this "
            f"rank, as torch.chunk would, got {local.shape[dim]}"
        )
    shard = _shards.shard_of(mesh.get_group())
    assert shard is not None
    return Shard(shard.group, start, classes)


def without(name: str, others: dict[str, Any]) -> None:
    """Raise where one of ``others`` is a DTensor, beside a ``name`` that is none."""
    for other, tensor in others.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"{name} expected as a DTensor beside {other} as one, got a plain tensor"
            )


def own_weight(weight: Any, shard: Shard | None, mesh: Any) -> Any:
    """This rank's part of class weights, which are plain, replicated, or sharded as classes are."""
    if not is_dtensor(weight):
        whole = weight
    elif weight.device_mesh != mesh:
        raise ValueError(f"weight is expected on the mesh {mesh}, got {weight.device_mesh}")
    elif weight.placements[0].is_replicate():
        whole = weight.to_local()
    else:
        return own_part("weight", weight, shard, mesh)
    if whole is None or shard is None:
        return whole
    if whole.dim() != 1 or whole.shape[0] != shard.classes:
        raise ValueError(
            f"weight is expected as ({shard.classes},), of all classes, got {tuple(whole.shape)}"
        )
    return whole[shard.start : shard.start + -(-shard.classes // mesh.size())]


def own_part(name: str, of_classes: Any, shard: Shard | None, mesh: Any) -> Any:
    """This rank's part of a DTensor [classes] that is sharded, or not, as the classes are."""
    if of_classes is None:
        return None
    if not is_dtensor(of_classes) or of_classes.device_mesh != mesh or of_classes.dim() != 1:
        raise ValueError(f"{name} is expected as a DTensor [classes] on {mesh}, got {of_classes!r}")
    placements = of_classes.placements
    local = of_classes.to_local(grad_placements=placements)
    if shard is None and all(p.is_replicate() for p in placements):
        return local
    if shard is None or not placements[0].is_shard(0):
        raise ValueError(
            f"{name} is expected to be placed as the classes are, got {tuple(placements)}"
        )
    if shard_on(f"{name} is", of_classes, local, 0) != shard:
        raise ValueError(f"{name} is expected as ({shard.classes},), got {tuple(of_classes.shape)}")
    return local
