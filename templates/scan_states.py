"""Texts about the leaves of a state, by name: ``s`` is s0, s1, ..."""

from __future__ import annotations

TYPES = {"int1": "int1", "int32": "int32", "fp32": "float32", "int64": "int64", "fp64": "float64"}


def leaves(prefix: str, states: tuple[str, ...]) -> str:
    return ", ".join(f"{prefix}{i}" for i in range(len(states)))


def group(prefix: str, states: tuple[str, ...]) -> str:
    """The same as one argument."""
    return f"{prefix}0" if len(states) == 1 else f"({leaves(prefix, states)})"


def picked(states: tuple[str, ...], to: str, of: str, call: str, where: str) -> str:
    """``to`` becomes ``of`` where ``where`` holds, which is once in what ``call`` sums, bit for
    bit."""
    lines = []
    for i, kind in enumerate(states):
        bits = {"fp32": "int32", "fp64": "int64"}.get(kind)
        state = f"{of}{i}.to(tl.{bits}, bitcast=True)" if bits else f"{of}{i}.to(tl.int32)"
        if kind == "int64":
            state = f"{of}{i}"
        back = f"tl.{TYPES[kind]}, bitcast=True" if bits else f"tl.{TYPES[kind]}"
        lines.append(f"{to}{i} = {call}({state}, {where}).to({back})")
    return "\n".join(lines)
