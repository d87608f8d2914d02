"""From a segment's problem and a tile to Triton source.

One program makes one tile of the output:

    statistics of its rows, if the norm is inside: two passes, in loops of their own before any tl.dot
    (statistics accumulated in the loop of tl.dot came out wrong on Hopper)
    for each block of K:
        A = the norm applied to a block of the rows, rounded
        ACC += A @ W^T
    the results, rounded; the epilogue; the store

With `GemmTile.split` the loop covers a part of K and the sums go to memory in fp32; a second kernel
(`generate_reduction`) adds them up, in order, and goes on from there: no atomics, one order of summation.

Where devices have programmatic dependent launch (`dependent`), every kernel lets the one behind it start at
once. That one may only fetch weights into the L2 cache until `gdc_wait` has returned, which is when the
kernel in front, and so all before it, has ended.

Identifiers of the machinery have an upper-case letter, as in codegen.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from .codegen import Generator
from .fused_linear_parts import Epilogue, Params, Prologue, distinct
from .fused_linear_structure import Problem
from .fused_linear_tiles import GemmTile
from .layout import Structure
from .region import DTYPES, NormRegion
from .source import KernelSource, Tile, module_text
from .targets import Target
from .writer import POINTER_TYPES

#: Bytes of a line of the L2 cache, which one prefetch brings.
LINE_BYTES = 128

_DEPENDENT = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
_PREFETCH = '"prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l"'


@lru_cache(maxsize=1024)
def generate(problem: Problem, tile: GemmTile, target: Target, dependent: bool) -> KernelSource:
    """The kernel of `problem`. Its grid: tiles of rows x tiles of columns, then `tile.split`.

    Parameters: the prologue's inputs; weights; with split 1 biases, the epilogues' inputs, the prologue's
    stored outputs, the epilogues' outputs, else the prologue's stored outputs and the fp32 sums; integers:
    the prologue's, the weights' strides, with split 1 the epilogues', M, the number of tiles of rows; the
    prologue's scalars, with split 1 the epilogues'.
    """
    return _Products(problem, tile, target, dependent).kernel()


@lru_cache(maxsize=1024)
def generate_reduction(problem: Problem, split: int, block: Tile, target: Target,
                       dependent: bool) -> KernelSource:
    """The kernel that adds up what `split` programs found. Its grid: blocks of rows x blocks of columns.

    Parameters: the sums, biases, the epilogues' inputs and outputs; integers: the epilogues', M, the number
    of blocks of rows; the epilogues' scalars.
    """
    return _Reduction(problem, split, block, target, dependent).kernel()


@lru_cache(maxsize=1024)
def generate_ahead(region: NormRegion, structure: Structure, tile: Tile, target: Target,
                   dependent: bool) -> KernelSource:
    """The norm kernel (`codegen.generate`) for a launch in front of a segment's."""
    return (_Ahead if dependent else Generator)(region, structure, tile, target).kernel()


class _Ahead(Generator):
    """A norm kernel that lets the kernel behind it start at once."""

    imports = _DEPENDENT

    def _prologue(self) -> None:
        self.put("gdc_launch_dependents()")
        super()._prologue()


