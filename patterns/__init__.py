"""The patterns: which nodes are a norm, and how far a site may grow round it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Node

from ..graph import Lens
from ..select import Candidate
from ..site import Decline, Norm, Site, assemble
from . import handwritten_norm, library_norm
from .grow import REACHES, grow
from .naming import pattern_name

#: Matchers, tried in turn on every node: each yields the norms that end there.
MATCHERS: list[Callable[[Lens, Node], Iterator[Norm]]] = [
    library_norm.match, handwritten_norm.match]


def find_norms(lens: Lens) -> tuple[list[Norm], list[tuple[Node, Decline]]]:
    """All norms of a graph, and those that were recognised but cannot be fused, with the reason."""
    norms: list[Norm] = []
    refused: list[tuple[Node, Decline]] = []
    for node in lens.nodes:
        for match in MATCHERS:
            try:
                norms += match(lens, node)
            except Decline as decline:
                refused.append((node, decline))
    return norms, refused


def candidate(lens: Lens, norm: Norm) -> Candidate:
    """The sites of `norm`, from the largest growth to the bare norm."""
    def make(reach) -> Site:
        if norm.out in lens.transformed:
            raise Decline("inside a functorch transform", norm.out)
        grown = grow(lens, (norm,), reach)
        name = pattern_name(lens, (norm,), grown)
        return assemble(lens, name, (norm,), grown.interior, grown.outputs, grown.regroup)

    return Candidate(norm.out, iter([lambda reach=reach: make(reach) for reach in REACHES]))
