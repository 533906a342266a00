"""A traced program, followed again with data: which graph runs on what, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from inductor_ext.testing.generated import Copy, GeneratedCode, GraphCall, Ref, Value


def replay(
    code: GeneratedCode,
    args: tuple[Any, ...],
    grad_outputs: Sequence[torch.Tensor] | None,
    run_graph: Callable[..., list[Any]],
) -> Any:
    """``run_interpreted``; ``run_graph(source, inputs, constants=)`` runs a generated graph."""
    program = code.program
    if code.stopped:
        raise NotImplementedError(
            f"run_interpreted expected code that was followed to its end, got: {code.stopped}"
        )
    if grad_outputs is not None and len(grad_outputs) != len(program.tangent_of):
        raise ValueError(
            f"run_interpreted expected {len(program.tangent_of)} grad_outputs, "
            f"got {len(grad_outputs)}"
        )
    memory = _Memory()
    leaves = pytree.tree_leaves(args)
    for index, ref in program.args:
        tensor = leaves[index] if index < len(leaves) else None
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            got = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(
                f"run_interpreted expected a tensor on cpu as argument {index}, got {got}"
            )
        if tensor.dtype != ref.dtype or tensor.dim() != len(ref.size):
            raise ValueError(
                f"run_interpreted expected argument {index} with {len(ref.size)} dimensions of "
                f"{ref.dtype}, got {tensor.dim()} of {tensor.dtype}"
            )
        memory.put(ref, tensor.detach())
    for name, tensor, ref in program.captured:
        if tensor.device.type == "cpu":
            memory.put(ref, tensor.detach())
        else:
            memory.absent[ref.storage] = f"{name}, which is on {tensor.device}"
    if grad_outputs is not None:
        for ref, gradient in zip(program.tangents, grad_outputs, strict=True):
            # A copy: a backward may reuse the memory of the gradients it is given.
            memory.put(ref, gradient.detach().clone(memory_format=torch.contiguous_format))

    for call in program.calls:
        if isinstance(call, Copy):
            if grad_outputs is not None:
                source = memory.get(call.source, "gradient")
                memory.put(call.target, _in_layout_of(call.target, source))
            continue
        if code.graph_kinds[call.graph] == "backward" and grad_outputs is None:
            continue
        inputs = _inputs(call, program.graph_inputs[call.graph], memory)
        outputs = run_graph(
            code.graphs[call.graph], inputs, constants=program.constants[call.graph]
        )
        for output, value in zip(call.outputs, outputs, strict=True):
            if isinstance(output, Ref):
                memory.put(output, value)

    result = [memory.get(r, "output") if isinstance(r, Ref) else r for r in program.output_refs]
    outputs = pytree.tree_unflatten(result, program.output_spec)
    if grad_outputs is None:
        return outputs
    gradients = {
        name: None if ref is None else memory.get(ref, f"gradient of {name}")
        for name, ref in zip(program.grad_names, program.grad_refs, strict=True)
    }
    return outputs, gradients


def _in_layout_of(traced: Ref, tensor: torch.Tensor) -> torch.Tensor:
    """A copy laid out as ``traced`` is; at other sizes, dense in the same order of dimensions."""
    if tuple(tensor.shape) == traced.size:
        copy = torch.empty_strided(traced.size, traced.stride, dtype=tensor.dtype)
    else:
        order = sorted(range(tensor.dim()), key=lambda dim: -traced.stride[dim])
        copy = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype)
    return copy.copy_(tensor)


class _Memory:
    """Real tensors by what they were in the trace."""

    def __init__(self) -> None:
        self.tensors: dict[Ref, torch.Tensor] = {}
        self.storages: dict[int, tuple[Ref, torch.Tensor]] = {}
        self.absent: dict[int, str] = {}
        self.symbols: dict[str, int] = {}  # a backward may have products of sizes in its inputs

    def put(self, ref: Ref, tensor: torch.Tensor) -> None:
        self.tensors[ref] = tensor
        self.storages[ref.storage] = (ref, tensor)

    def get(self, ref: Ref, what: str) -> torch.Tensor:
        if ref in self.tensors:
            return self.tensors[ref]
        if ref.storage in self.absent:
            raise ValueError(
                f"run_interpreted expected tensors on cpu, got {self.absent[ref.storage]}"
            )
        if ref.storage in self.storages:
            # Another view of memory that is known: exact where the sizes are those of the trace.
            traced, tensor = self.storages[ref.storage]
            same = tuple(tensor.shape) == traced.size and tuple(tensor.stride()) == traced.stride
            if same and traced.dtype == ref.dtype:
                offset = tensor.storage_offset() - traced.offset + ref.offset
                return torch.as_strided(tensor, ref.size, ref.stride, offset)
        raise NotImplementedError(
            f"run_interpreted expected every {what} to come from an argument or a generated graph, "
            f"got a {ref.dtype} tensor of size {ref.size} computed elsewhere"
        )


def _inputs(call: GraphCall, sizes: list[list[str]], memory: _Memory) -> list[Any]:
    values: list[Any] = [
        memory.get(ref, f"input of graph {call.graph}") if isinstance(ref, Ref) else ref
        for ref in call.inputs
    ]
    symbols = memory.symbols
    symbols |= {
        symbol: value.shape[dim]
        for value, names in zip(values, sizes, strict=True)
        if isinstance(value, torch.Tensor)
        for dim, symbol in enumerate(names)
    }
    return [symbols.get(v.symbol, v.number) if isinstance(v, Value) else v for v in values]
