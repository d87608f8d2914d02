"""Chains: a norm, the linear layers that read it, and what is pointwise between and behind them.

A chain is a few stages in the order in which they run. A `RegionStage` is a NormRegion (the norm, with
what grew round it; an activation; a gate; a residual add), a `LinearStage` is one matrix product:

    chain x, w, b, w1, b1, w2, b2; eps
    h = region(x, w, b; eps)
        space [*, *, 1024]
        ...
    z = linear(h, w1, b1)
    a = region(z)
        space [*, *, 4096]
        ...
    y = linear(a, w2, b2)
    out y

Like a region, a chain holds structure only: which value goes where, dtypes, the lanes. It is frozen,
hashable and prints as text, which is what a person reads and what measured choices are kept under. How
a chain runs is said elsewhere (chain_ways.py); what it means, here: `evaluate` with torch's own linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from .reference import reference
from .region import NormRegion


@dataclass(frozen=True)
class Part:
    """Columns `start` to `start + length` of a value: one of the two halves of a packed gate_up."""

    name: str
    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.start + self.length}]"

    def of(self, value: torch.Tensor) -> torch.Tensor:
        return value.narrow(-1, self.start, self.length)


#: What a stage reads: a value or an input by its name, or a part of one.
Ref = "str | Part"


@dataclass(frozen=True)
class RegionStage:
    """`names = region(args; scalars)`: one name for each output of the region."""

    names: tuple[str, ...]
    region: NormRegion
    args: tuple
    scalars: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.region.outputs) or len(self.args) != len(self.region.inputs) or \
                len(self.scalars) != len(self.region.scalars):
            raise ValueError(f"{', '.join(self.names)}: names, args and scalars must be as many as the "
                             "region's outputs, inputs and scalars")

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name_of(arg) for arg in self.args)

    def __str__(self) -> str:
        scalars = f"; {', '.join(self.scalars)}" if self.scalars else ""
        body = "\n".join(f"    {line}" for line in self.region.text.split("\n"))
        return f"{', '.join(self.names)} = region({', '.join(map(str, self.args))}{scalars})\n{body}"


@dataclass(frozen=True)
class LinearStage:
    """`name = value @ weight^T + bias`; `transposed`: the weight is `[K, N]`, as GPT-2's Conv1D has it,
    instead of `[N, K]`."""

    name: str
    value: str
    weight: str
    bias: str | None = None
    transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for name in (self.value, self.weight, self.bias) if name is not None)

    def __str__(self) -> str:
        word = "linear_kn" if self.transposed else "linear"
        return f"{self.name} = {word}({', '.join(self.reads)})"


def name_of(ref) -> str:
    """The name of the value that `ref` is, or is a part of."""
    return ref.name if isinstance(ref, Part) else ref


@dataclass(frozen=True)
class Chain:
    """See the module docstring.

    Attributes:
        inputs: names of the tensors of a call, in its order.
        scalars: names of the numbers that follow them.
        stages: in the order in which they run.
        outputs: names of the values to return.

    Raises:
        ValueError: at construction, when a name is undefined or defined twice, or nothing is returned.
    """

    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    stages: tuple
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = [*self.inputs, *self.scalars]
        for stage in self.stages:
            numbers = stage.scalars if isinstance(stage, RegionStage) else ()
            for name in (*stage.reads, *numbers):
                if name not in known:
                    raise ValueError(f"{name!r}, read by {stage.names[0]!r}, is not defined above")
            known += stage.names
        if len(set(known)) != len(known):
            raise ValueError("a name is defined twice")
        if not self.outputs or not set(self.outputs) <= set(known) - set(self.inputs):
            raise ValueError("outputs must be values of the stages, at least one")

    @cached_property
    def text(self) -> str:
        """What a person reads, and what choices are kept under: equal for equal chains."""
        scalars = f"; {', '.join(self.scalars)}" if self.scalars else ""
        return "\n".join((f"chain {', '.join(self.inputs)}{scalars}", *map(str, self.stages),
                          f"out {', '.join(self.outputs)}"))

    @cached_property
    def spent(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the values that nothing reads after it: memory that may be freed, or written."""
        last: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            last.update(dict.fromkeys(stage.reads, number))
        return tuple(tuple(name for name, where in last.items()
                           if where == number and name not in (*self.inputs, *self.outputs))
                     for number in range(len(self.stages)))

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """What backward needs beside the inputs: products whose value a later stage computes with.
        Everything else is cheap to compute again."""
        products = [stage.name for stage in self.stages if isinstance(stage, LinearStage)]
        read = {name for stage in self.stages for name in stage.reads}
        return tuple(name for name in products if name in read)

    @property
    def words(self) -> str:
        """`linear -> gelu -> linear`: what follows the norm, in short."""
        return words_of(self.stages[1:])


