"""From a region and actual shapes and strides to the loop nest of its kernel.

The space of a region is outer dims x lane. A `Layout` says how a kernel walks the outer dims: dims of
size 1 are dropped, dims that lie behind one another in every operand and output are merged, the rest is
sorted by stride. One dim is *blocked*: the rows of a tile run along it, so that a tile is a
`[rows, D]` piece of every operand. The others are decoded from the tile's index with scalar arithmetic.

As a rule the lane is innermost in memory. In a contiguous NCHW tensor that is normalised over C it lies
*across*: lane elements are a stride apart, and it is the rows that are neighbours. Then rows run along
memory, and neighbouring threads of a GPU read neighbouring rows. Where neither are neighbours there is no
kernel: it would be slower than the copy that the reference makes.

The sizes and strides are run-time arguments of the kernel. What the generated source depends on, and
what therefore keys a kernel, is the layout's `Structure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from .region import DTYPES, NormRegion, broadcast_sizes, dense_strides

#: Outer dims a kernel can have after merging. More would only cost scalar arithmetic, but no model
#: that we know needs them.
MAX_DIMS = 4

#: Bytes of the widest memory access (CUDA); strides that are multiples of it keep accesses aligned.
VECTOR_BYTES = 16

#: Rows of the largest tile that any target uses: bounds the offsets inside a tile.
MAX_ROWS = 1024

INT32_MAX = 2**31 - 1

#: Programs along the second and the third axis of a CUDA grid; along the first, 2^31 - 1.
MAX_AXIS = 65535


class Unsupported(Exception):
    """No kernel serves this region or layout; the message is the reason shown to the user."""


@dataclass(frozen=True)
class OperandStructure:
    """What the source of a kernel knows of one operand.

    Attributes:
        moving: per outer dim, whether the operand's stride is not 0.
        lane: whether it has a value per lane element, or one for all (lane stride 0). An operand that all
            heads read (`NormRegion.is_shared`) has one per element of a head.
        unit: power of two, in elements, that divides every stride that is passed, and D where the lane is
            innermost; strides are passed in units, so that the compiler can prove alignments.
        across: the lane has another stride than 1, which is passed.
        adjacent: the stride along the blocked dim is the literal 1 and is not passed; said only where the
            lane of some operand lies across.
        dense: the rows of a tile lie one behind the other: that stride is the lane's length, and not passed.
    """

    moving: tuple[bool, ...]
    lane: bool
    unit: int
    across: bool = False
    adjacent: bool = False
    dense: bool = False

    def passed(self, blocked: int) -> tuple[int, ...]:
        """The outer dims whose strides are arguments of a kernel with these rows."""
        known = self.adjacent or self.dense
        return tuple(d for d, m in enumerate(self.moving) if m and not (known and d == blocked))


@dataclass(frozen=True)
class Structure:
    """The part of a layout that a kernel's source depends on.

    Attributes:
        dims: number of outer dims, 1 to MAX_DIMS, outermost first.
        blocked: which of them the rows of a tile run along.
        operands: inputs, then outputs, in the region's order.
        wide: offsets from row to row of a tile may exceed 32 bits, so a tile must have one row.
        grain: power of two that divides the number of rows, which is passed in grains; 1 where no lane lies
            across. (A vector of rows is masked as a whole only where the compiler sees that.)
        axes: a GPU's grid may have an axis for each of the last two dims, and one for all others.
        narrow: offsets of tiles, in units, fit 32 bits.
    """

    dims: int
    blocked: int
    operands: tuple[OperandStructure, ...]
    wide: bool
    grain: int = 1
    axes: bool = False
    narrow: bool = False

    @property
    def across(self) -> bool:
        """Whether the lane of an operand lies across."""
        return any(operand.across for operand in self.operands)

    def __str__(self) -> str:
        def word(operand: OperandStructure) -> str:
            strides = ["s" if m else "0" for m in operand.moving]
            if operand.adjacent or operand.dense:
                strides[self.blocked] = "D" if operand.dense else "1"
            strides.append("s" if operand.across else "1" if operand.lane else "0")
            return f"({', '.join(strides)})/{operand.unit}"

        names = " ".join(word(x) for x in self.operands)
        rows = f"rows along dim {self.blocked}" + (f", in {self.grain}s" if self.grain > 1 else "")
        dims = f"{self.dims} outer dims" + ", an axis each" * self.axes
        return f"{dims}, {rows}; strides/unit {names}"


@dataclass(frozen=True)
class Layout:
    """How a kernel walks one call's tensors.

    Attributes:
        space: sizes of the region's space, before merging (the shape of the outputs).
        sizes: sizes of the kernel's outer dims, outermost first; never empty.
        strides: per operand (inputs, then outputs), elements, one per kernel dim.
        structure: see `Structure`.
        lanes: of each operand whose lane lies across, in order, its lane stride in elements.
    """

    space: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    structure: Structure
    lanes: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Size of the blocked dim."""
        return self.sizes[self.structure.blocked]

    def tiles(self, rows: int) -> int:
        """Number of tiles of `rows` rows; Unsupported beyond 32 bits."""
        others = prod(self.sizes) // max(self.rows, 1)
        count = others * -(-self.rows // rows)
        if count > INT32_MAX:
            raise Unsupported(f"{count} tiles are more than a 32-bit index can count")
        return count

    def grid(self, rows: int) -> tuple[int, int, int]:
        """A GPU's grid of programs with a tile of `rows` rows each; Unsupported beyond 32 bits."""
        count = self.tiles(rows)
        if not self.structure.axes:
            return count, 1, 1
        counts = list(self.sizes)
        counts[self.structure.blocked] = -(-self.rows // rows)
        return counts[-1], counts[-2], prod(counts[:-2])

    def arguments(self, rows: int) -> tuple[int, ...]:
        """The kernel's integer arguments: strides in units where they are passed, lane strides where they
        are not 1, sizes, tile count."""
        blocked, lanes = self.structure.blocked, iter(self.lanes)
        values = []
        for operand, strides in zip(self.structure.operands, self.strides):
            values += [strides[d] // operand.unit for d in operand.passed(blocked)]
            if operand.across:
                values.append(next(lanes) // operand.unit)
        sizes = list(self.sizes)
        sizes[blocked] //= self.structure.grain
        return (*values, *sizes, self.tiles(rows))


def layout(region: NormRegion, shapes: Sequence[Sequence[int]],
           strides: Sequence[Sequence[int]], units: bool = True,
           out_strides: Sequence[Sequence[int]] | None = None) -> Layout:
    """The layout of a call of `region` on inputs of `shapes` and `strides` (in elements).

    `units` False passes all strides, in elements and 64 bits (targets on which neither alignment nor a few
    scalars decide anything), and has no axes.
    `out_strides` are those of outputs that exist already; by default they are dense, as declared.

    Raises:
        ValueError: the shapes do not fit the region; names the operand.
        Unsupported: no kernel walks these strides.
    """
    space = broadcast_sizes(region, shapes)
    rows = []
    for operand, shape, stride in zip(region.inputs, shapes, strides, strict=True):
        rows.append(_padded(region, operand, shape, stride, space))
    if out_strides is None:
        out_strides = [dense_strides(space, out.order) for out in region.outputs]
    for stride in out_strides:
        rows.append([*(s if n > 1 else 0 for s, n in zip(stride[:-1], space)),
                     stride[-1] if region.lane > 1 else 1])
    lanes = [row[-1] for row in rows]
    lengths = [region.head if region.is_shared(x) else region.lane for x in region.inputs]
    lengths += [region.lane] * len(region.outputs)
    dims = [[space[d], [row[d] for row in rows]] for d in range(region.outer) if space[d] != 1]
    dims = _sorted(_merged(dims), lanes)
    if not dims:
        # One row: as if it stood among others, so that it is read, and reduced, as it would be there.
        whole = [region.rank > 1 and len(x.dims) == region.rank and 1 not in x.dims[:-1]
                 for x in region.inputs] + [region.rank > 1] * len(region.outputs)
        dims = [[1, [length * (w and bool(lane)) for w, lane, length in zip(whole, lanes, lengths)]]]
    if len(dims) > MAX_DIMS:
        raise Unsupported(f"{len(dims)} outer dims are left after merging, at most {MAX_DIMS} are served")
    sizes = tuple(size for size, _ in dims)
    if max(sizes) > INT32_MAX or region.lane > INT32_MAX:
        raise Unsupported("a dim of more than 2^31 elements")
    by_operand = tuple(tuple(column[i] for _, column in dims) for i in range(len(rows)))
    across = [lane not in (0, 1) for lane in lanes]
    if region.heads > 1 and any(across):
        raise Unsupported("a lane of heads that lies across memory")
    blocked = _blocked(sizes, by_operand, across)
    _check_neighbours(region, lanes, [column[blocked] for column in by_operand])
    dtypes = [x.dtype for x in region.inputs] + [x.dtype for x in region.outputs]
    operands = []
    for column, lane, apart, length, dtype in zip(by_operand, lanes, across, lengths, dtypes):
        adjacent = any(across) and column[blocked] == 1
        passed = [s for d, s in enumerate(column) if not (adjacent and d == blocked)]
        unit = _unit((lane if apart else length, *passed), DTYPES[dtype]) if units else 1
        dense = units and lane == 1 and column[blocked] == length
        moving = tuple(s != 0 for s in column)
        operands.append(OperandStructure(moving, bool(lane), unit, apart, adjacent, dense))
    # Where a lane lies across, its offsets take 64 bits (codegen).
    reach = max(column[blocked] for column in by_operand) * MAX_ROWS + region.lane
    grain = gcd(VECTOR_BYTES // 2, sizes[blocked]) if units and any(across) else 1
    axes = units and len(sizes) > 1 and max(sizes[-2], prod(sizes[:-2])) <= MAX_AXIS
    # Rows of 64-bit products are a chain that a small kernel waits for: LayerNorm at D 64, 1 MB: 2.42 us
    # without it and 2.52 with it.
    narrow = units and not any(across) and all(
        sum((n - 1) * s for n, s in zip(sizes, column)) // operand.unit <= INT32_MAX
        for column, operand in zip(by_operand, operands))
    structure = Structure(len(sizes), blocked, tuple(operands), reach > INT32_MAX, grain, axes, narrow)
    return Layout(space, sizes, by_operand, structure,
                  tuple(lane for lane, apart in zip(lanes, across) if apart))


def _padded(region, operand, shape, stride, space) -> list[int]:
    """Strides of one input over the whole space, 0 where it is broadcast; the lane's comes last."""
    if len(shape) != len(operand.dims):
        raise ValueError(f"{operand}: got a tensor of {len(shape)} dims, shape {tuple(shape)}")
    shift = region.rank - len(operand.dims)
    row = [0] * region.rank
    for i, (dim, size) in enumerate(zip(operand.dims, shape)):
        is_lane = shift + i == region.outer and dim in (region.lane, region.head)
        want = dim if is_lane else space[shift + i]
        if size != want and (size != 1 or is_lane):
            raise ValueError(f"{operand}: dim {i} is {size}, expected {want} (shape {tuple(shape)})")
        if size == want and want != 1:
            row[shift + i] = stride[i]
    if not operand.dims:
        return row
    if region.lane == 1:
        # A lane of one element has no stride; 1 keeps it a value "per lane element".
        row[-1] = 1
    if any(s < 0 for s in row):
        raise Unsupported(f"a negative stride of {operand.name}")
    return row


def _merged(dims: list) -> list:
    """Pairs of dims (i outside j) become one wherever stride_i == stride_j * size_j in all operands."""
    dims = list(dims)
    again = True
    while again:
        again = False
        for i, (outer, step_i) in enumerate(dims):
            for j, (inner, step_j) in enumerate(dims):
                if i != j and all(a == b * inner for a, b in zip(step_i, step_j)):
                    dims[j] = [outer * inner, step_j]
                    del dims[i]
                    again = True
                    break
            if again:
                break
    return dims


def _sorted(dims: list, lanes: list[int]) -> list:
    """Outermost first by the strides of the operand that moves along most dims (the normalised
    value, as a rule): consecutive tiles then read neighbouring memory."""
    def moves(i: int) -> int:
        return sum(column[i] != 0 for _, column in dims) + (lanes[i] != 0)

    primary = max(range(len(lanes)), key=moves)
    return sorted(dims, key=lambda d: (d[1][primary], d[1][-1]), reverse=True)


def _blocked(sizes: Sequence[int], strides: Sequence[Sequence[int]], across: Sequence[bool]) -> int:
    """The dim that rows run along: long enough to fill tiles; of those, the one along which most
    operands stay (an adaLN scale is then loaded once a tile); of those, the one whose rows lie closest.
    Where lanes lie across, however, the dim along which most such operands are neighbours in memory."""
    enough = min(max(sizes), 64)

    def cost(d: int) -> tuple:
        steps = [column[d] for column in strides]
        neighbours = sum(step == 1 for step, apart in zip(steps, across) if apart)
        return -neighbours, sizes[d] < enough, sum(s != 0 for s in steps), max(steps)

    return min(range(len(sizes)), key=cost)


def _check_neighbours(region: NormRegion, lanes: Sequence[int], steps: Sequence[int]) -> None:
    """Unsupported unless the rows of all operands whose lane lies across are neighbours in memory; some may
    have one row for the whole tile. `steps`: from row to row."""
    names = [x.name for x in region.inputs] + [f"output {x.value}" for x in region.outputs]
    neighbours = any(step == 1 for lane, step in zip(lanes, steps) if lane not in (0, 1))
    for name, lane, step in zip(names, lanes, steps):
        if lane not in (0, 1) and (step not in (0, 1) or not neighbours):
            raise Unsupported(f"lane stride of {name} is {lane}, not 1")


def _unit(strides: Sequence[int], itemsize: int) -> int:
    """The largest power of two, at most a vector's elements, that divides all strides. D counts as a
    stride: how a row is read must not depend on whether other rows stand beside it."""
    unit = VECTOR_BYTES // itemsize
    for stride in strides:
        unit = gcd(unit, stride)
    return unit
