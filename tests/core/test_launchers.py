"""Launchers built ahead of their kernels: built once, waited for, nothing left behind."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
import triton
from triton.backends.nvidia import driver

from inductor_ext import compat_launch

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(
        not hasattr(driver, "make_launcher"), reason="this Triton builds no launcher per signature"
    ),
]

SIGNATURE = ("*bf16", "*bf16", "*fp32")


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Triton with an empty cache and a C compiler that takes 0.2 s; the list of what it built."""
    built = []

    def build(name, src, srcdir, *rest):
        built.append(threading.current_thread().name)
        time.sleep(0.2)
        out = f"{srcdir}/{name}.so"
        shutil.copy(src, out)
        return out

    monkeypatch.setattr(triton.knobs.build, "impl", build)
    monkeypatch.setattr("triton.runtime.build._load_module_from_path", lambda name, path: path)
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return built


def load():
    """What a kernel's first launch does."""
    source = driver.make_launcher({}, dict(enumerate(SIGNATURE)), None)
    return triton.runtime.build.compile_module_from_src(source, "__triton_launcher")


def test_a_launch_waits_for_the_build_under_way(builds):
    compat_launch.build_ahead(SIGNATURE)
    load()
    assert len(builds) == 1
    assert builds[0].startswith("inductor_ext_launcher")
    assert triton.knobs.cache.manager_class is None


def test_a_signature_is_built_once(builds):
    for _ in range(3):
        compat_launch.build_ahead(SIGNATURE)
    load()
    compat_launch.build_ahead(SIGNATURE)
    assert len(builds) == 1


def test_a_failing_build_is_repeated_by_the_launch(builds, monkeypatch):
    good = triton.knobs.build.impl

    def fails_ahead(*args):
        if threading.current_thread().name.startswith("inductor_ext"):
            raise RuntimeError("no compiler")
        return good(*args)

    monkeypatch.setattr(triton.knobs.build, "impl", fails_ahead)
    compat_launch.build_ahead(SIGNATURE)
    assert load()
    assert len(builds) == 1


def test_a_users_cache_manager_is_left_alone(builds, monkeypatch):
    from triton.runtime.cache import FileCacheManager

    class Theirs(FileCacheManager):
        pass

    monkeypatch.setattr(triton.knobs.cache, "manager_class", Theirs)
    compat_launch.build_ahead(SIGNATURE)
    assert triton.knobs.cache.manager_class is Theirs
    assert builds == []
