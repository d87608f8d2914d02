"""Compiling ahead: the kernels that inputs of a range of shapes will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .kernels.chain import Chain, RegionStage
from .kernels.chain_ways import FEW_ROWS
from .kernels.launch import runs_reference
from .kernels.layout import Unsupported, layout
from .kernels.region import NormRegion, broadcast_sizes, dense_strides
from .kernels.targets import Target, target_for
from .kernels.tiling import ladder

if TYPE_CHECKING:
    from .chain_modules import FusedChain

#: Up to here every number of rows is looked at; above, one in every fiftieth.
EVERY_ROW = 1024


@dataclass(frozen=True)
class ShapeRange:
    """Shapes of inputs: every batch from the smallest to the largest of `batch`, every length likewise of
    `seq_len`, and the features listed in `hidden` (None: those of the module).

    Raises:
        TypeError, ValueError: at construction; names the argument.
    """

    batch: Sequence[int]
    seq_len: Sequence[int] = (1,)
    hidden: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "hidden"):
            sizes = getattr(self, name)
            if sizes is None and name == "hidden":
                continue
            if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or \
                    any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
                raise TypeError(f"{name} must be a list of ints, not {sizes!r}")
            if not sizes or min(sizes) <= 0:
                raise ValueError(f"{name} must hold positive sizes, at least one, not {list(sizes)}")
            object.__setattr__(self, name, tuple(sizes))

    @property
    def rows(self) -> tuple[int, int]:
        """The fewest and the most rows of an input."""
        return min(self.batch) * min(self.seq_len), max(self.batch) * max(self.seq_len)


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did: numbers of rows for which the module ran, or (none) why nothing was to do."""

    rows: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if not self.rows:
            return f"nothing to prepare: {self.reason}"
        return f"compiled with {', '.join(map(str, self.rows))} rows, which need all kernels of the range"


def prepare(module: FusedChain, shapes: ShapeRange) -> Prepared:
    """See FusedChain.prepare.

    Raises:
        TypeError: `shapes` is no ShapeRange; ValueError: none of its `hidden` is the module's.
    """
    if not isinstance(shapes, ShapeRange):
        raise TypeError(f"shapes must be a ShapeRange, not {type(shapes).__name__}")
    parameter = next(module.parameters(), None)
    if parameter is None:
        return Prepared(reason="the module has no parameter that names a device")
    features = module.in_features
    if shapes.hidden is not None and features not in shapes.hidden:
        raise ValueError(f"hidden={list(shapes.hidden)}: the module takes {features} features")
    device = parameter.device
    if device.type == "meta" or (device.type == "cpu" and runs_reference(device)):
        return Prepared(reason=f"on {device.type} a chain runs as plain PyTorch, which compiles nothing")
    rows = representative_rows(module.chain(), shapes, device)
    training = any(p.requires_grad for p in module.parameters())
    for count in rows:
        x = torch.arange(count * features, device=device).sin().to(parameter.dtype).view(count, features)
        with torch.no_grad():
            module(x)
        if training:
            with torch.enable_grad():
                module(x)
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
    return Prepared(rows)


def representative_rows(chain: Chain, shapes: ShapeRange, device: torch.device) -> tuple[int, ...]:
    """Numbers of rows in the range that between them need every kernel and every choice of it: all ends of
    the range, one for each different tile of a region, one for each power of two that ways are chosen for."""
    first, last = shapes.rows
    found: dict[object, int] = {}
    target = target_for(device)
    regions = [stage.region for stage in chain.stages if isinstance(stage, RegionStage)]
    for rows in _samples(first, last):
        if rows <= FEW_ROWS:
            found.setdefault(("bucket", (rows - 1).bit_length()), rows)
        for number, region in enumerate(regions):
            found.setdefault((number, rows == 1, _tiles(region, rows, target)), rows)
    corners = {b * s for b in (min(shapes.batch), max(shapes.batch))
               for s in (min(shapes.seq_len), max(shapes.seq_len))}
    return tuple(sorted({*found.values(), *corners}))


def _samples(first: int, last: int) -> Iterator[int]:
    rows = first
    while rows < last:
        yield rows
        rows = rows + 1 if rows < EVERY_ROW else rows * 51 // 50
    yield last


def _tiles(region: NormRegion, rows: int, target: Target) -> object:
    """The tiles of a region for contiguous inputs of that many rows."""
    shapes = [tuple(rows if d == "*" else d for d in x.dims) for x in region.inputs]
    strides = [dense_strides(shape, range(len(shape))) for shape in shapes]
    assert broadcast_sizes(region, shapes)[0] == rows
    try:
        walk = layout(region, shapes, strides, target.units)
        return walk.structure, ladder(region, walk.structure, walk.sizes, target)
    except Unsupported as why:
        return str(why)
