"""Outlines are short and stable; goldens fail with a diff and are rewritten on demand."""

import pytest
import torch

from inductor_ext.testing import assert_golden, compile_for, normalise, outline


def relu_of_product(x, w):
    return torch.relu(x @ w).sum(-1)


def test_outline_of_an_inference_program():
    code = compile_for("h200", relu_of_product, torch.randn(32, 64), torch.randn(64, 16))
    assert outline(code) == (
        "inference\n  extern_kernels.mm\n  [persistent_reduction] relu, sum loads=1 stores=1\n"
    )
    assert_golden("relu_of_product", outline(code))


def test_outline_does_not_depend_on_what_was_compiled_before():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
    first, second = (
        outline(compile_for("h200", model, torch.randn(8, 64), grad=True)) for _ in range(2)
    )
    assert first == second and first.startswith("forward\n") and "backward\n" in first


def test_normalised_text_has_no_paths_hashes_or_checks():
    code = compile_for("h200", lambda x: torch.sin(x) + 1, torch.randn(32, 64))
    text = normalise(code.source)
    assert "def triton_poi_fused_add_sin_0(in_ptr0, out_ptr0, xnumel, XBLOCK" in text
    for gone in ("/", "DeviceProperties", "backend_hash", "assert_size_stride", "import", "del "):
        assert gone not in text.replace("//", ""), gone
    again = normalise(compile_for("h200", lambda x: torch.sin(x) + 1, torch.randn(32, 64)).source)
    assert text == again


def test_golden_is_written_on_demand_and_compared(tmp_path, monkeypatch):
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    with pytest.raises(AssertionError, match="got none: run `make goldens`"):
        assert_golden("name", "a\n", tmp_path)
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    assert_golden("name", "a\n", tmp_path)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    assert_golden("name", "a\n", tmp_path)
    with pytest.raises(AssertionError, match=r"make goldens`(.|\n)*-a\n\+b"):
        assert_golden("name", "b\n", tmp_path)


def test_another_version_gets_its_own_golden(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert_golden("name", "a\n", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    assert_golden("name", "b\n", tmp_path)
    assert (tmp_path / "name.txt").read_text() == "a\n"
    assert (tmp_path / "name.torch-2.15.txt").read_text() == "b\n"
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    assert_golden("name", "b\n", tmp_path)
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    assert_golden("name", "a\n", tmp_path)
    assert not (tmp_path / "name.torch-2.15.txt").exists()
