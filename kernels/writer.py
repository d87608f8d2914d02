"""What a generated kernel reads and writes: parameters, the tile's place, addresses, masks, loads, stores.

`codegen.Generator` builds on it and says in which order.
"""

from __future__ import annotations

from .arithmetic import Arithmetic
from .lanes import by_halves, held, places
from .layout import Structure
from .region import NormRegion
from .source import Tile
from .targets import Target
from .values import Value, analyse, ancestors, variable

#: dtype words of regions -> Triton's dtypes, and its types of pointers.
TL_TYPES = {"bf16": "tl.bfloat16", "f16": "tl.float16", "f32": "tl.float32", "f64": "tl.float64"}
POINTER_TYPES = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32", "f64": "*fp64"}


class Writer:
    """The lines of one kernel. `self.values` maps a region's names to what is in scope at the moment."""

    def __init__(self, region: NormRegion, structure: Structure, tile: Tile, target: Target):
        self.region, self.structure, self.tile, self.target = region, structure, tile, target
        # Where nothing moves from row to row, not even an output, there is one row.
        single = not any(operand.moving[structure.blocked] for operand in structure.operands)
        self.rows, self.cols, self.lane = 1 if single else tile.rows, tile.cols, region.lane
        self.compute = region.compute
        self.tl_compute = TL_TYPES[self.compute]
        self.in_memory = held(region, self.cols)
        self.padded = self.lane % self.cols != 0
        self.lines: list[str] = []
        self.indent = 1
        self.values: dict[str, Value] = {}
        self.loaded = dict(zip((x.name for x in region.inputs), structure.operands))
        self.stored = structure.operands[len(region.inputs):]
        self.needed = ancestors(region, [out.value for out in region.outputs])
        self.read = {a for line in region.body if line.name in self.needed for a in line.args}
        self.written = {out.value for out in region.outputs}
        self.narrow: set[str] = set()
        #: Outputs that are written, by number; and whether the source stands where outputs are.
        self.done: set[int] = set()
        self.storing = False
        self.by_name = {line.name: line for line in region.body}
        self.traits = analyse(region, structure, tile.rows)
        #: Loads say what they leave in a GPU's caches.
        self.hints = False
        #: What is read where the source stands is read again later.
        self.comes_back = False
        #: Norms whose statistics stand in scope.
        self.known: set[str] = set()
        half = all(out.dtype in ("bf16", "f16") for out in region.outputs)
        self.arithmetic = Arithmetic(target, self.compute, half, self.lane)
        #: inputs of which all heads of the lane read the same elements
        self.shared = {x.name for x in region.inputs if region.is_shared(x)}

    def put(self, text: str) -> None:
        self.lines.append("    " * self.indent + text if text else "")

    # -- the frame -----------------------------------------------------------------------------

    def _params(self) -> tuple[tuple[str, str], ...]:
        region, structure = self.region, self.structure
        tensors = [(x.name, x.dtype) for x in region.inputs]
        tensors += [(f"{x.value}", x.dtype) for x in region.outputs]
        #: Names of operands in the source: an output may repeat, or have an input's name.
        self.tags = [n for n, _ in tensors[:len(region.inputs)]]
        self.tags += [f"O{i}_{n}" for i, (n, _) in enumerate(tensors[len(region.inputs):])]
        params = [(f"P_{tag}", POINTER_TYPES[d]) for tag, (_, d) in zip(self.tags, tensors)]
        for tag, operand in zip(self.tags, structure.operands):
            stride = "i32" if structure.narrow else "i64"
            params += [(f"S_{tag}_{d}", stride) for d in operand.passed(structure.blocked)]
            params += [(f"S_{tag}_LANE", "i64")] * operand.across
        params += [(f"N_{d}", "i32") for d in range(structure.dims)]
        params.append(("TILES", "i32"))
        if self.target.persistent:
            params.append(("PER", "i32"))
        if self.compute == "f64":
            # A float argument is fp32 in Triton; an fp64 one travels as its bits.
            params += [(f"BITS_{name}", "i64") for name in region.scalars]
        else:
            params += [(variable(name), "fp32") for name in region.scalars]
        return tuple(params)

    def _prologue(self) -> None:
        if self.rows > 1:
            self.put(f"ROW = tl.arange(0, {self.rows})[:, None]")
        if self.in_memory:
            self._columns()
        if self.compute == "f64":
            for name in self.region.scalars:
                self.put(f"{variable(name)} = BITS_{name}.to(tl.int64).to(tl.float64, bitcast=True)")
        for name in self.region.scalars:
            self.values[name] = self.traits[name]

    def _columns(self) -> None:
        """The column index; in a column pass, the head of its loop."""
        first = ""
        if not self.in_memory:
            self.put(f"for C0 in range(0, {self.lane}, {self.cols}):")
            self.indent += 1
            first = "C0 + "
        across = self.structure.across
        name, shape = ("LANE", "") if across else ("COL", "[None, :]")
        if by_halves(self.region):
            for line in places(self.region, self.cols, name, shape):
                self.put(line)
        else:
            self.put(f"{name} = {first}tl.arange(0, {self.cols}){shape}")
            if self.padded:
                self.put(f"{name}_IN = {name} < {self.lane}")
        if across:
            self.put("COL = LANE[None, :]")
            if self.padded:
                self.put("COL_IN = LANE_IN[None, :]")
        if self.shared:
            self.put(f"IN_HEAD = COL % {self.region.head}")

    def _decode(self) -> None:
        """From the tile's index to an index per outer dim, and to every operand's address."""
        dims, blocked, grain = self.structure.dims, self.structure.blocked, self.structure.grain
        self.put(f"# The tile's place; rows run along dim {blocked}.")
        size = f"N_{blocked}"
        if grain > 1:
            self.put(f"SIZE = {size} * {grain}")
            size = "SIZE"
        apart = self.structure.axes and not self.target.persistent
        rest = "TILE"
        for d in reversed(range(dims)):
            axis = dims - 1 - d
            if apart and axis < 2:
                # A division by a number that is known at run time costs a small kernel 4% (gated add ->
                # LayerNorm -> modulate at D 1024, 1 MB: 3.40 us, and 3.26 so).
                self.put(f"I_{d} = tl.program_id({axis})")
                rest = "tl.program_id(2)"
                continue
            if d == 0:
                self.put(f"I_0 = {rest}")
                break
            count = size if d == blocked else f"N_{d}"
            if d == blocked and self.rows > 1:
                count = "BLOCKS"
                self.put(f"BLOCKS = ({size} + {self.rows - 1}) // {self.rows}")
            self.put(f"I_{d} = {rest} % {count}")
            self.put(f"REST_{d} = {rest} // {count}")
            rest = f"REST_{d}"
        if self.rows > 1:
            self.put(f"ROW_0 = I_{blocked} * {self.rows}")
            self.put(f"ROW_IN = (ROW_0 + ROW) < {size}")
        used = self.tags[:len(self.region.inputs)]
        for tag, operand in zip(self.tags, self.structure.operands):
            if (tag in used and tag not in self.needed) or not any(operand.moving):
                continue
            row = "ROW_0" if self.rows > 1 else f"I_{blocked}"
            wide = "" if self.structure.narrow else ".to(tl.int64)"
            terms = [f"{row if d == blocked else f'I_{d}'}{wide} * S_{tag}_{d}"
                     for d in operand.passed(blocked)]
            if operand.dense:
                terms.append(f"{row}{wide} * {self._length(tag) // operand.unit}")
            offset = " + ".join(terms)
            if terms and (self.structure.narrow or operand.unit > 1):
                offset = f"({offset})" + ".to(tl.int64)" * self.structure.narrow
                offset += f" * {operand.unit}" * (operand.unit > 1)
            if operand.adjacent:
                offset = f"{offset} + {row}" if terms else row
            self.put(f"A_{tag} = P_{tag} + {offset}")

    # -- memory --------------------------------------------------------------------------------

    def _streams(self, name: str) -> bool:
        """An operand with elements of its own for every row."""
        operand = self.loaded[name]
        return operand.lane and operand.moving[self.structure.blocked]

    def _address(self, tag: str, operand, rows: bool, column: str = "COL") -> str:
        base = f"A_{tag}" if any(operand.moving) else f"P_{tag}"
        parts = []
        moves = operand.moving[self.structure.blocked]
        if operand.across:
            # D times its stride may not fit 32 bits. In front of the rows: it is the same for all of them.
            step = f"(S_{tag}_LANE * {operand.unit})" if operand.unit > 1 else f"S_{tag}_LANE"
            base = f"{base} + {column}.to(tl.int64) * {step}"
        if rows and moves:
            parts.append(self._row_offset(tag, operand))
        if operand.lane and not operand.across:
            column = "IN_HEAD" if tag in self.shared else column
            parts.append(column if moves or not rows else
                         f"tl.broadcast_to({column}, ({self.rows}, {self.cols}))")
        return f"{base} + ({' + '.join(parts)})" if parts else base

    def _row_offset(self, tag: str, operand) -> str:
        if operand.adjacent:
            return "ROW"
        if operand.dense:
            return f"ROW * {self._length(tag)}"
        step = f"S_{tag}_{self.structure.blocked}.to(tl.int32)"
        return f"ROW * ({step} * {operand.unit})" if operand.unit > 1 else f"ROW * {step}"

    def _length(self, tag: str) -> int:
        """Elements of an operand's lane."""
        return self.region.head if tag in self.shared else self.lane

    def _mask(self, rows: bool, lane: bool, column: str = "COL") -> list[str]:
        return ["ROW_IN"] * rows + [f"{column}_IN"] * (lane and self.padded)

    def _load(self, name: str) -> None:
        value, operand = self.traits[name], self.loaded[name]
        # One lane for all rows of a tile, where lanes lie across: see `kernel`.
        flat = self.structure.across and value.lane and not value.rows
        column = "LANE" if flat else "COL"
        mask = self._mask(value.rows and operand.moving[self.structure.blocked], value.lane, column)
        rest = f", mask={' & '.join(mask)}, other=0.0" if mask else ""
        text = f"tl.load({self._address(name, operand, value.rows, column)}{rest}"
        if hint := self._hint(name):
            # On a line of its own beside a mask: lines stay short enough to read.
            text += (",\n" + "    " * (self.indent + 2) if mask else ", ") + hint
        text += ")[None, :]" if flat else ")"
        if self.region.dtype_of[name] != self.compute:
            text += f".to({self.tl_compute})"
        self.put(f"{value.var} = {text}")

    def _hint(self, name: str) -> str:
        """What a load leaves in a GPU's caches: what is read once stays out of L1, where weights are to
        stay (LayerNorm at D 8192 on an H200: 39 us, and 35 so); what comes back stays until it has (RMSNorm
        at D 8192, 512 MB, in two passes: 257 us, and 252 so). Results, and what is read here, are left to
        L2 as they come: who reads them next would pay (benchmarks/kernel_sweep.py)."""
        if not self.hints or not self.loaded[name].lane:
            return ""
        if not self._streams(name):
            return 'eviction_policy="evict_last"'
        if self.in_memory and not self.tile.reads_again:
            return 'cache_modifier=".cg"'
        return f'eviction_policy="{"evict_last" if self.comes_back else "evict_first"}"'

    def _stores(self, name: str | None = None) -> None:
        """Writes the outputs that are not written yet; only those of one value, if `name` is given."""
        tags = self.tags[len(self.region.inputs):]
        for i, (tag, out, operand) in enumerate(zip(tags, self.region.outputs, self.stored)):
            if i in self.done or name not in (None, out.value):
                continue
            self.done.add(i)
            value = self._value(out.value)
            rows = operand.moving[self.structure.blocked] and self.rows > 1
            narrow = out.value in self.narrow
            text = f"NARROW_{out.value}" if narrow else value.var
            if (value.rows, value.lane) != (rows, True):
                text = f"tl.broadcast_to({text}, ({self.rows if rows else 1}, {self.cols}))"
            if out.dtype != self.compute and not narrow:
                text = f"{text}.to({TL_TYPES[out.dtype]})"
            mask = self._mask(rows, True)
            masked = f", mask={' & '.join(mask)}" if mask else ""
            self.put(f"tl.store({self._address(tag, operand, rows)}, {text}{masked})")
