"""How far small errors in a region's norms move its outputs, found by moving them: finite differences of the
region in float64, with everything above the norms rounded as the model rounds it.

What follows a norm carries the norm's error on, and not evenly: 1/y next to y = 0 makes it a million times
larger. PyTorch's error and a kernel's are then two draws of one amplified error, and only an allowance
that is carried on in the same way, element by element, can be held against both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..reference import TORCH_DTYPES, reference
from ..region import LANE_OPS, NORMS, Line, NormRegion, Operand, Output, broadcast_sizes
from ..values import ancestors

#: What fp32 arithmetic in another order may change, relative to the numbers in a row: 4 roundings.
ROUNDING = 2.0**-22


@dataclass(frozen=True)
class Conditioning:
    """Of one output, [*space, D] in float64.

    moved: by a rounding error of fp32 in what is normalised (a row of equal values may come of one that was
      none). Infinity where that decides whether the element is finite: the root of such a row, say.
    carried: by the error that the norms themselves may have. Infinity where that decides whether the
      element is finite.
    turns: whether the output turns round within that error, and not at 0. There may be a pole in between:
      PyTorch or the kernel may meet it, and if the way is long, nothing bounds what they give.
    """

    moved: torch.Tensor
    carried: torch.Tensor
    turns: torch.Tensor


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of `dtype` at each element of `x`, in float64."""
    info = torch.finfo(dtype)
    magnitude = x.double().abs().clamp(min=info.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def conditioning(region: NormRegion, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
                 bound: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Conditioning]:
    """The conditioning of each output for this call of `region`.

    bound: takes the error of PyTorch's in a norm's result and how far a rounding error in what it normalises
      moves that, both over the space, and gives how far off a norm may be, but for its last place.
    """
    count = len(region.outputs)
    space = tuple(broadcast_sizes(region, [x.shape for x in inputs]))
    flat, still = torch.ones(region.lane), [torch.zeros(space)] * len(region.norms)

    def run(nudge: torch.Tensor = flat, slips: Sequence[torch.Tensor] = still,
            wide: str = "f64") -> Sequence[torch.Tensor]:
        added = (x.to(TORCH_DTYPES[wide]) for x in (nudge, *slips))
        return reference(_from_the_norms_on(region, wide), [*inputs, *added], scalars)

    patterns = _patterns(region.lane)
    at, beside, low = run(), run(1 + ROUNDING * patterns[1]), run(wide="f32")
    outputs = at[:count]
    moved = [_distance(a, b) for a, b in zip(outputs, beside)]
    carried = [torch.zeros_like(a) for a in outputs]
    turns = [torch.zeros_like(a, dtype=torch.bool) for a in outputs]
    norms = zip(region.norms, at[count:], beside[count:], low[count:], strict=True)
    for k, (line, norm, near, rounded) in enumerate(norms):
        slip = bound((rounded - norm).abs(), _distance(norm, near)) + ulp(norm, TORCH_DTYPES[line.dtype])
        furthest = [torch.zeros_like(a) for a in outputs]
        for signs in patterns:
            ups, downs = (run(slips=[*still[:k], x, *still[k + 1:]]) for x in (signs * slip, -signs * slip))
            for i, (a, up, down) in enumerate(zip(outputs, ups, downs)):
                way = torch.maximum(_distance(a, up), _distance(a, down))
                furthest[i] = torch.maximum(furthest[i], way)
                least = torch.minimum(up.abs(), down.abs())
                turns[i] |= ((up - a) * (down - a) > 0) & (a.abs() > least)
        carried = [c + f for c, f in zip(carried, furthest)]
    return [Conditioning(*parts) for parts in zip(moved, carried, turns)]


def _patterns(lane: int) -> list[torch.Tensor]:
    """Signs of the errors in a row: alike, alternating, by halves. Two values that an op of the lane brings
    together have equal ones in one of them and different ones in another."""
    alike = torch.ones(lane, dtype=torch.float64)
    alternating, halves = alike.clone(), alike.clone()
    alternating[1::2] = -1
    halves[lane // 2:] = -1
    return [alike, alternating, halves]


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|b - a|: 0 where both are the same infinity or NaN, infinity where one of them is finite."""
    alike = (a == b) | (a.isnan() & b.isnan())
    return torch.where(alike, 0.0, torch.where(a.isfinite() & b.isfinite(), (b - a).abs(), float("inf")))


@lru_cache(maxsize=64)
def _from_the_norms_on(region: NormRegion, wide: str) -> NormRegion:
    """The region in `wide` from its norms on. More inputs: a vector that all that is normalised is multiplied
    by, and for each norm what is added to its result. More outputs: the norms' results before that."""
    above = ancestors(region, [line.args[0] for line in region.norms])
    nudge, body = "nudge_", []
    slips, norms = [], []
    dtypes = {x.name: x.dtype for x in region.inputs}

    def put(name: str, dtype: str, op: str, *args) -> str:
        body.append(Line(name, dtype, op, args))
        dtypes[name] = dtype
        return name

    for line in region.body:
        if line.op not in NORMS:
            kept = line.op in LANE_OPS and dtypes[line.args[0]]
            put(line.name, kept or (line.dtype if line.name in above else wide), line.op, *line.args)
            continue
        *tensors, eps = line.args
        value, *vectors = (t and put(f"{line.name}_{i}_", wide, "cast", t) for i, t in enumerate(tensors))
        value = put(f"{line.name}_nudged_", wide, "mul", value, nudge)
        norms.append(put(f"{line.name}_wide_", wide, line.op, value, *vectors, eps))
        slips.append(f"{line.name}_slip_")
        value = put(f"{line.name}_slipped_", wide, "add", norms[-1], slips[-1])
        put(line.name, line.dtype if line.name in above else wide, "cast", value)
    space = ("*",) * region.outer + (region.lane,)
    inputs = (*region.inputs, Operand(nudge, wide, (region.lane,)), *(Operand(s, wide, space) for s in slips))
    outputs = (*(replace(out, dtype=dtypes[out.value]) for out in region.outputs),
               *(Output(name, wide, tuple(range(region.rank))) for name in norms))
    return replace(region, inputs=inputs, body=tuple(body), outputs=outputs)
