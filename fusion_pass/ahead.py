"""Compiling ahead: the kernels that a fused graph needs are known before its first call. They are compiled in
the background, several at once (kernels/compiling.py), for the sizes that the graph's fakes carry."""

from __future__ import annotations

import torch

from .cat_site import CatSite, RestSite
from .chain_site import ChainSite
from .graph import Lens, hint
from .kernels.chain_ops import chain_runner
from .kernels.joined import expect_joined
from .kernels.launch import runs_reference
from .kernels.likeness import Likeness
from .kernels.ops import runner
from .select import Taken
from .views import replay


def begin_kernels(lens: Lens, taken: Taken, self_check: str) -> None:
    """Begin to compile the kernels of all taken sites. Nothing where they run as plain PyTorch.

    A first call that differs from what is expected here (an input at an odd address, other sizes) compiles
    what it needs, as it would without this.
    """
    for site in taken.sites:
        if isinstance(site, RestSite) or runs_reference(lens.tensor(site.anchor).device):
            continue
        fakes = [replay(lens.tensor(node), steps) for node, steps in site.inputs]
        inputs = [_likeness(fake) for fake in fakes]
        if isinstance(site, ChainSite):
            recorded = torch.is_grad_enabled() and any(fake.requires_grad for fake in fakes)
            chain_runner(site.chain, self_check).expect(inputs, site.chain.kept if recorded else ())
        elif isinstance(site, CatSite):
            expect_joined(site.joined, inputs, self_check)
        else:
            runner(site.region.text, self_check).expect(inputs)


def _likeness(fake: torch.Tensor) -> Likeness:
    """At the sizes seen here. Storages begin at a multiple of 16 bytes, as allocators have it."""
    return Likeness(tuple(map(hint, fake.shape)), tuple(map(hint, fake.stride())), fake.dtype, fake.device,
                    hint(fake.storage_offset(), 0) * fake.dtype.itemsize & 15)