class _Writer:
    """What both kernels of a segment share: rows, biases, epilogues, the text."""

    def __init__(self, problem: Problem, tile: Tile | GemmTile, target: Target, dependent: bool):
        self.problem, self.target, self.dependent, self.tile = problem, target, dependent, tile
        self.rows, self.cols = tile.rows, tile.cols
        self.lines: list[str] = []
        self.indent = 1
        self.starts = problem.starts(self.cols)
        self.pointer = POINTER_TYPES[problem.dtype]
        region = problem.prologue.region
        taken = {x.name for x in (*region.inputs, *region.body)} | set(region.scalars)
        first = len(region.outputs) - 1
        block = Tile(self.rows, self.cols)
        self.epilogues = [Epilogue(self, part, distinct(part.region, taken), block, target, f"E{i}_",
                                   [first + i]) for i, part in enumerate(problem.epilogues)]

    def put(self, text: str) -> None:
        self.lines.append("    " * self.indent + text if text else "")

    def ends(self, what: str) -> Params:
        """The parameters `what` of all epilogues."""
        return [x for part in self.epilogues for x in getattr(part, what)()]

    def biases(self) -> Params:
        return [(f"P_BIAS{i}", self.pointer) for i, w in enumerate(self.problem.weights) if w.bias]

    def place(self) -> None:
        """The program's tile."""
        self.put("# Neighbouring programs share a tile of the weights.")
        self.put("TILE_M = tl.program_id(0) % TILES_M")
        self.put("TILE_N = tl.program_id(0) // TILES_M")
        if self.rows > 1:
            self.put(f"ROW = TILE_M * {self.rows} + tl.arange(0, {self.rows})[:, None]")
            self.put("ROW_IN = ROW < M")
        else:
            self.put("ROW = TILE_M")

    def wait(self, early: bool) -> None:
        """Where kernels may start early: lets the next one, and waits for the one in front."""
        if self.dependent:
            self.put("gdc_launch_dependents()")
            if early:
                self.prefetch()
                self.put("gdc_wait()")

    def prefetch(self) -> None:
        """What may be done before the kernel in front has ended."""

    def results(self) -> None:
        """Bias, rounding, epilogue and store of the tile's sums."""
        if self.problem.joint:
            self._result(range(len(self.problem.weights)), self.epilogues[0], 0)
            return
        last = len(self.epilogues) - 1
        for i, part in enumerate(self.epilogues):
            self.put("else:" if i == last else
                     f"{'elif' if i else 'if'} TILE_N < {self.starts[i + 1]}:")
            self.indent += 1
            self._result([i], part, self.starts[i])
            self.indent -= 1

    def _result(self, numbers: Sequence[int], part: Epilogue, start: int) -> None:
        n = self.problem.weights[numbers[0]].n
        self.put(f"COL = {f'(TILE_N - {start})' if start else 'TILE_N'} * {self.cols} + "
                 f"tl.arange(0, {self.cols})[None, :]")
        part.block(self.cols, n % self.cols != 0)
        if part.padded:
            self.put(f"COL_IN = COL < {n}")
        part.addresses()
        sums = []
        for place, i in enumerate(numbers):
            sums.append(self.sums(place, i, part.padded))
            if self.problem.weights[i].bias:
                mask = ", mask=COL_IN, other=0.0" if part.padded else ""
                self.put(f"{sums[-1]} += tl.load(P_BIAS{i} + COL{mask}).to(tl.float32)")
        part.finish(sums)

    def sums(self, place: int, i: int, padded: bool) -> str:
        """The variable with the sums of projection `i`, the tile's `place`th."""
        raise NotImplementedError

    def finish(self, word: str, title: str, params: Params) -> KernelSource:
        problem = self.problem
        texts = [title]
        if problem.prologue.region.body:
            texts.append(problem.prologue.region.text)
        texts += [f"{w.n} features of {problem.k} elements; weight along {'K' if w.along_k else 'N'}, "
                  f"stride unit {w.unit}{', bias' if w.bias else ''}" for w in problem.weights]
        texts += [x.region.text for x in self.epilogues if x.region.body]
        texts.append(f"tile: {self.tile}; rules: {self.target.name}")
        doc, body = "\n\n".join(texts), "\n".join(self.lines)
        digest = hashlib.sha256(f"{doc}\n{body}".encode()).hexdigest()[:10]
        name = f"aln_{word}_{digest}"
        source = module_text(name, doc, params, body, _DEPENDENT if self.dependent else "")
        return KernelSource(name, source, tuple(params), self.tile)


