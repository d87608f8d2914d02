"""Chains: a norm, the linear layers that read it, and what is pointwise between and behind them.

A chain is a few stages in the order in which they run. A `RegionStage` is a NormRegion (the norm, with
what grew round it; an activation; a gate; a residual add), a `LinearStage` is one matrix product, a
`PatchStage` a downsampling convolution, a `ScoreStage` the product of q and k (chain_products.py):

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
a chain runs is said elsewhere (chain_ways.py); what it means, here: `evaluate` with torch's own products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .chain_products import Heads, Part, Product, name_of
from .placed import Place
from .reference import reference
from .region import Line, NormRegion
from .values import sources


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

    @cached_property
    def additive(self) -> bool:
        """See `is_additive`."""
        return is_additive(self.region)

    def __str__(self) -> str:
        scalars = f"; {', '.join(self.scalars)}" if self.scalars else ""
        body = "\n".join(f"    {line}" for line in self.region.text.split("\n"))
        return f"{', '.join(self.names)} = region({', '.join(map(str, self.args))}{scalars})\n{body}"


def is_additive(region: NormRegion) -> bool:
    """Whether a region only adds, casts and multiplies by numbers, so that its gradient needs no value."""
    return all(_additive(line, region) for line in region.body)


def _additive(line: Line, region: NormRegion) -> bool:
    tensors = [isinstance(arg, str) and arg not in region.scalars for arg in line.args]
    return line.op in ("add", "sub", "neg", "cast") or (line.op == "mul" and sum(tensors) == 1) or \
        (line.op == "div" and tensors == [True, False])


@dataclass(frozen=True)
class Chain:
    """See the module docstring.

    Attributes:
        inputs: names of the tensors of a call, in its order.
        scalars: names of the numbers that follow them.
        stages: in the order in which they run.
        outputs: names of the values to return.
        places: (name, place) of outputs that a ChainRunner writes into longer tensors, and returns those.
            The meaning of a chain, `evaluate`, has no places: there they are tensors of their own.

    Raises:
        ValueError: at construction, when a name is undefined or defined twice, or nothing is returned, or a
            value has a place that is read, or no output of a region, or not contiguous.
    """

    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    stages: tuple
    outputs: tuple[str, ...]
    places: tuple[tuple[str, Place], ...] = ()

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
        if not set(self.placed) <= self.placeable:
            raise ValueError("what has a place must be a contiguous output of a region that no stage reads")

    @cached_property
    def placeable(self) -> frozenset[str]:
        """The outputs that may have a place: contiguous results of regions that no stage reads."""
        contiguous = {name for stage in self.stages if isinstance(stage, RegionStage)
                      for name, out in zip(stage.names, stage.region.outputs)
                      if out.is_contiguous}
        return frozenset(contiguous.intersection(self.outputs).difference(
            name for stage in self.stages for name in stage.reads))

    @cached_property
    def placed(self) -> dict[str, Place]:
        """Name -> place, of the outputs that have one."""
        return dict(self.places)

    def in_places(self, places: Mapping[str, Place]) -> Chain:
        """This chain with places for the outputs of these names. What they are made of comes first: the
        product behind which one is written goes before other products come."""
        needed, first, others = set(places), [], []
        for stage in reversed(self.stages):
            wanted = not needed.isdisjoint(stage.names)
            (first if wanted else others).insert(0, stage)
            needed.update(stage.reads if wanted else ())
        return replace(self, stages=(*first, *others), places=tuple(places.items()))

    @cached_property
    def text(self) -> str:
        """What a person reads, and what choices are kept under: equal for equal chains."""
        scalars = f"; {', '.join(self.scalars)}" if self.scalars else ""
        return "\n".join((f"chain {', '.join(self.inputs)}{scalars}", *map(str, self.stages),
                          f"out {', '.join(map(self._output, self.outputs))}"))

    def _output(self, name: str) -> str:
        return f"{name} {self.placed[name]}" if name in self.placed else name

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
        """What backward needs beside the inputs: products whose value a later stage's gradient is made of.
        Everything else is cheap to compute again."""
        needed: set[str] = set()
        for stage in reversed(self.stages):
            if isinstance(stage, Product) or not stage.additive or needed.intersection(stage.names):
                needed.update(stage.reads)
        return tuple(stage.name for stage in self.stages
                     if isinstance(stage, Product) and stage.name in needed)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each output, the numbers of the inputs that it depends on."""
        found = {name: frozenset((i,)) for i, name in enumerate(self.inputs)}
        for stage in self.stages:
            reads = [found[name] for name in stage.reads]
            own = sources(stage.region) if isinstance(stage, RegionStage) else (range(len(reads)),)
            for name, numbers in zip(stage.names, own):
                found[name] = frozenset().union(*(reads[i] for i in numbers))
        return tuple(tuple(sorted(found[name])) for name in self.outputs)

    @property
    def words(self) -> str:
        """`linear -> gelu -> linear`: what follows the norm, in short."""
        return words_of(self.stages[1:])


