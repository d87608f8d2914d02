"""What a segment is: matrix products of one input, with what is pointwise around them, as one kernel.

    A = norm(norm_inputs)                           optional; else A is the input itself, [*, K]
    y_i = A @ weight_i^T + bias_i                   one for each projection, [*, N_i]
    out = epilogue(y_0, ..., y_n, more inputs)      optional; else every y_i is an output

Norm and epilogue are regions (region.py), so that where a model rounds, the kernel rounds: A is rounded to
the dtype that the norm region gives, products are summed in fp32, a projection with its bias is rounded
once, and the epilogue's lines follow. `reference` says the same in plain torch.

`Problem` is a segment together with what its kernel's source depends on: K, the N of every weight, which
strides are 0 or 1, alignment. The other sizes and strides are arguments of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import torch
from torch.nn import functional as F

from .lanes import moves_of
from .layout import INT32_MAX, VECTOR_BYTES, Layout, Unsupported, layout
from .reference import TORCH_DTYPES
from .reference import reference as region_reference
from .region import DTYPES, NORMS, NormRegion, Operand, Output, dense_strides
from .region import parse as parse_region

#: Dtypes of A and of weights for which kernels exist: those that matrix units multiply exactly.
DTYPES_SERVED = ("bf16", "f16")

#: Most columns of a tile and most steps along K in it: bounds the offsets inside a tile.
MAX_TILE = 2**14


@dataclass(frozen=True)
class Projection:
    """One matrix product of the segment's input.

    Attributes:
        bias: a bias vector `[N]` is added before the result is rounded.
        transposed: False: the weight is `[N, K]`, as nn.Linear has it; True: `[K, N]`, as GPT-2's Conv1D.
    """

    bias: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        return f"linear({'KN' if self.transposed else 'NK'}{', bias' if self.bias else ''})"


@dataclass(frozen=True)
class Segment:
    """See the module docstring.

    Attributes:
        norm: makes A: its first output, of lane K. Its other outputs (the sum of add -> norm) are outputs
            of the segment too. None: A is the one input.
        projections: at least one; all read A. With an epilogue they have one N.
        epilogue: a region without a norm, of lane N, with one output; its first inputs are the
            projections' results, in order. None: the results are the outputs.

    Raises:
        ValueError: at construction, when the parts do not fit together.
    """

    norm: NormRegion | None
    projections: tuple[Projection, ...]
    epilogue: NormRegion | None = None

    def __post_init__(self) -> None:
        if not self.projections:
            raise ValueError("a segment needs a projection")
        epilogue = self.epilogue
        if epilogue is None:
            return
        if any(line.op in NORMS for line in epilogue.body):
            raise ValueError("an epilogue is pointwise: it cannot hold a norm")
        if len(epilogue.outputs) != 1:
            raise ValueError(f"an epilogue has one output, not {len(epilogue.outputs)}")
        for operand in epilogue.inputs[:len(self.projections)]:
            if operand.dims != epilogue.full:
                raise ValueError(f"{operand}: a projection's result has all dims of the space")
        if len(epilogue.inputs) < len(self.projections):
            raise ValueError("an epilogue reads every projection")
        if self.norm is not None and self.norm.rank != epilogue.rank:
            raise ValueError(f"the norm has rank {self.norm.rank}, the epilogue {epilogue.rank}")

    @property
    def text(self) -> str:
        """What a person reads; equal for equal segments."""
        parts = [] if self.norm is None else [self.norm.text]
        parts += map(str, self.projections)
        parts += [] if self.epilogue is None else [self.epilogue.text]
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Segment:
    """The segment whose `text` this is.

    Raises:
        ValueError: it is no segment's.
    """
    parts: tuple[list[str], list[Projection], list[str]] = [], [], []
    for line in text.split("\n"):
        if line in _PROJECTIONS:
            parts[1].append(_PROJECTIONS[line])
        else:
            parts[2 if parts[1] else 0].append(line)
    norm, epilogue = (parse_region("\n".join(lines)) if lines else None for lines in (parts[0], parts[2]))
    return Segment(norm, tuple(parts[1]), epilogue)


_PROJECTIONS = {str(p): p for p in (Projection(bias, transposed) for bias in (False, True)
                                    for transposed in (False, True))}


def grouped(segment: Segment, tensors: Sequence[torch.Tensor]) -> tuple[list, list, list, list]:
    """(norm inputs, weights, biases with None where there is none, epilogue inputs) of tensors in a row."""
    rest = iter(tensors)
    first = [next(rest) for _ in (segment.norm.inputs if segment.norm is not None else (0,))]
    weights = [next(rest) for _ in segment.projections]
    biases = [next(rest) if p.bias else None for p in segment.projections]
    return first, weights, biases, list(rest)


def reference(segment: Segment, norm_inputs: Sequence[torch.Tensor], norm_scalars: Sequence[float],
              weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
              epilogue_inputs: Sequence[torch.Tensor] = (), epilogue_scalars: Sequence[float] = (),
              run_region: Callable = region_reference) -> tuple[torch.Tensor, ...]:
    """The meaning of a segment: what `FusedLinear` returns for the same arguments.

    `run_region`: runs norm and epilogue, with the arguments of `reference.reference`."""
    if segment.norm is None:
        a, *stored = norm_inputs
    else:
        a, *stored = run_region(segment.norm, norm_inputs, norm_scalars)
    results = [F.linear(a, w.t() if p.transposed else w, b)
               for p, w, b in zip(segment.projections, weights, biases, strict=True)]
    if segment.epilogue is not None:
        results = run_region(segment.epilogue, [*results, *epilogue_inputs], epilogue_scalars)
    return (*stored, *results)


@dataclass(frozen=True)
class WeightStructure:
    """What the source knows of one weight.

    Attributes:
        n: its number of output features.
        along_k: elements of one output feature lie side by side (nn.Linear), else those of one input
            feature (Conv1D).
        unit: power of two, in elements, that divides the other stride; see `layout.OperandStructure`.
        bias: there is one.
    """

    n: int
    along_k: bool
    unit: int
    bias: bool


@dataclass(frozen=True)
class PartStructure:
    """A region of the kernel, and how its operands lie over the rows of A.

    Attributes:
        region: makes A, or turns projections into an output.
        moving: for each operand (inputs, then outputs), whether it moves along each outer dim.
        lane: whether it has a value per lane element.
        unit: see `layout.OperandStructure`.
        absent: the operands that are no tensors: A, or the projections.
    """

    region: NormRegion
    moving: tuple[tuple[bool, ...], ...]
    lane: tuple[bool, ...]
    unit: tuple[int, ...]
    absent: tuple[int, ...]

    @property
    def present(self) -> tuple[int, ...]:
        """The operands that are tensors, by number."""
        return tuple(i for i in range(len(self.moving)) if i not in self.absent)

    @property
    def dims(self) -> int:
        """Outer dims that a row's number is taken apart into."""
        return len(self.moving[0])


