"""What Triton leaves for the first launch of a kernel for a GPU, done while the kernel is compiled.

Until then Triton has neither loaded the binary nor built the launcher, a C extension for the types of the
kernel's parameters: gcc needs longer for that than compiling a norm takes, so both are made side by side.

    with Loader(kernel.params) as loader:
        loader.load(jit_function.warmup(...))

Nothing is raised here: what fails fails again at the first launch, and is told there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace

_LOCK = threading.Lock()


class Loader:
    """See the module. Inside of it, a thread builds the launcher, on disk alone: Triton finds it there."""

    def __init__(self, params: Sequence[tuple[str, str]] | None):
        """`params` are a KernelSource's; None: everything is left for the first launch."""
        self._thread = None if params is None else \
            threading.Thread(target=_build, args=(tuple(kind for _, kind in params),), daemon=True,
                             name="ascend_ln_fuse compiling a launcher")

    def __enter__(self) -> Loader:
        if self._thread is not None:
            with contextlib.suppress(Exception), _LOCK:
                # Triton makes its driver when it is first asked for, and does not expect two threads.
                from triton.runtime import driver

                driver.active.launcher_cls  # noqa: B018
            self._thread.start()
        return self

    def load(self, compiled) -> None:
        """Load what `warmup` has given. On the current device, as everything of Triton's."""
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(Exception):
                compiled.run  # noqa: B018 - asking for it is what loads

    def __exit__(self, *error) -> None:
        if self._thread is not None:
            self._thread.join()


def _build(types: tuple[str, ...]) -> None:
    with contextlib.suppress(Exception), _launcher_lock(tuple("*" if t[0] == "*" else t for t in types)):
        from triton.runtime import driver

        driver.active.launcher_cls(SimpleNamespace(signature=dict(enumerate(types))), _Metadata())


@lru_cache(maxsize=256)
def _launcher_lock(types: tuple[str, ...]) -> threading.Lock:
    """Of equal launchers, one is built: all pointers are the same to it."""
    return threading.Lock()


class _Metadata:
    """A kernel's, of which the text of a launcher says nothing."""

    def __getattr__(self, name: str) -> int:
        return 0
