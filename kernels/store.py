"""A small store on disk for what was measured: JSON objects by key, shared by this user's processes.

    choices = Store("tiles")
    choices.put("sm_90 layer_norm ...", {"rows": 64})
    choices.get("sm_90 layer_norm ...")

Only data is read, never code, and only from a directory that this user alone can write
(`directories.distrust`): ASCEND_LN_FUSE_CACHE_DIR, else ascend_ln_fuse under XDG_CACHE_HOME or ~/.cache.
Where there is none, entries live in memory, and one warning says so. A file that is damaged, foreign, too
large or not what was asked for counts as missing; a disk that is full or read-only costs persistence and
nothing else. Losing an entry is never an error: it is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from . import directories

#: Written into every file; one with another number is ignored.
FORMAT = 1

#: Bytes of the largest file that is written or read.
MAX_BYTES = 64 * 1024

#: Files that one store keeps, and entries that it holds in memory; the oldest go first.
MAX_FILES = 4096


class Store:
    """JSON objects by key, on disk and in memory. Safe to use from several threads and processes.

    Attributes:
        name: of the folder that holds the store's files.
    """

    def __init__(self, name: str):
        """Nothing is read or made yet.

        Raises:
            ValueError: `name` is no plain word (letters, digits, _ and -).
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ValueError(f"a store's name is a plain word, not {name!r}")
        self.name = name
        self._entries: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> dict | None:
        """What was last put under `key`, by this process or another; None where there is nothing."""
        with self._lock:
            text = self._entries.get(key)
        if text is None:
            folder = self._folder()
            text = folder and _read(folder / _file_name(key))
            if not text:
                return None
        return _value(text, key)

    def put(self, key: str, value: Mapping) -> None:
        """Keep `value` under `key`, in the place of what was there.

        Raises:
            TypeError, ValueError: `value` is no mapping, not JSON, or larger than MAX_BYTES.
        """
        if not isinstance(key, str) or not isinstance(value, Mapping):
            raise TypeError(f"a store maps str to dict, not {type(key).__name__} to {type(value).__name__}")
        text = json.dumps({"format": FORMAT, "key": key, "value": dict(value)}, allow_nan=False)
        if len(text) > MAX_BYTES:  # ASCII: as many bytes
            raise ValueError(f"an entry of {len(text)} bytes; at most {MAX_BYTES} are kept")
        with self._lock:
            self._entries[key] = text
            self._entries.move_to_end(key)
            while len(self._entries) > MAX_FILES:
                self._entries.popitem(last=False)
        folder = self._folder()
        if folder is not None and _write(folder / _file_name(key), text):
            _trim(folder)

    def _folder(self) -> Path | None:
        """The store's folder, made if need be; None where there is none to trust or to write."""
        path = directories.cache_directory() / self.name
        why = _unusable(str(path))
        if not why:
            return path
        directories.warn_once(f"measured choices are kept in memory only, because {why}. Set "
                              f"{directories.CACHE_DIR} to a directory of yours.")
        return None


@lru_cache(maxsize=64)
def _unusable(path: str) -> str:
    """Why files cannot be kept at `path`; "" where they can. The answer stands for the process."""
    why = directories.distrust(path)
    if not why:
        try:
            directories.make(path)
        except OSError as error:
            why = f"{path}: {error.strerror or error}"
    return why


def _file_name(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32] + ".json"


#: Files of a store, and those that a process was about to put in their place.
_OURS = re.compile(r"[0-9a-f]{32}\.json(\..*)?\Z")


def _read(path: Path) -> str | None:
    """The text of a plain file of this user's of at most MAX_BYTES."""
    # Not through a link; and no waiting for the writer of a pipe that lies there under this name.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                return None
            if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
                return None
            return file.read(MAX_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _value(text: str, key: str) -> dict | None:
    """The entry in `text`; None where that is no file of ours for `key`."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("key") != key:
        return None
    value = found.get("value")
    return value if isinstance(value, dict) else None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _write(path: Path, text: str) -> bool:
    """Put a file in place at once: a reader sees the old one or the new one. False where that fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.replace(partial, path)
        return True
    except OSError:
        try:
            partial.unlink()
        except OSError:
            pass
        return False


def _trim(folder: Path) -> None:
    """Remove the oldest files beyond MAX_FILES, what killed processes left half-written among them."""
    try:
        names = [name for name in os.listdir(folder) if _OURS.match(name)]
        if len(names) <= MAX_FILES:
            return
        def age(name: str) -> float:
            try:
                return os.lstat(folder / name).st_mtime
            except OSError:  # another process was faster
                return float("inf")

        for name in sorted(names, key=age)[:len(names) - MAX_FILES * 3 // 4]:
            (folder / name).unlink(missing_ok=True)
    except OSError:
        pass
