"""A graph on its way to a simpler one, and what is known of it so far."""

from __future__ import annotations

from torch.fx import Graph, Node

from .graph import Lens
from .rewrite import copy_graph


class Draft:
    """A graph, whose nodes carry fakes, that may be changed step by step. The one that it begins with is only
    read: the first change makes a copy, which later ones are made in.

    Attributes:
        graph: what has become of it.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._is_copy = False
        self._lens: Lens | None = None

    @property
    def lens(self) -> Lens:
        """The lens of `graph`: made when it is asked for, and kept until the next change."""
        if self._lens is None:
            self._lens = Lens(self.graph)
        return self._lens

    @property
    def known_lens(self) -> Lens | None:
        """The lens of `graph`, where somebody has asked for it since the last change."""
        return self._lens

    def change(self) -> dict[Node, Node]:
        """Begin a change: from now on `graph` is one that may be changed, until the lens is asked for again.
        Returns its nodes, in order, by those of the graph before: their copies, or the nodes themselves where
        it is a copy already."""
        self._lens = None
        if self._is_copy:
            return {node: node for node in self.graph.nodes}
        self._is_copy = True
        self.graph, copies = copy_graph(self.graph)
        return copies
