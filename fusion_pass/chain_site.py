"""A chain in the graph: a norm's site with the linear layers behind it, and the builder of one.

What belongs to it is decided by patterns/chain.py; here nodes become names (kernels/chain.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from .graph import Lens, same, same_shape
from .kernels.chain import Chain, RegionStage
from .kernels.chain_products import LinearStage, Part, PatchStage, Ref, ScoreStage
from .kernels.placed import Place
from .site import Decline, Norm, Site
from .views import Step, replay

#: A tensor of the graph, and the views that are taken of it.
Operand = tuple[Node, tuple[Step, ...]]

#: Nodes that the chain replaces too, views of its values that others read: the value and the steps to each.
Views = dict[Node, Operand]


@dataclass(frozen=True)
class Product:
    """One linear layer, or a patch convolution, in the graph.

    Attributes:
        value: the node of what it reads (a value of the chain).
        weight, bias: operands; bias may be None.
        transposed: the weight is `[K, N]`.
        out: the node of the result.
        nodes: all that it replaces.
        finish: views that turn the product, `[..., N]`, into what `out` yields.
        patches: it is a convolution whose stride is its kernel; `grid`: the height and width of an image
            whose pixels are the rows of the value.
        views: see `Views`.
    """

    value: Node
    weight: Operand
    bias: Operand | None
    transposed: bool
    out: Node
    nodes: frozenset[Node]
    finish: tuple[Step, ...] = ()
    patches: bool = False
    grid: tuple[int, int] | None = None
    views: Views = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The product of q and k in the graph.

    Attributes:
        query, key: the node of a value of the chain, and a function that makes the stage's operand of its
            name.
        flat: as in ScoreStage.
        out, nodes, views: as in Product.
    """

    query: tuple[Node, Callable[[str], Ref]]
    key: tuple[Node, Callable[[str], Ref]]
    flat: bool
    out: Node
    nodes: frozenset[Node]
    views: Views


@dataclass(frozen=True)
class Pointwise:
    """What is pointwise behind products: a site without a norm.

    parts: the operands that are columns of a product -> that product's node and the columns.
    """

    site: Site
    out: Node
    nodes: frozenset[Node]
    parts: dict[Node, tuple[Node, int, int]] = field(default_factory=dict)


@dataclass
class ChainSite:
    """What `rewrite` needs to put one op in the place of a norm and what follows it: as `Site`, with a
    chain instead of a region.

    Attributes:
        site: the norm's own, of which the report speaks.
        pieces: the sites of all regions of the chain, for the contract.
        wholes: outputs that have places in the chain -> the cat whose result they are written into.
        finishes: for each output, the views that follow the op.
        results: for each output, which of the op's results it is made of.
    """

    site: Site
    chain: Chain
    interior: frozenset[Node]
    inputs: tuple[tuple[Node, tuple[Step, ...]], ...]
    scalars: tuple[float | Node, ...]
    outputs: tuple[Node, ...]
    finishes: tuple[tuple[Step, ...], ...]
    results: tuple[int, ...]
    pieces: tuple[Site, ...]
    wholes: dict[Node, Node] = field(default_factory=dict)

    @property
    def anchor(self) -> Node:
        return self.site.anchor

    @property
    def norms(self) -> tuple[Norm, ...]:
        return self.site.norms

    @property
    def parts(self) -> tuple[Site, ...]:
        return self.site.parts

    @property
    def pattern(self) -> str:
        return self.site.pattern

    def places(self, lens: Lens, piece: Site) -> tuple[tuple, ...] | None:
        """The strides of what the outputs of `piece` are written to; None where none of them has a place."""
        into = [self.wholes.get(node, node) for node in piece.outputs]
        return None if into == [*piece.outputs] else tuple(lens.tensor(node).stride() for node in into)

    def placed(self, node: Node, whole: Node, place: Place) -> ChainSite:
        """This site, whose output `node` is written in its place of the result of the cat `whole`."""
        name = self.chain.outputs[self.results[self.outputs.index(node)]]
        chain = self.chain.in_places({**self.chain.placed, name: place})
        return replace(self, chain=chain, wholes={**self.wholes, node: whole})


def build(lens: Lens, site: Site, steps: list[Product | Score | Pointwise]) -> ChainSite:
    """The chain of `site` and what follows it, in the order in which it runs.

    Raises:
        Decline: a region reads a value of the chain in another layout than the chain has it in.
    """
    return _Builder(lens, site, steps).build()


