"""The heads of a lane: a norm over all heads of q, what follows is done head by head.

    q = norm(x).unflatten(2, (heads, -1))                         # Wan
    q = norm(x).view(batch, tokens, heads, -1).transpose(1, 2)    # OLMo 2

The region keeps the norm's space, and its lane gets heads (kernels/region.py). So what stands below these
views is taken back: its operands are seen without the heads' dim, and its results get the views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from .graph import Lens, same, same_shape
from .views import Step

#: views that only change the order of dims
_PERMUTING = frozenset("permute transpose swapaxes swapdims movedim moveaxis".split())


@dataclass(frozen=True)
class Heads:
    """How the graph sees a lane as heads.

    Attributes:
        source: the value with the whole lane, `[*outer, count * size]`.
        view: the value with heads.
        nodes: the views from `source` to `view`, the latter among them.
        count, size: how many heads the lane has, and elements a head.
        order: for each dim of `view`, which one of `[*outer, count, size]` it is; the last stays last.
    """

    source: Node
    view: Node
    nodes: tuple[Node, ...]
    count: int
    size: int
    order: tuple[int, ...]

    @property
    def key(self) -> tuple:
        """Equal for those that see lanes of one size alike."""
        return self.count, self.size, self.order

    @cached_property
    def finish(self) -> tuple[Step, ...]:
        """The views from a result of the region to what the graph has."""
        return (Step.method("unflatten", -1, (self.count, self.size)), *_permute(self.order))

    @cached_property
    def apart(self) -> tuple[Step, ...]:
        """From the shape of `view` to `[*outer, count, size]`."""
        return _permute([self.order.index(dim) for dim in range(len(self.order))])

    @cached_property
    def joined(self) -> tuple[Step, ...]:
        """From the shape of `view` to the region's space; of a value for which `is_run`."""
        return (*self.apart, Step.method("flatten", -2))

    @cached_property
    def shared(self) -> tuple[Step, ...]:
        """From the shape of `view`, but for one head that stands for all, to an operand of the region."""
        return (*self.apart, Step.method("select", -2, 0))

    def is_run(self, split: torch.Tensor) -> bool:
        """Whether the two last dims of `split`, a fake of shape `[*outer, count, size]` or that broadcasts to
        it, are heads that lie one behind the other."""
        return same_shape(split.shape[-2:], (self.count, self.size)) and \
            same(split.stride(-2), self.size * split.stride(-1))

    def has_one(self, fake: torch.Tensor) -> bool:
        """Whether `fake`, which broadcasts to the shape of `view`, is the same for all heads."""
        place = self.order.index(len(self.order) - 2) - len(self.order) + fake.dim()
        return place < 0 or same(fake.shape[place], 1)

    def memory_order(self, order: Sequence[int]) -> tuple[int, ...]:
        """The dims of a finished result as they lie in memory, outermost first, where those of the region's
        result lie there in `order`, with the lane innermost."""
        return tuple(self.order.index(dim) for dim in (*order, len(order)))


def _permute(order: Sequence[int]) -> tuple[Step, ...]:
    return () if list(order) == list(range(len(order))) else (Step.method("permute", *order),)


def heads_below(lens: Lens, source: Node, view: Node, free: Callable[[Node], bool]) -> Heads | None:
    """The heads that `view`, the only reader of `source`, makes of its lane, and the permutation of dims that
    is all that follows; None where it makes none. `free`: whether a node may be taken along."""
    full, split = lens.tensor(source), lens.tensor(view)
    if split is None or not lens.is_view(view) or not free(view) or split.dim() != full.dim() + 1:
        return None
    *outer, count, size = split.shape
    whole = (*full.stride()[:-1], size, 1)
    if not isinstance(count, int) or not isinstance(size, int) or count < 2 or size < 2 or \
            not same(full.shape[-1], count * size) or not same_shape(outer, full.shape[:-1]) or \
            not all(same(a, b) or same(n, 1) for a, b, n in zip(split.stride(), whole, split.shape)):
        return None
    nodes, order = [view], tuple(range(split.dim()))
    while len(view.users) == 1:
        view = next(iter(view.users))
        moved = _moved(view, order) if lens.kind(view) in _PERMUTING and lens.is_view(view) else ()
        if moved[-1:] != (len(order) - 1,) or not free(view):
            break
        nodes.append(view)
        order = moved
    return Heads(source, nodes[-1], tuple(nodes), count, size, order)


def _moved(view: Node, order: tuple[int, ...]) -> tuple[int, ...]:
    """`order` as `view` changes it."""
    probe = torch.empty(tuple(range(2, 2 + len(order))), device="meta")  # of which all strides differ
    return tuple(order[probe.stride().index(step)] for step in Step.of(view).run(probe).stride())
