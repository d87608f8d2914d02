"""The lens: an FX graph as the patterns see it.

Dynamo's and ATen graphs look the same through it: what a node computes (`kind`), what it yields
(`value`), which memory it shares (`is_view_of`), and in which order nodes must stay (`order`:
data and effect edges over node positions). Nothing is traced or run again.
"""

from __future__ import annotations

import os
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .effects import (
    RANDOM,
    WORLD,
    effects_of,
    is_fence,
    is_idle_dropout,
    storages,
    storages_of,
    tensors_of,
    transform_depth_change,
    value_of,
)
from .kinds import base_name, kind
from .updates import private_updates


def same(a, b) -> bool:
    """Whether two sizes are equal for every size that the graph may meet; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    written = _expression(a)
    if written is not None and written == _expression(b):
        return True  # most of them, and a hundred times cheaper than a proof
    return statically_known_true(a == b)


def _expression(size):
    """How a size is written in the graph's symbols; None for one that is not (a nested tensor's)."""
    return size if isinstance(size, int) else getattr(getattr(size, "node", None), "expr", None)


def _constant(node: Node) -> int | None:
    """The int that the size of a dim is, which the graph asks for and has fixed; adds no guard."""
    value = value_of(node)
    if not isinstance(value, torch.SymInt) or not node.args or not isinstance(node.args[0], Node):
        return None
    asked = node.args[0] if base_name(node) == "getitem" else node
    if base_name(asked) != "size":
        return None
    written = _expression(value)
    return int(written) if getattr(written, "is_Integer", False) else None


def same_shape(a, b) -> bool:
    """`same`, dim by dim."""
    return len(a) == len(b) and all(map(same, a, b))


def hint(size, default: int = 1) -> int:
    """The size seen at compile time: for estimates and the report, never for a decision that
    must hold at other sizes."""
    if isinstance(size, int):
        return size
    value = getattr(getattr(size, "node", None), "_hint", None)
    return int(value) if value is not None else default


def static_size(size) -> int | None:
    """The int that `size` is at every size the graph may meet; None where it may vary."""
    value = hint(size)
    return value if same(size, value) else None


def tensor_bytes(fake: torch.Tensor) -> int:
    """Bytes of the distinct elements of a fake: a broadcast dim counts once."""
    count = fake.element_size()
    for size, stride in zip(fake.shape, fake.stride()):
        count *= 1 if isinstance(stride, int) and stride == 0 else hint(size)
    return count


@contextmanager
def quietly(fake: torch.Tensor) -> Iterator[None]:
    """Within, ops on fakes of the mode of `fake` yield fakes, and no guard is kept of them."""
    mode = fake.fake_mode
    with mode, mode.shape_env.suppress_guards() if mode.shape_env else nullcontext():
        yield


def call(node: Node, args, kwargs):
    """What the op of `node` yields of other arguments than its own."""
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def on_fakes(node: Node, args, kwargs, like: torch.Tensor):
    """`call` of fakes in the mode of `like`; no guard is kept of it."""
    with quietly(like):
        return call(node, args, kwargs)


def again_on_fakes(node: Node, look: Callable[[Node], object], like: torch.Tensor):
    """What `node` yields where its arguments yield what `look` says of them (`on_fakes`)."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), look)
    return on_fakes(node, args, kwargs, like)


def _fact(read: Callable) -> Callable:
    """Makes a Lens's method of one node answer from memory when asked again. For anything but a node
    the answer is None."""
    name = read.__name__

    @wraps(read)
    def fact(lens: Lens, node: Node):
        try:
            return lens._facts[name][node]
        except (KeyError, TypeError):  # not yet known; a list or slice
            if not isinstance(node, Node):
                return None
        result = lens._facts[name][node] = read(lens, node)
        return result

    return fact


