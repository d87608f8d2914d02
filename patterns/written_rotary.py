"""Rotary embedding written into a buffer: diffusers' Wan.

    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos

x1 and x2 are the even and odd elements of x; cos and sin the even or odd ones of tables with an element for
each of x. The buffer must be these two writes' own. Then it is, bit for bit, `x * c + rotate_pairs(x) * s`,
where c and s have the elements of cos and sin twice: a difference is the sum with the negative, and a sum has
no order.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from ..graph import Lens, same_shape
from ..kinds import base_name
from ..site import Composite, Term, pointwise_args, pointwise_word
from .rotary import lies, rotates, values_above, views_up


def written_rotation(lens: Lens, buffer: Node) -> Composite | None:
    """The rotary embedding that is all that is written into `buffer`."""
    if base_name(buffer) not in ("empty_like", "zeros_like") or not rotates(lens, buffer) or \
            not buffer.kwargs.keys() <= {"dtype", "device", "layout", "memory_format"}:
        return None
    writes = _writes(lens, buffer)
    if writes is None:
        return None
    even, odd = (writes[part].args[2] for part in (0, 1))
    if not _is(lens, "sub", even) or not _is(lens, "add", odd):
        return None
    products = (*pointwise_args(lens, even), *odd.args)
    inner = {even, odd, *products}
    if not all(_is(lens, "mul", node) for node in products) or \
            any(user not in inner and user not in writes.values() for node in inner for user in node.users):
        return None
    sources = (value for arg in products[0].args for value in values_above(lens, arg))
    terms = (_embedding(lens, buffer, source, products, (even, odd)) for source in sources)
    term = next((term for term in terms if term is not None), None)
    if term is None:
        return None
    nodes = _with_views(lens, {buffer, *inner, *writes.values()}, products, term.values)
    return Composite(term, buffer, frozenset(nodes))


def written_below(lens: Lens, value: Node) -> list[Composite]:
    """The rotary embeddings of `value` that are written into buffers like it."""
    found = (written_rotation(lens, user) for user in value.users)
    return [composite for composite in found if composite is not None and value in composite.term.values and
            not any(map(lens.is_mutated, composite.term.values))]


def _is(lens: Lens, word: str, node) -> bool:
    return isinstance(node, Node) and lens.tensor(node) is not None and pointwise_word(lens, node) == word


def _writes(lens: Lens, buffer: Node) -> dict[int, Node] | None:
    """0 and 1 -> the write of the even and of the odd elements; None unless these are all writes to
    `buffer`, and nobody looks at it before."""
    writes: dict[int, Node] = {}
    readers: list[Node] = []
    for user in buffer.users:
        part = _part_written(lens, user, buffer)
        if part is None:
            readers.append(user)
        elif part in writes:
            return None
        else:
            writes[part] = user
    if len(writes) != 2:
        return None
    written = max(map(lens.position.__getitem__, writes.values()))
    seen = set(readers)
    for reader in readers:  # which grows on the way
        if lens.position[reader] < written or \
                not lens.effects[reader].writes.isdisjoint(lens.storages(buffer)):
            return None
        aliases = [] if lens.storages(reader).isdisjoint(lens.storages(buffer)) else reader.users
        readers += [user for user in aliases if user not in seen]
        seen.update(aliases)
    return writes


def _part_written(lens: Lens, node: Node, buffer: Node) -> int | None:
    """0 or 1 where `node` is `buffer[..., 0::2] = value` or `buffer[..., 1::2] = value`."""
    if base_name(node) != "setitem" or len(node.args) != 3 or node.args[0] is not buffer or node.users:
        return None
    index, rank = node.args[1], lens.tensor(buffer).dim()
    if not isinstance(index, tuple) or not (Ellipsis in index[:-1] or len(index) == rank):
        return None
    *rest, last = index
    if not all(at is Ellipsis or at == slice(None) for at in rest):
        return None
    spelled = {0: (slice(None, None, 2), slice(0, None, 2)), 1: (slice(1, None, 2),)}
    return next((part for part, slices in spelled.items() if last in slices), None)


def _embedding(lens: Lens, buffer: Node, source: Node, products: tuple[Node, ...],
               sums: tuple[Node, Node]) -> Term | None:
    """What is written, where `products` are x1 * cos, x2 * sin, x1 * sin and x2 * cos of `source`, the last
    two in either order, and `sums` what is made of them."""
    full, out = lens.tensor(source), lens.tensor(buffer)
    factors = [_factors(lens, product, source) for product in products]
    if None in factors or not same_shape(full.shape, out.shape):
        return None
    (first, cos), (second, sin) = factors[:2]
    dtypes = {lens.tensor(node).dtype for node in (*products, *sums)}
    if (first, second) != (0, 1) or dict(factors[2:]) != {0: sin, 1: cos} or len(dtypes) != 1:
        return None
    dtype, = dtypes
    term = Term("add", (Term("mul", (source, cos), dtype),
                        Term("mul", (Term("rotate_pairs", (source,)), sin), dtype)), dtype)
    return term if out.dtype == dtype else Term("cast", (term,), out.dtype)


def _factors(lens: Lens, product: Node, source: Node) -> tuple[int, Term] | None:
    """(0 for the even elements of `source`, 1 for the odd ones; what they are multiplied by, with each of its
    elements twice)."""
    full = lens.tensor(source)
    for part, table in (product.args, product.args[::-1]):
        if isinstance(part, Node) and isinstance(table, Node) and views_up(lens, part, {source}) is not None:
            spread = _spread(lens, table, full.shape[-1])
            return next(((half, spread) for half in (0, 1)
                         if spread is not None and lies(lens, part, full, half, 2)), None)
    return None


def _spread(lens: Lens, table: Node, lane: int) -> Term | None:
    """`table`, every other element of a lane, with each of them twice."""
    for value in values_above(lens, table):
        full = lens.tensor(value)
        for half, op in enumerate(("repeat_even", "repeat_odd")):
            if full.shape[-1] == lane and lies(lens, table, full, half, 2):
                return Term(op, (value,))
    return None


def _with_views(lens: Lens, nodes: set[Node], products: Collection[Node],
                values: Collection[Node]) -> set[Node]:
    """`nodes`, and the views between `values` and `products` that nobody else reads."""
    views: set[Node] = set()
    for node in (arg for product in products for arg in product.args):
        while node not in values and lens.is_view(node):
            views.add(node)
            node = node.args[0]
    for view in sorted(views, key=lens.position.__getitem__, reverse=True):
        if nodes.issuperset(view.users):
            nodes.add(view)
    return nodes
