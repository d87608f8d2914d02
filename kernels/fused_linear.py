"""Running segments (fused_linear_structure.py): norm, matrix products and what is pointwise behind them.

A `FusedLinear` is the callable of one segment. The first call with given shapes, strides, alignment,
device and tile makes a plan: one to three launches (the norm ahead, the products, the sum of their parts)
and the memory between them; later calls look it up and launch compiled kernels directly. Meant for few
rows, where reading the weights and launching decide; nothing here compares it with the library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from .fused_linear_codegen import generate, generate_ahead, generate_reduction
from .fused_linear_structure import Bound, Projection, Segment, bind, reference, without_norm
from .fused_linear_tiles import GemmTile, tiles
from .launch import MAX_PLANS, launch_facts, runs_reference
from .layout import Unsupported, layout
from .reference import TORCH_DTYPES
from .region import NormRegion
from .source import KernelSource, Tile, jit, load
from .targets import Target, target_for
from .tiling import ladder
from .triton_cache import with_safe_cache

__all__ = ["FusedLinear", "GemmTile", "Projection", "Segment", "reference"]

#: Blocks of the kernel that adds up parts of the sums.
SUM_BLOCK = Tile(4, 128)


class FusedLinear:
    """Runs one segment; safe to call from several threads. Records no gradient.

    Attributes:
        segment: what it computes.
    """

    def __init__(self, segment: Segment, target: Target | None = None):
        """`target` overrides the choice by device (tests)."""
        self.segment = segment
        self._target = target
        self._plans: dict[tuple, Callable] = {}
        self._lock = threading.Lock()

    def __call__(self, norm_inputs: Sequence[torch.Tensor], norm_scalars: Sequence[float],
                 weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
                 epilogue_inputs: Sequence[torch.Tensor] = (), epilogue_scalars: Sequence[float] = (),
                 config: GemmTile | None = None) -> tuple[torch.Tensor, ...]:
        """The outputs of the segment: the norm's second outputs, then the epilogue's output or the
        projections' results; new and contiguous, outer dims as A has them.

        Args:
            norm_inputs: in the norm's order; without a norm the one tensor A, `[*, K]`.
            weights, biases: one for each projection; None for a bias that is not there.
            epilogue_inputs: the epilogue's inputs behind the projections.
            config: block shape and launch options; by default the first of `configs` that the device has
                memory for.

        Raises:
            ValueError: tensors that do not fit the segment; names them.
            Unsupported: no kernel serves them (see `supports`), or `config` needs too much memory.
        """
        tensors = [*norm_inputs, *weights, *[b for b in biases if b is not None], *epilogue_inputs]
        key = config, layouts(tensors)
        plan = self._plans.get(key)
        if plan is not None:
            return plan(tensors, norm_scalars, epilogue_scalars)
        return self._first(key, tensors, norm_inputs, norm_scalars, weights, biases,
                           epilogue_inputs, epilogue_scalars, config)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def plan(self, tensors: Sequence[torch.Tensor], config: GemmTile) -> Callable | None:
        """What a call with `config` on such tensors (norm inputs, weights, biases, epilogue inputs in a row)
        has made: `plan(tensors, norm_scalars, epilogue_scalars)` runs on others of the same layout, without
        looking. None before the first such call."""
        return self._plans.get((config, layouts(tensors)))

    def supports(self, norm_inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
                 biases: Sequence[torch.Tensor | None],
                 epilogue_inputs: Sequence[torch.Tensor] = ()) -> str | None:
        """Why no kernel serves these tensors (fake ones do); None if one does."""
        try:
            tensors = [*norm_inputs, *weights, *[b for b in biases if b is not None], *epilogue_inputs]
            self._target_for(tensors)
            bound = bind(self.segment, norm_inputs, weights, biases, epilogue_inputs)
            _check_sizes(bound)
        except (Unsupported, ImportError, ValueError) as why:
            return str(why)
        return None

    def configs(self, m: int, n: int, k: int, device: torch.device | None = None) -> tuple[GemmTile, ...]:
        """The tiles worth measuring for `m` rows of `k` elements and `n` output features, those of all
        projections together; few, best guess first."""
        target = self._target or target_for(device or torch.device("cuda", 0))
        joint = len(self.segment.projections) if self.segment.epilogue is not None else 1
        return tiles(m, n, k, joint, self.segment.norm is not None, target.cores)

    def _target_for(self, tensors: Sequence[torch.Tensor]) -> Target:
        device = tensors[0].device
        if any(x.device != device for x in tensors):
            raise Unsupported("tensors on different devices")
        if self._target is None and runs_reference(device):
            raise Unsupported("tensors on the CPU, where a segment is a few calls of torch")
        target = self._target or target_for(device)
        if target.backend == "npu":
            raise Unsupported("cube and vector work do not mix in one kernel on Ascend A2 and A3")
        return target

    def _first(self, key, tensors, norm_inputs, norm_scalars, weights, biases,
               epilogue_inputs, epilogue_scalars, config):
        """The first call with a key: makes the plan, runs it and keeps it."""
        target = self._target_for(tensors)
        bound = bind(self.segment, norm_inputs, weights, biases, epilogue_inputs)
        if not bound.m or not all(w.n for w in bound.problem.weights):
            with torch.no_grad():
                return reference(self.segment, norm_inputs, norm_scalars, weights, biases, epilogue_inputs,
                                 epilogue_scalars)
        _check_sizes(bound)
        candidates = (config,) if config is not None else \
            self.configs(bound.m, sum(w.n for w in bound.problem.weights), bound.problem.k, tensors[0].device)
        for i, tile in enumerate(candidates):
            try:
                plan = _Plan(self.segment, bound, tile, target, tensors, norm_inputs)
                results = plan(tensors, norm_scalars, epilogue_scalars)
                break
            except Exception as error:
                # Triton's own class, which must not be imported where there is no Triton.
                if type(error).__name__ != "OutOfResources":
                    raise
                if i + 1 == len(candidates):
                    raise Unsupported(f"{tile}: {error}") from error
        with self._lock:
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return results


def layouts(tensors: Sequence[torch.Tensor]) -> tuple:
    """What of tensors a compiled launch depends on."""
    return tuple([(x.shape, x.stride(), x.data_ptr() & 15, x.dtype, x.get_device()) for x in tensors])


def _check_sizes(bound: Bound) -> None:
    if bound.problem.k == 0:
        raise Unsupported("sums of no elements")


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


class _Plan:
    """The launches of one segment on tensors of one layout."""

    def __init__(self, segment: Segment, bound: Bound, tile: GemmTile, target: Target,
                 tensors: Sequence[torch.Tensor], norm_inputs: Sequence[torch.Tensor]):
        self.device, dependent = tensors[0].device, _dependent(target)
        launcher = _CudaLaunch if target.backend == "cuda" else _Interpreted
        stored = segment.norm.outputs[1:] if segment.norm is not None else ()
        shape_of_a = (*bound.outer, bound.problem.k)
        self.shapes = [(shape_of_a, TORCH_DTYPES[out.dtype]) for out in stored]
        for part in bound.problem.epilogues:
            out = part.region.outputs[0]
            self.shapes.append(((*bound.outer, part.region.lane), TORCH_DTYPES[out.dtype]))
        self.inputs, self.stored, self.weights = len(norm_inputs), len(stored), len(bound.problem.weights)
        self.ahead = self.reduction = None
        if tile.norm_ahead and segment.norm is not None:
            self.a = shape_of_a, TORCH_DTYPES[bound.problem.dtype]
            self.ahead = _ahead(segment.norm, norm_inputs, target, dependent, launcher)
            bound = without_norm(bound)
        problem, whole = bound.problem, tile.split == 1
        ends = [number for numbers in bound.epilogues for number in numbers]
        rows = -(-bound.m // tile.rows)
        self.products = launcher(
            generate(problem, tile, target, dependent), (rows * problem.starts(tile.cols)[-1], tile.split),
            [*bound.prologue, *bound.strides, *(ends if whole else ()), bound.m, rows], self.device,
            num_warps=tile.num_warps, num_stages=tile.num_stages, early=dependent and tile.overlap)
        if not whole:
            self.sums = (tile.split * bound.m * sum(w.n for w in problem.weights),), torch.float32
            block = SUM_BLOCK if bound.m > 1 else replace(SUM_BLOCK, rows=1)
            rows = -(-bound.m // block.rows)
            self.reduction = launcher(
                generate_reduction(problem, tile.split, block, target, dependent),
                (rows * problem.starts(block.cols)[-1], 1), [*ends, bound.m, rows], self.device,
                num_warps=block.num_warps, early=dependent)

    def __call__(self, tensors, norm_scalars, epilogue_scalars):
        outputs = [self.empty(shape, dtype) for shape, dtype in self.shapes]
        stored, results = outputs[:self.stored], outputs[self.stored:]
        inputs, rest = tensors[:self.inputs], tensors[self.inputs:]
        weights, more = rest[:self.weights], rest[self.weights:]
        if self.ahead is not None:
            a = self.empty(*self.a)
            self.ahead([*inputs, a, *stored], norm_scalars)
            inputs, stored, norm_scalars = [a], [], ()
        if self.reduction is None:
            self.products([*inputs, *weights, *more, *stored, *results],
                          [*norm_scalars, *epilogue_scalars])
        else:
            sums = self.empty(*self.sums)
            self.products([*inputs, *weights, *stored, sums], norm_scalars)
            self.reduction([sums, *more, *results], epilogue_scalars)
        return tuple(outputs)

    def empty(self, shape, dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _ahead(region: NormRegion, inputs: Sequence[torch.Tensor], target: Target, dependent: bool, launcher):
    """The launch of the norm by itself."""
    walk = layout(region, [x.shape for x in inputs], [x.stride() for x in inputs], target.units)
    tile = ladder(region, walk.structure, walk.sizes, target)[0]
    integers, grid = launch_facts(walk, tile.rows, target)
    return launcher(generate_ahead(region, walk.structure, tile, target, dependent), (grid, 1), integers,
                    inputs[0].device, num_warps=tile.num_warps)


class _Interpreted:
    """A launch on CPU tensors, by Triton's interpreter."""

    def __init__(self, source: KernelSource, grid: tuple[int, int], integers: Sequence[int],
                 device: torch.device, **options):
        self.source, self.grid, self.integers = source, grid, integers

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        from .targets.interpreter import run

        run(_function(self.source), self.grid, [*tensors, *self.integers, *map(float, scalars)])


