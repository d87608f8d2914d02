"""Directories of files that a process may trust: this user's own, which nobody else can write.

What lies in such a directory was put there by this user. That matters most for compiled code: Triton loads
the shared objects that it finds in its cache.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from pathlib import Path

from .settings import CACHE_DIR

#: Symbolic links followed on the way to a directory, as many as Linux follows.
MAX_LINKS = 40

_warned: set[str] = set()
_lock = threading.Lock()


def cache_directory() -> Path:
    """Where this project keeps files; nothing is made or checked."""
    chosen = os.environ.get(CACHE_DIR, "").strip()
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    # The XDG specification: a path that is not absolute is ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ascend_ln_fuse"


def make(path: str | os.PathLike) -> None:
    """Make a directory for this user alone, with its parents; one that exists is left as it is.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    path = Path(path)
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):  # parents too: `makedirs` would give them the umask's mode
        try:
            each.mkdir(mode=0o700)
        except FileExistsError:  # another process was faster
            pass


def warn_once(message: str) -> None:
    """Warn of a directory, once in a process whatever the filters are: one that raises does so once."""
    with _lock:
        known = message in _warned
        _warned.add(message)
    if not known:
        warnings.warn(f"ascend_ln_fuse: {message}", RuntimeWarning, stacklevel=5)


def distrust(path: str | os.PathLike, entries: bool = False) -> str:
    """Why `path`, a directory or one that is yet to be made, may hold what others wrote; "" where only
    this user can have written there.

    Every directory on the way must belong to this user or to root and not be writable by others, unless it
    is sticky, as /tmp is: whoever can rename one can replace what is below. The directory itself must be
    this user's. `entries`: so must be the directories in it.
    """
    if not hasattr(os, "geteuid"):  # Windows has other ways, and no Triton
        return ""
    try:
        steps = _steps(os.path.abspath(path))
        for step, found in steps[:-1]:
            if why := _shared(step, found, own=False):
                return why
        last, found = steps[-1]
        own = os.path.realpath(path) == last
        if why := _shared(last, found, own=own):
            return why
        if own and not stat.S_ISDIR(found.st_mode):
            return f"{last} is no directory"
        if own and entries:
            with os.scandir(last) as found_in:
                for entry in found_in:
                    if why := _shared(entry.path, entry.stat(follow_symlinks=False), own=True):
                        return why
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def _steps(path: str) -> list[tuple[str, os.stat_result]]:
    """(path, lstat) of everything from / to `path` that exists, links and what they lead to included."""
    found: list[tuple[str, os.stat_result]] = []
    parts = path.split(os.sep)[1:]
    at, links = os.sep, 0
    while True:
        state = os.lstat(at)
        found.append((at, state))
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(f"too many symbolic links: {path}")
            target = os.path.normpath(os.path.join(os.path.dirname(at), os.readlink(at)))
            parts = [*target.split(os.sep)[1:], *parts]
            at = os.sep
            continue
        if not parts or not parts[0]:
            return found
        at = os.path.join(at, parts.pop(0))
        if not os.path.lexists(at):
            return found


def _shared(path: str, found: os.stat_result, own: bool) -> str:
    """Why others can change what is at `path`. own: it must be this user's; else root's will do, and a
    sticky directory, in which nobody can touch what is not theirs."""
    user = os.geteuid()
    if found.st_uid != user and (own or found.st_uid != 0):
        return f"{path} belongs to user {found.st_uid}, not to user {user}"
    if stat.S_ISLNK(found.st_mode):  # a link has no mode of its own
        return f"{path} is a symbolic link" if own else ""
    if not own and found.st_mode & stat.S_ISVTX:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody"
    if found.st_mode & stat.S_IWGRP and not _group_of_one(found.st_gid):
        return f"{path} can be written by its group"
    return ""


def _group_of_one(group: int) -> bool:
    """Whether a group is this user's private one, as many systems give each user: directories are then
    writable by the group as a matter of course (umask 002)."""
    try:
        import grp
        import pwd

        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    return group == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
