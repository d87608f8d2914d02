"""The launches of a segment on tensors of one layout: what fused_linear.py keeps for later calls.

One to three kernels (the norm ahead, the products, the sum of their parts) and the memory between them.
`prepare` compiles them within the time limit of compiling.py; a call launches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from . import launch
from .compiling import ahead, within_limit
from .fused_linear_codegen import generate, generate_ahead, generate_reduction
from .fused_linear_structure import Bound, Segment, without_norm
from .fused_linear_tiles import GemmTile
from .layout import Unsupported, layout
from .likeness import Likeness
from .reference import TORCH_DTYPES
from .region import dense_strides
from .source import KernelSource, Tile
from .targets import Target
from .tiling import ladder
from .triton_cache import with_safe_cache

#: Blocks of the kernel that adds up parts of the sums.
SUM_BLOCK = Tile(4, 128)

#: (size, strides, dtype) of a tensor that a plan allocates.
Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Plan:
    """`plan(tensors, pointers, scalars)` runs a segment on tensors of the layout that it was made for: norm
    inputs, weights, biases and epilogue inputs in a row; the norm's scalars, then the epilogue's. Launches
    take addresses themselves: `pointers` are there for the guard, which calls all plans alike.

    `prepare` comes before the first call.

    Attributes:
        tile: block shape and launch options.
        device: of the tensors.
    """

    def __init__(self, segment: Segment, bound: Bound, tile: GemmTile, target: Target,
                 tensors: Sequence[torch.Tensor | Likeness]):
        self.segment, self.bound, self.tile, self.target = segment, bound, tile, target
        self.device, self.ready = tensors[0].device, False
        problem, norm = bound.problem, segment.norm
        shape_of_a = (*bound.outer, problem.k)
        stored = norm.outputs[1:] if norm is not None else ()
        self.outputs = [_spec(shape_of_a, out.dtype) for out in stored]
        for part in problem.epilogues:
            self.outputs.append(_spec((*bound.outer, part.region.lane), part.region.outputs[0].dtype))
        self.a = _spec(shape_of_a, problem.dtype)
        self.sums = _spec((tile.split * bound.m * sum(w.n for w in problem.weights),), "f32")
        self.inputs = 1 if norm is None else len(norm.inputs)
        self.stored, self.weights = len(stored), len(problem.weights)
        self.scalars = 0 if norm is None else len(norm.scalars)
        self.walk = None  # of the norm, where it runs ahead
        if tile.norm_ahead and norm is not None:
            first = tensors[:self.inputs]
            self.walk = layout(norm, [x.shape for x in first], [x.stride() for x in first], target.units)
        #: dtype and address modulo 16 of each tensor: what a compiler looks at
        self.pointers = tuple((x.dtype, x.data_ptr() & 15) for x in tensors)
        self.index = self.device.index
        self.several = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self.current_device = torch.cuda.current_device
        self.empty = allocator(self.device)

    def prepare(self, pointers: Sequence[int], scalars: Sequence[float], outputs=None) -> None:
        """Compile.

        Raises:
            CompileTimeout: the compiler needs longer than it may; a later call finds what it has made.
            Unsupported: the tile needs more on-chip memory than the device has. Or what the compiler raises.
        """
        if not self.ready:
            self.ahead, self.products, self.reduction = within_limit(*self._job(scalars))
            self.ready = True

    def begin(self, scalars: Sequence[float]) -> None:
        """Have what `prepare` waits for begin in the background."""
        if not self.ready:
            ahead(*self._job(scalars))

    def _job(self, scalars: Sequence[float]) -> tuple[tuple, Callable]:
        """(what makes two compilations equal, the compilation)."""
        key = self.segment, self.bound, self.tile, self.target, self.device, self.pointers
        return key, partial(self.compile, scalars)

    def compile(self, scalars: Sequence[float]) -> tuple:
        """The launches, compiled. In a thread of its own: changes no attribute, holds no tensor of a call."""
        launches = self._launches()
        stand_ins = [launch.stand_in(dtype, self.device, at) for dtype, at in self.pointers]
        self._run(*[part and part.compile for part in launches],
                  lambda size, stride, dtype: launch.stand_in(dtype, self.device), stand_ins, scalars)
        return launches

    def _launches(self) -> tuple[Callable | None, Callable, Callable | None]:
        """(the norm ahead, the products, the sum of their parts); None for what this plan has not."""
        tile, target, bound, dependent = self.tile, self.target, self.bound, _dependent(self.target)
        make = partial(_Cuda if target.backend == "cuda" else _Interpreted, self.device)
        ahead = reduction = None
        if self.walk is not None:
            ahead = self._ahead(dependent, make)
            bound = without_norm(bound)
        problem, whole = bound.problem, tile.split == 1
        ends = [number for numbers in bound.epilogues for number in numbers]
        rows = -(-bound.m // tile.rows)
        products = make(
            generate(problem, tile, target, dependent), (rows * problem.starts(tile.cols)[-1], tile.split, 1),
            [*bound.prologue, *bound.strides, *(ends if whole else ()), bound.m, rows],
            num_warps=tile.num_warps, num_stages=tile.num_stages, early=dependent and tile.overlap)
        if not whole:
            block = SUM_BLOCK if bound.m > 1 else replace(SUM_BLOCK, rows=1)
            rows = -(-bound.m // block.rows)
            reduction = make(
                generate_reduction(problem, tile.split, block, target, dependent),
                (rows * problem.starts(block.cols)[-1], 1, 1), [*ends, bound.m, rows],
                num_warps=block.num_warps, early=dependent)
        return ahead, products, reduction

    def _ahead(self, dependent: bool, make: Callable) -> Callable:
        """The launch of the norm by itself."""
        region, walk = self.segment.norm, self.walk
        tile = ladder(region, walk.structure, walk.sizes, self.target)[0]
        integers, grid = launch.launch_facts(walk, tile.rows, self.target)
        return make(generate_ahead(region, walk.structure, tile, self.target, dependent), grid, integers,
                    num_warps=tile.num_warps)

    def __call__(self, tensors, pointers, scalars, outputs=None) -> tuple[torch.Tensor, ...]:
        if self.several and self.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self._run(self.ahead, self.products, self.reduction, self.empty, tensors, scalars)
        return self._run(self.ahead, self.products, self.reduction, self.empty, tensors, scalars)

    def _run(self, ahead, products, reduction, empty, tensors, scalars) -> tuple[torch.Tensor, ...]:
        """Every kernel's arguments, each handed to what launches, or compiles, that kernel."""
        outputs = [empty(*spec) for spec in self.outputs]
        if ahead is None and reduction is None:  # one kernel: all tensors, as they stand in the row
            products([*tensors, *outputs], scalars)
            return tuple(outputs)
        stored, results = outputs[:self.stored], outputs[self.stored:]
        inputs, rest = tensors[:self.inputs], tensors[self.inputs:]
        weights, more = rest[:self.weights], rest[self.weights:]
        first = self.scalars
        if ahead is not None:
            a = empty(*self.a)
            ahead([*inputs, a, *stored], scalars[:first])
            inputs, stored, scalars, first = [a], [], scalars[first:], 0
        if reduction is None:
            products([*inputs, *weights, *more, *stored, *results], scalars)
        else:
            sums = empty(*self.sums)
            products([*inputs, *weights, *stored, sums], scalars[:first])
            reduction([sums, *more, *results], scalars[first:])
        return tuple(outputs)

    def capturing(self) -> bool:
        """Whether the call is being recorded for replay, so that nothing may wait for the device."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """`empty(size, strides, dtype)` on `device`; on a GPU that must be the current device."""
    if device.type == "cuda":
        # Inductor's allocator call: no argument parser, no dispatcher.
        empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
        if empty is not None:
            return empty
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


def _spec(size: tuple[int, ...], dtype: str) -> Spec:
    return size, dense_strides(size, range(len(size))), TORCH_DTYPES[dtype]


@lru_cache(maxsize=64)
def _dependent(target: Target) -> bool:
    """Whether the target has programmatic dependent launch: Hopper and later."""
    if target.backend != "cuda" or int(target.name.removeprefix("sm_")) < 90:
        return False
    try:
        from triton.language.extra.cuda import gdc_wait  # noqa: F401
    except ImportError:
        return False
    return True


class _Interpreted:
    """A launch on CPU tensors, by Triton's interpreter."""

    def __init__(self, device: torch.device, source: KernelSource, grid: tuple[int, int, int],
                 integers: Sequence[int], **options):
        self.source, self.grid, self.integers = source, grid, integers

    def compile(self, tensors: Sequence[Likeness], scalars: Sequence[float]) -> None:
        launch._function(self.source)

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        from .targets.interpreter import run

        run(launch._function(self.source), self.grid, [*tensors, *self.integers, *map(float, scalars)])


