"""The plan cache: what was measured while compiling, for the next process.

One small file a problem, in Inductor's cache directory, under a name that hashes everything the
times depend on: the problem, card, versions, the plugin's sources and Inductor's settings. Only
what was measured on a card (or on a virtual one, apart) is kept; nothing with Inductor's caches
off. In a job one rank reads or measures, and all follow it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import agreement, compat, registry

log = logging.getLogger("inductor_ext")


def folder() -> Path:
    """Where the files lie."""
    return Path(compat.cache_dir()) / "inductor_ext"


def recall(
    problem: str,
    measure: Callable[[], Any],
    *,
    topic: str = "",
    keep: Callable[[Any], bool] = lambda value: True,
) -> Any:
    """What ``measure()`` returned for this problem: here, in an earlier process, or on another rank
    of the job. It must be plain JSON.

    Ranks follow one another by ``topic`` (default: the problem), which leaves out what may differ
    from rank to rank. What ``keep`` says no to is not written: an accident is not for ever.
    """
    # Without the setting: ranks that differ in one must agree all the same.
    found = agreement.decide(
        _hash(topic or problem), lambda: _read_or_measure(problem, measure, keep)
    )
    return json.loads(found)


def here(problem: str) -> str:
    """What a process may remember the answer under: the problem, the setting and the job."""
    return _hash(problem, *_setting(), f"ranks={agreement.ranks()}")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _setting() -> list[str]:
    """What times depend on besides the problem."""
    return [
        str(compat.card_name()),
        f"virtual={not compat.on_real_card()}",
        *(compat.version(package) for package in ("torch", "triton")),
        registry.revision(),
        compat.settings_digest(),
        compat.float32_precision(),
    ]


_FORMAT = 1


def _read_or_measure(problem: str, measure: Callable[[], Any], keep: Callable[[Any], bool]) -> str:
    kept = compat.card_name() is not None and compat.caches_on()
    path = folder() / f"{_hash(problem, *_setting())}.json"
    if kept:
        # Not there, cut off, or another file: measured again.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["format"] == _FORMAT:
                return json.dumps(stored["value"])
    value = measure()
    text = json.dumps(value)
    if kept and keep(value):
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: another process may read it now.
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as out:
                temporary = Path(out.name)
                out.write(json.dumps({"format": _FORMAT, "value": value}))
            os.replace(temporary, path)
        except OSError as error:
            log.info("a measurement is not remembered: %s", error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)
    return text
