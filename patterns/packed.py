"""Norms that read common memory, in one launch: the q and k of an attention.

Two taken sites join when their norms are of one kind over spaces of one shape, and their values lie in
the same memory: a packed qkv. So do two that took a rotary embedding along below a norm over all heads, with
tables in common. What each had grown stays with it.
"""

from __future__ import annotations

from collections import defaultdict

from torch.fx import Node

from ..effects import storage_key
from ..graph import Lens, same_shape
from ..kinds import REGROUPING_VIEWS
from ..select import Taken
from ..site import Decline, Site, assemble
from .grow import MAX_OPERANDS, Grown
from .naming import pattern_name


def join_packed(lens: Lens, taken: Taken) -> None:
    """Join the taken sites that can share a launch; those that cannot stay as they are."""
    groups: dict = defaultdict(list)
    for site in taken.sites:
        if len(site.norms) == 1 and (site.heads or not site.finish):
            groups[_key(lens, site)].append(site)
    for sites in groups.values():
        first = sites[0]
        for other in sites[1:]:
            joined = _joined(lens, first, other)
            if joined is None or taken.replace([first, other], joined) is not None:
                first = other
            else:
                first = joined


def _key(lens: Lens, site: Site) -> tuple:
    norm = site.norms[0]
    heads = tuple(each.key for each in site.heads)
    return (norm.op, norm.shape, norm.dtype, lens.segment[norm.out], heads,
            _tables(site) or _packed(lens, norm.value))


def _tables(site: Site) -> tuple:
    """What `site` reads that is the same for all heads."""
    return tuple((node, *(step.key for step in steps))
                 for x, (node, steps) in zip(site.region.inputs, site.inputs) if site.region.is_shared(x))


def _packed(lens: Lens, node: Node):
    """The memory that `node` is a part of, seen through views, casts and copies."""
    while node.args and isinstance(node.args[0], Node) and lens.kind(node) is not None and (
            lens.is_view(node) or lens.kind(node) in {"to", "copy"} | REGROUPING_VIEWS):
        node = node.args[0]
    fake = lens.tensor(node)
    return node.name if fake is None else storage_key(fake)


def _joined(lens: Lens, first: Site, other: Site) -> Site | None:
    norms = (*first.norms, *other.norms)
    spaces = [lens.tensor(norm.value).shape for norm in norms]
    if not all(same_shape(space, spaces[0]) for space in spaces):
        return None
    if len({node for node, _ in (*first.inputs, *other.inputs)}) > MAX_OPERANDS:
        return None
    interior = first.interior | other.interior
    outputs = (*first.outputs, *other.outputs)
    if len(set(outputs)) != len(outputs) or len(outputs) > 4:
        return None
    composites = (*first.composites, *other.composites)
    heads = (*first.heads, *other.heads)
    name = pattern_name(lens, norms, Grown(interior, outputs, None, composites, heads))
    try:
        site = assemble(lens, name, norms, interior, outputs, composites=composites, heads=heads)
    except Decline:
        return None
    site.parts = (*(first.parts or (first,)), *(other.parts or (other,)))
    return site
