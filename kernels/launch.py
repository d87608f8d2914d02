"""Running regions: compile once, launch cheaply.

A `Runner` is the callable of one region. The first call with given shapes, strides, alignment and
device makes a plan: layout, tile, generated and compiled kernel, or the reason why there is none and
the reference runs. Later calls look the plan up, allocate the outputs and launch the compiled kernel
directly, past Triton's own dispatch. A new kernel is on trial first (`guard.Guard`).
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch

from . import launchers
from .codegen import generate
from .compiling import ahead, within_limit
from .frames import skip_frames
from .guard import Guard
from .layout import Layout, Unsupported, layout
from .likeness import Likeness
from .recent import Recent, layouts
from .record import Record
from .reference import TORCH_DTYPES, reference
from .region import NormRegion, broadcast_sizes, dense_strides
from .settings import DEFAULT_SELF_CHECK, INTERPRET, SELF_CHECKS
from .source import KernelSource, Tile, jit, load
from .targets import Target, target_for
from .tiling import ladder
from .triton_cache import with_safe_cache

#: Plans that one Runner keeps; the oldest goes first.
MAX_PLANS = 256

_LOCK = threading.RLock()


def runs_reference(device: torch.device) -> bool:
    """Whether regions run as plain torch there: on the CPU, unless the interpreter is asked for."""
    return device.type == "cpu" and os.environ.get(INTERPRET) != "1"


class Runner:
    """Runs one region; safe to call from several threads.

    Attributes:
        region: what it computes.
        self_check: when a kernel is compared with the reference (see `fusion_pass.options.Options`).
        record: what became of its kernels.
    """

    def __init__(self, region: NormRegion, target: Target | None = None,
                 self_check: str = DEFAULT_SELF_CHECK):
        """`target` overrides the choice by device (tests: the interpreter with an NPU's rules).

        Raises:
            ValueError: an unknown `self_check`.
        """
        if self_check not in SELF_CHECKS:
            raise ValueError(f"self_check must be one of {', '.join(SELF_CHECKS)}, not {self_check!r}")
        self.region = region
        self.self_check = self_check
        self.record = Record()
        self._target = target
        self._plans: dict[tuple, Callable] = {}
        #: the plans of the latest calls; and of those of `over`, by the number of the input
        self._recent, self._recent_over = Recent(), tuple(Recent() for _ in region.inputs)
        if "torch._dynamo" in sys.modules:
            skip_frames()

    @property
    def reasons(self) -> dict[str, int]:
        """Reason -> number of plans for which the reference runs instead of a kernel."""
        return self.record.reasons

    def __call__(self, inputs: Sequence[torch.Tensor],
                 scalars: Sequence[float] = ()) -> tuple[torch.Tensor, ...]:
        """The outputs of the region for `inputs` (in its order, any strides) and `scalars`.

        New tensors, dense in the declared order; nothing else is allocated. Records no gradient.

        Raises:
            ValueError, or what torch raises in the reference: inputs that do not fit the region.
        """
        pointers = [x.data_ptr() for x in inputs]
        plan = self._recent.find(inputs, pointers)
        if plan is None:
            key = layouts(inputs)
            plan = self._plans.get(key)
            if plan is None:
                return self._first(key, inputs, pointers, scalars)
            self._remember(self._recent, key, inputs, pointers, plan)
        return plan(inputs, pointers, scalars)

    def into(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
             outputs: Sequence[torch.Tensor]) -> None:
        """Like a call, but writes `outputs`: of the space's shape and the declared dtypes, lane
        stride 1. An output may be an input of the same strides (in place); it must not overlap
        itself or an input in any other way.

        Raises:
            ValueError: an output's shape or dtype is wrong.
        """
        pointers = [x.data_ptr() for x in inputs]
        key = ("into", *layouts((*inputs, *outputs)))
        plan = self._plans.get(key)
        if plan is None:
            self._first(key, inputs, pointers, scalars, outputs)
        else:
            plan(inputs, pointers, scalars, outputs)

    def over(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float], number: int) -> None:
        """`into` with input `number` as the one output."""
        pointers = [x.data_ptr() for x in inputs]
        outputs, recent = (inputs[number],), self._recent_over[number]
        plan = recent.find(inputs, pointers)
        if plan is None:
            key = ("into", *layouts((*inputs, *outputs)))
            plan = self._plans.get(key)
            if plan is None:
                self._first(key, inputs, pointers, scalars, outputs)
                return
            self._remember(recent, key, inputs, pointers, plan)
        plan(inputs, pointers, scalars, outputs)

    def expect(self, inputs: Sequence[Likeness], outputs: Sequence[Likeness] | None = None) -> None:
        """Begin to compile, in the background, what a call with such tensors (`into`, with such `outputs`)
        runs first. It waits for the rest; one whose tensors are others compiles as if nothing had been said.
        What fails is told by calls alone."""
        key = layouts(inputs) if outputs is None else ("into", *layouts([*inputs, *outputs]))
        device = inputs[0].device
        if key in self._plans or device in self.record.rejected or \
                self._target is None and runs_reference(device):
            return
        with contextlib.suppress(Unsupported, ImportError):
            plan = self._plan(inputs, outputs)
            if isinstance(plan, _Kernel):
                plan.begin([x.data_ptr() for x in inputs], [1.0] * len(self.region.scalars), outputs)

    # Dynamo, should it meet a Runner, calls it instead of tracing into it. `torch.compiler.disable`
    # would say the same with a wrapper that costs microseconds a call.
    for _method in (__call__, into, over):
        _method._torchdynamo_disable = True  # type: ignore[attr-defined]
        _method._torchdynamo_disable_msg = "launches a kernel"  # type: ignore[attr-defined]
    del _method

    def _remember(self, recent: Recent, key: tuple, inputs, pointers, plan: Callable) -> None:
        with _LOCK:
            if self._plans.get(key) is plan:  # no other thread has put another in its place
                recent.add(inputs, pointers, plan)

    def _forget(self) -> None:
        for recent in (self._recent, *self._recent_over):
            recent.clear()

    def _first(self, key: tuple, inputs, pointers, scalars, outputs=None):
        """The first call with a key: makes the plan, keeps it and runs it."""
        if "torch._dynamo" in sys.modules:
            skip_frames()
        plan = self._make(inputs, outputs)
        if isinstance(plan, _Kernel):
            plan = Guard(self, key, plan)
        with _LOCK:
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan(inputs, pointers, scalars, outputs)

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
        if self._target is None and runs_reference(device):
            return self.reference_plan
        if device in self.record.rejected:
            return self.declined(self.record.rejected[device])
        try:
            return self._plan(inputs, outputs)
        except (Unsupported, ImportError) as why:
            return self.declined(str(why))

    def _plan(self, inputs: Sequence[torch.Tensor | Likeness],
              outputs: Sequence[torch.Tensor | Likeness] | None) -> Callable:
        """The plan of a kernel. Unsupported, ImportError: there is none."""
        region, device = self.region, inputs[0].device
        if any(x.device != device for x in inputs):
            raise Unsupported("inputs on different devices")
        target = self._target or target_for(device)
        walk = layout(region, [x.shape for x in inputs], [x.stride() for x in inputs],
                      target.units, outputs and [x.stride() for x in outputs])
        if 0 in walk.space:
            return _Empty(region, walk, device)
        return _PLANS[target.backend](region, walk, target, device)

    def declined(self, reason: str) -> Callable:
        """The plan of a call that no kernel serves, for `reason`."""
        self.record.declined(reason)
        return self.reference_plan

    def replace(self, key: tuple, old: Callable, new: Callable) -> None:
        """Keep the plan `new` under `key`, where `old` is kept now."""
        with _LOCK:
            if self._plans.get(key) is old:
                self._plans[key] = new
                self._forget()

    def reject(self, device: torch.device, reason: str) -> bool:
        """Run the reference on `device` from now on. False where that was so already."""
        with _LOCK:
            first = self.record.reject(device, reason)
            self._plans.clear()  # those that are still right are made again
            self._forget()
            return first

    def reference_plan(self, inputs, pointers, scalars, outputs=None):
        """The plan that runs plain PyTorch."""
        with torch.no_grad():
            results = reference(self.region, inputs, scalars)
            for given, result in zip(outputs or (), results):
                given.copy_(result)
        return results


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
    """What the plans that launch a kernel share. `prepare` comes before the first call."""

    def __init__(self, region, walk, target, device):
        super().__init__(region, walk, device)
        self.region, self.walk, self.target = region, walk, target
        self.options: Mapping[str, object] = {}
        self.ready = False

    def generate(self, tile: Tile) -> KernelSource:
        return generate(self.region, self.walk.structure, tile, self.target)

    def take(self, source: KernelSource) -> None:
        """Launch that source from now on."""
        self.source = source
        self.integers, self.grid = launch_facts(self.walk, source.tile.rows, self.target)

    def numbers(self, scalars: Sequence[float]) -> list:
        if self.region.compute == "f64":
            return [struct.unpack("<q", struct.pack("<d", s))[0] for s in scalars]
        return list(map(float, scalars))

    def prepare(self, pointers: Sequence[int], scalars: Sequence[float],
                outputs: Sequence[torch.Tensor] | None = None) -> None:
        """Compile for a call whose inputs have these addresses.

        Raises:
            CompileTimeout: the compiler needs longer than it may; a later call finds what it has made.
            Unsupported, ImportError: no kernel serves the call. Or what the compiler raises.
        """
        if self.ready:
            return
        source, self.options = within_limit(*self._job(pointers, scalars, outputs))
        self.take(source)
        self.ready = True

    def begin(self, pointers: Sequence[int], scalars: Sequence[float],
              outputs: Sequence[Likeness] | None = None) -> None:
        """Have what `prepare` waits for begin in the background. Unsupported: no kernel serves the call."""
        ahead(*self._job(pointers, scalars, outputs))
        if self.target.backend == "cuda":
            launchers.begin(self.source.params)

    def _job(self, pointers, scalars, outputs) -> tuple[tuple, Callable]:
        """(what makes two compilations equal, the compilation)."""
        self.tiles = ladder(self.region, self.walk.structure, self.walk.sizes, self.target)
        self.take(self.generate(self.tiles[0]))
        addresses = [*pointers, *(x.data_ptr() for x in outputs or ())]
        dtypes = [TORCH_DTYPES[x.dtype] for x in (*self.region.inputs, *self.region.outputs)]
        addresses += [0] * (len(dtypes) - len(addresses))  # the allocator's own are aligned
        alignments = tuple(address & 15 for address in addresses)
        key = (self.region, self.walk.structure, self.tiles, self.target, self.device, alignments)
        stand_ins = [stand_in(dtype, self.device, a) for dtype, a in zip(dtypes, alignments)]
        return key, partial(self.compile, stand_ins, scalars)

    def compile(self, stand_ins: Sequence[Likeness],
                scalars: Sequence[float]) -> tuple[KernelSource, Mapping[str, object]]:
        """(what to launch, with which options), compiled. In a thread of its own: changes no attribute."""
        raise NotImplementedError

    def warm_up(self, source: KernelSource, stand_ins, scalars, **options) -> None:
        """Have Triton compile `source` without launching it."""
        integers, grid = launch_facts(self.walk, source.tile.rows, self.target)
        arguments = [*stand_ins, *integers, *self.numbers(scalars)]
        warm_up(source, arguments, grid, options, self.on_device(), self.target.backend == "cuda")

    def on_device(self) -> contextlib.AbstractContextManager:
        """Inside, the plan's device is this thread's current one."""
        return contextlib.nullcontext()

    def capturing(self) -> bool:
        """Whether the call is being recorded for replay, so that nothing may wait for the device."""
        return False


def stand_in(dtype: torch.dtype, device: torch.device, alignment: int = 0) -> Likeness:
    """What a compiler gets in the place of a call's tensor, which it would keep alive if it hangs."""
    return Likeness((1,), (1,), dtype, device, alignment)


class _Interpreted(_Kernel):
    def compile(self, stand_ins, scalars):
        _function(self.source)
        return self.source, {}

    def __call__(self, inputs, pointers, scalars, outputs=None):
        from .targets.interpreter import run

        outputs = outputs or self.allocate()
        run(_function(self.source), self.grid,
            [*inputs, *outputs, *self.integers, *self.numbers(scalars)])
        return outputs


class _Cuda(_Kernel):
    """The first call goes through Triton, which loads the binary; later ones launch it directly, with raw
    addresses and the raw current stream."""

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
        launch(*self.grid, self.stream(self.index), self.function, self.metadata,
               None, None, None, *pointers, *[x.data_ptr() for x in outputs],
               *self.integers, *scalars)
        return outputs

    def compile(self, stand_ins, scalars):
        options = {"num_warps": self.source.tile.num_warps}
        self.warm_up(self.source, stand_ins, scalars, **options)
        return self.source, options

    def first(self, inputs, scalars, outputs):
        arguments = [*inputs, *outputs, *self.integers, *self.numbers(scalars)]
        # Triton's cache again: with the binary it loads, and may first compile, a launcher for it.
        compiled = with_safe_cache(lambda: _jit(self.source)[self.grid](*arguments, **self.options))
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.launch = compiled.run
        return outputs

    def on_device(self):
        return torch.cuda.device(self.index)

    def capturing(self):
        return torch.cuda.is_current_stream_capturing()


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
        compiled = with_safe_cache(lambda: _jit(self.source)[self.grid](*arguments, **self.options))
        self.launch = compiled[self.grid]

    def compile(self, stand_ins, scalars):
        """The first tile that fits the Unified Buffer; at last, the smallest once in memory, not twice."""
        # Always said: without it, triton-ascend leaves double buffering off for the 950 family.
        tries = [(tile, True) for tile in self.tiles] + [(self.tiles[-1], False)]
        for tile, multibuffer in tries:
            options = {"multibuffer": multibuffer}
            source = self.generate(tile)
            try:
                self.warm_up(source, stand_ins, scalars, **options)
                return source, options
            except Exception as error:
                # What the compiler wrote is the only sign of a tile too large for the Unified Buffer.
                if "overflow" not in str(error).lower():
                    raise
                overflow = error
        raise Unsupported(f"no tile fits the Unified Buffer of {self.target.name}") from overflow

    def on_device(self):
        if torch.npu.current_device() == self.index:
            return contextlib.nullcontext()
        return torch.npu.device(self.index)

    def capturing(self):
        asked = getattr(torch.npu, "is_current_stream_capturing", None)
        return asked is not None and asked()


_PLANS = {"cuda": _Cuda, "npu": _Npu, "interpreter": _Interpreted}


def launch_facts(walk: Layout, rows: int, target: Target) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """(integer arguments, grid) of a launch with tiles of `rows` rows."""
    integers, tiles = walk.arguments(rows), walk.tiles(rows)
    if not target.persistent:
        return integers, walk.grid(rows)
    programs = min(target.cores, tiles)
    share = -(-tiles // programs)
    return (*integers, share), (-(-tiles // share), 1, 1)


@lru_cache(maxsize=1024)
def _jit(source: KernelSource):
    return jit(source)


def warm_up(source: KernelSource, arguments: Sequence, grid: tuple[int, ...], options: Mapping[str, object],
            device: contextlib.AbstractContextManager, launcher: bool) -> None:
    """Have Triton compile `source` for arguments like these without launching it, inside of `device`, and
    build the launcher where Triton's backend has one (`launchers`)."""
    def work() -> None:
        with launchers.building(source.params) if launcher else contextlib.nullcontext():
            _jit(source).warmup(*arguments, grid=grid, **options)

    with device, _compile_lock(source):
        with_safe_cache(work)


@lru_cache(maxsize=1024)
def _compile_lock(source: KernelSource) -> threading.Lock:
    """Triton does not say that one JIT function may be compiled by two threads at once."""
    return threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compile_lock.cache_clear)  # what held one of them stays behind


@lru_cache(maxsize=1024)
def _function(source: KernelSource):
    return load(source)
