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


def recall(problem: str, measure: Callable[[], Any]) -> Any:
    """What ``measure()`` returned for this problem: here, in an earlier process, or on another rank
    of the job. It must be plain JSON."""
    topic = _hash(problem)  # without the setting: ranks that differ in one must agree all the same
    return json.loads(agreement.decide(topic, lambda: _read_or_measure(problem, measure)))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _setting() -> list[str]:
    """What times depend on besides the problem."""
    return [
        str(compat.card_name()),
        f"virtual={not compat.on_real_card()}",
        *(compat.version(package) for package in ("torch", "triton")),
        registry.source_hash(),
        compat.settings_digest(),
        compat.float32_precision(),
    ]


def _read_or_measure(problem: str, measure: Callable[[], Any]) -> str:
    kept = compat.card_name() is not None and compat.caches_on()
    path = folder() / f"{_hash(problem, *_setting())}.json"
    if kept:
        with contextlib.suppress(OSError, ValueError):  # not there, or cut off: measured again
            text = path.read_text(encoding="utf-8")
            json.loads(text)
            return text
    text = json.dumps(measure())
    if kept:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: another process may read it now.
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as out:
                out.write(text)
            os.replace(out.name, path)
        except OSError as error:
            log.info("a measurement is not remembered: %s", error)
    return text
