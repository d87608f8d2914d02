"""The regions inside a segment's kernel: what makes A, and what turns products into an output.

Their lines are written by the generator of the norm kernels (codegen.py), for a tile whose rows are ROW
(`[rows, 1]`, or a number where a tile has one row) and whose columns are what COL says at the moment. Rows
are those of A, flattened; an operand with several outer dims takes the row's number apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .codegen import Generator
from .fused_linear_structure import PartStructure
from .layout import OperandStructure, Structure
from .region import Line, NormRegion, Operand, Output
from .source import Tile
from .targets import Target
from .values import Value, variable
from .writer import POINTER_TYPES, TL_TYPES

#: Elements of the block that a pass over the rows takes for their statistics, and its fewest columns.
STATISTICS_ELEMENTS = 8192
STATISTICS_COLS = 128

Params = list[tuple[str, str]]


class Kernel(Protocol):
    """Who writes the kernel that a part stands in."""

    lines: list[str]
    indent: int


class Part(Generator):
    """Writes one region into a kernel.

    `role` makes the names of its outer dims; `numbers` are those of its outputs in the kernel, None for one
    that is not stored.
    """

    def __init__(self, kernel: Kernel, part: PartStructure, region: NormRegion, tile: Tile, target: Target,
                 role: str, numbers: Sequence[int | None]):
        flat = tuple(OperandStructure((any(moving),), lane, unit)
                     for moving, lane, unit in zip(part.moving, part.lane, part.unit))
        super().__init__(region, Structure(1, 0, flat, False), tile, target)
        self.kernel_, self.part, self.role = kernel, part, role
        self.lines, self.indent = kernel.lines, 0
        self.in_memory = False
        self.tags = [x.name for x in region.inputs]
        self.tags += [f"O{number}_{x.value}" for number, x in zip(numbers, region.outputs)]
        self.values |= {name: self.traits[name] for name in region.scalars}

    def put(self, text: str) -> None:
        self.lines.append("    " * (self.kernel_.indent + self.indent) + text if text else "")

    def block(self, cols: int, padded: bool) -> None:
        """From here on COL has `cols` columns; `padded`: some are past the lane, and COL_IN says which."""
        self.cols, self.padded = cols, padded

    # -- parameters ----------------------------------------------------------------------------

    def input_pointers(self) -> Params:
        return self._pointers(i for i in self.part.present if i < len(self.region.inputs))

    def output_pointers(self) -> Params:
        return self._pointers(i for i in self.part.present if i >= len(self.region.inputs))

    def _pointers(self, operands: Iterable[int]) -> Params:
        dtypes = [x.dtype for x in (*self.region.inputs, *self.region.outputs)]
        return [(f"P_{self.tags[i]}", POINTER_TYPES[dtypes[i]]) for i in operands]

    def integers(self) -> Params:
        """Strides where they are not 0; with several outer dims, their sizes and the rows of a step."""
        names = [f"S_{self.tags[i]}_{d}" for i in self.part.present
                 for d, moves in enumerate(self.part.moving[i]) if moves]
        sizes = [f"{word}_{self.role}{d}" for word in "NR" for d in range(self.part.dims)]
        return [(name, "i64") for name in names] + [(name, "i32") for name in sizes] * (self.part.dims > 1)

    def scalars(self) -> Params:
        return [(variable(name), "fp32") for name in self.region.scalars]

    # -- memory --------------------------------------------------------------------------------

    def addresses(self) -> None:
        """Every operand's rows: A_ variables."""
        dims = range(self.part.dims)
        index = [f"I_{self.role}{d}" for d in dims] if self.part.dims > 1 else ["ROW"]
        moving = [i for i in self.part.present if any(self.part.moving[i])]
        if self.part.dims > 1:
            for d in dims if moving else ():
                self.put(f"{index[d]} = ROW // R_{self.role}{d} % N_{self.role}{d}")
        for i in moving:
            tag, unit = self.tags[i], self.part.unit[i]
            offset = " + ".join(f"{index[d]}.to(tl.int64) * S_{tag}_{d}" for d in dims
                                if self.part.moving[i][d])
            self.put(f"A_{tag} = P_{tag} + " + (f"({offset}) * {unit}" if unit > 1 else offset))

    def _address(self, tag: str, operand: OperandStructure, rows: bool, column: str = "COL") -> str:
        base = f"A_{tag}" if operand.moving[0] else f"P_{tag}"
        return f"{base} + {column}" if operand.lane else base

    def whole(self, text: str, value: Value) -> str:
        """`text` in the shape of a tile."""
        if (value.rows, value.lane) == (self.rows > 1, True):
            return text
        return f"tl.broadcast_to({text}, ({self.rows}, {self.cols}))"

    def result(self, output: Output) -> str:
        """The value of an output, a whole tile in its dtype."""
        value = self._value(output.value)
        text = f"NARROW_{output.value}" if output.value in self.narrow else value.var
        if text == value.var and output.dtype != self.compute:
            text = f"{text}.to({TL_TYPES[output.dtype]})"
        return self.whole(text, value)


