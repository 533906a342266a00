"""Nobody is in anybody's way: custom-pass slots stay the user's, and no global setting changes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_ext
from inductor_ext import compat, registry
from inductor_ext.testing import compile_for

pytestmark = pytest.mark.codegen

aten = torch.ops.aten

GRAPH_SLOTS = [
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
]


class UserPass(CustomGraphPass):
    """Turns ceil into cos, before or after autograd."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ceil:
                node.target = torch.cos
            elif node.target is aten.ceil.default:
                node.target = aten.cos.default

    def uuid(self) -> str:
        return "inductor_ext_test_user_pass"


@pytest.fixture
def our_passes() -> Iterator[list[str]]:
    """The stages in which our own graph passes ran."""
    if "test_slots" not in [name for name, *_ in registry.status()]:
        passes = {s: lambda graph, s=s: STAGES.append(s) for s in ("joint", "post_grad")}
        registry.register(registry.Lowering("test_slots", passes=passes))
    STAGES.clear()
    with inductor_ext.enable("test_slots"):
        yield STAGES
    inductor_ext.disable("test_slots")


STAGES: list[str] = []


def skinny() -> tuple[torch.Tensor, torch.Tensor]:
    bf16 = torch.bfloat16
    return torch.randn(16, 32768, dtype=bf16), torch.randn(32768, 16, dtype=bf16)


@pytest.mark.parametrize("slot", GRAPH_SLOTS)
def test_a_users_pass_and_ours_both_run(slot: str, our_passes: list[str]):
    def fn(a, b):
        return torch.ceil(a @ b)

    user = UserPass()
    with config.patch({slot: user}):
        code = compile_for("h200", fn, *skinny())
        assert getattr(config, slot) is user
    assert "tl_math.cos" in code.source, "the user's pass did not run"
    assert [d.fired for d in code.decisions] == [True], "our lowering did not run"
    assert our_passes == ["joint", "post_grad"], "our graph passes did not run"
    assert "tl_math.cos" not in compile_for("h200", fn, *skinny()).source


# A user's occupant for every slot; each says that it ran.
OCCUPY = """
    import functools, json, torch
    import torch._inductor.config as config
    from torch._inductor import custom_graph_pass

    ran = set()

    class GraphPass(custom_graph_pass.CustomGraphPass):
        def __init__(self, name):
            self.name = name

        def __call__(self, graph):
            ran.add(self.name)

        def uuid(self):
            return self.name

    class Partitioner(custom_graph_pass.CustomPartitionerFn):
        def __call__(self, gm, joint_inputs, **kwargs):
            from functorch.compile import min_cut_rematerialization_partition
            ran.add("custom_partitioner_fn")
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

        def uuid(self):
            return "partitioner"

    def fusion_pass(name, nodes):
        ran.add(name)
        return nodes

    def choices():
        from torch._inductor.choices import InductorChoices

        class Choices(InductorChoices):
            def uuid(self):
                return "choices"

        ran.add("inductor_choices_class")
        return Choices()

    def matmul(a, b, out):
        raise AssertionError("never called: no kernel runs here")

    def occupant(slot):
        if "fusion" in slot:
            return functools.partial(fusion_pass, slot)
        if slot == "custom_partitioner_fn":
            return Partitioner()
        if slot == "inductor_choices_class":
            return choices
        if slot == "external_matmul":
            return [matmul]
        return GraphPass(slot)

    values = {slot: occupant(slot) for slot in SLOTS}

    def occupy():
        for slot, value in values.items():
            setattr(config, slot, value)
"""

COMPILE = """
    from inductor_ext import registry
    from inductor_ext.testing import compile_for

    stages = []
    registry.register(registry.Lowering(
        "test", passes={s: lambda graph, s=s: stages.append(s) for s in ("joint", "post_grad")}
    ))
    bf16 = torch.bfloat16
    a, b = torch.randn(16, 32768, dtype=bf16), torch.randn(32768, 16, dtype=bf16)
    code = compile_for("h200", lambda a, b: torch.tanh(a @ b), a, b.requires_grad_(), grad=True)
    wide = torch.randn(256, 256), torch.randn(256, 256)
    tuned = compile_for("h200", torch.mm, *wide, mode="max-autotune-no-cudagraphs")
    if any(name.startswith("matmul ") or name == "matmul" for name in tuned.autotuned["mm"]):
        ran.add("external_matmul")
    print(json.dumps({
        "ran": sorted(ran),
        "kept": [slot for slot, value in values.items() if getattr(config, slot) is value],
        "fired": sum(d.fired for d in code.decisions),
        "stages": sorted(set(stages)),
    }))
"""