class _Cuda:
    """A launch on a GPU, which must be the current device. The first goes through Triton, which loads the
    binary; later ones launch it directly, with raw addresses and the raw current stream."""

    def __init__(self, device: torch.device, source: KernelSource, grid: tuple[int, int, int],
                 integers: Sequence[int], early: bool = False, **options):
        """`early`: start before the kernel in front has ended. `options` are Triton's."""
        self.source, self.grid, self.integers, self.index = source, grid, integers, device.index
        self.options = {**options, "launch_pdl": True} if early else options
        self.launch = None
        self.stream = torch._C._cuda_getCurrentRawStream

    def compile(self, tensors: Sequence[Likeness], scalars: Sequence[float]) -> None:
        """Have Triton compile for tensors like these, without launching; see `launch.warm_up`."""
        arguments = [*tensors, *self.integers, *map(float, scalars)]
        _fitting(lambda: launch.warm_up(self.source, arguments, self.grid, self.options,
                                        torch.cuda.device(self.index), launcher=True))

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        if self.launch is None:
            return self.first(tensors, scalars)
        self.launch(*self.grid, self.stream(self.index), self.function, self.metadata, None, None, None,
                    *[x.data_ptr() for x in tensors], *self.integers, *scalars)

    def first(self, tensors, scalars) -> None:
        arguments = [*tensors, *self.integers, *map(float, scalars)]
        compiled = _fitting(lambda: with_safe_cache(
            lambda: launch._jit(self.source)[self.grid](*arguments, **self.options)))
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.launch = compiled.run


def _fitting(call: Callable):
    """`call()` of Triton's; Unsupported where a kernel needs more on-chip memory than there is."""
    try:
        return call()
    except Exception as error:
        # Triton's own class, which must not be imported where there is no Triton.
        if type(error).__name__ != "OutOfResources":
            raise
        raise Unsupported(str(error)) from error