class Prologue(Part):
    """Makes A, the region's first output, and stores the others."""

    def statistics(self) -> None:
        """The norms' sums over whole rows, in loops of their own."""
        groups = self._generations(self.region.body)
        if not groups:
            return
        cols = min(1 << (self.lane - 1).bit_length(), max(STATISTICS_COLS, STATISTICS_ELEMENTS // self.rows))
        self.block(cols, self.lane % cols != 0)
        self._section([name for name in self._names() if not self.traits[name].lane])
        for norms in groups:
            self._statistics(norms)
        self.put("")

    def make(self, store: str) -> None:
        """A for the columns COL. The other outputs are stored by the programs for which `store` holds."""
        first = self.region.outputs[0]
        if self.region.body:
            self._section(self._names(self.needed))
            text = self.result(first)
            if self.padded and not self.traits[first.value].zero:
                # Weights are 0 there, but Inf times 0 is not.
                text = f"tl.where(COL_IN, {text}, 0.0).to({TL_TYPES[first.dtype]})"
        else:
            # An input as it is: not even a cast stands between its load and the product.
            value, operand = self.traits[first.value], self.loaded[first.value]
            mask = self._mask(value.rows, value.lane)
            rest = f", mask={' & '.join(mask)}, other=0.0" if mask else ""
            text = self.whole(f"tl.load({self._address(first.value, operand, value.rows)}{rest})", value)
        self.put(f"A = {text}")
        tags = self.tags[len(self.region.inputs):]
        for tag, output, operand in list(zip(tags, self.region.outputs, self.stored))[1:]:
            mask = " & ".join([*self._mask(self.rows > 1, True), f"({store})"])
            self.put(f"tl.store({self._address(tag, operand, True)}, {self.result(output)}, mask={mask})")


class Epilogue(Part):
    """Turns products into a tile of the output."""

    def finish(self, products: Sequence[str]) -> None:
        """Everything behind the products, fp32 variables with their bias, for the columns COL."""
        for operand, product in zip(self.region.inputs, products):
            var = variable(operand.name)
            self.put(f"{var} = {product}.to({TL_TYPES[operand.dtype]}).to(tl.float32)")
            self.values[operand.name] = Value(var, self.rows > 1, True, False, operand.dtype, False)
        self._section(self._names(self.needed))
        self._stores()


def distinct(region: NormRegion, taken: set[str]) -> NormRegion:
    """`region` with other names in the place of those in `taken`, to which its names are added."""
    names: dict[str, str] = {}
    for name in (*(x.name for x in region.inputs), *region.scalars, *(x.name for x in region.body)):
        new, count = name, 1
        while new in taken:
            count += 1
            new = f"{name}_{count}"
        names[name] = new
        taken.add(new)

    def renamed(arg):
        return names[arg] if isinstance(arg, str) else arg

    return NormRegion(
        region.lane, region.rank,
        tuple(Operand(names[x.name], x.dtype, x.dims) for x in region.inputs),
        tuple(names[x] for x in region.scalars),
        tuple(Line(names[x.name], x.dtype, x.op, tuple(map(renamed, x.args))) for x in region.body),
        tuple(Output(names[x.value], x.dtype, x.order) for x in region.outputs),
        region.heads)
