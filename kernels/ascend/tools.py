"""Where the compilers are, what they answer, and the errors of this package."""

from __future__ import annotations

import enum
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path


class Outcome(enum.Enum):
    """What became of a kernel."""

    PASSED = "passed"
    DEGRADED = "double buffering dropped"
    OVERFLOW = "on-chip memory overflow"
    UNSUPPORTED = "not supported by triton-ascend"
    CRASH = "compiler crash"
    TIMEOUT = "compiler timeout"
    MISSING_TOOL = "compiler not installed"


class ToolchainError(RuntimeError):
    """A step of the toolchain failed; `outcome` says how, `message` why."""

    def __init__(self, outcome: Outcome, message: str):
        super().__init__(f"{outcome.value}: {message}")
        self.outcome = outcome
        self.message = message


class MissingTool(ToolchainError):
    """A compiler is not installed; the message says what to install."""

    def __init__(self, message: str):
        super().__init__(Outcome.MISSING_TOOL, message)


TRITON_HINT = "pip install triton-ascend pybind11 'numpy<2.4'"
NPUIR_HINT = "pip install ascendnpu-ir (Linux; no NPU and no CANN needed)"
LLVM_HINT = "apt-get install mlir-19-tools llvm-19 gcc"


@functools.cache
def find_tool(name: str) -> str:
    """Path of a program of the ascendnpu-ir wheel: bishengir-compile, ... Raises MissingTool."""
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise MissingTool(f"{name} not found: {NPUIR_HINT}")
    path = Path(spec.origin).parent / "bin" / name
    if not path.exists():
        raise MissingTool(f"the installed ascendnpu-ir has no {name}: pip install -U ascendnpu-ir")
    return str(path)


@functools.cache
def find_llvm_tool(name: str) -> str:
    """Path of an LLVM 19 program (mlir-translate, opt, llc) or of gcc. Raises MissingTool."""
    candidates = (f"{name}-19", f"/usr/lib/llvm-19/bin/{name}") if name != "gcc" else ("gcc",)
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    raise MissingTool(f"{name}{'' if name == 'gcc' else ' of LLVM 19'} not found: {LLVM_HINT}")


def require_triton_ascend() -> None:
    """Raises MissingTool unless the installed module `triton` is triton-ascend."""
    if importlib.util.find_spec("triton") is None:
        raise MissingTool(f"triton-ascend not found: {TRITON_HINT}")
    if importlib.util.find_spec("triton.backends.ascend") is None:
        raise MissingTool(
            "the installed triton has no Ascend backend. triton-ascend installs a module of the "
            f"same name, so it needs an environment of its own: {TRITON_HINT}"
        )


# ------------------------------------------------------------------------------- the hivmc stub

# bishengir-compile asks hivmc for its version, and wants exactly this form of answer.
_HIVMC_STUB = """#!/bin/sh
[ "$1" = --version ] && echo "hivmc {version} ({commit} {date})"
exit 0
"""
_VERSION = re.compile(r"bishengir-compile (\d+\.\d+\.\d+) \(.*?\b([0-9a-f]{6,40}) (\d{4}-\d\d-\d\d)\)")


# functools.cache lets two threads make a directory each, and drops one of them, which removes it.
_LOCK = threading.Lock()


@functools.cache
def _stub_directory() -> tempfile.TemporaryDirectory:
    """A private directory with the hivmc stub. It is removed when the process ends."""
    answer = subprocess.run([find_tool("bishengir-compile"), "--version"], capture_output=True, text=True)
    found = _VERSION.search(answer.stdout)
    version, commit, date = found.groups() if found else ("1.2.0", "000000", "2026-01-01")
    directory = tempfile.TemporaryDirectory(prefix="ascend-ln-fuse-")
    for name in ("hivmc", "hivmc-a5"):
        stub = Path(directory.name) / name
        stub.write_text(_HIVMC_STUB.format(version=version, commit=commit, date=date))
        stub.chmod(0o700)
    return directory


def compiler_environment() -> dict[str, str]:
    """The environment for bishengir-compile: the stub is first on PATH, then its own -a5 twin."""
    programs = os.path.dirname(find_tool("bishengir-compile"))
    with _LOCK:
        stub = _stub_directory().name
    path = os.pathsep.join([stub, programs, os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}
