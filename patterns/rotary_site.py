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
from ..rules import rules_of
from ..select import Taken
from ..site import Composite, Decline, Norm, Site, assemble, pointwise_word
from .grow import MAX_OPERANDS, Grower, Grown, Reach
from .rotary import ELEMENTWISE, rotation_at
from .written_rotary import written_rotation

PATTERN = "rotary"

#: lane ops of kernels/region.py that turn a value
ROTATIONS = ("rotate_half", "rotate_pairs")

_REACHES = (Reach("rotary", True, False, True, True, False),
            Reach("rotary, nothing pointwise above", False, False, True, True, False))


def take_rotary(lens: Lens, taken: Taken, claimed: Collection[Node] = (),
                no_grad: bool = False) -> tuple[list[Site], list[tuple[Node, Decline]]]:
    """Add to `taken` the rotary embeddings of the graph that no site has yet.

    claimed: nodes of norms, which these sites keep out of. no_grad: nor do they record gradients.

    Returns:
        The sites taken; and of the embeddings that are left alone, the last node of the rotation, and why.
    """
    held = set(claimed).union(*(site.interior for site in taken.sites))
    found: list[Site] = []
    refused: list[tuple[Node, Decline]] = []
    for composite in _composites(lens):
        if composite.nodes <= held:  # taken along by a norm
            continue
        try:
            site = _site(lens, composite, held, no_grad)
        except Decline as decline:
            if _is_embedding(lens, composite):
                refused.append((composite.out, decline))
            continue
        # One that nobody reads would only bring its operands into the backward pass of another in its launch.
        if not any(node.users for node in site.outputs):
            continue
        conflict = taken.add(site)
        if conflict is None:
            found.append(site)
            held |= site.interior
        else:
            refused.append((composite.out, conflict))
    return _share_launches(lens, taken, found), refused


def _composites(lens: Lens) -> Iterator[Composite]:
    for node in lens.nodes:
        if lens.kind(node) in ("cat", "stack"):
            composite = rotation_at(lens, node)
        elif base_name(node) in ("empty_like", "zeros_like"):
            composite = written_rotation(lens, node)
        else:
            continue
        if composite is not None:
            yield composite


def _check(lens: Lens, composite: Composite, held: Collection[Node]) -> None:
    """Raise Decline where no site may hold `composite`, whatever stands round it."""
    out, nodes = composite.out, composite.nodes
    if rules_of(lens.tensor(out).device) in ELEMENTWISE:
        raise Decline("Ascend's compiler moves numbers within the last dim one at a time, so it runs as it "
                      "is written; no other spelling changes that", out)
    if len({lens.segment[part] for part in nodes}) > 1:
        raise Decline("a mode is switched inside the rotary embedding", out)
    if not lens.transformed.isdisjoint(nodes):
        raise Decline("inside a functorch transform", out)
    written = next(filter(lens.is_mutated, composite.term.values), None)
    if written is not None:
        raise Decline("what the rotary embedding reads is written in place", written)
    shared = min(nodes.intersection(held), key=lens.position.__getitem__, default=None)
    if shared is not None:
        raise Decline("part of another fused site", shared)


def _site(lens: Lens, composite: Composite, held: Collection[Node], no_grad: bool) -> Site:
    """The site that grows from `composite`.

    Raises:
        Decline: what grows is no rotary embedding, or none for a kernel.
    """
    _check(lens, composite, held)
    refused: Decline | None = None
    for reach in _REACHES:
        grown = _Grower(lens, composite, reach, held).run()
        space = _space(lens, composite, grown.outputs[0], frozenset())
        try:
            site = assemble(lens, PATTERN, (space,), grown.interior, grown.outputs,
                            composites=grown.composites)
            check_kernel(lens, site)
        except Decline as decline:
            refused = refused or decline
            continue
        if not _embeds(site.region):
            raise Decline("one kernel cannot take all from the rotation to the sum", composite.out)
        recorded = any(lens.tensor(node).requires_grad for node in grown.outputs)
        if recorded and no_grad:
            raise Decline("gradients are recorded here, and the option training is 'decline'", composite.out)
        if recorded and any(lens.is_overwritten(node) for node, _ in site.inputs):
            raise Decline("an operand is written in place, and backward needs what it was", composite.out)
        return site
    raise refused


def _is_embedding(lens: Lens, composite: Composite) -> bool:
    """Whether the graph adds the rotated value, times something, to the value as it was. What else is made of
    a rotation is nothing to report."""
    if composite.term.op not in ROTATIONS:  # written into a buffer: the sum is part of it
        return True
    rotated = _sums(lens, composite.out)
    return any(rotated & _sums(lens, value) for value in composite.term.values)


def _sums(lens: Lens, value: Node) -> set[Node]:
    """The sums that read `value` through products, casts and views (so not through a rotation)."""
    stack, seen, sums = [value], {value}, set()
    while stack:
        for user in stack.pop().users:
            if pointwise_word(lens, user) == "add":
                sums.add(user)
            elif user not in seen and (lens.kind(user) in ("mul", "to", "copy") or lens.is_view(user)):
                seen.add(user)
                stack.append(user)
    return sums


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
             if line.op in ROTATIONS]
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
