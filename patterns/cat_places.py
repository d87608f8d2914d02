"""Results that a later cat takes, with parts that are made after them: gelu(fc1(norm(x))) beside attention,
which reads the same norm (the single blocks of FLUX and HunyuanVideo).

The cat's memory is allocated when the result is made, and the result written there (kernels/placed.py). In
the place of the cat stands what copies its other parts. patterns/cats.py has the cats whose parts are all
there, and comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from ..cat_site import CatNode, RestSite
from ..chain_site import ChainSite, build
from ..graph import Lens, hint, same_shape
from ..kernels.chain_products import Product
from ..kernels.chain_ways import FEW_ROWS
from ..kernels.placed import Rest
from ..memory import live_bytes
from ..select import Taken
from ..site import Site
from .cats import cat_of
from .chain_products import COPIES

#: The least share of a cat that is worth it. The whole is there from now on, and each part that is copied is
#: a launch, where the cat was one: so no more should be copied than is saved.
LEAST_SHARE = 0.5

#: Bytes of the shortest run of memory that is written: of shorter ones, with a gap behind each, a store fills
#: less than the lines that memory is written in.
LEAST_RUN = 512


def place_in_cats(lens: Lens, taken: Taken) -> None:
    """Have taken sites write what is most of a cat to its place there; what cannot stays."""
    owners = {node: site for site in taken.sites if isinstance(site, (Site, ChainSite))
              for node in site.outputs}
    memory = _Memory(lens, taken)
    for node in lens.nodes:
        cat = cat_of(lens, node) if lens.kind(node) == "cat" and not taken.holds(node) else None
        part = cat and _largest(lens, taken, cat, owners)
        if not part:
            continue
        chain = part.site if isinstance(part.site, ChainSite) else build(lens, part.site, [])
        if not _is_worth_it(lens, part, chain) or not memory.takes(part):
            continue
        rest = _rest(lens, taken, part)
        if rest is None:
            continue
        placed = chain.placed(part.value, cat.node, rest.rest.place)
        taken.replace([part.site], placed)  # of the same nodes: nothing is in its way
        memory.note(part)
        owners.update(dict.fromkeys(placed.outputs, placed))


@dataclass(frozen=True)
class _Part:
    """Part `number` of `cat`: `value`, which `site` yields, or an identity of it (`between`)."""

    cat: CatNode
    number: int
    value: Node
    between: tuple[Node, ...]
    site: Site | ChainSite


def _largest(lens: Lens, taken: Taken, cat: CatNode, owners: dict[Node, Site | ChainSite]) -> _Part | None:
    """The largest part of `cat` that a taken site yields for it alone."""
    found = []
    for number, node in enumerate(cat.parts):
        reader, between = cat.node, []
        while node not in owners and set(node.users) == {reader} and lens.is_identity(node) and \
                not taken.holds(node):
            between.append(node)
            reader, node = node, node.args[0]
        if node in owners and set(node.users) == {reader} and \
                lens.segment[owners[node].anchor] == lens.segment[cat.node]:
            found.append(_Part(cat, number, node, tuple(between), owners[node]))
    return max(found, key=lambda part: lens.bytes_of(part.value), default=None)


def _is_worth_it(lens: Lens, part: _Part, chain: ChainSite) -> bool:
    """Whether `chain` may write the part to its place, and gains by it."""
    number = chain.outputs.index(part.value)
    name = chain.chain.outputs[chain.results[number]]
    if chain.finishes[number] or chain.results.count(chain.results[number]) > 1 or \
            name not in chain.chain.placeable or name in chain.chain.placed:
        return False
    sizes = tuple(map(hint, lens.tensor(part.value).shape))
    run = math.prod(sizes[part.cat.dim:]) * lens.tensor(part.value).element_size()
    if lens.bytes_of(part.value) < LEAST_SHARE * lens.bytes_of(part.cat.node) or run < LEAST_RUN:
        return False
    # Of few rows, a kernel that holds the product as well writes a tensor of its own.
    products = any(isinstance(stage, Product) for stage in chain.chain.stages)
    return not products or math.prod(sizes[:-1]) > FEW_ROWS


def _rest(lens: Lens, taken: Taken, part: _Part) -> RestSite | None:
    """The cat but for `part`, taken; None where it cannot be. A part that is a copy itself, for nobody else,
    is copied but once."""
    cat = part.cat
    rest = Rest(cat.dim, tuple(lens.tensor(node).shape[cat.dim] for node in cat.parts), part.number)
    plain = {node: node for node in cat.parts}, set()
    for sources, inside in (_sources(lens, taken, part), plain):
        read = tuple({**sources, cat.parts[part.number]: part.value}[node] for node in cat.parts)
        site = RestSite(cat.node, rest, read, frozenset((cat.node, *part.between, *inside)))
        if taken.add(site) is None:
            return site
    return None


def _sources(lens: Lens, taken: Taken, part: _Part) -> tuple[dict[Node, Node], set[Node]]:
    """(part of the cat -> what it is read from, the nodes that are not needed then)."""
    sources, inside = {}, {part.cat.node, *part.between}
    for number, node in enumerate(part.cat.parts):
        source = node
        while number != part.number and (before := _before(lens, taken, source, node, inside)) is not None:
            inside.add(source)
            source = before
        sources[node] = source
    return sources, inside


def _before(lens: Lens, taken: Taken, node: Node, part: Node, inside: set[Node]) -> Node | None:
    """What `node` is a copy of, or a view that keeps the elements in order, where those inside alone read it.
    It is of the shape of `part`, or has several dims for the last one."""
    if node.op not in ("call_function", "call_method") or not set(node.users) <= inside or \
            taken.holds(node) or lens.segment[node] != lens.segment[part]:
        return None
    fake, read, wanted = map(lens.tensor, (node, node.args[0] if node.args else None, part))
    if fake is None or read is None or read.dtype != fake.dtype:
        return None
    # What is read instead of a copy stays in memory longer, so it should be no part of something larger.
    if not lens.is_identity(node) and not (lens.kind(node) in COPIES and (
            lens.is_view(node) or hint(read.untyped_storage().nbytes()) == lens.bytes_of(node))):
        return None
    last = wanted.dim() - 1
    lanes, lane = read.shape[last:], wanted.shape[last]
    split = all(isinstance(n, int) for n in (*lanes, lane)) and math.prod(lanes) == lane
    if read.dim() <= last or not same_shape(read.shape[:last], wanted.shape[:last]) or \
            not (split or same_shape(lanes, (lane,))):
        return None
    return node.args[0]


class _Memory:
    """Whether the peak of memory stays where the graph as it came has it: once a part is in its place, there
    is the whole result of the cat."""

    def __init__(self, lens: Lens, taken: Taken):
        self.lens, self.taken = lens, taken

    @cached_property
    def peak(self) -> int:
        """Of the graph as it came."""
        return max(live_bytes(self.lens, self.lens.nodes))

    @cached_property
    def units(self) -> list:
        """In the order in which they run, as when asked first: placing changes none of it."""
        return self.taken.schedule()

    @cached_property
    def live(self) -> list[int]:
        """The bytes that are there behind each unit, with what was noted."""
        return live_bytes(self.lens, self.units)

    @cached_property
    def number(self) -> dict[Node, int]:
        """The unit of each node."""
        return {node: i for i, unit in enumerate(self.units)
                for node in ((unit,) if isinstance(unit, Node) else unit.interior)}

    def takes(self, part: _Part) -> bool:
        between = [self.live[i] for i in self._span(part)]
        return max(between, default=0) + self._growth(part) <= self.peak

    def note(self, part: _Part) -> None:
        for i in self._span(part):
            self.live[i] += self._growth(part)

    def _span(self, part: _Part) -> range:
        """The units between the one that makes the part and the cat."""
        return range(self.number[part.value] + 1, self.number[part.cat.node])

    def _growth(self, part: _Part) -> int:
        return self.lens.bytes_of(part.cat.node) - self.lens.bytes_of(part.value)
