"""The official Ascend compilers, run offline: Triton kernel -> Linalg -> final HIVM module.

Two steps, both plain functions:

* `lower` runs triton-ascend's front end and its `triton-adapter-opt`: TTIR and Linalg texts.
* `compile_planned` runs `bishengir-compile` on the Linalg text. The result holds the module as it
  is after memory planning, synchronisation and the cube/vector split, bytes used per memory, and
  an `Outcome` that says what became of the kernel.

`plan` does both and turns every failure into an `Outcome`.

No NPU and no CANN are needed. The closed last stage, `hivmc`, only receives the finished module;
a stub that does nothing takes its place, so that the exit code of `bishengir-compile` means
"everything before hivmc went well". Nothing here measures, or predicts, a time on hardware.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..parsing import parsing
from .mlir import MlirError, Module, Op, is_memref, memref_type, read_module
from .tools import (
    MissingTool,
    Outcome,
    ToolchainError,
    compiler_environment,
    find_tool,
    require_triton_ascend,
)

DEFAULT_SOC = "Ascend910B3"
DEFAULT_TIMEOUT_S = 300.0

# The module printed in front of this pass is "the final HIVM module": memory is planned, flags are
# set, cube and vector code are apart, and what follows only turns each op into a library call.
FINAL_PASS = "convert-hivm-to-std"


@dataclasses.dataclass(frozen=True)
class Overflow:
    """The last overflow that the compiler reported. Sizes are in bits, as it prints them."""

    space: str  # "ub" (Unified Buffer), "cbuf" (L1) or "cc" (L0C)
    bits_needed: int
    bits_available: int

    def __str__(self) -> str:
        return (
            f"{self.space} overflow: {self.bits_needed} bits ({self.bits_needed // 8} bytes) "
            f"needed, {self.bits_available} bits ({self.bits_available // 8} bytes) available"
        )


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A kernel after triton-ascend. `mix_mode` is "aiv" (vector), "aic" (cube) or "mix"."""

    name: str
    ttir: str
    linalg: str
    mix_mode: str
    soc: str
    signature: Mapping[str, str] = dataclasses.field(hash=False)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A kernel after bishengir-compile.

    name: the kernel's name.   soc: the target.   outcome, message: what happened, for a person.
    text: the final HIVM module (A2 and A3), or "" (A5, or no module was made).
    peak_bytes: highest byte used per space, e.g. {"ub": 137024}.
    double_buffered: the final module switches between two copies of at least one buffer.
    overflow: set when outcome is OVERFLOW, and the first, failed try's when it is DEGRADED on A5.
    """

    name: str
    soc: str
    outcome: Outcome
    message: str
    text: str = ""
    peak_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    double_buffered: bool = False
    overflow: Overflow | None = None

    @property
    def ok(self) -> bool:
        """The compiler made a module, with or without double buffering."""
        return self.outcome in (Outcome.PASSED, Outcome.DEGRADED)

    def require(self) -> Planned:
        """Itself if `ok`, else a ToolchainError with the compiler's message."""
        if not self.ok:
            raise ToolchainError(self.outcome, f"{self.name} for {self.soc}: {self.message}")
        return self


# ---------------------------------------------------------------------------------------- targets

# Every SoC that the compilers know, as they spell it, per generation. A2 and A3 plan memory alike.
GENERATIONS: dict[str, tuple[str, ...]] = {
    "A2": tuple(f"Ascend910B{end}" for end in "1 2 2C 3 4 4-1".split()),
    "A3": tuple(f"Ascend910_{end}" for end in "9362 9372 9381 9382 9391 9392".split()),
    "A5": (
        *(f"Ascend910_{end}" for end in "950z 9579 957b 957d 9581 9589 958a 958b 9599".split()),
        *(
            f"Ascend950PR_{end}"
            for end in "950z 9579 957a 957b 957c 957d 9589 958a 958b 958c 958d 9599 959a 959b".split()
        ),
        *(
            f"Ascend950DT_{end}"
            for end in (
                "950x 950y 9571 9572 9573 9574 9575 9576 9577 9578 9581 9582 9583 9584 9585 9586 9587 9588 "
                "9591 9592 9595 9596 95A1 95A2"
            ).split()
        ),
    ),
}
# For callers that care about the generation only.
ALIASES = {
    "A2": DEFAULT_SOC,
    "A3": "Ascend910_9382",
    "910_93xx": "Ascend910_9382",
    "A5": "Ascend950PR_9589",
    "950PR": "Ascend950PR_9589",
}


def resolve_soc(soc: str) -> str:
    """The compiler's name of a SoC, however it is capitalised; accepts `ALIASES`. ValueError lists what is
    known."""
    names = [name for names in GENERATIONS.values() for name in names]
    written = {name.lower(): name for name in (*names, *ALIASES)}
    soc = written.get(soc.lower(), soc)
    soc = ALIASES.get(soc, soc)
    if soc not in names:
        known = [
            textwrap.fill(f"{name}: {', '.join(names)}", 78, initial_indent="  ", subsequent_indent="      ")
            for name, names in GENERATIONS.items()
        ]
        raise ValueError("\n".join([f"unknown SoC {soc!r}. Known are {', '.join(ALIASES)}, and", *known]))
    return soc


