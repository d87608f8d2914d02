"""Selection: a conflict-free, convex set of sites, best value first.

A site is convex when nothing outside it lies between two of its nodes in the lens's order (data,
memory, random draws): only then can one op stand for all of it. Sites must not share a node, and must
stay convex together: with each taken site contracted to one node, the order stays acyclic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from torch.fx import Node

from .cost import saved_bytes
from .graph import Lens
from .site import Decline, Site


class Candidate:
    """The sites of one norm, from the largest to the smallest, each made when it is asked for.

    `makers` are called in turn; one that raises Decline is skipped, its reason kept.
    """

    def __init__(self, anchor: Node, makers: Iterable[Callable[[], Site]]):
        self.anchor, self._makers = anchor, tuple(makers)
        self._next = 0
        self._seen = 0  # how much was claimed when the makers were last started
        self.site: Site | None = None
        self.reason: Decline | None = None

    def advance(self) -> bool:
        """Move on to the next site; False when there is none left."""
        self.site = None
        while self._next < len(self._makers):
            make = self._makers[self._next]
            self._next += 1
            try:
                self.site = make()
                return True
            except Decline as decline:
                self.reason = self.reason or decline
        return False

    def restart(self, claimed: int) -> None:
        """Begin again with the largest site if more nodes are claimed than at the last start: growth
        keeps out of them, so other sites come now."""
        if claimed > self._seen:
            self._next, self._seen = 0, claimed


def select(lens: Lens, candidates: Sequence[Candidate],
           claimed: set[Node] | None = None) -> tuple[Taken, list[Candidate]]:
    """The chosen sites, and the candidates of which none could be taken (with their reasons).

    `claimed`: the set that the candidates' growth keeps out of; what is taken is added to it.
    """
    claimed = set() if claimed is None else claimed
    taken, lost, heap = Taken(lens), [], []

    def push(candidate: Candidate) -> None:
        if candidate.advance():
            value = saved_bytes(lens, candidate.site)
            heapq.heappush(heap, (-value, lens.position[candidate.anchor], candidate))
        else:
            lost.append(candidate)

    for candidate in candidates:
        push(candidate)
    while heap:
        _, _, candidate = heapq.heappop(heap)
        refusal = taken.add(candidate.site)
        if refusal is None:
            claimed.update(candidate.site.interior)
            continue
        candidate.reason = candidate.reason or refusal
        if taken.overlaps(candidate.site):
            candidate.restart(len(claimed))
        push(candidate)
    return taken, lost


class Taken:
    """The sites taken so far, and what the order looks like with each contracted to one node."""

    def __init__(self, lens: Lens):
        self.lens = lens
        self._sites: dict[int, Site] = {}
        self._members: dict[int, list[int]] = {}
        self._group: dict[int, int] = {}
        #: position -> the last position of the sites that span it (never taken back: an upper bound)
        self._spans: dict[int, int] = {}
        self._count = 0

    @property
    def sites(self) -> list[Site]:
        """The taken sites, in the order of their anchors."""
        return sorted(self._sites.values(), key=lambda site: self.lens.position[site.anchor])

    def only(self, wanted: Callable[[Site], bool]) -> Taken:
        """Those of the taken sites that are wanted."""
        some = Taken(self.lens)
        for site in filter(wanted, self.sites):
            some.add(site)
        return some

    def overlaps(self, site: Site) -> bool:
        """Whether `site` holds a node of a taken one."""
        return any(self.lens.position[node] in self._group for node in site.interior)

    def holds(self, node: Node) -> bool:
        """Whether a taken site holds `node`."""
        return self.lens.position[node] in self._group

    def add(self, site: Site) -> Decline | None:
        """Take `site`; the reason where it conflicts with what is taken, and then it is not taken."""
        positions = sorted(self.lens.position[node] for node in site.interior)
        for position in positions:
            if position in self._group:
                return Decline("part of another fused site", self.lens.nodes[position])
        between = self._path_back(positions)
        if between is not None:
            node = self.lens.nodes[between]
            return Decline("another op must run between two parts of the site", node)
        number = self._count
        self._count += 1
        self._sites[number], self._members[number] = site, positions
        self._group.update(dict.fromkeys(positions, number))
        for position in range(positions[0], positions[-1]):
            self._spans[position] = max(self._spans.get(position, 0), positions[-1])
        return None

    def replace(self, old: Sequence[Site], new: Site) -> Decline | None:
        """Take `new` in the place of the taken `old`; when that conflicts, all stays as it is."""
        numbers = [self._group[self.lens.position[site.anchor]] for site in old]
        kept = {n: (self._sites.pop(n), self._members.pop(n)) for n in numbers}
        for _, positions in kept.values():
            for position in positions:
                del self._group[position]
        refusal = self.add(new)
        if refusal is not None:
            for number, (site, positions) in kept.items():
                self._sites[number], self._members[number] = site, positions
                self._group.update(dict.fromkeys(positions, number))
        return refusal

    def _path_back(self, positions: list[int]) -> int | None:
        """A node outside that lies on a path from the site back into it, or None."""
        order, inside, last = self.lens.order, set(positions), self._horizon(positions[-1])
        seen: set[int] = set()
        stack = [s for p in positions for s in order[p] if s not in inside]
        while stack:
            position = stack.pop()
            if position in seen:
                continue
            group = self._group.get(position)
            members = [position] if group is None else self._members[group]
            seen.update(members)
            if members[0] > last:
                continue
            for member in members:
                for successor in order[member]:
                    if successor in inside:
                        return position
                    if successor not in seen:
                        stack.append(successor)
        return None

    def _horizon(self, last: int) -> int:
        """The position beyond which nothing leads back to `last`: edges lead forward, and only the
        taken sites, run as one, lead further back."""
        while self._spans.get(last, last) > last:
            last = self._spans[last]
        return last

    def schedule(self) -> list[Node | Site]:
        """Nodes and sites in an order to run them in: the graph's own, but for what must follow a
        site's last node."""
        lens = self.lens
        # A site stands at its last position. Kahn's algorithm; of what is ready, the first comes first.
        # (networkx's, on a contracted copy of the order, takes three times as long.)
        place = list(range(len(lens.nodes)))
        for position, group in self._group.items():
            place[position] = self._members[group][-1]
        followers = [set() for _ in place]
        for a, successors in enumerate(lens.order):
            followers[place[a]].update(map(place.__getitem__, successors))
        waiting = [0] * len(place)
        for a, after in enumerate(followers):
            after.discard(a)
            for b in after:
                waiting[b] += 1
        ready = [p for p, at in enumerate(place) if p == at and not waiting[p]]  # sorted: a heap
        ordered: list[Node | Site] = []
        while ready:
            a = heapq.heappop(ready)
            ordered.append(self._sites[self._group[a]] if a in self._group else lens.nodes[a])
            for b in followers[a]:
                waiting[b] -= 1
                if not waiting[b]:
                    heapq.heappush(ready, b)
        return ordered
