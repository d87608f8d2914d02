"""The net under a segment's kernel: as for a norm's kernel (guard.py, self_check.py, reproduction.py), with
the meaning of a segment in the place of a region's.

Beside rows the check samples columns: float64 copies of whole weights would take more memory and time than
the call. Sums and epilogues give each column from its own column of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

import torch

from . import reproduction, self_check
from .fused_linear_structure import Segment, grouped, parse, reference
from .fused_linear_tiles import GemmTile
from .guard import Guard
from .layout import Unsupported
from .record import Record
from .reference import reference as region_reference
from .region import LANE_OPS, NormRegion
from .self_check import FEW_PERCENT, Finding, sample_rows

#: The fewest columns of a product that one check compares, where it has so many.
MIN_COLUMNS = 64

#: Copies of the rows on which the reference's own error is measured again, see `self_check._own_error`.
COPIES = 8

#: What a file's text begins with.
_TILE = "tile "


class SegmentRecord(Record):
    """What became of the kernel of one segment. Told to the record of the chain's norm as well, which is
    what reports read and what knows the places in a model."""

    def __init__(self, words: str = "", norm: Record | None = None):
        """`words` name the kernel in a report of the norm."""
        super().__init__()
        self.words, self.norm = words, norm

    def where(self) -> str:
        return super().where() if self.norm is None else f"{self.norm.where()} with {self.words}"

    def declined(self, reason: str) -> None:
        super().declined(reason)
        if self.norm is not None:
            self.norm.declined(self._told(reason))

    def reject(self, device, reason: str) -> bool:
        first = super().reject(device, reason)
        if first and self.norm is not None:
            self.norm.declined(self._told(reason))
        return first

    def checked(self, finding: Finding) -> None:
        super().checked(finding)
        if self.norm is not None:
            self.norm.checked(finding)

    def not_checked(self, reason: str) -> None:
        super().not_checked(reason)
        if self.norm is not None:
            self.norm.not_checked(self._told(reason))

    def overdue(self, reason: str | None) -> bool:
        changed = super().overdue(reason)
        if changed and self.norm is not None:
            self.norm.overdue(reason and self._told(reason))
        return changed

    def _told(self, reason: str) -> str:
        return f"in one kernel with {self.words}: {reason}"


class SegmentGuard(Guard):
    """The plan of a segment's kernel on trial: `runner` is a FusedLinear, `kernel` a Plan of its."""

    def compare(self, inputs, scalars, results) -> Finding:
        return compare(self.runner.segment, self.kernel.tile, inputs, scalars, results)

    def reproduce(self, inputs, scalars, finding: Finding, where: str) -> str:
        text = f"{_TILE}{json.dumps(asdict(self.kernel.tile))}\n{self.runner.segment.text}"
        return reproduction.write(text, inputs, scalars, finding, where, program=__name__)


# -- the comparison ----------------------------------------------------------------------------------


def compare(segment: Segment, tile: GemmTile, tensors: Sequence[torch.Tensor], scalars: Sequence[float],
            outputs: Sequence[torch.Tensor]) -> Finding:
    """Compare `outputs`, which a kernel made of `tensors` (norm inputs, weights, biases and epilogue inputs
    in a row) and `scalars`, with the reference, on a sample of rows and columns; the bound is that of
    self_check.py.

    Waits for the device. Draws nothing from torch's or Python's global random state.

    Raises:
        torch.OutOfMemoryError, or what the device raises for a kernel that broke it.
    """
    sample = _sample(segment, tile, tensors, outputs)
    own = [0.0] * len(outputs)
    with torch.no_grad():
        low, exact = _both(sample, sample.tensors, scalars)
        found = [self_check._worst(*four) for four in zip(sample.outputs, low, exact, own)]
        if any(error > allowed for error, allowed, _ in found):  # the reference may be right by luck
            own = _own_error(sample, scalars)
            found = [self_check._worst(*four) for four in zip(sample.outputs, low, exact, own)]
    worst = max(range(len(found)), key=lambda i: found[i][0] / found[i][1])
    return Finding(worst, *found[worst], sample.rows, prod(outputs[0].shape[:-1]))


@dataclass(frozen=True)
class _Sample:
    """Rows and columns of a call: a segment over them, its tensors on the device, the kernel's results on the
    CPU; how many tensors in front, and from which on, are no parameters."""

    segment: Segment
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    rows: int
    inputs: int
    rest: int


