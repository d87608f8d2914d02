"""Compiling in threads: with a time limit, since a compiler that hangs must not hang the model, and ahead of
the call that needs a kernel, several at once. Triton's passes, LLVM and the assembler do not hold the GIL."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from .parsing import parsers_apart
from .settings import COMPILE_SECONDS, compile_seconds

T = TypeVar("T")

#: Where threads may not parse at any time, none works ahead before a call waits for a kernel: until then it
#: could disturb Dynamo, which parses the guards of the graph at hand.
PARSERS_APART = parsers_apart(sys.version_info[:3])

#: Threads that compile ahead, at most; there are no more than processors.
MOST_WORKERS = 16

#: Results of work ahead that nobody has asked for; the oldest go first.
MAX_UNASKED = 512

#: How long the end of the process waits for work ahead that is under way: what it runs must not lose its
#: libraries' memory from under it.
SECONDS_AT_EXIT = 10.0


class CompileTimeout(Exception):
    """Compiling has not ended within the limit; it goes on in its thread."""


class _Job:
    """One piece of work. Whoever sets `started`, under the lock, runs it."""

    def __init__(self, work: Callable):
        self.work: Callable | None = work
        self.done = threading.Event()
        self.started: float | None = None
        self.result = self.error = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # raised again where it is waited for
            self.error = error
        finally:
            self.work = None
            self.done.set()


_jobs: dict[Hashable, _Job] = {}
_lock = threading.Lock()
#: what `ahead` was given and nobody has begun
_waiting: deque[_Job] = deque()
_workers: set[threading.Thread] = set()


def within_limit(key: Hashable, work: Callable[[], T]) -> T:
    """`work()`, in a thread of its own, or CompileTimeout once ASCEND_LN_FUSE_COMPILE_SECONDS are over.

    Work that runs already for an equal `key` is waited for, not started again, and the time it has had
    counts: what is overdue is not waited for at all. A result that comes late, or that `ahead` has made, is
    handed to the next caller.

    Raises:
        CompileTimeout: not done in time. Or whatever `work` raises.
    """
    limit = compile_seconds()
    with _lock:
        job = _jobs.get(key)
        if job is None and limit is not None:
            job = _jobs[key] = _Job(work)
        ours = job is not None and job.started is None  # new, or nobody has come to it yet
        if ours:
            job.started = time.monotonic()
        _hire()
    if job is None:
        return work()
    if ours and limit is None:
        job.run()
    elif ours:
        _thread(job.run, "ascend_ln_fuse compiling").start()
    rest = None if limit is None else \
        min(max(0.0, job.started + limit - time.monotonic()), threading.TIMEOUT_MAX)
    if not job.done.wait(rest):
        raise CompileTimeout(f"compiling took longer than {limit:g} s ({COMPILE_SECONDS})")
    with _lock:
        if _jobs.get(key) is job:
            del _jobs[key]
    if job.error is not None:
        raise job.error
    return job.result


def ahead(key: Hashable, work: Callable[[], object]) -> None:
    """Have `work()` done in the background for a later `within_limit` with an equal `key`, which gets its
    result or its error. Returns at once. Nothing is heard of work that is never asked for.
    """
    with _lock:
        if key in _jobs:
            return
        _jobs[key] = job = _Job(work)
        _waiting.append(job)
        if len(_jobs) > MAX_UNASKED:
            oldest = next((known for known, other in _jobs.items() if other.done.is_set()), None)
            _jobs.pop(oldest, None)
        if PARSERS_APART:
            _hire()


def settle(seconds: float) -> None:
    """Wait until all that `ahead` was given is done, but not longer than `seconds`."""
    until = time.monotonic() + seconds
    with _lock:
        _hire()
    while workers := list(_workers):
        rest = until - time.monotonic()
        if rest <= 0:
            return
        workers[0].join(rest)


def _hire() -> None:
    """As many workers as there are jobs, or may be. Under the lock."""
    for _ in range(min(len(_waiting), min(MOST_WORKERS, _processors()) - len(_workers))):
        worker = _thread(_work, "ascend_ln_fuse compiling ahead")
        _workers.add(worker)
        worker.start()


def _work() -> None:
    """What a worker does: job after job, until none waits."""
    while True:
        with _lock:
            job = next(iter(_waiting), None)
            if job is None:
                _workers.discard(threading.current_thread())
                return
            _waiting.popleft()
            if job.started is not None:  # a caller could not wait
                continue
            job.started = time.monotonic()
        job.run()
        del job


def _thread(target: Callable[[], None], name: str) -> threading.Thread:
    # A daemon: a compiler that never ends must not keep the process alive.
    return threading.Thread(target=target, name=name, daemon=True)


def _processors() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finish() -> None:
    """At the end of the process: begin nothing more."""
    with _lock:
        _waiting.clear()
    settle(SECONDS_AT_EXIT)


def _forget() -> None:
    """In a forked process: threads stay behind, and so does a lock that one of them held."""
    global _lock
    _jobs.clear()
    _waiting.clear()
    _workers.clear()
    _lock = threading.Lock()


atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
