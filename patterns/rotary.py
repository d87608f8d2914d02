"""Rotary embedding: the rotation `rotate_half(q)` or `rotate_pairs(q)`, however a graph spells it.

Halves or pairs are told by where they lie in q's memory (slices, chunk, split, unbind of a reshape,
einops), and put together again by a cat or stack. The rotation is one lane op of kernels/region.py for
growth; what surrounds it (`q * cos + rotated * sin`, casts) is pointwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import Node

from ..graph import Lens, same, same_shape
from ..kernels.region import dense_strides
from ..kinds import base_name
from ..site import Composite, Term

#: devices whose compilers permute a lane element by element: there a rotation stays where it is
ELEMENTWISE = frozenset({"npu"})

#: the longest lane that is rotated: a kernel must hold all of it
MAX_LANE = 8192

#: views between a value and a half of its lane; more are not looked through
MAX_VIEWS = 8


def rotations(lens: Lens, source: Node, twins: Collection[Node] = ()) -> list[Composite]:
    """The rotations of `source` in the graph that nobody looks into. `twins` are nodes that yield
    `source` itself."""
    if not rotates(lens, source):
        return []
    roots = {source, *twins}
    found = (_rotation(lens, source, roots, end) for end in _joins(lens, roots))
    return [composite for composite in found if composite is not None]


def rotation_at(lens: Lens, end: Node) -> Composite | None:
    """The rotation that the cat or stack `end` makes of the nearest value above it that has one."""
    parts, _ = joined(end)
    return next((found for value in values_above(lens, parts[-1] if len(parts) == 2 else None)
                 if (found := _rotation(lens, value, {value}, end)) is not None), None)


def rotates(lens: Lens, value: Node) -> bool:
    """Whether a kernel can rotate the lane of `value`."""
    fake = lens.tensor(value)
    lane = fake.shape[-1] if fake is not None and fake.dim() else 0
    return isinstance(lane, int) and lane % 2 == 0 and 0 < lane <= MAX_LANE and same(fake.stride(-1), 1)


def values_above(lens: Lens, part: Node | None) -> Iterator[Node]:
    """The values that `part` may be half a lane of, nearest first."""
    for _ in range(MAX_VIEWS):
        if part is None or not lens.is_view(part):
            return
        part = part.args[0]
        if rotates(lens, part):
            yield part


def views_up(lens: Lens, node: Node, roots: Collection[Node]) -> set[Node] | None:
    """The views from `node` up to one of `roots`; None where something else is between."""
    views: set[Node] = set()
    while isinstance(node, Node) and node not in roots:
        if not lens.is_view(node):
            return None
        views.add(node)
        node = node.args[0]
    return views if views and node in roots else None


def lies(lens: Lens, part: Node, full: torch.Tensor, offset: int, step: int) -> bool:
    """Whether `part` is every `step`-th element of half the lane of `full`, from `offset` on."""
    fake, half = lens.tensor(part), full.shape[-1] // 2
    if fake is None or fake.dtype != full.dtype or not same_shape(fake.shape, (*full.shape[:-1], half)):
        return False
    strides = (*full.stride()[:-1], step)
    return same(fake.storage_offset() - full.storage_offset(), offset) and \
        all(same(a, b) or same(n, 1) for a, b, n in zip(fake.stride(), strides, fake.shape))


def _joins(lens: Lens, roots: set[Node]) -> list[Node]:
    """The cats and stacks of views of `roots` and their negatives."""
    stack, seen, ends = list(roots), set(roots), []
    while stack:
        for user in stack.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if lens.kind(user) in ("cat", "stack"):
                ends.append(user)
            elif lens.kind(user) == "neg" or lens.is_view(user):
                stack.append(user)
    return sorted(ends, key=lens.position.__getitem__)


def _rotation(lens: Lens, source: Node, roots: set[Node], end: Node) -> Composite | None:
    """The rotation that the cat or stack `end` makes of `source`: of a negated second part and a first."""
    parts, dim = joined(end)
    if len(parts) != 2 or lens.kind(parts[0]) != "neg" or not parts[0].args:
        return None
    negated, first = parts
    second = negated.args[0]
    views = [views_up(lens, part, roots) for part in (first, second)]
    full, out = lens.tensor(source), end
    nodes = {negated, end}
    rank, half = full.dim(), full.shape[-1] // 2
    if None in views:
        return None
    if lens.kind(end) == "cat" and dim in (-1, rank - 1):
        op, step, apart = "rotate_half", 1, half
    elif lens.kind(end) == "stack" and dim in (-1, rank):
        op, step, apart = "rotate_pairs", 2, 1
        out = _flat(lens, end, full)
        if out is None:
            return None
    else:
        return None
    if not lies(lens, first, full, 0, step) or not lies(lens, second, full, apart, step):
        return None
    nodes.update([out], *views)
    # `.reshape(x.shape)` of dynamic sizes
    nodes.update(arg for arg in out.all_input_nodes if base_name(arg) == "size" and arg.args[0] in roots)
    yielded = (lens.tensor(negated), lens.tensor(end), lens.tensor(out))
    if any(fake is None or fake.dtype != full.dtype for fake in yielded) or \
            not same_shape(yielded[-1].shape, full.shape):
        return None
    if any(user not in nodes for node in nodes - {out} for user in node.users):
        return None
    return Composite(Term(op, (source,)), out, frozenset(nodes))


def joined(end: Node) -> tuple[tuple, object]:
    """What a cat or stack joins, and along which dim."""
    kwargs = dict(end.kwargs)
    parts = end.args[0] if end.args else kwargs.pop("tensors", ())
    dim = end.args[1] if len(end.args) > 1 else kwargs.pop("dim", kwargs.pop("axis", 0))
    if kwargs or not isinstance(parts, (tuple, list)) or \
            not all(isinstance(part, Node) for part in parts):
        return (), None
    return tuple(parts), dim


def _flat(lens: Lens, end: Node, full) -> Node | None:
    """The view that makes one lane of a stack's last two dims."""
    if len(end.users) != 1:
        return None
    view = next(iter(end.users))
    before, after = lens.tensor(end), lens.tensor(view)
    if before is None or after is None or not lens.is_view(view):
        return None
    dense = all(same_shape(fake.stride(), dense_strides(tuple(fake.shape), range(fake.dim())))
                for fake in (before, after))
    same_memory = same(before.storage_offset(), after.storage_offset())
    return view if dense and same_memory and same_shape(after.shape, full.shape) else None
