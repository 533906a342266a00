"""Launchers of kernels with launch attributes, built while the kernels themselves compile.

Inductor's static launcher sets no launch attributes, so a kernel with programmatic dependent launch
goes through Triton's launcher, which up to triton 3.6 the C compiler builds once per signature and
cache directory: 0.35 s that would come after everything else. Newer Tritons build none, and nothing
here acts.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from concurrent.futures import Future
from typing import Any

log = logging.getLogger("inductor_ext")

_lock = threading.Lock()
_started: set[tuple[str, str]] = set()  # (cache directory, key), built or not
_pending: dict[str, Future[None]] = {}  # by the key that Triton gives its cache manager
_building = threading.local()


@functools.cache
def _builders() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(4, thread_name_prefix="inductor_ext_launcher")


def build_ahead(signature: tuple[str, ...]) -> None:
    """Start building the C launcher for kernel arguments of these Triton types, e.g. ``*bf16``.

    Triton finds the result in its cache; when the kernel is loaded before the build has ended,
    Triton's look-up waits for it instead of running the compiler a second time. A failed build
    leaves nothing behind: the kernel's own launch builds it again and reports.
    """
    from triton.backends.nvidia import driver

    make = getattr(driver, "make_launcher", None)
    if make is None:
        return
    from triton import knobs
    from triton.runtime import build, cache

    source = make({}, dict(enumerate(signature)), None)
    digest = hashlib.sha256((source + build.platform_key()).encode()).hexdigest()
    key = cache._base32(digest)
    with _lock:
        if (knobs.cache.dir, key) in _started or not _wait_in_look_ups():
            return
        _started.add((knobs.cache.dir, key))
        _pending[key] = Future()

    def run() -> None:
        _building.key = key
        try:
            build.compile_module_from_src(
                src=source,
                name="__triton_launcher",
                library_dirs=driver.library_dirs(),
                include_dirs=driver.include_dirs,
                libraries=driver.libraries,
            )
        except Exception as error:
            log.debug("a launcher could not be built ahead: %s", error)
        finally:
            with _lock:
                done = _pending.pop(key)
                if not _pending:
                    _stop_waiting()
            done.set_result(None)

    _builders().submit(run)


@functools.cache
def _waiting_manager() -> Any:
    """Triton's own cache manager, but asking it for a launcher that is being built waits."""
    from triton.runtime.cache import FileCacheManager

    class WaitingCacheManager(FileCacheManager):
        def __init__(self, key: str, *args: Any, **kwargs: Any) -> None:
            pending = _pending.get(key)
            if pending is not None and getattr(_building, "key", None) != key:
                pending.result()
            super().__init__(key, *args, **kwargs)

    return WaitingCacheManager


def _wait_in_look_ups() -> bool:
    """Put the waiting manager in while builds are pending; False when the user has their own."""
    from triton import knobs

    if knobs.cache.manager_class not in (None, _waiting_manager()):
        return False
    knobs.cache.manager_class = _waiting_manager()
    return True


def _stop_waiting() -> None:
    from triton import knobs

    if knobs.cache.manager_class is _waiting_manager():
        del knobs.cache.manager_class


def direct_launches() -> Any:
    """A context in which ``wrap_triton(kernel)`` is the kernel: for code that sees no tracing.

    Outside it each launch goes through a higher-order operation, which costs the host 1 ms.
    """
    from torch._library.triton import set_wrap_triton_enabled

    return set_wrap_triton_enabled(False)