def _sample(segment: Segment, tile: GemmTile, tensors: Sequence[torch.Tensor],
            outputs: Sequence[torch.Tensor]) -> _Sample:
    first, weights, biases, more = grouped(segment, tensors)
    norm, epilogue = segment.norm, segment.epilogue
    outer, k = tuple(outputs[0].shape[:-1]), first[0].shape[-1]
    if outer:
        limit = self_check.row_limit(norm or epilogue) if norm or epilogue else self_check.MAX_ROWS
        rows = sample_rows(outer, min(limit, max(2, self_check.BUDGET // (8 * k))), tile.rows)
        at = self_check._index(outer, rows, outputs[0].device)
        if norm is not None:
            norm, spread = self_check._by_row(norm)
            first = _rows_of(first, spread, outer, at)
        else:
            first = [x[at] for x in first]
        if epilogue is not None:
            count = len(segment.projections)
            epilogue, spread = self_check._by_row(epilogue)
            more = _rows_of(more, spread[count:], outer, at)
    else:  # one row without a dim of its own
        rows, at = [()], ()
    stored = len(outputs) - (1 if epilogue is not None else len(weights))
    found = [x[at].cpu() for x in outputs[:stored]]
    limit = max(MIN_COLUMNS, self_check.BUDGET // (8 * k * len(weights)))
    columns = [_columns(w.shape[1 if p.transposed else 0], limit, tile.cols, epilogue, w.device)
               for p, w in zip(segment.projections, weights)]
    if epilogue is not None:
        lane, width = epilogue.lane, len(columns[0])
        more = [x.index_select(-1, columns[0]) if x.shape[-1:] == (lane,) and lane != 1 else x for x in more]
        epilogue = _narrow(epilogue, width)
    weights = [w.index_select(1 if p.transposed else 0, c)
               for p, w, c in zip(segment.projections, weights, columns)]
    biases = [None if b is None else b.index_select(0, c) for b, c in zip(biases, columns)]
    found += [x[at].index_select(-1, c).cpu() for x, c in zip(outputs[stored:], columns)]
    parameters = [*weights, *[b for b in biases if b is not None]]
    return _Sample(Segment(norm, segment.projections, epilogue), [*first, *parameters, *more], found,
                   len(rows), len(first), len(first) + len(parameters))


def _rows_of(tensors: Sequence[torch.Tensor], spread: Sequence[bool], outer: tuple[int, ...],
             at: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [x.expand(*outer, x.shape[-1])[at] if s else x.reshape(x.shape[-1:])
            for x, s in zip(tensors, spread)]


def _columns(n: int, limit: int, tile_cols: int, epilogue: NormRegion | None, device) -> torch.Tensor:
    """The columns to compare; all of them where an epilogue moves values along the lane."""
    if epilogue is not None and any(line.op in LANE_OPS for line in epilogue.body):
        limit = n
    return torch.tensor([at for at, in sample_rows((n,), limit, tile_cols)], dtype=torch.int64).to(device)


def _narrow(region: NormRegion, width: int) -> NormRegion:
    """A pointwise region over `width` columns."""
    if region.lane == 1:
        return region
    inputs = tuple(replace(x, dims=(*x.dims[:-1], width)) if x.dims[-1:] == (region.lane,) else x
                   for x in region.inputs)
    return replace(region, lane=width, inputs=inputs)


def _both(sample: _Sample, tensors: Sequence[torch.Tensor],
          scalars: Sequence[float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(the reference in the model's dtypes on the device, in float64 on the CPU), both on the CPU."""
    low = run_reference(sample.segment, tensors, scalars)
    exact = run_reference(sample.segment, [self_check.in_float64(x.cpu()) for x in tensors], scalars,
                          self_check.float64_reference)
    return [x.cpu() for x in low], list(exact)


def run_reference(segment: Segment, tensors: Sequence[torch.Tensor], scalars: Sequence[float],
                  run_region: Callable = region_reference) -> tuple[torch.Tensor, ...]:
    """The meaning of a segment on tensors, and scalars, in a row; see `fused_linear_structure.reference`."""
    first, weights, biases, more = grouped(segment, tensors)
    count = 0 if segment.norm is None else len(segment.norm.scalars)
    return reference(segment, first, scalars[:count], weights, biases, more, scalars[count:], run_region)


def _own_error(sample: _Sample, scalars: Sequence[float]) -> list[float]:
    """The reference's error, output by output, on rows that differ a little: every other time in the last
    bits, else by a few percent."""
    draw = torch.Generator().manual_seed(0)  # of its own: nobody's random numbers change
    own = [0.0] * len(sample.outputs)

    def moved(x: torch.Tensor, by: float) -> torch.Tensor:
        steps = torch.randint(-2, 3, x.shape, generator=draw).double() * by
        return (x.cpu().double() * (1 + steps)).to(x.dtype).to(x.device)

    for copy in range(COPIES):
        near = [x if sample.inputs <= i < sample.rest else
                moved(x, torch.finfo(x.dtype).eps if copy % 2 else FEW_PERCENT)
                for i, x in enumerate(sample.tensors)]
        for i, (low, exact) in enumerate(zip(*_both(sample, near, scalars))):
            errors = (low.double() - exact).abs()
            errors = errors[errors.isfinite()]
            own[i] = max(own[i], errors.max().item() if errors.numel() else 0.0)
    return own


# -- the file that reproduces it ---------------------------------------------------------------------


def run(text: str, inputs: Sequence[tuple], scalars: Sequence[float], device: str,
        saved: str | None = None) -> int:
    """What a file does: as `reproduction.run`, of a segment and the tile that it ran with."""
    from .fused_linear import FusedLinear

    first, _, rest = text.partition("\n")
    segment, tile = parse(rest), GemmTile(**json.loads(first.removeprefix(_TILE)))
    tensors = reproduction.tensors_of(inputs, device, saved)
    runner = FusedLinear(segment, self_check="off")
    try:
        outputs = runner.attempt(tensors, scalars, tile)
    except Unsupported as why:
        print("no kernel ran:", why)
        return 0
    return reproduction.told(compare(segment, tile, tensors, scalars, outputs))