class _Builder:
    def __init__(self, lens: Lens, site: Site, steps: list[Product | Score | Pointwise]):
        self.lens, self.site, self.steps = lens, site, steps
        self.inputs: dict = {}  # (node, steps as text) -> (name, operand)
        self.scalars: list[float | Node] = []
        self.names: dict[Node, str] = {}  # values of the chain
        self.finish: dict[Node, tuple[Step, ...]] = {}
        self.laid_out: dict[Node, torch.Tensor] = {}  # fakes of the values as the chain has them
        self.views: set[Node] = set()  # of `names`, those that are seen through views
        self.stages: list = []

    def build(self) -> ChainSite:
        site = self.site
        self._region(site, [self._input(*operand) for operand in site.inputs])
        interior = set(site.interior)
        for step in self.steps:
            interior |= step.nodes
            if isinstance(step, Pointwise):
                self._region(step.site, [self._argument(step, *operand) for operand in step.site.inputs])
                continue
            for node, (source, steps) in step.views.items():
                self.names[node] = self.names[source]
                self.finish[node] = (*self.finish[source], *steps)
                self.laid_out[node] = self.laid_out[source]
                self.views.add(node)
            if isinstance(step, Product):
                self._product(step)
            else:
                self._score(step)
        read = {name for stage in self.stages for name in stage.reads}
        outputs = [node for node, name in self.names.items()
                   if (name not in read and node not in self.views) or
                   any(user not in interior for user in node.users)]
        returned = list(dict.fromkeys(self.names[node] for node in outputs))
        chain = Chain(tuple(name for name, _ in self.inputs.values()),
                      tuple(f"s{i}" for i in range(len(self.scalars))), tuple(self.stages), tuple(returned))
        pieces = (site, *(step.site for step in self.steps if isinstance(step, Pointwise)))
        return ChainSite(site, chain, frozenset(interior), tuple(o for _, o in self.inputs.values()),
                         tuple(self.scalars), tuple(outputs),
                         tuple(self.finish.get(node, ()) for node in outputs),
                         tuple(returned.index(self.names[node]) for node in outputs), pieces)

    def _region(self, site: Site, args: list) -> None:
        names = [self._name(node, site.finish) for node in site.outputs]
        self.stages.append(RegionStage(tuple(names), site.region, tuple(args),
                                       tuple(self._scalar(s) for s in site.scalars)))

    def _product(self, product: Product) -> None:
        weight = self._input(*product.weight)
        bias = None if product.bias is None else self._input(*product.bias)
        name, value = self._name(product.out, product.finish), self.names[product.value]
        self.stages.append(
            PatchStage(name, value, weight, bias, product.grid) if product.patches else
            LinearStage(name, value, weight, bias, product.transposed))

    def _score(self, score: Score) -> None:
        operands = [make(self.names[node]) for node, make in (score.query, score.key)]
        self.stages.append(ScoreStage(self._name(score.out, ()), *operands, flat=score.flat))

    def _argument(self, step: Pointwise, node: Node, views):
        if node in step.parts:
            source, start, length = step.parts[node]
            return Part(self.names[source], start, length)
        if node not in self.names:
            return self._input(node, views)
        has, reads = self.laid_out[node], replay(self.lens.tensor(node), views)
        if not same_shape(has.shape, reads.shape) or not same_shape(has.stride(), reads.stride()):
            raise Decline("a value of the chain is read in another layout", node)
        return self.names[node]

    def _name(self, node: Node, finish: tuple[Step, ...]) -> str:
        self.names[node] = f"v{len(set(self.names.values()))}"
        self.finish[node] = finish
        back = [Step.method("movedim", *reversed(step.args)) for step in finish if step.target == "movedim"]
        self.laid_out[node] = replay(self.lens.tensor(node), back)
        return self.names[node]

    def _input(self, node: Node, views) -> str:
        key = (node, *(step.key for step in views))
        if key not in self.inputs:
            self.inputs[key] = (f"x{len(self.inputs)}", (node, views))
        return self.inputs[key][0]

    def _scalar(self, value: float | Node) -> str:
        for number, known in enumerate(self.scalars):
            if known is value or (isinstance(known, float) and known == value):
                return f"s{number}"
        self.scalars.append(value)
        return f"s{len(self.scalars) - 1}"


def columns_of(part: torch.Tensor, whole: torch.Tensor) -> tuple[int, int] | None:
    """(start, length) when `part` is a run of the last dim of `whole` (fakes that share memory)."""
    if part.dim() != whole.dim() or not same_shape(part.shape[:-1], whole.shape[:-1]) or \
            not same_shape(part.stride(), whole.stride()):
        return None
    start = part.storage_offset() - whole.storage_offset()
    length = part.shape[-1]
    if not isinstance(start, int) or not isinstance(length, int) or \
            not isinstance(whole.shape[-1], int) or not same(whole.stride(-1), 1):
        return None
    return (start, length) if 0 <= start and start + length <= whole.shape[-1] else None
