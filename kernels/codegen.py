"""From a region, a layout's structure and a tile to Triton source that a person can read.

Three shapes of work come out of one generator. A tile is `[rows, D]`: many rows of a small D, or one
row of a large one, held in memory from load to store. Where D does not fit, a tile is a `[rows, cols]`
piece and the kernel passes over the columns: once for the means, once for the centred sums, once to
normalise and store; what stands above the norm in the region is computed again in each pass.

The source has no compile-time parameters: D and the block sizes are literals, so that a launch passes
pointers and numbers only. Identifiers of the machinery have an upper-case letter, values have the
names of the region (lower case by its grammar), so they never collide.

Rules from the Ascend compiler (see the project's docs): masks per dim as `index < bound`, lane stride
the literal 1, bases in 64 bit and in-tile offsets in 32, `//` and `%` on scalars only, no offset
carried through a loop, statistics two-pass, padded lanes zeroed after centring.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from .arithmetic import Arithmetic
from .half_precision import FORMS as HALF_FORMS
from .lanes import by_halves, check_moves, held, moved, places
from .layout import Structure, Unsupported
from .pointwise import POINTWISE
from .region import F16_NOTHING, LANE_OPS, NORMS, Line, NormRegion
from .source import KernelSource, Tile, module_text
from .targets import Target
from .values import Value, analyse, ancestors, rounds, variable

#: dtype words of regions -> Triton's dtypes, and its types of pointers.
TL_TYPES = {"bf16": "tl.bfloat16", "f16": "tl.float16", "f32": "tl.float32", "f64": "tl.float64"}
POINTER_TYPES = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32", "f64": "*fp64"}


@lru_cache(maxsize=1024)
def generate(region: NormRegion, structure: Structure, tile: Tile, target: Target) -> KernelSource:
    """The kernel of `region` for tensors laid out as `structure` says.

    Raises:
        Unsupported: the target lacks a dtype or wants lanes innermost in memory, a norm is taken of a value
            without a lane, or elements move along the lane where they cannot.
    """
    words = set(region.dtype_of.values())
    if lacking := sorted(words - set(target.dtypes)):
        raise Unsupported(f"{target.name} does not compute in {', '.join(lacking)}")
    check_moves(region, tile, target)
    if structure.across and not target.lanes_across:
        raise Unsupported(f"{target.name} wants lane stride 1")
    if structure.wide and tile.rows > 1:
        raise ValueError("offsets of a tile need 64 bits: one row a tile")
    return Generator(region, structure, tile, target).kernel()


class Generator:
    """Writes one kernel. `self.values` maps a region's names to what is in scope at the moment.

    imports: more import lines of the kernel's module.
    """

    imports = ""

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

    # -- the whole kernel ----------------------------------------------------------------------

    def kernel(self) -> KernelSource:
        self.hints = self.target.cache_hints
        # Triton lays a shared [1, D] out otherwise than a GPU's [rows, D] tile, and moves the whole tile
        # through shared memory to meet it (gated adaLN at D 64 on an H200: 107 us, and 66 without). Where a
        # lane lies across, it is loaded as [D], which is no tile: then it is the [D] that is moved.
        spread = self.target.power_of_two and not self.structure.across
        self.traits = analyse(self.region, self.structure, self.rows, spread)
        params = self._params()
        self._prologue()
        body = self.region.body
        if self.target.persistent:
            self._section([x for x in self._names() if self._level(x) == "program"])
            self.put("# Each program works off a contiguous range of tiles.")
            self.put("FIRST = tl.program_id(0) * PER")
            self.put("for TILE in range(FIRST, tl.minimum(FIRST + PER, TILES)):")
            self.indent += 1
        elif not self.structure.axes:
            self.put("TILE = tl.program_id(0)")
        self._decode()
        self.storing = self.in_memory and not self.tile.reads_again
        self._section([x for x in self._names() if self._level(x) != "column"])
        if not self.storing:
            for norms in self._generations(body):
                self._statistics(norms)
            self.put("")
            self.put("# Normalise and store.")
            if not self.in_memory:
                self._columns()
            self.storing = True
            self._section(self._names(self.needed))
        self._stores()
        return self._finish(params)

    def _params(self) -> tuple[tuple[str, str], ...]:
        region, structure = self.region, self.structure
        tensors = [(x.name, x.dtype) for x in region.inputs]
        tensors += [(f"{x.value}", x.dtype) for x in region.outputs]
        #: Names of operands in the source: an output may repeat, or have an input's name.
        self.tags = [n for n, _ in tensors[:len(region.inputs)]]
        self.tags += [f"O{i}_{n}" for i, (n, _) in enumerate(tensors[len(region.inputs):])]
        params = [(f"P_{tag}", POINTER_TYPES[d]) for tag, (_, d) in zip(self.tags, tensors)]
        for tag, operand in zip(self.tags, structure.operands):
            params += [(f"S_{tag}_{d}", "i64") for d in operand.passed(structure.blocked)]
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
            terms = [f"{row if d == blocked else f'I_{d}'}.to(tl.int64) * S_{tag}_{d}"
                     for d in operand.passed(blocked)]
            offset = " + ".join(terms)
            if operand.unit > 1 and terms:
                offset = f"({offset}) * {operand.unit}"
            if operand.adjacent:
                offset = f"{offset} + {row}" if terms else row
            self.put(f"A_{tag} = P_{tag} + {offset}")

    def _names(self, wanted=None) -> list[str]:
        """Values in the order of the region, restricted to the needed (or to `wanted`)."""
        wanted = self.needed if wanted is None else wanted
        order = [x.name for x in self.region.inputs] + [x.name for x in self.region.body]
        return [n for n in order if n in wanted]

    def _level(self, name: str) -> str:
        """Where a value is made: once a program, once a tile, or in each column pass."""
        value = self.traits[name]
        if value.lane and not self.in_memory:
            return "column"
        if self.tile.reads_again and (value.rows or value.lane) and not value.program:
            return "column"
        return "program" if value.program else "tile"

    def _section(self, names) -> None:
        """Loads and lines for `names` that are not in scope yet: loads first, unless `_late`."""
        late = self._late()
        inputs = {x.name for x in self.region.inputs}
        for name in names:
            if name in inputs and (self._streams(name) or not late):
                self._value(name)
        for name in names:
            if name not in inputs:
                self._value(name)

    def _late(self) -> bool:
        """Whether what does not stream through is loaded where it is needed. For a GPU that takes one
        long row a program: weights that wait in registers through the reductions cost occupancy (a
        quarter of the time at D 8192 on an H200; with more rows a program it is the other way)."""
        return self.rows == 1 and not self.target.persistent and not self.tile.loads_first

    def _streams(self, name: str) -> bool:
        """An operand with elements of its own for every row."""
        operand = self.loaded[name]
        return operand.lane and operand.moving[self.structure.blocked]

    def _value(self, name: str) -> Value:
        """The value, made here if it is not in scope."""
        if name not in self.values:
            line = self.by_name.get(name)
            if line is None:
                self._load(name)
            else:
                self._line(line)
            self.values[name] = self.traits[name]
            # Ascend's compiler plans the memory of what it finds in this order: a tile that is stored
            # at the end of the kernel is held until then.
            if line is not None and self.storing and self.target.persistent:
                self._stores(name)
        return self.values[name]

    # -- memory --------------------------------------------------------------------------------

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
        step = f"S_{tag}_{self.structure.blocked}.to(tl.int32)"
        return f"ROW * ({step} * {operand.unit})" if operand.unit > 1 else f"ROW * {step}"

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
        stay (LayerNorm at D 8192 on an H200: 39 us, and 35 so). Results, and what is read here, are left to
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

    # -- arithmetic ----------------------------------------------------------------------------

    def _word(self, arg) -> str:
        if isinstance(arg, str):
            return self._value(arg).var
        text = {"inf": "1e999", "-inf": "(-1e999)"}.get(repr(arg), repr(arg))
        return f"({text})" if text.startswith("-") else text

    def _line(self, line: Line) -> None:
        value = self.traits[line.name]
        if line.op in NORMS:
            text = self._norm(line)
        elif line.op in LANE_OPS:
            text = self._moved(line)
        else:
            words = [self._word(arg) for arg in line.args]
            self.put(f"# {line}")
            text = words[0] if line.op == "cast" else self._pointwise(line, words)
        self.put(f"{value.var} = {self._rounded(text, line)}")

    def _pointwise(self, line: Line, words: list[str]) -> str:
        if line.dtype == self.compute or line.op not in HALF_FORMS or not self.arithmetic.approximates:
            return POINTWISE[line.op].triton.format(*words)
        statements, text = HALF_FORMS[line.op](self.arithmetic, *words, line.name)
        for statement in statements:
            self.put(statement)
        return text

    def _moved(self, line: Line) -> str:
        x = self._value(line.args[0])
        rows = self.rows if x.rows else 1
        self.put(f"# {line}")
        tile = x.var if x.lane else f"tl.broadcast_to({x.var}, ({rows}, {self.cols}))"
        statement, text = moved(self.region, line, tile, rows, self.cols)
        self.put(statement)
        return text

    def _rounded(self, text: str, line: Line) -> str:
        """`text`, rounded to the line's dtype and widened again, where that is not the identity."""
        if line.dtype == self.compute or not rounds(line, self.traits):
            return text
        if line.name in self.written:
            if line.name not in self.read:
                return text  # the store rounds
            self.narrow.add(line.name)
            self.put(f"NARROW_{line.name} = ({text}).to({TL_TYPES[line.dtype]})")
            return f"NARROW_{line.name}.to({self.tl_compute})"
        return f"({text}).to({TL_TYPES[line.dtype]}).to({self.tl_compute})"

    def _sum(self, text: str) -> str:
        return f"tl.sum({text}, axis=1)[:, None]"

    def _inside(self, text: str) -> str:
        return f"tl.where(COL_IN, {text}, 0.0)" if self.padded else text

    def _corrects(self, line: Line) -> bool:
        """Whether a layer_norm corrects its rounded mean. At mean/std 1000 that is worth a factor of
        100 in fp32; a half-precision result rounds it away, and Ascend's vector cores pay for it."""
        return line.dtype == self.compute

    def _norm(self, line: Line) -> str:
        """The normalised value as an expression of its operand and of `MEAN_`, `SHIFT_`, `RSTD_` and `NORM_`
        variables, which are made here unless they stand in scope already."""
        name, x = line.name, self._value(line.args[0])
        self._word(line.args[-1])
        self.put(f"# {line}")
        centred = line.op == "layer_norm"
        if name not in self.known:
            self._reduce(line)
        elif centred:
            self.put(f"C_{name} = {x.var} - MEAN_{name}")
            if self._corrects(line):
                self.put(f"C_{name} = C_{name} - SHIFT_{name}")
        text = f"C_{name} * RSTD_{name}" if centred else f"{x.var} * RSTD_{name}"
        if line.op == "normalize":
            text = self.arithmetic.quotient(x.var, f"NORM_{name}")
        for sign, arg in zip("*+", line.args[1:-1]):
            if arg is not None:
                text = f"{text} {sign} {self._word(arg)}"
        return text

    def _reduce(self, line: Line) -> None:
        """The statistics of a norm whose whole rows are in memory; for one that centres, `C_` as well."""
        name, x = line.name, self._value(line.args[0])
        self.known.add(name)
        kept = x.var if x.zero else self._inside(x.var)
        if line.op != "layer_norm":
            self.put(f"SQUARES_{name} = {self._sum(self._square(kept, name))}")
            self._scale(line)
            return
        self.put(f"MEAN_{name} = {self.arithmetic.mean(self._sum(kept))}")
        self.put(f"C_{name} = {self._inside(f'{x.var} - MEAN_{name}')}")
        if self._corrects(line):
            # The mean was rounded: what it missed is the mean of the centred values.
            self.put(f"SHIFT_{name} = {self._sum(f'C_{name}')} * {self.arithmetic.share}")
            self.put(f"C_{name} = {self._inside(f'C_{name} - SHIFT_{name}')}")
        self.put(f"SQUARES_{name} = {self._sum(f'C_{name} * C_{name}')}")
        self._rstd(name, f"SQUARES_{name} * {self.arithmetic.share} + {self._word(line.args[-1])}")

    def _square(self, text: str, name: str) -> str:
        if text.isidentifier():
            return f"{text} * {text}"
        self.put(f"X_{name} = {text}")
        return f"X_{name} * X_{name}"

    def _scale(self, line: Line) -> None:
        """What a norm that does not centre scales its rows by, from their sums of squares."""
        name, squares, eps = line.name, f"SQUARES_{line.name}", self._word(line.args[-1])
        if line.op == "normalize":
            if line.dtype == "f16":
                # (Ascend's compiler takes a number that is rounded and widened again for the number.)
                self.put(f"EPS_{name} = tl.where({eps} > {F16_NOTHING!r}, {eps}, 0.0)")
                eps = f"EPS_{name}"
            self.put(f"NORM_{name} = tl.maximum({self.arithmetic.sqrt(squares)}, {eps}, "
                     "propagate_nan=tl.PropagateNan.ALL)")
        else:
            self._rstd(name, f"{squares} * {self.arithmetic.share} + {eps}" if line.op == "rms_norm" else
                       f"{squares} + {eps}")

    def _rstd(self, name: str, variance: str) -> None:
        self.put(f"RSTD_{name} = {self.arithmetic.rsqrt(variance)}")

    # -- column passes -------------------------------------------------------------------------

    def _generations(self, body) -> list[list[Line]]:
        """Norms by how many norms they stand on: those of a generation share their passes."""
        depth: dict[str, int] = {}
        groups: dict[int, list[Line]] = {}
        for line in body:
            below = max((depth.get(a, 0) for a in line.args if isinstance(a, str)), default=0)
            depth[line.name] = below
            if line.op in NORMS and line.name in self.needed:
                groups.setdefault(below, []).append(line)
                depth[line.name] = below + 1
        return [groups[k] for k in sorted(groups)]

    def _statistics(self, norms: list[Line]) -> None:
        if self.in_memory:
            self._read_once(norms)
            return
        self.known.update(line.name for line in norms)
        centred = [line for line in norms if line.op == "layer_norm"]
        self._pass(norms, "First pass: sums.", "SUM")
        for line in norms:
            if line.op == "layer_norm":
                self.put(f"MEAN_{line.name} = {self.arithmetic.mean(f'SUM_{line.name}')}")
            else:
                self._scale(line)
        if not centred:
            return
        self._pass(centred, "Second pass: centred sums.", "CENTRED")
        for line in centred:
            name, share = line.name, self.arithmetic.share
            variance = f"SQUARES_{name} * {share}"
            if self._corrects(line):
                # See _norm. Taking the square of the correction off can leave a rounding error
                # below 0 where all values are equal.
                self.put(f"SHIFT_{name} = SUM_{name} * {share}")
                self.put(f"VAR_{name} = {variance} - SHIFT_{name} * SHIFT_{name}")
                variance = f"tl.maximum(VAR_{name}, 0.0, propagate_nan=tl.PropagateNan.ALL)"
            self._rstd(name, f"{variance} + {self._word(line.args[-1])}")

    def _read_once(self, norms: list[Line]) -> None:
        """The statistics of whole rows, which are read again after that."""
        self.put("")
        self.put("# Statistics.")
        outside = dict(self.values)
        self.comes_back = True
        self._section(self._names(ancestors(self.region, [x.args[0] for x in norms])))
        for line in norms:
            self._reduce(line)
        self.comes_back = False
        self.values = outside

    def _pass(self, norms: list[Line], title: str, kind: str) -> None:
        """One loop over the columns that accumulates row sums for `norms`."""
        self.put("")
        self.put(f"# {title}")
        totals = {line.name: self._totals(line, kind) for line in norms}
        # Threads of a GPU add up columns of their own, and meet once.
        apart = self.target.power_of_two and not self.structure.across
        for line in norms:
            rows = self.rows if self.traits[line.args[0]].rows else 1
            for total in totals[line.name]:
                self.put(f"{total}_{line.name} = tl.full(({rows}, {self.cols if apart else 1}), 0.0, "
                         f"{self.tl_compute})")
        outside = dict(self.values)
        self.comes_back = True
        self._columns()
        self._section(self._names(ancestors(self.region, [x.args[0] for x in norms])))
        for line in norms:
            x, name = self._value(line.args[0]), line.name
            term = x.var if x.zero else self._inside(x.var)
            if kind == "CENTRED":
                term = self._inside(f"{x.var} - MEAN_{name}")
            if not term.isidentifier():
                self.put(f"C_{name} = {term}")
                term = f"C_{name}"
            for total in totals[name]:
                text = term if total == "SUM" else f"{term} * {term}"
                self.put(f"{total}_{name} = {total}_{name} + {text if apart else self._sum(text)}")
        self.values = outside
        self.comes_back = False
        self.indent -= 1
        if apart:
            for name, found in totals.items():
                for total in found:
                    self.put(f"{total}_{name} = {self._sum(f'{total}_{name}')}")

    def _totals(self, line: Line, kind: str) -> tuple[str, ...]:
        """The sums that a pass takes for a norm."""
        if kind == "CENTRED":
            return ("SUM", "SQUARES") if self._corrects(line) else ("SQUARES",)
        return ("SUM",) if line.op == "layer_norm" else ("SQUARES",)

    # -- text ----------------------------------------------------------------------------------

    def put(self, text: str) -> None:
        self.lines.append("    " * self.indent + text if text else "")

    def _finish(self, params) -> KernelSource:
        region, tile, target = self.region, self.tile, self.target
        # Lines of a region are names, numbers and punctuation by its grammar; nothing of a user's
        # can end the docstring.
        facts = f"{self.structure}\ntile: {tile}; rules: {target.name}"
        doc = f"{region.text}\n\n{facts}"
        body = "\n".join(self.lines)
        word = region.norms[0].op if region.norms else "pointwise"
        digest = hashlib.sha256(f"{doc}\n{body}".encode()).hexdigest()[:10]
        name = f"aln_{word}_{digest}"
        source = module_text(name, doc, params, body, self.imports)
        return KernelSource(name, source, params, tile)