def words_of(stages: Sequence) -> str:
    """`linear -> gelu -> linear`: what these stages do, in short."""
    words: list[str] = []
    fellows: list[LinearStage] = []
    for stage in stages:
        if isinstance(stage, LinearStage):
            fellows = [*fellows, stage] if fellows and fellows[0].value == stage.value else [stage]
            words[-1:] = [f"linear x{len(fellows)}"] if fellows[1:] else [*words[-1:], "linear"]
            continue
        fellows = []
        body = [line.op for line in stage.region.body if line.op != "cast"]
        words.append(" ".join(_NAMED.get(tuple(body), body)))
    return " -> ".join(words)


#: bodies that have a name of their own
_NAMED = {("mul", "sigmoid", "mul"): ["quick_gelu"],
          ("mul", "cube", "mul", "add", "mul", "tanh", "add", "mul"): ["gelu_new"]}


def linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
           transposed: bool) -> torch.Tensor:
    """The product of a LinearStage by torch's library: `[..., K]` -> `[..., N]`."""
    if not transposed:
        return F.linear(value, weight, bias)
    rows = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
    product = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return product if rows is value else product.view(*value.shape[:-1], weight.shape[1])


def evaluate(chain: Chain, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
             run_region: Callable | None = None, run_linear: Callable | None = None,
             keep: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The values of `chain.outputs` and of `keep`, by name; other values are dropped when nothing reads
    them any more.

    `run_region(stage, args, scalars)` gives a stage's outputs, `run_linear(stage, value, weight, bias)`
    a product. Without them this is the meaning of a chain, in plain torch, differentiable.
    """
    values: dict[str, torch.Tensor] = dict(zip(chain.inputs, inputs))
    walk(zip(chain.stages, chain.spent), values, dict(zip(chain.scalars, scalars)),
         run_region or _plain_region, run_linear, keep)
    return {name: values[name] for name in dict.fromkeys((*chain.outputs, *keep))}


def walk(stages: Iterable[tuple], values: dict[str, torch.Tensor], numbers: Mapping[str, float],
         run_region: Callable, run_linear: Callable | None = None, keep: Sequence[str] = ()) -> None:
    """Run `stages`, each with the values that are spent after it: adds their results to `values`, from which
    what is spent and not in `keep` goes. The functions are those of `evaluate`."""
    run_linear = run_linear or _plain_linear
    for stage, spent in stages:
        if isinstance(stage, LinearStage):
            bias = None if stage.bias is None else values[stage.bias]
            values[stage.name] = run_linear(stage, values[stage.value], values[stage.weight], bias)
        else:
            args = [operand(values, arg) for arg in stage.args]
            values.update(zip(stage.names, run_region(stage, args, [numbers[s] for s in stage.scalars])))
            del args
        for name in spent:
            if name not in keep:
                del values[name]


def operand(values: Mapping[str, torch.Tensor], ref) -> torch.Tensor:
    """What `ref` stands for."""
    return ref.of(values[ref.name]) if isinstance(ref, Part) else values[ref]


def _plain_region(stage: RegionStage, args, scalars):
    return reference(stage.region, args, scalars)


def _plain_linear(stage: LinearStage, value, weight, bias):
    return linear(value, weight, bias, stage.transposed)
