"""A scan that a graph pass fused, as an operation: what ``tune`` runs instead of the bare kernel,
so that its launch is met on tensors that exist."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_ext.ops._opaque import opaque_op
from inductor_ext.templates.scan_launch import launch
from inductor_ext.templates.scan_program import Program

_programs: dict[str, Program] = {}


def name_of(program: Program) -> str:
    """What the operation is told of a program."""
    name = str(hash(program))
    _programs[name] = program
    return name


def _empty(
    inputs: list[Tensor], program: str, shape: list[int], strides: list[int]
) -> list[Tensor]:
    made = []
    for i, dtype in enumerate(_programs[program].outputs):
        own = strides[i * len(shape) : (i + 1) * len(shape)]
        made.append(torch.empty_strided(shape, own, dtype=dtype, device=inputs[0].device))
    return made


@opaque_op("inductor_ext::fused_scan")
def fused_scan(
    inputs: list[Tensor], program: str, shape: list[int], strides: list[int], dim: int
) -> list[Tensor]:
    """The outputs of a program, with these strides one after the other, of inputs of ``shape``."""
    outputs = _empty(inputs, program, shape, strides)
    launch(_programs[program], inputs, outputs, dim)
    return outputs


@fused_scan.register_fake
def _(
    inputs: list[Tensor], program: str, shape: list[int], strides: list[int], dim: int
) -> list[Tensor]:
    return _empty(inputs, program, shape, strides)
