"""From a region, a layout's structure and a tile to Triton source that a person can read.

Four shapes of work come out of one generator. A tile is `[rows, D]`: many rows of a small D, or one
row of a large one, held in memory from load to store, or read again when its statistics are known. Where
D does not fit, a tile is a `[rows, cols]` piece and the kernel passes over the columns: once for the means,
once for the centred sums, once to normalise and store; what stands above the norm in the region is
computed again in each pass.

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

from .half_precision import FORMS as HALF_FORMS
from .lanes import check_moves, moved
from .layout import Structure, Unsupported
from .pointwise import POINTWISE
from .region import F16_NOTHING, LANE_OPS, NORMS, Line, NormRegion
from .source import KernelSource, Tile, module_text
from .targets import Target
from .values import Value, analyse, ancestors, rounds
from .writer import TL_TYPES, Writer


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


class Generator(Writer):
    """Writes one kernel.

    imports: more import lines of the kernel's module.
    """

    imports = ""

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
        if line.dtype == self.compute or line.op not in HALF_FORMS or not self.arithmetic.precise:
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

