"""Shared by the tests on a card: a clean setting, compiling with its decisions, judging by fp64."""

import contextlib
import copy
import math
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_ext
from inductor_ext import compat, measure, report

_broken = []  # tests that left this process without a working CUDA context


class _Wide(TorchDispatchMode):
    """A program of fp64 tensors, never rounded on the way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in ("mm", "addmm", "bmm", "baddbmm"):
            kwargs.pop("out_dtype", None)
            tensors = [a for a in args if not isinstance(a, torch.dtype)]
            return getattr(torch, name)(*tensors, **kwargs)
        if name == "_to_copy" and kwargs.get("dtype", torch.int).is_floating_point:
            return args[0]
        return func(*args, **kwargs)


def in_fp64(fn, args):
    """The leaves of ``fn(*args)`` in fp64."""
    wide = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, copy.deepcopy(args)
    )
    with torch.no_grad(), _Wide():
        return pytree.tree_leaves(fn(*wide))


def judge(fn, args, out, *, rounding=None, tf32=False):
    """Assert that ``out`` is ``fn(*args)``: by fp64, and twice the error of eager at most."""
    references = in_fp64(fn, args)
    with torch.no_grad():
        baselines = pytree.tree_leaves(fn(*copy.deepcopy(args)))
    outputs = pytree.tree_leaves(out)
    assert len(outputs) == len(baselines)
    for got, reference, baseline in zip(outputs, references, baselines, strict=True):
        verdict = measure.check(got, reference, baseline, rounding=rounding, tf32=tf32)
        assert verdict.ok, verdict.reason


def poison():
    """Leave NaN in the memory that the next allocations get."""
    sizes = [1 << n for n in range(7, 23, 3)]
    blocks = [torch.full((n,), math.nan, device="cuda") for n in sizes for _ in range(16)]
    torch.cuda.synchronize()
    del blocks


def compile_and_fire(fn, *args, **options):
    """(compiled function, its first output) of a program in which a site fires."""
    compiled = torch.compile(fn, **options)
    poison()
    with report.collect() as decisions:
        out = compiled(*args)
    assert decisions, "no site was looked at"
    assert decisions[0].fired, decisions[0].reason
    return compiled, out


# --- processes of their own -----------------------------------------------------------------------


def in_process(script, *argv, folder, preload="", seconds=120):
    """(exit code, None where it took too long; what it wrote) of a Python script.

    It writes to a file and is ended with all it started: a worker of Inductor's that outlived it
    would keep a pipe open, and reading that would wait for the worker.
    """
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if preload:
        env["LD_PRELOAD"] = preload
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, argv)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=env,
            start_new_session=True,
            # Writing the memory of a crashed process to the disk can take minutes.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()[-3000:]


def compilers_libstdcxx():
    """The C++ library of the compiler that a package is compiled with; "" if it can't be found.

    With another copy in the process, loaded first, the package's regular expressions are compiled
    code of one copy on data of the other: torch's loader of packages then crashes, also on stock's.
    """
    if shutil.which("gcc") is None:
        return ""
    asked = ["gcc", "-print-file-name=libstdc++.so.6"]
    path = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip()
    return os.path.realpath(path) if os.path.isabs(path) else ""


def check_package(build, load, folder):
    """Build a package in one process ("ours"), load and check it in another without the plugin.

    Skips where stock's package ("stock") can't be loaded either.
    """

    def attempt(which):
        paths = folder / f"{which}.pt2", folder / f"{which}.pt"
        code, wrote = in_process(build, which, *paths, folder=folder)
        if code != 0:
            return "be built", code, wrote
        preload = compilers_libstdcxx()
        code, wrote = in_process(load, which, *paths, folder=folder, preload=preload)
        return "be loaded and run" if code != 0 else "", code, wrote

    failed, code, wrote = attempt("ours")
    if not failed:
        return
    stock_failed, stock_code, stock_wrote = attempt("stock")
    if stock_failed == failed:
        pytest.skip(
            f"stock's package can't {failed} either (exit code {stock_code}): {stock_wrote[-300:]}"
        )
    raise AssertionError(f"our package can't {failed} (exit code {code}): {wrote}")


@pytest.fixture(name="check_package")
def _check_package(tmp_path):
    return lambda build, load: check_package(build, load, tmp_path)


@pytest.fixture(name="judge")
def _judge():
    return judge


@pytest.fixture(name="poison")
def _poison():
    return poison


@pytest.fixture(name="compile_and_fire")
def _compile_and_fire():
    return compile_and_fire


@pytest.fixture(autouse=True)
def clean_setting():
    """Strict, seeded, compiled anew, and torch's float32 precision as it was."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    with inductor_ext.config.patch(strict=True), compat.without_caches():
        yield
    torch.set_float32_matmul_precision(precision)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # other workers have tests of many GB


@pytest.fixture
def own_caches(clean_setting):
    """Caches of its own for a test that measures: without any, each program is compiled twice, and
    not ahead of its turn."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with fresh_cache(), config.patch(force_disable_caches=False):
        yield


def pytest_runtest_makereport(item, call):
    """Note a CUDA context that a kernel broke: all later tests of this process would fail."""
    if call.excinfo is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            _broken.append(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid):
    """End such a process if it is a worker of pytest-xdist, which starts another for the rest."""
    if _broken and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)