class _Products(_Writer):
    """The kernel with the products."""

    def __init__(self, problem: Problem, tile: GemmTile, target: Target, dependent: bool):
        super().__init__(problem, tile, target, dependent)
        self.depth, self.split = tile.depth, tile.split
        self.vector = tile.rows == 1
        #: Steps along K of one program; together the programs of a tile cover K.
        self.span = -(-problem.k // (tile.depth * tile.split)) * tile.depth
        self.first = "FIRST + " if tile.split > 1 else ""
        outputs = problem.prologue.region.outputs
        self.prologue = Prologue(self, problem.prologue, problem.prologue.region,
                                 Tile(tile.rows, tile.depth), target, "A", [None, *range(len(outputs) - 1)])
        #: For each projection of which a program makes a tile: its weight's pointer, stride and N in the
        #: source, and the number of the tile among the projection's.
        self.names = [(f"P_W{i}", f"S_W{i}", str(w.n), "TILE_N") for i, w in enumerate(problem.weights)]
        if not problem.joint:
            self.names = [("P_W", "S_W", "N_W", "TILE_W")]
        self.along_k = problem.weights[0].along_k
        self.ragged = any(w.n % tile.cols for w in problem.weights)

    def kernel(self) -> KernelSource:
        prologue, whole = self.prologue, self.split == 1
        params = prologue.input_pointers()
        params += [(f"P_W{i}", self.pointer) for i in range(len(self.problem.weights))]
        if whole:
            params += self.biases() + self.ends("input_pointers")
        params += prologue.output_pointers()
        params += self.ends("output_pointers") if whole else [("P_SUMS", "*fp32")]
        params += prologue.integers()
        params += [(f"S_W{i}", "i64") for i in range(len(self.problem.weights))]
        params += self.ends("integers") if whole else []
        params += [("M", "i32"), ("TILES_M", "i32"), *prologue.scalars()]
        params += self.ends("scalars") if whole else []
        self.place()
        self.weights()
        self.wait(self.tile.overlap)
        prologue.addresses()
        prologue.statistics()
        self.products()
        if whole:
            self.results()
        else:
            self.partial_sums()
        norms = self.problem.prologue.region.norms
        return self.finish(f"{norms[0].op}_linear" if norms else "linear",
                           "A segment: products of one input.", params)

    # -- weights -------------------------------------------------------------------------------

    def weights(self) -> None:
        """Pointers to the first block of every weight: W_ variables, of the block's shape."""
        problem, (_, _, n, tile) = self.problem, self.names[0]
        if not problem.joint:
            self.put("# The projection that the tile belongs to.")
            self.put(f"P_W, S_W, N_W, TILE_W = P_W0, S_W0, {problem.weights[0].n}, TILE_N")
            for i, start in enumerate(self.starts[1:-1], 1):
                self.put(f"if TILE_N >= {start}:")
                self.put(f"    P_W, S_W, N_W, TILE_W = P_W{i}, S_W{i}, {problem.weights[i].n}, "
                         f"TILE_N - {start}")
        if self.split > 1:
            self.put(f"FIRST = tl.program_id(1) * {self.span}")
        self.put(f"FEATURE = {tile} * {self.cols} + tl.arange(0, {self.cols})")
        if self.ragged and self.along_k:
            # Past the end, a feature that is there: cheaper than a mask, and not stored.
            self.put(f"FEATURE = tl.minimum(FEATURE, {n} - 1)")
        elif self.ragged:
            self.put(f"FEATURE_IN = (FEATURE < {n})[None, :]")
        self.put(f"STEP = {self.first}tl.arange(0, {self.depth})")
        for place, (pointer, *_) in enumerate(self.names):
            self.put(f"W_{place} = {pointer} + " + self._at(place, "FEATURE", "STEP"))

    def _stride(self, place: int) -> str:
        unit = self.problem.weights[place].unit
        return f"{self.names[place][1]} * {unit}" if unit > 1 else self.names[place][1]

    def _at(self, place: int, feature: str, step: str) -> str:
        """Offsets of a block of a weight: the dim along which elements lie side by side comes last."""
        outer, inner = (feature, step) if self.along_k else (step, feature)
        return f"{outer}.to(tl.int64)[:, None] * ({self._stride(place)}) + {inner}[None, :]"

    def prefetch(self) -> None:
        """The weights of the first trips into the L2 cache: harmless whatever the kernel in front writes,
        since the cache is where its writes arrive."""
        line = LINE_BYTES // DTYPES[self.problem.dtype]
        inside = self.depth if self.along_k else self.cols
        lines = f"tl.arange(0, {max(1, inside // line)}) * {min(line, inside)}"
        for trip in range(min(self.tile.prefetch, self.span // self.depth)):
            start = f"{self.first}{trip * self.depth}"
            for place, (pointer, _, n, tile) in enumerate(self.names):
                if self.along_k:
                    step = f"tl.minimum({start} + {lines}, {self.problem.k - 1})"
                    offsets = self._at(place, "FEATURE", step)
                else:
                    step = f"tl.minimum({start} + tl.arange(0, {self.depth}), {self.problem.k - 1})"
                    offsets = self._at(place, f"tl.minimum({tile} * {self.cols} + {lines}, {n} - 1)", step)
                self.put(f"LINES = ({pointer} + ({offsets})).to(tl.int64)")
                self.put(f"tl.inline_asm_elementwise({_PREFETCH}, [LINES], dtype=tl.int32, is_pure=False, "
                         "pack=1)")

    # -- products ------------------------------------------------------------------------------

    def products(self) -> None:
        """The loop over K."""
        prologue, k, places = self.prologue, self.problem.k, range(len(self.names))
        shape = (self.rows, self.cols)
        if self.vector:
            shape = (self.cols, self.depth) if self.along_k else (self.depth, self.cols)
        elif self.tile.swapped:
            shape = (self.cols, self.rows)
        for place in places:
            self.put(f"ACC_{place} = tl.full({shape}, 0.0, tl.float32)")
        # The vector units' loop is pipelined on request only; Triton knows that of tl.dot.
        if self.vector and self.tile.num_stages > 1:
            self.put(f"for C0 in tl.range(0, {self.span}, {self.depth}, num_stages={self.tile.num_stages}):")
        else:
            self.put(f"for C0 in range(0, {self.span}, {self.depth}):")
        self.indent += 1
        self.put(f"COL = {self.first}C0 + tl.arange(0, {self.depth})[None, :]")
        prologue.block(self.depth, self.span * self.split != k)
        if prologue.padded:
            self.put(f"COL_IN = COL < {k}")
        prologue.make("TILE_N == 0")
        for place in places:
            self.product(place)
        self.indent -= 1
        for place in places:
            if self.vector:
                axis = 1 if self.along_k else 0
                self.put(f"ACC_{place} = tl.sum(ACC_{place}, axis={axis})[None, :]")
            elif self.tile.swapped:
                self.put(f"ACC_{place} = tl.trans(ACC_{place})")

    def product(self, place: int) -> None:
        acc, w = f"ACC_{place}", f"WEIGHT_{place}"
        step = "C0" if self.along_k else f"C0 * ({self._stride(place)})"
        masks = []
        if self.prologue.padded:
            masks.append("COL_IN" if self.along_k else "tl.trans(COL_IN)")
        if self.ragged and not self.along_k:
            masks.append("FEATURE_IN")
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        self.put(f"{w} = tl.load(W_{place} + {step}{mask})")
        turned = f"tl.trans({w})"
        if self.vector:
            a = "A.to(tl.float32)"
            self.put(f"{acc} += {w}.to(tl.float32) * " + (a if self.along_k else f"tl.trans({a})"))
        elif self.tile.swapped:
            self.put(f"{acc} = tl.dot({w if self.along_k else turned}, tl.trans(A), {acc})")
        else:
            self.put(f"{acc} = tl.dot(A, {turned if self.along_k else w}, {acc})")

    def sums(self, place: int, i: int, padded: bool) -> str:
        # Of projections with tiles of their own, a program has one.
        return f"ACC_{place}"

    def partial_sums(self) -> None:
        """Stores the sums over this program's part of K: for each projection `[part, M, N]`."""
        weights = self.problem.weights
        before = [sum(w.n for w in weights[:i]) * self.split for i in range(len(weights))]
        if not self.problem.joint:
            self.put("BEFORE = 0")
            for start, count in zip(self.starts[1:-1], before[1:]):
                self.put(f"if TILE_N >= {start}:")
                self.put(f"    BEFORE = {count}")
        for place, (_, _, n, tile) in enumerate(self.names):
            base = before[place] if self.problem.joint else "BEFORE"
            self.put(f"COL = {tile} * {self.cols} + tl.arange(0, {self.cols})[None, :]")
            self.put(f"SUMS = P_SUMS + M.to(tl.int64) * {base} + "
                     f"(tl.program_id(1) * M + ROW).to(tl.int64) * {n}")
            mask = ["ROW_IN"] * (self.rows > 1) + [f"(COL < {n})"] * self.ragged
            rest = f", mask={' & '.join(mask)}" if mask else ""
            self.put(f"tl.store(SUMS + COL, ACC_{place}{rest})")


class _Reduction(_Writer):
    """The kernel that adds up partial sums."""

    def __init__(self, problem: Problem, split: int, block: Tile, target: Target, dependent: bool):
        super().__init__(problem, block, target, dependent)
        self.split = split

    def kernel(self) -> KernelSource:
        params = [("P_SUMS", "*fp32"), *self.biases(), *self.ends("input_pointers"),
                  *self.ends("output_pointers"), *self.ends("integers"), ("M", "i32"), ("TILES_M", "i32"),
                  *self.ends("scalars")]
        self.place()
        self.wait(early=True)
        self.results()
        return self.finish("linear_sum", f"The end of a segment: adds up {self.split} parts of every sum.",
                           params)

    def sums(self, place: int, i: int, padded: bool) -> str:
        weights = self.problem.weights
        n, before = weights[i].n, sum(w.n for w in weights[:i]) * self.split
        mask = ["ROW_IN"] * (self.rows > 1) + ["COL_IN"] * padded
        rest = f", mask={' & '.join(mask)}, other=0.0" if mask else ""
        self.put(f"SUMS = P_SUMS + M.to(tl.int64) * {before} + ROW.to(tl.int64) * {n} + COL")
        self.put(f"SUM_{place} = tl.load(SUMS{rest})")
        for part in range(1, self.split):
            self.put(f"SUM_{place} += tl.load(SUMS + M.to(tl.int64) * {part * n}{rest})")
        return f"SUM_{place}"
