"""Launchers: for the types of a kernel's parameters, Triton has gcc build an extension that launches it.

It does so at the first launch, after the kernel is compiled, and gcc needs longer than a norm's kernel does.
Here both are made side by side: `building` leaves the extension in Triton's cache, where the launch finds it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace

_LOCK = threading.Lock()


@contextlib.contextmanager
def building(params: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Inside, a thread builds the launcher for `params` (a KernelSource's); it is done at the end.

    What fails there fails again at the first launch, and is told there.
    """
    with contextlib.suppress(Exception), _LOCK:
        # Triton makes its driver when it is first asked for, and does not expect two threads.
        from triton.runtime import driver

        driver.active.launcher_cls  # noqa: B018
    thread = threading.Thread(target=_build, args=(tuple(kind for _, kind in params),), daemon=True,
                              name="ascend_ln_fuse compiling a launcher")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _build(types: tuple[str, ...]) -> None:
    pointers_alike = tuple("*" if kind[0] == "*" else kind for kind in types)
    with contextlib.suppress(Exception), _launcher_lock(pointers_alike):
        from triton.runtime import driver

        driver.active.launcher_cls(SimpleNamespace(signature=dict(enumerate(types))), _Metadata())


@lru_cache(maxsize=256)
def _launcher_lock(types: tuple[str, ...]) -> threading.Lock:
    """Of equal launchers one is built, which the others find."""
    return threading.Lock()


class _Metadata:
    """A kernel's, of which the text of a launcher says nothing."""

    def __getattr__(self, name: str) -> int:
        return 0
