"""Torch's structured trace (TORCH_TRACE, what tlparse reads): the private names that it takes.

An artifact carries the compile id of where it is emitted, so decisions wait with the graph they
were taken in and are handed over while that graph is still being compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tracing() -> bool:
    """Whether anything listens to the structured trace."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def emit_artifact(name: str, text: str) -> None:
    """Put a JSON text into the trace under this name, with the compile id in force here."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


_KEPT = "inductor_ext_kept"


def keep_until_code(item: Any, finish: Callable[[list[Any]], None]) -> None:
    """Call ``finish`` with all items of the graph being lowered, once, before its code is written.

    The ``finish`` of the first item counts. Where no graph is being lowered it is called at once.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph = V.graph
    if not isinstance(graph, GraphLowering):
        finish([item])
        return
    kept = vars(graph).get(_KEPT)
    if kept is None:
        kept = []
        setattr(graph, _KEPT, kept)

        def codegen(*args: Any, **kwargs: Any) -> Any:
            # On this one object, and gone before the class's own runs.
            del graph.codegen, vars(graph)[_KEPT]
            finish(kept)
            return graph.codegen(*args, **kwargs)

        graph.codegen = codegen
    kept.append(item)