class _CudaLaunch:
    """A launch on a GPU. The first goes through Triton, which compiles; later ones launch the binary
    directly, with raw addresses and the raw current stream."""

    def __init__(self, source: KernelSource, grid: tuple[int, int], integers: Sequence[int],
                 device: torch.device, early: bool = False, **options):
        """`early`: start before the kernel in front has ended. `options` are Triton's."""
        self.source, self.grid, self.integers, self.index = source, grid, integers, device.index
        self.options = {**options, "launch_pdl": True} if early else options
        self.launch = None
        self.stream = torch._C._cuda_getCurrentRawStream

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(tensors, scalars)
        if self.launch is None:
            return self.first(tensors, scalars)
        self.launch(*self.grid, 1, self.stream(self.index), self.function, self.metadata, None, None, None,
                    *[x.data_ptr() for x in tensors], *self.integers, *scalars)

    def first(self, tensors, scalars) -> None:
        arguments = [*tensors, *self.integers, *map(float, scalars)]
        compiled = with_safe_cache(lambda: _jit(self.source)[self.grid](*arguments, **self.options))
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.launch = compiled.run


@lru_cache(maxsize=1024)
def _jit(source: KernelSource):
    return jit(source)


@lru_cache(maxsize=1024)
def _function(source: KernelSource):
    return load(source)
