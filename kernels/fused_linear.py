"""Running segments (fused_linear_structure.py): norm, matrix products and what is pointwise behind them.

A `FusedLinear` is the callable of one segment. The first call with given shapes, strides, alignment,
device and tile makes a plan (fused_linear_plan.py); later calls look it up and launch compiled kernels
directly. A new kernel is on trial first (fused_linear_check.py), as a norm's is. Meant for few rows, where
reading the weights and launching decide; nothing here compares it with the library.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

import torch

from .frames import skip_frames
from .fused_linear_check import SegmentGuard, SegmentRecord, run_reference
from .fused_linear_plan import Plan
from .fused_linear_structure import Bound, Projection, Segment, bind, grouped, reference
from .fused_linear_tiles import GemmTile, tiles, unsplit
from .launch import MAX_PLANS, runs_reference
from .layout import Unsupported
from .likeness import Likeness
from .recent import Recent, layouts
from .settings import DEFAULT_SELF_CHECK
from .targets import Target, target_for

__all__ = ["FusedLinear", "GemmTile", "Projection", "Segment", "reference"]


class FusedLinear:
    """Runs one segment; safe to call from several threads. Records no gradient.

    Attributes:
        segment: what it computes.
        self_check: when its kernels are compared with the reference, a word of `settings.SELF_CHECKS`.
        record: what became of them.
    """

    def __init__(self, segment: Segment, target: Target | None = None, *,
                 self_check: str = DEFAULT_SELF_CHECK, record: SegmentRecord | None = None,
                 rejected: Callable[[], None] = lambda: None):
        """`target` overrides the choice by device (tests). `rejected` is called when a device has no kernel
        of the segment any more: who kept a plan must let go of it."""
        self.segment = self.region = segment  # the guard asks all runners for the text of their region
        self.self_check = self_check
        self.record = record or SegmentRecord()
        self._target, self._rejected = target, rejected
        self._plans: dict[tuple, Callable] = {}
        self._recent: dict[GemmTile, Recent] = {}  # the plans of the latest calls of `in_row`
        self._lock = threading.Lock()

    def __call__(self, norm_inputs: Sequence[torch.Tensor], norm_scalars: Sequence[float],
                 weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
                 epilogue_inputs: Sequence[torch.Tensor] = (), epilogue_scalars: Sequence[float] = (),
                 config: GemmTile | None = None) -> tuple[torch.Tensor, ...]:
        """The outputs of the segment: the norm's second outputs, then the epilogue's output or the
        projections' results; new and contiguous, outer dims as A has them. A kernel that fails is replaced
        by the reference, as a norm's is.

        Args:
            norm_inputs: in the norm's order; without a norm the one tensor A, `[*, K]`.
            weights, biases: one for each projection; None for a bias that is not there.
            epilogue_inputs: the epilogue's inputs behind the projections.
            config: block shape and launch options; by default the first of `configs` that the device has
                memory for.

        Raises:
            ValueError: tensors that do not fit the segment; names them.
            Unsupported: no kernel serves them (see `supports`).
        """
        tensors = in_a_row(norm_inputs, weights, biases, epilogue_inputs)
        key = config, layouts(tensors)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(key, norm_inputs, weights, biases, epilogue_inputs)
        return plan(tensors, (), [*norm_scalars, *epilogue_scalars])

    def in_row(self, config: GemmTile, tensors: Sequence[torch.Tensor], _: object,
               scalars: Sequence[float]) -> tuple[torch.Tensor, ...]:
        """As a call, on tensors (see `in_a_row`) and scalars that are in a row already; but for `config`,
        called as its plans are."""
        pointers = [x.data_ptr() for x in tensors]
        recent = self._recent.get(config)
        plan = recent.find(tensors, pointers) if recent is not None else None
        if plan is None:
            key = config, layouts(tensors)
            plan = self._plans.get(key) or self._make(key, *grouped(self.segment, tensors))
            with self._lock:
                if self._plans.get(key) is plan and isinstance(plan, Plan):
                    self._recent.setdefault(config, Recent()).add(tensors, pointers, plan)
        return plan(tensors, (), scalars)

    def attempt(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float],
                config: GemmTile) -> tuple[torch.Tensor, ...]:
        """As a call, on tensors and scalars in a row, but by the kernel or not at all: see `prepared`."""
        return self.prepared(tensors, scalars, config)(tensors, (), scalars)

    def prepared(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float], config: GemmTile) -> Plan:
        """The kernel for tensors and scalars in a row, compiled, on trial or not: nothing of it is checked,
        and nothing takes its place. For those who compare it with something.

        Raises:
            Unsupported: no kernel serves the tensors, or the device has too little on-chip memory.
            CompileTimeout, or whatever compiling raises.
        """
        kernel = self._kernel(tensors, config)
        if kernel is None:
            raise Unsupported(self.record.fallback() or "nothing to compute")
        kernel.prepare((), scalars)
        return kernel

    def begin(self, tensors: Sequence[torch.Tensor | Likeness], scalars: Sequence[float],
              config: GemmTile) -> None:
        """Begin to compile, in the background, what `prepared` gives for such tensors.

        Raises:
            Unsupported: no kernel serves them.
        """
        kernel = self._kernel(tensors, config)
        if kernel is not None:
            kernel.begin(scalars)

    def _kernel(self, tensors: Sequence[torch.Tensor | Likeness], config: GemmTile) -> Plan | None:
        """The plan of such calls, on trial or not; None where it launches no kernel."""
        key = config, layouts(tensors)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(key, *grouped(self.segment, tensors))
        kernel = plan.kernel if isinstance(plan, SegmentGuard) else plan
        return kernel if isinstance(kernel, Plan) else None

    for _method in (__call__, in_row, attempt, prepared):
        _method._torchdynamo_disable = True  # type: ignore[attr-defined]
        _method._torchdynamo_disable_msg = "launches a kernel"  # type: ignore[attr-defined]
    del _method

    def plan(self, tensors: Sequence[torch.Tensor], config: GemmTile) -> Plan | None:
        """What calls with `config` on such tensors (see `in_a_row`) run, without the look-up. None before
        the first of them, and while its kernel is on trial."""
        plan = self._plans.get((config, layouts(tensors)))
        return plan if isinstance(plan, Plan) else None

    def supports(self, norm_inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
                 biases: Sequence[torch.Tensor | None],
                 epilogue_inputs: Sequence[torch.Tensor] = ()) -> str | None:
        """Why no kernel serves these tensors (fake ones do); None if one does."""
        try:
            tensors = in_a_row(norm_inputs, weights, biases, epilogue_inputs)
            self._target_for(tensors)
            if why := self.record.rejected.get(tensors[0].device):
                return why
            bound = bind(self.segment, norm_inputs, weights, biases, epilogue_inputs)
            _check_sizes(bound)
        except (Unsupported, ImportError, ValueError) as why:
            return str(why)
        return None

    def configs(self, m: int, n: int, k: int, device: torch.device | None = None) -> tuple[GemmTile, ...]:
        """The tiles worth measuring for `m` rows of `k` elements and `n` output features, those of all
        projections together; few, best guess first."""
        return tiles(*self._sizes(m, n, k, device))

    def unsplit(self, m: int, n: int, k: int, device: torch.device | None = None) -> tuple[GemmTile, ...]:
        """Beside `configs`, where some of those split their sums: the tile worth measuring where a second
        launch takes the host too long."""
        return unsplit(*self._sizes(m, n, k, device))

    def _sizes(self, m: int, n: int, k: int, device: torch.device | None) -> tuple:
        target = self._target or target_for(device or torch.device("cuda", 0))
        joint = len(self.segment.projections) if self.segment.epilogue is not None else 1
        return m, n, k, joint, self.segment.norm is not None, target.cores

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

    def _make(self, key: tuple, norm_inputs, weights, biases, epilogue_inputs) -> Callable:
        """The plan of the first call with a key, which is kept."""
        if "torch._dynamo" in sys.modules:
            skip_frames()
        config, tensors = key[0], in_a_row(norm_inputs, weights, biases, epilogue_inputs)
        target = self._target_for(tensors)
        bound = bind(self.segment, norm_inputs, weights, biases, epilogue_inputs)
        if not bound.m or not all(w.n for w in bound.problem.weights):
            plan = self.reference_plan
        else:
            _check_sizes(bound)
            device = tensors[0].device
            if device in self.record.rejected:
                plan = self.declined(self.record.rejected[device])
            else:
                tile = config or self._fitting(bound, target, tensors)
                plan = SegmentGuard(self, key, Plan(self.segment, bound, tile, target, tensors))
        with self._lock:
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan

    def _fitting(self, bound: Bound, target: Target, tensors: Sequence[torch.Tensor]) -> GemmTile:
        """The first proposal that the device has on-chip memory for; only compiling tells."""
        proposed = self.configs(bound.m, sum(w.n for w in bound.problem.weights), bound.problem.k,
                                tensors[0].device)
        for tile in proposed[:-1]:
            plan = Plan(self.segment, bound, tile, target, tensors)
            try:
                plan.prepare((), self._no_scalars)
                plan(tensors, (), self._no_scalars)
            except Unsupported:
                continue
            except Exception:  # the guard's to judge, which sees it again
                pass
            return tile
        return proposed[-1]

    @property
    def _no_scalars(self) -> list[float]:
        regions = [region for region in (self.segment.norm, self.segment.epilogue) if region is not None]
        return [1.0] * sum(len(region.scalars) for region in regions)

    # -- what a guard asks of a runner

    def declined(self, reason: str) -> Callable:
        """The plan of a call that no kernel serves, for `reason`."""
        self.record.declined(reason)
        return self.reference_plan

    def replace(self, key: tuple, old: Callable, new: Callable) -> None:
        """Keep the plan `new` under `key`, where `old` is kept now."""
        with self._lock:
            if self._plans.get(key) is old:
                self._plans[key] = new

    def reject(self, device: torch.device, reason: str) -> bool:
        """Run the reference on `device` from now on. False where that was so already."""
        with self._lock:
            first = self.record.reject(device, reason)
            self._plans.clear()
            self._recent.clear()
        self._rejected()
        return first

    def reference_plan(self, tensors, pointers, scalars, outputs=None) -> tuple[torch.Tensor, ...]:
        """The plan that runs plain PyTorch."""
        with torch.no_grad():
            return run_reference(self.segment, tensors, scalars)


def in_a_row(norm_inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
             biases: Sequence[torch.Tensor | None],
             epilogue_inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call in the order in which kernels take them; the inverse is `grouped`."""
    return [*norm_inputs, *weights, *[b for b in biases if b is not None], *epilogue_inputs]


def _check_sizes(bound: Bound) -> None:
    if bound.problem.k == 0:
        raise Unsupported("sums of no elements")
