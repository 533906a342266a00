"""All of the plugin that decides what is compiled is in the FX-graph and AOTAutograd cache keys."""

from __future__ import annotations

import functools
import importlib
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import choosing, config, registry

# Library calls only: nothing has to be built, and forward and backward are in the caches.
SCRIPT = """
    import contextlib, json, torch
    {before}
    from torch._dynamo.utils import counters
    x, w = torch.randn(4, 8), torch.randn(8, 4, requires_grad=True)
    names = {{
        "inductor": ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"),
        "aot_autograd": ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass"),
    }}
    found = []
    for around in {around}:
        torch._dynamo.reset()
        counters.clear()
        with eval(around):
            torch.compile(lambda x, w: x @ w)(x, w).sum().backward()
        counted = {{n: counters[g][n] for g, ns in names.items() for n in ns}}
        found.append({{n: count for n, count in counted.items() if count}})
    print(json.dumps(found))
"""
AS_IT_IS = "contextlib.nullcontext()"
HIT = {"autograd_cache_hit": 1, "fxgraph_cache_hit": 2}
MISS = {"autograd_cache_miss": 1, "fxgraph_cache_miss": 2}

Caches = Callable[..., Any]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package to edit, as it is installed: lowerings and templates inside it."""
    package = tmp_path / "site" / "inductor_ext"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(inductor_ext.__path__[0], package, ignore=ignore)
    for part in (inductor_ext.lowerings, inductor_ext.templates):
        target = package / part.__name__.rpartition(".")[2]
        if not target.exists():
            shutil.copytree(part.__path__[0], target, ignore=ignore)
    return package


@pytest.fixture
def caches(fresh: Callable[..., Any], tree: Path) -> Caches:
    """Compile in a fresh process and return what the two caches counted.

    ``around``: contexts, of which each is around one compile in that process.
    """

    def run(before: str = "import inductor_ext", around: tuple[str, ...] = (), **how: Any):
        if before:
            before += f"; import inductor_ext; assert inductor_ext.__path__ == [{str(tree)!r}]"
        how["path"] = (tree.parent, *how.get("path", ()))
        script = SCRIPT.format(before=before, around=around or (AS_IT_IS,))
        found = fresh(script, **how).result
        return found if around else found[0]

    return run


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path.name}: edit another constant"
    path.write_text(text.replace(old, new, 1))


@pytest.mark.codegen
def test_nothing_changed_hits_and_every_change_misses(caches: Caches):
    assert caches() == MISS
    changes = {
        "a lowering is off": "inductor_ext.disable('decompose_k')",
        "a choice is forced": "inductor_ext.choosing.force({'decompose_k': 'bmm.*'})",
        "another choice is forced": "inductor_ext.choosing.force({'decompose_k': 'x'})",
        "pdl is off": "inductor_ext.config.patch(pdl=False)",
        "there is one more lowering": "contextlib.nullcontext(inductor_ext.registry.register("
        "inductor_ext.registry.Lowering('test_more')))",
    }
    first, *changed = caches(around=(AS_IT_IS, *changes.values()))
    assert first == HIT
    for what, counted in zip(changes, changed, strict=True):
        assert counted == MISS, f"hit although {what}"
    assert caches(before="") == MISS, "hit although the plugin is not imported"
    assert caches(env={"INDUCTOR_EXT_PDL": "0"}) == HIT, "the variable sets the same config value"
    assert caches(env={"INDUCTOR_EXT_DISABLE": "decompose_k"}) == HIT, "the variable does the same"


def test_an_edited_source_misses(caches: Caches, tree: Path):
    assert caches() == MISS
    _edit(tree / "lowerings/decompose_k_tilings.py", "k < 1024", "k < 1025")
    assert caches() == MISS, "hit although a constant of a lowering was edited"
    _edit(tree / "templates/decompose_k.py", "tl.sum(partials, 0)", "tl.sum(partials, 0) ")
    assert caches() == MISS, "hit although a template was edited"
    _edit(tree / "choosing.py", "threshold: float = 1.03", "threshold: float = 1.04")
    assert caches() == MISS, "hit although the way of choosing was edited"
    assert caches() == HIT


CUSTOM_OP = """
import torch, inductor_ext

