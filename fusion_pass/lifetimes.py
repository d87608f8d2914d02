"""What becomes of the memory of a graph: who writes it, who owns it, what leaves."""

from __future__ import annotations

import math

from torch.fx import Node

from .effects import WORLD, is_fence
from .graph import Lens


class Lifetimes:
    """The memory behind the values of one graph.

    Attributes:
        inputs: the storages of inputs and parameters.
        leaving: those that the graph returns.
        aliases: storage -> the nodes that yield it, in order.
        last_write: storage -> the last position at which it is written; of one that an op got of which
            nothing is known, and which may have kept it, no position is.
    """

    def __init__(self, lens: Lens):
        self.lens = lens
        self.last_write: dict = {}
        self.inputs: set = set()
        self.leaving: frozenset = frozenset()
        self.aliases: dict = {}
        for position, (node, effect) in enumerate(lens.effects.items()):
            for key in lens.storages(node):
                self.aliases.setdefault(key, []).append(node)
            if node.op in ("placeholder", "get_attr"):
                self.inputs |= lens.storages(node)
            if node.op == "output":
                self.leaving = effect.reads
            if is_fence(node):
                continue
            for key in effect.writes:
                self.last_write[key] = max(position, self._last_write(key))
            if WORLD in effect.writes:
                known = (effect.writes | lens.storages(node)) - {WORLD}
                self.last_write.update(dict.fromkeys(known, math.inf))
        self.last_write_to_inputs = max(map(self._last_write, (*self.inputs, WORLD)))

    def is_written_from(self, key, node: Node) -> bool:
        """Whether `node` or one after it may write a storage. Inputs may share memory without their fakes
        saying so: a write to one counts as one to all."""
        last = self.last_write_to_inputs if key in self.inputs else self._last_write(key)
        return last >= self.lens.position[node]

    def _last_write(self, key) -> float:
        return self.last_write.get(key, -1)
