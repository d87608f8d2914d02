"""Several runs on one machine at once: they compile beside each other; what is timed is timed alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path


class Turns:
    """A lock between processes, on two files; without a path, nothing is waited for. Of one thread.

    Who waits to be alone keeps others from beginning: `gate` is held meanwhile.
    """

    def __init__(self, path: Path | None):
        self.path, self._file = path, None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, no other run is alone."""
        with self._held(exclusive=False):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other run computes anything. Also inside of `together`, which is left for that time."""
        with self._held(exclusive=True):
            yield

    @contextlib.contextmanager
    def timing_alone(self, module, name: str) -> Iterator[None]:
        """Inside, that function of the module, which times something on its own, does so alone."""
        function: Callable = getattr(module, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            with self.alone():
                return function(*args, **kwargs)

        setattr(module, name, timed)
        try:
            yield
        finally:
            setattr(module, name, function)

    @contextlib.contextmanager
    def _held(self, exclusive: bool) -> Iterator[None]:
        if self.path is None:
            yield
            return
        before, outer = self._file, self._file is None
        if outer:
            self._file = open(self.path, "w")
        try:
            self._lock(exclusive)
            try:
                yield
            finally:
                if not outer:
                    self._lock(exclusive=False)
        finally:
            if outer:
                self._file.close()
            self._file = before

    def _lock(self, exclusive: bool) -> None:
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_UN)
        with open(self.path.with_suffix(".gate"), "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(self._file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
