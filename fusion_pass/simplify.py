"""What a graph does that it need not do: left out before any site is looked for."""

from __future__ import annotations

from torch.fx import Graph

from .masks import without_needless_masks
from .options import RUN_AS_WRITTEN, Options
from .pieces import without_needless_cats
from .streams import without_streams_across

SIMPLIFY = "simplify"


def simplified(graph: Graph, options: Options) -> tuple[Graph, tuple[str, ...]]:
    """A copy of `graph`, whose nodes carry fakes, without what the options say to leave out, and notes for
    the report; `graph` itself where it has nothing of that."""
    steps = [(options.masks, without_needless_masks), (options.cats, without_needless_cats)]
    if options.inner in RUN_AS_WRITTEN:  # others choose layouts themselves
        steps.append((options.streams, without_streams_across))
    notes = []
    for wanted, without in steps:
        if wanted == SIMPLIFY:
            graph, said = without(graph)
            notes += said
    return graph, tuple(notes)
