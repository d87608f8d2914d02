"""Launchers: for the types of a kernel's parameters, Triton for GPUs has gcc build an extension to launch it.

It does so at the first launch, after the kernel is compiled, and gcc needs longer than a norm's kernel does.
Here both are made side by side: the extension comes into Triton's cache, where the first launch finds it.
What fails here fails there again, and is told there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from . import triton_cache

#: Launchers that are remembered as built, or under way; all are forgotten together.
MAX_KNOWN = 256

#: (types, Triton's directory) -> the thread that builds the launcher, or has built it
_builds: dict[tuple, threading.Thread] = {}
_lock, _driver_lock = threading.Lock(), threading.Lock()


def begin(params: Sequence[tuple[str, str]]) -> threading.Thread:
    """The thread that builds the launcher for `params` (a KernelSource's), begun now or before. It parses
    nothing, so it disturbs nobody who does (parsing.py)."""
    types = tuple(kind for _, kind in params)
    # To a launcher all pointers are the same.
    key = tuple("*" if kind[0] == "*" else kind for kind in types), triton_cache.current()
    with _lock:
        thread = _builds.get(key)
        if thread is None:
            if len(_builds) >= MAX_KNOWN:
                _builds.clear()
            thread = _builds[key] = threading.Thread(
                target=_build, args=(types,), name="ascend_ln_fuse compiling a launcher", daemon=True)
            thread.start()
    return thread


@contextlib.contextmanager
def building(params: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Inside, a thread builds the launcher for `params`; it is done at the end."""
    thread = begin(params)
    try:
        with contextlib.suppress(Exception):
            _driver()
        yield
    finally:
        thread.join()


def _build(types: tuple[str, ...]) -> None:
    with contextlib.suppress(Exception):
        triton_cache.with_safe_cache(
            lambda: _driver().launcher_cls(SimpleNamespace(signature=dict(enumerate(types))), _Metadata()))


def _driver():
    """Triton's. It is made when it is first asked for, which two threads must not do at once."""
    with _driver_lock:
        from triton.runtime import driver

        driver.active.launcher_cls  # noqa: B018 - has it made
        return driver.active


class _Metadata:
    """A kernel's, of which the text of a launcher says nothing."""

    def __getattr__(self, name: str) -> int:
        return 0


def _forget() -> None:
    """In a forked process: threads stay behind, and so does a lock that one of them held."""
    global _lock, _driver_lock
    _builds.clear()
    _lock, _driver_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
