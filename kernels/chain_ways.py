"""How a chain runs on an accelerator: by the ways that its segments have, the fastest measured one each.

A chain falls into segments: a norm (or nothing) in front, the products that read it, and what is
pointwise behind them. A segment runs

- by the "library": the norm's kernel, torch's products, and one kernel for what is pointwise, in place
  where the product is nobody else's;
- as "one kernel" (fused_linear.py), with the norm in front of the product and the rest behind it (or
  with the norm's kernel first, where others read its result).

The second is for few rows, where reading the weights and launching is all the time there is. Which is
taken is measured on the first call with a new number of rows (up to the next power of two), outside of
graph capture, and kept on disk (chain_choice.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from .chain import Chain, RegionStage, walk, words_of
from .chain_choice import LIBRARY, Choice, Question, choose, worth_compiling
from .chain_fused import FusedSegment, fused_segment
from .chain_products import LinearStage, Product
from .chain_program import Step, program, written_over
from .fused_linear import FusedLinear
from .fused_linear_check import SegmentRecord
from .launch import MAX_PLANS, Runner
from .layout import Unsupported
from .likeness import Likeness
from .ops import runner
from .placed import PlacedRunner
from .recent import Recent, layouts
from .reference import TORCH_DTYPES
from .region import broadcast_sizes
from .settings import DEFAULT_SELF_CHECK

#: Rows above which no other way than the library is tried: the product itself is the time then.
FEW_ROWS = 256


@dataclass(frozen=True)
class Segment:
    """Consecutive stages of a chain that one kernel may do (see the module docstring)."""

    norm: RegionStage | None
    products: tuple[Product, ...]
    pointwise: RegionStage | None

    @property
    def stages(self) -> tuple:
        parts = (self.norm, *self.products, self.pointwise)
        return tuple(stage for stage in parts if stage is not None)


def segments(chain: Chain) -> tuple[Segment, ...]:
    """The chain, cut into segments; every stage is in one of them. A product that is no linear layer is in
    a segment without a norm, which only the library runs."""
    found: list[Segment] = []
    stages = list(chain.stages)
    while stages:
        norm = stages.pop(0) if isinstance(stages[0], RegionStage) else None
        products: list[Product] = []
        while stages and isinstance(stages[0], LinearStage) and \
                stages[0].value == (norm.names[0] if norm else (products or stages)[0].value):
            products.append(stages.pop(0))
        if norm is None and not products:
            products.append(stages.pop(0))
        pointwise = None
        if products and stages and isinstance(stages[0], RegionStage):
            names = {product.name for product in products}
            if names <= set(stages[0].reads) and not names & set(chain.outputs):
                pointwise = stages.pop(0)
        found.append(Segment(norm, tuple(products), pointwise))
    return tuple(found)


class ChainRunner:
    """Runs one chain; safe to call from several threads. Records no gradient.

    Attributes:
        chain: what it computes.
        segments: the chain's.
        choices: (segment number, device index, rows up to, strides) -> what was chosen there.
    """

    def __init__(self, chain: Chain, self_check: str = DEFAULT_SELF_CHECK,
                 decide: Callable[[Question], Choice] = choose):
        """`decide` answers which way a segment takes (tests: without measuring)."""
        self.chain, self.segments = chain, segments(chain)
        self.choices: dict[tuple, Choice] = {}
        #: layout of the inputs -> (what runs the whole chain on them, its kernels); and those of the latest
        self._bound: dict[tuple, tuple[Callable, list[Callable]]] = {}
        self._recent = Recent()
        #: for each segment, whether it is one kernel -> what runs the chain so, see `program`
        self._programs: dict[tuple[bool, ...], tuple[Callable, list[bool]]] = {}
        self._decide = decide
        self._lock = threading.RLock()
        #: how often a segment has lost its kernel: what was bound before that is not used after it
        self._rejections = 0
        regions = [stage for stage in chain.stages if isinstance(stage, RegionStage)]
        self._runners = {stage.names: self._runner(stage, self_check) for stage in regions}
        #: an input of each segment that has all of its rows
        self._whole = tuple(_whole(segment) for segment in self.segments)
        self._fused = tuple(self._kernel(number, self_check) if whole else None
                            for number, whole in enumerate(self._whole))
        self._spent = dict(zip((stage.names for stage in chain.stages), chain.spent))
        #: the stages of each segment, with what is spent after them; and all that is spent in it
        self._stages = tuple([(stage, self._spent[stage.names]) for stage in segment.stages]
                             for segment in self.segments)
        self._gone = tuple([name for _, spent in stages for name in spent] for stages in self._stages)
        self._over = {stage.names: self._reusable(stage) for stage in regions}

    def _runner(self, stage: RegionStage, self_check: str) -> Runner | PlacedRunner:
        run, places = runner(stage.region.text, self_check), [*map(self.chain.placed.get, stage.names)]
        return PlacedRunner(run, places) if any(places) else run

    def _kernel(self, number: int, self_check: str) -> FusedSegment | None:
        """Segment `number` as one kernel, whose record is told to that of the chain's norm."""
        segment, first = self.segments[number], self.chain.stages[0]
        norm = self._runners[first.names].record if isinstance(first, RegionStage) else None
        words = words_of([stage for stage in segment.stages if stage is not segment.norm])
        return fused_segment(self.chain, segment, partial(
            FusedLinear, self_check=self_check, record=SegmentRecord(words, norm),
            rejected=partial(self._forget, number)))

    def _forget(self, number: int) -> None:
        """Segment `number` has no kernel any more where it had one: ask again."""
        with self._lock:
            self._rejections += 1
            self._bound.clear()
            self._recent.clear()
            for key in [key for key in self.choices if key[0] == number]:
                del self.choices[key]

    def __call__(self, inputs: Sequence[torch.Tensor],
                 scalars: Sequence[float] = ()) -> tuple[torch.Tensor, ...]:
        """The outputs of the chain, new tensors."""
        pointers = [x.data_ptr() for x in inputs]
        found = self._recent.find(inputs, pointers)
        if found is None:
            key = layouts(inputs)
            found = self._bound.get(key)
            if found is None:
                return self._first(key, inputs, scalars)
            with self._lock:
                if self._bound.get(key) is found:
                    self._recent.add(inputs, pointers, found)
        run, kernels = found
        return run(kernels, inputs, scalars)

    def values(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
               keep: Sequence[str]) -> dict[str, torch.Tensor]:
        """The chain's outputs and the values of `keep`, by name. The library runs: the other ways never write
        a product to memory."""
        values, numbers = self._named(inputs, scalars)
        for number in range(len(self.segments)):
            self._library(number, values, numbers, keep)
        return {name: values[name] for name in dict.fromkeys((*self.chain.outputs, *keep))}

    def _named(self, inputs, scalars) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        return dict(zip(self.chain.inputs, inputs)), dict(zip(self.chain.scalars, scalars))

    def _first(self, key: tuple, inputs, scalars) -> tuple[torch.Tensor, ...]:
        """A call with a layout for which nothing is bound: chooses, and binds what can be bound."""
        values, numbers = self._named(inputs, scalars)
        rejections = self._rejections
        plans: list[tuple | None] = []  # for each segment, its kernel and block shapes; None: the library
        final = True
        for number, fused in enumerate(self._fused):
            choice = None if fused is None else self._choice(number, fused, values, numbers)
            if choice is None or choice.way == LIBRARY:
                self._library(number, values, numbers)
                plans.append(None)
            else:
                self._norm_ahead(number, values, numbers)
                values.update(fused.call(values, numbers, choice.config))
                plans.append((fused.plan(values, choice.config), choice.config))
                final = final and plans[-1][0] is not None
                self._drop(number, values)
            final = final and (choice is None or choice.final)
        if final:
            found = self._bind(plans)
            with self._lock:
                if len(self._bound) >= MAX_PLANS:
                    self._bound.clear()
                if rejections == self._rejections:
                    self._bound[key] = found
        return tuple([values[name] for name in self.chain.outputs])

    def _bind(self, plans: Sequence[tuple | None]) -> tuple[Callable, list[Callable]]:
        """What runs the chain with these plans of its segments; see `_first`."""
        ways = tuple(plan is not None for plan in plans)
        known = self._programs.get(ways)
        if known is None:
            steps = [self._step(number, way) for number, way in enumerate(ways)]
            known = self._programs[ways] = program(self.chain, steps, self._runners, self._over)
        run, implied = known
        alone = [(fused.run, *plan) for fused, plan in zip(self._fused, plans) if plan is not None]
        return run, [plan if sure else partial(kernel.in_row, config)
                     for (kernel, plan, config), sure in zip(alone, implied)]

    def _step(self, number: int, one_kernel: bool) -> Step:
        segment, fused = self.segments[number], self._fused[number]
        if not one_kernel:
            return Step(self._stages[number])
        return Step([(segment.norm, ())] if _norm_alone(segment, fused) else [], fused, self._gone[number])

    def expect(self, inputs: Sequence[Likeness], keep: Sequence[str] = ()) -> None:
        """Begin to compile, in the background, what a call of `values` on such tensors will need: the kernels
        of all regions and, where a segment is to be measured, those that it is measured with."""
        values: dict = dict(zip(self.chain.inputs, inputs))
        numbers = dict.fromkeys(self.chain.scalars, 1.0)
        names = [name for stage in self.chain.stages for name in stage.names]
        for number, fused in enumerate(self._fused):
            walk(self._stages[number], values, numbers, partial(self._expect_region, keep), _expected_product,
                 keep=names)
            if fused is not None and not keep:
                self._expect_kernels(number, fused, values, numbers)

    def _expect_region(self, keep: Sequence[str], stage: RegionStage, args: Sequence[Likeness],
                       scalars: Sequence[float]) -> Sequence[Likeness]:
        run, region = self._runners[stage.names], stage.region
        target = self._over[stage.names]
        if target is not None and target not in keep:
            buffer = args[stage.args.index(target)]
            if buffer.is_contiguous():  # as chain_program.written_over
                run.expect(args, (buffer,))
                return (buffer,)
        run.expect(args)
        sizes = broadcast_sizes(region, [x.shape for x in args])
        return [Likeness.dense(sizes, TORCH_DTYPES[out.dtype], args[0].device, out.order)
                for out in region.outputs]

    def _expect_kernels(self, number: int, fused: FusedSegment, values: dict, numbers: dict) -> None:
        """What segment `number` is measured with, or what that has chosen before."""
        place = self._place(number, fused, values)
        if place is None or place.key in self.choices:
            return
        sizes, unsupported, configs = fused.about(values, place.rows, place.device)
        if unsupported is not None:
            return
        for config in worth_compiling(self._text(fused, sizes), place.device, place.bucket, configs()):
            with suppress(Unsupported, ImportError):
                fused.begin(values, numbers, config)

    def _library(self, number: int, values: dict, numbers: dict, keep: Sequence[str] = ()) -> None:
        walk(self._stages[number], values, numbers, partial(self._region, keep), keep=keep)

    def _norm_ahead(self, number: int, values: dict, numbers: dict) -> None:
        """The norm in front of a kernel that does not hold it."""
        segment, fused = self.segments[number], self._fused[number]
        if _norm_alone(segment, fused):
            walk([(segment.norm, ())], values, numbers, partial(self._region, ()))

    def _drop(self, number: int, values: dict) -> None:
        """Let go of what nothing reads after segment `number`, which ran as one kernel."""
        for name in self._gone[number]:
            values.pop(name, None)

    def _region(self, keep: Sequence[str], stage: RegionStage, args: Sequence[torch.Tensor],
                scalars: Sequence[float]) -> Sequence[torch.Tensor]:
        """A region by its kernel, over an input where that may be."""
        run, target = self._runners[stage.names], self._over[stage.names]
        if target is not None and target not in keep:
            return written_over(run, args, scalars, stage.args.index(target))
        return run(args, scalars)

    def ways(self) -> tuple[str, ...]:
        """What was chosen so far, in words: for each segment and each number of rows a line."""
        with self._lock:
            choices = list(self.choices.items())
        return tuple(f"part {number + 1} of {len(self.segments)}, up to {rows} rows: {choice}"
                     for (number, _, rows, *_), choice in choices)

    def _one_kernel(self, number: int, call: Callable, config: object, values: dict, numbers: dict) -> None:
        """Segment `number` by `call`, one of its FusedSegment's."""
        self._norm_ahead(number, values, numbers)
        values.update(call(values, numbers, config))
        self._drop(number, values)

    def _reusable(self, stage: RegionStage) -> str | None:
        """The product that `stage` may write its one result over: of the same shape and dtype, read by
        nothing else."""
        region, spent = stage.region, self._spent[stage.names]
        products = {s.name for s in self.chain.stages if isinstance(s, Product)}
        if stage.names[0] in self.chain.placed:
            return None
        if len(region.outputs) != 1 or region.outputs[0].order != tuple(range(region.rank)):
            return None
        full = ("*",) * region.outer + (region.lane,)
        for arg, x in zip(stage.args, region.inputs):
            if arg in spent and arg in products and x.dims == full and \
                    x.dtype == region.outputs[0].dtype and stage.reads.count(arg) == 1:
                return arg
        return None

    def _choice(self, number: int, fused: FusedSegment, values: dict, numbers: dict) -> Choice | None:
        """Which way segment `number` takes on these values; None for the library, where nothing else is
        worth asking for."""
        place = self._place(number, fused, values)
        if place is None:
            return None
        choice = self.choices.get(place.key)
        if choice is None:
            choice = self._ask(number, fused, values, numbers, place)
            if choice.final:
                with self._lock:
                    self.choices[place.key] = choice
        return choice

    def _place(self, number: int, fused: FusedSegment, values: dict) -> _Place | None:
        """Where the choice for segment `number` on these values is kept; None where there is none to make."""
        segment = self.segments[number]
        first = values[self._whole[number]]
        rows = first.numel() // first.shape[-1] if first.shape[-1] else 0
        if not 0 < rows <= FEW_ROWS:
            return None
        bucket = 1 << (rows - 1).bit_length()
        read = segment.norm.reads if segment.norm is not None else (fused.value,)
        key = (number, first.get_device(), bucket, *[values[name].stride() for name in read])
        return _Place(key, first.device, rows, bucket)

    @staticmethod
    def _text(fused: FusedSegment, sizes: str) -> str:
        # The text of a segment without a norm names no sizes: those of its weights belong to the question.
        return f"{fused.run.segment.text}\n{sizes}"

    def _ask(self, number: int, fused: FusedSegment, values: dict, numbers: dict, place: _Place) -> Choice:
        ready = dict(values)
        values = dict(values)  # as they are now, however often the ways are tried
        self._norm_ahead(number, ready, numbers)
        names = tuple(name for stage, _ in self._stages[number] for name in stage.names
                      if name in fused.names)

        def by_library() -> list[torch.Tensor]:
            found = dict(values)
            self._library(number, found, numbers, keep=names)
            return [found[name] for name in names]

        def by_kernel(config) -> list[torch.Tensor]:
            found = dict(values)
            self._one_kernel(number, fused.attempt, config, found, numbers)
            return [found[name] for name in names]

        sizes, unsupported, configs = fused.about(ready, place.rows, place.device)
        return self._decide(Question(self._text(fused, sizes), place.device, place.bucket, by_library,
                                     by_kernel, unsupported, configs, partial(fused.begin, ready, numbers)))


@dataclass(frozen=True)
class _Place:
    """A number of rows. key: of the choice in a runner; bucket: the rows, rounded up to a power of two."""

    key: tuple
    device: torch.device
    rows: int
    bucket: int


def _expected_product(stage: Product, *operands: Likeness | None) -> Likeness:
    return Likeness.dense(stage.shape(*operands), operands[0].dtype, operands[0].device)


def _whole(segment: Segment) -> str | None:
    """The name of an input that has all rows of the segment; None where there is no single one."""
    if segment.norm is None:
        first = segment.products[0] if segment.products else None
        return first.value if isinstance(first, LinearStage) else None
    region = segment.norm.region
    full = ("*",) * region.outer + (region.lane,)
    return next((arg for arg, x in zip(segment.norm.args, region.inputs)
                 if x.dims == full and isinstance(arg, str)), None)


def _norm_alone(segment: Segment, fused: FusedSegment) -> bool:
    """Whether the segment's norm runs by itself, in front of the one kernel."""
    return segment.norm is not None and fused.norm is None
