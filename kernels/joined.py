"""Fused results that a `torch.cat` would join: each kernel writes its part of the joined tensor.

`joined_call(joined)` is a function of its tensors, then its scalars, for generated graphs. It records no
gradient of its own: where one is wanted, the regions and `torch.cat` run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from .launch import runs_reference
from .likeness import Likeness
from .ops import python_call, runner
from .region import NormRegion
from .settings import DEFAULT_SELF_CHECK


@dataclass(frozen=True)
class Launch:
    """A region, and which of the function's tensors and scalars it reads."""

    region: NormRegion
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]


@dataclass(frozen=True)
class Cat:
    """A joined tensor, contiguous.

    Attributes:
        sizes: of the whole.
        dim: along which its parts follow one another.
        lengths: their sizes along it.
        parts: for each, (launch, output) of what writes it, or (None, tensor) for one that is copied.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    lengths: tuple[int, ...]
    parts: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class Joined:
    """count: how many tensors the function takes. Each output of each launch is a part of one cat."""

    launches: tuple[Launch, ...]
    cats: tuple[Cat, ...]
    count: int


def joined_call(joined: Joined, self_check: str = DEFAULT_SELF_CHECK) -> Callable:
    """A function of `joined.count` tensors, then scalars, that returns one tensor for one cat, else a
    tuple."""
    runs = [runner(launch.region.text, self_check) for launch in joined.launches]
    calls = [python_call(launch.region, self_check) for launch in joined.launches]
    single = len(joined.cats) == 1

    def fused(*args):
        tensors, scalars = args[:joined.count], args[joined.count:]
        device = tensors[0].device
        if device.type == "cpu" and runs_reference(device) or forward_ad._current_level >= 0 or \
                torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            results = _one_by_one(joined, calls, tensors, scalars)
        else:
            results = _in_place(joined, runs, tensors, scalars)
        return results[0] if single else results

    fused.__name__ = fused.__qualname__ = "ascend_ln_fuse_joined"
    fused.__module__ = __name__
    fused.joined = joined
    return fused


def _one_by_one(joined: Joined, calls, tensors, scalars) -> tuple[torch.Tensor, ...]:
    made = []
    for launch, call in zip(joined.launches, calls):
        results = call(*(tensors[i] for i in launch.inputs), *(scalars[i] for i in launch.scalars))
        made.append((results,) if isinstance(results, torch.Tensor) else results)
    return tuple(torch.cat([tensors[i] if launch is None else made[launch][i] for launch, i in cat.parts],
                           cat.dim) for cat in joined.cats)


def _in_place(joined: Joined, runs, tensors, scalars) -> tuple[torch.Tensor, ...]:
    wholes = tuple([torch.empty(cat.sizes, dtype=cat.dtype, device=tensors[0].device) for cat in joined.cats])
    written, copied = _places(joined, wholes)
    for place, number in copied:
        place.copy_(tensors[number])
    for launch, run, places in zip(joined.launches, runs, written):
        run.into([tensors[i] for i in launch.inputs], [scalars[i] for i in launch.scalars], places)
    return wholes


def _places(joined: Joined, wholes: Sequence) -> tuple[list[list], list[tuple]]:
    """(for each launch, where in `wholes` its outputs lie; (place, tensor) of the parts that are copied)."""
    found: list[dict[int, object]] = [{} for _ in joined.launches]
    copied = []
    for cat, whole in zip(joined.cats, wholes):
        start = 0
        for (launch, number), length in zip(cat.parts, cat.lengths):
            place = whole.narrow(cat.dim, start, length)
            start += length
            if launch is None:
                copied.append((place, number))
            else:
                found[launch][number] = place
    return [[places[i] for i in range(len(places))] for places in found], copied


def expect_joined(joined: Joined, tensors: Sequence[Likeness], self_check: str = DEFAULT_SELF_CHECK) -> None:
    """Begin to compile, in the background, what a call of `joined_call` on such tensors runs without
    gradients."""
    wholes = [Likeness.dense(cat.sizes, cat.dtype, tensors[0].device) for cat in joined.cats]
    for launch, places in zip(joined.launches, _places(joined, wholes)[0]):
        runner(launch.region.text, self_check).expect([tensors[i] for i in launch.inputs], places)
