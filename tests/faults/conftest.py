"""Faults on purpose: the net is on here, and kernels run on the CPU, through Triton's interpreter."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_ln_fuse.kernels import compiling, directories, launch, ops, settings, store, triton_cache

# `norm_cases` lies there.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(what, end): a row of docs/reliability.md; see run.py")


#: Tests put others in the place of these.
CACHES = (ops.runner, launch._function, store._unusable, triton_cache._refused)


def forget() -> None:
    """What the process remembers of kernels and directories."""
    for cache in CACHES:
        cache.cache_clear()
    triton_cache._unusable.clear()
    directories._warned.clear()
    compiling._jobs.clear()


@pytest.fixture(autouse=True)
def faults(monkeypatch, tmp_path):
    """Failures fall back; files go to a directory of the test's own, which this user alone can write."""
    pytest.importorskip("triton")
    monkeypatch.delenv(settings.STRICT, raising=False)
    for variable in (settings.COMPILE_SECONDS, settings.SAVE_INPUTS):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(settings.INTERPRET, "1")
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture
def mutate(request, monkeypatch):
    """`mutate(pattern, new)`: kernels are generated with what a regular expression matches replaced. Whose: a
    test file names the module that calls `generate` as GENERATES, where it is not launch.py."""
    module = getattr(request.module, "GENERATES", launch)
    original = module.generate

    def change(pattern: str, new: str) -> None:
        def generate(*args):
            kernel = original(*args)
            source, found = re.subn(pattern, new, kernel.source)
            if not found:  # no Exception: the net would catch that
                pytest.fail(f"{pattern!r} is not in\n{kernel.source}")
            return replace(kernel, source=source)

        launch._function.cache_clear()
        monkeypatch.setattr(module, "generate", generate)

    return change


@pytest.fixture
def warned():
    """The texts of this project's warnings so far."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in caught if "ascend_ln_fuse" in str(w.message)]
