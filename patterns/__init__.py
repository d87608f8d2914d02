"""The patterns: which nodes are a norm, and how far a site may grow round it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch.fx import Node

from ..contract import ContractError, check_contract, check_kernel, check_norm
from ..graph import Lens
from ..options import strict
from ..select import Candidate
from ..site import Decline, Norm, Site, assemble
from . import handwritten_norm, library_norm
from .grow import REACHES, Reach, grow
from .naming import pattern_name

#: `match(lens, node)`: the norms whose last node is `node`. Raises Decline for one that cannot be fused.
Matcher = Callable[[Lens, Node], Iterator[Norm]]


@dataclass(frozen=True)
class Pattern:
    """A way to find norms. A user's is checked like ours, but its failures are its own."""

    name: str
    match: Matcher
    users: bool = False


BUILT_IN = (Pattern("library_norm", library_norm.match),
            Pattern("handwritten_norm", handwritten_norm.match))

_registered: dict[str, Pattern] = {}
_lock = threading.Lock()


def register_pattern(name: str, match: Matcher) -> None:
    """Have the pass look for a norm of your own (docs/patterns.md has a worked example).

    Yours are tried before the built-in ones. What `match` yields is checked, not trusted: a norm that does
    not replace what it says, of another shape or dtype, or with memory written inside it, is declined, and
    the patterns that come next are asked; after a `Decline` of its own they are not.

    Args:
        name: a word for the report; registering it again replaces the pattern.
        match: called as `match(lens, node)` for every node of a graph; yields a `Norm` for each norm
            that ends in `node`, or raises `Decline(reason)`.

    Raises:
        TypeError: `name` is no str or `match` cannot be called.
        ValueError: `name` is empty or that of a built-in pattern.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if not callable(match):
        raise TypeError(f"match must be callable as match(lens, node), not {type(match).__name__}")
    if not name or name in {pattern.name for pattern in BUILT_IN}:
        raise ValueError(f"name must not be empty or that of a built-in pattern, not {name!r}")
    with _lock:
        _registered[name] = Pattern(name, match, users=True)


def unregister_pattern(name: str) -> None:
    """Take a registered pattern back; graphs that are compiled already keep it.

    Raises:
        KeyError: no pattern of that name is registered.
    """
    with _lock:
        if name not in _registered:
            raise KeyError(f"no pattern {name!r} is registered; "
                           f"registered: {', '.join(_registered) or 'none'}")
        del _registered[name]


def patterns() -> tuple[Pattern, ...]:
    """All patterns in the order in which they are tried."""
    with _lock:
        return (*_registered.values(), *BUILT_IN)


@dataclass(frozen=True)
class Found:
    """A norm and the pattern that found it."""

    norm: Norm
    pattern: Pattern


def find_norms(lens: Lens) -> tuple[list[Found], list[tuple[Node, Decline]]]:
    """All norms of a graph, and those that were recognised but cannot be fused, with the reason."""
    norms: list[Found] = []
    refused: list[tuple[Node, Decline]] = []
    active = list(patterns())
    for node in lens.nodes:
        for pattern in tuple(active):
            found: list[Norm] = []
            try:
                found = list(pattern.match(lens, node) or ())
                for norm in found:
                    check_norm(lens, norm)
                norms += [Found(norm, pattern) for norm in found]
            except Decline as decline:
                if pattern.users:
                    decline = Decline(f"pattern {pattern.name}: {decline.reason}", decline.node)
                refused.append((node, decline))
                if pattern.users and found:
                    continue  # what it yields is at fault, which says nothing of the norm
                break
            except Exception as error:
                if not pattern.users or strict():
                    raise
                # A user's pattern that fails is out for this graph; the others go on.
                active.remove(pattern)
                refused.append((node, Decline(f"pattern {pattern.name} failed: "
                                              f"{type(error).__name__}: {error}", node)))
                continue
            if found:
                break  # a node is one norm
    return norms, refused


def candidate(lens: Lens, found: Found, claimed: Collection[Node] = (),
              no_grad: bool = False) -> Candidate:
    """The sites of a norm, from the largest growth to the bare norm; `claimed` as in `grow`.

    `no_grad`: sites that would record gradients are declined."""
    norm = found.norm

    def make(reach: Reach) -> Site:
        try:
            return site_of(reach)
        except Exception as error:
            if isinstance(error, Decline) or not found.pattern.users or strict():
                raise
            raise Decline(f"pattern {found.pattern.name} failed: {type(error).__name__}: {error}",
                          norm.out) from error

    def site_of(reach: Reach) -> Site:
        if norm.out in lens.transformed:
            raise Decline("inside a functorch transform", norm.out)
        grown = grow(lens, (norm,), reach, claimed)
        if no_grad and any(lens.tensor(node).requires_grad for node in grown.outputs):
            raise Decline("gradients are recorded here, and the option training is 'decline'", norm.out)
        name = pattern_name(lens, (norm,), grown)
        site = assemble(lens, name, (norm,), grown.interior, grown.outputs, grown.regroup,
                        grown.composites, heads=grown.heads, moved=grown.moved)
        check_kernel(lens, site)
        if any(lens.tensor(node).requires_grad for node in grown.outputs) and \
                any(lens.is_overwritten(node, site.interior) for node, _ in site.inputs):
            raise Decline("an operand is written in place, and backward needs what it was", norm.out)
        if found.pattern.users:  # ours are checked once, when they are written into the graph
            try:
                check_contract(lens, site)
            except ContractError as error:
                raise Decline(f"refused by the contract: {error}", norm.out) from error
        return site

    return Candidate(norm.out, [lambda reach=reach: make(reach) for reach in REACHES])
