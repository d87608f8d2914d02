"""Several runs on one machine at once: they compile beside each other, and take what is timed in turn."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path


class Turn:
    """A lock between processes, on a file; without one, nothing is waited for. Reentrant, of one thread."""

    def __init__(self, path: Path | None):
        self.path, self.depth = path, 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, no other run with the same file times anything."""
        if self.path is None or self.depth:
            yield
            return
        import fcntl

        with open(self.path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1

    @contextlib.contextmanager
    def around(self, module, name: str) -> Iterator[None]:
        """Inside, that function of the module waits for its turn: it times something on its own."""
        function: Callable = getattr(module, name)

        @functools.wraps(function)
        def in_turn(*args, **kwargs):
            with self():
                return function(*args, **kwargs)

        setattr(module, name, in_turn)
        try:
            yield
        finally:
            setattr(module, name, function)
