"""Results written into a longer tensor, of which a later `torch.cat` then copies the rest.

Where other parts of a cat are made after a fused result (attention, after an activation), no op can stand for
both. So the result's kernel allocates the whole tensor and writes its `Place` there; `rest_call` copies the
other parts when they are there, and yields the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .launch import Runner
from .likeness import Likeness
from .record import Record
from .reference import TORCH_DTYPES
from .region import NormRegion, broadcast_sizes, dense_strides


@dataclass(frozen=True)
class Place:
    """Where in a contiguous tensor a value lies: from element `start` of `total` on along `dim` (0 or more).
    In all other dims both are of one size."""

    dim: int
    start: int
    total: int

    def __str__(self) -> str:
        return f"at {self.start} of {self.total} along {self.dim}"

    def whole(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the tensor in which a value of `sizes` lies."""
        return (*sizes[:self.dim], self.total, *sizes[self.dim + 1:])

    def strides(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those of a value of `sizes` in its place."""
        return dense_strides(self.whole(sizes), range(len(sizes)))


class PlacedRunner:
    """A Runner whose results, or some of them, are written in their places of tensors that a call allocates.
    Called like the Runner itself; where a result has a place, the call yields the whole tensor.

    Attributes:
        places: for each output of the region its place, or None for a tensor of its own.
        record: the Runner's.
    """

    def __init__(self, run: Runner, places: Sequence[Place | None]):
        self.run, self.places = run, tuple(places)

    @property
    def record(self) -> Record:
        return self.run.record

    def __call__(self, inputs: Sequence[torch.Tensor],
                 scalars: Sequence[float] = ()) -> tuple[torch.Tensor, ...]:
        """The outputs of the region, new tensors. Only what lies in a place is written of a whole one."""
        region: NormRegion = self.run.region
        sizes, device = broadcast_sizes(region, [x.shape for x in inputs]), inputs[0].device
        results, targets = [], []
        for out, place in zip(region.outputs, self.places):
            dtype = TORCH_DTYPES[out.dtype]
            if place is None:
                result = target = torch.empty_strided(sizes, dense_strides(sizes, out.order), dtype=dtype,
                                                      device=device)
            else:
                result = torch.empty(place.whole(sizes), dtype=dtype, device=device)
                target = result.narrow(place.dim, place.start, sizes[place.dim])
            results.append(result)
            targets.append(target)
        self.run.into(inputs, scalars, targets)
        return tuple(results)

    # As in Runner.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __call__._torchdynamo_disable_msg = "launches a kernel"  # type: ignore[attr-defined]

    def expect(self, inputs: Sequence[Likeness]) -> None:
        """As `Runner.expect`, of a call."""
        region = self.run.region
        sizes, device = broadcast_sizes(region, [x.shape for x in inputs]), inputs[0].device
        targets = []
        for out, place in zip(region.outputs, self.places):
            dtype = TORCH_DTYPES[out.dtype]
            targets.append(Likeness.dense(sizes, dtype, device, out.order) if place is None else
                           Likeness.dense(place.whole(sizes), dtype, device).narrow(
                               place.dim, place.start, sizes[place.dim]))
        self.run.expect(inputs, targets)


@dataclass(frozen=True)
class Rest:
    """A cat of which one part may lie in the result already.

    Attributes:
        dim: along which the parts follow one another, 0 or more.
        lengths: their sizes along it, each at least 1.
        number: which part may be the whole tensor instead, with that part written.
    """

    dim: int
    lengths: tuple[int, ...]
    number: int

    @property
    def place(self) -> Place:
        """That part's."""
        return Place(self.dim, sum(self.lengths[:self.number]), sum(self.lengths))


def rest_call(rest: Rest) -> Callable:
    """A function of the parts of a cat, for generated graphs: `torch.cat(parts, rest.dim)`, where part
    `rest.number` may be the whole tensor, which then is completed and returned. Where gradients are recorded
    the result always is a new tensor. The last dim of other parts may be several (heads and a lane)."""
    place, number, dim = rest.place, rest.number, rest.dim
    length = rest.lengths[number]
    others = [(i, sum(rest.lengths[:i]), n) for i, n in enumerate(rest.lengths) if i != number]

    def fused(*parts):
        whole = parts[number]
        rank = whole.dim()
        if whole.shape[dim] != place.total:  # plain torch ran, which writes tensors of their own
            return torch.cat([x.flatten(rank - 1) for x in parts], dim)
        if torch.is_grad_enabled() and any([x.requires_grad for x in parts]):
            parts = [*parts[:number], whole.narrow(dim, place.start, length), *parts[number + 1:]]
            return torch.cat([x.flatten(rank - 1) for x in parts], dim)
        for i, start, n in others:
            x, target = parts[i], whole.narrow(dim, start, n)
            (target if x.dim() == rank else target.unflatten(-1, x.shape[rank - 1:])).copy_(x)
        return whole

    fused.__name__ = fused.__qualname__ = "ascend_ln_fuse_cat_rest"
    fused.__module__ = __name__
    fused.rest = rest
    return fused
