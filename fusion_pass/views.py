"""Views of tensors, apart from the nodes that take them: to be taken of others, on fakes or in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .effects import value_of


@dataclass(frozen=True, eq=False)
class Step:
    """A view to take of a tensor: a node's call without its first argument.

    Compared by identity: arguments may hold slices, which Python before 3.12 cannot hash."""

    op: str
    target: object
    args: tuple
    kwargs: tuple

    @classmethod
    def of(cls, node: Node) -> Step:
        return cls(node.op, node.target, tuple(node.args[1:]), tuple(node.kwargs.items()))

    @property
    def key(self) -> tuple:
        """Equal for equal views. (Slices and lists cannot be hashed, but print exactly.)"""
        return self.op, self.target, repr(self.args), repr(self.kwargs)

    @classmethod
    def method(cls, name: str, *args) -> Step:
        return cls("call_method", name, args, ())

    def insert(self, graph: Graph, node: Node, lookup) -> Node:
        """The node in `graph` that takes this view of `node`."""
        args, kwargs = torch.fx.node.map_arg((self.args, dict(self.kwargs)), lookup)
        return graph.create_node(self.op, self.target, (node, *args), kwargs)

    def run(self, value):
        """The view of a fake tensor (or tuple); no guard is kept of it."""
        args, kwargs = torch.fx.node.map_arg((self.args, dict(self.kwargs)), value_of)
        if self.op == "call_method":
            return getattr(value, self.target)(*args, **kwargs)
        return self.target(value, *args, **kwargs)


def replay(fake: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """`fake` seen through `steps`. Guards are suppressed: the steps are views that exist on any
    strides, so nothing is decided by the sizes seen here."""
    if not steps:
        return fake
    mode = fake.fake_mode
    with mode, mode.shape_env.suppress_guards() if mode.shape_env else nullcontext():
        for step in steps:
            fake = step.run(fake)
    return fake
