"""A chain cut into segments: what one kernel may do, or the library with a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .chain import Chain, RegionStage
from .chain_fused import FusedSegment
from .chain_products import LinearStage, Product


@dataclass(frozen=True)
class Segment:
    """Consecutive stages of a chain: a norm (or nothing) in front, the products that read it, and what is
    pointwise behind them."""

    norm: RegionStage | None
    products: tuple[Product, ...]
    pointwise: RegionStage | None

    @property
    def stages(self) -> tuple:
        parts = (self.norm, *self.products, self.pointwise)
        return tuple(stage for stage in parts if stage is not None)


def segments(chain: Chain) -> tuple[Segment, ...]:
    """The chain, cut into segments; every stage is in one of them. A product that is no linear layer is in
    a segment without a norm, which only the library runs."""
    found: list[Segment] = []
    stages = list(chain.stages)
    while stages:
        norm = stages.pop(0) if isinstance(stages[0], RegionStage) else None
        products: list[Product] = []
        while stages and isinstance(stages[0], LinearStage) and \
                stages[0].value == (norm.names[0] if norm else (products or stages)[0].value):
            products.append(stages.pop(0))
        if norm is None and not products:
            products.append(stages.pop(0))
        pointwise = None
        if products and stages and isinstance(stages[0], RegionStage):
            names = {product.name for product in products}
            if names <= set(stages[0].reads) and not names & set(chain.outputs):
                pointwise = stages.pop(0)
        found.append(Segment(norm, tuple(products), pointwise))
    return tuple(found)


def whole_input(segment: Segment) -> str | None:
    """The name of an input that has all rows of the segment; None where there is no single one."""
    if segment.norm is None:
        first = segment.products[0] if segment.products else None
        return first.value if isinstance(first, LinearStage) else None
    region = segment.norm.region
    return next((arg for arg, x in zip(segment.norm.args, region.inputs)
                 if x.dims == region.full and isinstance(arg, str)), None)


def norm_alone(segment: Segment, fused: FusedSegment) -> bool:
    """Whether the segment's norm runs by itself, in front of the one kernel."""
    return segment.norm is not None and fused.norm is None


def reusable(stage: RegionStage, spent: Sequence[str], products: set[str]) -> str | None:
    """The one of `products` that `stage` may write its one result over: of the same shape and dtype, read by
    nothing else. `spent`: what nothing reads behind the stage."""
    region = stage.region
    if len(region.outputs) != 1 or not region.outputs[0].is_contiguous:
        return None
    for arg, x in zip(stage.args, region.inputs):
        if arg in spent and arg in products and x.dims == region.full and \
                x.dtype == region.outputs[0].dtype and stage.reads.count(arg) == 1:
            return arg
    return None
