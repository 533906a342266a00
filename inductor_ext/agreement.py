"""Every rank of a torch.distributed job must emit the same program: what they compare and share.

Values go through the job's key-value store, not through collectives: a collective inside a compile
hangs when one rank compiles what another does not, a store can be polled with a deadline. Without
torch.distributed, and in a world of one, nothing here does anything.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from . import compat_runtime

GATHER_S = 300.0  # ranks may reach a call minutes apart: one of them prepares the weights
MEASURE_S = 1800.0
GRACE_S = 30.0
_POLL_S = 0.02


class Disagreement(RuntimeError):
    """Ranks of one job would emit different programs; never answered with stock code."""


_calls: dict[str, itertools.count[int]] = {}
_agreed: dict[str, str] = {}
_grace = threading.local()


def ranks() -> int:
    """How many ranks agree here: 1 without torch.distributed."""
    store, _, world = compat_runtime.distributed_store()
    return 1 if store is None else world


def gather(topic: str, value: str) -> list[str]:
    """The value of every rank, in order of rank; a call by each rank belongs together.

    Raises Disagreement when a rank does not call within 300 s.
    """
    store, rank, world = compat_runtime.distributed_store()
    if store is None:
        return [value]
    number = next(_calls.setdefault(topic, itertools.count()))
    keys = [f"inductor_ext/{topic}/{number}/{r}" for r in range(world)]
    store.set(keys[rank], value)
    missing = _wait(store, keys, GATHER_S)
    if missing:
        ranks = ", ".join(key.rsplit("/", 1)[1] for key in missing)
        raise Disagreement(
            f"inductor_ext: rank {ranks} did not come to {topic} within {GATHER_S:.0f} s of rank "
            f"{rank}; every rank must."
        )
    return [store.get(key).decode() for key in keys]


def compare_state(topic: str, value: str, *, wait: bool) -> None:
    """Raise Disagreement where another rank has published another state.

    A rank need never come here: with ``wait`` the others get 30 s, once, without it none.
    """
    store, rank, world = compat_runtime.distributed_store()
    if store is None or _agreed.get(topic) == value:
        return
    keys = [f"inductor_ext/{topic}/{r}" for r in range(world)]
    store.set(keys[rank], value)
    missing = set(_wait(store, keys, _grace_left(topic) if wait else 0.0))
    for other, key in enumerate(keys):
        if key not in missing and (theirs := store.get(key).decode()) != value:
            raise Disagreement(
                f"inductor_ext: rank {rank} compiles with {value}, rank {other} with {theirs}; "
                "give every rank the same plan."
            )
    if not missing:
        _agreed[topic] = value  # where a rank changes its mind, it says so


def decide(topic: str, compute: Callable[[], str]) -> str:
    """What one rank computes, on all that ask for ``topic``: rank 0, unless it never asks.

    Other ranks wait 30 s for rank 0 to begin (once: then it evidently compiles another graph); the
    first of them computes then. Where that fails every rank raises; Disagreement after 30 minutes.
    """
    store, rank, _ = compat_runtime.distributed_store()
    if store is None:
        return compute()
    claim, result = f"inductor_ext/{topic}/claim", f"inductor_ext/{topic}/result"
    if rank != 0:
        _wait(store, [claim], _grace_left("decide"))
    owner = store.compare_set(claim, "", str(rank)).decode()
    if owner == str(rank):
        try:
            value = compute()
        except BaseException as error:
            store.set(result, f"!{type(error).__name__}: {error}")
            raise
        store.set(result, f"={value}")
        return value
    if _wait(store, [result], MEASURE_S):
        raise Disagreement(
            f"inductor_ext: rank {owner} has not measured {topic} within {MEASURE_S:.0f} s."
        )
    value = store.get(result).decode()
    if value[0] == "!":
        # No disagreement: what fails there falls back to stock, and so does this rank.
        raise RuntimeError(f"rank {owner} failed to measure this site: {value[1:]}")
    return value[1:]


def _grace_left(topic: str) -> float:
    """Seconds to wait for others at this topic: all of them until they ran out once."""
    until = _grace.__dict__.setdefault(topic, time.monotonic() + GRACE_S)
    return max(until - time.monotonic(), 0.0)


def _wait(store: object, keys: list[str], seconds: float) -> list[str]:
    """Wait for keys of a store; those that are still missing."""
    deadline = time.monotonic() + seconds
    missing = keys
    while True:
        # Polled: a blocking read would hold the store's connection against the job's own threads.
        missing = [key for key in missing if not store.check([key])]  # type: ignore[attr-defined]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(_POLL_S)
