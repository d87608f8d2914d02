"""A kernel's final module, run by the interpreter on small calls and held against PyTorch.

The kernel is the one that a model launches: same source, same tile, same final module. Only the calls are
small: sizes are run-time arguments, so a few tiles, the last of them ragged, show what every tile does.
Tensors lie in storages that end where they end, rows far apart, so that any access outside is an error.

Two things are asked of each kind of rows (samples.py):

- no element is further off than twice what PyTorch is in these rows, plus one unit in the last place of
  the output's dtype, both against float64;
- no more elements than rounding can explain are further off than PyTorch's. In half precision a wrong
  factor (a variance divided by D-1) is less than the rounding of every element, but rounds some of them to
  another neighbour: of 8192 columns in bf16 about one in a hundred, where fp32 arithmetic in another order
  does that to one in ten thousand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..launch import Offline
from ..reference import reference
from ..region import DTYPES, NORMS, Line, NormRegion, Operand, parse
from ..values import ancestors
from .counters import Counters
from .interpreter import interpret
from .samples import ORDINARY, RowKind, SmallCall, far_call, small_call, small_walk
from .toolchain import Planned
from .traffic import ideal_bytes

#: What fp32 arithmetic in another order may change, relative to the numbers in a row: 4 roundings.
ROUNDING = 2.0**-22
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
           scalars: Sequence[float | None] | None = None) -> Verified:
    """Run `planned`, the compiled form of `offline`, on small calls. A2 and A3 only.

    sizes: of the kernel's dims, where the default's are not wanted.
    scalars: those of the model's call, None for one that only run time knows.

    Raises:
        InterpreterError: an access outside of a tensor, a read of what nobody wrote, a deadlock.
    """
    call = small_call(offline, planned.soc, sizes, scalars)
    counters = interpret(planned, None, call.arguments, (call.grid,), call.programs)
    findings = list(_compare(call))
    if far := _far(offline, scalars):
        interpret(planned, None, far.arguments, (far.grid,), far.programs)
        findings += [replace(f, where=f"{f.where} beyond 2^31 elements") for f in _compare(far)]
    ideal = ideal_bytes(replace(offline, walk=small_walk(offline, sizes, len(call.kinds), call.axis)),
                        call.grid)
    worst = max(findings, key=lambda f: max(f.share, f.flips))
    return Verified(max(f.share for f in findings), max(f.flips for f in findings),
                    "" if worst.right else str(worst),
                    next((f.where for f in findings if f.blank), ""), *_moved(counters), *ideal)


def _far(offline: Offline, scalars: Sequence[float | None] | None) -> SmallCall | None:
    """Rows at the end of huge tensors; None where the system or the kernel has no such tensors."""
    structure = offline.walk.structure
    if not all(x.moving[structure.blocked] for x in structure.operands[len(offline.region.inputs):]):
        return None
    try:
        return far_call(offline, scalars)
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
    moves = _sensitivity(call.region, call.inputs, call.scalars)
    for out, *tensors in zip(call.region.outputs, call.outputs, lows, trues, moves, strict=True):
        above = ancestors(call.region, [out.value])
        roundings = 0 if DTYPES[out.dtype] > 2 else \
            max(1, sum(line.name in above and DTYPES[line.dtype] <= 2 for line in call.region.body))
        scale = 0.0
        for kind, rows in _by_kind(call, tensors):
            where = f"output {out.value}, rows with {kind.name}"
            finding, largest = _judge(where, kind, *rows, scale, roundings)
            if kind is ORDINARY:
                scale = largest
            yield finding


def _by_kind(call: SmallCall, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[RowKind, list]]:
    """The rows of each kind, as [rows, D], of tensors over the call's space."""
    for k, kind in enumerate(call.kinds):
        rows = (slice(None),) * (call.axis or 0) + (slice(k, None, len(call.kinds)),)
        found = [t[rows].reshape(-1, t.shape[-1]) for t in tensors]
        if found[0].numel():
            yield kind, found


