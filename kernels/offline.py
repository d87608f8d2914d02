"""Kernels without a launch: generated for a call that is only described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .codegen import generate
from .launch import _jit, launch_facts
from .layout import Layout, layout
from .reference import TORCH_DTYPES
from .region import NormRegion, dense_strides
from .source import KernelSource, Tile
from .tiling import ladder


@dataclass(frozen=True)
class Offline:
    """A kernel and how to call it, for compilers and interpreters that run without a device.

    Attributes:
        kernel: the generated source.
        grid: number of programs.
        walk: how it walks the call's tensors.
        integers: the kernel's integer arguments.
        region: what it computes.
    """

    kernel: KernelSource
    grid: int
    walk: Layout
    integers: tuple[int, ...]
    region: NormRegion

    @property
    def space(self) -> tuple[int, ...]:
        """Shape of the outputs."""
        return self.walk.space

    @property
    def signature(self) -> Mapping[str, str]:
        """Parameter name -> Triton type, as `kernels.ascend.lower` takes it."""
        return self.kernel.signature

    def function(self):
        """The Triton JIT function; imports triton."""
        return _jit(self.kernel)

    def arguments(self, inputs: Sequence[torch.Tensor],
                  scalars: Sequence[float]) -> tuple[list, tuple[torch.Tensor, ...]]:
        """(all arguments in order, the outputs among them). Outputs are new, filled with NaN."""
        outputs = tuple(
            torch.empty_strided(self.space, dense_strides(self.space, out.order),
                                dtype=TORCH_DTYPES[out.dtype]).fill_(float("nan"))
            for out in self.region.outputs)
        return [*inputs, *outputs, *self.integers, *map(float, scalars)], outputs


def offline(region: NormRegion, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]],
            soc: str = "Ascend910B3", tile: Tile | None = None, cores: int | None = None) -> Offline:
    """The kernel that an NPU of that SoC would run on such inputs; needs no NPU.

    `tile` overrides the choice of block shape, `cores` the number of programs (tests).
    """
    from .targets.npu import describe

    target = describe(soc)
    walk = layout(region, shapes, strides, target.units)
    tile = tile or ladder(region, walk.structure, walk.sizes, target)[0]
    kernel = generate(region, walk.structure, tile, target)
    if cores is not None:
        target = replace(target, cores=cores)
    integers, (grid, *_) = launch_facts(walk, tile.rows, target)
    return Offline(kernel, grid, walk, integers, region)
