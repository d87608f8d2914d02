"""Which way a segment of a chain takes: measured once on the user's own tensors, and kept.

What was measured on this device with these versions is read from disk (store.py). An entry is only a
word and the text of block shapes: it counts only when both are among what would be measured now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch

from .layout import Unsupported
from .measure import device_microseconds, host_microseconds, may_measure
from .store import Store

LIBRARY, ONE_KERNEL = "library", "one kernel"

#: A kernel must beat the library by this factor: below it, the difference is noise.
MARGIN = 1.02

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
    """

    way: str
    config: object = None
    times: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    final: bool = True

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in self.times.items())
        return self.way + (f" ({times})" if times else f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Question:
    """A segment on live tensors.

    Attributes:
        text: the segment's.
        device: where the tensors are.
        rows: their number, rounded up to a power of two.
        by_library, by_kernel: run it; return its results. `by_kernel` takes block shapes.
        unsupported: why there is no kernel, or None.
        configs: the block shapes worth measuring.
    """

    text: str
    device: torch.device
    rows: int
    by_library: Callable[[], Sequence[torch.Tensor]]
    by_kernel: Callable[[object], Sequence[torch.Tensor]]
    unsupported: str | None
    configs: Callable[[], Sequence[object]]


def choose(question: Question) -> Choice:
    """The fastest way, measured, or as it was measured before."""
    if question.unsupported is not None:
        return Choice(LIBRARY, reason=question.unsupported)
    configs = question.configs()
    key = _key(question)
    known = _stored(key, configs)
    if known is not None:
        return known
    if not may_measure(question.device):
        return Choice(LIBRARY, reason="nothing can be measured here, or not during graph capture",
                      final=False)
    choice = _measured(question, configs)
    _store.put(key, {"way": choice.way, "config": str(choice.config), "reason": choice.reason[:500],
                     "times": {name: round(us, 2) for name, us in choice.times.items()}})
    return choice


def _measured(question: Question, configs: Sequence[object]) -> Choice:
    times: dict[str, float] = {}
    dropped: list[str] = []
    with torch.no_grad():
        wanted = question.by_library()
        times[LIBRARY] = best = device_microseconds(question.by_library, question.device)
        way, chosen = LIBRARY, None
        for config in configs:
            try:
                if not agree(question.by_kernel(config), wanted):
                    dropped.append(f"{config}: other results than the library")
                    continue
                us = device_microseconds(partial(question.by_kernel, config), question.device)
                times[str(config)] = us
            except (Unsupported, torch.OutOfMemoryError) as why:
                dropped.append(f"{config}: {why}")
                continue
            if us * (MARGIN if way == LIBRARY else 1) < best:
                way, chosen, best = ONE_KERNEL, config, us
        # Called plainly, so few rows are as fast as the host launches them: there too it must be no loss.
        if way == ONE_KERNEL:
            host, library = (host_microseconds(call, question.device) for call in
                             (partial(question.by_kernel, chosen), question.by_library))
            if max(host, best) > max(library, times[LIBRARY]):
                way, chosen = LIBRARY, None
                dropped.append(f"the kernel keeps the host busy for {host:.1f} us, the library {library:.1f}")
    return Choice(way, chosen, times, "; ".join(dropped))


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


def _key(question: Question) -> str:
    return "\n".join((_device(question.device), f"rows {question.rows}", question.text))


@lru_cache(maxsize=64)
def _device(device: torch.device) -> str:
    """The device and the versions that times depend on."""
    from importlib.metadata import version

    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(device)
        words = [f"{properties.name}, {properties.multi_processor_count} cores", *words,
                 f"CUDA {torch.version.cuda}, triton {triton.__version__}"]
    return ", ".join((*words, f"ascend-ln-fuse {version('ascend-ln-fuse')}"))
