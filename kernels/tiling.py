"""Block shapes from a target's memory budget.

`ladder` lists the tiles worth trying, best first; a compiler that runs out of memory on one is given
the next. `choose` is the first of them.

Ascend: everything that is live at the same time lies in the Unified Buffer. Fitted to where the official
compiler (ascendnpu-ir 1.2.0, Ascend910B3) drops double buffering, over nine regions, D from 64 to 30000,
bf16 and fp32: a tile costs, per element, 8 bytes for every full tile that is live at once (two fp32
copies, whatever the dtype in memory), 4 for one in between and 2 for the reductions. It errs on the
small side: a tile that loses double buffering costs more than a smaller one. The compiler for Ascend 950
gives buffers away more freely; `_eager_bytes` was fitted to it in the same way. tests/ascend checks both.

CUDA: a program should move a few KiB a warp and no more (measured by benchmarks/kernel_sweep.py);
tiles live in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from .lanes import columns, power, power_within
from .layout import MAX_ROWS, Structure, Unsupported
from .region import DTYPES, NormRegion, Operand
from .source import Tile
from .targets import Target

#: Ascend: a row of a tile takes a multiple of this many elements (32 bytes of the narrowest dtype).
LANE_MULTIPLE = 16

#: Ascend: the longest row that is taken whole, and ops that read their operand more than once.
MAX_WHOLE_LANE = 8192
BUSY_OPS = {"gelu", "gelu_tanh", "silu", "sigmoid", "tanh"}

#: Ascend: the share of the Unified Buffer that the estimate may fill.
UB_SHARE = 0.95
UB_SHARE_950 = 0.97

#: CUDA: bytes that one program and one warp load of an operand, and the most columns of a tile in
#: registers. All of these by benchmarks/kernel_sweep.py on an H200.
CUDA_TILE_BYTES = 4096
CUDA_WARP_BYTES = 2048
#: CUDA: bytes that one warp loads of rows of at most CUDA_SHORT_ROW_BYTES whose tiles share weights behind
#: the norm, or modulations: of all operands together, two rounds of 16 bytes a thread (LayerNorm -> modulate
#: at D 128 and 256, 8 MB: 5.9 and 6.0 us so, 6.3 and 6.6 in one round, 7.0 (D 256) in four; gated add ->
#: LayerNorm -> modulate, of two operands, at D 128: 10.2 so, 10.8 in four rounds each).
CUDA_SHORT_ROW_BYTES = 512
CUDA_SHARING_WARP_BYTES = 1024
#: CUDA: bytes that a thread loads where such rows have more than two operands of their own, as with a rotary
#: embedding, in programs of that many warps (q and k with RMSNorm and rotary embedding, 8192 tokens, 24 heads
#: of 128, fp32 tables: 56 us so, 67 with twice as many rows, 78 with four times; 32 heads of 64, bf16: 38.5
#: and 42.5).
CUDA_MANY_BYTES, CUDA_MANY_WARPS = 128, 2
#: CUDA: a row that is a program's only one takes a warp for half as many bytes, up to this many warps: its
#: reductions take longer than its loads (LayerNorm at D 4096, 1 MB: 3.1 us so, 3.5 otherwise). Bytes of the
#: row alone, neither padded nor of modulations that rows share: Wan's gated add -> LayerNorm -> modulate at
#: D 1536, 100 MB: 101 us in 2 warps, 114 in 8; SD3.5's LayerNorm -> modulate at D 2432: 12.5 in 4, 15.4 in 8.
#: RMSNorm of one tensor takes up to twice as many (D 8192, 512 MB: 253 us so, 257 in 8; 4 MB: 4.1 and 4.2).
CUDA_ROW_WARPS = 8
#: CUDA: half-precision columns that a warp loads at once. Of several rows a program none takes less: Triton
#: would give threads shorter pieces of a row, and add it up in another order. Where the last round of
#: CUDA_ROW_WARPS is left half empty, half of them take one round more (LayerNorm at D 5120, 8 MB: 6.5 us so,
#: 7.3 otherwise; at D 7168 RMSNorm 5.9 and 6.5, LayerNorm -> modulate 7.4 and 7.0).
CUDA_ROUND = 256
CUDA_MAX_COLS = 16384
CUDA_MAX_WARPS = 16
#: CUDA: from this many bytes on that a call moves for its rows, rows of CUDA_LONG_ROW_BYTES and more are read
#: a second time, from the caches, and not kept in registers meanwhile (gated add -> LayerNorm -> modulate at
#: D 4096, 256 MB an operand: 251 us so, 265 kept; RMSNorm at D 8192, 512 MB: 255 and 260).
#: Not LayerNorm -> modulate of one operand (D 4096, 256 MB: 137 so, 133 kept).
CUDA_AGAIN_BYTES = 2**29
CUDA_LONG_ROW_BYTES = 8192
#: CUDA: a half-precision row that centres and fills at most 3/4 of a tile of more than this many columns is
#: read again at any size, in half the warps (gated add -> LayerNorm -> modulate at D 10240, 64 MB: 69 us so,
#: 94 kept in 16 warps; 1 MB: 4.8 and 4.4. LayerNorm at D 12288: 37.5 and 42.9. RMSNorm is as fast kept).
CUDA_KEPT_COLS = 8192

#: CUDA, where the lane lies across: bytes of the rows that a tile reads side by side at one lane element, and
#: the fewest (a sector, the least that memory moves); elements from which a tile takes the fewest (twice as
#: many where one tile is live and none centred: RMSNorm and SiLU of 384 channels, 384 MB: 236 us so, 296
#: otherwise); elements of all live tiles that a thread holds; and those that the registers of a program hold.
#: By `kernel_sweep.py across` (LayerNorm and SiLU of 384 channels: 120 us so, 157 with 32 rows and 32 of
#: these a thread). Where the number of rows is no multiple of 4, bf16 tiles of 2048 columns spill (by ptxas
#: for sm_90, Triton 3.6).
CUDA_RUN_BYTES = 64
CUDA_SECTOR_BYTES = 32
CUDA_ACROSS_TILE = 8192
CUDA_ACROSS_THREAD = 64
CUDA_ACROSS_ELEMENTS = 32768

#: CUDA: programs per multiprocessor under which tiles are cut smaller.
BUSY = 4

#: CUDA: registers of a multiprocessor, those that a thread may fill with loads (it has 255), and those that
#: the arithmetic takes besides (by ptxas, over LayerNorm, RMSNorm and gated adds, D 768 to 8192: 8 to 32).
CUDA_REGISTERS = 65536
CUDA_THREAD_LOADS = 128
CUDA_THREAD_ARITHMETIC = 32


def choose(region: NormRegion, structure: Structure, sizes: Sequence[int], target: Target) -> Tile:
    """The tile for outer dims of `sizes`; Unsupported if no tile fits the target."""
    return ladder(region, structure, sizes, target)[0]


def ladder(region: NormRegion, structure: Structure, sizes: Sequence[int],
           target: Target) -> tuple[Tile, ...]:
    """Tiles, best first, for outer dims of `sizes` (see `layout.Layout.sizes`).

    A row's result must not depend on the batch that it is in, so sizes never change how a row is
    reduced: they only halve the number of rows of a tile, down to `_lowest`, where the blocked dim is
    short or cores would get no tile.

    Raises:
        Unsupported: none fits.
    """
    rows = sizes[structure.blocked]
    others = prod(sizes) // max(rows, 1)
    tiles = _largest(region, structure, target)
    if not tiles:
        raise Unsupported(f"no tile of {region.lane} columns fits {target.budget} bytes of {target.name}")
    busy = BUSY * target.cores if target.power_of_two else target.cores
    if structure.across and target.power_of_two:
        return tuple(_no_higher(tile, power(rows)) for tile in tiles)
    result = []
    for tile in tiles:
        height, lowest = tile.rows, _lowest(tile, region, target)
        while height // 2 >= lowest and not _fills(height, rows, others, busy):
            height //= 2
        tile = replace(tile, rows=height)
        count = -(-rows // height) * others
        again = tile.reads_again or _reads_again(tile, count, region, structure, target)
        first = not again and _loads_first(tile, count, region, structure, target)
        result.append(replace(tile, loads_first=first, reads_again=again))
    return tuple(dict.fromkeys(result))


def _reads_again(tile: Tile, count: int, region: NormRegion, structure: Structure, target: Target) -> bool:
    """Whether a GPU's `count` programs of one row read it again when its statistics are known. How the row is
    reduced does not change."""
    own = [DTYPES[x.dtype] for x in _own(region, structure)]
    if not _is_row(tile, region, target) or not own:
        return False
    moved = sum(own) + sum(DTYPES[out.dtype] for out in region.outputs)
    return (region.lane * max(own) >= CUDA_LONG_ROW_BYTES and count * region.lane * moved >= CUDA_AGAIN_BYTES
            and (len(own) > 1 or _modulations(region, structure) < 2))


def _loads_first(tile: Tile, count: int, region: NormRegion, structure: Structure, target: Target) -> bool:
    """Whether a GPU's `count` programs of one row load all they need before the statistics: where all of
    them run at once, registers that wait cost nothing, and a load that comes late is waited for."""
    shared = _shared(region, structure)
    if not _is_row(tile, region, target) or not shared:
        return False
    threads = 32 * tile.num_warps
    element = sum(DTYPES[x.dtype] for x in (*_own(region, structure), *shared))
    loads = element * tile.cols // threads // 4
    resident = CUDA_REGISTERS // (threads * (loads + CUDA_THREAD_ARITHMETIC))
    return loads <= CUDA_THREAD_LOADS and count <= resident * target.cores


def _is_row(tile: Tile, region: NormRegion, target: Target) -> bool:
    """Whether a GPU's program has one whole row, and normalises it."""
    return target.power_of_two and tile.rows == 1 and tile.cols >= region.lane and bool(region.norms)


