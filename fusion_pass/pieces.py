"""Cats of all the pieces of one tensor, in order: that tensor, copied.

Blocks of diffusers' FLUX and HunyuanVideo hand on `hidden[:, :n], hidden[:, n:]`, and the next block begins
with `torch.cat([text, image], dim=1)`. Eager copies there what lies in memory as it should; here the cat is
left out and its readers read the tensor itself. Pieces are not known by how they are spelled: the fakes tell
where in memory they lie.

A cat makes a new tensor, so it is left out only where nobody can tell: neither it nor the tensor is written
afterwards, and it does not leave the graph under any name. Where gradients are recorded it stays: the
tensor's gradient would be summed in another order. It stays, too, where backward may read it of somebody
else's, a weight, and the tensor is an input or is returned: its owner may write it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from .draft import Draft
from .effects import WORLD, effects_of, give_value, is_plain, storage_key, storages_of, tensors_of, value_of
from .graph import Lens, quietly, same, same_shape
from .kinds import kind
from .lifetimes import Lifetimes
from .patterns.rotary import joined
from .rewrite import erase_unread


def drop_needless_cats(draft: Draft) -> tuple[str, ...]:
    """Leave them out of a draft, which stays as it is where it has none; returns notes for the report."""
    found = needless_cats(draft)
    if not found:
        return ()
    left_out = _replace(found, draft.change())
    erase_unread(draft.graph, left_out, _is_pure)
    which = "1 cat of all pieces of a tensor is" if len(found) == 1 else \
        f"{len(found)} cats of all pieces of a tensor are"
    return (f"{which} not made: the tensor itself is read",)


def needless_cats(draft: Draft) -> dict[Node, Node]:
    """The cats of a draft that need not be made -> the tensor to read instead (which may be such a cat
    too)."""
    cats = [node for node in draft.graph.nodes if kind(node) == "cat" and
            len({storages_of(part) for part in joined(node)[0]}) == 1]
    if not cats:
        return {}
    lens = draft.lens
    memory = _Memory(lens)
    found = {}
    for cat in cats:
        source = _source(lens, cat)
        if source is not None and memory.is_common(cat, source):
            found[cat] = source
    return found


def _source(lens: Lens, cat: Node) -> Node | None:
    """The tensor, somewhere above the first part of a cat, all of whose pieces the cat joins."""
    parts, dim = joined(cat)
    result, pieces = lens.tensor(cat), [lens.tensor(part) for part in parts]
    if not is_plain(result) or not isinstance(dim, int) or not all(map(is_plain, pieces)):
        return None
    above = parts[0]
    while above is not None:
        whole = lens.tensor(above)
        if is_plain(whole) and _are_pieces(pieces, whole, result, dim):
            near = lens.segment[above] == lens.segment[cat] and cat not in lens.transformed
            return above if near else None
        keys = lens.storages(above)
        above = next((node for node in above.all_input_nodes if lens.storages(node) == keys), None)
    return None


def _are_pieces(pieces: Sequence[torch.Tensor], whole: torch.Tensor, result: torch.Tensor, dim: int) -> bool:
    """Whether `pieces` lie side by side along `dim` in the memory of `whole`, from end to end, and `whole` is
    laid out as `result`, which has memory of its own.

    Of memory that begins at an offset it would be known to whom addresses matter: a kernel that wants them
    aligned, a view as another dtype.
    """
    if not same_shape(whole.stride(), result.stride()) or not same(whole.storage_offset(), 0):
        return False
    dim %= whole.dim()
    start = 0
    for piece in pieces:
        offset = whole.storage_offset() + start * whole.stride(dim)
        if storage_key(piece) != storage_key(whole) or piece.dtype != whole.dtype or \
                not same(piece.storage_offset(), offset):
            return False
        for i, (size, stride) in enumerate(zip(piece.shape, piece.stride())):
            if i != dim and not same(size, whole.shape[i]):
                return False
            if not same(stride, whole.stride(i)) and not same(size, 1):
                return False
        start += piece.shape[dim]
    return same(start, whole.shape[dim])


class _Memory(Lifetimes):
    """The memory of a graph, as far as cats of it are concerned."""

    def __init__(self, lens: Lens):
        super().__init__(lens)
        #: storage of a cat that is common -> the storage that is read instead, which no such cat has
        self.roots: dict = {}

    def is_common(self, cat: Node, source: Node) -> bool:
        """Whether nobody can tell if `cat`, whose values are those of `source`, has memory of its own. To be
        asked in the graph's order."""
        mine, theirs = self.lens.storages(cat), self.lens.storages(source)
        if len(mine) != 1 or len(theirs) != 1 or WORLD in mine | theirs or mine & self.leaving:
            return False
        (made,), (kept,) = mine, theirs
        root = self.roots.get(kept, kept)
        if made in self.last_write or self.is_written_from(kept, cat) or \
                (root in self.inputs | self.leaving and self._may_be_saved(made)) or \
                not all(_can_move(tensor, value_of(cat)) for node in self.aliases[made]
                        for tensor in tensors_of(value_of(node))):
            return False
        self.roots[made] = root
        return True

    def _may_be_saved(self, key) -> bool:
        """Whether a backward pass, which runs when the graph has, may read this memory."""
        return any(tensor.requires_grad for node in self.aliases[key] for reader in node.users
                   for tensor in tensors_of(value_of(reader)))


def _can_move(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a fake that may be a view of `whole` can be made as one of another tensor (`_replace`)."""
    return storage_key(view) != storage_key(whole) or (is_plain(view) and view.dtype == whole.dtype)


def _replace(found: Mapping[Node, Node], nodes: dict[Node, Node]) -> list[Node]:
    """Have the tensors read in the place of their cats, and the fakes of the cats' views be views of them.
    Returns the cats. `nodes`: those to change, by those that `found` speaks of, in order (`Draft.change`)."""
    left_out = []
    bases: dict = {}  # storage of a cat -> the fake of what is read instead

    def moved(view: torch.Tensor) -> torch.Tensor:
        base = bases.get(storage_key(view))
        if base is None:
            return view
        with quietly(base), torch.no_grad():
            return base.as_strided(view.shape, view.stride(), view.storage_offset())

    for before, node in nodes.items():
        if before in found:
            source = nodes[found[before]]
            bases[storage_key(value_of(node))] = value_of(source)
            node.replace_all_uses_with(source)
            left_out.append(node)
            nodes[before] = source
        elif not bases.keys().isdisjoint(storages_of(node)):
            give_value(node, tree_map_only(torch.Tensor, moved, value_of(node)))
    return left_out


def _is_pure(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and not effects_of(node).writes
