"""Block shapes from a target's memory budget.

`ladder` lists the tiles worth trying, best first; a compiler that runs out of memory on one is given
the next. `choose` is the first of them.

Ascend: everything that is live at the same time lies in the Unified Buffer, loaded and stored tiles
twice for double buffering. The estimate was fitted to the official compiler's own memory report
(tests/kernels/test_ascend_kernels.py compiles what it chooses); it errs on the safe side, since a tile
that loses double buffering costs more than a smaller one.

CUDA: a program should move a few KiB a warp and no more (measured by benchmarks/kernel_sweep.py);
tiles live in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from .codegen import Tile
from .layout import MAX_ROWS, Structure, Unsupported
from .region import DTYPES, NORMS, NormRegion
from .targets import Target

#: Elements of a lane block are multiples of this on Ascend: 32 bytes of the narrowest dtype.
LANE_MULTIPLE = 16

#: CUDA: bytes that one program and one warp load, and the most columns of a tile in registers.
CUDA_TILE_BYTES = 8192
CUDA_WARP_BYTES = 2048
CUDA_MAX_COLS = 16384
CUDA_MAX_WARPS = 16

#: CUDA: programs per multiprocessor under which tiles are cut smaller.
BUSY = 4


def choose(region: NormRegion, structure: Structure, sizes: Sequence[int], target: Target) -> Tile:
    """The tile for outer dims of `sizes`; Unsupported if no tile fits the target."""
    return ladder(region, structure, sizes, target)[0]


def ladder(region: NormRegion, structure: Structure, sizes: Sequence[int],
           target: Target) -> tuple[Tile, ...]:
    """Tiles, best first, for outer dims of `sizes` (see `layout.Layout.sizes`).

    Sizes only choose between powers of two of the largest tile, so that few kernels serve all sizes:
    a tile is no longer than the blocked dim needs, and small enough that every core gets some.

    Raises:
        Unsupported: none fits.
    """
    rows = sizes[structure.blocked]
    others = prod(sizes) // max(rows, 1)
    tiles = _largest(region, structure, target)
    if not tiles:
        raise Unsupported(f"no tile of {region.lane} columns fits {target.budget} bytes of {target.name}")
    busy = BUSY * target.cores if target.backend == "cuda" else target.cores
    result = []
    for tile in tiles:
        height = tile.rows
        if tile.cols < region.lane:
            # A lower column tile is wider, and follows in the list.
            if height == 1 or _fills(height, rows, others, busy):
                result.append(tile)
            continue
        while height > 1 and not _fills(height, rows, others, busy):
            height //= 2
        result.append(_with_rows(tile, height))
    return tuple(dict.fromkeys(result))


def _fills(height: int, rows: int, others: int, busy: int) -> bool:
    """Tiles of `height` rows waste at most a fifth of their rows and leave no core without work."""
    blocks = -(-rows // height)
    return blocks * height <= 1.25 * rows and blocks * others >= busy


def _with_rows(tile: Tile, height: int) -> Tile:
    """`tile` with fewer rows, and as many fewer warps."""
    if height == tile.rows:
        return tile
    return Tile(height, tile.cols, max(1, tile.num_warps * height // tile.rows))


@lru_cache(maxsize=1024)
def _largest(region: NormRegion, structure: Structure, target: Target) -> tuple[Tile, ...]:
    """The largest tiles that fit, best first: whole rows, then column passes."""
    return (_cuda if target.power_of_two else _npu)(region, structure, target)


def _power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# -- CUDA --------------------------------------------------------------------------------------------


def _cuda(region: NormRegion, structure: Structure, target: Target) -> tuple[Tile, ...]:
    width = max(DTYPES[x.dtype] for x in (*region.inputs, *region.outputs))
    cols = _power(region.lane)
    if cols > CUDA_MAX_COLS // (2 if region.compute == "f64" else 1):
        return (Tile(1, 4096, 8), Tile(1, 1024, 4))
    rows = 1 if structure.wide else min(MAX_ROWS, max(1, CUDA_TILE_BYTES // (cols * width)))
    return (Tile(rows, cols, max(1, min(CUDA_MAX_WARPS, rows * cols * width // CUDA_WARP_BYTES))),)


# -- Ascend ------------------------------------------------------------------------------------------


def _npu(region: NormRegion, structure: Structure, target: Target) -> tuple[Tile, ...]:
    moving, fixed = element_bytes(region, structure, target.double_buffer)
    lane = max(region.lane, LANE_MULTIPLE)
    fit = max(0, min(MAX_ROWS, (target.budget - fixed * lane) // (moving * lane)))
    if structure.wide:
        fit = min(fit, 1)
    if fit > 16:
        fit -= fit % 8
    tiles = [Tile(fit >> i, region.lane) for i in range(fit.bit_length())]
    # Column passes: as many rows as leave columns wide enough for long vector instructions.
    for rows in (8, 4, 2, 1):
        wide = target.budget // ((moving + fixed) * rows) // 128 * 128
        if (wide >= 512 and not structure.wide) or (rows == 1 and wide >= 128):
            cols = _columns(region.lane, min(wide, 8192))
            if cols < region.lane:
                tiles.append(Tile(rows, cols))
    return tuple(dict.fromkeys(tiles))


def _columns(lane: int, most: int) -> int:
    """Columns of a pass: a divisor of D if one is at least half as wide as allowed (no masks), else
    a multiple of 128."""
    for cols in range(most, most // 2, -LANE_MULTIPLE):
        if lane % cols == 0:
            return cols
    passes = -(-lane // most)
    return min(most, -(-lane // passes // 128) * 128)


@lru_cache(maxsize=1024)
def element_bytes(region: NormRegion, structure: Structure, double: bool) -> tuple[int, int]:
    """Estimated bytes per element of a tile, and per element of a row held for the whole program.

    A tile that is loaded or stored counts in its own dtype, twice if double buffered; values in between
    count as fp32 at the moment when most of them are live, in the order of the region.
    """
    copies = 2 if double else 1
    blocked = structure.blocked
    full = {x.name: s.lane and s.moving[blocked]
            for x, s in zip(region.inputs, structure.operands)}
    moving = fixed = 0
    for operand, shape in zip(region.inputs, structure.operands):
        if full[operand.name]:
            moving += copies * DTYPES[operand.dtype]
        elif shape.lane:
            fixed += 4 + copies * DTYPES[operand.dtype]
    moving += sum(copies * DTYPES[x.dtype] for x in region.outputs)
    for line in region.body:
        full[line.name] = any(full.get(a, False) for a in line.args if isinstance(a, str))
    last = {a: i for i, line in enumerate(region.body) for a in line.args if isinstance(a, str)}
    last.update({out.value: len(region.body) for out in region.outputs})
    live, peak = set(), 0
    for i, line in enumerate(region.body):
        live.update(a for a in line.args if isinstance(a, str) and full.get(a))
        if full[line.name]:
            live.add(line.name)
        # A norm holds its centred value and the squares while it reduces.
        extra = 1 if line.op in NORMS else 0
        peak = max(peak, len(live) + extra)
        live = {n for n in live if last.get(n, -1) > i}
    return moving + 4 * peak, fixed
