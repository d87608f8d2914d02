"""Residual streams that lie across memory: laid out once, where they begin.

A video or image transformer begins with a convolution over patches and `flatten(2).transpose(1, 2)`: tokens
whose features lie a stride apart. `hidden + attention * gate` has the layout of its first operand, so every
sum of the residual stream lies so too. Eager copies it in front of each norm, and its pointwise operations
read one operand in steps; and no kernel takes the sum and the norm together where rows are too long to be
walked across memory (`across.py`). Where that moves more bytes than one copy, the view from which the stream
begins is copied to contiguous memory, and what comes after has the layout that eager would give it then.

Values stay the same, bit by bit but where an operation itself depends on how its operands lie: a product
takes another kernel, a sum another order. What has another layout than in the graph as it came is read only
by operations whose values do not depend on that; it is neither written nor returned, and no gradient of it is
recorded. What the stream is a view of is made by the graph and read by nobody else later, so it is freed when
it has been copied: there is no more memory in use than in eager, which has a copy beside the stream at norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from .across import walks
from .channels_last import CONVOLUTIONS, Patches, patches_of
from .draft import Draft
from .effects import give_value, is_idle_dropout, is_plain, storages, tensors_of, value_of
from .graph import Lens, again_on_fakes, hint, quietly, same, same_shape, source_line, tensor_bytes
from .kernels.pointwise import POINTWISE
from .kinds import REGROUPING_VIEWS, STRIDE_FREE_VIEWS, base_name, ignores_layout, kind
from .lifetimes import Lifetimes
from .patterns import find_norms
from .remedies import remedy
from .site import NUMBERS, Decline, Norm, layout_order

_POINTWISE = frozenset((*POINTWISE, "rsub", "pow", "clamp", "addcmul", "to", "dropout"))
_SUMS = frozenset("layer_norm rms_norm normalize norm mean var std var_mean sum".split())
_VIEWS = STRIDE_FREE_VIEWS | REGROUPING_VIEWS
#: Words of operations that yield contiguous tensors, however their operands lie.
_CONTIGUOUS = frozenset("linear addmm bmm layer_norm".split())
#: Words of operations whose values do not depend on where in memory their operands lie, and whose fakes tell
#: where results do. (Of attention they do not: its kernels differ.)
_INDIFFERENT = _POINTWISE | _SUMS | _VIEWS | \
    frozenset("copy linear matmul addmm bmm einsum cat stack".split())

Look = Callable[[Node], object]


def lay_out_streams(draft: Draft) -> tuple[str, ...]:
    """Have the streams of a draft that lie across memory copied where they begin; it stays as it is where
    none is. Returns notes for the report, also on those that are left."""
    found, left = streams_across(draft)
    notes = _notes_of_left(left)
    if not found:
        return notes
    nodes = draft.change()
    for stream in found:
        _lay_out(draft.graph, stream, nodes)
    note = "; ".join(filter(None, (
        _note([stream for stream in found if not stream.patches], "copied where"),
        _note([stream for stream in found if stream.patches], "laid out by the convolution with which"))))
    return (note, *notes)


def _note(streams: list[Stream], what: str) -> str:
    if not streams:
        return ""
    norms = sum(len(stream.norms) for stream in streams)
    which = f"1 stream that lies across memory is {what} it begins" if len(streams) == 1 else \
        f"{len(streams)} streams that lie across memory are {what} they begin"
    return which + (f": {norms} norm{' reads' if norms == 1 else 's read'} rows" if norms else "")


def _notes_of_left(left: Iterable[Left]) -> tuple[str, ...]:
    """A line a reason, with the places of the first stream that is left for it."""
    groups: dict[str, list[Left]] = {}
    for one in left:
        groups.setdefault(one.reason, []).append(one)
    notes = []
    for reason, (first, *others) in groups.items():
        which = f"the stream that begins at {first.where} lies across memory and is left so" if not others \
            else f"{len(others) + 1} streams that lie across memory are left so (the first begins at " \
                 f"{first.where})"
        cause = f" ({first.cause})" if first.cause else ""
        helps = f"; what helps: {remedy(reason)}" if remedy(reason) else ""
        notes.append(f"{which}: {reason}{cause}{helps}")
    return tuple(notes)


@dataclass(frozen=True)
class Left:
    """A stream that lies across memory and is left so.

    Attributes:
        where: it begins.
        reason: why it is left.
        cause: the place of what caused that, where that has one, and is not where it begins.
    """

    where: str
    reason: str
    cause: str


def streams_across(draft: Draft) -> tuple[list[Stream], list[Left]]:
    """The streams of a draft that are worth a copy, in order; and those that are
    left though norms read several of their values across memory."""
    if not any(base_name(node) in CONVOLUTIONS or (kind(node) in _SUMS and any(
            _is_across(value_of(arg)) for arg in node.all_input_nodes)) for node in draft.graph.nodes):
        return [], []
    sources = [node for node in draft.graph.nodes if _starts_across(node)]
    if not sources:
        return [], []
    lens = draft.lens
    lifetimes = Lifetimes(lens)
    norms = cache(lambda: [found.norm for found in find_norms(lens)[0]])  # takes longer than all else here
    known: dict[Node, object] = {}
    streams, declined = [], {}
    for source in sources:
        try:
            _check_memory(lens, lifetimes, source)
            stream = Stream(source, known)
            stream.flow(lens)
            _check_owner(lens, lifetimes, stream)
            if stream.may_serve(lens):
                stream.serve(norms())
                streams.append(stream)
                known = {**known, **stream.values}
        except Decline as why:
            declined[source] = why
    return streams, _left(lens, declined, known, norms)


def _left(lens: Lens, declined: Mapping[Node, Decline], known: Collection[Node],
          norms: Callable[[], Collection[Norm]]) -> list[Left]:
    """Those of the `declined`, by the views they begin with, that a reader of the report would look for:
    norms read at least two values of the stream across memory. (One norm of a view says by itself what it
    reads.) `known`: what lies across in this graph, and will not."""
    begins: dict[Node, Node] = {}  # a value that lies across -> the first stream that it is of
    for source in declined:
        waiting = [source]
        while waiting:
            value = waiting.pop()
            if value in begins or value in known or not _is_across(value_of(value)):
                continue
            begins[value] = source
            waiting += value.users
    if not any(kind(reader) in _SUMS for value in begins for reader in value.users):
        return []
    read = {norm.value for norm in norms() if norm.value in begins and
            not same(value_of(norm.value).stride(_lane(norm)), 1)}
    counts = Counter(begins[value] for value in read)
    return [Left(lens.where(source), why.reason,
                 lens.where(why.node) if why.node is not source and source_line(why.node) else "")
            for source, why in declined.items() if counts[source] > 1]


class Stream:
    """What comes of a view that lies across memory, if it is copied to contiguous memory.

    Attributes:
        source: the view.
        before: what nodes yield without this copy, where their fakes do not tell: the `values` of the streams
            that are copied already.
        values: what nodes yield with it (a fake, or a tuple of fakes), where that has another layout, or
            shares memory with what has; of `source`, what its copy is.
        norms: those that read a value which lay across.
        patches: the convolution that lays it out, where there is one: nothing is copied then.
    """

    def __init__(self, source: Node, before: Mapping[Node, object]):
        self.source, self.before = source, before
        with quietly(value_of(source)), torch.no_grad():
            copy = self.was(source).clone(memory_format=torch.contiguous_format)
        self.values: dict[Node, object] = {source: copy}
        self.norms: list[Norm] = []
        self.patches: Patches | None = None

    def was(self, node: Node):
        """What `node` yields without the copy."""
        return self.before[node] if node in self.before else value_of(node)

    def now(self, node: Node):
        """What `node` yields with it."""
        return self.values[node] if node in self.values else self.was(node)

    def flow(self, lens: Lens) -> None:
        """Fill in `values`.

        Raises:
            Decline: one of them is read by what may not be indifferent to its layout, or would need memory
                that it does not need in the graph as it came.
        """
        waiting, met = [], set()

        def go_on(node: Node) -> None:
            for reader in node.users.keys() - met:
                met.add(reader)
                heappush(waiting, lens.position[reader])

        go_on(self.source)
        while waiting:
            node = lens.nodes[heappop(waiting)]
            if ignores_layout(node):
                continue
            _check_reader(lens, node)
            was, now = self.was(node), self._run(node)
            before, after = list(tensors_of(was)), list(tensors_of(now))
            if len(before) != len(after) or not all(map(_are_alike, before, after)):
                raise Decline(f"not known to do the same in another layout: {_name(node)}", node)
            read = [arg for arg in node.all_input_nodes if arg in self.values]
            was_view = is_idle_dropout(node) or _share(was, map(self.was, read))
            is_view = _share(now, map(self.now, read))
            if was_view != is_view and not (is_view and _is_whole(now)):
                # A copy more, or a small view that keeps what it is a view of.
                raise Decline(f"laid out, it would take memory elsewhere: {_name(node)}", node)
            if is_view or not all(map(_lie_alike, before, after)) or not _is_settled(node, after):
                self.values[node] = now
                go_on(node)

    def _run(self, node: Node):
        """What `node` yields of what its arguments yield with the copy; None where it fails."""
        try:
            with torch.no_grad():
                return again_on_fakes(node, self.now, self.values[self.source])
        except Exception:  # a view that exists in the other layout alone
            return None

    def may_serve(self, lens: Lens) -> bool:
        """Whether a norm may read what lay across, or a convolution lays the stream out. Fills in
        `patches`."""
        self.patches = patches_of(lens, self.source, self.values[self.source])
        return self.patches is not None or any(
            kind(reader) in _SUMS | _POINTWISE for value in self.values
            if any(map(_is_across, tensors_of(self.was(value)))) for reader in value.users)

    def serve(self, norms: Collection[Norm]) -> None:
        """Fill in `norms`: those that read rows now, and did not.

        Raises:
            Decline: there are none, and no convolution that lays the stream out in front of others; a norm
                reads across memory what it did not before; or no fewer bytes are moved.
        """
        for norm in norms:
            if norm.value in self.values:
                if not same(self.now(norm.value).stride(_lane(norm)), 1):
                    raise Decline("laid out, another norm would read it across memory", norm.out)
                if not same(self.was(norm.value).stride(_lane(norm)), 1):
                    self.norms.append(norm)
        if not (self.norms or (self.patches is not None and norms)) or self.gain() <= 0:
            raise Decline("to lay it out would move as many bytes as it saves, or more", self.source)

    def gain(self) -> int:
        """Bytes that need not be moved with the copy, less those that it moves, at the sizes seen at compile
        time. Counted are copies, in front of norms and below, and what pointwise operations read in another
        order than they write it."""
        copied = {norm.value for norm in self.norms if not walks(self.was(norm.value), _lane(norm))}
        gained = 2 * sum(tensor_bytes(self.was(value)) for value in copied)
        # (What the convolution reads is copied instead of what cuDNN would transpose.)
        gained -= 0 if self.patches else 2 * tensor_bytes(self.now(self.source))
        for node in dict.fromkeys(reader for value in self.values for reader in value.users):
            moved = _stepped if kind(node) in _POINTWISE else _copied
            gained += moved(node, self.was) - moved(node, self.now)
        return gained


# -- where a stream begins


def _is_across(fake: torch.Tensor | None) -> bool:
    """Whether a fake is dense, but its last dim not the innermost in memory."""
    if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided or fake.dim() < 2 or \
            hint(fake.shape[-1]) < 2:
        return False
    try:
        return layout_order(None, fake)[-1] != fake.dim() - 1
    except Decline:
        return False


def _starts_across(node: Node) -> bool:
    """Whether `node` is a view that lies across memory, of what does not."""
    if kind(node) not in _VIEWS or not node.args or not isinstance(node.args[0], Node):
        return False
    above, here = value_of(node.args[0]), value_of(node)
    return _is_across(here) and isinstance(above, FakeTensor) and not _is_across(above) and \
        storages(here) == storages(above)


def _check_memory(lens: Lens, lifetimes: Lifetimes, source: Node) -> None:
    """Raises Decline unless the memory of `source` is made by the graph, and nobody writes it later."""
    _check_plain(lens, source)
    key, = lens.storages(source)
    if key in lifetimes.inputs:
        raise Decline("it begins as a view of an input or a parameter", source)
    if lifetimes.is_written_from(key, source):
        raise Decline("its memory may be written later", source)


def _check_owner(lens: Lens, lifetimes: Lifetimes, stream: Stream) -> None:
    """Raises Decline where somebody keeps the memory of the source when it has been copied, the graph's
    caller included."""
    key, = lens.storages(stream.source)
    for node in lifetimes.aliases[key]:
        if node not in stream.values and any(lens.position[reader] > lens.position[stream.source]
                                             for reader in node.users):
            raise Decline("what it begins as a view of is read later too, or returned", node)


# -- who may read it


def _check_plain(lens: Lens, node: Node) -> None:
    """Raises Decline unless what `node` yields is plain tensors, without gradients."""
    fakes = list(tensors_of(value_of(node)))
    if any(fake.requires_grad for fake in fakes):
        raise Decline("gradients are recorded of it", node)
    if not all(map(is_plain, fakes)):
        raise Decline("it is no plain tensor everywhere", node)
    if node in lens.transformed:
        raise Decline("inside a functorch transform", node)


def _check_reader(lens: Lens, node: Node) -> None:
    """Raises Decline unless `node` yields the same values however its operands lie, in plain tensors."""
    if node.op == "output":
        raise Decline("it is returned, and would be with other strides", node)
    _check_plain(lens, node)
    word = kind(node)
    if word not in _INDIFFERENT or lens.effects[node].writes or \
            (word == "getitem" and not _is_basic(node.args[1])):
        raise Decline(f"its layout may matter to what reads it: {_name(node)}", node)


def _name(node: Node) -> str:
    """What a reader of the report knows a node by."""
    return kind(node) or base_name(node) or getattr(node.target, "__name__", str(node.target))


def _is_basic(index) -> bool:
    """Whether indexing by `index` yields a view: by numbers and slices alone."""
    return all(one is None or one is Ellipsis or isinstance(one, slice) or
               (isinstance(value_of(one) if isinstance(one, Node) else one, NUMBERS) and
                not isinstance(one, bool))
               for one in (index if isinstance(index, tuple) else (index,)))


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fakes differ in layout at most. (Under autocast they may differ in dtype, run here.)"""
    return isinstance(b, FakeTensor) and same_shape(a.shape, b.shape) and a.dtype == b.dtype and \
        a.device == b.device


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fakes of one shape have one layout."""
    return same_shape(a.stride(), b.stride()) and same(a.storage_offset(), b.storage_offset())


def _is_settled(node: Node, results: Iterable[torch.Tensor]) -> bool:
    """Whether what `node` yields lies as its fakes, `results`, say. PyTorch's fakes are often wrong about the
    stride of a dim of one element, which some operations take a tensor's order in memory from."""
    return kind(node) in _CONTIGUOUS or all(
        isinstance(size, int) and size > 1 for result in results for size in result.shape)


