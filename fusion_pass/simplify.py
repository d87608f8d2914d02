"""What a graph does that it need not do: left out before any site is looked for."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from .draft import Draft
from .graph import Lens
from .masks import drop_needless_masks
from .options import RUN_AS_WRITTEN, Options
from .pieces import drop_needless_cats
from .streams import lay_out_streams

SIMPLIFY = "simplify"


@dataclass(frozen=True)
class Simplified:
    """What is left of a graph.

    Attributes:
        graph: a copy without what the options say to leave out; the graph itself where it has none of that.
        notes: for the report.
        lens: of `graph`, where one was needed to find that nothing more is to be left out.
    """

    graph: Graph
    notes: tuple[str, ...] = ()
    lens: Lens | None = None


def simplified(graph: Graph, options: Options) -> Simplified:
    """A graph, whose nodes carry fakes, without what the options say to leave out; it stays as it is."""
    steps = [(options.masks, drop_needless_masks), (options.cats, drop_needless_cats)]
    if options.inner in RUN_AS_WRITTEN:  # others choose layouts themselves
        steps.append((options.streams, lay_out_streams))
    draft, notes = Draft(graph), []
    for wanted, step in steps:
        if wanted == SIMPLIFY:
            notes += step(draft)
    return Simplified(draft.graph, tuple(notes), draft.known_lens)
