"""``python -m inductor_ext doctor``: what is here, what is switched on, and what cannot work.

Each check returns rows; a row is "ok", a "note" (worth knowing, nothing is broken) or "bad". One
bad row makes the exit code 1. A machine without a card is fine: code for virtual cards works there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.resources
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Row(NamedTuple):
    what: str
    value: str
    state: str = "ok"


def _release(version: str) -> tuple[int, ...]:
    """The numbers at the front: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def supported(package: str, version: str) -> tuple[bool, str]:
    """Whether this distribution's own requirement admits ``version``, and that requirement.

    Read from the installed metadata, so that pyproject.toml stays the one place that says it.
    """
    for line in importlib.metadata.requires("inductor_ext") or ():
        name, bounds = re.match(r"([\w.-]+)\s*([^;]*)", line).groups()  # type: ignore[union-attr]
        if name != package:
            continue
        have, ok = _release(version), True
        for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", bounds):
            ok &= have >= _release(bound) if operator == ">=" else have < _release(bound)
        return ok, bounds.strip()
    return True, "any"


def versions() -> Iterable[Row]:
    import torch

    yield Row("inductor_ext", importlib.metadata.version("inductor_ext"))
    yield Row("python", f"{platform.python_version()} ({platform.machine()})")
    for package in ("torch", "triton"):
        try:
            # The module knows its build ("+cpu"), the metadata of some builds does not.
            version = str(importlib.import_module(package).__version__)
        except ImportError as e:
            yield Row(package, f"cannot be imported: {e}", "bad")
            continue
        ok, bounds = supported(package, version)
        yield Row(package, f"{version} (supported: {bounds})", "ok" if ok else "bad")
    yield Row("CUDA of torch", torch.version.cuda or "none: a CPU build")


def has_card() -> bool:
    import torch

    return torch.cuda.is_available()


def card() -> Iterable[Row]:
    import torch

    if not has_card():
        yield Row("card", "none: code generation for virtual cards works", "note")
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            yield Row("torch", "nvidia-smi is here, but this torch is a CPU build", "note")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        yield Row(
            f"cuda:{index}",
            f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, "
            f"{p.total_memory / 2**30:.0f} GiB",
        )


def lowerings() -> Iterable[Row]:
    from inductor_ext import registry

    rows = registry.status()
    if not rows:
        yield Row("lowerings", "none registered", "bad")
    for name, enabled, why in rows:
        state = "enabled" if enabled else "disabled"
        yield Row(name, f"{state}: {why}" if why else state, "ok" if enabled else "note")


def caches_and_plans() -> Iterable[Row]:
    from inductor_ext import compat

    try:
        # Makes the folder where it is missing.
        cache = compat.cache_dir()
        with tempfile.TemporaryFile(dir=cache):
            yield Row("Inductor's cache", cache)
    except OSError as e:
        yield Row("Inductor's cache", f"cannot be written: {e}", "bad")
    yield from plans()
    folder = importlib.resources.files("inductor_ext") / "plans"
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(".json"))
    yield Row("shipped plans", f"{', '.join(names) or 'none'} in {folder}")


def plans() -> Iterable[Row]:
    """Which plans would be used here, and what is wrong with those that would not."""
    from inductor_ext import active_plan, compat
    from inductor_ext.plan import PlanError

    name, card = active_plan.ENVIRONMENT, compat.card_name()
    paths = active_plan.environment_paths()
    if not paths:
        yield Row(name, "not set: no plan of your own")
    for path in paths:
        try:
            plan = active_plan.read(path, False, card).plan
            yield Row(name, f"{path}: {len(plan.entries)} problems on {plan.card}")
        except PlanError as error:
            yield Row(name, str(error), "bad")
    shipped = None if card is None else active_plan.shipped(card)
    if shipped is not None:
        why = shipped.unfit(card)
        where = f"{shipped.name}: {len(shipped.plan.entries)} problems"
        yield Row("shipped plan", f"not used, {why}" if why else where, "note" if why else "ok")


def occupant(value: Any) -> str:
    """The dotted names of what sits in a slot, "" for an empty one."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(occupant(v) for v in value)
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def pass_slots() -> Iterable[Row]:
    from inductor_ext import compat

    for slot, value in compat.pass_slots().items():
        names = occupant(value)
        theirs = [n for n in names.split(", ") if n and not n.startswith("inductor_ext.")]
        yield Row(slot, names or "free", "note" if theirs else "ok")


def compiler() -> Row:
    """The C compiler that Triton builds launchers with: by its rule CC, then gcc, then clang."""
    # Without a card nothing is launched, so that then it is no fault.
    fault = "bad" if has_card() else "note"
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not cc or not shutil.which(cc):
        return Row("C compiler", f"{cc or 'gcc or clang'} not found: Triton needs one", fault)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return Row("C compiler", f"{cc}, but {header} is missing: install Python's headers", fault)
    return Row("C compiler", cc)


def ptxas() -> Row:
    try:
        from triton import knobs

        path = knobs.nvidia.ptxas.path
        out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        release = re.search(r"release [\d.]+", out.stdout)
        if out.returncode or not release:
            return Row("ptxas", f"{path} --version fails with exit code {out.returncode}", "bad")
        return Row("ptxas", f"{release[0]} at {path}")
    except Exception as e:  # whatever Triton's lookup raises, the other checks still run
        return Row("ptxas", f"Triton's ptxas does not run: {type(e).__name__}: {e}", "bad")


def tools() -> Iterable[Row]:
    yield compiler()
    yield ptxas()


def self_check() -> Iterable[Row]:
    from inductor_ext import registry

    for what, ok, detail in registry.self_check():
        yield Row(what, detail or ("in place" if ok else "not in place"), "ok" if ok else "bad")


SECTIONS: dict[str, Callable[[], Iterable[Row]]] = {
    "Versions": versions,
    "Card": card,
    "Tools": tools,
    "Lowerings": lowerings,
    "Caches and plans": caches_and_plans,
    "Inductor's single slots": pass_slots,
    "Self check": self_check,
}


def examine() -> dict[str, list[Row]]:
    """Run every check. One that fails itself becomes a bad row of its section."""
    results: dict[str, list[Row]] = {}
    for title, check in SECTIONS.items():
        rows = results[title] = []
        try:
            rows.extend(check())
        except Exception as e:
            rows.append(Row("check", f"failed itself: {type(e).__name__}: {e}", "bad"))
    return results


_STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


def render(results: dict[str, list[Row]], console: Console) -> None:
    for title, rows in results.items():
        table = Table(title=title, title_justify="left", show_header=False, expand=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column()
        for row in rows:
            style = _STYLES[row.state]
            table.add_row(escape(row.what), escape(row.value), f"[{style}]{row.state}[/]")
        console.print(table)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        "python -m inductor_ext doctor",
        description="Checks this machine and this installation; exits 1 if something cannot work.",
    )
    parser.parse_args(argv)
    results = examine()
    console = Console()
    if not console.is_terminal:
        # A pipe has no width to fit into: whoever searches the text finds each path in one piece.
        console = Console(width=200)
    render(results, console)
    rows = [row for section in results.values() for row in section]
    bad = [f"{row.what}: {row.value}" for row in rows if row.state == "bad"]
    for line in bad:
        console.print(f"cannot work: {escape(line)}", style="bold red", soft_wrap=True)
    if not bad:
        console.print("All checks passed.")
    return 1 if bad else 0