def _own(region: NormRegion, structure: Structure) -> list[Operand]:
    """Inputs with a lane of their own for every row."""
    return [x for x, s in zip(region.inputs, structure.operands) if s.lane and s.moving[structure.blocked]]


def _shared(region: NormRegion, structure: Structure) -> list[Operand]:
    """Inputs with a lane that all rows of a tile share."""
    return [x for x, s in zip(region.inputs, structure.operands)
            if s.lane and not s.moving[structure.blocked]]


def _modulations(region: NormRegion, structure: Structure) -> int:
    """How many of them are no norm's own."""
    norms = {arg for line in region.norms for arg in line.args}
    return sum(x.name not in norms for x in _shared(region, structure))


def _fills(height: int, rows: int, others: int, busy: int) -> bool:
    """Tiles of `height` rows waste at most a fifth of their rows and leave no core without work."""
    blocks = -(-rows // height)
    return blocks * height <= 1.25 * rows and blocks * others >= busy


def _lowest(tile: Tile, region: NormRegion, target: Target) -> int:
    """The fewest rows with which a tile's rows are reduced as in the largest."""
    if tile.cols < region.lane:
        return tile.rows
    # With one row, weights have a tile's shape, and the compiler may lay the row out like them.
    lowest = min(2, tile.rows)
    if target.power_of_two:
        # Triton gives a thread its full 16 bytes of a row only where there are elements enough.
        lowest = max(lowest, CUDA_ROUND * tile.num_warps // tile.cols)
    return lowest


@lru_cache(maxsize=1024)
def _largest(region: NormRegion, structure: Structure, target: Target) -> tuple[Tile, ...]:
    """The largest tiles that fit, best first: whole rows, then column passes."""
    return (_cuda if target.power_of_two else _npu)(region, structure, target)


# -- CUDA --------------------------------------------------------------------------------------------


def _cuda(region: NormRegion, structure: Structure, target: Target) -> tuple[Tile, ...]:
    if structure.across:
        return _across(region, structure)
    width, cols = _width(region), columns(region)
    if cols > CUDA_MAX_COLS // (2 if region.compute == "f64" else 1):
        return (Tile(1, 4096, 8), Tile(1, 1024, 4))
    own = [DTYPES[x.dtype] for x in _own(region, structure)]
    centred = any(line.op == "layer_norm" for line in region.norms)
    each, short = _width_streaming(region, structure), cols * width <= CUDA_SHORT_ROW_BYTES
    rows = max(1, CUDA_TILE_BYTES // (cols * width))
    if rows == 2 and len(own) > 1:
        rows = 1  # add -> LayerNorm at D 1024, 8 MB: 10.2 us so, 10.6 with two rows
    warps = rows * cols * width // CUDA_WARP_BYTES
    if short and len(own) > 2:
        rows, warps = _rows_of_many(cols, sum(own)), CUDA_MANY_WARPS
    elif short and _modulations(region, structure) and region.lane % (CUDA_ROUND // 32) == 0:
        # (Threads that load single elements share a row with those of other warps.)
        warps = min(rows * cols * each * len(own) // CUDA_SHARING_WARP_BYTES, rows * cols // CUDA_ROUND)
    rows = 1 if structure.wide else min(MAX_ROWS, rows)
    if rows == 1:
        twice = 2 * region.lane * each // CUDA_WARP_BYTES
        most = CUDA_ROW_WARPS if centred or len(own) > 1 else 2 * CUDA_ROW_WARPS
        warps = max(cols * each // CUDA_WARP_BYTES, min(most, power_within(twice)))
        if each == 2 and warps == CUDA_ROW_WARPS and \
                region.lane % (CUDA_ROUND * warps) == CUDA_ROUND * warps // 2:
            warps //= 2
    warps = max(1, min(CUDA_MAX_WARPS, warps))
    if centred and width == 2 and cols > CUDA_KEPT_COLS and 4 * region.lane <= 3 * cols:
        return (Tile(rows, cols, max(1, warps // 2), reads_again=True),)
    return (Tile(rows, cols, warps),)


def _rows_of_many(cols: int, bytes_of_all: int) -> int:
    """Rows of a tile that CUDA_MANY_WARPS load, of operands with so many bytes an element."""
    elements = max(CUDA_ROUND // 32, power_within(CUDA_MANY_BYTES // bytes_of_all))
    return max(1, 32 * CUDA_MANY_WARPS * elements // cols)


def _width(region: NormRegion) -> int:
    """Bytes of the widest element in memory."""
    return max(DTYPES[x.dtype] for x in (*region.inputs, *region.outputs))


def _width_streaming(region: NormRegion, structure: Structure) -> int:
    """Bytes of the widest element of what every row reads and writes for itself."""
    return max(DTYPES[x.dtype] for x in (*_own(region, structure), *region.outputs))


def _across(region: NormRegion, structure: Structure) -> tuple[Tile, ...]:
    """Rows that are neighbours in memory: whole lanes where registers hold them, else pieces of the lane.
    Threads share rows, and so the order of a row's sums depends on their number: it never follows the batch.
    """
    if structure.wide:
        return (Tile(1, 4096, 8),)
    rows, cols = _shape_across(region, structure)
    width = _width(region)
    if not holds_across(region, structure):
        rows, cols = CUDA_RUN_BYTES // width, 128
    # Not more threads than columns: each would load a weight again for every row (Triton 3.6).
    warps = min(rows * cols * _live_across(region, structure) // (32 * CUDA_ACROSS_THREAD), cols // 32,
                CUDA_MAX_WARPS)
    return (Tile(rows, cols, max(1, power_within(warps))),)


def _shape_across(region: NormRegion, structure: Structure) -> tuple[int, int]:
    """Rows and columns of a tile of whole lanes that lie across."""
    width, cols = _width(region), max(32, columns(region))
    rows = min(MAX_ROWS, max(CUDA_RUN_BYTES, CUDA_TILE_BYTES // cols) // width)
    light = _live_across(region, structure) == 1 and not any(x.op == "layer_norm" for x in region.norms)
    while rows * cols > CUDA_ACROSS_TILE * (2 if light else 1) and rows * width > CUDA_SECTOR_BYTES:
        rows //= 2
    return rows, cols


def holds_across(region: NormRegion, structure: Structure) -> bool:
    """Whether registers hold whole lanes that lie across. In pieces, what is above a norm is read once more
    for every pass, by few programs: no site is grown that far (fusion_pass/contract.py)."""
    rows, cols = _shape_across(region, structure)
    return rows * cols * _live_across(region, structure) <= CUDA_ACROSS_ELEMENTS


def _live_across(region: NormRegion, structure: Structure) -> int:
    """Registers of a thread for each element that it holds of a tile."""
    return live_tiles(region, structure) * (2 if region.compute == "f64" else 1)


def _no_higher(tile: Tile, rows: int) -> Tile:
    """`tile` with at most that many rows, and as much work for a warp."""
    height = min(tile.rows, rows)
    return replace(tile, rows=height, num_warps=max(1, tile.num_warps * height // tile.rows))


# -- Ascend ------------------------------------------------------------------------------------------


def _npu(region: NormRegion, structure: Structure, target: Target) -> tuple[Tile, ...]:
    budget = int(target.budget * (UB_SHARE_950 if target.eager_buffers else UB_SHARE))
    peak = live_tiles(region, structure)
    whole, passed = held_bytes(region, structure)
    busy = 2 * any(line.op in BUSY_OPS for line in region.body)
    # A sum that is stored and then normalised is written as soon as it is known (codegen), which spares
    # the tile that it would wait in.
    passing = peak > 1 and _stores_what_it_reads(region)
    least = _eager_bytes(region, structure, passing) if target.eager_buffers else 0
    each = max(8 * peak + (2 if passing else 6) + busy, least)
    lane = -(-region.lane // LANE_MULTIPLE) * LANE_MULTIPLE
    tiles = []
    fit = (budget - whole * lane) // (each * lane)
    if fit > 16:
        fit -= fit % 8
    if structure.wide or fit <= 1:
        # A row alone needs less: its reductions have no tree of rows.
        narrow = all(DTYPES[x.dtype] < 4 for x in (*region.inputs, *region.outputs))
        alone = max((8 if passing and narrow else 10) * peak + busy, least) + whole
        fit = 1 if lane <= MAX_WHOLE_LANE and alone * lane <= budget else 0
    tiles += [Tile(min(fit, MAX_ROWS) >> i, region.lane) for i in range(fit.bit_length())]
    # Column passes: a few rows share the loads of the weights; columns stay wide enough for long
    # vector instructions.
    for rows in (4, 2, 1):
        wide = budget // (each * rows + passed) // 128 * 128
        if (wide >= 512 and not structure.wide) or (rows == 1 and wide >= 128):
            cols = _columns(region.lane, wide)
            if cols < region.lane:
                tiles.append(Tile(rows, cols))
    return tuple(t for t in dict.fromkeys(tiles) if t.rows)


def _eager_bytes(region: NormRegion, structure: Structure, passing: bool) -> int:
    """Bytes per element of a tile on Ascend 950, where every tile that streams through is held twice. Fitted,
    like the rest, to where that SoC's compiler drops double buffering."""
    tensors = (*region.inputs, *region.outputs)
    stream = sum(DTYPES[x.dtype] for x, s in zip(tensors, structure.operands)
                 if s.lane and s.moving[structure.blocked])
    if passing and len(region.norms) == 1:
        return stream * 3 // 2
    wide = any(DTYPES[x.dtype] > 2 for x, s in zip(tensors, structure.operands) if any(s.moving))
    affine = any(s.lane and not any(s.moving) for s in structure.operands)
    # Half precision is widened, and a norm in fp32 centres its rows a second time (codegen).
    again = 4 * any(x.op == "layer_norm" and x.dtype == region.compute for x in region.body)
    return 2 * stream + (8 if wide else (8 if affine else 6) + again)


def _stores_what_it_reads(region: NormRegion) -> bool:
    """Whether an output is also an operand of what comes after it."""
    return not {out.value for out in region.outputs}.isdisjoint(a for x in region.body for a in x.args)


def _columns(lane: int, most: int) -> int:
    """Columns of a pass: a divisor of D if one is at least half as wide as allowed (no masks), else
    a multiple of 128."""
    for cols in range(most, most // 2, -LANE_MULTIPLE):
        if lane % cols == 0:
            return cols
    passes = -(-lane // most)
    return min(most, -(-lane // passes // 128) * 128)


@lru_cache(maxsize=1024)
def live_tiles(region: NormRegion, structure: Structure) -> int:
    """The most full tiles that are live at once, in the order of the region; a line's result takes the
    place of an operand that it reads last. Inputs are all live from the start: the kernel loads first."""
    full = {x.name: s.lane and s.moving[structure.blocked]
            for x, s in zip(region.inputs, structure.operands)}
    last = {a: i for i, line in enumerate(region.body) for a in line.args if isinstance(a, str)}
    last |= {out.value: len(region.body) for out in region.outputs}
    live = {name for name, whole in full.items() if whole and name in last}
    peak = max(1, len(live))
    for i, line in enumerate(region.body):
        full[line.name] = any(full.get(a, False) for a in line.args if isinstance(a, str))
        live = {n for n in live if last[n] > i}
        if full[line.name] and line.name in last:
            live.add(line.name)
        peak = max(peak, len(live))
    return peak


def held_bytes(region: NormRegion, structure: Structure) -> tuple[int, int]:
    """Bytes per column of the operands that all rows of a tile share: (whole rows, column passes).

    One that is held for the whole program takes its own dtype and fp32, one that is loaded for every
    tile or pass two fp32 tiles."""
    whole = passed = 0
    for operand, shape in zip(region.inputs, structure.operands):
        if not shape.lane or shape.moving[structure.blocked]:
            continue
        size = DTYPES[operand.dtype]
        whole += 8 if any(shape.moving) else 4 + (size if size < 4 else 0)
        passed += 8
    return whole, passed
