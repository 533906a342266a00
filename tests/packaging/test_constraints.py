"""The pinned versions of development agree with what the project says that it needs."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from inductor_ext import doctor

ROOT = Path(__file__).resolve().parents[2]
PER_TORCH = sorted((ROOT / "constraints").glob("torch-*.txt"))

pytestmark = pytest.mark.packaging


def pins(path: Path) -> dict[str, str]:
    """name -> version; the last one of those with markers."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), re.MULTILINE))


def test_every_dependency_is_pinned() -> None:
    needed = set()
    for line in importlib.metadata.requires("inductor_ext") or ():
        if "extra ==" not in line or re.search(r"extra == .dev", line):
            needed.add(re.match(r"[\w.-]+", line)[0])  # type: ignore[index]
    assert needed - {"torch", "triton"} == set(pins(ROOT / "constraints" / "dev.txt"))


@pytest.mark.parametrize("path", PER_TORCH, ids=lambda p: p.stem)
def test_pinned_torch_is_supported_and_named_by_its_file(path: Path) -> None:
    pinned = pins(path)
    assert path.stem == "torch-" + pinned["torch"].rsplit(".", 1)[0]
    assert doctor.supported("torch", pinned["torch"])[0]
    if "triton" in pinned:
        assert doctor.supported("triton", pinned["triton"])[0]


def test_ci_runs_every_pinned_torch() -> None:
    others = re.search(r"^OTHER_TORCH=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    default = re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert others and default
    run = {*others[1].split(), default[1]}
    assert run == {pins(path)["torch"] for path in PER_TORCH}
