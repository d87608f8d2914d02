"""Rotary embeddings that stand below no norm: sites of their own.

    q = cat([norm(text), norm(image)]), then the rotation (FLUX); q of a linear layer (Llama)

A site grows from the rotation as one grows from a norm, and has to reach the value that the rotated one is
added to. Two of one shape with common tables, q and k, share a launch. They are for inner compilers that run
each op as it is written; others fuse these themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from torch.fx import Node

from ..contract import check_kernel
from ..graph import Lens, module_path
from ..kernels.region import NormRegion
from ..kernels.values import ancestors
from ..kinds import base_name
from ..select import Taken
from ..site import Composite, Decline, Norm, Site, assemble
from .grow import MAX_OPERANDS, Grower, Grown, Reach
from .rotary import ELEMENTWISE, rotation_at
from .written_rotary import written_rotation

PATTERN = "rotary"

_REACHES = (Reach("rotary", True, False, True, True, False),
            Reach("rotary, nothing pointwise above", False, False, True, True, False))


def take_rotary(lens: Lens, taken: Taken, claimed: Collection[Node] = (),
                no_grad: bool = False) -> list[Site]:
    """Add to `taken` the rotary embeddings of the graph that no site has yet, and say which.

    claimed: nodes of norms, which these sites keep out of. no_grad: nor do they record gradients.
    """
    held = set(claimed).union(*(site.interior for site in taken.sites))
    found: list[Site] = []
    for composite in _composites(lens):
        site = None if held & composite.nodes else _site(lens, composite, held, no_grad)
        # One that nobody reads would only bring its operands into the backward pass of another in its launch.
        if site is not None and any(node.users for node in site.outputs) and taken.add(site) is None:
            found.append(site)
            held |= site.interior
    return _share_launches(lens, taken, found)


def _composites(lens: Lens) -> Iterator[Composite]:
    for node in lens.nodes:
        if lens.kind(node) in ("cat", "stack"):
            composite = rotation_at(lens, node)
        elif base_name(node) in ("empty_like", "zeros_like"):
            composite = written_rotation(lens, node)
        else:
            continue
        if composite is not None and lens.tensor(composite.out).device.type not in ELEMENTWISE and \
                len({lens.segment[part] for part in composite.nodes}) == 1 and \
                lens.transformed.isdisjoint(composite.nodes) and \
                not any(map(lens.is_mutated, composite.term.values)):
            yield composite


def _site(lens: Lens, composite: Composite, held: Collection[Node], no_grad: bool) -> Site | None:
    """The site that grows from `composite`; None where that is no rotary embedding, or none for a kernel."""
    for reach in _REACHES:
        grown = _Grower(lens, composite, reach, held).run()
        space = _space(lens, composite, grown.outputs[0], frozenset())
        try:
            site = assemble(lens, PATTERN, (space,), grown.interior, grown.outputs,
                            composites=grown.composites)
            check_kernel(lens, site)
        except Decline:
            continue
        recorded = any(lens.tensor(node).requires_grad for node in grown.outputs)
        if not _embeds(site.region) or recorded and (
                no_grad or any(lens.is_overwritten(node) for node, _ in site.inputs)):
            return None
        return site
    return None


def _space(lens: Lens, composite: Composite, out: Node, interior: frozenset[Node]) -> Norm:
    """The iteration space of a site without a norm that yields `out`."""
    lane = lens.tensor(composite.term.values[0]).shape[-1]
    return Norm("", out, None, None, 0.0, (lane,), out, interior, lens.tensor(out).dtype, "")


class _Grower(Grower):
    """Grows a rotation: down from it, and up from all that the grown site reads."""

    def __init__(self, lens: Lens, composite: Composite, reach: Reach, held: Collection[Node]):
        super().__init__(lens, (_space(lens, composite, composite.out, composite.nodes),), reach, held)
        self.composites = [composite]
        #: the value as it was is the other side of the embedding
        values = set(composite.term.values)
        self.below |= values | {user for value in values for user in value.users if lens.kind(user) == "to"}

    def run(self) -> Grown:
        composite = self.composites[0]
        outputs = self._down(composite.out)
        for value in composite.term.values:
            self._up(value)
        return Grown(frozenset(self.interior), tuple(outputs), None, (composite,))

    def _passes_view(self, view: Node, node: Node) -> bool:
        return False  # a view cannot be taken of tables that broadcast, as most do


def _embeds(region: NormRegion) -> bool:
    """Whether some line brings a rotated value together with the value as it was."""
    tensors, inputs = region.dtype_of, {x.name for x in region.inputs}
    turns = [(line.name, inputs & ancestors(region, line.args)) for line in region.body
             if line.op in ("rotate_half", "rotate_pairs")]
    for line in region.body:
        sides = [ancestors(region, [arg]) for arg in line.args if arg in tensors]
        for name, read in turns:
            if any(name in one and name not in other and read & other for one in sides for other in sides):
                return True
    return False


def _share_launches(lens: Lens, taken: Taken, sites: Sequence[Site]) -> list[Site]:
    """`sites`, two of a module in one where they are of one shape and read common tables: q and k."""
    groups: dict = defaultdict(list)
    for site in sites:
        shape = tuple(lens.tensor(site.anchor).shape)
        groups[lens.segment[site.anchor], module_path(site.anchor), str(shape)].append(site)
    shared: list[Site] = []
    for group in groups.values():
        waiting: Site | None = None
        for site in group:
            joined = _joined(lens, waiting, site) if waiting is not None else None
            if joined is not None and taken.replace([waiting, site], joined) is None:
                shared.append(joined)
                waiting = None
                continue
            shared += [] if waiting is None else [waiting]
            waiting = site
        shared += [] if waiting is None else [waiting]
    return sorted(shared, key=lambda site: lens.position[site.anchor])


def _joined(lens: Lens, first: Site, other: Site) -> Site | None:
    """Both in one launch, where that reads less than two."""
    try:
        site = assemble(lens, PATTERN, (*first.norms, *other.norms), first.interior | other.interior,
                        (*first.outputs, *other.outputs), composites=(*first.composites, *other.composites))
        check_kernel(lens, site)
    except Decline:
        return None
    if not len(site.inputs) < len(first.inputs) + len(other.inputs) or len(site.inputs) > MAX_OPERANDS:
        return None
    site.parts = (first, other)
    return site
