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
    rotary = _rotary(grown)
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


def _rotary(grown) -> set:
    """The nodes of rotary embeddings: a rotation, and what leads from its source and itself to their sum."""
    found: set = set()
    for composite in grown.composites:
        found |= composite.nodes
        rotated = _below([composite.out], grown)
        whole = _below([composite.source], grown)
        plain = _below([user for user in composite.source.users if user not in composite.nodes], grown)
        meeting = rotated & plain
        found |= {node for node in whole if node not in meeting and _below([node], grown) & meeting}
        found |= {node for node in meeting if not set(node.all_input_nodes) & meeting}
    return found


def _below(nodes, grown) -> set:
    """`nodes` and what of the site follows from them."""
    found = {node for node in nodes if node in grown.interior}
    stack = list(found)
    while stack:
        for user in stack.pop().users:
            if user in grown.interior and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _descendants(norms, grown) -> set:
    return _below([norm.out for norm in norms], grown)


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
