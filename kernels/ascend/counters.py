"""What a launch moved and did: exact counts, no times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Sums over all program instances of a launch.

    bytes: moved per path: "GM->UB", "UB->GM", "UB->UB", "GM->L1", "L0C->GM", and "GM->scalar" /
      "scalar->GM" for element-wise accesses of the scalar unit.
    ops: executed HIVM ops per short name ("vadd", "load", "pipe_barrier", ...).
    vector_ops, vector_elements: vector instructions, and the elements that they wrote (read, for
      a reduction).
    vector_barriers: waits of the vector pipe for itself (PIPE_V).
    macs: multiply-adds of the cube.
    peak_bytes: highest byte used per on-chip memory.
    """

    bytes: Counter = field(default_factory=Counter)
    ops: Counter = field(default_factory=Counter)
    vector_ops: int = 0
    vector_elements: int = 0
    vector_barriers: int = 0
    macs: int = 0
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def gm_to_ub(self) -> int:
        """Bytes read from global memory into the Unified Buffer."""
        return self.bytes["GM->UB"]

    @property
    def ub_to_gm(self) -> int:
        """Bytes written from the Unified Buffer to global memory."""
        return self.bytes["UB->GM"]

    def __add__(self, other: Counters) -> Counters:
        """The counts of one launch after the other."""
        spaces = {*self.peak_bytes, *other.peak_bytes}
        return Counters(
            self.bytes + other.bytes,
            self.ops + other.ops,
            self.vector_ops + other.vector_ops,
            self.vector_elements + other.vector_elements,
            self.vector_barriers + other.vector_barriers,
            self.macs + other.macs,
            {space: max(self.peak_bytes.get(space, 0), other.peak_bytes.get(space, 0)) for space in spaces},
        )