def _judge(where: str, kind: RowKind, ours: torch.Tensor, low: torch.Tensor, true: torch.Tensor,
           move: torch.Tensor, scale: float, roundings: int) -> tuple[_Finding, float]:
    """Compare rows [rows, D]; also the largest magnitude among them.

    low: PyTorch's.  true: float64.  move: see `_sensitivity`.  scale: magnitude of ordinary results.
    roundings: to half precision on the way.
    """
    finite = low.isfinite()
    blank = kind is ORDINARY and not finite.any()
    same = torch.where(finite, ours.isfinite(), (ours == low) | (ours.isnan() & low.isnan()))
    same |= move.isinf()
    if not same.all():
        return _Finding(where, float("inf"), float("inf"), blank), 0.0
    if not finite.any():
        return _Finding(where, 0.0, 0.0, blank), 0.0
    info = torch.finfo(ours.dtype)
    finite &= move.isfinite() & ours.isfinite()
    ours, low, true, move = (torch.where(finite, t.double(), 0.0) for t in (ours, low, true, move))
    magnitude = true.abs()
    ulp = torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=info.smallest_normal)))) * info.eps
    allowed = 2 * (low - true).abs().max() + ulp
    if kind is not ORDINARY:
        # Where rows are all but equal values, or results are small, PyTorch may be right by luck.
        allowed = allowed + move.abs().max() + ROUNDING * scale
    share = _largest((ours - true).abs() / allowed)

    flips = 0.0
    if roundings:  # in fp32, any element may differ
        slip = ROUNDING * (low.abs() + low.square().mean(1, keepdim=True).sqrt() + scale)
        slip += move.square().mean(1, keepdim=True).sqrt()
        likely = (roundings * slip / ulp).clamp(max=1)
        worse = (ours - true).abs() > (low - true).abs()
        flips = max(_flips(worse, likely, rows) for rows in (False, True))
    return _Finding(where, share, flips, blank), magnitude.max().item()


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


def _sensitivity(region: NormRegion, inputs, scalars) -> list[torch.Tensor]:
    """How far a rounding error of fp32 in what is normalised moves each output: with everything above the
    norms as it is rounded, because a row of equal values may come of one that was none. Infinity where it
    decides whether the output is finite (the root of a normalised row of equal values, say)."""
    signs = torch.ones(region.lane, dtype=torch.float64)
    signs[1::2] = -1
    at, beside = (reference(_from_the_norms_on(region), [*inputs, 1 + step * signs], scalars)
                  for step in (0.0, ROUNDING))
    found = []
    for a, b in zip(at, beside):
        alike = (a.isfinite() & b.isfinite()) | (a == b) | (a.isnan() & b.isnan())
        found.append(torch.where(alike, torch.where(a.isfinite(), b.double() - a, 0.0), float("inf")))
    return found


@lru_cache(maxsize=64)
def _from_the_norms_on(region: NormRegion) -> NormRegion:
    """The region in float64 from its norms on, each of what it normalises times one more input, a vector."""
    above = ancestors(region, [line.args[0] for line in region.norms])
    nudge, body = "nudge_", []

    def put(name: str, dtype: str, op: str, *args) -> str:
        body.append(Line(name, dtype, op, args))
        return name

    for line in region.body:
        if line.op not in NORMS:
            put(line.name, line.dtype if line.name in above else "f64", line.op, *line.args)
            continue
        *tensors, eps = line.args
        value, *vectors = (t and put(f"{line.name}_{i}_", "f64", "cast", t) for i, t in enumerate(tensors))
        value = put(f"{line.name}_nudged_", "f64", "mul", value, nudge)
        if line.name in above:
            put(line.name, line.dtype, "cast",
                put(f"{line.name}_wide_", "f64", line.op, value, *vectors, eps))
        else:
            put(line.name, "f64", line.op, value, *vectors, eps)
    dtypes = {x.name: x.dtype for x in (*region.inputs, *body)}
    return replace(region, inputs=(*region.inputs, Operand(nudge, "f64", (region.lane,))), body=tuple(body),
                   outputs=tuple(replace(out, dtype=dtypes[out.value]) for out in region.outputs))


# -- bytes


def _moved(counters: Counters) -> tuple[int, int]:
    read = sum(n for path, n in counters.bytes.items() if path.startswith("GM->"))
    written = sum(n for path, n in counters.bytes.items() if path.endswith("->GM"))
    return read, written
