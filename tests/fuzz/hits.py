"""Which parts of the pass had something to do in a program: the fuzz report counts them.

What is watched are the functions through which all that is fused goes, so a part that never works is seen to
have no programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.fx import Node

from ascend_ln_fuse import backend, simplify
from ascend_ln_fuse.cat_site import CatSite, RestSite
from ascend_ln_fuse.chain_site import ChainSite
from ascend_ln_fuse.graph import Lens
from ascend_ln_fuse.kernels.chain_fused import FusedSegment
from ascend_ln_fuse.kernels.recent import Recent
from ascend_ln_fuse.kinds import base_name
from ascend_ln_fuse.patterns import rotary_site
from ascend_ln_fuse.select import Taken
from ascend_ln_fuse.site import Site


@contextmanager
def watched() -> Iterator[set[str]]:
    """A set that fills, inside, with the names of what the pass does."""
    hits: set[str] = set()
    rewrite, drop, join = backend.rewrite, simplify.drop_needless_masks, simplify.drop_needless_cats
    lay_out = simplify.lay_out_streams
    find, call = Recent.find, FusedSegment.call

    def watched_rewrite(lens: Lens, taken: Taken, **options):
        for site in taken.sites:
            hits.update(_of_site(lens, site))
        return rewrite(lens, taken, **options)

    def watched_drop(draft):
        notes = drop(draft)
        hits.update(f"mask dropped: {meaning}" for meaning in ("all True", "causal")
                    if any(meaning in note for note in notes))
        return notes

    def watched_join(draft):
        notes = join(draft)
        hits.update(["cat of pieces left out"] if notes else [])
        return notes

    def watched_lay_out(draft):
        notes = lay_out(draft)
        hits.update(["stream laid out"] if any(" left so" not in note for note in notes) else [])
        return notes

    def watched_find(self, tensors, pointers):
        found = find(self, tensors, pointers)
        if found is not None:
            hits.add("warm call of a chain" if isinstance(found, tuple) else "warm call of a kernel")
        return found

    def watched_call(self, *args):
        hits.add("chain: one kernel")
        return call(self, *args)

    with mock.patch.object(backend, "rewrite", watched_rewrite), \
            mock.patch.object(FusedSegment, "call", watched_call), \
            mock.patch.object(simplify, "drop_needless_masks", watched_drop), \
            mock.patch.object(simplify, "drop_needless_cats", watched_join), \
            mock.patch.object(simplify, "lay_out_streams", watched_lay_out), \
            mock.patch.object(Recent, "find", watched_find):
        yield hits


def _of_site(lens: Lens, site: Site | ChainSite | CatSite | RestSite) -> Iterator[str]:
    if not lens.updates.keys().isdisjoint(site.interior):
        yield "private update"
    if isinstance(site, RestSite):
        yield "cat of later parts"
        return
    if isinstance(site, CatSite):
        yield "joined cat"
        if any(launch is None for cat in site.joined.cats for launch, _ in cat.parts):
            yield "joined cat: a part is copied"
        for piece in site.pieces:
            yield from _of_site(lens, piece)
        return
    if isinstance(site, ChainSite):
        yield "chain"
        for stage in site.chain.stages[1:]:
            yield f"chain: {getattr(stage, 'word', 'pointwise')}"
        site = site.site
    if site.pattern == rotary_site.PATTERN:
        yield "rotary site: q and k" if site.parts else "rotary site"
    elif site.parts:
        yield "packed q and k"
    for composite in site.composites:
        yield "rotary written into a buffer" if any(map(_is_buffer, composite.nodes)) else \
            f"rotary by {'halves' if composite.term.op == 'rotate_half' else 'pairs'}"


def _is_buffer(node: Node) -> bool:
    return base_name(node) in ("empty_like", "zeros_like")
