"""What the official compiler makes of every kernel that a model would launch.

`check_calls` takes the calls of a model, finds the distinct kernels behind them and compiles each; where
the compiler runs out of memory on a tile it takes the next, as a launch would. It says for each kernel
what memory it uses, what it moves, whether double buffering stayed on and whether the module is clean;
with `verify` also whether the module computes right.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ..call import Call
from ..layout import Unsupported
from ..offline import Offline
from ..targets.npu import describe
from .interpreter import InterpreterError
from .lint import errors, lint
from .op_table import UnknownOp
from .toolchain import Planned, compile_planned, generation, lower
from .tools import MissingTool, Outcome, ToolchainError, find_tool, require_triton_ascend
from .traffic import ideal_bytes, launch_bytes, source_bytes
from .verify import Verified, verify

#: Of a call: see call.Call.
Scalars = tuple[float | None, ...] | None

# Lowering runs in this process, in a library that makes no promise about threads.
_LOWERING = threading.Lock()


@dataclass(frozen=True)
class Evidence:
    """One distinct kernel for one SoC.

    kernel: its name; "" where there is none (`reason` says why, the reference runs instead).
    calls: how many calls of the model launch it.  tile: block shape.
    refused: tiles that were tried first and did not fit, with the compiler's message.
    outcome: of the compiler; None where there is no kernel.
    ub_bytes, ub_limit: of the Unified Buffer, used and there.  double_buffered: loads overlap compute.
    bytes_moved: between global memory and the core in all calls, from the final module, a ragged tile
      counted as a full one; from the kernel's source for A5, whose compiler prints no module.
    bytes_ideal: every tensor once.
    findings: of the lint, errors only.  verified: of the small run, if there was one.
    unverified: that run was asked for and says nothing.
    reason: why the verdict is not "ok", for a person.
    """

    kernel: str
    calls: int
    tile: str = ""
    refused: tuple[str, ...] = ()
    outcome: Outcome | None = None
    ub_bytes: int = 0
    ub_limit: int = 0
    double_buffered: bool = False
    bytes_moved: int | None = None
    bytes_ideal: int = 0
    findings: tuple[str, ...] = ()
    verified: Verified | None = None
    unverified: bool = False
    reason: str = ""

    @property
    def compiles(self) -> bool:
        """The compiler made a module; also where there is no kernel to compile."""
        return self.outcome in (None, Outcome.PASSED, Outcome.DEGRADED)

    @property
    def wrong(self) -> bool:
        """The module is known to be miscompiled, or computed something else than PyTorch."""
        return bool(self.findings) or (self.verified is not None and not self.verified.right)

    @property
    def verdict(self) -> str:
        if self.outcome is None:
            return "no kernel"
        if not self.compiles:
            return self.outcome.value
        if self.wrong:
            return "wrong code"
        if self.unverified:
            return "not verified"
        return "ok" if self.double_buffered else "degraded"

    @property
    def failed(self) -> bool:
        """It does not compile, it is wrong, or the run that was asked for did not end."""
        return self.verdict not in ("ok", "degraded", "no kernel")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        run = self.verified
        return {
            "kernel": self.kernel, "verdict": self.verdict, "reason": self.reason, "calls": self.calls,
            "tile": self.tile, "refused": list(self.refused),
            "outcome": self.outcome.value if self.outcome else None, "ub_bytes": self.ub_bytes,
            "ub_limit": self.ub_limit, "double_buffered": self.double_buffered,
            "bytes_moved": self.bytes_moved, "bytes_ideal": self.bytes_ideal,
            "findings": list(self.findings),
            # JSON has no infinity: null, and `reason` says why.
            "error_share": run.share if run and math.isfinite(run.share) else None,
            "flips_share": run.flips if run and math.isfinite(run.flips) else None,
        }


@dataclass
class _Job:
    """A kernel and every call that launches it.

    scalars: the different ones that these calls give it.
    """

    call: Call
    kernel: str
    reason: str = ""
    launches: list[Offline] = field(default_factory=list)
    scalars: list[Scalars] = field(default_factory=list)


def check_calls(calls: Sequence[Call], soc: str, run: bool = False, jobs: int = 1,
                progress: Callable[[int, int], None] = lambda done, total: None) -> list[Evidence]:
    """Evidence for each distinct kernel behind `calls`, in the order of the calls.

    soc: as the compiler spells it (toolchain.resolve_soc).  run: also run each module on a small call
    (A2 and A3).  jobs: compilations at a time.  progress: called with (kernels done, kernels in all).

    Raises:
        MissingTool: a compiler is not installed.
    """
    require_triton_ascend()  # before the first kernel is written, which imports Triton
    find_tool("bishengir-compile")
    work = _distinct(calls, soc)
    done = 0
    progress(0, len(work))

    def one(job: _Job) -> Evidence:
        nonlocal done
        found = _check(job, soc, run)
        with _LOWERING:
            done += 1
            progress(done, len(work))
        return found

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        results = list(pool.map(one, work))
    for result in results:
        if result.outcome is Outcome.MISSING_TOOL:
            raise MissingTool(result.reason)
    return results


def _distinct(calls: Sequence[Call], soc: str) -> list[_Job]:
    """One job a kernel; calls without a kernel are one job a reason, calls without elements none."""
    jobs: dict[str, _Job] = {}
    for call in calls:
        try:
            launch = next(call.candidates(soc), None)
        except Unsupported as why:
            job = jobs.setdefault(f"?{why}", _Job(call, "", str(why)))
            job.launches.append(None)
            continue
        if launch is not None:
            job = jobs.setdefault(launch.kernel.name, _Job(call, launch.kernel.name))
            job.launches.append(launch)
            if call.scalars not in job.scalars:
                job.scalars.append(call.scalars)
    return list(jobs.values())


def _check(job: _Job, soc: str, run: bool) -> Evidence:
    found = Evidence(job.kernel, len(job.launches), ub_limit=describe(soc).budget, reason=job.reason)
    if not job.kernel:
        return found
    refused: list[str] = []
    for offline in job.call.candidates(soc):
        planned = compile_kernel(offline, soc)
        # A launch goes on to the next tile also where a smaller demand (no double buffering) would fit.
        if planned.overflow is None:
            break
        refused.append(f"{offline.kernel.tile}: {planned.overflow}")
    if refused and planned.ok and planned.overflow is not None:
        refused.pop()  # the last tile, which does run so
    launches = [launch if not refused else replace(offline, walk=launch.walk) for launch in job.launches]
    found = replace(
        found, tile=str(offline.kernel.tile), refused=tuple(refused), outcome=planned.outcome,
        kernel=offline.kernel.name, ub_bytes=planned.peak_bytes.get("ub", 0),
        double_buffered=planned.double_buffered and planned.outcome is Outcome.PASSED,
        bytes_ideal=sum(sum(ideal_bytes(x, x.grid)) for x in launches), reason=_shortcoming(planned))
    if not planned.ok:
        return found
    if not planned.text:  # A5: the compiler prints no final module
        return replace(found, bytes_moved=sum(map(source_bytes, launches)))
    problems = tuple(map(str, errors(lint(planned))))
    moved = [launch_bytes(x, planned) for x in launches]
    found = replace(found, findings=problems, reason=_joined(found.reason, *problems),
                    bytes_moved=None if None in moved else sum(moved))
    return _run(found, offline, planned, job.scalars) if run else found


def _shortcoming(planned: Planned) -> str:
    """Why a kernel does not compile, or what it lost."""
    if planned.outcome is Outcome.DEGRADED:
        return f"{planned.outcome.value}: {planned.message}"
    if planned.outcome is not Outcome.PASSED:
        return planned.message
    return "" if planned.double_buffered else "the compiler keeps no buffer twice"


def _run(found: Evidence, offline: Offline, planned: Planned, scalars: Iterable[Scalars]) -> Evidence:
    """With what a run gives for each of the scalars; it ends with the first that is not right."""
    for numbers in scalars:
        try:
            verified = verify(offline, planned, scalars=numbers)
        except UnknownOp as error:  # the interpreter's limit, not the kernel's fault
            return replace(found, unverified=True,
                           reason=_joined(found.reason, f"the interpreter cannot run it: {error}"))
        except InterpreterError as error:
            verified = Verified.broken(f"{type(error).__name__}: {error}")
        if verified.problem:
            return replace(found, verified=verified, reason=_joined(found.reason, verified.problem))
        if verified.blank:
            why = f"PyTorch's own result is nowhere finite: {verified.blank}"
            return replace(found, unverified=True, reason=_joined(found.reason, why))
        if found.verified is None or verified.share > found.verified.share:
            found = replace(found, verified=verified)
    return found


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def compile_kernel(offline: Offline, soc: str) -> Planned:
    """Lower and compile; every failure is an outcome."""
    try:
        with _LOWERING:
            lowered = lower(offline.function(), offline.signature, soc=soc)
        return compile_planned(lowered, soc)
    except ToolchainError as error:
        return Planned(offline.kernel.name, soc, error.outcome, error.message)


def can_run(soc: str) -> bool:
    """Whether the interpreter knows the SoC's generation."""
    return generation(soc) != "A5"
