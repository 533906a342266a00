"""The interface: that of Inductor's function, with errors that say what was expected."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch._inductor.kernel import custom_op as inductors

import inductor_ext
from inductor_ext import CustomOpConfig, autotuning, register_custom_op_autotuning
from inductor_ext.testing import compile_for

pytestmark = pytest.mark.codegen

_numbers = itertools.count()


def new_op():
    """A fresh operation add(x, y), into which Inductor cannot look."""

    @torch.library.custom_op(f"inductor_ext_test::registered{next(_numbers)}", mutates_args=())
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    add.register_fake(lambda x, y: torch.empty_like(x))
    return add


def plain(x, y):
    return x + y


def name_of(op) -> str:
    return f"{op._opoverload._name}_autotuned"


X, Y = torch.randn(64), torch.randn(64)


# --- call compatibility ---------------------------------------------------------------------------


def test_every_parameter_of_inductors_function_is_accepted():
    theirs = inspect.signature(inductors.register_custom_op_autotuning).parameters
    ours = inspect.signature(register_custom_op_autotuning).parameters
    missing = set(theirs) - set(ours)
    assert not missing, f"torch {torch.__version__} has {sorted(missing)}"
    common = [n for n in theirs if n in ours]
    assert [n for n in ours if n in theirs] == common, "positional arguments are in another order"
    for name in common:
        assert ours[name].kind == theirs[name].kind


def test_every_parameter_of_inductors_config_is_accepted():
    for cls in (inductors.CustomOpConfig, CustomOpConfig):
        config = cls(plain, block=3)
        assert config.decomposition is plain and config.params == {"block": 3}
    theirs = inspect.signature(inductors.CustomOpConfig).parameters
    assert set(theirs) <= set(inspect.signature(CustomOpConfig).parameters)


def test_inductors_configs_are_accepted():
    op = new_op()
    register_custom_op_autotuning(op, [inductors.CustomOpConfig(plain)])
    code = compile_for("h200", op, X, Y, force={name_of(op): "plain"})
    assert len(code.kernels) == 1 and not code.extern_calls


def test_arguments_by_position_as_inductor_has_them():
    op = new_op()
    register_custom_op_autotuning(
        op, [CustomOpConfig(plain)], None, "test_by_position", {"x": None}
    )
    assert compile_for("h200", op, X, Y, force={"test_by_position": "plain"}).kernels


def test_an_overload_of_aten():
    op = torch.ops.aten.trunc.default
    register_custom_op_autotuning(op, configs=[CustomOpConfig(lambda x: torch.floor(x))])
    try:
        stock = compile_for("h200", torch.trunc, X)
        assert "trunc" in stock.source and [d.chosen for d in stock.decisions] == ["stock"]
        name = "aten::trunc_autotuned"
        forced = compile_for("h200", torch.trunc, X, force={name: "<lambda>"})
        assert "libdevice.floor" in forced.source and "libdevice.trunc" not in forced.source
    finally:
        inductor_ext.disable("aten::trunc_autotuned")


def test_a_name_of_ones_own():
    op = new_op()
    register_custom_op_autotuning(op, configs=[CustomOpConfig(plain)], name="my_addition")
    (decision,) = compile_for("h200", op, X, Y).decisions
    assert decision.lowering == "my_addition" and decision.sites.startswith(str(op._opoverload))
    with inductor_ext.disable("my_addition"):
        assert not compile_for("h200", op, X, Y).decisions


def test_registering_again_replaces():
    op = new_op()

    def other(x, y):
        return (x + y) * 1.0

    register_custom_op_autotuning(op, configs=[CustomOpConfig(plain)])
    (first,) = compile_for("h200", op, X, Y).decisions
    register_custom_op_autotuning(op, config_generator=lambda fakes: [CustomOpConfig(other)])
    (second,) = compile_for("h200", op, X, Y).decisions
    assert [c.name for c in first.candidates] == ["stock", "plain"]
    assert [c.name for c in second.candidates] == ["stock", "other"]
    assert second.lowering == first.lowering


def test_an_operation_that_was_defined_anew_is_registered_again():
    for _ in range(2):

        @torch.library.custom_op("inductor_ext_test::defined_twice", mutates_args=())
        def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        twice.register_fake(lambda x, y: torch.empty_like(x))
        register_custom_op_autotuning(twice, configs=[CustomOpConfig(plain)])
    assert compile_for("h200", twice, X, Y, force={name_of(twice): "plain"}).kernels


def test_a_taken_name_leaves_nothing_behind():
    first, second = new_op(), new_op()
    register_custom_op_autotuning(first, configs=[CustomOpConfig(plain)], name="test_taken")
    with pytest.raises(ValueError, match="expected a new lowering name, got 'test_taken'"):
        register_custom_op_autotuning(second, configs=[CustomOpConfig(plain)], name="test_taken")
    register_custom_op_autotuning(second, configs=[CustomOpConfig(plain)], name="test_not_taken")
    assert compile_for("h200", second, X, Y, force={"test_not_taken": "plain"}).kernels


# --- errors ---------------------------------------------------------------------------------------

ONE = [CustomOpConfig(plain)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"custom_op": plain}, TypeError, "torch.library.custom_op or an OpOverload, got function"),
        ({"custom_op": torch.ops.aten.mm}, TypeError, "an OpOverload, got OpOverloadPacket"),
        ({"configs": None}, ValueError, "exactly one of configs and config_generator"),
        (
            {"config_generator": lambda f: ONE},
            ValueError,
            "exactly one of configs and config_generator",
        ),
        ({"configs": []}, ValueError, "at least one config, got an empty list"),
        ({"configs": CustomOpConfig(plain)}, TypeError, "configs as a list, got CustomOpConfig"),
        ({"configs": [3]}, TypeError, "each config as a CustomOpConfig, got int"),
        ({"input_gen_fns": {"z": torch.rand_like}}, ValueError, r"among \['x', 'y'\], got z"),
        ({"min_speedup_threshold": 0.9}, ValueError, "min_speedup_threshold >= 1, got 0.9"),
        ({"dispatch_on": {"tensor_name": "z", "dim": 0}}, ValueError, "got 'z'"),
        ({"split_points": [64]}, ValueError, "got split_points alone"),
    ],
)
def test_bad_arguments(changes, error, message):
    op = new_op()
    arguments = {"custom_op": op, "configs": ONE, **changes}
    known = dict(autotuning._registrations)
    with pytest.raises(error, match=message):
        register_custom_op_autotuning(**arguments)
    assert autotuning._registrations == known, "a refused registration left something behind"


def test_a_config_needs_a_function():
    with pytest.raises(TypeError, match="expected a callable decomposition, got str"):
        CustomOpConfig("plain")