class Lens:
    """One graph, read once: it must not change while a lens looks at it. Positions are those of the
    graph at construction.

    Attributes:
        nodes: the nodes in order; `position` is its inverse.
        effects: per node, in order, what it reads and writes.
        order: position -> the positions that must come after it (data, a read after a write, a write
            after a read or write, random draws in turn). Lists: networkx keeps two dicts an edge, which
            large models would not leave in the processor's caches.
        segment: per node, the count of fences (grad mode, autocast, functorch) before it. A fused op
            replaces nodes of one segment only.
        updates: the private updates (`updates.py`), each with the word of its functional form, as which all
            but `effects` and `order` takes it: it is no mutation, and its result no view of what it writes.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        #: numbers that are the same at every size: sizes of a dim that the graph's guards have fixed. Whoever
        #: reads one needs not wait for it
        self.constants = {node: size for node in self.nodes if (size := _constant(node)) is not None}
        self.segment: dict[Node, int] = {}
        self.transformed: set[Node] = set()
        self.written: set = set()
        self.overwritten: set = set()
        self._facts: dict[str, dict] = defaultdict(dict)
        #: memory that the fakes of idle dropouts, and of views of them, have for
        #: themselves -> whose it is
        self._renamed: dict = {}
        for node in filter(is_idle_dropout, self.nodes):
            whose = self.storages(node.args[0])
            for key in storages(value_of(node)) - whose if len(whose) == 1 else ():
                self._renamed[key], = whose
        self._facts["storages"].clear()
        self.effects = {node: effects_of(node, self.storages) for node in self.nodes}
        self.order = self._order()
        self.updates: dict[Node, str] = private_updates(self)
        #: storage -> the positions of its private updates
        self._updated: dict = defaultdict(list)
        for update in self.updates:
            for key in self.storages(update):
                self._updated[key].append(self.position[update])
        self.written -= self._updated.keys()
        self.overwritten -= self._updated.keys()

    @_fact
    def kind(self, node: Node) -> str | None:
        """The word for what `node` computes; None for unknown ops."""
        return self.updates.get(node) or kind(node)

    @_fact
    def storages(self, node: Node) -> frozenset:
        """Keys of the memory behind what `node` yields (`effects.storages`)."""
        keys = storages_of(node)
        return frozenset(self._renamed.get(key, key) for key in keys) if self._renamed else keys

    @_fact
    def bytes_of(self, node: Node) -> int:
        """Bytes of the tensors that `node` yields, at the sizes seen at compile time."""
        return sum(map(tensor_bytes, tensors_of(value_of(node))))

    @_fact
    def tensor(self, node: Node) -> torch.Tensor | None:
        """The one plain tensor that `node` yields, or None (also for sparse tensors, for wrapper
        subclasses and for negative views, whose memory does not hold their values)."""
        value = value_of(node)
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and \
            not value.is_neg() and not is_traceable_wrapper_subclass(value)
        return value if plain else None

    def users(self, node: Node) -> list[Node]:
        return list(node.users)

    @_fact
    def is_view(self, node: Node) -> bool:
        """Whether `node` yields memory of its first argument (an identity counts as a view)."""
        if node.op not in ("call_function", "call_method") or not node.args or \
                not isinstance(node.args[0], Node) or node in self.updates:
            return False
        mine = self.storages(node)
        return bool(mine) and WORLD not in mine and mine <= self.storages(node.args[0]) and \
            self.kind(node) is not None

    @_fact
    def is_identity(self, node: Node) -> bool:
        """Whether `node` yields its first argument itself (`x.float()` of fp32, `contiguous` of dense)."""
        mine, theirs = self.tensor(node), self.tensor(node.args[0]) if node.args else None
        return mine is not None and theirs is not None and self.is_view(node) and \
            mine.dtype == theirs.dtype and same_shape(mine.shape, theirs.shape) and \
            same_shape(mine.stride(), theirs.stride()) and \
            same(mine.storage_offset(), theirs.storage_offset())

    def is_mutated(self, node: Node) -> bool:
        """Whether any node of the graph, private updates aside, writes the memory that `node` yields."""
        return not self.storages(node).isdisjoint(self.written)

    def is_overwritten(self, node: Node, inside: Collection[Node] = ()) -> bool:
        """Whether what `node` yields is written later, private updates that are not `inside` a site included:
        the graph may keep those. Without the ops of which nothing is known, which as a rule only read."""
        keys = self.storages(node)
        if not keys.isdisjoint(self.overwritten):
            return True
        for positions in map(self._updated.get, keys & self._updated.keys()):
            following = bisect(positions, self.position[node])
            if following < len(positions) and self.nodes[positions[following]] not in inside:
                return True
        return False

    def leads_into(self, node: Node, targets: Collection[Node]) -> bool:
        """Whether some target must come after `node`. Looks no further than the last target."""
        places = {self.position[target] for target in targets}
        last, stack, seen = max(places), [self.position[node]], set()
        while stack:
            position = stack.pop()
            if position in places:
                return True
            if position <= last and position not in seen:
                seen.add(position)
                stack.extend(self.order[position])
        return False

    def where(self, node: Node) -> str:
        """`module.path, file.py:line` of `node`, as far as its metadata tells."""
        parts = [part for part in (module_path(node), source_line(node)) if part]
        return ", ".join(parts) or node.name

    def _order(self) -> list[list[int]]:
        after: list[list[int]] = [[] for _ in self.nodes]
        for effect in self.effects.values():
            self.written |= effect.writes
            if WORLD not in effect.writes:
                self.overwritten |= effect.writes
        inputs = frozenset().union(*(self.storages(node) for node in self.nodes
                                     if node.op in ("placeholder", "get_attr"))) - {WORLD}
        # Two inputs may share memory without their fakes saying so: where the graph writes one
        # input, all inputs count as one storage.
        joint = inputs if inputs & self.written else frozenset()
        writer: dict = {}
        readers = defaultdict(list)
        wild: list[int] = []  # readers of memory that cannot be told
        segment = depth = 0
        fence = world = None

        def precede(earlier: Iterable[int], i: int) -> None:
            for j in earlier:
                if j != i and (not after[j] or after[j][-1] != i):
                    after[j].append(i)

        def touch(i: int, keys: frozenset, write: bool) -> None:
            for key in keys if joint.isdisjoint(keys) else {"inputs", *keys - joint}:
                before = writer.get(key, world)
                if before is not None:
                    precede((before,), i)
                if write:
                    others = () if key == RANDOM else wild
                    precede((*readers.pop(key, ()), *others), i)
                    writer[key] = i
                else:
                    readers[key].append(i)

        for i, (node, effect) in enumerate(self.effects.items()):
            precede((self.position[n] for n in node.all_input_nodes if n not in self.constants), i)
            if fence is not None:
                precede((fence,), i)
            if is_fence(node):
                depth += transform_depth_change(node)
                precede(range(fence or 0, i), i)
                segment, fence = segment + 1, i
            self.segment[node] = segment
            if depth > 0:
                self.transformed.add(node)
            if WORLD in effect.writes:
                # Memory that cannot be told: after all that came before, before all that follows.
                touch(i, frozenset(writer) | frozenset(readers), write=True)
                writer.clear()
                wild.clear()
                world = i
            else:
                if WORLD in effect.reads:
                    precede((w for key, w in writer.items() if key != RANDOM), i)
                    wild.append(i)
                touch(i, effect.reads, write=False)
                touch(i, effect.writes, write=True)
        return after


_STEP = re.compile(r"_modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]|([^.\[\]]+)")


def module_path(node: Node) -> str:
    """`blocks.3.attn.norm_q` from Dynamo's module stack; "" when the node has none."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = entry[0] if isinstance(entry, (tuple, list)) else str(entry)
    path = re.sub(r"\A(L\['args'\]\[0\]|L\['[^']*'\]|L__self__|self)\.?", "", path)
    steps = ("".join(filter(None, m)) for m in _STEP.findall(path))
    return ".".join(step for step in steps if step not in ("__dict__", "_modules"))


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def source_line(node: Node) -> str:
    """`model.py:41`: the innermost frame that is not PyTorch's own; "" when unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [f for f in frames if not f[0].startswith(_PACKAGE)]  # auto_fusion's own
    own = [f for f in frames if not re.search(r"[\\/](torch|einops)[\\/]", f[0])] or frames
    if not own:
        return ""
    path, line = own[-1]
    name = re.split(r"[\\/]", path)[-1]
    return f"{name}:{line}"