def generation(soc: str) -> str:
    """ "A2", "A3" or "A5"."""
    soc = resolve_soc(soc)
    return next(g for g, names in GENERATIONS.items() if soc in names)


# ------------------------------------------------------------------------------------------ lower


def lower(
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    soc: str = DEFAULT_SOC,
    **options: Any,
) -> Lowered:
    """Lower a `triton.jit` function to TTIR and Linalg for a SoC.

    signature: types of the run-time parameters, {"x_ptr": "*bf16", "n": "i32", "eps": "fp32"}.
    constants: values of the constexpr parameters, if it has any.
    options: of triton-ascend, such as enable_nd2nz_on_vector; an unknown one raises KeyError.

    The function's source must be readable by `inspect`: a file, or text registered in `linecache`.
    Raises MissingTool, or ToolchainError with outcome UNSUPPORTED (refused) or CRASH.
    """
    soc = resolve_soc(soc)
    require_triton_ascend()
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.compiler.errors import CompilationError

    name = fn.fn.__name__
    target = GPUTarget("npu", soc, 0)
    backend = make_backend(target)
    parsed = backend.parse_options({"compile_on_910_95": generation(soc) == "A5", **options})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed)
    metadata = {"target": target, **parsed.__dict__}
    try:
        source = ASTSource(fn=fn, signature=dict(signature), constants=dict(constants or {}))
        generators = backend.get_codegen_implementation()
        module = parsing(lambda: source.make_ir(parsed, generators, {}, context))
        module = stages["ttir"](module, metadata)
        ttir = str(module)
        linalg = stages["ttadapter"](module, metadata)
    except CompilationError as error:
        raise ToolchainError(Outcome.UNSUPPORTED, f"{name}: Triton front end: {error}") from error
    except subprocess.CalledProcessError as error:
        stderr = (error.stderr or b"").decode(errors="replace")
        crashed = error.returncode < 0  # ended by a signal: an assertion or a segmentation fault
        detail = f"ended by {signal.Signals(-error.returncode).name}" if crashed else _first_error(stderr)
        outcome = Outcome.CRASH if crashed else Outcome.UNSUPPORTED
        raise ToolchainError(outcome, f"{name}: triton-adapter-opt: {detail}") from error
    mix_mode = re.search(r'mix_mode\s*=\s*"([^"]+)"', linalg)
    return Lowered(name, ttir, linalg, mix_mode.group(1) if mix_mode else "aiv", soc, dict(signature))


def _first_error(text: str) -> str:
    """The first line with 'error:', or the end of the text."""
    lines = [line.strip() for line in text.splitlines() if "error:" in line]
    return lines[0] if lines else text.strip()[-500:] or "no message"


# ---------------------------------------------------------------------------------------- compile

_OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits")
_DROPPED = re.compile(r"\[NOTE\].*set enable-auto-multi-buffer to false.*")
_A5_ALLOCATED = re.compile(r"Allocated (\w+) size = (\d+) bits")
_DUMP = re.compile(r"^// -----// IR Dump .*?//----- //$", re.M)


def compile_planned(
    lowered: Lowered,
    soc: str | None = None,
    multibuffer: bool = True,
    timeout: float = DEFAULT_TIMEOUT_S,
    extra: tuple[str, ...] = (),
) -> Planned:
    """Compile a lowered kernel up to its final HIVM module. Never raises for a bad kernel.

    soc: the target, the one it was lowered for when None. A2 and A3 share their Linalg; an A5
    target wants a kernel lowered for A5 (ValueError otherwise).
    multibuffer: ask for double buffering. timeout: seconds, per run of the compiler.
    extra: more options for bishengir-compile.
    """
    soc = resolve_soc(soc or lowered.soc)
    is_a5 = generation(soc) == "A5"
    if is_a5 != (generation(lowered.soc) == "A5"):
        raise ValueError(f"{lowered.name} was lowered for {lowered.soc}; lower it again for {soc}")
    try:
        planned = _compile_once(lowered, soc, multibuffer, timeout, extra)
        if is_a5 and multibuffer and planned.outcome is Outcome.OVERFLOW:
            # The A2/A3 compiler drops double buffering by itself, the A5 compiler does not.
            retried = _compile_once(lowered, soc, False, timeout, extra)
            if retried.ok:
                message = f"passes without double buffering only; with it: {planned.message}"
                return dataclasses.replace(
                    retried, outcome=Outcome.DEGRADED, message=message, overflow=planned.overflow
                )
        return planned
    except MissingTool as error:
        return Planned(lowered.name, soc, Outcome.MISSING_TOOL, error.message)