def words_of(stages: Sequence) -> str:
    """`linear -> gelu -> linear`: what these stages do, in short. Products of one value are fellows."""
    words: list[str] = []
    fellows: list[Product] = []
    for stage in stages:
        if isinstance(stage, Product):
            together = fellows and isinstance(stage.refs[0], str) and fellows[0].refs[0] == stage.refs[0]
            fellows = [*fellows, stage] if together else [stage]
            words[-1:] = [_fellows(fellows)] if together else [*words[-1:], stage.word]
            continue
        fellows = []
        body = [line.op for line in stage.region.body if line.op != "cast"]
        words.append(" ".join(_NAMED.get(tuple(body), body)) or "cast")
    return " -> ".join(words)


def _fellows(stages: Sequence[Product]) -> str:
    """`linear x3`, `linear, patch conv`."""
    counts = Counter(stage.word for stage in stages)
    return ", ".join(word if count == 1 else f"{word} x{count}" for word, count in counts.items())


#: bodies that have a name of their own
_NAMED = {("mul", "sigmoid", "mul"): ["quick_gelu"],
          ("mul", "cube", "mul", "add", "mul", "tanh", "add", "mul"): ["gelu_new"]}


def evaluate(chain: Chain, inputs: Sequence[torch.Tensor], scalars: Sequence[float],
             run_region: Callable | None = None, run_product: Callable | None = None,
             keep: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The values of `chain.outputs` and of `keep`, by name; other values are dropped when nothing reads
    them any more.

    `run_region(stage, args, scalars)` gives a stage's outputs, `run_product(stage, *operands)` a product
    (operands as in `stage.refs`, None for no bias). Without them this is the meaning of a chain, in plain
    torch, differentiable.
    """
    values: dict[str, torch.Tensor] = dict(zip(chain.inputs, inputs))
    walk(zip(chain.stages, chain.spent), values, dict(zip(chain.scalars, scalars)),
         run_region or _plain_region, run_product, keep)
    return {name: values[name] for name in dict.fromkeys((*chain.outputs, *keep))}


def walk(stages: Iterable[tuple], values: dict[str, torch.Tensor], numbers: Mapping[str, float],
         run_region: Callable, run_product: Callable | None = None, keep: Sequence[str] = ()) -> None:
    """Run `stages`, each with the values that are spent after it: adds their results to `values`, from which
    what is spent and not in `keep` goes. The functions are those of `evaluate`."""
    run_product = run_product or _plain_product
    for stage, spent in stages:
        if isinstance(stage, Product):
            operands = [None if ref is None else operand(values, ref) for ref in stage.refs]
            values[stage.name] = run_product(stage, *operands)
            del operands
        else:
            args = [operand(values, arg) for arg in stage.args]
            values.update(zip(stage.names, run_region(stage, args, [numbers[s] for s in stage.scalars])))
            del args
        for name in spent:
            if name not in keep:
                del values[name]


def operand(values: Mapping[str, torch.Tensor], ref) -> torch.Tensor:
    """What `ref` stands for."""
    return ref.of(values[ref.name]) if isinstance(ref, (Part, Heads)) else values[ref]


def _plain_region(stage: RegionStage, args, scalars):
    return reference(stage.region, args, scalars)


def _plain_product(stage: Product, *operands):
    return stage.run(*operands)
