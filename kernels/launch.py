"""Running regions: compile once, launch cheaply.

A `Runner` is the callable of one region. The first call with given shapes, strides, alignment and
device makes a plan: layout, tile, generated and compiled kernel, or the reason why there is none and
the reference runs. Later calls look the plan up, allocate the outputs and launch the compiled kernel
directly, past Triton's own dispatch.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .codegen import generate
from .layout import Layout, Unsupported, layout
from .reference import TORCH_DTYPES, reference
from .region import NormRegion, broadcast_sizes, dense_strides
from .source import KernelSource, Tile, jit, load
from .targets import Target, target_for
from .tiling import ladder

#: Plans that one Runner keeps; the oldest goes first.
MAX_PLANS = 256

#: Set to 1: kernels run on CPU tensors, through Triton's interpreter (for tests; slow).
INTERPRET = "ASCEND_LN_FUSE_INTERPRET"

_LOCK = threading.RLock()


def runs_reference(device: torch.device) -> bool:
    """Whether regions run as plain torch there: on the CPU, unless the interpreter is asked for."""
    return device.type == "cpu" and os.environ.get(INTERPRET) != "1"


class Runner:
    """Runs one region; safe to call from several threads.

    Attributes:
        region: what it computes.
        reasons: reason -> number of plans for which the reference ran instead of a kernel.
    """

    def __init__(self, region: NormRegion, target: Target | None = None):
        """`target` overrides the choice by device (tests: the interpreter with an NPU's rules)."""
        self.region = region
        self.reasons: dict[str, int] = {}
        self._target = target
        self._plans: dict[tuple, Callable] = {}
        if "torch._dynamo" in sys.modules:
            _skip_frames()

    def __call__(self, inputs: Sequence[torch.Tensor],
                 scalars: Sequence[float] = ()) -> tuple[torch.Tensor, ...]:
        """The outputs of the region for `inputs` (in its order, any strides) and `scalars`.

        New tensors, dense in the declared order; nothing else is allocated. Records no gradient.

        Raises:
            ValueError, or what torch raises in the reference: inputs that do not fit the region.
        """
        pointers = [x.data_ptr() for x in inputs]
        key = tuple([(x.shape, x.stride(), p & 15, x.dtype, x.get_device())
                     for x, p in zip(inputs, pointers)])
        plan = self._plans.get(key)
        if plan is None:
            return self._first(key, inputs, pointers, scalars)
        return plan(inputs, pointers, scalars)

    def into(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
             outputs: Sequence[torch.Tensor]) -> None:
        """Like a call, but writes `outputs`: of the space's shape and the declared dtypes, lane
        stride 1. An output may be an input of the same strides (in place); it must not overlap
        itself or an input in any other way.

        Raises:
            ValueError: an output's shape or dtype is wrong.
        """
        tensors = [*inputs, *outputs]
        pointers = [x.data_ptr() for x in tensors]
        key = ("into", *[(x.shape, x.stride(), p & 15, x.dtype, x.get_device())
                         for x, p in zip(tensors, pointers)])
        plan = self._plans.get(key)
        if plan is None:
            self._first(key, inputs, pointers[:len(inputs)], scalars, outputs)
        else:
            plan(inputs, pointers[:len(inputs)], scalars, outputs)

    # Dynamo, should it meet a Runner, calls it instead of tracing into it. `torch.compiler.disable`
    # would say the same with a wrapper that costs microseconds a call.
    for _method in (__call__, into):
        _method._torchdynamo_disable = True  # type: ignore[attr-defined]
        _method._torchdynamo_disable_msg = "launches a kernel"  # type: ignore[attr-defined]
    del _method

    def _first(self, key: tuple, inputs, pointers, scalars, outputs=None):
        """The first call with a key: makes the plan, runs it and keeps it."""
        if "torch._dynamo" in sys.modules:
            _skip_frames()
        plan = self._make(inputs, outputs)
        try:
            results = plan(inputs, pointers, scalars, outputs)
        except (Unsupported, ImportError) as why:
            plan = self._declined(str(why))
            results = plan(inputs, pointers, scalars, outputs)
        with _LOCK:
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return results

    def _make(self, inputs: Sequence[torch.Tensor],
              outputs: Sequence[torch.Tensor] | None) -> Callable:
        region = self.region
        if len(inputs) != len(region.inputs):
            raise ValueError(f"the region has {len(region.inputs)} inputs, got {len(inputs)}")
        for operand, x in zip(region.inputs, inputs):
            if x.dtype != TORCH_DTYPES[operand.dtype]:
                raise ValueError(f"{operand}: got {x.dtype}")
        device = inputs[0].device
        if outputs is not None:
            space = broadcast_sizes(region, [x.shape for x in inputs])
            for out, x in zip(region.outputs, outputs, strict=True):
                if x.shape != space or x.dtype != TORCH_DTYPES[out.dtype] or x.device != device:
                    raise ValueError(f"{out}: expected {out.dtype}{list(space)} on {device}, got "
                                     f"{x.dtype}{list(x.shape)} on {x.device}")
        target = self._target
        if target is None and runs_reference(device):
            return self._reference
        try:
            if any(x.device != device for x in inputs):
                raise Unsupported("inputs on different devices")
            target = target or target_for(device)
            walk = layout(region, [x.shape for x in inputs], [x.stride() for x in inputs],
                          target.units, outputs and [x.stride() for x in outputs])
            if 0 in walk.space:
                return _Empty(region, walk, device)
            return _PLANS[target.backend](region, walk, target, device)
        except (Unsupported, ImportError) as why:
            return self._declined(str(why))

    def _declined(self, reason: str) -> Callable:
        with _LOCK:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return self._reference

    def _reference(self, inputs, pointers, scalars, outputs=None):
        with torch.no_grad():
            results = reference(self.region, inputs, scalars)
            for given, result in zip(outputs or (), results):
                given.copy_(result)
        return results


@lru_cache(maxsize=1)
def _skip_frames() -> None:
    """Has Dynamo skip the frames of launching and of the reference, where it meets them as frames of
    their own (after a graph break before a Runner)."""
    from torch._dynamo.eval_frame import skip_code

    from . import reference as reference_module

    found = []
    for module in (sys.modules[__name__], reference_module):
        owners = [vars(module), *(vars(x) for x in vars(module).values() if isinstance(x, type))]
        for owner in owners:
            found += [f.__code__ for f in owner.values()
                      if getattr(f, "__module__", None) == module.__name__ and hasattr(f, "__code__")]
    while found:
        code = found.pop()
        skip_code(code)
        found += [c for c in code.co_consts if hasattr(c, "co_code")]


# -- plans -------------------------------------------------------------------------------------------


class _Outputs:
    """Allocates the outputs of one plan."""

    def __init__(self, region: NormRegion, walk: Layout, device: torch.device):
        self.device = device
        self.specs = [(walk.space, dense_strides(walk.space, out.order), TORCH_DTYPES[out.dtype])
                      for out in region.outputs]

    def allocate(self) -> tuple[torch.Tensor, ...]:
        return tuple([torch.empty_strided(size, stride, dtype=dtype, device=self.device)
                      for size, stride, dtype in self.specs])


class _Empty(_Outputs):
    """No element to compute: outputs without a launch."""

    def __call__(self, inputs, pointers, scalars, outputs=None):
        return self.allocate()


class _Kernel(_Outputs):
    """What the plans that launch a kernel share."""

    def __init__(self, region, walk, target, device):
        super().__init__(region, walk, device)
        self.region, self.walk, self.target = region, walk, target
        self.tiles = iter(ladder(region, walk.structure, walk.sizes, target))
        self.next_tile()

    def next_tile(self) -> bool:
        """Take the next tile of the ladder; False when there is none."""
        tile = next(self.tiles, None)
        if tile is None:
            return False
        self.source = generate(self.region, self.walk.structure, tile, self.target)
        self.integers, self.grid = launch_facts(self.walk, tile.rows, self.target)
        return True

    def numbers(self, scalars: Sequence[float]) -> list:
        if self.region.compute == "f64":
            return [struct.unpack("<q", struct.pack("<d", s))[0] for s in scalars]
        return list(map(float, scalars))


class _Interpreted(_Kernel):
    def __call__(self, inputs, pointers, scalars, outputs=None):
        from .targets.interpreter import run

        outputs = outputs or self.allocate()
        run(_function(self.source), (self.grid,),
            [*inputs, *outputs, *self.integers, *self.numbers(scalars)])
        return outputs


class _Cuda(_Kernel):
    """The first call goes through Triton, which compiles; later ones launch the binary directly,
    with raw addresses and the raw current stream."""

    def __init__(self, region, walk, target, device):
        super().__init__(region, walk, target, device)
        self.launch = None
        self.exact_scalars = region.compute == "f64"
        self.index = device.index
        self.several = torch.cuda.device_count() > 1
        self.current_device = torch.cuda.current_device
        self.stream = torch._C._cuda_getCurrentRawStream
        # Inductor's allocator call, on the current device: no argument parser, no dispatcher.
        self.empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

    def allocate(self):
        empty = self.empty
        if empty is None:
            return super().allocate()
        return tuple([empty(size, stride, dtype) for size, stride, dtype in self.specs])

    def __call__(self, inputs, pointers, scalars, outputs=None):
        if self.several and self.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(inputs, pointers, scalars, outputs)
        return self.run(inputs, pointers, scalars, outputs)

    def run(self, inputs, pointers, scalars, outputs):
        if outputs is None:
            outputs = self.allocate()
        launch = self.launch
        if launch is None:
            return self.first(inputs, scalars, outputs)
        if self.exact_scalars:
            scalars = self.numbers(scalars)
        launch(self.grid, 1, 1, self.stream(self.index), self.function, self.metadata,
               None, None, None, *pointers, *[x.data_ptr() for x in outputs],
               *self.integers, *scalars)
        return outputs

    def first(self, inputs, scalars, outputs):
        compiled = _jit(self.source)[(self.grid,)](
            *inputs, *outputs, *self.integers, *self.numbers(scalars),
            num_warps=self.source.tile.num_warps)
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.launch = compiled.run
        return outputs


class _Npu(_Kernel):
    """Not run on hardware by us; the compiler's own launcher is used throughout."""

    def __init__(self, region, walk, target, device):
        super().__init__(region, walk, target, device)
        self.launch = None
        self.index = device.index

    def __call__(self, inputs, pointers, scalars, outputs=None):
        outputs = outputs or self.allocate()
        arguments = [*inputs, *outputs, *self.integers, *self.numbers(scalars)]
        if torch.npu.current_device() != self.index:
            with torch.npu.device(self.index):
                self.run(arguments)
        else:
            self.run(arguments)
        return outputs

    def run(self, arguments):
        if self.launch is not None:
            self.launch(*arguments)
            return
        options = {}
        while True:
            try:
                compiled = _jit(self.source)[(self.grid,)](*arguments, **options)
                break
            except Exception as error:
                # What the compiler wrote is the only sign of a tile too large for the Unified Buffer.
                if "overflow" not in str(error).lower():
                    raise
                if self.next_tile():
                    count = len(self.region.inputs) + len(self.region.outputs)
                    numbers = arguments[len(arguments) - len(self.region.scalars):]
                    arguments = [*arguments[:count], *self.integers, *numbers]
                elif not options:
                    options = {"multibuffer": False}  # the smallest tile, once in memory instead of twice
                else:
                    raise Unsupported(f"no tile fits the Unified Buffer of {self.target.name}") from error
        self.launch = compiled[(self.grid, 1, 1)]


_PLANS = {"cuda": _Cuda, "npu": _Npu, "interpreter": _Interpreted}


def launch_facts(walk: Layout, rows: int, target: Target) -> tuple[tuple[int, ...], int]:
    """(integer arguments, grid) of a launch with tiles of `rows` rows."""
    integers, tiles = walk.arguments(rows), walk.tiles(rows)
    if not target.persistent:
        return integers, tiles
    programs = min(target.cores, tiles)
    share = -(-tiles // programs)
    return (*integers, share), -(-tiles // share)


@lru_cache(maxsize=1024)
def _jit(source: KernelSource):
    return jit(source)


@lru_cache(maxsize=1024)
def _function(source: KernelSource):
    return load(source)


# -- without a launch --------------------------------------------------------------------------------


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
    integers, grid = launch_facts(walk, tile.rows, target)
    return Offline(kernel, grid, walk, integers, region)