def _share(value, others: Iterable) -> bool:
    """Whether `value` and one of `others` have memory in common."""
    return not storages(value).isdisjoint(storages([*others]))


def _is_whole(view) -> bool:
    """Whether a view has all elements of its memory, at the sizes seen at compile time."""
    return isinstance(view, torch.Tensor) and tensor_bytes(view) >= hint(view.untyped_storage().nbytes())


# -- what it costs


def _lane(norm: Norm) -> int:
    return -1 if norm.axis is None else norm.axis


def _stepped(node: Node, look: Look) -> int:
    """Bytes that a pointwise operation reads in another order than it writes."""
    out = look(node)
    if not isinstance(out, torch.Tensor):
        return 0
    # (x.type_as(like) reads nothing of `like`.)
    read = node.args[:1] if kind(node) == "to" else node.all_input_nodes
    operands = [fake for arg in read if isinstance(fake := look(arg), torch.Tensor)]
    return sum(tensor_bytes(fake) for fake in operands if _innermost(fake) not in (None, _innermost(out)))


def _innermost(fake: torch.Tensor) -> int | None:
    """The dim, counted from the last, along which neighbours in memory lie; None where no dim does."""
    steps = [(hint(fake.stride(dim)), dim) for dim in range(-fake.dim(), 0)
             if hint(fake.shape[dim]) > 1 and hint(fake.stride(dim)) > 0]
    return min(steps)[1] if steps else None


def _copied(node: Node, look: Look) -> int:
    """Bytes that `reshape`, `contiguous` and the like move, if they copy."""
    above = node.args[0] if node.args and kind(node) in _VIEWS | {"copy"} else None
    if not isinstance(above, Node) or _share(look(node), [look(above)]):
        return 0
    return 2 * sum(map(tensor_bytes, tensors_of(look(node))))


# -- the copy


def _lay_out(graph: Graph, stream: Stream, nodes: Mapping[Node, Node]) -> None:
    """Copy the source of `stream` in `graph`, or what its convolution reads, and have nodes carry the fakes
    of its values. `nodes`: those to change, by those that `stream` speaks of."""
    if stream.patches:
        stream.patches.lay_out(graph, nodes)
        first = nodes[stream.source]
    else:
        source = nodes[stream.source]
        with graph.inserting_after(source):
            first = graph.call_function(torch.clone, (source,), {"memory_format": torch.contiguous_format})
        first.meta = dict(source.meta)
        source.replace_all_uses_with(first, delete_user_cb=lambda reader: reader is not first)
    for node, value in stream.values.items():
        give_value(first if node is stream.source else nodes[node], value)
