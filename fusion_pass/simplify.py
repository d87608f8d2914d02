"""What a graph does that it need not do, whoever compiles it: left out before any site is looked for."""

from __future__ import annotations

from torch.fx import Graph

from .masks import without_needless_masks
from .options import Options
from .pieces import without_needless_cats

SIMPLIFY = "simplify"


def simplified(graph: Graph, options: Options) -> tuple[Graph, tuple[str, ...]]:
    """A copy of `graph`, whose nodes carry fakes, without what the options say to leave out, and notes for
    the report; `graph` itself and () where it has nothing of that."""
    notes = []
    for wanted, without in ((options.masks, without_needless_masks), (options.cats, without_needless_cats)):
        if wanted == SIMPLIFY:
            graph, note = without(graph)
            notes += [note] if note else []
    return graph, tuple(notes)
