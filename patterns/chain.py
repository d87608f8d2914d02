"""Chains: from a fused norm to the linear layers that read it, and on through what is pointwise.

    norm -> linear (one or several)
         -> bias, activation, gate, residual: anything pointwise that ends in one value
         -> linear -> ...

A linear layer is `F.linear`, `x @ w`, GPT-2's Conv1D (`addmm` on rows) or a 1x1 convolution of a
channels-last value. Whatever is none of these (dropout in training, attention, another norm) ends the
chain; of the stages found, the longest run that may move together is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import replace

from torch.fx import Node

from ..chain_site import ChainSite, Pointwise, Product, build, columns_of
from ..contract import check_kernel
from ..effects import value_of
from ..graph import Lens, same, same_shape
from ..kernels.reference import DTYPE_WORDS
from ..kinds import REGROUPING_VIEWS
from ..select import Taken
from ..site import NUMBERS, Decline, Norm, Site, Step, assemble, pointwise_args, pointwise_word

#: pointwise nodes that one region behind a product may hold
MAX_POINTWISE = 16


def extend_chains(lens: Lens, taken: Taken, differentiable: bool = True) -> None:
    """Replace taken sites by the longest chains that begin with them; others stay as they are.

    differentiable: also where gradients are recorded.
    """
    for site in taken.sites:
        if len(site.norms) != 1 or site.norms[0].out in lens.transformed:
            continue
        if not differentiable and any(lens.tensor(node).requires_grad for node in site.outputs):
            continue
        for chain in _proposals(lens, site, taken):
            if not differentiable and any(lens.tensor(node).requires_grad for node in chain.outputs):
                continue
            if taken.replace([site], chain) is None:
                break


def _proposals(lens: Lens, site: Site, taken: Taken) -> Iterator[ChainSite]:
    """The chains that begin with `site`, longest first."""
    steps: list[Product | Pointwise] = []
    ends: list[int] = []
    # A value that a regrouping follows is read in another shape than the region yields.
    frontier = [] if site.finish and site.norms[0].axis is None else list(site.outputs)
    while frontier:
        products = [p for node in frontier for p in _products(lens, site, node, taken)]
        if not products:
            break
        steps += products
        ends.append(len(steps))
        pointwise = _pointwise(lens, site, [p for p in products if not p.finish], taken)
        if pointwise is None:
            frontier = [p.out for p in products if not p.finish] if len(products) == 1 else []
            continue
        steps.append(pointwise)
        ends.append(len(steps))
        frontier = [pointwise.out]
    for end in reversed(ends):
        chain = build(lens, site, steps[:end])
        if not _saves_overwritten(lens, chain):
            yield chain


def _saves_overwritten(lens: Lens, chain: ChainSite) -> bool:
    """Whether backward would need an operand that the graph writes in place."""
    return any(lens.tensor(node).requires_grad for node in chain.outputs) and \
        any(lens.is_overwritten(node, chain.interior) for node, _ in chain.inputs)


def _free(lens: Lens, site: Site, node: Node, taken: Taken) -> bool:
    """Whether a chain of `site` may take `node` in at all."""
    return node.op in ("call_function", "call_method") and not taken.holds(node) and \
        lens.segment[node] == lens.segment[site.anchor] and node not in lens.transformed and \
        not lens.is_mutated(node)


# Products


def _products(lens: Lens, site: Site, value: Node, taken: Taken) -> list[Product]:
    """The linear layers that read `value`, itself or through an identity (dropout in eval mode) that
    nothing else reads."""
    found: list[Product] = []
    for user in value.users:
        if lens.is_identity(user) and user.args[0] is value and _free(lens, site, user, taken):
            behind = _products(lens, site, user, taken)
            if len({product.out for product in behind}) == len(user.users):
                found += [replace(p, value=value, nodes=p.nodes | {user}) for p in behind]
            continue
        matches = (match(lens, site, value, user) for match in (_linear, _matmul, _rows, _convolution))
        product = next((p for p in matches if p is not None), None)
        if product is not None and all(_free(lens, site, node, taken) for node in product.nodes) and \
                _plain_product(lens, product):
            found.append(product)
    return found


def _plain_product(lens: Lens, product: Product) -> bool:
    """Whether all is of one dtype on one device, so that the product is what torch's `linear` computes
    (autocast casts first), and the weight is a plain matrix."""
    value, out = lens.tensor(product.value), lens.tensor(product.out)
    operands = [lens.tensor(node) for node, _ in filter(None, (product.weight, product.bias))]
    if out is None or None in operands or out.dtype not in DTYPE_WORDS:
        return False
    return all(t.dtype == value.dtype and t.device == value.device for t in (*operands, out)) and \
        isinstance(operands[0].shape[0], int) and value.dim() > 1


def _argument(node: Node, position: int, name: str):
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _operand(arg) -> tuple[Node, tuple[Step, ...]] | None:
    return (arg, ()) if isinstance(arg, Node) else None


def _linear(lens: Lens, site: Site, value: Node, node: Node) -> Product | None:
    if lens.kind(node) != "linear" or _argument(node, 0, "input") is not value or site.finish:
        return None
    weight, bias = _operand(_argument(node, 1, "weight")), _operand(_argument(node, 2, "bias"))
    if weight is None or lens.tensor(weight[0]) is None or lens.tensor(weight[0]).dim() != 2:
        return None
    return Product(value, weight, bias, False, node, frozenset([node]))


def _matmul(lens: Lens, site: Site, value: Node, node: Node) -> Product | None:
    if lens.kind(node) != "matmul" or len(node.args) != 2 or node.args[0] is not value or node.kwargs or \
            site.finish:
        return None
    weight = _operand(node.args[1])
    if weight is None or lens.tensor(weight[0]) is None or lens.tensor(weight[0]).dim() != 2:
        return None
    return Product(value, weight, None, True, node, frozenset([node]))


def _rows(lens: Lens, site: Site, value: Node, view: Node) -> Product | None:
    """`addmm(bias, value.view(-1, K), weight).view(..., N)`."""
    rows, whole = lens.tensor(view), lens.tensor(value)
    if lens.kind(view) not in REGROUPING_VIEWS or len(view.users) != 1 or rows is None or \
            rows.dim() != 2 or not same(rows.shape[-1], whole.shape[-1]) or site.finish:
        return None
    product, = view.users
    if lens.kind(product) != "addmm" or len(product.args) != 3 or product.args[1] is not view or \
            product.kwargs or len(product.users) != 1:
        return None
    back, = product.users
    fake = lens.tensor(back)
    if lens.kind(back) not in REGROUPING_VIEWS or back.args[0] is not product or fake is None or \
            not same_shape(fake.shape[:-1], whole.shape[:-1]):
        return None
    bias, weight = _operand(product.args[0]), _operand(product.args[2])
    if weight is None or bias is None or lens.tensor(bias[0]).dim() != 1:
        return None
    return Product(value, weight, bias, True, back, frozenset([view, product, back]))


def _convolution(lens: Lens, site: Site, value: Node, node: Node) -> Product | None:
    """A 1x1 convolution of a channels-last value, or of one whose channels a view moves to the front: the
    product over its channels."""
    view = None
    if site.norms[0].axis not in (1, -3):
        if not _to_channels_first(lens, value, node):
            return None
        view, (node,) = node, node.users
    read = value if view is None else view
    if lens.kind(node) != "conv2d" or _argument(node, 0, "input") is not read:
        return None
    weight, bias = _operand(_argument(node, 1, "weight")), _operand(_argument(node, 2, "bias"))
    fake, out = lens.tensor(weight[0] if weight else None), lens.tensor(node)
    plain = [_argument(node, i, name) for i, name in
             ((3, "stride"), (4, "padding"), (5, "dilation"), (6, "groups"))]
    if fake is None or out is None or fake.dim() != 4 or not same_shape(fake.shape[2:], (1, 1)) or \
            any(got is not None and _pair(got) != wanted
                for got, wanted in zip(plain, ((1, 1), (0, 0), (1, 1), (1, 1)))):
        return None
    if not same(out.stride(1), 1) or not same_shape(out.shape[2:], lens.tensor(read).shape[2:]):
        return None
    return Product(value, (weight[0], (Step.method("flatten", 1),)), bias, False, node,
                   frozenset([node] if view is None else [view, node]), (Step.method("movedim", -1, 1),))


def _to_channels_first(lens: Lens, value: Node, view: Node) -> bool:
    """Whether `view`, which has one reader, is `value` (N, H, W, C) as (N, C, H, W)."""
    whole, fake = lens.tensor(value), lens.tensor(view)
    if fake is None or whole.dim() != 4 or fake.dim() != 4 or len(view.users) != 1 or \
            not lens.is_view(view):
        return False
    return all(same_shape([of[i] for i in (0, 3, 1, 2)], got)
               for of, got in ((whole.shape, fake.shape), (whole.stride(), fake.stride())))


def _pair(value) -> tuple:
    return tuple(value) * (2 // len(value)) if isinstance(value, (tuple, list)) else (value, value)


# What is pointwise behind products


def _pointwise(lens: Lens, site: Site, products: list[Product], taken: Taken) -> Pointwise | None:
    """The largest set of pointwise nodes behind `products` that takes in all of their readers and ends
    in one value."""
    sources = [product.out for product in products]
    if not sources or any(lens.is_mutated(source) for source in sources):
        return None
    members: dict[Node, None] = {}  # in order
    parts: dict[Node, tuple[Node, int, int]] = {}
    queue = [(lens.position[user], user) for source in sources for user in source.users]
    heapq.heapify(queue)
    best, space, seen = None, None, set()
    while queue and len(members) < MAX_POINTWISE:
        _, node = heapq.heappop(queue)
        if node in seen or not _free(lens, site, node, taken):
            continue
        seen.add(node)
        if not _is_part(lens, node, sources, members, parts):
            if not _fits(lens, node, space, (*sources, *members)):
                continue
            space = lens.tensor(node).shape
        members[node] = None
        for user in node.users:
            heapq.heappush(queue, (lens.position[user], user))
        leaf = _leaf(members, parts, sources)
        if leaf is not None and leaf not in parts and lens.tensor(leaf) is not None and \
                not lens.is_view(leaf):
            best = (leaf, frozenset(members))
    return best and _assembled(lens, site, *best, parts)


def _is_part(lens: Lens, node: Node, sources: list[Node], members: Collection[Node], parts: dict) -> bool:
    """Whether `node` is columns of a product (or a tuple of such); notes which."""
    if not lens.is_view(node) or lens.is_identity(node):
        return False
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return node.args[0] in sources
    source = next((s for s in sources if node.args[0] is s or (
        node.args[0] in members and node.args[0].args[:1] == (s,))), None)
    columns = columns_of(value, lens.tensor(source)) if source is not None else None
    if columns is None:
        return False
    parts[node] = (source, *columns)
    return True


def _fits(lens: Lens, node: Node, space, chain: Collection[Node]) -> bool:
    """Whether a region over `space` (None: not known yet) may compute `node`."""
    fake = lens.tensor(node)
    if fake is None or fake.dtype not in DTYPE_WORDS or not fake.dim() or \
            (space is not None and not same_shape(fake.shape, space)):
        return False
    word = lens.kind(node)
    if word in ("to", "copy") or lens.is_identity(node):
        return node.args[0] in chain
    if lens.is_view(node) or pointwise_word(lens, node) is None:
        return False
    for arg in pointwise_args(lens, node):
        other = lens.tensor(arg)
        if other is None:
            number = isinstance(arg, (int, float)) and not isinstance(arg, bool)
            if not number and not (isinstance(arg, Node) and isinstance(value_of(arg), NUMBERS)):
                return False
        elif other.dtype not in DTYPE_WORDS or other.device != fake.device or (
                other.dim() and not (same(other.shape[-1], 1) or other.stride(-1) in (0, 1))):
            return False
    return True


def _leaf(members: Collection[Node], parts: dict, sources: list[Node]) -> Node | None:
    """The one node that others read, when nobody outside reads any other or a product."""
    if any(user not in members for source in sources for user in source.users):
        return None
    leaves = [node for node in members if any(user not in members for user in node.users)]
    return leaves[0] if len(leaves) == 1 else None


def _assembled(lens: Lens, site: Site, leaf: Node, nodes: frozenset[Node], parts: dict) -> Pointwise | None:
    fake = lens.tensor(leaf)
    lane = fake.shape[-1]
    if not isinstance(lane, int):
        return None
    space = Norm("", leaf, None, None, 0.0, (lane,), leaf, frozenset(), fake.dtype, "")
    columns = {node for node in nodes if node in parts or isinstance(value_of(node), (tuple, list))}
    try:
        region = assemble(lens, "pointwise", (space,), nodes - columns, (leaf,))
        check_kernel(region)
    except Decline:
        return None
    if any(views for _, views in region.inputs):
        return None
    read = {node for node, _ in region.inputs}
    return Pointwise(region, leaf, nodes, {n: p for n, p in parts.items() if n in read})
