"""Cats of all slices of a value: `torch.cat([h[:, :n], h[:, n:]], 1)` is a copy of `h`.

Models that take image and text apart behind one block, and join them in front of the next (FLUX,
HunyuanVideo), copy the whole of it. Where nobody could tell the copy from the value, it is left out, and
sites grow across.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from .effects import value_of
from .graph import Lens, hint, same, same_shape
from .kernels.region import dense_strides
from .kinds import kind
from .patterns.rotary import joined
from .rewrite import copy_graph


def without_needless_cats(graph: Graph) -> tuple[Graph, dict]:
    """(a copy of `graph`, whose nodes carry fakes, in which the value is read instead of each of them; memory
    of their fakes -> that of the value, for a Lens of it); `graph` itself where it has none."""
    cats = [node for node in graph.nodes if kind(node) == "cat" and _sliced(joined(node)[0]) is not None]
    if not cats:
        return graph, {}
    lens = Lens(graph)
    found = {node: whole for node in cats if (whole := _whole(lens, node)) is not None}
    if not found:
        return graph, {}
    copied, env = copy_graph(graph)
    renamed: dict = {}
    for cat, whole in found.items():  # in order: a value may be a cat of them itself
        copy, (slices, _) = env[cat], joined(env[cat])
        copy.replace_all_uses_with(env[whole])
        env[cat] = env[whole]
        _erase_unused(copied, (copy, *slices, *(part.args[0] for part in slices)))
        (key,), (own,) = lens.storages(cat), lens.storages(whole)
        renamed[key] = renamed.get(own, own)
    return copied, renamed


def _erase_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    for node in dict.fromkeys(nodes):
        if not node.users and node.op in ("call_function", "call_method"):
            graph.erase_node(node)


def _sliced(parts: tuple[Node, ...]) -> Node | None:
    """The node that all `parts` are taken of, by a slice or a split; None where they are of several."""
    sources = {part.args[0] if part.args else None for part in parts}
    source = sources.pop() if len(sources) == 1 else None
    if not isinstance(source, Node):
        return None
    if isinstance(value_of(source), (tuple, list)):
        source = source.args[0] if source.args else None
    return source if isinstance(source, Node) else None


def _whole(lens: Lens, cat: Node) -> Node | None:
    """The value of which `cat` joins all slices, in order, where it may stand for the copy: both are
    contiguous, neither is written, and the copy does not leave the graph."""
    parts, dim = joined(cat)
    whole = _sliced(parts)
    value, copy = lens.tensor(whole), lens.tensor(cat)
    if value is None or copy is None or not isinstance(dim, int) or cat in lens.transformed or \
            lens.segment[whole] != lens.segment[cat] or \
            value.dtype != copy.dtype or value.requires_grad != copy.requires_grad or \
            not _alike(value, copy) or not same(value.storage_offset(), 0):
        return None
    offset, dim = 0, dim % copy.dim()
    for part in parts:
        read = lens.tensor(part)
        if read is None or not lens.is_view(part) or lens.storages(part) != lens.storages(whole) or \
                not same_shape(read.stride(), value.stride()) or not same(read.storage_offset(), offset):
            return None
        offset = offset + read.shape[dim] * value.stride(dim)
    # Memory that is the value's alone: of the copy's size, and no input's, which may share it with others.
    outputs = next(node for node in reversed(lens.nodes) if node.op == "output").all_input_nodes
    given = [node for node in lens.nodes if node.op in ("placeholder", "get_attr")]
    if hint(value.untyped_storage().nbytes()) != lens.bytes_of(cat) or \
            any(lens.is_mutated(node) or lens.is_overwritten(node) for node in (whole, cat)) or \
            _share(lens, cat, outputs) or _share(lens, whole, given):
        return None
    return whole


def _alike(value: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether both are contiguous, of the same sizes and on the same device."""
    return copy.dim() > 0 and value.device == copy.device and same_shape(value.shape, copy.shape) and all(
        same_shape(x.stride(), dense_strides(tuple(x.shape), range(x.dim()))) for x in (value, copy))


def _share(lens: Lens, node: Node, others: Iterable[Node]) -> bool:
    """Whether `node` shares memory with any of `others`."""
    own = lens.storages(node)
    return any(not own.isdisjoint(lens.storages(other)) for other in others)
