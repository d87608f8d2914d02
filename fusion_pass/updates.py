"""Private updates: in-place pointwise ops that mean the same as their functional form.

`h = norm(x); h.mul_(scale).add_(shift)` writes memory that was made in the graph and that nobody reads
as it was. Whether `mul_` writes there or makes a tensor of its own cannot be told, so a site may take it in
like `mul`. Where no site does, the graph keeps it, in place: what must come before it comes before it either
way.

The unit is a storage, as in `effects.py`: all that writes it must be a private update, or none is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .effects import RANDOM, WORLD, binds_inplace, inplace_position, value_of
from .kernels.pointwise import POINTWISE
from .kernels.region import dense_strides
from .kinds import KINDS, REGROUPING_VIEWS, base_name, kind

if TYPE_CHECKING:
    from .graph import Lens

_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "ipow": "pow"}
_WORDS = frozenset(POINTWISE) | {"pow"}

#: Views of all elements of a tensor. (`to`, `copy` and `dropout` where they yield their argument itself.)
_WHOLE_VIEWS = REGROUPING_VIEWS | frozenset(
    "to copy dropout unflatten permute transpose movedim unsqueeze squeeze swapaxes swapdims moveaxis t mT"
    .split())

#: Ops whose results have memory of their own, unless the fakes say otherwise.
_MAKERS = _WORDS | REGROUPING_VIEWS | frozenset(
    "to copy rsub layer_norm rms_norm normalize matmul linear addmm conv2d cat stack mean sum var addcmul "
    "embedding scaled_dot_product_attention".split())

#: Those of them whose backward does not need the result: eager lets it be written in place.
_KEEP_NO_RESULT = frozenset(
    "to copy add sub rsub mul div neg abs square silu gelu mish hardswish layer_norm rms_norm normalize "
    "matmul linear addmm conv2d cat stack".split())


def update_word(node: Node) -> str | None:
    """The word of the pointwise op that `node` computes in place, on its first argument, which it yields;
    None for any other node."""
    name = base_name(node)
    if name is None or not node.args or not isinstance(node.args[0], Node) or "out" in node.kwargs:
        return None
    if node.op == "call_function" and binds_inplace(node):
        word = kind(node)
    elif name.startswith("__"):
        word = _OPERATORS.get(name.strip("_")) if node.op == "call_method" else None
    elif name.endswith("_"):
        word = KINDS.get(name[:-1])
    else:
        word = _OPERATORS.get(name) if node.op == "call_function" else None
    return word if word in _WORDS else None


def without_inplace(node: Node) -> tuple[tuple, dict]:
    """The arguments of a call but for `inplace`."""
    kwargs = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    position = inplace_position(node.target) if node.op == "call_function" else None
    return node.args[:position], kwargs


def private_updates(lens: Lens) -> dict[Node, str]:
    """The updates of a graph that may be read as their functional form, in order, with their words; the lens
    need not know `updates` yet.

    Those of a storage are private when
    - it is made in the graph, by an op that yields nothing else, and an update writes all of it;
    - what was there before an update is read after it by nobody, under any name: whoever comes later reads
      the update's result;
    - nothing else writes it, and nothing sees it that may keep it (ops of which nothing is known);
    - a new tensor of its values would have its strides;
    - all happens under one grad mode and autocast, outside of functorch transforms;
    - where gradients are recorded, eager would allow it, and the update is of one dtype.
    """
    updates: dict[object, list[Node]] = defaultdict(list)
    spoiled: set = {WORLD}
    for node, effect in lens.effects.items():
        writes = effect.writes - {RANDOM}
        if not writes:
            continue
        if len(writes) == 1 and update_word(node) and lens.storages(node) == writes:
            updates[next(iter(writes))].append(node)
        else:
            spoiled |= writes
    aliases: dict[object, list[Node]] = {key: [] for key in updates if key not in spoiled}
    for node in lens.nodes:
        for key in lens.storages(node) if aliases else ():
            if key in aliases:
                aliases[key].append(node)
    private = [node for key, nodes in aliases.items() if _are_private(lens, nodes, updates[key])
               for node in updates[key]]
    return {node: update_word(node) for node in sorted(private, key=lens.position.__getitem__)}


def _are_private(lens: Lens, aliases: Sequence[Node], updates: Sequence[Node]) -> bool:
    """Whether the updates of a storage are; `aliases` are all nodes that yield memory of it, in order."""
    maker, waiting = aliases[0], set(updates)
    if maker in waiting or lens.tensor(maker) is None or (kind(maker) or base_name(maker)) not in _MAKERS:
        return False
    last_read, current = -1, maker  # `current`: the maker, or the last update
    for node in aliases:
        position = lens.position[node]
        if node in waiting:
            if last_read > position or not _is_update_of(lens, node, current):
                return False
            current = node
        elif node is not maker and kind(node) is None:
            return False  # as_strided, detach
        for user in node.users:
            if value_of(user) is None and user.users:
                return False  # may be anything, this memory too
            last_read = max(last_read, lens.position[user])
    return True


def _is_update_of(lens: Lens, update: Node, current: Node) -> bool:
    """Whether `update` writes all of `current`, in its segment, and eager would differentiate it as its
    functional form."""
    target = update.args[0]
    before, after = lens.tensor(target), lens.tensor(update)
    if before is None or after is None or update in lens.transformed or \
            lens.segment[update] != lens.segment[current] or \
            before.dtype != lens.tensor(current).dtype or \
            _has_odd_strides(after):  # (another dtype: a view as other numbers)
        return False
    view = target
    while view is not current:
        if kind(view) not in _WHOLE_VIEWS or not view.args or not isinstance(view.args[0], Node):
            return False
        view = view.args[0]
    others = [arg for arg in update.all_input_nodes if arg is not target]
    if any(not lens.storages(arg).isdisjoint(lens.storages(target)) for arg in others):
        return False
    if not (before.requires_grad or after.requires_grad):
        return True
    # Who else reads what is overwritten may need it for backward, where eager then raises: other nodes, the
    # update itself (`h.mul_(h)`), the op that made it.
    return target is current and list(target.users) == [update] and \
        [*update.args, *update.kwargs.values()].count(target) == 1 and _word(current) in _KEEP_NO_RESULT and \
        all(lens.tensor(arg) is None or lens.tensor(arg).dtype == after.dtype for arg in others)


def _has_odd_strides(fake: torch.Tensor) -> bool:
    """Whether a fake is contiguous only because nobody steps along its dims of size 1. An in-place op keeps
    their strides; what its functional form yields has those of a new tensor."""
    dense = dense_strides(tuple(fake.shape), range(fake.dim()))
    found = False
    for size, stride, usual in zip(fake.shape, fake.stride(), dense):
        if not statically_known_true(stride == usual):
            if not (isinstance(size, int) and size == 1):
                return False
            found = True
    return found


def _word(node: Node) -> str | None:
    """The kind of a node, or of the functional form of an update."""
    return update_word(node) or kind(node)
