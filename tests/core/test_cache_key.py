"""Everything of the plugin that decides what is compiled is in the FX-graph and AOTAutograd cache keys."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import choosing, config, registry

pytestmark = pytest.mark.codegen  # the hook that carries the revision is a private name

# Library calls only: nothing has to be built, and forward and backward are in the caches.
SCRIPT = """
    import contextlib, json, torch
    {before}
    from torch._dynamo.utils import counters
    x, w = torch.randn(4, 8), torch.randn(8, 4, requires_grad=True)
    with {around}:
        torch.compile(lambda x, w: x @ w)(x, w).sum().backward()
    names = {{
        "inductor": ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"),
        "aot_autograd": ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass"),
    }}
    print(json.dumps({{n: counters[g][n] for g, ns in names.items() for n in ns if counters[g][n]}}))
"""
HIT = {"autograd_cache_hit": 1, "fxgraph_cache_hit": 2}
MISS = {"autograd_cache_miss": 1, "fxgraph_cache_miss": 2}

Caches = Callable[..., dict[str, int]]


@pytest.fixture
def caches(fresh: Callable[..., Any]) -> Caches:
    """Compile in a fresh process and return what the two caches counted."""

    def run(before: str = "import inductor_ext", around: str = "contextlib.nullcontext()", **how: Any):
        return fresh(SCRIPT.format(before=before, around=around), **how).result

    return run


def test_nothing_changed_hits_and_every_change_misses(caches: Caches):
    assert caches() == MISS
    assert caches() == HIT
    changed = {
        "a lowering is off": {"around": "inductor_ext.disable('decompose_k')"},
        "a choice is forced": {"around": "inductor_ext.choosing.force({'decompose_k': 'bmm.*'})"},
        "another choice is forced": {"around": "inductor_ext.choosing.force({'decompose_k': 'x'})"},
        "pdl is off": {"around": "inductor_ext.config.patch(pdl=False)"},
        "one more lowering": {
            "before": "import inductor_ext\n"
            "    from inductor_ext import registry\n"
            "    registry.register(registry.Lowering('test_more'))"
        },
        "the plugin is not imported": {"before": "import inductor_ext.config"},
    }
    del changed["the plugin is not imported"]  # a submodule imports the package; see below
    for what, how in changed.items():
        assert caches(**how) == MISS, f"hit although {what}"
    assert caches(env={"INDUCTOR_EXT_PDL": "0"}) == HIT, "the variable is the config value"
    assert caches(before="") == MISS, "hit although the plugin is not imported"
    assert caches() == HIT


def _tree(root: Path) -> Path:
    """The package as it is installed: lowerings and templates inside it."""
    package = Path(inductor_ext.__path__[0])
    target = root / "inductor_ext"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, target, ignore=ignore)
    for name in ("lowerings", "templates"):
        (source,) = getattr(__import__(f"inductor_ext.{name}"), name).__path__
        if not (target / name).exists():
            shutil.copytree(source, target / name, ignore=ignore)
    return root


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, f"{old!r} is not in {path.name}: edit another constant"
    path.write_text(text.replace(old, new, 1))


def test_an_edited_source_misses(caches: Caches, tmp_path: Path):
    tree = _tree(tmp_path / "site")
    before = f"import inductor_ext; assert inductor_ext.__path__ == [{str(tree / 'inductor_ext')!r}]"
    how = {"before": before, "path": (tree,)}
    assert caches(**how) == MISS
    assert caches(**how) == HIT
    _edit(tree / "inductor_ext/lowerings/decompose_k.py", "k < 1024", "k < 1025")
    assert caches(**how) == MISS, "hit although a constant of a lowering was edited"
    assert caches(**how) == HIT
    _edit(tree / "inductor_ext/templates/decompose_k.py", "tl.sum(partials, 0)", "tl.sum(partials, 0) ")
    assert caches(**how) == MISS, "hit although a template was edited"
    _edit(tree / "inductor_ext/choosing.py", "threshold: float = 1.03", "threshold: float = 1.04")
    assert caches(**how) == MISS, "hit although the way of choosing was edited"
    assert caches(**how) == HIT


CUSTOM_OP = '''
import torch, inductor_ext

def half(a, b):
    return a / SCALE, b

def generator(fakes):
    return [inductor_ext.CustomOpConfig(half)]

@torch.library.custom_op("inductor_ext_test::keyed", mutates_args=())
def keyed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a / 2, b.clone()

inductor_ext.register_custom_op_autotuning(keyed, REGISTRATION)
'''
CONFIGS = "configs=[inductor_ext.CustomOpConfig(half)]"


@pytest.mark.parametrize(
    ("scale", "registration"),
    [
        ("2 + 1", CONFIGS),
        ("2", "configs=[inductor_ext.CustomOpConfig(half, b=1)]"),
        ("2", "configs=[inductor_ext.CustomOpConfig(half), inductor_ext.CustomOpConfig()]"),
        ("2", "config_generator=generator"),
        ("2", CONFIGS + ", min_speedup_threshold=1.5"),
    ],
)
def test_the_text_of_a_custom_operations_candidates_is_in_the_revision(
    tmp_path: Path, scale: str, registration: str
):
    before = _registered(tmp_path / "before", "2", CONFIGS)
    assert _registered(tmp_path / "same", "2", CONFIGS) == before
    assert _registered(tmp_path / "after", scale, registration) != before


def _registered(folder: Path, scale: str, registration: str) -> str:
    """The revision with the operation registered from a module of this text."""
    import importlib.util

    folder.mkdir()
    path = folder / "keyed_module.py"
    path.write_text(CUSTOM_OP.replace("SCALE", scale).replace("REGISTRATION", registration))
    spec = importlib.util.spec_from_file_location("keyed_module", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["keyed_module"] = module
    try:
        spec.loader.exec_module(module)
        return registry.revision()
    finally:
        del sys.modules["keyed_module"]


def test_a_custom_operations_text_misses(caches: Caches, tmp_path: Path):
    path = tmp_path / "keyed_module.py"
    how = {"before": "import keyed_module", "path": (tmp_path,)}
    path.write_text(CUSTOM_OP.replace("SCALE", "2").replace("REGISTRATION", CONFIGS))
    assert caches(**how) == MISS
    assert caches(**how) == HIT
    path.write_text(CUSTOM_OP.replace("SCALE", "2.0").replace("REGISTRATION", CONFIGS))
    assert caches(**how) == MISS


# --- the revision in this process -----------------------------------------------------------------


def test_the_revision_follows_switches_and_returns():
    before = registry.revision()
    assert registry.revision() == before
    seen = {before}
    for context in (
        inductor_ext.disable("decompose_k"),
        choosing.force({"decompose_k": "stock"}),
        config.patch(pdl=not config.pdl),
        config.patch(strict=not config.strict),
    ):
        with context:
            assert registry.revision() not in seen
            seen.add(registry.revision())
        assert registry.revision() == before


def test_an_exact_choice_of_one_thread_is_no_part_of_it():
    """Choices forced for a measurement concern nested compiles, which no cache keeps."""
    before = registry.revision()
    with choosing._force_here("decompose_k", "split4"):
        assert registry.revision() == before


def test_the_uuid_is_the_revision():
    from torch._inductor.codegen.common import custom_backend_passes

    salt = custom_backend_passes["inductor_ext"]
    assert salt.uuid() == registry.revision()
    with inductor_ext.disable():
        assert salt.uuid() == registry.revision()
    assert salt(torch.fx.GraphModule({}, torch.fx.Graph())) is None