def _compile_once(
    lowered: Lowered, soc: str, multibuffer: bool, timeout: float, extra: tuple[str, ...]
) -> Planned:
    """One run of bishengir-compile in a directory of its own."""
    is_a5 = generation(soc) == "A5"
    result = functools.partial(Planned, lowered.name, soc)
    tool = find_tool("bishengir-compile-a5" if is_a5 else "bishengir-compile")
    with tempfile.TemporaryDirectory(prefix="ascend-ln-fuse-") as directory:
        source = Path(directory) / "kernel.mlir"
        # The attribute is triton-ascend's own; bishengir-compile refuses it.
        source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", lowered.linalg))
        command = [
            tool,
            str(source),
            "-o",
            str(Path(directory) / "kernel.o"),
            f"--target={soc}",
            f"--enable-auto-multi-buffer={multibuffer}",
            "--enable-auto-bind-sub-block=True",
            "--enable-hfusion-compile=true",
            "--enable-triton-kernel-compile=true",
            "--mlir-disable-threading",
        ]
        if is_a5:
            command += ["--enable-print-memory-allocated-size"]
        else:
            command += [
                "--enable-hivm-compile=true",
                "--mlir-print-ir-module-scope",
                f"--mlir-print-ir-before={FINAL_PASS}",
            ]
        try:
            run = subprocess.run(
                [*command, *extra],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=compiler_environment(),
                cwd=directory,
            )
        except subprocess.TimeoutExpired:
            return result(Outcome.TIMEOUT, f"no result after {timeout:g} s")
    output = run.stdout + run.stderr
    if run.returncode != 0:
        return _failure(result, run.returncode, output)
    if is_a5:
        peaks: dict[str, int] = {}
        for space, bits in _A5_ALLOCATED.findall(output):
            peaks[space.lower()] = max(peaks.get(space.lower(), 0), int(bits) // 8)
        # This compiler prints no final HIVM; it honours the option or overflows.
        return result(Outcome.PASSED, "passed", "", peaks, multibuffer)
    text = _last_module(output)
    if not text:
        return result(Outcome.CRASH, f"exit code 0 but no module was printed before {FINAL_PASS}")
    try:
        module = read_module(text)
    except MlirError as error:
        return result(Outcome.CRASH, str(error))
    peaks, double_buffered = peak_bytes(module), bool(double_buffers(module))
    if dropped := _DROPPED.findall(output):  # a note per retry; the last says how it ended
        return result(Outcome.DEGRADED, dropped[-1].strip(), text, peaks, double_buffered)
    return result(Outcome.PASSED, "passed", text, peaks, double_buffered)


def _failure(result: Any, returncode: int, output: str) -> Planned:
    """The outcome of a run that failed. Earlier tries report too: the last overflow counts."""
    overflows = _OVERFLOW.findall(output)
    if returncode < 0:
        return result(Outcome.CRASH, f"bishengir-compile ended by {signal.Signals(-returncode).name}")
    if overflows:
        space, needed, available = overflows[-1]
        overflow = Overflow(space, int(needed), int(available))
        return result(Outcome.OVERFLOW, str(overflow), overflow=overflow)
    return result(Outcome.CRASH, f"exit code {returncode}: {_first_error(output)}")


def _last_module(output: str) -> str:
    """The last printed module: retries print one each. Notes may follow it."""
    *_, tail = _DUMP.split(output)
    end = [match.end() for match in re.finditer(r"^}\n", tail, re.M)]
    return tail[: end[-1]].strip() + "\n" if end and "module" in tail else ""


def peak_bytes(module: Module) -> dict[str, int]:
    """Highest byte that the plan uses in each on-chip memory, over all functions."""
    peaks: dict[str, int] = {}
    for func in module.device_funcs:
        for op in func.op.walk():
            if op.name != "hivm.hir.pointer_cast":
                continue
            type_ = memref_type(op.result.type)
            for address in op.segments()[0]:
                if address.producer is not None and address.producer.name == "arith.constant":
                    end = int(address.producer.properties["value"].split()[0]) + type_.bytes
                    peaks[type_.space] = max(peaks.get(type_.space, 0), end)
    return peaks


def double_buffers(module: Module) -> list[Op]:
    """The ops that choose between the two copies of a double-buffered buffer."""
    return [
        op
        for func in module.device_funcs
        for op in func.op.walk()
        if op.name == "arith.select" and is_memref(op.result.type)
    ]


def plan(
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    soc: str = DEFAULT_SOC,
    multibuffer: bool = True,
    timeout: float = DEFAULT_TIMEOUT_S,
    **options: Any,
) -> Planned:
    """`lower`, then `compile_planned`; every failure is an outcome, none an exception."""
    try:
        return compile_planned(lower(fn, signature, constants, soc, **options), soc, multibuffer, timeout)
    except ToolchainError as error:
        return Planned(fn.fn.__name__, resolve_soc(soc), error.outcome, error.message)
