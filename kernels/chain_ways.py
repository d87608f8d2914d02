"""How a chain runs on an accelerator: by the ways that its segments have, the fastest measured one each.

A chain falls into segments: a norm (or nothing) in front, the products that read it, and what is
pointwise behind them. A segment runs

- by the "library": the norm's kernel, torch's products, and one kernel for what is pointwise, in place
  where the product is nobody else's;
- by the "library with the activation in the product", where that is all there is behind it
  (chain_activated.py);
- as "one kernel" (fused_linear.py), with the norm in front of the product and the rest behind it (or
  with the norm's kernel first, where others read its result).

The last is for few rows, where reading the weights and launching is all the time there is. Which is taken
is measured on the first call with a new number of rows (up to the next power of two), outside of graph
capture, and kept on disk (chain_choice.py). There may be two answers, one for plain calls and one for a
capture, which then finds its kernels compiled and checked: a plain call runs both once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from .chain import Chain, RegionStage, walk, words_of
from .chain_activated import activated, serves, within_bound
from .chain_choice import ACTIVATED, LIBRARY, ONE_KERNEL, Choice, Question, Way, choose, worth_compiling
from .chain_fused import FusedSegment, fused_segment
from .chain_products import Product
from .chain_program import Step, program, written_over
from .chain_segments import norm_alone, reusable, segments, whole_input
from .chain_trial import Trial
from .fused_linear import FusedLinear
from .fused_linear_check import SegmentRecord
from .guard import out_of_memory
from .launch import MAX_PLANS, Runner
from .layout import Unsupported
from .likeness import Likeness
from .measure import is_capturing
from .ops import runner
from .placed import PlacedRunner
from .recent import Recent, layouts
from .reference import TORCH_DTYPES
from .region import broadcast_sizes
from .settings import DEFAULT_SELF_CHECK

#: Rows above which no kernel with a product is tried: the product itself is the time then. Between SURE_ROWS
#: and that many, only with weights of so many bytes: at 256 rows, kernels won on an H200 at hidden sizes of
#: 768 and 1024 (17.1 us for 19.3, 21.0 for 21.9), were level at 1536 and 2048, and lost at 3072 (42 for 38),
#: where measuring them took 2 s of HunyuanVideo's first call.
FEW_ROWS, SURE_ROWS, LIGHT_BYTES = 256, 128, 32e6

#: Choices that one runner keeps; each is found again on disk.
MAX_CHOICES = 256


class Bound(NamedTuple):
    """What runs the whole chain on inputs of one layout: `run(kernels, inputs, scalars)`. captured: the same
    two for calls inside a graph capture, where that is something else."""

    run: Callable
    kernels: list[Callable]
    captured: tuple[Callable, list[Callable]] | None


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
        #: layout of the inputs -> what is bound to it; and those of the latest
        self._bound: dict[tuple, Bound] = {}
        self._recent = Recent()
        #: the words of the segments' ways -> what runs the chain so, see `program`
        self._programs: dict[tuple[str, ...], tuple[Callable, list[bool]]] = {}
        self._decide = decide
        self._lock = threading.RLock()
        #: how often a segment has lost a way: what was bound before that is not used after it
        self._rejections = 0
        #: the segments that the library cannot run with the activation in the product
        self._refused: set[int] = set()
        regions = [stage for stage in chain.stages if isinstance(stage, RegionStage)]
        products = {stage.name for stage in chain.stages if isinstance(stage, Product)}
        self._runners = {stage.names: self._runner(stage, self_check) for stage in regions}
        #: an input of each segment that has all of its rows
        self._whole = tuple(whole_input(segment) for segment in self.segments)
        self._fused = tuple(self._kernel(number, self_check) if whole else None
                            for number, whole in enumerate(self._whole))
        spent = dict(zip((stage.names for stage in chain.stages), chain.spent))
        self._over = {stage.names: None if stage.names[0] in chain.placed else
                      reusable(stage, spent[stage.names], products) for stage in regions}
        #: what each segment runs, by the word of each of its ways
        self._steps = tuple(self._ways_of(number, spent) for number in range(len(self.segments)))
        self._trials = tuple(Trial(segment, steps, self._runners, self._over) if len(steps) > 1 else None
                             for segment, steps in zip(self.segments, self._steps))

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

    def _ways_of(self, number: int, spent: dict[tuple, tuple[str, ...]]) -> dict[str, Step]:
        """What segment `number` runs, by the word of each of its ways. `spent`: what is after each stage."""
        segment, fused = self.segments[number], self._fused[number]
        stages = [(stage, spent[stage.names]) for stage in segment.stages]
        gone = [name for _, names in stages for name in names]
        ways = {LIBRARY: Step(stages)}
        if fused is not None:
            ways[ONE_KERNEL] = Step([(segment.norm, ())] if norm_alone(segment, fused) else [], fused, gone)
            product = activated(segment, gone, partial(self._without_activated, number))
            if product is not None and product.name not in self.chain.placed:
                first = [pair for pair in stages if pair[0] is segment.norm]
                rest = [name for _, names in stages[len(first):] for name in names
                        if name != product.linear.name]
                ways[ACTIVATED] = Step([*first, (product, rest)])
        return ways

    def _forget(self, number: int) -> None:
        """Segment `number` has lost a way: ask again."""
        with self._lock:
            self._rejections += 1
            self._bound.clear()
            self._recent.clear()
            for key in [key for key in self.choices if key[0] == number]:
                del self.choices[key]

    def _without_activated(self, number: int, why: str) -> None:
        """The library has refused to run a product of segment `number` with its activation inside."""
        with self._lock:
            first = number not in self._refused
            self._refused.add(number)
        if first:
            self._forget(number)
            words = words_of(self.segments[number].stages)
            warnings.warn(f"ascend_ln_fuse: {words}, with the activation in the product: {why}. They run one "
                          "after the other from now on.", RuntimeWarning, stacklevel=4)

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
        run, kernels, captured = found
        if captured is not None and is_capturing(inputs[0].device):
            run, kernels = captured
        return run(kernels, inputs, scalars)

    def values(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
               keep: Sequence[str]) -> dict[str, torch.Tensor]:
        """The chain's outputs and the values of `keep`, by name. The library runs: the other ways never write
        a product to memory."""
        values, numbers = self._named(inputs, scalars)
        for steps in self._steps:
            self._walk(steps[LIBRARY], values, numbers, keep)
        return {name: values[name] for name in dict.fromkeys((*self.chain.outputs, *keep))}

    def _named(self, inputs, scalars) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        return dict(zip(self.chain.inputs, inputs)), dict(zip(self.chain.scalars, scalars))

    # -- the first call with a layout

    def _first(self, key: tuple, inputs, scalars) -> tuple[torch.Tensor, ...]:
        """A call with a layout for which nothing is bound: chooses, and binds what can be bound."""
        values, numbers = self._named(inputs, scalars)
        rejections, capturing = self._rejections, is_capturing(inputs[0].device)
        taken: list[_Part | None] = []  # by this call
        others: list[_Part | None] = []  # by a call outside or inside of a capture, where this one is not
        final = True
        for number in range(len(self.segments)):
            choice = self._choice(number, values, numbers)
            now, other = (choice.captured, choice.plain) if capturing else (choice.plain, choice.captured)
            if other != now:  # before `now`, which may write over what it reads
                others.append(None if capturing else self._rehearsed(number, other, values, numbers))
            taken.append(self._run(number, now, values, numbers))
            if other == now:
                others.append(taken[-1])
            final = final and choice.final and None not in (taken[-1], others[-1])
        if final:  # inside of a capture: if both are one
            same = all(a.way == b.way for a, b in zip(taken, others))
            found = Bound(*self._bind(taken), None if same else self._bind(others))
            with self._lock:
                if len(self._bound) >= MAX_PLANS:
                    self._bound.clear()
                if rejections == self._rejections:
                    self._bound[key] = found
        return tuple([values[name] for name in self.chain.outputs])

    def _run(self, number: int, way: Way, values: dict, numbers: dict) -> _Part | None:
        """Segment `number` in this way. What a bound program runs of it; None where that may still change."""
        step = self._steps[number][way.word]
        self._walk(step, values, numbers)
        fused = step.kernel
        if fused is None:
            return _Part(way)
        values.update(fused.call(values, numbers, way.config))
        plan = fused.plan(values, way.config)
        for name in step.gone:
            values.pop(name, None)
        return None if plan is None else _Part(way, fused, plan)

    def _rehearsed(self, number: int, way: Way, values: dict, numbers: dict) -> _Part | None:
        """As `_run`, for a way not taken now: no value changes. Its kernels are compiled and checked. Without
        memory for that, the next call tries."""
        try:
            return self._run(number, way, self._trials[number].copy(values), numbers)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return None

    def _bind(self, parts: Sequence[_Part]) -> tuple[Callable, list[Callable]]:
        """What runs the chain so; see `_first`."""
        words = tuple(part.way.word for part in parts)
        known = self._programs.get(words)
        if known is None:
            steps = [self._steps[number][word] for number, word in enumerate(words)]
            known = self._programs[words] = program(self.chain, steps, self._runners, self._over)
        run, implied = known
        kernels = [part for part in parts if part.plan is not None]
        return run, [part.plan if sure else partial(part.fused.run.in_row, part.way.config)
                     for part, sure in zip(kernels, implied)]

    def _walk(self, step: Step, values: dict, numbers: dict, keep: Sequence[str] = ()) -> None:
        """The stages of a step, whose kernel is still to run."""
        walk(step.stages, values, numbers, partial(self._region, keep), keep=keep)

    def _region(self, keep: Sequence[str], stage: RegionStage, args: Sequence[torch.Tensor],
                scalars: Sequence[float]) -> Sequence[torch.Tensor]:
        """A region by its kernel, over an input where that may be."""
        run, target = self._runners[stage.names], self._over[stage.names]
        if target is not None and target not in keep:
            return written_over(run, args, scalars, stage.args.index(target))
        return run(args, scalars)

    # -- what is compiled ahead

    def expect(self, inputs: Sequence[Likeness], keep: Sequence[str] = ()) -> None:
        """Begin to compile, in the background, what a call of `values` on such tensors will need: the kernels
        of all regions and, where a segment is to be measured, those that it is measured with."""
        values: dict = dict(zip(self.chain.inputs, inputs))
        numbers = dict.fromkeys(self.chain.scalars, 1.0)
        names = [name for stage in self.chain.stages for name in stage.names]
        for number, fused in enumerate(self._fused):
            walk(self._steps[number][LIBRARY].stages, values, numbers, partial(self._expect_region, keep),
                 _expected_product, keep=names)
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
        place = self._place(number, values)
        if place is None or place.key in self.choices or not place.few:
            return
        sizes, unsupported, configs, unsplit = fused.about(values, place.rows, place.device)
        if unsupported is not None:
            return
        for config in worth_compiling(self._text(fused, sizes), place.device, place.bucket,
                                      (*configs(), *unsplit())):
            with suppress(Unsupported, ImportError):
                fused.begin(values, numbers, config)

    # -- the choice

    def ways(self) -> tuple[str, ...]:
        """What was chosen so far, in words: for each segment and each number of rows a line."""
        with self._lock:
            choices = list(self.choices.items())
        return tuple(dict.fromkeys(f"part {number + 1} of {len(self.segments)}, up to {rows} rows: {choice}"
                                   for (number, _, rows, *_), choice in choices))

    def _choice(self, number: int, values: dict, numbers: dict) -> Choice:
        """Which way segment `number` takes on these values."""
        place = self._place(number, values)
        if place is None:
            return _NOTHING_ELSE
        choice = self.choices.get(place.key)
        if choice is None:
            choice = self._ask(number, self._fused[number], values, numbers, place)
            if choice.final:
                with self._lock:
                    while len(self.choices) >= MAX_CHOICES:
                        del self.choices[next(iter(self.choices))]
                    self.choices[place.key] = choice
        return choice

    def _place(self, number: int, values: dict) -> _Place | None:
        """Where the choice for segment `number` on these values is kept; None where there is none to make."""
        segment, fused = self.segments[number], self._fused[number]
        if fused is None:
            return None
        first = values[self._whole[number]]
        rows = first.numel() // first.shape[-1] if first.shape[-1] else 0
        if not rows:
            return None
        bucket = 1 << (rows - 1).bit_length()
        few = bucket <= SURE_ROWS or bucket <= FEW_ROWS and fused.bytes_of_weights(values) <= LIGHT_BYTES
        if not few and not self._by_activated(number, first.device):
            return None
        read = segment.norm.reads if segment.norm is not None else (fused.value,)
        layout = [_layout_of(values[name]) for name in read]
        return _Place((number, first.get_device(), bucket, *layout), first.device, rows, bucket, few)

    def _by_activated(self, number: int, device: torch.device) -> bool:
        """Whether segment `number` may have its activation in the product there."""
        return ACTIVATED in self._steps[number] and number not in self._refused and serves(device)

    @staticmethod
    def _text(fused: FusedSegment, sizes: str) -> str:
        # The text of a segment without a norm names no sizes: those of its weights belong to the question.
        return f"{fused.run.segment.text}\n{sizes}"

    def _ask(self, number: int, fused: FusedSegment, values: dict, numbers: dict, place: _Place) -> Choice:
        trial = self._trials[number]
        ready = trial.before_kernel(fused, values, numbers)
        prepared: tuple[object, list[Callable]] = None, []  # for the latest block shapes

        def by_kernel(config) -> Sequence[torch.Tensor]:
            nonlocal prepared
            if prepared[0] is not config:
                prepared = config, [fused.prepared(ready, numbers, config)]
            return run_kernel(prepared[1])

        run_kernel = trial.call(ONE_KERNEL, values, numbers)
        sizes, unsupported, configs, unsplit = fused.about(ready, place.rows, place.device)
        if not place.few:
            unsupported, configs, unsplit = None, tuple, tuple
        question = Question(self._text(fused, sizes), place.device, place.bucket,
                            trial.call(LIBRARY, values, numbers), by_kernel, unsupported, configs,
                            partial(fused.begin, ready, numbers), unsplit)
        if self._by_activated(number, place.device):
            question = self._with_activated(number, question, values, numbers)
        return self._decide(question)

    def _with_activated(self, number: int, question: Question, values: dict, numbers: dict) -> Question:
        """The question about one way more, where the product's input is contiguous."""
        trial, segment = self._trials[number], self.segments[number]
        product, _ = self._steps[number][ACTIVATED].stages[-1]
        behind = trial.behind_norm(values, numbers)
        operands = [behind[name] for name in product.refs]
        if not operands[0].is_contiguous():
            return question
        return replace(
            question, by_activated=trial.call(ACTIVATED, values, numbers),
            within_bound=lambda found: within_bound(product, segment.pointwise, operands, found[-1]))


@dataclass(frozen=True)
class _Place:
    """A number of rows. key: of the choice in a runner; bucket: the rows, rounded up to a power of two; few:
    whether kernels with the product are tried."""

    key: tuple
    device: torch.device
    rows: int
    bucket: int
    few: bool


class _Part(NamedTuple):
    """A segment in a bound program. plan: of its one kernel."""

    way: Way
    fused: FusedSegment | None = None
    plan: Callable | None = None


_NOTHING_ELSE = Choice(LIBRARY)


def _layout_of(x: torch.Tensor) -> tuple:
    """How `x` lies in memory, as far as a choice depends on it: contiguous ones are alike in all sizes but 1,
    which broadcasts."""
    return tuple([n == 1 for n in x.shape]) if x.is_contiguous() else x.stride()


def _expected_product(stage: Product, *operands: Likeness | None) -> Likeness:
    return Likeness.dense(stage.shape(*operands), operands[0].dtype, operands[0].device)
