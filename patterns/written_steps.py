"""Reading arithmetic backwards: from a node through casts, views and pointwise steps to what it is made of.

What a pattern passes on the way makes up the norm, if it is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..graph import Lens, same_shape
from ..kernels.reference import DTYPE_WORDS


@dataclass
class Trail:
    """The nodes passed on the way; they make up the norm if it is one."""

    nodes: set[Node] = field(default_factory=set)
    #: casts between the value and its statistic: part of the norm where nobody else reads them
    loose: set[Node] = field(default_factory=set)

    def through(self, node: Node) -> Node:
        self.nodes.add(node)
        return node


class NoNorm(Exception):
    """The structure is something else altogether."""


class Reader:
    """Reads what leads to `out`; `trail` has the nodes on the way."""

    def __init__(self, lens: Lens, out: Node):
        self.lens, self.out, self.trail = lens, out, Trail({out})

    def _kept(self, node: Node) -> Node:
        """Below casts and views that only restore a reduced dim: `unsqueeze(-1)`, `[..., None]`."""
        node = self._uncast(node)
        while self.lens.kind(node) in ("unsqueeze", "getitem", "view", "reshape") and \
                self.lens.is_view(node):
            fake, inner = self.lens.tensor(node), self.lens.tensor(node.args[0])
            if fake is None or inner is None or not same_shape(_long(fake), _long(inner)):
                break
            self.trail.through(node)
            node = self._uncast(node.args[0])
        return node

    def _square(self, node: Node) -> Node:
        """x of x^2."""
        node = self._uncast(node)
        word, args = self._operation(node)
        if word == "square" or (word == "pow" and len(args) == 2 and args[1] in (2, 2.0)):
            return self._step(node, args[0])
        if word == "mul" and len(args) == 2 and isinstance(args[0], Node) and \
                isinstance(args[1], Node) and self._equal(args[0], args[1]):
            return self._step(node, args[0])
        raise NoNorm

    def _equal(self, value: Node, other: Node) -> bool:
        """Whether two nodes hold one value, up to casts that lose nothing of `value`."""
        mine, theirs = [value], [other]
        node = value
        while self.lens.kind(node) == "to" and self._exact_cast(node):
            node = node.args[0]
            mine.append(node)
        node = other
        while self.lens.kind(node) == "to" and self._float_cast(node):
            node = node.args[0]
            theirs.append(node)
        common = next((n for n in theirs if n in mine), None)
        if common is None:
            return False
        self.trail.loose |= set(theirs[:theirs.index(common)]) - set(mine)
        return True

    def _exact_cast(self, node: Node) -> bool:
        return self._float_cast(node) and torch.promote_types(
            self.lens.tensor(node.args[0]).dtype, self.lens.tensor(node).dtype) == \
            self.lens.tensor(node).dtype

    def _float_cast(self, node: Node) -> bool:
        """Between dtypes that hold a value but for rounding: none through integers or fp8."""
        fakes = (self.lens.tensor(node.args[0]), self.lens.tensor(node))
        return all(fake is not None and fake.dtype in DTYPE_WORDS for fake in fakes)

    def _uncast(self, node) -> Node:
        """`node` below its float casts, which join the trail."""
        if not isinstance(node, Node):
            raise NoNorm
        while self.lens.kind(node) == "to" and self._float_cast(node):
            self.trail.through(node)
            node = node.args[0]
        return node

    def _through(self, node: Node, result: Node) -> Node:
        self.trail.through(node)
        return result

    def _operation(self, node: Node) -> tuple[str | None, tuple]:
        """The kind of a pointwise node and its operands; nothing where a keyword (alpha, rounding_mode,
        out) makes it another operation."""
        return (None, ()) if node.kwargs else (self.lens.kind(node), node.args)

    def _step(self, node: Node, arg) -> Node:
        if not isinstance(arg, Node):
            raise NoNorm
        return self._through(node, arg)


def lens_rank(lens: Lens, node: Node) -> int:
    """Rank of the tensor that `node` yields; -1 when it yields none."""
    fake = lens.tensor(node)
    return -1 if fake is None else fake.dim()


def _long(fake: torch.Tensor) -> list:
    """Its sizes but for those that are 1."""
    return [size for size in fake.shape if not (isinstance(size, int) and size == 1)]
