"""What is asked about a segment of a chain, and what the answer is (chain_choice.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

LIBRARY, ACTIVATED, ONE_KERNEL = "library", "library with the activation in the product", "one kernel"


class Way(NamedTuple):
    """How a segment runs: LIBRARY, ACTIVATED, or ONE_KERNEL with its block shapes."""

    word: str
    config: object = None

    def __str__(self) -> str:
        return self.word if self.config is None else f"{self.word} [{self.config}]"

    @property
    def name(self) -> str:
        """What its times are kept under."""
        return self.word if self.config is None else str(self.config)


@dataclass(frozen=True)
class Choice:
    """What was chosen for a segment and why.

    Attributes:
        way, config: taken by plain calls: LIBRARY, ACTIVATED or ONE_KERNEL, and the kernel's block shapes.
        times: name of a way -> measured device time in microseconds; empty where nothing was measured.
        reason: why nothing was measured, or what became of the ways that were not.
        final: False where the next call should ask again.
        lasting: False where other processes should measure again: something failed that may work there.
        host_times: name of a way -> microseconds that a call keeps the host busy, where that could decide.
        in_graph: taken while a CUDA graph is captured, where that is another way.
    """

    way: str
    config: object = None
    times: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    final: bool = True
    lasting: bool = True
    host_times: dict[str, float] = field(default_factory=dict)
    in_graph: Way | None = None

    @property
    def plain(self) -> Way:
        """Taken by plain calls."""
        return Way(self.way, self.config)

    @property
    def captured(self) -> Way:
        """Taken while a CUDA graph is captured."""
        return self.in_graph or self.plain

    def __str__(self) -> str:
        taken = str(self.plain)
        if self.captured != self.plain:
            taken += f"; in a CUDA graph {self.captured}"
        times = ", ".join(f"{name} {us:.1f} us" + (f" and {self.host_times[name]:.1f} us of the host"
                                                   if name in self.host_times else "")
                          for name, us in self.times.items())
        words = "; ".join(filter(None, (times, self.reason)))
        return f"{taken} ({words})" if words else taken


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
        unsplit: block shapes without a second launch, worth measuring where launching takes longer than
            the fastest kernel.
        by_activated: run it with the activation in the product; None where there is no such way.
        within_bound: whether results of `by_activated` are within the error bound; may be asked of a sample.
    """

    text: str
    device: torch.device
    rows: int
    by_library: Callable[[], Sequence[torch.Tensor]]
    by_kernel: Callable[[object], Sequence[torch.Tensor]]
    unsupported: str | None
    configs: Callable[[], Sequence[object]]
    begin: Callable[[object], None] = lambda config: None
    unsplit: Callable[[], Sequence[object]] = tuple
    by_activated: Callable[[], Sequence[torch.Tensor]] | None = None
    within_bound: Callable[[Sequence[torch.Tensor]], bool] = lambda found: True
