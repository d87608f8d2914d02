"""A kernel's final module, run by the interpreter on small calls and held against PyTorch.

The kernel is the one that a model launches: same source, same tile, same final module. Only the calls are
small: sizes are run-time arguments, so a few tiles a program, the last of them ragged, show what every tile
does; then sizes that the tile divides, fewer rows than a tile, and rows beyond 2^31 elements.
Tensors lie in storages that end where they end, rows far apart, so that any access outside is an error.

Two things are asked of each kind of rows (samples.py):

- no element is further off than twice what PyTorch is in these rows, plus one unit in the last place of
  the output's dtype, both against float64. What follows a norm may carry the norm's own error further in
  some elements than in others (1/y next to y = 0), and there PyTorch's error and ours are two draws that
  say little of each other. So PyTorch's error counts where it is carried no further than in the element
  that is judged, and the bound of the norm itself, carried on, is allowed as well (conditioning.py);
- no more elements than rounding can explain are further off than PyTorch's. In half precision a wrong
  factor (a variance divided by D-1) is less than the rounding of every element, but rounds some of them to
  another neighbour: of 8192 columns in bf16 about one in a hundred, where fp32 arithmetic in another order
  does that to one in ten thousand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..offline import Offline
from ..reference import reference
from ..region import DTYPES, NormRegion, parse
from ..values import ancestors
from .conditioning import ROUNDING, Conditioning, conditioning, ulp
from .counters import Counters
from .interpreter import interpret
from .samples import ORDINARY, RowKind, SmallCall, edge_calls, far_call, small_call
from .toolchain import Planned
from .traffic import ideal_bytes

#: Elements that may differ in any case, and deviations beyond which chance explains no more.
FEW, CHANCE = 4, 6.0


@dataclass(frozen=True)
class Verified:
    """What small calls gave.

    share: largest error against float64, as a share of what is allowed (see above).  flips: the same for
      the number of elements that are worse.  Right are shares of at most 1; NaN or infinity where PyTorch
      has none, or the other way round, is an infinite share.
    problem: "" where all is right, else the worst that is not, and in which rows.
    blank: an output of which PyTorch gives nothing finite in ordinary rows, so that nothing was compared.
    read, written: bytes moved between global memory and the core, exact.
    ideal_read, ideal_written: each element of each tensor once; parameters once a program.
    """

    share: float
    flips: float = 0.0
    problem: str = ""
    blank: str = ""
    read: int = 0
    written: int = 0
    ideal_read: int = 0
    ideal_written: int = 0

    @classmethod
    def broken(cls, problem: str) -> Verified:
        """Of a run that did not end."""
        return cls(float("inf"), float("inf"), problem)

    @property
    def right(self) -> bool:
        return not self.problem and not self.blank


def verify(offline: Offline, planned: Planned, sizes: Sequence[int] | None = None,
           scalars: Sequence[float | None] | None = None, seed: int = 0) -> Verified:
    """Run `planned`, the compiled form of `offline`, on small calls. A2 and A3 only.

    sizes: of the kernel's dims, where the default's are not wanted.
    scalars: those of the model's call, None for one that only run time knows.  seed: of the tensors' numbers.

    Raises:
        InterpreterError: an access outside of a tensor, a read of what nobody wrote, a deadlock.
    """
    call = small_call(offline, sizes, scalars, seed)
    counters = interpret(planned, None, call.arguments, (call.grid,), call.programs)
    findings = list(_compare(call))
    more = [(f"in a call of {' x '.join(map(str, edge.walk.sizes))} rows", edge)
            for edge in edge_calls(offline, scalars, seed)]
    if far := _far(offline, scalars, seed):
        more.append(("beyond 2^31 elements", far))
    for where, other in more:
        interpret(planned, None, other.arguments, (other.grid,), other.programs)
        findings += [replace(f, where=f"{f.where} {where}") for f in _compare(other)]
    ideal = ideal_bytes(replace(offline, walk=call.walk), call.grid)
    worst = max(findings, key=lambda f: max(f.share, f.flips))
    return Verified(max(f.share for f in findings), max(f.flips for f in findings),
                    "" if worst.right else str(worst),
                    next((f.where for f in findings if f.blank), ""), *_moved(counters), *ideal)


def _far(offline: Offline, scalars: Sequence[float | None] | None, seed: int) -> SmallCall | None:
    """Rows at the end of huge tensors; None where the system or the kernel has no such tensors."""
    structure = offline.walk.structure
    if not all(x.moving[structure.blocked] for x in structure.operands[len(offline.region.inputs):]):
        return None
    try:
        return far_call(offline, scalars, seed)
    except OSError:
        return None


# -- comparing


@dataclass(frozen=True)
class _Finding:
    """Rows of one kind of one output; see Verified."""

    where: str
    share: float
    flips: float
    blank: bool

    @property
    def right(self) -> bool:
        return self.share <= 1 and self.flips <= 1

    def __str__(self) -> str:
        if self.share >= self.flips:
            return f"{self.where}: its error is {self.share:.3g} times what is allowed"
        return (f"{self.where}: elements that are worse than PyTorch's are {self.flips:.3g} times as many as "
                "rounding explains")


def _compare(call: SmallCall) -> Iterator[_Finding]:
    lows = reference(call.region, call.inputs, call.scalars)
    trues = _exact(call.region, call.inputs, call.scalars)
    conditions = conditioning(call.region, call.inputs, call.scalars, partial(_bound_of_norm, call))
    for out, ours, low, true, condition in zip(call.region.outputs, call.outputs, lows, trues, conditions,
                                               strict=True):
        above = ancestors(call.region, [out.value])
        roundings = 0 if DTYPES[out.dtype] > 2 else \
            max(1, sum(line.name in above and DTYPES[line.dtype] <= 2 for line in call.region.body))
        scale = 0.0
        for kind, rows in _kinds(call):
            where = f"output {out.value}, rows with {kind.name}"
            ours_, low_, true_, *parts = (t[rows].reshape(-1, t.shape[-1]) for t in (
                ours, low, true, condition.moved, condition.carried, condition.turns))
            finding, largest = _judge(where, kind, ours_, low_, true_, Conditioning(*parts), scale, roundings)
            if kind is ORDINARY:
                scale = largest
            yield finding


def _kinds(call: SmallCall) -> Iterator[tuple[RowKind, tuple[slice, ...]]]:
    """Each kind of rows that the call has, and where they lie in a tensor over its space."""
    axis = call.axis or 0
    for k, kind in enumerate(call.kinds):
        if k < call.outputs[0].shape[axis]:
            yield kind, (slice(None),) * axis + (slice(k, None, len(call.kinds)),)


def _bound_of_norm(call: SmallCall, error: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """How far off a norm may be in rows of each element's kind, before the last place; as in `_judge`."""
    error, moved = (torch.where(t.isfinite(), t, 0.0) for t in (error, moved))
    bound = torch.zeros_like(error)
    for kind, rows in _kinds(call):
        bound[rows] = 2 * error[rows].max() + (0.0 if kind is ORDINARY else moved[rows].max())
    return bound


