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
    path = {norms[0].value}
    above: list[str] = []
    below: list[str] = []
    for node in sorted(grown.interior - inside, key=lens.position.__getitem__, reverse=True):
        if node in path:
            path.update(node.all_input_nodes)
            above.append(_word(lens, node))
    for node in sorted(after - inside, key=lens.position.__getitem__):
        below.append(_word(lens, node))
    return _squeeze(list(reversed(above))), _squeeze(below)


def _descendants(norms, grown) -> set:
    found = {norm.out for norm in norms}
    stack = list(found)
    while stack:
        for user in stack.pop().users:
            if user in grown.interior and user not in found:
                found.add(user)
                stack.append(user)
    return found


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
