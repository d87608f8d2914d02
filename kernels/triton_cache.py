"""The directory in which Triton keeps what it compiled, where that is safe and usable.

Triton loads shared objects and binaries from its cache without asking who wrote them, and fails where the
directory cannot be written. `with_safe_cache` holds that directory to `directories.distrust`; where it does
not pass, or is read-only or full, Triton compiles into a temporary directory of this process instead.

Triton has no argument for it. Up to 3.3 it reads TRITON_CACHE_DIR each time; later ones read it through
`triton.knobs.cache.dir`, unless a program has set that. Both are changed only while this project compiles,
so that other users of Triton in the process keep their directory.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from . import directories
from .parsing import parsing

T = TypeVar("T")

VARIABLE = "TRITON_CACHE_DIR"

#: A file of this size must fit for a directory to count as usable: about that of one kernel's files.
PROBE_BYTES = 256 * 1024

#: What a directory that cannot be written fails with.
UNUSABLE = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO}

_LOCK = threading.Lock()


class _Redirection:
    """How many compilations want the temporary directory now, and what to put back after the last."""

    def __init__(self):
        self.users = 0
        self.variable: str | None = None
        self.knob: str | None = None

    def settings(self) -> tuple[str | None, str | None]:
        """(the variable, the knob) as the user has them, while they are redirected as well."""
        with _LOCK:
            if self.users:
                return self.variable, self.knob
            return os.environ.get(VARIABLE), _knobs().get("dir")

    def enter(self, path: str) -> None:
        with _LOCK:
            self.users += 1
            if self.users > 1:
                return
            self.variable, knobs = os.environ.get(VARIABLE), _knobs()
            self.knob = knobs.get("dir")
            os.environ[VARIABLE] = path
            if self.knob is not None:
                knobs["dir"] = path

    def leave(self) -> None:
        with _LOCK:
            self.users -= 1
            if self.users:
                return
            if self.variable is None:
                os.environ.pop(VARIABLE, None)
            else:
                os.environ[VARIABLE] = self.variable
            if self.knob is not None:
                _knobs()["dir"] = self.knob


_redirection = _Redirection()
_unusable: dict[str, str] = {}  # directory -> why Triton could not write there


def with_safe_cache(work: Callable[[], T]) -> T:
    """`parsing(work)`, during which Triton compiles into a directory that only this user can have written.

    Warns once for each directory that does not pass. Where Triton then fails to write to the one it has,
    `work` is called a second time, with the temporary one. Raises what `work` raises.
    """
    path = current()
    why = _unusable.get(path) or _refused(path)
    if not why:
        try:
            return parsing(work)
        except Exception as error:
            why = _unusable[path] = _disk_error(error, path)
            if not why:
                raise
    directories.warn_once(
        f"Triton's cache is not used, because {why}; kernels are compiled into a temporary directory. Set "
        f"{VARIABLE} to a directory of yours.")
    _redirection.enter(_temporary(os.getpid()))
    try:
        return parsing(work)
    finally:
        _redirection.leave()


def _disk_error(error: BaseException | None, path: str) -> str:
    """What the system said of a directory that `error`, or what led to it, tells of; "" for other errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in UNUSABLE:
            return f"{path}: {error.strerror}"
        error = error.__cause__ or error.__context__
    return ""


def current() -> str:
    """The directory that Triton is set to use."""
    variable, knob = _redirection.settings()
    chosen = knob or (variable or "").strip()
    home = _knobs().get("home_dir") or os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.path.abspath(chosen or os.path.join(home, ".triton", "cache"))


def _knobs() -> dict:
    """What a program has set on `triton.knobs.cache` in Python; an empty dict before Triton 3.4."""
    cache = getattr(sys.modules.get("triton.knobs"), "cache", None)
    return vars(cache) if cache is not None else {}


@lru_cache(maxsize=64)
def _refused(path: str) -> str:
    """Why Triton should not compile into `path`; "" where it may."""
    if why := directories.distrust(path, entries=True):
        return why
    try:
        directories.make(path)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


@lru_cache(maxsize=1)
def _temporary(process: int) -> str:
    """A directory for this process alone (a fork makes its own), gone when it ends."""
    path = tempfile.mkdtemp(prefix="ascend_ln_fuse-")

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path
