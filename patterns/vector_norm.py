"""Arguments of PyTorch's vector norms and of clamps from below, by any of their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..effects import value_of
from ..graph import Lens
from ..kinds import base_name
from ..site import Decline

#: what is written for the order of the Euclidean norm; None is the default of `torch.linalg.norm`
EUCLIDEAN = (None, "fro", 2)


def places_from_the_end(dims: int | Sequence[int], rank: int, node: Node) -> tuple[int, ...]:
    """The normalised dims of a tensor of `rank` dims, counted from the end, in order.

    Raises:
        Decline: several that are not the last ones; `node` is what caused it.
    """
    dims = [dims] if isinstance(dims, int) else list(dims)
    places = tuple(sorted(d % rank - rank for d in dims if rank))
    if not rank or len(places) > 1 and places != tuple(range(-len(places), 0)):
        raise Decline(f"normalises dims {', '.join(map(str, dims))} of {rank}, not the last ones", node)
    return places


def is_euclidean(order) -> bool:
    """Whether `order`, the `p` or `ord` of a vector norm as a graph has it, is the Euclidean one's."""
    order = value_of(order) if isinstance(order, Node) else order
    return isinstance(order, (int, float, str, type(None))) and order in EUCLIDEAN


def vector_norm(node: Node) -> tuple[Node, object, object] | None:
    """(value, dims, order) of `x.norm(p, dim)`, `torch.norm`, `torch.linalg.norm` or `vector_norm`; None for
    a norm of all elements and for one of matrices."""
    bound = dict(zip(("input", "p", "dim"), node.args)) | dict(node.kwargs)
    names = {"self": "input", "x": "input", "A": "input", "ord": "p", "axis": "dim"}
    bound = {names.get(name, name): value for name, value in bound.items()}
    order, dims = bound.get("p"), bound.get("dim")
    if not isinstance(bound.get("input"), Node) or dims is None or "out" in bound:
        return None
    if base_name(node) == "linalg_norm" and order is not None and not isinstance(dims, int):
        return None  # of matrices, if there are two dims
    return bound["input"], dims, order


def clamped_from_below(lens: Lens, node: Node) -> tuple[Node, float | Node] | None:
    """(value, bound) of `clamp_min(value, bound)` and `clamp(value, min=bound)`; None for anything else, a
    clamp from above included."""
    if lens.kind(node) != "clamp":
        return None
    bound = dict(zip(("input", "min", "max"), node.args)) | dict(node.kwargs)
    value, least = bound.pop("input", None), bound.pop("min", None)
    if bound.pop("max", None) is not None or bound or least is None or not isinstance(value, Node):
        return None
    return value, least
