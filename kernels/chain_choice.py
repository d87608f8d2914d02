"""Which way a segment of a chain takes: measured once on the user's own tensors, and kept.

What was measured on this device with these versions is read from disk (store.py). An entry is only a
word and the text of block shapes: it counts only when both are among what would be measured now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from .compiling import CompileTimeout, settle
from .guard import _words, device_lost, out_of_memory
from .layout import Unsupported
from .measure import device_microseconds, host_microseconds, machine, may_measure
from .store import Store

LIBRARY, ONE_KERNEL = "library", "one kernel"

#: A kernel must beat the library by this factor: below it, the difference is noise.
MARGIN = 1.02

#: Seconds that one segment may take on a first call: to wait for its kernels' compiler, all together, and to
#: measure them. What is left then is not tried.
COMPILE_SECONDS, MEASURE_SECONDS = 4.0, 0.3

_store = Store("chains")


@dataclass(frozen=True)
class Choice:
    """What was chosen for a segment and why.

    Attributes:
        way: LIBRARY or ONE_KERNEL.
        config: the kernel's block shapes.
        times: way or block shapes -> measured device time in microseconds; empty where nothing was
            measured.
        reason: why nothing was measured, or what became of the kernels that were not.
        final: False where the next call should ask again.
        lasting: False where other processes should measure again: something failed that may work there.
    """

    way: str
    config: object = None
    times: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    final: bool = True
    lasting: bool = True

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in self.times.items())
        words = "; ".join(filter(None, (times, self.reason)))
        return f"{self.way} ({words})" if words else self.way


@dataclass(frozen=True)
class Question:
    """A segment on live tensors.

    Attributes:
        text: the segment's.
        device: where the tensors are.
        rows: their number, rounded up to a power of two.
        by_library, by_kernel: run it; return its results. `by_kernel` takes block shapes, and raises where
            there is no kernel with them.
        unsupported: why there is no kernel, or None.
        configs: the block shapes worth measuring.
        begin: begin to compile the kernel with these block shapes in the background; raises as `by_kernel`.
    """

    text: str
    device: torch.device
    rows: int
    by_library: Callable[[], Sequence[torch.Tensor]]
    by_kernel: Callable[[object], Sequence[torch.Tensor]]
    unsupported: str | None
    configs: Callable[[], Sequence[object]]
    begin: Callable[[object], None] = lambda config: None


def choose(question: Question) -> Choice:
    """The fastest way, measured, or as it was measured before."""
    if question.unsupported is not None:
        return Choice(LIBRARY, reason=question.unsupported)
    configs = question.configs()
    key = _key(question.text, question.device, question.rows)
    known = _stored(key, configs)
    if known is not None:
        return known
    if not may_measure(question.device):
        return Choice(LIBRARY, reason="nothing can be measured here, or not during graph capture",
                      final=False)
    try:
        choice = _measured(question, configs)
    except Exception as error:
        if not out_of_memory(error):
            raise
        choice = Choice(LIBRARY, reason="out of memory while the ways were measured", lasting=False)
    if not choice.lasting:
        _release(question.device)  # not sooner: an exception's frames hold tensors
        return choice
    _store.put(key, {"way": choice.way, "config": str(choice.config), "reason": choice.reason[:500],
                     "times": {name: round(us, 2) for name, us in choice.times.items()}})
    return choice


def worth_compiling(text: str, device: torch.device, rows: int,
                    configs: Sequence[object]) -> Sequence[object]:
    """Those of `configs` whose kernels a Question with this text will want: the one that was chosen before,
    or all."""
    known = _stored(_key(text, device, rows), configs)
    if known is None:
        return configs if may_measure(device) else ()
    return () if known.config is None else (known.config,)


def _measured(question: Question, configs: Sequence[object]) -> Choice:
    """The fastest of the ways that run and give the library's results. A kernel that fails in any way is
    dropped; what the library raises is raised."""
    times: dict[str, float] = {}
    dropped: list[str] = []
    lasting = True

    def drop(config: object, error: Exception) -> None:
        nonlocal lasting
        if device_lost(error):
            raise error
        lasting = lasting and isinstance(error, Unsupported)
        dropped.append(f"{config}: {_reason(error)}")

    for config in configs:
        with suppress(Exception):  # `by_kernel` fails in the same way
            question.begin(config)
    with torch.no_grad():
        wanted = question.by_library()
        settle(COMPILE_SECONDS)  # compilers that run beside it would slow the host down
        times[LIBRARY] = best = device_microseconds(question.by_library, question.device)
        way, chosen = LIBRARY, None
        compiling, measuring = _Budget(COMPILE_SECONDS), _Budget(MEASURE_SECONDS)
        for number, config in enumerate(configs):
            if spent := "compiling" if compiling.over else "measuring" if measuring.over else "":
                dropped.append(f"{len(configs) - number} more not tried: {spent} the others took too long")
                lasting = lasting and not compiling.over  # another process finds them compiled
                break
            by_kernel = partial(question.by_kernel, config)
            try:
                with compiling:
                    right = agree(by_kernel(), wanted)
                if not right:
                    dropped.append(f"{config}: other results than the library")
                    continue
                with measuring:
                    us = times[str(config)] = device_microseconds(by_kernel, question.device)
            except CompileTimeout as error:
                drop(config, error)
                dropped.append("no other kernel was tried")  # one is enough to wait for
                break
            except Exception as error:
                drop(config, error)
                continue
            if us * (MARGIN if way == LIBRARY else 1) < best:
                way, chosen, best = ONE_KERNEL, config, us
        # Called plainly, so few rows are as fast as the host launches them: there too it must be no loss.
        if way == ONE_KERNEL:
            library = host_microseconds(question.by_library, question.device)
            try:
                host = host_microseconds(partial(question.by_kernel, chosen), question.device)
            except Exception as error:
                drop(chosen, error)
                way, chosen = LIBRARY, None
            else:
                if max(host, best) > max(library, times[LIBRARY]):
                    way, chosen = LIBRARY, None
                    dropped.append(f"the kernel keeps the host busy for {host:.1f} us, "
                                   f"the library {library:.1f}")
    return Choice(way, chosen, times, "; ".join(dropped), lasting=lasting)


class _Budget:
    """Seconds that may be spent inside of its contexts, all together."""

    def __init__(self, seconds: float):
        self.left = seconds

    @property
    def over(self) -> bool:
        return self.left <= 0

    def __enter__(self) -> None:
        self.left += time.monotonic()

    def __exit__(self, *error) -> None:
        self.left -= time.monotonic()


def _reason(error: Exception) -> str:
    """Why a kernel was dropped, in a line."""
    known = isinstance(error, (Unsupported, CompileTimeout, torch.OutOfMemoryError))
    return str(error) if known else _words(error)


def _release(device: torch.device) -> None:
    """Give back what measuring has reserved."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def agree(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether two ways gave the same results up to how they round: the norm of the difference is within
    one rounding step of the norm of the result, and NaN and infinities stand in the same places."""
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            return False
        a, b = (t.float().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
        if (a - b).norm() > torch.finfo(found[0].dtype).eps * b.norm():
            return False
    return True


def _stored(key: str, configs: Sequence[object]) -> Choice | None:
    entry = _store.get(key)
    if entry is None:
        return None
    way, text, times, reason = (entry.get(name) for name in ("way", "config", "times", "reason"))
    config = {str(c): c for c in configs}.get(text) if isinstance(text, str) else None
    if way not in (LIBRARY, ONE_KERNEL) or (way == ONE_KERNEL and config is None) or \
            not isinstance(times, dict) or not isinstance(reason, str) or \
            not all(isinstance(us, (int, float)) for us in times.values()):
        return None
    return Choice(way, config, times, reason)


def _key(text: str, device: torch.device, rows: int) -> str:
    return "\n".join((machine(device), f"rows {rows}", text))
