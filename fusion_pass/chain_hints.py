"""Hints on block shapes: honoured or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from .chain_steps import MatmulStep, NormStep, Step, chain_of
from .kernels.chain import Chain, RegionStage
from .kernels.chain_choice import Choice, Question, choose
from .kernels.chain_fused import fused_segment
from .kernels.chain_segments import segments
from .kernels.chain_ways import FEW_ROWS, ChainRunner
from .kernels.fused_linear import FusedLinear
from .kernels.fused_linear_structure import DTYPES_SERVED
from .kernels.targets import cuda
from .kernels.tiling import LANE_MULTIPLE, MAX_WHOLE_LANE

#: The device whose tuning set says which tiles there are, where none is there to ask.
TYPICAL = cuda.describe("sm_90", 132)


@dataclass(frozen=True)
class Hints:
    """What a user wants of block shapes; None: no wish.

    Attributes:
        tile_size: output columns of a tile, in kernels that hold a matrix product.
        alignment: elements of which the rows of a tile lie on chip in multiples.
    """

    tile_size: int | None = None
    alignment: int | None = None

    def __bool__(self) -> bool:
        return self.tile_size is not None or self.alignment is not None

    @classmethod
    def parse(cls, tile_size, alignment) -> Hints:
        """Raises TypeError or ValueError for what can be no hint of any chain."""
        for name, value in (("tile_size", tile_size), ("alignment", alignment)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an int or None, not {value!r}")
            if value is not None and (value <= 0 or value & (value - 1)):
                raise ValueError(f"{name} must be a power of two, not {value}")
        return cls(tile_size, alignment)

    def check(self, steps: Sequence[Step]) -> None:
        """Whether a chain of these steps can be run so.

        Raises:
            ValueError: it cannot; says what is possible.
        """
        if self.alignment is not None:
            for lane in dict.fromkeys(_lanes(steps)):
                if not _aligned(lane, self.alignment):
                    fit = [str(1 << i) for i in range(14) if _aligned(lane, 1 << i)]
                    raise ValueError(f"alignment={self.alignment}: rows of {lane} elements do not lie on "
                                     f"chip in multiples of that many; possible: {', '.join(fit)}")
        if self.tile_size is not None:
            possible = possible_tile_sizes(tuple(steps))
            if self.tile_size not in possible:
                words = ", ".join(map(str, sorted(possible))) or "none, since no kernel holds a product here"
                raise ValueError(f"tile_size={self.tile_size}: no tile has that many columns; "
                                 f"possible: {words}")


def _lanes(steps: Sequence[Step]) -> list[int]:
    """The rows that kernels hold: of the regions and of the products."""
    return [step.size if isinstance(step, NormStep) else step.features for step in steps
            if isinstance(step, (NormStep, MatmulStep))]


def _aligned(lane: int, alignment: int) -> bool:
    """Whether all targets hold rows of `lane` elements in multiples of `alignment` (a power of two): Ascend
    pads to LANE_MULTIPLE, or cuts longer rows, CUDA pads to a power of two."""
    padded = 1 << (lane - 1).bit_length()
    whole = lane <= MAX_WHOLE_LANE and lane % alignment == 0
    return padded % alignment == 0 and (whole or LANE_MULTIPLE % alignment == 0)


@lru_cache(maxsize=256)
def possible_tile_sizes(steps: tuple[Step, ...]) -> frozenset[int]:
    """The columns of tiles that kernels for every product of the chain have, for some number of rows."""
    chain = chain_of(steps, 2, "bf16")
    sizes: list[set[int]] = []
    for segment in segments(chain):
        fused = fused_segment(chain, segment, partial(FusedLinear, target=TYPICAL))
        if fused is not None:
            columns, depth = _product(steps, [p.weight for p in segment.products], chain)
            sizes.append({config.cols for rows in _buckets()
                          for config in fused.run.configs(rows, columns, depth)})
    return frozenset(set.intersection(*sizes)) if sizes else frozenset()


def _buckets() -> list[int]:
    return [1 << i for i in range(FEW_ROWS.bit_length())]


def _product(steps: Sequence[Step], weights: Sequence[str], chain: Chain) -> tuple[int, int]:
    """(output features of all, input features) of the products with these weights."""
    products = [stage.weight for stage in chain.stages if not isinstance(stage, RegionStage)]
    sizes, features = [], 0
    for step in steps:
        if isinstance(step, NormStep):
            features = step.size
        elif isinstance(step, MatmulStep):
            sizes.append((step.features, features))
            features = step.features
    found = [sizes[products.index(weight)] for weight in weights]
    return sum(n for n, _ in found), found[0][1]


@lru_cache(maxsize=1024)
def runner_with(chain: Chain, tile_size: int | None, device: str) -> ChainRunner | None:
    """A runner that measures only tiles of that many columns; None where there is no wish, or no kernel.

    Raises:
        ValueError: devices of that type, or the chain's dtype, have no kernels with tiles to choose from.
    """
    if tile_size is None or device == "cpu":
        return None
    if device != "cuda":
        raise ValueError(f"tile_size={tile_size}: on {device} products run in the library, which takes no "
                         "tile; leave tile_size out")
    dtype = next(stage.region for stage in chain.stages if isinstance(stage, RegionStage)).outputs[0].dtype
    if dtype not in DTYPES_SERVED:
        raise ValueError(f"tile_size={tile_size}: kernels that hold a product exist for "
                         f"{', '.join(DTYPES_SERVED)}, not {dtype}; leave tile_size out")
    return ChainRunner(chain, decide=partial(_choose, tile_size))


def _choose(tile_size: int, question: Question) -> Choice:
    """As `choose`, with fewer tiles to choose from, and kept under a text of its own."""
    def only(configs):
        return lambda: [config for config in configs() if config.cols == tile_size]

    return choose(replace(question, text=f"{question.text}\ntiles of {tile_size} columns",
                          configs=only(question.configs), unsplit=only(question.unsplit)))
