"""The distribution: what is in it, and that it works where the checkout is out of reach."""

from __future__ import annotations

import ast
import email.message
import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Where each folder of the repository is installed.
PACKAGES = {
    "inductor_ext": "inductor_ext",
    "lowerings": "inductor_ext/lowerings",
    "templates": "inductor_ext/templates",
}

pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path) -> str:
    # Nothing of the caller's Python settings may decide which inductor_ext is found.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what belongs to the project: building leaves files behind."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    folder.mkdir()
    for name in [*PACKAGES, "tests", "benchmarks", "examples", "constraints"]:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "w", cwd=source)
    (path,) = (source / "w").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist_and_its_wheel(source: Path) -> tuple[Path, Path]:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "s", cwd=source)
    (sdist,) = (source / "s").glob("*.tar.gz")
    (path,) = (source / "s").glob("*.whl")
    return sdist, path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and, from here, only its dependencies.

    A path that a .pth file adds is searched, but .pth files in there are not read: that leaves out
    the hooks by which this environment finds the checkout.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    run(*install, "--no-deps", "--no-index", wheel, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    lower = [p for p in sys.path if p.endswith("-packages")]
    (packages / "lower.pth").write_text("\n".join(lower) + "\n")
    return python


def files(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as z:
        return {n for n in z.namelist() if not n.endswith("/")}


def metadata(path: Path) -> email.message.Message:
    with zipfile.ZipFile(path) as z:
        (name,) = [n for n in z.namelist() if n.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(z.read(name).decode())


def code_and_data(names: set[str]) -> set[str]:
    return {n for n in names if ".dist-info/" not in n}


def test_nothing_stray_at_the_top(wheel: Path) -> None:
    info = f"inductor_ext-{metadata(wheel)['Version']}.dist-info"
    assert {n.split("/")[0] for n in files(wheel)} == {"inductor_ext", info}


def test_every_module_of_the_checkout_is_inside_and_nothing_else(source: Path, wheel: Path) -> None:
    expected = {"inductor_ext/py.typed"}
    for folder, installed in PACKAGES.items():
        for path in (source / folder).rglob("*.py"):
            expected.add(f"{installed}/{path.relative_to(source / folder).as_posix()}")
    expected |= {
        f"inductor_ext/plans/{p.name}" for p in (ROOT / "inductor_ext/plans").glob("*.json")
    }
    assert code_and_data(files(wheel)) == expected


def third_party_imports(code: str) -> set[str]:
    """What importing the module imports; what its functions import when called is optional."""
    found, left = set(), list(ast.parse(code).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left += ast.iter_child_nodes(node)
    return found - set(sys.stdlib_module_names) - {"inductor_ext"}


def test_modules_need_only_the_declared_dependencies(wheel: Path) -> None:
    declared, testing = set(), set()
    for requirement in metadata(wheel).get_all("Requires-Dist", []):
        name = re.match(r"\w+", requirement)[0]  # type: ignore[index]
        if "extra ==" not in requirement:
            declared.add(name)
        elif re.search(r"extra == .testing", requirement):
            testing.add(name)
    with zipfile.ZipFile(wheel) as z:
        modules = {n: z.read(n).decode() for n in z.namelist() if n.endswith(".py")}
    undeclared = {}
    for name, code in modules.items():
        allowed = declared | testing if name.startswith("inductor_ext/testing/") else declared
        if found := third_party_imports(code) - allowed:
            undeclared[name] = found
    assert undeclared == {}


def test_the_license_is_inside(wheel: Path) -> None:
    (name,) = [n for n in files(wheel) if n.endswith("LICENSE")]
    with zipfile.ZipFile(wheel) as z:
        assert z.read(name) == (ROOT / "LICENSE").read_bytes()
    assert metadata(wheel)["License-Expression"] == "BSD-3-Clause"


def test_metadata(wheel: Path) -> None:
    meta = metadata(wheel)
    assert set(meta["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    needs = {r for r in meta.get_all("Requires-Dist", []) if "extra ==" not in r}
    assert needs == {"torch<2.16,>=2.11", "triton>=3.6", "sympy", "rich", "tqdm"}
    assert set(meta.get_all("Provides-Extra", [])) == {"dev", "testing", "plot", "bench"}


IMPORT_ALL = """
import importlib, importlib.util, json, pkgutil, sys
import inductor_ext, inductor_ext.lowerings, inductor_ext.templates

found = {}
for info in pkgutil.walk_packages(inductor_ext.__path__, "inductor_ext."):
    if not info.name.endswith("__main__"):
        found[info.name] = importlib.import_module(info.name).__file__
stray = [n for n in ("lowerings", "templates", "benchmarks") if importlib.util.find_spec(n)]
print(json.dumps([inductor_ext.__file__, found, stray]))
"""


def test_every_module_imports_from_the_wheel(clean_python: Path, tmp_path: Path) -> None:
    out = run(clean_python, "-c", IMPORT_ALL, cwd=tmp_path)
    package, found, stray = json.loads(out.splitlines()[-1])
    environment = clean_python.parent.parent
    assert Path(package).is_relative_to(environment)
    assert {"inductor_ext.lowerings", "inductor_ext.templates", "inductor_ext.ops"} <= set(found)
    assert [n for n, file in found.items() if not Path(file).is_relative_to(environment)] == []
    assert stray == []


def test_the_command_line_works_from_the_wheel(clean_python: Path, tmp_path: Path) -> None:
    assert "doctor" in run(clean_python, "-m", "inductor_ext", "--help", cwd=tmp_path)


def test_the_sdist_builds_the_same_wheel(
    wheel: Path, sdist_and_its_wheel: tuple[Path, Path]
) -> None:
    sdist, rebuilt = sdist_and_its_wheel
    with tarfile.open(sdist) as t:
        names = t.getnames()
    assert {n.split("/")[1] for n in names if "/" in n} >= {*PACKAGES, "pyproject.toml", "LICENSE"}
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(rebuilt) as b:
        assert set(a.namelist()) == set(b.namelist())
        for name in code_and_data(files(wheel)):
            assert a.read(name) == b.read(name), name
