"""Compiling with a time limit: a compiler that hangs must not hang the model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from .settings import COMPILE_SECONDS, compile_seconds

T = TypeVar("T")


class CompileTimeout(Exception):
    """Compiling has not ended within the limit; it goes on in its thread."""


class _Job:
    """One piece of work in a thread of its own."""

    def __init__(self, work: Callable):
        self.done = threading.Event()
        self.started = time.monotonic()
        self.result = self.error = None
        # A daemon: a compiler that never ends must not keep the process alive.
        threading.Thread(target=self._run, args=(work,), name="ascend_ln_fuse compiling", daemon=True).start()

    def _run(self, work: Callable) -> None:
        try:
            self.result = work()
        except BaseException as error:  # raised again where it is waited for
            self.error = error
        finally:
            self.done.set()


_jobs: dict[Hashable, _Job] = {}
_lock = threading.Lock()


def within_limit(key: Hashable, work: Callable[[], T]) -> T:
    """`work()`, in a thread of its own, or CompileTimeout once ASCEND_LN_FUSE_COMPILE_SECONDS are over.

    Work that runs already for an equal `key` is waited for, not started again, and the time it has had
    counts: what is overdue is not waited for at all. A result that comes late is handed to the next caller.

    Raises:
        CompileTimeout: not done in time. Or whatever `work` raises.
    """
    limit = compile_seconds()
    if limit is None:
        return work()
    with _lock:
        job = _jobs.get(key)
        if job is None:
            job = _jobs[key] = _Job(work)
    rest = job.started + limit - time.monotonic()
    if not job.done.wait(min(max(0.0, rest), threading.TIMEOUT_MAX)):
        raise CompileTimeout(f"compiling took longer than {limit:g} s ({COMPILE_SECONDS})")
    with _lock:
        if _jobs.get(key) is job:
            del _jobs[key]
    if job.error is not None:
        raise job.error
    return job.result


def _forget() -> None:
    """In a forked process: threads stay behind, and so does a lock that one of them held."""
    global _lock
    _jobs.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
