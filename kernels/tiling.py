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

from functools import lru_cache

from .codegen import Tile
from .layout import MAX_ROWS, Structure, Unsupported
from .region import DTYPES, NORMS, NormRegion
from .targets import Target

#: Elements of a lane block are multiples of this on Ascend: 32 bytes of the narrowest dtype.
LANE_MULTIPLE = 16

#: CUDA: bytes that one program moves, and the most columns of a tile in registers.
CUDA_TILE_BYTES = 8192
CUDA_MAX_COLS = 16384
CUDA_MAX_WARPS = 16


def choose(region: NormRegion, structure: Structure, rows: int, target: Target) -> Tile:
    """The tile for `rows` rows along the blocked dim; Unsupported if no tile fits the target."""
    return ladder(region, structure, rows, target)[0]


@lru_cache(maxsize=4096)
def ladder(region: NormRegion, structure: Structure, rows: int, target: Target) -> tuple[Tile, ...]:
    """Tiles, best first. `rows` is the size of the blocked dim: no tile is larger than it needs.

    Raises:
        Unsupported: none fits.
    """
    if structure.wide:
        rows = 1
    if target.power_of_two:
        return _cuda(region, structure, rows)
    tiles = _npu(region, structure, rows, target)
    if not tiles:
        raise Unsupported(f"no tile of {region.lane} columns fits {target.budget} bytes of {target.name}")
    return tiles


def _power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# -- CUDA --------------------------------------------------------------------------------------------


def _cuda(region: NormRegion, structure: Structure, rows: int) -> tuple[Tile, ...]:
    width = max(DTYPES[x.dtype] for x in (*region.inputs, *region.outputs))
    cols = _power(region.lane)
    if cols > CUDA_MAX_COLS // (2 if region.compute == "f64" else 1):
        cols = 4096
        return (Tile(1, cols, 8), Tile(1, cols // 4, 4))
    fit = max(1, CUDA_TILE_BYTES // (cols * width))
    block = min(fit, _power(rows), MAX_ROWS)
    # A short blocked dim (attention heads, say) should not leave most of a tile idle.
    while block > 1 and -(-rows // block) * block > 1.25 * rows:
        block //= 2
    warps = min(CUDA_MAX_WARPS, max(1, block * cols * width // 2048))
    tiles = [Tile(block, cols, warps)]
    if block > 1:
        tiles.append(Tile(1, cols, max(1, min(CUDA_MAX_WARPS, cols * width // 2048))))
    return tuple(tiles)


# -- Ascend ------------------------------------------------------------------------------------------


def _npu(region: NormRegion, structure: Structure, rows: int, target: Target) -> tuple[Tile, ...]:
    tiles = []
    moving, fixed = element_bytes(region, structure, target.double_buffer)
    lane = max(region.lane, LANE_MULTIPLE)
    fit = (target.budget - fixed * lane) // (moving * lane)
    if fit >= 1:
        most = balanced(rows, min(fit, MAX_ROWS))
        while most >= 1:
            tiles.append(Tile(most, region.lane))
            if most == 1:
                break
            most = balanced(rows, most // 2)
    else:
        fit = 0
    # Column passes: rows enough to keep the loop long, columns as wide as the budget allows.
    for height in (8, 4, 2, 1):
        wide = target.budget // ((moving + fixed) * height) // 128 * 128
        if wide >= 512 and height <= rows and not structure.wide or (height == 1 and wide >= 128):
            cols = _columns(region.lane, min(wide, 8192))
            if cols < region.lane:
                tiles.append(Tile(height, cols))
    return tuple(dict.fromkeys(tiles))


def balanced(rows: int, most: int) -> int:
    """Rows of a tile, at most `most`, so that the last tile is nearly as full as the others."""
    most = max(1, min(rows, most))
    return -(-rows // -(-rows // most))


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