def half(a, b):
    return a / SCALE, b

@torch.library.custom_op("inductor_ext_test::keyed", mutates_args=())
def keyed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a / 2, b.clone()

inductor_ext.register_custom_op_autotuning(keyed, configs=[inductor_ext.CustomOpConfig(half)])
"""


@torch.library.custom_op("inductor_ext_test::revised", mutates_args=())
def revised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b


def test_what_a_custom_operation_is_registered_with_is_in_the_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)

    def module(text: str) -> types.ModuleType:
        """A module of this text: inspect reads a candidate's text from its file."""
        name = f"inductor_ext_keyed{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def revision(**registration: Any) -> str:
        inductor_ext.register_custom_op_autotuning(revised, **registration)
        return registry.revision()

    Config = inductor_ext.CustomOpConfig
    text = """if True:
        SCALE = 2
        def f(a, b): return helper(a, b)
        def g(a, b): return helper(b, a)
        def helper(a, b): return a / b
        """
    f, g = module(text).f, module(text).g
    before = revision(configs=[Config(f)])
    assert revision(configs=[Config(module(text).f)]) == before
    revisions = [
        before,
        revision(configs=[Config(module(text.replace("return a / b", "return b / a")).f)]),
        revision(configs=[Config(module(text.replace("= 2", "= 3")).f)]),
        revision(configs=[Config(g)]),
        revision(configs=[Config(f, scale=1)]),
        revision(configs=[Config(f, scale=2)]),
        revision(configs=[Config(f), Config(f, scale=2)]),
        revision(configs=[Config(f, config_patches={"coordinate_descent_tuning": True})]),
        revision(configs=[Config(f)], min_speedup_threshold=1.5),
        revision(config_generator=f),
    ]
    assert len(set(revisions)) == len(revisions)
    assert revision(configs=[Config(f)]) == before


@pytest.mark.parametrize(
    "bind",
    [
        lambda scale: functools.partial(divided, scale=scale),
        lambda scale: lambda a, b: a / b * scale,
    ],
    ids=["partial", "closure"],
)
def test_what_a_candidate_is_bound_to_is_in_the_revision(bind: Callable[..., Any]):
    def revision(scale: float) -> str:
        config = inductor_ext.CustomOpConfig(bind(scale))
        inductor_ext.register_custom_op_autotuning(revised, configs=[config])
        return registry.revision()

    assert revision(1.0) == revision(1.0)
    assert revision(1.0) != revision(2.0)


def divided(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return a / b * scale


def test_a_custom_operations_text_misses(caches: Caches, tmp_path: Path):
    path = tmp_path / "keyed_module.py"
    how = {"before": "import keyed_module", "path": (tmp_path,)}  # it imports inductor_ext
    path.write_text(CUSTOM_OP.replace("SCALE", "2"))
    assert caches(**how) == MISS
    assert caches(**how) == HIT
    path.write_text(CUSTOM_OP.replace("SCALE", "2.0"))
    assert caches(**how) == MISS


# --- the revision in this process -----------------------------------------------------------------


@pytest.mark.codegen
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
    with choosing.force_here("decompose_k", "split4"):
        assert registry.revision() == before


@pytest.mark.codegen
def test_the_uuid_is_the_revision():
    from torch._inductor.codegen.common import custom_backend_passes

    salt = custom_backend_passes["inductor_ext"]
    assert salt.uuid() == registry.revision()
    with inductor_ext.disable():
        assert salt.uuid() == registry.revision()
    assert salt(torch.fx.GraphModule({}, torch.fx.Graph())) is None