@dataclass(frozen=True)
class Problem:
    """What the source of a segment's kernel depends on, beside the tile.

    Attributes:
        dtype: of A, the weights and the projections' results.
        k: length of the sums.
        prologue: makes A; one line of nothing where A is an input.
        weights: one for each projection.
        epilogues: one for all projections, or one for each that only stores.
    """

    dtype: str
    k: int
    prologue: PartStructure
    weights: tuple[WeightStructure, ...]
    epilogues: tuple[PartStructure, ...]

    @property
    def joint(self) -> bool:
        """Whether one tile of the output is made of a tile of every projection."""
        return len(self.epilogues) < len(self.weights) or len(self.weights) == 1

    def starts(self, cols: int) -> tuple[int, ...]:
        """The first tile of each projection where each has its own tiles of `cols` columns; the last
        number is the count of tiles."""
        if self.joint:
            return 0, -(-self.weights[0].n // cols)
        starts = [0]
        for weight in self.weights:
            starts.append(starts[-1] - (-weight.n // cols))
        return tuple(starts)


@dataclass(frozen=True)
class Bound:
    """A problem together with the run-time numbers of one call's tensors.

    Attributes:
        problem: see `Problem`.
        m: rows of A.
        outer: outer sizes of A and of the outputs.
        prologue, epilogues: run-time integers of each part: strides in units where they are not 0; where
            there are several outer dims, then their sizes and the rows that one step along them is.
        strides: of each weight, the stride that is not 1, in its unit.
    """

    problem: Problem
    m: int
    outer: tuple[int, ...]
    prologue: tuple[int, ...]
    epilogues: tuple[tuple[int, ...], ...]
    strides: tuple[int, ...]


def stored_only(dtype: str, rank: int, lane: int, name: str) -> NormRegion:
    """The region that gives its one input back."""
    dims = ("*",) * (rank - 1) + (lane,)
    return NormRegion(lane, rank, (Operand(name, dtype, dims),), (), (),
                      (Output(name, dtype, tuple(range(rank))),))


def without_norm(bound: Bound) -> Bound:
    """The same products of an A that lies in memory, contiguous."""
    a = bound.problem.prologue.region
    region = stored_only(bound.problem.dtype, a.rank, a.lane, "a")
    shape = (*bound.outer, bound.problem.k)
    part, numbers, _ = _part(region, [shape], [dense_strides(shape, range(a.rank))], (1,))
    return replace(bound, problem=replace(bound.problem, prologue=part), prologue=numbers)


def bind(segment: Segment, norm_inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
         biases: Sequence[torch.Tensor | None], epilogue_inputs: Sequence[torch.Tensor]) -> Bound:
    """The problem that a call poses.

    Raises:
        ValueError: tensors that do not fit the segment; names them.
        Unsupported: no kernel serves the dtypes or strides.
    """
    _check_counts(segment, norm_inputs, weights, biases, epilogue_inputs)
    if segment.norm is None:
        x = norm_inputs[0]
        if x.dim() == 0:
            raise ValueError("the input is 0-dimensional")
        word = next((w for w, dtype in TORCH_DTYPES.items() if dtype == x.dtype), str(x.dtype))
        if word not in DTYPES_SERVED:
            raise Unsupported(f"products of {word}; served are {', '.join(DTYPES_SERVED)}")
        prologue = stored_only(word, x.dim(), x.shape[-1], "a")
    else:
        prologue = segment.norm
    k, dtype = prologue.lane, prologue.outputs[0].dtype
    if dtype not in DTYPES_SERVED:
        raise Unsupported(f"products of {dtype}; served are {', '.join(DTYPES_SERVED)}")
    for region in (prologue, segment.epilogue):
        if region is None:
            continue
        if region.compute == "f64":
            raise Unsupported("fp64 beside matrix products")
        if not all(out.is_contiguous for out in region.outputs):
            raise Unsupported("an output that is not contiguous")
    _check_dtypes(prologue.inputs, norm_inputs)
    part, numbers, space = _part(prologue, [x.shape for x in norm_inputs],
                                 [x.stride() for x in norm_inputs], (len(norm_inputs),))
    outer = space[:-1]
    structures, strides = [], []
    for i, (projection, weight, bias) in enumerate(zip(segment.projections, weights, biases)):
        structure, stride = _weight(i, projection, weight, bias, k, dtype)
        structures.append(structure)
        strides.append(stride)
    structures, strides = _alike(structures, strides)
    epilogues = _epilogues(segment, dtype, outer, structures, epilogue_inputs)
    problem = Problem(dtype, k, part, tuple(structures), tuple(e for e, _ in epilogues))
    if prod(outer) > INT32_MAX:
        raise Unsupported("more than 2^31 rows")
    return Bound(problem, prod(outer), outer, numbers, tuple(n for _, n in epilogues), tuple(strides))


def _check_counts(segment, norm_inputs, weights, biases, epilogue_inputs) -> None:
    wanted = 1 if segment.norm is None else len(segment.norm.inputs)
    if len(norm_inputs) != wanted:
        raise ValueError(f"norm_inputs: expected {wanted}, got {len(norm_inputs)}")
    for name, given in (("weights", weights), ("biases", biases)):
        if len(given) != len(segment.projections):
            raise ValueError(f"{name}: expected {len(segment.projections)}, got {len(given)}")
    epilogue = segment.epilogue
    wanted = 0 if epilogue is None else len(epilogue.inputs) - len(segment.projections)
    if len(epilogue_inputs) != wanted:
        raise ValueError(f"epilogue_inputs: expected {wanted}, got {len(epilogue_inputs)}")


def _check_dtypes(operands: Sequence[Operand], tensors: Sequence[torch.Tensor]) -> None:
    for operand, x in zip(operands, tensors):
        if x.dtype != TORCH_DTYPES[operand.dtype]:
            raise ValueError(f"{operand}: got {x.dtype}")


def _epilogues(segment: Segment, dtype: str, outer: tuple[int, ...], weights: Sequence[WeightStructure],
               inputs: Sequence[torch.Tensor]) -> list[tuple[PartStructure, tuple[int, ...]]]:
    rank, count = len(outer) + 1, len(weights)
    if segment.epilogue is None:
        parts = []
        for i, weight in enumerate(weights):
            region = stored_only(dtype, rank, weight.n, f"y{i}")
            shape = (*outer, weight.n)
            parts.append(_part(region, [shape], [dense_strides(shape, range(rank))], (0,))[:2])
        return parts
    region = segment.epilogue
    if region.rank != rank:
        raise ValueError(f"the epilogue has rank {region.rank}, its input {rank}")
    for i, weight in enumerate(weights):
        if weight.n != region.lane:
            raise ValueError(f"weight {i} gives {weight.n} features, the epilogue reads {region.lane}")
    for operand in region.inputs[:count]:
        if operand.dtype != dtype:
            raise Unsupported(f"{operand}: projections give {dtype}")
    _check_dtypes(region.inputs[count:], inputs)
    shape = (*outer, region.lane)
    dense = dense_strides(shape, range(rank))
    part, numbers, space = _part(region, [*[shape] * count, *[x.shape for x in inputs]],
                                 [*[dense] * count, *[x.stride() for x in inputs]], range(count))
    if space != shape:
        raise Unsupported(f"an epilogue that widens {shape} to {space}")
    return [(part, numbers)]


def _part(region: NormRegion, shapes, strides,
          absent) -> tuple[PartStructure, tuple[int, ...], tuple[int, ...]]:
    """(structure, run-time integers, space) of a region over the rows of A, of which a kernel has pieces of
    the lane at a time."""
    if moves := moves_of(region):
        raise Unsupported(f"{moves} beside matrix products")
    if any(map(region.is_shared, region.inputs)):
        raise Unsupported("heads that share an operand beside matrix products")
    walk: Layout = layout(region, shapes, strides)
    if walk.structure.across:
        raise Unsupported(f"lane stride {walk.lanes[0]} beside matrix products")
    operands, steps = list(walk.structure.operands), list(walk.strides)
    if region.rank == 1:
        # One row without a dim of its own: outputs step to a next row that there is not.
        for i in range(len(region.inputs), len(operands)):
            operands[i], steps[i] = replace(operands[i], moving=(True,)), (region.lane,)
    part = PartStructure(region, tuple(x.moving for x in operands), tuple(x.lane for x in operands),
                         tuple(x.unit for x in operands), tuple(absent))
    numbers = [s // operands[i].unit for i in part.present
               for s, moves in zip(steps[i], operands[i].moving) if moves]
    if part.dims > 1:
        # Outputs are contiguous: their strides say how many rows one step along a dim is.
        out = walk.strides[len(region.inputs)]
        numbers += [*walk.sizes, *(s // max(region.lane, 1) for s in out)]
    return part, tuple(numbers), walk.space


def _alike(weights: Sequence[WeightStructure],
           strides: Sequence[int]) -> tuple[list[WeightStructure], list[int]]:
    """The weights and their strides with one unit for all: one kernel's loop serves them.

    Raises:
        Unsupported: some lie along K, others along N.
    """
    if len({w.along_k for w in weights}) > 1:
        raise Unsupported("weights of which some lie along K, others along N")
    unit = min(w.unit for w in weights)
    return ([replace(w, unit=unit) for w in weights],
            [stride * (w.unit // unit) for w, stride in zip(weights, strides)])


def _weight(i: int, projection: Projection, weight: torch.Tensor, bias: torch.Tensor | None,
            k: int, dtype: str) -> tuple[WeightStructure, int]:
    """(structure, stride in its unit) of weight `i`."""
    if weight.dim() != 2 or weight.shape[0 if projection.transposed else 1] != k:
        wanted = f"({k}, N)" if projection.transposed else f"(N, {k})"
        raise ValueError(f"weight {i}: expected the shape {wanted}, got {tuple(weight.shape)}")
    if weight.dtype != TORCH_DTYPES[dtype]:
        raise ValueError(f"weight {i}: expected {dtype}, got {weight.dtype}")
    n_stride, k_stride = weight.stride()[::-1] if projection.transposed else weight.stride()
    n = weight.shape[1 if projection.transposed else 0]
    if (bias is not None) != projection.bias:
        raise ValueError(f"bias {i}: {'missing' if projection.bias else 'not declared'}")
    if bias is not None:
        if bias.shape != (n,) or bias.dtype != weight.dtype:
            raise ValueError(f"bias {i}: expected {dtype}[{n}], got {bias.dtype}{list(bias.shape)}")
        if n > 1 and bias.stride(0) != 1:
            raise Unsupported(f"stride of bias {i} is {bias.stride(0)}, not 1")
    along_k = k_stride == 1 or k == 1
    if not along_k and n_stride != 1 and n != 1:
        raise Unsupported(f"weight {i} has strides {weight.stride()}; one must be 1")
    stride, side = (n_stride, k) if along_k else (k_stride, n)
    if stride * MAX_TILE > INT32_MAX:
        raise Unsupported(f"weight {i}: rows {stride} elements apart")
    unit = gcd(VECTOR_BYTES // DTYPES[dtype], stride, side)
    return WeightStructure(n, along_k, unit, projection.bias), stride // unit
