"""Selection: convex, conflict-free sites, and an order to run them in."""

from types import SimpleNamespace

import networkx as nx
import pytest
import torch
from checks import check
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ascend_ln_fuse import select as select_module
from ascend_ln_fuse.select import Candidate, Taken, select
from ascend_ln_fuse.site import Decline, Site


def lens_of(edges, count):
    """A lens of `count` nodes (numbers with a name) in the given order."""
    order = [[b for a, b in edges if a == position] for position in range(count)]
    nodes = [FakeNode(f"n{i}") for i in range(count)]
    return SimpleNamespace(nodes=nodes, position=Positions(nodes), order=order)


class FakeNode:
    def __init__(self, name):
        self.name = name


class Positions(dict):
    def __init__(self, nodes):
        self.by_id = {id(node): i for i, node in enumerate(nodes)}

    def __getitem__(self, node):
        return self.by_id[id(node)]


def site(lens, *positions):
    made = object.__new__(Site)
    made.interior = [lens.nodes[p] for p in positions]
    made.norms = (SimpleNamespace(out=made.interior[0]),)
    return made


def scheduled(taken):
    """Positions of nodes, and lists of positions for sites, as they are to run."""
    position = taken.lens.position
    return [[position[n] for n in unit.interior] if isinstance(unit, Site) else position[unit]
            for unit in taken.schedule()]


def test_a_path_out_of_a_site_and_back_is_refused():
    lens = lens_of([(0, 1), (1, 2), (0, 2)], 3)
    refusal = Taken(lens).add(site(lens, 0, 2))
    assert "must run between two parts" in refusal.reason
    assert refusal.node is lens.nodes[1]
    assert Taken(lens).add(site(lens, 0, 1, 2)) is None


def test_a_shared_node_is_refused():
    lens = lens_of([(0, 1), (1, 2)], 3)
    taken = Taken(lens)
    assert taken.add(site(lens, 0, 1)) is None
    assert "another fused site" in taken.add(site(lens, 1, 2)).reason


def test_two_sites_each_convex_may_not_wait_for_each_other():
    lens = lens_of([(0, 3), (1, 2)], 4)
    taken = Taken(lens)
    assert taken.add(site(lens, 0, 2)) is None
    assert "must run between" in taken.add(site(lens, 1, 3)).reason


def test_a_cycle_that_leads_beyond_the_last_node_is_seen():
    """From {4, 5} to {6, 9}, over 9 to {2, 10} and from 2 back into the site."""
    lens = lens_of([(5, 6), (9, 10), (2, 4)], 11)
    taken = Taken(lens)
    assert taken.add(site(lens, 2, 10)) is None
    assert taken.add(site(lens, 6, 9)) is None
    assert "must run between" in taken.add(site(lens, 4, 5)).reason
    taken.schedule()


def test_the_order_of_the_graph_is_kept_but_for_what_waits_for_a_site():
    lens = lens_of([(0, 1), (0, 4)], 6)
    taken = Taken(lens)
    assert taken.add(site(lens, 0, 4)) is None
    assert scheduled(taken) == [2, 3, [0, 4], 1, 5]


def test_replacing_sites_by_one_that_conflicts_changes_nothing():
    lens = lens_of([(0, 1), (1, 2), (2, 3), (3, 4)], 5)
    taken = Taken(lens)
    first, second = site(lens, 0, 1), site(lens, 3)
    assert taken.add(first) is None and taken.add(second) is None
    before = scheduled(taken)
    assert taken.replace([first, second], site(lens, 0, 1, 3)) is not None
    assert scheduled(taken) == before and taken.sites == [first, second]
    merged = site(lens, 0, 1, 2, 3)
    assert taken.replace([first, second], merged) is None
    assert scheduled(taken) == [[0, 1, 2, 3], 4] and taken.sites == [merged]


@st.composite
def dags_with_sites(draw):
    count = draw(st.integers(2, 14))
    numbers = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(numbers, numbers), max_size=25))
    sites = draw(st.lists(st.sets(numbers, min_size=1, max_size=4), max_size=6))
    return count, [(min(p), max(p)) for p in pairs if p[0] != p[1]], sites


@settings(max_examples=60, deadline=None)
@given(dags_with_sites())
def test_what_is_taken_can_always_be_run_and_nothing_more_could_be(case):
    count, edges, sets = case
    lens = lens_of(edges, count)
    taken, chosen = Taken(lens), []
    for members in sets:
        refusal = taken.add(site(lens, *sorted(members)))
        overlap = any(members & other for other in chosen)
        unit = {p: min(group) for group in [*chosen, members] for p in group}
        contracted = nx.DiGraph((unit.get(a, a), unit.get(b, b)) for a, b in edges)
        contracted.remove_edges_from(list(nx.selfloop_edges(contracted)))
        possible = not overlap and nx.is_directed_acyclic_graph(contracted)
        assert (refusal is None) is possible
        if possible:
            chosen.append(members)
    turn = {}
    for i, unit in enumerate(scheduled(taken)):
        turn.update(dict.fromkeys(unit if isinstance(unit, list) else [unit], i))
    assert sorted(turn) == list(range(count))
    for a, b in edges:
        assert turn[a] < turn[b] or any({a, b} <= group for group in chosen)


def test_the_best_site_comes_first_and_the_loser_falls_back(monkeypatch):
    lens = lens_of([(0, 1), (1, 2)], 3)
    values = {(0, 1): 5, (1, 2): 9, (0,): 1, (1,): 3}
    monkeypatch.setattr(select_module, "saved_bytes",
                        lambda lens, s: values[tuple(lens.position[n] for n in s.interior)])

    def never():
        raise Decline("no region", lens.nodes[0])

    def maker(*positions):
        return lambda: site(lens, *positions)

    small = Candidate(lens.nodes[0], iter([maker(0, 1), maker(0)]))
    large = Candidate(lens.nodes[2], iter([never, maker(1, 2)]))
    refused = Candidate(lens.nodes[1], iter([never, maker(1)]))
    taken, lost = select(lens, [small, large, refused])
    assert [[lens.position[n] for n in s.interior] for s in taken.sites] == [[0], [1, 2]]
    assert lost == [refused] and refused.reason.reason == "no region"


class SharedSum(nn.Module):
    """Two norms of one sum, which is read elsewhere too: the sum belongs to one site at most."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x, y):
        s = x + y
        return self.a(s), self.b(s), s.sin()


def test_two_norms_of_one_sum():
    check(SharedSum(), torch.randn(4, 16), torch.randn(4, 16), fused=2)


def between(x, y):
    s = x + y
    t = F.layer_norm(s, (16,))
    return F.layer_norm(t.cumsum(0) + s, (16,))


def chain_of_adds(x, y):
    for _ in range(4):
        x = x + y
        y = F.layer_norm(x, (16,)) * 2
    return x, y


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


@pytest.mark.parametrize("f, fused", [(between, 2), (chain_of_adds, 4)])
def test_overlapping_sites(f, fused):
    check(Function(f), torch.randn(4, 16), torch.randn(4, 16), fused=fused)
