"""A chain on inputs of one layout, as one Python function: what a warm call runs.

Which way each segment takes, which value goes where and what may be freed after what is settled when a layout
is met first (chain_ways.py). Written out as source, a call costs little more than its launches and products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .chain import Chain, RegionStage
from .chain_fused import FusedSegment
from .chain_products import Heads, LinearStage, Part, Product, Ref, name_of
from .frames import skip_frames_of
from .launch import Runner


@dataclass(frozen=True)
class Step:
    """Stages that run together.

    Attributes:
        stages: of the chain, with what is spent after each; run by their kernels and torch's products.
        kernel: the segment that is one kernel, behind them; None where the stages are all there is.
        gone: what is spent after the kernel.
    """

    stages: Sequence[tuple]
    kernel: FusedSegment | None = None
    gone: Sequence[str] = ()


def program(chain: Chain, steps: Sequence[Step], runners: dict, over: dict) -> tuple[Callable, list[bool]]:
    """(`run(kernels, inputs, scalars)`, which gives the chain's outputs; for each kernel, whether its tensors
    are laid out alike in all calls whose inputs are).

    `kernels` are called as plans are, `kernel(tensors, (), scalars)`, one for each step that has one.

    Args:
        runners: names of a RegionStage -> its Runner.
        over: names of a RegionStage -> the argument that its result is written over where that is contiguous,
            or None.
    """
    writer = _Writer(chain, runners, over)
    for step in steps:
        writer.write(step)
    return writer.function(), writer.implied


class _Writer:
    def __init__(self, chain: Chain, runners: dict, over: dict):
        self.chain, self.runners, self.over_arguments = chain, runners, over
        self.scope: dict = {"over": written_over}
        self.lines: list[str] = []
        self.implied: list[bool] = []
        #: names of values whose layout follows from that of the inputs: these, and what we allocate. Not
        #: torch's products, which an ambient mode may change.
        self.ours = set(chain.inputs)
        self.made: set[str] = set()  # names that stand for something by now
        self.numbers = itertools.count()

    def write(self, step: Step) -> None:
        for stage, spent in step.stages:
            if isinstance(stage, Product):
                self.product(stage)
            else:
                self.region(stage)
            self.free(spent)
        kernel = step.kernel
        if kernel is not None:
            tensors = ", ".join(self.text(ref, dim) for ref, dim in kernel.row)
            self.call(kernel.names, f"kernel{len(self.implied)}([{tensors}], (), [{_all(kernel.scalars)}])")
            self.implied.append(all(name_of(ref) in self.ours for ref, _ in kernel.row))
            self.ours.update(kernel.names)
            self.free(step.gone)

    def product(self, stage: Product) -> None:
        plain = isinstance(stage, LinearStage) and not stage.transposed  # most are: without a frame between
        run = self.named("product", torch.nn.functional.linear if plain else stage.run)
        operands = ", ".join("None" if ref is None else self.text(ref) for ref in stage.refs)
        self.lines.append(f"{_variable(stage.name)} = {run}({operands})")
        self.made.add(stage.name)

    def region(self, stage: RegionStage) -> None:
        run = self.named("run", self.runners[stage.names])
        tensors = ", ".join(self.text(arg) for arg in stage.args)
        arguments = f"[{tensors}], [{_all(stage.scalars)}]"
        target = self.over_arguments[stage.names]
        if target is None:
            self.call(stage.names, f"{run}({arguments})")
            self.ours.update(stage.names)
        else:
            self.call(stage.names, f"over({run}, {arguments}, {stage.args.index(target)})")

    def named(self, word: str, function: Callable) -> str:
        """A name by which the source calls `function`."""
        name = f"{word}{next(self.numbers)}"
        self.scope[name] = function
        return name

    def text(self, ref: Ref, dim: int = -1) -> str:
        """What `ref` stands for; `dim`: along which a Part is one."""
        name = _variable(name_of(ref))
        if isinstance(ref, Heads):
            return f"{self.named('heads', ref.of)}({name})"
        return f"{name}.narrow({dim}, {ref.start}, {ref.length})" if isinstance(ref, Part) else name

    def call(self, names: Sequence[str], call: str) -> None:
        self.lines.append(f"{''.join(f'{_variable(name)}, ' for name in names)}= {call}")
        self.made.update(names)

    def free(self, names: Sequence[str]) -> None:
        names = [name for name in names if name in self.made]  # some are never made inside of one kernel
        if names:
            self.lines.append(f"del {_all(names)}")

    def function(self) -> Callable:
        chain = self.chain
        unpack = [("kernels", [f"kernel{i}" for i in range(len(self.implied))]),
                  ("inputs", [_variable(name) for name in chain.inputs]),
                  ("scalars", [_variable(name) for name in chain.scalars])]
        lines = ["def run(kernels, inputs, scalars):",
                 *(f"    {', '.join(names)}, = {word}" for word, names in unpack if names),
                 *(f"    {line}" for line in self.lines),
                 f"    return ({_all(chain.outputs)},)"]
        exec(compile("\n".join(lines), "<ascend_ln_fuse chain>", "exec"), self.scope)
        skip_frames_of(self.scope["run"])
        return self.scope["run"]


def written_over(run: Runner, args: Sequence[torch.Tensor], scalars: Sequence[float],
                 number: int) -> Sequence[torch.Tensor]:
    """The one result of a region, written over input `number` where that is contiguous, as the result is."""
    buffer = args[number]
    if not buffer.is_contiguous():
        return run(args, scalars)
    run.over(args, scalars, number)
    return (buffer,)


def _variable(name: str) -> str:
    """A chain's name as one that is no word of the source."""
    return f"V_{name}"


def _all(names: Sequence[str]) -> str:
    return ", ".join(map(_variable, names))
