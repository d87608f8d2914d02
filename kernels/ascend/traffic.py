"""Bytes that a launch moves between global memory and the cores: at the least, by the kernel's source, and
by its final module. All count; nothing is run, and nothing is a time."""

from __future__ import annotations

import re

from ..offline import Offline
from ..region import DTYPES
from .cost import loop_costs
from .toolchain import Planned

_LOAD = re.compile(r"tl\.load\([AP]_(\w+)")


def ideal_bytes(offline: Offline, programs: int) -> tuple[int, int]:
    """(read, written) bytes of the call that `offline` walks, at the least: every element of a tensor
    once; what is the same for all rows once for each of the `programs`."""
    region, walk = offline.region, offline.walk
    used = {a for line in region.body for a in line.args} | {out.value for out in region.outputs}
    moved = [0, 0]
    for i, (x, operand) in enumerate(zip((*region.inputs, *region.outputs), walk.structure.operands)):
        is_output = i >= len(region.inputs)
        if not is_output and x.name not in used:
            continue
        elements = region.lane if operand.lane else 1
        for size, moves in zip(walk.sizes, operand.moving):
            elements *= size if moves else 1
        times = 1 if is_output or any(operand.moving) else programs
        moved[is_output] += times * elements * DTYPES[x.dtype]
    return moved[0], moved[1]


def source_bytes(offline: Offline) -> int:
    """Bytes by the loads in the kernel's source: one in front of the loop over tiles once a program, one
    inside once a tile, in as many passes over the columns as there are. Outputs are written once."""
    region, walk = offline.region, offline.walk
    structure, tiles = walk.structure, walk.tiles(offline.kernel.tile.rows)
    around, _, loop = offline.kernel.source.partition("for TILE in ")
    total = ideal_bytes(offline, offline.grid)[1]
    rows = 1
    for size in walk.sizes:
        rows *= size
    for x, operand in zip(region.inputs, structure.operands):
        # What moves along the rows of a tile is read for each row, other operands once a tile.
        times = _LOAD.findall(around).count(x.name) * offline.grid
        times += _LOAD.findall(loop).count(x.name) * (rows if operand.moving[structure.blocked] else tiles)
        total += times * (region.lane if operand.lane else 1) * DTYPES[x.dtype]
    return total


def passes(offline: Offline) -> int:
    """How often a launch reads the rows that it normalises: once where a tile holds them whole."""
    return max(_LOAD.findall(offline.kernel.source).count(x.name) for x in offline.region.inputs)


def launch_bytes(offline: Offline, planned: Planned) -> int | None:
    """Bytes by the final module: what stands outside of its loop once a program, its loop once a tile,
    loops inside of that once a column tile; a ragged tile counts as a full one. None where the module has
    other loops."""
    region, tile = offline.region, offline.kernel.tile
    tiles, columns = offline.walk.tiles(tile.rows), -(-region.lane // tile.cols)
    times = {0: offline.grid, 1: tiles, 2: tiles * columns}
    total = 0
    for loop in loop_costs(planned):
        amount = sum(n for path, n in loop.bytes.items() if "GM" in path)
        if len(loop.loop) not in times:
            return None
        total += amount * times[len(loop.loop)]
    return total
