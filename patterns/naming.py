"""The name of a site's pattern: what was taken along, in the order of the data."""

from __future__ import annotations

from ..graph import Lens
from ..site import Norm
from .grow import Grown

_UP, _DOWN = 0, 1


def pattern_name(lens: Lens, norms: tuple[Norm, ...], grown: Grown) -> str:
    """For example "cast -> slice -> layer_norm -> cast" or "add -> rms_norm -> modulate"."""
    first, last = norms[0], norms[-1]
    inside = set().union(*(norm.interior for norm in norms))
    above, below = _parts(lens, norms, grown, inside)
    middle = first.op if len(norms) == 1 else f"{len(norms)} x {last.op}"
    return " -> ".join([*above, middle, *below])


def _parts(lens, norms, grown, inside) -> tuple[list[str], list[str]]:
    after = _descendants(norms, grown)
    rotary = _rotary(grown, after)
    path = {norms[0].value}
    above: list[str] = []
    below: list[str] = []
    for node in sorted(grown.interior - inside, key=lens.position.__getitem__, reverse=True):
        if node in path:
            path.update(node.all_input_nodes)
            above.append(_word(lens, node))
    for node in sorted(after - inside, key=lens.position.__getitem__):
        below.append("rotary" if node in rotary else _word(lens, node))
    return _squeeze(list(reversed(above))), _squeeze(below)


def _rotary(grown, after: set) -> set:
    """The nodes of rotary embeddings: a rotation, the node where it meets the value as it was, and what
    leads to that on both sides."""
    found: set = set()
    for composite in grown.composites:
        found |= composite.nodes
        rotated = _closure([composite.out], after, lambda node: node.users)
        meeting = min((node for node in rotated if any(
            arg in after and arg not in rotated for arg in node.all_input_nodes)
            and node not in composite.nodes), key=lambda node: len(
                _closure([node], after, lambda n: n.all_input_nodes)), default=None)
        if meeting is None:
            continue
        sides = [_closure([arg], after, lambda node: node.all_input_nodes)
                 for arg in meeting.all_input_nodes if arg in after]
        found |= {meeting} | (set.union(*sides) - set.intersection(*sides))
    return found


def _closure(nodes, inside: set, step) -> set:
    """`nodes` and all of `inside` that `step` leads to from them."""
    found, stack = set(nodes), list(nodes)
    while stack:
        for node in step(stack.pop()):
            if node in inside and node not in found:
                found.add(node)
                stack.append(node)
    return found


def _descendants(norms, grown) -> set:
    return _closure([norm.out for norm in norms], grown.interior, lambda node: node.users)


def _word(lens: Lens, node) -> str:
    word = lens.kind(node) or ""
    if lens.is_view(node):
        return "" if lens.is_identity(node) else "view"
    return {"to": "cast", "copy": "contiguous", "mul": "scale", "add": "add"}.get(word, word)


def _squeeze(words: list[str]) -> list[str]:
    """Without repeats in a row; mul then add below a norm is a modulate."""
    out: list[str] = []
    for word in words:
        if word and (not out or out[-1] != word):
            out.append(word)
    text = " -> ".join(out).replace("scale -> add", "modulate")
    return text.split(" -> ") if text else []
