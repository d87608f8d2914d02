"""The kernels that are proven for Ascend: every kernel shape x dtype x D x kind of site.

    python tests/ascend/grid.py            compile, lint and run all of it, and write the table into
                                           docs/ascend.md (`make ascend-sweep`)

The tests run the same cases: see test_ascend_grid.py for which of them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ascend_ln_fuse.kernels.ascend import Outcome, Planned, toolchain
from ascend_ln_fuse.kernels.ascend.evidence import compile_kernel
from ascend_ln_fuse.kernels.ascend.lint import errors, lint
from ascend_ln_fuse.kernels.ascend.verify import Verified, verify
from ascend_ln_fuse.kernels.call import Call
from ascend_ln_fuse.kernels.offline import Offline

sys.path[:0] = [str(Path(__file__).parents[1] / "kernels"), str(Path(__file__).parents[1])]
from norm_cases import region  # noqa: E402
from pages import write_section  # noqa: E402

SOC = "Ascend910B3"
LANES = (64, 80, 128, 513, 1024, 3072, 4096, 8192, 12288)
DTYPES = ("f32", "f16", "bf16")
#: Kind of site -> region of norm_cases.
VARIANTS = {"plain": "layer_norm", "strided": "layer_norm", "cast": "cast_chain", "add": "add_norm",
            "modulate": "modulate", "RMS": "rms_norm"}
#: How a kernel walks its rows: several a tile, one a tile, one in pieces.
SHAPES = ("rows", "row", "columns")
#: Batch and tokens of the model's call that a tile is chosen for.
BATCH, TOKENS = 4, 4096


@dataclass(frozen=True)
class Case:
    """One kernel of the grid."""

    variant: str
    dtype: str
    lane: int
    shape: str

    def __str__(self) -> str:
        return f"{self.variant} {self.dtype} {self.lane} {self.shape}"

    def call(self) -> Call:
        """The call of a model: [BATCH, TOKENS, D]; strided: q of a packed [BATCH, TOKENS, 3, D]."""
        r = region(VARIANTS[self.variant], self.lane, self.dtype)
        pitch = self.lane * (3 if self.variant == "strided" else 1)
        shapes, strides = [], []
        for operand in r.inputs:
            sizes = dict(zip(range(3), (BATCH, TOKENS, self.lane)))
            shift = 3 - len(operand.dims)
            shape = tuple(1 if d == 1 else sizes[shift + i] for i, d in enumerate(operand.dims))
            whole = shape == (BATCH, TOKENS, self.lane)
            shapes.append(shape)
            strides.append((TOKENS * pitch, pitch, 1) if whole else torch.empty(shape).stride())
        return Call(r, tuple(shapes), tuple(strides), torch.device("cpu"), SOC)

    def kernel(self, soc: str = SOC) -> Offline:
        """The first kernel of this shape that a launch would try."""
        return next(x for x in self.call().candidates(soc) if shape_of(x) == self.shape)


def shape_of(offline: Offline) -> str:
    tile = offline.kernel.tile
    return "columns" if tile.cols < offline.region.lane else "row" if tile.rows == 1 else "rows"


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """Every kernel shape that the planner has for each dtype, D and kind of site."""
    return tuple(_cases())


def _cases() -> Iterator[Case]:
    for variant in VARIANTS:
        for dtype in DTYPES:
            for lane in LANES:
                found = {shape_of(x) for x in Case(variant, dtype, lane, "").call().candidates(SOC)}
                for shape in SHAPES:
                    if shape in found:
                        yield Case(variant, dtype, lane, shape)


def is_first(case: Case) -> bool:
    """Whether this is the kernel that a launch takes, and not one that it falls back to."""
    return shape_of(next(case.call().candidates(SOC))) == case.shape


# -- compiled once


def compiled(offline: Offline, cache: Path | None, soc: str = SOC) -> Planned:
    """`compile_kernel`, remembered in a folder by source, SoC and compiler."""
    if cache is None:
        return compile_kernel(offline, soc)
    versions = [importlib.metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")]
    ours = Path(toolchain.__file__).read_text()
    key = hashlib.sha256("\n".join([offline.kernel.source, soc, *versions, ours]).encode()).hexdigest()
    path = cache / f"{key}.json.gz"
    if path.exists():
        data = json.loads(gzip.decompress(path.read_bytes()))
        return Planned(**{**data, "outcome": Outcome[data["outcome"]]})
    planned = compile_kernel(offline, soc)
    if planned.ok:
        data = {"name": planned.name, "soc": planned.soc, "outcome": planned.outcome.name,
                "message": planned.message, "text": planned.text, "peak_bytes": dict(planned.peak_bytes),
                "double_buffered": planned.double_buffered}
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(gzip.compress(json.dumps(data).encode(), 1))
        partial.replace(path)  # another process may be at it too
    return planned


@dataclass(frozen=True)
class Result:
    """What became of a case; `problem` is "" where all is well."""

    case: Case
    tile: tuple[int, int]
    ub_bytes: int
    verified: Verified | None
    problem: str


def prove(case: Case, cache: Path | None) -> Result:
    """Compile, lint and run a case."""
    offline = case.kernel()
    planned = compiled(offline, cache)
    tile, used = offline.kernel.tile, planned.peak_bytes.get("ub", 0)
    verified, problem = None, ""
    if planned.outcome is not Outcome.PASSED:
        problem = f"{planned.outcome.value}: {planned.message}"
    elif not planned.double_buffered:
        problem = "no buffer is double"
    elif used > toolchain_limit():
        problem = f"{used} bytes of the Unified Buffer"
    elif found := errors(lint(planned)):
        problem = str(found[0])
    else:
        verified = verify(offline, planned)
        problem = verified.problem or verified.blank
    return Result(case, (tile.rows, tile.cols), used, verified, problem)


def toolchain_limit() -> int:
    """Bytes of a vector core's Unified Buffer."""
    return 192 * 1024


# -- the table


def table(results: list[Result]) -> str:
    """Tile and Unified Buffer of the kernel that a launch takes, a row a D, for bf16."""
    first = {(r.case.variant, r.case.lane): r for r in results if r.case.dtype == "bf16" and is_first(r.case)}
    lines = ["| D | " + " | ".join(VARIANTS) + " |", "|---" * (len(VARIANTS) + 1) + "|"]
    for lane in LANES:
        cells = []
        for variant in VARIANTS:
            r = first[variant, lane]
            cells.append(f"{r.tile[0]} x {r.tile[1]}, {r.ub_bytes / 1024:.0f}")
        lines.append(f"| {lane} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    good = [r for r in results if not r.problem]
    worst = max(r.verified.share for r in good)
    versions = " and ".join(f"{n} {importlib.metadata.version(n)}" for n in ("triton-ascend", "ascendnpu-ir"))
    return (f"{len(good)} of {len(results)} kernels compile for {SOC} with double buffering, are clean by "
            f"the lint and compute right ({versions}). The largest error is {worst:.2f} of what is allowed.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--dry", action="store_true", help="print, and leave docs/ascend.md as it is")
    args = parser.parse_args()
    from rich.progress import track

    todo = cases()
    with ProcessPoolExecutor(args.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = pool.map(prove, todo, [None] * len(todo))
        results = list(track(found, "kernels", len(todo)))
    for r in results:
        if r.problem:
            print(f"{r.case}: {r.problem}")
    text = f"{summary(results)}\n\n{table(results)}\n"
    print(text)
    if not args.dry:
        write_section("ascend.md", "grid", text)
    sys.exit(any(r.problem for r in results))


if __name__ == "__main__":
    main()
