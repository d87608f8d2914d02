"""Small calls of a kernel, on tensors whose rows show what ordinary data hides.

In half precision a variance divided by D-1, or an eps ten times too large, changes ordinary rows by less
than they are rounded. It shows in rows whose variance is about eps or below, and a variance computed as
E[x^2] - mean^2 in rows whose mean is a thousand times their deviation. So the rows of every operand that
has rows of its own are of `row_kinds`, one after the other. Where no norm is in the kernel (an activation
behind a linear layer), they are of `value_kinds`: an activation goes wrong far from 0.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..layout import INT32_MAX, MAX_ROWS, Layout
from ..offline import Offline
from ..reference import TORCH_DTYPES
from ..region import NormRegion, Operand, Output
from ..values import ancestors
from .referee import with_exact_numbers

#: Distance of neighbouring values around 1024 in bf16, which has the fewest of all dtypes.
COARSEST_STEP = 8.0


@dataclass(frozen=True)
class RowKind:
    """Rows that are alike. make(generator, shape): fp32 values of such rows, one lane a row."""

    name: str
    make: Callable[[torch.Generator, Sequence[int]], torch.Tensor]


ORDINARY = RowKind("ordinary", lambda generator, shape: torch.randn(shape, generator=generator) + 1.0)


def row_kinds(eps: Sequence[float]) -> tuple[RowKind, ...]:
    """The kinds of rows for norms with these eps: ordinary ones first."""
    kinds = [ORDINARY]
    for value in dict.fromkeys(eps):
        # Where eps is 0 or absurd, rows of that size would say nothing, or not be finite.
        deviation = min(max(math.sqrt(abs(value)), 2.0**-40), 1.0) if math.isfinite(value) else 1.0
        kinds += [_scaled(f"variance of the size of eps ({value:g})", deviation),
                  _scaled(f"variance far below eps ({value:g})", deviation / 16)]
    return (*kinds,
            RowKind("mean far above deviation", _spikes),
            RowKind("equal values", lambda _, shape: torch.full(shape, 3.0)),
            RowKind("zeros", lambda _, shape: torch.zeros(shape)),
            _with("one NaN", float("nan")), _with("one infinity", float("inf")))


def value_kinds() -> tuple[RowKind, ...]:
    """The kinds of rows for a kernel without a norm."""
    return (ORDINARY, _scaled("values of some tens", 30.0), _scaled("values of some hundreds", 300.0),
            _scaled("small values", 2.0**-10), RowKind("zeros", lambda _, shape: torch.zeros(shape)),
            _with("one NaN", float("nan")), _with("one infinity", float("inf")),
            _with("one negative infinity", float("-inf")))


def _scaled(name: str, deviation: float) -> RowKind:
    return RowKind(name, lambda generator, shape: torch.randn(shape, generator=generator) * deviation)


def _with(name: str, value: float) -> RowKind:
    """Ordinary rows but for their last element. What is not finite must stay in its row."""
    def make(generator: torch.Generator, shape: Sequence[int]) -> torch.Tensor:
        rows = ORDINARY.make(generator, shape)
        rows[..., -1] = value
        return rows

    return RowKind(name, make)


def _spikes(generator: torch.Generator, shape: Sequence[int]) -> torch.Tensor:
    """A mean of 1024 to 2040 with 3 to 8 values one step higher, in numbers that every dtype has: at D of
    128 the mean is 500 times the deviation and more. Different numbers of steps, because sums of such
    numbers are exact in fp32 now and then, and then nothing shows."""
    outer = (*shape[:-1], 1)
    low = 1024 + COARSEST_STEP * torch.randint(0, 128, outer, generator=generator)
    places = torch.randint(0, shape[-1], (*shape[:-1], 8), generator=generator)
    count = torch.randint(3, 9, outer, generator=generator)
    places = torch.where(torch.arange(8) < count, places, places[..., :1])
    return low.expand(shape).scatter(-1, places, (low + COARSEST_STEP).expand(places.shape))


@dataclass(frozen=True)
class SmallCall:
    """A call of a kernel on tensors of its own making.

    region: the kernel's region over the kernel's own dims; what PyTorch computes on an accelerator.
    walk: how the kernel walks the tensors.
    inputs, scalars: for `reference(region, ...)`.  outputs: what the kernel is to write, NaN at first.
    arguments, grid: of the launch.  programs: those of the grid to run.
    kinds, axis: rows at index i of this dim are of kind i modulo their number; all where it is None
    are ordinary.
    """

    region: NormRegion
    walk: Layout
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    scalars: list[float]
    arguments: list
    grid: int
    programs: range
    kinds: tuple[RowKind, ...]
    axis: int | None


def small_call(offline: Offline, sizes: Sequence[int] | None = None,
               scalars: Sequence[float | None] | None = None, seed: int = 0) -> SmallCall:
    """A launch of the kernel on at least five tiles, the last of them ragged, and two of dims that are not
    along its rows. There are two programs, and the first has more tiles than the second: it uses each
    copy of a double buffer, and comes back to the first.

    sizes: of the kernel's dims, where these are not wanted.  scalars: of the model's call, None where
    they are known at run time only.  seed: of the numbers in the tensors.
    """
    numbers, axis = _numbers(offline.region, scalars), _axis(offline)
    kinds = row_kinds(_eps_of(offline.region, numbers)) if offline.region.norms else value_kinds()
    sizes = sizes or _sizes(offline, len(kinds), axis)
    return _call(offline, sizes, numbers, (ORDINARY,) if axis is None else kinds, axis, seed)


def edge_calls(offline: Offline, scalars: Sequence[float | None] | None = None,
               seed: int = 0) -> list[SmallCall]:
    """More small calls, where the rows of the tile are several: of so many rows that tiles divide them, and
    of fewer than a tile has. All rows are ordinary: a few of each kind would say little of how far off
    PyTorch is in them."""
    rows, structure = offline.kernel.tile.rows, offline.walk.structure
    sizes = [_addressed(offline, [n if d == structure.blocked else 2 for d in range(structure.dims)])
             for n in (2 * rows, rows // 2) if rows > 1]
    numbers = _numbers(offline.region, scalars)
    return [_call(offline, one, numbers, (ORDINARY,), None, seed) for one in sizes]


def _call(offline: Offline, sizes: Sequence[int], numbers: list[float], kinds: tuple[RowKind, ...],
          axis: int | None, seed: int) -> SmallCall:
    region, walk = offline.region, _small_walk(offline, sizes)
    generator = torch.Generator().manual_seed(seed)
    tensors = [_empty(walk, region, i) for i in range(len(walk.strides))]
    for i in range(len(region.inputs)):
        _fill(tensors[i], _values(tensors[i].shape, walk, i, generator, kinds, axis))
    rows, count = offline.kernel.tile.rows, len(region.inputs)
    tiles = walk.tiles(rows)
    share = tiles // 2 + 1  # tiles of a program
    grid = -(-tiles // share)
    return SmallCall(_referee(region, walk), walk, tensors[:count], tensors[count:], numbers,
                     [*tensors, *walk.arguments(rows), share, *numbers], grid, range(grid), kinds, axis)


def far_call(offline: Offline, scalars: Sequence[float | None] | None = None, seed: int = 0) -> SmallCall:
    """The last rows of a launch whose tensors are so large that their rows lie beyond 2^31 elements: the
    last program's share, a tile and a bit. Pages that nobody touches take no memory.

    Raises:
        OSError: the system has no addresses for it.
    """
    region, walk = offline.region, offline.walk
    structure, rows = walk.structure, offline.kernel.tile.rows
    blocked = structure.blocked
    # The longest distance between rows that the kernel was made for, in units of any operand.
    step = ((INT32_MAX - region.lane) // MAX_ROWS // 256 - 1) * 256
    first = -(-(INT32_MAX + 1) // (step * rows))  # tile
    sizes = [(first + 1) * rows + max(1, rows // 3) if d == blocked else 1 for d in range(structure.dims)]
    strides = tuple(tuple(step * moves for moves in x.moving) for x in structure.operands)
    far = Layout((*sizes, region.lane), tuple(sizes), strides, structure)
    start, numbers = first * rows, _numbers(region, scalars)
    generator = torch.Generator().manual_seed(seed)
    arguments, seen = [], []
    for i, operand in enumerate(structure.operands):
        whole = _sparse(far, region, i)
        # What the last program sees: the same tensor from its first row on.
        tail = whole
        if operand.moving[blocked]:
            dim = blocked - structure.dims - 1
            tail = whole.narrow(whole.dim() + dim, start, sizes[blocked] - start)
        _fill(tail, torch.randn(tail.shape, generator=generator) + 1.0 if i < len(region.inputs)
              else torch.tensor(float("nan")))
        arguments.append(whole)
        seen.append(tail)
    tiles, count = far.tiles(rows), len(region.inputs)
    # Program 0 has the tiles in front, program 1 the rest.
    integers = (*far.arguments(rows), first)
    if not first < tiles <= 2 * first:
        raise ValueError(f"{tiles} tiles where {first + 1} to {2 * first} were wanted")
    return SmallCall(_referee(region, far), far, seen[:count], seen[count:], numbers,
                     [*arguments, *integers, *numbers], 2, range(1, 2), (ORDINARY,), None)


# -- parts of a call


def _numbers(region: NormRegion, scalars: Sequence[float | None] | None) -> list[float]:
    """A number for each scalar of the region; small ones, as an eps is, where none is known."""
    given = [None] * len(region.scalars) if scalars is None else scalars
    return [1e-5 * (i + 1) if x is None else float(x) for i, x in enumerate(given)]


def _eps_of(region: NormRegion, numbers: Sequence[float]) -> list[float]:
    """The eps of the region's norms, as what is added to a variance, without those that a tensor holds."""
    known = dict(zip(region.scalars, numbers, strict=True))
    found = [(line.op, known.get(eps, eps) if isinstance(eps, str) else eps)
             for line in region.norms for eps in line.args[-1:]]
    return [_ON_VARIANCE.get(op, lambda eps, lane: eps)(eps, region.lane) for op, eps in found
            if isinstance(eps, (int, float))]


