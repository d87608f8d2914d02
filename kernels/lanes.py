"""Where the elements of a lane lie in the columns of a tile, and how they change places there.

Halves change places by reshapes of the tile, whose sizes must be powers of two (upstream Triton). Where
half a head (half the lane, where it has no heads) is none, each half is padded to the next one.
"""

from __future__ import annotations

from .layout import Unsupported
from .region import LANE_OPS, Line, NormRegion
from .source import Tile
from .targets import Target


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def power_within(n: int) -> int:
    """The largest power of two that is at most n; 0 where there is none."""
    return power(n + 1) // 2


def by_halves(region: NormRegion) -> bool:
    """Whether padding stands behind each half of a head instead of behind the lane."""
    return region.head != power(region.head) and any(line.op == "rotate_half" for line in region.body)


def columns(region: NormRegion) -> int:
    """Columns, a power of two, of a tile that holds the lane."""
    return power(region.heads) * power(region.head) if by_halves(region) else power(region.lane)


def held(region: NormRegion, cols: int) -> bool:
    """Whether a tile of `cols` columns holds the lane."""
    return cols >= (columns(region) if by_halves(region) else region.lane)


def moves_of(region: NormRegion) -> str:
    """The ops of `region` that move elements along the lane, in words; "" where none does."""
    return ", ".join(sorted({line.op for line in region.body} & set(LANE_OPS)))


def check_moves(region: NormRegion, tile: Tile, target: Target) -> None:
    """Raises Unsupported where a kernel cannot move elements along the lane as `region` does."""
    moves = moves_of(region)
    if not target.permutes:
        if moves:
            raise Unsupported(f"{moves}: {target.name} permutes a lane element by element")
        if any(map(region.is_shared, region.inputs)):
            raise Unsupported(f"heads that share an operand: {target.name} gathers a lane element by element")
    if moves and not held(region, tile.cols) and (by_halves(region) or tile.cols % region.head):
        raise Unsupported(f"{moves} of {region.lane} columns, which no tile holds")


def places(region: NormRegion, cols: int, name: str, shape: str) -> list[str]:
    """Source of `name`, the element of each column of a tile padded by halves, and of `name`_IN, whether it
    is one of the lane. `shape` is what makes a [cols] of the shape that they have."""
    half, room = region.head // 2, power(region.head) // 2
    inside = f"PLACE % {room} < {half}"
    if cols > 2 * room * region.heads:
        inside = f"({inside}) & (PLACE < {2 * room * region.heads})"
    return [f"PLACE = tl.arange(0, {cols}){shape}",
            f"{name} = PLACE // {room} * {half} + PLACE % {room}",
            f"{name}_IN = {inside}"]


def moved(region: NormRegion, line: Line, tile: str, rows: int, cols: int) -> tuple[str, str]:
    """Source of a lane op of the value `tile` of `[rows, cols]`: a statement, and what yields the result. The
    two halves of each head (or the two of every pair) change places, or one of the two takes both."""
    first, second = f"FIRST_{line.name}", f"SECOND_{line.name}"
    halves = line.op == "rotate_half"
    if halves:
        head = power(region.head)
        parts = f"({rows}, {cols // head}, 2, {head // 2})" if cols > head else f"({rows}, 2, {head // 2})"
        swap = "(0, 1, 3, 2)" if cols > head else "(0, 2, 1)"
        tile = f"tl.permute(tl.reshape({tile}, {parts}), {swap})"
    else:
        if by_halves(region) and region.head % 4:
            raise Unsupported(f"pairs and halves of {region.head} columns in one kernel")
        tile = f"tl.reshape({tile}, ({rows}, {cols // 2}, 2))"
    # Times -1: Triton's -x is 0 - x, which loses the sign of a zero.
    pair = {"repeat_even": (first, first), "repeat_odd": (second, second)}.get(
        line.op, (f"{second} * -1.0", first))
    text = "tl.join({}, {})".format(*pair)
    if halves:
        text = f"tl.permute({text}, {swap})"
    return f"{first}, {second} = tl.split({tile})", f"tl.reshape({text}, ({rows}, {cols}))"
