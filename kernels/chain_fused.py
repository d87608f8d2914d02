"""A segment of a chain as one kernel: from its stages to a FusedLinear and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from .chain import Chain, RegionStage, operand
from .chain_products import LinearStage, Part, name_of
from .fused_linear import FusedLinear, GemmTile, Projection, in_a_row
from .fused_linear import Segment as Fusible
from .fused_linear_plan import Plan


@dataclass(frozen=True)
class FusedSegment:
    """The arguments of a FusedLinear, by name.

    Attributes:
        run: the kernel's callable.
        norm: the stage that makes the products' input; None where that is a value of the chain.
        value: that value, where there is no norm.
        weights, biases: a name, or columns of a product as rows of its weight; biases may be None.
        transposed: for each product.
        pointwise: the stage behind the products, and those of its arguments that follow the products.
        names: of the values that a call yields, in order.
    """

    run: FusedLinear
    norm: RegionStage | None
    value: str
    weights: tuple
    biases: tuple
    transposed: tuple[bool, ...]
    pointwise: RegionStage | None
    extra: tuple
    names: tuple[str, ...]

    def tensors(self, values: Mapping[str, torch.Tensor]) -> tuple[list, list, list, list]:
        """(norm inputs, weights, biases, epilogue inputs) among the values of a call."""
        first = [values[self.value]] if self.norm is None else [operand(values, a) for a in self.norm.args]
        weights = [_rows(values, ref, 1 if flip else 0) for ref, flip in zip(self.weights, self.transposed)]
        biases = [None if ref is None else _rows(values, ref, 0) for ref in self.biases]
        return first, weights, biases, [operand(values, a) for a in self.extra]

    def bytes_of_weights(self, values: Mapping[str, torch.Tensor]) -> int:
        return sum(w.numel() * w.dtype.itemsize for w in self.tensors(values)[1])

    def about(self, values: Mapping[str, torch.Tensor], rows: int, device: torch.device) -> tuple:
        """(sizes of the weights in words; why no kernel serves these values, or None; functions that list the
        block shapes `configs` and `unsplit` of the FusedLinear)."""
        first, weights, biases, extra = self.tensors(values)
        layouts = "; ".join(f"{list(w.shape)} strides {list(w.stride())}" for w in weights)
        sizes = [w.shape[::-1] if flip else w.shape for w, flip in zip(weights, self.transposed)]
        columns, depth = sum(n for n, _ in sizes), sizes[0][1]
        return (f"{first[0].dtype}, weights {layouts}", self.run.supports(first, weights, biases, extra),
                partial(self.run.configs, rows, columns, depth, device),
                partial(self.run.unsplit, rows, columns, depth, device))

    def call(self, values: Mapping[str, torch.Tensor], numbers: Mapping[str, float],
             config: GemmTile) -> dict[str, torch.Tensor]:
        """What the segment adds to `values`."""
        first, weights, biases, extra = self.tensors(values)
        results = self.run(first, self._of(self.norm, numbers), weights, biases, extra,
                           self._of(self.pointwise, numbers), config)
        return dict(zip(self.names, results, strict=True))

    def prepared(self, values: Mapping[str, torch.Tensor], numbers: Mapping[str, float],
                 config: GemmTile) -> Plan:
        """The kernel for such values and numbers, or an exception: see `FusedLinear.prepared`."""
        return self.run.prepared(self._row(values), self._scalars(numbers), config)

    def begin(self, values: Mapping, numbers: Mapping[str, float], config: GemmTile) -> None:
        """Begin to compile, in the background, what `prepared` gives for such values (likenesses do).

        Raises:
            Unsupported: no kernel serves them.
        """
        self.run.begin(self._row(values), self._scalars(numbers), config)

    def plan(self, values: Mapping[str, torch.Tensor], config: GemmTile) -> Plan | None:
        """What a call with `config` runs on values laid out as these; None where that is not a kernel, or one
        that is still on trial."""
        return self.run.plan(self._row(values), config)

    @cached_property
    def row(self) -> tuple[tuple, ...]:
        """The kernel's tensors in its order: what each is, and the dim along which a Part is one."""
        first = [self.value] if self.norm is None else self.norm.args
        return (*((ref, -1) for ref in first),
                *((ref, 1 if flip else 0) for ref, flip in zip(self.weights, self.transposed)),
                *((ref, 0) for ref in self.biases if ref is not None), *((ref, -1) for ref in self.extra))

    @property
    def scalars(self) -> tuple[str, ...]:
        """The kernel's numbers, in its order."""
        return tuple(name for stage in (self.norm, self.pointwise) if stage is not None
                     for name in stage.scalars)

    def _row(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The kernel's tensors, in its order."""
        return in_a_row(*self.tensors(values))

    def _scalars(self, numbers: Mapping[str, float]) -> list[float]:
        """The kernel's numbers, in its order."""
        return [numbers[name] for name in self.scalars]

    @staticmethod
    def _of(stage: RegionStage | None, numbers: Mapping[str, float]) -> list[float]:
        return [] if stage is None else [numbers[name] for name in stage.scalars]


def _rows(values: Mapping[str, torch.Tensor], ref, dim: int) -> torch.Tensor:
    if isinstance(ref, Part):
        return values[ref.name].narrow(dim, ref.start, ref.length)
    return values[ref]


def fused_segment(chain: Chain, segment, make: Callable[[Fusible], FusedLinear] = FusedLinear,
                  ) -> FusedSegment | None:
    """`segment` (of `chain_ways.segments`) as one kernel; None where it is none. A norm whose result is
    read elsewhere too runs by itself, and the rest is the kernel. It writes tensors of its own: what has a
    place (kernels/placed.py) is left to the library's way."""
    if not segment.products or not all(isinstance(p, LinearStage) for p in segment.products) or \
            any(name in chain.placed for stage in segment.stages for name in stage.names):
        return None
    norm = segment.norm
    inside = {stage.names for stage in segment.stages}
    outside = {name for stage in chain.stages if stage.names not in inside for name in stage.reads}
    outside |= set(chain.outputs)
    if norm is not None and (norm.names[0] in outside or (segment.pointwise is not None and
                                                          norm.names[0] in segment.pointwise.reads)):
        norm = None
    by_name = {product.name: product for product in segment.products}
    refs = list(by_name)
    epilogue, extra = None, []
    if segment.pointwise is not None:
        stage = segment.pointwise
        order = sorted(range(len(stage.args)), key=lambda i: name_of(stage.args[i]) not in by_name)
        refs = [stage.args[i] for i in order if name_of(stage.args[i]) in by_name]
        extra = [stage.args[i] for i in order[len(refs):]]
        if norm is not None and {name_of(arg) for arg in extra} & set(norm.names):
            norm = None  # the sum of add -> norm, which the same kernel would have to write first
        epilogue = replace(stage.region, inputs=tuple(stage.region.inputs[i] for i in order))
    products = [by_name[name_of(ref)] for ref in refs]
    try:
        fusible = Fusible(None if norm is None else norm.region,
                          tuple(Projection(p.bias is not None, p.transposed) for p in products), epilogue)
    except ValueError:
        return None
    names = (*(norm.names[1:] if norm else ()), *(segment.pointwise.names if epilogue else by_name))
    return FusedSegment(make(fusible), norm, products[0].value,
                        tuple(_of(p.weight, ref) for p, ref in zip(products, refs)),
                        tuple(None if p.bias is None else _of(p.bias, ref) for p, ref in zip(products, refs)),
                        tuple(p.transposed for p in products), segment.pointwise, tuple(extra), names)


def _of(name: str, ref):
    """The columns `ref` of a product, as rows of its weight or bias `name`."""
    return Part(name, ref.start, ref.length) if isinstance(ref, Part) else name
