"""Block shapes for a segment's kernel, and which of them are worth measuring.

The shapes, but for the narrow ones, are those that came first, or close, for some number of rows and some
size in benchmarks/fused_linear.py on an H200; a cost model orders them for a call. It knows what differs
between them: the bytes that a multiprocessor reads through the L2 cache, and what splitting sums costs.
Reading the weights from memory, the larger part, they have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GemmTile:
    """Block shape and launch options of one way to run a segment.

    Attributes:
        rows: rows of a tile of the output. 1: products are summed by the vector units, without tl.dot.
        cols: columns of a tile of the output.
        depth: steps along K in one trip of the main loop.
        num_warps, num_stages: Triton's.
        split: programs that share the K of one tile. More than 1: they write fp32 sums, which a second
            kernel adds up, in order, before bias and epilogue.
        swapped: tl.dot(W, A^T) instead of tl.dot(A, W^T): the weight's columns take the long side of the
            matrix units where A has few rows.
        norm_ahead: the norm runs as a kernel of its own and writes A; else every program normalises its
            rows itself.
        overlap: the kernel starts while the one in front still runs, and waits for it before it reads A
            (devices with programmatic dependent launch; elsewhere it says nothing).
        prefetch: trips of the main loop whose weights it fetches into the L2 cache before that wait.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int = 4
    num_stages: int = 3
    split: int = 1
    swapped: bool = False
    norm_ahead: bool = False
    overlap: bool = True
    prefetch: int = 0

    def __str__(self) -> str:
        words = [f"{self.rows} x {self.cols} x {self.depth}", f"{self.num_warps} warps",
                 f"{self.num_stages} stages"]
        words += [f"split {self.split}"] * (self.split > 1)
        words += ["swapped"] * self.swapped + ["norm ahead"] * self.norm_ahead
        words += ["no overlap"] * (not self.overlap)
        words += [f"prefetch {self.prefetch}"] * (self.prefetch > 0)
        return ", ".join(words)


#: Bytes of shared memory and fp32 sums that one program can hold (Hopper; Ampere has 163 KiB, and its
#: compiler refuses the tiles that are too large there).
SHARED_BYTES = 227 * 1024
MOST_SUMS = 128 * 256

#: Shortest block along K of a tl.dot.
LEAST_DEPTH = 16

#: Fewest steps along K that are worth a program of their own.
LEAST_STEPS = 1024

#: Bytes that one multiprocessor reads in a microsecond from the L2 cache, all of them write or read there
#: fp32 sums, and microseconds of the kernel that adds those up. Rough.
L2_BYTES = 160e3
SUM_BYTES = 3e6
SUM_MICROSECONDS = 2.0

#: One row: vector units.
VECTOR = tuple(GemmTile(1, *shape) for shape in (
    (8, 1024, 4, 1), (4, 2048, 4, 1), (16, 256, 4, 1), (8, 512, 4, 1), (4, 1024, 4, 1), (2, 4096, 4, 1),
    (2, 1024, 4, 1), (4, 256, 4, 1)))

#: Up to 16 rows: the weights on the long side of the matrix units.
FEW = tuple(GemmTile(16, *shape, swapped=True) for shape in (
    (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 4), (64, 64, 4, 8), (64, 64, 4, 5), (64, 256, 4, 3)))

#: More rows.
MANY = tuple(GemmTile(*shape) for shape in (
    (128, 128, 64, 8, 5), (128, 256, 64, 8, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 5),
    (128, 64, 64, 8, 6), (64, 64, 64, 4, 6), (128, 64, 64, 8, 4)))

#: Of few columns, for up to 16 rows and for more: many programs without splitting sums, which takes a second
#: launch. Tried only where launching is the time; see `unsplit`.
NARROW_FEW = (GemmTile(16, 16, 256, 4, 5), GemmTile(16, 32, 256, 4, 5))
NARROW_MANY = (GemmTile(64, 32, 128, 4, 5),)

#: Bytes of weights that take longer to read than two launches take the host: some 20 us on an H200.
LAUNCH_BYTES = 80e6


def tiles(m: int, n: int, k: int, joint: int, norm: bool, cores: int) -> tuple[GemmTile, ...]:
    """The tiles worth measuring, best guess first, for `m` rows of `k` elements and `n` features: those
    of all projections together, of which `joint` share an epilogue. `norm`: there is one in front.

    As many as it takes: in benchmarks/ffn_chain.py on an H200 the fastest of six was the first for 128 rows,
    one of the first three for 16, and any for one row; for 58 rows (SeedVR's text) one of the first two.
    """
    n = -(-n // joint)
    shapes, most = (VECTOR, 6) if m == 1 else (FEW, 4) if m <= 16 else (MANY, 2)
    found = []
    for tile in _whole(shapes, m, k, joint, norm):
        found.append(tile)
        split = 2
        while m > 1 and k // split >= LEAST_STEPS and _programs(tile, m, n) * split <= cores:
            found.append(replace(tile, split=split))
            split *= 2
    found.sort(key=lambda tile: _cost(tile, m, n, k, joint, cores))
    return tuple(dict.fromkeys(found))[:most]


def unsplit(m: int, n: int, k: int, joint: int, norm: bool, cores: int) -> tuple[GemmTile, ...]:
    """Where some of `tiles` split their sums: the best guess without, if it is none of them; else nothing.
    Nothing either where two launches are not the time."""
    known = tiles(m, n, k, joint, norm, cores)
    if 2 * n * k > LAUNCH_BYTES or all(tile.split == 1 for tile in known):
        return ()
    shapes = (*FEW, *NARROW_FEW) if m <= 16 else (*MANY, *NARROW_MANY)
    n = -(-n // joint)
    best = min(_whole(shapes, m, k, joint, norm), key=lambda tile: _cost(tile, m, n, k, joint, cores))
    return () if best in known else (best,)


def _whole(shapes: tuple[GemmTile, ...], m: int, k: int, joint: int, norm: bool) -> list[GemmTile]:
    """Those that fit, as they run for `m` rows of `k` elements, unsplit."""
    longest = max(LEAST_DEPTH, 1 << (k - 1).bit_length())
    return [replace(tile, depth=min(tile.depth, longest), norm_ahead=norm and m > 1)
            for tile in shapes if _fits(tile, joint)]


def _fits(tile: GemmTile, joint: int) -> bool:
    if tile.rows == 1:
        return tile.cols * tile.depth * joint <= 64 * 32 * tile.num_warps
    shared = 2 * tile.num_stages * (tile.rows + joint * tile.cols) * tile.depth
    return shared <= SHARED_BYTES and tile.rows * tile.cols * joint <= MOST_SUMS


def _programs(tile: GemmTile, m: int, n: int) -> int:
    return -(-m // tile.rows) * -(-n // tile.cols) * tile.split


def _cost(tile: GemmTile, m: int, n: int, k: int, joint: int, cores: int) -> float:
    """Microseconds, but for what all tiles have in common."""
    programs = _programs(tile, m, n)
    lines = joint * tile.cols + (tile.rows if tile.rows > 1 else 0)
    read = -(-programs // cores) * lines * 2 * k / tile.split / L2_BYTES
    added = SUM_MICROSECONDS + 8 * tile.split * m * n * joint / SUM_BYTES if tile.split > 1 else 0.0
    return read + added