#: op that compares its eps with something else than a variance -> the variance where eps and that are equal
_ON_VARIANCE = {"l2_norm": lambda eps, lane: eps / lane, "normalize": lambda eps, lane: eps * eps / lane}


def _axis(offline: Offline) -> int | None:
    """The dim along which what is normalised (or, without a norm, any value) has rows of its own: the rows of
    a tile, if it can be."""
    region, structure = offline.region, offline.walk.structure
    ends = [line.args[0] for line in region.norms] or [out.value for out in region.outputs]
    above = ancestors(region, ends)
    rows = [x.moving for operand, x in zip(region.inputs, structure.operands)
            if x.lane and operand.name in above]
    outputs = structure.operands[len(region.inputs):]
    return next((d for d in (structure.blocked, *range(structure.dims))
                 if any(moving[d] for moving in rows) and all(x.moving[d] for x in outputs)), None)


def _sizes(offline: Offline, kinds: int, axis: int | None) -> list[int]:
    """Sizes of a small call: at least `kinds` rows along `axis`, and at least five tiles."""
    rows, structure = offline.kernel.tile.rows, offline.walk.structure
    # Two of another dim make six tiles of three.
    whole, ragged = 4 if structure.dims == 1 else 2, max(1, rows // 3)
    sizes = [2] * structure.dims
    if axis == structure.blocked:
        whole = max(whole, -(-(kinds - ragged) // rows))
    elif axis is not None:
        sizes[axis] = kinds
    sizes[structure.blocked] = rows * whole + ragged
    return _addressed(offline, sizes)


def _addressed(offline: Offline, sizes: Sequence[int]) -> list[int]:
    """The sizes, 1 where an output does not move: several elements of it cannot lie at one address."""
    outputs = offline.walk.structure.operands[len(offline.region.inputs):]
    return [n if all(x.moving[d] for x in outputs) else 1 for d, n in enumerate(sizes)]


def _small_walk(offline: Offline, sizes: Sequence[int]) -> Layout:
    """How the kernel walks tensors of these sizes that are far apart in memory."""
    walk = offline.walk
    structure, count = walk.structure, len(offline.region.inputs)
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


def _view(walk: Layout, region: NormRegion, i: int) -> tuple[list[int], tuple[int, ...], torch.dtype]:
    """(shape, strides, dtype) of an operand. A weight is a vector, as a norm wants it, and not a
    [1, ..., D]."""
    operand, steps = walk.structure.operands[i], walk.strides[i]
    shape = [n if moves else 1 for n, moves in zip(walk.sizes, operand.moving)] if any(operand.moving) else []
    shape.append(region.lane if operand.lane else 1)
    return shape, (*steps, 1)[-len(shape):], TORCH_DTYPES[(*region.inputs, *region.outputs)[i].dtype]


def _empty(walk: Layout, region: NormRegion, i: int) -> torch.Tensor:
    """An operand in a memory of its own that is NaN, gaps included, and ends where its last element ends."""
    shape, steps, dtype = _view(walk, region, i)
    return torch.full((_length(shape, steps),), float("nan"), dtype=dtype).as_strided(shape, steps)


def _sparse(walk: Layout, region: NormRegion, i: int) -> torch.Tensor:
    """The same in memory that takes room only where something is written."""
    shape, steps, dtype = _view(walk, region, i)
    length = _length(shape, steps)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, length * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, steps)


def _length(shape: Sequence[int], steps: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, steps))


def _fill(view: torch.Tensor, values: torch.Tensor) -> None:
    view.copy_(values.to(view.dtype))


def _values(shape: Sequence[int], walk: Layout, i: int, generator: torch.Generator,
            kinds: Sequence[RowKind], axis: int | None) -> torch.Tensor:
    """Values for an input: rows of all kinds where it has a row for every index along `axis`."""
    operand = walk.structure.operands[i]
    values = ORDINARY.make(generator, shape)
    if axis is None or not (operand.lane and operand.moving[axis]):
        return values
    for k, kind in enumerate(kinds[1:], 1):
        rows = values[(slice(None),) * axis + (slice(k, None, len(kinds)),)]
        rows.copy_(kind.make(generator, rows.shape))
    return values


def _referee(region: NormRegion, walk: Layout) -> NormRegion:
    """The region over the dims that its kernel walks (rows are alike, so the arithmetic is the same), for
    plain PyTorch on the CPU to give what it gives on an accelerator."""
    rank = len(walk.sizes) + 1
    inputs = tuple(
        Operand(x.name, x.dtype, (*(("*" if m else 1 for m in operand.moving) if any(operand.moving) else ()),
                                  region.lane if operand.lane else 1))
        for x, operand in zip(region.inputs, walk.structure.operands))
    outputs = tuple(Output(out.value, out.dtype, tuple(range(rank))) for out in region.outputs)
    return with_exact_numbers(replace(region, rank=rank, inputs=inputs, outputs=outputs))
