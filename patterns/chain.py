"""Chains: from a fused norm to the linear layers that read it, and on through what is pointwise.

    norm -> linear (one or several)
         -> bias, activation, gate, residual: anything pointwise that ends in one value
         -> linear -> ...

A linear layer is `F.linear`, `x @ w`, GPT-2's Conv1D (`addmm` on rows), or a convolution of a channels-last
value over one pixel or over patches that do not overlap. Two of them may be q and k of an attention score,
which ends the chain with its scale and mask. Whatever is none of these (dropout in training, softmax, another
norm) ends the chain; of the stages found, the longest run that may move together is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from ..chain_site import ChainSite, Pointwise, Product, Score, build, columns_of
from ..contract import check_kernel
from ..effects import value_of
from ..graph import Lens, same, same_shape
from ..kernels.chain import is_additive
from ..kernels.reference import DTYPE_WORDS
from ..select import Taken
from ..site import (
    NUMBERS,
    Decline,
    Norm,
    Site,
    Step,
    assemble,
    pointwise_args,
    pointwise_word,
    replay,
)
from .chain_products import is_free, products_of, score_of

#: pointwise nodes that one region behind a product may hold
MAX_POINTWISE = 16


def extend_chains(lens: Lens, taken: Taken, differentiable: bool = True) -> dict[Node, Decline]:
    """Replace taken sites by the longest chains that begin with them; others stay as they are.

    differentiable: also where gradients are recorded.

    Returns:
        For sites that products read and that stay as they are, their anchors: why.
    """
    alone: dict[Node, Decline] = {}
    for site in taken.sites:
        if site.norms[0].out in lens.transformed:
            continue
        if len(site.norms) != 1:
            alone |= {part.anchor: Decline("norms that share a launch begin none", part.anchor)
                      for part in site.parts
                      if any(_is_read(lens, part, node, taken) for node in part.outputs)}
            continue
        refused: list[Decline] = []
        for chain in _proposals(lens, site, taken, refused):
            if not differentiable and any(lens.tensor(node).requires_grad for part in (site, chain)
                                          for node in part.outputs):
                refusal = Decline('gradients are recorded, and inner is not "eager"', site.anchor)
            else:
                refusal = taken.replace([site], chain)
            if refusal is None:
                break
            refused.append(refusal)
        else:
            if refused:
                alone[site.anchor] = refused[-1]  # of the shortest, which needs least
    return alone


def _proposals(lens: Lens, site: Site, taken: Taken, refused: list[Decline]) -> Iterator[ChainSite]:
    """The chains that begin with `site`, longest first. `refused`: why others do not is added to it."""
    steps: list[Product | Score | Pointwise] = []
    ends: list[int] = []
    first = site.axis is not None
    frontier = _readable(lens, site, taken, refused)
    while frontier:
        products = [p for node in frontier for p in products_of(lens, site, node, first, taken, refused)]
        if not products:
            break
        steps += products
        ends.append(len(steps))
        first = bool(products[0].finish)
        behind = _behind(lens, site, products, first, taken)
        if not behind:
            frontier = [p.out for p in products] if len(products) == 1 else []
            continue
        for step in behind:
            steps.append(step)
            ends.append(len(steps))
        scored = any(isinstance(step, Score) for step in behind)
        frontier = [] if scored else [step.out for step in behind]
    for end in reversed(ends):
        try:
            chain = build(lens, site, steps[:end])
        except Decline as decline:
            refused.append(decline)
            continue
        if _saves_overwritten(lens, chain):
            refused.append(Decline("an operand is written in place, and backward needs what it was",
                                   site.anchor))
        else:
            yield chain


def _readable(lens: Lens, site: Site, taken: Taken, refused: list[Decline]) -> list[Node]:
    """The outputs of `site` that products of a chain may read. Where others do, `refused` gets the reason."""
    known = _has_layout(lens, site)
    readable = _with_features_innermost(site) if known else []
    node = next((n for n in site.outputs if n not in readable and _is_read(lens, site, n, taken)), None)
    if node is not None and known:
        refused.append(Decline("the features of the norm's result are not the innermost in memory", node))
    elif node is not None:
        refused.append(Decline("the norm's result is reshaped behind its kernel", node))
    return readable


def _is_read(lens: Lens, site: Site, node: Node, taken: Taken) -> bool:
    """Whether products read the output `node` of `site`, in whatever layout."""
    refused: list[Decline] = []
    return bool(products_of(lens, site, node, site.axis is not None, taken, refused) or refused)


def _has_layout(lens: Lens, site: Site) -> bool:
    """Whether the values of `site` are in a layout of patterns/chain_products.py. (One that a regrouping
    follows is read in another shape than the region yields.)"""
    axis = site.axis
    return not site.finish if axis is None else axis in (1, -3) and lens.tensor(site.outputs[0]).dim() == 4


def _with_features_innermost(site: Site) -> list[Node]:
    """The outputs whose features are innermost in memory, as products read them."""
    last = site.region.outer
    return [node for node, out in zip(site.outputs, site.region.outputs) if out.order[-1] == last]


def _behind(lens: Lens, site: Site, products: list[Product], first: bool,
            taken: Taken) -> list[Pointwise | Score]:
    """What follows `products`: what is pointwise behind all of them; or what is pointwise behind single ones
    (an activation, where q, k and v are made of the same norm), the score of two of them, and what is
    pointwise behind that."""
    if any(bool(p.finish) != first for p in products):
        return []
    pointwise = _pointwise(lens, site, products, first, taken)
    if pointwise is not None:
        return [pointwise]
    # (behind the one product there is, that has just been looked for)
    each = [(product, own) for product in products if len(products) > 1 and
            (own := _pointwise(lens, site, [product], first, taken)) is not None]
    scaled = [own for _, own in each]
    score = None if first else score_of(lens, site, [*products, *scaled], taken)
    others = _apart(each, lambda group: _pointwise(lens, site, group, first, taken), lens.position)
    if score is None or (lens.tensor(score.out).requires_grad and not _spares_memory(lens, score)):
        return others
    found = [own for own in scaled if own.out in (score.query[0], score.key[0])]
    found += [own for own in others if not any(own.nodes & operand.nodes for operand in found)]
    last = _pointwise(lens, site, [score], False, taken)
    # A score has a row of keys for each query: in training it is kept for nobody.
    kept = last is not None and lens.tensor(score.out).requires_grad and not is_additive(last.site.region)
    return [*found, score, *([] if last is None or kept else [last])]


def _apart(each: Sequence[tuple[Product, Pointwise]], behind: Callable[[list[Product]], Pointwise | None],
           position: Mapping[Node, int]) -> list[Pointwise]:
    """What is pointwise behind single products, in order: gelu of fc1, where q, k and v are made of the same
    norm. Two that share a node are one, `behind` both of their products: gate and up. Casts alone stay: who
    reads them may take them in."""
    groups: list[tuple[list[Product], Pointwise]] = []
    for product, own in each:
        group = [product]
        while own is not None and (other := next((g for g in groups if g[1].nodes & own.nodes), None)):
            groups.remove(other)
            group += other[0]
            own = behind(group)
        if own is not None:
            groups.append((group, own))
    found = [own for _, own in groups if any(line.op != "cast" for line in own.site.region.body)]
    return sorted(found, key=lambda own: position[own.out])


def _saves_overwritten(lens: Lens, chain: ChainSite) -> bool:
    """Whether backward would need an operand that the graph writes in place."""
    return any(lens.tensor(node).requires_grad for node in chain.outputs) and \
        any(lens.is_overwritten(node, chain.interior) for node, _ in chain.inputs)


# What is pointwise behind products


def _spares_memory(lens: Lens, score: Score) -> bool:
    """Whether a training step with the score in the chain needs no more memory than eager's. Backward copies
    q and k once more, beside the score's gradient, which must be the larger; and of a packed qkv it would
    make the gradient twice, once for v."""
    sizes = [lens.tensor(node).shape for node in (score.out, score.query[0])]
    return score.query[0] is not score.key[0] and \
        all(isinstance(n, int) for shape in sizes for n in shape) and \
        math.prod(sizes[0]) >= 2 * math.prod(sizes[1])


def _pointwise(lens: Lens, site: Site, products: Sequence[Product | Score], first: bool,
               taken: Taken) -> Pointwise | None:
    """The largest set of pointwise nodes behind `products` that takes in all of their readers and ends
    in one value. `first`: as in patterns/chain_products.py."""
    sources = [product.out for product in products]
    if not sources or any(lens.is_mutated(source) for source in sources):
        return None
    axis = 1 if first else None
    members: dict[Node, None] = {}  # in order
    parts: dict[Node, tuple[Node, int, int]] = {}
    queue = [(lens.position[user], user) for source in sources for user in source.users]
    heapq.heapify(queue)
    best, space, seen = None, None, set()
    while queue and len(members) < MAX_POINTWISE:
        _, node = heapq.heappop(queue)
        if node in seen or not is_free(lens, site, node, taken):
            continue
        seen.add(node)
        if not _is_part(lens, node, sources, members, parts, axis):
            if not _fits(lens, node, space, (*sources, *members), axis):
                continue
            space = lens.tensor(node).shape
        members[node] = None
        for user in node.users:
            heapq.heappush(queue, (lens.position[user], user))
        leaf = _leaf(members, parts, sources)
        if leaf is not None and leaf not in parts and lens.tensor(leaf) is not None and \
                not lens.is_view(leaf):
            best = (leaf, frozenset(members))
    return best and _assembled(lens, *best, {*sources, *parts}, parts, axis)


def _is_part(lens: Lens, node: Node, sources: list[Node], members: Collection[Node], parts: dict,
             axis: int | None) -> bool:
    """Whether `node` is columns of a product (or a tuple of such); notes which."""
    if not lens.is_view(node) or lens.is_identity(node):
        return False
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return node.args[0] in sources
    source = next((s for s in sources if node.args[0] is s or (
        node.args[0] in members and node.args[0].args[:1] == (s,))), None)
    if source is None or value is None:
        return False
    columns = columns_of(*(replay(fake, _to_end(axis)) for fake in (value, lens.tensor(source))))
    if columns is None:
        return False
    parts[node] = (source, *columns)
    return True


def _to_end(axis: int | None) -> tuple[Step, ...]:
    """The features moved to the end."""
    return () if axis is None else (Step.method("movedim", axis, -1),)


def _fits(lens: Lens, node: Node, space, chain: Collection[Node], axis: int | None) -> bool:
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
        elif other.dtype not in DTYPE_WORDS or other.device != fake.device or \
                not _lies_well(other, -1 if axis is None else axis - fake.dim()):
            return False
    return True


def _lies_well(operand: torch.Tensor, lane: int) -> bool:
    """Whether the dim `lane` of an operand (counted from the end) is broadcast or innermost in memory."""
    return operand.dim() < -lane or same(operand.shape[lane], 1) or operand.stride(lane) in (0, 1)


def _leaf(members: Collection[Node], parts: dict, sources: list[Node]) -> Node | None:
    """The one node that others read, when nobody outside reads any other or a product."""
    if any(user not in members for source in sources for user in source.users):
        return None
    leaves = [node for node in members if any(user not in members for user in node.users)]
    return leaves[0] if len(leaves) == 1 else None


def _assembled(lens: Lens, leaf: Node, nodes: frozenset[Node], chain: Collection[Node], parts: dict,
               axis: int | None) -> Pointwise | None:
    """`chain`: the nodes that are values of the chain, as it has them, or columns of one."""
    fake = lens.tensor(leaf)
    lane = fake.shape[-1 if axis is None else axis]
    if not isinstance(lane, int):
        return None
    space = Norm("", leaf, None, None, 0.0, (lane,), leaf, frozenset(), fake.dtype, "", axis)
    columns = {node for node in nodes if node in parts or isinstance(value_of(node), (tuple, list))}
    try:
        region = assemble(lens, "pointwise", (space,), nodes - columns, (leaf,))
        check_kernel(lens, region)
    except Decline:
        return None
    if not _with_features_innermost(region):
        return None
    moved = len(_to_end(axis))
    if any(len(views) != moved for node, views in region.inputs if node in chain or not moved):
        return None
    read = {node for node, _ in region.inputs}
    return Pointwise(region, leaf, nodes, {n: p for n, p in parts.items() if n in read})