def _judge(where: str, kind: RowKind, ours: torch.Tensor, low: torch.Tensor, true: torch.Tensor,
           condition: Conditioning, scale: float, roundings: int) -> tuple[_Finding, float]:
    """Compare rows [rows, D]; also the largest magnitude among them.

    low: PyTorch's.  true: float64.  scale: magnitude of ordinary results.  roundings: to half precision on
    the way.
    """
    moved, carried = condition.moved, condition.carried
    finite = low.isfinite() & moved.isfinite() & carried.isfinite()
    reach = torch.where(finite, carried, float("inf"))
    error, moved, magnitude = (torch.where(finite, t.double().abs(), 0.0) for t in (low - true, moved, true))
    step = ulp(magnitude, ours.dtype)
    allowed = 2 * _worst_alike(error, reach)
    if kind is not ORDINARY:
        # Where rows are all but equal values, or results are small, PyTorch may be right by luck.
        allowed = allowed + _worst_alike(moved, reach) + ROUNDING * scale
    bounded = finite & ~(condition.turns & (carried > allowed + step))
    same = torch.where(low.isfinite(), ours.isfinite(), (ours == low) | (ours.isnan() & low.isnan()))
    same |= condition.moved.isinf() | carried.isinf() | condition.turns
    # At the end of the dtype's range, one of two right results may round to infinity.
    overflows = (true.abs() - torch.finfo(ours.dtype).max).abs() <= carried + ulp(true, ours.dtype)
    same |= true.isfinite() & overflows & (ours.sign() == true.sign())
    blank = kind is ORDINARY and not bounded.any()
    bounded &= ours.isfinite()
    if not same.all():
        return _Finding(where, float("inf"), float("inf"), blank), 0.0
    if not bounded.any():
        return _Finding(where, 0.0, 0.0, blank), 0.0
    allowed = torch.maximum(allowed, carried) + step
    ours, low, true = (torch.where(bounded, t.double(), 0.0) for t in (ours, low, true))
    share = _largest(torch.where(bounded, (ours - true).abs() / allowed, 0.0))

    flips = 0.0
    if roundings:  # in fp32, any element may differ
        slip = ROUNDING * (low.abs() + low.square().mean(1, keepdim=True).sqrt() + scale)
        slip += moved.square().mean(1, keepdim=True).sqrt()
        likely = torch.where(bounded, (roundings * slip / step).clamp(max=1), 0.0)
        worse = (ours - true).abs() > (low - true).abs()
        flips = max(_flips(worse, likely, rows) for rows in (False, True))
    return _Finding(where, share, flips, blank), magnitude.max().item()


def _worst_alike(errors: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """For each element, the largest of the errors whose reach is no more than its own, or than the median:
    what is next to a pole says nothing about the rest. Elements of infinite reach do not count."""
    limits, order = reach.flatten().sort()
    median = limits[limits.isfinite().sum() // 2]
    largest = errors.flatten()[order].cummax(0).values
    return largest[torch.searchsorted(limits, reach.clamp(min=median), right=True) - 1]


def _flips(worse: torch.Tensor, likely: torch.Tensor, rows: bool) -> float:
    """The number of elements that are further off than PyTorch's, as a share of what is allowed: of all
    rows, or of the worst.  likely: how likely each of them is to differ."""
    count, expected = (t.sum(1) if rows else t.sum() for t in (worse, likely))
    return _largest(count / (expected + CHANCE * expected.sqrt() + FEW))


def _largest(shares: torch.Tensor) -> float:
    """Unlike `max` of Python's, never passes over a NaN."""
    return torch.nan_to_num(shares, nan=float("inf"), posinf=float("inf")).max().item()


def _exact(region: NormRegion, inputs, scalars) -> tuple[torch.Tensor, ...]:
    wide = parse(re.sub(r"\b(bf16|f16|f32)\b", "f64", region.text))
    return reference(wide, [x.double() for x in inputs], scalars)


# -- bytes


def _moved(counters: Counters) -> tuple[int, int]:
    read = sum(n for path, n in counters.bytes.items() if path.startswith("GM->"))
    written = sum(n for path, n in counters.bytes.items() if path.endswith("->GM"))
    return read, written
