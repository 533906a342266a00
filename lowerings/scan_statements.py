"""Statements of a scan's kernel, written from copies of the nodes that it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from inductor_ext.lowerings.scan_places import Step

from inductor_ext import scan_pointwise
from inductor_ext.editing import value


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor that the kernel reads: a node, seen through ``steps``; ``dim`` is the scanned
    dimension in it, as in ``Place``."""

    node: Any
    steps: tuple[Step, ...]
    shift: int = 0
    fill: str = "0"
    dim: int | None = dataclasses.field(default=None, compare=False)


class Statements:
    """Statements from scratch copies of nodes: what lies in different places has copies of its
    own."""

    def __init__(self, leaves: dict[Leaf, int], prefix: str) -> None:
        self.graph = torch.fx.Graph()
        self.leaves = leaves
        self.translator = scan_pointwise.Translator({}, prefix)
        self.known: dict[Any, Any] = {}

    def given(self, key: Any, like: Any, name: str) -> Any:
        """A value that has a name: of a leaf, or of a result of the scan."""
        if key not in self.known:
            copy = self.known[key] = self.graph.placeholder(f"given_{len(self.known)}")
            copy.meta["val"] = value(like)
            self.translator.given(copy, name)
        return self.known[key]

    def leaf(self, leaf: Leaf) -> Any:
        index = self.leaves.setdefault(leaf, len(self.leaves))
        return self.given(leaf, leaf.node, f"x{index}")

    def pointwise(self, key: Any, node: Any, sources: dict[Any, Any]) -> Any:
        """Copy a pointwise node; ``sources`` are the copies of what it reads. Raises Unknown."""
        if key not in self.known:
            copy = self.graph.node_copy(node, lambda n: sources[n])
            self.translator.add(copy)
            self.known[key] = copy
        return self.known[key]

    def of(self, copy: Any) -> str:
        return self.translator.of(copy)

    def lines(self) -> list[str]:
        return self.translator.statements

    def state(self) -> Any:
        return dict(self.known), dict(self.leaves), self.translator.state()

    def back_to(self, state: Any) -> None:
        """Forget what was added since ``state()``."""
        self.known = dict(state[0])
        self.leaves.clear()
        self.leaves.update(state[1])
        self.translator.back_to(state[2])
