"""Growth: from a norm to the nodes round it that one kernel can take along.

Upwards through casts, copies and pointwise ops that nobody else reads (or whose value the kernel can store
too: the sum of add -> norm), with the views between them moved onto the operands; downwards through
casts and pointwise ops that read nothing but the result. What stops growth is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass

from torch.fx import Node

from ..across import lies_across, walks
from ..effects import value_of
from ..graph import Lens, same, same_shape
from ..heads import Heads, heads_below
from ..kernels.reference import DTYPE_WORDS
from ..kinds import REGROUPING_VIEWS, STRIDE_FREE_VIEWS
from ..rules import rules_of
from ..site import NUMBERS, Composite, Decline, Moved, Norm, pointwise_args, pointwise_word
from ..views import Step, replay
from .rotary import ELEMENTWISE, MAX_LANE, rotations
from .written_rotary import written_below

#: full-size operands that one kernel may read: more would not fit on chip together
MAX_OPERANDS = 8

#: words of nodes that yield the values of their first argument
COPIES = frozenset({"to", "copy"}) | REGROUPING_VIEWS

#: words of nodes that, as identities, yield their argument and no view of it
ITSELF = frozenset({"dropout", "to", "copy"})


@dataclass(frozen=True)
class Reach:
    """How far a growth goes.

    Attributes:
        pointwise_up: through adds, gates, activations above the norm.
        store_up: values above that have other readers are stored by the kernel as well.
        pointwise_down: through modulate, activations below the norm.
        copies: through casts, copies and reshapes above.
        rotary: through a rotary embedding below.
    """

    name: str
    pointwise_up: bool
    store_up: bool
    pointwise_down: bool
    copies: bool
    rotary: bool


#: From the largest to the bare norm; selection takes the first that works.
REACHES = (
    Reach("full", True, True, True, True, True),
    Reach("no second output", True, False, True, True, True),
    Reach("no pointwise above", False, False, True, True, True),
    Reach("no rotary", True, True, True, True, False),
    Reach("no rotary or second output", True, False, True, True, False),
    Reach("no rotary or pointwise above", False, False, True, True, False),
    Reach("casts alone", False, False, False, True, False),
    Reach("bare", False, False, False, False, False),
)


@dataclass(frozen=True)
class Grown:
    """The result of growth: see `site.assemble`."""

    interior: frozenset[Node]
    outputs: tuple[Node, ...]
    regroup: Node | None
    composites: tuple[Composite, ...] = ()
    heads: tuple[Heads, ...] = ()
    moved: Moved | None = None


class Grower:
    """Grows one norm, or several of one space, as far as `reach` says."""

    def __init__(self, lens: Lens, norms: tuple[Norm, ...], reach: Reach,
                 claimed: Collection[Node] = ()):
        self.lens, self.norms, self.reach, self.claimed = lens, norms, reach, claimed
        self.interior: set[Node] = set().union(*(norm.interior for norm in norms))
        self.stored: list[Node] = []
        self.composites: list[Composite] = []
        #: what is inside below the norm, and which of it `_down` has been at
        self.below: set[Node] = {norm.out for norm in norms}
        self.followed: set[Node] = set()
        #: `y.type_as(x)` -> x: no reader of x where it is inside too
        self.templates: dict[Node, Node] = {}
        self.regroup: Node | None = None
        self.heads: tuple[Heads, ...] = ()
        self.moved: Moved | None = None
        first = norms[0]
        self.segment = lens.segment[first.out]
        self.space = lens.tensor(first.value).shape
        self.device = lens.tensor(first.value).device
        self.flat = len(first.shape) > 1
        self.axis = -1 if first.axis is None else first.axis

    def run(self) -> Grown:
        for norm in self.norms:
            self._up(norm.value, on_value=True)
            for vector in (norm.weight, norm.bias):
                if vector is not None:
                    self._up(vector)
        outputs = list(dict.fromkeys(norm.out for norm in self.norms))
        outputs = [leaf for out in outputs for leaf in self._down(out)]
        self._close_templates(outputs)
        return Grown(frozenset(self.interior), (*outputs, *self.stored), self.regroup,
                     tuple(self.composites), self.heads, self.moved)

    def _close_templates(self, outputs: list[Node]) -> None:
        for cast, value in self.templates.items():
            if cast in self.interior or value not in self.interior or value in outputs:
                continue
            source = cast.args[0]
            if source not in outputs or not self.interior.issuperset(source.users.keys() - {cast}) or \
                    not self.lens.is_identity(cast) or not self._mine(cast):
                raise Decline("a value inside gives its dtype to a cast outside", cast)
            # `.type_as(x)` at the end of fp32: nothing is cast, but x is read
            self.interior.add(cast)
            outputs[outputs.index(source)] = cast

    # Upwards

    def _up(self, node: Node, on_value: bool = False) -> None:
        """Take in what yields `node`, an operand so far, where that is possible."""
        chain = self._views_above(node)
        source = chain[-1].args[0] if chain else node
        if not isinstance(source, Node) or source in self.interior or source in self.lens.transformed:
            return
        if self._try_regroup(node, chain, on_value):
            return
        if any(self.lens.kind(view) not in STRIDE_FREE_VIEWS and not self.lens.is_identity(view)
               for view in chain):
            return
        if not self._absorbable(source, chain):
            return
        self._take(source, chain, on_value and not chain)

    def _take(self, source: Node, chain: list[Node], on_value: bool) -> None:
        self.stored += self._read_outside([source, *chain])
        self.interior.update(chain, (source,))
        unary = self.lens.kind(source) in COPIES
        for arg in self._tensor_args(source):
            self._up(arg, on_value and unary)

    def _tensor_args(self, node: Node) -> list[Node]:
        """The tensors whose values `node` computes with (not the other of `type_as`)."""
        copies = self.lens.kind(node) in COPIES
        args = node.args[:1] if copies else pointwise_args(self.lens, node)
        return [arg for arg in args if self.lens.tensor(arg) is not None]

    def _try_regroup(self, node: Node, chain: list[Node], on_value: bool) -> bool:
        """A reshape that keeps the lane moves below the norm, onto the contiguous result."""
        lens = self.lens
        if not on_value or self.regroup is not None or self.flat or self.axis != -1 or \
                not self.reach.copies:
            return False
        if len(chain) > 1 or lens.kind(node) not in REGROUPING_VIEWS or \
                lens.kind(node) in ("view_as", "reshape_as"):
            return False
        source = node.args[0] if node.args else None
        shape = lens.tensor(source)
        if shape is None or not self._mine(node) or not shape.dim():
            return False
        if any(user not in self.interior for user in node.users):
            return False
        if not same(shape.shape[-1], self.space[-1]) or \
                not same_shape(self.space, lens.tensor(node).shape):
            return False
        if lens.is_view(node) and not self._worth_moving(source):
            return False
        if self.stored or not same(shape.stride(-1), 1):
            return False
        self.regroup = node
        self.interior.add(node)
        self._up(source, on_value=True)
        return True

    def _worth_moving(self, source: Node) -> bool:
        """Whether a copy or cast above a view would be saved by moving the view."""
        return self.lens.kind(source) in ("to", "copy") and not self.lens.is_view(source)

    def _views_above(self, node: Node) -> list[Node]:
        """The views from `node` upwards that only this site reads, or that yield what the kernel may store
        for others too: an identity (dropout in eval mode), which is the value itself."""
        chain: list[Node] = []
        while self.lens.is_view(node) and self._mine(node) and (
                not self._read_outside([node], chain) or
                (self.reach.store_up and self.lens.kind(node) in ITSELF and self.lens.is_identity(node))):
            chain.append(node)
            node = node.args[0]
        return chain

    def _read_outside(self, nodes: list[Node], below: list[Node] = ()) -> list[Node]:
        """Those of `nodes` that somebody reads who is neither inside, nor one of them, nor `below`."""
        return [node for node in nodes
                if any(user not in self.interior and user not in nodes and user not in below
                       for user in node.users)]

    def _mine(self, node: Node) -> bool:
        """Whether `node` may be touched at all: same segment, memory never written, no part of a norm
        (what makes up another norm is that one's own)."""
        return self.lens.segment[node] == self.segment and not self._is_written(node) and \
            node not in self.claimed

    def _is_written(self, node: Node) -> bool:
        """Whether the memory of `node` is written, other than by a rotary embedding that is taken along."""
        return self.lens.is_mutated(node) and not any(
            self.lens.storages(node) <= self.lens.storages(composite.out) for composite in self.composites)

    def _absorbable(self, node: Node, chain: list[Node]) -> bool:
        lens = self.lens
        fake = lens.tensor(node)
        if node.op not in ("call_function", "call_method") or fake is None or \
                lens.is_view(node) or not self._mine(node):
            return False
        if fake.dtype not in DTYPE_WORDS or fake.device != self.device:
            return False
        word = lens.kind(node)
        if word in COPIES:
            if not self._plain_copy(node, word):
                return False
        elif not (self.reach.pointwise_up or self._below(node)) or \
                not self._pointwise(node, same_only=not all(map(lens.is_identity, chain))):
            return False
        shared = self._read_outside([node, *chain])
        if not shared:
            return True
        # The kernel may store the value too, when it has the space's full shape, under one name.
        # Then none of those readers may come between it and the norm.
        inside = self.interior.union(chain)
        return self.reach.store_up and all(map(lens.is_identity, chain)) and len(shared) == 1 and \
            not self.flat and self.regroup is None and \
            word not in REGROUPING_VIEWS and len(self.stored) < 2 and \
            same_shape(fake.shape, self.space) and \
            not any(lens.leads_into(reader, self.interior) for reader in shared[0].users.keys() - inside)

    def _below(self, node: Node) -> bool:
        """Whether `node` reads what stands below the norm: the other side of a diamond."""
        return any(arg in self.below for arg in node.all_input_nodes)

    def _plain_copy(self, node: Node, word: str) -> bool:
        """A cast or copy of one float tensor that keeps the shape, and whose source has the lane where
        kernels walk it."""
        if not self.reach.copies:
            return False
        source = self.lens.tensor(node.args[0]) if node.args else None
        fake = self.lens.tensor(node)
        if source is None or source.dtype not in DTYPE_WORDS or source.device != fake.device:
            return False
        if not same_shape(source.shape, fake.shape) or not source.dim():
            return False
        if source.dim() != self.lens.tensor(self.norms[0].value).dim():
            return True  # a vector: its layout is checked where it is read
        kept = same(source.stride(self.axis), 1) or same(source.shape[self.axis], 1) or \
            lies_across(source, self.axis)
        return kept or (word == "to" and not same(fake.stride(self.axis), 1))

    def _pointwise(self, node: Node, same_only: bool) -> bool:
        lens = self.lens
        if pointwise_word(lens, node) is None:
            return False
        full = 0
        for arg in pointwise_args(lens, node):
            if not isinstance(arg, Node):
                if isinstance(arg, bool) or not isinstance(arg, (int, float)):
                    return False
                continue
            value = value_of(arg)
            fake = lens.tensor(arg)
            if fake is None:
                if not isinstance(value, NUMBERS):
                    return False
                continue
            if fake.dtype not in DTYPE_WORDS or fake.device != self.device:
                return False
            if (same_only or self.flat) and not same_shape(fake.shape, lens.tensor(node).shape):
                return False
            if not self._broadcasts(fake):
                return False
            full += same_shape(fake.shape, self.space)
        return full + self._full_operands() <= MAX_OPERANDS

    def _broadcasts(self, fake) -> bool:
        shape = self._inner_shape()
        if fake.dim() > len(shape):
            return False
        tail = shape[len(shape) - fake.dim():]
        fits = all(same(size, space) or same(size, 1) for size, space in zip(fake.shape, tail))
        lane = self.axis if self.axis < 0 else self.axis - len(shape)
        if not fits or fake.dim() < -lane:
            return fits
        return same(fake.shape[lane], 1) or walks(fake, lane)

    def _inner_shape(self):
        return self.space if self.regroup is None else self.lens.tensor(self.regroup.args[0]).shape

    def _full_operands(self) -> int:
        operands = {arg for node in self.interior for arg in node.all_input_nodes
                    if arg not in self.interior}
        fakes = map(self.lens.tensor, operands)
        return sum(1 for fake in fakes if fake is not None and same_shape(fake.shape, self.space))

    # Downwards

    def _down(self, node: Node) -> list[Node]:
        """Absorb the readers of `node` where all of them can be; the nodes to write in its place."""
        if node in self.followed:  # reached twice, as x is in x * sigmoid(x)
            return []
        self.followed.add(node)
        readers, twins = self._readers(node)
        if len(readers) == 1 and self._passes_view(readers[0], node):
            return self._down_through(readers[0], node, twins)
        if len(readers) == 1 and not self.heads and self._sees_heads(node):
            heads = heads_below(self.lens, node, readers[0], self._mine)
            leaves = None if heads is None else self._down_heads(heads, twins)
            if leaves is not None:
                return leaves
        if len(readers) == 1 and not twins and (axis := self._lane_moved_to(readers[0], node)) is not None:
            return self._down_through(readers[0], node, twins, axis)
        composites = self._rotations(node, twins)
        hidden = set().union(*(composite.nodes for composite in composites))
        readers = [reader for reader in readers if reader not in hidden]
        if not (readers or composites) or \
                not all(self._absorbs_reader(reader, node, twins, readers) for reader in readers):
            return [node]
        if len(readers) + len(composites) + len(self.stored) > 3:
            return [node]
        self.interior.update(readers, hidden, twins)
        self.below.update(readers, hidden, twins)
        self.composites += composites
        for reader in readers:
            for arg in self._tensor_args(reader):
                if arg not in self.interior:
                    self._up(arg)
        rotated = [composite.out for composite in composites]
        return [leaf for reader in (*rotated, *readers) for leaf in self._down(reader)]

    def _readers(self, node: Node) -> tuple[list[Node], list[Node]]:
        """The readers of `node`, and the identities (`x.float()` of fp32) through which some read it."""
        readers: list[Node] = []
        equal = [node]
        for one in equal:  # which grows on the way
            for user in one.users:
                if user.args[:1] == (one,) and self.lens.is_identity(user) and self._mine(user):
                    equal.append(user)
                elif self.reach.rotary and self.lens.kind(user) == "to" and user.args[:1] != (one,):
                    self.templates[user] = one
                elif user not in readers:
                    readers.append(user)
        return readers, equal[1:]

    def _rotations(self, node: Node, twins: list[Node]) -> list[Composite]:
        """The rotations, and rotary embeddings written into a buffer, of `node` that a kernel can take
        along."""
        if not self._rotates():
            return []
        found = [composite for composite in rotations(self.lens, node, twins)
                 if all(map(self._mine, composite.nodes))]
        found += [composite for composite in written_below(self.lens, node)
                  if all(self.lens.segment[part] == self.segment and part not in self.claimed
                         for part in composite.nodes)]
        return [composite for composite in found if self.lens.transformed.isdisjoint(composite.nodes)]

    def _rotates(self) -> bool:
        """Whether a kernel can move elements along the lane."""
        return self.reach.rotary and rules_of(self.device) not in ELEMENTWISE and not self.flat and \
            self.axis == -1 and self.regroup is None

    def _passes_view(self, view: Node, node: Node) -> bool:
        """Whether what follows `view` may be computed on the view: it leaves the lane alone, and
        nothing else is written by the site."""
        if not self._may_pass(view):
            return False
        lens, fake, source = self.lens, self.lens.tensor(view), self.lens.tensor(node)
        # A view cannot be taken of a broadcast operand (a modulate's [B, 1, D]) that stands above it.
        if any(arg not in self.interior and lens.tensor(arg).dim() > 1
               and not same_shape(lens.tensor(arg).shape, source.shape)
               for below in self.below if pointwise_word(lens, below) for arg in self._tensor_args(below)):
            return False
        return fake.dim() > 0 and same(fake.shape[-1], source.shape[-1]) and \
            same(fake.stride(-1), source.stride(-1)) and not same(source.shape[-1], 1)

    def _may_pass(self, view: Node) -> bool:
        """Whether growth may go on below a view at all."""
        lens = self.lens
        return lens.tensor(view) is not None and self.reach.pointwise_down and not self.stored and \
            not self.flat and self.regroup is None and self.axis == -1 and len(self.norms) == 1 and \
            not self.heads and lens.is_view(view) and lens.kind(view) in STRIDE_FREE_VIEWS and \
            self._mine(view)

    def _lane_moved_to(self, view: Node, node: Node) -> int | None:
        """The dim to which `view` moves the lane of `node`, the others keeping their order (the permute back
        to NCHW); None where it is another view, or growth cannot go on below it."""
        if not self._may_pass(view) or self.composites:
            return None
        source, fake = self.lens.tensor(node), self.lens.tensor(view)
        for axis in range(fake.dim() - 1) if fake.dim() == source.dim() else ():
            back = replay(fake, (Step.method("movedim", axis, -1),))
            if same_shape(back.shape, source.shape) and same_shape(back.stride(), source.stride()) and \
                    same(back.storage_offset(), source.storage_offset()):
                return axis
        return None

    def _down_through(self, view: Node, node: Node, twins: list[Node], axis: int | None = None) -> list[Node]:
        """Go on below a view (q.transpose(1, 2) before a rotary embedding, or before a copy; one that moves
        the lane to dim `axis`); alone it is not worth taking, since it costs nothing where it is."""
        before = set(self.interior), self.space, self.axis
        self.interior.update([view], twins)
        self.below.update([view], twins)
        self.space = self.lens.tensor(view).shape
        if axis is not None:
            self.axis, self.moved = axis, Moved(view, axis)
        leaves = self._down(view)
        if leaves == [view]:
            self.interior, self.space, self.axis = before
            self.moved = None
            return [node]
        return leaves

    def _sees_heads(self, node: Node) -> bool:
        """Whether the site may see the lane of `node` as heads from here on."""
        return self._rotates() and not self.stored and len(self.norms) == 1 and \
            self.norms[0].lane <= MAX_LANE and same_shape(self.lens.tensor(node).shape, self.space)

    def _down_heads(self, heads: Heads, twins: list[Node]) -> list[Node] | None:
        """Go on below views that make heads of the lane, where a rotary embedding is; None where none is:
        what is pointwise is as well done by others, and such a view may be part of a rotation of pairs."""
        kept = {name: copy(getattr(self, name)) for name in
                ("interior", "below", "followed", "stored", "composites", "templates", "space")}
        self.heads, self.space = (heads,), self.lens.tensor(heads.view).shape
        self.interior.update(heads.nodes, twins)
        self.below.update(heads.nodes, twins)
        leaves = self._down(heads.view)
        if self.composites:
            return leaves
        self.heads = ()
        vars(self).update(kept)
        return None

    def _absorbs_reader(self, reader: Node, node: Node, twins: list[Node], fellows: list[Node]) -> bool:
        lens = self.lens
        fake = lens.tensor(reader)
        if fake is None or lens.is_view(reader) or not self._mine(reader) or \
                lens.is_mutated(node) or reader in lens.transformed:
            return False
        if fake.dtype not in DTYPE_WORDS or not same_shape(fake.shape, lens.tensor(node).shape):
            return False
        if lens.kind(reader) in ("to", "copy"):
            source = lens.tensor(node)
            return reader.args[0] in (node, *twins) and source.device == fake.device
        if not self.reach.pointwise_down or not self._pointwise(reader, same_only=False):
            return False
        # No operand may be made from what the site yields.
        others = [arg for arg in self._tensor_args(reader)
                  if arg not in self.interior and arg not in twins and arg not in fellows]
        if others and any(lens.leads_into(other, others) for other in (node, *self.stored)):
            return False
        # In a regrouped space operands are laid out otherwise than the result: lanes only.
        return self.regroup is None or all(
            arg is node or arg in twins or not isinstance(arg, Node) or lens.tensor(arg) is None
            or lens.tensor(arg).dim() <= 1 for arg in pointwise_args(lens, reader))


def grow(lens: Lens, norms: tuple[Norm, ...], reach: Reach,
         claimed: Collection[Node] = ()) -> Grown:
    """The nodes that one kernel can take along with `norms`, and what it must write.

    `claimed`: the nodes of all norms of the graph, which no other site grows into."""
    return Grower(lens, norms, reach, claimed).run()
