"""Sites whose results a cat joins, in the graph: one op in the place of the sites and the cats; or one in the
place of a cat that finds a part of its result written already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .graph import Lens
from .kernels.joined import Cat, Joined, Launch
from .kernels.placed import Rest
from .kernels.region import dense_strides
from .site import Norm, Site
from .views import Step


@dataclass(frozen=True)
class CatNode:
    """A cat in the graph: what it joins, and along which dim (0 or more)."""

    node: Node
    parts: tuple[Node, ...]
    dim: int


@dataclass
class CatSite:
    """What `rewrite` needs to put one op in the place of several sites and the cats of their results.

    Attributes:
        pieces: the sites; every output of theirs is a part of a cat.
        joined: what the op does.
    """

    pieces: tuple[Site, ...]
    joined: Joined
    interior: frozenset[Node]
    inputs: tuple[tuple[Node, tuple[Step, ...]], ...]
    scalars: tuple[float | Node, ...]
    outputs: tuple[Node, ...]

    @property
    def anchor(self) -> Node:
        return self.pieces[0].anchor

    @property
    def norms(self) -> tuple[Norm, ...]:
        return tuple(norm for piece in self.pieces for norm in piece.norms)

    def places(self, piece: Site) -> tuple[tuple[int, ...], ...]:
        """The strides of what each output of `piece` is written to."""
        whole = {}
        for cat in self.joined.cats:
            for launch, number in cat.parts:
                if launch is not None and self.pieces[launch] is piece:
                    whole[number] = dense_strides(cat.sizes, range(len(cat.sizes)))
        return tuple(whole[number] for number in range(len(whole)))

    @property
    def finishes(self) -> tuple[tuple[Step, ...], ...]:
        return ((),) * len(self.outputs)

    @property
    def results(self) -> tuple[int, ...]:
        """For each output, which of the op's results it is."""
        return tuple(range(len(self.outputs)))


@dataclass(frozen=True)
class RestSite:
    """What `rewrite` needs to put the op `rest` in the place of a cat, one part of which a chain writes
    (`ChainSite.wholes`).

    Attributes:
        parts: what it reads, in the order of the cat's parts; the written one as the chain yields it.
        interior: the cat, and identities between the chain and it.
    """

    cat: Node
    rest: Rest
    parts: tuple[Node, ...]
    interior: frozenset[Node]

    scalars = ()
    pieces = ()
    finishes = ((),)
    results = (0,)

    @property
    def anchor(self) -> Node:
        return self.cat

    @property
    def inputs(self) -> tuple[tuple[Node, tuple[Step, ...]], ...]:
        return tuple((part, ()) for part in self.parts)

    @property
    def outputs(self) -> tuple[Node, ...]:
        return (self.cat,)


def build(lens: Lens, pieces: Sequence[Site], cats: Sequence[CatNode]) -> CatSite:
    """The op that stands for `pieces` and `cats`; a part of a cat that no piece yields is copied."""
    inputs: dict = {}  # (node, views as text) -> (number, operand)
    scalars: list[float | Node] = []

    def tensor(node: Node, views: tuple[Step, ...]) -> int:
        key = (node, *(step.key for step in views))
        return inputs.setdefault(key, (len(inputs), (node, views)))[0]

    def scalar(value: float | Node) -> int:
        scalars.append(value)
        return len(scalars) - 1

    launches = tuple(Launch(piece.region, tuple(tensor(*operand) for operand in piece.inputs),
                            tuple(map(scalar, piece.scalars))) for piece in pieces)
    made = {node: (i, j) for i, piece in enumerate(pieces) for j, node in enumerate(piece.outputs)}
    joins = []
    for cat in cats:
        fake: torch.Tensor = lens.tensor(cat.node)
        lengths = tuple(lens.tensor(part).shape[cat.dim] for part in cat.parts)
        parts = tuple(made[part] if part in made else (None, tensor(part, ())) for part in cat.parts)
        joins.append(Cat(tuple(fake.shape), fake.dtype, cat.dim, lengths, parts))
    interior = frozenset().union(*(piece.interior for piece in pieces), (cat.node for cat in cats))
    return CatSite(tuple(pieces), Joined(launches, tuple(joins), len(inputs)), interior,
                   tuple(operand for _, operand in inputs.values()), tuple(scalars),
                   tuple(cat.node for cat in cats))
