"""What stands between a new kernel and a model: a `Guard` is the plan of a kernel that is not trusted yet.

It compiles the kernel within a time limit, launches it, and compares the results of the first call with the
reference. A kernel that fails any of this is replaced by the reference from then on, for its region and on
its device; the call in hand gets the reference's results. One that passes takes the guard's place among the
runner's plans: later calls cost what they would without a guard.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from . import reproduction
from .compiling import CompileTimeout
from .layout import Unsupported
from .self_check import Finding, compare
from .settings import strict

if TYPE_CHECKING:
    from .launch import Runner

#: How many calls that tell nothing are compared before a kernel is trusted for want of better ones: a model
#: may never see others (a weight or a gate of zeros), and each comparison waits for the device.
MAX_TRIALS = 8

#: What a device says when a kernel broke it: every later operation fails, the fallback as well.
_LOST = re.compile(
    r"illegal (memory access|instruction|address)|misaligned address|unspecified launch failure|"
    r"device-side assert|hardware stack error|invalid program counter|uncorrectable|"
    r"launch timed out and was terminated|context is destroyed|aicore (exception|error|timeout)|"
    r"vector core (exception|timeout)", re.IGNORECASE)

#: What the CPU's allocator says, which has no exception of its own.
_CPU_MEMORY = re.compile(r"can't allocate memory|not enough memory")


class SelfCheckError(RuntimeError):
    """A kernel's results are outside the bound, and the user wants to hear of it by an exception."""


def device_lost(error: BaseException) -> bool:
    """Whether `error` tells of a device that will run nothing more for this process."""
    return bool(_LOST.search(str(error)))


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(_CPU_MEMORY.search(str(error)))


class Guard:
    """The plan of a kernel on trial; called as any plan is."""

    def __init__(self, runner: Runner, key: tuple, kernel):
        """`kernel`: the plan on trial, which `runner` keeps under `key`."""
        self.runner, self.key, self.kernel = runner, key, kernel
        self.mode, self.record = runner.self_check, runner.record
        self.trials = 0

    def __call__(self, inputs, pointers, scalars, outputs=None):
        kernel, capturing = self.kernel, self.kernel.capturing()
        due = self.mode != "off" and not capturing
        before = inputs
        stage = "does not compile"
        try:
            kernel.prepare(pointers, scalars, outputs)
            self.record.overdue(None)
            stage = "cannot be launched"
            if due and outputs is not None:
                before = self.kept(inputs, outputs)
                due = before is not None
            results = kernel(inputs, pointers, scalars, outputs)
        except (Unsupported, ImportError) as why:
            plan = self.runner.declined(str(why))
            self.settle(plan)
        except CompileTimeout as why:
            plan = self.late(why)
        except Exception as error:
            if out_of_memory(error) or device_lost(error):
                raise
            plan = self.failed(error, stage, capturing)
        else:
            finding = self.check(before, scalars, results) if due else None
            if finding is None or finding.within:
                if not capturing and self.mode != "always" and self.told(finding):
                    self.settle(kernel)
                return results
            for x, kept in zip(inputs, before):
                if kept is not x:
                    x.copy_(kept)
            plan = self.wrong(finding, inputs, scalars)
        return plan(inputs, pointers, scalars, outputs)

    def told(self, finding: Finding | None) -> bool:
        """Whether the trial is over: there is something to go by, or no use in waiting for it."""
        if finding is None or finding.tells:
            return True
        self.trials += 1
        if self.trials < MAX_TRIALS:
            return False
        self.record.not_checked(f"what a norm does, which the values of {MAX_TRIALS} calls hide")
        return True

    def settle(self, plan: Callable) -> None:
        """`plan` takes the guard's place."""
        self.runner.replace(self.key, self, plan)

    def kept(self, inputs: Sequence[torch.Tensor],
             outputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """`inputs` as they are before the kernel writes over some; None where memory does not allow it."""
        written = {x.untyped_storage().data_ptr() for x in outputs}
        try:
            return [x.clone() if x.untyped_storage().data_ptr() in written else x for x in inputs]
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.record.not_checked("out of memory")
            return None

    def check(self, inputs, scalars, results) -> Finding | None:
        """What the comparison finds; None, with a note, where it could not be made."""
        try:
            finding = self.compare(inputs, scalars, results)
        except Exception as error:
            if device_lost(error):
                raise
            if out_of_memory(error):
                self.record.not_checked("out of memory")
            elif strict():
                raise
            else:
                self.record.not_checked(_words(error))
            return None
        self.record.checked(finding)
        return finding

    def compare(self, inputs, scalars, results) -> Finding:
        """The kernel's results of a call against the reference."""
        return compare(self.runner.region, inputs, scalars, results, self.kernel.source.tile.rows)

    def reproduce(self, inputs, scalars, finding: Finding, where: str) -> str:
        """Write the file that makes the comparison again; its path, or why there is none."""
        return reproduction.write(self.runner.region.text, inputs, scalars, finding, where)

    def wrong(self, finding: Finding, inputs, scalars) -> Callable:
        """The plan in the place of a kernel that is outside the bound."""
        device, where = self.kernel.device, self.record.where()
        path = self.reproduce(inputs, scalars, finding, where)
        message = (f"the kernel of {where} is wrong on {device}: {finding}. "
                   f"A file that reproduces it: {path}")
        if self.raises():
            raise SelfCheckError(f"ascend_ln_fuse: {message}. The region:\n{self.runner.region.text}")
        return self.reject(f"the self-check failed: {finding}", message)

    def failed(self, error: Exception, how: str, capturing: bool) -> Callable:
        """The plan in the place of a kernel that raised `error`."""
        if self.raises():
            raise error
        if capturing:  # what fails inside a graph capture may work outside
            return self.runner.reference_plan
        why = f"{how}: {_words(error)}"
        return self.reject(f"the kernel {why}",
                           f"on {self.kernel.device}, the kernel of {self.record.where()} {why}")

    def reject(self, reason: str, message: str) -> Callable:
        """The reference, for good. Says so once."""
        if self.runner.reject(self.kernel.device, reason):
            warnings.warn(f"ascend_ln_fuse: {message}. PyTorch runs instead from now on. The region:\n"
                          f"{self.runner.region.text}", RuntimeWarning, stacklevel=4)
        return self.runner.reference_plan

    def late(self, why: CompileTimeout) -> Callable:
        """The plan of a call for which the compiler is not done. The guard stays, and takes the kernel at
        the first call after it has come."""
        if self.raises():
            raise why
        if self.record.overdue(str(why)):
            warnings.warn(f"ascend_ln_fuse: {self.record.where()}: {why}. PyTorch runs until it is done.",
                          RuntimeWarning, stacklevel=4)
        return self.runner.reference_plan

    def raises(self) -> bool:
        """Whether failures raise instead of falling back."""
        return self.mode == "raise" or strict()


def _words(error: Exception) -> str:
    """An error in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