@pytest.mark.parametrize("order", ["before the import", "after the import"])
def test_every_slot_is_the_users(fresh: Callable[..., Any], order: str):
    slots = list(compat.pass_slots())
    occupy, imports = "occupy()\n", "import inductor_ext\n"
    parts = [occupy, imports] if order == "before the import" else [imports, occupy]
    script = (
        f"SLOTS = {slots}\n" + textwrap.dedent(OCCUPY) + "".join(parts) + textwrap.dedent(COMPILE)
    )
    result = fresh(script).result
    assert result["kept"] == slots
    assert result["ran"] == sorted(slots)
    assert result["fired"] == 1 and result["stages"] == ["joint", "post_grad"]


def test_the_import_changes_no_global_setting(fresh: Callable[..., Any]):
    script = """
        import json, os, torch, warnings
        import torch._dynamo.config, torch._functorch.config, torch._inductor.config
        import torch.compiler.config, torch.fx.experimental._config

        def modules():
            yield torch.backends
            for name in sorted(vars(torch.backends)):
                if isinstance(getattr(torch.backends, name), type(torch)):
                    yield getattr(torch.backends, name)

        def settings():
            found = {
                name: module.save_config()
                for name, module in {
                    "inductor": torch._inductor.config, "dynamo": torch._dynamo.config,
                    "functorch": torch._functorch.config, "compiler": torch.compiler.config,
                    "fx": torch.fx.experimental._config,
                }.items()
            }
            plain = (bool, int, float, str, type(None))
            for module in modules():
                for name in dir(module):
                    try:
                        value = getattr(module, name)
                    except Exception:
                        continue
                    if isinstance(value, plain) and not name.startswith("__"):
                        found[f"{module.__name__}.{name}"] = value
            for owner in ("cuda.matmul", "cudnn", "mkldnn"):
                flags = torch.backends
                for part in owner.split("."):
                    flags = getattr(flags, part)
                for name in ("allow_tf32", "fp32_precision", "deterministic", "benchmark",
                             "allow_fp16_reduced_precision_reduction",
                             "allow_bf16_reduced_precision_reduction"):
                    found[f"{owner}.{name}"] = repr(getattr(flags, name, None))
            found["precision"] = torch.get_float32_matmul_precision()
            found["default"] = (str(torch.get_default_dtype()), str(torch.get_default_device()))
            found["grad"] = torch.is_grad_enabled()
            found["deterministic"] = torch.are_deterministic_algorithms_enabled()
            found["threads"] = torch.get_num_threads()
            found["rng"] = torch.get_rng_state().sum().item()
            found["environment"] = dict(os.environ)
            found["warnings"] = repr(warnings.filters)
            found["handler"] = repr(torch._inductor.virtualized.V.choices)
            return found

        settings()  # reading some of them imports what sets them up
        before = settings()
        import inductor_ext
        after = settings()
        changed = {n: [repr(before.get(n)), repr(after.get(n))] for n in {*before, *after}
                   if before.get(n) != after.get(n)}
        from torch._inductor import lowering
        print(json.dumps([len(before), changed]))
    """
    count, changed = fresh(script).result
    assert count > 30 and changed == {}


def test_no_slot_is_taken(fresh: Callable[..., Any]):
    script = """
        import json, inductor_ext
        from inductor_ext import compat
        print(json.dumps([name for name, value in compat.pass_slots().items() if value]))
    """
    assert fresh(script).result == []


def test_a_slot_that_is_taken_is_seen():
    """The doctor prints who sits where."""
    user = UserPass()
    with config.patch(joint_custom_post_pass=user):
        assert {n: v for n, v in compat.pass_slots().items() if v} == {
            "joint_custom_post_pass": user
        }
