"""Where the normalised dim may lie in memory: innermost, or across.

Of a contiguous NCHW tensor that is normalised over C, neighbouring pixels are neighbours in memory, and
channels lie a stride apart. A GPU reads that as fast as rows of channels, if enough pixels lie side by side:
the threads of a warp then take neighbouring pixels (kernels/layout.py).
"""

from __future__ import annotations

import torch

from .graph import hint, same
from .rules import rules_of

#: Devices whose compilers want the lane innermost in memory.
INNERMOST = frozenset({"npu"})

#: Bytes that must lie side by side at each lane element: a sector, the least that a GPU's memory moves. Of
#: shorter runs it would move more than is read, where the copy that eager makes moves it once.
LEAST_RUN_BYTES = 32

#: How `why_not` begins.
NOT_INNERMOST = "the normalised dim is not the innermost in memory"

#: The longest lane across: beyond it no tile of such runs fits registers, and what lies above the norm would
#: be read, and computed, once more for every pass over the lane.
MAX_ACROSS = 2048


def lies_across(fake: torch.Tensor, axis: int = -1) -> bool:
    """Whether dim `axis` is no innermost dim, but one that kernels for the fake's device walk all the same,
    reading or writing. Decided by the sizes seen here: at others it is slower at worst."""
    lane, stride = hint(fake.shape[axis]), hint(fake.stride(axis))
    if rules_of(fake.device) in INNERMOST or not 1 < lane <= MAX_ACROSS or stride in (0, 1):
        return False
    return _run(fake, axis) * fake.element_size() >= LEAST_RUN_BYTES


def walks(fake: torch.Tensor, axis: int = -1) -> bool:
    """Whether kernels for the fake's device walk dim `axis` as a lane where it lies."""
    return any(same(fake.stride(axis), step) for step in (0, 1)) or lies_across(fake, axis)


def why_not(fake: torch.Tensor, axis: int = -1) -> str:
    """Why kernels for the fake's device do not walk dim `axis`, where `walks` says that they do not."""
    if rules_of(fake.device) in INNERMOST:
        why = "Ascend's compiler wants it there"
    elif hint(fake.stride(axis)) in (0, 1):
        why = "its stride varies"
    elif hint(fake.shape[axis]) > MAX_ACROSS:
        why = f"it is longer than {MAX_ACROSS}"
    else:
        why = "too few rows lie side by side"
    return f"{NOT_INNERMOST} ({why})"


def _run(fake: torch.Tensor, axis: int) -> int:
    """How many rows lie side by side in memory."""
    run, lane = 1, axis % fake.dim()
    dims = [(hint(fake.stride(d)), hint(fake.shape[d])) for d in range(fake.dim()) if d != lane]
    for stride, size in sorted(dims):
        if size > 1 and stride > 0:
            if stride != run:
                break
            run *= size
    return run
