"""One call of a region as a graph shows it: which kernel it would launch, without launching it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .codegen import generate
from .launch import launch_facts, runs_reference
from .layout import Layout, Unsupported, layout
from .offline import Offline
from .region import NormRegion
from .source import KernelSource
from .targets import Target, target_for
from .targets.npu import describe
from .tiling import ladder

#: The SoC whose rules kernels follow where none is named and no accelerator is there to ask.
DEFAULT_SOC = "Ascend910B3"


@dataclass(frozen=True)
class Call:
    """A region with the shapes and strides (in elements) of its inputs, in its order, and their device.

    soc: the NPU's, where the device is not to be asked for it.
    scalars: values of the region's scalars, None for one that only run time knows; None where the call
    is of no model.
    places: strides of outputs that exist already; None where the call makes its own.
    """

    region: NormRegion
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    device: torch.device
    soc: str | None = None
    scalars: tuple[float | None, ...] | None = None
    places: tuple[tuple[int, ...], ...] | None = None

    def target(self) -> Target:
        """The rules for `soc`, else for the device; where that cannot be asked, for DEFAULT_SOC."""
        if self.soc is None and not runs_reference(self.device):
            try:
                return target_for(self.device)
            except ImportError:  # a device named npu without torch_npu: only its name is real
                pass
        return describe(self.soc or DEFAULT_SOC)

    def walk(self, target: Target) -> Layout:
        """How a kernel for `target` walks the call. Unsupported where none can."""
        return layout(self.region, self.shapes, self.strides, target.units, self.places)

    def candidates(self, soc: str) -> Iterator[Offline]:
        """The kernels for an NPU of that SoC, best first: the next is used where a compiler runs out of
        memory on one. None for a call without elements. Unsupported where no kernel serves it."""
        target = describe(soc)
        walk = self.walk(target)
        if 0 in walk.space:
            return
        for tile in ladder(self.region, walk.structure, walk.sizes, target):
            integers, (grid, *_) = launch_facts(walk, tile.rows, target)
            yield Offline(generate(self.region, walk.structure, tile, target), grid, walk, integers,
                          self.region)

    def first_kernel(self) -> KernelSource | None:
        """The kernel that is tried first; None for a call without elements. Unsupported where none is."""
        target = self.target()
        walk = self.walk(target)
        if 0 in walk.space:
            return None
        tile = ladder(self.region, walk.structure, walk.sizes, target)[0]
        return generate(self.region, walk.structure, tile, target)

    def kernel(self) -> KernelSource | None:
        """`first_kernel`; None where the reference runs instead."""
        try:
            return self.first_kernel()
        except Unsupported:
            return None

    def source(self) -> str | None:
        """The text of `kernel()`."""
        kernel = self.kernel()
        return kernel.source if kernel else None
