"""Results that a cat joins (the q of text and image, before one attention): their kernels write its memory.

A cat copies what the kernels have just written. Where all that a site yields goes into cats, it is written
there at once; the other parts of those cats are copied as before. Only for sizes that never vary, and
where no gradient is recorded.
"""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import torch
from torch.fx import Node

from ..cat_site import CatNode, build
from ..graph import Lens, same_shape
from ..kernels.region import dense_strides
from ..kinds import STRIDE_FREE_VIEWS
from ..select import Taken
from ..site import Decline, Site, assemble
from .rotary import joined

#: bytes of the smallest cat that is taken: below, a launch costs more than the copy
LEAST_BYTES = 1 << 20


def join_cats(lens: Lens, taken: Taken) -> None:
    """Put the cats of what taken sites yield, and those sites, into one op each; what cannot stays."""
    cats = {part: cat for cat in _cats(lens, taken) for part in cat.parts}
    if not cats:
        return
    groups = nx.Graph()
    moved: dict[Node, Site] = {}  # anchor -> the site with the views in front of the cats
    for site in taken.sites:
        written = _into_cats(lens, site, cats)
        if written is not None:
            moved[site.anchor] = written
            groups.add_edges_from((site.anchor, cats[out].node) for out in written.outputs)
    sites = {site.anchor: site for site in taken.sites}
    by_node = {cat.node: cat for cat in cats.values()}
    for group in nx.connected_components(groups):
        members = sorted(group, key=lens.position.__getitem__)
        anchors = [node for node in members if node in moved]
        site = build(lens, [moved[anchor] for anchor in anchors],
                     [by_node[node] for node in members if node in by_node])
        if not any(node in site.interior for node, _ in site.inputs):  # a cat of a cat
            taken.replace([sites[anchor] for anchor in anchors], site)


def _cats(lens: Lens, taken: Taken) -> list[CatNode]:
    found = (cat_of(lens, node) for node in lens.nodes if lens.kind(node) == "cat" and not taken.holds(node))
    return [cat for cat in found if cat is not None and _is_taken(lens, cat)]


def cat_of(lens: Lens, node: Node) -> CatNode | None:
    """The cat `node`, where kernels may write what it yields: it is contiguous, and records no gradient; its
    parts are of one dtype and device, and their sizes along its dim known and not 0."""
    parts, dim = joined(node)
    fake = lens.tensor(node)
    if fake is None or not isinstance(dim, int) or len(set(parts)) != len(parts) or not fake.dim():
        return None
    fakes = [lens.tensor(part) for part in parts]
    if any(part is None or part.dtype != fake.dtype or part.dim() != fake.dim() or
           part.device != fake.device or part.requires_grad for part in fakes):
        return None
    dim %= fake.dim()
    lengths = [part.shape[dim] for part in fakes]
    if not all(isinstance(n, int) and n > 0 for n in lengths) or \
            not same_shape(fake.stride(), dense_strides(tuple(fake.shape), range(fake.dim()))):
        return None
    if fake.requires_grad or node in lens.transformed or lens.bytes_of(node) < LEAST_BYTES:
        return None
    return CatNode(node, parts, dim)


def _is_taken(lens: Lens, cat: CatNode) -> bool:
    fakes = [lens.tensor(node) for node in (cat.node, *cat.parts)]
    sizes = [n for fake in fakes for n in (*fake.shape, *fake.stride())]
    return all(isinstance(n, int) for n in sizes) and 0 not in fakes[0].shape and \
        cat.dim != fakes[0].dim() - 1 and not lens.is_mutated(cat.node)


def _into_cats(lens: Lens, site, cats: dict[Node, CatNode]) -> Site | None:
    """`site` with all its results given as parts of cats; None where one is read in another way."""
    if type(site) is not Site or site.finish or site.axis is not None:
        return None
    ends, views = [], set()
    for out in site.outputs:
        node = out
        while node not in cats:
            users = list(node.users)
            if len(users) != 1 or not _leads_on(lens, site, users[0], node):
                return None
            views.add(users[0])
            node = users[0]
        cat = cats[node].node
        if set(node.users) != {cat} or lens.segment[cat] != lens.segment[site.anchor] or \
                not _has_lane_last(lens.tensor(node), lens.tensor(out), site.region.lane):
            return None
        ends.append(node)
    if not views:
        return site
    try:
        written = assemble(lens, site.pattern, site.norms, site.interior | views, ends,
                           composites=site.composites, expands=True)
    except Decline:
        return None
    return replace(written, parts=site.parts)


def _has_lane_last(part: torch.Tensor, out: torch.Tensor, lane: int) -> bool:
    """Whether the last dim of `part`, a view of the result `out`, is the lane; another dim may be as long."""
    return part.shape[-1] == lane and part.stride(-1) == out.stride(-1)


def _leads_on(lens: Lens, site: Site, view: Node, node: Node) -> bool:
    """Whether `view` is one of `node` alone that may be taken of what the site reads instead."""
    return lens.is_view(view) and (lens.is_identity(view) or lens.kind(view) in STRIDE_FREE_VIEWS) and \
        view.all_input_nodes == [node] and lens.segment[view] == lens.segment[site.anchor] and \
        not lens.is_mutated(view) and lens.tensor(view) is not None
