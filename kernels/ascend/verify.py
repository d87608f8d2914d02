"""A kernel's final module, run by the interpreter on a small ragged call and held against PyTorch.

The kernel is the one that a model launches: same source, same tile, same final module. Only the call is
small: sizes are run-time arguments, so a few tiles, the last of them ragged, show what every tile does.
Tensors lie in storages that end where they end, rows far apart, so that any access outside is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..launch import Offline, launch_facts
from ..layout import Layout
from ..reference import TORCH_DTYPES, reference
from ..region import NormRegion, Operand, Output, parse
from ..targets.npu import describe
from .counters import Counters
from .interpreter import interpret
from .toolchain import Planned

#: Programs of a small launch: few enough that one of them works off several tiles.
PROGRAMS = 3


@dataclass(frozen=True)
class SmallCall:
    """A call of a kernel on tensors of its own making.

    region: the kernel's region over the kernel's own dims; the same arithmetic.
    inputs, scalars: for `reference(region, ...)`.  outputs: what the kernel is to write, NaN at first.
    arguments, grid: of the launch.
    """

    region: NormRegion
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    scalars: list[float]
    arguments: list
    grid: int


@dataclass(frozen=True)
class Verified:
    """What a small call gave.

    share: largest error against float64, as a share of what is allowed: twice the error of plain
      PyTorch, plus one unit in the last place of the output's dtype. At most 1 is right.
    read, written: bytes moved between global memory and the core, exact.
    ideal_read, ideal_written: each element of each tensor once; parameters once a program.
    """

    share: float
    read: int
    written: int
    ideal_read: int
    ideal_written: int

    @property
    def right(self) -> bool:
        return self.share <= 1


def verify(offline: Offline, planned: Planned, sizes: Sequence[int] | None = None,
           ratio: float = 1.0) -> Verified:
    """Run `planned`, the compiled form of `offline`, on a small call. A2 and A3 only.

    sizes: of the kernel's dims, where the default's are not wanted.  ratio: mean over standard deviation
    of the inputs.

    Raises:
        InterpreterError: an access outside of a tensor, a read of what nobody wrote, a deadlock.
    """
    call = small_call(offline, planned.soc, sizes, ratio)
    counters = interpret(planned, None, call.arguments, (call.grid,))
    share = max(map(_share, call.outputs, reference(call.region, call.inputs, call.scalars),
                    _exact(call.region, call.inputs, call.scalars)))
    read, written = ideal_bytes(replace(offline, walk=_small_walk(offline, sizes)), call.grid)
    return Verified(share, *_moved(counters), read, written)


def small_call(offline: Offline, soc: str, sizes: Sequence[int] | None = None,
               ratio: float = 1.0) -> SmallCall:
    """A launch of the kernel on random tensors: two tiles and a bit along its rows, two of other dims."""
    region, walk = offline.region, _small_walk(offline, sizes)
    structure, count = walk.structure, len(region.inputs)
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for i, (steps, operand) in enumerate(zip(walk.strides, structure.operands)):
        # A weight is a vector, as a norm wants it, and not a [1, ..., D].
        shape = [n if moves else 1 for n, moves in zip(walk.sizes, operand.moving)] \
            if any(operand.moving) else []
        shape.append(region.lane if operand.lane else 1)
        steps = (*steps, 1)[-len(shape):]
        dtype = TORCH_DTYPES[(*region.inputs, *region.outputs)[i].dtype]
        length = 1 + sum((n - 1) * s for n, s in zip(shape, steps))
        if i < count:
            memory = (torch.randn(length, generator=generator) + ratio).to(dtype)
        else:
            memory = torch.full((length,), float("nan"), dtype=dtype)
        tensors.append(memory.as_strided(shape, steps))
    scalars = [1e-5 * (i + 1) for i in range(len(region.scalars))]
    integers, grid = launch_facts(walk, offline.kernel.tile.rows, replace(describe(soc), cores=PROGRAMS))
    return SmallCall(_over_kernel_dims(region, walk), tensors[:count], tensors[count:], scalars,
                     [*tensors, *integers, *scalars], grid)


def ideal_bytes(offline: Offline, programs: int) -> tuple[int, int]:
    """(read, written) bytes of the call that `offline` walks, at the least: every element of a tensor
    once; what is the same for all rows once for each of the `programs`."""
    region, walk = offline.region, offline.walk
    used = {a for line in region.body for a in line.args} | {out.value for out in region.outputs}
    moved = [0, 0]
    for i, (x, operand) in enumerate(zip((*region.inputs, *region.outputs), walk.structure.operands)):
        is_output = i >= len(region.inputs)
        if not is_output and x.name not in used:
            continue
        elements = region.lane if operand.lane else 1
        for size, moves in zip(walk.sizes, operand.moving):
            elements *= size if moves else 1
        times = 1 if is_output or any(operand.moving) else programs
        moved[is_output] += times * elements * TORCH_DTYPES[x.dtype].itemsize
    return moved[0], moved[1]


def _small_walk(offline: Offline, sizes: Sequence[int] | None = None) -> Layout:
    walk, rows = offline.walk, offline.kernel.tile.rows
    structure, count = walk.structure, len(offline.region.inputs)
    if sizes is None:
        sizes = [rows * 2 + max(1, rows // 3) if d == structure.blocked else 2
                 for d in range(structure.dims)]
        # Several elements of an output cannot lie at one address.
        sizes = [n if all(x.moving[d] for x in structure.operands[count:]) else 1
                 for d, n in enumerate(sizes)]
    strides = []
    for i, (steps, operand) in enumerate(zip(walk.strides, structure.operands)):
        # Dims keep their order in memory. Rows of inputs lie three apart, as q does in a packed qkv.
        lane = offline.region.lane if operand.lane else 1
        step = lane * (3 if i < count else 1)
        found = [0] * structure.dims
        for d in sorted(range(structure.dims), key=lambda d: steps[d]):
            if operand.moving[d]:
                found[d] = step
                step *= sizes[d]
        strides.append(tuple(found))
    return Layout((*sizes, offline.region.lane), tuple(sizes), tuple(strides), structure)


def _over_kernel_dims(region: NormRegion, walk: Layout) -> NormRegion:
    """The region over the dims that its kernel walks: rows are alike, so the arithmetic is the same."""
    rank = len(walk.sizes) + 1
    inputs = tuple(
        Operand(x.name, x.dtype, (*(("*" if m else 1 for m in operand.moving) if any(operand.moving) else ()),
                                  region.lane if operand.lane else 1))
        for x, operand in zip(region.inputs, walk.structure.operands))
    outputs = tuple(Output(out.value, out.dtype, tuple(range(rank))) for out in region.outputs)
    return NormRegion(region.lane, rank, inputs, region.scalars, region.body, outputs)


def _exact(region: NormRegion, inputs, scalars) -> tuple[torch.Tensor, ...]:
    wide = parse(re.sub(r"\b(bf16|f16|f32)\b", "f64", region.text))
    return reference(wide, [x.double() for x in inputs], scalars)


def _share(ours: torch.Tensor, low: torch.Tensor, true: torch.Tensor) -> float:
    """The error of `ours` as a share of what is allowed; infinite where it is not finite and `low` is."""
    finite = low.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    info = torch.finfo(ours.dtype)
    ours, low, true = (t[finite].double() for t in (ours, low, true))
    magnitude = true.abs().clamp(min=info.smallest_normal)
    ulp = torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps
    allowed = 2 * (low - true).abs().max() + ulp
    return ((ours - true).abs() / allowed).max().item()


def _moved(counters: Counters) -> tuple[int, int]:
    read = sum(n for path, n in counters.bytes.items() if path.startswith("GM->"))
    written = sum(n for path, n in counters.bytes.items() if path.endswith("->GM"))
    return read, written
