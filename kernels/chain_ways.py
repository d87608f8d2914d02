"""How a chain runs on an accelerator: by the ways that its segments have, the fastest measured one each.

A chain falls into segments: a norm (or nothing) in front, the products that read it, and what is
pointwise behind them. A segment runs

- by the "library": the norm's kernel, torch's products, and one kernel for what is pointwise, in place
  where the product is nobody else's;
- as "one kernel" (fused_linear.py), with the norm in front of the product and the rest behind it;
- or with the norm's kernel first and "one kernel" for the rest.

The last two are for few rows, where reading the weights and launching is all the time there is. Which is
taken is measured on the first call with a new number of rows (up to the next power of two), outside of
graph capture, and kept on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .chain import Chain, LinearStage, RegionStage, linear, operand
from .launch import Runner

#: Rows above which no other way than the library is tried: the product itself is the time then.
FEW_ROWS = 256

LIBRARY = "library"


@dataclass(frozen=True)
class Segment:
    """Consecutive stages of a chain that one kernel may do (see the module docstring)."""

    norm: RegionStage | None
    products: tuple[LinearStage, ...]
    pointwise: RegionStage | None

    @property
    def stages(self) -> tuple:
        parts = (self.norm, *self.products, self.pointwise)
        return tuple(stage for stage in parts if stage is not None)


def segments(chain: Chain) -> tuple[Segment, ...]:
    """The chain, cut into segments; every stage is in one of them."""
    found: list[Segment] = []
    stages = list(chain.stages)
    while stages:
        norm = stages.pop(0) if isinstance(stages[0], RegionStage) else None
        products: list[LinearStage] = []
        while stages and isinstance(stages[0], LinearStage) and \
                stages[0].value == (norm.names[0] if norm else (products or stages)[0].value):
            products.append(stages.pop(0))
        pointwise = None
        if products and stages and isinstance(stages[0], RegionStage):
            names = {product.name for product in products}
            if names <= set(stages[0].reads) and not names & set(chain.outputs):
                pointwise = stages.pop(0)
        found.append(Segment(norm, tuple(products), pointwise))
    return tuple(found)


@dataclass
class Choice:
    """What was chosen for a segment and why.

    Attributes:
        way: "library", "one kernel" or "norm kernel, one kernel".
        config: the block shapes of `way`, where it has any.
        times: way and block shapes -> measured device time in microseconds; empty where nothing was
            measured.
        reason: why other ways were not, or could not be, measured.
    """

    way: str
    config: object = None
    times: dict[str, float] = field(default_factory=dict)
    reason: str = ""


class ChainRunner:
    """Runs one chain; safe to call from several threads. Records no gradient.

    Attributes:
        chain: what it computes.
        segments: the chain's.
        choices: (segment number, device index, rows up to) -> what was chosen there.
    """

    def __init__(self, chain: Chain):
        self.chain, self.segments = chain, segments(chain)
        self.choices: dict[tuple, Choice] = {}
        self._lock = threading.RLock()
        self._ways: dict[int, object] = {}
        self._runners = {stage.names: Runner(stage.region) for stage in chain.stages
                         if isinstance(stage, RegionStage)}
        spent = dict(zip((stage.names for stage in chain.stages), chain.spent))
        #: after each segment, the values that nothing reads any more
        self._spent = [tuple(n for stage in segment.stages for n in spent[stage.names])
                       for segment in self.segments]
        self._inside = [spent[stage.names] for segment in self.segments for stage in segment.stages]
        self._in_place = {stage.names: self._reusable(stage, spent[stage.names])
                          for stage in chain.stages if isinstance(stage, RegionStage)}
        self._spent_after = spent

    def __call__(self, inputs: Sequence[torch.Tensor],
                 scalars: Sequence[float] = ()) -> tuple[torch.Tensor, ...]:
        """The outputs of the chain, new tensors."""
        return tuple(self.values(inputs, scalars).values())

    def values(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
               keep: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """The chain's outputs and the values of `keep`, by name. With `keep`, the library runs: the
        other ways never write a product to memory."""
        values = dict(zip(self.chain.inputs, inputs))
        numbers = dict(zip(self.chain.scalars, scalars))
        for number, segment in enumerate(self.segments):
            way = None if keep else self._way(number, values, numbers)
            if way is None:
                self._library(segment, values, numbers, keep)
            else:
                way(values, numbers)
                for name in self._spent[number]:
                    values.pop(name, None)
        return {name: values[name] for name in dict.fromkeys((*self.chain.outputs, *keep))}

    def _library(self, segment: Segment, values: dict, numbers: dict, keep: Sequence[str] = ()) -> None:
        for stage in segment.stages:
            if isinstance(stage, LinearStage):
                bias = None if stage.bias is None else values[stage.bias]
                values[stage.name] = linear(values[stage.value], values[stage.weight], bias,
                                            stage.transposed)
            else:
                self._region(stage, values, numbers, keep)
            for name in self._spent_after[stage.names]:
                if name not in keep:
                    values.pop(name, None)

    def _region(self, stage: RegionStage, values: dict, numbers: dict, keep: Sequence[str]) -> None:
        args = [operand(values, arg) for arg in stage.args]
        scalars = [numbers[name] for name in stage.scalars]
        run, target = self._runners[stage.names], self._in_place[stage.names]
        buffer = values[target] if target is not None and target not in keep else None
        if buffer is not None and buffer.is_contiguous():
            run.into(args, scalars, (buffer,))
            values[stage.names[0]] = buffer
        else:
            values.update(zip(stage.names, run(args, scalars)))

    def _reusable(self, stage: RegionStage, spent: Sequence[str]) -> str | None:
        """The product that `stage` may write its one result over: of the same shape and dtype, read by
        nothing else."""
        region = stage.region
        products = {s.name for s in self.chain.stages if isinstance(s, LinearStage)}
        if len(region.outputs) != 1 or region.outputs[0].order != tuple(range(region.rank)):
            return None
        full = ("*",) * region.outer + (region.lane,)
        for arg, x in zip(stage.args, region.inputs):
            if arg in spent and arg in products and x.dims == full and \
                    x.dtype == region.outputs[0].dtype and stage.args.count(arg) == 1:
                return arg
        return None

    def _way(self, number: int, values: dict, numbers: dict) -> Callable | None:
        """How segment `number` runs on these values; None for the library."""
        return None
