"""What is compared: each column is a way to run a model."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

EAGER, OURS, OURS_INDUCTOR = "eager", "ours", "ours-inductor"
COMPILE, AUTOTUNE = "compile", "autotune"


@dataclass(frozen=True)
class Column:
    """`options`: the arguments of `torch.compile`; None: the model as it is. `slow`: compiled last, when the
    others have been measured. `replays`: it owns its results only until its next call. `forms`: how many of a
    graph it compiles, to keep the fastest."""

    title: str
    options: Mapping[str, Any] | None
    slow: bool = False
    replays: bool = False
    forms: int = 1


def _ours(inner: str) -> dict[str, Any]:
    return {"backend": "ascend_ln_fuse", "options": {"report": "off", "inner": inner}}


COLUMNS: dict[str, Column] = {
    EAGER: Column("eager", None),
    COMPILE: Column("torch.compile", {}),
    OURS: Column("ours", _ours("eager")),
    OURS_INDUCTOR: Column("ours, inductor", _ours("inductor"), forms=3),
    "graphs": Column("reduce-overhead", {"mode": "reduce-overhead"}, replays=True),
    # What mode="reduce-overhead" means here; torch.compile takes no options beside a mode.
    "ours-graphs": Column("ours, cudagraphs", _ours("cudagraphs"), replays=True),
    AUTOTUNE: Column("max-autotune", {"mode": "max-autotune-no-cudagraphs"}, slow=True),
}
DEFAULT = (EAGER, COMPILE, OURS, OURS_INDUCTOR, AUTOTUNE)
#: On a CPU nothing is timed, and Inductor would only build C++.
ON_CPU = (EAGER, OURS)

Call = Callable[[], Any]


def contender(column: Column, model: nn.Module, inputs: Mapping[str, Any]) -> Call:
    """A call of the model in the column's way; what `torch.compile` compiles comes at its first run."""
    if column.options is None:
        return lambda: model(**inputs)
    compiled = torch.compile(separate(model), **column.options)
    if not column.replays:
        return lambda: compiled(**inputs)

    def replay():
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(**inputs)

    return replay


def separate(model: nn.Module) -> Callable:
    """A function that calls `model`, with a code object of its own (`separate_function`)."""
    def forward(**inputs):
        return model(**inputs)

    return separate_function(forward)


def separate_function(call: Callable) -> Callable:
    """A copy of a function with a code object of its own: Dynamo keeps what it compiled by code object, and
    no contender shall meet the guards, or the limit of recompilations, of another."""
    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__,
                              call.__closure__)


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Caches of Inductor and Triton that start empty, so that no column finds another's kernels on disk. The
    files stay until `temporary_caches` ends: code may still be loaded from them."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=os.environ[_FOLDER], delete=False):
        yield


_FOLDER = "BENCHMARK_CACHES"


@contextlib.contextmanager
def temporary_caches() -> Iterator[None]:
    """Every cache on disk in a new folder, our own too, for the time of this context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        given = {_FOLDER: folder, "ASCEND_LN_FUSE_CACHE_DIR": f"{folder}/ours",
                 "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class OutOfTime(BaseException):
    """The time of `time_limit` is over. No Exception: who tries a form of a graph and takes another when it
    fails must not catch this."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread, which this must be, when that time is over; 0: no limit."""
    if not seconds:
        yield
        return

    def over(signum, frame):
        raise OutOfTime(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    others = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def first_call(call: Call, device: torch.device) -> tuple[float, Any]:
    """Seconds of a call until its results are there, and the results."""
    synchronize(device)
    started = time.perf_counter()
    output = call()
    synchronize(device)
    return time.perf_counter() - started, output


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
