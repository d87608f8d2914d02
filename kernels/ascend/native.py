"""Runs a kernel's Linalg form natively: Linalg text -> shared library -> one call per program.

This is the kernel as triton-ascend lowered it, compiled for the CPU by LLVM 19. It checks the
kernel's arithmetic, masks and strides at native speed; it does not see what bishengir-compile makes
of them (for that: interpreter.py), and it checks no bounds.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .interpreter import MAX_PROGRAMS
from .toolchain import Lowered
from .tools import find_llvm_tool, find_tool

_BUFFERIZE = [
    "--linalg-generalize-named-ops",
    "--convert-elementwise-to-linalg",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true allow-unknown-ops=true",
    "--canonicalize",
    "--cse",
    # Without these every call would leak its tiles.
    "--ownership-based-buffer-deallocation",
    "--canonicalize",
    "--buffer-deallocation-simplification",
    "--bufferization-lower-deallocations",
    "--cse",
    "--canonicalize",
]
_TO_LLVM = [
    "--convert-linalg-to-loops",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
]
# Full unrolling of the tile loops makes LLVM slow, and gains nothing in a test.
_OPTIMIZE = ["-O2", "-unroll-max-count=1", "-unroll-full-max-count=0", "-mcpu=native"]

# The functions of Ascend's libdevice that a kernel may call.
_LIBDEVICE = """
#include <math.h>
float __hmf_tanhf(float x) { return tanhf(x); }
float __hmf_reluf(float x) { return x > 0 ? x : 0; }
float __hmf_roundf(float x) { return roundf(x); }
"""

_SCALARS = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "f32": ctypes.c_float,
}


class NativeBuildError(RuntimeError):
    """A tool refused the kernel; the message has the tool's own first lines."""


class NativeKernel:
    """A loaded library. Call it with the kernel's tensors and numbers, and a grid."""

    def __init__(self, function: Callable[..., None], lowered: Lowered, keep_alive: Any):
        self._function = function
        self._types = list(lowered.signature.values())
        self._keep_alive = keep_alive  # the directory of the library
        self.name = lowered.name

    def __call__(self, args: Sequence[Any], grid: Sequence[int]) -> None:
        """Run every program, one after the other; the tensors in `args` are written.

        args: CPU tensors and numbers in the order of the signature. grid: one to three sizes.
        No access is checked: a kernel that leaves a tensor corrupts this process.
        """
        if len(args) != len(self._types):
            raise TypeError(f"{self.name} takes {len(self._types)} arguments, got {len(args)}")
        sizes = [int(size) for size in grid] + [1] * (3 - len(grid))
        if len(sizes) != 3 or not 0 < math.prod(sizes) <= MAX_PROGRAMS:
            raise ValueError(f"grid {tuple(grid)}: one to three sizes, 1 to {MAX_PROGRAMS} programs")
        values = _memref(0) + _memref(0)  # the lock and the workspace: Linalg code uses neither
        for type_, arg in zip(self._types, args, strict=True):
            if type_.startswith("*"):
                values += _memref(arg.data_ptr())
            else:
                values.append(_SCALARS[type_](arg))
        values += [ctypes.c_int32(size) for size in sizes]
        for z in range(sizes[2]):
            for y in range(sizes[1]):
                for x in range(sizes[0]):
                    self._function(*values, *(ctypes.c_int32(index) for index in (x, y, z)))


def _memref(address: int) -> list[Any]:
    """A one-dimensional memref: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(1 << 40), ctypes.c_int64(1)]


def build(lowered: Lowered) -> NativeKernel:
    """Compile and load a lowered kernel (cached). Raises MissingTool or NativeBuildError."""
    function, directory = _build(lowered.linalg, lowered.name)
    return NativeKernel(function, lowered, directory)


@functools.lru_cache(maxsize=64)
def _build(linalg: str, name: str) -> tuple[Callable[..., None], Any]:
    mlir_opt, translate = find_tool("bishengir-opt"), find_llvm_tool("mlir-translate")
    opt, llc, gcc = (find_llvm_tool(tool) for tool in ("opt", "llc", "gcc"))
    source = re.sub(r', (mix_mode|parallel_mode)\s*=\s*"[^"]*"', "", linalg)
    buffers = _edit_buffers(_run([mlir_opt, "-", *_BUFFERIZE], source))
    llvm_dialect = _drop_ascend_attributes(_run([mlir_opt, "-", *_TO_LLVM], buffers))
    llvm_ir = _run([translate, "--mlir-to-llvmir", "-"], llvm_dialect)
    directory = tempfile.TemporaryDirectory(prefix="ascend-ln-fuse-")
    bitcode, kernel, shim, library = (
        str(Path(directory.name) / n) for n in ("k.bc", "k.o", "shim.c", "k.so")
    )
    Path(shim).write_text(_LIBDEVICE)
    triple = f"-mtriple={platform.machine()}-linux-gnu"
    _run([opt, *_OPTIMIZE, triple, "-", "-o", bitcode], llvm_ir)
    _run(
        [
            llc,
            "-O2",
            "-mcpu=native",
            "-relocation-model=pic",
            "-filetype=obj",
            bitcode,
            "-o",
            kernel,
        ]
    )
    _run([gcc, "-O2", "-shared", "-fPIC", "-o", library, kernel, shim, "-lm", "-Wl,--no-undefined"])
    function = getattr(ctypes.CDLL(library), name)
    function.restype = None
    return function, directory


def _run(command: list[str], text: str | None = None) -> str:
    """Standard output of a tool that is fed `text`."""
    run = subprocess.run(command, input=text, capture_output=True, text=True)
    if run.returncode != 0:
        raise NativeBuildError(f"{Path(command[0]).name}: {run.stderr.strip()[:1500]}")
    return run.stdout


def _edit_buffers(text: str) -> str:
    """Copies as loops (memref.copy wants a runtime library); marks for the Ascend compiler out."""
    text = re.sub(r"^\s*annotation\.mark.*$", "", text, flags=re.M)
    return re.sub(
        r"memref\.copy (%[\w#.]+), (%[\w#.]+) : (.+) to (memref<.+)$",
        r"linalg.copy ins(\1 : \3) outs(\2 : \4)",
        text,
        flags=re.M,
    )


def _drop_ascend_attributes(text: str) -> str:
    """mlir-translate of plain LLVM knows no hacc, hivm or tt attributes."""
    lines = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("module"):
            line = "module {"
        elif stripped.startswith("llvm.func"):
            has_body = stripped.endswith("{")
            head = re.sub(r" attributes \{.*\}\s*$", "", line.rstrip().removesuffix("{").rstrip())
            line = _without_braces(head) + (" {" if has_body else "")
        else:
            line = re.sub(r" \{(?:hivm|hacc|hfusion|tt|annotation)[\w.]*[^{}]*\}", "", line)
        lines.append(line)
    return "\n".join(lines)


def _without_braces(text: str) -> str:
    """The text outside of braces: a function's head without its parameters' attributes."""
    kept, depth = [], 0
    for character in text:
        depth += character == "{"
        if depth == 0:
            kept.append(character)
        depth -= character == "}"
    return "".join(kept)
